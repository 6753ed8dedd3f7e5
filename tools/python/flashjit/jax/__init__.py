"""flashjit for JAX: attention under jit, grad, vmap and shard_map. See tools/docs/jax.md in its repository."""

from ._attention import attention
from ._cache import append
from ._dot_product import dot_product_attention
from ._formats import new_cache
from ._handler import register

register()

__all__ = ["append", "attention", "dot_product_attention", "new_cache"]

"""flashjit for PyTorch tensors: attention() with autograd, as custom operators, and what replaces PyTorch's own.

Every call runs on the tensors' device and on PyTorch's current stream, allocates with PyTorch's allocator and waits for
nothing. Tensors on the CPU are computed by the CPU reference, in fp64: for tests, not for speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._attention import attention
from ._bound import bind
from ._cache import append
from ._caches import attention_over
from ._formats import KvFormat
from ._launch import bind_context
from ._library import runtime
from ._lists import TileLists
from ._merge import merge
from ._problem import BlockMap, causal_option, check_types
from ._quantize import quantize
from ._reports import KernelReport
from ._sdpa import scaled_dot_product_attention
from ._tensors import SPEC_TYPES

__all__ = [
    "append",
    "attention",
    "attention_over",
    "bind",
    "merge",
    "quantize",
    "scaled_dot_product_attention",
    "BlockMap",
    "KvFormat",
    "TileLists",
    "prepare",
    "register_with_diffusers",
    "register_with_transformers",
    "use_in_diffusers",
]


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool = False,
    config: str | None = None,
    causal: bool | str = False,
    options: str = "",
) -> tuple[KernelReport, ...]:
    """Compiles and loads the kernels of attention(q, k, v, causal=causal) now, e.g. before a CUDA graph capture.

    q, k, v: tensors on a GPU, of the sizes and types that calls will have; their values are not read.
    backward: also the kernels of the backward pass. options: more of the spec, such as ":dropout".
    config: tiles to use for this problem from now on, such as "sm80:br128:bc64:w4:s2"; None: the ones that calls choose.

    Returns what it found or made, a report for each pass. Raises flashjit.Error.
    """
    check_types(q, k, v)
    named = causal_option(causal)
    dims = f"{q.shape[3]}" if q.shape[3] == v.shape[3] else f"{q.shape[3]}x{v.shape[3]}"
    spec = f"{SPEC_TYPES[q.dtype]}:d{dims}{named and ':' + named}{options}"
    shape = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    with torch.cuda.device(q.device):
        bind_context(q.device)
        if backward and config is None:
            return runtime().prepare_both(spec, shape)
        passes = (False, True) if backward else (False,)
        return tuple([runtime().prepare(spec, shape, backward=which, config=config) for which in passes])


def register_with_transformers(name: str = "jit_attention") -> str:
    """Makes flashjit an attention implementation of Hugging Face transformers (4.53 or newer), under a name for
    model.set_attn_implementation(name) and from_pretrained(..., attn_implementation=name). Returns the name.

    name: must not contain "flash", which transformers takes for a package of FlashAttention.
    """
    from ._transformers import register

    return register(name)


def register_with_diffusers() -> str:
    """Makes flashjit an attention back end of Hugging Face diffusers (0.35 or newer), by the name that it returns, "flashjit": for
    model.set_attention_backend(name), and for diffusers.models.attention_dispatch.attention_backend(name).

    Models whose processors do not ask the dispatcher, such as SD3's, need use_in_diffusers().
    """
    from ._diffusers import register

    return register()


def use_in_diffusers(model: torch.nn.Module) -> None:
    """Makes a model of diffusers, such as pipe.transformer, compute its attention with flashjit: by its dispatcher, and where a
    processor calls torch.nn.functional.scaled_dot_product_attention itself, in the place of that."""
    from ._diffusers import use

    use(model)

"""Trains the small GPT of gpt_jax.py as modules of Flax NNX, with nnx.MultiHeadAttention over flashjit and over jax.nn's attention,
from the same seed: the loss curves coincide.

    pip install flax optax
    python3 tools/examples/python/gpt_nnx.py --steps 500

Exit code: 1 if the curves diverge.
"""

import sys

import gpt_jax
import jax
import jax.numpy as jnp
import optax
from flax import nnx


def causal(name):
    """An attention_fn of nnx.MultiHeadAttention."""
    return lambda q, k, v, **_: gpt_jax.ATTENTION[name](q, k, v, is_causal=True)


class Block(nnx.Module):
    def __init__(self, attention, heads, width, rngs):
        more = dict(use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, attention_fn=attention, decode=False, **more)
        self.up, self.down = nnx.Linear(width, 4 * width, **more), nnx.Linear(4 * width, width, **more)
        self.before_attention, self.before_up = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.down(jax.nn.gelu(self.up(self.before_up(x))))


class Gpt(nnx.Module):
    def __init__(self, attention, options, rngs):
        width = options.width
        self.tokens, self.positions = (nnx.Embed(n, width, rngs=rngs) for n in (256, options.length))
        self.blocks = nnx.List([Block(attention, options.heads, width, rngs) for _ in range(options.layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def update(model, optimizer, window):
    def loss_of(model):
        logits = model(window[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return loss


def train(name, text, options):
    model = Gpt(causal(name), options, nnx.Rngs(options.seed))
    warm_up = optax.linear_schedule(0, options.rate, 50)
    optimizer = nnx.Optimizer(model, optax.adam(warm_up, b2=0.95), wrt=nnx.Param)
    return gpt_jax.run(name, lambda window, *_: update(model, optimizer, window), text, options)


if __name__ == "__main__":
    sys.exit(gpt_jax.main(train))

"""Trains a small GPT in JAX on this repository's own pages, once with flashjit and once with jax.nn's attention, from the same
seed: the loss curves coincide.

    python3 tools/examples/python/gpt_jax.py --steps 500

About 11 million parameters, bytes as tokens, bf16, causal attention with heads of 64; on the CPU, with small sizes, flashjit's
reference computes. Exit code: 1 if the curves diverge.
"""

import argparse
import functools
import pathlib
import sys
import time

import flashjit.jax
import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
ATTENTION = {
    "flashjit": flashjit.jax.dot_product_attention,  # the one line that changes
    "jax.nn": jax.nn.dot_product_attention,
}


def initial(key, layers, width, length):
    """The model's weights, in float32."""
    keys = iter(jax.random.split(key, 3 + 4 * layers))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    block = lambda: {
        "qkv": normal(width, 3, width),
        "out": normal(width, width),
        "up": normal(width, 4 * width),
        "down": normal(4 * width, width),
        "norms": jnp.ones((2, width)),
    }
    return {
        "tokens": normal(256, width),
        "positions": normal(length, width),
        "head": normal(width, 256),
        "norm": jnp.ones(width),
        "blocks": [block() for _ in range(layers)],
    }


def normed(x, scale):
    mean = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype) * scale


def logits_of(attention, heads, weights, ids):
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    x = weights["tokens"][ids] + weights["positions"]
    for block in weights["blocks"]:
        qkv = jnp.einsum("btw,wcd->cbtd", normed(x, block["norms"][0]), block["qkv"])
        q, k, v = qkv.reshape(*qkv.shape[:3], heads, -1)
        x = x + attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normed(x, block["norms"][1]) @ block["up"]) @ block["down"]
    return (normed(x, weights["norm"]) @ weights["head"]).astype(jnp.float32)


def loss_of(attention, heads, weights, window):
    logits = jax.nn.log_softmax(logits_of(attention, heads, weights, window[:, :-1]))
    return -jnp.take_along_axis(logits, window[:, 1:, None], -1).mean()


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4))
def update(attention, heads, weights, mean, square, window, step, rate):
    """One step of Adam."""
    loss, gradient = jax.value_and_grad(functools.partial(loss_of, attention, heads))(weights, window)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, gradient)
    moved = lambda w, m, s: w - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.95**step)) + 1e-8)
    return jax.tree.map(moved, weights, mean, square), mean, square, loss


def run(name, update, text, options):
    """The losses, step by step. update(window, step, rate) makes a step and gives its loss. The mean of 20 steps is printed."""
    random = np.random.default_rng(options.seed)
    losses, start = [], time.perf_counter()
    for step in range(1, options.steps + 1):
        begin = random.integers(0, len(text) - options.length - 1, (options.batch, 1))
        window = text[begin + np.arange(options.length + 1)].astype(np.int32)
        losses.append(update(window, float(step), options.rate * min(1, step / 50)))
        if step % 100 == 0 or step == options.steps:
            seconds = time.perf_counter() - start
            print(f"{name:9} step {step:5}  loss {np.mean(losses[-20:]):.4f}  {seconds:.1f} s with compiling")
    return np.array(losses)


def train(name, text, options):
    weights = initial(jax.random.key(options.seed), options.layers, options.width, options.length)
    state = [weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2))]

    def step(*given):
        *state[:], loss = update(ATTENTION[name], options.heads, *state, *given)
        return loss

    return run(name, step, text, options)


def main(train=train):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = dict(steps=500, layers=6, width=384, heads=6, length=1024, batch=8, seed=0)
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    pages = b"\n".join(path.read_bytes() for path in sorted(ROOT.glob("tools/**/*.md")))
    ours, theirs = (train(name, np.frombuffer(pages, np.uint8), options) for name in ATTENTION)
    apart = float(np.abs(ours - theirs).max())
    print(f"the losses are at most {apart:.4f} apart")
    return int(apart > 0.1)


if __name__ == "__main__":
    sys.exit(main())

"""Measure flashjit.jax on one GPU, next to jax.nn.dot_product_attention by cuDNN and by XLA.

Each measurement runs one compiled loop of calls, each of which reads the last one's result, so that host and launch costs are hidden as
in a model. Libraries take turns, and medians count. Outputs are compared before they are timed; "-" where a library refuses the
call, or has no such gradient.

    python3 tools/bench/jax_attention.py --csv jax.csv
    python3 tools/bench/jax_attention.py --small     # on any device: that everything runs and agrees

Exit code: 0 if everything ran and was right, 1 if not, 3 without a GPU.
"""

import argparse
import csv
import functools
import statistics
import sys
import time
import typing

import flashjit.jax as fj
import jax
import jax.numpy as jnp
import numpy as np

WIDTH, TOKENS = 2048, 16384


class Case(typing.NamedTuple):
    name: str
    dim: int
    length: int
    tokens: int
    more: dict = {}
    bias: bool = False  # dense, with a gradient
    alibi: bool = False  # slopes, with a gradient

    def arrays(self):
        heads = WIDTH // self.dim if self.tokens > 4096 else 2
        shape = (self.tokens // self.length, self.length, heads, self.dim)
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:3])
        if self.bias:
            return q, k, v, jax.random.normal(keys[3], (1, heads, self.length, self.length), jnp.bfloat16)
        return q, k, v, 2.0 ** -jnp.linspace(1, 8, heads)


def cases(small):
    tokens, lengths = (256, (64,)) if small else (TOKENS, (1024, 4096, 16384))
    for dim in (64,) if small else (64, 128):
        for length in lengths:
            yield Case("full", dim, length, tokens)
            yield Case("causal", dim, length, tokens, {"is_causal": True})
        window = lengths[-1] // 16
        yield Case("window", dim, lengths[-1], tokens, {"is_causal": True, "local_window_size": (window, 0)})
        yield Case("bias", dim, lengths[0], tokens, bias=True)
        yield Case("ALiBi", dim, lengths[0], tokens, {"is_causal": True}, alibi=True)


def with_alibi(implementation, more, q, k, v, slopes):
    if implementation == "flashjit":
        score_mod = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
        return fj.attention(q, k, v, causal=True, score_mod=score_mod)
    places = jnp.arange(q.shape[1])
    bias = slopes[:, None, None] * (places[None] - places[:, None])
    if implementation == "cudnn":  # which takes a bias of Q's type alone: too few bits for distances
        bias = bias.astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias=bias[None], implementation=implementation, **more)


def attend(case, implementation, q, k, v, extra):
    if case.alibi:
        return with_alibi(implementation, case.more, q, k, v, extra)
    more = {**case.more, **({"bias": extra} if case.bias else {})}
    if implementation == "flashjit":
        return fj.dot_product_attention(q, k, v, **more)
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **more)


def call_of(case, implementation, backward):
    """A call as (q, k, v, extra) -> (what takes q's place in the next, all results)."""
    forward = functools.partial(attend, case, implementation)
    if not backward:
        return lambda *arrays: (forward(*arrays),) * 2
    wanted = (0, 1, 2, 3) if case.bias or case.alibi else (0, 1, 2)
    weigh = lambda out: out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)  # a sum's gradient is noise
    loss = lambda *arrays: weigh(forward(*arrays)).astype(jnp.float32).sum()
    gradient = jax.grad(loss, wanted)

    def call(*arrays):
        made = gradient(*arrays)
        return made[0] + sum(x.astype(jnp.float32).sum() * 0 for x in made[1:]).astype(made[0].dtype), made

    return call


def loop_of(call, repeats):
    def loop(q, *others):
        return jax.lax.fori_loop(0, repeats, lambda _, x: call(x, *others)[0].astype(x.dtype), q)

    return jax.jit(loop)


def agree(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    return all(
        np.abs(x - y).max() <= 0.05 * np.abs(y).max()
        for x, y in (tuple(np.asarray(a, np.float32) for a in pair) for pair in pairs)
    )


def measure(case, backward, implementations, repeats, rounds):
    """({implementation: seconds a call}, whether all agree)."""
    arrays, loops, right, ours = case.arrays(), {}, True, None
    for implementation in implementations:
        call = call_of(case, implementation, backward)
        try:
            results = jax.block_until_ready(jax.jit(call)(*arrays)[1])
            loop = loop_of(call, repeats)
            jax.block_until_ready(loop(*arrays))
        except Exception as error:  # of many kinds, of JAX and cuDNN
            if implementation == "flashjit":
                raise
            print(f"  {implementation}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        loops[implementation] = loop
        ours = results if ours is None else ours
        if not (case.alibi and implementation == "cudnn") and not agree(ours, results):
            right = False
            print(f"  {implementation} has other results for {case}", file=sys.stderr)
    times = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            start = time.perf_counter()
            jax.block_until_ready(loop(*arrays))
            times[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(each) for name, each in times.items()}, right


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", help="file to write the times to")
    parser.add_argument("--small", action="store_true", help="few tokens, on any device")
    parser.add_argument("--repeats", type=int, default=20, help="calls of a loop")
    parser.add_argument("--rounds", type=int, default=7, help="loops of each library")
    options = parser.parse_args()
    if not options.small and jax.default_backend() != "gpu":
        print("jax_attention: JAX finds no GPU; --small runs without", file=sys.stderr)
        return 3
    names = ("flashjit", "cudnn", "xla") if jax.default_backend() == "gpu" else ("flashjit", "xla")
    rows, right = [], True
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; milliseconds, and times of others over flashjit's"
    )
    for case in cases(options.small):
        for backward in (False, True):
            peers = [name for name in names if name != "xla" or case.length <= 4096 or options.small]
            times, same = measure(case, backward, peers, options.repeats, options.rounds)
            right &= same
            columns = [f"{times[n] * 1e3:9.3f}" if n in times else "        -" for n in names]
            ratios = [f"{times[n] / times['flashjit']:6.2f}" if n in times else "     -" for n in names[1:]]
            kind = "both passes" if backward else "forward"
            print(f"{case.name:7} d{case.dim:<4} {case.length:6} {kind:11}", *columns, *ratios, flush=True)
            rows += [(case.name, case.dim, case.length, kind, n, seconds) for n, seconds in times.items()]
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([("case", "dim", "length", "pass", "library", "seconds"), *rows])
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())

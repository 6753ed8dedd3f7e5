"""Measure flashjit.jax on one GPU, next to jax.nn.dot_product_attention by cuDNN and by XLA, and Pallas' attention for Hopper.

Each measurement runs one compiled loop of calls; each reads the last one's result, so that host and launch costs are hidden as
in a model. Libraries take turns, and medians count. Outputs are compared before they are timed; "-" where a library refuses the
call, or has no such gradient. Pallas (Mosaic GPU) counts by the best of two tile sizes, computes in fp16, the one type that it has
in JAX 0.11, and knows no scale: Q is scaled before its loop, not in it.

    python3 tools/bench/jax_attention.py --csv jax.csv     # each row at once; run again, it goes on
    python3 tools/bench/jax_attention.py --small     # on any device: that everything runs and agrees

Exit code: 0 if everything ran and was right, 1 if not, 3 without a GPU.
"""

import argparse
import concurrent.futures
import csv
import functools
import os
import statistics
import sys
import time
import typing

import flashjit.jax as fj
import jax
import jax.numpy as jnp
import numpy as np

WIDTH, TOKENS = 2048, 16384
PALLAS = [f"pallas {rows}" for rows in (64, 128, 256)]  # keys of a tile
COMPILING = max(8, (os.cpu_count() or 0) // 2)  # at a time
PASSES = ("forward", "both passes")


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


def cases(small, dims):
    tokens, lengths = (256, (64,)) if small else (TOKENS, (1024, 4096, 16384))
    for dim in (64,) if small else dims:
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


def with_pallas(keys, causal, q, k, v):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    rows = min(keys, 128)
    backward = dict(block_q_dq=64, block_kv_dq=rows, block_q_dkv=rows, block_kv_dkv=64, compute_wgs_bwd=2)
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=keys, max_concurrent_steps=2, causal=causal, **backward
    )
    return attention_mgpu.attention(q, k, v, config)


def attend(case, implementation, q, k, v, extra):
    if implementation in PALLAS:
        return with_pallas(int(implementation.split()[1]), bool(case.more), q, k, v)
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


def arrays_for(case, implementation):
    q, k, v, extra = case.arrays()
    return (
        [*(x.astype(jnp.float16) for x in (q, k, v)), extra] if implementation in PALLAS else [q, k, v, extra]
    )


def compiled(case, backward, implementation, repeats):
    """(the call, the loop of calls), for arrays_for(); an error where a library refuses."""
    call = call_of(case, implementation, backward)

    def once(scale, q, *others):
        results = call((q * scale).astype(q.dtype), *others)[1]
        return ((results[0] * scale).astype(q.dtype), *results[1:]) if backward else results

    def loop(q, *others):
        return jax.lax.fori_loop(0, repeats, lambda _, x: call(x, *others)[0].astype(x.dtype), q)

    shapes = jax.eval_shape(lambda: arrays_for(case, implementation))
    scale = case.dim**-0.5 if implementation in PALLAS else 1
    return (
        jax.jit(functools.partial(once, scale)).lower(*shapes).compile(),
        jax.jit(loop).lower(*shapes).compile(),
    )


def agree(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    return all(
        np.abs(x - y).max() <= 0.05 * np.abs(y).max()
        for x, y in (tuple(np.asarray(a, np.float32) for a in pair) for pair in pairs)
    )


def measure(case, made, repeats, rounds):
    """({implementation: seconds a call}, whether all agree). made: what compiled() will give, by implementation."""
    loops, right, ours = {}, True, None
    for implementation, future in made.items():
        arrays = arrays_for(case, implementation)
        try:
            once, loop = future.result()
            results = jax.block_until_ready(once(*arrays))
            jax.block_until_ready(loop(*arrays))
        except Exception as error:  # of many kinds, of JAX, cuDNN and Pallas
            if implementation == "flashjit":
                raise
            print(f"  {implementation}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        ours = results if ours is None else ours
        if not (case.alibi and implementation == "cudnn") and not agree(ours, results):
            right = False
            print(f"  {implementation} has other results for {case}", file=sys.stderr)
            continue
        loops[implementation] = functools.partial(loop, *arrays)
    times = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            start = time.perf_counter()
            jax.block_until_ready(loop())
            times[name].append((time.perf_counter() - start) / repeats)
    medians = {name: statistics.median(each) for name, each in times.items()}
    best = min((medians.pop(name) for name in PALLAS if name in medians), default=None)
    return medians if best is None else {**medians, "pallas": best}, right


def implementations(case, names):
    """Which of these can compute a case."""
    for name in names:
        if name == "pallas":
            if not (case.bias or case.alibi or set(case.more) - {"is_causal"}):
                yield from ("pallas 64", "pallas 128") if case.dim > 64 else ("pallas 128", "pallas 256")
        elif name != "xla" or case.length <= 4096:
            yield name


def measured(path):
    """The rows that a file has already: case, dim, length and pass."""
    if not path or not os.path.exists(path):
        return set()
    with open(path, newline="") as file:
        return {
            (row["case"], int(row["dim"]), int(row["length"]), row["pass"]) for row in csv.DictReader(file)
        }


def keep(path, rows):
    begins = not os.path.exists(path)
    with open(path, "a", newline="") as file:
        device = (jax.devices()[0].device_kind, jax.__version__)
        names = ("case", "dim", "length", "pass", "library", "seconds", "device", "jax")
        csv.writer(file).writerows([*([names] if begins else []), *[(*row, *device) for row in rows]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", help="file to write the times to")
    parser.add_argument("--small", action="store_true", help="few tokens, on any device")
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128), help="head dimensions")
    parser.add_argument("--repeats", type=int, default=20, help="calls of a loop")
    parser.add_argument("--rounds", type=int, default=7, help="loops of each library")
    options = parser.parse_args()
    if not options.small and jax.default_backend() != "gpu":
        print("jax_attention: JAX finds no GPU; --small runs without", file=sys.stderr)
        return 3
    on_gpu = jax.default_backend() == "gpu"
    names = ("flashjit", "cudnn", "pallas", "xla") if on_gpu else ("flashjit", "xla")
    done, right = measured(options.csv), True
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; milliseconds, and times of others over flashjit's"
    )
    with concurrent.futures.ThreadPoolExecutor(COMPILING) as pool:
        begin = lambda *call: pool.submit(compiled, *call, options.repeats)
        made = {
            row: (case, {name: begin(case, backward, name) for name in implementations(case, names)})
            for case in cases(options.small, options.dims)
            for backward in (False, True)
            if (row := (case.name, case.dim, case.length, PASSES[backward])) not in done
        }
        concurrent.futures.wait([future for _, each in made.values() for future in each.values()])
    for row, (case, futures) in made.items():
        times, same = measure(case, futures, options.repeats, options.rounds)
        right &= same
        columns = [f"{times[n] * 1e3:9.3f}" if n in times else "        -" for n in names]
        ratios = [f"{times[n] / times['flashjit']:6.2f}" if n in times else "     -" for n in names[1:]]
        print(f"{case.name:7} d{case.dim:<4} {case.length:6} {row[3]:11}", *columns, *ratios, flush=True)
        if options.csv:
            keep(options.csv, [(*row, n, f"{seconds:.6f}") for n, seconds in times.items()])
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())

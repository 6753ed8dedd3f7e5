"""Measure a serving engine's calls on one GPU: attention over a cache, pages and uneven lengths, append() and merge().

Beside flashjit's own contiguous cache, FlashAttention-3's (`pip install fa3-fwd`), and cuDNN through PyTorch where all lengths
are alike. Pages lie in a random order. Each call is captured in a CUDA graph, several times over as many copies of the cache as
L2 cannot hold; graphs take turns, and medians count. Outputs are checked beside each other before they are timed.

    python3 tools/bench/serving.py --lib build/libflashjit.so --csv tools/bench/results/h200_serving.csv

Exit code: 0 if everything ran and was right, 1 if not, 3 without GPU or PyTorch.
"""

import math
import random
import re
import sys
import typing

import measuring
from measuring import F, SDPBackend, sdpa_kernel, torch

PAGES = (1, 8, 16, 64, 128)
IN_L2 = 200 << 20  # bytes that copies of a cache have at least
LONG = [131072] + [1024] * 31


def log_uniform(count, least, most):
    draw = random.Random(count)
    return [round(math.exp(draw.uniform(math.log(least), math.log(most)))) for _ in range(count)]


class Problem(typing.NamedTuple):
    name: str
    dim: int
    heads: int
    heads_kv: int
    queries: int
    lengths: list

    def label(self):
        return f"d{self.dim} {self.heads}/{self.heads_kv} heads, {self.name}, {self.queries} queries"

    def kv_bytes(self):
        return 4 * self.dim * self.heads_kv * sum(self.lengths)


def problems():
    mixed = log_uniform(64, 128, 32768)
    for name, lengths, many in (
        ("64 x 4k", [4096] * 64, (1, 4, 16)),
        ("256 x 1k", [1024] * 256, (1, 4, 16)),
        ("128k and 31 x 1k", LONG, (1,)),
        ("64 of 128 to 32k", mixed, (1, 16)),
        ("255 x 1k and 8k", [1024] * 255 + [8192], (16,)),
        ("8 x 8k", [8192] * 8, (16,)),
        ("1 x 8k", [8192], (1,)),
        ("4k prefill", [4096] * 4, (4096,)),
        ("chunk of 16k", [16384] * 4, (512,)),
    ):
        for queries in many:
            yield Problem(name, 128, 32, 8, queries, lengths)
    yield Problem("4k prefill", 64, 32, 8, 4096, [4096] * 4)
    yield Problem("chunk of 16k", 64, 32, 8, 512, [16384] * 4)
    for name, lengths, many in (
        ("64 x 4k", [4096] * 64, (1, 4, 16)),
        ("256 x 1k", [1024] * 256, (16,)),
        ("128k and 31 x 1k", LONG, (1,)),
        ("1 x 8k", [8192], (1,)),
    ):
        for queries in many:
            yield Problem(name, 64, 64, 8, queries, lengths)


class Cache:
    """K and V of a problem: sequences one behind the other in a pool of rows, [rows, heads_kv, dim], cut into pages as asked."""

    def __init__(self, problem, device="cuda"):
        self.problem = problem
        rows = [-(-length // 128) * 128 for length in problem.lengths]
        self.starts = [sum(rows[:i]) for i in range(len(rows))]
        make = lambda: torch.randn(
            sum(rows), problem.heads_kv, problem.dim, device=device, dtype=torch.bfloat16
        )
        self.k, self.v = make(), make()
        self.lengths = torch.tensor(problem.lengths, device=device, dtype=torch.int32)

    def pages(self, rows):
        """K and V as [pages, rows, heads_kv, dim] in a random order, and the table."""
        count = self.k.shape[0] // rows
        place = torch.randperm(count, device=self.k.device)
        shuffled = []
        for x in (self.k, self.v):
            pool = torch.empty_like(x).view(count, rows, *x.shape[1:])
            pool[place] = x.view(pool.shape)
            shuffled.append(pool)
        table = torch.full(
            (len(self.starts), -(-max(self.problem.lengths) // rows)),
            -1,
            device=self.k.device,
            dtype=torch.int32,
        )
        for i, (start, length) in enumerate(zip(self.starts, self.problem.lengths)):
            used = -(-length // rows)
            table[i, :used] = place[start // rows : start // rows + used]
        return (*shuffled, table)

    def contiguous(self):
        """[sequences, longest, heads_kv, dim]."""
        longest = max(self.problem.lengths)
        if len(set(self.problem.lengths)) == 1 and longest % 128 == 0:
            return tuple(x.view(len(self.starts), longest, *x.shape[1:]) for x in (self.k, self.v))
        found = []
        for x in (self.k, self.v):
            whole = x.new_zeros(len(self.starts), longest, *x.shape[1:])
            for i, (start, length) in enumerate(zip(self.starts, self.problem.lengths)):
                whole[i, :length] = x[start : start + length]
            found.append(whole)
        return tuple(found)


def calls_of(problem, caches, flashjit, fa3, pages):
    """Name -> a function for each copy of the cache, which returns O as [sequences, queries, heads, dim]."""
    q = torch.randn(
        len(problem.lengths),
        problem.queries,
        problem.heads,
        problem.dim,
        device=caches[0].k.device,
        dtype=torch.bfloat16,
    )
    heads_first = lambda x: x.transpose(1, 2)

    def ours(of, k, v, **where):
        return lambda: heads_first(
            flashjit.attention(
                heads_first(q), heads_first(k), heads_first(v), causal=True, kv_lengths=of.lengths, **where
            )
        )

    def fa3_call(of, k, v):
        return lambda: fa3(q, k, v, cache_seqlens=of.lengths, causal=True)

    def cudnn(of, k, v):
        def call():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return heads_first(
                    F.scaled_dot_product_attention(
                        heads_first(q),
                        heads_first(k),
                        heads_first(v),
                        is_causal=problem.queries > 1,
                        enable_gqa=True,
                    )
                )

        return call

    whole = [cache.contiguous() for cache in caches]
    found = {
        name: [ours(cache, *kv, cache=True, **option) for cache, kv in zip(caches, whole)]
        for name, option in (("contiguous", {}), ("invariant", {"batch_invariant": True}))
    }
    for rows in pages:
        found[f"pages{rows}"] = [
            ours(cache, k, v, page_table=table) for cache in caches for k, v, table in [cache.pages(rows)]
        ]
    for rows in (0, 16):  # of 8 bits
        eight = []
        for cache, kv in zip(caches, whole):
            k, v, *table = cache.pages(rows) if rows else kv
            scales = [x.abs().max().float() / 448 for x in (k, v)]
            k, v = ((x / scale).to(torch.float8_e4m3fn) for x, scale in zip((k, v), scales))
            where = {"page_table": table[0]} if rows else {"cache": True}
            eight.append(
                ours(cache, k, v, k_scale=scales[0].reshape(1), v_scale=scales[1].reshape(1), **where)
            )
        found["e4m3" + f"_pages{rows}" * bool(rows)] = eight
    if fa3:
        found["fa3"] = [fa3_call(cache, *kv) for cache, kv in zip(caches, whole)]
    if len(set(problem.lengths)) == 1 and problem.queries in (1, problem.lengths[0]):
        found["cudnn"] = [cudnn(cache, *kv) for cache, kv in zip(caches, whole)]
    return found


def captured(functions):
    """A graph of all calls, and their number."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph, len(functions)


def microseconds(calls, rounds):
    """Name -> the time of one call."""
    graphs = {}
    for name, functions in calls.items():
        try:
            graphs[name] = captured(functions)
        except Exception as error:
            print(f"  {name} does not run: {measuring.reason(error)}")
    ms = measuring.interleaved_ms({name: graph.replay for name, (graph, _) in graphs.items()}, rounds)
    return {name: 1e3 * ms[name] / graphs[name][1] for name in ms}


def run_problem(report, problem, flashjit, fa3, rounds, pages):
    torch.manual_seed(len(problem.lengths))
    caches = [Cache(problem) for _ in range(max(1, -(-IN_L2 // problem.kv_bytes())))]
    calls = calls_of(problem, caches, flashjit, fa3, pages)
    expected = None
    for name, functions in list(calls.items()):
        try:
            out = functions[0]().float()
        except Exception as error:
            if name in ("fa3", "cudnn"):
                print(f"  {name} does not run: {measuring.reason(error)}")
            else:
                report.failure(f"{problem.label()}: {name}: {measuring.reason(error)}")
            del calls[name]
            continue
        expected = out if expected is None else expected
        error = ((out - expected).norm() / expected.norm()).item()
        if not error <= (0.08 if "e4m3" in name else 0.01):
            report.failure(f"{problem.label()}: {name} differs from contiguous by {error:.3g}")
    us = microseconds(calls, rounds)
    report.row(
        head_dim=problem.dim,
        heads=problem.heads,
        heads_kv=problem.heads_kv,
        problem=problem.name,
        queries=problem.queries,
        kv_bytes=problem.kv_bytes(),
        **{f"{name}_us": x for name, x in us.items()},
    )
    print(
        f"{problem.label():52} us: "
        + "  ".join(f"{name} {x:7.1f}" for name, x in us.items())
        + f"  {problem.kv_bytes() / us['contiguous'] / 1e6:.2f} TB/s",
        flush=True,
    )


def run_prefix(report, flashjit, rounds):
    """64 sequences of 8k keys that they share and 512 of their own, in pages: with and without prefix_length."""
    count, heads, heads_kv, shared, own, dim, page = 64, 32, 8, 8192, 512, 128, 16
    pages = (shared + count * own) // page
    k, v = (
        torch.randn(pages, page, heads_kv, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in "kv"
    )
    place = torch.randperm(pages, device="cuda").to(torch.int32)
    prefix, rest = place[: shared // page], place[shared // page :].view(count, -1)
    ints = lambda values: torch.tensor(values, device="cuda", dtype=torch.int32)
    length = ints([shared])
    table = torch.cat([prefix.expand(count, -1), rest], 1)
    q = torch.randn(1, heads, count, dim, device="cuda", dtype=torch.bfloat16)
    where = dict(
        causal=True,
        page_table=table,
        kv_lengths=ints([shared + own] * count),
        cu_seqlens_q=ints(range(count + 1)),
        max_seqlen_q=1,
    )
    calls = {
        "plain": lambda: flashjit.attention(q, k, v, **where),
        "prefix": lambda: flashjit.attention(q, k, v, prefix_length=length, **where),
    }
    plain, once = (call().float() for call in calls.values())
    if not (error := ((once - plain).norm() / plain.norm()).item()) <= 0.01:
        report.failure(f"a shared prefix: O differs by {error:.3g} with prefix_length")
    us = microseconds({name: [call] for name, call in calls.items()}, rounds)
    least = k.nbytes + v.nbytes
    report.row(
        problem="64 share 8k, 512 of their own", kv_bytes=least, **{f"{name}_us": x for name, x in us.items()}
    )
    print(
        f"a prefix of 8k shared by 64, 512 keys of their own: {us['prefix']:.1f} us, {least / us['prefix'] / 1e6:.2f} TB/s of what must be "
        f"read; without prefix_length {us['plain']:.1f} us",
        flush=True,
    )


#: Queries and keys of prefills and of decodes, each of them.
MIXES = {
    "8 x 1k prefill and 56 x 4k decode": (([1024] * 8, [1024] * 8), ([1] * 56, [4096] * 56)),
    "2 x 2k prefill and 128 x 2k decode": (([2048] * 2, [2048] * 2), ([1] * 128, [2048] * 128)),
    "1 x 8k prefill and 64 x 4k decode": (([8192], [8192]), ([1] * 64, [4096] * 64)),
}


def run_mix(report, flashjit, rounds):
    """Prefills and decodes in one call, beside a call for each kind."""
    make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")

    def call(cache, queries, lengths, begin):
        offsets = ints([0, *torch.tensor(queries).cumsum(0).tolist()])
        q, of_lengths, end = make(1, 32, sum(queries), 128), ints(lengths), begin + len(queries)
        return lambda: flashjit.attention(
            q,
            *(x[begin:end] for x in cache),
            causal=True,
            cache=True,
            kv_lengths=of_lengths,
            cu_seqlens_q=offsets,
            max_seqlen_q=max(queries),
        )

    for name, (prefill, decode) in MIXES.items():
        queries, lengths = (a + b for a, b in zip(prefill, decode))
        cache = [make(len(lengths), 8, max(lengths), 128) for _ in "kv"]
        parts = [call(cache, *prefill, 0), call(cache, *decode, len(prefill[0]))]
        calls = {
            "together": [call(cache, queries, lengths, 0)],
            "apart": [lambda: [part() for part in parts]],
        }
        us = microseconds(calls, rounds)
        report.row(problem=name, **{f"{kind}_us": x for kind, x in us.items()})
        print(f"{name}: one call {us['together']:.1f} us, two {us['apart']:.1f} us", flush=True)


def run_states(report, flashjit, rounds):
    """append() of rotated keys and values beside a copy of its bytes, also with Q and norms; merge() beside a copy."""
    like = dict(device="cuda", dtype=torch.bfloat16)
    for tokens in (64, 4096):
        k, v = torch.randn(tokens, 8, 1, 128, **like), torch.randn(tokens, 8, 1, 128, **like)
        pool = (
            torch.zeros(tokens, 16, 8, 128, **like).transpose(1, 2),
            torch.zeros(tokens, 16, 8, 128, **like).transpose(1, 2),
        )
        table = torch.randperm(tokens, device="cuda").to(torch.int32)[:, None]
        lengths = torch.randint(1, 17, (tokens,), device="cuda", dtype=torch.int32)
        twice = torch.empty_like(k), torch.empty_like(v)
        q = torch.randn(tokens, 32, 1, 128, **like)
        q_out, weight = torch.empty_like(q), torch.ones(128, **like)
        us = microseconds(
            {
                "append": [
                    lambda: flashjit.append(k, v, *pool, kv_lengths=lengths, page_table=table, theta=1e4)
                ]
                * 20,
                "copy": [lambda: torch._foreach_copy_(twice, (k, v))] * 20,
                "prologue": [
                    lambda: flashjit.append(
                        k,
                        v,
                        *pool,
                        kv_lengths=lengths,
                        page_table=table,
                        theta=1e4,
                        q=q,
                        q_out=q_out,
                        k_norm=weight,
                        q_norm=weight,
                    )
                ]
                * 20,
                "prologue_copy": [lambda: torch._foreach_copy_((*twice, q_out), (k, v, q))] * 20,
            },
            rounds,
        )
        report.row(problem=f"append {tokens}", **{f"{name}_us": x for name, x in us.items()})
        print(
            f"append of {tokens} tokens: " + "  ".join(f"{name} {x:.2f} us" for name, x in us.items()),
            flush=True,
        )
    states = [
        (torch.randn(1, 32, 16384, 128, device="cuda"), torch.randn(1, 32, 16384, device="cuda"))
        for _ in range(2)
    ]
    whole = torch.empty(3, 1, 32, 16384, 128, device="cuda")
    us = microseconds(
        {"merge": [lambda: flashjit.merge(states)], "copy": [lambda: whole[:1].copy_(whole[1:2])]}, rounds
    )
    report.row(problem="merge of 2", **{f"{name}_us": x for name, x in us.items()})
    print(
        f"merge of 2 states: {us['merge']:.1f} us, {3 * whole[0].nbytes / us['merge'] / 1e6:.2f} TB/s, a copy "
        f"{2 * whole[0].nbytes / us['copy'] / 1e6:.2f} TB/s",
        flush=True,
    )


#: All columns but the pages'.
COLUMNS = (
    "head_dim",
    "heads",
    "heads_kv",
    "problem",
    "queries",
    "kv_bytes",
    "contiguous_us",
    "invariant_us",
    "e4m3_us",
    "e4m3_pages16_us",
    "fa3_us",
    "cudnn_us",
    "append_us",
    "prologue_us",
    "prologue_copy_us",
    "merge_us",
    "copy_us",
    "together_us",
    "apart_us",
    "prefix_us",
    "plain_us",
)


@torch.no_grad()
def measure(report, flashjit, arguments):
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache as fa3
    except ImportError:
        fa3 = None
    for problem in problems():
        if re.search(arguments.only, problem.label()):
            measuring.guarded(
                report,
                problem.label(),
                run_problem,
                report,
                problem,
                flashjit,
                fa3,
                arguments.rounds,
                arguments.pages,
            )
    for name, run in (
        ("append and merge", run_states),
        ("a shared prefix", run_prefix),
        ("prefill and decode", run_mix),
    ):
        if re.search(arguments.only, name):
            measuring.guarded(report, name, run, report, flashjit, arguments.rounds)


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--only", metavar="REGEX", default="", help="the problems whose label matches")
    parser.add_argument("--rounds", type=int, default=15, help="of timing (default %(default)s)")
    parser.add_argument(
        "--pages",
        default=PAGES,
        type=lambda text: [int(word) for word in text.split(",") if word],
        help="sizes of pages (default 1,8,16,64,128)",
    )
    arguments = parser.parse_args()
    of_pages = [f"pages{rows}_us" for rows in arguments.pages]
    return measuring.command("serving", arguments, [*COLUMNS, *of_pages], measure)


if __name__ == "__main__":
    sys.exit(main())

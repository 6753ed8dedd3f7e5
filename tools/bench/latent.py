"""Measure latent attention on one GPU: absorbed decode over latents of 576 columns, whose first 512 are V, sparse tokens, and prefill that
is not absorbed, with heads of 192 columns and V of 128.

Beside FlashAttention-3's (`pip install fa3-fwd`), cuDNN's where it takes the shape, FlashMLA's if it is installed, and a copy of the
latents' bytes. Each call is captured in a CUDA graph, several times over as many copies of the cache as L2 cannot hold; graphs take
turns, and medians count. Outputs are checked beside each other before they are timed.

    python3 tools/bench/latent.py --lib build/libflashjit.so --csv tools/bench/results/h100_latent.csv

Exit code: 0 if everything ran and was right, 1 if not, 3 without GPU or PyTorch.
"""

import sys
import typing

import measuring
import serving
from measuring import F, SDPBackend, sdpa_kernel, torch

DIM, V_DIM, PAGE = 576, 512, 64
SCALE = 192**-0.5
HEADS, SEQUENCES, KEYS = (16, 64, 128), (1, 32, 128), (1024, 4096, 32768)
PREFILL_DIM, PREFILL_V_DIM = 192, 128
PREFILL_HEADS, PREFILL_TOKENS = (16, 128), (1024, 4096, 16384)


class Problem(typing.NamedTuple):
    kind: str  # decode, sparse decode, sparse prefill
    heads: int
    sequences: int
    queries: int
    keys: int
    top_k: int = 0
    shared: float = 0.0  # share of a list's keys that the list before has; 0: each list is drawn alone

    def label(self):
        return (
            f"{self.kind}, {self.heads} heads, {self.sequences} x {self.queries} queries, {self.keys} keys"
            + (f", top {self.top_k}" if self.top_k else "")
            + (f", {self.shared:.0%} shared" if self.shared else "")
        )

    def cache_bytes(self):
        return 2 * DIM * self.sequences * self.keys

    def read_bytes(self):
        """Bytes of latents, each query's own where it has a list."""
        return 2 * DIM * self.sequences * (self.queries * self.top_k if self.top_k else self.keys)

    def operations(self):
        return 2 * self.sequences * self.queries * self.heads * (self.top_k or self.keys) * (DIM + V_DIM)


def problems():
    for heads in HEADS:
        for sequences in SEQUENCES:
            for keys in KEYS:
                yield Problem("decode", heads, sequences, 1, keys)
    for heads in (8, 24):  # which should cost no more than 16 and 32
        yield Problem("decode", heads, 128, 1, 4096)
    yield Problem("decode", 32, 128, 1, 4096)
    for sequences in SEQUENCES:
        yield Problem("sparse decode", 128, sequences, 1, 32768, 2048)
    yield Problem("sparse decode", 16, 128, 1, 32768, 2048)
    for heads in (16, 32, 128):
        for shared in (0.0, 0.5, 0.9):
            yield Problem("sparse prefill", heads, 1, 4096, 8192, 2048, shared)
        yield Problem("dense prefill", heads, 1, 4096, 2048)


class Prefill(typing.NamedTuple):
    heads: int
    sequences: int
    tokens: int
    causal: bool

    def label(self):
        return f"{self.kind()}, {self.heads} heads, {self.sequences} x {self.tokens} tokens"

    def kind(self):
        return f"{'causal' if self.causal else 'full'} prefill of {PREFILL_DIM}, {PREFILL_V_DIM}"

    def operations(self):
        pairs = self.tokens**2 // (2 if self.causal else 1)
        return 2 * self.sequences * self.heads * pairs * (PREFILL_DIM + PREFILL_V_DIM)


def prefills():
    for heads in PREFILL_HEADS:
        for tokens in PREFILL_TOKENS:
            for causal in (False, True):
                yield Prefill(heads, max(1, 2**18 // (heads * tokens)), tokens, causal)


def key_lists(problem, device):
    """A list for each query of a prefill, int32 [queries, top-k]."""
    if not problem.shared:
        return torch.rand(problem.queries, problem.keys, device=device).topk(problem.top_k).indices.int()
    keys, changed = torch.randperm(problem.keys), round((1 - problem.shared) * problem.top_k)
    lists = torch.empty(problem.queries, problem.top_k, dtype=torch.int32)
    for one in lists:
        one.copy_(keys[: problem.top_k])
        leave = torch.randperm(problem.top_k)[:changed]
        join = problem.top_k + torch.randperm(problem.keys - problem.top_k)[:changed]
        keys[leave], keys[join] = keys[join], keys[leave]
    return lists.to(device)


def flash_mla(problem, q, pages, table, lengths):
    """FlashMLA's call, or None."""
    try:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    except ImportError:
        return None
    plan, splits = get_mla_metadata(lengths, problem.queries * problem.heads, 1)
    return lambda: flash_mla_with_kvcache(
        q, pages, table, lengths, V_DIM, plan, splits, softmax_scale=SCALE, causal=False
    )[0]


def calls_of(problem, flashjit, fa3, copies, device="cuda"):
    """Name -> a function for each of some copies of the cache, which returns O as [sequences, queries, heads, 512]."""
    like = dict(device=device, dtype=torch.bfloat16)
    q = torch.randn(problem.sequences, problem.queries, problem.heads, DIM, **like)
    heads_first = lambda x: x.transpose(1, 2)
    lengths = torch.full((problem.sequences,), problem.keys, device=device, dtype=torch.int32)
    found = {}

    def add(name, call):
        if call is not None:
            found.setdefault(name, []).append(call)

    def ours(latents, **where):
        return lambda: heads_first(
            flashjit.attention(heads_first(q), heads_first(latents), v_columns=V_DIM, scale=SCALE, **where)
        )

    for _ in range(copies):
        latents = torch.randn(problem.sequences, problem.keys, 1, DIM, **like)
        if "prefill" in problem.kind:
            where = {}
            if problem.top_k:
                where["indices"] = key_lists(problem, device)[None, :, None]
            add("ours", ours(latents, **where))
            continue
        count = problem.sequences * problem.keys // PAGE
        place = torch.randperm(count, device=device)
        pages = torch.empty(count, PAGE, 1, DIM, **like)
        pages[place] = latents.view(pages.shape)
        table = place.to(torch.int32).view(problem.sequences, -1)
        paged = dict(page_table=table, kv_lengths=lengths)
        if problem.top_k:
            lists = (
                torch.rand(problem.sequences, problem.keys, device=device)
                .topk(problem.top_k)
                .indices.to(torch.int32)[:, None, None]
            )
            add("ours", ours(latents, cache=True, kv_lengths=lengths, indices=lists))
            add("pages64", ours(pages, **paged, indices=lists))
            continue
        add("ours", ours(latents, cache=True, kv_lengths=lengths))
        add("pages64", ours(pages, **paged))
        if fa3:
            add(
                "fa3",
                lambda latents=latents: fa3(
                    q[..., V_DIM:],
                    latents[..., V_DIM:],
                    latents[..., :V_DIM],
                    qv=q[..., :V_DIM],
                    cache_seqlens=lengths,
                    softmax_scale=SCALE,
                ),
            )
        add("flashmla", flash_mla(problem, q, pages, table, lengths))
    return found


def prefill_calls(problem, flashjit, fa3, device="cuda"):
    """Name -> a list of one function that returns O as [sequences, heads, tokens, 128]."""
    like = dict(device=device, dtype=torch.bfloat16)
    shape = problem.sequences, problem.tokens, problem.heads
    q, k, v = (torch.randn(*shape, dim, **like) for dim in (PREFILL_DIM, PREFILL_DIM, PREFILL_V_DIM))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*heads_first, is_causal=problem.causal)

    def of_fa3():
        out = fa3(q, k, v, causal=problem.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    found = {"ours": [lambda: flashjit.attention(*heads_first, causal=problem.causal)], "cudnn": [cudnn]}
    return {**found, "fa3": [of_fa3]} if fa3 else found


def run_prefill(report, problem, flashjit, fa3, rounds):
    torch.manual_seed(problem.tokens)
    calls = prefill_calls(problem, flashjit, fa3)
    check(report, problem, calls)
    us = serving.microseconds(calls, rounds)
    flops = problem.operations() / us["ours"] / 1e6
    report.row(
        kind=problem.kind(),
        heads=problem.heads,
        sequences=problem.sequences,
        queries=problem.tokens,
        keys=problem.tokens,
        tflop_per_s=flops,
        **{f"{name}_us": x for name, x in us.items()},
    )
    print(
        f"{problem.label():60} us: "
        + "  ".join(f"{name} {x:8.1f}" for name, x in us.items())
        + f"  {flops:.0f} TFLOP/s",
        flush=True,
    )


def check(report, problem, calls):
    """Leaves out what does not run; reports what differs from ours."""
    expected = None
    for name, functions in list(calls.items()):
        try:
            out = functions[0]().float()
        except Exception as error:
            if name in ("fa3", "flashmla", "cudnn"):
                print(f"  {name} does not run: {measuring.reason(error)}")
            else:
                report.failure(f"{problem.label()}: {name}: {measuring.reason(error)}")
            del calls[name]
            continue
        expected = out if expected is None else expected
        error = ((out - expected).norm() / expected.norm()).item()
        if not error <= 0.01:
            report.failure(f"{problem.label()}: {name} differs from ours by {error:.3g}")


def run_problem(report, problem, flashjit, fa3, rounds, copy_rate):
    torch.manual_seed(problem.keys)
    calls = calls_of(problem, flashjit, fa3, max(1, -(-serving.IN_L2 // problem.cache_bytes())))
    check(report, problem, calls)
    us = serving.microseconds(calls, rounds)
    rate, flops = problem.read_bytes() / us["ours"] / 1e6, problem.operations() / us["ours"] / 1e6
    report.row(
        **problem._asdict(),
        read_bytes=problem.read_bytes(),
        tb_per_s=rate,
        tflop_per_s=flops,
        copy_tb_per_s=copy_rate,
        **{f"{name}_us": x for name, x in us.items()},
    )
    print(
        f"{problem.label():60} us: "
        + "  ".join(f"{name} {x:8.1f}" for name, x in us.items())
        + f"  {rate:.2f} TB/s, {flops:.0f} TFLOP/s",
        flush=True,
    )


def measured_copy_rate(rounds):
    """TB/s that a copy of 4 GB reads and writes."""
    x, y = (torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2))
    us = serving.microseconds({"copy": [lambda: y.copy_(x)]}, rounds)
    return 2 * x.nbytes / us["copy"] / 1e6


@torch.no_grad()
def measure(report, flashjit, arguments):
    try:
        from fa3_fwd_interface import flash_attn_func as fa3_prefill
        from fa3_fwd_interface import flash_attn_with_kvcache as fa3
    except ImportError:
        fa3 = fa3_prefill = None
    copy_rate = measured_copy_rate(15)
    print(f"a copy: {copy_rate:.2f} TB/s")
    for problem in problems():
        if not arguments.only or arguments.only in problem.label():
            measuring.guarded(
                report, problem.label(), run_problem, report, problem, flashjit, fa3, 15, copy_rate
            )
    for problem in prefills():
        if not arguments.only or arguments.only in problem.label():
            measuring.guarded(
                report, problem.label(), run_prefill, report, problem, flashjit, fa3_prefill, 15
            )


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--only", metavar="TEXT", help="the problems whose label has this text")
    columns = [
        *Problem._fields,
        "read_bytes",
        "tb_per_s",
        "tflop_per_s",
        "copy_tb_per_s",
        "ours_us",
        "pages64_us",
        "fa3_us",
        "flashmla_us",
        "cudnn_us",
    ]
    return measuring.command("latent", parser.parse_args(), columns, measure)


if __name__ == "__main__":
    sys.exit(main())

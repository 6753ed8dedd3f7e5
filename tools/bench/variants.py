"""Compare flashjit's score and mask programs with PyTorch's FlexAttention on one GPU, in one process, on the same tensors.

bf16, 8k tokens twice, head dims 64 and 128: full, causal, a sliding window, documents, ALiBi, softcap, prefix LM; with head
dim 128 only, so that it takes four minutes in all, more masks and biases; and the butterfly blocks of the first
FlashAttention paper at 64k. Results are checked before they are timed. Launches are interleaved, each between two CUDA
events, and the median counts. FlexAttention's block mask is built beforehand, as its users do. If a mask needs tile lists,
ours are built in every call, and count; listed_ms is with lists built beforehand. Biases have no gradient here.

    python3 tools/bench/variants.py --lib build/libflashjit.so --csv variants.csv

Rates count the pairs that attend. bias_gbs: GB/s of a dense bias's elements at those pairs. tiles: 128x128 tiles in which a
pair attends. At the end, without FlexAttention: the cost of a tile with ALiBi, relative to plain attention; and with a window
("window_tiles"), relative to full attention on sequences so short that a row has about as many tiles ("short"), both with
sm90's tiles for a window. Exit code: as compare.py.
"""

import sys
import time

import measuring
from measuring import Ours, Report, abi, interleaved_ms, torch

try:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError as error:
    print(f"variants: FlexAttention is needed: {error}", file=sys.stderr)
    sys.exit(3)

LENGTH, BATCH, HIDDEN = 8192, 2, 2048
WINDOW, DOCUMENTS, PREFIX = 1024, 16, 2000
TILE = 128
#: What sm90 takes for a window: Br, Bc and the rest of the configuration by head dimension and pass.
WINDOW_TILES = {
    (64, "fwd"): (192, 128, "w12:s3"),
    (128, "fwd"): (128, 128, "w8:s2"),
    (64, "bwd"): (128, 128, "w8:s2"),
    (128, "bwd"): (64, 128, "w8:s2"),
}
#: Beside which cases' tiles a case's are put.
PLAIN = {"alibi": ("causal", "full"), "window_tiles": ("short",)}
COLUMNS = [
    "pass",
    "case",
    "head_dim",
    "batch",
    "heads",
    "seqlen",
    "pairs",
    "flashjit_ms",
    "flex_ms",
    "flashjit_tflops",
    "flex_tflops",
    "ratio",
    "flashjit_compile_ms",
    "flex_compile_ms",
    "tiles",
    "partial_tiles",
    "bias_gbs",
    "listed_ms",
    "listed_ratio",
]


def document_ids(length, device):
    """int32 [length]: DOCUMENTS runs of different lengths."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.sort(torch.randperm(length - 1, generator=generator)[: DOCUMENTS - 1] + 1)[0]
    ids = torch.zeros(length, dtype=torch.int32)
    for cut in cuts.tolist():
        ids[cut:] += 1
    return ids.to(device)


def causal(b, h, q, k):
    return q >= k


def butterfly(b, h, q, k):
    x = (q // 128) ^ (k // 128)
    return (x & (x - 1)) == 0


class Case:
    """One attention, for both: our spec's parts and captures, FlexAttention's functions. bias: the name of a capture with
    an element for each pair. by_batch: whether the mask tells batch entries apart."""

    def __init__(self, name, parts, score_mod=None, mask_mod=None, captures=None, bias=None, by_batch=False):
        self.name, self.parts, self.score_mod, self.mask_mod = name, parts, score_mod, mask_mod
        self.captures, self.bias, self.by_batch = captures or {}, bias, by_batch


def cases(length, device="cuda"):
    ids = document_ids(length, device)
    return [
        Case("full", ""),
        Case("causal", ":causal", mask_mod=causal),
        Case(
            "window",
            f":mask{{q >= kv && q - kv < {WINDOW}}}",
            mask_mod=lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        ),
        Case(
            "documents",
            ":mask{ids: int32 1d; q >= kv && ids[q] == ids[kv]}",
            mask_mod=lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
            captures={"ids": ids},
        ),
        Case(
            "prefix",
            f":mask{{q >= kv || kv < {PREFIX}}}",
            mask_mod=lambda b, h, q, k: (q >= k) | (k < PREFIX),
        ),
        Case(
            "alibi",
            ":score{score + exp2(-0.5 * to_float(h + 1)) * to_float(kv - q)}:causal",
            score_mod=lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 0.5)) * (k - q),
            mask_mod=causal,
        ),
        Case(
            "softcap",
            ":score{50.0 * tanh(score / 50.0)}:causal",
            score_mod=lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0),
            mask_mod=causal,
        ),
    ]


def more_cases(batch, heads, length, device="cuda"):
    """Those of the gallery that are measured with one head dimension. One after the other, as the last takes memory."""
    lengths = torch.linspace(0.625, 1.0, batch, device=device) * length
    valid = torch.arange(length, device=device) < lengths[:, None]
    yield Case(
        "padding",
        ":mask{valid: bool 2d; valid[b, kv]}",
        mask_mod=lambda b, h, q, k: valid[b, k],
        captures={"valid": valid},
        by_batch=True,
    )
    start = (length - lengths).int()
    yield Case(
        "left_padding",
        ":mask{start: int32 1d; kv >= start[b] && kv <= q}",
        captures={"start": start},
        by_batch=True,
        mask_mod=lambda b, h, q, k: (k >= start[b]) & (k <= q),
    )
    yield Case(
        "first_tokens",
        ":mask{window: int; kv <= q && (q - kv < window || kv < 4)}",
        captures={"window": WINDOW},
        mask_mod=lambda b, h, q, k: (k <= q) & ((q - k < WINDOW) | (k < 4)),
    )
    yield Case("block_causal", ":mask{kv / 8 <= q / 8}", mask_mod=lambda b, h, q, k: k // 8 <= q // 8)
    yield Case(
        "dilated",
        ":mask{step: int; kv <= q && (q - kv) % step == 0}",
        captures={"step": 3},
        mask_mod=lambda b, h, q, k: (k <= q) & ((q - k) % 3 == 0),
    )
    yield Case(
        "strided",
        ":mask{kv <= q && (q - kv < 8 || (q - kv) % 8 == 0)}",
        mask_mod=lambda b, h, q, k: (k <= q) & ((q - k < 8) | ((q - k) % 8 == 0)),
    )
    yield Case(
        "neighbourhood",
        ":mask{abs(q / 64 - kv / 64) <= 8 && abs(q % 64 - kv % 64) <= 8}",
        mask_mod=lambda b, h, q, k: ((q // 64 - k // 64).abs() <= 8) & ((q % 64 - k % 64).abs() <= 8),
    )
    torch.manual_seed(0)
    keys = torch.randn(batch, length, device=device)
    yield Case(
        "key_bias",
        ":score{bias: fp32 2d; score + bias[b, kv]}",
        captures={"bias": keys},
        score_mod=lambda s, b, h, q, k: s + keys[b, k],
    )
    gates = torch.nn.functional.logsigmoid(torch.randn(batch, heads, length, device=device) + 4.0).cumsum(-1)
    yield Case(
        "forget_gates",
        ":score{f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])}:causal",
        captures={"f": gates},
        score_mod=lambda s, b, h, q, k: s + (gates[b, h, q] - gates[b, h, k]),
        mask_mod=causal,
    )
    table = torch.randn(heads, 64, device=device).half()
    yield Case(
        "relative_bias",
        ":score{table: fp16 2d; score + table[h, max(min(kv - q, 31), -32) + 32]}",
        score_mod=lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -32, 31) + 32],
        captures={"table": table},
    )
    bias = torch.randn(batch, heads, length, length, device=device, dtype=torch.bfloat16)
    yield Case(
        "bias",
        ":score{bias: bf16 4d; score + bias[b, h, q, kv]}:causal",
        mask_mod=causal,
        captures={"bias": bias},
        score_mod=lambda s, b, h, q, k: s + bias[b, h, q, k],
        bias="bias",
    )


def counts(mask_mod, length, device="cuda", br=TILE, bc=TILE):
    """Pairs that attend, tiles in which one does, and tiles in which some do and some do not."""
    if mask_mod is None:
        return length * length, -(-length // br) * -(-length // bc), 0
    keys, pairs, kept, partial = torch.arange(length, device=device), 0, 0, 0
    for begin in range(0, length, 8 * br):
        queries = torch.arange(begin, min(begin + 8 * br, length), device=device)
        attends = mask_mod(0, 0, queries[:, None], keys[None, :]).expand(len(queries), length)
        whole = torch.nn.functional.pad(attends, (0, -length % bc, 0, -len(queries) % br))
        tiles = whole.reshape(-1, br, whole.shape[1] // bc, bc).sum((1, 3))
        pairs += int(tiles.sum())
        kept += int((tiles > 0).sum())
        partial += int(((tiles > 0) & (tiles < br * bc)).sum())
    return pairs, kept, partial


def counts_of(case, batch, length):
    """The same of a case, on average over the batch."""
    each = [
        counts(case.mask_mod and (lambda _, h, q, k, b=b: case.mask_mod(b, h, q, k)), length)
        for b in range(batch if case.by_batch else 1)
    ]
    return [sum(column) / len(each) for column in zip(*each)]


def tile_costs(rows):
    """Lines: the cost of a tile with ALiBi or a window, relative to the plain kernel's. rows: as in the CSV."""
    known = {(row["head_dim"], row["pass"], row["case"]): row for row in rows}
    for (dim, pass_name, case), row in known.items():
        if case not in PLAIN:
            continue
        br, bc = WINDOW_TILES[int(dim), pass_name][:2] if case == "window_tiles" else (TILE, TILE)
        cost = lambda row: row["flashjit_ms"] / (row["tiles"] * row["batch"] * row["heads"])
        beside = [
            f"{cost(row) / cost(known[dim, pass_name, plain]):.2f} of the {plain} kernel's"
            for plain in PLAIN[case]
            if (dim, pass_name, plain) in known
        ]
        yield (
            f"{pass_name} d{dim} {case}: {row['tiles']} tiles of {br}x{bc}, {row['partial_tiles']} of them partial; "
            f"time for each: {', '.join(beside) or 'nothing to compare with'}"
        )


def window_point(runtime, report, dim, rounds):
    """A window, and full attention on as many tokens in sequences as long as what a window's Q tile meets: same tiles."""
    window = next(case for case in cases(LENGTH) if case.name == "window")
    heads, short = HIDDEN // dim, WINDOW + TILE
    config = lambda br, bc, rest: f"sm90:br{br}:bc{bc}:{rest}"
    tiles = {(pass_name, dim): config(*WINDOW_TILES[dim, pass_name]) for pass_name in measuring.PASSES}
    problems = [
        ("window_tiles", window.parts, window.mask_mod, BATCH, LENGTH),
        ("short", "", None, BATCH * LENGTH // short, short),
    ]
    ours = {
        name: Ours(runtime, f"bf16:d{dim}{parts}", *measuring.tensors(batch, heads, length, dim), tiles=tiles)
        for name, parts, _, batch, length in problems
    }
    for pass_name in measuring.PASSES:
        call = lambda problem: problem.forward if pass_name == "fwd" else problem.backward
        ms = interleaved_ms({name: call(problem) for name, problem in ours.items()}, rounds)
        for name, _, mask_mod, batch, length in problems:
            pairs, kept, partial = counts(mask_mod, length, "cuda", *WINDOW_TILES[dim, pass_name][:2])
            report.row(
                **{"pass": pass_name},
                case=name,
                head_dim=dim,
                batch=batch,
                heads=heads,
                seqlen=length,
                pairs=float(pairs),
                flashjit_ms=ms[name],
                tiles=kept,
                partial_tiles=partial,
            )
            print(f"{pass_name} {name} d{dim} b{batch} h{heads} s{length}: {ms[name]:.4f} ms", flush=True)


class Flex:
    """One problem for FlexAttention, compiled for its shape."""

    def __init__(self, case, q, k, v, dout):
        torch._dynamo.reset()
        begin = time.monotonic()
        length = q.shape[2]
        block_mask = case.mask_mod and create_block_mask(
            case.mask_mod,
            q.shape[0] if case.by_batch else None,
            None,
            length,
            length,
            device="cuda",
            _compile=length > 16384,
        )
        self.dout, self.inputs = dout, tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
        compiled = torch.compile(
            lambda q, k, v: flex_attention(q, k, v, score_mod=case.score_mod, block_mask=block_mask),
            dynamic=False,
        )
        self.call = lambda: compiled(*self.inputs)
        self.out = self.call()
        self.backward()
        torch.cuda.synchronize()
        self.compile_ms = (time.monotonic() - begin) * 1e3
        self.forward()

    def forward(self):
        with torch.no_grad():
            return self.call()

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self):
        return {"out": self.out.detach(), **dict(zip(("dq", "dk", "dv"), self.backward()))}


def point(runtime, report, case, batch, heads, length, dim, rounds):
    label = f"{case.name} d{dim} b{batch} h{heads} s{length}"
    q, k, v, dout = measuring.tensors(batch, heads, length, dim)
    begin = time.monotonic()
    ours = Ours(runtime, f"bf16:d{dim}{case.parts}", q, k, v, dout, captures=case.captures)
    compile_ms = (time.monotonic() - begin) * 1e3
    listed = Ours(runtime, f"bf16:d{dim}{case.parts}", q, k, v, dout, captures=case.captures, lists=True)
    flex = Flex(case, q, k, v, dout)
    for problem in (ours, listed) if listed.lists else (ours,):
        problem.forward()
        problem.backward()
        for text in measuring.differences(problem.results(), flex.results()):
            report.failure(f"{label}: {text}")
    pairs, tiles, partial = counts_of(case, batch, length)
    for pass_name, method in (("fwd", "forward"), ("bwd", "backward")):
        problems = {
            "flashjit": ours,
            "flex": flex,
            **({"listed": listed} if pass_name in listed.lists else {}),
        }
        ms = interleaved_ms({name: getattr(problem, method) for name, problem in problems.items()}, rounds)
        rate = lambda x: 4.0 * pairs * dim * heads * batch * (2.5 if pass_name == "bwd" else 1.0) / x / 1e9
        more = {}
        if "listed" in ms:
            more = {"listed_ms": ms["listed"], "listed_ratio": ms["flex"] / ms["listed"]}
        if case.bias:
            more["bias_gbs"] = (
                pairs * batch * heads * case.captures[case.bias].element_size() / ms["flashjit"] / 1e6
            )
        report.row(
            **{"pass": pass_name},
            case=case.name,
            head_dim=dim,
            batch=batch,
            heads=heads,
            seqlen=length,
            pairs=pairs,
            flashjit_ms=ms["flashjit"],
            flex_ms=ms["flex"],
            flashjit_tflops=rate(ms["flashjit"]),
            flex_tflops=rate(ms["flex"]),
            ratio=ms["flex"] / ms["flashjit"],
            flashjit_compile_ms=compile_ms,
            flex_compile_ms=flex.compile_ms,
            tiles=tiles,
            partial_tiles=partial,
            **more,
        )
        print(
            f"{pass_name} {label:34} TFLOP/s: flashjit {rate(ms['flashjit']):5.0f}  flex {rate(ms['flex']):5.0f}  "
            f"ratio {ms['flex'] / ms['flashjit']:.2f}   cold compile {compile_ms:.0f} / {flex.compile_ms:.0f} ms"
            + "".join(f"   {name} {x:.3g}" for name, x in more.items()),
            flush=True,
        )


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    if measuring.without_gpu("variants"):
        return 3
    torch.zeros(1, device="cuda")
    measuring.use_library(arguments.lib)
    runtime = abi.Runtime()
    constants = measuring.constants_of(arguments)
    print(f"{constants['device']}, flashjit {constants['commit']}, PyTorch {torch.__version__}")
    report = Report(arguments.csv, list(constants) + COLUMNS, constants)
    todo = [(dim, cases(LENGTH)) for dim in (64, 128)] + [(128, more_cases(BATCH, HIDDEN // 128, LENGTH))]
    for dim, some in todo:
        for case in some:
            if arguments.only in case.name:
                measuring.guarded(
                    report,
                    f"{case.name} d{dim}",
                    point,
                    runtime,
                    report,
                    case,
                    BATCH,
                    HIDDEN // dim,
                    LENGTH,
                    dim,
                    11,
                )
    blocks = Case(
        "butterfly", ":mask{((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0}", mask_mod=butterfly
    )
    if arguments.only in blocks.name:
        measuring.guarded(report, "butterfly", point, runtime, report, blocks, 1, 8, 65536, 64, 5)
    for dim in (64, 128):  # last: these kernels are others', too, whose compile time counts
        if arguments.only in "window_tiles":
            measuring.guarded(report, f"window_tiles d{dim}", window_point, runtime, report, dim, 11)
    print("\n".join(tile_costs(report.rows)))
    return measuring.ended(report)


if __name__ == "__main__":
    sys.exit(main())

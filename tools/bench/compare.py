"""Compare flashjit with cuDNN and FlashAttention-2, -3 and -4 on one GPU, in one process, on the same tensors.

cuDNN and FlashAttention-2 are PyTorch's; FlashAttention-3 (forward alone) and -4 take part where they can be imported:
`pip install fa3-fwd flash-attn-4`.

Dense: bf16, head dims 64, 128 and 256, lengths 512 to 16k, causal and full; 16k tokens in all, hidden size 2048; flashjit
by its own choice, and its portable family sm80. Others: fp16, short sequences, grouped heads, one GPU's share of a
model's heads, dropout, problems too small for the device.
Few: few queries of many keys, as in decoding, forward, without a mask.
Sparse: block maps of 128-blocks, and of 64-blocks, against flashjit's own dense time, and against that of as many tokens in sequences with as
many keys as a row of the map. Results are checked before they are timed. Launches of all peers are
interleaved, each between two CUDA events, and the median counts.

    python3 tools/bench/compare.py --lib build/libflashjit.so --csv dense.csv

For the sparse table ratio is sparse_ms / dense_ms, a share of the
time, and rate the share of the blocks by it: 1 if a kept block costs what it costs in the dense kernel;
ratio_short is short_ms / sparse_ms, a speed. To find slow lengths: --only dense --lengths 320,577,640.
Exit code: 0 if every point of flashjit ran and was right, 1 if one was not, 3 without GPU or PyTorch.
"""

import argparse
import functools
import importlib
import itertools
import os
import statistics
import sys
import typing

from measuring import (
    BLOCK,
    OURS,
    PASSES,
    PEERS,
    F,
    Ours,
    Report,
    SDPBackend,
    abi,
    constants_of,
    differences,
    ended,
    guarded,
    interleaved_ms,
    parser_of,
    running,
    sdpa_kernel,
    tensors,
    teraflops,
    torch,
    use_library,
    without_gpu,
)

TOKENS, HIDDEN = 16384, 2048
# Lengths, shares of the blocks that a map keeps, and where these are.
SPARSE = (
    (4096, 0.125, "window"),
    (8192, 0.0625, "window"),
    (8192, 0.125, "window"),
    (8192, 0.5, "window"),
    (16384, 0.125, "window"),
    (65536, 0.0625, "window"),
    (65536, 0.5, "window"),
    (8192, 0.125, "scattered"),
    (8192, 0.5, "scattered"),
    (32768, 0.125, "by head"),
    (32768, 0.125, "by head, 64x64"),
)
# Batch, heads of Q, and of K and V, queries, keys, head dimension.
FEW = (
    (1, 32, 8, 1, 8192, 128),
    (1, 32, 8, 1, 131072, 128),
    (4, 32, 8, 1, 8192, 128),
    (16, 32, 8, 1, 8192, 128),
    (64, 32, 8, 1, 4096, 128),
    (1, 32, 1, 1, 32768, 128),
    (1, 32, 8, 1, 131072, 64),
    (1, 32, 8, 4, 8192, 128),
    (64, 32, 8, 4, 4096, 128),
    (16, 64, 8, 8, 8192, 128),
    (1, 32, 8, 16, 32768, 128),
    (1, 32, 8, 16, 32768, 64),
    (1, 32, 8, 128, 32768, 128),
)
# What the heuristic takes in the family sm80, by pass and head dim: forced, for the portable family's own figures.
SM80_TILES = {
    ("fwd", 64): "sm80:br128:bc64:w4:s2",
    ("fwd", 128): "sm80:br128:bc64:w4",
    ("fwd", 256): "sm80:br64:bc64:w4",
    ("bwd", 64): "sm80:br32:bc128:w4:s2",
    ("bwd", 128): "sm80:br64:bc128:w8:s2:d_split2",
    ("bwd", 256): "sm80:br32:bc64:w8:s2:d_split2",
}
# With dropout d128 has fewer registers.
SM80_DROPOUT_TILES = {
    **SM80_TILES,
    ("fwd", 128): "sm80:br128:bc48:w4",
    ("bwd", 128): "sm80:br32:bc128:w8:s2:d_split2",
}
# Where few KV tiles have many queries, which blocks share.
SM80_SHARED_TILES = {**SM80_TILES, ("bwd", 128): SM80_TILES["bwd", 128] + ":split"}
# Where tiles of 128 rows leave multiprocessors without one.
SM80_SMALL_TILES = {
    ("fwd", 64): "sm80:br64:bc128:w4",
    ("bwd", 64): "sm80:br64:bc64:w8:s2:d_split2",
    ("fwd", 128): "sm80:br64:bc64:w4",
    ("bwd", 128): "sm80:br64:bc64:w8:s2:d_split2",
}


class Peer:
    """One problem for a backend of scaled_dot_product_attention."""

    def __init__(self, backend, q, k, v, dout, causal, dropout=0.0):
        self.backend, self.dout, self.causal, self.dropout = backend, dout, causal, dropout
        self.inputs = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
        self.out = self._attention()

    def _attention(self):
        with sdpa_kernel(self.backend):
            grouped = self.inputs[0].shape[1] != self.inputs[1].shape[1]
            return F.scaled_dot_product_attention(
                *self.inputs, dropout_p=self.dropout, is_causal=self.causal, enable_gqa=grouped
            )

    def forward(self):
        with torch.no_grad():
            return self._attention()

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self):
        dq, dk, dv = self.backward()
        return {"out": self.out.detach(), "dq": dq, "dk": dk, "dv": dv}


class FlashAttention:
    """One problem for a function of FlashAttention-3's or -4's packages, which take [batch, length, heads, dimension]."""

    def __init__(self, function, q, k, v, dout, causal):
        self.function, self.causal, self.dout = function, causal, dout.transpose(1, 2)
        self.inputs = tuple(x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
        self.out = self._attention()

    def _attention(self):
        out = self.function(*self.inputs, causal=self.causal)
        return out[0] if isinstance(out, tuple) else out

    def forward(self):
        with torch.no_grad():
            return self._attention()

    def results(self):
        return {"out": self.out.detach().transpose(1, 2)}


class FlashAttentionWithGradients(FlashAttention):
    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)


def other_packages():
    """By name, what makes a problem for each package that can be imported."""
    found = {}
    for name, module, kind in (
        ("fa3", "fa3_fwd_interface", FlashAttention),
        ("fa4", "flash_attn.cute", FlashAttentionWithGradients),
    ):
        try:
            function = importlib.import_module(module).flash_attn_func
        except ImportError:
            continue
        found[name] = functools.partial(kind, function)
    return found


class Point(typing.NamedTuple):
    dim: int
    length: int
    causal: bool
    batch: int
    heads: int
    heads_kv: int
    dtype: str = "bf16"
    dropout: float = 0.0

    def spec(self):
        return (
            f"{self.dtype}:d{self.dim}"
            + (":causal" if self.causal else "")
            + (":dropout" if self.dropout else "")
        )

    def label(self):
        heads = f"{self.heads}/{self.heads_kv}" if self.heads != self.heads_kv else str(self.heads)
        dropout = f" p{self.dropout}" if self.dropout else ""
        return f"{self.dtype} d{self.dim} {'causal' if self.causal else 'full'}{dropout} b{self.batch} h{heads} s{self.length}"


def dense_points(dim, lengths):
    """The table that FlashAttention's papers have: as many tokens and as wide a model at every length."""
    heads = HIDDEN // dim
    return [
        Point(dim, length, causal, TOKENS // length, heads, heads)
        for length in lengths
        for causal in (False, True)
    ]


def other_points():
    """fp16, short sequences, odd numbers of tiles, grouped heads, one GPU's share of a model's, dropout, and problems that
    do not fill the device."""
    for dim in (64, 128, 256):
        yield from (point._replace(dtype="fp16") for point in dense_points(dim, (4096,)))
    for dim in (64, 128):
        yield from dense_points(dim, (256,))
    for dim in (64, 128, 256):
        yield from (point for point in dense_points(dim, (640, 1152)) if point.causal)
    yield from (Point(128, length, True, TOKENS // length, 32, 8) for length in (1024, 4096, 16384))
    yield from (Point(128, length, True, 1, 8, 1) for length in (2048, 4096, 8192))
    yield from (Point(128, length, True, 1, 32, 8) for length in (1024, 4096))
    yield Point(128, 1024, True, 1, 16, 4)
    for dim in (64, 128, 256):
        yield from (point._replace(dropout=0.1) for point in dense_points(dim, (4096,)))
    yield from (
        Point(dim, length, causal, 1, 16, 16)
        for dim in (64, 128)
        for length in (512, 1024, 2048)
        for causal in (False, True)
    )


def lengths_of(text):
    """Lengths of sequences, separated by commas; each fits into the tokens of a point."""
    lengths = tuple(int(word) for word in text.split(","))
    if not all(1 <= length <= TOKENS for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} has a length that is not within 1 to {TOKENS}")
    return lengths


def sm80_tiles(point):
    """The tiles that the heuristic takes for a problem in the family sm80, on the 132 multiprocessors of an H100."""
    if point.batch * point.heads * point.length // 128 < 0.9 * 132:
        return SM80_SMALL_TILES
    if point.batch * point.heads_kv * point.length // 128 < 0.9 * 132:
        return SM80_SHARED_TILES
    return SM80_DROPOUT_TILES if point.dropout else SM80_TILES


def dense_point(runtime, portable, packages, report, point, rounds):
    dim, length, causal, batch, heads, heads_kv, dtype, dropout = point
    label = point.label()
    q, k, v, dout = tensors(batch, heads, length, dim, heads_kv, dtype)
    spec = point.spec()
    people = running(
        report,
        label,
        {
            "flashjit": lambda: Ours(runtime, spec, q, k, v, dout, dropout=dropout),
            "sm80": lambda: Ours(portable, spec, q, k, v, dout, tiles=sm80_tiles(point), dropout=dropout),
            "fa2": lambda: Peer(SDPBackend.FLASH_ATTENTION, q, k, v, dout, causal, dropout),
            "cudnn": lambda: Peer(SDPBackend.CUDNN_ATTENTION, q, k, v, dout, causal, dropout),
            **(
                {}
                if dropout
                else {name: functools.partial(make, q, k, v, dout, causal) for name, make in packages.items()}
            ),
        },
        ("forward", "backward"),
    )
    # Peers drop other pairs; our families, which share no kernel, the same.
    reference = people.get("sm80") if dropout else people.get("fa2") or people.get("cudnn")
    for name in people.keys() & (OURS - {"sm80"} if dropout else OURS):
        if reference is None:
            report.failure(f"{label}: nothing to check {name} against")
            continue
        for text in differences(people[name].results(), reference.results()):
            report.failure(f"{label}: {name}: {text}")
    for pass_name in PASSES:
        method = "forward" if pass_name == "fwd" else "backward"
        ms = interleaved_ms(
            {name: getattr(person, method) for name, person in people.items() if hasattr(person, method)},
            rounds,
        )
        report.row(
            **{"pass": pass_name},
            dtype=dtype,
            head_dim=dim,
            causal=int(causal),
            dropout=dropout,
            batch=batch,
            heads=heads,
            heads_kv=heads_kv,
            seqlen=length,
            **{f"{name}_ms": x for name, x in ms.items()},
        )
        rates = "  ".join(
            f"{name} {teraflops(batch, heads, length, dim, causal, pass_name, x):5.0f}"
            for name, x in ms.items()
        )
        print(f"{pass_name} {label:34} TFLOP/s: {rates}", flush=True)


def few_point(runtime, packages, report, problem, rounds):
    """The forward pass of few queries, in the bytes of K and V that it reads a second."""
    batch, heads, heads_kv, queries, keys, dim = problem
    label = f"bf16 d{dim} b{batch} h{heads}/{heads_kv} sq{queries} skv{keys}"
    torch.manual_seed(keys + dim)
    random = lambda heads, length: torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = random(heads, queries), random(heads_kv, keys), random(heads_kv, keys)
    people = running(
        report,
        label,
        {
            "flashjit": lambda: Ours(runtime, f"bf16:d{dim}", q, k, v, q, passes=("fwd",)),
            "fa2": lambda: Peer(SDPBackend.FLASH_ATTENTION, q, k, v, q, False),
            "cudnn": lambda: Peer(SDPBackend.CUDNN_ATTENTION, q, k, v, q, False),
            **{name: functools.partial(make, q, k, v, q, False) for name, make in packages.items()},
        },
        ("forward",),
    )
    if "flashjit" not in people:
        return
    reference = people.get("fa2") or people.get("cudnn")
    if reference is None:
        report.failure(f"{label}: no peer to check flashjit against")
    else:
        for text in differences({"out": people["flashjit"].out}, {"out": reference.forward()}):
            report.failure(f"{label}: {text}")
    ms = interleaved_ms({name: person.forward for name, person in people.items()}, rounds)
    report.row(
        **{"pass": "fwd"},
        dtype="bf16",
        head_dim=dim,
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=queries,
        seqlen_kv=keys,
        **{f"{name}_ms": x for name, x in ms.items()},
        gbs=2 * batch * heads_kv * keys * dim * 2 / ms["flashjit"] / 1e6,
    )
    print(f"fwd {label:34} us: " + "  ".join(f"{name} {1e3 * x:6.1f}" for name, x in ms.items()), flush=True)


def window_map(length, density):
    """uint8 [1, 1, n, n]: in every row a window of that share of the blocks, around the diagonal."""
    n = length // BLOCK
    width = max(1, round(density * n))
    begin = (torch.arange(n) - width // 2).clamp(0, n - width)[:, None]
    column = torch.arange(n)[None, :]
    return ((column >= begin) & (column < begin + width)).to(torch.uint8)[None, None].contiguous().cuda()


def scattered_map(length, density):
    """As many blocks in every row, at random: neighbouring rows share no more than chance has it."""
    n = length // BLOCK
    order = torch.rand(n, n, generator=torch.Generator().manual_seed(n)).argsort(dim=1)
    return (order < max(1, round(density * n))).to(torch.uint8)[None, None].contiguous().cuda()


def map_by_head(length, density, heads, block):
    """Like scattered_map, another for each head, as sparse attention of videos has it."""
    n = length // block
    order = torch.rand(heads, n, n, generator=torch.Generator().manual_seed(n)).argsort(dim=2)
    return (order < max(1, round(density * n))).to(torch.uint8)[None].contiguous().cuda()


def map_of(pattern, length, density, heads):
    """The blocks that attend, and their rows."""
    if pattern.startswith("by head"):
        block = 64 if pattern.endswith("64x64") else BLOCK
        return map_by_head(length, density, heads, block), block
    return {"window": window_map, "scattered": scattered_map}[pattern](length, density), BLOCK


def masked_reference(q, k, v, dout, block_map, block):
    """O and gradients of the first batch entry's first head in fp32, with the map written out."""
    q, k, v = (x[0, 0].float().requires_grad_() for x in (q, k, v))
    keep = block_map[0, 0].bool().repeat_interleave(block, 0).repeat_interleave(block, 1)
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~keep, float("-inf"))
    out = torch.softmax(scores, dim=-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout[0, 0].float())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def sparse_point(runtime, report, dim, length, density, pattern, rounds):
    """A block map compared with the dense kernel, and with it on as many tokens in sequences as long as a row of the map."""
    batch, heads = max(TOKENS // length, 1), min(HIDDEN, TOKENS * HIDDEN // length) // dim
    label = f"bf16 d{dim} {pattern} b{batch} h{heads} s{length}"
    q, k, v, dout = tensors(batch, heads, length, dim)
    block_map, block = map_of(pattern, length, density, heads)
    density = block_map.float().mean().item()
    dense = Ours(runtime, f"bf16:d{dim}", q, k, v, dout)
    sparse = Ours(runtime, f"bf16:d{dim}:map{block}x{block}", q, k, v, dout, block_map)
    keys = round(density * length)
    short = Ours(runtime, f"bf16:d{dim}", *tensors(batch * length // keys, heads, keys, dim))
    people = {"sparse": sparse, "dense": dense, "short": short}
    for problem in people.values():
        problem.forward()
        problem.backward()
    torch.cuda.synchronize()
    if length <= 32768:  # beyond, the written-out map does not fit
        first_head = {name: tensor[0, 0] for name, tensor in sparse.results().items()}
        for text in differences(first_head, masked_reference(q, k, v, dout, block_map, block)):
            report.failure(f"{label}: {text}")
    for pass_name, method in (("fwd", "forward"), ("bwd", "backward")):
        ms = interleaved_ms(
            {name: getattr(person, method) for name, person in people.items()},
            rounds if length <= 16384 else 5,
        )
        ratio = ms["sparse"] / ms["dense"]
        report.row(
            **{"pass": pass_name},
            dtype="bf16",
            head_dim=dim,
            pattern=pattern,
            density=density,
            batch=batch,
            heads=heads,
            heads_kv=heads,
            seqlen=length,
            sparse_ms=ms["sparse"],
            dense_ms=ms["dense"],
            ratio=ratio,
            rate=density / ratio,
            short_ms=ms["short"],
            ratio_short=ms["short"] / ms["sparse"],
        )
        print(
            f"{pass_name} {label:34} sparse {ms['sparse']:8.3f} ms  dense {ms['dense']:8.3f} ms  share of the time "
            f"{ratio:.3f} at density {density:.3f}: {density / ratio:.2f} of the dense rate, "
            f"{ms['short'] / ms['sparse']:.2f} of sequences of {keys}",
            flush=True,
        )


def summary(report):
    """Geometric mean and worst of the speed relative to the best peer of each point, by pass and head dimension."""
    groups = {}
    for row in report.rows:
        peers = [row[f"{name}_ms"] for name in PEERS if f"{name}_ms" in row]
        if peers and "flashjit_ms" in row:
            groups.setdefault((row["pass"], row["head_dim"]), []).append(min(peers) / row["flashjit_ms"])
    for (pass_name, dim), ratios in groups.items():
        print(
            f"{pass_name} d{dim}: geometric mean {statistics.geometric_mean(ratios):.3f} of the best peer's speed, worst "
            f"{min(ratios):.3f}, {len(ratios)} points"
        )


def main():
    parser = parser_of(
        __doc__, csv="write the dense table here, the others next to it: *_other.csv, *_few.csv, *_sparse.csv"
    )
    parser.add_argument("--quick", action="store_true", help="4k and few rounds only")
    parser.add_argument(
        "--only",
        choices=("dense", "other", "few", "sparse"),
        help="one table alone; the others stay as they are",
    )
    parser.add_argument(
        "--lengths",
        type=lengths_of,
        metavar="N,...",
        help="of the dense table, such as 320,640,1500 (default 512 to 16384, with --quick 4096)",
    )
    arguments = parser.parse_args()
    if without_gpu("compare"):
        return 3
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the primary context current, which flashjit then uses

    use_library(arguments.lib)
    runtime, portable, packages = abi.Runtime(), abi.Runtime(), other_packages()
    constants = constants_of(arguments)
    print(
        f"{constants['device']}, flashjit {abi.version()} ({constants['commit']}), "
        f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {', '.join(packages) or 'neither fa3 nor fa4'}"
    )
    lengths, rounds = ((4096,), 7) if arguments.quick else ((512, 1024, 2048, 4096, 8192, 16384), 15)
    lengths = arguments.lengths or lengths
    wanted = lambda name: arguments.only in (None, name)
    table = lambda name, suffix: (
        suffix.join(os.path.splitext(arguments.csv)) if arguments.csv and wanted(name) else None
    )
    beside = lambda name: table(name, f"_{name}")
    about = list(constants) + ["pass", "dtype", "head_dim"]
    times = ["flashjit_ms", "sm80_ms"] + [f"{name}_ms" for name in PEERS]
    sizes = ["batch", "heads", "heads_kv", "seqlen"]
    dense = Report(table("dense", ""), about + ["causal"] + sizes + times, constants)
    other = Report(beside("other"), about + ["causal", "dropout"] + sizes + times, constants)
    sparse = Report(
        beside("sparse"),
        about
        + ["pattern", "density"]
        + sizes
        + ["sparse_ms", "dense_ms", "ratio", "rate", "short_ms", "ratio_short"],
        constants,
    )
    few = Report(
        beside("few"),
        about
        + ["batch", "heads", "heads_kv", "seqlen_q", "seqlen_kv"]
        + [name for name in times if name != "sm80_ms"]
        + ["gbs"],
        constants,
    )
    points = (
        [(dense, point) for dim in (64, 128, 256) for point in dense_points(dim, lengths)]
        if wanted("dense")
        else []
    )
    if wanted("other") and not arguments.quick:
        points += [(other, point) for point in other_points()]
    for report, point in points:
        guarded(report, point.label(), dense_point, runtime, portable, packages, report, point, rounds)
    for problem in (FEW[:1] if arguments.quick else FEW) if wanted("few") else ():
        guarded(few, f"few queries {problem}", few_point, runtime, packages, few, problem, rounds)
    for dim, problem in itertools.product(
        (64, 128) if wanted("sparse") else (), SPARSE[:1] if arguments.quick else SPARSE
    ):
        guarded(sparse, f"d{dim} {problem}", sparse_point, runtime, sparse, dim, *problem, rounds)
    summary(dense)
    return ended(dense, other, few, sparse)


if __name__ == "__main__":
    sys.exit(main())

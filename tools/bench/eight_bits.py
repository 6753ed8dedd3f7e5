"""Errors of attention in 8 bits against fp64, over the length, and its speed: flashjit's, FlashAttention-3's and cuDNN's, on one GPU.

    python3 tools/bench/eight_bits.py --lib build/libflashjit.so --csv   # measures errors, and writes file, picture and page
    python3 tools/bench/eight_bits.py --lib build/libflashjit.so --csv --inputs mean   # the errors of these inputs alone, again
    python3 tools/bench/eight_bits.py --lib build/libflashjit.so --csv --speed   # measures speeds, and writes file and page
    python3 tools/bench/eight_bits.py --tables                           # writes picture and pages again, without a GPU

The file is tools/bench/results/h200_eight_bits.csv: of each method the relative RMS error against the inputs before they were
rounded (rel) and against what their codes mean (kernel), the RMS and the largest error. The page is the section of
tools/docs/accuracy.md; the picture needs matplotlib. Codes are e4m3, with a scale for each sequence and KV head. Speeds are
for 16k tokens of hidden size 2048 in [batch, length, heads, d], with flashjit's in bf16: h200_eight_bits_speed.csv, and a
section of tools/docs/eight-bits-results.md.
Exit code: 0, 1 where an error is beyond its limit, 3 where there is no GPU or PyTorch.
"""

import contextlib
import csv
import functools
import importlib
import math
import os
import sys
import tempfile

from plot_rows import RESULTS, ROOT, markdown, package_over, page_parser, read, replace

try:
    import torch
except ImportError:
    torch = None

FILE, PICTURE = (os.path.join(RESULTS, f"h200_eight_bits.{kind}") for kind in ("csv", "png"))
SPEED_FILE = os.path.join(RESULTS, "h200_eight_bits_speed.csv")
PAGE, SPEED_PAGE = (
    os.path.join(ROOT, "tools", "docs", name) for name in ("accuracy.md", "eight-bits-results.md")
)
COLUMNS = ("inputs", "head_dim", "causal", "seqlen", "method", "rel", "kernel", "rmse", "largest")
SPEED_COLUMNS = ("head_dim", "causal", "seqlen", "method", "us", "tflops")
LENGTHS = (1024, 4096, 16384, 65536, 131072)
SPEED_LENGTHS, TOKENS, HIDDEN = (1024, 4096, 16384), 16384, 2048
INPUTS, DIMS, MASKS = ("normal", "outliers", "mean"), (64, 128, 256), (0, 1)
HEADS, ROWS = 4, 256  # of which errors are found
LARGEST_CODE = 448.0
#: The error of rounding to e4m3: 2^-3 / sqrt(12) of a binade's beginning, over floats whose logarithms are spread evenly in it.
ROUNDING = 2**-3 / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
#: Against what the codes mean: P's rounding, and a tenth for luck.
KERNEL_LIMIT = 1.1 * ROUNDING
COLOURS = {
    "inputs": "#999999",
    "flashjit bf16": "#009E73",
    "flashjit": "#0072B2",
    "flashjit hadamard": "#56B4E9",
    "fa3": "#CC79A7",
    "fa3 hadamard": "#E69F00",
    "cudnn": "#D55E00",
}


def draw_inputs(kind, length, dim, device, heads=HEADS, seed=0):
    """Q, K and V in bf16; `outliers`: one element of a thousand is ten times as large; `mean`: V's mean is two deviations."""
    torch.manual_seed(seed)
    made = []
    for name in "qkv":
        x = torch.randn(1, heads, length, dim, device=device)
        if kind == "outliers":
            x = torch.where(torch.rand_like(x) < 1e-3, 10 * x, x)
        if kind == "mean" and name == "v":
            x = x + 2
        made.append(x.to(torch.bfloat16))
    return made


def hadamard(x):
    """The rows times an orthogonal matrix, which leaves Q K^T alone: blocks of the largest power of two that divides them."""
    dim = x.shape[-1]
    block = dim & -dim
    y, step = x.float(), 1
    while step < block:
        pairs = y.unflatten(-1, (-1, 2, step))
        y = torch.stack(
            (pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2
        ).flatten(-3)
        step *= 2
    return y / math.sqrt(block)


def quantized(x):
    """Codes, and the scale of each head of each sequence."""
    x = x.float()
    scale = x.abs().amax((2, 3)).clamp_min(1e-30) / LARGEST_CODE
    return (x / scale[..., None, None]).to(torch.float8_e4m3fn), scale


def meant(codes, scale):
    return codes.double() * scale[..., None, None].double()


def exact(q, k, v, causal, rows):
    """O in fp64, of some rows."""
    out = []
    for h in range(q.shape[1]):
        s = q[0, h, rows].double() @ k[0, h].double().T / math.sqrt(q.shape[3])
        if causal:
            s.masked_fill_(torch.arange(k.shape[2], device=q.device) > rows[:, None], -math.inf)
        out.append(torch.softmax(s, -1) @ v[0, h].double())
    return torch.stack(out)[None]


# A method prepares a call from codes and scales; the call returns O.


def flashjit_method(q, k, v, scales, causal, out_dtype=None):
    import flashjit

    q_scale, k_scale, v_scale = scales
    return functools.partial(
        flashjit.attention,
        q,
        k,
        v,
        causal=causal,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out_dtype=out_dtype or torch.float32,
    )


def fa3_method():
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def prepare(q, k, v, scales, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def run():
            out = function(
                q, k, v, causal=causal, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]
            )
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return run

    return prepare


def cudnn_method():
    cudnn = importlib.import_module("cudnn")

    def prepare(q, k, v, scales, causal):
        # cuDNN has one scale for each tensor: codes of the largest.
        whole = [s.amax() for s in scales]
        codes = [
            (x.double() * (s / one)[..., None, None]).to(torch.float8_e4m3fn)
            for x, s, one in zip((q, k, v), scales, whole)
        ]
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.FP8_E4M3,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        tensors = [graph.tensor_like(x) for x in codes]
        number = lambda x: x.reshape(1, 1, 1, 1).float().contiguous()
        factors = [
            number(x)
            for x in (
                *whole,
                torch.tensor(1 / LARGEST_CODE, device=q.device),
                torch.tensor(LARGEST_CODE, device=q.device),
                torch.ones((), device=q.device),
            )
        ]
        named = [graph.tensor_like(x) for x in factors]
        out, _, amax_s, amax_o = graph.sdpa_fp8(
            q=tensors[0],
            k=tensors[1],
            v=tensors[2],
            descale_q=named[0],
            descale_k=named[1],
            descale_v=named[2],
            descale_s=named[3],
            scale_s=named[4],
            scale_o=named[5],
            generate_stats=False,
            attn_scale=1 / math.sqrt(q.shape[3]),
            use_causal_mask=causal,
        )
        result = torch.empty_like(q, dtype=torch.bfloat16)
        out.set_output(True).set_dim(result.shape).set_stride(result.stride()).set_data_type(
            cudnn.data_type.BFLOAT16
        )
        largest = [torch.empty(1, 1, 1, 1, device=q.device) for _ in "so"]
        for tensor in (amax_s, amax_o):
            tensor.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(
                cudnn.data_type.FLOAT
            )
        graph.build([cudnn.heur_mode.A])
        space = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=q.device)
        given = {
            **dict(zip(tensors, codes)),
            **dict(zip(named, factors)),
            out: result,
            amax_s: largest[0],
            amax_o: largest[1],
        }

        def run():
            graph.execute(given, space)
            return result

        return run

    return prepare


def methods():
    """By name, those that can be imported."""
    found = {"flashjit": flashjit_method}
    for name, make in (("fa3", fa3_method), ("cudnn", cudnn_method)):
        try:
            found[name] = make()
        except ImportError as error:
            print(f"without {name}: {error}")
    return found


def errors(got, unrounded, codes):
    rms = lambda x: x.square().mean().sqrt().item()
    return {
        "rel": rms(got - unrounded) / rms(unrounded),
        "kernel": rms(got - codes) / rms(codes),
        "rmse": rms(got - unrounded),
        "largest": (got - unrounded).abs().max().item(),
    }


def measure_case(kind, dim, causal, length, people, device="cuda", heads=HEADS):
    """Rows of the file."""
    import flashjit

    q, k, v = draw_inputs(kind, length, dim, device, heads)
    rows = torch.linspace(0, length - 1, min(ROWS, length), device=device).long()
    unrounded = exact(q, k, v, causal, rows)
    found = []

    def add(method, got, codes):
        found.append(
            {
                "inputs": kind,
                "head_dim": dim,
                "causal": int(causal),
                "seqlen": length,
                "method": method,
                **errors(got.double(), unrounded, codes),
            }
        )

    add("flashjit bf16", flashjit.attention(q, k, v, causal=causal)[:, :, rows], unrounded)
    for suffix, turn in (("", lambda x: x), (" hadamard", hadamard)):
        given = [quantized(x) for x in (turn(q), turn(k), v)]
        codes, scales = [x for x, _ in given], [scale for _, scale in given]
        of_codes = exact(*(meant(*x) for x in given), causal, rows)
        add("inputs" + suffix, of_codes, of_codes)
        for name, prepare in people.items():
            if name == "cudnn" and suffix:
                continue
            try:
                add(name + suffix, prepare(*codes, scales, causal)()[:, :, rows], of_codes)
            except Exception as error:  # a peer that does not take the case is left out
                if name == "flashjit":
                    raise
                print(f"  {name} refuses d{dim} {length}: {str(error).splitlines()[0][:120]}")
    return found


@contextlib.contextmanager
def rows_of(path, columns):
    """A new file; calls add rows, which are printed, too, and there if the next ones never come."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()

        def add(row):
            writer.writerow(row)
            file.flush()
            print(*row.values(), sep="  ")

        yield add


def measure(path, kinds, kept):
    """Errors of these kinds of inputs, after the rows that are kept."""
    people = methods()
    with rows_of(path, COLUMNS) as add:
        for row in kept:
            add(row)
        for kind in kinds:
            for dim in DIMS:
                for causal in MASKS:
                    for length in LENGTHS:
                        if length > 16384 and not (causal and dim == 128):
                            continue
                        for row in measure_case(kind, dim, bool(causal), length, people):
                            add(
                                {
                                    name: f"{value:.4g}" if isinstance(value, float) else value
                                    for name, value in row.items()
                                }
                            )


def measure_speeds(path):
    import flashjit
    from measuring import interleaved_ms

    people = methods()
    with rows_of(path, SPEED_COLUMNS) as add:
        for dim in DIMS:
            for length in SPEED_LENGTHS:
                torch.manual_seed(0)
                # [batch, heads, length, d] of rows that lie as [batch, length, heads, d]
                q, k, v = (
                    torch.randn(TOKENS // length, length, HIDDEN // dim, dim, device="cuda")
                    .to(torch.bfloat16)
                    .transpose(1, 2)
                    for _ in "qkv"
                )
                codes, scales = zip(*(quantized(x) for x in (q, k, v)))
                for causal in MASKS:
                    calls = {
                        "flashjit bf16": functools.partial(flashjit.attention, q, k, v, causal=bool(causal))
                    }
                    for name, prepare in people.items():
                        options = {"out_dtype": torch.bfloat16} if name == "flashjit" else {}
                        try:
                            calls[name] = prepare(*codes, scales, bool(causal), **options)
                            calls[name]()
                        except Exception as error:
                            calls.pop(name, None)
                            if name == "flashjit":
                                raise
                            print(f"  {name} refuses d{dim} {length}: {str(error).splitlines()[0][:120]}")
                    products = 4 * TOKENS * length * HIDDEN / (2 if causal else 1)
                    for name, ms in interleaved_ms(calls, 30).items():
                        add(
                            {
                                "head_dim": dim,
                                "causal": causal,
                                "seqlen": length,
                                "method": name,
                                "us": f"{1e3 * ms:.1f}",
                                "tflops": f"{products / ms / 1e9:.0f}",
                            }
                        )


def speed_table(rows):
    """TFLOP/s by head dimension and length, full and causal."""
    names = [
        name
        for name in ("flashjit bf16", "flashjit", "fa3", "cudnn")
        if any(row["method"] == name for row in rows)
    ]
    lines = []
    for dim in DIMS:
        for length in SPEED_LENGTHS:
            of = {
                (row["method"], row["causal"]): row["tflops"]
                for row in rows
                if (row["head_dim"], row["seqlen"]) == (dim, length)
            }
            if of:
                lines.append(
                    [
                        f"d{dim}, {length // 1024}k",
                        *(", ".join(of.get((name, causal), "-") for causal in MASKS) for name in names),
                    ]
                )
    return markdown(["TFLOP/s, full, causal", *names], lines)


def beyond(rows):
    """The rows of flashjit's 8 bits whose kernels make more than P's rounding."""
    return [
        row
        for row in rows
        if row["method"] in ("flashjit", "flashjit hadamard") and float(row["kernel"]) > KERNEL_LIMIT
    ]


def table(rows):
    """The table of d128: relative errors x 1e-3, by inputs, mask and length."""
    names = [
        name
        for name in (
            "flashjit bf16",
            "inputs",
            "flashjit",
            "fa3",
            "cudnn",
            "inputs hadamard",
            "flashjit hadamard",
            "fa3 hadamard",
        )
        if any(row["method"] == name for row in rows)
    ]
    lines = []
    for kind in INPUTS:
        for causal in MASKS:
            for length in LENGTHS:
                of = {
                    row["method"]: row
                    for row in rows
                    if (row["inputs"], row["head_dim"], row["causal"], row["seqlen"])
                    == (kind, 128, causal, length)
                }
                if of:
                    lines.append(
                        [
                            f"{kind}, {'causal' if causal else 'full'}, {length // 1024}k",
                            *(f"{float(of[name]['rel']) * 1e3:.1f}" if name in of else "" for name in names),
                        ]
                    )
    return markdown(["d128, x 1e-3", *names], lines)


def draw(rows, path):
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: the picture stays as it is")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(INPUTS), figsize=(14, 4), sharey=True)
    for axis, kind in zip(axes, INPUTS):
        for name, colour in COLOURS.items():
            points = sorted(
                (row["seqlen"], float(row["rel"]))
                for row in rows
                if row["method"] == name and (row["inputs"], row["head_dim"], row["causal"]) == (kind, 128, 1)
            )
            if points:
                axis.plot(
                    *zip(*points),
                    label=name,
                    color=colour,
                    marker="o",
                    linestyle="--" if "hadamard" in name else "-",
                )
        axis.set(title=f"{kind} inputs, d128, causal", xscale="log", yscale="log", xlabel="keys")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative RMS error of O")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write_pages():
    """Writes the pages whose files are there."""
    if os.path.exists(FILE):
        rows = read(FILE)
        draw(rows, PICTURE)
        replace(
            PAGE,
            "eight_bits",
            f"{table(rows)}\n\n![Errors over the length](../bench/results/{os.path.basename(PICTURE)})",
        )
    if os.path.exists(SPEED_FILE):
        replace(SPEED_PAGE, "speed", speed_table(read(SPEED_FILE)))
    return 0


def main():
    options = page_parser(__doc__)
    options.add_argument("--speed", action="store_true", help="measure speeds instead of errors")
    options.add_argument(
        "--inputs", choices=INPUTS, help="errors of these inputs alone; the file keeps its rows of others"
    )
    given = options.parse_args()
    if given.tables:
        return write_pages()
    if torch is None or not torch.cuda.is_available():
        print("eight_bits: this needs PyTorch and a GPU")
        return 3
    package_over(given.lib)
    with tempfile.TemporaryDirectory() as folder:
        path = (SPEED_FILE if given.speed else FILE) if given.csv else os.path.join(folder, "measured.csv")
        if given.speed:
            measure_speeds(path)
            wrong = []
        else:
            kept = [row for row in read(FILE) if row["inputs"] != given.inputs] if given.inputs else []
            measure(path, [given.inputs] if given.inputs else INPUTS, kept)
            wrong = beyond(read(path))
    for row in wrong:
        print(f"beyond {KERNEL_LIMIT:.4f}:", *row.values())
    if given.csv:
        write_pages()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

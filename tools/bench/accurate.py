"""What attention(accurate=True) and accurate="fp32" give and cost, on one GPU: errors of the gradients next to PyTorch's, and time.

    python3 tools/bench/accurate.py --lib build/libflashjit.so --csv   # measures, and writes the files and the page
    python3 tools/bench/accurate.py --tables                           # writes the page again, without a GPU

The files are tools/bench/results/h200_accurate.csv and h200_accurate_time.csv, the page two tables of tools/docs/accuracy.md.
Exit code: 0, 3 where there is no GPU or PyTorch.
"""

import itertools
import math
import os
import statistics
import sys

import accuracy
from accuracy import F, torch
from plot_rows import (
    RESULTS,
    commits,
    listed,
    markdown,
    package_over,
    page_parser,
    read,
    replace,
    short,
    values,
)

LIBRARIES = ("flashjit", "accurate", "accurate fp32", "FlashAttention-2", "cuDNN", "eager", "eager fp32")
OPTIONS = {"plain": False, "accurate": True, "fp32": "fp32"}
INPUTS = ("normal", "strong key", "squared scores", "outliers", "common offset")
DRAWS, ROUNDS, CALLS = 6, 15, 10
FILE, TIMES = (os.path.join(RESULTS, f"h200_accurate{part}.csv") for part in ("", "_time"))
SHAPES = [
    (dim, causal, seqlen, 16384 // seqlen)
    for dim, causal, seqlen in itertools.product((64, 128), (0, 1), (2048, 8192))
]


def squared(score, b, h, q, kv):
    return score * score


def inputs_of(case, seed):
    """Q, K, V and dO; squared scores have a strong key, whose score is then about 5 above the logarithm of the others' sum."""
    if case.inputs != "squared scores":
        return accuracy.draw(case, seed)
    torch.manual_seed(seed)
    shape = (1, case.heads, case.seqlen, case.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda") for _ in range(4))
    direction = F.normalize(torch.randn(case.head_dim, device="cuda"), dim=0)
    k[:, :, 7] = direction * 3 * math.sqrt(case.head_dim)
    q += direction * math.sqrt(math.log(case.seqlen) + 8) / 3
    return [x.to(getattr(torch, case.dtype)) for x in (q, k, v, dout)]


def eager(case, dtype=None):
    """The formula in PyTorch, in the type of the inputs or in `dtype`, and rounded to that of the inputs."""

    def attention(q, k, v):
        of_call = q.dtype
        q, k, v = (x.to(dtype or of_call) for x in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(case.head_dim)
        if case.inputs == "squared scores":
            scores = scores * scores
        out = torch.softmax(scores, 3) @ v
        return out if dtype == torch.float64 else out.to(of_call)

    return attention


def measure(case, ours):
    """{library: {tensor: (RMS error, largest error)}} as accuracy.measure() has them."""
    score = {"score_mod": squared} if case.inputs == "squared scores" else {}
    functions = {
        "flashjit": lambda q, k, v: ours(q, k, v, **score),
        "accurate": lambda q, k, v: ours(q, k, v, accurate=True, **score),
        "accurate fp32": lambda q, k, v: ours(q, k, v, accurate="fp32", **score),
        "eager": eager(case),
        "eager fp32": eager(case, torch.float32),
    }
    if not score:
        functions |= {name: accuracy.peer(case, backend) for name, backend in accuracy.PEERS.items()}
    errors = accuracy.Errors()
    for seed in range(DRAWS):
        q, k, v, dout = inputs_of(case, seed)
        want = accuracy.gradients(eager(case, torch.float64), *(x.double() for x in (q, k, v)), dout.double())
        for name, function in functions.items():
            errors.add(name, accuracy.gradients(function, q, k, v, dout), want)
    return errors.over(DRAWS)


def milliseconds(function):
    """The median over rounds of calls that the host queues behind a wait of the GPU."""
    found = []
    function()
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        begin.record()
        for _ in range(CALLS):
            function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(found)


def times(ours, dim, causal, seqlen, batch):
    """{(pass, option): ms} of forward passes that autograd records, and of backward passes."""
    torch.manual_seed(1)
    shape = (batch, 16, seqlen, dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = {}
    for option in [*OPTIONS] * 2:
        call = lambda: ours(q, k, v, causal=bool(causal), accurate=OPTIONS[option])  # noqa: B023
        out = call()
        backward = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: B023
        for name, function in (("forward", call), ("backward", backward)):
            took = milliseconds(function)
            found[name, option] = min(took, found.get((name, option), took))
    return found


# --- the page ---


def error_table(rows):
    """RMS errors of dQ and dK, of the head dimension in which they are larger."""
    worst = {}
    for row in rows:
        cells = worst.setdefault((row["inputs"], row["dtype"]), {})
        key = row["library"], row["tensor"]
        cells[key] = max(float(row["rms"]), cells.get(key, 0.0))
    header, lines = ["x 1e-3: dQ, dK", *LIBRARIES], []
    for (inputs, dtype), cells in sorted(worst.items(), key=lambda one: (INPUTS.index(one[0][0]), one[0][1])):
        shown = [
            ", ".join(f"{1e3 * cells[name, tensor]:.2f}" for tensor in ("dQ", "dK"))
            if (name, "dQ") in cells
            else "-"
            for name in LIBRARIES
        ]
        lines.append([f"{inputs}, {dtype}", *shown])
    return f"{markdown(header, lines)}\n\n{origin(rows)}, PyTorch {listed(values(rows, 'torch'))}."


def time_table(rows):
    lines = []
    for row in rows:
        cells = [f"d{row['head_dim']}, {short(row['seqlen'])}, {'causal' if row['causal'] else 'full'}"]
        for name in ("forward", "backward"):
            plain = float(row[f"{name}_plain_ms"])
            times = [row.get(f"{name}_{option}_ms") for option in ("accurate", "fp32")]
            cells += [f"{plain:.3f}", *(f"{float(ms) / plain:.2f}" if ms else "-" for ms in times)]
        lines.append(cells)
    names = [
        f"{name}, {part}" for name in ("forward", "backward") for part in ("ms", "accurate", "accurate fp32")
    ]
    return f"{markdown(['16k rows of 16 heads', *names], lines)}\n\n{origin(rows)}."


def origin(rows):
    """The device, the date and, where the file has it, the commit."""
    about = ", ".join(listed(values(rows, name)) for name in ("device", "date"))
    return f"{about}, {commits(rows)}" if "commit" in rows[0] else about


def write_page():
    replace(accuracy.PAGE, "accurate", error_table(read(FILE)))
    replace(accuracy.PAGE, "accurate_time", time_table(read(TIMES)))


def main():
    arguments = page_parser(__doc__).parse_args()
    if arguments.tables:
        write_page()
        return 0
    if torch is None or not torch.cuda.is_available():
        print("accurate: PyTorch and a GPU are needed", file=sys.stderr)
        return 3
    flashjit = package_over(arguments.lib)
    rows = []
    for inputs, dtype, dim in itertools.product(INPUTS, ("bfloat16", "float16"), (64, 128)):
        case = accuracy.Case(inputs, dtype, dim, 0)
        errors = measure(case, flashjit.attention)
        rows += accuracy.rows_of(case, errors)
        print(
            case, {name: [f"{of[t][0]:.2e}" for t in ("dQ", "dK")] for name, of in errors.items()}, flush=True
        )
    timed = []
    for dim, causal, seqlen, batch in SHAPES:
        found = times(flashjit.attention, dim, causal, seqlen, batch)
        row = dict(head_dim=dim, causal=causal, batch=batch, heads=16, seqlen=seqlen)
        timed.append(row | {f"{name}_{option}_ms": f"{ms:.4f}" for (name, option), ms in found.items()})
        print(timed[-1], flush=True)
    if arguments.csv:
        accuracy.write_file(rows, FILE, arguments.commit)
        accuracy.write_file(timed, TIMES, arguments.commit)
        write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())

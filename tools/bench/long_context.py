"""One attention, forward and backward, from 1k tokens to as many as the GPU's memory holds, with flashjit and with each of
PyTorch's backends: time and peak memory side by side.

    python3 tools/bench/long_context.py --causal --csv long_context.csv --png long_context.png

Lengths double. A backend that runs out of memory, fails, or would run past a time limit says so and why in the table, and is
not tried again; a kernel that fails in a way that ends this process's use of the GPU ends the table. As memory grows with
heads times length, and time with heads times length squared, the wider layer ends sooner: that of a model with 70 billion
parameters, --hidden 8192, fills 80 GB before 512k tokens, in some two minutes altogether. A narrow one goes on for longer
than anyone waits: --hidden 1024 to 2M tokens, a minute and more each. What had no time can be done later, also for flashjit
alone:

    python3 tools/bench/long_context.py --causal --csv long_context.csv --png long_context.png \\
        --resume --backends flashjit --seconds 400

Peak memory is that of the attention: its inputs, outputs, gradients and what the backend needs meanwhile, without what
PyTorch keeps for cuBLAS from its first use on. Each result's last rows, of O and of dQ, are checked against fp32. Needs a
GPU; --device cpu --last 512 runs a small one through the CPU reference, to see that all is wired up. Exit code: 1 where
flashjit failed or a result is wrong.
"""

import argparse
import contextlib
import csv
import statistics
import sys
import time
from typing import NamedTuple

import flashjit
import flashjit.torch
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flashjit": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
COLUMNS = (
    "device",
    "head_dim",
    "heads",
    "causal",
    "seqlen",
    "backend",
    "status",
    "ms",
    "tflops",
    "peak_mib",
    "note",
)
CHECKED_ROWS = 16
ERROR_LIMIT = 0.03  # of the rows' norm: what bf16 leaves, with a margin
LOST = "lost the GPU"
REPEAT_SECONDS = 0.3
LONG_SECONDS = 4  # a first run that takes longer counts: what a backend prepares in it is little then


class Problem:
    """The inputs of one length, and what the backends have to compute."""

    def __init__(self, options, dim, length):
        self.causal, self.device = options.causal, torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        heads = options.hidden // dim
        make = lambda: torch.randn(1, heads, length, dim, device=self.device, dtype=self.dtype)
        torch.manual_seed(length)
        self.q, self.k, self.v = (make().requires_grad_() for _ in range(3))
        self.dout = make()

    def flops(self):
        """Operations of both passes: 2 products forward and 5 backward, over the pairs that attend."""
        _, heads, length, dim = self.q.shape
        return 7 * 2 * heads * length * length * dim / (2 if self.causal else 1)

    def run(self, backend):
        """(O, dQ) of one forward and one backward pass."""
        with contextlib.nullcontext() if BACKENDS[backend] is None else sdpa_kernel(BACKENDS[backend]):
            attention = (
                flashjit.torch.scaled_dot_product_attention
                if backend == "flashjit"
                else F.scaled_dot_product_attention
            )
            out = attention(self.q, self.k, self.v, is_causal=self.causal)
        dq, _, _ = torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)
        return out.detach(), dq

    def error(self, out, dq):
        """The larger relative error of the last rows of O and of dQ."""
        return max(self._error_of_head(head, out, dq) for head in {0, self.q.shape[1] - 1})

    def _error_of_head(self, head, out, dq):
        q, k, v = (x.detach()[0, head].float() for x in (self.q, self.k, self.v))
        q = q[-CHECKED_ROWS:].requires_grad_()
        rows, length = q.shape[0], k.shape[0]
        s = q @ k.T * q.shape[1] ** -0.5
        if self.causal:
            s = s.masked_fill(
                ~torch.ones(rows, length, dtype=torch.bool, device=s.device).tril(length - rows), -torch.inf
            )
        want = torch.softmax(s, 1) @ v
        (want_dq,) = torch.autograd.grad(want, q, self.dout[0, head, -rows:].float())
        relative = lambda got, exact: ((got[0, head, -rows:].float() - exact).norm() / exact.norm()).item()
        return max(relative(out, want.detach()), relative(dq, want_dq))


def timed(device, run):
    """(what run() returns, seconds)."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return result, time.perf_counter() - start


def warm_up(options):
    """Bytes of what is allocated once and stays, such as cuBLAS's memory in this thread and in autograd's: it is in no row.
    Not asked again before a row: autograd's thread may let go of the last row's tensors a little late."""
    problem = Problem(options, options.dims[0], 64)
    problem.error(*problem.run("math"))
    return torch.cuda.memory_allocated() if options.device == "cuda" else 0


def reserve(device, mib):
    """Raises torch.OutOfMemoryError where so much memory is not to be had."""
    torch.empty(int(mib * 2**20), dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()


def measure(options, backend, dim, length):
    """The table's entry for one backend and one length. Raises what the backend raises."""
    on_gpu = options.device == "cuda"
    problem = Problem(options, dim, length)
    if on_gpu:
        if backend == "flashjit":  # so that a first run, which may be the only one, does not compile
            flashjit.torch.prepare(problem.q, problem.k, problem.v, backward=True, causal=problem.causal)
        torch.cuda.reset_peak_memory_stats()
    (out, dq), first = timed(problem.device, lambda: problem.run(backend))
    peak = (torch.cuda.max_memory_allocated() - options.kept_bytes) / 2**20 if on_gpu else None
    error = problem.error(out, dq)
    del out, dq
    again = lambda: timed(problem.device, lambda: problem.run(backend) and None)[1]
    once = again() if first < LONG_SECONDS else first
    middle = statistics.median([again() for _ in range(min(20, int(REPEAT_SECONDS / once)))] or [once])
    return {
        "status": "ok" if error < ERROR_LIMIT else "wrong",
        "ms": middle * 1e3,
        "peak_mib": peak,
        "tflops": problem.flops() / middle / 1e12,
        "note": f"error {error:.1e}",
    }


class Before(NamedTuple):
    """The length that a backend goes on with, and what half of it took."""

    length: int
    seconds: float = 0.0
    mib: float = 0.0


def one_line(error):
    return " ".join(str(error).split())[:200]


def attempt(options, backend, dim, before, end):
    """measure(), or why there is nothing to measure. end: when all must be done, by time.perf_counter()."""
    least_mib = 2 * before.mib
    seconds = 4 * before.seconds * (2 if 4 * before.seconds < LONG_SECONDS else 1)
    try:
        if least_mib:  # before time goes into a forward pass whose backward pass does not fit
            reserve(options.device, least_mib)
        if seconds > options.each or time.perf_counter() + seconds > end:
            return {"status": "no time", "note": f"would take about {seconds:.0f} s" if seconds else ""}
        return measure(options, backend, dim, before.length)
    except torch.OutOfMemoryError as error:
        needs = f"needs {least_mib / 1024:.1f} GiB or more: " if least_mib else ""
        result = {
            "status": "out of memory",
            "note": needs + one_line(error).partition(" Of the allocated")[0],
        }
    except Exception as error:  # noqa: BLE001  (whatever a backend does is a row of the table)
        result = {"status": "failed", "note": one_line(error)}
    # Here the exception does not hold the tensors.
    return result if gpu_goes_on(options.device) else {**result, "status": LOST}


def gpu_goes_on(device):
    """False after an error in a kernel, which ends the use of the GPU by this process."""
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def starts(options, table):
    """What each head dimension and backend begins with. table: rows of an earlier run, after which those go on that had no
    time."""
    begin = {(dim, backend): Before(options.first) for backend in options.backends for dim in options.dims}
    for row in table:
        at = row["head_dim"], row["backend"]
        if at in begin and row["status"] == "ok":
            begin[at] = Before(2 * row["seqlen"], row["ms"] / 1e3, row.get("peak_mib", 0.0))
        elif at in begin and row["status"] != "no time":
            del begin[at]
    return begin


def rows(options, table=()):
    """Rows of the table, shortest lengths first, until no backend goes on."""
    end = time.perf_counter() + options.seconds
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    going = starts(options, table)
    while (
        length := min((before.length for before in going.values()), default=options.last + 1)
    ) <= options.last:
        for (dim, backend), before in list(going.items()):
            if before.length > length:
                continue
            result = attempt(options, backend, dim, before, end)
            yield {
                "device": name,
                "head_dim": dim,
                "heads": options.hidden // dim,
                "causal": int(options.causal),
                "seqlen": length,
                "backend": backend,
                **result,
            }
            if result["status"] == LOST:
                return
            if result["status"] in ("ok", "wrong"):
                going[dim, backend] = Before(2 * length, result["ms"] / 1e3, result["peak_mib"] or 0.0)
            else:
                del going[dim, backend]


def kept(options):
    """Rows of an earlier run's table, which are not measured again."""
    if not options.resume:
        return []
    again = {(dim, backend) for dim in options.dims for backend in options.backends}
    return [
        row
        for row in read(options.csv)
        if row["status"] != "no time" or (row["head_dim"], row["backend"]) not in again
    ]


def show(row):
    value = lambda name, digits, unit: (
        f"{row[name]:12,.{digits}f} {unit}" if row.get(name) is not None else " " * 16
    )
    print(
        f"d{row['head_dim']:<4} {row['seqlen']:>9,}  {row['backend']:9} {row['status']:14} {value('ms', 2, 'ms ')}"
        f" {value('tflops', 1, 'TF ')} {value('peak_mib', 0, 'MiB')}  {row.get('note', '')}",
        flush=True,
    )


def read(path):
    """The table that --csv wrote."""
    kinds = {
        "head_dim": int,
        "heads": int,
        "causal": int,
        "seqlen": int,
        "ms": float,
        "tflops": float,
        "peak_mib": float,
    }
    with open(path, newline="") as file:
        return [
            {name: kinds.get(name, str)(x) for name, x in row.items() if x} for row in csv.DictReader(file)
        ]


def tokens(length):
    return f"{length / 1024:g}k" if length < 2**20 else f"{length / 2**20:g}M"


def label(table, dim, backend):
    """The backend's name, and where and why it ended."""
    name = {"flash": "PyTorch: FlashAttention-2", "cudnn": "PyTorch: cuDNN", "math": "PyTorch: math"}.get(
        backend, backend
    )
    last = [row for row in table if row["head_dim"] == dim and row["backend"] == backend][-1:]
    return name + "".join(
        f" ({row['status']} at {tokens(row['seqlen'])})" for row in last if row["status"] != "ok"
    )


def plot(path, table):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Okabe and Ito's colours, which colour-blind readers can distinguish.
    styles = {
        "flashjit": ("#0072B2", "o", 3),
        "flash": ("#009E73", "^", 1.5),
        "cudnn": ("#D55E00", "s", 1.5),
        "math": ("#000000", "d", 1.5),
    }
    dims = sorted({row["head_dim"] for row in table})
    figure, axes = plt.subplots(2, len(dims), figsize=(5 * len(dims), 7.5), sharex=True, squeeze=False)
    for column, dim in enumerate(dims):
        for axis, what, scale in ((axes[0][column], "ms", 1), (axes[1][column], "peak_mib", 1 / 1024)):
            for backend, (color, marker, width) in styles.items():
                mine = [
                    row
                    for row in table
                    if row["head_dim"] == dim
                    and row["backend"] == backend
                    and row["status"] == "ok"
                    and row.get(what) is not None
                ]
                axis.plot(
                    [row["seqlen"] for row in mine],
                    [row[what] * scale for row in mine],
                    color=color,
                    marker=marker,
                    linewidth=width,
                    markersize=4,
                    label=label(table, dim, backend),
                )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
        axes[0][column].set_title(
            f"head dim {dim}, {table[0]['heads'] * table[0]['head_dim'] // dim} heads, "
            f"{'causal' if table[0]['causal'] else 'full'}"
        )
        axes[0][column].legend(fontsize=8, loc="lower right")
        axes[1][column].set_xlabel("tokens")
        axes[1][column].xaxis.set_major_formatter(lambda x, _: tokens(x))
    axes[0][0].set_ylabel("forward and backward, ms")
    axes[1][0].set_ylabel("peak memory, GiB")
    figure.suptitle(f"One attention on {table[0]['device']}")
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head dimensions")
    parser.add_argument("--hidden", type=int, default=8192, help="heads times head dimension")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--first", type=int, default=1024, help="the shortest length")
    parser.add_argument("--last", type=int, default=2**24, help="no longer than this")
    parser.add_argument(
        "--seconds", type=float, default=150, help="begin nothing that would end later than this"
    )
    parser.add_argument(
        "--each", type=float, default=float("inf"), help="begin no length that would take longer than this"
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument(
        "--resume", action="store_true", help="keep the table in --csv, and go on with what had no time"
    )
    parser.add_argument("--csv", help="write the table here")
    parser.add_argument("--png", help="draw it here; needs matplotlib")
    parser.add_argument(
        "--draw", metavar="CSV", help="measure nothing: draw what --csv wrote, e.g. on another machine"
    )
    options = parser.parse_args()
    if options.draw:
        plot(options.png or options.draw.removesuffix(".csv") + ".png", read(options.draw))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("long_context: PyTorch finds no GPU; --device cpu --last 512 runs without", file=sys.stderr)
        return 77
    if options.resume and not options.csv:
        parser.error("--resume goes on with the table that --csv names")
    table, new = kept(options), []
    options.kept_bytes = warm_up(options)
    with open(options.csv, "w", newline="") if options.csv else contextlib.nullcontext() as file:
        writer = csv.DictWriter(file, COLUMNS) if file else None

        def write(row):
            if writer:  # at once: what is measured stays if a later length ends the process
                writer.writerow({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in row.items()})
                file.flush()

        if writer:
            writer.writeheader()
        for row in table:
            write(row)
        for row in rows(options, table):
            show(row)
            new.append(row)
            write(row)
    table += new
    if options.png:
        plot(options.png, table)
    bad = any(
        row["status"] in ("wrong", LOST) or (row["backend"], row["status"]) == ("flashjit", "failed")
        for row in new
    )
    return 1 if bad or not table else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure what FlashAttention's first paper shows (Dao et al., 2022), from our kernels, on one GPU, in two to three minutes.

Its figure 2: operations, memory traffic and time of standard attention, which writes S and P, beside ours, forward and
backward (GPT-2 medium: 1k tokens, 16 heads of 64, batch 64); time of block-sparse attention over the share of the blocks at 4k. Traffic is counted by ncu, where it is found and allowed
to; else the least that must be moved is computed, and the column traffic says "computed".

The tables of its appendix: fp16, batch 16, 8 heads of 64, lengths 128 to 64k, forward and backward, with dropout, with a
mask of the keys (random lengths, up to 20 keys shorter), with both and with neither, and the memory that both passes need
beyond their inputs; beside PyTorch's math, memory-efficient, FlashAttention-2 and cuDNN. Results without dropout are
checked before they are timed. What does not run has a note: out of memory, or why not.

    python3 tools/bench/paper.py --lib build/libflashjit.so --csv tools/bench/results/h100_paper.csv

writes h100_paper.csv and h100_paper_figure.csv; plot.py draws them. Calls of all libraries are interleaved and the median
counts; a call of more than 0.1 s is timed once. Exit code: as compare.py.
"""

import argparse
import concurrent.futures
import csv
import functools
import glob
import io
import itertools
import os
import shutil
import subprocess
import sys
import time

import compare
import measuring
from measuring import PASSES, F, Ours, Report, SDPBackend, abi, differences, sdpa_kernel, torch

DEVICE = "cuda"
BATCH, HEADS, DIM = 16, 8, 64
LENGTHS = tuple(2**i for i in range(7, 17))
DROPOUT = 0.1
GPT2 = (64, 16, 1024, DIM)  # batch, heads, length and head dimension of the figure's model
SPARSE_LENGTH, DENSITIES = 4096, (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
BACKENDS = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}  # math last: it leaves little memory
NAMES = ("flashjit", *BACKENDS)
SLOW_MS = 100  # one launch of such a call is enough
LONGEST_MS = 4000  # a call that is expected to take longer is not made
ROUNDS_MS = 150  # for all rounds of a measurement
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")
MARKER = "spin_kernel"  # what torch.cuda._sleep() launches

TABLE = [
    "pass",
    "dropout",
    "mask",
    "batch",
    "heads",
    "head_dim",
    "seqlen",
    *(f"{name}_ms" for name in NAMES),
    *(f"{name}_mb" for name in NAMES),
    "notes",
]
FIGURE = [
    "part",
    "who",
    "pass",
    "density",
    "batch",
    "heads",
    "head_dim",
    "seqlen",
    "ms",
    "gigaoperations",
    "device_gb",
    "l2_gb",
    "traffic",
]


class Peer:
    """One problem for a backend of scaled_dot_product_attention. keep: bool, which keys attend; None: all."""

    def __init__(self, backend, q, k, v, dout, keep=None, dropout=0.0):
        self.backend, self.dout, self.keep, self.dropout = backend, dout, keep, dropout
        self.inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        self.out = self.attention()

    def attention(self):
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*self.inputs, attn_mask=self.keep, dropout_p=self.dropout)

    def forward(self):
        with torch.no_grad():
            return self.attention()

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self):
        dq, dk, dv = self.backward()
        return {"out": self.out.detach(), "dq": dq, "dk": dk, "dv": dv}


class Standard(Peer):
    """The paper's algorithm 0: S and P are written to memory."""

    def __init__(self, q, k, v, dout):
        super().__init__(None, q, k, v, dout)

    def attention(self):
        q, k, v = self.inputs
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


def tensors(batch, heads, length, dim):
    """Q, K, V and dO."""
    torch.manual_seed(length + dim)
    return tuple(torch.randn(batch, heads, length, dim, device=DEVICE, dtype=torch.float16) for _ in range(4))


# --- timing and memory ---


def event_ms(function):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def medians(calls):
    """Milliseconds of calls that ran before. calls: name -> function."""
    ms = {name: event_ms(function) for name, function in calls.items()}
    quick = {name: function for name, function in calls.items() if ms[name] < SLOW_MS}
    if quick:
        rounds = ROUNDS_MS / max(sum(ms[name] for name in quick), 1e-3)
        ms.update(measuring.interleaved_ms(quick, max(3, min(int(rounds), 15))))
    return ms


def with_memory(make):
    """A problem after both of its passes, and the most memory that these took, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem = make()
    problem.forward()
    problem.backward()
    torch.cuda.synchronize()
    return problem, (torch.cuda.max_memory_allocated() - before) / 1e6


def why(error):
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else measuring.reason(error)


# --- the tables of the appendix ---


def makers_of(runtime, length, dropout, mask):
    """By name, what makes one problem of a length."""
    q, k, v, dout = tensors(BATCH, HEADS, length, DIM)
    lengths = (
        torch.randint(
            length - 20,
            length + 1,
            (BATCH,),
            dtype=torch.int32,
            generator=torch.Generator().manual_seed(length),
        ).to(DEVICE)
        if mask
        else None
    )
    keep = (torch.arange(length, device=DEVICE) < lengths[:, None])[:, None, None] if mask else None
    spec = f"fp16:d{DIM}" + (":dropout" if dropout else "") + (":kvlen" if mask else "")
    makers = {"flashjit": lambda: Ours(runtime, spec, q, k, v, dout, dropout=dropout, kv_lengths=lengths)}
    for name, backend in BACKENDS.items():
        makers[name] = functools.partial(Peer, backend, q, k, v, dout, keep, dropout)
    return makers


def compile_all(runtime, lengths):
    """All kernels of ours in parallel; what cannot be compiled says so when it is needed."""

    def prepare(job):
        torch.cuda.set_device(0)  # the thread's context
        try:
            runtime.prepare(*job[:2], backward=job[2])
        except Exception:
            pass

    variants = [dropout + mask for dropout in ("", ":dropout") for mask in ("", ":kvlen")]
    jobs = [
        (f"fp16:d{DIM}{variant}", (BATCH, HEADS, HEADS, length, length), backward)
        for length in lengths
        for variant in variants
        for backward in (False, True)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(prepare, jobs))


def first_sequence(results):
    return {name: tensor[:1] for name, tensor in results.items()}


def table_point(runtime, report, dropout, mask, length, expected):
    """Both passes of one length. expected: by name, milliseconds that a backward pass may take; updated to the next length's."""
    label = f"fp16 d{DIM} s{length}" + (f" dropout {dropout}" if dropout else "") + (" mask" if mask else "")
    people, memory, notes = {}, {}, {}
    for name, make in makers_of(runtime, length, dropout, mask).items():
        if expected.get(name, 0) > LONGEST_MS:
            notes[name] = f"not run, about {expected[name] / 1e3:.0f} s a call"
            continue
        try:
            people[name], memory[name] = with_memory(make)
        except Exception as error:
            notes[name] = why(error)
            if name == "flashjit":
                report.failure(f"{label}: {notes[name]}")
        if name in notes:
            torch.cuda.empty_cache()
    reference = people.get("efficient") or people.get("math")
    if not dropout and reference and "flashjit" in people:
        for text in differences(
            first_sequence(people["flashjit"].results()), first_sequence(reference.results())
        ):
            report.failure(f"{label}: {text}")
    for pass_name in PASSES:
        method = "forward" if pass_name == "fwd" else "backward"
        ms = medians({name: getattr(problem, method) for name, problem in people.items()})
        report.row(
            **{"pass": pass_name},
            dropout=dropout,
            mask=int(mask),
            batch=BATCH,
            heads=HEADS,
            head_dim=DIM,
            seqlen=length,
            **{f"{name}_ms": x for name, x in ms.items()},
            **{f"{name}_mb": x for name, x in memory.items() if pass_name == "bwd"},
            notes="; ".join(f"{name}: {note}" for name, note in notes.items()),
        )
        print(
            f"{pass_name} {label:34} ms: " + "  ".join(f"{name} {x:.3f}" for name, x in ms.items()),
            flush=True,
        )
    expected.update({name: 4 * x for name, x in ms.items()})


# --- figure 2 ---


class Case:
    """One point of the figure: what its row says, and a call that was made before."""

    def __init__(self, call, **row):
        self.call, self.row = call, row


def both(problem):
    def call():
        # Peers keep what the forward pass leaves; a model's step computes it.
        problem.forward() if isinstance(problem, Ours) else setattr(problem, "out", problem.attention())
        problem.backward()

    return call


def sizes(batch, heads, length, dim):
    return dict(batch=batch, heads=heads, seqlen=length, head_dim=dim)


def traffic_cases(runtime):
    """Standard attention beside ours, and others'; forward and backward."""
    inputs = tensors(*GPT2)
    batch, heads, length, dim = GPT2
    makers = {
        "standard": functools.partial(Standard, *inputs),
        "flashjit": lambda: Ours(runtime, f"fp16:d{dim}", *inputs),
    }
    for name in ("fa2", "cudnn"):
        makers[name] = functools.partial(Peer, BACKENDS[name], *inputs)
    for name, make in makers.items():
        try:
            call = both(make())
            call()
        except Exception as error:
            print(f"figure 2: {name} does not run: {why(error)}", flush=True)
            continue
        products = 6 if name == "standard" else 7  # S is computed again
        rows, row = batch * heads * length, dim * 2
        least = 11 * rows * length * 2 + 12 * rows * row if name == "standard" else 12 * rows * row
        yield Case(
            call,
            part="standard",
            who=name,
            **{"pass": "both"},
            **sizes(*GPT2),
            gigaoperations=2.0 * products * rows * length * dim / 1e9,
            least_gb=least / 1e9,
        )


def density_cases(runtime):
    """Our two passes at 4k with a share of the blocks, at random, and dense."""
    size = (BATCH, HEADS, SPARSE_LENGTH, DIM)
    inputs = tensors(*size)
    for density in (None, *DENSITIES):
        block_map = None if density is None else compare.scattered_map(SPARSE_LENGTH, density).to(DEVICE)
        parts = "" if density is None else f":map{measuring.BLOCK}x{measuring.BLOCK}"
        problem = Ours(runtime, f"fp16:d{DIM}{parts}", *inputs, block_map)
        call = both(problem)
        call()
        kept = 1.0 if density is None else block_map.float().mean().item()
        yield Case(
            call,
            part="density" if parts else "dense",
            who="flashjit",
            **{"pass": "both"},
            density=kept,
            **sizes(*size),
        )


def run_counted(runtime):
    """What the process under ncu runs: each case behind a marker."""
    cases = list(traffic_cases(runtime))
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for case in cases:
        torch.cuda._sleep(1000)
        case.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def parse_counters(text):
    """Reads ncu's table of kernels (--csv --page raw --print-units base): for each case, bytes by metric."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return []
    sums = []
    for row in csv.DictReader(io.StringIO("\n".join(lines[begin:]))):
        if not row["ID"].isdigit():
            continue  # the units, or a message
        if MARKER in row["Kernel Name"]:
            sums.append(dict.fromkeys(METRICS, 0.0))
        elif sums:
            for metric in METRICS:
                sums[-1][metric] += float(row[metric].replace(",", ""))
    return sums


def find_ncu():
    installed = sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True)
    return next(
        (
            path
            for path in (shutil.which("ncu"), "/usr/local/cuda/bin/ncu", *installed)
            if path and os.path.exists(path)
        ),
        None,
    )


def counters(library, count):
    """The bytes of each case, or nothing and why."""
    ncu = find_ncu()
    if not ncu:
        return [], "there is no ncu"
    command = [
        ncu,
        "--metrics",
        ",".join(METRICS),
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--cache-control",
        "none",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        sys.executable,
        os.path.abspath(__file__),
        "--lib",
        library,
        "--counted",
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = parse_counters(run.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        return [], measuring.reason(error)
    if len(found) == count:
        return found, ""
    text = run.stdout + run.stderr
    denied = next((line for line in text.splitlines() if "ERR_" in line or "==ERROR==" in line), "")
    return [], denied or f"ncu counted {len(found)} of {count} cases: {text.strip().splitlines()[-1:]}"


def traffic(case, counted):
    """The columns of a row."""
    if counted:
        return dict(
            device_gb=(counted[METRICS[0]] + counted[METRICS[1]]) / 1e9,
            l2_gb=counted[METRICS[2]] / 1e9,
            traffic="counted",
        )
    least = case.row.get("least_gb")
    return dict(device_gb=least, traffic="computed") if least else {}


def figure(runtime, report, library):
    cases = list(traffic_cases(runtime))
    for case in cases:
        case.row["ms"] = medians({"": case.call})[""]
    counted_by, missing = counters(library, len(cases)) if library else ([], "not asked for")
    if missing:
        print(f"figure 2: no counters: {missing}", flush=True)
    for case, counted in itertools.zip_longest(cases, counted_by):
        show(report, case, traffic(case, counted))
    del cases, case
    torch.cuda.empty_cache()
    for case in density_cases(runtime):
        case.row["ms"] = medians({"": case.call})[""]
        show(report, case, {})


def show(report, case, more):
    row = {name: value for name, value in {**case.row, **more}.items() if name in FIGURE}
    report.row(**row)
    print(
        "figure 2: "
        + "  ".join(f"{name} {x:.4g}" if isinstance(x, float) else str(x) for name, x in row.items()),
        flush=True,
    )


def tables(runtime, report, lengths, deadline):
    """Length by length, so that what is not reached is the longest of all."""
    variants = list(itertools.product((0.0, DROPOUT), (False, True)))
    expected = {variant: {} for variant in variants}
    for length, variant in itertools.product(lengths, variants):
        if time.monotonic() > deadline:
            report.failure(f"not reached: {length} {variant}; give more --seconds")
            continue
        measuring.guarded(
            report, f"{length} {variant}", table_point, runtime, report, *variant, length, expected[variant]
        )


def main():
    parser = measuring.parser_of(
        __doc__, csv="write the tables here, and the figure next to it: *_figure.csv"
    )
    parser.add_argument(
        "--seconds", type=float, default=170, help="begin no length after that (default %(default)s)"
    )
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(word) for word in text.split(",")],
        default=LENGTHS,
        metavar="N,...",
        help="of the tables (default 128 to 65536)",
    )
    parser.add_argument(
        "--only", choices=("figure", "tables"), help="one of them alone; the other's file stays as it is"
    )
    parser.add_argument("--no-counters", action="store_true", help="compute the traffic, and run no ncu")
    parser.add_argument(
        "--counted", action="store_true", help=argparse.SUPPRESS
    )  # this is the process under ncu
    arguments = parser.parse_args()
    begin = time.monotonic()
    if measuring.without_gpu("paper"):
        return 3
    torch.zeros(1, device=DEVICE)
    measuring.use_library(arguments.lib)
    runtime = abi.Runtime()
    if arguments.counted:
        run_counted(runtime)
        return 0
    constants = measuring.constants_of(arguments)
    print(
        f"{constants['device']}, flashjit {constants['commit']}, PyTorch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}"
    )
    path = lambda name, suffix: (
        suffix.join(os.path.splitext(arguments.csv))
        if arguments.csv and arguments.only in (None, name)
        else None
    )
    drawn = Report(path("figure", "_figure"), list(constants) + FIGURE, constants)
    table = Report(path("tables", ""), list(constants) + TABLE, constants)
    if arguments.only != "tables":
        measuring.guarded(
            drawn, "figure 2", figure, runtime, drawn, None if arguments.no_counters else arguments.lib
        )
    if arguments.only != "figure":
        compile_all(runtime, arguments.lengths)
        tables(runtime, table, arguments.lengths, begin + arguments.seconds)
    print(f"{time.monotonic() - begin:.0f} s")
    return measuring.ended(drawn, table)


if __name__ == "__main__":
    sys.exit(main())

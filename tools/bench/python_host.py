"""What a Python call costs on the CPU in steady state, flashjit's next to PyTorch's own, and what the import costs.

    build/tools/flashjit_host_bench --benchmark_out=host_costs.csv --benchmark_out_format=csv
    python3 tools/bench/python_host.py --cpp host_costs.csv --csv tools/bench/results/h200_host.csv

Small problems, so that the GPU never delays the host, and a short queue. Rows are interleaved, ten calls each, because a loop
repeats a call; medians count. Two rows are parts of flashjit.attention(): its one
allocation, and the library's launch with its arguments filled in, which ctypes calls. Rows with the backward pass have beside them a
torch.autograd.Function in Python that allocates and saves the same and launches nothing, four calls one behind the other, where
PyTorch's threads change once too, and the same in one thread. --without-gpu leaves the launch out, on CPU tensors: what remains is
Python's share, for profiling. GOALS_US has the goals of rows on an H100's host; the import takes 60 ms at most beyond PyTorch's.
Goals that are missed are named; with --goals the exit code is then 1.
--drop-ins compares the functions that replace other libraries' with flashjit.attention() of the same tensors. Exit code: 1 if one
costs more than 5 us beside it.
--cpp adds the rows of host_costs.cpp, which needs no Python, to the same table.
"""

import argparse
import csv
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock

import flashjit
import flashjit.torch
import torch
import torch.nn.functional as F
from flashjit import _front, _kept_plans, _launch, _plans, flash_attn
from measuring import commit_name
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda

GOALS_US = {
    "flashjit.attention": 12,
    "flashjit.bind, its call": 6,
    "flash_attn_varlen_func": 16,
    "flash_attn_with_kvcache, pages": 16,
    "flashjit.attention, with backward": 150,
}
GOAL_IMPORT_S, GOAL_DROP_IN_US = 0.06, 5
BURST = 10  # calls of a row, one after the other
IMPORT = "import time, torch; start = time.perf_counter(); import flashjit, flashjit.torch; print(time.perf_counter() - start)"


def launch_alone(q, k, v):
    """The library's function, called by ctypes; on the CPU nothing."""
    launches = []
    with unittest.mock.patch.object(_plans, "launch", lambda *launch: launches.append(launch)):
        out = flashjit.attention(q, k, v, causal=True)
    function, spec, words, index = launches[0]
    if index < 0:
        return lambda: None
    shared, (address, _) = _launch.runtime().address, words.buffer_info()
    launch, stream = _launch._launchers[function], torch._C._cuda_getCurrentRawStream(index)
    return lambda: (launch(shared, spec.address, address, stream), words, out)


class OfSameMemory(torch.autograd.Function):
    """Allocates and saves what attention() does, and launches nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        new = _empty_strided_cuda if q.is_cuda else _empty_strided_cpu
        out = new(tuple(q.shape), q.stride(), q.dtype)
        lse = new(tuple(q.shape[:3]), (q.shape[1] * q.shape[2], q.shape[2], 1), torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        new = _empty_strided_cuda if dout.is_cuda else _empty_strided_cpu
        q, k, v, _, lse = ctx.saved_tensors
        new((q.numel() + lse.numel(),), (1,), torch.float32)  # the workspace
        return tuple([new(tuple(x.shape), x.stride(), x.dtype) for x in (q, k, v)])


def with_backward(leaves, dout):
    """Both passes of each attention, by name; see the top."""
    of_same_memory = lambda q, k, v, **options: OfSameMemory.apply(q, k, v)
    attentions = {
        "flashjit.attention": (flashjit.attention, dict(causal=True)),
        "torch sdpa": (F.scaled_dot_product_attention, dict(is_causal=True)),
        "of the same memory": (of_same_memory, {}),
    }

    def step(attention, options, layers=1, threads=True):
        inputs = leaves if layers == 1 else leaves[:1]  # whose gradients are not summed up
        others = leaves[1:] if layers == 1 else [x.detach() for x in leaves[1:]]

        def call():
            torch._C._set_multithreading_enabled(threads)
            out = leaves[0]
            for _ in range(layers):
                out = attention(out, *others, **options)
            torch.autograd.grad(out, inputs, dout)
            torch._C._set_multithreading_enabled(True)

        return call

    rows = {f"{name}, with backward": step(*given) for name, given in attentions.items()}
    rows |= {f"{name}, with backward, four": step(*given, 4) for name, given in attentions.items()}
    return rows | {
        f"{name}, with backward, one thread": step(*given, 1, False) for name, given in attentions.items()
    }


def calls(device):
    """The measured calls, by name: what the host does is timed, not what the GPU does."""
    dtype = torch.bfloat16
    q, k, v = (torch.randn(2, 4, 128, 64, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    slopes = torch.rand(4, device=device)
    alibi = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
    program = flashjit.trace(alibi)
    document = torch.arange(128, device=device) // 32
    documents = flashjit.trace(mask_mod=lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx])
    lists = flashjit.TileLists(q, k, v, mask_mod=documents)
    bound, out = flashjit.bind(q, k, v, causal=True), torch.empty_like(q)
    packed = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]
    offsets = torch.tensor([0, 100, 256], dtype=torch.int32, device=device)
    decoded, *pages = (
        x.contiguous() for x in (q[:, :, :1].transpose(1, 2), *(p.view(16, 16, 4, 64) for p in (k, v)))
    )
    cache = dict(
        block_table=torch.arange(16, dtype=torch.int32, device=device).view(2, 8),
        cache_seqlens=torch.tensor([100, 128], dtype=torch.int32, device=device),
    )
    table = dict(page_table=cache["block_table"], kv_lengths=cache["cache_seqlens"])
    decode = [x.transpose(1, 2) for x in (decoded, *pages)]
    bound_decode = flashjit.bind(*decode, causal=True, **table)

    return {
        "flashjit.attention": lambda: flashjit.attention(q, k, v, causal=True),
        "its allocation alone": lambda: torch.empty(q.shape, dtype=dtype, device=device),
        "its launch alone": launch_alone(q, k, v),
        "torch sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "flashjit.bind, its call": lambda: bound(q, k, v),
        "flashjit.bind, its call, out": lambda: bound(q, k, v, out=out),
        "flashjit.bind, its call over pages": lambda: bound_decode(*decode, **table),
        "flashjit.attention over pages": lambda: flashjit.attention(*decode, causal=True, **table),
        "flash_attn_varlen_func": lambda: flash_attn.flash_attn_varlen_func(
            *packed, offsets, offsets, 156, 156, causal=True
        ),
        "flash_attn_with_kvcache, pages": lambda: flash_attn.flash_attn_with_kvcache(
            decoded, *pages, causal=True, **cache
        ),
        "flashjit.torch.scaled_dot_product_attention": lambda: flashjit.torch.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
        "flashjit.attention, traced score_mod": lambda: flashjit.attention(q, k, v, score_mod=program),
        "flashjit.attention, score_mod": lambda: flashjit.attention(q, k, v, score_mod=alibi),
        "flashjit.attention, documents": lambda: flashjit.attention(q, k, v, mask_mod=documents),
        "flashjit.attention, documents, lists": lambda: flashjit.attention(
            q, k, v, mask_mod=documents, lists=lists
        ),
        "flashjit.attention, recorded": lambda: flashjit.attention(*leaves, causal=True),
        "torch sdpa, recorded": lambda: F.scaled_dot_product_attention(*leaves, is_causal=True),
        **with_backward(leaves, dout),
    }


def drop_ins(device):
    """(a drop-in's call, the same by flashjit.attention() in its layout) by name."""
    from flashjit._diffusers import attention_forward as of_diffusers
    from flashjit._transformers import attention_forward as of_transformers
    from flashjit.flex_attention import create_block_mask, flex_attention

    attention = flashjit.attention
    q, k, v = (torch.randn(2, 4, 128, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]  # [batch, length, heads, dim]
    packed = [x.flatten(0, 1) for x in rows]
    lengths = torch.tensor([0, 100, 256], dtype=torch.int32, device=device)
    named = dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=156, max_seqlen_kv=156)
    slopes = torch.rand(4, device=device)
    alibi = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 128, 128, device=device)
    window = "kv <= q + seqlen_kv - seqlen_q + right && kv >= q + seqlen_kv - seqlen_q - left"
    module = torch.nn.Module()
    module.config, module.is_causal = argparse.Namespace(output_attentions=False), True

    def of_rows(q, k, v, **options):
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)

    def of_packed(q, k, v, **options):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attention(q, k, v, **options)[0].transpose(0, 1)

    views = [x.transpose(1, 2) for x in rows]  # as transformers' models give them
    return {
        "scaled_dot_product_attention": (
            lambda: flashjit.torch.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: attention(q, k, v, causal=True),
        ),
        "flash_attn_func": (
            lambda: flash_attn.flash_attn_func(*rows, causal=True),
            lambda: of_rows(*rows, causal=True),
        ),
        "flash_attn_func, window": (
            lambda: flash_attn.flash_attn_func(*rows, causal=True, window_size=(9, 0)),
            lambda: of_rows(*rows, mask_mod=window, captures={"left": 9, "right": 0}),
        ),
        "flash_attn_varlen_func": (
            lambda: flash_attn.flash_attn_varlen_func(*packed, lengths, lengths, 156, 156, causal=True),
            lambda: of_packed(*packed, causal=True, **named),
        ),
        "flex_attention": (lambda: flex_attention(q, k, v), lambda: attention(q, k, v)),
        "flex_attention, score_mod": (
            lambda: flex_attention(q, k, v, alibi),
            lambda: attention(q, k, v, score_mod=alibi),
        ),
        "flex_attention, block_mask": (
            lambda: flex_attention(q, k, v, None, mask),
            lambda: attention(q, k, v, block_mask=mask),
        ),
        "transformers": (
            lambda: of_transformers(module, *views, None, scaling=0.125)[0],
            lambda: attention(*views, causal=True, scale=0.125).transpose(1, 2).contiguous(),
        ),
        "diffusers": (
            lambda: of_diffusers(query=rows[0], key=rows[1], value=rows[2]),
            lambda: of_rows(*rows),
        ),
    }


def print_drop_ins(device, rounds, wait):
    """Whether each costs at most the goal."""
    pairs = drop_ins(device)
    table = medians(
        {(name, i): call for name, pair in pairs.items() for i, call in enumerate(pair)}, rounds, wait
    )
    costs = {name: (table[name, 0], table[name, 1]) for name in pairs}
    print(f"{'':30} {'drop-in':>9} {'attention':>9} {'more':>6}")
    for name, (drop_in, attention) in costs.items():
        print(f"{name:30} {drop_in:6.2f} us {attention:6.2f} us {drop_in - attention:6.2f}")
    return max(drop_in - attention for drop_in, attention in costs.values()) <= GOAL_DROP_IN_US


def medians(rows, rounds, wait):
    """Microseconds by name."""
    costs = {name: [] for name in rows}
    warm_up = 5
    for i in range(rounds // BURST + warm_up):
        for name, call in rows.items():
            for _ in range(BURST):
                start = time.perf_counter_ns()
                call()
                costs[name].append(time.perf_counter_ns() - start)
            wait()
    return {name: statistics.median(times[warm_up * BURST :]) / 1e3 for name, times in costs.items()}


def import_seconds():
    """Seconds to import flashjit after PyTorch; the best of five processes, with the bytecode that pip writes when it installs."""
    with tempfile.TemporaryDirectory() as folder:
        bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        run = lambda: float(
            subprocess.run(
                [sys.executable, "-c", IMPORT],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, **bytecode},
            ).stdout
        )
        return min(run() for _ in range(5))


def read_cpp(path):
    """(name, microseconds) of Google Benchmark's CSV, which begins with lines about the machine."""
    with open(path, newline="") as file:
        lines = file.read().splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("name,")), None)
    if start is None:
        sys.exit(f"python_host: {path} has no line of columns: make it with --benchmark_out_format=csv")
    scale = {"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6}
    return [
        ("C++ " + row["name"], float(row["real_time"]) * scale[row["time_unit"]])
        for row in csv.DictReader(lines[start:])
        if row["real_time"]
    ]


def write(path, device, commit, rows):
    """rows: (what, value, unit)."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["date", "device", "commit", "what", "value", "unit"])
        writer.writerows([date, device, commit, *row] for row in rows)


def leave_the_launch_out():
    _plans.launch = lambda function, spec, words, index: None
    _front.address_of = lambda function, index: 0
    _front.are_checked = lambda plan, fixed: False
    _kept_plans.check_tensors = lambda *tensors: None  # which on the CPU every call does


def profile(call):
    import cProfile
    import pstats

    with cProfile.Profile() as profiler:
        for _ in range(20000):
            call()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without-gpu", action="store_true", help="leave the launch out, on CPU tensors")
    parser.add_argument(
        "--drop-ins",
        action="store_true",
        help="what other libraries' functions cost more than flashjit.attention()",
    )
    parser.add_argument("--goals", action="store_true", help="exit code 1 if a goal is missed")
    parser.add_argument("--profile", metavar="ROW", help="profile this row instead")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--cpp", metavar="CSV", help="what flashjit_host_bench wrote: more rows of the table")
    parser.add_argument("--csv", help="write the table here")
    parser.add_argument("--commit", default=None, help="what the CSV calls this version (default: git's)")
    options = parser.parse_args()
    if not options.without_gpu and not torch.cuda.is_available():
        print("python_host: PyTorch finds no GPU; --without-gpu leaves the launch out", file=sys.stderr)
        return 77
    torch.manual_seed(0)
    if options.without_gpu:
        leave_the_launch_out()
    if options.drop_ins:
        device, wait = ("cpu", lambda: None) if options.without_gpu else ("cuda", torch.cuda.synchronize)
        return 0 if print_drop_ins(device, options.rounds, wait) else 1
    rows = calls("cpu" if options.without_gpu else "cuda")
    if options.without_gpu:  # PyTorch's would compute
        rows = {name: call for name, call in rows.items() if not name.startswith("torch")}
    if options.profile:
        if options.profile not in rows:
            sys.exit(
                f"python_host: there is no row {options.profile!r}; there are {', '.join(map(repr, rows))}"
            )
        profile(rows[options.profile])
        return 0
    table = medians(rows, options.rounds, (lambda: None) if options.without_gpu else torch.cuda.synchronize)
    imports = import_seconds()
    cpp = read_cpp(options.cpp) if options.cpp else []
    rows = [
        *((name, f"{cost:.2f}", "us") for name, cost in (*table.items(), *cpp)),
        ("import flashjit, after torch", f"{imports:.3f}", "s"),
    ]
    for name, value, unit in rows:
        print(f"{name:45} {value:>9} {unit}")
    if options.csv:
        device = os.uname().machine if options.without_gpu else torch.cuda.get_device_name()
        write(options.csv, device, options.commit or commit_name(), rows)
    missed = [
        f"{name}: {table[name]:.2f} us, goal {goal}" for name, goal in GOALS_US.items() if table[name] > goal
    ]
    if imports > GOAL_IMPORT_S:
        missed.append(f"import: {imports * 1e3:.0f} ms, goal {GOAL_IMPORT_S * 1e3:.0f}")
    for text in missed:
        print(f"python_host: missed {text}", file=sys.stderr)
    return 1 if options.goals and missed else 0


if __name__ == "__main__":
    sys.exit(main())

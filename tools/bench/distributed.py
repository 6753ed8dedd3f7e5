"""Measure attention over a sequence that GPUs of one host share: flashjit.distributed over NCCL.

bf16, 32 heads and 8 of K and V, head dimension 128, a causal mask or with --full none, zigzag: the forward pass, and both passes,
of ring, all_gather, ulysses, and from four GPUs on two_level with pairs of GPUs inside, against attention() on one GPU, and against
what simulator.py predicts of them. The time of a call is the slowest rank's, from one barrier to all ranks' ends; of calls under
1.25 s it is the mean of four in a row. Medians count. Results are checked against one GPU's first.

    python3 tools/bench/distributed.py --lib build/libflashjit.so --csv tools/bench/results/h200_distributed.csv
    python3 tools/bench/distributed.py --lib build/libflashjit.so --gpus 2,4,8 --tokens 65536,262144,1048576 \
        --csv tools/bench/results/h200_scaling.csv     # the scaling run
    python3 tools/bench/distributed.py --lib build/libflashjit.so --cpu --gpus 2,4,8 --tokens 256   # the same without GPUs
    python3 tools/bench/distributed.py --lib build/libflashjit.so --schemes ulysses,pytorch_ring,pytorch_all_gather   # beside PyTorch's

Columns: ms is the slowest rank's time, alone_ms one GPU's, scaling alone_ms / ms, imbalance the slowest over the fastest
rank's time at its kernels from 64k tokens on, predicted_ms the simulator's, memory_gb the peak of a rank's allocations,
formula_gb what simulator.memory_bytes() says, reserved_sms what a ring leaves to NCCL. Rows are written as they come.
Exit code: 0 if everything ran and was right, 1 if not, 3 without the GPUs or PyTorch.
"""

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"distributed: PyTorch is needed: {error}", file=sys.stderr)
    sys.exit(3)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
import flashjit  # noqa: E402
import flashjit.distributed as fd  # noqa: E402
import simulator  # noqa: E402

HEADS, HEADS_KV, DIM, LAYOUT, INNER = 32, 8, 128, "zigzag", 2
IN_A_ROW = 4  # calls, as a model has them: the host prepares one while the GPU computes another
LONG = 5.0  # seconds of a call of which one is measured: check() has compiled it
PROFILED = 65536  # tokens from which ranks' kernels are compared
PYTORCHS = {
    "pytorch_ring": "alltoall",
    "pytorch_all_gather": "allgather",
}  # how PyTorch's context parallelism sends K and V
FIELDS = (
    "device",
    "ranks",
    "tokens",
    "mask",
    "scheme",
    "reserved_sms",
    "pass",
    "ms",
    "alone_ms",
    "scaling",
    "imbalance",
    "predicted_ms",
    "memory_gb",
    "formula_gb",
)


class Shard:
    """This rank's tensors of a sequence; `ranks` 1: the whole of it."""

    def __init__(self, tokens, ranks, rank, device):
        generator = torch.Generator(device).manual_seed(tokens + rank)
        self.rows = tokens // ranks
        make = lambda heads: torch.randn(
            1, heads, self.rows, DIM, generator=generator, device=device, dtype=torch.bfloat16
        )
        self.q, self.k, self.v, self.dout = make(HEADS), make(HEADS_KV), make(HEADS_KV), make(HEADS)

    def both_passes(self, attend):
        inputs = [x.requires_grad_() for x in (self.q, self.k, self.v)]
        return torch.autograd.grad(attend(*inputs), inputs, self.dout)

    def forward(self, attend):
        with torch.no_grad():
            return attend(self.q, self.k, self.v)


CALLS = {"forward": Shard.forward, "both": Shard.both_passes}


class Team:
    """The ranks of one run."""

    def __init__(self, rank, ranks, device, causal=True):
        self.rank, self.ranks, self.device, self.causal = rank, ranks, device, causal
        self.pytorchs = None
        self.pairs = (
            dist.device_mesh.init_device_mesh(device.type, (ranks // INNER, INNER))
            if ranks % INNER == 0 and ranks > INNER
            else None
        )

    def attend(self, scheme, **given):
        if scheme in PYTORCHS:
            return self.attend_by_pytorch(PYTORCHS[scheme])
        group = self.pairs if scheme == "two_level" else None
        return lambda q, k, v: fd.distributed_attention(
            q, k, v, scheme=scheme, layout=LAYOUT, causal=self.causal, group=group, **given
        )

    def attend_by_pytorch(self, how):
        """torch.distributed.tensor.experimental.context_parallel over cuDNN, which lays a sequence out as zigzag does. A ring's steps
        have as many heads of K and V as of Q."""
        from torch.distributed.tensor.experimental import _attention, context_parallel

        if self.pytorchs is None:  # is never left, as a backward pass needs it, too
            mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.ranks,))
            rows = torch.zeros(2 * self.ranks, device=self.device)
            self.pytorchs = context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0])
            self.pytorchs.__enter__()

        def attend(q, k, v):
            _attention.set_rotate_method(how)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

        return attend

    def one(self, q, k, v):
        """On this rank's GPU alone."""
        return flashjit.attention(q, k, v, causal=self.causal)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def largest(self, *numbers):
        numbers = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()

    def measured(self, call, repeats):
        """Seconds of the slowest rank, and the peak of a rank's memory. The first call does not count, unless it is LONG."""
        on_gpu = self.device.type == "cuda"
        seconds = []
        for repeat in range(1 + repeats):
            if repeat < 2 and on_gpu:
                torch.cuda.reset_peak_memory_stats()
            calls = IN_A_ROW if repeat and seconds[-1] < LONG / IN_A_ROW else 1
            dist.barrier()
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            self.synchronize()
            seconds += self.largest((time.perf_counter() - begin) / calls)
            if seconds[-1] > LONG:
                break
        (peak,) = self.largest(torch.cuda.max_memory_allocated() if on_gpu else 0)
        return statistics.median(seconds[1:] or seconds), peak

    def imbalance(self, call):
        """The slowest over the fastest rank's time at its attention kernels, by the profiler."""
        dist.barrier()
        self.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            self.synchronize()
        own = sum(
            event.self_device_time_total
            for event in profile.key_averages()
            if "nccl" not in event.key.lower()
        )
        slowest, minus_fastest = self.largest(own, -own)
        return slowest / max(-minus_fastest, 1e-9)

    def schemes(self, wanted):
        return [scheme for scheme in wanted if scheme != "two_level" or self.pairs is not None]


def check(team, args):
    """Every scheme's results on a shorter sequence, against one GPU's: the largest difference, relative to the largest element."""
    tokens = min(16384, *args.tokens)
    whole = Shard(tokens, 1, 0, team.device)
    expected = [team.one(whole.q, whole.k, whole.v).detach(), *whole.both_passes(team.one)]
    worst = 0.0
    for scheme in team.schemes(args.schemes):
        group = team.pairs if scheme == "two_level" else None
        cut = lambda x: fd.shard(x.detach(), layout=LAYOUT, group=group)
        mine = Shard(tokens, team.ranks, team.rank, team.device)
        mine.q, mine.k, mine.v, mine.dout = map(cut, (whole.q, whole.k, whole.v, whole.dout))
        attend = team.attend(scheme)
        for got, want in zip([mine.forward(attend), *mine.both_passes(attend)], expected):
            want = cut(want).float()
            worst = max(worst, ((got.float() - want).abs().max() / want.abs().max()).item())
    return team.largest(worst)[0]


def alone(team, tokens, args):
    """Seconds of one GPU, by pass; of none for which its memory is too small."""
    found = {}
    try:
        shard = Shard(tokens, 1, team.rank, team.device)
        for name, run in CALLS.items():
            found[name], _ = team.measured(lambda: run(shard, team.one), args.repeats)
    except torch.OutOfMemoryError:  # on all ranks alike
        pass
    return found


def row_of(team, tokens, scheme, reserved, name, seconds, alone_seconds, imbalance, memory):
    problem = simulator.Problem(tokens, HEADS, HEADS_KV, DIM, causal=team.causal)
    both = name == "both"
    inner = INNER if scheme == "two_level" else 1
    predicted = formula = 0
    if scheme in simulator.SCHEMES:
        predicted = sum(
            simulator.simulate(problem, team.ranks, scheme, LAYOUT, backward=backward, inner=inner).seconds
            for backward in ([False, True] if both else [False])
        )
        formula = simulator.memory_bytes(problem, team.ranks, scheme, both, inner)
        if not both:  # in which dO is here, too
            formula += problem.q_bytes(tokens // team.ranks)
    device = torch.cuda.get_device_name() if team.device.type == "cuda" else "CPU"
    milliseconds = lambda x: f"{x * 1e3:.3f}" if x else ""
    return dict(
        zip(
            FIELDS,
            (
                device,
                team.ranks,
                tokens,
                "causal" if team.causal else "full",
                scheme,
                reserved,
                name,
                milliseconds(seconds),
                milliseconds(alone_seconds),
                f"{alone_seconds / seconds:.3f}" if alone_seconds else "",
                f"{imbalance:.3f}" if imbalance else "",
                milliseconds(predicted),
                f"{memory / 1e9:.3f}" if memory else "",
                f"{formula / 1e9:.3f}" if formula else "",
            ),
        )
    )


def measure_scheme(team, args, tokens, scheme, reserved, seconds_alone, write):
    attend = team.attend(scheme, reserved_sms=reserved)
    shard = Shard(tokens, team.ranks, team.rank, team.device)
    for name, run in CALLS.items():
        call = lambda: run(shard, attend)
        seconds, memory = team.measured(call, args.repeats)
        profiled = tokens >= PROFILED and team.device.type == "cuda" and seconds < LONG
        imbalance = team.imbalance(call) if profiled else 0
        write(
            row_of(team, tokens, scheme, reserved, name, seconds, seconds_alone.get(name), imbalance, memory)
        )


def measure(team, args, times_alone, write):
    empty = torch.cuda.empty_cache if team.device.type == "cuda" else lambda: None
    for tokens in args.tokens:
        if str(tokens) not in times_alone:
            times_alone[str(tokens)] = alone(team, tokens, args)
            empty()
        for scheme in team.schemes(args.schemes):
            for reserved in args.reserved_sms if scheme == "ring" else [0]:
                measure_scheme(team, args, tokens, scheme, reserved, times_alone[str(tokens)], write)
                empty()


def run(rank, ranks, folder, args):
    if args.cpu:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks
        )
    else:
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks, device_id=device
        )
    team = Team(rank, ranks, device, not args.full)
    begin = time.perf_counter()
    worst = check(team, args)
    if rank == 0:
        print(
            f"{ranks} ranks checked in {time.perf_counter() - begin:.0f} s: the largest difference is {worst:.3g} of the largest "
            "element",
            flush=True,
        )
    known = os.path.join(folder, "alone.json")
    times_alone = json.load(open(known)) if os.path.exists(known) else {}

    def write(row):
        if rank != 0:
            return
        print("  ".join(f"{name} {x}" for name, x in row.items() if name != "device" and x != ""), flush=True)
        if args.csv:
            with open(args.csv, "a", newline="") as file:
                csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)

    measure(team, args, times_alone, write)
    dist.barrier()
    if rank == 0:
        with open(known, "w") as file:
            json.dump(times_alone, file)
    sys.stdout.flush()
    os._exit(1 if worst > 0.02 else 0)  # gloo's threads at times abort an interpreter that ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser.add_argument("--lib", help="libflashjit.so")
    parser.add_argument("--csv")
    parser.add_argument("--gpus", type=numbers, help="how many, such as 2,4,8; default all")
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU instead, over gloo")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--tokens", type=numbers, default=[32768, 131072, 262144])
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=list(simulator.SCHEMES))
    parser.add_argument("--reserved-sms", type=numbers, default=[0], help="of ring, such as 0,16")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    here = torch.cuda.device_count()
    gpus = args.gpus or [2 if args.cpu else here]
    if not args.cpu and (min(gpus) < 2 or max(gpus) > here):
        print(f"distributed: {max(gpus)} GPUs are asked for, and {here} are here", file=sys.stderr)
        return 3
    if args.lib:
        os.environ["FLASHJIT_LIBRARY"] = os.path.abspath(args.lib)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            csv.DictWriter(file, FIELDS, lineterminator="\n").writeheader()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in gpus:
            mp.spawn(run, (ranks, folder, args), nprocs=ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure attention over a sequence that GPUs of one host share: flashjit.distributed over NCCL.

bf16, 32 heads and 8 of K and V, head dimension 128, causal, zigzag: the forward pass, and both passes, of ring, all_gather and
ulysses, against attention() on one GPU, and against what flashjit.simulator predicts of them. The time of a call is the slowest
rank's, from one barrier to all ranks' ends; medians count. Results are checked against one GPU's first.

    python3 tools/bench/distributed.py --lib build/libflashjit.so --csv tools/bench/results/h100_distributed.csv

Columns: ms is the slowest rank's time, alone_ms one GPU's, scaling alone_ms / ms, imbalance the slowest over the fastest
rank's time at its kernels, predicted_ms the simulator's, memory_gb the peak of a rank's allocations, formula_gb what
simulator.memory_bytes() says. Exit code: 0 if everything ran and was right, 1 if not, 3 without two GPUs or PyTorch.
"""
import argparse
import csv
import os
import statistics
import sys
import tempfile
import time

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
except ImportError as error:
    print(f"distributed: PyTorch is needed: {error}", file=sys.stderr)
    sys.exit(3)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
import flashjit  # noqa: E402
import flashjit.distributed as fd  # noqa: E402
from flashjit import simulator  # noqa: E402

HEADS, HEADS_KV, DIM, LAYOUT = 32, 8, 128, "zigzag"
FIELDS = ("device", "ranks", "tokens", "scheme", "pass", "ms", "alone_ms", "scaling", "imbalance", "predicted_ms", "memory_gb",
          "formula_gb")


class Shard:
    """This rank's tensors of a sequence; `ranks` 1: the whole of it."""

    def __init__(self, tokens, ranks, rank, device):
        generator = torch.Generator(device).manual_seed(tokens + rank)
        self.rows = tokens // ranks
        make = lambda heads: torch.randn(1, heads, self.rows, DIM, generator=generator, device=device, dtype=torch.bfloat16)
        self.q, self.k, self.v, self.dout = make(HEADS), make(HEADS_KV), make(HEADS_KV), make(HEADS)

    def both_passes(self, attend):
        inputs = [x.requires_grad_() for x in (self.q, self.k, self.v)]
        return torch.autograd.grad(attend(*inputs), inputs, self.dout)

    def forward(self, attend):
        with torch.no_grad():
            return attend(self.q, self.k, self.v)


def measured(call, repeats):
    """Seconds of the slowest rank, of this rank without the others' waits, and the peak of memory beside what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor([statistics.median(seconds), torch.cuda.max_memory_allocated()], dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def kernel_seconds(call):
    """Of this rank's attention kernels, by the profiler, and of the slowest and the fastest rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    own = sum(event.self_device_time_total for event in profile.key_averages() if "nccl" not in event.key.lower())
    times = torch.zeros(dist.get_world_size(), dtype=torch.float64, device="cuda")
    times[dist.get_rank()] = own
    dist.all_reduce(times)
    return times.max().item() / max(times.min().item(), 1e-9)


def check(rank, ranks, device):
    """Every scheme's results on a shorter sequence, against one GPU's."""
    whole = Shard(16384, 1, 0, device)
    alone = lambda q, k, v: flashjit.attention(q, k, v, causal=True)
    expected = [alone(whole.q, whole.k, whole.v).detach(), *whole.both_passes(alone)]
    mine = Shard(16384, ranks, rank, device)
    mine.q, mine.k, mine.v, mine.dout = (fd.shard(x.detach(), layout=LAYOUT) for x in (whole.q, whole.k, whole.v, whole.dout))
    worst = 0.0
    for scheme in simulator.SCHEMES[:3]:
        attend = lambda q, k, v: fd.distributed_attention(q, k, v, scheme=scheme, layout=LAYOUT, causal=True)
        for got, want in zip([mine.forward(attend), *mine.both_passes(attend)], expected):
            want = fd.shard(want, layout=LAYOUT).float()
            worst = max(worst, ((got.float() - want).abs().max() / want.abs().max()).item())
    return worst


def measure(rank, ranks, args, device, rows):
    calls = {"forward": Shard.forward, "both": Shard.both_passes}
    for tokens in args.tokens:
        alone_attend = lambda q, k, v: flashjit.attention(q, k, v, causal=True)
        shard, alone = Shard(tokens, 1, rank, device), {}
        for name, run in calls.items():
            run(shard, alone_attend)
            alone[name], _ = measured(lambda: run(shard, alone_attend), args.repeats)
        del shard
        torch.cuda.empty_cache()
        for scheme in args.schemes:
            attend = lambda q, k, v: fd.distributed_attention(q, k, v, scheme=scheme, layout=LAYOUT, causal=True)
            shard = Shard(tokens, ranks, rank, device)
            for name, run in calls.items():
                run(shard, attend)
                seconds, memory = measured(lambda: run(shard, attend), args.repeats)
                imbalance = kernel_seconds(lambda: run(shard, attend)) if tokens == max(args.tokens) else 0
                problem = simulator.Problem(tokens, HEADS, HEADS_KV, DIM)
                both = [False, True] if name == "both" else [False]
                predicted = sum(simulator.simulate(problem, ranks, scheme, LAYOUT, backward=b).seconds for b in both)
                formula = simulator.memory_bytes(problem, ranks, scheme, both[-1]) + (0 if both[-1] else shard.dout.nbytes)
                rows.append(dict(zip(FIELDS, (
                    torch.cuda.get_device_name(), ranks, tokens, scheme, name, f"{seconds * 1e3:.3f}", f"{alone[name] * 1e3:.3f}",
                    f"{alone[name] / seconds:.3f}", f"{imbalance:.3f}" if imbalance else "", f"{predicted * 1e3:.3f}",
                    f"{memory / 1e9:.3f}", f"{formula / 1e9:.3f}"))))
                if rank == 0:
                    print("  ".join(f"{name} {x}" for name, x in rows[-1].items() if name != "device"), flush=True)
            del shard
            torch.cuda.empty_cache()


def run(rank, ranks, store, args):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device)
    begin = time.perf_counter()
    worst = check(rank, ranks, device)
    if rank == 0:
        print(f"checked in {time.perf_counter() - begin:.0f} s: the largest difference is {worst:.3g} of the largest element", flush=True)
    rows = []
    measure(rank, ranks, args, device, rows)
    if rank == 0 and args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    dist.barrier()
    dist.destroy_process_group()
    if worst > 0.02:
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser.add_argument("--lib", help="libflashjit.so")
    parser.add_argument("--csv")
    parser.add_argument("--gpus", type=int, default=0, help="default all")
    parser.add_argument("--tokens", type=numbers, default=[32768, 131072, 262144])
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=list(simulator.SCHEMES[:3]))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    gpus = args.gpus or torch.cuda.device_count()
    if gpus < 2 or torch.cuda.device_count() < gpus:
        print(f"distributed: {gpus} GPUs are asked for, and {torch.cuda.device_count()} are here", file=sys.stderr)
        return 3
    if args.lib:
        os.environ["FLASHJIT_LIBRARY"] = os.path.abspath(args.lib)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (gpus, os.path.join(folder, "store"), args), nprocs=gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())

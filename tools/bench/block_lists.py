"""Time attention over blocks that each head and each block of queries chooses, as models of video do: forward and backward, next to the
dense kernel on the same tensors, on one GPU.

32k tokens, bf16, an eighth of the blocks. "random": as they come. "video": blocks are cubes of a grid, and each head keeps those whose
smooth features go best with the block of queries', and some noise, so that neighbours share most. "window": around the diagonal. With
sizes some blocks are not full, which a mask says (`variable_block_sizes` of FastVideo). O and gradients of a head are checked first,
against fp32 with the map written out.

    python3 tools/bench/block_lists.py --lib build/libflashjit.so --csv block_lists.csv

A rate of 1 is the dense kernel's on the pairs kept. union: how many lists' blocks two neighbouring lists have together, from 1 to 2. Exit
code: as compare.py.
"""

import sys
import typing

import measuring
from measuring import Ours, abi, torch

LENGTH, HIDDEN, DENSITY = 32768, 512, 0.125
SIZES = ":mask{sizes: int32 1d; kv % 64 < sizes[kv / 64]}"
COLUMNS = ["pass", "head_dim", "block", "pattern", "sizes", "share", "union", "ms", "dense_ms", "rate"]


class Problem(typing.NamedTuple):
    dim: int
    block: int
    pattern: str
    sizes: bool = False

    def label(self):
        return f"d{self.dim} {self.block} x {self.block} {self.pattern}" + ", sizes" * self.sizes


def problems():
    for dim in (64, 128):
        for pattern in ("random", "video"):
            yield Problem(dim, 64, pattern)
            yield Problem(dim, 64, pattern, sizes=True)
        yield Problem(dim, 64, "window")
        yield Problem(dim, 128, "random")


def random_map(heads, blocks, density):
    """uint8 [heads, blocks, blocks]."""
    order = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(blocks)).argsort(dim=2)
    return (order < round(density * blocks)).to(torch.uint8)


def video_map(heads, blocks, density):
    """The same; `blocks` is a third power."""
    generator, side = torch.Generator().manual_seed(blocks), round(blocks ** (1 / 3))
    grid = torch.stack(torch.meshgrid(*[torch.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3) / side
    waves = torch.randn(heads, 3, 24, generator=generator) * 3.0
    features = torch.cos(grid @ waves + torch.rand(heads, 1, 24, generator=generator) * 6.28)
    noise = torch.randn(heads, blocks, blocks, generator=generator) * 1.5
    kept = (features @ features.transpose(1, 2) + noise).topk(round(density * blocks), 2).indices
    return torch.zeros(heads, blocks, blocks, dtype=torch.uint8).scatter_(2, kept, 1)


def window_map(heads, blocks, density):
    """The same: the blocks around the diagonal."""
    width, rows = round(density * blocks), torch.arange(blocks)
    begin = (rows - width // 2).clamp(0, blocks - width)[:, None]
    return ((rows >= begin) & (rows < begin + width)).to(torch.uint8).repeat(heads, 1, 1)


MAPS = {"random": random_map, "video": video_map, "window": window_map}


def block_sizes(blocks, block):
    """int32 [blocks]: an eighth are not full."""
    sizes = torch.full((blocks,), block, dtype=torch.int32)
    sizes[::8] = block * 3 // 4
    return sizes


def expected(q, k, v, dout, keep):
    """O and gradients of the first head in fp32. keep: bool [queries, keys]."""
    q, k, v = (x[0, 0].float().requires_grad_() for x in (q, k, v))
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~keep, float("-inf"))
    out = torch.softmax(scores, dim=-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout[0, 0].float())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def pairs_kept(block_map, sizes, length):
    """bool [queries, keys] of the first head."""
    block = length // block_map.shape[-1]
    keep = block_map[0, 0].bool().repeat_interleave(block, 0).repeat_interleave(block, 1)
    if sizes is not None:
        place = torch.arange(length, device=keep.device)
        keep &= place % block < sizes[place // block]
    return keep


def point(runtime, report, problem, rounds):
    dim, block, heads = problem.dim, problem.block, HIDDEN // problem.dim
    blocks = LENGTH // block
    block_map = MAPS[problem.pattern](heads, blocks, DENSITY)[None].cuda()
    sizes = block_sizes(blocks, block).cuda() if problem.sizes else None
    kept = block_map.bool()
    share = kept.float().mean().item()
    union = (kept[:, :, 0::2] | kept[:, :, 1::2]).float().mean().item() / share
    tensors = measuring.tensors(1, heads, LENGTH, dim)
    spec = f"bf16:d{dim}{SIZES if problem.sizes else ''}:map{block}x{block}"
    people = {
        "dense": Ours(runtime, f"bf16:d{dim}", *tensors),
        "sparse": Ours(
            runtime, spec, *tensors, block_map, captures={"sizes": sizes} if problem.sizes else {}
        ),
    }
    for person in people.values():
        person.forward()
        person.backward()
    first_head = {name: tensor[0, 0] for name, tensor in people["sparse"].results().items()}
    for text in measuring.differences(first_head, expected(*tensors, pairs_kept(block_map, sizes, LENGTH))):
        report.failure(f"{problem.label()}: {text}")
    for pass_name, method in (("fwd", "forward"), ("bwd", "backward")):
        ms = measuring.interleaved_ms({name: getattr(x, method) for name, x in people.items()}, rounds)
        rate = share * ms["dense"] / ms["sparse"]
        report.row(
            **{"pass": pass_name},
            head_dim=dim,
            block=block,
            pattern=problem.pattern,
            sizes=int(problem.sizes),
            share=share,
            union=union,
            ms=ms["sparse"],
            dense_ms=ms["dense"],
            rate=rate,
        )
        print(
            f"{pass_name} {problem.label():28} {ms['sparse']:7.3f} ms, dense {ms['dense']:7.3f}: {rate:.2f} of the dense rate, union {union:.2f}",
            flush=True,
        )


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of all launches (default %(default)s)")
    parser.add_argument("--only", default="", help="problems whose label has this in it")
    arguments = parser.parse_args()
    if measuring.without_gpu("block_lists"):
        return 3
    torch.zeros(1, device="cuda")
    measuring.use_library(arguments.lib)
    runtime = abi.Runtime()
    constants = measuring.constants_of(arguments)
    report = measuring.Report(arguments.csv, [*constants, *COLUMNS], constants)
    print(f"{constants['device']}, flashjit {constants['commit']}, {LENGTH} tokens")
    for problem in problems():
        if arguments.only in problem.label():
            measuring.guarded(report, problem.label(), point, runtime, report, problem, arguments.rounds)
    return measuring.ended(report)


if __name__ == "__main__":
    sys.exit(main())

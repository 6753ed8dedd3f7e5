"""Measure skip-softmax on one GPU: time, share of skipped tiles and error over the threshold, beside the plain kernel.

Each block of 128 keys has scores that lie higher by a number drawn from 0 to 24, so that a threshold of exp(-24 (1 - share)) skips
about that share of the tiles. Errors are those beside the plain kernel, relative to O's norm. Calls take turns, and medians count.

    python3 tools/bench/skip_softmax.py --lib build/libflashjit.so --csv tools/bench/results/h200_skip_softmax.csv

Exit code: 0 if everything ran and was right, 1 if not, 3 without GPU or PyTorch.
"""

import math
import sys

import measuring
import torch

KEYS, SPREAD = 128, 24.0  # of a block; nats between the lowest and the highest
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)


def threshold_of(share):
    return math.exp(-SPREAD * (1 - share)) if share else 0.0


def in_blocks(q, k):
    """Raises the scores of each block of keys by its number, through the first column."""
    blocks = (k.shape[-2] + KEYS - 1) // KEYS
    heights = SPREAD * torch.rand(*k.shape[:-2], blocks, device=k.device)
    q[..., 0] = 4.0
    k[..., 0] = (heights.repeat_interleave(KEYS, -1)[..., : k.shape[-2]] * q.shape[-1] ** 0.5 / 4.0).to(
        k.dtype
    )


def prefill(length, dim, causal):
    q, k, v, _ = measuring.tensors(1, 32, length, dim, heads_kv=8)
    in_blocks(q, k)
    return (q, k, v), {"causal": causal}


def decode(batch, length, dim, page=64):
    """One query of each sequence, over pages in a random order."""
    torch.manual_seed(batch)
    pages = length // page
    draw = lambda *size: torch.randn(*size, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = draw(batch, 32, 1), draw(batch, 8, length), draw(batch, 8, length)
    in_blocks(q, k)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    place = torch.empty_like(table.view(-1), dtype=torch.long)
    place[table.view(-1).long()] = torch.arange(batch * pages, device="cuda")
    in_pages = lambda x: x.view(batch, 8, pages, page, dim).transpose(1, 2).flatten(0, 1)[place].contiguous()
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return (q, in_pages(k), in_pages(v)), {"page_table": table, "kv_lengths": lengths, "causal": True}


def problems():
    for length in (16384, 32768, 65536):
        yield f"prefill {length // 1024}k d128 causal", lambda length=length: prefill(length, 128, True)
    yield "prefill 16k d128", lambda: prefill(16384, 128, False)
    yield "prefill 16k d64 causal", lambda: prefill(16384, 64, True)
    yield "decode 64 x 16k d128, pages of 64", lambda: decode(64, 16384, 128)


def run_problem(report, label, make, flashjit, rounds):
    tensors, options = make()
    plain = lambda: flashjit.attention(*tensors, **options)
    exact = plain()
    calls, shares, errors = {"plain": plain}, {}, {}
    for share in SHARES:
        threshold, counts = threshold_of(share), torch.zeros(2, dtype=torch.int64, device="cuda")
        call = lambda threshold=threshold, **more: flashjit.attention(
            *tensors, **options, skip_softmax_threshold=threshold, **more
        )
        out = call(skip_softmax_counts=counts)
        tiles, skipped = counts.tolist()
        if share == 0 and (skipped != 0 or not torch.equal(out, exact)):
            report.failure(f"{label}: a threshold of 0 skips {skipped} tiles, or changes O")
        shares[threshold] = skipped / tiles
        errors[threshold] = ((out.float() - exact.float()).norm() / exact.float().norm()).item()
        calls[threshold] = call
    ms = measuring.interleaved_ms(calls, rounds)
    report.row(problem=label, threshold="plain", us=1e3 * ms["plain"], of_plain=1.0)
    for threshold, share in shares.items():
        report.row(
            problem=label,
            threshold=f"{threshold:.2e}",
            us=1e3 * ms[threshold],
            of_plain=ms[threshold] / ms["plain"],
            skipped=share,
            error=f"{errors[threshold]:.2e}",
        )
        print(
            f"{label:36} {threshold:8.2e} skips {share:.3f}: {1e3 * ms[threshold]:9.1f} us, "
            f"{ms[threshold] / ms['plain']:.3f} of plain {1e3 * ms['plain']:.1f}, error {errors[threshold]:.2e}",
            flush=True,
        )


@torch.no_grad()
def measure(report, flashjit, arguments):
    for label, make in problems():
        measuring.guarded(report, label, run_problem, report, label, make, flashjit, arguments.rounds)


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="of timed calls (default %(default)s)")
    columns = ["problem", "threshold", "us", "of_plain", "skipped", "error"]
    return measuring.command("skip_softmax", parser.parse_args(), columns, measure)


if __name__ == "__main__":
    sys.exit(main())

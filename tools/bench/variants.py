"""Compare flashjit's score and mask programs with PyTorch's FlexAttention on one GPU, in one process, on the same tensors.

bf16, 8k tokens twice, head dims 64 and 128: full, causal, a sliding window, documents, ALiBi, softcap, prefix LM; and the
butterfly blocks of the first FlashAttention paper at 64k. Results are checked before they are timed. Launches take turns,
each between two CUDA events, and the median counts. FlexAttention's block mask is made beforehand, as its users do; ours,
where a mask needs lists of tiles, is made anew in every call and counts.

    python3 tools/bench/variants.py --lib build/libflashjit.so --csv variants.csv

Rates count the pairs that attend. Exit code: as compare.py.
"""
import argparse
import datetime
import sys
import time

import compare
from compare import Ours, abi, Report, interleaved_ms, reason, torch

try:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError as error:
    print(f"variants: FlexAttention is needed: {error}", file=sys.stderr)
    sys.exit(3)

LENGTH, BATCH, HIDDEN = 8192, 2, 2048
WINDOW, DOCUMENTS, PREFIX = 1024, 16, 2000


def document_ids(length):
    """int32 [length]: DOCUMENTS runs of unlike lengths."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.sort(torch.randperm(length - 1, generator=generator)[:DOCUMENTS - 1] + 1)[0]
    ids = torch.zeros(length, dtype=torch.int32)
    for cut in cuts.tolist():
        ids[cut:] += 1
    return ids.cuda()


def causal(b, h, q, k):
    return q >= k


def butterfly(b, h, q, k):
    x = (q // 128) ^ (k // 128)
    return (x & (x - 1)) == 0


class Case:
    """One attention, for both: our spec's parts and captures, FlexAttention's functions."""

    def __init__(self, name, parts, score_mod=None, mask_mod=None, captures=None):
        self.name, self.parts, self.score_mod, self.mask_mod = name, parts, score_mod, mask_mod
        self.captures = captures or {}


def cases(length):
    ids = document_ids(length)
    return [
        Case("full", ""),
        Case("causal", ":causal", mask_mod=causal),
        Case("window", f":mask{{q >= kv && q - kv < {WINDOW}}}", mask_mod=lambda b, h, q, k: (q >= k) & (q - k < WINDOW)),
        Case("documents", ":mask{ids: int32 1d; q >= kv && ids[q] == ids[kv]}",
             mask_mod=lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), captures={"ids": ids}),
        Case("prefix", f":mask{{q >= kv || kv < {PREFIX}}}", mask_mod=lambda b, h, q, k: (q >= k) | (k < PREFIX)),
        Case("alibi", ":score{score + exp2(-0.5 * to_float(h + 1)) * to_float(kv - q)}:causal",
             score_mod=lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 0.5)) * (k - q), mask_mod=causal),
        Case("softcap", ":score{50.0 * tanh(score / 50.0)}:causal",
             score_mod=lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0), mask_mod=causal),
    ]


def attending_pairs(mask_mod, length):
    if mask_mod is None:
        return float(length) * length
    keys, count = torch.arange(length, device="cuda"), 0
    for begin in range(0, length, 1024):
        queries = torch.arange(begin, begin + 1024, device="cuda")
        count += int(mask_mod(0, 0, queries[:, None], keys[None, :]).sum())
    return float(count)


class Flex:
    """One problem for FlexAttention, compiled for its shape."""

    def __init__(self, case, q, k, v, dout):
        torch._dynamo.reset()
        begin = time.monotonic()
        length = q.shape[2]
        block_mask = case.mask_mod and create_block_mask(case.mask_mod, None, None, length, length, device="cuda",
                                                         _compile=length > 16384)
        self.dout, self.inputs = dout, tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
        compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=case.score_mod, block_mask=block_mask),
                                 dynamic=False)
        self.call = lambda: compiled(*self.inputs)
        self.out = self.call()
        self.backward()
        torch.cuda.synchronize()
        self.compile_ms = (time.monotonic() - begin) * 1e3
        self.forward()

    def forward(self):
        with torch.no_grad():
            return self.call()

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self):
        return {"out": self.out.detach(), **dict(zip(("dq", "dk", "dv"), self.backward()))}


def point(runtime, report, case, batch, heads, length, dim, rounds):
    label = f"{case.name} d{dim} b{batch} h{heads} s{length}"
    q, k, v, dout = compare.tensors(batch, heads, length, dim)
    begin = time.monotonic()
    ours = Ours(runtime, f"bf16:d{dim}{case.parts}", q, k, v, dout, captures=case.captures)
    compile_ms = (time.monotonic() - begin) * 1e3
    ours.forward()
    ours.backward()
    flex = Flex(case, q, k, v, dout)
    for text in compare.differences(ours.results(), flex.results()):
        report.failure(f"{label}: {text}")
    pairs = attending_pairs(case.mask_mod, length)
    for pass_name, method in (("fwd", "forward"), ("bwd", "backward")):
        ms = interleaved_ms({"flashjit": getattr(ours, method), "flex": getattr(flex, method)}, rounds)
        rate = lambda x: 4.0 * pairs * dim * heads * batch * (2.5 if pass_name == "bwd" else 1.0) / x / 1e9
        report.row(**{"pass": pass_name}, case=case.name, head_dim=dim, batch=batch, heads=heads, seqlen=length,
                   pairs=pairs, flashjit_ms=ms["flashjit"], flex_ms=ms["flex"], flashjit_tflops=rate(ms["flashjit"]),
                   flex_tflops=rate(ms["flex"]), ratio=ms["flex"] / ms["flashjit"], flashjit_compile_ms=compile_ms,
                   flex_compile_ms=flex.compile_ms)
        print(f"{pass_name} {label:34} TFLOP/s: flashjit {rate(ms['flashjit']):5.0f}  flex {rate(ms['flex']):5.0f}  "
              f"ratio {ms['flex'] / ms['flashjit']:.2f}   cold compile {compile_ms:.0f} / {flex.compile_ms:.0f} ms",
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default="build/libflashjit.so", help="the shared library (default %(default)s)")
    parser.add_argument("--csv", help="write the table here")
    parser.add_argument("--commit", default=None, help="what the CSV calls this version (default: git's)")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("variants: PyTorch finds no GPU", file=sys.stderr)
        return 3
    torch.zeros(1, device="cuda")
    compare.use_library(arguments.lib)
    runtime = abi.Runtime()
    constants = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                 "device": torch.cuda.get_device_name(), "commit": arguments.commit or compare.commit_name()}
    print(f"{constants['device']}, flashjit {constants['commit']}, PyTorch {torch.__version__}")
    report = Report(arguments.csv, list(constants) + ["pass", "case", "head_dim", "batch", "heads", "seqlen", "pairs",
                                                      "flashjit_ms", "flex_ms", "flashjit_tflops", "flex_tflops", "ratio",
                                                      "flashjit_compile_ms", "flex_compile_ms"], constants)
    for dim in (64, 128):
        for case in cases(LENGTH):
            if arguments.only in case.name:
                compare.guarded(report, f"{case.name} d{dim}", point, runtime, report, case, BATCH, HIDDEN // dim, LENGTH, dim,
                                11)
    blocks = Case("butterfly", ":mask{((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0}", mask_mod=butterfly)
    if arguments.only in blocks.name:
        compare.guarded(report, "butterfly", point, runtime, report, blocks, 1, 8, 65536, 64, 5)
    print(f"{len(report.failures)} failures" + "".join(f"\n  {text}" for text in report.failures))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

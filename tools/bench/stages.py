#!/usr/bin/env python3
"""Programs of O and of Q's and K's rows on one GPU: within the call of attention, and as kernels of their own beside it.

    python3 tools/bench/stages.py --lib build/libflashjit.so --csv tools/bench/results/h200_stages.csv [--only REGEX] [--rounds N]

bf16, causal, 16k tokens of 2048 columns in all. "gate" is a sigmoid of a tensor like O, by out_mod; "rope" turns halves of Q's and K's rows
by tables, "norm" is their RMS norm with weights, by q_mod and k_mod. "fp8", "rows" and "nvfp4" store O as codes: FP8 with one scale or a scale for
each row, and NVFP4. torch.compile makes the kernels of their own. Passes: "forward", and but for codes "both" with all gradients. Outputs are checked beside each other before they are timed, calls take turns, and medians count.
Exit code: 0 if everything ran and was right, 1 if not, 3 without GPU or PyTorch.
"""

import re
import sys

import measuring
from measuring import torch

TOKENS, COLUMNS, EPSILON = 16384, 2048, 1e-6
FP8, FP4_LEVELS = torch.float8_e4m3fn, (0, 0.5, 1, 1.5, 2, 3, 4, 6)
TABLE = ("program", "dim", "length", "pass", "way", "us", "of_plain")


def rope_tables(length, dim):
    angle = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(dim // 2) / (dim // 2))
    return torch.cos(angle).cuda(), torch.sin(angle).cuda()


def turned(x, cosine, sine):
    half = x.shape[-1] // 2
    low, high = x[..., :half].float(), x[..., half:].float()
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1).to(x.dtype)


def normed(x, weight):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPSILON) * weight).to(x.dtype)


def gated(out, gate):
    return out * torch.sigmoid(gate)


def in_fp8(out, scale):
    return (out * (1 / scale)).clamp(-448, 448).to(FP8)


def in_fp8_rows(out):
    x = out.float()
    scale = x.abs().amax(-1, keepdim=True) * (1 / 448)
    return (x * (1 / scale)).to(FP8), scale


def in_nvfp4(out, scale):
    x = out.float().unflatten(-1, (-1, 16))
    block = (x.abs().amax(-1, keepdim=True) * (1 / 6) / scale).to(FP8)
    x = x * (1 / (block.float() * scale))
    size = x.abs()
    code = sum((size > middle).int() for middle in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    code = (code | (x < 0).int() << 3).flatten(-2).unflatten(-1, (-1, 2))
    return (code[..., 0] | code[..., 1] << 4).to(torch.uint8), block.squeeze(-1)


class Program:
    """One program's options, and the kernels of its own."""

    passes, limit = ("forward", "both"), 0.02

    def numbers(self, result):
        return result


class Gate(Program):
    """out_mod."""

    def __init__(self, q, k):
        gate = torch.randn_like(q).requires_grad_()
        self.parameters, self.apart = [gate], torch.compile(gated)
        self.options = {"out_mod": lambda out, b, h, i, column: out * torch.sigmoid(gate[b, h, i, column])}

    def separate(self, attend, q, k, v):
        return self.apart(attend(q, k, v), *self.parameters)


class Rope(Program):
    """q_mod and k_mod."""

    def __init__(self, q, k):
        dim = q.shape[-1]
        cosine, sine = self.tables = rope_tables(q.shape[-2], dim)
        self.parameters, self.apart = [], torch.compile(turned)

        def rope(row, b, h, i, column):
            half = dim // 2
            other = torch.where(column < half, -row[column + half], row[column - half])
            return row[column] * cosine[i, column % half] + other * sine[i, column % half]

        self.options = {"q_mod": rope, "k_mod": rope}

    def separate(self, attend, q, k, v):
        return attend(self.apart(q, *self.tables), self.apart(k, *self.tables), v)


class Norm(Program):
    """q_mod and k_mod, with weights that have gradients."""

    def __init__(self, q, k):
        dim = q.shape[-1]
        self.parameters = [torch.rand(dim, device="cuda").requires_grad_() for _ in range(2)]
        self.apart = torch.compile(normed)

        def norm(weight):
            return lambda row, b, h, i, column: (
                row[column] * torch.rsqrt(row.square().sum() / dim + EPSILON) * weight[column]
            )

        self.options = {"q_mod": norm(self.parameters[0]), "k_mod": norm(self.parameters[1])}

    def separate(self, attend, q, k, v):
        return attend(self.apart(q, self.parameters[0]), self.apart(k, self.parameters[1]), v)


class Codes(Program):
    """out_dtype of FP8, with a scale."""

    passes, limit, function, dtype = ("forward",), 0.05, staticmethod(in_fp8), FP8

    def __init__(self, q, k):
        self.parameters, self.apart = [], torch.compile(self.function)
        self.scale = torch.tensor([1 / 64], device="cuda")
        self.options = {"out_dtype": self.dtype, "out_scale": self.scale}

    def separate(self, attend, q, k, v):
        return self.apart(attend(q, k, v), self.scale)

    def numbers(self, result):
        return result.float() * self.scale


class Rows(Codes):
    """The same with a scale for each row."""

    function = staticmethod(in_fp8_rows)

    def __init__(self, q, k):
        super().__init__(q, k)
        self.options = {"out_dtype": self.dtype}

    def separate(self, attend, q, k, v):
        return self.apart(attend(q, k, v))

    def numbers(self, result):
        return result[0].float() * result[1]


class Nvfp4(Codes):
    function, dtype = staticmethod(in_nvfp4), getattr(torch, "float4_e2m1fn_x2", None)

    def numbers(self, result):
        byte = result[0].view(torch.uint8).int()
        code = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
        size = torch.tensor(FP4_LEVELS, device="cuda", dtype=torch.float32)[code & 7]
        scale = (result[1].float() * self.scale).repeat_interleave(16, -1)
        return torch.where(code > 7, -size, size) * scale


PROGRAMS = {"gate": Gate, "rope": Rope, "norm": Norm, "fp8": Codes, "rows": Rows, "nvfp4": Nvfp4}


def with_gradients(forward, leaves, dout):
    return lambda: torch.autograd.grad(forward(), leaves, dout)


def difference(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def measure(report, label, name, dim, length, rounds, flashjit):
    heads = COLUMNS // dim
    q, k, v, dout = measuring.tensors(TOKENS // length, heads, length, dim)
    program = PROGRAMS[name](q, k)
    with_both = "both" in program.passes
    leaves = [x.requires_grad_(with_both) for x in (q, k, v)]
    attend = lambda q, k, v: flashjit.attention(q, k, v, causal=True)
    forwards = {
        "plain": lambda: attend(q, k, v),
        "within": lambda: flashjit.attention(q, k, v, causal=True, **program.options),
        "apart": lambda: program.separate(attend, q, k, v),
    }
    trained = {
        way: with_gradients(call, leaves + (program.parameters if way != "plain" else []), dout)
        for way, call in forwards.items()
    }
    pairs = [tuple(program.numbers(forwards[way]()) for way in ("within", "apart"))]
    if with_both:
        pairs.extend(zip(trained["within"](), trained["apart"]()))
    worst = max(difference(*pair) for pair in pairs)
    if not worst < program.limit:
        report.failure(f"{label}: within the call and apart differ by {worst:.3f}")
    del pairs

    for kind, calls in (
        ("forward", {way: torch.no_grad()(call) for way, call in forwards.items()}),
        ("both", trained),
    ):
        if kind not in program.passes:
            continue
        ms = measuring.interleaved_ms(calls, rounds)
        for way, time in ms.items():
            report.row(
                **{"program": name, "dim": dim, "length": length, "pass": kind, "way": way},
                us=1e3 * time,
                of_plain=time / ms["plain"],
            )
        print(
            f"{label:18} {kind:8} plain {1e3 * ms['plain']:8.1f} us, within {1e3 * ms['within']:8.1f} "
            f"(+{1e3 * (ms['within'] - ms['plain']):.1f}), apart {1e3 * ms['apart']:8.1f} "
            f"(+{1e3 * (ms['apart'] - ms['plain']):.1f})",
            flush=True,
        )


def measure_all(report, flashjit, arguments):
    for name in PROGRAMS:
        for dim in (64, 128, 256):
            for length in (1024, 4096, 16384):
                label = f"{name} d{dim} {length}"
                if re.search(arguments.only, label):
                    measuring.guarded(
                        report, label, measure, report, label, name, dim, length, arguments.rounds, flashjit
                    )


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument(
        "--only", metavar="REGEX", default="", help='the problems whose name, as "rope d128 4096", matches'
    )
    parser.add_argument("--rounds", type=int, default=21, help="of timed calls (default %(default)s)")
    return measuring.command("stages", parser.parse_args(), TABLE, measure_all)


if __name__ == "__main__":
    sys.exit(main())

"""Every operation of programs over every pair of types against PyTorch, traced and as text; and random programs."""

import os
import random
import time

import flashjit
import pytest

torch = pytest.importorskip("torch", reason="the other side of the comparison")
from program_values import of_eager, of_library, raw_scores  # noqa: E402  (needs PyTorch)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
]
VALUES = {
    torch.bool: [0, 1],
    torch.uint8: [0, 1, 7, 200, 255],
    torch.int8: [-128, -3, 0, 1, 127],
    torch.int16: [-32768, -7, 0, 2, 32767],
    torch.int32: [-(2**31), -5, 0, 3, 2**31 - 1],
    torch.int64: [-(2**40), -4, 0, 5, 2**61 + 3],
}
NUMBERS = [True, 3, -2, 0.5, -1.75]


def values_of(dtype):
    return torch.tensor(VALUES.get(dtype, [-2.5, -0.75, 0.0, 1.0, 3.5]), dtype=dtype)


def pairs_of(x, y):
    """All pairs of two types' values, or of one type's and a Python number."""
    if not isinstance(y, torch.dtype):
        return values_of(x), y
    first, second = values_of(x), values_of(y)
    return first.repeat_interleave(len(second)), second.repeat(len(first))


def evaluated(score_mod, count, captures=None):
    """What a program makes of queries 0, 1, ...: the LSE of the only key."""
    q, k = torch.zeros(1, 1, count, 8), torch.zeros(1, 1, 1, 8)
    return flashjit.attention(q, k, k, score_mod=score_mod, captures=captures, return_lse=True)[1][0, 0]


def check_close(got, want, what):
    want = want.float()
    known = torch.isfinite(want)  # of the rest the language has rules of its own
    torch.testing.assert_close(
        got[known], want[known], rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )


TRACED = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "fmod": torch.fmod,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "**": lambda x, y: x**y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "<<": lambda x, y: x << y,
    ">>": lambda x, y: x >> y,
    "minimum": lambda x, y: torch.minimum(x, y),
    "maximum": lambda x, y: torch.maximum(x, y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "reversed": lambda x, y: y - x,
    "reversed /": lambda x, y: y / x,
    "logical_and": lambda x, y: torch.logical_and(x, y),
    "~": lambda x, y: ~x,
    "-x": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "sign": lambda x, y: torch.sign(x),
    "floor": lambda x, y: torch.floor(x),
    "float": lambda x, y: x.float(),
    "uint8": lambda x, y: x.byte(),
    "int16": lambda x, y: x.short(),
    "bool": lambda x, y: x.bool(),
}
UNARY = ("~", "-x", "abs", "sign", "floor", "float", "uint8", "int16", "bool")
ZERO_DIVIDES = ("//", "%", "fmod", "trunc")


@pytest.mark.parametrize("name", TRACED)
def test_traced_operations_are_pytorch_s(name):
    """Where PyTorch refuses types, so may flashjit; where it does not, both give the same."""
    operation, compared = TRACED[name], 0
    for x in DTYPES:
        for y in [*DTYPES, *NUMBERS]:
            if name in UNARY and y is not x:
                continue
            first, second = pairs_of(x, y)
            if name in ZERO_DIVIDES:
                kept = torch.as_tensor(second).bool() & (first == first)
                first, second = (
                    (first[kept], second[kept]) if isinstance(second, torch.Tensor) else (first, second)
                )
            if name in ("uint8", "int16") and x.is_floating_point:
                first = first.abs()  # of negative floats it is not defined
            if (
                name == "**"
                and not (x.is_floating_point or getattr(y, "is_floating_point", isinstance(y, float)))
                and y != 3
            ):
                continue  # ints to powers that are not known are refused
            try:
                want = operation(first, second)
            except (RuntimeError, TypeError):
                continue
            if (
                x.is_floating_point or isinstance(second, float) or getattr(y, "is_floating_point", False)
            ):  # as the reference does
                want = operation(*(t.double() if isinstance(t, torch.Tensor) else t for t in (first, second)))
            constant = not isinstance(second, torch.Tensor)
            got = evaluated(
                lambda s, b, h, q, kv: operation(first[q], second if constant else second[q]), len(first)
            )
            check_close(got, want, (name, x, y))
            compared += 1
    assert compared > 4


TEXTS = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
    "%": torch.fmod,
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "==": torch.eq,
    "!=": torch.ne,
    "&": torch.bitwise_and,
    "|": torch.bitwise_or,
    "^": torch.bitwise_xor,
    "&&": torch.logical_and,
    "||": torch.logical_or,
    "min": torch.minimum,
    "max": torch.maximum,
    "pow": torch.pow,
}
KINDS = {
    torch.bool: "bool",
    **dict.fromkeys([torch.uint8, torch.int8, torch.int16, torch.int32], "int"),
    torch.int64: "int64",
}
LANGUAGE = {
    "bool": torch.bool,
    "int": torch.int32,
    "int64": torch.int64,
    "float": torch.float64,
}  # float64: as the reference computes


@pytest.mark.parametrize("name", TEXTS)
def test_text_operations_are_those_of_ints_floats_and_bools(name):
    operation, compared = TEXTS[name], 0
    call = "{}(x[q], y[q])" if name.isalpha() else "(x[q] {} y[q])"
    for x in DTYPES:
        for y in DTYPES:
            kinds = {KINDS.get(x, "float"), KINDS.get(y, "float")}
            first, second = pairs_of(x, y)
            if kinds <= {"int", "int64"} and name in "/%":
                first, second = first[second != 0], second[second != 0]
            text = f"to_float({call.format(name)})"
            try:
                got = evaluated(text, len(first), {"x": first, "y": second})
            except flashjit.InvalidArgument:
                assert "bool" in kinds or name in ("&&", "||") or "float" in kinds, (name, x, y)
                continue
            kind = LANGUAGE[
                "float" if "float" in kinds or name == "pow" else "int64" if "int64" in kinds else kinds.pop()
            ]
            check_close(got, operation(first.to(kind), second.to(kind)), (name, x, y))
            compared += 1
    assert compared


# --- random programs ---------------------------------------------------------------------------------------------------

CAPTURES = {
    "u8": torch.tensor([3, 250, 0, 7, 129], dtype=torch.uint8),
    "i8": torch.tensor([-128, 5, 0, -1, 127], dtype=torch.int8),
    "i32": torch.tensor([2, -7, 0, 4, 1], dtype=torch.int32),
    "i64": torch.tensor([1, -3, 0, 2, 5]),
    "far": torch.tensor([2**40, -(2**40), 7, 2**40 + 1, 2**33]),
    "flags": torch.tensor([True, False, False, True, True]),
    "weights": torch.tensor([0.5, -1.25, 2.0, 0.0, -0.75]),
    "matrix": torch.arange(-10, 10).reshape(4, 5) / 4,
    "scale": torch.tensor(1.5),
    "shift": torch.tensor(2),
}


class RandomProgram:
    """The source of a score_mod. Its floats are sums and products of few bits, so that no rounding decides a comparison; what
    is not exact comes last."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def pick(self, *choices):
        return self.random.choice(choices)

    def integer(self, depth):
        if depth == 0:
            return self.pick(
                "q",
                "kv",
                "h",
                "b",
                "3",
                "(-2)",
                "shift",
                "len(weights)",
                "matrix.shape[1]",
                f"i32[{self.position()}]",
                f"i64[{self.position()}]",
                f"(far[{self.varying()}] - far[{self.varying()}]) // 65536",
                f"u8[{self.position()}]",
                f"i8[{self.position()}]",
            )
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        return self.pick(
            f"({x} + {y})",
            f"({x} - {y})",
            f"({x} * {self.pick('2', 'q', 'kv', '(-1)')})",
            f"({x} // {self.pick(2, 3, -2)})",
            f"({x} % {self.pick(2, 5, -3, 'len(weights)')})",
            f"({x} & {y})",
            f"({x} | {y})",
            f"({x} ^ {y})",
            f"({x} << {self.pick(1, 3)})",
            f"({x} >> {self.pick(1, 2, 40)})",
            f"abs({x})",
            f"torch.minimum(q + {x}, kv + {y})",
            f"torch.where({self.boolean(depth - 1)}, q + {x}, {y})",
            f"torch.sign(q + {x})",
            f"(q + {x}).to(torch.{self.pick('uint8', 'int8', 'int16', 'int32')})",
        )

    def position(self):
        return self.pick(self.varying(), self.varying(), "3", "-2")

    def varying(self):
        return self.pick("q", "kv", "-1 - q", "q - kv", "(q + kv) % 5", "(q * kv - 3) % len(weights)")

    def boolean(self, depth):
        if depth == 0:
            return self.pick(
                "(q >= kv)",
                f"flags[{self.position()}]",
                f"(far[{self.varying()}] {self.pick('==', '<')} far[{self.varying()}])",
                f"(kv < {self.integer(0)})",
                "(b == h)",
            )
        x, y = self.boolean(depth - 1), self.boolean(depth - 1)
        return self.pick(
            f"({x} & {y})",
            f"({x} | ~{y})",
            f"({x} ^ {y})",
            f"(q + {self.integer(depth - 1)} <= {self.integer(depth - 1)})",
            f"({self.real(depth - 1)} > {self.real(depth - 1)})",
            f"torch.logical_or({x}, {y})",
            f"({x} == {y})",
        )

    def real(self, depth):
        if depth == 0:
            return self.pick(
                "s",
                "s",
                f"weights[{self.position()}]",
                "matrix[q - 4, kv]",
                "matrix[q][kv - q]",
                "(0.25 + 0 * s)",
                "scale",
                "(q + kv) * 0.5",
                "matrix[:, kv][h]",
            )
        x = self.real(depth - 1)
        return self.pick(
            f"({x} + {self.real(depth - 1)})",
            f"({x} - {self.real(depth - 1)})",
            f"({x} * {self.real(0)})",
            f"abs({x})",
            f"(-{x})",
            f"torch.where({self.boolean(depth - 1)}, {x}, {self.real(depth - 1)})",
            f"torch.floor({x} * 1.0)",
            f"torch.clamp({x} * 1.0, -3.5, {self.pick(2, 2.5)})",
            f"torch.maximum({x} + s, {self.real(0)} - s)",
            f"({x} + (q + {self.integer(depth - 1)}) % 64)",
            f"torch.relu({x} - s)",
            f"({x} % 0.75)",
            f"({x} // 0.5)",
            f"torch.round({x} * 2.0)",
            f"({x} + {self.boolean(depth - 1)} * 2.0)",
            f"({x} + matrix[h].sum())",
        )

    def source(self):
        x, y = self.real(3), self.real(2)
        return "lambda s, b, h, q, kv: " + self.pick(
            x,
            f"torch.tanh({x} * 0.1) + {y}",
            f"torch.sigmoid(s + {x}) * ({y})",
            f"F.gelu(s + {x}) + torch.sin({y} + s)",
            f"torch.exp(-abs({x} + s)) - F.softplus(s * {y})",
        )


def test_random_programs_are_pytorch_s():
    """For a few seconds; FLASHJIT_FUZZ_SEED repeats one."""
    given = os.environ.get("FLASHJIT_FUZZ_SEED")
    first = int(given) if given else time.time_ns() % 10**9
    end, count = time.monotonic() + 6, 0
    scores = raw_scores(first)
    names = {"torch": torch, "F": torch.nn.functional, **CAPTURES}
    while count < (1 if given else 40) and (time.monotonic() < end or count < 3):
        source = RandomProgram(first + count).source()
        what = f"FLASHJIT_FUZZ_SEED={first + count}: {source}"
        function = eval(source, dict(names))
        want = of_eager(function, scores)
        if want.abs().max() < 1e6:
            try:
                got = of_library(function, scores=scores)
            except flashjit.InvalidArgument as error:
                assert "levels deep" in str(error) or "nodes" in str(error), (what, error)
            else:
                torch.testing.assert_close(
                    got, want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}"
                )
        count += 1
    print(f"{count} programs from seed {first}")


def test_sums_of_int64_saturate():
    """PyTorch's wrap. A number that stands for "no limit" stays one, so that masks may move positions across it."""
    most = torch.tensor([2**63 - 1], dtype=torch.int64)
    got = evaluated(lambda s, b, h, q, kv: s + torch.where(most[b] + q >= most[b], 1.0, 0.0), 3)
    torch.testing.assert_close(got, torch.ones(3))

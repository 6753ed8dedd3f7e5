"""Functions of torch on stand-ins, by their names there; those of a tensor are its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _arithmetic as ops
from . import _values as v
from ._torch_names import FUNCTIONS
from ._values import INFINITY, Value, as_bool, as_float, condition, converted, literal, real
from .errors import InvalidArgument, WrongType


def _unary(text: str) -> Callable[..., Value]:
    """A function of floats; {x} is its argument."""
    return lambda input: real(text.replace("{x}", as_float(input)), _float_dtype(input))


def _float_dtype(*values: Any) -> str:
    dtype = v.promoted(*map(literal, values))
    return dtype if Value("", dtype).type == "float" else "float32"


def _whole(function: str) -> Callable[..., Value]:
    """A function that leaves ints as they are."""

    def rounded(input: Any, *, decimals: int = 0) -> Value:
        if decimals != 0:
            raise InvalidArgument(
                "a program rounds to whole numbers: write torch.round(x * 10) / 10 instead of decimals=1."
            )
        x = literal(input)
        return real(function.replace("{x}", x.text), x.dtype_name) if x.type == "float" else x

    return rounded


def _sign(input: Any) -> Value:
    x = literal(input)
    if x.type == "bool":
        return x
    return ops.where(
        ops.compare(">", x, 0),
        converted(1, x.dtype_name),
        ops.where(
            ops.compare("<", x, 0),
            converted(-1, v.strong(x.dtype_name))
            if x.low < 0 or x.type == "float"
            else converted(0, x.dtype_name),
            converted(0, x.dtype_name),
        ),
    )


def _test(text: str, of_ints: bool) -> Callable[..., Value]:
    """What is asked of floats; ints are finite."""

    def test(input: Any) -> Value:
        x = literal(input)
        return condition(text.replace("{x}", x.text)) if x.type == "float" else literal(of_ints)

    return test


def _min_or_max(function: str) -> Callable[..., Value]:
    def chosen(input: Any, other: Any = None, *more: Any) -> Value:
        if other is None or more or isinstance(other, tuple):
            raise WrongType(
                f"torch.{function} in a program takes two values: the smaller or the larger of them."
            )
        return ops.chosen(function, input, other)

    return chosen


def _clamp(input: Any, min: Any = None, max: Any = None) -> Value:
    result = literal(input)
    if min is not None:
        result = ops.chosen("max", result, min)
    return result if max is None else ops.chosen("min", result, max)


def _where(condition: Any, input: Any = None, other: Any = None, *, self: Any = None) -> Value:
    input = self if input is None else input
    if input is None or other is None:
        raise WrongType("torch.where needs three arguments in a program: where(condition, a, b).")
    return ops.where(condition, input, other)


def _divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return ops.divide(input, other)
    if rounding_mode not in ("floor", "trunc"):
        raise InvalidArgument(f"rounding_mode is {rounding_mode!r}: give 'floor', 'trunc' or None.")
    return (ops.floor_divide if rounding_mode == "floor" else ops.truncated_divide)(input, other)


def _scaled(operator: Callable[[Any, Any], Value]) -> Callable[..., Value]:
    """torch.add(a, b, alpha=2)."""

    def scaled(input: Any, other: Any, *, alpha: Any = 1) -> Value:
        factor, number = literal(alpha).number, literal(other).number
        if factor is None or number is None:
            return operator(input, other if factor == 1 else ops.multiply(other, alpha))
        return operator(input, number if factor == 1 else number * factor)

    return scaled


def _logical(operator: str) -> Callable[..., Value]:
    return lambda input, other: ops.bits(operator, as_bool(input), as_bool(other))


def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    return converted(fill_value, literal(input).dtype_name if dtype is None else v.dtype_name(dtype))


def _new(number: int) -> Callable[..., Value]:
    """position.new_ones((), dtype=torch.bool), as FlexAttention's compositions of masks begin."""
    return lambda input, *size, dtype=None, **_: _full_like(input, number, dtype=dtype)


def _to(input: Any, *arguments: Any, dtype: Any = None, other: Any = None, **_: Any) -> Value:
    """to(dtype), to(other), to(device), to(device, dtype)."""
    for argument in (*arguments, other):
        if isinstance(argument, Value):
            return converted(input, v.strong(argument.dtype_name))
        if dtype is None and argument is not None and ("." in str(argument) or isinstance(argument, type)):
            dtype = argument
    return literal(input) if dtype is None else converted(input, v.dtype_name(dtype))


def _conversion(dtype: str) -> Callable[..., Value]:
    return lambda input, **_: converted(input, dtype)


def _refuse(instead: str) -> Callable[..., Value]:
    def refused(*_: Any, **__: Any) -> Value:
        raise InvalidArgument(instead)

    return refused


# --- activations -------------------------------------------------------------------------------------------------------


def _relu(input: Any) -> Value:
    return ops.chosen("max", converted(0, literal(input).dtype_name), input)  # at 0 its slope is 0


def _between(input: Any, low: Any, high: Any) -> Value:
    """A clamp without slope at its ends."""
    return ops.chosen("min", high, ops.chosen("max", low, input))


def _gelu(input: Any, *, approximate: str = "none") -> Value:
    x = v.as_real(input)
    if approximate == "tanh":
        return 0.5 * x * (1.0 + FUNCTIONS["tanh"](0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if approximate != "none":
        raise InvalidArgument(f"approximate is {approximate!r}: give 'none' or 'tanh'.")
    return 0.5 * x * (1.0 + FUNCTIONS["erf"](x * 0.7071067811865476))


def _elu(input: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Value:
    x = v.as_real(input)
    return scale * ops.where(x > 0, x, alpha * FUNCTIONS["expm1"](x * input_scale))


def _softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Value:
    x = v.as_real(input)
    scaled = x * beta
    return ops.where(scaled > threshold, x, FUNCTIONS["log1p"](FUNCTIONS["exp"](scaled)) / beta)


def _shrunk(input: Any, lambd: Any = 0.5, *, soft: bool) -> Value:
    x = v.as_real(input)
    by = lambd if soft else 0.0
    return ops.where(x > lambd, x - by, ops.where(x < -lambd, x + by, 0.0))


def _nan_to_num(input: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    x = literal(input)
    if x.type != "float":
        return x
    most = 3.4028234663852886e38
    bounded = _clamp(x, -most if neginf is None else neginf, most if posinf is None else posinf)
    if posinf is not None or neginf is not None:
        bounded = ops.where(
            condition(f"({x.text} == {INFINITY})"),
            most if posinf is None else posinf,
            ops.where(condition(f"({x.text} == -{INFINITY})"), -most if neginf is None else neginf, x),
        )
    return ops.where(x != x, nan, bounded)


FUNCTIONS.update(
    {
        **{
            name: _unary(name + "({x})")
            for name in (
                "exp",
                "exp2",
                "expm1",
                "log",
                "log2",
                "log1p",
                "sqrt",
                "rsqrt",
                "tanh",
                "sigmoid",
                "erf",
                "sin",
                "cos",
            )
        },
        "expit": _unary("sigmoid({x})"),
        "erfc": _unary("(1.0 - erf({x}))"),
        "tan": _unary("(sin({x}) / cos({x}))"),
        "log10": _unary("(log2({x}) * 0.30102999566398120)"),
        "cosh": _unary("(0.5 * exp({x}) + 0.5 * exp(-{x}))"),
        "sinh": _unary("(0.5 * expm1({x}) - 0.5 * expm1(-{x}))"),
        "logit": _unary("log({x} / (1.0 - {x}))"),
        "reciprocal": _unary("(1.0 / {x})"),
        "deg2rad": _unary("({x} * 0.017453292519943295)"),
        **{name: _whole(name + "({x})") for name in ("floor", "trunc", "round")},
        "ceil": _whole("(-floor(-{x}))"),
        "fix": _whole("trunc({x})"),
        "frac": lambda input: input - FUNCTIONS["trunc"](input),
        "abs": ops.absolute,
        "absolute": ops.absolute,
        "neg": ops.negate,
        "negative": ops.negate,
        "pos": literal,
        "positive": literal,
        "square": lambda input: ops.power(input, 2),
        "sign": _sign,
        "sgn": _sign,
        "isfinite": _test(f"(abs({{x}}) < {INFINITY})", True),
        "isnan": _test("({x} != {x})", False),
        "isinf": _test(f"(abs({{x}}) == {INFINITY})", False),
        "isposinf": _test(f"({{x}} == {INFINITY})", False),
        "isneginf": _test(f"({{x}} == -{INFINITY})", False),
        "signbit": _test("({x} < 0.0)", False),
        "nan_to_num": _nan_to_num,
        "where": _where,
        **{name: _min_or_max(name[:3]) for name in ("min", "max", "minimum", "maximum")},
        "fmin": _min_or_max("min"),
        "fmax": _min_or_max("max"),
        "clamp": _clamp,
        "clip": _clamp,
        "clamp_min": lambda input, min: _clamp(input, min),
        "clamp_max": lambda input, max: _clamp(input, None, max),
        "add": _scaled(ops.add),
        "sub": _scaled(ops.subtract),
        "subtract": _scaled(ops.subtract),
        "rsub": _scaled(lambda a, b: ops.subtract(b, a)),
        "mul": ops.multiply,
        "multiply": ops.multiply,
        "div": _divide,
        "divide": _divide,
        "true_divide": _divide,
        "truediv": _divide,
        "floor_divide": ops.floor_divide,
        "floordiv": ops.floor_divide,
        "remainder": ops.remainder,
        "mod": ops.remainder,
        "fmod": ops.truncated_remainder,
        "pow": ops.power,
        "float_power": ops.power,
        "lerp": lambda input, end, weight: input + weight * (literal(end) - input),
        "addcmul": lambda input, a, b, *, value=1: input + ops.multiply(ops.multiply(a, b), value),
        "addcdiv": lambda input, a, b, *, value=1: input + ops.multiply(ops.divide(a, b), value),
        "hypot": lambda input, other: FUNCTIONS["sqrt"](
            ops.multiply(input, input) + ops.multiply(other, other)
        ),
        "logaddexp": lambda input, other: _softplus(ops.subtract(other, input)) + input,
        "lt": lambda input, other: ops.compare("<", input, other),
        "less": lambda input, other: ops.compare("<", input, other),
        "le": lambda input, other: ops.compare("<=", input, other),
        "less_equal": lambda input, other: ops.compare("<=", input, other),
        "gt": lambda input, other: ops.compare(">", input, other),
        "greater": lambda input, other: ops.compare(">", input, other),
        "ge": lambda input, other: ops.compare(">=", input, other),
        "greater_equal": lambda input, other: ops.compare(">=", input, other),
        "eq": lambda input, other: ops.compare("==", input, other),
        "ne": lambda input, other: ops.compare("!=", input, other),
        "not_equal": lambda input, other: ops.compare("!=", input, other),
        **{
            name: lambda input, other, sign=sign: ops.bits(sign, input, other)
            for sign, names in (
                ("&", ("and", "bitwise_and")),
                ("|", ("or", "bitwise_or")),
                ("^", ("xor", "bitwise_xor")),
            )
            for name in names
        },
        "invert": ops.invert,
        "bitwise_not": ops.invert,
        "lshift": ops.shift_left,
        "bitwise_left_shift": ops.shift_left,
        "rshift": ops.shift_right,
        "bitwise_right_shift": ops.shift_right,
        "logical_and": _logical("&"),
        "logical_or": _logical("|"),
        "logical_xor": _logical("^"),
        "logical_not": lambda input: ops.invert(as_bool(input)),
        "zeros_like": lambda input, **named: _full_like(input, 0, **named),
        "ones_like": lambda input, **named: _full_like(input, 1, **named),
        "full_like": _full_like,
        "new_ones": _new(1),
        "new_zeros": _new(0),
        "masked_fill": lambda input, mask, value: ops.where(
            mask, converted(value, literal(input).dtype_name), input
        ),
        # Conversions.
        "to": _to,
        "type": _to,
        "type_as": _to,
        **{
            name: _conversion(dtype)
            for name, dtype in (
                ("float", "float32"),
                ("half", "float16"),
                ("bfloat16", "bfloat16"),
                ("bool", "bool"),
                ("byte", "uint8"),
                ("char", "int8"),
                ("short", "int16"),
                ("int", "int32"),
                ("long", "int64"),
            )
        },
        "double": _refuse("a program computes in float32: write .float() instead of .double()."),
        "unsqueeze": lambda input, dim: literal(
            input
        ),  # so that it meets each element of a captured row, as it does anyway
        "clone": lambda input, **_: literal(input),
        "contiguous": lambda input, **_: literal(input),
        "cpu": literal,
        "detach": _refuse(
            "a program's values have the gradients of all that is written: detach what is captured, before the call."
        ),
        # Activations.
        "relu": _relu,
        "relu6": lambda input: _between(input, 0, 6),
        "gelu": _gelu,
        "elu": _elu,
        "softplus": _softplus,
        "silu": lambda input: v.as_real(input) * FUNCTIONS["sigmoid"](input),
        "celu": lambda input, alpha=1.0: _elu(input, alpha, 1.0, 1.0 / alpha),
        "selu": lambda input: _elu(input, 1.6732632423543772, 1.0507009873554805),
        "leaky_relu": lambda input, negative_slope=0.01: ops.where(
            literal(input) > 0, input, ops.multiply(input, negative_slope)
        ),
        "hardtanh": lambda input, min_val=-1.0, max_val=1.0: _between(input, min_val, max_val),
        "log_sigmoid": lambda input: ops.where(literal(input) < -20, input, -_softplus(-literal(input))),
        "hardsigmoid": lambda input: _between(v.as_real(input) / 6 + 0.5, 0.0, 1.0),
        "hardswish": lambda input: v.as_real(input) * FUNCTIONS["hardsigmoid"](input),
        "mish": lambda input: v.as_real(input) * FUNCTIONS["tanh"](_softplus(input)),
        "softsign": lambda input: v.as_real(input) / (1.0 + ops.absolute(input)),
        "tanhshrink": lambda input: input - FUNCTIONS["tanh"](input),
        "softshrink": lambda input, lambd=0.5: _shrunk(input, lambd, soft=True),
        "hardshrink": lambda input, lambd=0.5: _shrunk(input, lambd, soft=False),
        "threshold": lambda input, threshold, value: ops.where(literal(input) > threshold, input, value),
    }
)
FUNCTIONS["logsigmoid"] = FUNCTIONS["log_sigmoid"]

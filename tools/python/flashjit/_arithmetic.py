"""Operators of stand-ins, with PyTorch's types and the ranges of their results; at the end Value gets them by Python's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ._values import (
    FLOATS,
    Value,
    as_bool,
    as_float,
    as_text,
    condition,
    converted,
    float_text,
    int_text,
    integer,
    is_long,
    language_type,
    limits,
    literal,
    operands,
    promoted,
    strong,
)
from .errors import InvalidArgument, WrongType


def add(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        return Value(f"({as_float(x)} + {as_float(y)})", dtype)
    if dtype == "bool":
        return bits("|", x, y)
    (low, high), (other_low, other_high) = limits(x), limits(y)
    return integer("({} + {})", dtype, low + other_low, high + other_high, x, y)


def subtract(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        return Value(f"({as_float(x)} - {as_float(y)})", dtype)
    if dtype == "bool":
        raise WrongType("PyTorch has no - of two booleans: use ^, or convert one with .int().")
    (low, high), (other_low, other_high) = limits(x), limits(y)
    return integer("({} - {})", dtype, low - other_high, high - other_low, x, y)


def multiply(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        return Value(f"({as_float(x)} * {as_float(y)})", dtype)
    if dtype == "bool":
        return bits("&", x, y)
    products = [m * n for m in limits(x) for n in limits(y)]
    return integer("({} * {})", dtype, min(products), max(products), x, y)


def divide(a: Any, b: Any) -> Value:
    x, y = literal(a), literal(b)
    dtype = promoted(x, y)
    return Value(f"({as_float(x)} / {as_float(y)})", dtype if dtype in FLOATS else "float32")


def _signs_differ(of_divisor: tuple[int, int]) -> str:
    """Whether a division of ints has a rest, and rounds towards zero where Python rounds down."""
    return "{0} % {1} < 0" if of_divisor[0] > 0 else "{0} % {1} != 0 && ({0} < 0) != ({1} < 0)"


def floor_divide(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        p, q = as_float(x), as_float(y)
        return Value(f"select({q} == 0.0, {p} / {q}, round(({p} - {_float_remainder(p, q)}) / {q}))", dtype)
    dtype = "int64" if dtype == "bool" else dtype
    (low, high), of_divisor = limits(x), limits(y)
    if low >= 0 and of_divisor[0] >= 0:
        return integer("({0} / {1})", dtype, 0, high, x, y)
    size = max(-low, high)
    return integer(f"({{0}} / {{1}} - to_int({_signs_differ(of_divisor)}))", dtype, -size, size, x, y)


def _float_remainder(x: str, y: str) -> str:
    return f"({x} % {y} + select({x} % {y} != 0.0 && ({x} % {y} < 0.0) != ({y} < 0.0), {y}, 0.0))"


def remainder(a: Any, b: Any) -> Value:
    """With the divisor's sign, as Python's."""
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        return Value(_float_remainder(as_float(x), as_float(y)), dtype)
    dtype = "int64" if dtype == "bool" else dtype
    (low, high), (least, most) = limits(x), limits(y)
    if low >= 0 and least >= 0:
        return integer("({0} % {1})", dtype, 0, max(0, min(high, most - 1)), x, y)
    return integer(
        f"({{0}} % {{1}} + select({_signs_differ((least, most))}, {{1}}, 0))",
        dtype,
        min(0, least + 1),
        max(0, most - 1),
        x,
        y,
    )


def truncated_remainder(a: Any, b: Any) -> Value:
    """With the dividend's sign, as C's and torch.fmod."""
    x, y, dtype = _no_booleans("fmod", *operands(a, b))
    if dtype in FLOATS:
        return Value(f"({as_float(x)} % {as_float(y)})", dtype)
    low, high = limits(x)
    return integer("({} % {})", dtype, min(low, 0), max(high, 0), x, y)


def _no_booleans(name: str, x: Value, y: Value, dtype: str) -> tuple[Value, Value, str]:
    if dtype == "bool":
        raise WrongType(f"PyTorch has no {name} of two booleans: convert one with .int().")
    return x, y, dtype


def truncated_divide(a: Any, b: Any) -> Value:
    x, y, dtype = _no_booleans("truncated division", *operands(a, b))
    if dtype in FLOATS:
        return Value(f"trunc({as_float(x)} / {as_float(y)})", dtype)
    size = max(-limits(x)[0], limits(x)[1])
    return integer("({} / {})", dtype, -size, size, x, y)


def power(a: Any, b: Any) -> Value:
    x, y = literal(a), literal(b)
    dtype = promoted(x, y)
    exponent = y.number if not isinstance(y.number, bool) else int(y.number)
    if dtype not in FLOATS:
        return _int_power(x, y, exponent, dtype)
    if exponent is not None and 1 <= abs(exponent) <= 8 and exponent == int(exponent):
        value = product = converted(x, dtype)
        for _ in range(abs(int(exponent)) - 1):
            product = multiply(product, value)
        return product if exponent > 0 else divide(1.0, product)
    if exponent in (0.5, -0.5):
        return Value(f"{'sqrt' if exponent > 0 else 'rsqrt'}({as_float(x)})", dtype)
    if x.number is not None and x.number > 0:
        power_of_two = as_float(y) if x.number == 2 else f"{as_float(y)} * {float_text(math.log2(x.number))}"
        return Value(f"exp2({power_of_two})", dtype)
    return Value(f"pow({as_float(x)}, {as_float(y)})", dtype)


def _int_power(x: Value, y: Value, exponent: Any, dtype: str) -> Value:
    if exponent is None and x.number == 2:
        return shift_left(converted(1, strong(dtype)), y)
    if exponent is None or exponent < 0 or exponent > 8:
        raise InvalidArgument(
            "a program raises integers to constant powers from 0 to 8 only: convert one of the two with "
            ".float()."
        )
    product = converted(1, "int64" if dtype == "bool" else dtype)
    for _ in range(exponent):
        product = multiply(product, x)
    return product


def negate(a: Any) -> Value:
    x = literal(a)
    if x.type == "float":
        return Value(f"(-{x.text})", x.dtype_name)
    if x.type == "bool":
        raise WrongType("PyTorch has no - of a boolean: use ~, or convert it with .int().")
    return integer("(-{})", x.dtype_name, -x.high, -x.low, x)


def absolute(a: Any) -> Value:
    x = literal(a)
    if x.type == "float":
        return Value(f"abs({x.text})", x.dtype_name)
    if x.type == "bool":
        return x
    low, high = (x.low, x.high) if x.low >= 0 else (0, max(-x.low, x.high))
    return integer("abs({})", x.dtype_name, low, high, x)


def compare(operator: str, a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        return condition(f"({as_float(x)} {operator} {as_float(y)})")
    if dtype == "bool" and operator in ("==", "!="):
        return condition(f"({x.text} {operator} {y.text})")
    return condition(f"({int_text(x, dtype)} {operator} {int_text(y, dtype)})")


_LOGICAL = {"&": ("&&", "true"), "|": ("||", "false"), "^": ("!=", "")}  # and what changes nothing


def bits(operator: str, a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        raise WrongType(
            f"{operator} needs booleans or integers, not floats; put comparisons into parentheses."
        )
    if dtype == "bool":
        logical, neutral = _LOGICAL[operator]
        if neutral in (x.text, y.text):  # what compositions of masks begin with
            return y if x.text == neutral else x
        return condition(f"({x.text} {logical} {y.text})")
    low, high = _bit_range(operator, limits(x), limits(y))
    return integer(f"({{}} {operator} {{}})", dtype, low, high, x, y)


def _bit_range(operator: str, x: tuple[int, int], y: tuple[int, int]) -> tuple[int, int]:
    naturals = [high for low, high in (x, y) if low >= 0]
    if operator == "&" and naturals:
        return 0, min(naturals)
    ones = (1 << max(map(_bit_length, (*x, *y)))) - 1
    return (0, ones) if len(naturals) == 2 else (-ones - 1, ones)


def _bit_length(number: int) -> int:
    return (number if number >= 0 else ~number).bit_length()


def invert(a: Any) -> Value:
    x = literal(a)
    if x.type == "float":
        raise WrongType("~ needs a boolean or an integer, not a float.")
    if x.type == "bool":
        return condition(f"(!{x.text})")
    return integer("(~{})", x.dtype_name, -x.high - 1, -x.low - 1, x)


def _shift_operands(operator: str, a: Any, b: Any) -> tuple[Value, Value, str]:
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        raise WrongType(f"{operator} needs integers, not floats.")
    return x, y, "int64" if dtype == "bool" else dtype


def shift_left(a: Any, b: Any) -> Value:
    x, y, dtype = _shift_operands("<<", a, b)
    width = 64 if dtype == "int64" else 32
    (low, high), (least, most) = limits(x), limits(y)
    if least >= 0 and most < width:
        moved = [bound << by for bound in (low, high) for by in (least, most)]
        return integer("({} << {})", dtype, min(moved), max(moved), x, y)
    # The language takes counts modulo the width.
    return integer(f"select({{1}} >= 0 && {{1}} < {width}, {{0}} << {{1}}, 0)", dtype, -(2**64), 2**64, x, y)


def shift_right(a: Any, b: Any) -> Value:
    x, y, dtype = _shift_operands(">>", a, b)
    last = 63 if x.wide else 31
    (low, high), (least, most) = limits(x), limits(y)
    pattern = "({0} >> {1})"
    if least < 0 or most > last:
        pattern, least, most = f"({{0}} >> select({{1}} >= 0 && {{1}} < {last}, {{1}}, {last}))", 0, last
    moved = [bound >> by for bound in (low, high) for by in (least, most)]
    return integer(pattern, dtype, min(moved), max(moved), x, y)


def chosen(function: str, a: Any, b: Any) -> Value:
    """min or max."""
    x, y, dtype = operands(a, b)
    if dtype in FLOATS:
        return Value(f"{function}({as_float(x)}, {as_float(y)})", dtype)
    if dtype == "bool":
        return bits("&" if function == "min" else "|", x, y)
    choose = min if function == "min" else max
    (low, high), (other_low, other_high) = limits(x), limits(y)
    return integer(f"{function}({{}}, {{}})", dtype, choose(low, other_low), choose(high, other_high), x, y)


def where(test: Any, a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    test, dtype = as_bool(test), strong(dtype)
    kind = language_type(dtype)
    first, second = [int_text(value, dtype) if kind == "int" else as_text(value, kind) for value in (x, y)]
    wide = kind == "int" and any([value.wide or is_long(value) for value in (x, y)])
    (low, high), (other_low, other_high) = limits(x), limits(y)
    return Value(
        f"select({test.text}, {first}, {second})",
        dtype,
        min(low, other_low),
        max(high, other_high),
        wide=wide,
        arms=(
            test,
            Value(first, dtype, low, high, arms=x.arms),
            Value(second, dtype, other_low, other_high, arms=y.arms),
        ),
    )


# --- Python's names ----------------------------------------------------------------------------------------------------


def _both_ways(function: Callable[[Any, Any], Value]) -> tuple[Callable[..., Value], Callable[..., Value]]:
    return lambda self, other: function(self, other), lambda self, other: function(other, self)


def _sign(function: Callable[[str, Any, Any], Value], sign: str) -> Callable[[Any, Any], Value]:
    return lambda a, b: function(sign, a, b)


for _name, _function in (
    ("add", add),
    ("sub", subtract),
    ("mul", multiply),
    ("truediv", divide),
    ("floordiv", floor_divide),
    ("mod", remainder),
    ("pow", power),
    ("and", _sign(bits, "&")),
    ("or", _sign(bits, "|")),
    ("xor", _sign(bits, "^")),
    ("lshift", shift_left),
    ("rshift", shift_right),
):
    _left, _right = _both_ways(_function)
    setattr(Value, f"__{_name}__", _left)
    setattr(Value, f"__r{_name}__", _right)
for _name, _symbol in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    setattr(Value, f"__{_name}__", _sign(compare, _symbol))
setattr(Value, "__neg__", lambda self: negate(self))
setattr(Value, "__pos__", lambda self: self)
setattr(Value, "__abs__", lambda self: absolute(self))
setattr(Value, "__invert__", lambda self: invert(self))

"""Stand-ins for the numbers of a program: they write down what is done to them, with PyTorch's types.

A value has a dtype of PyTorch, or that of a Python number, "int" or "float", which takes the type of what it meets. In the
program's language it is a float (fp32, whatever PyTorch's precision), a bool, an int of 32 bits or an int64. Smaller ints wrap
as PyTorch's do, by a mask where their range asks for one; an int64 whose range fits 32 bits is an int where it can be.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from .errors import InvalidArgument, WrongType

#: Types of captured arrays, as PyTorch and JAX call them, and as the language does.
ELEMENTS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int32": "int32",
    "int64": "int64",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "bool",
}
_FLOATS = frozenset(("float", "float16", "bfloat16", "float32"))
_RANGES = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "int": (-(2**31), 2**31 - 1),
}
_INT = _RANGES["int32"]
_WIDTHS = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}
_BEYOND_FLOAT = float.fromhex("0x1.ffffffp127")  # from here on fp32 rounds to infinity
_MOST_BITS = 1023  # of an int that a Python float holds
# A value that is used twice is written twice: 20 rounds of s = s * 0.5 + s * 0.25 double their text 20 times.
# The language takes 64 KiB; a value that the result does not use may be longer.
_MOST_TEXT = 1 << 20

INFINITY, LOWEST = "(1.0 / 0.0)", "(-1.0 / 0.0)"


class UnknownAttribute(InvalidArgument, AttributeError):
    """A stand-in does not have what a tensor has."""


def _language_type(dtype: str) -> str:
    return "float" if dtype in _FLOATS else "bool" if dtype == "bool" else "int"


class Value:
    """Stands for a number that the kernel will know: a score, a position, or what is computed from them.

    dtype: "float32", "int32", "bool", ...; "int" and "float" of Python numbers. type: in the language. low, high: what an int
    lies between. wide: whether it is an int64 in the language. number: of a constant. arms: of a where(), its condition and
    its two values.
    """

    __slots__ = ("text", "dtype_name", "type", "low", "high", "wide", "number", "arms")
    __array_ufunc__ = None  # so that NumPy's numbers leave operators to this class

    def __init__(
        self,
        text: str,
        dtype: str,
        low: int = 0,
        high: int = 0,
        number: Any = None,
        arms: tuple[Value, Value, Value] | None = None,
        wide: bool = False,
    ) -> None:
        if len(text) > _MOST_TEXT:
            raise InvalidArgument(
                f"a program grew beyond {_MOST_TEXT} characters, as a value that is used twice is "
                "written twice: compute in fewer steps, or capture a table of the results."
            )
        self.text, self.dtype_name, self.type, self.low, self.high = (
            text,
            dtype,
            _language_type(dtype),
            low,
            high,
        )
        self.number, self.arms, self.wide = number, arms, wide

    def __repr__(self) -> str:
        return f"<{self.dtype_name} {self.text}>"

    # Arithmetic.
    def __add__(self, other: Any) -> Value:
        return add(self, other)

    def __radd__(self, other: Any) -> Value:
        return add(other, self)

    def __sub__(self, other: Any) -> Value:
        return subtract(self, other)

    def __rsub__(self, other: Any) -> Value:
        return subtract(other, self)

    def __mul__(self, other: Any) -> Value:
        return multiply(self, other)

    def __rmul__(self, other: Any) -> Value:
        return multiply(other, self)

    def __truediv__(self, other: Any) -> Value:
        return divide(self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return divide(other, self)

    def __floordiv__(self, other: Any) -> Value:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return floor_divide(other, self)

    def __mod__(self, other: Any) -> Value:
        return remainder(self, other)

    def __rmod__(self, other: Any) -> Value:
        return remainder(other, self)

    def __pow__(self, other: Any) -> Value:
        return power(self, other)

    def __rpow__(self, other: Any) -> Value:
        return power(other, self)

    def __neg__(self) -> Value:
        return negate(self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return absolute(self)

    # Comparisons.
    def __lt__(self, other: Any) -> Value:
        return compare("<", self, other)

    def __le__(self, other: Any) -> Value:
        return compare("<=", self, other)

    def __gt__(self, other: Any) -> Value:
        return compare(">", self, other)

    def __ge__(self, other: Any) -> Value:
        return compare(">=", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return compare("==", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return compare("!=", self, other)

    __hash__ = None  # type: ignore[assignment]

    # Bits and logic.
    def __and__(self, other: Any) -> Value:
        return bits("&", self, other)

    def __rand__(self, other: Any) -> Value:
        return bits("&", other, self)

    def __or__(self, other: Any) -> Value:
        return bits("|", self, other)

    def __ror__(self, other: Any) -> Value:
        return bits("|", other, self)

    def __xor__(self, other: Any) -> Value:
        return bits("^", self, other)

    def __rxor__(self, other: Any) -> Value:
        return bits("^", other, self)

    def __invert__(self) -> Value:
        return invert(self)

    def __lshift__(self, other: Any) -> Value:
        return shift_left(self, other)

    def __rlshift__(self, other: Any) -> Value:
        return shift_left(other, self)

    def __rshift__(self, other: Any) -> Value:
        return shift_right(self, other)

    def __rrshift__(self, other: Any) -> Value:
        return shift_right(other, self)

    # What Python asks for and a kernel cannot answer.
    def __bool__(self) -> bool:
        raise WrongType(
            "a program has no branches: use torch.where(condition, a, b) instead of if, and &, |, ~ with "
            "parentheses instead of and, or, not."
        )

    def _no_number(self, *_: Any) -> Any:
        raise WrongType(
            "the value is known in the kernel only, so it has no Python number: use functions of torch "
            "(torch.tanh, torch.floor, ...) instead of math's, and no range() or indexing of lists by it."
        )

    __float__ = __int__ = __index__ = __len__ = __iter__ = __complex__ = _no_number
    __round__ = __floor__ = __ceil__ = __trunc__ = item = tolist = _no_number

    # What tensors have.
    device = None
    shape = ()
    ndim = 0
    requires_grad = False

    @property
    def dtype(self) -> Any:
        return getattr(
            loaded_torch(), {"int": "int64", "float": "float32"}.get(self.dtype_name, self.dtype_name)
        )

    def dim(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        function = FUNCTIONS.get(name)
        if function is None and name.endswith("_") and not name.startswith("_"):
            refuse_in_place(name)
        if function is None or name.startswith("__"):
            raise UnknownAttribute(without_function(name))
        return lambda *arguments, **named: call(name, function, (self, *arguments), named)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        return tracers[-1].call_torch(function, arguments, named or {})


class Size(int):
    """A size of a captured tensor: Python knows it, and a program asks the call, so that it serves other sizes, too."""

    value: Value

    def __new__(cls, number: int, value: Value) -> Size:
        self = int.__new__(cls, number)
        self.value = value
        return self

    def _with(self, name: str, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return Size(getattr(int, name)(self, other), getattr(self.value, name)(other))

    def __add__(self, other: Any) -> Any:
        return self._with("__add__", other)

    def __radd__(self, other: Any) -> Any:
        return self._with("__radd__", other)

    def __sub__(self, other: Any) -> Any:
        return self._with("__sub__", other)

    def __rsub__(self, other: Any) -> Any:
        return self._with("__rsub__", other)

    def __mul__(self, other: Any) -> Any:
        return self._with("__mul__", other)

    def __rmul__(self, other: Any) -> Any:
        return self._with("__rmul__", other)

    def __floordiv__(self, other: Any) -> Any:
        return self._with("__floordiv__", other)

    def __mod__(self, other: Any) -> Any:
        return self._with("__mod__", other)

    def __neg__(self) -> Size:
        return Size(-int(self), -self.value)


class Shape(tuple):
    """The sizes of a captured tensor."""

    def numel(self) -> Any:
        product: Any = self[0] if self else 1
        for size in self[1:]:
            product = product * size
        return product


# --- numbers as values -------------------------------------------------------------------------------------------------


def literal(value: Any) -> Value:
    if isinstance(value, Value):
        return value
    if isinstance(value, Size):
        return value.value
    if isinstance(value, bool):
        return Value("true" if value else "false", "bool", number=value)
    if is_symbol(value) and tracers[-1].has_room_for_symbols():
        return tracers[-1].symbol(value)
    if is_compiling() and isinstance(
        value, (int, float)
    ):  # a symbol that is known after all has no text, nor one too many
        value = loaded_torch().fx.experimental.symbolic_shapes.guard_scalar(value)
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise InvalidArgument(
                f"a program cannot use an integer of {value.bit_length()} bits: give one that a float holds."
            )
        return Value(str(value) if value >= 0 else f"(-{-value})", "int", value, value, number=value)
    if isinstance(value, float):
        return Value(_float_text(float(value)), "float", number=float(value))
    if is_tensor(value) and tracers:
        return literal(tracers[-1].value_of(value))
    if hasattr(value, "as_value"):
        return value.as_value()
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy's numbers
        return literal(value.item())
    raise WrongType(
        f"a program cannot use a {type(value).__name__} ({value!r}): use numbers, the function's arguments, "
        "and captured tensors indexed by them."
    )


def _float_text(value: float) -> str:
    if math.isnan(value):
        raise InvalidArgument("a program cannot use the constant NaN.")
    if abs(value) >= _BEYOND_FLOAT:
        return INFINITY if value > 0 else LOWEST
    return repr(value) if value >= 0 and not math.copysign(1, value) < 0 else f"(-{-value!r})"


def as_text(value: Any, type: str) -> str:
    """The text of a value as a "float", "int" or "bool", converted where that takes a function."""
    given = literal(value)
    number = given.number
    if number is not None and (type != given.type or type == "int"):
        if type == "float":
            return _float_text(float(number))
        if type == "bool":
            return "true" if number else "false"
        number = int(number)
        if not -(2**31) < number < 2**31:
            raise InvalidArgument(f"the integer {number} in a program does not fit 32 bits: use a float.")
        return str(number) if number >= 0 else f"(-{-number})"
    return given.text if given.type == type else f"to_{type}({given.text})"


def as_float(value: Any) -> str:
    return as_text(value, "float")


def as_real(value: Any) -> Value:
    given = literal(value)
    return given if given.type == "float" else Value(as_text(given, "float"), "float32")


def as_bool(value: Any) -> Value:
    return Value(as_text(value, "bool"), "bool")


def real(text: str, dtype: str = "float32") -> Value:
    return Value(text, dtype)


def condition(text: str) -> Value:
    return Value(text, "bool")


def promoted(*values: Value) -> str:
    """The dtype that PyTorch gives what is computed of values."""
    dtype = values[0].dtype_name
    for value in values[1:]:
        dtype = _common_dtype(dtype, value.dtype_name)
    return dtype


def _common_dtype(a: str, b: str) -> str:
    if a == b or b == "bool":
        return "int64" if (a, b) == ("int", "bool") else a
    if a == "bool":
        return "int64" if b == "int" else "float32" if b == "float" else b
    if a in ("int", "float") or b in ("int", "float"):
        weak, other = (a, b) if a in ("int", "float") else (b, a)
        if weak == "int" or other in _FLOATS:
            return other
        return "float" if other == "int" else "float32"
    if a in _FLOATS or b in _FLOATS:
        return b if a not in _FLOATS else a if b not in _FLOATS else "float32"
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return a if _WIDTHS[a] > _WIDTHS[b] else b


def strong(dtype: str) -> str:
    """Of a tensor made of Python numbers alone."""
    return {"int": "int64", "float": "float32"}.get(dtype, dtype)


def limits(value: Value) -> tuple[int, int]:
    """What a value lies between as an int."""
    return (0, 1) if value.type == "bool" else (value.low, value.high)


def int_range(dtype: str) -> tuple[int, int]:
    return _RANGES.get(dtype, (0, 0))


def integer(pattern: str, dtype: str, low: int, high: int, *values: Value) -> Value:
    """An int of the operands {0} and {1} that would lie between low and high if it had room: it wraps where its type has
    none."""
    texts = [int_text(value, dtype) for value in values]
    wide = any([value.wide or _is_long(value) for value in values])
    least, most = _RANGES[dtype]
    if dtype == "int64" and not wide and not (_INT[0] <= low and high <= _INT[1]):
        texts[0], wide = f"to_int64({texts[0]})", True
    text = pattern.format(*texts)
    if least <= low and high <= most:
        return Value(text, dtype, low, high, wide=wide)
    if dtype == "uint8":
        text = f"({text} & 255)"
    elif dtype in ("int8", "int16"):
        unused = 32 - _WIDTHS[dtype]
        text = f"(({text} << {unused}) >> {unused})"
    return Value(text, dtype, least, most, wide=wide)


def _is_long(value: Value) -> bool:
    """Whether it is a number that does not fit 32 bits."""
    return type(value.number) is int and not -(2**31) < value.number < 2**31


def int_text(value: Value, dtype: str) -> str:
    """A value as an int; a long number, where it meets an int64, by its halves."""
    number = value.number
    if dtype != "int64" or not _is_long(value):
        return as_text(value, "int")
    if not -(2**63) < number < 2**63:
        raise InvalidArgument(f"the integer {number} in a program does not fit 64 bits: use a float.")
    high, low = number >> 32, number & 0xFFFFFFFF
    upper = f"(to_int64({high // 2}) * 2 + {high % 2})" if abs(high) >= 2**30 else f"to_int64({high})"
    return f"(({upper} << 32) + (to_int64({low // 2}) * 2 + {low % 2}))"


def converted(value: Any, dtype: str) -> Value:
    """As PyTorch's to(dtype)."""
    given = literal(value)
    if dtype in _FLOATS:
        return Value(as_float(given), dtype)
    if dtype == "bool":
        return as_bool(given)
    if dtype == "int64" and given.type == "float":
        return Value(f"to_int64({given.text})", dtype, *_RANGES[dtype], wide=True)
    low, high = limits(given) if given.type != "float" else _INT
    if not given.wide or dtype == "int64":
        return integer("{0}", dtype, low, high, given)
    if low < _INT[0] or high > _INT[1]:
        low, high = _INT
    return integer("{0}", dtype, low, high, Value(f"low_word({given.text})", "int32", low, high))


def dtype_name(dtype: Any) -> str:
    name = {"float": "float32", "int": "int64", "half": "float16", "long": "int64", "double": "float64"}.get(
        getattr(dtype, "__name__", ""), str(dtype).rpartition(".")[2]
    )
    if name not in _WIDTHS and name not in ("bool", "float16", "bfloat16", "float32"):
        raise WrongType(
            f"a program cannot convert to {dtype}: it computes in float32, int32 and bool; use one of torch's "
            f"float32, float16, bfloat16, {', '.join(reversed(_WIDTHS))} and bool."
        )
    return name


def operands(a: Any, b: Any) -> tuple[Value, Value, str]:
    """Both as values, and the dtype of what is computed of them; a Python int is converted to it, as PyTorch does."""
    x, y = literal(a), literal(b)
    dtype = promoted(x, y)
    if dtype in ("uint8", "int8", "int16"):
        x, y = _within(x, dtype), _within(y, dtype)
    return x, y, dtype


def _within(value: Value, dtype: str) -> Value:
    if value.number is None or isinstance(value.number, bool):
        return value
    least, most = _RANGES[dtype]
    return literal((value.number - least) % (most - least + 1) + least)


# --- operators ---------------------------------------------------------------------------------------------------------


def add(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in _FLOATS:
        return Value(f"({as_float(x)} + {as_float(y)})", dtype)
    if dtype == "bool":
        return bits("|", x, y)
    (low, high), (other_low, other_high) = limits(x), limits(y)
    return integer("({} + {})", dtype, low + other_low, high + other_high, x, y)


def subtract(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in _FLOATS:
        return Value(f"({as_float(x)} - {as_float(y)})", dtype)
    if dtype == "bool":
        raise WrongType("PyTorch has no - of two booleans: use ^, or convert one with .int().")
    (low, high), (other_low, other_high) = limits(x), limits(y)
    return integer("({} - {})", dtype, low - other_high, high - other_low, x, y)


def multiply(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in _FLOATS:
        return Value(f"({as_float(x)} * {as_float(y)})", dtype)
    if dtype == "bool":
        return bits("&", x, y)
    products = [m * n for m in limits(x) for n in limits(y)]
    return integer("({} * {})", dtype, min(products), max(products), x, y)


def divide(a: Any, b: Any) -> Value:
    x, y = literal(a), literal(b)
    dtype = promoted(x, y)
    return Value(f"({as_float(x)} / {as_float(y)})", dtype if dtype in _FLOATS else "float32")


def _signs_differ(of_divisor: tuple[int, int]) -> str:
    """Whether a division of ints has a rest, and rounds towards zero where Python rounds down."""
    return "{0} % {1} < 0" if of_divisor[0] > 0 else "{0} % {1} != 0 && ({0} < 0) != ({1} < 0)"


def floor_divide(a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in _FLOATS:
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
    if dtype in _FLOATS:
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
    if dtype in _FLOATS:
        return Value(f"({as_float(x)} % {as_float(y)})", dtype)
    low, high = limits(x)
    return integer("({} % {})", dtype, min(low, 0), max(high, 0), x, y)


def _no_booleans(name: str, x: Value, y: Value, dtype: str) -> tuple[Value, Value, str]:
    if dtype == "bool":
        raise WrongType(f"PyTorch has no {name} of two booleans: convert one with .int().")
    return x, y, dtype


def truncated_divide(a: Any, b: Any) -> Value:
    x, y, dtype = _no_booleans("truncated division", *operands(a, b))
    if dtype in _FLOATS:
        return Value(f"trunc({as_float(x)} / {as_float(y)})", dtype)
    size = max(-limits(x)[0], limits(x)[1])
    return integer("({} / {})", dtype, -size, size, x, y)


def power(a: Any, b: Any) -> Value:
    x, y = literal(a), literal(b)
    dtype = promoted(x, y)
    exponent = y.number if not isinstance(y.number, bool) else int(y.number)
    if dtype not in _FLOATS:
        return _int_power(x, y, exponent, dtype)
    if exponent is not None and 1 <= abs(exponent) <= 8 and exponent == int(exponent):
        value = product = converted(x, dtype)
        for _ in range(abs(int(exponent)) - 1):
            product = multiply(product, value)
        return product if exponent > 0 else divide(1.0, product)
    if exponent in (0.5, -0.5):
        return Value(f"{'sqrt' if exponent > 0 else 'rsqrt'}({as_float(x)})", dtype)
    if x.number is not None and x.number > 0:
        power_of_two = as_float(y) if x.number == 2 else f"{as_float(y)} * {_float_text(math.log2(x.number))}"
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
    if dtype in _FLOATS:
        return condition(f"({as_float(x)} {operator} {as_float(y)})")
    if dtype == "bool" and operator in ("==", "!="):
        return condition(f"({x.text} {operator} {y.text})")
    return condition(f"({int_text(x, dtype)} {operator} {int_text(y, dtype)})")


_LOGICAL = {"&": ("&&", "true"), "|": ("||", "false"), "^": ("!=", "")}  # and what changes nothing


def bits(operator: str, a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    if dtype in _FLOATS:
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
    if dtype in _FLOATS:
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
    if dtype in _FLOATS:
        return Value(f"{function}({as_float(x)}, {as_float(y)})", dtype)
    if dtype == "bool":
        return bits("&" if function == "min" else "|", x, y)
    choose = min if function == "min" else max
    (low, high), (other_low, other_high) = limits(x), limits(y)
    return integer(f"{function}({{}}, {{}})", dtype, choose(low, other_low), choose(high, other_high), x, y)


def where(test: Any, a: Any, b: Any) -> Value:
    x, y, dtype = operands(a, b)
    test, dtype = as_bool(test), strong(dtype)
    kind = _language_type(dtype)
    first, second = [int_text(value, dtype) if kind == "int" else as_text(value, kind) for value in (x, y)]
    wide = kind == "int" and any([value.wide or _is_long(value) for value in (x, y)])
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


# --- PyTorch's names ---------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by their names in torch; _functions.py fills it


def call(name: str, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if named.get("inplace"):
        refuse_in_place(name)
    named = {key: value for key, value in named.items() if key not in ("inplace", "out") or value}
    try:
        return function(*arguments, **named)
    except TypeError as error:
        if isinstance(error, InvalidArgument):
            raise
        raise WrongType(
            f"torch.{name} cannot be called in a program with {len(arguments)} arguments"
            f"{' and ' + ', '.join(named) if named else ''}: see help(flashjit.programs)."
        ) from None


_OF_OTHER_PAIRS = (
    "a program computes one pair of a query and a key, and sees no other: compute it before the call, and capture "
    "the result as a tensor. Softmax over the keys is attention's own."
)
_RANDOM = "give attention() dropout_p, or capture a tensor of numbers drawn before the call."
_INSTEAD = {
    **dict.fromkeys(
        (
            "softmax",
            "log_softmax",
            "logsumexp",
            "sum",
            "mean",
            "prod",
            "cumsum",
            "cumprod",
            "sort",
            "argsort",
            "topk",
            "argmax",
            "argmin",
            "amax",
            "amin",
            "norm",
            "var",
            "std",
            "median",
            "any",
            "all",
            "layer_norm",
            "rms_norm",
            "normalize",
            "glu",
            "einsum",
            "matmul",
        ),
        _OF_OTHER_PAIRS,
    ),
    **dict.fromkeys(
        ("dropout", "alpha_dropout", "rand_like", "randn_like", "randint_like", "bernoulli", "rrelu"), _RANDOM
    ),
    "asinh": "write torch.log(x + torch.sqrt(x * x + 1)).",
    "acosh": "write torch.log(x + torch.sqrt(x * x - 1)).",
    "atanh": "write 0.5 * torch.log((1 + x) / (1 - x)).",
    "ndtr": "write 0.5 * (1 + torch.erf(x * 0.7071067811865476)).",
    "log_ndtr": "write torch.log(0.5 * (1 + torch.erf(x * 0.7071067811865476))).",
    "sinc": "write torch.where(x == 0, 1.0, torch.sin(math.pi * x) / (math.pi * x)).",
    "xlogy": "write torch.where(x == 0, 0.0, x * torch.log(y)).",
    "ldexp": "write x * 2.0 ** y.",
    "logaddexp2": "write y + torch.log2(1 + 2.0 ** (x - y)).",
    "heaviside": "write torch.where(x == 0, y, (x > 0).float()).",
    "copysign": "write torch.where(y < 0, -x.abs(), x.abs()).",
    "cross_entropy": _OF_OTHER_PAIRS,
}
_NO_DERIVATIVE = (
    "what has no derivative here is computed before the call where it is of positions, and captured as a tensor, as in "
    "table[q_idx - kv_idx]; of the score, write it with the functions that help(flashjit.programs) lists, such as "
    "torch.tanh(x), torch.erf(x) or x / (1 + x.abs())."
)
_ALIASES = {"arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh"}


def without_function(name: str, what: str = "its values") -> str:
    """What to write instead of a function that programs do not have."""
    plain = name.removeprefix("torch.")
    return f"a program has no {name!r} of {what}: {_INSTEAD.get(_ALIASES.get(plain, plain), _NO_DERIVATIVE)}"


def refuse_in_place(name: str) -> Any:
    raise WrongType(
        f"a program cannot change values in place, as {name} does: write score = score + x instead of "
        "score.add_(x)."
    )


# --- what is at work ---------------------------------------------------------------------------------------------------

tracers: list[Any] = []  # the one at work is the last
torch_module: list[Any] = []  # PyTorch, once flashjit.torch is imported


def loaded_torch() -> Any:
    """PyTorch, where it is imported. torch.compile follows this, too: of a look into sys.modules it would make a condition on
    all modules, and compile again when one is imported."""
    return torch_module[0] if torch_module else sys.modules.get("torch")


def is_compiling() -> bool:
    torch = loaded_torch()
    return torch is not None and torch.compiler.is_compiling()


def is_symbol(value: Any) -> bool:
    """Whether a number may differ from one run of compiled code to another."""
    return (
        is_compiling()
        and isinstance(value, (int, float))
        and not loaded_torch().fx.experimental.symbolic_shapes.has_static_value(value)
    )


def symbol_tensor(value: Any) -> Any:
    """Such a number as a tensor on the CPU, which a launch reads: it is no part of the program."""
    torch = loaded_torch()
    if isinstance(value, float):  # which is a symbol to the end where it is a factor
        return torch.ones((), dtype=torch.float64, device="cpu") * value
    return torch.full((), value, dtype=torch.int64, device="cpu")


def is_tensor(value: Any) -> bool:
    torch = loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)

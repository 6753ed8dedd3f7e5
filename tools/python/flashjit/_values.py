"""Stand-ins for the numbers of a program: they write down what is done to them, with PyTorch's types.

A value has a dtype of PyTorch, or that of a Python number, "int" or "float", which takes the type of what it meets. In the
program's language it is a float (fp32, whatever PyTorch's precision), a bool, an int of 32 bits or an int64. Smaller ints wrap
as PyTorch's do, by a mask where their range asks for one; an int64 whose range fits 32 bits is an int where it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ._at_work import is_compiling, is_symbol, is_tensor, loaded_torch, tracers
from ._torch_names import FUNCTIONS, call, refuse_in_place, without_function
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
FLOATS = frozenset(("float", "float16", "bfloat16", "float32"))
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


def language_type(dtype: str) -> str:
    return "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"


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
            language_type(dtype),
            low,
            high,
        )
        self.number, self.arms, self.wide = number, arms, wide

    def __repr__(self) -> str:
        return f"<{self.dtype_name} {self.text}>"

    # _arithmetic.py gives it all of Python's operators; the package itself uses these.
    __add__: Callable[[Value, Any], Value]
    __radd__: Callable[[Value, Any], Value]
    __sub__: Callable[[Value, Any], Value]
    __rsub__: Callable[[Value, Any], Value]
    __mul__: Callable[[Value, Any], Value]
    __rmul__: Callable[[Value, Any], Value]
    __truediv__: Callable[[Value, Any], Value]
    __lt__: Callable[[Value, Any], Value]
    __gt__: Callable[[Value, Any], Value]
    __neg__: Callable[[Value], Value]
    __hash__ = None  # type: ignore[assignment]

    # What Python asks for and a kernel cannot answer.
    def __bool__(self) -> bool:
        raise WrongType(
            "a program has no branches: use torch.where(condition, a, b) instead of if, &, |, ~ with parentheses "
            "instead of and, or, not, (a <= x) & (x < b) instead of a <= x < b, and torch.maximum and "
            "torch.minimum instead of max() and min()."
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
        return Value(float_text(float(value)), "float", number=float(value))
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


def float_text(value: float) -> str:
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
            return float_text(float(number))
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
        if weak == "int" or other in FLOATS:
            return other
        return "float" if other == "int" else "float32"
    if a in FLOATS or b in FLOATS:
        return b if a not in FLOATS else a if b not in FLOATS else "float32"
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return a if _WIDTHS[a] > _WIDTHS[b] else b


def strong(dtype: str) -> str:
    """The type of a tensor made of Python numbers alone."""
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
    wide = any([value.wide or is_long(value) for value in values])
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


def is_long(value: Value) -> bool:
    """Whether it is a number that does not fit 32 bits."""
    return type(value.number) is int and not -(2**31) < value.number < 2**31


def int_text(value: Value, dtype: str) -> str:
    """A value as an int; a long number, where it meets an int64, by its halves."""
    number = value.number
    if dtype != "int64" or not is_long(value):
        return as_text(value, "int")
    if not -(2**63) < number < 2**63:
        raise InvalidArgument(f"the integer {number} in a program does not fit 64 bits: use a float.")
    high, low = number >> 32, number & 0xFFFFFFFF
    upper = f"(to_int64({high // 2}) * 2 + {high % 2})" if abs(high) >= 2**30 else f"to_int64({high})"
    return f"(({upper} << 32) + (to_int64({low // 2}) * 2 + {low % 2}))"


def converted(value: Any, dtype: str) -> Value:
    """As PyTorch's to(dtype)."""
    given = literal(value)
    if dtype in FLOATS:
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

"""Python functions as text of flashjit's language: called once, with stand-ins that write down what is done to them."""
from __future__ import annotations

import math
import sys
from typing import Any, Callable, Mapping

from .errors import InvalidArgument, WrongType

MAX_TENSORS = MAX_SCALARS = 8

_INT_MAX = 2**31 - 1


def _literal(value: Any) -> "Value":
    if isinstance(value, Value):
        return value
    if isinstance(value, bool):
        return Value("true" if value else "false", "bool")
    if isinstance(value, int):
        if not -_INT_MAX <= value <= _INT_MAX:
            raise InvalidArgument(f"the integer {value} in a program does not fit 32 bits: use a float.")
        return Value(str(value) if value >= 0 else f"(-{-value})", "int", at_least_zero=value >= 0)
    if isinstance(value, float):
        return Value(_float_text(value), "float")
    if (is_tensor(value) or isinstance(value, PartialRead)) and _tracers:
        return _tracers[-1].value_of(value)
    raise WrongType(f"a program cannot use a {type(value).__name__} ({value!r}): use numbers, the function's arguments, "
                    "and captured tensors indexed by them.")


def _float_text(value: float) -> str:
    if math.isnan(value):
        raise InvalidArgument("a program cannot use the constant NaN.")
    if math.isinf(value):
        return "(1.0 / 0.0)" if value > 0 else "(-1.0 / 0.0)"
    return repr(value) if value >= 0 and not math.copysign(1, value) < 0 else f"(-{-value!r})"


_LOWEST = "(-1.0 / 0.0)"


class Value:
    """Stands for a number that the kernel will know: a score, a position, or what is computed from them."""

    __slots__ = ("text", "type", "at_least_zero", "arms")

    def __init__(self, text: str, type: str, at_least_zero: bool = False,
                 arms: tuple["Value", "Value", "Value"] | None = None) -> None:
        self.text, self.type, self.at_least_zero, self.arms = text, type, at_least_zero, arms

    def __repr__(self) -> str:
        return f"<{self.type} {self.text}>"

    # Arithmetic.
    def __add__(self, other: Any) -> "Value":
        return _arithmetic("+", self, other, keeps_sign=True)

    def __radd__(self, other: Any) -> "Value":
        return _arithmetic("+", other, self, keeps_sign=True)

    def __sub__(self, other: Any) -> "Value":
        return _arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> "Value":
        return _arithmetic("-", other, self)

    def __mul__(self, other: Any) -> "Value":
        return _arithmetic("*", self, other, keeps_sign=True)

    def __rmul__(self, other: Any) -> "Value":
        return _arithmetic("*", other, self, keeps_sign=True)

    def __truediv__(self, other: Any) -> "Value":
        return Value(f"({_as(self, 'float')} / {_as(other, 'float')})", "float")

    def __rtruediv__(self, other: Any) -> "Value":
        return Value(f"({_as(other, 'float')} / {_as(self, 'float')})", "float")

    def __floordiv__(self, other: Any) -> "Value":
        return _floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> "Value":
        return _floor_divide(other, self)

    def __mod__(self, other: Any) -> "Value":
        return _modulo(self, other)

    def __rmod__(self, other: Any) -> "Value":
        return _modulo(other, self)

    def __pow__(self, other: Any) -> "Value":
        return _power(self, other)

    def __rpow__(self, other: Any) -> "Value":
        return _power(other, self)

    def __neg__(self) -> "Value":
        value = _number(self)
        return Value(f"(-{value.text})", value.type)

    def __pos__(self) -> "Value":
        return self

    def __abs__(self) -> "Value":
        value = _number(self)
        return Value(f"abs({value.text})", value.type)

    # Comparisons.
    def __lt__(self, other: Any) -> "Value":
        return _compare("<", self, other)

    def __le__(self, other: Any) -> "Value":
        return _compare("<=", self, other)

    def __gt__(self, other: Any) -> "Value":
        return _compare(">", self, other)

    def __ge__(self, other: Any) -> "Value":
        return _compare(">=", self, other)

    def __eq__(self, other: Any) -> "Value":  # type: ignore[override]
        return _compare("==", self, other)

    def __ne__(self, other: Any) -> "Value":  # type: ignore[override]
        return _compare("!=", self, other)

    __hash__ = None  # type: ignore[assignment]

    # Bits and logic.
    def __and__(self, other: Any) -> "Value":
        return _bits("&", "&&", self, other)

    def __rand__(self, other: Any) -> "Value":
        return _bits("&", "&&", other, self)

    def __or__(self, other: Any) -> "Value":
        return _bits("|", "||", self, other)

    def __ror__(self, other: Any) -> "Value":
        return _bits("|", "||", other, self)

    def __xor__(self, other: Any) -> "Value":
        return _bits("^", "!=", self, other)

    def __rxor__(self, other: Any) -> "Value":
        return _bits("^", "!=", other, self)

    def __invert__(self) -> "Value":
        if self.type == "float":
            raise WrongType("~ needs a boolean or an integer, not a float.")
        return Value(f"({'!' if self.type == 'bool' else '~'}{self.text})", self.type)

    def __lshift__(self, other: Any) -> "Value":
        return _shift("<<", self, other)

    def __rlshift__(self, other: Any) -> "Value":
        return _shift("<<", other, self)

    def __rshift__(self, other: Any) -> "Value":
        return _shift(">>", self, other)

    def __rrshift__(self, other: Any) -> "Value":
        return _shift(">>", other, self)

    # What Python asks for and a kernel cannot answer.
    def __bool__(self) -> bool:
        raise WrongType("a program has no branches: use torch.where(condition, a, b) instead of if, and &, |, ~ with "
                        "parentheses instead of and, or, not.")

    def _no_number(self, *_: Any) -> Any:
        raise WrongType("the value is known in the kernel only, so it has no Python number: use functions of torch "
                        "(torch.tanh, torch.floor, ...) instead of math's, and no range() or indexing of lists by it.")

    __float__ = __int__ = __index__ = __len__ = __iter__ = __complex__ = _no_number

    # What tensors have.
    @property
    def device(self) -> Any:
        return None

    @property
    def dtype(self) -> Any:
        torch = loaded_torch()
        return {"float": torch.float32, "int": torch.int32, "bool": torch.bool}[self.type]

    def __getattr__(self, name: str) -> Any:
        function = _FUNCTIONS.get(name)
        if function is None or name.startswith("__"):
            raise AttributeError(f"the stand-ins of a program have no {name!r}: see help(flashjit.programs) for what "
                                 "they can do")
        return lambda *arguments, **named: function(self, *arguments, **named)

    def float(self) -> "Value":
        return _literal_as(self, "float")

    def int(self) -> "Value":
        return _literal_as(self, "int")

    def long(self) -> "Value":
        return _literal_as(self, "int")

    def bool(self) -> "Value":
        return _literal_as(self, "bool")

    def to(self, dtype: Any) -> "Value":
        kind = str(dtype).rpartition(".")[2]
        if kind.startswith(("float", "bfloat")):
            return self.float()
        if kind.startswith(("int", "uint", "long")):
            return self.int()
        if kind == "bool":
            return self.bool()
        raise WrongType(f"a program cannot convert to {dtype}: use a floating point, integer or boolean dtype.")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple[Any, ...] = (),
                           named: dict[str, Any] | None = None) -> Any:
        return _call_torch(function, arguments, named or {})


class PartialRead:
    """A captured tensor with some of its indices given: t[b] of a matrix."""

    __slots__ = ("name", "rank", "type", "indices")

    def __init__(self, name: str, rank: int, type: str, indices: tuple[Value, ...]) -> None:
        self.name, self.rank, self.type, self.indices = name, rank, type, indices

    def __getitem__(self, index: Any) -> Any:
        given = index if isinstance(index, tuple) else (index,)
        indices = self.indices + tuple(map(_index, given))
        if len(indices) > self.rank:
            raise InvalidArgument(f"a captured tensor of {self.rank} dimensions is indexed with {len(indices)}.")
        if len(indices) < self.rank:
            return PartialRead(self.name, self.rank, self.type, indices)
        return Value(f"{self.name}[{', '.join(i.text for i in indices)}]", self.type)


def _index(index: Any) -> Value:
    value = _literal(index)
    if value.type == "float":
        raise WrongType("a captured tensor is indexed with a float: convert it with .int() first.")
    if isinstance(index, int) and index < 0:
        raise InvalidArgument(f"a captured tensor is indexed with {index}: negative constants do not count from the end "
                              "here; write the position.")
    return Value(_as(value, "int"), "int", value.at_least_zero)


def _as(value: Any, type: str) -> str:
    """The text of a value, converted where that takes a function."""
    given = _literal(value)
    if given.type == type:
        return given.text
    if isinstance(value, (int, float)):
        return _literal({"float": float, "int": int, "bool": bool}[type](value)).text
    return f"to_{type}({given.text})"


def _literal_as(value: Any, type: str) -> Value:
    return Value(_as(value, type), type, _literal(value).at_least_zero)


def _number(value: Any) -> Value:
    """A value that is no boolean."""
    given = _literal(value)
    return Value(_as(given, "int"), "int", True) if given.type == "bool" else given


def _common(a: Any, b: Any) -> tuple[str, str, str]:
    x, y = _number(a), _number(b)
    type = "float" if "float" in (x.type, y.type) else "int"
    convert = lambda raw, value: _as(raw if isinstance(raw, (int, float)) and not isinstance(raw, bool) else value, type)
    return convert(a, x), convert(b, y), type


def _arithmetic(operator: str, a: Any, b: Any, keeps_sign: bool = False) -> Value:
    x, y, type = _common(a, b)
    return Value(f"({x} {operator} {y})", type,
                 keeps_sign and type == "int" and _number(a).at_least_zero and _number(b).at_least_zero)


def _floor_divide(a: Any, b: Any) -> Value:
    x, y, type = _common(a, b)
    if type == "float":
        return Value(f"floor({x} / {y})", "float")
    if _number(a).at_least_zero and _number(b).at_least_zero:
        return Value(f"({x} / {y})", "int", True)
    # The language truncates, Python rounds down: one less where there is a rest and the signs differ.
    return Value(f"({x} / {y} - to_int({x} % {y} != 0 && ({x} < 0) != ({y} < 0)))", "int")


def _modulo(a: Any, b: Any) -> Value:
    x, y, type = _common(a, b)
    if type == "float":
        return Value(f"({x} - floor({x} / {y}) * {y})", "float")
    if _number(a).at_least_zero and _number(b).at_least_zero:
        return Value(f"({x} % {y})", "int", True)
    return Value(f"({x} % {y} + select({x} % {y} != 0 && ({x} < 0) != ({y} < 0), {y}, 0))", "int",
                 _number(b).at_least_zero)


def _power(a: Any, b: Any) -> Value:
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        if b == 0.5:
            return _function("sqrt")(a)
        if b == -0.5:
            return _function("rsqrt")(a)
        if b == int(b) and 1 <= b <= 8:
            value = power = _number(a)
            for _ in range(int(b) - 1):
                power = power * value
            return power if isinstance(b, int) else power.float()
        if b == int(b) and -8 <= b <= -1:
            return 1.0 / _power(a, int(-b))
    if isinstance(a, (int, float)) and a > 0:
        exponent = _as(b, "float")
        return Value(f"exp2({exponent})" if a == 2 else f"exp2({exponent} * {_float_text(math.log2(a))})", "float")
    return Value(f"exp2({_as(b, 'float')} * log2({_as(a, 'float')}))", "float")


def _compare(operator: str, a: Any, b: Any) -> Value:
    if operator in ("==", "!=") and _literal(a).type == _literal(b).type == "bool":
        return Value(f"({_literal(a).text} {operator} {_literal(b).text})", "bool")
    x, y, _ = _common(a, b)
    return Value(f"({x} {operator} {y})", "bool")


def _bits(bitwise: str, logical: str, a: Any, b: Any) -> Value:
    x, y = _literal(a), _literal(b)
    if "float" in (x.type, y.type):
        raise WrongType(f"{bitwise} needs booleans or integers, not floats; put comparisons into parentheses.")
    if x.type == y.type == "bool":
        neutral = {"&&": "true", "||": "false"}.get(logical)  # what compositions of masks begin with
        if neutral in (x.text, y.text):
            return y if x.text == neutral else x
        return Value(f"({x.text} {logical} {y.text})", "bool")
    return Value(f"({_as(a, 'int')} {bitwise} {_as(b, 'int')})", "int", x.at_least_zero and y.at_least_zero)


def _shift(operator: str, a: Any, b: Any) -> Value:
    if "float" in (_literal(a).type, _literal(b).type):
        raise WrongType(f"{operator} needs integers, not floats.")
    return Value(f"({_as(a, 'int')} {operator} {_as(b, 'int')})", "int", operator == ">>" and _literal(a).at_least_zero)


def _function(name: str) -> Callable[..., Value]:
    return lambda value: Value(f"{name}({_as(value, 'float')})", "float")


def _smaller_or_larger(name: str) -> Callable[..., Value]:
    def function(a: Any, b: Any = None, *, other: Any = None) -> Value:
        x, y, type = _common(a, other if b is None else b)
        both = [_number(a).at_least_zero, _number(other if b is None else b).at_least_zero]
        return Value(f"{name}({x}, {y})", type, any(both) if name == "max" else all(both))
    return function


_min, _max = _smaller_or_larger("min"), _smaller_or_larger("max")


def _where(condition: Any, a: Any = None, b: Any = None, *, input: Any = None, other: Any = None) -> Value:
    a, b = input if a is None else a, other if b is None else b
    if a is None or b is None:
        raise WrongType("torch.where needs three arguments in a program: where(condition, a, b).")
    chosen = _literal(condition)
    if _literal(a).type == _literal(b).type == "bool":
        x, y, type = _literal(a).text, _literal(b).text, "bool"
    else:
        x, y, type = _common(a, b)
    test = _as(chosen, "bool")
    return Value(f"select({test}, {x}, {y})", type, _literal(a).at_least_zero and _literal(b).at_least_zero,
                 arms=(Value(test, "bool"), Value(x, type, arms=_literal(a).arms), Value(y, type, arms=_literal(b).arms)))


def _clamp(value: Any, min: Any = None, max: Any = None) -> Value:
    result = _number(value)
    if min is not None:
        result = _max(result, min)
    return result if max is None else _min(result, max)


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    if rounding_mode == "trunc" and _common(a, b)[2] == "int":
        x, y, _ = _common(a, b)
        return Value(f"({x} / {y})", "int", _number(a).at_least_zero and _number(b).at_least_zero)
    if rounding_mode is not None:
        raise InvalidArgument(f"rounding_mode {rounding_mode!r} is not known in a program: use 'floor'.")
    return _literal(a) / b


def _scaled(operator: Callable[[Any, Any], Value]) -> Callable[..., Value]:
    """torch.add(a, b, alpha=2)."""
    return lambda a, b, *, alpha=1: operator(_literal(a), b if alpha == 1 else _literal(b) * alpha)


def _logical(operator: Callable[[Value, Any], Value]) -> Callable[..., Value]:
    return lambda a, b: operator(_literal_as(a, "bool"), _literal_as(b, "bool"))


def _full_like(value: Any, fill_value: Any, **_: Any) -> Value:
    return _literal(float(fill_value) if _literal(value).type == "float" else fill_value)


def _new(number: int) -> Callable[..., Value]:
    """position.new_ones((), dtype=torch.bool), as FlexAttention's compositions of masks begin."""
    def function(_: Any, *size: Any, dtype: Any = None, **__: Any) -> Value:
        kind = str(dtype).rpartition(".")[2]
        return _literal(bool(number) if kind == "bool" else float(number) if "float" in kind else number)
    return function


def _refuse_in_place(*_: Any, **__: Any) -> Value:
    raise WrongType("a program cannot change values in place: write score = score + x instead of score.add_(x).")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _function(name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin",
                                          "cos", "floor")},
    "ceil": lambda x: Value(f"(-floor(-{_as(x, 'float')}))", "float"),
    "abs": lambda x: abs(_literal(x)), "absolute": lambda x: abs(_literal(x)),
    "neg": lambda x: -_literal(x), "negative": lambda x: -_literal(x),
    "square": lambda x: _literal(x) * x, "relu": lambda x: _max(x, 0), "reciprocal": lambda x: 1.0 / _literal(x),
    "where": _where, "minimum": _min, "maximum": _max, "min": _min, "max": _max, "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda x, min: _max(x, min), "clamp_max": lambda x, max: _min(x, max),
    "add": _scaled(lambda a, b: a + b), "sub": _scaled(lambda a, b: a - b),
    "subtract": _scaled(lambda a, b: a - b), "rsub": _scaled(lambda a, b: _literal(b) - a),
    "mul": lambda a, b: _literal(a) * b, "multiply": lambda a, b: _literal(a) * b,
    "div": _divide, "divide": _divide, "true_divide": _divide, "truediv": _divide,
    "floor_divide": _floor_divide, "floordiv": _floor_divide,
    "remainder": _modulo, "mod": _modulo, "pow": _power,
    "lt": lambda a, b: _compare("<", a, b), "less": lambda a, b: _compare("<", a, b),
    "le": lambda a, b: _compare("<=", a, b), "less_equal": lambda a, b: _compare("<=", a, b),
    "gt": lambda a, b: _compare(">", a, b), "greater": lambda a, b: _compare(">", a, b),
    "ge": lambda a, b: _compare(">=", a, b), "greater_equal": lambda a, b: _compare(">=", a, b),
    "eq": lambda a, b: _compare("==", a, b), "ne": lambda a, b: _compare("!=", a, b),
    "not_equal": lambda a, b: _compare("!=", a, b),
    "and": lambda a, b: _literal(a) & b, "bitwise_and": lambda a, b: _literal(a) & b,
    "or": lambda a, b: _literal(a) | b, "bitwise_or": lambda a, b: _literal(a) | b,
    "xor": lambda a, b: _literal(a) ^ b, "bitwise_xor": lambda a, b: _literal(a) ^ b,
    "invert": lambda a: ~_literal(a), "bitwise_not": lambda a: ~_literal(a),
    "lshift": lambda a, b: _shift("<<", a, b), "bitwise_left_shift": lambda a, b: _shift("<<", a, b),
    "rshift": lambda a, b: _shift(">>", a, b), "bitwise_right_shift": lambda a, b: _shift(">>", a, b),
    "logical_and": _logical(lambda a, b: a & b), "logical_or": _logical(lambda a, b: a | b),
    "logical_xor": _logical(lambda a, b: a ^ b), "logical_not": lambda a: ~_literal_as(a, "bool"),
    "zeros_like": lambda x, **_: _full_like(x, 0), "ones_like": lambda x, **_: _full_like(x, 1), "full_like": _full_like,
    "new_ones": _new(1), "new_zeros": _new(0),
    "masked_fill": lambda x, condition, value: _where(condition, value, x),
}


def _call_torch(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A function of torch, or an operator of a tensor, on stand-ins and captured tensors."""
    # Reversed operators are wrapped, and a compiled function sees the wrapper without their name.
    function = getattr(function, "__wrapped__", function)
    name = getattr(function, "__name__", str(function))
    if _tracers:
        tracer = _tracers[-1]
        if name == "__getitem__" and arguments and is_tensor(arguments[0]):
            return tracer.read(arguments[0])[arguments[1]]
        arguments = tuple(tracer.value_of(argument) for argument in arguments)
        named = {key: tracer.value_of(value) for key, value in named.items()}
    plain = name.strip("_") if name.startswith("__") else name
    if plain.startswith("r") and name.startswith("__") and plain[1:] in _FUNCTIONS and len(arguments) == 2:
        plain, arguments = plain[1:], arguments[::-1]
    if name.startswith("__i") and plain[1:] in _FUNCTIONS and plain not in _FUNCTIONS:
        _refuse_in_place()
    if name.endswith("_") and not name.startswith("__"):
        _refuse_in_place()
    if plain not in _FUNCTIONS:
        raise InvalidArgument(f"torch.{plain} cannot be used in a program: see help(flashjit.programs) for what can.")
    return _FUNCTIONS[plain](*arguments, **named)


# --- tracing -----------------------------------------------------------------------------------------------------------


def identifiers(text: str) -> frozenset[str]:
    """The words of a text: names, functions and types. Without `re`: torch.compile follows this, and would hold on to the
    places of patterns in a cache that others change."""
    words = "".join(char if char.isalnum() or char == "_" else " " for char in text).split()
    return frozenset(word for word in words if not word[0].isdigit())


def loaded_torch() -> Any:
    """PyTorch, where it is imported. torch.compile follows this, too: of a look into sys.modules it would make a condition on
    all modules, and compile again when one is imported."""
    return sys.modules.get("torch") if _torch is None else _torch


def is_tensor(value: Any) -> bool:
    torch = loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)


class Tracer:
    """Gives names to the captured tensors of the functions that it calls, in the order of their first use."""

    def __init__(self, taken: Mapping[str, Any]) -> None:
        self.taken = taken  # names that texts use already
        self.tensors: dict[str, Any] = {}
        self.scalars: dict[str, Any] = {}

    def read(self, tensor: Any) -> PartialRead:
        if tensor.dim() == 0:
            raise InvalidArgument("a captured tensor without dimensions is indexed: use it as it is.")
        type = element_type(tensor)
        return PartialRead(self._name(self.tensors, tensor, "c", MAX_TENSORS), tensor.dim(), program_type(type), ())

    def value_of(self, value: Any) -> Any:
        """A captured tensor as a number, where it is one."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.value_of, value))
        if isinstance(value, PartialRead):
            raise InvalidArgument("a captured tensor has more dimensions than it is indexed with: index all of them.")
        if not is_tensor(value):
            return value
        if value.dim() > 0:
            raise InvalidArgument(f"a captured tensor of shape {tuple(value.shape)} is used as a number: index it with "
                                  "b, h, q_idx and kv_idx, such as bias[h, q_idx - kv_idx].")
        kind = program_type(element_type(value))
        if value.device.type == "cpu" and not value.requires_grad:
            name = self._name(self.scalars, value, "s", MAX_SCALARS)
            return Value(name, "float" if kind == "float" else "int")
        return Value(f"{self._name(self.tensors, value, 'c', MAX_TENSORS)}[0]", kind)

    def _name(self, names: dict[str, Any], tensor: Any, prefix: str, most: int) -> str:
        for name, known in names.items():
            if known is tensor:
                return name
        if len(names) == most:
            raise InvalidArgument(f"a program captures more than {most} {'tensors' if prefix == 'c' else 'scalars'}: "
                                  "put them into one tensor of one more dimension.")
        name = next(f"{prefix}{i}" for i in range(len(names), 99) if f"{prefix}{i}" not in self.taken)
        names[name] = tensor
        return name

    def score(self, function: Callable[..., Any]) -> tuple[str, list[str]]:
        """The text of a score_mod, "" where it returns the score as it is, and the conditions that it masks by."""
        result = self._call(function, (Value("score", "float"), *_positions()), "score_mod")
        result, conditions = _split_mask(result)
        return "" if result.text == "score" else _as(result, "float"), conditions

    def mask(self, function: Callable[..., Any]) -> str:
        """The text of a mask_mod."""
        return _as(self._call(function, _positions(), "mask_mod"), "bool")

    def _call(self, function: Callable[..., Any], arguments: tuple[Value, ...], kind: str) -> Value:
        _tracers.append(self)
        try:
            if loaded_torch() is None:
                result = function(*arguments)
            else:
                with torch_mode():
                    result = function(*arguments)
            result = self.value_of(result)
        except (TypeError, IndexError) as error:  # IndexError: of NumPy, which looks at an index itself
            if isinstance(error, InvalidArgument):
                raise
            raise WrongType(f"{_name_of(function)} cannot be traced ({error}): a {kind} is called as "
                            f"{SIGNATURES[kind]} with stand-ins for numbers; see help(flashjit.programs).") from error
        finally:
            _tracers.pop()
        if not isinstance(result, (Value, int, float)):
            raise WrongType(f"{_name_of(function)} returns a {type(result).__name__}: a {kind} returns a "
                            f"{'score' if kind == 'score_mod' else 'condition'}, computed from its arguments.")
        return _literal(result)


_tracers: list[Tracer] = []  # the one at work is the last
SIGNATURES = {"score_mod": "score_mod(score, b, h, q_idx, kv_idx)", "mask_mod": "mask_mod(b, h, q_idx, kv_idx)"}


def _positions() -> tuple[Value, ...]:
    return tuple(Value(name, "int", at_least_zero=True) for name in ("b", "h", "q", "kv"))


def _split_mask(score: Value) -> tuple[Value, list[str]]:
    """Conditions that give -inf at the outside of a score, as masks: they say the same and cost less."""
    conditions: list[str] = []
    while score.arms:
        condition, a, b = score.arms
        if "score" in identifiers(condition.text):
            break
        if b.text == _LOWEST:
            conditions.append(condition.text)
            score = a
        elif a.text == _LOWEST:
            conditions.append(f"(!{condition.text})")
            score = b
        else:
            break
    return score, conditions


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


_torch: Any = None  # once flashjit.torch is imported, with the class below
_mode_class: Any = None


def torch_mode() -> Any:
    """Sees every call of torch on real tensors too: `slopes[h]` asks the tensor, not the stand-in."""
    global _torch, _mode_class
    if _mode_class is None:
        import torch as _torch
        from torch.overrides import TorchFunctionMode

        class ProgramMode(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
                if _has_stand_in((arguments, named)):
                    return _call_torch(function, arguments, named or {})
                return function(*arguments, **(named or {}))

        _mode_class = ProgramMode
    return _mode_class()


def _has_stand_in(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_stand_in, value))
    if isinstance(value, dict):
        return any(map(_has_stand_in, value.values()))
    return isinstance(value, (Value, PartialRead))


_ELEMENTS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "int32", "int64": "int64",
             "int16": "int16", "int8": "int8", "uint8": "uint8", "bool": "bool"}


def element_type(array: Any, name: str = "a captured tensor") -> str:
    """"fp32", ..., "bool" of a tensor or array. Raises WrongType for types that programs cannot read."""
    dtype = str(array.dtype).rpartition(".")[2]
    if dtype not in _ELEMENTS:
        raise WrongType(f"{name} has type {dtype}: programs read {', '.join(_ELEMENTS)}; convert it.")
    return _ELEMENTS[dtype]


def program_type(element: str) -> str:
    return "float" if element in ("fp32", "fp16", "bf16") else "bool" if element == "bool" else "int"


def is_scalar(value: Any) -> bool:
    """Whether a capture is a number: a Python one, or a tensor without dimensions on the CPU."""
    return isinstance(value, (int, float)) or (is_tensor(value) and value.dim() == 0 and value.device.type == "cpu"
                                               and not value.requires_grad)


def is_real(scalar: Any) -> bool:
    return scalar.dtype.is_floating_point if is_tensor(scalar) else isinstance(scalar, float)


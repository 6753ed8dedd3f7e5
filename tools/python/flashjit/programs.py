"""Score and mask programs: text in flashjit's language, or Python functions that are traced into it.

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

becomes "c0: fp32 1d; score + (c0[h] * to_float(kv - q))", with the tensor `slopes` as the capture c0. The functions
have the signatures of PyTorch's FlexAttention: score_mod(score, b, h, q_idx, kv_idx), mask_mod(b, h, q_idx, kv_idx).
They are called once, with stand-ins instead of numbers: +, -, *, /, //, %, **, comparisons, &, |, ^, ~, <<, >>, abs and
these functions of torch work on them: where, minimum, maximum, clamp, exp, exp2, log, log2, sqrt, rsqrt, tanh, sigmoid,
sin, cos, floor, ceil, square, relu, remainder, logical_and, logical_or, logical_not, zeros_like, ones_like, full_like.
"""
from __future__ import annotations

import functools
import math
import re
import sys
import types
from typing import Any, Callable, Mapping

from .errors import InvalidArgument, WrongType

MAX_TENSORS = MAX_SCALARS = 8
NAMED_MASKS = ("causal", "causal_top_left")

_INT_MAX = 2**31 - 1
_POSITIONS = ("b", "h", "q", "kv")


class Form:
    """What a program computes, without the values of its names.

    score, mask: texts without declarations; "" for none. declared: the declarations that the texts brought along,
    such as "slopes: fp32 1d grad". tensors, scalars: the names that each call gives values for.
    """

    def __init__(self, score: str, mask: str, declared: tuple[str, ...] = (), tensors: tuple[str, ...] = (),
                 scalars: tuple[str, ...] = ()) -> None:
        self.score, self.mask, self.declared, self.tensors, self.scalars = score, mask, declared, tensors, scalars
        self.known = frozenset(map(declared_name, declared))
        self.in_score, self.in_mask = _identifiers(score), _identifiers(mask)

    def declarations(self, kinds: tuple[tuple[str, int, bool], ...], is_float: tuple[bool, ...]) -> list[str]:
        """Of all names. kinds: element type, rank and whether a gradient is wanted, of each tensor. is_float: of each
        scalar."""
        lines = list(self.declared)
        for name, (element, rank, grad) in zip(self.tensors, kinds):
            if name not in self.known:
                lines.append(f"{name}: {element} {max(1, rank)}d{' grad' if grad else ''}")
        for name, real in zip(self.scalars, is_float):
            if name not in self.known:
                lines.append(f"{name}: {'float' if real else 'int'}")
        return lines

    def options(self, causal: str, kinds: tuple[tuple[str, int, bool], ...], is_float: tuple[bool, ...]) -> str:
        """As options of a spec: ":score{...}:mask{...}". causal: a named mask to add, or ""."""
        lines = self.declarations(kinds, is_float)
        mask = self.mask
        if causal:
            mask = f"({_spelled_out(causal)}) && ({_spelled_out(mask)})" if mask else causal
        result = ""
        if self.score:
            own = [line for line in lines if declared_name(line) in self.in_score]
            result += f":score{{{'; '.join([*own, self.score])}}}"
        if mask in NAMED_MASKS:
            result += f":{mask}"
        elif mask:
            own = [line.removesuffix(" grad") for line in lines if declared_name(line) in self.in_mask]
            result += f":mask{{{'; '.join([*own, mask])}}}"
        return result


class Program:
    """A form and the values of its names: what score_mod and mask_mod of flashjit.attention() may be.

    tensors: captured tensors, as form.tensors names them. scalars: numbers, or 0-d tensors on the CPU whose value is
    read at every call, as form.scalars names them.
    """

    def __init__(self, form: Form, tensors: tuple[Any, ...] = (), scalars: tuple[Any, ...] = ()) -> None:
        self.form, self.tensors, self.scalars = form, tensors, scalars

    def __repr__(self) -> str:
        parts = [f"score: {self.form.score}"] * bool(self.form.score) + [f"mask: {self.form.mask}"] * bool(self.form.mask)
        return f"<flashjit.Program {'; '.join(parts) or 'that changes nothing'}>"

    def options(self, causal: str = "") -> str:
        """The program as options of a spec, without gradients for captures."""
        kinds = tuple((element_type(t), len(t.shape), False) for t in self.tensors)
        return self.form.options(causal, kinds, tuple(map(is_real, self.scalars)))


# --- text ------------------------------------------------------------------------------------------------------------


def split_declarations(text: str) -> tuple[tuple[str, ...], str]:
    """("a: int; b: fp32 1d; score + a") -> (("a: int", "b: fp32 1d"), "score + a")."""
    head, _, expression = text.rpartition(";")
    return tuple(part.strip() for part in head.split(";") if part.strip()), expression.strip()


def declared_name(declaration: str) -> str:
    return declaration.partition(":")[0].strip()


def _identifiers(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text))


# --- stand-ins -------------------------------------------------------------------------------------------------------


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
    if _is_tensor(value) and _Tracer.current is not None:
        return _Tracer.current.value_of(value)
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

    # Methods of tensors.
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


def _refuse_in_place(*_: Any, **__: Any) -> Value:
    raise WrongType("a program cannot change values in place: write score = score + x instead of score.add_(x).")


_V = Value
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
    "masked_fill": lambda x, condition, value: _where(condition, value, x),
}


def _call_torch(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A function of torch, or an operator of a tensor, on stand-ins and captured tensors."""
    name = getattr(function, "__name__", str(function))
    tracer = _Tracer.current
    if tracer is not None:
        if name == "__getitem__" and arguments and _is_tensor(arguments[0]):
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


# --- tracing ---------------------------------------------------------------------------------------------------------


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class _Tracer:
    """Gives names to the captured tensors of the functions that it calls, in the order of their first use."""

    current: "_Tracer | None" = None

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
        if not _is_tensor(value):
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

    def call(self, function: Callable[..., Any], arguments: tuple[Value, ...], kind: str) -> Value:
        torch = sys.modules.get("torch")
        former, _Tracer.current = _Tracer.current, self
        try:
            if torch is None:
                result = function(*arguments)
            else:
                with _torch_mode():
                    result = function(*arguments)
            result = self.value_of(result)
        except TypeError as error:
            if isinstance(error, InvalidArgument):
                raise
            raise WrongType(f"{_name_of(function)} cannot be traced ({error}): a {kind} is called as "
                            f"{_SIGNATURE[kind]} with stand-ins for numbers; see help(flashjit.programs).") from error
        finally:
            _Tracer.current = former
        if not isinstance(result, (Value, int, float)):
            raise WrongType(f"{_name_of(function)} returns a {type(result).__name__}: a {kind} returns a "
                            f"{'score' if kind == 'score_mod' else 'condition'}, computed from its arguments.")
        return _literal(result)


_SIGNATURE = {"score_mod": "score_mod(score, b, h, q_idx, kv_idx)", "mask_mod": "mask_mod(b, h, q_idx, kv_idx)"}


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


_mode_class: Any = None


def _torch_mode() -> Any:
    """Sees every call of torch on real tensors too: `slopes[h]` asks the tensor, not the stand-in."""
    global _mode_class
    if _mode_class is None:
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
    return isinstance(value, (int, float)) or (_is_tensor(value) and value.dim() == 0 and value.device.type == "cpu"
                                               and not value.requires_grad)


def is_real(scalar: Any) -> bool:
    return scalar.dtype.is_floating_point if _is_tensor(scalar) else isinstance(scalar, float)


def trace(score_mod: Any = None, mask_mod: Any = None, captures: Mapping[str, Any] | None = None) -> Program:
    """Makes a program once, for many calls: `flashjit.attention(q, k, v, score_mod=program)` then traces nothing.

    score_mod, mask_mod: functions or texts. captures: the values of the names in texts.
    A condition that gives -inf at the outside of a score_mod, torch.where(condition, x, -inf), becomes a mask, whose
    empty tiles are skipped.
    """
    for what, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if isinstance(given, Program) or not (given is None or isinstance(given, str) or callable(given)):
            raise WrongType(f"{what} is a {type(given).__name__}: give a function {_SIGNATURE[what]} or text.")
    values = dict(captures or {})
    score, own_score = _text_of(score_mod)
    mask, own_mask = _text_of(mask_mod)
    declared = tuple(dict.fromkeys(own_score + own_mask))
    tracer = _Tracer({**values, **dict.fromkeys(map(declared_name, declared))})
    b, h, q, kv = (Value(name, "int", at_least_zero=True) for name in _POSITIONS)
    conditions: list[str] = []
    if callable(score_mod):
        result, conditions = _split_mask(tracer.call(score_mod, (Value("score", "float"), b, h, q, kv), "score_mod"))
        score = "" if result.text == "score" else _as(result, "float")
    if callable(mask_mod):
        mask = _as(tracer.call(mask_mod, (b, h, q, kv), "mask_mod"), "bool")
    if conditions:
        mask = " && ".join(conditions + ([f"({_spelled_out(mask)})"] if mask else []))
    used = _identifiers(score) | _identifiers(mask)
    for name in values:
        if name not in used:
            raise InvalidArgument(f"captures has {name!r}, but neither program mentions it: remove it, or use it.")
    for name in map(declared_name, declared):
        if name not in values:
            raise InvalidArgument(f"the program declares {name!r}, but captures does not have it: give its value.")
    tensors = {**{name: value for name, value in values.items() if not is_scalar(value)}, **tracer.tensors}
    scalars = {**{name: value for name, value in values.items() if is_scalar(value)}, **tracer.scalars}
    return Program(Form(score, mask, declared, tuple(tensors), tuple(scalars)), tuple(tensors.values()),
                   tuple(scalars.values()))


def _text_of(program: Any) -> tuple[str, tuple[str, ...]]:
    if not isinstance(program, str):
        return "", ()
    own, text = split_declarations(program)
    return text, own


def _spelled_out(mask: str) -> str:
    return {"causal": "kv <= q + seqlen_kv - seqlen_q", "causal_top_left": "kv <= q"}.get(mask, mask)


def _split_mask(score: Value) -> tuple[Value, list[str]]:
    """Conditions that give -inf at the outside of a score, as masks: they say the same and cost less."""
    conditions: list[str] = []
    while score.arms:
        condition, a, b = score.arms
        if "score" in _identifiers(condition.text):
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


# --- remembering what was traced -------------------------------------------------------------------------------------

_EMPTY = Program(Form("", ""))
_forms: dict[Any, tuple[Form, tuple[int, ...], tuple[int, ...]]] = {}
_MOST_FORMS = 1000


def program_of(score_mod: Any, mask_mod: Any, captures: Mapping[str, Any] | None) -> Program:
    """trace(), which remembers what it traced while nothing changes that a function refers to: a function is traced
    anew when a number or a function that it uses changed, not when a captured tensor did."""
    if isinstance(score_mod, Program) or isinstance(mask_mod, Program):
        if captures or not (score_mod is None or mask_mod is None or score_mod is mask_mod):
            raise InvalidArgument("a program from flashjit.trace() comes with other programs or captures: trace all of "
                                  "them together, flashjit.trace(score_mod, mask_mod, captures).")
        return mask_mod if score_mod is None else score_mod
    if score_mod is None and mask_mod is None and not captures:
        return _EMPTY
    walk = _Walk()
    for name, value in (captures or {}).items():
        walk.key.append(name)
        walk.visit(value if is_scalar(value) and _is_tensor(value) else float(0) if isinstance(value, float)
                   else 0 if isinstance(value, int) else _Opaque)
    key = None
    if walk.visit(score_mod) and walk.visit(mask_mod):
        key = tuple(walk.key)
        found = _forms.get(key)
        if found is not None:
            form, tensors, scalars = found
            given = captures or {}
            return Program(form, *(tuple(given[i] if isinstance(i, str) else walk.tensors[i] for i in places)
                                   for places in (tensors, scalars)))
    program = trace(score_mod, mask_mod, captures)
    places = [[_place(name, value, captures, walk) for name, value in zip(names, values)]
              for names, values in ((program.form.tensors, program.tensors), (program.form.scalars, program.scalars))]
    if key is not None and None not in places[0] + places[1]:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[key] = (program.form, tuple(places[0]), tuple(places[1]))
    return program


def _place(name: str, value: Any, captures: Mapping[str, Any] | None, walk: "_Walk") -> Any:
    """Where the next call finds the value of a name: in captures, or among the tensors that its functions refer to."""
    if captures and name in captures:
        return name
    return next((i for i, tensor in enumerate(walk.tensors) if tensor is value), None)


class _Opaque:
    """Stands for a captured array in a key: which one it is does not matter."""


class _Walk:
    """Collects what the trace of functions depends on: `key` for what is compared, `tensors` for what may change."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Any] = []

    def visit(self, value: Any, depth: int = 0) -> bool:
        """False where it cannot be told, such as for a method of an object that may change."""
        if value is None or isinstance(value, (int, float, str)):
            self.key += (type(value), value)
        elif _is_tensor(value):
            same = next((i for i, tensor in enumerate(self.tensors) if tensor is value), -1)
            self.key += (value.dtype, value.dim(), same, value.dim() == 0 and is_scalar(value))
            self.tensors.append(value)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
            self.key.append(value)
        elif isinstance(value, (tuple, list)) and len(value) <= 8 and depth < 4:
            self.key += (type(value), len(value))
            return all([self.visit(item, depth + 1) for item in value])
        elif isinstance(value, types.FunctionType) and depth < 4:
            return self._visit_function(value, depth)
        else:
            return False
        return True

    def _visit_function(self, function: types.FunctionType, depth: int) -> bool:
        self.key.append(function.__code__)
        try:
            parts = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a variable that is not set yet
            return False
        names = function.__globals__
        parts += [names[name] for name in _names_in(function.__code__) if name in names]
        parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return all([self.visit(part, depth + 1) for part in parts])


@functools.lru_cache(maxsize=_MOST_FORMS)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function and in those inside of it."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names_in(const))
    return tuple(dict.fromkeys((*code.co_names, *inner)))

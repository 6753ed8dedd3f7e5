"""score_mod, mask_mod and programs of elements as text of flashjit's language, from their jaxprs.

A jaxpr's equations are followed from the function's arguments on. What depends on captured arrays alone is computed where
the call is, so that only elements are read in the kernel; what depends on a position or on the score becomes text. An array
in between, such as a row of a table, is known by its elements, each made when it is asked for.

The text has marks where a transformation of the call has to know what stands there: @b@, @h@ and @h_kv@ are the positions b, h and
h_kv, @b:c0:1@ is b as the index of a capture in a dimension of the batch's size, and @c0@ is where the indices of c0 begin.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np

from .. import _arithmetic as ops
from .. import _values as v
from .._tracing import MAX_TENSORS, SIGNATURES, split_mask
from .._values import ELEMENTS, Value, as_text
from ..errors import InvalidArgument, WrongType
from ._rows import of_squares, row_of
from ._rules import INSTEAD, RULES, UNCHANGED, Elements, constant, dtype_of, scalar

_MOST_DIMENSIONS = 6
_MARKED = ("b", "h", "h_kv")


@dataclasses.dataclass(frozen=True)
class Capture:
    """What programs read. programs: which ones do. along: of each dimension "b", "h" or "h_kv" where all reads index it by that position
    alone, else "". folds: the numbers of the vmaps whose axes are in front of the dimensions, the last one first."""

    type: str
    rank: int
    programs: frozenset[str]
    along: tuple[str, ...]
    folds: tuple[int, ...] = ()

    def has_gradient(self) -> bool:
        """Whether a program but the mask reads it."""
        return bool(self.programs - {"mask"})


@dataclasses.dataclass(frozen=True)
class Program:
    """Texts with marks, "" where there is none, and what they read, by the names c0, c1, ..."""

    score: str = ""
    mask: str = ""
    q_mod: str = ""
    k_mod: str = ""
    out_mod: str = ""
    captures: tuple[Capture, ...] = ()

    def texts(self) -> dict[str, str]:
        """The programs that there are, by their names in a spec."""
        fields = {name: getattr(self, name) for name in ("score", "mask", "q_mod", "k_mod", "out_mod")}
        return {name: text for name, text in fields.items() if text}


#: What each program becomes that changes nothing.
_UNCHANGED_TEXTS = {"score": "score", "q_mod": "element", "k_mod": "element", "out_mod": "out"}


class Tracer:
    """Reads functions, and gives names to what they capture, in the order of its first use."""

    def __init__(self, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, heads_kv: int = 1) -> None:
        self.pairs = {"b": batch, "h": heads, "q": seqlen_q, "kv": seqlen_kv}
        self.sizes = {**self.pairs, "h_kv": heads_kv}
        self.arrays: list[Any] = []
        self._reads: dict[tuple[str, int], set[str]] = {}  # the marks by which a dimension is indexed

    def position(self, name: str) -> Value:
        text = f"@{name}@" if name in _MARKED else name
        return Value(text, "int32", 0, max(self.sizes[name] - 1, 0))

    def positions(self) -> list[Value]:
        return [self.position(name) for name in self.pairs]

    # Functions.

    def score(self, kind: str, function: Callable[..., Any], score: str) -> tuple[str, list[str]]:
        """What a score_mod or weight_mod makes of a score, and the conditions that it masks by."""
        made = self._number(kind, function, scalar(Value(score, "float32")), *self.positions())
        result, conditions = split_mask(made)
        return as_text(result, "float"), conditions

    def mask(self, function: Callable[..., Any]) -> str:
        made = self._call("mask_mod", function, *map(scalar, self.positions()))
        if made.type != "bool":
            raise WrongType(
                f"mask_mod returns {made.dtype_name}: it returns a boolean, true where a pair attends."
            )
        return made.text

    def out(self, function: Callable[..., Any], columns: int) -> str:
        """What an out_mod makes of an element of O."""
        places = [self.position(name) for name in ("b", "h", "q")]
        made = self._number("out_mod", function, scalar(Value("out", "float32")), *places, _column(columns))
        return as_text(made, "float")

    def row(self, kind: str, function: Callable[..., Any], columns: int) -> str:
        """What a q_mod or k_mod makes of an element of a row."""
        places = [
            self.position(name) for name in (("b", "h", "q") if kind == "q_mod" else ("b", "h_kv", "kv"))
        ]
        made = self._number(kind, function, row_of(columns), *places, _column(columns))
        return as_text(made, "float")

    def _number(self, kind: str, function: Callable[..., Any], first: Elements, *places: Value) -> Value:
        made = self._call(kind, function, first, *map(scalar, places))
        if v.Value("", made.dtype_name).type != "float":
            what = {"score_mod": "a score", "weight_mod": "a weight"}.get(kind, "an element")
            raise WrongType(f"{kind} returns {made.dtype_name}: it returns {what}, a floating-point number.")
        return made

    def _call(self, kind: str, function: Callable[..., Any], *arguments: Elements) -> Value:
        if not callable(function):
            raise WrongType(f"{kind} is a {type(function).__name__}: give a function {SIGNATURES[kind]}.")
        shapes = [jax.ShapeDtypeStruct(argument.shape, argument.dtype) for argument in arguments]
        traced = jax.make_jaxpr(function)(*shapes)
        if len(traced.out_avals) != 1 or traced.out_avals[0].shape != ():
            raise WrongType(
                f"{kind} returns {', '.join(str(aval) for aval in traced.out_avals) or 'nothing'}: it is called as "
                f"{SIGNATURES[kind]}, and returns a scalar."
            )
        (result,) = self._follow(kind, traced.jaxpr, traced.consts, arguments)
        return self.elements(result).at(())

    def _follow(self, kind: str, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments)))

        def value_of(atom: Any) -> Any:
            if isinstance(atom, jax.extend.core.Literal):
                return atom.val if isinstance(atom.val, jax.Array) else np.asarray(atom.val, atom.aval.dtype)
            return known[atom]

        for equation in jaxpr.eqns:
            values = [value_of(atom) for atom in equation.invars]
            if any(isinstance(value, Elements) for value in values):
                results = self._equation(kind, equation, values)
            else:
                results = _computed(jaxpr, equation, values)
            known.update(zip(equation.outvars, results))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _equation(self, kind: str, equation: Any, values: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        inner = _inner_jaxpr(equation)
        if inner is not None:
            whole = _division_of_naturals(equation, inner)
            if whole is not None:
                x, y = (self.elements(value) for value in values)
                if x.at(()).low >= 0 and y.at(()).low > 0:
                    return [Elements((), x.dtype, lambda _: whole(x.at(()), y.at(())))]
            return self._follow(kind, inner.jaxpr, inner.consts, values)
        if name in UNCHANGED:
            return values
        rule = RULES.get(name)
        if rule is None:
            raise InvalidArgument(
                f"{kind} uses {name}, which a program does not have{INSTEAD.get(name, '')}. It may use, on scalars and "
                f"elements of captured arrays: {', '.join(sorted(RULES))}."
            )
        operands = [self.elements(value) for value in values]
        return [of_squares(equation, operands) or rule(equation, *operands)]

    # Captured arrays.

    def elements(self, array: Any) -> Elements:
        if isinstance(array, Elements):
            return array
        if isinstance(array, np.ndarray) and array.ndim == 0:  # whatever its type, a number
            kind = "float32" if str(array.dtype) == "float64" else dtype_of(array.dtype)
            return Elements((), kind, lambda _: constant(array.item()))
        name = dtype_of(array.dtype, "a captured array")
        if not isinstance(array, np.ndarray):
            return Elements(array.shape, name, functools.partial(self.read, array), True)

        def constant_or_read(indices: tuple[Value, ...]) -> Value:
            numbers = [index.number for index in indices]
            if any(number is None for number in numbers):
                return self.read(array, indices)
            return constant(array[tuple(numbers)].item())

        return Elements(array.shape, name, constant_or_read, True)

    def read(self, array: Any, indices: Sequence[Value]) -> Value:
        """An element of an array that the call passes on."""
        if array.ndim > _MOST_DIMENSIONS:
            raise InvalidArgument(
                f"a captured array has {array.ndim} dimensions, {array.shape}: programs read arrays of at most "
                f"{_MOST_DIMENSIONS}; reshape it."
            )
        if array.size == 0:
            raise InvalidArgument(f"a captured array of shape {array.shape} has no element to read.")
        dtype = dtype_of(array.dtype, "a captured array")
        name = self._name(array)
        texts = [self._index(name, d, array.shape[d], index) for d, index in enumerate(indices)] or ["0"]
        return Value(f"{name}[@{name}@{', '.join(texts)}]", dtype, *v.int_range(dtype), wide=dtype == "int64")

    def _index(self, name: str, dimension: int, size: int, index: Value) -> str:
        text = "0" if size == 1 else as_text(index, "int")
        name_of_position = text.strip("@")
        is_alone = text == f"@{name_of_position}@" and name_of_position in _MARKED
        mark = name_of_position if is_alone and self.sizes[name_of_position] == size else ""
        self._reads.setdefault((name, dimension), set()).add(mark)
        return f"@{mark}:{name}:{dimension}@" if mark else text

    def _name(self, array: Any) -> str:
        for number, known in enumerate(self.arrays):
            if known is array:
                return f"c{number}"
        if len(self.arrays) == MAX_TENSORS:
            raise InvalidArgument(f"the programs read more than {MAX_TENSORS} arrays: join some of them.")
        self.arrays.append(array)
        return f"c{len(self.arrays) - 1}"

    def program(self, **texts: str) -> tuple[Program, tuple[Any, ...]]:
        """The program of texts, by its names for them, with the values that they read."""
        texts = {kind: text for kind, text in texts.items() if text != _UNCHANGED_TEXTS.get(kind)}
        for (name, dimension), marks in self._reads.items():
            if len(marks) > 1:  # then no one position says which elements are read
                for mark in filter(None, marks):
                    whole = f"@{mark}:{name}:{dimension}@"
                    texts = {kind: text.replace(whole, f"@{mark}@") for kind, text in texts.items()}
        used = "".join(texts.values())
        read = [n for n in range(len(self.arrays)) if f"@c{n}@" in used]  # not where a choice is known
        captures = [self._capture(number, texts) for number in read]
        renamed = {f"c{number}": f"c{place}" for place, number in enumerate(read)}
        texts = {
            kind: re.sub(r"\bc\d+\b", lambda name: renamed[name[0]], text) for kind, text in texts.items()
        }
        arrays = [_on_device(self.arrays[number]) for number in read]
        values = tuple(array if array.ndim else array.reshape(1) for array in arrays)
        return Program(**texts, captures=tuple(captures)), values

    def _capture(self, number: int, texts: dict[str, str]) -> Capture:
        array, name = self.arrays[number], f"c{number}"
        marks = [self._reads.get((name, dimension), set()) for dimension in range(array.ndim)]
        along = [next(iter(found)) if len(found) == 1 else "" for found in marks]
        programs = frozenset(kind for kind, text in texts.items() if f"@{name}@" in text)
        return Capture(ELEMENTS[str(array.dtype)], max(array.ndim, 1), programs, tuple(along) or ("",))


def _column(columns: int) -> Value:
    return Value("column", "int32", 0, columns - 1)


def _on_device(array: Any) -> Any:
    return jax.numpy.asarray(array) if isinstance(array, np.ndarray) else array


def _computed(jaxpr: Any, equation: Any, values: list[Any]) -> Sequence[Any]:
    """The results of an equation of what the call knows; of constants, constants."""
    given = {
        atom: value
        for atom, value in zip(equation.invars, values)
        if not isinstance(atom, jax.extend.core.Literal)
    }
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=equation.outvars, eqns=[equation])
    compute = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(alone, ()))
    if not all(isinstance(value, np.ndarray) for value in values):
        return compute(*given.values())
    with jax.ensure_compile_time_eval():
        return list(map(np.asarray, compute(*given.values())))


def _inner_jaxpr(equation: Any) -> Any:
    """The function that an equation calls."""
    name, params = equation.primitive.name, equation.params
    if name == "custom_jvp_call":
        source = str(params["call_jaxpr"].jaxpr.debug_info.func_src_info)
        if f"{jax.__path__[0]}" not in source:
            raise InvalidArgument(
                f"a program uses {source.split(' ')[0]}, which has a custom_jvp: its derivative is made of what it computes, "
                "so leave the rule out."
            )
        return params["call_jaxpr"]
    if name in ("jit", "pjit", "closed_call", "core_call"):
        return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    if name in ("remat", "checkpoint", "remat2"):
        return jax.extend.core.ClosedJaxpr(params["jaxpr"], ())
    return None


_DIVISIONS = {
    "floor_divide": (jax.numpy.floor_divide, ops.floor_divide),
    "remainder": (jax.numpy.remainder, ops.remainder),
}


def _division_of_naturals(equation: Any, inner: Any) -> Callable[[Value, Value], Value] | None:
    """What stands for JAX's own floor division or remainder of scalar ints that are not below zero: its jaxpr also serves
    negative ones, and masks are analysed by what they say."""
    name = equation.params.get("name")
    if name not in _DIVISIONS or any(
        atom.aval.shape or atom.aval.dtype.kind != "i" for atom in equation.invars
    ):
        return None
    of_jax, meant = _DIVISIONS[name]
    kinds = tuple((str(atom.aval.dtype), atom.aval.weak_type) for atom in equation.invars)
    return meant if str(inner) == _text_of(of_jax, kinds) else None


@functools.cache
def _text_of(function: Callable[..., Any], kinds: tuple[tuple[str, bool], ...]) -> str:
    shapes = [jax.ShapeDtypeStruct((), dtype, weak_type=weak) for dtype, weak in kinds]
    return str(jax.make_jaxpr(function)(*shapes).jaxpr.eqns[0].params["jaxpr"])

"""Captured tensors whose indices a program gives in part, and rows of stand-ins that it sums or indexes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from . import _functions  # noqa: F401  (fills FUNCTIONS)
from ._arithmetic import add, bits, multiply
from ._at_work import tracers
from ._torch_names import FUNCTIONS, without_function
from ._values import Shape, UnknownAttribute, Value, as_bool, as_text, literal
from .errors import InvalidArgument, WrongType

_MAX_ROW = 256  # what is unrolled at most


class PartialRead:
    """A captured tensor with some of its indices given: t[b] of a matrix, or t[:, kv]."""

    def __init__(self, tracer: Any, tensor: Any, indices: tuple[Value | None, ...]) -> None:
        self.tracer, self.tensor, self.indices = tracer, tensor, indices

    def _open(self) -> list[int]:
        """The dimensions without an index."""
        return [i for i, index in enumerate(self.indices) if index is None]

    def __getitem__(self, index: Any) -> Any:
        given = index if isinstance(index, tuple) else (index,)
        open_ = self._open()
        indexed = sum(item is not Ellipsis for item in given)
        rest = len(open_) - indexed
        if rest < 0 or len(given) > indexed + 1:
            raise InvalidArgument(
                f"{self.tracer.named(self.tensor)} has {len(self.indices)} dimensions and is indexed with "
                f"{indexed + len(self.indices) - len(open_)}."
            )
        places = iter(open_)
        indices = list(self.indices)
        for item in given:
            if item is Ellipsis:
                for _ in range(rest):
                    next(places)
                continue
            dimension = next(places)
            if isinstance(item, slice):
                if item != slice(None):
                    raise WrongType(
                        f"{self.tracer.named(self.tensor)} is cut by a slice in a program, which takes whole "
                        "dimensions, [:], only: add the beginning to the index instead."
                    )
                continue
            indices[dimension] = self.tracer.index(self.tensor, dimension, item)
        return self.tracer.read_at(self.tensor, tuple(indices))

    @property
    def shape(self) -> Shape:
        return Shape(self.tracer.size(self.tensor, i) for i in self._open())

    def size(self, dimension: int | None = None) -> Any:
        return self.shape if dimension is None else self.shape[dimension]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def as_row(self) -> Row:
        if len(self._open()) != 1:
            raise InvalidArgument(
                f"{self.tracer.named(self.tensor)} has {len(self.indices)} dimensions and is indexed with "
                f"{len(self.indices) - len(self._open())}: index all of them."
            )
        if len(self) > _MAX_ROW:
            raise InvalidArgument(
                f"{self.tracer.named(self.tensor)} is indexed but for a dimension of {len(self)}: index all of "
                f"them; rows of at most {_MAX_ROW} are computed with as a whole."
            )
        return Row(list(self))

    def as_value(self) -> Value:
        raise InvalidArgument(
            f"{self.tracer.named(self.tensor)} has {len(self.indices)} dimensions and is indexed with "
            f"{len(self.indices) - len(self._open())}: index all of them."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.as_row(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return tracers[-1].call_torch(function, arguments, named or {})


class Row:
    """Stand-ins in a row: an operation applies to each, and a sum, any() or all() makes one value of them."""

    __array_ufunc__ = None

    def __init__(self, items: list[Value]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Row(self.items[index])
        return self.items[index]

    def sum(self, *_: Any, **__: Any) -> Value:
        terms: list[Any] = self.items
        while len(terms) > 1:  # by halves: what is nested deeply is refused
            terms = [
                add(*terms[i : i + 2]) if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)
            ]
        return terms[0]  # type: ignore[no-any-return]

    def mean(self, *_: Any, **__: Any) -> Value:
        return self.sum() / len(self.items)

    def any(self, *_: Any, **__: Any) -> Value:
        return functools.reduce(lambda a, b: bits("|", a, b), map(as_bool, self.items))

    def all(self, *_: Any, **__: Any) -> Value:
        return functools.reduce(lambda a, b: bits("&", a, b), map(as_bool, self.items))

    def dot(self, other: Any) -> Value:
        return self.each(multiply, (self, other), {}).sum()

    inner = vdot = dot

    @staticmethod
    def each(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Row:
        rows = [row_of(argument) for argument in arguments]
        lengths = {len(row) for row in rows if row is not None}
        if len(lengths) != 1:
            raise InvalidArgument(
                f"rows of {' and '.join(map(str, sorted(lengths)))} captured elements meet in a program: they "
                "must have one length."
            )
        return Row(
            [
                function(
                    *(argument if row is None else row.items[i] for argument, row in zip(arguments, rows)),
                    **named,
                )
                for i in range(lengths.pop())
            ]
        )

    def as_value(self) -> Value:
        raise InvalidArgument(
            f"a row of {len(self.items)} captured elements is used as a number: sum it, or index it."
        )

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise UnknownAttribute(without_function(name, "a row of a captured tensor"))
        return lambda *arguments, **named: self.each(FUNCTIONS[name], (self, *arguments), named)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return tracers[-1].call_torch(function, arguments, named or {})


class ElementRow:
    """The row of Q or K that a q_mod or k_mod changes: row[column] is an element, row.square().sum() a number."""

    __array_ufunc__ = None

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer

    def __getitem__(self, column: Any) -> Value:
        index = None if isinstance(column, (bool, slice, tuple)) else literal(self.tracer.value_of(column))
        if index is None or index.type != "int" or index.number is not None and index.number < 0:
            raise WrongType(
                f"the row of q_mod or k_mod is indexed with {column}: give a column, an int from 0 on, such as column or "
                "column ^ 1."
            )
        text = as_text(index, "int")
        return Value("element" if text == "column" else f"element_at({text})", "float32")

    def square(self) -> _Squares:
        return _Squares()

    def pow(self, exponent: Any) -> _Squares:
        if exponent != 2:
            self._refuse()
        return _Squares()

    __pow__ = pow

    def __mul__(self, other: Any) -> _Squares:
        if other is not self:
            self._refuse()
        return _Squares()

    def _refuse(self) -> NoReturn:
        raise WrongType(
            "the row of q_mod or k_mod is used as a whole: index it by columns, as in row[column]; of all columns there is "
            "row.square().sum() alone."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class _Squares:
    """The squares of a row, to be summed."""

    def sum(self, *_: Any, **__: Any) -> Value:
        return Value("sum_of_squares", "float32")

    def mean(self, *_: Any, **__: Any) -> NoReturn:
        raise WrongType(
            "row.square().mean() has no number of columns here: divide row.square().sum() by head_dim."
        )


STAND_INS = (Value, PartialRead, Row, ElementRow)


def row_of(value: Any) -> Row | None:
    return value if isinstance(value, Row) else value.as_row() if isinstance(value, PartialRead) else None


def _row_operator(name: str, reverse: bool) -> Callable[..., Any]:
    function = FUNCTIONS[name]
    if reverse:
        return lambda self, other: Row.each(function, (other, self), {})
    return lambda self, *other: Row.each(function, (self, *other), {})


for _kind in (PartialRead, Row):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
        setattr(_kind, f"__{_name}__", _row_operator(_name, False))
        setattr(_kind, f"__r{_name}__", _row_operator(_name, True))
    setattr(_kind, "__matmul__", lambda self, other: row_of(self).dot(other))  # type: ignore[union-attr]
    for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
        setattr(_kind, f"__{_name}__", _row_operator(_name, False))

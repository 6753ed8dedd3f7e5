"""The row of Q or K that a q_mod or k_mod changes: its elements, and the sum of their squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._values import Value, as_text
from ._rules import Elements, scalar


class _Row(Elements):
    """[head_dim]. An index that is outside is clamped into the row."""

    def __init__(self, columns: int) -> None:
        super().__init__((columns,), "float32", _element, True)


class _Squares(Elements):
    """A row's squares."""


def row_of(columns: int) -> Elements:
    return _Row(columns)


def _element(indices: tuple[Value, ...]) -> Value:
    text = as_text(indices[0], "int")
    return Value("element" if text == "column" else f"element_at({text})", "float32")


def of_squares(equation: Any, operands: Sequence[Elements]) -> Elements | None:
    """The squares of a row, or their sum; None where the equation makes another thing."""
    name, first = equation.primitive.name, operands[0]
    if name == "reduce_sum" and isinstance(first, _Squares):
        return scalar(Value("sum_of_squares", "float32"))
    if not isinstance(first, _Row):
        return None
    is_square = (
        name == "square"
        or name == "integer_pow"
        and equation.params["y"] == 2
        or name == "mul"
        and operands[1] is first
    )
    square = lambda indices: first.at(indices) * first.at(indices)
    return _Squares(first.shape, first.dtype, square) if is_square else None

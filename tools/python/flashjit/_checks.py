"""Arguments of wrong types: what was given, and what to give."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from .errors import InvalidArgument, WrongType

_LARGEST = 2**1023  # that a float holds for sure
_NUMBERS = frozenset(
    {float, int}
)  # without a look at the abstract classes, which takes longer than all else here


def check_number(name: str, value: Any) -> None:
    if type(value) not in _NUMBERS and not isinstance(value, Real):
        raise WrongType(f"{name} is a {type(value).__name__}: give a Python number.")
    if type(value) is int and abs(value) > _LARGEST:
        raise InvalidArgument(
            f"{name} is an int of {value.bit_length()} bits: give a number that a float can hold."
        )


def python_number(value: Any) -> Any:
    """One of NumPy's numbers as Python's; other values as they are."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
        return float(value) if type(value).__module__ == "numpy" else value  # longdouble is its own item()
    return value


def check_switches(**given: Any) -> None:
    """True or False, also NumPy's, and whole numbers, as C has them; None counts as False."""
    for name, value in given.items():
        is_one = isinstance(value, Integral) or type(value).__name__ in ("bool", "bool_") or value is None
        dimensions: int = getattr(value, "ndim", 0)  # an array has some
        if not is_one or dimensions > 0:
            raise WrongType(f"{name} is a {type(value).__name__}: give True or False.")


def read_accurate(accurate: Any) -> tuple[bool, Any]:
    """Whether P and dS are two elements each, and `accurate` as a switch."""
    if not isinstance(accurate, str):
        return False, accurate
    if accurate != "fp32":
        raise InvalidArgument(f'accurate is {accurate!r}: give True, False or "fp32".')
    return True, True


def check_whole(name: str, value: Any) -> None:
    if type(value) is not int and not isinstance(value, Integral):
        raise WrongType(f"{name} is a {type(value).__name__}: give a Python int.")


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise WrongType(f"{name} is a {type(value).__name__}: give a str.")
    if "\0" in value or not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidArgument(f"{name} is {value!r}: give text without NUL and halves of surrogate pairs.")


def check_mapping(name: str, value: Any) -> None:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise WrongType(f"{name} is a {type(value).__name__}: give a dict of values by name.")

"""Arguments of wrong types: what was given, and what to give."""
from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from .errors import WrongType

_NUMBERS = frozenset({float, int})  # without a look at the abstract classes, which takes longer than all else here


def check_number(name: str, value: Any) -> None:
    if type(value) not in _NUMBERS and not isinstance(value, Real):
        raise WrongType(f"{name} is a {type(value).__name__}: give a Python number.")


def check_whole(name: str, value: Any) -> None:
    if type(value) is not int and not isinstance(value, Integral):
        raise WrongType(f"{name} is a {type(value).__name__}: give a Python int.")


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise WrongType(f"{name} is a {type(value).__name__}: give a str.")


def check_mapping(name: str, value: Any) -> None:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise WrongType(f"{name} is a {type(value).__name__}: give a dict of values by name.")

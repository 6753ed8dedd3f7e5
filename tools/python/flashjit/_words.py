"""Errors in the words of a function that has other names for attention()'s arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from .errors import Error

Function = TypeVar("Function", bound=Callable[..., Any])


def renamed(error: Error, words: Mapping[str, str]) -> Error:
    """words: the caller's, by the message's. In compiled code the error itself."""
    if torch.compiler.is_compiling():
        return error
    text = re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], str(error))
    made = type(error)(text)
    made.detail = error.detail
    return made


def in_words(**words: str) -> Callable[[Function], Function]:
    """A decorator: errors of the function in these words."""

    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            try:
                return function(*args, **named)
            except Error as error:
                raise renamed(error, words) from None

        return call  # type: ignore[return-value]

    return decorated

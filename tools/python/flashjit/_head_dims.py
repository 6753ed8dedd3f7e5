"""The head dimensions that kernels have, as the library says."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from ._library import library


class HeadDims(NamedTuple):
    """Multiples of step, from step on: up to most, and up to most_v of V."""

    step: int
    most: int
    most_v: int


@functools.cache
def head_dims() -> HeadDims:
    found = [ctypes.c_int32() for _ in HeadDims._fields]
    library().flashjit_head_dims(*map(ctypes.byref, found))
    return HeadDims(*(number.value for number in found))


# What torch.compiler.assume_constant_result() does, which imports the compiler.
head_dims._dynamo_marked_constant = True  # type: ignore[attr-defined]


def wrong_head_dim(dim: int, dim_v: int) -> str:
    """What no kernel has: "head_dim is 12; it must be ..."; "" if some have both."""
    step, most, most_v = head_dims()
    for name, given, largest in (("head_dim", dim, most), ("head_dim_v", dim_v, most_v)):
        if given % step or not step <= given <= largest:
            return f"{name} is {given}; it must be a multiple of {step} from {step} to {largest}"
    return ""

"""Kernels for a range of shapes at once, before requests come. Nothing here knows PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import _library
from ._library import Runtime, check, library, pass_of, shape_struct, spec_handle
from ._reports import KernelReport, Received
from .errors import InvalidArgument

_PROGRESS = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_NAMES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv")


class RangeReport(NamedTuple):
    """What prepare_range() did."""

    made: int  #: configurations whose kernels are loaded
    configurations: int  #: that calls of these shapes choose: more than made where it was stopped
    workspace_bytes: int  #: the most device memory that one of the calls needs lent
    kernels: tuple[KernelReport, ...]  #: those made


def prepare_range(
    spec: str,
    shapes: Sequence[int | Sequence[int]],
    *,
    backward: bool = False,
    progress: Callable[[int, int], object] | None = None,
    runtime: Runtime | None = None,
) -> RangeReport:
    """Compiles and loads on the current device every kernel that calls in a range of shapes choose, on all cores: no such
    call compiles afterwards.

    spec: such as "bf16:d128:causal:varlen:pages16", or "append:bf16:d128:pages16".
    shapes: (batch, heads_q, heads_kv, seqlen_q, seqlen_kv), each a number or, but for the heads, (first, last) or (first, last,
    step). Without a step it means the ends and the powers of two between them, as engines round bounds up; with one first, first
    + step and so on, and last. At most 2^16 shapes.
    progress: called as progress(made, configurations), first with none made. False, an exception or Ctrl-C stops: the kernels
    under way are finished, and those made stay in memory and in the cache, so that the same call goes on from there.
    runtime: by default the one that all calls share.

    Raises InvalidArgument for a range that is empty, begins below 1 or has too many shapes; otherwise as Runtime.prepare().
    """
    ends = [_ends(name, sizes) for name, sizes in zip(_NAMES, shapes)]
    if len(shapes) != len(_NAMES):
        raise InvalidArgument(f"shapes has {len(shapes)} entries: give ({', '.join(_NAMES)}).")
    first, last, step = (shape_struct(sizes) for sizes in zip(*ends))
    stopped_by: list[BaseException] = []

    def tell(_user: object, made: int, configurations: int) -> int:
        try:
            return progress is None or progress(made, configurations) is not False
        except BaseException as error:  # Ctrl-C, too: raised below, as C lets no exception through
            stopped_by.append(error)
            return False

    callback, received = _PROGRESS(tell), Received()
    results = (ctypes.c_size_t * 3)()
    word = ctypes.sizeof(ctypes.c_size_t)
    used = runtime or _library.runtime()
    status = library().flashjit_prepare_range(
        used.address,
        pass_of(spec, backward),
        spec_handle(spec).address,
        *map(ctypes.byref, (first, last, step)),
        ctypes.cast(callback, ctypes.c_void_p),
        received.receiver,
        None,
        *(ctypes.byref(results, i * word) for i in range(3)),
    )
    used.generation += 1
    if stopped_by:
        raise stopped_by[0]
    check(status)
    return RangeReport(results[0], results[1], results[2], tuple(received.kernels))


def _ends(name: str, sizes: int | Sequence[int]) -> tuple[int, int, int]:
    """First, last and step."""
    if not isinstance(sizes, Sequence):
        return sizes, sizes, 1
    if len(sizes) not in (2, 3) or name.startswith("heads"):
        allowed = "a number" if name.startswith("heads") else "a number, (first, last) or (first, last, step)"
        raise InvalidArgument(f"{name} is {tuple(sizes)}: give {allowed}.")
    return sizes[0], sizes[1], sizes[2] if len(sizes) == 3 else 0

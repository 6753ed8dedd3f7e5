"""What was prepared: reports of kernels, as the C interface tells them. Nothing here knows PyTorch."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ._c_interface import EntryReport as _Entry
from ._c_interface import KernelReport as _Kernel

_RECEIVER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Kernel))


class EntryReport(NamedTuple):
    """What an entry (a __global__ function) of a kernel takes."""

    entry: str
    registers: int
    spill_bytes: int  #: stores and loads together
    shared_bytes: int  #: static and dynamic together
    threads: int  #: a block


class KernelReport(NamedTuple):
    """A kernel that was prepared."""

    spec: str
    config: str  #: tiles
    config_source: str  #: "given", "tuned", "tuned elsewhere", "tuned for a near shape" or "heuristic"
    key: str  #: its directory in cache and packs; empty: nothing is launched
    origin: str  #: "memory", "pack", "disk" or "compiled"
    render_ms: float  #: spent by this call, as are the next two
    compile_ms: float
    load_ms: float
    entries: tuple[EntryReport, ...]


class Received:
    """The reports of one call, which is given `receiver`."""

    def __init__(self) -> None:
        self.kernels: list[KernelReport] = []
        self._callback = _RECEIVER(self._receive)
        self.receiver = ctypes.cast(self._callback, ctypes.c_void_p)

    def _receive(self, _user: object, report: Any) -> None:
        told = report.contents
        entries = ctypes.cast(told.entries, ctypes.POINTER(_Entry))
        texts = [getattr(told, name).decode() for name in KernelReport._fields[:5]]
        taken = [[getattr(entries[i], name) for name in EntryReport._fields] for i in range(told.entry_count)]
        spent = [told.render_ms, told.compile_ms, told.load_ms]
        of_entries = tuple([EntryReport(name.decode(), *numbers) for name, *numbers in taken])
        self.kernels.append(KernelReport._make([*texts, *spent, of_entries]))

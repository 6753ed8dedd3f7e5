"""What a function's trace depends on, where all of it can be compared at the next call."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence
from typing import Any

from ._torch_names import FUNCTIONS
from ._tracing import is_scalar, is_tensor

_NUMBERS = frozenset((int, float, bool, str, type(None)))
_MODULES = frozenset(("torch", "torch.nn.functional", "torch.special", "math"))
# What functions may ask of these modules and of values; whatever else has a name is not known to stay as it is.
_ATTRIBUTES = frozenset(
    (
        *FUNCTIONS,
        "nn",
        "functional",
        "special",
        "inf",
        "pi",
        "dtype",
        "float32",
        "float16",
        "int32",
        "int64",
        "range",
    )
)
_WRITES = frozenset(
    (
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
        "STORE_ATTR",
        "DELETE_ATTR",
        "STORE_SUBSCR",
        "DELETE_SUBSCR",
        "IMPORT_NAME",
    )
)
_MOST_CODES = 1000


class Watch:
    """Collects what the trace of functions depends on: `key` for what is compared, `tensors` for what may change."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Any] = []

    def place_of(self, tensor: Any) -> int | None:
        return next((i for i, known in enumerate(self.tensors) if known is tensor), None)

    def see_all(self, mods: Sequence[Any]) -> bool:
        """see() for each program; most are None."""
        for mod in mods:
            if mod is None:
                self.key.append(None)
            elif not self.see(mod):
                return False
        return True

    def see(self, value: Any, depth: int = 0) -> bool:
        """False where something cannot be compared, such as the attributes of an object."""
        kind = type(value)
        if kind in _NUMBERS:
            self.key += (kind, value or repr(value))  # 0.0 equals -0.0
            return True
        if kind is types.FunctionType:
            return depth < 4 and self._see_function(value, depth)
        if is_tensor(value):
            self.key += (
                value.dtype,
                value.dim(),
                self.place_of(value) if self.tensors else None,
                value.dim() == 0 and is_scalar(value),
            )
            self.tensors.append(value)
            return True
        if kind in (tuple, list):
            self.key += (kind, len(value))
            return len(value) <= 8 and depth < 4 and all([self.see(item, depth + 1) for item in value])
        self.key.append(value)
        if kind is types.ModuleType:
            return value.__name__ in _MODULES
        return kind is types.BuiltinFunctionType and _is_of_torch(value)

    def _see_function(self, function: types.FunctionType, depth: int) -> bool:
        self.key.append(function.__code__)
        if _is_of_torch(function):
            return True
        names = _names_in(function.__code__)
        if names is None:
            return False
        try:
            parts = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a variable that is not set yet
            return False
        known = function.__globals__
        for name in names:
            if name in known:
                parts.append(known[name])
            elif name not in _ATTRIBUTES:
                return False
        parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return all([self.see(part, depth + 1) for part in parts])


def _is_of_torch(function: Any) -> bool:
    return (function.__module__ or "").startswith(
        ("torch.nn.functional", "torch._C", "torch.functional")
    ) and (function.__name__ in FUNCTIONS)


@functools.lru_cache(maxsize=_MOST_CODES)
def _names_in(code: types.CodeType) -> tuple[str, ...] | None:
    """The names of globals and attributes in a function and in those inside of it; None where it changes anything."""
    names = list(code.co_names)
    for step in dis.get_instructions(code):
        if step.opname in _WRITES or step.opname == "STORE_DEREF" and step.argval in code.co_freevars:
            return None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found = _names_in(inner)
            if found is None:
                return None
            names += found
    return tuple(dict.fromkeys(names))

"""What is at work in the process: tracers, PyTorch where it is imported, torch.compile."""

from __future__ import annotations

import sys
from typing import Any

tracers: list[Any] = []  # the one at work is the last
torch_module: list[Any] = []  # PyTorch, once flashjit.torch is imported


def loaded_torch() -> Any:
    """PyTorch, where it is imported. torch.compile follows this, too: of a look into sys.modules it would make a condition on
    all modules, and compile again when one is imported."""
    return torch_module[0] if torch_module else sys.modules.get("torch")


def is_compiling() -> bool:
    torch = loaded_torch()
    return torch is not None and torch.compiler.is_compiling()


def is_symbol(value: Any) -> bool:
    """Whether a number may differ from one run of compiled code to another."""
    return (
        is_compiling()
        and isinstance(value, (int, float))
        and not loaded_torch().fx.experimental.symbolic_shapes.has_static_value(value)
    )


def constant(value: int) -> int:
    """A number that compiled code does not take for a symbol: it compiles again for another one."""
    if not is_compiling():
        return value
    return int(loaded_torch().fx.experimental.symbolic_shapes.guard_scalar(value))


def symbol_tensor(value: Any) -> Any:
    """Such a number as a tensor on the CPU, which a launch reads: it is no part of the program."""
    torch = loaded_torch()
    if isinstance(value, float):  # which is a symbol to the end where it is a factor
        return torch.ones((), dtype=torch.float64, device="cpu") * value
    return torch.full((), value, dtype=torch.int64, device="cpu")


def is_tensor(value: Any) -> bool:
    torch = loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)

"""What PyTorch is told of the operators' results, for compiled code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

# PyTorch asks inspect where each is registered: from this one small file, and without a look at all modules of the process, which
# took a third of the time of flashjit's import.
inspect.modulesbyfile.setdefault(inspect.getabsfile(inspect.currentframe()), __name__)  # type: ignore[attr-defined, arg-type]


def register_fake(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torch.library.register_fake()."""
    return lambda function: torch.library.register_fake(operator, function)

"""flashjit: attention kernels generated, compiled at run time, tuned and cached.

    import torch, flashjit
    out = flashjit.attention(q, k, v, causal=True)  # [batch, heads, length, head_dim], with gradients
    out = flashjit.attention(q, k, v, score_mod=lambda score, b, h, q, kv: score + slopes[h] * (kv - q))

flashjit.torch has scaled_dot_product_attention() with PyTorch's signature; flashjit.forward() and flashjit.backward()
take any arrays: NumPy's on the CPU, and those with DLPack or the CUDA array interface. `python -m flashjit --help` is
the command.
"""

from __future__ import annotations

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from . import masks
from ._can import Support, can
from ._library import Runtime, runtime, version
from ._ranges import RangeReport, prepare_range
from ._reports import KernelReport
from .errors import (
    CompileFailed,
    CudaError,
    Error,
    FileError,
    InternalError,
    InvalidArgument,
    KernelMissing,
    NoCompiler,
    NoDevice,
    NoDriver,
    Unsupported,
    WrongType,
)
from .functional import DeviceTileLists, backward, build_lists, forward
from .programs import Program, trace

if TYPE_CHECKING:
    __version__: str
if TYPE_CHECKING or "torch" in _sys.modules:
    from .torch import BlockMap, KvFormat, TileLists, append, attention, attention_over, bind, merge, quantize

__all__ = [
    "append",
    "attention",
    "attention_over",
    "backward",
    "bind",
    "build_lists",
    "can",
    "forward",
    "masks",
    "merge",
    "prepare_range",
    "quantize",
    "trace",
    "runtime",
    "version",
    "DeviceTileLists",
    "BlockMap",
    "KernelReport",
    "KvFormat",
    "Program",
    "RangeReport",
    "Runtime",
    "Support",
    "TileLists",
    "Error",
    "InvalidArgument",
    "WrongType",
    "Unsupported",
    "NoDriver",
    "NoDevice",
    "NoCompiler",
    "CompileFailed",
    "KernelMissing",
    "FileError",
    "CudaError",
    "InternalError",
]


_OF_TORCH = (
    *("append", "attention", "attention_over", "bind", "merge", "quantize"),
    *("BlockMap", "KvFormat", "TileLists"),
)


_MODULES = (
    *("block_sparse_attn", "distributed", "fastvideo", "flash_attn", "flashinfer", "flex_attention", "jax"),
    "torch",
)


def __getattr__(name: str) -> Any:
    """What needs PyTorch or JAX is imported when it is first asked for, and the library opened."""
    if name == "__version__":
        return version()
    if name in _MODULES:
        return _import_module(f"{__name__}.{name}")
    if name in _OF_TORCH:
        try:
            from . import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"flashjit.{name} needs PyTorch 2.10 or newer: pip install torch; flashjit.forward() takes NumPy arrays, "
                "flashjit.jax takes JAX arrays",
                name="torch",
            ) from None

        globals().update({given: getattr(torch, given) for given in _OF_TORCH})
        return globals()[name]
    raise AttributeError(f"module 'flashjit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The launch: a filled struct to the library's function, on the current stream, or on the CPU to the reference."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import torch

from . import _library
from ._library import Handle, library, runtime


def is_watched() -> bool:
    """Whether a mode or a transform, besides autograd, must see the call."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class _Launchers(dict):
    def __missing__(self, name: str) -> Any:
        self[name] = getattr(library(), f"flashjit_{name}")
        return self[name]


_launchers = _Launchers()


def launch(function: str, spec: Handle, words: array.array[int], index: int) -> None:
    """Calls the library's function with the struct that the words are: on a GPU's current stream, or where index is negative on
    the CPU."""
    args, _ = words.buffer_info()
    if index < 0:
        status = getattr(library(), f"flashjit_reference_{function}")(spec.address, args)
    else:
        call = _launchers[function]
        shared = runtime().address
        stream = torch._C._cuda_getCurrentRawStream(index)
        if torch._C._cuda_getDevice() == index:
            status = call(shared, spec.address, args, stream)
        else:
            with torch.cuda.device(index):
                status = call(shared, spec.address, args, stream)
        if status == 4:  # a thread that has not used CUDA has no context yet, such as autograd's
            with torch.cuda.device(index):
                bind_context(torch.device("cuda", index))
                status = call(shared, spec.address, args, stream)
    if status:
        _library.raise_error(status)


def address_of(function: str, index: int) -> int:
    """The address of the library's function that launch() calls."""
    name = f"flashjit_reference_{function}" if index < 0 else f"flashjit_{function}"
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def bind_context(device: torch.device) -> None:
    """Makes the device's context current in this thread, as a first launch by PyTorch does."""
    torch.zeros(1, device=device)

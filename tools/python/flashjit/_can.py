"""can(): whether some kernel computes a problem on a GPU, or why none does."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

from ._c_interface import Device
from ._library import c_text, check, library, pass_of, runtime, shape_struct, spec_handle
from .errors import InvalidArgument, WrongType

_UNSUPPORTED = 2  # FLASHJIT_UNSUPPORTED


@dataclasses.dataclass(frozen=True)
class Support:
    """True where a problem is supported; else `reason` says why not: each kernel family's reason, or the mistake."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


def can(
    spec: str, shape: Sequence[int] | None = None, device: str | None = None, *, backward: bool = False
) -> Support:
    """Whether some kernel family computes the spec at the shape on the device: true or false; `.reason` says why none does.

    spec: such as "bf16:d128:causal:varlen:pages16", or "append:bf16:d128:pages16". One that no call could have is false, too, with
        what is wrong with it.
    shape: (batch, heads_q, heads_kv, seqlen_q, seqlen_kv); None: not known yet, asks about (1, 16, 16, 4096, 4096).
    device: an architecture such as "sm_90a", which needs no GPU and stands for its common product; None: the GPU of the current
        CUDA context.
    backward: asks about the backward pass of a spec that names no pass.

    The reason is the message of the exception that a call would raise: the planner of calls is asked, so that the answer is exact
    for the combination. Nothing is compiled or launched, no file is read, and it takes well under a millisecond. Raises flashjit.Error for a
    shape or device that is none, and without a device where there is no driver, GPU or current context.
    """
    if not isinstance(spec, str):
        raise WrongType(f"spec is a {type(spec).__name__}: give a text such as 'bf16:d128:causal'.")
    sizes = None if shape is None else ctypes.byref(shape_struct(shape))
    found = _device(device)
    try:
        handle = spec_handle(spec)
    except InvalidArgument as error:
        return Support(str(error))
    status = library().flashjit_can(pass_of(spec, backward), handle.address, sizes, ctypes.byref(found))
    if status == _UNSUPPORTED:
        return Support(library().flashjit_last_error_message().decode(errors="replace"))
    check(status)
    return Support()


def _device(arch: str | None) -> Device:
    device = Device(struct_size=ctypes.sizeof(Device))
    if arch is None:
        check(library().flashjit_current_device(runtime().address, ctypes.byref(device)))
    elif isinstance(arch, str):
        check(library().flashjit_device_of(c_text("device", arch), ctypes.byref(device)))
    else:
        raise WrongType(
            f"device is a {type(arch).__name__}: give an architecture such as 'sm_90a', or None for the current GPU."
        )
    return device

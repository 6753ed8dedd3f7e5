"""What flashjit raises: one exception class a code, each also the built-in exception that Python users expect."""

from __future__ import annotations


class Error(Exception):
    """A failure that flashjit reports. `str()` says what was given, what is allowed and what to do.

    code: "invalid_argument", "unsupported", "no_driver", "no_device", "no_compiler", "compile_failed",
        "kernel_missing", "io", "cuda" or "internal".
    detail: long material such as a compiler's log; often "".
    """

    # No __init__ of its own: torch.compile could not follow it, and would show its own message instead.
    code = "internal"
    detail = ""


class InvalidArgument(Error, ValueError):
    """A value that is not allowed; the message says which are."""

    code = "invalid_argument"


class WrongType(InvalidArgument, TypeError):
    """An argument of a type that cannot be used, such as a list where a tensor belongs."""


class Unsupported(Error, NotImplementedError):
    """A valid request that no kernel computes; the message has the reason."""

    code = "unsupported"


class NoDriver(Error, RuntimeError):
    """libcuda cannot be opened, or is too old."""

    code = "no_driver"


class NoDevice(Error, RuntimeError):
    """There is no CUDA device, no current context, or a tensor is on the wrong device."""

    code = "no_device"


class NoCompiler(Error, RuntimeError):
    """NVRTC is missing."""

    code = "no_compiler"


class CompileFailed(Error, RuntimeError):
    """NVRTC refused a kernel's source; its log is in `detail`."""

    code = "compile_failed"


class KernelMissing(Error, RuntimeError):
    """With FLASHJIT_JIT=off: the kernel is in no pack and not in the cache."""

    code = "kernel_missing"


class FileError(Error, OSError):
    """A file cannot be read or written, or is damaged."""

    code = "io"


class CudaError(Error, RuntimeError):
    """A call of the CUDA driver failed."""

    code = "cuda"


class InternalError(Error, RuntimeError):
    """A bug in flashjit: please report it."""

    code = "internal"


#: The C ABI's status codes, 1 to 10 in this order.
BY_STATUS: tuple[type[Error], ...] = (
    InvalidArgument,
    Unsupported,
    NoDriver,
    NoDevice,
    NoCompiler,
    CompileFailed,
    KernelMissing,
    FileError,
    CudaError,
    InternalError,
)

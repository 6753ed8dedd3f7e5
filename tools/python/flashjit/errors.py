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
    code = "invalid_argument"


class WrongType(InvalidArgument, TypeError):
    """An argument of a type that cannot be used, such as a list where a tensor belongs."""


class Unsupported(Error, NotImplementedError):
    code = "unsupported"


class NoDriver(Error, RuntimeError):
    code = "no_driver"


class NoDevice(Error, RuntimeError):
    code = "no_device"


class NoCompiler(Error, RuntimeError):
    code = "no_compiler"


class CompileFailed(Error, RuntimeError):
    code = "compile_failed"


class KernelMissing(Error, RuntimeError):
    code = "kernel_missing"


class FileError(Error, OSError):
    code = "io"


class CudaError(Error, RuntimeError):
    code = "cuda"


class InternalError(Error, RuntimeError):
    code = "internal"


#: The C ABI's status codes, 1 to 10 in this order.
BY_STATUS: tuple[type[Error], ...] = (InvalidArgument, Unsupported, NoDriver, NoDevice, NoCompiler, CompileFailed,
                                      KernelMissing, FileError, CudaError, InternalError)

"""The handlers that XLA calls, and what a GPU needs for a call."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .. import _installed, _library
from .._can import can
from ..errors import CudaError, NoDriver, Unsupported

#: By function. A target has handlers for its execution and, on a GPU, for what comes before.
TARGETS = {
    name: f"flashjit_{name}" for name in ("forward", "backward", "tangent", "backward_tangent", "append")
}
#: The pass that a spec's text begins with, of functions whose pass is neither forward nor backward.
PASSES = {"tangent": "jvp:", "backward_tangent": "bwd_jvp:"}

_ALIGNMENT = 256


def handler_path() -> pathlib.Path:
    """Beside the library."""
    return _installed.library_path().parent / "libflashjit_jax.so"


@functools.cache
def register() -> None:
    """Tells XLA about the handlers, once."""
    path = handler_path()
    try:
        opened = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoDriver(
            f"flashjit.jax needs {path.name}, which cannot be opened ({error}): a release's wheel has it; from source it is "
            "built where JAX is installed before flashjit: install JAX, then flashjit again (pip install "
            "--force-reinstall ./tools/python), or build the CMake target flashjit_jax."
        ) from None
    _refuse_newer_ffi(divmod(opened.flashjit_jax_ffi_version(), 1000))
    opened.flashjit_jax_open.restype = ctypes.c_char_p
    opened.flashjit_jax_open.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    wrong = opened.flashjit_jax_open(os.fsencode(_installed.library_path()), _library.runtime().address)
    if wrong is not None:
        raise NoDriver(
            f"{path} does not fit {_installed.library_path()} ({wrong.decode()}): install flashjit again."
        )
    capsule = lambda name: jax.ffi.pycapsule(getattr(opened, f"flashjit_jax_{name}"))
    for call, target in TARGETS.items():
        jax.ffi.register_ffi_target(target, capsule(f"reference_{call}"), platform="cpu")
        stages = {"initialize": capsule(f"prepare_{call}"), "execute": capsule(call)}
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")


def _refuse_newer_ffi(built: tuple[int, int]) -> None:
    """XLA takes handlers of its own interface and of older ones. It refuses others, but only when JAX first uses a platform, which then
    has none."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    found = re.findall(
        r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", header.read_text() if header.exists() else ""
    )
    if len(found) != 2:
        return
    major, minor = map(int, found)
    if built[0] != major or built[1] > minor:
        raise NoDriver(
            f"{handler_path().name} is built for XLA's FFI {built[0]}.{built[1]}, and jaxlib {jax.lib.__version__} has "
            f"{major}.{minor}, which takes {major}.{minor} and older ones: install a newer JAX (pip install -U jax), or build "
            "flashjit with this one (pip install --force-reinstall ./tools/python)."
        )


def workspace_bytes(spec: str, shape: Sequence[int], kind: str) -> int:
    """kind: of TARGETS. Of device memory that a call needs on this process's GPUs, wherever it begins; a call that they cannot do is refused."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise Unsupported(
            f"flashjit.jax makes calls for the GPU of this process, and JAX finds none ({error}): lower and compile on a "
            "machine with the GPU, or for the platform cpu."
        ) from None
    kinds = {device.device_kind: device.local_hardware_id for device in devices}
    needed = max(_needed(spec, shape, kind, ordinal) for ordinal in kinds.values())
    return needed + _ALIGNMENT if needed else 0


def _needed(spec: str, shape: Sequence[int], kind: str, ordinal: int) -> int:
    backward = kind == "backward"
    spec = PASSES.get(kind, "") + spec
    with _primary_context(ordinal):
        support = can(spec, shape, backward=backward)
        if not support:
            raise Unsupported(support.reason)
        return _library.runtime().workspace_bytes(spec, shape, backward=backward)


@contextlib.contextmanager
def _primary_context(ordinal: int) -> Iterator[None]:
    """XLA's context, which is current in its own threads alone."""
    context, before = ctypes.c_void_p(), ctypes.c_void_p()
    _driver("cuCtxGetCurrent", ctypes.byref(before))
    _driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    try:
        _driver("cuCtxSetCurrent", context)
        yield
    finally:
        _driver("cuCtxSetCurrent", before)
        _driver("cuDevicePrimaryCtxRelease", ordinal)


def _driver(name: str, *arguments: Any) -> None:
    """Calls a function of libcuda, of the version that flashjit knows."""
    library = ctypes.CDLL(os.environ.get("FLASHJIT_LIBCUDA") or "libcuda.so.1")
    address, found = ctypes.c_void_p(), ctypes.c_int()
    version, flags = 12000, ctypes.c_uint64(0)
    result = library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(address), version, flags, ctypes.byref(found)
    )
    result = result or ctypes.CFUNCTYPE(ctypes.c_int)(address.value or 0)(*arguments)
    if result:
        raise CudaError(f"{name} returned error {result} when flashjit.jax asked for the device's context.")

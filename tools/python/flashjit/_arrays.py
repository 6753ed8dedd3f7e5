"""Pointers, sizes and strides of other libraries' arrays, by DLPack or the CUDA array interface."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from .errors import InvalidArgument, WrongType

_BYTES = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int32": 4,
    "int64": 8,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class View(NamedTuple):
    """An array's memory. stride: in elements. device: ("cpu", 0) or ("cuda", index). owner: keeps the memory alive."""

    pointer: int
    type: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: tuple[str, int]
    read_only: bool
    owner: Any

    @property
    def element_size(self) -> int:
        return _BYTES[self.type]

    def contiguous_pointer(self, name: str) -> int:
        if (
            self.stride != _contiguous(self.size)
            and 0 not in self.size
            and any(
                size > 1 and stride != dense
                for size, stride, dense in zip(self.size, self.stride, _contiguous(self.size))
            )
        ):
            raise InvalidArgument(
                f"{name} has strides {list(self.stride)} for shape {list(self.size)}: it must be "
                "contiguous; copy it."
            )
        return self.pointer


def view(array: Any, name: str, stream: int = 0) -> View:
    """The memory of an array. stream: the CUDA stream that will use it; a DLPack producer orders its work before that."""
    if hasattr(array, "detach") and hasattr(
        array, "data_ptr"
    ):  # a torch.Tensor: no need to go through a capsule
        return _torch_view(array, name)
    if hasattr(array, "__array_interface__"):
        return _interface_view(array.__array_interface__, array, ("cpu", 0), name)
    if hasattr(array, "__dlpack__"):
        if not hasattr(array, "__dlpack_device__"):  # as what stands for arrays under JAX's transformations
            raise WrongType(
                f"{name} is a {type(array).__name__}, which has no memory: under jax.jit, grad and vmap call "
                "flashjit outside, or through jax.pure_callback()."
            )
        return _dlpack_view(array, name, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _interface_view(array.__cuda_array_interface__, array, ("cuda", _device_of(array)), name)
    raise WrongType(
        f"{name} is a {type(array).__name__}: give an array of NumPy, or one with DLPack or the CUDA array "
        "interface, such as CuPy's, JAX's or PyTorch's."
    )


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _torch_view(tensor: Any, name: str) -> View:
    import torch

    from ._tensors import is_differentiated
    from ._tracing import element_type
    from ._transforms import refuse_wrapped

    if is_differentiated(tensor) and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{name} requires gradients, which flashjit.forward() and backward() do not record: call "
            "flashjit.attention(), or give its detach(), or call these under torch.no_grad()."
        )
    refuse_wrapped("flashjit.forward()", tensor)
    if tensor.is_neg():
        raise InvalidArgument(
            f"{name} is a view whose memory holds the negated numbers: give its resolve_neg()."
        )
    if tensor.device.type not in ("cuda", "cpu"):
        raise InvalidArgument(f"{name} is on {tensor.device}: move it to a CUDA device or to the CPU.")
    device = ("cuda", tensor.get_device()) if tensor.is_cuda else ("cpu", 0)
    return View(
        tensor.data_ptr(),
        element_type(tensor, name),
        tuple(tensor.shape),
        tensor.stride(),
        device,
        False,
        tensor,
    )


def _device_of(array: Any) -> int:
    return int(getattr(getattr(array, "device", 0), "id", 0))


_KINDS = {
    "f4": "fp32",
    "f2": "fp16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u1": "uint8",
    "b1": "bool",
}


def _interface_view(interface: dict[str, Any], array: Any, device: tuple[str, int], name: str) -> View:
    text = interface["typestr"]
    kind = "bf16" if str(getattr(array, "dtype", "")) == "bfloat16" else _KINDS.get(text[1:])
    if kind is None or text[0] == ">":
        raise WrongType(
            f"{name} has type {getattr(array, 'dtype', text)}: give one of {', '.join(_BYTES)}, little-endian."
        )
    pointer, read_only = interface["data"]
    size = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        stride = _contiguous(size)
    else:
        if any(step % _BYTES[kind] for step in strides):
            raise InvalidArgument(
                f"{name} has strides of {list(strides)} bytes, no multiples of its elements: copy it."
            )
        stride = tuple(step // _BYTES[kind] for step in strides)
    return View(pointer or 0, kind, size, stride, device, bool(read_only), array)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_CODES = {
    (2, 32): "fp32",
    (2, 16): "fp16",
    (4, 16): "bf16",
    (0, 64): "int64",
    (0, 32): "int32",
    (0, 16): "int16",
    (0, 8): "int8",
    (1, 8): "uint8",
    (6, 8): "bool",
}
_CUDA, _CUDA_MANAGED = 2, 13
_CPU = (1, 3)  # kDLCPU, kDLCUDAHost

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _dlpack_view(array: Any, name: str, stream: int) -> View:
    kind, index = array.__dlpack_device__()
    on_gpu = int(kind) in (_CUDA, _CUDA_MANAGED)
    if not on_gpu and int(kind) not in _CPU:
        raise InvalidArgument(
            f"{name} is on a device of DLPack's type {int(kind)}: move it to a CUDA device or to the CPU."
        )
    # DLPack's name for CUDA's default stream is 1. The capsule's destructor gives the memory back, as it is not renamed.
    capsule = array.__dlpack__(stream=stream or 1) if on_gpu else array.__dlpack__()
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    element = _CODES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if element is None:
        raise WrongType(f"{name} has type {getattr(array, 'dtype', '?')}: give one of {', '.join(_BYTES)}.")
    size = tuple(tensor.shape[i] for i in range(tensor.ndim))
    stride = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else _contiguous(size)
    return View(
        (tensor.data or 0) + tensor.byte_offset,
        element,
        size,
        stride,
        ("cuda", int(index)) if on_gpu else ("cpu", 0),
        is_of_jax(array),
        (array, capsule),
    )


def is_of_jax(array: Any) -> bool:
    """Whether it is an array of JAX, which takes arrays for unchangeable and shares their memory."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")

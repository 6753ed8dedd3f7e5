"""The C ABI by ctypes: include/flashjit/flashjit.h as Python sees it. Nothing here knows PyTorch."""

from __future__ import annotations

import array
import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import _reports
from ._c_interface import *  # noqa: F403 - callers find the structs here
from ._c_interface import (
    APPEND,
    BACKWARD,
    BACKWARD_JVP,
    FORWARD,
    JVP,
    MERGE,
    QUANTIZE,
    SIGNATURES,
    Options,
    Shape,
)
from ._checks import check_text, check_whole
from ._installed import LIBRARY_NAME, installed_packs, library_path, nvrtc_folder
from .errors import BY_STATUS, InternalError, InvalidArgument, NoDriver, WrongType


def words_of(structure: ctypes.Structure) -> array.array[int]:
    """A copy of the structure as 64-bit words: a call copies these and sets its pointers, which is much quicker than to set
    members of members."""
    return array.array("Q", bytes(structure))


def word(structure: type[ctypes.Structure], member: str) -> int:
    """The index of the word where a member begins."""
    return getattr(structure, member).offset // 8


@functools.cache
def library() -> ctypes.CDLL:
    """The opened library; its functions have their types."""
    path = library_path()
    try:
        opened = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoDriver(
            f"{LIBRARY_NAME} cannot be opened ({error}): install the flashjit wheel (pip wheel tools/python), "
            f"or set FLASHJIT_LIBRARY to a {LIBRARY_NAME} that was built from the same sources."
        ) from None
    for name, (result, arguments) in SIGNATURES.items():
        try:
            function = getattr(opened, name)
        except AttributeError:
            raise InternalError(
                f"{path} has no function {name}: it belongs to another version of flashjit; install "
                "the wheel again, or point FLASHJIT_LIBRARY to the library of this version."
            ) from None
        function.restype, function.argtypes = result, arguments
    return opened


#: Names of struct members in the library's messages, and the names of Python's arguments for them.
_PYTHON_WORDS = {
    "softmax_scale": "scale",
    "rope.dims": "rope_dims",
    "rope.theta": "theta",
    "rope.cos": "cos",
    "rope.sin": "sin",
    "rope.positions": "positions",
    "rope.sections": "mrope_section",
    "rope.interleaved_sections": "mrope_interleaved",
    "k_norm.eps": "norm_eps",
    "q_norm.eps": "norm_eps",
    "flashjit_workspace_bytes()": "Runtime.workspace_bytes()",
    "flashjit_list_bytes()": "Runtime.list_bytes()",
    "flashjit_build_lists()": "flashjit.build_lists()",
    "flashjit_prepare()": "flashjit.torch.prepare()",
    **{f"{x}_scale is null": f"{x}_scale is missing" for x in "qkv"},
    **{f"write :{x}_format in the spec": f"give {x}_format" for x in "kv"},
}


def raise_error(status: int) -> None:
    """Raises the last call's error as a Python exception."""
    message = library().flashjit_last_error_message().decode(errors="replace")
    for word, of_python in _PYTHON_WORDS.items():
        message = message.replace(word, of_python)
    detail = library().flashjit_last_error_detail().decode(errors="replace")
    error = (BY_STATUS[status - 1] if 0 < status <= len(BY_STATUS) else InternalError)(message)
    error.detail = detail
    raise error


def check(status: int) -> None:
    if status:
        raise_error(status)


class Handle:
    """Owns what a create function made."""

    def __init__(self, create: str, destroy: str, *arguments: Any) -> None:
        made = ctypes.c_void_p()
        check(getattr(library(), create)(*arguments, ctypes.byref(made)))
        self.address = made.value
        self._destroy = getattr(library(), destroy)

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        if getattr(self, "address", None) and not is_finalizing():  # at exit kernels may still run
            self._destroy(self.address)


@functools.cache
def spec_options() -> tuple[tuple[str, str], ...]:
    """The options of a spec that are on or off, each with the argument that turns it on, as ("kvlen", "kv_lengths"); in a
    spec's order."""
    option, argument = ctypes.c_char_p(), ctypes.c_char_p()
    found: list[tuple[str, str]] = []
    while library().flashjit_spec_option(len(found), ctypes.byref(option), ctypes.byref(argument)):
        found.append(((option.value or b"").decode(), (argument.value or b"").decode()))
    return tuple(found)


def options_of(given: Mapping[str, bool], options: Iterable[tuple[str, str]]) -> str:
    """The options that arguments turn on, as a spec has them: ":dropout:kvlen"."""
    return "".join([f":{option}" for option, argument in options if given.get(argument)])


#: What all threads share. functools.cache alone lets two of them make a thing each: the first one counts.
_SHARED: dict[str, Any] = {}


def c_text(name: str, text: str) -> bytes:
    """A text as C reads it, which ends at a NUL."""
    check_text(name, text)
    return text.encode()


@functools.cache
def spec_handle(text: str) -> Handle:
    """A spec that was read and checked; the same object for the same text."""
    return _SHARED.setdefault(
        text, Handle("flashjit_spec_create", "flashjit_spec_destroy", c_text("the spec", text))
    )


#: flashjit_jit and flashjit_switch, by what the arguments say.
_SWITCH = {None: 0, True: 1, False: 2}


def _switch(name: str, value: Any) -> int:
    if value not in (None, True, False):
        raise InvalidArgument(
            f"{name} is {value!r}: give True, False, or None for what the environment says."
        )
    return _SWITCH[value]


class Runtime:
    """Compiles, caches and launches kernels. All calls use flashjit.runtime() by default.

    cache_dir: folder of compiled kernels and tuning records; None: FLASHJIT_CACHE_DIR, else the user's cache folder;
        "": nothing is kept on disk.
    packs: folders of packed kernels, searched in this order before the cache; then come the packs of installed
        flashjit-kernels wheels, and FLASHJIT_PACKS.
    jit: whether to compile kernels that are in no pack and not in the cache; None: FLASHJIT_JIT, else yes.
    template_dir: folder to read kernel templates from, instead of the embedded ones.
    nvrtc: libnvrtc or its folder; None: FLASHJIT_NVRTC, else PyTorch's, else the usual places.
    cache_limit: bytes of kernels in cache_dir at which the least recently used are removed;
        None: FLASHJIT_CACHE_LIMIT, else 2 GiB.
    tune_in_background: whether the first use of a shape starts its tuning, in a background thread, for some seconds; calls
        switch when it finishes, and results may change in their last bits. Needs NVRTC; shapes with tile lists are
        not tuned. None: FLASHJIT_TUNE_IN_BACKGROUND, else no.
    compile_in_background: whether a call whose kernel must be compiled uses another one of its spec that is in memory, while
        the better one is compiled in a background thread; then calls switch, and results may change in their last bits. Not for
        deterministic and batch-invariant calls. None: FLASHJIT_COMPILE_IN_BACKGROUND, else no.
    """

    def __init__(
        self,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        packs: Sequence[str | os.PathLike[str]] = (),
        jit: bool | None = None,
        template_dir: str | os.PathLike[str] | None = None,
        nvrtc: str | os.PathLike[str] | None = None,
        cache_limit: int | None = None,
        tune_in_background: bool | None = None,
        compile_in_background: bool | None = None,
    ) -> None:
        if isinstance(packs, (str, os.PathLike)):
            raise WrongType(f"packs is {packs!r}, which is one folder: give a list of them.")
        check_whole("cache_limit", cache_limit or 0)
        text = lambda path: None if path is None else os.fsencode(path)
        packs = [*packs, *installed_packs()]
        paths = (ctypes.c_char_p * len(packs))(*map(text, packs))
        options = Options(
            struct_size=ctypes.sizeof(Options),
            cache_dir=text(cache_dir),
            packs=paths,
            pack_count=len(packs),
            jit=_switch("jit", jit),
            template_dir=text(template_dir),
            nvrtc=text(nvrtc if nvrtc is not None else nvrtc_folder()),
            cache_limit=cache_limit or 0,
            tune_in_background=_switch("tune_in_background", tune_in_background),
            compile_in_background=_switch("compile_in_background", compile_in_background),
        )
        self._handle = Handle("flashjit_runtime_create", "flashjit_runtime_destroy", ctypes.byref(options))
        self.address = self._handle.address
        self.generation = 0  # counts what may change the workspace that calls need
        # At exit too: then the driver and NVRTC must not be in use.
        weakref.finalize(self, _stop_tuning, self._handle, os.getpid())

    def stop_tuning(self) -> None:
        """Ends tuning in the background for good: waits for the compile or measurement under way, some seconds at most.
        What was tuned stays in use. Happens by itself when Python ends."""
        check(library().flashjit_stop_tuning(self.address))

    def prepare(
        self, spec: str, shape: Sequence[int], *, backward: bool = False, config: str | None = None
    ) -> _reports.KernelReport:
        """Compiles and loads now on the current device, e.g. before a CUDA graph capture. Returns what it found or made.

        spec: such as "bf16:d128:causal", or "append:bf16:d128:pages16". shape: (batch, heads_q, heads_kv, seqlen_q, seqlen_kv).
        config: tiles for this spec and shape from now on, such as "sm80:br128:bc64:w4:s2".
        """
        received = _reports.Received()
        check(
            library().flashjit_prepare(
                self.address,
                pass_of(spec, backward),
                spec_handle(spec).address,
                ctypes.byref(shape_struct(shape)),
                c_text("config", config) if config else None,
                received.receiver,
                None,
            )
        )
        self.generation += 1
        return received.kernels[0]

    def prepare_both(self, spec: str, shape: Sequence[int]) -> tuple[_reports.KernelReport, ...]:
        """prepare() for both passes at once, in little more time than one takes."""
        received = _reports.Received()
        check(
            library().flashjit_prepare_both(
                self.address,
                spec_handle(spec).address,
                ctypes.byref(shape_struct(shape)),
                received.receiver,
                None,
            )
        )
        return tuple(received.kernels)

    def prepare_first_calls(self, spec: str, shape: Sequence[int]) -> None:
        """Compiles in parallel the kernels that the first calls of both passes would wait for. With compile_in_background these
        may be plain kernels; else it is prepare_both()."""
        check(
            library().flashjit_prepare_first_calls(
                self.address, spec_handle(spec).address, ctypes.byref(shape_struct(shape))
            )
        )

    def workspace_bytes(self, spec: str, shape: Sequence[int], *, backward: bool = False) -> int:
        """Bytes of the workspace that a call needs on the current device; list_bytes() fewer if it receives its lists."""
        return self._bytes("flashjit_workspace_bytes", spec, shape, backward)

    def list_bytes(self, spec: str, shape: Sequence[int], *, backward: bool = False) -> int:
        """Bytes of device memory that tile lists need on the current device; 0 if the kernels use no lists."""
        return self._bytes("flashjit_list_bytes", spec, shape, backward)

    def _bytes(self, function: str, spec: str, shape: Sequence[int], backward: bool) -> int:
        needed = ctypes.c_size_t()
        check(
            getattr(library(), function)(
                self.address,
                pass_of(spec, backward),
                spec_handle(spec).address,
                ctypes.byref(shape_struct(shape)),
                ctypes.byref(needed),
            )
        )
        return needed.value


def pass_of(spec: str, backward: bool) -> int:
    """flashjit_pass: the pass that the text names, if it is neither the forward nor the backward pass; else by `backward`."""
    if not isinstance(spec, str):
        raise WrongType(f'the spec is {spec!r}: give a text such as "bf16:d128:causal".')
    return {"append": APPEND, "merge": MERGE, "quantize": QUANTIZE, "jvp": JVP, "bwd_jvp": BACKWARD_JVP}.get(
        spec.partition(":")[0], BACKWARD if backward else FORWARD
    )


def _stop_tuning(runtime: Handle, process: int) -> None:
    if os.getpid() == process:  # a fork has no such thread
        library().flashjit_stop_tuning(runtime.address)


def shape_struct(sizes: Sequence[int]) -> Shape:
    for size in sizes:
        check_whole("a size of the shape", size)
    if len(sizes) != 5:
        raise InvalidArgument(
            f"shape has {len(sizes)} numbers: give (batch, heads_q, heads_kv, seqlen_q, seqlen_kv)."
        )
    return Shape(*sizes)


@functools.cache
def runtime() -> Runtime:
    """The runtime that all calls share: made when first used, from the environment."""
    return _SHARED.setdefault("runtime", Runtime())


def version() -> str:
    """The library's version, such as "0.1.0"."""
    return library().flashjit_version().decode()

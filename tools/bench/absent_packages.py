"""Stands for packages that an engine imports and that a run of it on tiny models never calls.

SGLang 0.5 imports some twenty packages of kernels, formats and servers before it loads a model. install() lets every import
succeed that the engine's own files ask for: where a package is absent, its names are classes without contents."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

#: Their absence is what an engine or transformers asks about: packages of other platforms, and optional ones.
PLATFORMS = (
    "torch_npu",
    "aiter",
    "torch_musa",
    "habana_frameworks",
    "torch_xla",
    "mlx",
    "torchada",
    "torch_mlu",
    "torchcodec",
    "flash_attn",
)


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:  # in annotations
        return object

    __ror__ = __or__

    def __getitem__(cls, key: Any) -> Any:
        return cls


def _named(name: str) -> Any:
    """A class, that is also a decorator which changes nothing."""
    return _Empty(
        name,
        (),
        {
            "__init__": _no_tensors,
            "__call__": lambda self, given=None, *_, **__: given,
            "__module__": "absent",
            "__get_pydantic_core_schema__": classmethod(lambda *_: _anything()),
        },
    )


def _no_tensors(self: Any, *given: Any, **named: Any) -> None:
    """A function that computes is needed, not stood for."""
    if any("Tensor" in type(x).__name__ for x in (*given, *named.values())):
        raise RuntimeError(
            f"{type(self).__name__} is of a package that is absent, and was called with a tensor"
        )


def _anything() -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = "99.0" if name == "__version__" else _named(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Looks last, or, for the packages that are always empty, first."""

    def __init__(self, engine: str, always: tuple[str, ...] = ()) -> None:
        self.engine, self.always = engine, always
        self.found: set[str] = set()
        found = importlib.util.find_spec(engine) if engine else None
        # Not by the name alone: a folder that has it and other packages may be called the same.
        self.folders = tuple(f"{path}/" for path in (found and found.submodule_search_locations) or ())

    def find_spec(self, name: str, *_: Any) -> Any:
        top, _, rest = name.partition(".")
        if self.always:
            wanted = top in self.always
        elif rest:
            wanted = isinstance(sys.modules.get(top), _Module)
        else:
            known = top in sys.stdlib_module_names or top.startswith("_") or top in PLATFORMS
            wanted = not known and top != self.engine and _importer().startswith(self.folders)
        if not wanted:
            return None
        self.found.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def _importer() -> str:
    """The file whose import is under way."""
    frame: Any = sys._getframe(1)
    while frame and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame.f_code.co_filename if frame else ""


def stand_for(packages: tuple[str, ...]) -> None:
    """Only these packages stand empty: whether another is there is for the engine to find out."""
    sys.meta_path.insert(0, _Finder("", packages))


def install(engine: str, always: tuple[str, ...] = ()) -> set[str]:
    """engine: the package whose files may import what is absent. always: packages that are empty though they are there.
    Returns the names of the packages that stand empty, as they are found."""
    last, first = _Finder(engine), _Finder(engine, always)
    first.found = last.found
    sys.meta_path.append(last)
    if always:
        sys.meta_path.insert(0, first)
    return last.found

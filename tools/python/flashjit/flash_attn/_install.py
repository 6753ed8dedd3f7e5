"""flash-attn's packages, by the names that libraries import."""

from __future__ import annotations

import dis
import importlib.machinery
import importlib.metadata
import sys
import types
from typing import Any

from ..errors import InvalidArgument
from . import _fa3, _fa4, _functions, _passes, bert_padding, rotary

__version__ = "2.8.3"  # whose interface this is


def _public(module: types.ModuleType) -> dict[str, Any]:
    """The public names that a module itself defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    }


def _contents() -> dict[str, dict[str, Any]]:
    """The names that each module has. Packages come before what they contain."""
    functions = _public(_functions)
    passes = {name: value for name, value in vars(_passes).items() if name.startswith("_flash_attn_")}
    wrapped = {f"_wrapped{name}": function for name, function in passes.items()}
    fa3 = {
        **_public(_fa3),
        "_flash_attn_forward": _fa3._flash_attn_forward,
        "_flash_attn_backward": _fa3._flash_attn_backward,
    }
    return {
        "flash_attn": functions,
        "flash_attn.flash_attn_interface": {**functions, **passes, **wrapped},
        "flash_attn.cute": _public(_fa4),
        "flash_attn.cute.interface": _public(_fa4),
        "flash_attn.bert_padding": _public(bert_padding),
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {**_public(rotary), "apply_rotary_emb_func": rotary.apply_rotary_emb},
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.rotary": {"apply_rotary": rotary.apply_rotary},
        "flash_attn_interface": fa3,
        "flash_attn_3": {},
        "flash_attn_3.flash_attn_interface": fa3,
    }


def install() -> None:
    """Puts flash_attn, its flash_attn_interface, bert_padding, layers.rotary and ops.triton.rotary, and
    FlashAttention-3's flash_attn_interface, also in flash_attn_3, and FlashAttention-4's flash_attn.cute in place
    for `import` in this process, where the packages flash-attn, flash-attn-3 and flash-attn-4 count as installed: transformers' own
    attn_implementation="flash_attention_2" then runs on flashjit. Raises flashjit.InvalidArgument where one
    of these modules was imported already from another package."""
    contents = _contents()
    for name in contents:
        if name in sys.modules and not hasattr(sys.modules[name], "_is_flashjit"):
            raise InvalidArgument(
                f"{name} was imported already, from "
                f"{getattr(sys.modules[name], '__file__', None)}: call install() before "
                "anything imports it."
            )
    for name, functions in contents.items():
        is_package = any(other.startswith(name + ".") for other in contents)
        module = types.ModuleType(name, f"{__package__}, by the name of the package that it stands for.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
        module.__dict__.update(
            functions, __version__=__version__, _is_flashjit=True, __getattr__=_absent(name)
        )
        if is_package:
            module.__path__ = []
        sys.modules[name] = module
        package, _, short = name.rpartition(".")
        if package:
            setattr(sys.modules[package], short, module)
    if not any(isinstance(finder, _Packages) for finder in sys.meta_path):
        sys.meta_path.append(_Packages())
    _look_again("transformers.utils.import_utils")


def _why(name: str) -> str:
    return (
        f"{name} is not among the names that flashjit.flash_attn.install() gives for flash-attn: "
        "flash_attn and its flash_attn_interface, bert_padding, cute, layers.rotary and ops.triton.rotary, and "
        "flash_attn_interface. Leave out what needs it, or do not call install() and install flash-attn "
        "itself."
    )


def _absent(module: str) -> Any:
    def get(name: str) -> Any:
        if not name.startswith("__"):
            frame = sys._getframe(1)
            # `from module import name` makes a message of its own of an AttributeError.
            if frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]:
                raise ImportError(_why(f"{module}.{name}"), name=module)
        raise AttributeError(name if name.startswith("__") else _why(f"{module}.{name}"))

    return get


class _Package(importlib.metadata.Distribution):
    """The metadata of a package without files."""

    def __init__(self, name: str, module: str, version: str) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": module,
        }

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(
            f"{path}: flashjit.flash_attn is in the place of this package, and has no files"
        )


class _Packages(importlib.metadata.DistributionFinder):
    """Lets libraries find that flash-attn is installed, and its version."""

    packages = (
        _Package("flash-attn", "flash_attn", __version__),
        _Package("flash-attn-3", "flash_attn_interface\nflash_attn_3", "3.0.0"),
        _Package("flash-attn-4", "flash_attn", "4.0.0"),
    )

    def find_distributions(self, context: Any = importlib.metadata.DistributionFinder.Context()) -> Any:
        plain = lambda name: name.lower().replace("_", "-")
        return [
            package
            for package in self.packages
            if context.name is None or plain(context.name) == plain(package.name)
        ]

    def find_spec(self, name: str, *_: Any) -> None:
        """Modules that no finder before has found. importlib.util.find_spec(), which only asks, gets None."""
        ours = name.startswith(("flash_attn.", "flash_attn_3."))
        if ours and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(_why(name), name=name)


def _look_again(module: str) -> None:
    """Forgets what a library has found of the packages, if it has looked already."""
    found = vars(sys.modules.get(module, types))
    if "PACKAGE_DISTRIBUTION_MAPPING" in found:  # transformers 5.17 looks when it is imported
        found["PACKAGE_DISTRIBUTION_MAPPING"] = importlib.metadata.packages_distributions()
    for name, value in found.items():
        caches = "flash_attn" in name or name == "_package_distribution_mapping"
        if caches and hasattr(value, "cache_clear"):
            value.cache_clear()

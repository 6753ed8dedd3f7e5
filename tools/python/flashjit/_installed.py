"""What was installed: flashjit's library and command, NVRTC from PyPI, and packed kernels."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterable

PACKAGE = pathlib.Path(__file__).resolve().parent
WINDOWS = os.name == "nt"
LIBRARY_NAME, COMMAND_NAME = ("flashjit.dll", "flashjit.exe") if WINDOWS else ("libflashjit.so", "flashjit")


def library_path() -> pathlib.Path:
    """The shared library: what FLASHJIT_LIBRARY names, else the one that the wheel carries."""
    given = os.environ.get("FLASHJIT_LIBRARY")
    return pathlib.Path(given).resolve() if given else PACKAGE / "native" / LIBRARY_NAME


def nvrtc_folder() -> str | None:
    """A folder that holds NVRTC from PyPI, as PyTorch and the nvidia-cuda-nvrtc wheel bring it; None where the loader
    and the toolkits have to do, or where FLASHJIT_NVRTC decides."""
    if os.environ.get("FLASHJIT_NVRTC"):
        return None
    for file in _nvrtc_candidates():
        if file.exists():
            return str(file)
    return None


def _nvrtc_candidates() -> Iterable[pathlib.Path]:
    torch = sys.modules.get("torch")
    majors = ["13", "12"]
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    if cuda and cuda.split(".")[0] in majors:  # the one that this process has open already
        majors.sort(key=lambda major: major != cuda.split(".")[0])
    spec = importlib.util.find_spec("nvidia")
    for root in map(pathlib.Path, spec.submodule_search_locations or [] if spec else []):
        for major in majors:
            if WINDOWS:
                for place in (f"cu{major}/bin/x86_64", "cuda_nvrtc/bin"):
                    yield root / place / f"nvrtc64_{major}0_0.dll"
                continue
            for place in (f"cu{major}/lib", "cuda_nvrtc/lib"):
                yield root / place / f"libnvrtc.so.{major}"
    if WINDOWS and torch is not None:  # whose wheels of Windows have CUDA's libraries within
        for major in majors:
            yield pathlib.Path(str(torch.__file__)).parent / "lib" / f"nvrtc64_{major}0_0.dll"


def installed_packs() -> list[str]:
    """Folders of packed kernels that wheels such as flashjit-kernels-sm90 brought: flashjit_kernels/NAME in Python's path."""
    spec = importlib.util.find_spec("flashjit_kernels")
    folders = [pathlib.Path(path) for path in spec.submodule_search_locations or []] if spec else []
    return [str(pack.parent) for folder in folders for pack in sorted(folder.glob("*/v1"))]

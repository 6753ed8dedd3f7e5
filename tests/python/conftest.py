"""The package under test: the installed one, else tools/python with the library of the build folder."""

import collections
import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

if importlib.util.find_spec("flashjit") is None:
    sys.path.insert(0, str(ROOT / "tools" / "python"))
import flashjit._library  # noqa: E402  (the path is set above)
import flashjit.functional  # noqa: E402

if not flashjit._installed.library_path().exists():
    os.environ.setdefault("FLASHJIT_LIBRARY", str(ROOT / "build" / "libflashjit.so"))
os.environ.setdefault("FLASHJIT_CACHE_DIR", str(ROOT / "build" / "test-cache"))


class FakeGpu:
    """The driver of tests/fake, which launches nothing, under a runtime of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.runtime = flashjit.Runtime(cache_dir="", nvrtc=folder / "libflashjit_fake_nvrtc.so")
        self._launches = ctypes.CDLL(str(folder / "libflashjit_fake_cuda.so")).flashjit_fake_launches
        self._launches.restype = ctypes.c_size_t

    def launches(self, work):
        """How many kernels `work` launches."""
        before = self._launches()
        work()
        return self._launches() - before


@pytest.fixture
def fake_gpu(monkeypatch):
    folder = pathlib.Path(os.environ.get("FLASHJIT_FAKES", ROOT / "build" / "tests"))
    if not (folder / "libflashjit_fake_cuda.so").exists():
        pytest.skip("the fake driver is not built: build the target flashjit_unit_tests")
    monkeypatch.setenv("FLASHJIT_LIBCUDA", str(folder / "libflashjit_fake_cuda.so"))
    gpu = FakeGpu(folder)
    for module in (flashjit.functional, flashjit._can):
        monkeypatch.setattr(module, "runtime", lambda: gpu.runtime)
    return gpu


def is_drawn(name, of):
    """One in `of`, drawn by its name and the package's sources: a run of a commit has the same, a change others."""
    return int.from_bytes(hashlib.sha256(_sources() + name.encode()).digest()[:4], "big") % of == 0


@functools.cache
def _sources():
    files = sorted((ROOT / "tools" / "python" / "flashjit").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: a case takes seconds of a CPU")
    config.addinivalue_line(
        "markers", "every_case: cases are cheap or hold files that the draw does not see: all run"
    )


def pytest_collection_modifyitems(config, items):
    """A quarter of the cases of a test with many runs, at least one, and an eighth of all slow cases; where tests are named, and
    at night, all."""
    named = config.option.keyword or any("::" in arg for arg in config.args)
    if named or os.environ.get("FLASHJIT_EVERY_KERNEL"):
        return
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    left = set()
    for of_test in cases.values():
        for i, item in enumerate(of_test):
            slow = item.get_closest_marker("slow") is not None
            if item.get_closest_marker("every_case"):
                continue
            if (i >= 1 or slow) and not is_drawn(item.nodeid.rpartition("/")[2], 8 if slow else 4):
                left.add(item)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]

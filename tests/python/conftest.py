"""The package under test: the installed one, else tools/python with the library of the build folder."""
import importlib.util
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

if importlib.util.find_spec("flashjit") is None:
    sys.path.insert(0, str(ROOT / "tools" / "python"))
import flashjit._library  # noqa: E402  (the path is set above)

if not flashjit._library.library_path().exists():
    os.environ.setdefault("FLASHJIT_LIBRARY", str(ROOT / "build" / "libflashjit.so"))
os.environ.setdefault("FLASHJIT_CACHE_DIR", str(ROOT / "build" / "test-cache"))


@pytest.fixture(scope="session")
def programs():
    """Skips where the library cannot read general programs yet."""
    try:
        flashjit._library.spec_handle("fp32:d8:score{score * 2.0}")
    except flashjit.Error as error:
        pytest.skip(f"this library has no general programs: {error}")

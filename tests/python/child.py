"""Python processes of the tests' own."""

import os
import pathlib
import subprocess
import sys

import flashjit
import pytest
from flashjit import _installed

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment(**more):
    """In which they import the package under test, too. more: variables."""
    paths = [str(pathlib.Path(flashjit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        **{name: str(value) for name, value in more.items()},
    }


def script(path, *arguments, timeout=120):
    """What a script of the repository did."""
    return subprocess.run(
        [sys.executable, ROOT / path, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )


def built_command():
    """The wheel's command, or the one beside the library under test."""
    built = pathlib.Path(os.environ.get("FLASHJIT_COMMAND") or _installed.PACKAGE / "native" / "flashjit")
    if not built.exists():
        built = _installed.library_path().parent / "tools" / "flashjit"
    if not built.exists():
        pytest.skip("the command is not built: build the target flashjit_command")
    return built


def command(*arguments, **more):
    """What python -m flashjit did. more: variables."""
    return subprocess.run(
        [sys.executable, "-m", "flashjit", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(FLASHJIT_COMMAND=built_command(), **more),
    )

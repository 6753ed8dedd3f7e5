"""What `pip wheel tools/python --no-deps` makes, where its native files come from, and what it says without them. In a
copy of the package, with a CMake that builds nothing and writes down what it was asked."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from flashjit import _installed

ROOT = pathlib.Path(__file__).resolve().parents[2]
if not (importlib.util.find_spec("wheel") or importlib.util.find_spec("setuptools.command.bdist_wheel")):
    pytest.skip("no wheels can be made here: pip install setuptools wheel", allow_module_level=True)

CMAKE = """#!/bin/sh
echo "$@" >>"$ASKED"
[ "$1" = --build ] || exit 0
[ -z "$BROKEN" ] || exit 1
mkdir -p "$2/tools" && echo made library >"$2/libflashjit.so" && echo made command >"$2/tools/flashjit"
echo made handler >"$2/libflashjit_jax.so" && echo made front >"$2/libflashjit_torch.so"
"""


@pytest.fixture
def repository(tmp_path):
    """Only what the wheel reads, without a build folder."""
    root = tmp_path / "repository"
    shutil.copytree(
        ROOT / "tools/python",
        root / "tools/python",
        ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"),
    )
    shutil.copy(ROOT / "CMakeLists.txt", root)
    return root


class Outcome:
    def __init__(self, folder, done, asked):
        self.code, self.said, self.asked = done.returncode, done.stdout + done.stderr, asked
        self.wheels = list(folder.glob("*.whl"))

    def files(self):
        with zipfile.ZipFile(self.wheels[0]) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}


def make_wheel(repository, cmake=CMAKE, source=None, **environment):
    """pip wheel of the repository's package, or of `source`, with a PATH that has this CMake, or none."""
    scratch = repository.parent
    tools, asked = scratch / "tools", scratch / "asked"
    tools.mkdir()
    for name in ("sh", "mkdir"):
        (tools / name).symlink_to(shutil.which(name))
    if cmake:
        (tools / "cmake").write_text(cmake)
        (tools / "cmake").chmod(0o755)
    given = {
        name: value for name, value in os.environ.items() if name not in ("FLASHJIT_NATIVE", "PYTHONPATH")
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            scratch / "wheels",
            source or repository / "tools/python",
        ],
        text=True,
        timeout=300,
        capture_output=True,
        env={
            **{**given, "PATH": str(tools), "ASKED": str(asked)},
            **{"FLASHJIT_JAX_INCLUDE": "", "FLASHJIT_PYTHON_INCLUDE": "", **environment},
        },
    )
    return Outcome(scratch / "wheels", done, asked.read_text().splitlines() if asked.exists() else [])


def native(tmp_path, *names):
    folder = tmp_path / "native"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"given {name}\n")
    return str(folder)


def test_a_wheel_holds_the_package_its_types_and_the_native_files(repository, tmp_path):
    made = make_wheel(repository, FLASHJIT_NATIVE=native(tmp_path, "libflashjit.so", "flashjit"))
    assert made.code == 0 and made.asked == [], made.said
    files = made.files()
    sources = ROOT / "tools/python"
    modules = {str(path.relative_to(sources)) for path in (sources / "flashjit").rglob("*.py")}
    assert {name for name in files if name.startswith("flashjit/")} == modules | {
        "flashjit/py.typed",
        "flashjit/native/libflashjit.so",
        "flashjit/native/flashjit",
    }
    assert files["flashjit/native/libflashjit.so"] == b"given libflashjit.so\n"
    assert made.wheels[0].name.split("-")[2:4] == ["py3", "none"] and "linux" in made.wheels[0].name


def test_the_description_has_no_links_that_lead_nowhere(repository, tmp_path):
    made = make_wheel(repository, FLASHJIT_NATIVE=native(tmp_path, "libflashjit.so", "flashjit"))
    (metadata,) = (text.decode() for name, text in made.files().items() if name.endswith("/METADATA"))
    assert "Description-Content-Type: text/markdown" in metadata and "](../" not in metadata
    assert "(tools/docs/flash-attn.md)" in metadata and "Pages of tools/docs are in" in metadata


def test_what_an_earlier_version_left_is_not_in_the_wheel(repository, tmp_path):
    given = native(tmp_path, "libflashjit.so", "flashjit")
    first = make_wheel(repository, FLASHJIT_NATIVE=given)
    (left,) = (repository / "tools/python/build").glob("lib*/flashjit")
    (left / "old.py").touch()
    shutil.rmtree(tmp_path / "tools")
    again = make_wheel(repository, FLASHJIT_NATIVE=given)
    assert again.code == 0 and again.files().keys() == first.files().keys(), again.said


def test_without_native_files_they_are_built_with_cmake(repository):
    made = make_wheel(repository)
    assert made.code == 0, made.said
    configure, build = made.asked
    assert configure.startswith(f"-S {repository} -B ") and "-DCMAKE_BUILD_TYPE=Release" in configure
    assert "--target flashjit flashjit_command" in build
    assert (
        made.files()["flashjit/native/flashjit"] == b"made command\n" and not (repository / "build").exists()
    )


def test_a_configured_build_folder_is_used(repository):
    (repository / "build").mkdir()
    (repository / "build/CMakeCache.txt").touch()
    made = make_wheel(repository)
    assert made.code == 0, made.said
    assert [line.partition(" --parallel")[0] for line in made.asked] == [f"--build {repository / 'build'}"]
    assert made.files()["flashjit/native/libflashjit.so"] == b"made library\n"


def test_with_jax_its_handler_is_built_by_itself(repository):
    (repository / "build").mkdir()
    (repository / "build/CMakeCache.txt").touch()
    made = make_wheel(repository, FLASHJIT_JAX_INCLUDE="/headers")
    assert made.code == 0, made.said
    _, configure, build = made.asked
    assert configure.startswith(f"-S {repository}/tools/jax -B ")
    assert configure.endswith("-DFLASHJIT_JAX_INCLUDE=/headers") and build.startswith("--build ")
    assert made.files()["flashjit/native/libflashjit_jax.so"] == b"made handler\n"


def test_with_pythons_headers_its_front_is_built_by_itself(repository, tmp_path):
    (repository / "build").mkdir()
    (repository / "build/CMakeCache.txt").touch()
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    made = make_wheel(repository, FLASHJIT_PYTHON_INCLUDE=tmp_path / "include")
    assert made.code == 0, made.said
    _, configure, build = made.asked
    assert configure.startswith(f"-S {repository}/tools/torch -B ")
    assert configure.endswith(f"-DFLASHJIT_PYTHON_INCLUDE={tmp_path}/include") and build.startswith(
        "--build "
    )
    assert made.files()["flashjit/native/libflashjit_torch.so"] == b"made front\n"


@pytest.mark.parametrize("name", ["libflashjit_jax.so", "libflashjit_torch.so"])
def test_what_is_given_besides_is_in_the_wheel(repository, tmp_path, name):
    given = native(tmp_path, "libflashjit.so", "flashjit", name)
    made = make_wheel(repository, FLASHJIT_NATIVE=given)
    assert made.code == 0, made.said
    assert made.files()[f"flashjit/native/{name}"] == f"given {name}\n".encode()


def refused(made, *texts):
    assert made.code != 0 and not made.wheels
    assert "Traceback" not in made.said
    for text in texts:
        assert text in made.said, made.said


def test_without_cmake_it_is_said_what_to_do(repository):
    refused(make_wheel(repository, cmake=None), "there is no cmake", "tools/setup.sh", "FLASHJIT_NATIVE")


def test_a_build_that_fails_is_no_wheel(repository):
    refused(make_wheel(repository, BROKEN="1"), "cmake --build", "failed", "FLASHJIT_NATIVE")


def test_native_files_that_are_missing_are_named(repository, tmp_path):
    folder = native(tmp_path, "libflashjit.so")
    refused(make_wheel(repository, FLASHJIT_NATIVE=folder), f"FLASHJIT_NATIVE is {folder}", "has no flashjit")


def test_the_package_alone_without_the_repository(repository, tmp_path):
    (repository / "CMakeLists.txt").unlink()
    refused(make_wheel(repository), "not in flashjit's repository")


def test_the_tag_is_what_auditwheel_says(repository, tmp_path):
    """The wheel has the library and the command under test."""
    pytest.importorskip("auditwheel", reason="auditwheel")
    library = _installed.library_path()
    command = next(
        (
            path
            for path in (library.parent / "flashjit", library.parent / "tools" / "flashjit")
            if path.is_file()
        ),
        None,
    )
    if command is None:
        pytest.skip("the command is not built: build the target flashjit_command")
    folder = tmp_path / "native"
    folder.mkdir()
    shutil.copy(library, folder / "libflashjit.so")
    shutil.copy(command, folder / "flashjit")
    made = make_wheel(repository, FLASHJIT_NATIVE=str(folder))
    assert made.code == 0, made.said
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", made.wheels[0]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    tag = made.wheels[0].stem.split("-")[-1]
    assert tag.startswith("manylinux_2_") and f'"{tag}"' in done.stdout.partition("references")[0], (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    "symbols, tag",
    [
        (b"GLIBC_2.28\0GLIBC_2.2.5\0GLIBCXX_3.4.21", "manylinux_2_28_x86_64"),
        (b"GLIBC_2.34\0GLIBCXX_3.4.30", "manylinux_2_35_x86_64"),
        (b"GLIBC_2.17\0GLIBCXX_3.4.99", "linux_x86_64"),
    ],
)
def test_a_tag_is_that_of_the_newest_symbol(repository, tmp_path, symbols, tag):
    folder = pathlib.Path(native(tmp_path, "libflashjit.so", "flashjit"))
    (folder / "flashjit").write_bytes(b"ELF\0" + symbols + b"\0")
    made = make_wheel(repository, FLASHJIT_NATIVE=str(folder))
    assert made.code == 0 and made.wheels[0].stem.split("-")[-1] == tag.replace(
        "x86_64", os.uname().machine
    ), made.said


def test_a_release_names_the_oldest_system_that_it_promises(repository, tmp_path):
    folder = pathlib.Path(native(tmp_path, "libflashjit.so", "flashjit"))
    (folder / "flashjit").write_bytes(b"ELF\0GLIBC_2.25\0")
    made = make_wheel(repository, FLASHJIT_NATIVE=str(folder), FLASHJIT_GLIBC="28")
    assert made.code == 0 and "-manylinux_2_28_" in made.wheels[0].name, made.said


def source_distribution(repository, tmp_path):
    for name in ("include", "runtime", "templates", "autotune", "tools", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        if name != "tools":
            copy(ROOT / name, repository / name)
    for name in (
        "CMakeLists.txt",
        "setup.sh",
        "embed_files.cmake",
        "flashjit.map",
        "cmake",
        "command",
        "parts",
        "jax",
        "torch",
    ):
        copy = shutil.copytree if (ROOT / "tools" / name).is_dir() else shutil.copy
        copy(ROOT / "tools" / name, repository / "tools" / name)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})",
        ],
        cwd=repository / "tools/python",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(tmp_path.glob("flashjit-*.tar.gz"))


@pytest.mark.slow
def test_a_source_distribution_has_all_that_a_wheel_is_built_of(repository, tmp_path):
    """Built by CMake, but for the compiler's work, which is there already."""
    build = pathlib.Path(os.environ.get("FLASHJIT_FAKES", ROOT / "build" / "tests")).parent
    if not (build / "CMakeFiles" / "flashjit_support.dir").exists() or not shutil.which("cmake"):
        pytest.skip("flashjit is not built here")
    unity = re.search(
        "^FLASHJIT_UNITY:BOOL=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE
    ).group(1)
    packed = source_distribution(repository, tmp_path)
    with tarfile.open(packed) as tar:
        assert not [name for name in tar.getnames() if "/build/" in name or name.endswith(".pyc")]
    shutil.rmtree(repository)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path / "wheels",
            packed,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "REUSE": str(build),
            "CMAKE_ARGS": f"-DFLASHJIT_UNITY={unity}",
            "CMAKE_CXX_COMPILER_LAUNCHER": str(ROOT / "tests/install/reuse.sh"),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(*(tmp_path / "wheels").glob("*.whl")) as wheel:
        wheel.extractall(tmp_path / "installed")
    said = subprocess.run(
        [sys.executable, "-c", "import flashjit; print(flashjit.__file__, flashjit.version())"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "FLASHJIT_LIBRARY": ""},
    )
    assert str(tmp_path / "installed") in said.stdout, said.stdout + said.stderr


def test_a_source_distribution_without_cmake(repository, tmp_path):
    packed = source_distribution(repository, tmp_path)
    refused(
        make_wheel(repository, cmake=None, source=packed),
        "there is no cmake",
        "repository/tools/setup.sh",
        "FLASHJIT_NATIVE",
    )

"""Puts libflashjit.so and the flashjit command into the wheel: from FLASHJIT_NATIVE, a folder that holds both, or built
by CMake from this repository or a source distribution; and where the folder has them, or the environment
has what they are built with, libflashjit_jax.so (JAX) and libflashjit_torch.so (Python's headers). The wheel is for every Python, and for the oldest Linux that has the symbols which its files
need, but none older than FLASHJIT_GLIBC says: 28 for glibc 2.28, the oldest that a release is tried with."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import BaseError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
PACKED = HERE / "repository"  # in a source distribution
ROOT = PACKED if PACKED.exists() else HERE.parent.parent
SOURCES = (
    "CMakeLists.txt",
    "LICENSE",
    "include",
    "runtime",
    "templates",
    "autotune",
    "tools/CMakeLists.txt",
    "tools/setup.sh",
    "tools/embed_files.cmake",
    "tools/flashjit.map",
    "tools/cmake",
    "tools/command",
    "tools/parts",
    "tools/jax",
    "tools/torch",
)
HANDLER, FRONT = "libflashjit_jax.so", "libflashjit_torch.so"
WINDOWS = sysconfig.get_platform().startswith("win")  # what the wheel is for
LIBRARY, COMMAND = ("flashjit.dll", "flashjit.exe") if WINDOWS else ("libflashjit.so", "flashjit")
NATIVE = {LIBRARY: "flashjit", COMMAND: "flashjit_command"}  # file -> CMake target


OTHERWISE = f"or set FLASHJIT_NATIVE to a folder that holds a built {LIBRARY} and the flashjit command."


def version():
    project = ROOT / "CMakeLists.txt"
    if not project.exists():
        raise SystemExit(
            f"{HERE} is not in flashjit's repository ({project} is missing): make the wheel there."
        )
    return re.search(r"project\(flashjit VERSION ([0-9.]+)", project.read_text()).group(1)


def cmake(*arguments):
    command = ["cmake", *map(str, arguments)]
    try:
        status = subprocess.run(command).returncode
    except FileNotFoundError:
        raise BaseError(
            f"there is no cmake to build flashjit with: run {ROOT}/tools/setup.sh, {OTHERWISE}"
        ) from None
    if status:
        raise BaseError(
            f"{' '.join(command)} failed, see above: run {ROOT}/tools/setup.sh, which installs what it needs, "
            f"{OTHERWISE}"
        )


def build_native(folder):
    """Builds with CMake in the repository's build folder where one is configured, else in `folder`."""
    build = ROOT / "build"
    if not (build / "CMakeCache.txt").exists():
        fetched = build / "cuda" / "include"  # by tools/setup.sh
        options = [f"-DFLASHJIT_CUDA_INCLUDE={fetched}"] if fetched.exists() else []
        asked = shlex.split(os.environ.get("CMAKE_ARGS", ""))
        build = folder
        cmake("-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DFLASHJIT_TESTS=OFF", *options, *asked)
    cmake("--build", build, "--parallel", "--target", *NATIVE.values())
    return [build / LIBRARY, build / "tools" / COMMAND, *build_handler(folder), *build_front(folder)]


def jax_headers():
    """The folder of FLASHJIT_JAX_INCLUDE, or jaxlib's in the environment that builds; None where there is neither. An isolated build
    cannot import what the environment has."""
    given = os.environ.get("FLASHJIT_JAX_INCLUDE")
    folder = pathlib.Path(sysconfig.get_path("platlib")) / "jaxlib/include" if given is None else given
    return folder if given or given is None and folder.exists() else None


def build_handler(folder):
    """By itself, as it links nothing: the repository's build folder may know another JAX, or none."""
    headers = jax_headers()
    if headers is None:
        return []
    cmake("-S", ROOT / "tools/jax", "-B", folder / "jax", f"-DFLASHJIT_JAX_INCLUDE={headers}")
    cmake("--build", folder / "jax")
    return [folder / "jax" / HANDLER]


def build_front(folder):
    """By itself, too: for the Python that builds, and so for all. FLASHJIT_PYTHON_INCLUDE names other headers, or "" none."""
    headers = os.environ.get("FLASHJIT_PYTHON_INCLUDE", sysconfig.get_path("include"))
    if WINDOWS or not headers or not (pathlib.Path(headers) / "Python.h").exists():
        return []
    cmake("-S", ROOT / "tools/torch", "-B", folder / "torch", f"-DFLASHJIT_PYTHON_INCLUDE={headers}")
    cmake("--build", folder / "torch")
    return [folder / "torch" / FRONT]


def readme():
    """README.md without links to the repository's files, which lead nowhere from an installed package: their names stay."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    named = lambda link: f"tools/{link[2]}" if link[1] == "page" else f"{link[1]} (tools/{link[2]})"
    text = re.sub(r"\[([^]]*)\]\(\.\./([^)#]*)(#[^)]*)?\)", named, text)
    return text + "\nPages of tools/docs are in flashjit's repository, and in its source archive.\n"


def given_native(folder):
    files = [pathlib.Path(folder) / name for name in NATIVE]
    for file in files:
        if not file.exists():
            raise BaseError(
                f"FLASHJIT_NATIVE is {folder}, which has no {file.name}: it must hold {' and '.join(NATIVE)}; "
                "without it they are built."
            )
    optional = [pathlib.Path(folder) / name for name in (HANDLER, FRONT)]
    return [*files, *[file for file in optional if file.exists()]]


class BuildPackage(build_py):
    def run(self):
        package = pathlib.Path(self.build_lib) / "flashjit"
        shutil.rmtree(
            package, ignore_errors=True
        )  # what an earlier version left there would get into the wheel
        super().run()
        target = package / "native"
        target.mkdir(parents=True)
        given = os.environ.get("FLASHJIT_NATIVE")
        with tempfile.TemporaryDirectory() as scratch:
            files = given_native(given) if given else build_native(pathlib.Path(scratch))
            for file in files:
                shutil.copy(file, target / file.name)  # follows links: libflashjit.so is one


# The first glibc x of manylinux_2_x whose libstdc++ has GLIBCXX_3.4.y, as PEP 600's policies in auditwheel say.
LIBSTDCXX = {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35, 33: 39}


def manylinux(files, platform):
    """The tag of the oldest systems that have what these files need; `platform` where there are no such systems."""
    needed = {"GLIBC_2": int(os.environ.get("FLASHJIT_GLIBC", 17)), "GLIBCXX_3.4": 0}
    for file in files:
        for version, minor in re.findall(
            rb"\0(GLIBC_2|GLIBCXX_3\.4)\.(\d+)(?:\.\d+)?(?=\0)", file.read_bytes()
        ):
            needed[version.decode()] = max(needed[version.decode()], int(minor))
    runtimes = [glibc for libstdcxx, glibc in LIBSTDCXX.items() if libstdcxx >= needed["GLIBCXX_3.4"]]
    if not platform.startswith("linux_") or not runtimes:
        return platform
    return f"manylinux_2_{max(needed['GLIBC_2'], runtimes[0])}_{platform.removeprefix('linux_')}"


class PlatformWheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        files = [
            file
            for name in (*NATIVE, HANDLER, FRONT)
            for file in pathlib.Path(self.bdist_dir).glob(f"flashjit/native/{name}")
        ]
        return "py3", "none", manylinux(files, super().get_tag()[2])


class SourceDistribution(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in SOURCES:
            target = pathlib.Path(base_dir) / "repository" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(
    version=version(),
    long_description=readme(),
    long_description_content_type="text/markdown",
    distclass=Binary,
    cmdclass={"build_py": BuildPackage, "bdist_wheel": PlatformWheel, "sdist": SourceDistribution},
)

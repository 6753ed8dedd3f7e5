"""Puts libflashjit.so and the flashjit command into the wheel: from FLASHJIT_NATIVE, a folder that holds both, or built
by CMake from this repository. The wheel is for one platform and every Python."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NATIVE = {"libflashjit.so": "flashjit", "flashjit": "flashjit_command"}  # file -> CMake target


OTHERWISE = "or set FLASHJIT_NATIVE to a folder that holds a built libflashjit.so and the flashjit command."


def version():
    project = ROOT / "CMakeLists.txt"
    if not project.exists():
        raise SystemExit(f"{HERE} is not in flashjit's repository ({project} is missing): make the wheel there.")
    return re.search(r"project\(flashjit VERSION ([0-9.]+)", project.read_text()).group(1)


def cmake(*arguments):
    command = ["cmake", *map(str, arguments)]
    try:
        status = subprocess.run(command).returncode
    except FileNotFoundError:
        raise BaseError(f"there is no cmake to build flashjit with: run {ROOT}/tools/setup.sh, {OTHERWISE}") from None
    if status:
        raise BaseError(f"{' '.join(command)} failed, see above: run {ROOT}/tools/setup.sh, which installs what it needs, "
                        f"{OTHERWISE}")


def build_native(folder):
    """Builds with CMake in the repository's build folder where one is configured, else in `folder`."""
    build = ROOT / "build"
    if not (build / "CMakeCache.txt").exists():
        build = folder
        cmake("-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DFLASHJIT_TESTS=OFF")
    cmake("--build", build, "--parallel", "--target", *NATIVE.values())
    return [build / "libflashjit.so", build / "tools" / "flashjit"]


def given_native(folder):
    files = [pathlib.Path(folder) / name for name in NATIVE]
    for file in files:
        if not file.exists():
            raise BaseError(f"FLASHJIT_NATIVE is {folder}, which has no {file.name}: it must hold {' and '.join(NATIVE)}; "
                            "without it they are built.")
    return files


class BuildPackage(build_py):
    def run(self):
        package = pathlib.Path(self.build_lib) / "flashjit"
        shutil.rmtree(package, ignore_errors=True)  # what an earlier version left there would get into the wheel
        super().run()
        target = package / "native"
        target.mkdir(parents=True)
        given = os.environ.get("FLASHJIT_NATIVE")
        with tempfile.TemporaryDirectory() as scratch:
            files = given_native(given) if given else build_native(pathlib.Path(scratch))
            for file in files:
                shutil.copy(file, target / file.name)  # follows links: libflashjit.so is one


class PlatformWheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(version=version(), distclass=Binary, cmdclass={"build_py": BuildPackage, "bdist_wheel": PlatformWheel})

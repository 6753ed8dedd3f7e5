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

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NATIVE = {"libflashjit.so": "flashjit", "flashjit": "flashjit_command"}  # file -> CMake target


def version():
    return re.search(r"project\(flashjit VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def build_native(folder):
    """Builds with CMake in the repository's build folder where one is configured, else in `folder`."""
    build = ROOT / "build"
    if not (build / "CMakeCache.txt").exists():
        build = folder
        subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", "-DFLASHJIT_TESTS=OFF"],
                       check=True)
    subprocess.run(["cmake", "--build", str(build), "--parallel", "--target", *NATIVE.values()], check=True)
    return [build / "libflashjit.so", build / "tools" / "flashjit"]


class BuildPackage(build_py):
    def run(self):
        super().run()
        target = pathlib.Path(self.build_lib) / "flashjit" / "native"
        target.mkdir(parents=True, exist_ok=True)
        given = os.environ.get("FLASHJIT_NATIVE")
        with tempfile.TemporaryDirectory() as scratch:
            files = [pathlib.Path(given) / name for name in NATIVE] if given else build_native(pathlib.Path(scratch))
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

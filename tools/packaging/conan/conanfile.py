"""flashjit for Conan 2, from this tree:

    conan create tools/packaging/conan --build=missing

CUDA's headers (cuda.h, nvrtc.h) are the system's: those of CUDA_HOME, or of -c user.flashjit:cuda_include=<folder>. No
toolkit is needed where programs run.
"""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

SOURCES = (
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "include/*",
    "runtime/*",
    "templates/*",
    "autotune/*",
    "tools/*.txt",
    "tools/*.cmake",
    "tools/*.map",
    "tools/cmake/*",
    "tools/command/*",
    "tools/parts/*",
    "tools/docs/*.md",
    "tools/bench/results/*.png",
    "tools/examples/python/results/*.png",
)


class Flashjit(ConanFile):
    name = "flashjit"
    description = "Attention kernels for NVIDIA GPUs, generated, compiled at run time, tuned and cached"
    license = "MIT"
    topics = ("cuda", "attention", "jit")
    package_type = "shared-library"  # libflashjit.a is in the package, too: flashjit::static
    settings = "os", "arch", "compiler", "build_type"
    options = {"with_command": [True, False]}
    default_options = {"with_command": True, "fmt/*:header_only": True}

    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        self.version = re.search(
            r"project\(flashjit VERSION ([0-9.]+)", load(self, os.path.join(self._root(), "CMakeLists.txt"))
        ).group(1)

    def export_sources(self):
        for pattern in SOURCES:
            copy(self, pattern, self._root(), self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def requirements(self):
        # What its objects need of them is in the library: programs that use flashjit need none of these.
        for package in ("fmt/10.2.1", "nlohmann_json/3.11.3", "xxhash/0.8.3"):
            self.requires(package, visible=False)
        if self.options.with_command:
            self.requires("cli11/2.4.2", visible=False)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["FLASHJIT_TESTS"] = False
        toolchain.cache_variables["FLASHJIT_TOOLS"] = bool(self.options.with_command)
        include = self.conf.get("user.flashjit:cuda_include")
        if include:
            toolchain.cache_variables["FLASHJIT_CUDA_INCLUDE"] = include
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        self.cpp_info.libs = ["flashjit"]
        self.cpp_info.set_property(
            "cmake_find_mode", "none"
        )  # the installed package has its own, with flashjit_add_pack()
        self.cpp_info.builddirs = ["lib/cmake/flashjit"]

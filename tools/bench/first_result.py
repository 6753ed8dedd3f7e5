"""From an empty virtual environment to the first kernel, timed, next to what a JIT that calls nvcc does with the same source.

    python3 tools/bench/first_result.py --wheel flashjit-*_x86_64.whl

The environment gets the wheel, NumPy and NVRTC from PyPI, and compiles a forward kernel for sm_90a, which takes no GPU; with one, it
computes too. Where there is an nvcc, the same source is compiled to a shared library; where --torch names a Python that has
PyTorch, so is the binding that torch.utils.cpp_extension.load_inline() writes for it. Seconds of the clock, and of all
processors together, which a busy machine does not change.
"""

import argparse
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = "fwd:bf16:d128:causal"
RESULT = """
import numpy, flashjit
q = numpy.ones((1, 2, 64, 128), numpy.float32)
print(flashjit.forward(q, q, q, options="causal")[0].mean())
"""
BINDING = """#include <torch/extension.h>
torch::Tensor attention(torch::Tensor q) { return q; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("attention", &attention); }
"""


def timed(what, command, **environment):
    """Prints a row."""
    used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    start, before = time.perf_counter(), used()
    outside = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("FLASHJIT_")
    }
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**outside, **environment}
    )
    if done.returncode:
        sys.exit(f"first_result: {what}: {done.stdout}{done.stderr}")
    print(f"{what:56} {time.perf_counter() - start:8.1f} s {used() - before:8.1f} s", flush=True)


def with_flashjit(scratch, wheel):
    """Returns the rendered source of the kernel."""
    python = scratch / "venv" / "bin" / "python"
    timed("python3 -m venv", [sys.executable, "-m", "venv", scratch / "venv"])
    timed(
        "pip install flashjit-*_x86_64.whl numpy nvidia-cuda-nvrtc",
        [python, "-m", "pip", "install", "-q", "--no-cache-dir", wheel, "numpy", "nvidia-cuda-nvrtc"],
    )
    cache = dict(FLASHJIT_CACHE_DIR=str(scratch / "cache"))
    timed("import flashjit, a result of the CPU reference", [python, "-c", RESULT], **cache)
    timed(
        f"first kernel, {SPEC} for sm_90a",
        [python, "-m", "flashjit", "pack", "--spec", SPEC, "--arch", "sm_90a", "--out", scratch / "pack"],
        **cache,
    )
    return next(scratch.glob("pack/**/kernel.cu"))


def with_nvcc(scratch, source, nvcc):
    (scratch / "flashjit").symlink_to(ROOT / "templates")
    timed(
        "the same source by nvcc, as a shared library",
        [
            nvcc,
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "-gencode=arch=compute_90a,code=sm_90a",
            "-std=c++20",
            "--expt-relaxed-constexpr",
            f"-I{scratch}",
            "-o",
            scratch / "kernel.so",
            source,
        ],
    )


def with_torch(scratch, python):
    found = subprocess.run(
        [
            python,
            "-c",
            "import torch.utils.cpp_extension as e, sysconfig; "
            "print(*e.include_paths(), sysconfig.get_path('include'), sep='\\n')",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    (scratch / "binding.cpp").write_text(BINDING)
    timed(
        "the binding of load_inline(), by g++",
        [
            "g++",
            "-std=c++20",
            "-O3",
            "-fPIC",
            "-shared",
            "-DTORCH_EXTENSION_NAME=binding",
            *(f"-I{folder}" for folder in found.stdout.split()),
            scratch / "binding.cpp",
            "-o",
            scratch / "binding.so",
        ],
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", required=True, help="flashjit's wheel")
    parser.add_argument("--nvcc", default=shutil.which("nvcc"), help="default: the one in PATH, if any")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        print(f"{'':56} {'clock':>10} {'processors':>10}")
        source = with_flashjit(scratch, options.wheel)
        if options.nvcc:
            with_nvcc(scratch, source, options.nvcc)
        if options.torch:
            with_torch(scratch, options.torch)


if __name__ == "__main__":
    main()

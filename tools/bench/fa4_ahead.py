"""Compile FlashAttention-4's kernels where there is no GPU, for a GPU machine that cannot have CuTe DSL (92 MB) or a network.

    python3 tools/bench/fa4_ahead.py FOLDER            # with CUDA's PyTorch, flash-attn-4, nvidia-cutlass-dsl[cu13] and g++: 10 minutes of a core
    PYTHONPATH=FOLDER python3 tools/bench/compare.py   # there, with PyTorch, einops and apache-tvm-ffi of the same versions

FOLDER then has FlashAttention-4's Python, the kernels for sm_90a of compare.py's problems and race_programs.py's, and fa4_offline.py, which
finds a call's kernel. Calls of other problems raise an error that says so. FlashAttention-4 itself compiles in its fake mode, which its sources describe.
"""

import os
import pathlib
import shutil
import subprocess
import sys

os.environ |= {
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "QUACK_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # so that its caches have names
}

import compare  # noqa: E402
import fa4_offline  # noqa: E402
import fa4_programs  # noqa: E402
import race_programs  # noqa: E402
import variants  # noqa: E402
from measuring import DTYPES, torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

#: In place of what CuTe's runtime, which is not there, would say of a failed CUDA call.
RAISED = """
#include <stdio.h>
int CuteDSLRT_TVMFFISetRaisedCudaError(long a, long b, long c) {
  fprintf(stderr, "a CUDA call of a kernel's launcher failed: %ld %ld\\n", a, b);
  return -1;
}
"""


class Exported(dict):
    """A cache of FlashAttention-4's, whose kernels are written as objects."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def path(self, key):
        return self.folder / f"{self.name}-{fa4_offline.name_of(key)}.o"

    def __setitem__(self, key, function):
        super().__setitem__(key, function)
        function.export_to_c(object_file_path=str(self.path(key)), function_name="func")
        print(self.path(key).name, flush=True)

    def __contains__(self, key):
        return super().__contains__(key) or self.path(key).exists()


def dense(interface, point):
    dtype = DTYPES[point.dtype]
    make = lambda heads: torch.empty(point.batch, point.length, heads, point.dim, dtype=dtype, device="cuda")
    q, k, v = make(point.heads), make(point.heads_kv), make(point.heads_kv)
    out, lse = interface._flash_attn_fwd(q, k, v, causal=point.causal, return_lse=True)[:2]
    interface._flash_attn_bwd(q, k, v, out, torch.empty_like(q), lse, causal=point.causal)


def few(interface, batch, heads, heads_kv, queries, keys, dim):
    make = lambda heads, length: torch.empty(batch, length, heads, dim, dtype=torch.bfloat16, device="cuda")
    interface._flash_attn_fwd(
        make(heads, queries), make(heads_kv, keys), make(heads_kv, keys), return_lse=True
    )


def program(case, dim):
    length, heads = race_programs.LENGTH, race_programs.HIDDEN // dim
    ints = lambda *sizes: torch.empty(*sizes, dtype=torch.int32, device="cuda")
    case.captures = {name: ints(length) for name in case.captures}
    blocks = length // fa4_programs.BLOCK
    lists = [(ints(1, 1, blocks), ints(1, 1, blocks, blocks)) * 2] * 2
    shape = race_programs.BATCH, heads, length, dim
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    side = fa4_programs.FlashAttention4(case, *tensors, lists)
    side.fwd()
    side.bwd()


def compile_all(interface):
    """Makes every call in fake mode, which computes nothing but compiles what it would launch."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    points = [point for dim in (64, 128, 256) for point in compare.dense_points(dim, lengths)]
    points += [point for point in compare.other_points() if not point.dropout]
    with FakeTensorMode():
        for point in points:
            dense(interface, point)
        for problem in compare.FEW:
            few(interface, *problem)
    cases = [case for case in variants.cases(race_programs.LENGTH, "cpu") if case.name in race_programs.CASES]
    for dim in (128, 64):
        for case in cases:
            with FakeTensorMode():
                program(case, dim)


def link(objects, to):
    """A shared library of each object, over the CUDA runtime that PyTorch has and TVM FFI."""
    import nvidia_cutlass_dsl
    import tvm_ffi

    nvidia = pathlib.Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"
    runtime = (
        pathlib.Path(nvidia_cutlass_dsl.__path__[0]) / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
    )
    ffi = pathlib.Path(tvm_ffi.__file__).parent / "lib"
    source = objects / "raised.c"
    source.write_text(RAISED)
    to.mkdir(parents=True, exist_ok=True)
    for path in objects.glob("*.o"):
        made = to / f"{path.stem}.so"
        words = ["g++", "-shared", "-fPIC", "-s", "-o", made, path, runtime, "-x", "c", source, "-x", "none"]
        words += ["-L", ffi, "-ltvm_ffi", "-L", nvidia, "-l:libcudart.so.13", "-Wl,--exclude-libs,ALL"]
        subprocess.run([str(word) for word in words], check=True)


def main():
    if len(sys.argv) != 2:
        print(__doc__.splitlines()[2].strip(), file=sys.stderr)
        return 2
    folder = pathlib.Path(sys.argv[1])
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    import flash_attn.cute.interface as interface

    torch.cuda.get_device_capability = lambda *which: (9, 0)
    for function in vars(interface).values():
        if hasattr(function, "compile_cache"):
            function.compile_cache = Exported(objects, function.compile_cache.cache_path.name)
    compile_all(interface)
    link(objects, folder / "kernels")
    package = pathlib.Path(interface.__file__).parent
    shutil.copytree(package, folder / "flash_attn" / "cute", dirs_exist_ok=True)
    shutil.copy(fa4_offline.__file__, folder)
    (folder / "flash_attn" / "__init__.py").write_text("import fa4_offline\n\nfa4_offline.install()\n")
    shutil.rmtree(objects)
    return 0


if __name__ == "__main__":
    sys.exit(main())

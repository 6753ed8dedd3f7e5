"""Compiles the modules of FlashInfer that races call and nvcc takes minutes for, on a machine without a GPU. peers.py calls it.

    python3 tests/gpu/flashinfer_modules.py --peers build/peers/flashinfer --work build/peers/modules [NAME...]

FlashInfer's code, flags and generated sources are used as they are. Left out are kernels that no race calls, for other masks and tiles:
calling one ends the process. The result, data/aot/MODULE/MODULE.so in the package, is where FlashInfer looks before it compiles.
Needs nvcc, and in this Python PyTorch, apache-tvm-ffi, jinja2, ninja, einops, filelock and what else `import flashinfer` reads.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = "9.0a"


def pod(modules: Any, torch: Any) -> Any:
    b = torch.bfloat16
    return modules.gen_batch_pod_module(b, b, b, 128, 0, False, False, False, torch.int32, 0, False, False)


def persistent(modules: Any, torch: Any) -> Any:
    b = torch.bfloat16
    return modules._gen_batch_attention_primary_module(b, b, b, torch.int32, 128, 128, 0, False, False)


def prefill(backend: str) -> Callable[[Any, Any], Any]:
    def spec(modules: Any, torch: Any) -> Any:
        make = (
            modules._gen_batch_prefill_primary_module
            if backend == "fa2"
            else modules.gen_batch_prefill_module
        )
        b = torch.bfloat16
        return make(backend, b, b, b, torch.int32, 128, 128, 0, False, False, False)

    return spec


def sigmoid(backend: str, dim: int) -> Callable[[Any, Any], Any]:
    def spec(modules: Any, _: Any) -> Any:
        import race_weights

        return modules.gen_customize_single_prefill_module(*race_weights.jit_arguments(backend, dim))

    return spec


#: name -> what gives FlashInfer's description of the module, and the sources with kernels that a race calls
MODULES = {
    "pod": (pod, r"kernel_mask_1p_0d"),
    "persistent": (persistent, r"kernel_mask_1"),
    "prefill_fa2": (prefill("fa2"), r"paged_kernel_mask_1"),
    "prefill_fa3": (prefill("fa3"), r"paged_sm90_kernel_mask_1"),
    **{
        f"sigmoid_{backend}_d{dim}": (sigmoid(backend, dim), r"kernel_mask_[01]")
        for backend in ("fa3", "fa2")
        for dim in (128, 64)
    },
}


def without_small_tiles(source: Path) -> None:
    """Drops the kernels for prefills of few rows from POD's source: they triple its time, and the race's tiles have 128."""
    text = source.read_text()
    kernels = re.findall(r"\ntemplate cudaError_t.*?;\n", text, re.DOTALL)
    for kernel in kernels:
        if "CTA_TILE_Q_P=*/128" not in kernel:
            text = text.replace(kernel, "\n")
    source.write_text(text)


def build(name: str, peers: Path) -> Path:
    import torch
    from flashinfer.jit.attention import modules

    make, wanted = MODULES[name]
    spec = make(modules, torch)
    spec.write_ninja()
    chosen = [
        (source, path)
        for source, path in zip(spec.sources, spec.get_object_paths())
        if "kernel_mask" not in source.name or re.search(rf"{wanted}\.cu$", source.name)
    ]
    if name == "pod":
        for source, _ in chosen:
            if "kernel_mask" in source.name:
                without_small_tiles(source)
    script = spec.ninja_path.read_text()
    objects = []
    for source, _ in chosen:
        found = re.search(rf"^build (\S+): \S+ \S*/{re.escape(source.name)}$", script, re.MULTILINE)
        assert found, f"{source.name} is not in {spec.ninja_path}"
        objects.append(found[1])
    subprocess.run(["ninja", "-C", spec.build_dir, "-j1", *objects], check=True)
    library = peers / "flashinfer" / "data" / "aot" / spec.name / f"{spec.name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    # Undefined kernels are bound when they are called: -z lazy.
    command = [
        "c++",
        "-shared",
        "-Wl,-z,lazy",
        *objects,
        f"-L{home}/lib64",
        f"-L{home}/lib64/stubs",
        "-lcudart",
        "-lcuda",
    ]
    subprocess.run([*command, "-o", library], check=True, cwd=spec.build_dir)
    return library


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODULES))
    parser.add_argument(
        "--peers", type=Path, required=True, help="the folder that peers.py made of flashinfer"
    )
    parser.add_argument("--work", type=Path, required=True, help="for sources and objects")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in MODULES:
            parser.error(f"there is no {name}: {', '.join(MODULES)}")
    os.environ |= {
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        "FLASHINFER_WORKSPACE_BASE": str(options.work.resolve()),
    }
    # Last, as apache-tvm-ffi in that folder is compiled for the Python of the GPU's machine.
    sys.path += [str(options.peers.resolve()), str(ROOT / "tools" / "bench"), str(ROOT / "tools" / "python")]
    for name in options.names or MODULES:
        library = build(name, options.peers.resolve())
        print(f"{name}: {library.stat().st_size / 2**20:.1f} MiB in {library}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

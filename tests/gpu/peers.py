"""Makes what measurements beside other projects need on a machine without a network: build/peers/peers-NAME.tar.xz.

    python3 tests/gpu/peers.py tangents fa3 flashinfer      # then: tests/gpu/carry.py pack --peers tangents fa3 flashinfer
    python3 tests/gpu/peers.py --list

Wheels are fetched by pip, as they are for Python 3.12 on x86-64 (manylinux), without what they depend on. Of large ones only the
files that the measurements read are kept, and of compiled libraries the kernels of Hopper (sm_90) that they call: the others are
blanked in place, which a later xz makes nothing of. Archives over --part MiB are cut, into .1of2 and .2of2, to travel apart.
Needs pip with a network, for `rings` and `flashinfer_suite` also git, and xz.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)] + [
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
]


@dataclass(frozen=True)
class Peer:
    """wheels: of PyPI, with their versions. keep: the files to keep, a regular expression; all by default. kernels: of compiled
    libraries, by file: a regular expression of names; kernels of attention that do not match are blanked. files: written as
    they stand here. made_by: a script of tools/bench that fetches sources by git. compiled_by: a script of this folder that compiles into
    the folder, where there is nvcc."""

    wheels: tuple[str, ...] = ()
    keep: str = ""
    kernels: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    made_by: tuple[str, ...] = ()
    compiled_by: str = ""


TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
FLASH_MLA = '"""FlashMLA of vLLM\'s wheel, by its own name."""\nfrom vllm.third_party.flashmla.flash_mla_interface import *  # noqa: F403\n'
SGLANG_NEEDS = (
    "annotated-types==0.8.0 anthropic==2.14.0 cachetools==8.0.2 dill==0.4.1 distro==1.9.0 "
    "docstring-parser==0.18.0 fastapi==0.136.3 interegular==0.3.3 loguru==0.7.3 msgspec==0.23.0 openai==2.8.0 "
    "orjson==3.13.0 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.4 "
    "pydantic-core==2.50.5 python-multipart==0.0.34 pyzmq==27.3.0 setproctitle==1.3.8 sniffio==1.3.1 "
    "starlette==1.10.0 typing-inspection==0.4.5 uvicorn==0.54.0 "
).split()
PEERS = {
    "tangents": Peer(("jvp_flash_attention==0.14.0",), files={"jvp_flash_attention/__init__.py": ""}),
    "fa3": Peer(("fa3-fwd==0.0.3",), kernels={"fa3_fwd/_C.abi3.so": r"bfloat16_t|float_e4m3_t"}),
    "vllm": Peer(
        ("vllm==0.33.0",),
        keep=r"vllm/vllm_flash_attn/(?!_vllm_fa2)|vllm/third_party/flashmla/|vllm/_flashmla_C",
        kernels={
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": r"ELi(128|256)ENS_12float_e4m3_t",
            "vllm/_flashmla_C.abi3.so": "",
        },
        files={
            "vllm/__init__.py": "",
            "vllm/vllm_flash_attn/__init__.py": "",
            "vllm/third_party/__init__.py": "",
            "flash_mla/__init__.py": FLASH_MLA,
            "flash_mla-0.33.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash_mla\nVersion: 0.33.0+vllm\n",
        },
    ),
    "flashinfer": Peer(
        ("flashinfer-python==0.7.4", TVM_FFI),
        keep=r"flashinfer/.*\.py$|flashinfer/data/(cccl|cutlass|include|spdlog)/|flashinfer/data/csrc/(?!alphamoe|cake)[^/]+$|tvm_ffi/",
        compiled_by="flashinfer_modules.py",
    ),
    "wide": Peer(("ffpa-attn==0.2.4",)),
    "cute": Peer(
        (
            "flash-attn-4==4.0.0b36",
            "quack-kernels==0.6.5",
            "torch-c-dlpack-ext==0.1.5",
            "nvidia-cutlass-dsl==4.8.1",
            "nvidia-cutlass-dsl-libs-base==4.8.1",
            "nvidia-cutlass-dsl-libs-core==4.8.1",
            "nvidia-cutlass-dsl-libs-cu13==4.8.1",
            "nvidia-cudnn-frontend==1.32.0",
            TVM_FFI,
        )
    ),
    "sglang": Peer(
        ("sglang==0.5.23", *SGLANG_NEEDS),
        keep=r"(?!sglang/multimodal_gen/|sglang/srt/rust_extensions/_|share/)",
    ),
    "rings": Peer(made_by=("ring_suite.py", "--prepare", "--work")),
    "flashinfer_suite": Peer(made_by=("flashinfer_suite.py", "--device", "cuda", "--prepare", "--work")),
}


def pip_download(folder: Path, requirement: str) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    return [*command, "-d", str(folder), requirement]


def fetch(requirement: str, wheels: Path) -> Path:
    """The wheel, fetched unless it is there."""
    name, _, version = requirement.partition("==")
    pattern = f"{re.sub('[-_.]+', '_', name)}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        subprocess.run(pip_download(wheels, requirement), check=True)
    return next(iter(wheels.glob(pattern)))


def unpack(wheel: Path, keep: str, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        wanted = re.compile(rf"(?:{keep})|[^/]+\.dist-info/METADATA$|[^/]+\.pth$" if keep else "")
        for name in archive.namelist():
            # What a wheel would install beside the packages is left out, and what it would install into them lies there.
            found = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)
            if name.endswith("/") or ".data/" in found or not wanted.match(found):
                continue
            to = into / found
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(archive.read(name))


def device_code(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Kind (2: machine code), architecture, begin and size of all that an ELF file has for GPUs."""
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    count, names = struct.unpack_from("<HH", data, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", data, sections + 64 * i) for i in range(count)]
    for name, _, _, _, begin, size in headers:
        start = headers[names][4] + name
        if data[start : data.index(b"\0", start)] not in (b".nv_fatbin", b"__nv_relfatbin"):
            continue
        at = begin
        while at < begin + size:
            if data[at : at + 4] != b"\x50\xed\x55\xba":
                at += 8
                continue
            header, length = struct.unpack_from("<HQ", data, at + 6)
            entry, at = at + header, at + header + length
            while entry < at:
                kind, own, own_length = struct.unpack_from("<HxxIQ", data, entry)
                architecture = struct.unpack_from("<I", data, entry + 28)[0]
                yield kind, architecture, entry + own, own_length
                entry += own + own_length


def blank(path: Path, wanted: str) -> None:
    """Blanks the device code of other architectures than sm_90, and kernels of attention whose names do not match."""
    data = bytearray(path.read_bytes())
    for kind, architecture, begin, size in list(device_code(bytes(data))):
        code = bytes(data[begin : begin + size])
        names = re.findall(rb"\.text\.(_Z[A-Za-z0-9_]+)", code)
        attention = wanted and any(b"CollectiveMainloop" in name for name in names)
        matches = any(re.search(wanted.encode(), name) for name in names)
        if kind != 2 or architecture != 90 or (attention and not matches):
            data[begin : begin + size] = bytes(size)
    path.write_bytes(data)


def make(name: str, folder: Path, part: float) -> None:
    peer, into = PEERS[name], folder / name
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    if peer.made_by:
        script, *options = peer.made_by
        found = {**os.environ, "PYTHONPATH": str(ROOT / "tools" / "python")}
        subprocess.run(
            [sys.executable, ROOT / "tools/bench" / script, *options, str(into)], check=True, env=found
        )
    wheels = folder / "wheels"
    wheels.mkdir(exist_ok=True)
    fetched = 0
    for requirement in peer.wheels:
        wheel = fetch(requirement, wheels)
        fetched += wheel.stat().st_size
        unpack(wheel, peer.keep, into)
    for path, wanted in peer.kernels.items():
        blank(into / path, wanted)
    for path, text in peer.files.items():
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).write_text(text)
    if peer.compiled_by and shutil.which("nvcc"):
        command = [sys.executable, ROOT / "tests/gpu" / peer.compiled_by, "--peers", into]
        subprocess.run([*command, "--work", folder / "modules"], check=True)
    archive = folder / f"peers-{name}.tar.xz"
    for old in folder.glob(f"peers-{name}.tar.xz*"):
        old.unlink()
    subprocess.run(["tar", "-C", folder, "--use-compress-program=xz -T2", "-cf", archive, name], check=True)
    size = archive.stat().st_size
    print(f"{name}: {fetched / 2**20:.1f} MiB fetched, {size / 2**20:.1f} MiB in {archive}", flush=True)
    cut(archive, int(part * 2**20))


def cut(archive: Path, most: int) -> None:
    data = archive.read_bytes()
    count = -(-len(data) // most)
    if count > 1:
        each = -(-len(data) // count)
        for i in range(count):
            archive.with_name(f"{archive.name}.{i + 1}of{count}").write_bytes(data[i * each : (i + 1) * each])
        archive.unlink()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--part", type=float, default=38, help="MiB of an archive (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print what there is, and pip's command")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in PEERS:
            parser.error(f"there is no {name}: {', '.join(PEERS)}")
    if options.list:
        print(f"{shlex.join(pip_download(options.folder / 'wheels', 'NAME==VERSION'))}\n")
    for name, peer in PEERS.items():
        if options.list:
            print(f"{name:18} {' '.join(peer.wheels or peer.made_by)}")
        elif name in options.names:
            make(name, options.folder, options.part)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

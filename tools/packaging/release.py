"""Parts of tools/release.sh that are easier in Python than in a shell."""

import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import sys
import sysconfig
import tarfile
import zipfile

EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
INCLUDE = pathlib.Path("/usr/include")
# Header-only libraries that are compiled in: CMake's package, its targets, the header that has the version, the license.
LIBRARIES = {
    "fmt": (("fmt::fmt", "fmt::fmt-header-only"), "fmt/core.h", "MIT"),
    "nlohmann_json": (("nlohmann_json::nlohmann_json",), "nlohmann/json.hpp", "MIT"),
    "CLI11": (("CLI11::CLI11",), "CLI/Version.hpp", "BSD-3-Clause"),
    "xxhash": ((), "xxhash.h", "BSD-2-Clause"),
}


def library_version(name, include=INCLUDE):
    """From the header's macros."""
    header = include / LIBRARIES[name][1]
    texts = [
        path.read_text()
        for path in (header, *include.glob("nlohmann/detail/abi_macros.hpp"))
        if path.exists()
    ]
    text = "\n".join(texts)
    if name == "fmt":
        number = int(re.search(r"define FMT_VERSION (\d+)", text).group(1))
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    words = {"nlohmann_json": "NLOHMANN_JSON", "CLI11": "CLI11", "xxhash": "XXH"}[name]
    last = {"xxhash": "RELEASE"}.get(name, "PATCH")
    parts = (re.search(rf"define {words}_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", last))
    return ".".join(part.group(1) for part in parts)


def headers(target):
    """The libraries' headers without the system's, which are another glibc's; with packages for CMake."""
    folder = pathlib.Path(target)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cmake").mkdir(parents=True)
    for name, (targets, header, _) in LIBRARIES.items():
        first = header.split("/")[0]
        (shutil.copytree if (INCLUDE / first).is_dir() else shutil.copy)(INCLUDE / first, folder / first)
        lines = [f"set({name}_VERSION {library_version(name)})"]
        for one in targets:
            lines.append(f"add_library({one} INTERFACE IMPORTED)")
            lines.append(f"target_include_directories({one} INTERFACE ${{CMAKE_CURRENT_LIST_DIR}}/..)")
        (folder / "cmake" / f"{name.lower()}-config.cmake").write_text("\n".join(lines) + "\n")


def jax_headers(folder, target):
    """What XLA calls a handler by, of the jaxlib wheel in the folder: three headers."""
    (path,) = pathlib.Path(folder).glob("jaxlib-*.whl")
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.startswith("jaxlib/include/xla/ffi/") and not name.endswith("/"):
                file = pathlib.Path(target) / name.removeprefix("jaxlib/include/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(wheel.read(name))


def python_headers(target):
    """Python's headers with this system's pyconfig.h: the stable interface's types are the same on every 64-bit Linux."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(sysconfig.get_path("include"), target)
    shutil.copy(sysconfig.get_config_h_filename(), pathlib.Path(target) / "pyconfig.h")


def repack(source, target):
    """The same tar.gz, without times, owners and the order of a folder."""
    with (
        tarfile.open(source) as old,
        open(target, "wb") as file,
        gzip.GzipFile("", "wb", 9, file, 0) as packed,
    ):
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member in sorted(old.getmembers(), key=lambda member: member.name):
                member.mtime, member.uid, member.gid, member.uname, member.gname = EPOCH, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)


def check_wheel(path, glibc, arch):
    """The tag is the one that the pages promise, the files are of the architecture, and need only libc's own libraries."""
    if not path.endswith(f"-manylinux_2_{glibc}_{arch}.whl"):
        sys.exit(f"{path} should be for manylinux_2_{glibc}_{arch}")
    machine = {"x86_64": 62, "aarch64": 183}[arch]
    with zipfile.ZipFile(path) as wheel:
        for name in (
            f"flashjit/native/{file}"
            for file in ("libflashjit.so", "flashjit", "libflashjit_jax.so", "libflashjit_torch.so")
        ):
            data = wheel.read(name)
            if data[:4] != b"\x7fELF" or struct.unpack_from("<H", data, 18)[0] != machine:
                sys.exit(f"{name} of {path} is not for {arch}")
            if b"libstdc++.so" in data or b"libc++.so" in data:
                sys.exit(f"{name} of {path} needs a C++ library of the system")


def kernels_wheel(name, version, pack, models, folder):
    """flashjit-kernels-NAME: a pack where flashjit's package finds it, for every Python and host."""
    from wheel.wheelfile import WheelFile

    root, kernels = pathlib.Path(pack), f"flashjit_kernels_{name}-{version}"
    manifest = "v1/SHA256SUMS"  # what it does not list is not the pack's
    listed = [f"v1/{line.split(maxsplit=1)[1]}" for line in (root / manifest).read_text().splitlines()]
    about = {
        "Metadata-Version": "2.1",
        "Name": f"flashjit-kernels-{name}",
        "Version": version,
        "Summary": f"Kernels of common models for flashjit, compiled for {name}",
        "License": "MIT",
        "Requires-Dist": f"flashjit=={version}",
    }
    lines = [f"{key}: {value}" for key, value in about.items()]
    tags = ["Wheel-Version: 1.0", "Generator: flashjit", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    with WheelFile(pathlib.Path(folder) / f"{kernels}-py3-none-any.whl", "w") as wheel:
        for path in sorted([*listed, manifest]):
            wheel.writestr(f"flashjit_kernels/{name}/{path}", (root / path).read_bytes())
        text = "\n".join([*lines, "", pathlib.Path(models).read_text()])
        wheel.writestr(f"{kernels}.dist-info/METADATA", text)
        wheel.writestr(f"{kernels}.dist-info/WHEEL", "\n".join([*tags, ""]))


def sbom(version, commit, cuda, folder, zig, jaxlib):
    """SPDX 2.3: what is in the folder, and what was compiled in."""
    cuda_version = int(
        re.search(r"define CUDA_VERSION (\d+)", (pathlib.Path(cuda) / "cuda.h").read_text()).group(1)
    )
    contents = [(name, library_version(name), license) for name, (_, _, license) in LIBRARIES.items()]
    contents.append(("cuda-headers", f"{cuda_version // 1000}.{cuda_version % 1000 // 10}", "NOASSERTION"))
    contents.append(("xla-ffi-headers", f"of {jaxlib}, in wheels", "Apache-2.0"))
    contents.append(("libc++", f"of {zig}, in wheels", "Apache-2.0 WITH LLVM-exception"))
    package = lambda name, version, license: {
        "SPDXID": f"SPDXRef-{name.replace('_', '-').replace('+', 'p')}",
        "name": name,
        "versionInfo": version,
        "licenseDeclared": license,
        "licenseConcluded": license,
        "downloadLocation": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "filesAnalyzed": False,
    }
    packages = [package("flashjit", version, "MIT"), *(package(*part) for part in contents)]
    files = [
        path for path in sorted(pathlib.Path(folder).iterdir()) if path.suffix in (".whl", ".gz", ".deb")
    ]
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"flashjit-{version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/flashjit-{version}-{commit}",
        "creationInfo": {"created": created(), "creators": ["Tool: flashjit tools/release.sh"]},
        "packages": packages,
        "files": [
            {
                "SPDXID": f"SPDXRef-file-{number}",
                "fileName": f"./{path.name}",
                "checksums": [
                    {
                        "algorithm": name.upper(),
                        "checksumValue": hashlib.new(name, path.read_bytes()).hexdigest(),
                    }
                    for name in ("sha1", "sha256")
                ],
                "licenseConcluded": "MIT",
                "copyrightText": "NOASSERTION",
            }
            for number, path in enumerate(files)
        ],
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": packages[0]["SPDXID"],
            },
            *(
                {
                    "spdxElementId": packages[0]["SPDXID"],
                    "relationshipType": "STATIC_LINK",
                    "relatedSpdxElement": part["SPDXID"],
                }
                for part in packages[1:]
            ),
        ],
    }
    target = pathlib.Path(folder) / f"flashjit-{version}.spdx.json"
    target.write_text(json.dumps(document, indent=2) + "\n")


def created():
    import datetime

    return datetime.datetime.fromtimestamp(EPOCH, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def try_installed(page):
    """The page's first lines in Python, and what they say that they print; without PyTorch, NumPy's way."""
    import contextlib
    import io

    import flashjit

    found = [name for name in ("gcc", "g++", "cc", "c++", "clang", "nvcc") if shutil.which(name)]
    if found:
        sys.exit(f"the PATH has compilers: {found}")
    print("flashjit", flashjit.version(), "from", flashjit.__file__)
    code = re.search(
        r"^```python\n(.*?)^```$", pathlib.Path(page).read_text(), re.DOTALL | re.MULTILINE
    ).group(1)
    try:
        import torch  # noqa: F401
    except ImportError:
        import numpy

        q, k, v = numpy.random.default_rng(0).standard_normal((3, 1, 2, 64, 32), dtype=numpy.float32)
        out, _ = flashjit.forward(q, k, v, options="causal")
        if not numpy.allclose(out[:, :, 0], v[:, :, 0], atol=1e-5):
            sys.exit("the first query's output is not its only value")
        return print("without PyTorch: attention of NumPy arrays is right")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    if printed.getvalue().splitlines() != re.findall(r"^# (.*)$", code, re.MULTILINE):
        sys.exit(f"{page} says otherwise than: {printed.getvalue()}")
    print(printed.getvalue(), end="")


PARTS = {
    "headers": headers,
    "jax-headers": jax_headers,
    "python-headers": python_headers,
    "repack": repack,
    "check-wheel": check_wheel,
    "kernels-wheel": kernels_wheel,
    "sbom": sbom,
    "try": try_installed,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])

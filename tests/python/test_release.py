"""The parts of tools/release.sh that take no compiler, and that every file has the one version."""

import gzip
import importlib.util
import io
import json
import pathlib
import re
import struct
import tarfile
import zipfile

import pytest
from flashjit import _installed

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = re.search(r"project\(flashjit VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


@pytest.fixture
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools/packaging/release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "file, wanted",
    [
        ("tools/packaging/vcpkg/flashjit/vcpkg.json", '"version": "{}"'),
        ("tools/packaging/rust/Cargo.toml", 'version = "{}"'),
        ("tools/docs/cpp-packages.md", "flashjit/{}"),
        ("tools/docs/changelog.md", "## {}"),
        ("tools/docs/compatibility.md", "such as `v{}`"),
    ],
)
def test_every_file_has_the_version(file, wanted):
    assert wanted.format(VERSION) in (ROOT / file).read_text()


def test_the_library_has_the_name_that_the_page_says():
    major, minor, _ = VERSION.split(".")
    name = f"libflashjit.so.{major if major != '0' else f'{major}.{minor}'}"
    assert f"The shared library is `{name}`" in (ROOT / "tools/docs/compatibility.md").read_text()
    assert name.encode() + b"\0" in _installed.library_path().read_bytes()


def archive(path, order, mtime):
    with tarfile.open(path, "w:gz") as tar:
        for name in order:
            member = tarfile.TarInfo(f"flashjit/{name}")
            member.size, member.mtime, member.uid = len(name), mtime, mtime
            tar.addfile(member, io.BytesIO(name.encode()))


def test_archives_of_the_same_files_are_the_same_bytes(release, tmp_path):
    archive(tmp_path / "a.tar.gz", ("one", "two"), 1)
    archive(tmp_path / "b.tar.gz", ("two", "one"), 2)
    for name in "ab":
        release.repack(tmp_path / f"{name}.tar.gz", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert gzip.decompress((tmp_path / "a").read_bytes()).count(b"flashjit/") == 2
    with tarfile.open(tmp_path / "a") as tar:
        assert tar.extractfile("flashjit/two").read() == b"two"


def wheel(folder, tag, machine=62, more=b""):
    path = folder / f"flashjit-0.1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("libflashjit.so", "flashjit", "libflashjit_jax.so", "libflashjit_torch.so"):
            file.writestr(
                f"flashjit/native/{name}", b"\x7fELF" + bytes(14) + struct.pack("<H", machine) + more
            )
    return str(path)


def test_wheels_that_are_not_what_they_should_be_are_refused(release, tmp_path):
    release.check_wheel(wheel(tmp_path, "manylinux_2_28_x86_64"), "28", "x86_64")
    release.check_wheel(wheel(tmp_path, "manylinux_2_28_aarch64", 183), "28", "aarch64")
    for tag, machine, more in (
        ("manylinux_2_25_x86_64", 62, b""),
        ("manylinux_2_31_x86_64", 62, b""),
        ("linux_x86_64", 62, b""),
        ("manylinux_2_28_x86_64", 183, b""),
        ("manylinux_2_28_x86_64", 62, b"libstdc++.so.6"),
    ):
        with pytest.raises(SystemExit):
            release.check_wheel(wheel(tmp_path, tag, machine, more), "28", "x86_64")


def test_of_jaxlib_only_the_headers_of_its_calls_are_kept(release, tmp_path):
    with zipfile.ZipFile(tmp_path / "jaxlib-1-cp312-cp312-linux_x86_64.whl", "w") as file:
        file.writestr("jaxlib/include/xla/ffi/api/ffi.h", "// calls")
        file.writestr("jaxlib/lib.so", "large")
    release.jax_headers(tmp_path, tmp_path / "include")
    kept = [path for path in (tmp_path / "include").rglob("*") if path.is_file()]
    assert kept == [tmp_path / "include/xla/ffi/api/ffi.h"] and kept[0].read_text() == "// calls"


def test_the_bill_of_materials_names_files_and_what_is_compiled_in(release, tmp_path, monkeypatch):
    monkeypatch.setattr(release, "library_version", lambda name: "1.2.3")
    (tmp_path / "cuda.h").write_text("#define CUDA_VERSION 12040\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.whl").write_text("a")
    release.sbom("0.1.0", "c0ffee", tmp_path, tmp_path / "out", "zig==1", "jaxlib==2")
    document = json.loads((tmp_path / "out/flashjit-0.1.0.spdx.json").read_text())
    versions = {package["name"]: package["versionInfo"] for package in document["packages"]}
    assert (
        versions["fmt"] == "1.2.3" and versions["cuda-headers"] == "12.4" and versions["flashjit"] == "0.1.0"
    )
    assert versions["xla-ffi-headers"] == "of jaxlib==2, in wheels"
    assert [file["fileName"] for file in document["files"]] == ["./a.whl"]
    known = {part["SPDXID"] for part in (document, *document["packages"], *document["files"])}
    for relation in document["relationships"]:
        assert {relation["spdxElementId"], relation["relatedSpdxElement"]} <= known


def test_versions_are_read_from_headers(release):
    if not (release.INCLUDE / "fmt/core.h").exists():
        pytest.skip("the libraries' headers are not in /usr/include")
    for name in release.LIBRARIES:
        assert re.fullmatch(r"\d+\.\d+\.\d+", release.library_version(name)), name

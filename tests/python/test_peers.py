"""tests/gpu/peers.py, from wheels that are there: what is kept of them, and of their libraries' device code."""

import pathlib
import shutil
import struct
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    import peers

    return peers


def elf(codes):
    """An ELF file whose section .nv_fatbin has entries of a kind, an architecture and bytes."""
    entries = b""
    for kind, architecture, code in codes:
        code += bytes(-len(code) % 8)
        head = (
            struct.pack("<HHIQ", kind, 0, 64, len(code))
            + bytes(12)
            + struct.pack("<I", architecture)
            + bytes(32)
        )
        entries += head + code
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.shstrtab\0"
    sections = [(0, 0, 0), (1, 64, len(fatbin)), (12, 64 + len(fatbin), len(names))]
    end = 64 + len(fatbin) + len(names)
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    struct.pack_into("<Q", head, 0x28, end)
    struct.pack_into("<HH", head, 0x3C, len(sections), 2)
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 0, 0) for name, at, size in sections
    )
    return bytes(head) + fatbin + names + table


def test_device_code_that_is_not_called_is_blanked(peers, tmp_path):
    mine = b"\0.text._ZN3CollectiveMainloopELi128E\0 mine"
    other = b"\0.text._ZN3CollectiveMainloopELi64E\0 other"
    codes = [
        (2, 90, mine),
        (2, 90, other),
        (2, 90, b"\0.text._Zcombine\0"),
        (2, 80, mine),
        (1, 90, b"// ptx"),
    ]
    path = tmp_path / "lib.so"
    path.write_bytes(elf(codes))
    assert [row[:2] for row in peers.device_code(path.read_bytes())] == [code[:2] for code in codes]
    peers.blank(path, "ELi128E")
    data = path.read_bytes()
    kept = [data[begin : begin + size].strip(b"\0") for _, _, begin, size in peers.device_code(data)]
    assert kept == [mine.strip(b"\0"), b"", b".text._Zcombine", b"", b""]
    assert len(data) == len(elf(codes))


def test_an_archive_has_what_is_kept_of_the_wheels(peers, tmp_path, monkeypatch):
    if not shutil.which("xz"):
        pytest.skip("there is no xz")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/big_one-1.0-py3-none-any.whl", "w") as wheel:
        for name in (
            "big/a.py",
            "big/csrc/b.cu",
            "big_one-1.0.dist-info/METADATA",
            "big_one-1.0.data/purelib/big/c.py",
        ):
            wheel.writestr(name, name)
    peer = peers.Peer(("big-one==1.0",), keep=r"big/.*\.py$", files={"more/__init__.py": "x = 1\n"})
    monkeypatch.setitem(peers.PEERS, "big", peer)
    assert peers.main(["big", "--folder", str(tmp_path)]) == 0
    files = {
        str(path.relative_to(tmp_path / "big")) for path in (tmp_path / "big").rglob("*") if path.is_file()
    }
    assert files == {"big/a.py", "big/c.py", "big_one-1.0.dist-info/METADATA", "more/__init__.py"}
    assert (tmp_path / "peers-big.tar.xz").exists()
    assert peers.main(["big", "--folder", str(tmp_path), "--part", "0.0003"]) == 0
    parts = sorted(path.name for path in tmp_path.glob("peers-big*"))
    assert len(parts) > 1 and parts[0] == f"peers-big.tar.xz.1of{len(parts)}"
    with pytest.raises(SystemExit):
        peers.main(["nothing"])


def test_jobs_name_peers_that_can_be_made(peers):
    import carry_jobs

    assert {name for job in carry_jobs.all_jobs("*") for name in job.peers} <= set(peers.PEERS)

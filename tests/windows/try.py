"""What run.sh tries under wine, with the files that tools/packaging/windows.sh built: `try.py WORK LINUX_BUILD [NAME...]`.

Each function below is a test; a failed assertion ends it. The folder of a test is empty and has a name that is not ASCII."""

import filecmp
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK, LINUX = map(pathlib.Path, sys.argv[1:3])
BUILD = WORK / "build"
COMMAND = BUILD / "tools" / "flashjit.exe"
NVRTC = WORK / "nvrtc" / "nvidia" / "cu13" / "bin" / "x86_64" / "nvrtc64_130_0.dll"
FAKES = BUILD / "tests" / "windows"
# A kernel of every family: simt, sm80 and sm90 are planned for these.
FAMILIES = "--spec fwd:bf16:d64:causal --arch sm_75,sm_80,sm_90a,sm_100a".split()
TESTS = []


def test(function):
    TESTS.append(function)
    return function


def windows(path):
    return "Z:" + str(path).replace("/", "\\")


def environment(folder, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHJIT_")}
    return kept | {"FLASHJIT_CACHE_DIR": windows(folder / "cache"), "FLASHJIT_NVRTC": windows(NVRTC)} | more


def start(folder, *arguments, **more):
    return subprocess.Popen(
        ["wine", str(COMMAND), *map(str, arguments)],
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def run(folder, *arguments, code=0, **more):
    """What the command writes to stdout."""
    process = start(folder, *arguments, **more)
    out, err = process.communicate()
    assert process.returncode == code, f"{arguments}: exit code {process.returncode}: {out!r} {err.decode()}"
    return out.decode(), err.decode()


def fake_compiler(**more):
    return {"FLASHJIT_NVRTC": windows(FAKES / "flashjit_fake_nvrtc.dll"), **more}


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@test
def c_header(folder):
    """The C header and the import library, by the C compiler."""
    program = folder / "use_c.exe"
    subprocess.run(
        ["x86_64-w64-mingw32-gcc-posix", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
        + [
            f"-I{ROOT / 'include'}",
            "-o",
            program,
            ROOT / "tests/install/use_c.c",
            BUILD / "libflashjit.dll.a",
        ],
        check=True,
    )
    shutil.copy(BUILD / "flashjit.dll", folder)
    done = subprocess.run(["wine", program], capture_output=True, text=True, env=environment(folder))
    assert done.returncode == 0 and "supports: no_driver" in done.stdout, (done.stdout, done.stderr)
    assert "nvcuda.dll" in done.stdout, done.stdout


@test
def exports(folder):
    """The DLL exports flashjit's own functions, and needs Windows' own libraries alone."""
    listing = subprocess.run(
        ["x86_64-w64-mingw32-objdump", "-p", BUILD / "flashjit.dll"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = {line.split()[-1].lower() for line in listing.splitlines() if "DLL Name:" in line}
    assert needed <= {"kernel32.dll", "advapi32.dll", "bcrypt.dll", "msvcrt.dll", "shell32.dll"}, needed
    exported = [
        line.split()[0] for line in (BUILD / "flashjit.def").read_text().splitlines()[1:] if line.strip()
    ]
    assert "flashjit_forward" in exported, exported[:5]
    assert all("flashjit" in name for name in exported), [
        name for name in exported if "flashjit" not in name
    ][:5]


@test
def usage(folder):
    assert "Usage: flashjit" in run(folder, "--help")[0]
    assert "\r" not in run(folder, "--version")[0], "the same bytes as on Linux"
    assert "there is no subcommand 'fly'" in run(folder, "fly", code=2)[1]
    found = json.loads(run(folder, "doctor", "--json", code=3)[0])
    texts = {finding["subject"]: finding for finding in found["findings"]}
    assert texts["NVRTC"]["state"] == "ok" and "nvrtc13.0.88" in texts["NVRTC"]["text"], texts
    assert texts["cache"]["state"] == "ok", texts["cache"]
    assert "nvcuda.dll" in texts["driver"]["text"], texts["driver"]
    error = json.loads(run(folder, "cache", "list", "--json", "--dir", windows(folder / "no"), code=2)[0])
    assert error["error"]["code"] == "invalid_argument" or error["error"]["code"] == "io", error


@test
def inspect(folder):
    """The source of a kernel has the same bytes as on Linux."""
    asked = ["inspect", "--spec", "fwd:bf16:d64:causal", "--arch", "sm_80", "--source"]
    here = subprocess.run(
        [LINUX / "tools" / "flashjit", *asked], capture_output=True, check=True, env=environment(folder)
    ).stdout.decode()
    there = run(folder, *asked)[0]
    assert here == there and len(here) > 1000, (here[:200], there[:200])


@test
def packs_are_equal(folder):
    """Kernels of every family by NVRTC's own DLL; the pack has the bytes that the same NVRTC makes on Linux."""
    on_windows, on_linux = folder / "windows", folder / "linux"
    run(folder, "pack", *FAMILIES, "--jobs", 2, "--out", windows(on_windows))
    subprocess.run(
        [LINUX / "tools" / "flashjit", "pack", *FAMILIES, "--jobs", "2", "--out", on_linux],
        check=True,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("FLASHJIT_")}
        | {
            "FLASHJIT_CACHE_DIR": str(folder / "linux-cache"),
            "FLASHJIT_NVRTC": os.environ.get("FLASHJIT_NVRTC", ""),
        },
    )
    names = files_of(on_linux)
    print("  ", sum(name.endswith(".cubin") for name in names), "kernels")
    assert names == files_of(on_windows), set(names) ^ set(files_of(on_windows))
    different = [n for n in names if not filecmp.cmp(on_windows / n, on_linux / n, shallow=False)]
    assert not different, different
    assert " sound, 0 files" in run(folder, "cache", "verify", "--dir", windows(on_linux))[0]
    # What is there already is not compiled again, whoever made it.
    cubins = {path: path.stat().st_ino for path in on_linux.rglob("kernel.cubin")}
    run(folder, "pack", *FAMILIES, "--out", windows(on_linux))
    assert cubins == {path: path.stat().st_ino for path in on_linux.rglob("kernel.cubin")}, "compiled again"


@test
def cache(folder):
    run(
        folder,
        "pack",
        "--spec",
        "fwd:bf16:d64",
        "--arch",
        "sm_80",
        "--out",
        windows(folder / "p"),
        **fake_compiler(),
    )
    shown = json.loads(run(folder, "cache", "list", "--json", "--dir", windows(folder / "p"))[0])
    key = shown["entries"][0]["key"]
    assert json.loads(run(folder, "cache", "show", key[:6], "--json", "--dir", windows(folder / "p"))[0])
    cubin = next((folder / "p").rglob("kernel.cubin"))
    cubin.write_bytes(b"other")
    assert run(folder, "cache", "verify", "--dir", windows(folder / "p"), code=1)
    run(folder, "cache", "verify", "--repair", "--dir", windows(folder / "p"))
    run(folder, "cache", "clear", "--records", "--yes", "--dir", windows(folder / "p"))
    assert files_of(folder / "p") == [], files_of(folder / "p")


@test
def racing_and_killed_processes(folder):
    """Six processes fill one folder, and some are killed: what is there afterwards is sound, and the rest comes then."""
    target, random_numbers = folder / "pack", random.Random(1)
    asked = [
        "pack",
        "--spec",
        "bf16:d64",
        "--spec",
        "fp16:d128:causal",
        "--arch",
        "sm_80,sm_90a",
        "--out",
        windows(target),
    ]
    slow = fake_compiler(FAKE_NVRTC_MS="30")
    for _ in range(3):
        racers = [start(folder, *asked, **slow) for _ in range(6)]
        for racer in racers[:3]:
            time.sleep(random_numbers.uniform(0.05, 0.5))
            os.killpg(racer.pid, signal.SIGKILL)
        for racer in racers[3:]:
            out, err = racer.communicate()
            assert racer.returncode == 0, (out, err)
        for racer in racers[:3]:
            racer.communicate()
        verified = run(folder, "cache", "verify", "--dir", windows(target))[0]
        assert " sound, 0 files" in verified, verified
        run(folder, "cache", "verify", "--repair", "--dir", windows(target))
        locks = [name for name in files_of(target) if name.endswith(".lock")]
        assert not locks, locks
        if random_numbers.random() < 0.7:
            shutil.rmtree(target / "v1" / "sm_80")
            (target / "v1" / "SHA256SUMS").unlink()


@test
def fake_driver(folder):
    """The command from end to end with a driver that is a DLL and computes nothing."""
    fake = fake_compiler(FLASHJIT_LIBCUDA=windows(FAKES / "flashjit_fake_cuda.dll"))
    found = json.loads(run(folder, "doctor", "--json", **fake)[0])
    assert found["kernels_can_run"], found
    rows = run(
        folder, "bench", "--spec", "fwd:bf16:d64", "--shape", "b1:hq2:hkv2:sq128:skv128", "--json", **fake
    )[0]
    assert json.loads(rows), rows


def write_npy(path, numbers, shape):
    header = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    path.write_bytes(
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(header))
        + header
        + struct.pack(f"<{len(numbers)}f", *numbers)
    )


def read_npy(path):
    data = path.read_bytes()
    begin = 10 + struct.unpack_from("<H", data, 8)[0]
    return struct.unpack(f"<{(len(data) - begin) // 4}f", data[begin:])


@test
def reference(folder):
    """The CPU reference, without a driver and NVRTC, gives what it gives on Linux."""
    numbers = random.Random(2)
    for name in "qkv":
        write_npy(folder / f"{name}.npy", [numbers.gauss(0, 1) for _ in range(2 * 24 * 16)], (1, 2, 24, 16))
    asked = ["run", "--spec", "fp32:d16:causal", "--cpu"]
    inputs = lambda place: [part for name in "qkv" for part in (f"--{name}", place(folder / f"{name}.npy"))]
    run(folder, *asked, *inputs(windows), "--out-dir", windows(folder / "there"), FLASHJIT_NVRTC="")
    subprocess.run(
        [LINUX / "tools" / "flashjit", *asked, *inputs(str), "--out-dir", folder / "here"],
        check=True,
        capture_output=True,
    )
    assert files_of(folder / "here") == files_of(folder / "there") == ["lse.npy", "out.npy"], files_of(folder)
    for name in files_of(folder / "here"):
        pairs = zip(read_npy(folder / "here" / name), read_npy(folder / "there" / name), strict=True)
        assert max(abs(x - y) for x, y in pairs) < 1e-6, name


def main():
    chosen = sys.argv[3:] or [function.__name__ for function in TESTS]
    failed = 0
    for function in TESTS:
        if function.__name__ not in chosen:
            continue
        folder = WORK / "tried" / f"{function.__name__} flüße 页"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begin = time.monotonic()
        try:
            function(folder)
            result = "passed"
        except (AssertionError, subprocess.CalledProcessError) as error:
            failed += 1
            result = f"FAILED: {error}"
        print(f"{function.__name__}: {result} ({time.monotonic() - begin:.1f} s)", flush=True)
    return failed != 0


sys.exit(main())

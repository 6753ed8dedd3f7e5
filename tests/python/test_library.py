"""The C ABI as Python sees it: struct layouts, errors, handles, the runtime's options."""

import ctypes
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import child
import flashjit
import pytest
from flashjit import _c_interface, _installed, _library, errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
STRUCTS = {
    "flashjit_" + re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower(): structure
    for name, structure in vars(_c_interface).items()
    if isinstance(structure, type) and hasattr(structure, "_fields_")
}
CODES = [
    "invalid_argument",
    "unsupported",
    "no_driver",
    "no_device",
    "no_compiler",
    "compile_failed",
    "kernel_missing",
    "io",
    "cuda",
    "internal",
]


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler to read flashjit.h with")
def test_structs_have_the_layout_of_the_header(tmp_path):
    lines = []
    for name, structure in STRUCTS.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        lines += [
            f'  printf("{name}.{member} %zu\\n", offsetof({name}, {member}));'
            for member, _ in structure._fields_
        ]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <flashjit/flashjit.h>\n#include <stdio.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\n  return 0;\n}\n"
    )
    program = tmp_path / "layout"
    subprocess.run(["cc", "-std=c11", f"-I{ROOT}/include", str(source), "-o", str(program)], check=True)
    expected = dict(
        line.split()
        for line in subprocess.run(
            [str(program)], check=True, capture_output=True, text=True
        ).stdout.splitlines()
    )
    for name, structure in STRUCTS.items():
        assert ctypes.sizeof(structure) == int(expected[name]), name
        for member, _ in structure._fields_:
            assert getattr(structure, member).offset == int(expected[f"{name}.{member}"]), f"{name}.{member}"


def test_bindings_of_python_and_rust_are_the_headers():
    subprocess.run([sys.executable, str(ROOT / "tools/make_bindings.py"), "--check"], check=True)
    assert {"flashjit_forward_args", "flashjit_jvp_args", "flashjit_rope"} <= STRUCTS.keys()
    assert _library.ELEMENT_TYPES["bf16"] == 3 and "untold" not in _library.ELEMENT_TYPES


def test_bindings_of_a_changed_header_are_refused(tmp_path):
    for folder in ("include/flashjit", "tools/python/flashjit", "tools/packaging/rust/src"):
        (tmp_path / folder).mkdir(parents=True)
        for file in (ROOT / folder).glob("*.*"):
            shutil.copy(file, tmp_path / folder)
    script = shutil.copy(ROOT / "tools/make_bindings.py", tmp_path / "tools")
    header = tmp_path / "include/flashjit/flashjit.h"
    header.write_text(header.read_text().replace("  int32_t hadamard;", "  int64_t hadamard, *more[2];"))
    refused = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert refused.returncode == 1 and "run tools/make_bindings.py" in refused.stderr
    subprocess.run([sys.executable, str(script)], check=True)
    made = (tmp_path / "tools/packaging/rust/src/c_interface.rs").read_text()
    assert "pub hadamard: i64,\n    pub more: [*mut i64; 2],\n" in made


def test_options_of_a_spec_are_the_library_s():
    pytest.importorskip("torch")
    arguments = inspect.signature(flashjit.attention).parameters
    for option, argument in _library.spec_options():
        # Options for parts of a sequence, which attention() does not have, for append(), or values of pv_sums.
        if not argument:
            assert option in ("fp32_grads", "add_grads", "dropout_place", "hadamard", "sums4", "sums_all")
            continue
        assert argument in arguments, option
        kinds = {
            "key_scales": "bf16:d64:kve4m3",
            "q_codes": "bf16:d64:kve4m3",
            "q_rope": "bf16:d96x64:shared_kv",
            "shared_prefix": "bf16:d64:varlen:pages16",
            "swizzled_scales": "bf16:d64:out{e2m1:g16:e4m3:apart:scaled}",
            "weight_mod": "bf16:d64:score{sigmoid(score)}",
        }
        kind = kinds.get(option, "bf16:d64")
        _library.spec_handle(f"{kind}{_library.options_of({argument: True}, _library.spec_options())}")
    given = {"sinks": True, "dropout_p": True, "deterministic": False}
    assert _library.options_of(given, _library.spec_options()) == ":dropout:sinks"


def test_every_code_has_an_exception():
    assert [error.code for error in errors.BY_STATUS] == CODES
    for status, name in enumerate(CODES, 1):
        assert _library.library().flashjit_status_name(status).decode() == name
    assert issubclass(errors.InvalidArgument, ValueError) and issubclass(errors.WrongType, TypeError)
    assert issubclass(errors.FileError, OSError) and issubclass(errors.Unsupported, NotImplementedError)


def test_an_error_carries_the_library_s_message():
    with pytest.raises(flashjit.InvalidArgument, match="fp16:d7") as caught:
        _library.spec_handle("fp16:d7")
    assert caught.value.code == "invalid_argument"
    assert isinstance(caught.value, flashjit.Error) and isinstance(caught.value, ValueError)


def test_specs_are_kept():
    assert _library.spec_handle("bf16:d64:causal") is _library.spec_handle("bf16:d64:causal")


def test_version():
    assert flashjit.version().count(".") == 2
    assert flashjit.__version__ == flashjit.version()


def test_a_runtime_without_a_driver_says_so(monkeypatch):
    monkeypatch.setenv("FLASHJIT_LIBCUDA", "/nonexistent/libcuda.so.1")
    runtime = flashjit.Runtime(cache_dir="", jit=False, packs=["/nonexistent"])
    for call in (
        lambda: runtime.prepare("bf16:d64", (1, 1, 1, 8, 8)),
        lambda: runtime.prepare_both("bf16:d64", (1, 1, 1, 8, 8)),
        lambda: runtime.prepare_first_calls("bf16:d64", (1, 1, 1, 8, 8)),
        lambda: runtime.workspace_bytes("bf16:d64", (1, 1, 1, 8, 8), backward=True),
    ):
        with pytest.raises(flashjit.NoDriver, match="FLASHJIT_LIBCUDA"):
            call()
    with pytest.raises(flashjit.InvalidArgument, match="4 numbers"):
        runtime.workspace_bytes("bf16:d64", (1, 1, 8, 8))


@pytest.mark.parametrize(
    "option, environment, tunes",
    [(True, "", True), (None, "on", True), (None, "", False), (False, "on", False)],
)
def test_tuning_in_the_background_is_asked_for_and_ended(fake_gpu, option, environment, tunes, tmp_path):
    """In a process that ends while it tunes: the thread ends first, so that nothing crashes."""
    code = f"""import threading, os, flashjit
runtime = flashjit.Runtime(cache_dir="", nvrtc={str(fake_gpu.folder / "libflashjit_fake_nvrtc.so")!r}, tune_in_background={option})
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
runtime.prepare("bf16:d64", (1, 2, 2, 128, 128))
print(threads() - before)"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=child.environment(FLASHJIT_TUNE_IN_BACKGROUND=environment),
    )
    assert (int(run.stdout) > 0) == tunes


def test_threads_share_specs_and_the_runtime():
    """What one thread got must not be destroyed because another made the same thing at the same time."""
    code = """import flashjit, sys, threading
from flashjit._library import spec_handle
sys.setswitchinterval(1e-6)
def seen_by_all(make):
    seen, start = [], threading.Barrier(8)
    def work():
        start.wait()
        seen.append(make())
    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    return len({id(made) for made in seen})
print(seen_by_all(flashjit.runtime), *{seen_by_all(lambda: spec_handle(f"bf16:d64:mask{{q > {n}}}")) for n in range(100)})"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=child.environment(),
    )
    assert run.stdout == "1 1\n"


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(jit="off"), "jit is 'off': give True, False, or None"),
        (dict(tune_in_background=3), "tune_in_background is 3"),
        (dict(packs="my-pack"), "packs is 'my-pack', which is one folder: give a list"),
        (dict(cache_limit="2G"), "cache_limit is a str: give a Python int"),
    ],
)
def test_a_runtime_s_options_are_checked(options, match):
    with pytest.raises(flashjit.InvalidArgument, match=match):
        flashjit.Runtime(**{"cache_dir": "", **options})


def test_a_shape_of_wrong_types_is_refused():
    with pytest.raises(flashjit.WrongType, match="a size of the shape is a str"):
        flashjit.Runtime(cache_dir="").workspace_bytes("bf16:d64", "12345")


def test_tuning_can_be_ended(fake_gpu):
    threads = len(os.listdir("/proc/self/task"))
    runtime = flashjit.Runtime(
        cache_dir="", nvrtc=fake_gpu.folder / "libflashjit_fake_nvrtc.so", tune_in_background=True
    )
    runtime.prepare("bf16:d64", (1, 2, 2, 128, 128))
    runtime.stop_tuning()
    assert len(os.listdir("/proc/self/task")) <= threads
    runtime.stop_tuning()
    runtime.prepare("bf16:d64", (1, 2, 2, 128, 256))
    assert len(os.listdir("/proc/self/task")) <= threads


def test_a_wrong_switch_is_named(monkeypatch):
    monkeypatch.setenv("FLASHJIT_TUNE_IN_BACKGROUND", "maybe")
    with pytest.raises(flashjit.InvalidArgument, match="FLASHJIT_TUNE_IN_BACKGROUND is 'maybe'"):
        flashjit.Runtime(cache_dir="")


def test_nvrtc_of_the_environment_decides(monkeypatch):
    monkeypatch.setenv("FLASHJIT_NVRTC", "/somewhere/libnvrtc.so.13")
    assert _installed.nvrtc_folder() is None


@pytest.mark.parametrize(
    ("windows", "name"),
    [
        (False, "cu13/lib/libnvrtc.so.13"),
        (True, "cu13/bin/x86_64/nvrtc64_130_0.dll"),
        (True, "cuda_nvrtc/bin/nvrtc64_120_0.dll"),
    ],
)
def test_nvrtc_is_found_in_wheels(windows, name, tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHJIT_NVRTC", raising=False)
    library = tmp_path / "nvidia" / name
    library.parent.mkdir(parents=True)
    library.touch()
    code = (
        f"from flashjit import _installed; _installed.WINDOWS = {windows}; print(_installed.nvrtc_folder())"
    )
    path = os.pathsep.join([str(tmp_path), str(pathlib.Path(flashjit.__file__).parent.parent)])
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    ).stdout.strip()
    assert found == str(library)


def test_importing_needs_neither_pytorch_nor_the_library():
    code = (
        "import sys, flashjit; assert 'torch' not in sys.modules and 'numpy' not in sys.modules; "
        "assert flashjit._library.library.cache_info().currsize == 0"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(flashjit.__file__).parent.parent)},
    )


def test_the_command_runs(tmp_path):
    script = tmp_path / "flashjit"
    script.write_text('#!/bin/sh\necho "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(flashjit.__file__).parent.parent)}
    run = subprocess.run(
        [sys.executable, "-m", "flashjit", "cache", "list"],
        capture_output=True,
        text=True,
        env={**environment, "FLASHJIT_COMMAND": str(script)},
    )
    assert (run.returncode, run.stdout) == (0, "cache list\n")
    run = subprocess.run(
        [sys.executable, "-m", "flashjit", "doctor"],
        capture_output=True,
        text=True,
        env={**environment, "FLASHJIT_COMMAND": "/nonexistent"},
    )
    assert run.returncode == 3 and "FLASHJIT_COMMAND" in run.stderr


def test_the_real_command_packs_and_lists(fake_gpu, tmp_path):
    """With the NVRTC of tests/fake, so that it needs none."""
    nvrtc, pack = fake_gpu.folder / "libflashjit_fake_nvrtc.so", tmp_path / "pack"
    packed = child.command(
        "pack", "--spec", "fwd:fp16:d64", "--arch", "sm_80", "--out", pack, FLASHJIT_NVRTC=nvrtc
    )
    assert packed.returncode == 0 and "1 of 1 kernels" in packed.stdout, packed.stderr
    entries = lambda *more, **named: json.loads(
        child.command("cache", "list", "--json", *more, **named).stdout
    )["entries"]
    assert [(entry["spec"], entry["arch"]) for entry in entries("--dir", pack)] == [("fwd:fp16:d64", "sm_80")]
    assert entries(FLASHJIT_CACHE_DIR=tmp_path / "cache") == []
    refused = child.command("pack", "--spec", "fp16:d7", "--arch", "sm_80", "--out", pack)
    assert refused.returncode == 2 and "fp16:d7" in refused.stderr


@pytest.mark.parametrize("name", ["tune", "pack", "doctor", "cache"])
def test_python_reaches_each_real_subcommand(name):
    done = child.command(name, "--help")
    assert (done.returncode, done.stderr) == (0, "") and f"Usage: flashjit {name} [OPTIONS]" in done.stdout


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["nothing"], 2, "no subcommand 'nothing'"),
        (["tune"], 2, "either --spec with --shape, or --suite"),
        (["pack", "--spec", "fp16:d64"], 2, "--arch"),
        (["cache", "list", "--nope"], 2, "--nope"),
        (["tune", "--spec", "fwd:fp16:d64", "--shape", "b1:hq1:hkv1:sq64:skv64"], 3, "FLASHJIT_LIBCUDA"),
    ],
)
def test_the_real_command_s_refusals_reach_python(arguments, code, said, tmp_path):
    done = child.command(
        *arguments, FLASHJIT_CACHE_DIR=tmp_path, FLASHJIT_LIBCUDA="/nonexistent/libcuda.so.1"
    )
    assert done.returncode == code and said in done.stderr, done.stdout


def test_the_real_command_tunes_and_checks(fake_gpu, tmp_path):
    """Over the driver and the NVRTC of tests/fake."""
    tuned = child.command(
        "tune",
        "--spec",
        "fwd:fp16:d64",
        "--shape",
        "b1:hq1:hkv1:sq64:skv64",
        FLASHJIT_CACHE_DIR=tmp_path,
        FLASHJIT_NVRTC=fake_gpu.folder / "libflashjit_fake_nvrtc.so",
    )
    assert tuned.returncode == 0 and f"records in {tmp_path}" in tuned.stdout, tuned.stderr
    assert list(tmp_path.glob("v1/tuning/*/*.json"))
    (entry,) = tmp_path.glob("v1/*/*/kernel.cubin")
    assert child.command("cache", "verify", FLASHJIT_CACHE_DIR=tmp_path).returncode == 0
    entry.write_bytes(b"damage")
    assert child.command("cache", "verify", FLASHJIT_CACHE_DIR=tmp_path).returncode == 1


def test_the_real_doctor_looks_around(tmp_path):
    """Exit code 3: kernels cannot run here, as it says."""
    done = child.command("doctor", FLASHJIT_CACHE_DIR=tmp_path)
    assert done.returncode in (0, 3) and str(tmp_path) in done.stdout, done.stderr
    assert (done.returncode == 3) == ("Kernels cannot run here" in done.stdout)
    assert (
        child.command(
            "doctor", FLASHJIT_CACHE_DIR=tmp_path, FLASHJIT_LIBCUDA="/nonexistent/libcuda.so.1"
        ).returncode
        == 3
    )

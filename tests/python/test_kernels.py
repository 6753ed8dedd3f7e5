"""Packs that come as wheels, flashjit-kernels-sm90 and others: how they are made, and that the package finds them where they are
installed. Over the fake driver and compiler."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import zipfile

import child
import pytest

pytest.importorskip("wheel.wheelfile", reason="wheel")
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "tools/packaging/kernels/models.txt"
# A first call, as far as there is no GPU: the kernel is found, checked and loaded.
PREPARE = """
import flashjit
print(flashjit._installed.installed_packs())
runtime = flashjit.Runtime(cache_dir="", jit=False)
runtime.prepare("bf16:d128:causal", (1, 16, 16, 4096, 4096))
print("prepared")
"""


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools/packaging/release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fakes():
    folder = pathlib.Path(os.environ.get("FLASHJIT_FAKES", ROOT / "build" / "tests"))
    if not (folder / "libflashjit_fake_cuda.so").exists():
        pytest.skip("the fake driver is not built: build the target flashjit_unit_tests")
    return {
        "FLASHJIT_LIBCUDA": folder / "libflashjit_fake_cuda.so",
        "FLASHJIT_NVRTC": folder / "libflashjit_fake_nvrtc.so",
        "FLASHJIT_PACKS": "",
    }


@pytest.fixture(scope="module")
def pack(fakes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack") / "sm90"
    asked = ("pack", "--spec", "fwd:bf16:d128:causal", "--arch", "sm_90a,sm_80", "--out", folder)
    done = child.command(*asked, **fakes)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(release, pack, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    release.kernels_wheel("sm90", "0.1.0", pack, MODELS, out)
    return out / "flashjit_kernels_sm90-0.1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder


def python(code, folder, fakes):
    more = {name: str(value) for name, value in fakes.items()}
    variables = {**child.environment(), **more}
    variables["PYTHONPATH"] = os.pathsep.join([*filter(None, [str(folder or "")]), variables["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=variables
    )


def test_a_wheel_holds_the_pack_and_names_its_flashjit(wheel, pack):
    with zipfile.ZipFile(wheel) as file:
        held = {name.removeprefix("flashjit_kernels/sm90/") for name in file.namelist()}
        about = file.read("flashjit_kernels_sm90-0.1.0.dist-info/METADATA").decode()
    kernels = [f"v1/{path.relative_to(pack / 'v1')}" for path in pack.glob("v1/sm_*/*/*")]
    assert len(kernels) == 6 and held >= {*kernels, "v1/SHA256SUMS"}
    assert not [name for name in held if "locks" in name]
    assert "Requires-Dist: flashjit==0.1.0\n" in about and "pages of 16" in about.partition("\n\n")[2]


def test_the_same_pack_gives_the_same_bytes(release, pack, wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        release.kernels_wheel("sm90", "0.1.0", pack, MODELS, folder)
        made.append((folder / wheel.name).read_bytes())
    assert made[0] == made[1]


def test_with_an_installed_pack_nothing_is_compiled(installed, fakes):
    done = python(PREPARE, installed, fakes)
    assert done.returncode == 0, done.stderr
    assert "prepared" in done.stdout and str(installed / "flashjit_kernels/sm90") in done.stdout


def test_without_it_the_same_call_lacks_its_kernel(fakes):
    done = python(PREPARE, None, fakes)
    assert done.stdout.startswith("[]") and "KernelMissing" in done.stderr, done.stdout + done.stderr


def test_the_doctor_tells_what_is_installed(installed, fakes):
    done = python(
        "import sys; sys.argv = ['flashjit', 'doctor']; from flashjit.__main__ import main; main()",
        installed,
        {**fakes, "FLASHJIT_COMMAND": child.built_command()},
    )
    (line,) = (line for line in done.stdout.splitlines() if " pack " in line)
    assert str(installed / "flashjit_kernels/sm90") in line and "2 kernels for sm_80 sm_90a" in line


# Calls of the models in models.txt, at other shapes than those that packing looks at: decoding, chunks of a prompt, training.
CALLS = """
import random, flashjit
window = "mask{window_left: int; kv <= q + seqlen_kv - seqlen_q && kv >= q + seqlen_kv - seqlen_q - window_left}"
served = [("d128:causal", 16, 40, 8), ("d256:causal", 16, 16, 8), ("d256:" + window, 16, 16, 8), ("d64:causal:sinks", 16, 64, 8),
          ("d64:" + window + ":sinks", 16, 64, 8), ("d576x512:causal", 64, 128, 1)]
trained = [("d128:causal", 28, 4), ("d256:causal", 16, 8), ("d192x128:causal", 128, 128), ("d64:causal", 12, 12)]
runtime = flashjit.Runtime(cache_dir="", jit=False)
random.seed(1)
for spec, page, heads, heads_kv in served:
    latent = ":shared_kv" * (page == 64)
    for queries in (1, 1, 5, 700, 2000):
        shape = (random.randint(1, 200), heads, heads_kv, queries, random.randint(2000, 90000))
        runtime.prepare(f"bf16:{spec}{':varlen' * (queries > 16)}:pages{page}{latent}", shape)
    for packing in ("", ":varlen"):
        dims = spec.partition(":")[0]
        runtime.prepare(f"append:bf16:{dims}{packing}:pages{page}", (3, heads, heads_kv, 1, 5000))
for spec, heads, heads_kv in trained:
    for packing in ("", ":varlen"):
        for backward in (False, True):
            length = random.randint(100, 30000)
            runtime.prepare(f"bf16:{spec}{packing}", (random.randint(1, 8), heads, heads_kv, length, length), backward=backward)
print("prepared")
"""


def test_the_listed_models_need_no_compiler(fakes, tmp_path):
    models = [line for line in MODELS.read_text().splitlines() if line and not line.startswith("#")]
    asked = [word for line in models for word in ("--model", line)]
    folder = tmp_path / "flashjit_kernels/sm90"
    done = child.command("pack", *asked, "--arch", "sm_90a", "--out", folder, **fakes)
    assert done.returncode == 0, done.stderr
    assert not (folder / "v1/tuning").exists()  # a runtime chooses the same by itself
    said = python(CALLS, tmp_path, {**fakes, "FLASHJIT_NVRTC": "/nowhere"})
    assert said.stdout == "prepared\n", said.stderr

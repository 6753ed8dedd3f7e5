"""The examples that need a GPU for their figures, in small sizes on the CPU: that they run, agree, and write what they say."""

import argparse
import csv
import importlib
import re

import pytest

torch = pytest.importorskip("torch")
import child  # noqa: E402
import flashjit  # noqa: E402

ROOT, run = child.ROOT, child.script


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_gpt_learns_the_same_with_both(tmp_path):
    done = run(
        "tools/examples/python/gpt.py",
        "--device",
        "cpu",
        "--steps",
        40,
        "--layers",
        1,
        "--width",
        32,
        "--heads",
        2,
        "--length",
        16,
        "--batch",
        2,
        "--rate",
        0.01,
        "--csv",
        tmp_path / "gpt.csv",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(tmp_path / "gpt.csv")
    assert len(rows) == 40 and float(rows[-1]["flashjit_loss"]) < float(rows[0]["flashjit_loss"]) - 0.1
    assert all(abs(float(row["flashjit_loss"]) - float(row["pytorch_loss"])) < 1e-2 for row in rows)


def over_codes(dtype):
    """Causal attention over a cache of 8 bits that append() fills, with a scale for each key."""

    def attention(q, k, v):
        lengths = torch.full((k.shape[0],), k.shape[2], dtype=torch.int32, device=k.device)
        cache = [
            torch.zeros_like(x, memory_format=torch.contiguous_format, dtype=torch.float32).to(dtype)
            for x in (k, v)
        ]
        scales = dict(zip(("k_scale", "v_scale"), (torch.ones(k.shape[:3], device=k.device) for _ in "kv")))
        flashjit.append(k, v, *cache, kv_lengths=lengths, **scales)
        return flashjit.attention(q, *cache, causal=True, kv_lengths=lengths, cache=True, **scales)

    return attention


@pytest.mark.slow
def test_a_gpt_s_loss_stays_with_a_cache_of_8_bits(monkeypatch):
    """Within 1%, of a model that needs its attention."""
    monkeypatch.syspath_prepend(ROOT / "tools/examples/python")
    gpt = importlib.import_module("small_gpt")
    length = 64
    # Not the repository's text, which each commit changes: stretches of 256 letters, each of three of the alphabet's.
    generator = torch.Generator().manual_seed(3)
    letters = torch.randint(97, 123, (400, 3), generator=generator)
    text = letters.gather(1, torch.randint(3, (400, 256), generator=generator)).reshape(-1).to(torch.uint8)
    options = argparse.Namespace(
        device="cpu", layers=2, width=64, heads=2, length=length, batch=8, rate=0.01, seed=1
    )
    _, _, model = gpt.train("pytorch", text, options, 200)
    begin = torch.randint(0, len(text) - length - 1, (4, 1), generator=torch.Generator().manual_seed(5))
    window = text[begin + torch.arange(length + 1)].long()

    def loss(attention):
        for block in model.blocks:
            block.attention = attention
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(
                model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
            ).item()

    exact = loss(gpt.ATTENTION["pytorch"])
    assert loss(lambda q, k, v: torch.zeros_like(q)) > 1.02 * exact
    for dtype in (torch.float8_e4m3fn, torch.int8):
        assert 1e-7 < abs(loss(over_codes(dtype)) - exact) < 0.01 * exact


def strong_model(folder, monkeypatch, sizes, std):
    """--model FILE of serve.py: each of its tokens depends on all before it."""
    monkeypatch.syspath_prepend(ROOT / "tools/examples/python")
    gpt = importlib.import_module("small_gpt")
    torch.manual_seed(1)
    model = gpt.GPT(*sizes, None)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=std)
    torch.save({"sizes": sizes, "weights": model.state_dict()}, folder / "gpt.pt")
    return ["--model", folder / "gpt.pt"]


@pytest.mark.slow
def test_serving_gives_the_tokens_of_a_padded_cache(tmp_path, monkeypatch):
    model = strong_model(tmp_path, monkeypatch, (2, 32, 2, 96), 0.5)
    small = (
        "--device",
        "cpu",
        "--prompts",
        9,
        "--wants",
        12,
        "--slots",
        4,
        "--chunk",
        20,
        "--page",
        8,
        "--pages",
        30,
    )
    done = run("tools/examples/python/serve.py", *small, *model, "--csv", tmp_path / "serve.csv")
    assert done.returncode == 0 and "100.0% of the tokens are the same" in done.stdout, (
        done.stdout + done.stderr
    )
    rows = table(tmp_path / "serve.csv")
    counts = {
        name: int([row for row in rows if row["engine"] == name][-1]["tokens"])
        for name in ("flashjit", "pytorch")
    }
    assert counts["flashjit"] == counts["pytorch"] > 9


@pytest.mark.slow
@pytest.mark.parametrize("form", ["q8_0", "int8:g32:fp16:apart", "uint8:g32:fp16:zero"])
def test_serving_from_a_cache_in_a_format(form, tmp_path, monkeypatch):
    """An answer leaves the other engine's at some token, with 4 bits soon; without what is in the cache 3% are the same."""
    options = [*strong_model(tmp_path, monkeypatch, (2, 64, 2, 96), 0.2), "--prompts", 9, "--wants", 12]
    sizes = ["--slots", 4, "--chunk", 20, "--page", 8, "--pages", 60]
    done = run("tools/examples/python/serve.py", "--device", "cpu", *options, *sizes, "--format", form)
    assert done.returncode == 0, done.stdout + done.stderr
    share = float(re.search(r"([\d.]+)% of the tokens are the same", done.stdout)[1])
    assert share >= 60, done.stdout


@pytest.mark.slow
def test_serving_trains_a_model_where_there_is_none(tmp_path):
    done = run(
        "tools/examples/python/serve.py",
        "--device",
        "cpu",
        "--steps",
        4,
        "--layers",
        1,
        "--width",
        16,
        "--heads",
        2,
        "--length",
        48,
        "--batch",
        2,
        "--prompts",
        3,
        "--wants",
        8,
        "--slots",
        2,
        "--pages",
        12,
        "--model",
        tmp_path / "gpt.pt",
    )
    assert done.returncode == 0 and "step     3" in done.stdout and (tmp_path / "gpt.pt").exists(), (
        done.stdout + done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("causal", [(), ("--causal",)])
def test_long_context_goes_on_where_a_backend_fails(tmp_path, causal):
    done = run(
        "tools/bench/long_context.py",
        "--device",
        "cpu",
        "--first",
        64,
        "--last",
        128,
        "--hidden",
        64,
        "--dims",
        32,
        "--csv",
        tmp_path / "table.csv",
        *causal,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["backend"], row["seqlen"]): row["status"] for row in table(tmp_path / "table.csv")}
    assert rows["cudnn", "64"] == "failed" and ("cudnn", "128") not in rows  # there is none on the CPU
    assert all(rows[name, length] == "ok" for name in ("flashjit", "math") for length in ("64", "128"))


@pytest.mark.slow
def test_long_context_begins_nothing_without_time(tmp_path):
    done = run(
        "tools/bench/long_context.py",
        "--device",
        "cpu",
        "--first",
        64,
        "--hidden",
        64,
        "--dims",
        32,
        "--seconds",
        0,
        "--csv",
        tmp_path / "table.csv",
    )
    assert done.returncode == 0 and {row["status"] for row in table(tmp_path / "table.csv")} == {"no time"}


@pytest.mark.slow
def test_long_context_goes_on_later_with_what_had_no_time(tmp_path):
    small = ("--device", "cpu", "--first", 64, "--hidden", 64, "--dims", 32, "--csv", tmp_path / "table.csv")
    assert run("tools/bench/long_context.py", *small, "--last", 64).returncode == 0
    before = table(tmp_path / "table.csv")
    done = run("tools/bench/long_context.py", *small, "--last", 128, "--each", 0, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(tmp_path / "table.csv")
    assert rows[: len(before)] == before and {row["status"] for row in rows[len(before) :]} == {"no time"}
    done = run("tools/bench/long_context.py", *small, "--last", 128, "--resume", "--backends", "flashjit")
    assert done.returncode == 0, done.stdout + done.stderr
    again = table(tmp_path / "table.csv")
    assert [row for row in again if row["backend"] != "flashjit"] == [
        row for row in rows if row["backend"] != "flashjit"
    ]
    assert [(row["seqlen"], row["status"]) for row in again if row["backend"] == "flashjit"] == [
        ("64", "ok"),
        ("128", "ok"),
    ]


@pytest.fixture
def long_context(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools/bench")
    return importlib.import_module("long_context")


def long_options(**changed):
    return argparse.Namespace(
        **{
            "device": "cpu",
            "dims": [64],
            "hidden": 64,
            "causal": True,
            "first": 1024,
            "last": 2**30,
            "seconds": 1000.0,
            "each": float("inf"),
            "backends": ["flashjit"],
            **changed,
        }
    )


@pytest.mark.parametrize("seconds", [1000.0, 0.2])
def test_long_context_ends_where_memory_does(long_context, monkeypatch, seconds):
    """With 100 MiB, and 10 MiB at 1k tokens, 8k tokens fit; 16k are not begun, also where there were no time for them."""
    measured = []

    def measure(options, backend, dim, length):
        measured.append(length)
        return {"status": "ok", "ms": 1.0 * (length // 1024) ** 2, "peak_mib": 10.0 * (length // 1024)}

    def reserve(device, mib):
        if mib > 100:
            raise torch.OutOfMemoryError("Tried to allocate much. Of the allocated memory nothing matters")

    monkeypatch.setattr(long_context, "measure", measure)
    monkeypatch.setattr(long_context, "reserve", reserve)
    rows = list(long_context.rows(long_options(seconds=seconds)))
    assert measured == [1024, 2048, 4096, 8192]
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["out of memory"]
    assert (
        rows[-1]["seqlen"] == 16384 and rows[-1]["note"] == "needs 0.2 GiB or more: Tried to allocate much."
    )
    assert long_context.label(rows, 64, "flashjit") == "flashjit (out of memory at 16k)"


def test_long_context_says_how_long_it_would_take(long_context, monkeypatch):
    monkeypatch.setattr(long_context, "measure", lambda *_: {"status": "ok", "ms": 5000.0, "peak_mib": None})
    rows = list(long_context.rows(long_options(each=10.0)))
    assert [(row["seqlen"], row["status"]) for row in rows] == [(1024, "ok"), (2048, "no time")]
    assert rows[-1]["note"] == "would take about 20 s"


@pytest.mark.parametrize("goes_on", [True, False])
def test_long_context_ends_where_the_gpu_is_lost(long_context, monkeypatch, goes_on):
    def measure(options, backend, dim, length):
        if backend == "cudnn" and length == 2048:
            raise RuntimeError("an illegal memory access")
        return {"status": "ok", "ms": 1.0, "peak_mib": None}

    monkeypatch.setattr(long_context, "measure", measure)
    monkeypatch.setattr(long_context, "gpu_goes_on", lambda device: goes_on)
    rows = list(long_context.rows(long_options(backends=["flashjit", "cudnn"], last=4096, dims=[32, 64])))
    statuses = [row["status"] for row in rows if row["backend"] == "cudnn" and row["head_dim"] == 32]
    assert statuses == ["ok", "failed" if goes_on else "lost the GPU"]
    ends = {row["head_dim"]: row["seqlen"] for row in rows if row["backend"] == "flashjit"}
    assert ends == (
        {32: 4096, 64: 4096} if goes_on else {32: 2048, 64: 2048}
    )  # of each length, flashjit's come first


@pytest.mark.slow
def test_the_host_bench_measures_every_row(tmp_path):
    cpp = tmp_path / "cpp.csv"  # as Google Benchmark writes it
    cpp.write_text(
        "2026-11-21T10:00:00+00:00\nRunning bench\n"
        "name,iterations,real_time,cpu_time,time_unit,bytes_per_second,items_per_second,label,error_occurred,"
        'error_message\n"Runtime::forward",100,2500,2400,ns,,,,,\n"broken",,,,,,,,true,"why"\n'
    )
    done = run(
        "tools/bench/python_host.py",
        "--without-gpu",
        "--rounds",
        20,
        "--csv",
        tmp_path / "host.csv",
        "--cpp",
        cpp,
    )
    assert done.returncode == 0, done.stderr  # also where a slow machine misses the goals
    rows = {row["what"]: float(row["value"]) for row in table(tmp_path / "host.csv")}
    assert rows.pop("import flashjit, after torch") > 0 and rows.pop("C++ Runtime::forward") == 2.5
    assert len(rows) == 21 and all(cost > 0 for cost in rows.values()) and "C++ broken" not in rows


def test_examples_are_pages_to_learn_from():
    """They have 120 lines at most; each longer one has its reason in tools/examples/README.md."""
    files = [
        path
        for path in (ROOT / "tools/examples").rglob("*.*")
        if path.suffix in (".py", ".c", ".cpp", ".h", ".hpp")
    ]
    long = {path.name for path in files if len(path.read_text().splitlines()) > 120}
    assert len(files) > 20
    assert long == {"small_llama.cpp"}


@pytest.mark.slow
def test_the_custom_attention():
    done = run("tools/examples/python/custom_attention.py")
    assert done.returncode == 0 and "so are the gradients" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_video_tiles():
    done = run("tools/examples/python/video_tiles.py")
    assert done.returncode == 0 and "the same as the matrix written out" in done.stdout, (
        done.stdout + done.stderr
    )

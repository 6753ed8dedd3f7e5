"""What the scripts of tools/bench measure and show: the same attention on both sides, and honest tile counts."""

import csv
import functools
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
np = pytest.importorskip("numpy")
import child  # noqa: E402
import flashjit  # noqa: E402
from flashjit import _installed  # noqa: E402

BENCH = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"
LENGTH, HEADS = 256, 2


@pytest.fixture(scope="module")
def variants():
    before = list(sys.path)
    sys.path[:0] = [str(BENCH)]
    yield importlib.import_module("variants")
    sys.path[:] = before


@pytest.fixture(scope="module")
def plot(variants):
    return importlib.import_module("plot")


@pytest.fixture(scope="module")
def plot_rows(plot):
    return sys.modules["plot_rows"]


@pytest.fixture(scope="module")
def plot_paper(plot):
    return sys.modules["plot_paper"]


@pytest.fixture(scope="module")
def plot_speeds(plot):
    return sys.modules["plot_speeds"]


@pytest.fixture(scope="module")
def plot_ranks(plot):
    return sys.modules["plot_ranks"]


@pytest.fixture(scope="module")
def gallery(variants):
    return importlib.import_module("gallery")


@pytest.fixture(scope="module")
def jax_figures(variants):
    return importlib.import_module("jax_figures")


@pytest.fixture(scope="module")
def eight_bits(variants):
    return importlib.import_module("eight_bits")


@pytest.fixture(scope="module")
def accuracy(variants):
    return importlib.import_module("accuracy")


@pytest.fixture(scope="module")
def accurate(accuracy):
    return importlib.import_module("accurate")


@pytest.fixture(scope="module")
def compare(variants):
    return importlib.import_module("compare")


@pytest.fixture(scope="module")
def serving(variants):
    return importlib.import_module("serving")


def all_cases(variants, length=LENGTH):
    return [*variants.cases(length, "cpu"), *variants.more_cases(1, HEADS, length, "cpu")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_both_compute_the_same_attention(variants, monkeypatch):
    monkeypatch.setattr(variants, "WINDOW", 50)
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, HEADS, LENGTH, 16) for _ in range(3))
    for case in all_cases(variants):
        mask = case.mask_mod and flex.create_block_mask(
            case.mask_mod, None, None, LENGTH, LENGTH, device="cpu"
        )
        want = flex.flex_attention(q, k, v, score_mod=case.score_mod, block_mask=mask)
        out, _ = flashjit.forward(q, k, v, options=case.parts.removeprefix(":"), captures=case.captures)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4, msg=lambda text: f"{case.name}: {text}")


def test_the_gallery_shows_what_is_measured(variants, gallery):
    measured = {case.name: case for case in all_cases(variants)}
    shown = {attention.case: attention for attention in gallery.attentions() if attention.case}
    assert shown.keys() - measured.keys() == {"butterfly"} and measured.keys() - shown.keys() == {"full"}
    for name, attention in shown.items():
        if name in ("documents", "butterfly"):
            continue  # of other documents; and not among these
        parts = measured[name].parts
        for text in filter(None, (attention.mask, attention.score)):
            text = text.replace(" grad;", ";")
            assert text in parts or (
                text == "kv <= q + seqlen_kv - seqlen_q" and parts.endswith(":causal")
            ), name


def test_the_gallerys_pictures_are_of_the_library(gallery):
    pictures = {attention.name: attention for attention in gallery.attentions()}
    row, column = np.arange(128)[:, None], np.arange(128)[None]
    assert np.array_equal(~np.isnan(pictures["Causal"].picture()), (column <= row)[None])
    assert np.array_equal(
        ~np.isnan(pictures["Sliding window"].picture()[0]), (column <= row) & (row - column < 16)
    )
    alibi = np.where(column <= row, np.exp2(-0.5) * 64 * (column - row), np.nan)
    np.testing.assert_allclose(pictures["ALiBi"].picture()[0], alibi, rtol=1e-6)
    heads = pictures["Window that grows with the head"].picture()
    assert [int((~np.isnan(head[-1])).sum()) for head in heads] == [4, 8, 16, 32]
    np.testing.assert_allclose(
        gallery.softcapped("50.0 * tanh(score / 50.0)", [50.0]), 50 * np.tanh(1), rtol=1e-6
    )


def test_the_pictures_of_other_stages_are_of_the_library(gallery):
    pictures = {program.name: program for program in gallery.gallery_stages.programs()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    scores = pictures["ReLU attention"].values
    close(pictures["Sigmoid attention"].results(), [sigmoid(scores - 2)])
    close(pictures["ReLU attention"].results(), [np.maximum(scores, 0) / 8])
    close(pictures["SiLU / n (HSTU)"].results(), [scores * sigmoid(scores) / 8])
    angles = np.arange(64)[:, None] * 10000.0 ** -(np.arange(8) / 8)
    turned = np.stack([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], -1)
    close(pictures["RoPE of a row of ones"].results(), turned.reshape(64, 16))
    weights = np.broadcast_to(np.linspace(0.5, 1.5, 16), (16, 16))
    np.testing.assert_allclose(pictures["RMS norm of a head"].results(), weights, rtol=1e-4)
    elements = pictures["Softcap of O"].values
    close(pictures["Softcap of O"].results(), [2 * np.tanh(elements / 2)])
    gated = pictures["Output gate of heads (Qwen3-Next)"].results()
    close(gated, [elements * sigmoid(gate) for gate in (-2, 0, 2)])
    rounded = [
        scale * np.clip(np.round(elements.astype("float32") / np.float32(scale)), -127, 127)
        for scale in (0.02, 0.5)
    ]
    close(pictures["Values of int8, a scale per head"].results(), rounded)
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return
    fp8 = torch.tensor(elements * 64, dtype=torch.float32).to(torch.float8_e4m3fn).float() / 64
    close(pictures["FP8 with one scale"].results(), [fp8.numpy()])
    in_fp4 = pictures["NVFP4, a scale for 16 columns"].results()[0].reshape(-1, 16)
    largest = np.abs(elements).reshape(-1, 16).max(-1, keepdims=True)
    assert (np.abs(in_fp4 - elements.reshape(-1, 16)) <= 0.19 * largest).all()


def test_tiles_are_counted(variants):
    count = lambda mask, length=1024: variants.counts(mask, length, "cpu")
    assert count(None) == (1024 * 1024, 64, 0)
    assert count(variants.causal) == (1024 * 1025 // 2, 36, 8)
    assert count(variants.causal, 2048)[1:] == (136, 16)  # in two steps
    assert count(lambda b, h, q, k: (q >= k) & (q - k < 130)) == (130 * 1024 - 129 * 130 // 2, 8 + 7 + 6, 21)
    assert count(lambda b, h, q, k: q // 128 == k // 128) == (8 * 128 * 128, 8, 0)
    assert count(lambda b, h, q, k: k < 200) == (200 * 1024, 16, 8)  # of keys alone
    assert variants.counts(None, 1000, "cpu", 192, 128)[1:] == (48, 0)
    assert variants.counts(variants.causal, 400, "cpu", 192, 128) == (400 * 401 // 2, 2 + 3 + 4, 2 + 2 + 4)


def test_costs_of_tiles(variants):
    row = lambda case, ms, tiles, batch=2: dict(
        head_dim=64,
        case=case,
        flashjit_ms=ms,
        tiles=tiles,
        partial_tiles=3,
        batch=batch,
        heads=4,
        **{"pass": "fwd"},
    )
    rows = [
        row("full", 8.0, 64),
        row("causal", 4.5, 36),
        row("short", 9.9, 9, batch=8),
        row("window_tiles", 4.95, 36),
        row("alibi", 4.95, 36),
        row("softcap", 9.0, 36),
    ]
    assert list(variants.tile_costs(rows)) == [
        "fwd d64 window_tiles: 36 tiles of 192x128, 3 of them partial; time for each: 0.50 of the short kernel's",
        "fwd d64 alibi: 36 tiles of 128x128, 3 of them partial; time for each: 1.10 of the causal kernel's, 1.10 of the full "
        "kernel's",
    ]
    assert "nothing to compare with" in next(iter(variants.tile_costs(rows[3:])))


def test_the_gallery_takes_the_rates_of_the_bias(variants, gallery, tmp_path):
    path = tmp_path / "table.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["date", "device", "commit", *variants.COLUMNS], restval="")
        writer.writeheader()
        for case in ("causal", "bias"):
            for number, name in enumerate(("fwd", "bwd")):
                writer.writerow(
                    {
                        "date": "d",
                        "device": "GPU",
                        "commit": "c",
                        "pass": name,
                        "case": case,
                        "head_dim": 128,
                        "batch": 2,
                        "heads": 16,
                        "seqlen": 8192,
                        "flashjit_tflops": 300,
                        "flex_tflops": 200,
                        "ratio": 1.5,
                        "bias_gbs": 1000 + number if case == "bias" else "",
                    }
                )
    text = gallery.section(gallery.read(path), "gallery.png")
    assert "read at forward 1000 and backward 1001 GB/s" in text.replace("\n", " ")
    (row,) = [line for line in text.splitlines() if line.startswith("| Bias of a pair")]
    assert row.count("300 / 200 = 1.50x") == 2


def test_lengths_are_those_that_a_point_has_tokens_for(compare):
    assert compare.lengths_of("320,16384") == (320, 16384)
    for text in ("0", "640,-1", "16385"):
        with pytest.raises(compare.argparse.ArgumentTypeError, match="within 1 to 16384"):
            compare.lengths_of(text)


@pytest.mark.slow
def test_the_portable_family_is_measured_with_its_own_tiles(compare, fake_gpu, tmp_path):
    """With the NVRTC of tests/fake, as only what is chosen is asked for."""
    points = [point for dim in (64, 128, 256) for point in compare.dense_points(dim, (512, 16384))]
    points += compare.other_points()
    for point in points:
        shape = f"b{point.batch}:hq{point.heads}:hkv{point.heads_kv}:sq{point.length}:skv{point.length}"
        run = child.command(
            "inspect",
            "--json",
            "--arch",
            "sm_90",
            "--spec",
            point.spec(),
            "--shape",
            shape,
            FLASHJIT_CACHE_DIR=tmp_path,
            FLASHJIT_NVRTC=fake_gpu.folder / "libflashjit_fake_nvrtc.so",
        )
        assert run.returncode == 0, run.stdout + run.stderr
        taken = {kernel["spec"][:3]: kernel["config"] for kernel in json.loads(run.stdout)["kernels"]}
        assert taken == {name: compare.sm80_tiles(point)[name, point.dim] for name in compare.PASSES}, (
            point.label()
        )


@pytest.fixture
def tuner_study(variants):
    return importlib.import_module("tuner_study")


def test_the_tuner_is_compared_with_measuring_everything(tuner_study, plot):
    times = {"a": 1.0, "b": 1.02, "c": 2.0, "d": 0}
    timings = [{"config": config, "ms": ms, "predicted_ms": 3 * ms} for config, ms in times.items()]
    heat = {"first": 40, "last": 61, "least": 39, "most": 61}
    searched = {
        "spec": "fwd:bf16:d64",
        "shape": "b1:hq1:hkv1:sq8:skv8",
        "candidates": 40,
        "measured": 6,
        "seconds": 4.321,
        "best": "b",
        "heuristic": "c",
        "clock_mhz": None,
        "celsius": {**heat, "least": 30},
        "slowed_by": "the power limit",
    }
    everything = {
        **searched,
        "best": "a",
        "timings": timings,
        "drift": 0.01,
        "celsius": heat,
        "slowed_by": "",
    }
    row = tuner_study.row(searched, everything, {"config": "d", "config_source": "heuristic"})
    assert (row["choice_slower"], row["heuristic_slower"], row["untuned_slower"]) == ("1.020", "2.000", "")
    assert (row["best_ms"], row["untuned_by"], row["rank_correlation"]) == ("1.00000", "heuristic", "1.0000")
    assert (row["clock_mhz_least"], row["celsius_least"], row["celsius_most"]) == ("", 30, 61)
    assert row["slowed_by"] == "the power limit"
    table = plot.tuner_section([row, {**row, "untuned_slower": "1.000"}])
    assert "| the tuner's choice | 1.020 | 1.020 | 0 of 2 |" in table
    assert "| a shape without its own record | 1.000 | 1.000 | 1 of 1 |" in table


def test_ranks_are_correlated(tuner_study):
    assert tuner_study.rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert tuner_study.rank_correlation([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert tuner_study.rank_correlation([1], [1]) == tuner_study.rank_correlation([1, 1], [1, 2]) == 0


def test_the_tuner_is_studied_by_its_command(tuner_study, fake_gpu, tmp_path, monkeypatch):
    """Over the drivers of tests/fake. Each problem is the other's nearest record."""
    monkeypatch.setenv("FLASHJIT_NVRTC", str(fake_gpu.folder / "libflashjit_fake_nvrtc.so"))
    problems = [("fwd:fp32:d32", f"b{batch}:hq4:hkv4:sq256:skv256") for batch in (1, 2)]
    rows = list(tuner_study.study([str(child.built_command())], problems, tmp_path, ["--families", "simt"]))
    assert [row["shape"] for row in rows] == [shape for _, shape in problems]
    assert [row["untuned"] for row in rows] == [row["choice"] for row in reversed(rows)]
    for row in rows:
        assert row["untuned_by"] == "record" and float(row["choice_slower"]) >= 1
        assert row["measured"] < row["candidates"]


def test_the_suite_of_the_study_names_pass_and_shape(tuner_study):
    problems = tuner_study.suite(tuner_study.SUITE)
    assert len(problems) == 34 and all(
        spec[:4] in ("fwd:", "bwd:") and shape[0] == "b" for spec, shape in problems
    )


def test_other_problems_are_a_table(plot_speeds):
    row = {
        "pass": "fwd",
        "dtype": "bf16",
        "head_dim": 64,
        "causal": 1,
        "batch": 4,
        "heads": 32,
        "heads_kv": 8,
        "seqlen": 4096,
        "flashjit_ms": "0.8",
        "sm80_ms": "1.0",
        "cudnn_ms": "1.0",
        "fa2_ms": "1.009",
        "fa3_ms": "",
        "fa4_ms": "0.72",
    }
    lines = plot_speeds.other_table([row, {**row, "heads_kv": 32, "dropout": "0.1000"}]).splitlines()
    assert lines[2:] == [
        "| forward | bf16, d64, causal, b4, 32/8 heads | 4k | 1.25 | 1.26 | - | 0.90 | 1.01 |",
        "| forward | bf16, d64, causal, dropout 0.1, b4, 32 heads | 4k | 1.25 | 1.26 | - | 0.90 | 1.01 |",
    ]


def test_few_queries_are_a_table(plot_speeds):
    row = {
        "seqlen_q": 1,
        "seqlen_kv": 8192,
        "batch": 4,
        "heads": 32,
        "heads_kv": 8,
        "head_dim": 128,
        "flashjit_ms": "0.0151",
        "cudnn_ms": "0.0161",
        "fa2_ms": "",
        "gbs": "2222.1",
    }
    lines = plot_speeds.few_table([row, {**row, "batch": 1, "seqlen_q": 16, "seqlen_kv": 1000}]).splitlines()
    assert lines[2:] == [
        "| 1 | 4 x 8k | 32/8 | 128 | 15.1 | 16.1 | - | - | - | 2.22 |",
        "| 16 | 1000 | 32/8 | 128 | 15.1 | 16.1 | - | - | - | 2.22 |",
    ]


def test_the_pages_show_the_committed_results(
    plot, gallery, accuracy, accurate, eight_bits, jax_figures, monkeypatch
):
    shown = []
    monkeypatch.setattr(plot, "replace", lambda path, name, text: shown.append((path, name, text)))
    monkeypatch.setattr(eight_bits, "draw", lambda rows, path: None)
    of_eight_bits = [file for file in (eight_bits.FILE, eight_bits.SPEED_FILE) if pathlib.Path(file).exists()]
    later = [eight_bits] if of_eight_bits else []
    later += [jax_figures] if pathlib.Path(jax_figures.FILE).exists() else []
    for script in (gallery, accuracy, accurate, *later):
        monkeypatch.setattr(script, "replace", plot.replace)
    for script in (plot, gallery, accuracy, accurate, *later):
        monkeypatch.setattr(sys, "argv", [script.__name__, "--tables"])
        assert script.main() == 0
    of_plot = [
        name
        for name in ("h100_paper.csv", "h200_distributed.csv", "h200_scaling.csv")
        if (BENCH / "results" / name).exists()
    ]
    assert len(shown) == 14 + len(of_plot) + len(of_eight_bits) + (jax_figures in later)
    for path, name, text in shown:
        page = pathlib.Path(path).read_text(encoding="utf-8")
        assert f"<!-- {name} -->\n{text}\n<!-- /{name} -->" in page, f"{path}: run the script again"


def test_attentions_of_jax_are_a_table(jax_figures):
    row = {"case": "causal", "dim": "64", "length": "1024", "device": "a GPU", "jax": "1.0"}
    seconds = [
        ("forward", "flashjit", "1e-3"),
        ("forward", "cudnn", "2e-3"),
        ("both passes", "flashjit", "3e-3"),
    ]
    rows = [{**row, "pass": kind, "library": name, "seconds": time} for kind, name, time in seconds]
    text = jax_figures.section(rows)
    assert text.splitlines()[-1] == "| d64 causal 1k | 1.000 | 2.00 | 3.000 | - |"
    assert "cuDNN 2.00 (forward), - (both passes)" in " ".join(text.split())


def test_the_committed_errors_are_within_their_limits(plot_rows, accuracy):
    """And each limit beyond the aim is one that they need."""
    needed = set()
    for case, errors in accuracy.measured(plot_rows.read(accuracy.FILE)).items():
        found = accuracy.ratios(errors)
        assert accuracy.beyond(case, found) == [], case
        needed |= {
            known
            for known in accuracy.KNOWN
            for tensor, (rms, largest) in found.items()
            if accuracy.limits(case, tensor) == (known.rms, known.largest)
            and known.inputs == case.inputs
            and known.tensor == tensor
            and (rms > accuracy.RMS_AIM or largest > accuracy.LARGEST_AIM)
        }
    assert needed == set(accuracy.KNOWN)


def test_errors_beyond_a_limit_are_found(accuracy):
    case = accuracy.Case("normal", "bfloat16", 64, 0)
    errors = {
        "flashjit": dict.fromkeys(accuracy.TENSORS, (1.03, 1.0)),
        "cuDNN": dict.fromkeys(accuracy.TENSORS, (1.0, 2.0)),
        "FlashAttention-2": dict.fromkeys(accuracy.TENSORS, (2.0, 0.8)),
    }
    errors["flashjit"]["dV"] = (1.0, 1.0)
    found = accuracy.ratios(errors)
    assert found["O"] == (1.03, 1.25) and accuracy.beyond(case, found) == list(accuracy.TENSORS)
    errors["flashjit"]["dV"] = (1.02, 0.96)
    assert accuracy.beyond(case, accuracy.ratios(errors)) == ["O", "dQ", "dK"]
    assert accuracy.limits(accuracy.Case("normal", "bfloat16", 256, 0), "O") == (1.05, 1.2)
    assert accuracy.limits(accuracy.Case("normal", "bfloat16", 256, 1), "O") == (1.02, 1.2)


def test_drop_ins_are_compared_with_the_same_attention(variants):
    """What python_host.py --drop-ins times: both calls of a row give the same."""
    for name, (drop_in, attention) in importlib.import_module("python_host").drop_ins("cpu").items():
        torch.testing.assert_close(drop_in(), attention(), msg=lambda text: f"{name}: {text}")


def test_the_calls_of_an_engine_agree(serving):
    """On the CPU, with pages in a random order, and lengths that are alike and that are not."""
    for lengths in ([128, 128], [5, 130, 64]):
        problem = serving.Problem("small", 16, 4, 2, 3, lengths)
        calls = serving.calls_of(problem, [serving.Cache(problem, "cpu")], flashjit, None, (1, 8, 16))
        assert list(calls) == [
            "contiguous",
            "invariant",
            "pages1",
            "pages8",
            "pages16",
            "e4m3",
            "e4m3_pages16",
        ]
        outs = {name: function().float() for name, (function,) in calls.items()}
        for name, out in outs.items():
            limit = 0.1 if "e4m3" in name else 1e-3
            torch.testing.assert_close(out, outs["contiguous"], atol=limit, rtol=limit)


def test_captures_fill_the_struct_of_the_library(variants):
    measuring = importlib.import_module("measuring")
    tensor, number = measuring.capture_array({"ids": torch.zeros(8, 3, dtype=torch.int32), "step": 2})
    assert tensor.rank == 2 and list(tensor.size[:3]) == [8, 3, 0] and list(tensor.stride[:2]) == [3, 1]
    assert number.name == b"step" and number.scalar == 2.0


def test_masks_of_requests_are_checked_against_pytorch(serving):
    """On the CPU, where nothing is timed: as drafts and as a prefill, each with every mask it has."""
    masks = importlib.import_module("serving_masks")
    report = importlib.import_module("compare").Report(None, [], {})
    for queries, least in ((3, 5), (512, 5)):
        problem = serving.Problem("small", 16, 4, 2, queries, [512] * 2)
        assert len(masks.masks_of(flashjit, problem, "cpu")) == least
        masks.run_problem(report, problem, flashjit, 1, "cpu")
    assert report.failures == []


def test_the_calls_over_latents_agree(serving):
    """On the CPU: pages in a random order, and lists of all keys, which are dense attention."""
    latent = importlib.import_module("latent")
    for problem in (latent.Problem("decode", 8, 2, 1, 64), latent.Problem("sparse decode", 8, 2, 1, 128, 16)):
        outs = {
            name: function()
            for name, (function,) in latent.calls_of(problem, flashjit, None, 1, "cpu").items()
        }
        assert list(outs) == ["ours", "pages64"]
        torch.testing.assert_close(outs["ours"], outs["pages64"], atol=1e-3, rtol=1e-3)
    torch.manual_seed(0)
    (sparse,) = latent.calls_of(latent.Problem("sparse prefill", 4, 1, 3, 32, 32), flashjit, None, 1, "cpu")[
        "ours"
    ]
    torch.manual_seed(0)
    (dense,) = latent.calls_of(latent.Problem("dense prefill", 4, 1, 3, 32), flashjit, None, 1, "cpu")["ours"]
    torch.testing.assert_close(sparse(), dense(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_of_latents_is_that_of_other_libraries(serving, causal):
    latent = importlib.import_module("latent")

    def other(q, k, v, causal):
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(
            1, 2
        )

    calls = latent.prefill_calls(latent.Prefill(2, 2, 40, causal), flashjit, other, "cpu")
    torch.testing.assert_close(calls["ours"][0](), calls["fa3"][0](), atol=2e-2, rtol=2e-2)


class OnCpu:
    """In place of a problem for flashjit, where there is no GPU: PyTorch's attention in fp32."""

    def __init__(
        self,
        runtime,
        spec,
        q,
        k,
        v,
        dout,
        block_map=None,
        tiles=None,
        passes=("fwd", "bwd"),
        dropout=0.0,
        kv_lengths=None,
    ):
        self.inputs, self.dout = tuple(x.float().requires_grad_() for x in (q, k, v)), dout.float()
        self.keep = (
            None if kv_lengths is None else (torch.arange(k.shape[2]) < kv_lengths[:, None])[:, None, None]
        )

    def forward(self):
        self.out = torch.nn.functional.scaled_dot_product_attention(*self.inputs, attn_mask=self.keep)

    def backward(self):
        self.gradients = torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self):
        return {"out": self.out.detach(), **dict(zip(("dq", "dk", "dv"), self.gradients))}


@pytest.fixture
def paper(variants, monkeypatch):
    """The script with small sizes, on the CPU."""
    paper = importlib.import_module("paper")
    once = lambda calls: {name: (function(), 1.5)[1] for name, function in calls.items()}

    def with_memory(make):
        problem = make()
        problem.forward()
        problem.backward()
        return problem, 12.0

    for name, value in dict(
        DEVICE="cpu",
        BATCH=2,
        HEADS=2,
        DIM=16,
        GPT2=(2, 2, 64, 16),
        SPARSE_LENGTH=256,
        Ours=OnCpu,
        medians=once,
        with_memory=with_memory,
    ).items():
        monkeypatch.setattr(paper, name, value)
    monkeypatch.setattr(
        paper.compare, "scattered_map", lambda length, density: torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return paper


ABOUT = {"date": "d", "device": "GPU", "commit": "c"}


def test_the_papers_tables(paper, plot_rows, plot_paper, tmp_path, monkeypatch):
    report = paper.Report(tmp_path / "table.csv", list(ABOUT) + paper.TABLE, ABOUT)
    backends = dict(paper.BACKENDS)

    class Crowded(paper.Peer):
        def __init__(self, backend, q, *rest):
            if q.shape[2] > 32:
                raise torch.OutOfMemoryError("no room")
            super().__init__(paper.SDPBackend.MATH, q, *rest)

    monkeypatch.setattr(
        paper, "BACKENDS", {name: paper.SDPBackend.MATH for name in backends if name != "math"}
    )
    original = paper.makers_of
    monkeypatch.setattr(
        paper,
        "makers_of",
        lambda runtime, length, dropout, mask: {
            **original(runtime, length, dropout, mask),
            "math": lambda: Crowded(None, *paper.tensors(2, 2, length, 16)),
        },
    )
    paper.tables(None, report, (32, 64), paper.time.monotonic() + 60)
    assert report.failures == []
    report.file.close()
    rows = plot_rows.read(tmp_path / "table.csv")
    assert len(rows) == 2 * 4 * 2 and {row["notes"] for row in rows if row["seqlen"] == 64} == {
        "math: out of memory"
    }
    text = plot_paper.paper_table(rows, [("both", "ms", ("fwd", "bwd"))], dropout="0.0000", mask="0")
    assert "| both, flashjit | 3 | 3 |" in text and "| both, math | 3 | OOM |" in text
    assert plot_paper.paper_curve(rows, "math", "mb", dropout="0.1000", mask="1") == {32: 12.0}
    paper.tables(None, report, (128,), paper.time.monotonic() - 1)
    assert len(report.failures) == 4 and "not reached: 128" in report.failures[0]


def test_a_result_of_the_papers_tables_that_is_wrong_is_a_failure(paper, monkeypatch):
    report = paper.Report(None, paper.TABLE, ABOUT)
    monkeypatch.setattr(paper, "BACKENDS", {"efficient": paper.SDPBackend.MATH})
    monkeypatch.setattr(
        OnCpu,
        "results",
        lambda self: {"out": 1.1 * self.out.detach(), **dict(zip(("dq", "dk", "dv"), self.gradients))},
    )
    paper.table_point(None, report, 0.0, True, 64, {})
    assert len(report.failures) == 1 and "mask: out" in report.failures[0]
    slow = {"efficient": 1e9}
    paper.table_point(None, report, 0.0, False, 64, slow)
    assert (
        "efficient: not run, about 1000000 s a call" in report.rows[-1]["notes"] and len(report.failures) == 1
    )


def test_the_papers_figure(paper, plot_rows, plot_paper, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(paper, "BACKENDS", {name: paper.SDPBackend.MATH for name in paper.BACKENDS})
    count = len(list(paper.traffic_cases(None)))
    counted = [dict(zip(paper.METRICS, (1e9, 2e9, 5e9)))] * count
    files = []
    for name, found in (("counted", counted), ("computed", [])):
        monkeypatch.setattr(paper, "counters", lambda library, cases: (found, "" if found else "forbidden"))
        report = paper.Report(tmp_path / f"{name}.csv", list(ABOUT) + paper.FIGURE, ABOUT)
        paper.figure(None, report, "lib")
        report.file.close()
        files.append(plot_rows.read(tmp_path / f"{name}.csv"))
        assert [row["part"] for row in report.rows] == ["standard"] * 4 + ["dense"] + ["density"] * len(
            paper.DENSITIES
        )
    assert (files[0][0]["device_gb"], files[0][0]["l2_gb"], files[0][0]["traffic"]) == (
        "3.0000",
        "5.0000",
        "counted",
    )
    assert files[1][0]["traffic"] == "computed" and files[1][4]["device_gb"] == ""
    table = paper.Report(tmp_path / "table.csv", list(ABOUT) + paper.TABLE, ABOUT)
    paper.tables(None, table, (32, 64), paper.time.monotonic() + 60)
    table.file.close()
    rows = plot_rows.read(tmp_path / "table.csv")
    for figure, source in zip(files, ("counted by ncu", "the least, computed")):
        plot_paper.draw_paper(rows, figure, tmp_path / "paper.png")
        assert f"Traffic: {source}." in plot_paper.paper_section(rows, figure)
    assert (tmp_path / "paper.png").stat().st_size > 10000


def test_counters_are_read_case_by_case(paper):
    header = '"ID","Process ID","Kernel Name",' + ",".join(f'"{name}"' for name in paper.METRICS)
    text = "\n".join(
        [
            "==PROF== Connected",
            header,
            '"","","","byte","byte","byte"',
            '"0","7","spin_kernel(long)","1","1","1"',
            '"1","7","forward","1,000","20","5"',
            '"2","7","backward","10","0","5"',
            '"3","7","spin_kernel(long)","1","1","1"',
            '"4","7","x","3","4","5"',
        ]
    )
    assert [list(case.values()) for case in paper.parse_counters(text)] == [[1010, 20, 10], [3, 4, 5]]
    assert paper.parse_counters("==ERROR== ERR_NVGPUCTRPERM") == []


def test_eight_bits_are_measured_against_what_their_codes_mean(eight_bits):
    """On the CPU, whose results are exact but for the rounding of the codes."""
    torch = pytest.importorskip("torch")
    rows = {
        row["method"]: row
        for row in eight_bits.measure_case(
            "outliers", 128, True, 512, {"flashjit": eight_bits.flashjit_method}, "cpu", heads=1
        )
    }
    assert rows["flashjit"]["kernel"] < 1e-6 and rows["flashjit"]["rel"] == pytest.approx(
        rows["inputs"]["rel"], rel=1e-3
    )
    assert 0.02 < rows["inputs hadamard"]["rel"] < rows["inputs"]["rel"]  # which spreads the outliers
    assert [x.float().mean().item() for x in eight_bits.draw_inputs("mean", 512, 64, "cpu")] == pytest.approx(
        [0, 0, 2], abs=0.05
    )
    x = torch.randn(1, 1, 5, 96, dtype=torch.float64)
    turned = eight_bits.hadamard(x).double()
    assert torch.allclose(turned @ turned.mT, x @ x.mT, atol=1e-5)  # the same scores
    table = eight_bits.table(
        [
            {
                "inputs": "normal",
                "head_dim": 128,
                "causal": 0,
                "seqlen": 4096,
                "method": name,
                "rel": "0.0468",
            }
            for name in ("inputs", "flashjit")
        ]
    )
    assert table.splitlines()[-1] == "| normal, full, 4k | 46.8 | 46.8 |"
    speeds = eight_bits.speed_table(
        [
            {"head_dim": 128, "causal": causal, "seqlen": 4096, "method": name, "tflops": f"{900 + causal}"}
            for name in ("flashjit", "fa3")
            for causal in ((0, 1) if name == "flashjit" else (0,))
        ]
    )
    assert speeds.splitlines()[-1] == "| d128, 4k | 900, 901 | 900, - |"
    far = {"method": "flashjit", "kernel": "0.031"}
    assert eight_bits.beyond([far, {**far, "kernel": "0.026"}, {**far, "method": "fa3"}]) == [far]


@pytest.mark.slow
@pytest.mark.parametrize("mask, given", [("causal", []), ("full", ["--full"])])
def test_the_scaling_run_works_on_the_cpu(plot_ranks, tmp_path, mask, given):
    """Four ranks and all schemes, from the command to the table."""
    path = tmp_path / "scaling.csv"
    run = subprocess.run(
        [
            sys.executable,
            BENCH / "distributed.py",
            "--cpu",
            "--gpus",
            "4",
            "--tokens",
            "16",
            "--repeats",
            "1",
            "--csv",
            path,
            *given,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=child.environment(FLASHJIT_LIBRARY=_installed.library_path()),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["scheme"], row["pass"]) for row in rows] == [
        (scheme, passes) for scheme in plot_ranks.SCHEMES for passes in ("forward", "both")
    ]
    assert {row["mask"] for row in rows} == {
        mask
    } and f"| 0k | {mask} | `ring` | both |" in plot_ranks.shared_section(rows)
    assert all(float(row["ms"]) > 0 and float(row["predicted_ms"]) > 0 for row in rows)
    assert "| `two_level` | both |" in plot_ranks.scaling_section(rows, "scaling.png")
    pytest.importorskip("matplotlib")
    plot_ranks.draw_scaling(rows, tmp_path / "scaling.png")


def test_maps_of_videos_keep_what_neighbours_keep():
    blocks = importlib.import_module("block_lists")
    union = lambda kept: (kept[:, 0::2] | kept[:, 1::2]).float().mean() / kept.float().mean()
    video, chance = (make(2, 64, 0.125).bool() for make in (blocks.video_map, blocks.random_map))
    assert (video.sum(2) == 8).all() and (chance.sum(2) == 8).all()
    assert union(video) < 1.6 < union(chance)
    assert (blocks.window_map(2, 64, 0.125).sum(2) == 8).all()
    sizes = blocks.block_sizes(64, 4)
    kept = blocks.pairs_kept(video[None], sizes, 256)
    assert (
        kept.shape == (256, 256)
        and not kept[:, 3].any()
        and kept.sum() == 16 * video[0].sum() - (4 * video[0, :, ::8].sum())
    )


def test_a_model_s_logits_over_cache_formats(tmp_path):
    """The GPT's logits are near those over a bf16 cache, nearer with more bits."""
    script, table = BENCH / "kv_perplexity.py", tmp_path / "table.csv"
    sizes = "--layers 1 --width 32 --heads 1 --length 32 --batch 2 --windows 2 --steps 3"
    formats = ["--formats", "q8_0", "q4_0", "uint2:keys32:fp16:min"]
    subprocess.run(
        [sys.executable, script, *sizes.split(), *formats, "--csv", table],
        check=True,
        env=child.environment(),
    )
    rows = list(csv.DictReader(table.open()))
    errors = [float(row["logit_error"]) for row in rows]
    assert errors[0] == 0 < errors[1] < errors[2] < errors[3] < 0.5
    assert all(abs(float(row["perplexity"]) / float(rows[0]["perplexity"]) - 1) < 0.05 for row in rows)

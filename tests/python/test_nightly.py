"""What tools/bench/nightly.py sees fall, on the tables of tools/bench/results and on copies that are slower."""

import csv
import importlib.util
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/bench/nightly.py"
RESULTS = ROOT / "tools/bench/results"


@pytest.fixture
def nightly():
    spec = importlib.util.spec_from_file_location("nightly", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tables(tmp_path):
    """A night that measured what the pages show."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("dense", "dense_few", "dense_other", "serving", "variants"):
        shutil.copy(RESULTS / f"h200_{name}.csv", folder / f"{name}.csv")
    return folder


def slower(path, column, factor, **only):
    rows = list(csv.DictReader(path.open()))
    for row in rows:
        if row[column] and all(row[name] == value for name, value in only.items()):
            row[column] = str(float(row[column]) * factor)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def run(tables, history):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--tables", tables, "--history", history],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_same_figures_pass_and_are_kept(tables, tmp_path):
    for night in (1, 2):
        code, said = run(tables, tmp_path / "history.csv")
        assert code == 0 and ", 0 fell" in said, said
        rows = list(csv.DictReader((tmp_path / "history.csv").open()))
        assert len(rows) == night * len({(row["table"], row["group"], row["peer"]) for row in rows})
    assert {row["table"] for row in rows} == {"dense", "few", "other", "serving", "variants", "first call"}
    assert all(float(row["ratio"]) > 0 and row["date"] and row["commit"] for row in rows)


@pytest.mark.parametrize("factor, code", [(1.02, 0), (1.05, 1), (0.9, 0)])
def test_a_fall_of_more_than_three_percent_fails(tables, tmp_path, factor, code):
    slower(tables / "dense.csv", "flashjit_ms", factor, head_dim="128", causal="1", **{"pass": "bwd"})
    found, said = run(tables, tmp_path / "history.csv")
    assert found == code, said
    if code:
        assert "pass bwd head_dim 128 causal 1, next to cudnn" in said and "(-4.8%)" in said
        assert "head_dim 64" not in said


def test_a_slower_first_call_fails(tables, tmp_path):
    slower(tables / "variants.csv", "flashjit_compile_ms", 1.1)
    code, said = run(tables, tmp_path / "history.csv")
    assert code == 1 and "first call, pass fwd, next to flex" in said


def test_many_small_steps_are_seen(nightly, tables):
    """No night is 3% below the last ones, but in the end below the page's."""
    published = nightly.ratios(RESULTS, "h200_")
    history, failed = [], []
    for _ in range(8):
        slower(tables / "serving.csv", "contiguous_us", 1.01)
        rows = nightly.ratios(tables)
        failed.append(bool(nightly.fallen(rows, history, published)))
        assert not nightly.fallen(rows, history[-len(rows) :], [])
        history += rows
    assert not any(failed[:3]) and all(failed[3:])


def test_a_night_is_compared_with_the_median_of_the_last(nightly):
    row = dict(device="d", commit="c", table="t", group="g", peer="p", points=2, ratio=1.0)
    history = [{**row, "ratio": ratio} for ratio in (9, 9, 9, 1.0, 1.5, 1.0, 1.02, 0.7)]
    assert not nightly.fallen([row], history, [])
    (sentence,) = nightly.fallen([{**row, "ratio": 0.96}], history, [])
    assert "0.960 after 1.000, the median of 5 nights" in sentence
    for other in ({"device": "e"}, {"points": 3}, {"peer": "q"}):  # nothing to compare with
        assert not nightly.fallen([{**row, "ratio": 0.1, **other}], history, [])


def test_what_is_measured_is_what_is_compared(nightly, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        nightly.subprocess,
        "run",
        lambda command: (
            asked.append(command) or subprocess.CompletedProcess(command, 0 if len(asked) < 3 else 3)
        ),
    )
    assert nightly.measure("lib.so", tmp_path) == 3
    for command, script in zip(asked, ("compare.py", "serving.py", "variants.py"), strict=True):
        assert command[1].endswith(script) and command[2:4] == ["--lib", "lib.so"]
    # compare.py names its other tables after the first
    files = {table.file for table in nightly.TABLES.values()}
    assert files == {"dense.csv", "dense_few.csv", "dense_other.csv", "serving.csv", "variants.csv"}


def test_nothing_to_compare_is_no_success(tmp_path):
    code, said = run(tmp_path, tmp_path / "history.csv")
    assert code == 1 and "no table" in said

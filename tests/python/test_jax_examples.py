"""The example and the measurement of flashjit.jax, in small sizes: that they run, agree, and write what they say."""

import csv
import functools
import re

import pytest

pytest.importorskip("jax_reference")
import child  # noqa: E402

run = functools.partial(child.script, timeout=600)


@pytest.mark.parametrize("example", ["gpt_jax", "gpt_nnx"])
def test_a_gpt_learns_the_same_with_both(example):
    if example == "gpt_nnx":
        pytest.importorskip("flax")
        pytest.importorskip("optax")
    sizes = "--layers 1 --width 32 --heads 2 --length 16 --batch 2 --rate 0.01 --steps 40".split()
    done = run(f"tools/examples/python/{example}.py", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs, apart = done.stdout.splitlines()
    losses = [float(line.partition("loss ")[2].split()[0]) for line in (ours, theirs)]
    # From log(256) = 5.5 on; the text is that of the pages, which change.
    assert max(losses) < 5.3 and abs(losses[0] - losses[1]) < 1e-2, done.stdout
    assert apart.startswith("the losses are at most 0.0")


@pytest.mark.slow
def test_libraries_are_measured_by_the_same_results(tmp_path):
    done = run(
        "tools/bench/jax_attention.py",
        *f"--small --repeats 1 --rounds 1 --csv {tmp_path / 'jax.csv'}".split(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "jax.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == {"full", "causal", "window", "bias", "ALiBi"}
    for library in ("flashjit", "xla"):
        assert sum(row["library"] == library for row in rows) == 10
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_snippets_of_the_page_run_in_order():
    page = (child.ROOT / "tools/docs/jax.md").read_text(encoding="utf-8")
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(code.replace("(2, 1024, 16, 128)", "(2, 128, 16, 128)"), names)  # the page's length for the CPU
    assert "k_scales" in names

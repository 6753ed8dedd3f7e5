"""Errors on a GPU beside those of PyTorch's FlashAttention-2 and cuDNN, on the same inputs: tools/docs/accuracy.md's rule, with the
limits of tools/bench/accuracy.py, over a part of its cases. Skips where no GPU is."""

import importlib
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

import flashjit  # noqa: E402

BENCH = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"
sys.path.insert(0, str(BENCH))
accuracy = importlib.import_module("accuracy")
sys.path.remove(str(BENCH))

CASES = [
    *(
        accuracy.Case(inputs, "bfloat16", dim, causal)
        for inputs in accuracy.INPUTS
        for dim in (64, 128, 256)
        for causal in (0, 1)
    ),
    accuracy.Case("normal", "float16", 128, 0),
    accuracy.Case("outliers", "float16", 64, 1),
    accuracy.Case("normal", "bfloat16", 128, 1, seqlen=333),
    accuracy.Case("normal", "bfloat16", 128, 0, heads=8, heads_kv=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_as_small_as_the_peers(case):
    errors = accuracy.measure(case, flashjit.attention)
    if len(errors) == 1:
        pytest.skip("neither peer computes this here")
    found = accuracy.ratios(errors)
    assert accuracy.beyond(case, found) == [], found

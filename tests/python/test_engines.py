"""A serving engine's layer by _engines: steps that only decode are calls of one query each, with the results of packed ones."""

import pytest

torch = pytest.importorskip("torch")

from flashjit import _engines  # noqa: E402
from vllm_standin import DEVICE, ints, normal  # noqa: E402

HQ, HKV, DIM, PAGE = 4, 2, 32, 16
LENGTHS = (20, 7, 33, 0)  # keys, with the new one; the last sequence pads a captured graph


def decoding(lengths=LENGTHS):
    offsets = torch.tensor([0, *[int(n > 0) for n in lengths]]).cumsum(0).int().to(DEVICE)
    table = ints(*range(3 * len(lengths))).view(len(lengths), 3)
    return _engines.Batch(offsets, ints(*lengths), table, 1, max(lengths))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


@pytest.mark.parametrize("options", [{}, {"left": 9, "softcap": 20.0}, {"slopes": (0.5, 0.25, 0.1, 0.0)}])
def test_steps_that_decode_have_the_results_of_packed_ones(options):
    options = {name: normal(HQ).new_tensor(x) if name == "slopes" else x for name, x in options.items()}
    batch, q = decoding(), normal(len(LENGTHS), HQ, DIM)
    k, v = (normal(3 * len(LENGTHS), HKV, PAGE, DIM) for _ in "kv")
    assert batch.only_decodes(q)
    results = []
    for invariant in (True, False):  # which is always packed, and which is not
        out = torch.full_like(q, float("nan"))
        given, lse = _engines.Layer(0.2, **options, batch_invariant=invariant).attend(
            q, k, v, batch, out, wants_lse=True
        )
        assert given is out and lse.shape == (HQ, len(LENGTHS))
        results.append((out, lse))
    rows = slice(0, 3)
    for packed, alone, wide in zip(*results, (False, True), strict=True):
        expected, found = (x[:, rows] if wide else x[rows] for x in (packed, alone))
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert (results[1][0][3] == 0).all()


def test_only_whole_steps_of_one_query_each_are_taken_so():
    batch, q = decoding(), normal(len(LENGTHS), HQ, DIM)
    assert not batch.only_decodes(q[:3])  # rows and sequences differ
    for other in (
        {"table": None},
        {"most_q": 2},
        {"prefix": ints(16)},
        {"ranges": ints(*[-1] * 8).view(4, 2)},
        {"tree": _engines.Tree(ints(*[1] * 4).long().view(4, 1), ints(*[0] * 4).view(4, 1))},
    ):
        assert not batch._replace(**other).only_decodes(q)

"""tools/bench/simulator.py: its counts against counting, and what any timeline must keep to."""

import pathlib
import random
import sys

import pytest

pytest.importorskip("torch")
from flashjit import distributed  # noqa: E402
from flashjit._chunks import Chunk, chunks  # noqa: E402
from flashjit.errors import InvalidArgument  # noqa: E402

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"))
import simulator  # noqa: E402
from simulator import Machine, Problem, pairs, simulate  # noqa: E402


def test_pairs_are_those_that_attend():
    draw = random.Random(1)
    for _ in range(2000):
        q, kv = (Chunk(0, draw.randint(1, 9), draw.randint(0, 12)) for _ in range(2))
        window = draw.choice([None, 1, 2, 3, 5, 20])
        found = sum(
            1
            for i in range(q.first, q.last + 1)
            for j in range(kv.first, kv.last + 1)
            if j <= i and (window is None or i - j < window)
        )
        assert pairs(q, kv, True, window) == found, (q, kv, window)
        assert pairs(q, kv, False, None) == q.rows * kv.rows


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_pairs_are_computed_once(layout, ranks):
    tokens = 48 * ranks
    everyone = [c for rank in range(ranks) for c in chunks(rank, ranks, tokens // ranks, layout)]
    assert sum(pairs(a, b, True, None) for a in everyone for b in everyone) == tokens * (tokens + 1) / 2


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("scheme", simulator.SCHEMES)
def test_timelines(scheme, backward):
    for ranks in (2, 8, 64) if scheme != "two_level" else (8, 64):
        inner = 4 if scheme == "two_level" else 1
        if scheme == "ulysses" and ranks > 32:
            continue
        plan = simulate(Problem(65536), ranks, scheme, backward=backward, inner=inner, keep_events=True)
        assert 0 < plan.efficiency < 1 and plan.waiting >= 0
        assert max(event.end for event in plan.events if event.what != "send") <= plan.seconds * (1 + 1e-9)
        for rank in range(ranks):
            own = sorted((e.begin, e.end) for e in plan.events if e.rank == rank and e.what != "send")
            assert all(a[1] <= b[0] + 1e-12 for a, b in zip(own, own[1:]))


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(ranks=0), "ranks is 0"),
        (dict(ranks=-2), "ranks is -2"),
        (dict(ranks="8"), "ranks is '8'"),
        (dict(ranks=3), "pad it to 65538"),
        (dict(problem=Problem(-8)), "tokens is -8"),
        (dict(problem=Problem(65536, heads_kv=0)), "heads_kv is 0"),
        (dict(problem=Problem(65536, heads_kv=5)), "heads is 32 and problem.heads_kv 5"),
        (dict(problem=Problem(65536, dim=0)), "dim is 0"),
        (dict(problem=Problem(65536, window=0)), "window is 0"),
        (dict(layout="x"), "layout is 'x'"),
        (dict(scheme="x"), "scheme is 'x'"),
        (dict(scheme="two_level", inner=3), "inner is 3"),
        (dict(scheme="two_level", inner=0), "inner is 0"),
        (dict(machine=Machine(link_bytes=-1)), "link_bytes is -1"),
        (dict(machine=Machine(forward_flops=0)), "forward_flops is 0"),
        (dict(machine=Machine(forward_flops=float("nan"))), "forward_flops is nan"),
        (dict(machine=Machine(ranks_of_host=0)), "ranks_of_host"),
    ],
)
def test_what_makes_no_sense_is_refused(changed, words):
    with pytest.raises(InvalidArgument, match=words):
        simulate(**{"problem": Problem(65536), "ranks": 8, **changed})
    if not {"inner", "scheme"} & changed.keys() and "pad" not in words:
        named = {"problem": Problem(65536), "ranks": 8, **changed}
        with pytest.raises(InvalidArgument, match=words):
            simulator.plans(named.pop("problem"), named.pop("ranks"), **named)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--ranks 0", "ranks is 0"),
        ("--link-bytes 0", "link_bytes is 0"),
        ("--tokens abc", "invalid whole_numbers"),
        ("--layout x", "invalid choice"),
    ],
)
def test_the_command_names_mistakes(arguments, words, capsys):
    with pytest.raises(SystemExit):
        simulator.main(arguments.split())
    assert words in capsys.readouterr().err


def test_the_documented_command_runs(capsys):
    command = next(line for line in simulator.__doc__.splitlines() if "simulator.py --tokens" in line)
    assert simulator.main(command.split("simulator.py")[1].replace(",512", "").split()) == 0
    assert "ring" in capsys.readouterr().out


def test_zigzag_is_balanced_and_contiguous_is_not():
    times = {
        layout: simulate(Problem(1 << 20), 8, "ring", layout).seconds for layout in ("zigzag", "contiguous")
    }
    assert 1.7 < times["contiguous"] / times["zigzag"] < 2


def test_a_slow_link_is_what_a_ring_waits_for():
    problem, slow = Problem(65536), Machine(link_bytes=1e9)
    plan = simulate(problem, 4, "ring", machine=slow)
    assert plan.seconds == pytest.approx(3 * problem.kv_bytes(65536 // 4) / 1e9, rel=0.3)
    assert simulate(problem, 4, "ring").waiting < 0.1 * plan.waiting


def test_the_best_scheme_depends_on_the_machine():
    def fastest(problem, ranks=8, **options):
        return simulator.plans(problem, ranks, **options)[0].scheme

    problem = Problem(262144)
    assert fastest(problem) == "ulysses"
    odd = problem._replace(heads=30, heads_kv=10)  # which do not divide into 8 ranks
    assert fastest(odd) == "all_gather" and fastest(odd, machine=Machine(link_bytes=30e9)) == "ring"
    assert simulator.plans(problem, 8, machine=Machine(capacity=3 * problem.q_bytes(32768))) == []
    assert fastest(Problem(1 << 20), 64, backward=True) == "two_level"


@pytest.mark.parametrize("heads, heads_kv", [(32, 8), (32, 32), (40, 8), (28, 4), (8, 1)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_auto_is_nearly_the_fastest(heads, heads_kv, ranks, backward):
    chosen = distributed._fastest(heads, heads_kv, ranks, backward)
    for tokens in (131072, 1048576):
        found = {
            plan.scheme: plan.seconds
            for plan in simulator.plans(Problem(tokens, heads, heads_kv), ranks, backward=backward)
        }
        assert found[chosen] < 1.05 * min(found.values()), found


def test_auto_does_without_heads_that_divide():
    assert (
        distributed._fastest(28, 4, 8, True) == "ring" and distributed._fastest(28, 4, 2, True) == "ulysses"
    )
    assert distributed._fastest(28, 0, 7, True) == "ring"  # refused later, on all ranks


def test_the_command_line(capsys):
    assert simulator.main(["--tokens", "65536", "--ranks", "8,16", "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tokens,ranks,scheme") and {line.split(",")[1] for line in lines[1:]} == {
        "8",
        "16",
    }
    assert simulator.main(["--full", "--forward", "--ranks", "8"]) == 0
    assert "contiguous" in capsys.readouterr().out

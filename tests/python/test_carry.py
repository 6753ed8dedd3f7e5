"""tests/gpu/carry.py: how jobs share a machine's GPUs, and a build that goes to another folder and is tested there."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    import carry_jobs
    import carry_plan

    return carry_jobs, carry_plan


@pytest.fixture
def played(modules, tmp_path):
    """What a plan of jobs did: name -> [(begin, end, GPUs)], and what became of each."""
    jobs, plans = modules

    def play(given, gpus, cores=8, seconds=20):
        notes, ended = tmp_path / "notes", {}
        notes.mkdir()
        note = f'date +%s.%N >> "{notes}/$NAME.begin"; echo "$CUDA_VISIBLE_DEVICES $WORKERS" >> "{notes}/$NAME.gpus"; '
        made = []
        for name, last, options in given:
            options = dict(options)
            if (handing_out := options.pop("handing_out", None)) is not None:
                note += f'sleep {handing_out}; touch "$RESULTS/handed_out"; '
            # A queue ends when it is told to, and all that is left in its last run.
            wait = f"sleep {last}" if not options.get("rest") else f"sleep {last} & wait"
            tail = f'; date +%s.%N >> "{notes}/$NAME.end"'
            trap = f"trap 'date +%s.%N >> \"{notes}/$NAME.end\"; exit 4' TERM; "
            made.append(jobs.Job(name, trap + note + wait + tail, 30, **options))
        plan = plans.Plan(
            made,
            [str(i) for i in range(gpus)],
            cores,
            tmp_path / "results",
            lambda job, workers: {**os.environ, "NAME": job.name},
            lambda job: ended.update({job.name: job.what}),
        )
        plan.run(seconds)
        read = lambda name, kind: (notes / f"{name}.{kind}").read_text().split("\n")[:-1]
        return {
            name: [
                (float(begin), float(end), line.split())
                for begin, end, line in zip(read(name, "begin"), read(name, "end"), read(name, "gpus"))
            ]
            for name, _, _ in given
            if (notes / f"{name}.end").exists()
        }, ended

    return play


def overlap(a, b):
    return a[0] < b[1] and b[0] < a[1]


def test_jobs_that_measure_are_alone_on_their_gpu(played):
    ran, ended = played(
        [
            ("race", 0.4, {"alone": True}),
            ("test", 0.6, {}),
            ("other", 0.4, {"alone": True}),
            ("more", 0.6, {}),
            ("pair", 0.3, {"gpus": 2}),
            ("whole", 0.3, {"gpus": 2, "alone": True}),
        ],
        2,
    )
    assert set(ended.values()) == {"passed"} and len(ended) == 6
    spans = [(name, *span) for name, times in ran.items() for span in times]
    for name, *span in spans:
        for other, *more in spans:
            if name in ("race", "other", "whole") and name != other and overlap(span, more):
                assert not set(span[2][0].split(",")) & set(more[2][0].split(",")), (name, other)
    assert ran["race"][0][2][0] == "0" and ran["test"][0][2][0] == "1" and ran["pair"][0][2][0] == "0,1"
    assert overlap(ran["test"][0], ran["race"][0]) and overlap(ran["test"][0], ran["more"][0])
    assert all(ran["whole"][0][0] <= times[0][0] for times in ran.values())


def test_a_queue_takes_what_others_leave(played):
    ran, ended = played([("tests", 1.0, {"rest": True}), ("race", 0.6, {"alone": True, "cores": 3})], 2)
    assert ended == {"tests": "passed", "race": "passed"}
    assert [gpus for _, _, gpus in ran["tests"]] == [["1", "5"], ["0,1", "8"]]


def test_a_queue_that_waits_for_its_last_tests_has_the_next_beside_it(played):
    ran, ended = played(
        [
            ("first", 1.5, {"rest": True, "handing_out": 0.3}),
            ("tests", 0.3, {"rest": True, "handing_out": 0.3}),
            ("emulated", 0.3, {"rest": True}),
        ],
        1,
    )
    assert set(ended.values()) == {"passed"} and all(len(times) == 1 for times in ran.values())
    first, tests, emulated = (ran[name][0] for name in ("first", "tests", "emulated"))
    assert first[0] + 0.3 <= tests[0] and tests[0] + 0.3 <= emulated[0] and emulated[0] < first[1]
    assert [one[2] for one in (first, tests, emulated)] == [["0", "8"]] * 3


def test_queues_give_their_gpu_to_a_job_that_wants_it_alone(played, tmp_path):
    """And go on after it, in their order."""
    race = {"alone": True, "gpus": 2, "warm": "sleep 0.9"}
    ran, ended = played(
        [
            ("first", 2.0, {"rest": True, "handing_out": 0.2}),
            ("tests", 1.0, {"rest": True}),
            ("race", 0.4, race),
        ],
        2,
    )
    assert set(ended.values()) == {"passed"}, ended
    for name in ("first", "tests"):
        assert not any(overlap(each, ran["race"][0]) for each in ran[name]), ran
    assert len(ran["first"]) == 2 and ran["first"][1][0] < ran["tests"][-1][0]


def test_jobs_begin_in_their_order_and_few_cores_suffice(played):
    pair = {"gpus": 2, "cores": 9}
    ran, _ = played(
        [("race", 0.3, {"alone": True}), ("pair", 0.3, pair), ("last", 0.1, {"alone": True})], 2, cores=2
    )
    assert ran["race"][0][1] <= ran["pair"][0][0] and ran["pair"][0][1] <= ran["last"][0][0]


def test_one_gpu_is_had_in_turn(played):
    ran, ended = played(
        [("race", 0.3, {"alone": True}), ("test", 0.3, {}), ("tests", 0.3, {"rest": True})], 1
    )
    assert set(ended.values()) == {"passed"}
    assert not overlap(ran["race"][0], ran["test"][0]) and not overlap(ran["race"][0], ran["tests"][0])


def test_what_compiles_goes_first(played, modules, tmp_path):
    warm = {"alone": True, "warm": f'date +%s.%N > "{tmp_path}/warm"; sleep 0.3'}
    ran, ended = played([("race", 0.1, warm), ("test", 0.1, {})], 2)
    assert ended["race:warm"] == "passed"
    assert ran["race"][0][0] >= float((tmp_path / "warm").read_text()) + 0.3


def test_time_ends_jobs_and_two_gpus_are_not_one(played):
    began = time.monotonic()
    _, ended = played(
        [("long", 60, {"alone": True}), ("late", 1, {"alone": True}), ("pair", 1, {"gpus": 2})], 1, seconds=1
    )
    assert time.monotonic() - began < 10
    assert ended["long"].startswith("cut off") and ended["late"].startswith("not begun")
    assert ended["pair"] == "left out: it needs 2 GPUs, and here is 1"


def with_imports(script):
    """Its text, and what it imports of the files beside it."""
    text = script.read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, re.M)
    beside = [script.parent / f"{name}.py" for name in names]
    return text + "".join(path.read_text() for path in beside if path.exists())


def test_all_jobs_name_what_is_there(modules):
    """Scripts, their options, and bash's grammar."""
    jobs = modules[0]
    for job in jobs.all_jobs("*"):
        for command in filter(None, (job.command, job.warm)):
            assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, command
            for path, options in re.findall(r"(?:python3|bash) ((?:tools|tests)/\S+)([^|&;]*)", command):
                text = with_imports(ROOT / path)
                for option in re.findall(r" (--[a-z-]+)", options):
                    assert f'"{option}"' in text, f"{job.name}: {path} has no {option}"
    names = [job.name for job in jobs.all_jobs("*")]
    assert len(names) == len(set(names)) and {"python:gpu", "jax:gpu", "rings:tests"} <= set(names)
    assert [job.name for job in jobs.chosen(["races:serving", "first", "first"])] == [
        "races:serving",
        "first",
    ]
    with pytest.raises(ValueError, match="no job 'nothing': first, "):
        jobs.chosen(["nothing"])


@pytest.fixture
def machine(tmp_path):
    """A folder with a repository's scripts, and carry.py there."""

    def make(name):
        root = tmp_path / name
        shutil.copytree(GPU, root / "tests" / "gpu", ignore=shutil.ignore_patterns("*.cpp", "__pycache__"))
        (root / "tests" / "python").mkdir()
        (root / ".gitignore").write_text("/build/\n/.carry/\n__pycache__\n")
        git = ["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "All"]):
            subprocess.run([*git, *words], check=True)
        tools = tmp_path / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: a card'\n")
        (tools / "nvidia-smi").chmod(0o755)

        def carry(*arguments, **more):
            given = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", **more}
            given.pop("CUDA_VISIBLE_DEVICES", None)
            done = subprocess.run(
                [sys.executable, root / "tests/gpu/carry.py", *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=100,
                env=given,
            )
            return done.returncode, done.stdout + done.stderr

        return root, carry

    if not (shutil.which("strip") and shutil.which("xz") and shutil.which("git")):
        pytest.skip("strip, xz or git is missing")
    return make


def test_a_build_is_carried_and_tested(machine, tmp_path):
    here, carry = machine("here")
    code, said = carry("pack")
    assert code == 1 and "flashjit_gpu_tests" in said, said
    programs = {"tests/flashjit_gpu_tests": "true", "tools/flashjit": "true", "libflashjit.so.1": "true"}
    for name, program in {**programs, "tools/examples/example_bad": "false"}.items():
        (here / "build" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(shutil.which(program), here / "build" / name)
    (here / "build/libflashjit.so").symlink_to("libflashjit.so.1")
    peers = here / "build/peers"
    (peers / "tangents").mkdir(parents=True)
    (peers / "tangents/peer.py").write_text("")
    tar = ["tar", "-C", str(peers), "-cJf"]
    subprocess.run([*tar, str(peers / "peers-tangents.tar.xz"), "tangents"], check=True)
    code, said = carry("pack", "--peers", "tangents")
    assert code == 0 and "in all, of 64" in said and "not built, so left out: libflashjit_jax.so" in said, (
        said
    )
    assert carry("pack", "--limit", "0")[0] == 1

    there, run = machine("there")
    (tmp_path / "sweep.sh").write_text("echo found > $RESULTS/found.txt")
    carry("pack", "--peers", "tangents", "--extra", tmp_path / "sweep.sh")
    shutil.copytree(here / ".carry", there / ".carry")
    out = tmp_path / "out"
    jobs = ("checkwaits", "examples", "rings:devices", "extra:sweep")
    code, said = run("run", *jobs, "--seconds", "30", "--out", out)
    assert code == 1, said
    assert (there / "build/carry/results/extra_sweep/found.txt").read_text() == "found\n"
    assert re.search(r"^checkwaits +passed", said, re.M) and re.search(
        r"^examples +failed \(1\)", said, re.M
    ), said
    assert "failed: example_bad" in said and re.search("rings:devices +left out", said), said
    assert (there / "build/carry/peers/tangents/peer.py").exists() and (out / "results.tar.xz").exists()

    # A fresh machine goes on with the results that came back, and a job that failed runs again.
    carry("pack", "--results", out)
    fresh, run = machine("fresh")
    shutil.copytree(here / ".carry", fresh / ".carry")
    code, said = run("run", "checkwaits", "examples")
    assert code == 1 and "checkwaits               passed before" in said and "failed (1)" in said, said
    assert run("run", "nothing")[0] == 2
    assert run("run", "checkwaits", PATH=os.environ["PATH"].replace(str(tmp_path), ""))[0] in (0, 3)


def test_a_build_of_the_machine_itself_is_kept(machine):
    root, carry = machine("own")
    (root / "build").mkdir()
    (root / "build/libflashjit.so").write_text("")
    (root / ".carry").mkdir()
    (root / ".carry/build.tar.xz").write_text("")
    code, said = carry("run", "checkwaits")
    assert code == 1 and "is a build of this machine" in said, said


def test_drawn_cases_are_fewer_than_all(machine):
    """And a job that passed with them has not passed with all."""
    root, carry = machine("quick")
    program = root / "build/tests/flashjit_gpu_tests"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho every=$FLASHJIT_EVERY_KERNEL\n")
    program.chmod(0o755)

    def run(*options):
        said = carry("run", "checkwaits", *options, FLASHJIT_EVERY_KERNEL="yes")[1]
        return re.search("^checkwaits +(passed before|passed .*)$", said, re.M).group(1).split()[-1]

    assert run("--drawn") == "every=" and run("--drawn") == "before"
    assert run() == "every=1" and run("--drawn") == "before" and run() == "before"


def test_parts_of_a_peer_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    import carry
    import peers

    if not shutil.which("xz"):
        pytest.skip("there is no xz")
    (tmp_path / "made/big").mkdir(parents=True)
    (tmp_path / "made/big/data").write_bytes(os.urandom(999))
    archive = tmp_path / "made/peers-big.tar.xz"
    carry.write_tar(archive, tmp_path / "made", "big")
    peers.cut(archive, 500)
    monkeypatch.setattr(carry, "CARRIED", tmp_path / "carried")
    monkeypatch.setattr(carry, "HERE", tmp_path / "here")
    parts = sorted((tmp_path / "made").glob("peers-big*"))
    assert len(parts) == 3
    for part in parts:
        assert not (tmp_path / "here/peers/big").exists()
        shutil.rmtree(tmp_path / "carried", ignore_errors=True)
        (tmp_path / "carried").mkdir()
        shutil.copy(part, tmp_path / "carried")
        carry.unpack()
    assert (tmp_path / "here/peers/big/data").read_bytes() == (tmp_path / "made/big/data").read_bytes()

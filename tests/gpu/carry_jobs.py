"""The jobs that carry.py runs on a machine with a GPU, by name: what each runs, for how long at most, and on what.

A command is bash's, in the root of the repository. $RESULTS is a folder of its own, $COMMIT what was built. A name such as
`races` stands for all jobs whose names begin with `races:`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = "build/tests/flashjit_gpu_tests"
#: Tests that compile for the emulator itself, which does not travel, are left out.
EMULATED = "-*EmulatedRanks*:*Command*:EmulatedQ.OfManyTiles*:*EmulatedProblemsOf*"
ALONE = "Lifetime*:CheckWaits*"  # tests that need the device for themselves


@dataclass(frozen=True)
class Job:
    """seconds: its limit. gpus: how many it needs. alone: nothing else may run on them, as it measures time or memory.
    cores: how many it keeps busy. rest: a queue, which takes all cores and GPUs that others leave, and is started anew where
    these change; once it has made $RESULTS/handed_out, as its last work has begun, the next queue starts beside it. peers: what
    peers.py made, to be on Python's path. warm: a command that runs beside other jobs and ends before this one begins, to
    compile what it calls."""

    name: str
    command: str
    seconds: int
    gpus: int = 1
    alone: bool = False
    cores: int = 2
    rest: bool = False
    peers: tuple[str, ...] = ()
    warm: str = ""


def queue(name: str, chosen: str, program: str = TESTS, variables: str = "") -> Job:
    """$WORKERS: the cores that are left. Results of all queues are in one folder: a test that ended well in one of them is not
    run by another."""
    options = (
        f"--filter='{chosen}' --workers $WORKERS --folder $ALL_RESULTS/tests --handed-out $RESULTS/handed_out"
    )
    return Job(
        name, f"exec env {variables} python3 tests/gpu/run_tests.py {program} {options}", 3600, rest=True
    )


def bench(name: str, script: str, seconds: int, options: str = "", peers: tuple[str, ...] = ()) -> Job:
    """A measurement with a table. It may lack peers: their columns are empty then."""
    table = f"--csv $RESULTS/{name.replace(':', '_')}.csv --commit $COMMIT"
    command = f"python3 tools/bench/{script} --lib build/libflashjit.so {table} {options}"
    return Job(name, command.strip(), seconds, alone=True, peers=peers)


def race(name: str, seconds: int, peers: tuple[str, ...], parts: tuple[str, ...] = ("",)) -> Job:
    """One of races.py. Before it, the problems of each part are checked once, all parts at the same time: that compiles."""
    found = bench(f"races:{name}", "races.py", seconds, f"--race {name}", peers)
    plain = f"python3 tools/bench/races.py --lib build/libflashjit.so --race {name} --rounds 0"
    warm = [f"{plain} --only '{part}' &" if part else f"{plain} &" for part in parts]
    return Job(**{**vars(found), "warm": " ".join([*warm, "wait"])})


def serving(seconds: int) -> Job:
    """serving.py. Before it, its parts run briefly and all at once, which compiles their kernels."""
    found = bench("races:serving", "serving.py", seconds, peers=("fa3",))
    plain = "python3 tools/bench/serving.py --lib build/libflashjit.so --rounds 1"
    parts = (
        "^d128.*, [14] queries",
        "^d128.* (16|512|4096) queries",
        "^d64",
        "^(append|a shared|prefill and)",
    )
    warm = [f"{plain} --only '{part}' &" for part in parts]
    return Job(**{**vars(found), "warm": " ".join([*warm, "wait"])})


def python_job(group: str, path: Path, before: str = "") -> Job:
    command = f"{before}python3 -m pytest -q -p no:cacheprovider -rs --durations=3 tests/python/{path.name}"
    command += "; code=$?; [ $code = 5 ] && exit 77; exit $code"  # 5: no test was drawn
    return Job(f"{group}:{path.stem.removeprefix('test_').removeprefix('jax_')}", command, 300)


def python_jobs() -> list[Job]:
    """The files of tests/python that call a GPU where there is one, a process for each."""
    found = []
    for path in sorted((ROOT / "tests/python").glob("test_*.py")):
        if path.name.startswith("test_jax"):
            found.append(python_job("jax", path, "XLA_PYTHON_CLIENT_PREALLOCATE=false "))
        elif path.name != "test_distributed.py" and re.search(
            r"cuda\.(is_available|device_count)|import DEVICE", path.read_text()
        ):
            found.append(python_job("python", path))
    return found


def ring(suite: str, port: int) -> Job:
    command = f"PET_MASTER_PORT={port} python3 tools/bench/ring_suite.py --work $PEERS/rings --suites {suite} --limit 60"
    return Job(f"rings:{suite}", command, 150, gpus=2, peers=("rings",))


def distributed(name: str, seconds: int, options: str) -> Job:
    command = f"python3 tools/bench/distributed.py --lib build/libflashjit.so --gpus 2 {options} --csv $RESULTS/{name}.csv"
    return Job(f"rings:{name}", command, seconds, gpus=2, alone=True)


def errors(script: str, options: str = "") -> Job:
    """A script of tools/bench that compares errors and writes its own file: no times, so other jobs may run beside it."""
    command = f"python3 tools/bench/{script}.py --lib build/libflashjit.so --csv {options}".strip()
    return Job(f"errors:{script}", f"{command}; cp tools/bench/results/*_{script}.csv $RESULTS", 300, cores=3)


def cache_formats(name: str, script: str, seconds: int, problems: str = "") -> Job:
    """Caches in all formats that a script of tools/bench times; warm compiles each format's kernels in a process of its own."""
    plain = f"python3 tools/bench/{script}.py --lib build/libflashjit.so --problems '{problems}'"
    formats = f"import sys; sys.path[:0] = ['tools/bench', 'tools/python']; import {script} as k; print(*k.FORMATS, sep='\\n')"
    warm = f'python3 -c "{formats}" | xargs -P 12 -I@ {plain} --warm @'
    return Job(name, f"{plain} --csv $RESULTS/{script}.csv", seconds, alone=True, warm=warm)


EXAMPLES = """
ls build/tools/examples/example_* || exit 77 # not built
for example in build/tools/examples/example_*; do
  echo "== $example"
  "$example" || [ $? = 77 ] || failed="${failed:-} $(basename $example)"
done
echo "failed:${failed:- none}"; [ -z "${failed:-}" ]
"""
DRAFTS = "python3 tools/bench/sglang_drafts.py --device cuda"
SCHEMES = "--schemes ring,all_gather,ulysses"


def extra_jobs() -> list[Job]:
    """What `pack --extra` took along. bash runs them with these peers on the path."""
    return [
        Job(f"extra:{path.stem}", f"bash {path}", 300, alone=True, peers=("fa3", "flashinfer", "vllm"))
        for path in sorted((ROOT / ".carry").glob("*.sh"))
    ]


def all_jobs(first: str) -> list[Job]:
    """first: a filter of GoogleTest for the job `first`."""
    return [
        queue("first", first),
        queue("tests", f"-{ALONE}"),
        queue("emulated", EMULATED, "build/tests/flashjit_emulated_tests", "FLASHJIT_LIBCUDA=libcuda.so.1"),
        Job(
            "tangents:tests",
            f"python3 tests/gpu/run_tests.py {TESTS} --filter='*Tangents*' --workers 6 --folder $RESULTS",
            240,
            cores=6,
        ),
        Job(
            "accurate:tests",
            f"{TESTS} --gtest_filter='StrongKey*' && python3 -m pytest -q -p no:cacheprovider tests/python/test_accurate.py",
            150,
        ),
        Job(
            "accurate:figures",
            "python3 tools/bench/accurate.py --lib build/libflashjit.so --csv --commit $COMMIT; "
            "cp tools/bench/results/h200_accurate*.csv $RESULTS",
            240,
            alone=True,
        ),
        Job("sanitize", "LOGS=$RESULTS LIMIT=240 bash tests/gpu/sanitize.sh", 420, cores=16),
        Job("racecheck", "TOOLS=racecheck LOGS=$RESULTS LIMIT=240 bash tests/gpu/sanitize.sh", 420, cores=8),
        Job("checkwaits", f"{TESTS} --gtest_filter='CheckWaits*'", 180, alone=True),
        Job("soak", f"FLASHJIT_SOAK_CALLS=150 {TESTS} --gtest_filter='Lifetime*'", 240, alone=True, cores=4),
        Job("examples", EXAMPLES, 120),
        *python_jobs(),
        Job(
            "rings:tests",
            "python3 -m pytest -q -rs -p no:cacheprovider --durations=8 tests/python/test_distributed.py "
            "-k 'gpus or (long_rings and cuda)'",
            180,
            gpus=2,
            cores=8,
        ),
        Job("rings:devices", f"{TESTS} --gtest_filter='*Devices*'", 120, gpus=2),
        ring("ring", 29611),
        ring("yunchang", 29622),
        distributed("causal", 120, f"--tokens 65536,131072,262144 {SCHEMES}"),
        distributed("full", 90, f"--full --tokens 65536,131072 {SCHEMES}"),
        distributed(
            "pytorch",
            90,
            "--tokens 65536,131072 --schemes all_gather,ulysses,pytorch_ring,pytorch_all_gather",
        ),
        cache_formats("formats:speed", "kv_format_speed", 150),
        cache_formats("formats:append", "kv_format_speed", 60, "append"),
        cache_formats("formats:once", "decoded_cache", 120),
        race("tangents", 90, ("tangents",)),
        race("codes", 90, ("fa3", "vllm")),
        race("latents", 120, ("vllm", "flashinfer")),
        race("wide", 120, ("wide", "cute", "vllm")),
        race(
            "flashinfer", 330, ("flashinfer",), ("^decode, 64 x 4k$", "e4m3", "d64", "^4 queries", "^2 x 2k")
        ),
        race(
            "weights",
            120,
            ("flashinfer",),
            ("sigmoid, d128", "sigmoid, d64", "softmax, d128", "softmax, d64"),
        ),
        race("programs", 150, ("cute",), ("fwd, .*d64", "fwd, .*d128", "bwd, .*d64", "bwd, .*d128")),
        Job(
            "suites:flashinfer",
            "python3 tools/bench/flashinfer_suite.py --device cuda --work $PEERS/flashinfer_suite --cases 1500 "
            "--seed ${SEED:-60} --processes 14 --seconds 230 --limit 30; "
            "cp $PEERS/flashinfer_suite/results-*.jsonl $RESULTS",
            280,
            alone=True,  # it fills the GPU's memory
            cores=14,
            peers=("flashinfer_suite",),
        ),
        *(
            Job(
                f"sglang:{model}",
                f"HF_HUB_OFFLINE=1 python3 tools/bench/sglang_tokens.py --device cuda --models {model} --page {page} "
                "--own torch_native --dtype float32",
                300,
                cores=3,
                peers=("sglang",),
            )
            for model, page in (("llama", 16), ("qwen3", 1), ("mistral", 1))
        ),
        Job(
            "sglang:drafts",  # two models side by side, as loading takes most of the time
            f"HF_HUB_OFFLINE=1 {DRAFTS} --models llama --topk 2 & first=$!; "
            f"HF_HUB_OFFLINE=1 {DRAFTS} --models qwen3 --topk 1 --page 16 && wait $first",
            200,
            cores=4,
            peers=("sglang",),
        ),
        Job(
            "host",
            "python3 tools/bench/python_host.py --rounds 300 --csv $RESULTS/host.csv --commit $COMMIT && "
            "python3 tools/bench/python_host.py --drop-ins --rounds 200",
            90,
            alone=True,
        ),
        serving(180),
        bench("races:masks", "serving_masks.py", 90),
        bench("races:invariance", "serving.py", 60, "--pages= --only heads,"),
        bench("races:skip_softmax", "skip_softmax.py", 60),
        bench("races:block_lists", "block_lists.py", 90),
        bench("races:sparse", "compare.py", 150, "--only sparse"),
        bench("races:latent", "latent.py", 120, peers=("fa3", "vllm")),
        bench("races:other", "compare.py", 200, "--only other", peers=("fa3",)),
        bench("races:variants", "variants.py", 400),
        *extra_jobs(),
        errors("accuracy", "--commit $COMMIT"),
        errors("eight_bits"),
        Job(
            "races:eight_bits",
            "python3 tools/bench/eight_bits.py --lib build/libflashjit.so --speed --csv; "
            "cp tools/bench/results/*_eight_bits_speed.csv $RESULTS",
            150,
            alone=True,
            peers=("fa3",),
        ),
    ]


def chosen(names: list[str], first: str = "*") -> list[Job]:
    """The jobs of these names, in their order, each once. ValueError: there is none."""
    jobs = {job.name: job for job in all_jobs(first)}
    found: dict[str, Job] = {}
    for name in names:
        group = [job for job in jobs.values() if name == job.name or job.name.startswith(f"{name}:")]
        if not group:
            groups = dict.fromkeys(job.partition(":")[0] for job in jobs)
            raise ValueError(
                f"there is no job '{name}': {', '.join(groups)}, or one of a group, as races:serving"
            )
        found.update((job.name, job) for job in group)
    return list(found.values())

#!/usr/bin/env python3
"""FlashInfer's own tests on flashjit.flashinfer: a seeded sample of its cases, counted by how each ended.

    tools/bench/flashinfer_suite.py --cases 1000 --seed 1 --work /tmp/flashinfer-suite [--device cuda]

It fetches FlashInfer's sources by git into --work, at the commit below, and runs their tests with a module `flashinfer`
that has flashjit's functions; some need einops and scipy. On the CPU, the default, the sources' "cuda" is read as "cpu". Each call is besides compared
with a softmax in float64, where it is small. Cases end as

    passed    refused   by flashjit.Unsupported, with its reason
    missing   a name of FlashInfer that flashjit.flashinfer does not have
    skipped   by FlashInfer's test itself             gpu   what only a GPU has: CUDA graphs, processes
    large     longer than --limit seconds, or more than --memory GB
    wrong     a comparison failed                     error anything else
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys
import time

SOURCE = "https://github.com/flashinfer-ai/flashinfer"
COMMIT = "fb28d7242b3506a2348265962041acc1fb56cca4"
FILES = (
    "alibi attention_sink batch_attention batch_decode_kernels batch_invariant_fa2 batch_prefill batch_prefill_kernels "
    "decode_prefill_lse decode_fp8_calibration_scale deepseek_mla fp8_prefill hopper hopper_fp8_attention logits_cap "
    "mla_decode_kernel mla_page non_contiguous_decode non_contiguous_prefill page shared_prefix_kernels single_prefill "
    "sliding_window tensor_cores_decode trtllm_gen_attention_decode"
).split()
HERE = pathlib.Path(__file__).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/flashinfer-suite"))
    parser.add_argument("--source", default=SOURCE, help="a git repository with the commit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share", type=float, default=1, help="of each test function, the smallest cases")
    parser.add_argument(
        "--again", action="store_true", help="only what was missing, wrong, an error, or for a GPU"
    )
    parser.add_argument("--limit", type=float, default=20, help="seconds of a case")
    parser.add_argument("--memory", type=float, default=12, help="GB of the process of a case, on the CPU")
    parser.add_argument("--processes", type=int, default=1, help="that run cases at the same time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole run")
    parser.add_argument("--given", type=pathlib.Path, help="a file of cases, in their order, no sample")
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="fetch the tests and list their cases alone: --work may then travel",
    )
    args = parser.parse_args()
    args.work = args.work.resolve()
    tests = prepare(args)
    if args.prepare:
        print(f"{len(collect(tests, args) or sys.exit('pytest found no cases'))} cases")
        shutil.rmtree(args.work / "source", ignore_errors=True)
        return
    if args.given:
        chosen = args.given.read_text().splitlines()
        print(f"{len(chosen)} cases given", flush=True)
    else:
        ids = collect(tests, args)
        chosen = sorted(sample(ids, args))
        print(
            f"{len(ids)} cases in {len(args.files)} files, {len(chosen)} chosen with seed {args.seed}",
            flush=True,
        )
    report(run(chosen, tests, args), args)


def prepare(args: argparse.Namespace) -> pathlib.Path:
    """The folder with FlashInfer's tests, for the device, without its own conftest.py. Tests that are there are kept."""
    clone, tree = args.work / "source", args.work / args.device
    if not (tree / "tests/attention").exists():
        fetch(clone, tree, args)
    (tree / "tests/__init__.py").touch()
    (tree / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HERE.parent)!r})\nfrom flashinfer_shim import *\n"
    )
    (tree / "pytest.ini").write_text("[pytest]\n")
    return tree


def fetch(clone: pathlib.Path, tree: pathlib.Path, args: argparse.Namespace) -> None:
    if not clone.exists():
        subprocess.run(["git", "clone", "-q", "--no-checkout", args.source, str(clone)], check=True)
    listed = git(clone, "ls-tree", "-r", "--name-only", COMMIT, "tests/attention", "tests/test_helpers")
    for name in listed.split():
        if name.endswith(".py") and not name.endswith("conftest.py"):
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = git(clone, "show", f"{COMMIT}:{name}")
            path.write_text(on_cpu(text) if args.device == "cpu" else text)


def git(clone: pathlib.Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(clone), *command], check=True, capture_output=True, text=True
    ).stdout


def on_cpu(text: str) -> str:
    text = re.sub(r"""f?(["'])cuda(:\d+|:\{\w+\})?\1""", '"cpu"', text)
    return text.replace(".cuda()", ".cpu()").replace(".to(0)", '.to("cpu")')


def environment(args: argparse.Namespace) -> dict[str, str]:
    return {**os.environ, "FLASHINFER_SUITE_DEVICE": args.device, "OMP_NUM_THREADS": "1"}


def collect(tests: pathlib.Path, args: argparse.Namespace) -> list[str]:
    kept = tests / "cases.txt"
    if not kept.exists():
        paths = [f"tests/attention/test_{name}.py" for name in args.files]
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        output = subprocess.run(
            [*command, "--continue-on-collection-errors", *paths],
            cwd=tests,
            env=environment(args),
            capture_output=True,
            text=True,
        )
        lines = output.stdout.splitlines()
        print(*[line for line in lines if line.startswith("ERROR")], sep="\n", flush=True)
        found = [line for line in lines if "::" in line and not line.startswith("ERROR")]
        kept.write_text("\n".join(found))
    wanted = tuple(f"tests/attention/test_{name}.py::" for name in args.files)
    return [name for name in kept.read_text().split("\n") if name.startswith(wanted)]


def size_of(name: str) -> float:
    """The product of a case's numbers, by which cases of one function compare."""
    return math.prod(float(number) for number in re.findall(r"(?<=[\[-])\d+(?=[\]-])", name) if number != "0")


def sample(ids: list[str], args: argparse.Namespace) -> list[str]:
    """As many of each test function, as far as it has them, without NVFP4's."""
    count = args.cases
    by_function: dict[str, list[str]] = collections.defaultdict(list)
    for name in ids:
        if "nvfp4" not in name:
            by_function[name.partition("[")[0]].append(name)
    draw = random.Random(args.seed)
    for names in by_function.values():
        names.sort(key=size_of)
        del names[math.ceil(len(names) * args.share) :]
        draw.shuffle(names)
    chosen: list[str] = []
    while len(chosen) < count and any(by_function.values()):
        for names in by_function.values():
            if names and len(chosen) < count:
                chosen.append(names.pop())
    return chosen


def run(chosen: list[str], tests: pathlib.Path, args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What became of each case, from processes that are ended where one takes too long."""
    log = args.work / f"results-{args.device}-{args.seed}.jsonl"
    kept = [
        x
        for x in read(log).values()
        if args.again and x["outcome"] in ("passed", "refused", "skipped", "large")
    ]
    log.write_text("".join(json.dumps(x) + "\n" for x in kept))
    done = read(log)
    left = [name for name in chosen if name not in done]
    end = time.time() + args.seconds
    with concurrent.futures.ThreadPoolExecutor(args.processes) as threads:
        parts = [left[i :: args.processes] for i in range(args.processes)]
        for part in threads.map(lambda i: run_part(parts[i], i, end, tests, args), range(args.processes)):
            with log.open("a") as file:
                file.write("".join(json.dumps(x) + "\n" for x in part.values()))
    return read(log)


def run_part(
    left: list[str], number: int, end: float, tests: pathlib.Path, args: argparse.Namespace
) -> dict[str, dict[str, str]]:
    """What became of the cases of one of the processes."""
    log = args.work / f"part-{number}.jsonl"
    log.write_text("")
    while time.time() < end:
        left = [name for name in left if name not in read(log)]
        if not left:
            break
        batch = tests / f"batch-{number}.txt"
        batch.write_text("\n".join(left))
        child = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"@{batch}"],
            cwd=tests,
            env={**environment(args), "FLASHINFER_SUITE_LOG": str(log), "FLASHINFER_SUITE_CASES": str(batch)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: limit_memory(args),
        )
        watch(child, log, args.limit, end)
    return read(log)


def limit_memory(args: argparse.Namespace) -> None:
    if args.device == "cpu":  # a GPU's driver reserves more addresses
        resource.setrlimit(resource.RLIMIT_AS, (int(args.memory * 2**30),) * 2)


def watch(child: subprocess.Popen[bytes], log: pathlib.Path, limit: float, end: float) -> None:
    """Ends the process where a case that has begun takes longer than the limit, and writes that down."""
    begun = log.with_suffix(".begun")
    begun.write_text("")
    while child.poll() is None:
        time.sleep(0.25)
        name = begun.read_text()
        if name and time.time() - begun.stat().st_mtime > limit:
            child.kill()
            child.wait()
        if time.time() > end:
            child.kill()
            child.wait()
            return
    name = begun.read_text()
    if name and name not in read(log):
        with log.open("a") as file:
            file.write(
                json.dumps({"name": name, "outcome": "large", "why": f"ended by {child.returncode}"}) + "\n"
            )
    elif child.returncode not in (0, 1):
        sys.exit(f"pytest ended with {child.returncode}")


def read(log: pathlib.Path) -> dict[str, dict[str, str]]:
    if not log.exists():
        return {}
    return {found["name"]: found for found in map(json.loads, log.read_text().splitlines())}


def report(found: dict[str, dict[str, str]], args: argparse.Namespace) -> None:
    counts = collections.Counter(result["outcome"] for result in found.values())
    checked = sum(int(result.get("checked", 0)) for result in found.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    print(f"{checked} calls also compared with float64")
    reasons = collections.Counter(
        (result["outcome"], result["why"][:160]) for result in found.values() if result["outcome"] != "passed"
    )
    for (outcome, why), count in sorted(reasons.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"  {outcome:8} {count:5}  {why}")


if __name__ == "__main__":
    main()

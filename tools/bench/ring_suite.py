#!/usr/bin/env python3
"""ring-flash-attention's and yunchang's own test programs on flashjit.flash_attn, unmodified, on several GPUs.

    tools/bench/ring_suite.py --work /tmp/ring-suite [--device cpu] [--processes 2]

It fetches their sources by git into --work, at the commits below, and starts each program by torchrun, with flash_attn being
flashjit's. The programs compare their ranks with the whole sequence on one and print the differences; here each is judged:
at most 3% of the largest value that was printed, and on average at most 2% of the average. On the CPU, over gloo, the
programs' lengths are short. With --share all ranks use one GPU, and exchange tensors by gloo through the host's memory.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import time
import types

from flashinfer_suite import git, on_cpu

SOURCES = {
    "ring": ("https://github.com/zhuzilin/ring-flash-attention", "8996282"),
    "yunchang": ("https://github.com/feifeibear/long-context-attention", "56118e0"),
}
HYBRID = "test_hybrid_attn.py --use_bwd --attn_impl"
PROGRAMS = {
    "ring": [
        f"test_{name}_func.py"
        for name in (
            "ring_flash_attn",
            "ring_flash_attn_varlen",
            "zigzag_ring_flash_attn",
            "zigzag_ring_flash_attn_varlen",
            "stripe_flash_attn",
            "llama3_flash_attn_varlen",
        )
    ],
    "yunchang": [
        "test_ulysses_attn.py",
        f"{HYBRID} fa --causal",
        f"{HYBRID} fa --sp_ulysses_degree 1",
        f"{HYBRID} fa --sp_ulysses_degree 1 --ring_impl_type zigzag --causal",
        f"{HYBRID} fa3",  # which computes without a mask, whatever is asked
        f"{HYBRID} fa3 --sp_ulysses_degree 1",
    ],
}
HERE = pathlib.Path(__file__).resolve()
LARGEST, AVERAGE = 0.03, 0.02
GRADIENTS = ("dq diff", "dk diff", "dv diff")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/ring-suite"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--share", action="store_true", help="one GPU for all ranks")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds of a program")
    parser.add_argument("--suites", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--only", default="", help="programs whose command has this")
    parser.add_argument(
        "--prepare", action="store_true", help="fetch the sources alone: --work may then travel"
    )
    args = parser.parse_args()
    args.work = args.work.resolve()
    wrong = 0
    for suite in args.suites:
        folder = prepare(suite, args)
        if args.prepare:
            shutil.rmtree(args.work / f"{suite}-source", ignore_errors=True)
            continue
        for program in PROGRAMS[suite]:
            if args.only in program:
                wrong += not judge(suite, program, *run(folder, program, args))
    sys.exit(f"{wrong} programs failed" if wrong else 0)


def prepare(suite: str, args: argparse.Namespace) -> pathlib.Path:
    """The folder of the library and its tests, for the device. What is there is kept."""
    (source, commit), clone = SOURCES[suite], args.work / f"{suite}-source"
    folder = args.work / f"{suite}-{args.device}"
    if folder.exists():
        return folder
    if not clone.exists():
        subprocess.run(["git", "clone", "-q", "--no-checkout", source, str(clone)], check=True)
    for name in git(clone, "ls-tree", "-r", "--name-only", commit).split():
        if name.endswith(".py") and name.partition("/")[0] in ("test", "ring_flash_attn", "yunchang"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = git(clone, "show", f"{commit}:{name}")
            path.write_text(shorter(text) if args.device == "cpu" else text)
    return folder


def on_one_gpu(text: str) -> str:
    return text.replace('"nccl"', '"gloo"').replace("cuda:{rank}", "cuda:0")


def shorter(text: str) -> str:
    text = re.sub(r"\bseqlen = \d+", "seqlen = 96", on_cpu(text).replace('"nccl"', '"gloo"'))
    text = text.replace("[0, 120, 1248, 4232]", "[0, 16, 88, 120]")
    return text.replace("torch.cuda.max_memory_allocated(device)", "0").replace(
        "torch.cuda.reset_peak_memory_stats(device)", "None"
    )


def run(folder: pathlib.Path, program: str, args: argparse.Namespace) -> tuple[int, str, float]:
    """The exit code, the output and the seconds."""
    name, *more = program.split()
    if args.device == "cpu" and "hybrid_attn" in name:
        more += ["--seqlen", "64"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.processes)]
    begun = time.time()
    done = subprocess.run(
        ["timeout", "-k", "1", str(args.limit), *command, str(HERE), "--under", f"test/{name}", *more],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RING_SUITE_SHARE": "1" if args.share else ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout, time.time() - begun


def judge(suite: str, program: str, code: int, output: str, seconds: float) -> bool:
    """Prints the program's differences. True: all are small. Programs compare gradients of a rank's first tokens alone (`[:, 0]`),
    which are far above the average where these are the sequence's first."""
    found, bad = differences(output), []
    for name, largest, average, of_largest, of_average in found:
        limit = LARGEST / 10 * of_largest if name in GRADIENTS else AVERAGE * of_average
        if not (largest <= LARGEST * of_largest and average <= limit):
            bad.append(f"{name} {largest:.3g} of {of_largest:.3g}")
    good = code == 0 and bool(found) and not bad
    worst = max((row[1] / row[3] for row in found), default=float("nan"))
    tail = "" if good else f" exit {code} {bad} {last_words(output)}"
    print(
        f"{suite} {program}: {'passed' if good else 'failed'}, {len(found)} comparisons, worst difference "
        f"{worst:.2e} of the largest value, {seconds:.0f} s{tail}",
        flush=True,
    )
    return good


def last_words(output: str) -> str:
    """The end of an output, without torchrun's report."""
    return re.split(r"^[EW]\d{4} ", output, flags=re.MULTILINE)[0][-1500:]


def differences(output: str) -> list[tuple[str, float, float, float, float]]:
    """Name, largest and average difference, and the same of the values that all ranks printed last before it."""
    found: list[tuple[str, float, float, float, float]] = []
    name, last, is_new = "", {}, True
    for line in output.splitlines():
        heading = re.search(r"([a-zA-Z_]+(?: diff)?)\b[^:\[\]]*:", line.partition("] ")[2] or line)
        numbers = re.search(r"max ([\w.+-]+), mean ([\w.+-]+)", line)
        if heading:
            name, is_new = heading[1], True
        if not numbers or not name:
            continue
        pair = float(numbers[1]), float(numbers[2])
        kind = "lse" if "lse" in name else "out" if "out" in name else "gradient"
        if "diff" in name:
            found.append((name, *pair, *last.get(kind, last.get("out", (float("nan"),) * 2))))
        else:
            before = (0.0, 0.0) if is_new else last[kind]
            last[kind], is_new = (max(before[0], pair[0]), max(before[1], pair[1])), False
    return found


def under(program: str) -> None:
    """Runs the program, in one of torchrun's processes."""
    import flashjit.flash_attn

    flashjit.flash_attn.install()
    if pathlib.Path(
        "ring_flash_attn"
    ).exists():  # its part for transformers, which is not tested, wants names of version 4
        import transformers.modeling_flash_attention_utils as names

        vars(names).setdefault("_flash_supports_window_size", True)
        vars(names).setdefault("is_flash_attn_greater_or_equal", lambda _: True)
    sys.path[:0] = [os.getcwd(), str(pathlib.Path(program).parent.resolve())]
    sys.argv = sys.argv[2:]
    if not os.environ.get("RING_SUITE_SHARE"):
        runpy.run_path(program, run_name="__main__")
        return
    import host_exchange

    host_exchange.install()
    code = compile(on_one_gpu(pathlib.Path(program).read_text()), program, "exec")
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(code, vars(main))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--under"]:
        under(sys.argv[2])
    else:
        main()

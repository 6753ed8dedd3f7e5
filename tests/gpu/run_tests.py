"""Runs the tests of a GoogleTest program side by side, on all GPUs, and goes on where a run was cut off.

    python3 tests/gpu/run_tests.py build/tests/flashjit_gpu_tests --filter='-Lifetime*:CheckWaits*' --seconds 600

Processes take a few tests at a time, so that no worker is left with the slow ones. Which tests ended well is written at
once to a file beside the program, with the digest of the program in its name: a second run of the same program, later or
at the same time, runs the others, or with --again all. What a failed test printed is in the same folder.
CUDA_VISIBLE_DEVICES chooses among the GPUs. The exit code is 0 only if every test passed or skipped itself, 1 if one failed, 2 for a wrong call, 4 if time
ended before the tests did, and 77 without a GPU, unless FLASHJIT_LIBCUDA names another driver.

With --sanitizer the tests run under that tool of compute-sanitizer, which says at a process's end what it found:
tests count as passed only when it has said that it found nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

_ENDED = re.compile(r"\[ +(OK|SKIPPED|FAILED) +\] (\S+?)(?:, where.*)? \((\d+) ms\)")
_FOUND = re.compile(r"=+ [A-Z]* ?SUMMARY: (\d+) ")
_BEGAN = re.compile(r"\[ RUN +\] (\S+)")


def tests_of(program: Path, chosen: str) -> list[str]:
    listing = subprocess.run(
        [program, "--gtest_list_tests", f"--gtest_filter={chosen}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = []
    suite = ""
    for line in listing.splitlines():
        if line.startswith("  "):
            names.append(suite + line.split("#")[0].strip())
        elif line.split("#")[0].strip().endswith("."):
            suite = line.split("#")[0].strip()
    return names


def gpus() -> list[str]:
    """The GPUs that the tests may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return [str(i) for i in range(len(re.findall("^GPU ", listing, re.MULTILINE)))]


class Run:
    """One run: what is to be done, what ended how, and the processes that are at it."""

    def __init__(self, options: argparse.Namespace, program: Path, folder: Path, names: list[str]):
        self.command = [str(program)]
        sanitizer = self.sanitizer = options.sanitizer
        if sanitizer:
            # What the driver answers to a question, such as whose a pointer is, is no error of ours.
            quiet = ["--report-api-errors", "no", "--error-exitcode", "9"]
            self.command = ["compute-sanitizer", "--tool", sanitizer, *quiet, str(program)]
        self.folder = folder
        digest = hashlib.sha256(program.read_bytes()).hexdigest()[:16]
        self.ended = folder / f"ended-{sanitizer}{digest}.txt"
        if options.again:
            self.ended.unlink(missing_ok=True)
        self.results: dict[str, str] = {}
        left = self.not_ended(names)
        self.before = len(self.results)
        random.Random(0).shuffle(left)  # neighbours take equally long
        chunk = max(1, min(options.chunk, -(-len(left) // options.workers)))  # all workers get some
        self.chunks = deque(left[i : i + chunk] for i in range(0, len(left), chunk))
        self.failed: list[str] = []
        self.lock = threading.Lock()
        self.processes: set[subprocess.Popen[str]] = set()
        self.stopped = False
        self.handed_out: Path | None = options.handed_out

    def not_ended(self, names: list[str]) -> list[str]:
        """What neither this run nor one beside it has ended well."""
        if self.ended.exists():
            whole = self.ended.read_text().rpartition("\n")[0]  # another run may be writing a line
            known = dict(line.split()[:2][::-1] for line in whole.splitlines())
            self.results.update((name, known[name]) for name in names if name in known)
        return [name for name in names if name not in self.results]

    def end(self, name: str, result: str, milliseconds: str, printed: list[str]) -> None:
        with self.lock:
            if result == "FAILED":
                self.failed.append(name)
                text = "".join(printed)
                (self.folder / f"failed-{hashlib.sha256(name.encode()).hexdigest()[:12]}.log").write_text(
                    text
                )
                print(f"FAILED {name}\n{text}", flush=True)
                return
            self.results[name] = result
            with self.ended.open("a") as file:
                file.write(f"{result} {name} {milliseconds}\n")

    def work(self, device: str) -> None:
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=device)
        # Tests of a shard know that they have the device not for themselves.
        environment.update(GTEST_TOTAL_SHARDS="1", GTEST_SHARD_INDEX="0")
        while not self.stopped:
            with self.lock:
                if not self.chunks:
                    return
                names = self.not_ended(self.chunks.popleft())
                if not self.chunks and self.handed_out:
                    self.handed_out.touch()
            while names and not self.stopped:
                names = self.run_chunk(names, environment)

    def run_chunk(self, names: list[str], environment: dict[str, str]) -> list[str]:
        """Returns the tests that a process which ended early has not begun."""
        command = [*self.command, f"--gtest_filter={':'.join(names)}"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        with self.lock:
            self.processes.add(process)
        left = list(names)
        running = ""
        printed: list[str] = []
        everything: list[str] = []
        held: list[tuple[str, str, str]] = []  # until the sanitizer has said what it found
        found = -1
        assert process.stdout is not None
        for line in process.stdout:
            if began := _BEGAN.match(line):
                running, printed = began.group(1), []
                left = [name for name in left if name != running]
            printed.append(line)
            everything.append(line)
            if summary := _FOUND.match(line):
                found = max(found, int(summary.group(1)))
            ended = _ENDED.match(line)
            if ended and ended.group(2) == running:
                if self.sanitizer and ended.group(1) != "FAILED":
                    held.append((running, ended.group(1), ended.group(3)))
                else:
                    self.end(running, ended.group(1), ended.group(3), printed)
                running = ""
        process.wait()
        with self.lock:
            self.processes.discard(process)
        if self.stopped:
            return []
        for name, result, milliseconds in held:
            self.end(name, result if found == 0 else "FAILED", milliseconds, everything)
        if not running and len(left) == len(names):  # it began none: the program itself is at fault
            running, left = left[0], left[1:]
        if running:
            printed.append(f"the process ended with {process.returncode} within this test\n")
            self.end(running, "FAILED", "0", printed)
        return left

    def stop(self) -> None:
        self.stopped = True
        with self.lock:
            for process in self.processes:
                process.kill()

    def progress(self, total: int, began: float) -> str:
        with self.lock:
            passed = sum(result == "OK" for result in self.results.values())
            skipped = len(self.results) - passed
            text = f"{passed} of {total} passed, {skipped} skipped, {len(self.failed)} failed"
            rate = (len(self.results) - self.before + len(self.failed)) / max(time.monotonic() - began, 1e-3)
        return f"{text} ({self.before} before); {rate:.1f} tests/s"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--filter", default="*", help="GoogleTest's filter")
    parser.add_argument(
        "--sanitizer", default="", choices=["memcheck", "racecheck", "initcheck", "synccheck"]
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--chunk", type=int, default=12, help="tests a process runs")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, help="of the results; the program's by default")
    parser.add_argument("--handed-out", type=Path, help="a file to make when the last tests have begun")
    parser.add_argument("--again", action="store_true", help="run tests that ended well before, too")
    options = parser.parse_args(arguments)
    if not options.program.is_file():
        parser.error(f"there is no program '{options.program}'")
    for name in ("workers", "chunk"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least 1")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    devices = gpus() or ([""] if os.environ.get("FLASHJIT_LIBCUDA", "libcuda.so.1") != "libcuda.so.1" else [])
    if not devices:
        print("there is no GPU here")
        return 77
    program = options.program.resolve()
    folder = options.folder or program.parent
    folder.mkdir(parents=True, exist_ok=True)
    names = tests_of(program, options.filter)
    if not names:
        print(f"no test is called '{options.filter}'")
        return 2
    run = Run(options, program, folder, names)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: run.stop())
    threads = [
        threading.Thread(target=run.work, args=(devices[i % len(devices)],)) for i in range(options.workers)
    ]
    for thread in threads:
        thread.start()
    told = began
    try:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            if time.monotonic() - began > options.seconds:
                run.stop()
            if time.monotonic() - told > 15:
                told = time.monotonic()
                print(run.progress(len(names), began), flush=True)
    except KeyboardInterrupt:
        run.stop()
    for thread in threads:
        thread.join()
    for name in run.failed:
        print(f"failed: {name}")
    print(run.progress(len(names), began))
    if run.failed:
        return 1
    return 0 if len(run.results) == len(names) else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

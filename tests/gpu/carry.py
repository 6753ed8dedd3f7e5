"""Tests and measures on a machine with a GPU what was built on one without: where each is used, see README.md beside this.

    python3 tests/gpu/carry.py pack --build build --peers fa3 tangents       # here: writes .carry/
    python3 tests/gpu/carry.py run first tangents races:serving tests --first "*Tangents*" --seconds 560 --out /tmp/results
    python3 tests/gpu/carry.py list                                          # the jobs that run takes

pack: stripped programs and libraries of the build, what peers.py made of other projects, and with --results what an earlier
run brought back, each as a file in .carry/. run: where the repository and .carry/ were copied to, in the repository's root. It
unpacks once, runs the jobs, and writes what they said to build/carry/results, and as results.tar.xz to --out. A job that
passed before, at the same commit, is not run again, and a queue of tests goes on where it was. With a build of this machine
and without .carry/ run works, too.

Exit code: 0 if all jobs passed, 1 if one did not, 2 for a wrong call, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import carry_jobs
import run_tests
from carry_plan import Ended, Plan

ROOT = carry_jobs.ROOT
CARRIED = ROOT / ".carry"
HERE = ROOT / "build" / "carry"  # on the machine with the GPU
LIMIT = 64  # MiB
NEEDED = ("libflashjit.so", "tools/flashjit", "tests/flashjit_gpu_tests")
ALSO = (
    "libflashjit.so.*",
    "libflashjit_torch.so",
    "libflashjit_jax.so",
    "tests/flashjit_emulated_tests",
    "tests/flashjit_unload",
    "tests/libflashjit_*.so",
    "tools/examples/example_*",
    "tools/examples/small_llama",
)
PEER_PATHS = ("nvidia_cutlass_dsl/dsl_packages",)  # which a .pth file adds where a wheel is installed
PEER_SETTINGS = {
    "FLASHINFER_WORKSPACE_BASE": str(HERE / "flashinfer"),
    "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "CUDA_HOME": "/usr/local/cuda",
    "MAX_JOBS": "8",
}


def commit_of(root: Path) -> str:
    """The commit, with "+" and a digest where the tree differs from it."""
    git = lambda *words: subprocess.run(["git", "-C", root, *words], capture_output=True, check=True).stdout
    changed = git("diff", "HEAD")
    digest = f"+{hashlib.sha256(changed).hexdigest()[:6]}" if changed else ""
    return git("rev-parse", "--short=8", "HEAD").decode().strip() + digest


def pack_build(build: Path, into: Path) -> None:
    """The stripped files, as build.tar.xz with the folder build/."""
    for name in NEEDED:
        if not (build / name).exists():
            sys.exit(f"{build / name} is missing: build flashjit, flashjit_command and flashjit_gpu_tests")
    with tempfile.TemporaryDirectory() as work:
        for pattern in (*NEEDED, *ALSO):
            found = [path for path in sorted(build.glob(pattern)) if not path.is_dir()]
            if not found:
                print(f"  not built, so left out: {pattern}")
            for path in found:
                to = Path(work) / "build" / path.relative_to(build)
                to.parent.mkdir(parents=True, exist_ok=True)
                if path.is_symlink():
                    to.unlink(missing_ok=True)
                    to.symlink_to(os.readlink(path))
                else:
                    subprocess.run(["strip", "-s", "-o", to, path], check=True)
        (Path(work) / "build" / "carried").write_text(commit_of(ROOT))
        write_tar(into / "build.tar.xz", Path(work), "build")


def write_tar(path: Path, folder: Path, name: str, level: int = 6) -> None:
    """folder/name as an archive, which is there as a whole or not at all."""
    part = path.with_suffix(".part")
    environment = {**os.environ, "XZ_OPT": f"-{level}"}
    subprocess.run(["tar", "-C", folder, "-cJf", part, name], check=True, env=environment)
    part.replace(path)


def pack(options: argparse.Namespace) -> int:
    shutil.rmtree(CARRIED, ignore_errors=True)
    CARRIED.mkdir()
    if not options.peers_only:
        pack_build(options.build.resolve(), CARRIED)
    for name in options.peers:
        base, _, part = name.partition(".")  # such as cute, or cute.1of2 alone
        found = sorted(options.peers_from.glob(f"peers-{base}.tar.xz{f'.{part}' if part else '*'}"))
        if not found:
            sys.exit(
                f"there is no {options.peers_from}/peers-{base}.tar.xz: run tests/gpu/peers.py {base} first"
            )
        for path in found:
            shutil.copy(path, CARRIED)
    for path in options.extra:
        shutil.copy(path, CARRIED)
    if options.results:
        given = options.results
        shutil.copy(given / "results.tar.xz" if given.is_dir() else given, CARRIED / "results.tar.xz")
    sizes = {path.name: path.stat().st_size for path in sorted(CARRIED.iterdir())}
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    tree = sum((ROOT / name).lstat().st_size for name in tracked.stdout.split("\0") if name)
    for name, size in {**sizes, "the repository's files": tree}.items():
        print(f"  {size / 2**20:6.1f} MiB  {name}")
    total = (sum(sizes.values()) + tree) / 2**20
    print(f"  {total:6.1f} MiB in all, of {options.limit}")
    return int(total > options.limit)


def unpack() -> None:
    """.carry/ to build/, unless that was done before. Parts of a peer wait for each other."""
    build = ROOT / "build"
    if (CARRIED / "build.tar.xz").exists():
        if build.exists() and not (build / "carried").exists() and any(build.glob("libflashjit.so")):
            sys.exit(f"{build} is a build of this machine, which .carry would overwrite: remove one of them")
        extract(CARRIED / "build.tar.xz", ROOT)
    peers = HERE / "peers"
    peers.mkdir(parents=True, exist_ok=True)
    for path in sorted(CARRIED.glob("peers-*")):
        kept = peers / path.name
        if not kept.exists():
            shutil.copy(path, kept)
    for first in sorted(peers.glob("peers-*")):
        name, _, part = first.name.removeprefix("peers-").partition(".tar.xz")
        # The parts of three are .1of3, .2of3 and .3of3.
        parts = [first] if not part else sorted(peers.glob(f"peers-{name}.tar.xz.*"))
        if (peers / name).exists() or (part and len(parts) != int(part.partition("of")[2])):
            continue
        whole = peers / f"{name}.part"
        with whole.open("wb") as file:
            for each in parts:
                file.write(each.read_bytes())
        extract(whole, peers)
        whole.unlink()
    if (CARRIED / "results.tar.xz").exists() and not (HERE / "results").exists():
        extract(CARRIED / "results.tar.xz", HERE)


def extract(path: Path, into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-C", into, "-xJf", path], check=True)


def environment_of(job: carry_jobs.Job, commit: str, results: Path, drawn: bool) -> dict[str, str]:
    peers = [HERE / "peers" / name for name in job.peers]
    paths = [*peers, *(path for peer in peers for name in PEER_PATHS for path in peer.glob(name))]
    defaults = {
        "FLASHJIT_LOG": "quiet",
        "FLASHJIT_CACHE_DIR": str(HERE / "kernels"),
        "FLASHJIT_TEST_CACHE": str(HERE / "test-kernels"),
        # A lent machine may share its switch: multicast through it stays off.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        **PEER_SETTINGS,
    }
    given = {name: value for name, value in os.environ.items() if name != "FLASHJIT_EVERY_KERNEL"}
    return {
        **defaults,
        **given,
        **({} if drawn else {"FLASHJIT_EVERY_KERNEL": "1"}),
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT / "tools" / "python"])),
        "PYTHONUNBUFFERED": "1",
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(ROOT / "build"), os.environ.get("LD_LIBRARY_PATH")])
        ),
        "FLASHJIT_LIBRARY": str(ROOT / "build" / "libflashjit.so"),
        "FLASHJIT_FAKES": str(ROOT / "build" / "tests"),
        "COMMIT": commit,
        "PEERS": str(HERE / "peers"),
        "ALL_RESULTS": str(results),
    }


def last_line(path: Path) -> str:
    if not path.exists():
        return ""
    lines = path.read_bytes()[-4000:].decode(errors="replace").split("\n")
    return next((line.strip()[:140] for line in reversed(lines) if line.strip()), "")


class Report:
    """A line for each job, as it ends; what passed, with the commit it passed at; the archive of it all."""

    def __init__(self, results: Path, commit: str, out: Path | None, drawn: bool):
        self.results, self.commit, self.out = results, commit, out
        self.ran = f"{commit} drawn" if drawn else commit
        self.began = time.monotonic()
        self.lines: list[str] = []
        self.bad = 0

    def folder(self, name: str) -> Path:
        return self.results / name.replace(":", "_")

    def passed_before(self, name: str) -> bool:
        mark = self.folder(name) / "passed"
        return mark.exists() and mark.read_text() in (
            self.commit,
            self.ran,
        )  # all cases are the drawn ones, too

    def ended(self, job: Ended) -> None:
        folder = self.folder(job.name)
        folder.mkdir(parents=True, exist_ok=True)
        if job.what == "passed":
            (folder / "passed").write_text(self.ran)
        self.bad += job.code != 0 or not job.what.startswith(("passed", "skipped"))
        self.add(f"{job.name:24} {job.what:22} {job.seconds:4.0f} s  {last_line(folder / 'log')}")

    def add(self, line: str) -> None:
        self.lines.append(line)
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", flush=True)
        self.keep()

    def keep(self) -> None:
        (self.results / "summary.txt").write_text(f"{self.ran}\n" + "\n".join(self.lines) + "\n")
        if self.out:
            write_tar(self.out / "results.tar.xz", self.results.parent, self.results.name, level=1)


def run(options: argparse.Namespace) -> int:
    first = Path(options.first)
    chosen = (
        ":".join(first.read_text().split()) if first.is_file() else options.first
    )  # a file has a name a line
    try:
        jobs = carry_jobs.chosen(options.jobs, chosen)
    except ValueError as error:
        print(f"carry: {error}", file=sys.stderr)
        return 2
    gpus = run_tests.gpus()
    if not gpus:
        print("carry: there is no GPU here", file=sys.stderr)
        return 3
    os.chdir(ROOT)
    began = time.monotonic()
    if CARRIED.exists():
        unpack()
    carried = ROOT / "build" / "carried"
    commit = carried.read_text() if carried.exists() else commit_of(ROOT)
    results = HERE / "results"
    results.mkdir(parents=True, exist_ok=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    report = Report(results, commit, options.out, options.drawn)
    print(
        f"commit {commit}, {len(gpus)} GPUs, {os.cpu_count()} cores, unpacked in {time.monotonic() - began:.0f} s"
    )
    left = [job for job in jobs if options.again or not report.passed_before(job.name)]
    for job in jobs:
        if job not in left:
            report.add(f"{job.name:24} passed before")
    plan = Plan(
        left,
        gpus,
        os.cpu_count() or 1,
        results,
        lambda job, workers: environment_of(job, commit, results, options.drawn),
        report.ended,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        plan.run(options.seconds - (time.monotonic() - began))
    finally:
        plan.stop("cut off: the run was ended")
        report.keep()
    print("\n".join(["", *sorted(report.lines)]))
    return int(report.bad > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="writes .carry/")
    packing.add_argument("--build", type=Path, default=ROOT / "build")
    packing.add_argument(
        "--peers",
        nargs="*",
        default=[],
        metavar="NAME",
        help="what peers.py made; a part of one as cute.1of2",
    )
    packing.add_argument("--peers-from", type=Path, default=ROOT / "build" / "peers", metavar="FOLDER")
    packing.add_argument("--peers-only", action="store_true", help="leave the build out: it was sent before")
    packing.add_argument(
        "--extra",
        type=Path,
        nargs="*",
        default=[],
        help="scripts of your own: NAME.sh becomes the job extra:NAME",
    )
    packing.add_argument("--results", type=Path, help="an earlier results.tar.xz, or its folder")
    packing.add_argument(
        "--limit", type=float, default=LIMIT, help="MiB that may travel (default %(default)s)"
    )
    running = commands.add_parser("run", help="runs jobs")
    running.add_argument("jobs", nargs="+", metavar="JOB")
    running.add_argument(
        "--first", default="*", help="tests of the job `first`: a filter, or a file of names"
    )
    running.add_argument("--seconds", type=float, default=560, help="for all (default %(default)s)")
    running.add_argument("--out", type=Path, help="folder for results.tar.xz")
    running.add_argument(
        "--drawn", action="store_true", help="of tests with many cases those that CI draws, instead of all"
    )
    running.add_argument("--again", action="store_true", help="also what passed before")
    commands.add_parser("list", help="prints the jobs")
    options = parser.parse_args(arguments)
    if options.command == "pack":
        return pack(options)
    if options.command == "run":
        return run(options)
    for job in carry_jobs.all_jobs("*"):
        where = f"{job.gpus} GPU{'s' * (job.gpus > 1)}{' alone' * job.alone}"
        print(f"{job.name:24} {job.seconds:5} s  {where:12} {' '.join(job.peers)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

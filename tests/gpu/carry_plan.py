"""How jobs of a plan share the GPUs and cores of a machine. A Plan starts them, ends them at their limits, and says what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from carry_jobs import Job

MORE_CORES = 8  # so many more for a queue are worth starting it anew


@dataclass
class Running:
    job: Job
    gpus: list[str]
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float
    handed_out: Path  # there when a queue has begun the last of its work
    workers: int = 0
    why: str = ""  # why it was ended, if it was

    def end(self, why: str) -> None:
        """Ends the job with all that it started. A queue may write down what it has first."""
        if not self.why:
            self.why = why
            if self.job.rest:
                self.process.terminate()
            else:
                self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class Ended:
    name: str
    code: int
    seconds: float
    what: str  # passed, failed, cut off, ...


@dataclass
class Plan:
    """environment(job, workers): of its process. ended(Ended): called once for each job. The first jobs of a plan go first where
    several wait for the same. Jobs that need their GPU alone take the first GPU, the others the second and so on as long as one
    of those is left; with a single GPU they take turns."""

    jobs: list[Job]
    gpus: list[str]
    cores: int
    results: Path
    environment: Callable[[Job, int], dict[str, str]]
    ended: Callable[[Ended], None]
    running: list[Running] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    own: set[str] = field(default_factory=set)  # GPUs that a job which waits is to have alone
    shared: set[str] = field(default_factory=set)  # GPUs that a job which waits is to share

    def __post_init__(self) -> None:
        able = []
        for job in self.jobs:
            if job.gpus <= len(self.gpus):
                able.append(job)
            else:
                here = f"left out: it needs {job.gpus} GPUs, and here is {len(self.gpus)}"
                self.ended(Ended(job.name, 0, 0, here))
        # What needs all GPUs alone begins first, then what compiles for others.
        whole = [job for job in able if job.alone and job.gpus > 1]
        warm = [
            replace(job, name=f"{job.name}:warm", command=job.warm, alone=False, warm="", cores=6)
            for job in able
            if job.warm
        ]
        self.waiting = whole + warm + [job for job in able if job not in whole]

    def run(self, seconds: float) -> None:
        """Until all jobs have ended, or for so many seconds."""
        end = time.monotonic() + seconds
        while (self.waiting or self.running) and time.monotonic() < end:
            self.collect()
            self.start(end)
            time.sleep(0.1)
        self.stop("cut off: time is over")
        for job in self.waiting:
            self.ended(Ended(job.name, 0, 0, "not begun: time is over"))
        self.waiting = []

    def stop(self, why: str) -> None:
        for each in self.running:
            each.end(why)
        patience = time.monotonic() + 3
        while self.running:
            self.collect()
            if time.monotonic() > patience:
                for each in self.running:
                    each.kill()
            time.sleep(0.05)

    def collect(self) -> None:
        """What has ended, and ends what has had its time."""
        for each in list(self.running):
            seconds = time.monotonic() - each.began
            code = each.process.poll()
            if code is None:
                if seconds > each.job.seconds:
                    each.end(f"cut off at {each.job.seconds} s")
                continue
            each.kill()  # what it may have left running
            each.log.close()
            self.running.remove(each)
            if each.why != "anew":
                what = each.why or {0: "passed", 77: "skipped itself"}.get(code, f"failed ({code})")
                self.ended(Ended(each.job.name, code if not each.why else 1, seconds, what))

    def start(self, end: float) -> None:
        self.own, self.shared = set(), set()
        for job in list(self.waiting):
            if job.rest or self.is_warming(job):
                continue
            gpus = self.gpus_for(job)
            busy = sum(each.job.cores for each in self.running if not (each.job.rest or each.job.alone))
            enough = job.alone or busy + min(job.cores, self.cores) <= self.cores
            if enough and self.are_free(gpus, job):
                self.waiting.remove(job)
                self.begin(job, gpus)
            elif job.alone:
                self.own.update(gpus)
            elif enough:
                self.shared.update(gpus)
        self.start_queue()

    def is_warming(self, job: Job) -> bool:
        name = f"{job.name}:warm"
        return any(each.job.name == name for each in self.running) or any(
            each.name == name for each in self.waiting
        )

    def lonely(self) -> bool:
        """Whether a job waits or runs that needs its GPU alone."""
        return any(job.alone for job in [*self.waiting, *(each.job for each in self.running)])

    def gpus_for(self, job: Job) -> list[str]:
        if job.gpus > 1 or len(self.gpus) == 1:
            return self.gpus[: job.gpus]
        others = self.gpus[1:]
        if not any(not each.alone for each in [*self.waiting, *(each.job for each in self.running)]):
            others = self.gpus  # all want one alone: each GPU takes one
        if job.alone:
            free = [gpu for gpu in others if others is self.gpus and self.are_free([gpu], job)]
            return free[:1] or self.gpus[:1]
        users = {
            gpu: sum(gpu in each.gpus for each in self.running if not each.job.rest) for gpu in self.gpus
        }
        return [min(others if self.lonely() else self.gpus, key=lambda gpu: users[gpu])]

    def are_free(self, gpus: list[str], job: Job) -> bool:
        taken = set(self.own) | (self.shared if job.alone else set())
        for each in self.running:
            if job.alone or each.job.alone:
                taken.update(each.gpus)
        return not taken.intersection(gpus)

    def start_queue(self) -> None:
        """Starts the first waiting queue on what others leave, and restarts a running one where that has changed much. Once a queue
        has handed out all its work, the next begins beside it: so a few slow tests keep no cores idle."""
        taken = set(self.own)
        for each in self.running:
            if each.job.alone:
                taken.update(each.gpus)
        kept = self.gpus[:1] if self.lonely() else []
        gpus = [gpu for gpu in self.gpus if gpu not in taken and gpu not in kept]
        busy = sum(each.job.cores for each in self.running if not each.job.rest)
        workers = max(2, self.cores - busy)
        queues = [each for each in self.running if each.job.rest]
        for queue in reversed(queues):
            done = queue.handed_out.exists()
            moved = not set(queue.gpus) <= set(gpus) if done else queue.gpus != gpus
            if moved or (not done and workers >= queue.workers + MORE_CORES):
                if not queue.why:
                    self.waiting.insert(0, queue.job)
                queue.end("anew")
        if any(queue.why or not queue.handed_out.exists() for queue in queues):
            return
        job = next((job for job in self.waiting if job.rest), None)
        if job and gpus:
            self.waiting.remove(job)
            self.begin(job, gpus, workers)

    def begin(self, job: Job, gpus: list[str], workers: int = 0) -> None:
        folder = self.results / job.name.replace(":", "_")
        folder.mkdir(parents=True, exist_ok=True)
        handed_out = folder / "handed_out"
        handed_out.unlink(missing_ok=True)
        log = (folder / "log").open("ab")
        environment = {**self.environment(job, workers), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        process = subprocess.Popen(
            ["bash", "-c", job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, "RESULTS": str(folder), "WORKERS": str(workers)},
            start_new_session=True,
        )
        self.running.append(Running(job, gpus, process, log, time.monotonic(), handed_out, workers))

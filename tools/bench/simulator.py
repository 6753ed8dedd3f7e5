"""How long attention over a shared sequence takes, by scheme and number of ranks, without a GPU.

    python3 tools/bench/simulator.py --tokens 262144 --ranks 8,64,512

A rank's kernels, its memory's copies and its links are each one after the other; a step of a ring begins when its block is there
and the step before has ended, on both sides. The rates of a Machine are those that kernels and links reach, not their peaks.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
from flashjit._chunks import LAYOUTS, Chunk, chunks, parts_of_heads  # noqa: E402
from flashjit.errors import InvalidArgument  # noqa: E402

SCHEMES = ("ring", "all_gather", "ulysses", "two_level")


class Machine(NamedTuple):
    """H100s, eight on a host with NVLink, and a 400 Gb/s port for each between hosts."""

    ranks_of_host: int = 8
    forward_flops: float = 700e12  # of kernels, a second
    backward_flops: float = 600e12
    memory_bytes: float = 2.4e12  # read and written a second, by copies and sums
    link_bytes: float = 330e9  # sent, and received, a second by a rank
    link_latency: float = 12e-6  # of a transfer
    port_bytes: float = 42e9  # the same between hosts
    port_latency: float = 25e-6
    launch: float = 8e-6  # of a kernel that has nothing to do
    head_start: float = 30e-6  # of a ring's transfer before the kernels beside it
    rate_of_parts: float = (
        0.96  # of a ring's kernels, and all_gather's backward ones, beside those of a whole sequence
    )
    capacity: float = 79e9  # bytes of a GPU's memory

    def link(self, ranks: int) -> tuple[float, float]:
        """Bytes a second, and latency, between `ranks` ranks."""
        return (
            (self.link_bytes, self.link_latency)
            if ranks <= self.ranks_of_host
            else (self.port_bytes, self.port_latency)
        )


class Problem(NamedTuple):
    """One attention: sizes of the whole sequence, and its mask."""

    tokens: int  # of the whole sequence
    heads: int = 32
    heads_kv: int = 8
    dim: int = 128
    batch: int = 1
    causal: bool = True
    window: int | None = None
    element: int = 2  # bytes

    def flops(self, pairs: float) -> float:
        """Operations of the forward pass; the backward pass has two and a half times as many."""
        return 4.0 * pairs * self.dim * self.heads * self.batch

    def q_bytes(self, rows: int) -> int:
        return self.batch * self.heads * rows * self.dim * self.element

    def kv_bytes(self, rows: int) -> int:
        return 2 * self.batch * self.heads_kv * rows * self.dim * self.element


class Event(NamedTuple):
    """What a rank does, and from when to when, in seconds from the start of the pass."""

    rank: int
    what: str  # "compute", "copy", "send"
    begin: float
    end: float


class Plan(NamedTuple):
    """What simulate() finds. With both passes, times are of both."""

    scheme: str
    layout: str
    ranks: int
    seconds: float  # of the slowest rank
    alone: float  # on one rank
    waiting: float  # the slowest rank's, for transfers and others
    bytes: float  # of memory a rank has at its peak
    events: tuple[Event, ...] = ()

    @property
    def efficiency(self) -> float:
        """The share of linear speed."""
        return self.alone / self.seconds / self.ranks


def pairs(q: Chunk, kv: Chunk, causal: bool, window: int | None) -> float:
    """How many pairs of these queries and keys attend."""
    if not causal:
        return float(q.rows) * kv.rows
    if q.step > 1:  # striped: both have every n-th row
        return (
            q.rows * (q.rows + 1) / 2
            if window is None
            else min(q.rows * (q.rows + 1) / 2, q.rows * window / q.step)
        )

    def before(distance: int) -> float:
        """Those whose key is at least so far before the query."""
        first, last = (max(0, min(kv.rows, i - distance - kv.first + 1)) for i in (q.first, q.last))
        growing = last - first
        begin = (
            q.rows if growing == 0 else min(q.rows, max(0, kv.first + distance - q.first))
        )  # rows that see none
        if growing == 0:
            return float(first) * q.rows
        full = max(0, q.last - distance - (kv.first + kv.rows - 1) + 1) if last == kv.rows else 0
        full = min(full, q.rows - begin)
        rising = q.rows - begin - full
        return rising * (max(first, 1) + (max(first, 1) + rising - 1)) / 2 + float(full) * kv.rows

    return before(0) - (before(window) if window is not None else 0)


def simulate(
    problem: Problem,
    ranks: int,
    scheme: str = "ring",
    layout: str = "zigzag",
    *,
    backward: bool = False,
    machine: Machine = Machine(),
    inner: int = 1,
    keep_events: bool = False,
) -> Plan:
    """One pass of one scheme of SCHEMES.

    backward: the backward pass; else the forward pass. inner: with two_level, how many ranks share heads. keep_events: the plan
    has each rank's events. Raises InvalidArgument where the tokens or the ranks do not divide.
    """
    _check(problem, ranks, layout, machine, (scheme,))
    parts = ranks * (2 if layout == "zigzag" else 1)
    if problem.tokens % parts:
        raise InvalidArgument(
            f"problem.tokens is {problem.tokens}, which does not divide into {parts} parts for {ranks} ranks and the "
            f"layout {layout!r}: pad it to {-(-problem.tokens // parts) * parts}."
        )
    if not 1 <= inner <= ranks or ranks % inner:
        raise InvalidArgument(f"inner is {inner}: give a divisor of the {ranks} ranks.")
    run = _Run(problem, ranks, scheme, layout, backward, machine, inner, keep_events)
    {"ring": run.ring, "all_gather": run.all_gather, "ulysses": run.ulysses, "two_level": run.two_level}[
        scheme
    ]()
    alone = _Run(problem, 1, scheme, "contiguous", backward, machine, 1, False)
    alone.compute(
        0, pairs(Chunk(0, problem.tokens, 0), Chunk(0, problem.tokens, 0), problem.causal, problem.window)
    )
    seconds = max(run.now)
    slowest = run.now.index(seconds)
    return Plan(
        scheme,
        layout,
        ranks,
        seconds,
        alone.now[0],
        seconds - run.busy[slowest],
        memory_bytes(problem, ranks, scheme, backward, inner),
        tuple(run.events),
    )


def _check(problem: Problem, ranks: int, layout: str, machine: Machine, schemes: Sequence[str]) -> None:
    """What no timeline can be made of."""
    least = {
        "problem.tokens": (problem.tokens, 0),
        "problem.heads": (problem.heads, 1),
        "problem.heads_kv": (problem.heads_kv, 1),
        "problem.dim": (problem.dim, 1),
        "problem.batch": (problem.batch, 0),
        "problem.element": (problem.element, 1),
        "problem.window": (1 if problem.window is None else problem.window, 1),
        "ranks": (ranks, 1),
        "machine.ranks_of_host": (machine.ranks_of_host, 1),
    }
    for name, (value, smallest) in least.items():
        if not isinstance(value, Integral) or value < smallest:
            raise InvalidArgument(f"{name} is {value!r}: give a whole number of at least {smallest}.")
    if problem.heads % problem.heads_kv:
        raise InvalidArgument(
            f"problem.heads is {problem.heads} and problem.heads_kv {problem.heads_kv}: give a multiple of it."
        )
    for name, value in machine._asdict().items():
        may_be_zero = name in ("link_latency", "port_latency", "launch", "head_start", "capacity")
        if not (isinstance(value, (int, float)) and (value > 0 or may_be_zero and value == 0)):
            raise InvalidArgument(
                f"machine.{name} is {value!r}: give a number {'of at least' if may_be_zero else 'above'} 0."
            )
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout is {layout!r}: give one of {', '.join(LAYOUTS)}.")
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise InvalidArgument(f"scheme is {scheme!r}: give one of {', '.join(SCHEMES)}.")


def memory_bytes(
    problem: Problem, ranks: int, scheme: str, backward: bool = False, inner: int = 1, on_gpu: bool = True
) -> float:
    """The tensors of the rank that has the most at the peak of a pass, in the layout zigzag, the caller's Q, K, V, O, dO and
    gradients with them. on_gpu: with dQ's accumulator, the one workspace that counts; else with gloo's copy of
    what it adds up."""
    rows = problem.tokens // ranks
    q, kv, fp32 = problem.q_bytes(rows), problem.kv_bytes(rows), 4 / problem.element
    lse = q / problem.dim / problem.element * 4
    inputs = q + kv + lse
    accumulator = fp32 * q if on_gpu else 0
    if backward:
        inputs += 2 * q  # O and dO
    if ranks == 1:
        return inputs + (q + kv + accumulator if backward else q)
    if scheme == "ring":
        blocks = min(ranks - 1, 2) * kv  # at work and under way
        if not backward:  # O, which the blocks join in place; and with the last block O as it is returned
            return inputs + fp32 * q + max(blocks, kv + q)
        # The sum of dQ and a part; of dK and dV the sums that leave and those that come, and a part, with new sums where it is less.
        part, new_sums = (kv / 2, kv) if problem.causal else (kv, 0)
        return inputs + blocks + fp32 * (2 * q + 2 * kv + part) + max(accumulator, fp32 * new_sums)
    if scheme == "all_gather":
        if not backward:  # K and V as they come and in order, or in order beside O
            return inputs + ranks * kv + max(ranks * kv, q)
        # dQ, the sums, and the parts and O of half of the queries.
        gathered = ranks * kv
        parts = fp32 * (q / 2 + gathered) + q / 2 + accumulator / 2
        return (
            inputs
            + gathered
            + q
            + fp32 * gathered
            + (parts if on_gpu else max(parts, fp32 * (gathered + kv)))
        )
    ranks_of_heads = ranks if scheme == "ulysses" else inner
    spread = q + kv * max(1, ranks_of_heads / problem.heads_kv)
    if scheme == "ulysses":
        parts = _parts_of_heads(problem, ranks)
        away = (ranks - 1) / ranks / parts  # of a part, what is another rank's
        back = away * (2 if problem.batch > 1 else 1)  # with several sequences also where it comes in
        several = parts > 1
        if not backward:  # Q, K and V of the last part as they come; or all of O, by head and by row
            return (
                inputs
                + spread
                + max(away * spread + several * (2 * q - q / parts + back * q), 2 * q + back * q)
            )
        # At the last part's kernel dO, gradients and what has left before; then the gradients by head and by row.
        kernel = several * (1 + back) * spread + (q + spread + accumulator) / parts
        return inputs + spread + q + max(kernel, spread + spread / parts + back * spread)
    own = problem._replace(heads=max(1, problem.heads // inner), heads_kv=max(1, problem.heads_kv // inner))
    return inputs + memory_bytes(own, ranks // inner, "ring", backward, on_gpu=on_gpu)


def _parts_of_heads(problem: Problem, ranks: int) -> int:
    return parts_of_heads(ranks, problem.batch * problem.tokens, problem.heads, problem.heads_kv)


class _Run:
    """What each rank has done so far."""

    def __init__(
        self,
        problem: Problem,
        ranks: int,
        scheme: str,
        layout: str,
        backward: bool,
        machine: Machine,
        inner: int,
        keep_events: bool,
    ) -> None:
        self.problem, self.ranks, self.layout, self.backward, self.machine, self.inner = (
            problem,
            ranks,
            layout,
            backward,
            machine,
            inner,
        )
        self.now, self.busy, self.keep = [0.0] * ranks, [0.0] * ranks, keep_events
        self.events: list[Event] = []
        self.rows = problem.tokens // ranks

    def _take(self, rank: int, what: str, seconds: float) -> None:
        begin = self.now[rank]
        self.now[rank] = begin + seconds
        self.busy[rank] += seconds
        if self.keep:
            self.events.append(Event(rank, what, begin, begin + seconds))

    def compute(self, rank: int, count: float, heads: float = 1.0, rate: float = 1.0) -> None:
        if count <= 0:
            return
        flops = self.problem.flops(count) * heads / rate
        machine = self.machine
        seconds = 2.5 * flops / machine.backward_flops if self.backward else flops / machine.forward_flops
        self._take(rank, "compute", machine.launch + seconds)

    def copy(self, rank: int, bytes: float) -> None:
        if bytes > 0:
            self._take(rank, "copy", self.machine.launch + bytes / self.machine.memory_bytes)

    def transfer(self, ready: float, bytes: float, ranks: int, transfers: int = 1) -> float:
        speed, latency = self.machine.link(ranks)
        return ready + transfers * latency + bytes / speed

    def together(self, bytes: float, ranks: int, transfers: int, group: Sequence[int]) -> None:
        """A collective: all begin with the last one, and wait for its end."""
        begin = max(self.now[rank] for rank in group)
        end = self.transfer(begin, bytes, ranks, transfers)
        for rank in group:
            if self.keep:
                self.events.append(Event(rank, "send", begin, end))
            self.now[rank] = end

    def ring(self, ring: Sequence[Sequence[int]] | None = None, heads: float = 1.0) -> None:
        """The ranks of each ring, whose members may be several ranks with a part of the heads each."""
        members = ring or [[rank] for rank in range(self.ranks)]
        count = len(members)
        problem, rows = self.problem, self.rows * len(members[0])
        chunks_of = [chunks(place, count, rows, self.layout) for place in range(count)]
        block = problem.kv_bytes(rows) * heads
        sums = block * 4 / problem.element
        q = problem.q_bytes(rows) * heads * 4 / problem.element
        arrived, coming, link = [0.0] * count, [0.0] * count, [0.0] * count
        leaders = [group[0] for group in members]
        for step in range(count):
            for place, rank in enumerate(leaders):
                self.now[rank] = max(self.now[rank], arrived[place])
            starts = [self.now[rank] for rank in leaders]
            if step + 1 < count:
                arrived = [
                    self.transfer(max(starts[place], starts[place - 1], link[place]), block, self.ranks)
                    for place in range(count)
                ]
                link = list(arrived)
                self._let_transfers_begin(leaders)
                if self.keep:
                    self.events += [
                        Event(leaders[place], "send", max(starts[place], starts[place - 1]), arrived[place])
                        for place in range(count)
                    ]
            for place, rank in enumerate(leaders):
                seen = [
                    (a, pairs(a, b, problem.causal, problem.window))
                    for a in chunks_of[place]
                    for b in chunks_of[(place - step) % count]
                ]
                total = sum(found for _, found in seen)
                self.compute(rank, total, heads, self.machine.rate_of_parts if count > 1 else 1.0)
                if total and step:  # O is joined by the kernel, which reads it, or dQ added
                    touched = sum(a.rows for a in {a for a, found in seen if found}) / rows
                    if self.backward:
                        self.copy(rank, 3 * q * touched)
                    else:
                        self._take(rank, "copy", q * touched / self.machine.memory_bytes)
            if self.backward and count > 1:
                for place, rank in enumerate(leaders):
                    self.now[rank] = max(self.now[rank], coming[place])
                    if step:
                        self.copy(rank, 3 * sums)
                ends = [self.now[rank] for rank in leaders]
                coming = [
                    self.transfer(max(ends[place], ends[place - 1], link[place]), sums, self.ranks)
                    for place in range(count)
                ]
                link = list(coming)
                self._let_transfers_begin(leaders)
        for place, rank in enumerate(leaders):
            self.now[rank] = max(self.now[rank], coming[place])
            if count > 1:
                self.copy(rank, 1.5 * q + (1.5 * sums if self.backward else 0))
        for group in members:
            for rank in group[1:]:
                self.now[rank], self.busy[rank] = self.now[group[0]], self.busy[group[0]]

    def _let_transfers_begin(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.now[rank] += self.machine.head_start

    def all_gather(self) -> None:
        problem, ranks = self.problem, self.ranks
        everyone = range(ranks)
        rate = self.machine.rate_of_parts if self.backward and ranks > 1 else 1.0
        all_kv = problem.kv_bytes(self.rows) * ranks
        self.together(all_kv * (ranks - 1) / ranks, ranks, ranks - 1, everyone)
        whole = Chunk(0, problem.tokens, 0)
        for rank in everyone:
            self.copy(rank, 2 * all_kv if ranks > 1 else 0)
            for rows in chunks(rank, ranks, self.rows, self.layout):
                if rows.step > 1:
                    self.compute(
                        rank,
                        sum(pairs(rows, rows, problem.causal, problem.window) for _ in everyone),
                        rate=rate,
                    )
                else:
                    self.compute(rank, pairs(rows, whole, problem.causal, problem.window), rate=rate)
            if ranks > 1:
                self.copy(
                    rank, 2 * problem.q_bytes(self.rows) * (4 / problem.element if self.backward else 1)
                )
                if self.backward:  # dK and dV in fp32: added up, and put in order
                    self.copy(rank, 5 * all_kv * 4 / problem.element)
        if self.backward:
            self.together(all_kv * 4 / problem.element * (ranks - 1) / ranks, ranks, ranks - 1, everyone)

    def _share_heads(self, group: Sequence[int], back: bool) -> None:
        """An all-to-all of Q, K and V, or of O; in the backward pass of their gradients, the other way round."""
        ranks, problem = len(group), self.problem
        if ranks == 1:
            return
        q, kv = problem.q_bytes(self.rows), problem.kv_bytes(self.rows) * max(1, ranks / problem.heads_kv)
        bytes = q if back else q + kv
        for rank in group:
            self.copy(rank, 4 * bytes)
        self.together(bytes * (ranks - 1) / ranks, ranks, ranks - 1, group)

    def ulysses(self) -> None:
        problem, ranks = self.problem, self.ranks
        parts = _parts_of_heads(problem, ranks)
        o = problem.q_bytes(self.rows) / parts
        qkv = o + problem.kv_bytes(self.rows) * max(1, ranks / problem.heads_kv) / parts
        come, leave = (o, qkv) if self.backward else (qkv, o)
        whole = Chunk(0, problem.tokens, 0)
        seen = pairs(whole, whole, problem.causal, problem.window)
        link, arrived = 0.0, []
        for _ in range(parts):
            link = self._exchange(link, come)
            arrived.append(link)
        for at in arrived:
            for rank in range(ranks):
                self.now[rank] = max(self.now[rank], at)
                self.copy(rank, 2 * come if ranks > 1 else 0)
                self.compute(rank, seen, 1 / ranks / parts)
                self.copy(rank, 2 * leave if ranks > 1 else 0)
            link = self._exchange(max(link, *self.now), leave)
        self.now = [max(link, now) for now in self.now]

    def _exchange(self, begin: float, bytes: float) -> float:
        """The end of an all-to-all of all ranks."""
        if self.ranks == 1:
            return begin
        end = self.transfer(begin, bytes * (self.ranks - 1) / self.ranks, self.ranks, self.ranks - 1)
        if self.keep:
            self.events += [Event(rank, "send", begin, end) for rank in range(self.ranks)]
        return end

    def two_level(self) -> None:
        groups = [list(range(first, first + self.inner)) for first in range(0, self.ranks, self.inner)]
        for group in groups:
            self._share_heads(group, self.backward)
        self.ring(groups, 1 / self.inner)
        for group in groups:
            self._share_heads(group, not self.backward)


def plans(
    problem: Problem,
    ranks: int,
    *,
    layout: str | None = None,
    backward: bool = False,
    machine: Machine = Machine(),
    schemes: Sequence[str] = SCHEMES,
) -> list[Plan]:
    """The plans of all schemes that work on so many ranks and fit into memory, the fastest first.

    layout: None: zigzag with a causal mask, else contiguous. backward: both passes; else the forward pass. Raises InvalidArgument.
    """
    layout = layout or ("zigzag" if problem.causal else "contiguous")
    _check(problem, ranks, layout, machine, schemes)
    found = []
    for scheme in schemes:
        inner = (
            _inner_ranks(problem, ranks, machine)
            if scheme == "two_level"
            else ranks
            if scheme == "ulysses"
            else 1
        )
        if (
            problem.tokens % (ranks * (2 if layout == "zigzag" else 1))
            or problem.heads % inner
            or (scheme == "two_level" and not 1 < inner < ranks)
        ):
            continue
        if problem.heads_kv % inner and inner % problem.heads_kv:
            continue
        passes = [
            simulate(problem, ranks, scheme, layout, backward=b, machine=machine, inner=inner)
            for b in ([False, True] if backward else [False])
        ]
        plan = (
            passes[0]
            if not backward
            else passes[1]._replace(
                **{name: sum(getattr(p, name) for p in passes) for name in ("seconds", "alone", "waiting")}
            )
        )
        if plan.bytes <= machine.capacity:
            found.append(plan)
    return sorted(found, key=lambda plan: plan.seconds)


def _inner_ranks(problem: Problem, ranks: int, machine: Machine) -> int:
    """As many as share the heads within a host."""
    return max(
        n
        for n in range(1, min(machine.ranks_of_host, ranks) + 1)
        if ranks % n == 0
        and problem.heads % n == 0
        and (problem.heads_kv % n == 0 or n % problem.heads_kv == 0)
    )


FIELDS: dict[str, Callable[[Plan], Any]] = {
    "ranks": lambda p: p.ranks,
    "scheme": lambda p: p.scheme,
    "layout": lambda p: p.layout,
    "ms": lambda p: f"{p.seconds * 1e3:.3f}",
    "efficiency": lambda p: f"{p.efficiency:.3f}",
    "waiting_ms": lambda p: f"{p.waiting * 1e3:.3f}",
    "memory_gb": lambda p: f"{p.bytes / 1e9:.2f}",
}


def whole_numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulator.py", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tokens", type=whole_numbers, default=[131072], help="lengths of the whole sequence; default 131072"
    )
    parser.add_argument("--ranks", type=whole_numbers, default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--window", type=int)
    parser.add_argument(
        "--layout", choices=LAYOUTS, help="default zigzag with a causal mask, else contiguous"
    )
    parser.add_argument("--forward", action="store_true", help="the forward pass alone")
    for name, value in Machine()._asdict().items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=type(value), default=value, help=f"default {value:g}"
        )
    parser.add_argument("--csv", action="store_true", help="print commas")
    args = parser.parse_args(arguments)
    machine = Machine(*(getattr(args, name) for name in Machine._fields))
    rows = [["tokens", *FIELDS]]
    for tokens, ranks in itertools.product(args.tokens, args.ranks):
        problem = Problem(tokens, args.heads, args.heads_kv, args.dim, args.batch, not args.full, args.window)
        try:
            found = plans(problem, ranks, layout=args.layout, backward=not args.forward, machine=machine)
        except InvalidArgument as error:
            parser.error(str(error))
        for plan in found:
            rows.append([str(tokens), *(str(read(plan)) for read in FIELDS.values())])
    if args.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
        return 0
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(x.rjust(width) for x, width in zip(row, widths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

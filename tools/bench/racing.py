"""What the races share: a heat's calls, checked against attention in fp32 and timed in turns, and a row of the table for each."""

import importlib.metadata
import itertools
import math
import typing

import measuring
import serving
from measuring import torch

COLUMNS = (
    "device",
    "date",
    "commit",
    "race",
    "problem",
    "who",
    "version",
    "us",
    "tflop_per_s",
    "tb_per_s",
    "error",
    "why_not",
)
OURS = "flashjit"


class Heat(typing.NamedTuple):
    """One problem. calls: who -> a function for each copy of what is read, which returns a tensor or several. expected: the same in fp32,
    for the first copy. limit: of the relative norm of errors. graphs: whether calls can be captured in a CUDA graph."""

    problem: str
    calls: dict
    expected: tuple
    limit: float
    operations: float
    read_bytes: float = 0.0
    graphs: bool = True


class Race(typing.NamedTuple):
    """A peer. modules: what it is imported as. package: how a user gets it. problems(): what to run, each with a name. heat(problem):
    its Heat. versions: the distribution whose version a call's row has, by what its name begins with."""

    name: str
    modules: tuple
    package: str
    problems: typing.Callable
    heat: typing.Callable
    versions: dict


def missing(race):
    """Why the race cannot be run here, or ""."""
    for name in race.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a peer's import may fail in any way
            return f"{name} cannot be imported ({measuring.reason(error)}): {race.package}"
    return ""


def version_of(race, who):
    for begin, distribution in race.versions.items():
        if who.startswith(begin):
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                return ""
    return ""


def as_tuple(found):
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def relative_error(found, expected):
    """The largest of the tensors' relative norms; NaN if there is one."""
    norms = [
        ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()
        for a, b in zip(as_tuple(found), expected, strict=True)
    ]
    return math.nan if any(map(math.isnan, norms)) else max(norms)


def checked(report, heat):
    """who -> its error, of those that are right, and who -> why not."""
    errors, refused = {}, {}
    for who, functions in heat.calls.items():
        try:
            error = relative_error(functions[0](), heat.expected)
        except Exception as found:
            refused[who] = measuring.reason(found)
        else:
            if error <= heat.limit:
                errors[who] = error
                continue
            refused[who] = f"its error is {error:.3g}, over {heat.limit}"
        if who.startswith(OURS):
            report.failure(f"{heat.problem}: {who}: {refused[who]}")
        else:
            print(f"  {who} is left out: {refused[who]}", flush=True)
    return errors, refused


def times_of(heat, names, rounds):
    """who -> microseconds of a call."""
    calls = {who: heat.calls[who] for who in names}
    if heat.graphs:
        return serving.microseconds(calls, rounds)
    ms = measuring.interleaved_ms({who: functions[0] for who, functions in calls.items()}, rounds)
    return {who: 1e3 * x for who, x in ms.items()}


def run_heat(report, race, problem, rounds):
    heat = race.heat(problem)
    errors, refused = checked(report, heat)
    us = times_of(heat, errors, rounds) if rounds else {}
    for who in heat.calls:
        row = {"race": race.name, "problem": heat.problem, "who": who, "version": version_of(race, who)}
        if who in us:
            row["us"], row["tflop_per_s"] = us[who], heat.operations / us[who] / 1e6
            row["tb_per_s"] = heat.read_bytes / us[who] / 1e6 if heat.read_bytes else ""
        elif rounds and who in errors:
            refused[who] = "a graph of it cannot be captured"
        error = f"{errors[who]:.3g}" if who in errors else ""
        report.row(**row, error=error, why_not=refused.get(who, ""))
    print(
        f"{race.name}: {heat.problem}\n"
        + "\n".join(
            f"    {who:44} "
            + (f"{us[who]:9.1f} us  {heat.operations / us[who] / 1e6:6.0f} TFLOP/s" if who in us else "")
            + f"  error {error:.2g}"
            for who, error in errors.items()
        ),
        flush=True,
    )


def pairs(queries, lengths, causal=True):
    """How many a batch computes, the last query of each sequence at its last key."""
    return sum(n * m - (n * (n - 1) // 2 if causal else 0) for n, m in zip(queries, lengths))


def attention_in_fp32(q, k, v, causal=True, scale=None, weigh=lambda scores: scores.softmax(-1)):
    """O, fp32 [queries, heads, dim], of one sequence. q: [queries, heads, dim]; k, v: [keys, heads_kv, dim]. weigh: P of scores, which are
    -inf where the mask is."""
    group, keys = q.shape[1] // k.shape[1], k.shape[0]
    out = torch.empty(*q.shape[:2], v.shape[2], device=q.device)
    for head in range(k.shape[1]):
        of = slice(head * group, (head + 1) * group)
        scores = torch.einsum("qgd,kd->gqk", q[:, of].float(), k[:, head].float()) * (
            scale or q.shape[2] ** -0.5
        )
        if causal and q.shape[0] > 1:
            later = torch.ones(q.shape[0], keys, device=q.device, dtype=torch.bool).triu(
                keys - q.shape[0] + 1
            )
            scores.masked_fill_(later, -torch.inf)
        out[:, of] = torch.einsum("gqk,kd->qgd", weigh(scores), v[:, head].float())
    return out


def offsets(counts, device):
    return torch.tensor([0, *itertools.accumulate(counts)], device=device, dtype=torch.int32)

"""The tables of races.py's results."""

import statistics
import textwrap

from plot_rows import listed, markdown, values

TITLES = {
    "codes": "Q, K and V of 8 bits (e4m3), next to FlashAttention-3",
    "flashinfer": "Over pages of 16 rows, next to FlashInfer",
    "latents": "Over latents (576 columns, V of 512), next to FlashMLA and FlashInfer",
    "programs": "Masks and scores, next to FlexAttention on FlashAttention-4 and cuDNN's flex attention",
    "tangents": "O and its tangent, next to jvp_flash_attention",
    "weights": "Sigmoid attention, next to FlashInfer with a transform of logits",
    "wide": "Heads of 512 columns, next to FFPA",
}
OURS = "flashjit"


def in_order(rows, name):
    return list(dict.fromkeys(row[name] for row in rows))


def microseconds(text):
    us = float(text)
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def beside_ours(timed):
    """The best peer's time by our best one, and the peer; None where either has none. timed: who -> microseconds."""
    ours = min((us for who, us in timed.items() if who.startswith(OURS)), default=None)
    theirs = min(((us, who) for who, us in timed.items() if not who.startswith(OURS)), default=None)
    return (theirs[0] / ours, theirs[1]) if ours and theirs else None


def times(rows):
    return {row["who"]: float(row["us"]) for row in rows if row["us"]}


def largest_lead(rows):
    """(how many times as fast a peer is, the peer, its race and problem) where that is most; None where none is ahead."""
    found = []
    for race, problem in dict.fromkeys((row["race"], row["problem"]) for row in rows):
        beside = beside_ours(times(row for row in rows if (row["race"], row["problem"]) == (race, problem)))
        if beside and beside[0] < 1:
            found.append((1 / beside[0], beside[1], f"{race}: {problem}"))
    return max(found, default=None)


def races_summary(rows):
    """tools/docs/benchmarks.md"""
    lines = []
    for race in sorted(values(rows, "race")):
        of = [row for row in rows if row["race"] == race]
        found = {
            problem: beside_ours(times(row for row in of if row["problem"] == problem))
            for problem in in_order(of, "problem")
        }
        found = {problem: beside for problem, beside in found.items() if beside}
        if not found:
            continue
        extreme = [choose(found, key=lambda problem: found[problem][0]) for choose in (min, max)]
        cells = [f"{found[problem][0]:.2f} ({found[problem][1]}; {problem})" for problem in extreme]
        mean = statistics.geometric_mean([ratio for ratio, _ in found.values()])
        lines.append([f"`{race}`", str(len(found)), f"{mean:.2f}", *cells])
    return markdown(["race", "problems", "best peer's time / ours", "least", "most"], lines)


def line(problem, people, of):
    """A row of the table: each one's time, ours with its rate, and the best peer's time by our best one."""
    timed, beside = times(of.values()), beside_ours(times(of.values()))
    cells = [microseconds(timed[who]) if who in timed else "-" for who in people]
    rate = of[OURS]["tflop_per_s"] if OURS in timed else ""
    text = f"{beside[0]:.2f}" if beside else "-"
    shown = f"**{text}**" if beside and beside[0] < 0.99 else text
    return [problem, *cells, f"{float(rate):.0f}" if rate else "-", shown]


def race_table(rows):
    """One race's table, and below it why calls have no time."""
    people = in_order(rows, "who")
    timed = [who for who in people if any(row["us"] for row in rows if row["who"] == who)]
    lines = [
        line(problem, timed, {row["who"]: row for row in rows if row["problem"] == problem})
        for problem in in_order(rows, "problem")
    ]
    head = ["problem", *(f"{who}, us" for who in timed), "flashjit, TFLOP/s", "best peer's time / ours"]
    reasons = {}
    for row in rows:
        if row["why_not"]:
            reasons.setdefault((row["who"], row["why_not"]), []).append(row["problem"])
    said = [
        textwrap.fill(
            f"- No time of {who}: {why} ({problems[0] if len(problems) == 1 else f'{len(problems)} problems'})",
            118,
            subsequent_indent="  ",
        )
        for (who, why), problems in reasons.items()
    ]
    return "\n\n".join([markdown(head, lines), *(["\n".join(said)] if said else [])])


def races_section(rows):
    """tools/docs/benchmarks-results.md"""
    parts = [
        textwrap.fill(
            f"{listed(values(rows, 'device'))}, {listed(values(rows, 'date'))}, "
            f"commit{'s' if len(values(rows, 'commit')) > 1 else ''} {listed(values(rows, 'commit'))}. Above 1, flashjit is faster; "
            "bold where a peer is faster by 1% or more. Errors of all are in the CSV file.",
            118,
        )
    ]
    for race in sorted(values(rows, "race")):
        of = [row for row in rows if row["race"] == race]
        versions = {f"{row['who'].split(',')[0]} {row['version']}": 0 for row in of if row["version"]}
        title = TITLES[race] + (f" ({listed(list(versions))})" if versions else "")
        device = f"\n\nOn an {of[0]['device']}." if len(values(rows, "device")) > 1 else ""
        parts.append(f"### {title}{device}\n\n{race_table(of)}")
    return "\n\n".join(parts)

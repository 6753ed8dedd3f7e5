"""Draw what jax_attention.py measured, and write its table into tools/docs/jax.md, between the markers of "figures".

python3 tools/bench/jax_figures.py             # picture (needs matplotlib) and table
python3 tools/bench/jax_figures.py --tables    # the table only
"""

import argparse
import os
import statistics
import sys
import textwrap

from plot_rows import LINES, RESULTS, ROOT, link, listed, markdown, read, replace

FILE = os.path.join(RESULTS, "jax.csv")
PICTURE = os.path.join(RESULTS, "jax.png")
PAGE = os.path.join(ROOT, "tools", "docs", "jax.md")
PASSES = ("forward", "both passes")
PEERS = {"cudnn": "cuDNN", "pallas": "Pallas", "xla": "XLA"}
POINTS = {
    "cudnn": LINES["cudnn"],
    "pallas": dict(label="Pallas, Mosaic GPU (fp16)", color="#009E73", marker="^", markersize=5),
    "xla": dict(label="XLA", color="#999999", marker="x", markersize=5),
}


def times_of(rows):
    """Seconds by problem, pass and library."""
    times = {}
    for row in rows:
        problem = int(row["dim"]), row["case"], int(row["length"])
        times.setdefault(problem, {}).setdefault(row["pass"], {})[row["library"]] = float(row["seconds"])
    return dict(sorted(times.items(), key=lambda each: (each[0][0], each[0][1] not in ("full", "causal"))))


def title(problem):
    dim, case, length = problem
    return f"d{dim} {case} {length // 1024}k"


def ratios(times, kind, peer):
    """Time of a peer over flashjit's, problem by problem."""
    found = {problem: each.get(kind, {}) for problem, each in times.items()}
    return {problem: each[peer] / each["flashjit"] for problem, each in found.items() if peer in each}


def measured(rows):
    return [peer for peer in PEERS if any(row["library"] == peer for row in rows)]


def table(times, peers):
    header = ["", *(text for kind in PASSES for text in (f"{kind}, ms", *(PEERS[peer] for peer in peers)))]
    lines = []
    for problem, each in times.items():
        cells = [title(problem)]
        for kind in PASSES:
            of_kind = each.get(kind, {})
            own = of_kind.get("flashjit")
            cells.append(f"{own * 1e3:.3f}" if own else "-")
            cells += [f"{of_kind[peer] / own:.2f}" if peer in of_kind else "-" for peer in peers]
        lines.append(cells)
    return markdown(header, lines)


def section(rows):
    times, peers = times_of(rows), measured(rows)
    means = [
        f"{PEERS[peer]} {', '.join(mean_of(ratios(times, kind, peer), kind) for kind in PASSES)}"
        for peer in peers
    ]
    about = (
        f"{rows[0]['device']}, JAX {rows[0]['jax']}: bf16, 16k tokens, hidden size 2048, milliseconds of flashjit.jax and the time of "
        "others over it, above 1 where flashjit is faster. Windows are a sixteenth of the length, bias and ALiBi have gradients; cuDNN's ALiBi is a bias of bf16. "
        f"{'Pallas computes in fp16 and has no causal gradient. ' if 'pallas' in peers else ''}Geometric means: {'; '.join(means)}."
    )
    names = listed([PEERS[peer] for peer in peers])
    picture = f"![Time of {names} over flashjit's]({link(PICTURE, PAGE)})"
    return "\n\n".join([picture, textwrap.fill(about, 118), table(times, peers)])


def mean_of(found, kind):
    return f"{statistics.geometric_mean(found.values()):.2f} ({kind})" if found else f"- ({kind})"


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = times_of(rows)
    names = [title(problem) for problem in times]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, constrained_layout=True)
    for panel, kind in zip(panels, PASSES):
        for peer in measured(rows):
            found = ratios(times, kind, peer)
            style = {**POINTS[peer], "linestyle": "", "markersize": 6}
            panel.plot([title(problem) for problem in found], list(found.values()), **style)
        panel.axhline(1, color=LINES["flashjit"]["color"], linewidth=2)
        panel.set(title=kind, yscale="log", xlim=(-0.7, len(names) - 0.3))
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        panel.set_yticks([1, 1.5, 2, 3, 5, 10, 20], ["1", "1.5", "2", "3", "5", "10", "20"])
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("time over flashjit's")
    panels[1].legend(fontsize=8)
    figure.suptitle(f"flashjit.jax on one {rows[0]['device']}: other attentions of JAX", fontsize=11)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="write the table only, and leave the picture")
    options = parser.parse_args()
    rows = read(FILE)
    if not options.tables:
        draw(rows, PICTURE)
    replace(PAGE, "figures", section(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

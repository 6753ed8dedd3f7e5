"""Rows of the measured tables, and what pictures and tables of all of them share: paths, lines, cells."""

import argparse
import csv
import importlib
import os
import statistics
import sys

PASSES = {"fwd": "forward", "bwd": "backward"}
MASKS = {0: "full", 1: "causal"}
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

RESULTS = os.path.join(ROOT, "tools", "bench", "results")
README = os.path.join(ROOT, "README.md")
PAGES = "benchmarks", "benchmarks-results", "tuning", "serving-results", "paper", "distributed-results"
BENCHMARKS, POINTS, TUNING, SERVING, PAPER, DISTRIBUTED = (
    os.path.join(ROOT, "tools", "docs", f"{name}.md") for name in PAGES
)

# Okabe and Ito's colours, which colour-blind readers can distinguish, in drawing order: flashjit and its dashes on top.
LINES = {
    "fa2": dict(label="FlashAttention-2", color="#009E73", linewidth=1.4, marker="^", markersize=5),
    "fa3": dict(label="FlashAttention-3", color="#CC79A7", linewidth=1.4, marker="v", markersize=5),
    "fa4": dict(label="FlashAttention-4", color="#E69F00", linewidth=1.4, marker="D", markersize=4),
    "cudnn": dict(label="cuDNN", color="#D55E00", linewidth=1.4, marker="s", markersize=4.5),
    "flashjit": dict(label="flashjit", color="#0072B2", linewidth=3.5, marker="o", markersize=6.5),
    "sm80": dict(label="flashjit, portable family sm80", color="#000000", linewidth=1.3, linestyle="--"),
}
LEGEND = ("flashjit", "sm80", "cudnn", "fa4", "fa3", "fa2")
PEERS = {"cudnn": "cuDNN", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4"}
BESIDE_PEERS = [f"flashjit / {name}" for name in PEERS.values()]


def page_parser(doc):
    """The options of scripts that measure, and write their files and pages."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", help="libflashjit.so; default: the installed package's")
    parser.add_argument("--commit", default=None, help="what the files call this version (default: git's)")
    parser.add_argument("--csv", action="store_true", help="write the files, their pictures and pages")
    parser.add_argument(
        "--tables", action="store_true", help="write pictures and pages of the files, and measure nothing"
    )
    return parser


def package_over(library):
    """flashjit: this tree's over the library given, else the installed one, or this tree's if there is none."""
    if library:
        os.environ["FLASHJIT_LIBRARY"] = os.path.abspath(library)
    sys.path.insert(0 if library else len(sys.path), os.path.join(ROOT, "tools", "python"))
    return importlib.import_module("flashjit")


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        sys.exit(f"plot: {path} has no rows")
    for row in rows:
        for name in ("head_dim", "causal", "batch", "heads", "heads_kv", "seqlen", "seqlen_q", "seqlen_kv"):
            if row.get(name):
                row[name] = int(row[name])
    return rows


GPUS = ("h200", "h100")  # whose figures are shown, where both have some: the first's


def measured(name):
    """The path of a table or picture of measurements, which its GPU begins; of the first GPU if there is none."""
    paths = [os.path.join(RESULTS, f"{gpu}_{name}") for gpu in GPUS]
    return next(filter(os.path.exists, paths), paths[0])


def gpus(*tables):
    """ "H100", of "NVIDIA H100 80GB HBM3"."""
    return listed(sorted({row["device"].split()[1] for rows in tables for row in rows}))


def values(rows, name):
    return sorted({row[name] for row in rows})


def listed(names):
    """ "a", "a and b", "a, b and c"."""
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def commits(rows):
    found = values(rows, "commit")
    return f"commit{'s' if len(found) > 1 else ''} {listed(found)}"


def select(rows, **wanted):
    """The rows with these values, shortest sequence first."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return sorted(found, key=lambda row: row["seqlen"])


def short(length):
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def origin(rows):
    return f"{listed(values(rows, 'device'))}, {listed(values(rows, 'date'))}, {commits(rows)}"


def present(rows):
    """The peers that ran."""
    return [who for who in PEERS if any(row.get(f"{who}_ms") for row in rows)]


def best_peer(row):
    return min((who for who in PEERS if row.get(f"{who}_ms")), key=lambda who: float(row[f"{who}_ms"]))


def teraflops(row, who):
    """As compare.py counts them."""
    operations = 4.0 * row["batch"] * row["heads"] * row["seqlen"] ** 2 * row["head_dim"]
    operations *= (0.5 if row["causal"] else 1.0) * (2.5 if row["pass"] == "bwd" else 1.0)
    return operations / float(row[f"{who}_ms"]) / 1e9


def pyplot():
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        return plt
    except ImportError as error:
        sys.exit(f"plot: matplotlib is needed for the pictures: {error}")


def ratios(rows, peer, ours="flashjit"):
    """Our speed by the peer's, where both ran."""
    return [
        float(row[f"{peer}_ms"]) / float(row[f"{ours}_ms"])
        for row in rows
        if row.get(f"{ours}_ms") and row.get(f"{peer}_ms")
    ]


def mean(found):
    return f"{statistics.geometric_mean(found):.2f}" if found else "-"


def beside_the_best(row):
    return ratios([row], best_peer(row))[0]


def markdown(header, lines):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])


def versus(row):
    """ "736 / 730 FA3", in bold where the peer is faster by 1% or more."""
    best = best_peer(row)
    text = f"{teraflops(row, 'flashjit'):.0f} / {teraflops(row, best):.0f} {PEERS[best]}"
    return f"**{text}**" if beside_the_best(row) < 0.99 else text


def link(path, page):
    return os.path.relpath(path, os.path.dirname(page))


def replace(path, name, text):
    """Puts the text between the file's lines <!-- name --> and <!-- /name -->."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    with open(path, encoding="utf-8") as file:
        readme = file.read()
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        sys.exit(f"{path} lacks the lines {begin.strip()} and {end}, once each and in this order")
    before, after = readme.split(begin)[0], readme.split(end)[1]
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{before}{begin}{text}\n{end}{after}")

"""Watches speeds: measures flashjit next to its peers, keeps the ratios of each night, and fails where one fell by more than 3%.

A ratio is a peer's time by flashjit's, the geometric mean of a group's points: of a pass and head dimension, say. It is compared with the
median of the last nights on the same kind of GPU, and with the tables of tools/bench/results, so that many small steps downwards are
seen, too. Groups of other points than before are new ones. Peers that are not installed have no ratios.

    python3 tools/bench/nightly.py --lib build/libflashjit.so --history nightly.csv
    python3 tools/bench/nightly.py --tables FOLDER --history nightly.csv    # compares stored figures

Exit code: 0 if no ratio fell, 1 if one did or a measurement failed, 3 without GPU or PyTorch.
"""

import argparse
import collections
import csv
import datetime
import pathlib
import statistics
import subprocess
import sys
import tempfile
import typing

HERE = pathlib.Path(__file__).resolve().parent
FALL = 0.03
NIGHTS = 5
GPUS = ("h100", "h200")  # whose tables are published
COLUMNS = ("date", "device", "commit", "table", "group", "peer", "points", "ratio")


class Table(typing.NamedTuple):
    """A measured table: its file, the columns that name a group, flashjit's column, and its peers' columns."""

    file: str
    group: tuple[str, ...]
    ours: str
    peers: tuple[str, ...]


LIBRARIES = ("fa2_ms", "cudnn_ms", "fa3_ms", "fa4_ms")
TABLES = {
    "dense": Table("dense.csv", ("pass", "head_dim", "causal"), "flashjit_ms", LIBRARIES),
    "few": Table("dense_few.csv", ("head_dim", "seqlen_q"), "flashjit_ms", LIBRARIES),
    "other": Table("dense_other.csv", ("pass", "head_dim"), "flashjit_ms", LIBRARIES),
    "serving": Table("serving.csv", ("head_dim", "queries"), "contiguous_us", ("fa3_us", "cudnn_us")),
    "variants": Table("variants.csv", ("pass", "case"), "flashjit_ms", ("flex_ms",)),
    "first call": Table("variants.csv", ("pass",), "flashjit_compile_ms", ("flex_compile_ms",)),
}
MEASURED_BY = {"dense.csv": "compare.py", "serving.csv": "serving.py", "variants.csv": "variants.py"}


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def measure(library, folder):
    """The tables of this commit; the exit code of the first script that failed, or 0."""
    for file, script in MEASURED_BY.items():
        command = [sys.executable, HERE / script, "--lib", library, "--csv", folder / file]
        code = subprocess.run([str(word) for word in command]).returncode
        if code:
            print(f"nightly: {script} ended with {code}", file=sys.stderr)
            return code
    return 0


def ratios(folder, prefix=""):
    """One row a table, group and peer, of what the folder has."""
    rows = []
    for name, table in TABLES.items():
        path = pathlib.Path(folder) / (prefix + table.file)
        points = collections.defaultdict(list)
        for row in read(path) if path.exists() else ():
            group = " ".join(f"{column} {row[column]}" for column in table.group)
            for peer in table.peers:
                if row.get(peer) and row.get(table.ours):
                    points[row["device"], row["commit"], group, peer].append(
                        float(row[peer]) / float(row[table.ours])
                    )
        rows += merged(name, points)
    return rows


def merged(table, points):
    """Points of one group are one row, though a table may hold rows of several commits."""
    groups = collections.defaultdict(list)
    commits = {}
    for (device, commit, group, peer), found in points.items():
        groups[device, group, peer] += found
        commits[device, group, peer] = commit
    return [
        {
            "device": device,
            "commit": commits[device, group, peer],
            "table": table,
            "group": group,
            "peer": peer.rpartition("_")[0].removesuffix("_compile"),
            "points": len(found),
            "ratio": statistics.geometric_mean(found),
        }
        for (device, group, peer), found in groups.items()
    ]


def key(row):
    return tuple(str(row[name]) for name in ("device", "table", "group", "peer", "points"))


def fallen(rows, history, published):
    """A sentence for each ratio that is more than 3% below what it was."""
    before = collections.defaultdict(list)
    for row in history:
        before[key(row)].append(float(row["ratio"]))
    pages = {key(row): float(row["ratio"]) for row in published}
    sentences = []
    for row in rows:
        known = []
        if nights := before[key(row)][-NIGHTS:]:
            known.append((statistics.median(nights), f"the median of {len(nights)} nights"))
        if key(row) in pages:
            known.append((pages[key(row)], "the published table"))
        for was, where in known:
            if row["ratio"] < was * (1 - FALL):
                sentences.append(
                    f"{row['table']}, {row['group']}, next to {row['peer']}: {row['ratio']:.3f} after {was:.3f}, {where} "
                    f"({100 * (row['ratio'] / was - 1):.1f}%)"
                )
    return sentences


def append(path, rows, date):
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({**row, "date": date, "ratio": f"{row['ratio']:.4f}"})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lib", help="libflashjit.so to measure")
    parser.add_argument("--tables", type=pathlib.Path, help="tables that were measured, instead of --lib")
    parser.add_argument(
        "--history", type=pathlib.Path, required=True, help="CSV of former nights; this one is added"
    )
    parser.add_argument("--published", type=pathlib.Path, default=HERE / "results", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (arguments.lib is None) == (arguments.tables is None):
        parser.error("give --lib to measure, or --tables")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.tables or pathlib.Path(scratch)
        if arguments.lib and (code := measure(arguments.lib, folder)):
            return code
        rows = ratios(folder)
    if not rows:
        print(f"nightly: {folder} has no table with a peer's times", file=sys.stderr)
        return 1
    history = read(arguments.history) if arguments.history.exists() else []
    published = [row for gpu in GPUS for row in ratios(arguments.published, f"{gpu}_")]
    sentences = fallen(rows, history, published)
    append(arguments.history, rows, datetime.date.today().isoformat())
    print(f"{len(rows)} ratios, {len(sentences)} fell by more than {100 * FALL:.0f}%", *sentences, sep="\n  ")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())

"""How good the tuner is on this GPU: its choices against measuring everything.

    python3 tools/bench/tuner_study.py --csv tools/bench/results/h100_tuner.csv
    python3 tools/bench/plot.py                   # the table of tools/docs/tuning.md

Every problem is tuned in an empty folder, so that a search compiles all that it measures. Then all
candidates are measured, except those that the model expects to be PRUNE times slower than the best. Times are
relative to the fastest. "Untuned" is the configuration of a call whose shape has no record: the other
problems' records and the shipped ones choose it.
"""

import argparse
import csv
import json
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile

import plot

PRUNE = "2"
SUITE = pathlib.Path(__file__).parent / "tuner_study.txt"


def suite(path):
    """(spec, shape) of each line; a spec begins with its pass."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [tuple(line.rsplit(None, 1)) for line in lines if line]


def run(command, arguments, records):
    """The JSON that `flashjit` prints where the folder `records` is the cache."""
    environment = {**os.environ, "FLASHJIT_CACHE_DIR": str(records)}
    done = subprocess.run(
        [*command, *arguments, "--json"], env=environment, stdout=subprocess.PIPE, text=True
    )
    if not done.stdout:
        raise SystemExit(f"{shlex.join([*command, *arguments])} failed with exit code {done.returncode}")
    return json.loads(done.stdout)


def rank_correlation(a, b):
    """Spearman's; equal values share their rank. 0 for fewer than two values, or if one side is constant."""

    def ranks(values):
        return [
            (sum(other < value for other in values) + sum(other <= value for other in values)) / 2
            for value in values
        ]

    return statistics.correlation(ranks(a), ranks(b)) if len(set(a)) > 1 and len(set(b)) > 1 else 0.0


def span(ranges):
    """The least and the most of several ranges; empty where the GPU reports none."""
    known = [each for each in ranges if each]
    return (min(each["least"] for each in known), max(each["most"] for each in known)) if known else ("", "")


def row(searched, everything, untuned):
    """A line of the table: what a search found, next to what measuring everything did."""
    measured = [timing for timing in everything["timings"] if timing["ms"] > 0]
    times = {timing["config"]: timing["ms"] for timing in measured}
    best = min(times.values())
    slower = {config: f"{ms / best:.3f}" for config, ms in times.items()}
    clock, celsius = (span([searched[key], everything[key]]) for key in ("clock_mhz", "celsius"))
    predicted, ms = ([timing[key] for timing in measured] for key in ("predicted_ms", "ms"))
    reasons = dict.fromkeys(f"{searched['slowed_by']}, {everything['slowed_by']}".strip(", ").split(", "))
    return {
        "spec": searched["spec"],
        "shape": searched["shape"],
        "candidates": searched["candidates"],
        "measured": searched["measured"],
        "seconds": f"{searched['seconds']:.2f}",
        "choice": searched["best"],
        "choice_slower": slower.get(searched["best"], ""),
        "best": everything["best"],
        "best_ms": f"{best:.5f}",
        "heuristic": searched["heuristic"],
        "heuristic_slower": slower.get(searched["heuristic"], ""),
        "untuned": untuned["config"],
        "untuned_slower": slower.get(untuned["config"], ""),
        "untuned_by": "heuristic" if untuned["config_source"] == "heuristic" else "record",
        "rank_correlation": f"{rank_correlation(predicted, ms):.4f}",
        "drift": f"{everything['drift']:.4f}",
        "clock_mhz_least": clock[0],
        "clock_mhz_most": clock[1],
        "celsius_least": celsius[0],
        "celsius_most": celsius[1],
        "slowed_by": ", ".join(reasons),
    }


def tune(command, problem, folder, records, *options):
    spec, shape = problem
    arguments = ["tune", "--spec", spec, "--shape", shape, "--dir", str(folder), *options]
    return run(command, arguments, records)["problems"][0]


def copy_records(folders, to):
    for folder in folders:
        for tuning in folder.glob("*/tuning"):
            shutil.copytree(tuning, to / tuning.relative_to(folder), dirs_exist_ok=True)
    return to


def study(command, problems, work, options=()):
    """Yields the row of each problem, after all were searched: their records serve the others."""
    (work / "none").mkdir()
    folders = {problem: work / f"problem{i}" for i, problem in enumerate(problems)}
    searched = {
        problem: tune(command, problem, folder, work / "none", *options)
        for problem, folder in folders.items()
    }
    others = {
        problem: copy_records(set(folders.values()) - {folder}, work / "others" / folder.name)
        for problem, folder in folders.items()
    }
    for problem, folder in folders.items():
        if failure := searched[problem].get("failure"):
            print(f"{' '.join(problem)}: {failure}", file=sys.stderr)
            continue
        spec, shape = problem
        arguments = ["inspect", "--spec", spec, "--shape", shape, "--source"]
        untuned = run(command, arguments, others[problem])["kernels"][0]
        # The search's record is in the folder, and the nearest of the others is a lead: never left out.
        everything = tune(
            command, problem, folder, others[problem], "--exhaustive", "--prune", PRUNE, *options
        )
        yield row(searched[problem], everything, untuned)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", required=True, help="file to write")
    parser.add_argument(
        "--suite",
        type=pathlib.Path,
        default=SUITE,
        help="problems, as for `flashjit tune`, each with its pass and shape",
    )
    parser.add_argument("--flashjit", default="flashjit", help="the command, e.g. build/tools/flashjit")
    parser.add_argument("--families", help="as of `flashjit tune`")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        options = ["--families", args.families] if args.families else []
        for line in study(shlex.split(args.flashjit), suite(args.suite), pathlib.Path(work), options):
            rows.append(line)
            with open(args.csv, "w", newline="") as file:  # again after each problem
                table = csv.DictWriter(file, rows[0], lineterminator="\n")
                table.writeheader()
                table.writerows(rows)
    print(plot.tuner_section(rows))


if __name__ == "__main__":
    main()

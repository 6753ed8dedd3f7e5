"""Draw the measured speeds, and write the tables of README.md and tools/docs from the CSV files in tools/bench/results.

    python3 tools/bench/plot.py            # pictures (these need matplotlib) and tables
    python3 tools/bench/plot.py --tables   # tables only

Where tables of several GPUs have a name, such as h100_dense.csv and h200_dense.csv, the newer GPU's is shown. The sections between
the markers <!-- name --> and <!-- /name --> are replaced:

    README.md                  speed    five ratios, and where other libraries win the most
    tools/docs/benchmarks.md   peers    picture and ratios of compare.py's dense.csv
                               leads    where other libraries win, by library
                               races    the races of races.csv in a line each
    tools/docs/benchmarks-results.md
                               figures  all points, and *_other.csv, *_few.csv, *_sparse.csv
                               races    races.csv of races.py, where that was run
                               scaling  h200_scaling.csv of distributed.py on up to eight GPUs, where that was run
    tools/docs/tuning.md       tuner    h100_tuner.csv of tuner_study.py
    tools/docs/serving-results.md
                               figures  serving.csv of serving.py
    tools/docs/distributed-results.md
                               plans    plans.csv of `simulator.py --tokens 131072,1048576,4194304 --csv`
                               figures  h200_distributed.csv of distributed.py
    tools/docs/paper.md        figures  h100_paper.csv and h100_paper_figure.csv of paper.py
"""

import argparse
import os
import statistics
import sys
import textwrap

from plot_paper import draw_paper, paper_section
from plot_races import races_section, races_summary
from plot_ranks import draw_plans, draw_scaling, plans_section, scaling_section, shared_section
from plot_rows import (
    BENCHMARKS,
    DISTRIBUTED,
    PAPER,
    POINTS,
    README,
    RESULTS,
    SERVING,
    TUNING,
    markdown,
    measured,
    read,
    replace,
)
from plot_speeds import draw, figures_section, leads_section, peers_summary, serving_section, speed_section


def tuner_section(rows):
    """tools/docs/tuning.md"""
    lines = []
    for name, column in (
        ("the tuner's choice", "choice_slower"),
        ("the heuristic alone", "heuristic_slower"),
        ("a shape without its own record", "untuned_slower"),
    ):
        slower = [float(row[column]) for row in rows if row[column]]  # empty: what cannot be measured
        lines.append(
            [
                name,
                f"{statistics.geometric_mean(slower):.3f}",
                f"{max(slower):.3f}",
                f"{sum(time <= 1.01 for time in slower)} of {len(slower)}",
            ]
        )
    seconds = [float(row["seconds"]) for row in rows]
    share = sum(int(row["measured"]) for row in rows) / sum(int(row["candidates"]) for row in rows)
    return "\n\n".join(
        [
            markdown(["time by the best's", "mean", "worst", "within 1%"], lines),
            textwrap.fill(
                f"A search measured {100 * share:.0f}% of the candidates and took {statistics.median(seconds):.1f} s in the median "
                f"({max(seconds):.1f} s at most), compiling included.",
                118,
            ),
        ]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="write the tables only, and leave the pictures")
    arguments = parser.parse_args()
    result = lambda name: os.path.join(RESULTS, name)
    dense, other, few, sparse = (
        read(measured(f"dense{name}.csv")) for name in ("", "_other", "_few", "_sparse")
    )
    picture = measured("dense.csv").removesuffix("csv") + "png"
    paper = [result(f"h100_paper{name}.csv") for name in ("", "_figure")]
    paper = [read(path) for path in paper] if all(map(os.path.exists, paper)) else None
    scaling = read(result("h200_scaling.csv")) if os.path.exists(result("h200_scaling.csv")) else None
    if not arguments.tables:
        draw(dense, picture)
        draw_plans(read(result("plans.csv")), result("plans.png"))
        if scaling:
            draw_scaling(scaling, result("h200_scaling.png"))
        if paper:
            draw_paper(*paper, result("h100_paper.png"))
    serving, latent, codes, variants = (
        read(measured(f"{name}.csv")) for name in ("serving", "latent", "eight_bits_speed", "variants")
    )
    races = read(result("races.csv")) if os.path.exists(result("races.csv")) else []
    leads = dense + other, few, serving, latent, codes
    replace(README, "speed", speed_section(dense, *leads[1:], variants, races))
    replace(BENCHMARKS, "peers", peers_summary(dense, picture))
    replace(BENCHMARKS, "leads", leads_section(*leads))
    replace(POINTS, "figures", figures_section(dense, other, few, sparse, picture))
    replace(SERVING, "figures", serving_section(serving))
    replace(TUNING, "tuner", tuner_section(read(result("h100_tuner.csv"))))
    replace(DISTRIBUTED, "plans", plans_section(read(result("plans.csv")), result("plans.png")))
    if os.path.exists(result("h200_distributed.csv")):
        replace(DISTRIBUTED, "figures", shared_section(read(result("h200_distributed.csv"))))
    if races:
        replace(POINTS, "races", races_section(races))
        replace(BENCHMARKS, "races", races_summary(races))
    if scaling:
        replace(POINTS, "scaling", scaling_section(scaling, result("h200_scaling.png")))
    if paper:
        replace(PAPER, "figures", paper_section(*paper))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Races beside peers that the other scripts do not have, each from its wheel or built by peers.sh:

    codes        FlashAttention-3 of vLLM's fork, with Q, K and V of 8 bits
    flashinfer   FlashInfer's decode, prefill, BatchAttention and POD, over pages
    latents      FlashMLA's dense and sparse decode and sparse prefill, and FlashInfer's decode over latents
    programs     FlexAttention on FlashAttention-4, and cuDNN's flex attention
    tangents     jvp_flash_attention: O and its tangent
    weights      FlashInfer's sigmoid attention, a transform of logits in place of the softmax
    wide         FFPA's training with heads of 512 columns

All calls of a race are checked against attention in fp32 before they are timed; what is wrong or does not run has no time, but its reason.
They take turns, in CUDA graphs where they can be captured, and medians count. Planning on the host, which FlashInfer's calls need, is not timed.

    bash tools/bench/peers.sh flashinfer
    python3 tools/bench/races.py --race flashinfer --lib build/libflashjit.so --csv tools/bench/results/races.csv

    python3 tools/bench/races.py --join decode.csv mix.csv --csv tools/bench/results/races.csv    # rows of later files win, and add to the table

Exit code: 0 if everything ran and ours was right, 1 if not, 3 without GPU or PyTorch, or where no peer asked for is installed.
"""

import csv
import os
import re
import sys

import measuring
import race_codes
import race_flashinfer
import race_latents
import race_programs
import race_tangents
import race_weights
import race_wide
import racing
from measuring import torch

RACES = {
    module.RACE.name: module.RACE
    for module in (
        race_codes,
        race_flashinfer,
        race_latents,
        race_programs,
        race_tangents,
        race_weights,
        race_wide,
    )
}


def able(names):
    """The races of these names that can be run; says why of the others."""
    found = []
    for name in names:
        if why := racing.missing(RACES[name]):
            print(f"races: {name} is left out: {why}", file=sys.stderr)
        else:
            found.append(RACES[name])
    return found


def join(into, paths):
    """The table with the rows of these files, each in place of the one of its race, problem and call; rows of missing peers are left out."""
    rows = {}
    for path in [into, *paths] if os.path.exists(into) else paths:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if not row["why_not"].startswith("ModuleNotFoundError"):
                    rows[row["race"], row["problem"], row["who"]] = row
    with open(into, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, racing.COLUMNS)
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=lambda row: row["race"]))


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument(
        "--race",
        action="append",
        choices=sorted(RACES),
        help="a race to run (default: all, of installed peers)",
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="the problems whose name matches")
    parser.add_argument(
        "--rounds", type=int, default=15, help="of timing; 0: check alone (default %(default)s)"
    )
    parser.add_argument(
        "--join", nargs="+", metavar="CSV", help="join these tables into --csv, and run nothing"
    )
    arguments = parser.parse_args()
    if arguments.join:
        if not arguments.csv:
            parser.error("--join needs --csv, the table that they join")
        join(arguments.csv, arguments.join)
        return 0
    if measuring.without_gpu("races"):
        return 3
    measuring.use_library(arguments.lib)
    races = able(arguments.race or RACES)
    if not races:
        return 3
    report = measuring.Report(arguments.csv, racing.COLUMNS, measuring.constants_of(arguments))
    with torch.no_grad():
        for race in races:
            for problem in race.problems():
                if re.search(arguments.only, problem.name):
                    measuring.guarded(
                        report, problem.name, racing.run_heat, report, race, problem, arguments.rounds
                    )
    return measuring.ended(report)


if __name__ == "__main__":
    sys.exit(main())

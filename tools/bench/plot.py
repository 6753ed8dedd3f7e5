"""Draw the measured speeds, and write the tables of README.md and tools/docs from the CSV files in tools/bench/results.

    python3 tools/bench/plot.py            # pictures (these need matplotlib) and tables
    python3 tools/bench/plot.py --tables   # tables only

The sections between the markers <!-- name --> and <!-- /name --> are replaced:

    README.md                  speed    five ratios, and where other libraries win the most
    tools/docs/benchmarks.md   peers    picture and ratios of compare.py's h100_dense.csv
                               leads    where other libraries win, by library
    tools/docs/benchmarks-results.md
                               figures  all points, and *_other.csv, *_few.csv, *_sparse.csv
                               scaling  h100_scaling.csv of distributed.py on up to eight GPUs, where that was run
    tools/docs/tuning.md       tuner    h100_tuner.csv of tuner_study.py
    tools/docs/serving-results.md
                               figures  h100_serving.csv of serving.py
    tools/docs/distributed-results.md
                               plans    plans.csv of `simulator.py --tokens 131072,1048576,4194304 --csv`
                               figures  h100_distributed.csv of distributed.py
    tools/docs/paper.md        figures  h100_paper.csv and h100_paper_figure.csv of paper.py
"""

import argparse
import csv
import os
import statistics
import sys
import textwrap

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
PAPER_LINES = {
    **{who: LINES[who] for who in ("fa2", "cudnn", "flashjit")},
    "efficient": dict(
        label="PyTorch, memory-efficient", color="#56B4E9", linewidth=1.4, marker="v", markersize=5
    ),
    "math": dict(label="PyTorch, math", color="#999999", linewidth=1.4, marker="x", markersize=5),
}
PAPER_NAMES = {
    "flashjit": "flashjit",
    "cudnn": "cuDNN",
    "fa2": "FA2",
    "efficient": "memory-efficient",
    "math": "math",
    "standard": "standard",
}
LEGEND = ("flashjit", "sm80", "cudnn", "fa4", "fa3", "fa2")
PEERS = {"cudnn": "cuDNN", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4"}
BESIDE_PEERS = [f"flashjit / {name}" for name in PEERS.values()]


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


# --- the picture ---


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


def draw(rows, path):
    plt = pyplot()
    panels = [(dim, causal) for dim in values(rows, "head_dim") for causal in values(rows, "causal")]
    lengths = values(rows, "seqlen")
    shown = [who for who in LINES if f"{who}_ms" in rows[0]]
    figure, axes = plt.subplots(
        len(PASSES),
        len(panels),
        figsize=(16, 7),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for pass_name, line_of_axes in zip(PASSES, axes):
        for (dim, causal), axis in zip(panels, line_of_axes):
            points = select(rows, **{"pass": pass_name}, head_dim=dim, causal=causal)
            for who in shown:
                known = [(row["seqlen"], teraflops(row, who)) for row in points if row[f"{who}_ms"]]
                axis.plot([x for x, _ in known], [y for _, y in known], **LINES[who])
            axis.set_title(f"{PASSES[pass_name]}, d{dim}, {MASKS[causal]}", fontsize=12)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [short(length) for length in lengths])
            axis.grid(color="#dddddd", linewidth=0.7)
            axis.set_axisbelow(True)
            axis.tick_params(labelsize=10, labelbottom=True, labelleft=True)
        line_of_axes[0].set_ylim(bottom=0)
        line_of_axes[0].set_ylabel("TFLOP/s", fontsize=12)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length", fontsize=11)
    figure.suptitle(f"Attention, {listed(values(rows, 'dtype'))}: {origin(rows)}", fontsize=15)
    handles = dict(zip(shown, axes[0][0].get_lines()))
    figure.legend(
        handles=[handles[who] for who in LEGEND if who in handles],
        loc="outside lower center",
        ncols=len(shown),
        fontsize=12,
        frameon=False,
        handlelength=3,
    )
    figure.savefig(path, dpi=100)


def draw_paper(table, figure, path):
    """Five panels: what standard attention moves and takes next to ours; over density; time and memory over length."""
    figure_2, axes = pyplot().subplots(2, 3, figsize=(15, 8), layout="constrained")
    traffic, times, density, lengths, memory, empty = axes.flat
    empty.remove()
    standard = [row for row in figure if row["part"] == "standard"]
    names = [PAPER_NAMES[row["who"]] for row in standard]
    traffic.bar(names, [float(row["device_gb"] or 0) for row in standard], color="#0072B2")
    traffic.set_title(f"device memory traffic, {traffic_source(standard)}, GB")
    times.bar(names, [float(row["ms"]) for row in standard], color="#0072B2")
    times.set_title("forward and backward, ms (GPT-2 medium)")
    sparse = [row for row in figure if row["part"] == "density"]
    density.plot(
        [100 * float(row["density"]) for row in sparse],
        [float(row["ms"]) for row in sparse],
        **LINES["flashjit"],
    )
    for row in figure:
        if row["part"] == "dense":
            density.axhline(float(row["ms"]), color="#000000", linestyle="--", label="dense")
    density.set_title("both passes at 4k over % of the blocks, ms")
    density.set_ylim(bottom=0)
    density.legend(frameon=False)
    variant = dict(dropout=max(values(table, "dropout")), mask=max(values(table, "mask")))
    for who, style in PAPER_LINES.items():
        for axis, column in ((lengths, "ms"), (memory, "mb")):
            known = paper_curve(table, who, column, **variant)
            axis.plot(list(known), list(known.values()), **style)
    for axis, title in (
        (lengths, "both passes, with dropout and mask, ms"),
        (memory, "memory beyond the inputs, MB"),
    ):
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(values(table, "seqlen"), [short(length) for length in values(table, "seqlen")])
    for axis in (traffic, times, density, lengths, memory):
        axis.grid(color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    figure_2.suptitle(f"What FlashAttention's first paper measures: {origin(table)}", fontsize=14)
    figure_2.legend(
        handles=lengths.get_lines()[::-1], loc="outside lower center", ncols=len(PAPER_LINES), frameon=False
    )
    figure_2.savefig(path, dpi=100)


# --- the tables ---


def traffic_source(rows):
    """ "counted by ncu", or "computed"."""
    found = values([row for row in rows if row["traffic"]], "traffic")
    return {"counted": "counted by ncu", "computed": "the least, computed"}.get(
        " and ".join(found), "not known"
    )


def paper_curve(rows, who, column, **variant):
    """By length, the milliseconds of both passes (the sum) or the megabytes."""
    passes = ("fwd", "bwd") if column == "ms" else ("bwd",)
    found = {}
    for length in values(rows, "seqlen"):
        cells = [
            row[f"{who}_{column}"]
            for name in passes
            for row in select(rows, seqlen=length, **{"pass": name}, **variant)
        ]
        if len(cells) == len(passes) and all(cells):
            found[length] = sum(map(float, cells))
    return found


def paper_cell(rows, who, column, length, passes, **variant):
    """A sum over passes; "OOM" where memory did not suffice, "-" where there is none."""
    found = [row for name in passes for row in select(rows, seqlen=length, **{"pass": name}, **variant)]
    if len(found) == len(passes) and all(row[f"{who}_{column}"] for row in found):
        return f"{sum(float(row[f'{who}_{column}']) for row in found):.4g}"
    return "OOM" if any(f"{who}: out of memory" in row["notes"] for row in found) else "-"


def paper_table(rows, columns, **variant):
    """columns: the row's name, the column and the passes that it sums."""
    lengths = values(rows, "seqlen")
    lines = [
        [
            f"{name}{', ' if name else ''}{PAPER_NAMES[who]}",
            *(paper_cell(rows, who, column, length, passes, **variant) for length in lengths),
        ]
        for name, column, passes in columns
        for who in ("flashjit", "cudnn", "fa2", "efficient", "math")
    ]
    return markdown(["", *(short(length) for length in lengths)], lines)


def paper_section(table, figure):
    """tools/docs/paper.md"""
    standard = [row for row in figure if row["part"] == "standard"]
    number = lambda row, name: f"{float(row[name]):.4g}" if row[name] else "-"
    lines = [
        [
            PAPER_NAMES[row["who"]],
            *(number(row, name) for name in ("gigaoperations", "device_gb", "l2_gb", "ms")),
        ]
        for row in standard
    ]
    parts = [
        f"![Five panels]({link(os.path.join(RESULTS, 'h100_paper.png'), PAPER)})",
        f"{origin(table)}.",
        "## Figure 2",
        f"GPT-2 medium: 1k tokens, 16 heads of 64, batch 64; forward and backward. Traffic: {traffic_source(standard)}.",
        markdown(["", "Gop (computed)", "device memory, GB", "L2, GB", "ms"], lines),
    ]
    by_density = [
        [f"{100 * float(row['density']):.1f}%" if row["part"] == "density" else "dense", number(row, "ms")]
        for row in figure
        if row["part"] in ("density", "dense")
    ]
    parts += [
        "Block-sparse at 4k (batch 16, 8 heads of 64; 128x128 blocks at random), both passes:",
        markdown(["blocks kept", "ms"], by_density),
        "## Times, ms",
        textwrap.fill(
            "fp16, batch 16, 8 heads of 64; both passes. OOM: out of memory; -: not supported, or too slow to be "
            f"run. [The CSV]({link(os.path.join(RESULTS, 'h100_paper.csv'), PAPER)}) has each pass, and "
            "dropout and mask alone.",
            118,
            break_on_hyphens=False,
        ),
    ]
    for title, choose in (("Neither dropout nor mask", min), ("Dropout and mask", max)):
        variant = {name: choose(values(table, name)) for name in ("dropout", "mask")}
        parts += [f"{title}:", paper_table(table, [("", "ms", ("fwd", "bwd"))], **variant)]
    parts += [
        "## Memory, MB",
        "Both passes, with dropout and mask, beyond Q, K, V and dO.",
        paper_table(
            table,
            [("", "mb", ("bwd",))],
            dropout=max(values(table, "dropout")),
            mask=max(values(table, "mask")),
        ),
    ]
    return "\n\n".join(parts)


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


def sparse_table(rows):
    problems = sorted(
        {(row["head_dim"], row["pattern"], row["seqlen"], row["density"]) for row in rows},
        key=lambda problem: (problem[0], problem[1] != "window", *problem[2:]),
    )
    lines = []
    for dim, pattern, length, density in problems:
        cells = [
            select(rows, **{"pass": pass_name}, head_dim=dim, pattern=pattern, seqlen=length, density=density)
            for pass_name in PASSES
        ]
        share = [
            f"{100 * float(cell[0]['ratio']):.1f}% ({float(cell[0]['rate']):.2f}, {float(cell[0]['ratio_short']):.2f})"
            if cell
            else "-"
            for cell in cells
        ]
        lines.append([str(dim), short(length), f"{100 * float(density):.1f}%", pattern] + share)
    header = ["Head dim", "Length", "Blocks kept", "which"]
    return markdown(header + [f"{name}: time (rate, beside short)" for name in PASSES.values()], lines)


def other_table(rows):
    lines = []
    for row in rows:
        heads = f"{row['heads']}/{row['heads_kv']}" if row["heads"] != row["heads_kv"] else row["heads"]
        dropout = f"dropout {float(row['dropout']):g}, " if float(row.get("dropout", 0)) else ""
        problem = f"{row['dtype']}, d{row['head_dim']}, {MASKS[row['causal']]}, {dropout}b{row['batch']}, {heads} heads"
        lines.append(
            [
                PASSES[row["pass"]],
                problem,
                short(row["seqlen"]),
                *(mean(ratios([row], peer)) for peer in PEERS),
                mean(ratios([row], "fa2", "sm80")),
            ]
        )
    return markdown(["Pass", "Problem", "Length", *BESIDE_PEERS, "sm80 / FA2"], lines)


def few_table(rows):
    lines = []
    for row in rows:
        sequences = f"{row['batch']} x " if row["batch"] > 1 else ""
        micros = lambda who: f"{1e3 * float(row[f'{who}_ms']):.1f}" if row.get(f"{who}_ms") else "-"
        lines.append(
            [
                str(row["seqlen_q"]),
                f"{sequences}{short(row['seqlen_kv'])}",
                f"{row['heads']}/{row['heads_kv']}",
                str(row["head_dim"]),
                micros("flashjit"),
                *(micros(peer) for peer in PEERS),
                f"{float(row['gbs']) / 1e3:.2f}",
            ]
        )
    return markdown(
        ["Queries", "Keys", "Heads", "Head dim", "flashjit, us", *PEERS.values(), "flashjit, TB/s"], lines
    )


def summary_table(rows):
    lines = []
    for pass_name in PASSES:
        for dim in values(rows, "head_dim"):
            points = select(rows, **{"pass": pass_name}, head_dim=dim)
            worst = min(points, key=beside_the_best)
            lines.append(
                [
                    f"{PASSES[pass_name]}, d{dim}",
                    *(mean(ratios(points, peer)) for peer in present(rows)),
                    mean([beside_the_best(row) for row in points]),
                    f"{beside_the_best(worst):.2f} ({PEERS[best_peer(worst)]}, {MASKS[worst['causal']]} "
                    f"{short(worst['seqlen'])})",
                ]
            )
    return markdown(
        [
            "speed of flashjit",
            *(f"/ {PEERS[who]}" for who in present(rows)),
            "/ the best of them",
            "worst point",
        ],
        lines,
    )


def peers_table(rows):
    """TFLOP/s of flashjit and the best peer, a column for each length."""
    lengths = values(rows, "seqlen")
    lines = []
    for pass_name in PASSES:
        for dim in values(rows, "head_dim"):
            for causal in values(rows, "causal"):
                points = {
                    row["seqlen"]: row
                    for row in select(rows, **{"pass": pass_name}, head_dim=dim, causal=causal)
                }
                if points:
                    lines.append(
                        [
                            f"{PASSES[pass_name]} d{dim} {MASKS[causal]}",
                            *(versus(points[length]) if length in points else "-" for length in lengths),
                        ]
                    )
    return markdown(["", *(short(length) for length in lengths)], lines)


def versus(row):
    """ "736 / 730 FA3", in bold where the peer is faster by 1% or more."""
    best = best_peer(row)
    text = f"{teraflops(row, 'flashjit'):.0f} / {teraflops(row, best):.0f} {PEERS[best]}"
    return f"**{text}**" if beside_the_best(row) < 0.99 else text


def link(path, page):
    return os.path.relpath(path, os.path.dirname(page))


def peers_summary(dense, png):
    """tools/docs/benchmarks.md"""
    title = "TFLOP/s over sequence length on an H100: flashjit, " + ", ".join(
        LINES[who]["label"] for who in present(dense)
    )
    about = (
        f"{origin(dense)}; bf16, 16k tokens, hidden size 2048. Geometric means over full and causal masks and the lengths "
        "512 to 16k, all libraries in one process; above 1, flashjit is faster."
    )
    return "\n\n".join(
        [f"![{title}]({link(png, BENCHMARKS)})", summary_table(dense), textwrap.fill(about, 118)]
    )


def speeds_of_codes(rows):
    """flashjit's speed by FA3's for Q, K and V in 8 bits, by head dimension."""
    times = {(row["head_dim"], row["causal"], row["seqlen"], row["method"]): float(row["us"]) for row in rows}
    found = {}
    for (dim, causal, length, method), us in times.items():
        if method == "fa3":
            found.setdefault(dim, []).append(us / times[dim, causal, length, "flashjit"])
    return {f"d{dim}": ratios_of_dim for dim, ratios_of_dim in sorted(found.items())}


def speed_section(dense, few, serving, latent, codes, variants):
    """README.md"""
    by_dim = lambda name: [
        mean([beside_the_best(row) for row in dense if row["pass"] == name and row["head_dim"] == dim])
        for dim in values(dense, "head_dim")
    ]
    cached = [row for row in serving if row["queries"] and int(row["queries"]) <= 16]
    from_a_cache = [
        min(float(row[f"{who}_us"]) for who in ("fa3", "cudnn") if row[f"{who}_us"])
        / float(row["contiguous_us"])
        for row in cached
        if row["fa3_us"] or row["cudnn_us"]
    ]
    measured = [row for row in variants if row["ratio"]]
    compiled = [
        statistics.median(float(row[f"{who}_compile_ms"]) for row in variants if row[f"{who}_compile_ms"])
        for who in ("flex", "flashjit")
    ]
    of_codes = speeds_of_codes(codes)
    dims = ", ".join(f"d{dim}" for dim in values(dense, "head_dim"))
    lines = [
        [
            f"[training](tools/docs/benchmarks.md), forward; backward ({dims})",
            "the best of cuDNN, FA2, FA3, FA4",
            f"{', '.join(by_dim('fwd'))}; {', '.join(by_dim('bwd'))}",
        ],
        [
            "[decoding](tools/docs/serving-results.md) from a KV cache, 1 to 16 queries",
            "the better of cuDNN, FA3",
            f"{mean(from_a_cache)} ({min(from_a_cache):.2f} to {max(from_a_cache):.2f})",
        ],
        [
            f"[FP8 Q, K and V](tools/docs/eight-bits-results.md) ({', '.join(of_codes)})",
            "FA3",
            ", ".join(mean(found) for found in of_codes.values()),
        ],
        [
            "[other masks and scores](tools/docs/gallery.md), forward; backward",
            "FlexAttention",
            "; ".join(
                mean([float(row["ratio"]) for row in measured if row["pass"] == name]) for name in PASSES
            ),
        ],
        [
            "[first call](tools/docs/gallery.md), both passes compiled",
            "FlexAttention",
            f"{compiled[0] / compiled[1]:.1f} ({compiled[1] / 1e3:.1f} s)",
        ],
    ]
    others = "; ".join(
        f"{PEERS[who]} {ahead:.2f} ({where})"
        for who, (ahead, where) in most_ahead(dense, few, serving, latent, codes).items()
    )
    about = (
        "Above 1, flashjit is faster: geometric means on an H100 (FP8: an H200); the linked pages name commits and shapes. "
        f"Largest leads of others: {others}."
    )
    table = markdown(["speed of flashjit", "next to", "ratio"], lines)
    return "\n\n".join([table, textwrap.fill(about, 140, break_long_words=False, break_on_hyphens=False)])


def leads_of(dense, few, serving, latent, codes):
    """For each peer, by kind of problem, the most that it is ahead, and where."""

    def row_of(row):
        heads = f", {row['heads']}/{row['heads_kv']} heads" if row["heads"] != row["heads_kv"] else ""
        return f"d{row['head_dim']} {MASKS[row['causal']]}, {row['batch']} x {short(row['seqlen'])}{heads}"

    def queries_of(row):
        return f"{row['queries']} {'query' if row['queries'] == '1' else 'queries'}"

    of_codes = {
        (row["head_dim"], row["causal"], row["seqlen"], row["method"]): float(row["us"]) for row in codes
    }
    found = {}
    for who in PEERS:
        ahead = lambda rows, unit, ours, where: [
            (float(row[f"{ours}_{unit}"]) / float(row[f"{who}_{unit}"]), where(row))
            for row in rows
            if row.get(f"{who}_{unit}")
        ]
        kinds = {
            what: ahead([row for row in dense if row["pass"] == name], "ms", "flashjit", row_of)
            for name, what in PASSES.items()
        }
        kinds["for few queries"] = ahead(
            few,
            "ms",
            "flashjit",
            lambda row: f"{row['seqlen_q']} of {row['batch']} x {short(row['seqlen_kv'])}",
        )
        kinds["from a cache"] = ahead(
            serving, "us", "contiguous", lambda row: f"{row['problem']}, {queries_of(row)}"
        )
        kinds["with latents"] = ahead(
            latent,
            "us",
            "ours",
            lambda row: (
                f"{row['kind']}, {row['heads']} heads, {row['sequences']} x {short(int(row['keys']))}"
            ),
        )
        kinds["with Q, K and V of 8 bits"] = [
            (of_codes[dim, causal, length, "flashjit"] / us, f"d{dim} {MASKS[causal]}, {short(length)}")
            for (dim, causal, length, method), us in of_codes.items()
            if method == who
        ]
        found[who] = {
            what: max(points) for what, points in kinds.items() if points and max(points)[0] >= 1.005
        }
    return found


def leads_section(*results):
    """tools/docs/benchmarks.md"""
    lines = []
    for who, leads in leads_of(*results).items():
        if leads:
            found = listed([f"{ahead:.2f} {what} ({where})" for what, (ahead, where) in leads.items()])
            lines.append(textwrap.fill(f"- {PEERS[who]}: {found}", 118, subsequent_indent="  "))
    return "\n".join(lines)


def most_ahead(*results):
    """By peer that is ahead anywhere, the most, and where."""
    found = {}
    for who, leads in leads_of(*results).items():
        if leads:
            what, (ahead, where) = max(leads.items(), key=lambda lead: lead[1])
            found[who] = ahead, f"{what}: {where}"
    return found


def figures_section(dense, other, few, sparse, png):
    """tools/docs/benchmarks.md"""
    later = {}  # tables of other commits, by these
    for name, rows in {"other problems": other, "few queries": few, "block-sparse": sparse}.items():
        if rows and values(rows, "commit") != values(dense, "commit"):
            later.setdefault(commits(rows), []).append(name)
    others = "".join(f"; {listed(names)}: {made_by}" for made_by, names in later.items())
    about = f"""{origin(dense)}{others}. TFLOP/s of flashjit / the best peer, and which one; bold where flashjit is slower by 1% or
more. bf16, 16k tokens in all, hidden size 2048."""
    portable = ", ".join(
        f"{PASSES[name]} d{dim} {mean(ratios(select(dense, head_dim=dim, **{'pass': name}), 'fa2', 'sm80'))}"
        for name in PASSES
        for dim in values(dense, "head_dim")
    )
    parts = [
        f"""\
![TFLOP/s over sequence length]({link(png, POINTS)})

{textwrap.fill(about, 118)}""",
        peers_table(dense),
        textwrap.fill(
            f"The portable family sm80, forced, beside FlashAttention-2 (geometric means of the same points): {portable}.",
            118,
        ),
    ]
    if other:
        parts += [
            """\
fp16, short sequences, odd numbers of tiles, grouped heads (including one GPU's share of a model spread over eight),
dropout, and few heads, as ratios of speed (above 1 the first is faster):""",
            other_table(other),
        ]
    if few:
        parts += [
            """\
Few queries of many keys, as in decoding: forward, bf16. TB/s counts one reading of K and V. Each library has its
own K and V, so they come from memory, not L2.""",
            few_table(few),
        ]
    if sparse:
        parts += [
            """\
Block-sparse, 128x128 blocks: the share of the time of flashjit's own dense kernel. In brackets: the rate on the blocks kept,
which is 1 if a block costs what it costs in the dense kernel; and the speed next to the dense kernel on as many tokens in
sequences as short as a row of the map. The map is a window around the diagonal, or as many blocks per row at random.""",
            sparse_table(sparse),
        ]
    return "\n\n".join(parts)


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


def serving_section(rows):
    """tools/docs/serving-results.md"""
    pages = sorted((int(name[5:-3]) for name in rows[0] if name.startswith("pages")), reverse=True)
    columns = {
        "contiguous": "contiguous",
        "invariant": "batch_invariant",
        **{f"pages{size}": str(size) if i else f"pages of {size}" for i, size in enumerate(pages)},
        "e4m3": "e4m3",
        "e4m3_pages16": "e4m3, pages of 16",
        "fa3": "FA3",
        "cudnn": "cuDNN",
    }
    micros = lambda row, name: f"{float(row[f'{name}_us']):.0f}" if row.get(f"{name}_us") else "-"
    lines = [
        [
            row["problem"],
            f"{row['heads']}/{row['heads_kv']}, d{row['head_dim']}",
            row["queries"],
            *(micros(row, name) for name in columns),
        ]
        for row in rows
        if row["heads"]
    ]
    states = [
        f"{row['problem']}: {float(row[name]):.1f} us, a copy {float(row['copy_us']):.1f}"
        for row in rows
        for name in ("append_us", "merge_us")
        if row.get(name)
    ]
    states += [
        f"{row['problem']}: one call {float(row['together_us']):.0f} us, two {float(row['apart_us']):.0f}"
        for row in rows
        if row.get("together_us")
    ]
    states += [
        f"{row['problem']}: {float(row['prefix_us']):.0f} us with prefix_length, {float(row['plain_us']):.0f} without"
        for row in rows
        if row.get("prefix_us")
    ]
    about = (
        f"Microseconds of a call in a CUDA graph; {listed(values(rows, 'device'))}, {commits(rows)}, "
        f"bf16 queries, by tools/bench/serving.py. {'; '.join(states)}."
    )
    return "\n\n".join(
        [markdown(["sequences", "heads", "queries", *columns.values()], lines), textwrap.fill(about, 118)]
    )


SCHEMES = {"ring": "#0072B2", "all_gather": "#D55E00", "ulysses": "#009E73", "two_level": "#CC79A7"}


def draw_plans(rows, path):
    plt = pyplot()
    lengths = list(dict.fromkeys(row["tokens"] for row in rows))
    figure, axes = plt.subplots(1, len(lengths), figsize=(15, 4), sharey=True, layout="constrained")
    for axis, tokens in zip(axes, lengths):
        for scheme, color in SCHEMES.items():
            points = [
                (int(row["ranks"]), float(row["efficiency"]))
                for row in rows
                if row["tokens"] == tokens and row["scheme"] == scheme
            ]
            axis.plot([x for x, _ in points], [y for _, y in points], color=color, marker="o", label=scheme)
        axis.set_title(f"{int(tokens) >> 10}k tokens", fontsize=12)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("ranks", fontsize=11)
        axis.set_ylim(0, 1.02)
        axis.grid(color="#dddddd", linewidth=0.7)
    axes[0].set_ylabel("share of linear speed", fontsize=11)
    axes[0].legend(frameon=False, fontsize=11)
    figure.suptitle(
        "Predicted by simulator.py: both passes, bf16, 32/8 heads, d128, causal, hosts of 8 H100", fontsize=13
    )
    figure.savefig(path, dpi=100)


def plans_section(rows, png):
    """tools/docs/distributed-results.md"""
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    lines = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        of = {(row["ranks"], row["scheme"]): row for row in rows if row["tokens"] == tokens}
        for scheme in SCHEMES:
            shares = [
                f"{float(of[n, scheme]['efficiency']):.2f}" if (n, scheme) in of else "-" for n in ranks
            ]
            lines.append([f"{int(tokens) >> 10}k", f"`{scheme}`", *shares])
    table = markdown(["tokens", "scheme", *(f"{n} ranks" for n in ranks)], lines)
    return "\n\n".join([f"![shares of linear speed]({link(png, DISTRIBUTED)})", table])


def shared_section(rows):
    """tools/docs/distributed-results.md"""
    left = lambda row: "" if int(row.get("reserved_sms") or 0) == 0 else f", {row['reserved_sms']} SMs left"
    lines = [
        [
            f"{int(row['tokens']) >> 10}k",
            row["mask"],
            f"`{row['scheme']}`{left(row)}",
            row["pass"],
            row["alone_ms"],
            row["ms"],
            row["predicted_ms"],
            row["scaling"],
            row["memory_gb"],
            row["formula_gb"],
        ]
        for row in rows
    ]
    return markdown(
        [
            "tokens",
            "mask",
            "scheme",
            "passes",
            "one GPU, ms",
            f"{rows[0]['ranks']} GPUs, ms",
            "predicted, ms",
            "times as fast",
            "peak, GB",
            "formula, GB",
        ],
        lines,
    )


def draw_scaling(rows, path):
    """Measured, and dashed as predicted."""
    plt = pyplot()
    rows = [row for row in rows if row["pass"] == "both" and row["scaling"]]
    lengths, ranks = (
        list(dict.fromkeys(row["tokens"] for row in rows)),
        sorted({int(row["ranks"]) for row in rows}),
    )
    figure, axes = plt.subplots(
        1, len(lengths), figsize=(5 * len(lengths), 4), sharey=True, layout="constrained", squeeze=False
    )
    for axis, tokens in zip(axes[0], lengths):
        for scheme, color in SCHEMES.items():
            points = [
                (
                    int(row["ranks"]),
                    float(row["scaling"]),
                    float(row["alone_ms"]) / float(row["predicted_ms"]),
                )
                for row in rows
                if row["tokens"] == tokens and row["scheme"] == scheme
            ]
            axis.plot(
                [n for n, _, _ in points],
                [times / n for n, times, _ in points],
                color=color,
                marker="o",
                label=scheme,
            )
            axis.plot(
                [n for n, _, _ in points], [times / n for n, _, times in points], color=color, linestyle="--"
            )
        axis.set_title(f"{int(tokens) >> 10}k tokens", fontsize=12)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, ranks)
        axis.set_xlabel("GPUs", fontsize=11)
        axis.set_ylim(0, 1.1)
        axis.grid(color="#dddddd", linewidth=0.7)
    axes[0][0].set_ylabel("share of linear speed", fontsize=11)
    axes[0][0].legend(frameon=False, fontsize=11)
    figure.suptitle(
        f"Both passes, bf16, 32/8 heads, d128, causal, zigzag, on {rows[0]['device']}; dashed: predicted",
        fontsize=13,
    )
    figure.savefig(path, dpi=100)


def scaling_section(rows, png):
    """tools/docs/benchmarks-results.md"""
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    lines = []
    for tokens, scheme, passes in dict.fromkeys((row["tokens"], row["scheme"], row["pass"]) for row in rows):
        of = {
            row["ranks"]: row
            for row in rows
            if (row["tokens"], row["scheme"], row["pass"]) == (tokens, scheme, passes)
        }
        times = [f"{float(of[n]['scaling']):.2f}" if n in of and of[n]["scaling"] else "-" for n in ranks]
        lines.append([f"{int(tokens) >> 10}k", f"`{scheme}`", passes, *times])
    table = markdown(["tokens", "scheme", "passes", *(f"{n} GPUs" for n in ranks)], lines)
    return "\n\n".join(
        [
            "Speed on several GPUs of one host, as a multiple of one GPU's:",
            f"![shares of linear speed]({link(png, POINTS)})",
            table,
        ]
    )


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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="write the tables only, and leave the pictures")
    arguments = parser.parse_args()
    result = lambda name: os.path.join(RESULTS, name)
    dense, other, few, sparse = (
        read(result(f"h100_dense{name}.csv")) for name in ("", "_other", "_few", "_sparse")
    )
    paper = [result(f"h100_paper{name}.csv") for name in ("", "_figure")]
    paper = [read(path) for path in paper] if all(map(os.path.exists, paper)) else None
    scaling = read(result("h100_scaling.csv")) if os.path.exists(result("h100_scaling.csv")) else None
    if not arguments.tables:
        draw(dense, result("h100_dense.png"))
        draw_plans(read(result("plans.csv")), result("plans.png"))
        if scaling:
            draw_scaling(scaling, result("h100_scaling.png"))
        if paper:
            draw_paper(*paper, result("h100_paper.png"))
    serving, latent, codes, variants = (
        read(result(f"h100_{name}.csv")) for name in ("serving", "latent", "eight_bits_speed", "variants")
    )
    leads = dense + other, few, serving, latent, codes
    replace(README, "speed", speed_section(dense, *leads[1:], variants))
    replace(BENCHMARKS, "peers", peers_summary(dense, result("h100_dense.png")))
    replace(BENCHMARKS, "leads", leads_section(*leads))
    replace(POINTS, "figures", figures_section(dense, other, few, sparse, result("h100_dense.png")))
    replace(SERVING, "figures", serving_section(serving))
    replace(TUNING, "tuner", tuner_section(read(result("h100_tuner.csv"))))
    replace(DISTRIBUTED, "plans", plans_section(read(result("plans.csv")), result("plans.png")))
    if os.path.exists(result("h100_distributed.csv")):
        replace(DISTRIBUTED, "figures", shared_section(read(result("h100_distributed.csv"))))
    if scaling:
        replace(POINTS, "scaling", scaling_section(scaling, result("h100_scaling.png")))
    if paper:
        replace(PAPER, "figures", paper_section(*paper))
    return 0


if __name__ == "__main__":
    sys.exit(main())

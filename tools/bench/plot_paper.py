"""The picture and the tables of what FlashAttention's first paper shows."""

import os
import textwrap

from plot_rows import LINES, PAPER, RESULTS, link, markdown, origin, pyplot, select, short, values

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

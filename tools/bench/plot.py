"""Draw what tools/bench/compare.py measured, and write the README's section of figures.

    python3 tools/bench/plot.py tools/bench/results/h100_dense.csv --png tools/bench/results/h100_dense.png

The picture shows TFLOP/s over the sequence length, one panel for each pass, head dim and mask; it needs matplotlib.
--table prints the section that stands in the README between its two markers, with the tables *_other.csv, *_few.csv and
*_sparse.csv beside the given one, where they are; --readme puts the section there.

The picture's path in the section is that of --png, else the CSV's with the ending .png.
"""
import argparse
import csv
import os
import statistics
import sys

PASSES = {"fwd": "forward", "bwd": "backward"}
MASKS = {0: "full", 1: "causal"}
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Colours of Okabe and Ito, which the colour-blind can tell apart. In drawing order: the dashes are seen on flashjit.
LINES = {
    "fa2": dict(label="FlashAttention-2", color="#009E73", linewidth=1.4, marker="^", markersize=5),
    "cudnn": dict(label="cuDNN", color="#D55E00", linewidth=1.4, marker="s", markersize=4.5),
    "flashjit": dict(label="flashjit", color="#0072B2", linewidth=3.5, marker="o", markersize=6.5),
    "sm80": dict(label="flashjit, portable family sm80", color="#000000", linewidth=1.3, linestyle="--"),
}
LEGEND = ("flashjit", "sm80", "cudnn", "fa2")


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        sys.exit(f"plot: {path} has no rows")
    for row in rows:
        for name in ("head_dim", "causal", "batch", "heads", "heads_kv", "seqlen", "seqlen_q", "seqlen_kv"):
            if name in row:
                row[name] = int(row[name])
    return rows


def values(rows, name):
    return sorted({row[name] for row in rows})


def select(rows, **wanted):
    """The rows with these values, shortest sequence first."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return sorted(found, key=lambda row: row["seqlen"])


def short(length):
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def origin(rows):
    device, date, commit = (" and ".join(values(rows, name)) for name in ("device", "date", "commit"))
    return f"{device}, {date}, commit {commit}"


# --- the picture ---


def teraflops(row, who):
    """As compare.py counts them; None where this peer did not run."""
    if not row[f"{who}_ms"]:
        return None
    operations = 4.0 * row["batch"] * row["heads"] * row["seqlen"] ** 2 * row["head_dim"]
    operations *= (0.5 if row["causal"] else 1.0) * (2.5 if row["pass"] == "bwd" else 1.0)
    return operations / float(row[f"{who}_ms"]) / 1e9


def draw(rows, path):
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        sys.exit(f"plot: matplotlib is needed for --png: {error}")
    panels = [(dim, causal) for dim in values(rows, "head_dim") for causal in values(rows, "causal")]
    lengths = values(rows, "seqlen")
    figure, axes = plt.subplots(len(PASSES), len(panels), figsize=(16, 7), sharex=True, sharey="row", squeeze=False,
                                layout="constrained")
    for pass_name, line_of_axes in zip(PASSES, axes):
        for (dim, causal), axis in zip(panels, line_of_axes):
            points = select(rows, **{"pass": pass_name}, head_dim=dim, causal=causal)
            for who, style in LINES.items():
                known = [(row["seqlen"], teraflops(row, who)) for row in points if row[f"{who}_ms"]]
                axis.plot([x for x, _ in known], [y for _, y in known], **style)
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
    figure.suptitle(f"Attention, {' and '.join(values(rows, 'dtype'))}: {origin(rows)}", fontsize=15)
    handles = dict(zip(LINES, axes[0][0].get_lines()))
    figure.legend(handles=[handles[who] for who in LEGEND], loc="outside lower center", ncols=len(LEGEND), fontsize=12,
                  frameon=False, handlelength=3)
    figure.savefig(path, dpi=100)


# --- the section of the README ---


def speed_ratios(rows, ours, peer):
    """Sequence length -> how many times the peer's speed, where both ran."""
    return {row["seqlen"]: float(row[f"{peer}_ms"]) / float(row[f"{ours}_ms"])
            for row in rows if row[f"{ours}_ms"] and row[f"{peer}_ms"]}


def mean(ratios, count):
    """The geometric mean, and over how many points where some are missing."""
    if not ratios:
        return "-"
    missing = f" ({len(ratios)} of {count})" if len(ratios) < count else ""
    return f"{statistics.geometric_mean(ratios.values()):.2f}{missing}"


def markdown(header, lines):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])


def dense_table(rows):
    count = len(values(rows, "seqlen"))
    lines = []
    for pass_name in PASSES:
        for dim in values(rows, "head_dim"):
            for causal in values(rows, "causal"):
                points = select(rows, **{"pass": pass_name}, head_dim=dim, causal=causal)
                cudnn = speed_ratios(points, "flashjit", "cudnn")
                worst = min(cudnn, key=cudnn.get, default=None)
                lines.append([PASSES[pass_name], str(dim), MASKS[causal], mean(cudnn, count),
                              f"{cudnn[worst]:.2f} at {short(worst)}" if cudnn else "-",
                              mean(speed_ratios(points, "flashjit", "fa2"), count),
                              mean(speed_ratios(points, "sm80", "fa2"), count)])
    return markdown(["Pass", "Head dim", "Mask", "flashjit / cuDNN", "its worst point", "flashjit / FA2", "sm80 / FA2"],
                    lines)


def sparse_table(rows):
    problems = sorted({(row["head_dim"], row["pattern"], row["seqlen"], row["density"]) for row in rows},
                      key=lambda problem: (problem[0], problem[1] != "window", *problem[2:]))
    lines = []
    for dim, pattern, length, density in problems:
        cells = [select(rows, **{"pass": pass_name}, head_dim=dim, pattern=pattern, seqlen=length, density=density)
                 for pass_name in PASSES]
        share = [f"{100 * float(cell[0]['ratio']):.1f}% ({float(cell[0]['rate']):.2f}, {float(cell[0]['ratio_short']):.2f})"
                 if cell else "-" for cell in cells]
        lines.append([str(dim), short(length), f"{100 * float(density):.1f}%", pattern] + share)
    header = ["Head dim", "Length", "Blocks kept", "which"]
    return markdown(header + [f"{name}: time (rate, beside short)" for name in PASSES.values()], lines)


def other_table(rows):
    lines = []
    for row in rows:
        heads = f"{row['heads']}/{row['heads_kv']}" if row["heads"] != row["heads_kv"] else row["heads"]
        dropout = f"dropout {float(row['dropout']):g}, " if float(row.get("dropout", 0)) else ""
        problem = f"{row['dtype']}, d{row['head_dim']}, {MASKS[row['causal']]}, {dropout}b{row['batch']}, {heads} heads"
        ratio = lambda name: f"{float(row[name]):.2f}" if row.get(name) else "-"
        lines.append([PASSES[row["pass"]], problem, short(row["seqlen"]), ratio("ratio_cudnn"), ratio("ratio_fa2"),
                      ratio("sm80_ratio_fa2")])
    return markdown(["Pass", "Problem", "Length", "flashjit / cuDNN", "flashjit / FA2", "sm80 / FA2"], lines)


def few_table(rows):
    lines = []
    for row in rows:
        sequences = f"{row['batch']} x " if row["batch"] > 1 else ""
        micros = lambda name: f"{1e3 * float(row[name]):.1f}" if row[name] else "-"
        lines.append([str(row["seqlen_q"]), f"{sequences}{short(row['seqlen_kv'])}", f"{row['heads']}/{row['heads_kv']}",
                      str(row["head_dim"]), micros("flashjit_ms"), micros("cudnn_ms"), micros("fa2_ms"),
                      f"{float(row['gbs']) / 1e3:.2f}"])
    return markdown(["Queries", "Keys", "Heads", "Head dim", "flashjit, us", "cuDNN", "FA2", "flashjit, TB/s"], lines)


def section(dense, other, few, sparse, dense_csv, png):
    """The text between the markers, without a newline at its end. Paths in it count from the repository's root."""
    dense_csv, png = (os.path.relpath(path, ROOT) for path in (dense_csv, png))
    lengths = values(dense, "seqlen")
    span = f"{short(lengths[0])} to {short(lengths[-1])}"
    tables = {"the second table": other, "few queries": few, "block-sparse": sparse}
    commits = ", ".join(f"{name} of {' and '.join(values(rows, 'commit'))}" for name, rows in tables.items()
                        if rows and values(rows, "commit") != values(dense, "commit"))
    parts = [
        f"""\
[The picture above]({png}) and this section: {origin(dense)}{commits and f"; {commits}"}.
Measured by [tools/bench/compare.py](tools/bench/compare.py): flashjit, cuDNN and FlashAttention-2 (both through
PyTorch) in one process on the same tensors, checked before they are timed, launches interleaved, medians; 16k tokens
in all, hidden size 2048, bf16. `flashjit` is what the library chooses by itself, `sm80` its portable family, forced.
The table has ratios of speed, above 1 the first is faster: geometric means over the lengths {span}.""",
        dense_table(dense),
    ]
    if other:
        parts += ["fp16, short sequences, some lengths of odd numbers of tiles, grouped heads, those that a GPU has of a model "
                  "spread over\neight, dropout, and few heads:",
                  other_table(other)]
    if few:
        parts += ["Few queries of many keys, as in decoding: forward, bf16, and the rate at which K and V are read once. Each "
                  "peer has its\nown, so that they come from memory.", few_table(few)]
    if sparse:
        parts += ["Block-sparse, 128x128 blocks: share of the time of flashjit's own dense kernel, and in brackets the rate "
                  "on the\nblocks kept, 1 where such a block costs what it costs in the dense kernel, and the speed beside "
                  "that kernel where\nas many tokens are sequences with no more keys than a row of the map has. A window around "
                  "the diagonal, or as many\nblocks of each row scattered at random.",
                  sparse_table(sparse)]
    parts += [f"""\
To measure on the GPU machine, and to renew the picture and this section:

```sh
python3 tools/bench/compare.py --lib build/libflashjit.so --csv {dense_csv}
python3 tools/bench/plot.py {dense_csv} --png {png} --readme README.md
```"""]
    return "\n\n".join(parts)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="the dense table of compare.py")
    parser.add_argument("--png", help="write the picture here")
    parser.add_argument("--table", action="store_true", help="print the README's section")
    parser.add_argument("--readme", help="replace the section in this file")
    arguments = parser.parse_args()
    if not (arguments.png or arguments.table or arguments.readme):
        parser.error("nothing to do: give --png, --table or --readme")
    dense = read(arguments.csv)
    beside = lambda name: f"_{name}".join(os.path.splitext(arguments.csv))
    other, few, sparse = (read(beside(name)) if os.path.exists(beside(name)) else None
                          for name in ("other", "few", "sparse"))
    if arguments.png:
        draw(dense, arguments.png)
    if arguments.table or arguments.readme:
        png = arguments.png or os.path.splitext(arguments.csv)[0] + ".png"
        text = section(dense, other, few, sparse, arguments.csv, png)
        if arguments.table:
            print(text)
        if arguments.readme:
            replace(arguments.readme, "figures", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

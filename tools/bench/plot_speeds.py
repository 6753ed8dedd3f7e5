"""The picture and the tables of speeds next to other libraries: dense, few queries, block maps, caches."""

import statistics
import textwrap

from plot_races import largest_lead
from plot_rows import (
    BENCHMARKS,
    BESIDE_PEERS,
    LEGEND,
    LINES,
    MASKS,
    PASSES,
    PEERS,
    POINTS,
    beside_the_best,
    best_peer,
    commits,
    gpus,
    link,
    listed,
    markdown,
    mean,
    origin,
    present,
    pyplot,
    ratios,
    select,
    short,
    teraflops,
    values,
    versus,
)


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


def sparse_table(rows):
    problems = sorted(
        {(row["head_dim"], row["pattern"], row["seqlen"], row["density"]) for row in rows},
        key=lambda problem: (problem[0], problem[1] != "window", *problem[2:], problem[1]),
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


def peers_summary(dense, png):
    """tools/docs/benchmarks.md"""
    title = f"TFLOP/s over sequence length on an {gpus(dense)}: flashjit, " + ", ".join(
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


def of_gpus(dense, serving, variants):
    """ "an H100 (decoding, FP8: an H200)"."""
    found = {
        "training": gpus(dense),
        "decoding": gpus(serving),
        "FP8": "H200",
    }  # as FP8's table names no device
    found["other masks"] = found["first call"] = gpus(variants)
    most = statistics.mode(found.values())
    others = [
        f"{', '.join(name for name, its in found.items() if its == gpu)}: an {gpu}"
        for gpu in dict.fromkeys(found.values())
        if gpu != most
    ]
    return f"an {most}" + (f" ({'; '.join(others)})" if others else "")


def speed_section(dense, few, serving, latent, codes, variants, races):
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
    if lead := largest_lead(races):
        ahead, who, problem = lead
        others += f"; {who} {ahead:.2f} ({problem})"
    about = (
        f"Above 1, flashjit is faster: geometric means on {of_gpus(dense, serving, variants)}; the linked pages name commits and shapes. "
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
        of_gpu = f" on an {gpus(latent)}" if gpus(latent) != gpus(dense) else ""
        kinds[f"with latents{of_gpu}"] = ahead(
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
        f"{row['problem']} with Q and norms of Q and K: {float(row['prologue_us']):.1f} us, a copy {float(row['prologue_copy_us']):.1f}"
        for row in rows
        if row.get("prologue_us")
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

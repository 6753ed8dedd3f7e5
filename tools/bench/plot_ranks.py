"""Pictures and tables of sequences that ranks share: plans of the simulator, speeds, scaling."""

from plot_rows import DISTRIBUTED, POINTS, link, markdown, pyplot

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

"""Draw a gallery of attentions, each made by a line of flashjit's language, and write the tables of tools/docs/gallery.md.

    FLASHJIT_LIBRARY=build/libflashjit.so python3 tools/bench/gallery.py

flashjit's reference computes each picture from the very text in its title; matplotlib draws it. With a table of speeds measured by
tools/bench/variants.py, picture and section show them next to FlexAttention's:

    FLASHJIT_CACHE_DIR=$(mktemp -d) python3 tools/bench/variants.py --lib build/libflashjit.so \\
        --csv tools/bench/results/h200_variants.csv
    python3 tools/bench/gallery.py
"""

import argparse
import dataclasses
import os
import re
import statistics
import sys
import textwrap

import gallery_stages
from plot_rows import PASSES, RESULTS, ROOT, link, markdown, origin, read, replace, select, short, values

try:
    import numpy as np
except ImportError as error:
    sys.exit(f"gallery: NumPy is needed: {error}")
sys.path.insert(0, os.path.join(ROOT, "tools", "python"))
import flashjit  # noqa: E402

PAGE = os.path.join(ROOT, "tools", "docs", "gallery.md")
PIXELS = 128  # of a picture's side, at most
BLUE, GREY = "#0072B2", "#EEEEEE"


# --- the attentions ---

BOUNDS, INTERVALS, PAIRS = "bounds", "lists, by intervals", "lists, by pairs"


@dataclasses.dataclass
class Attention:
    """One picture. `tiles` is how runtime/expr/analyze.cpp has the mask's tiles visited; `case` its name in the CSV."""

    name: str
    mask: str = ""
    score: str = ""
    tiles: str = BOUNDS
    length: int = 64
    heads: int = 1
    names: dict = dataclasses.field(default_factory=dict)
    case: str = ""

    def program(self):
        """What the user writes."""
        return self.score if self.score else self.mask

    def on_pixels(self, text):
        """The program on every n-th position, with captured tensors in fp32."""
        step = max(1, self.length // PIXELS)
        text = re.sub(r"\b[bf][fp]16\b", "fp32", text.replace(" grad;", ";"))
        return re.sub(r"\b(q|kv|seqlen_q|seqlen_kv)\b", rf"(\1 * {step})", text) if step > 1 else text

    def captures(self, text):
        """The values of the names that a program declares."""
        types = {"f": np.float32, "i": np.int32}
        return {
            name: value.astype(types.get(value.dtype.kind, value.dtype))
            if isinstance(value, np.ndarray)
            else value
            for name, value in self.names.items()
            if f"{name}:" in text
        }

    def picture(self):
        """[heads, pixels, pixels]: scores where all products are 0, NaN where pairs do not attend."""
        pixels = min(self.length, PIXELS)
        q = np.zeros((1, self.heads, pixels, 8), np.float32)
        each_key = np.broadcast_to(np.eye(pixels, dtype=np.float32), (1, self.heads, pixels, pixels)).copy()
        picture = np.ones(each_key.shape[1:])
        if self.score:
            options = f"score{{{self.on_pixels(self.score)}}}:mask{{only: int; kv == only}}"
            scores = [
                flashjit.forward(
                    q, q, q, options=options, captures={**self.captures(self.score), "only": key}
                )[1]
                for key in range(pixels)
            ]
            picture = np.stack(scores, -1)[0]
        if self.mask:
            options = f"mask{{{self.on_pixels(self.mask)}}}"
            out, _ = flashjit.forward(q, q, each_key, options=options, captures=self.captures(self.mask))
            picture[out[0] == 0] = np.nan
        return picture


def softcapped(text, scores):
    """A program's result for each score."""
    q = np.zeros((1, 1, len(scores), 8), np.float32)
    q[0, 0, :, 0] = scores
    return flashjit.forward(
        q, np.eye(1, 8, dtype=np.float32)[None, None], q[:, :, :1], scale=1.0, options=f"score{{{text}}}"
    )[1][0, 0]


def runs(count, length, seed):
    """Ids of `count` documents of different lengths."""
    cuts = np.random.default_rng(seed).choice(np.arange(1, length), count - 1, replace=False)
    return (np.arange(length)[:, None] >= cuts[None, :]).sum(1)


CAUSAL = "kv <= q + seqlen_kv - seqlen_q"


def attentions():
    random = np.random.default_rng(4)
    return masks(random) + scores(random)


def masks(random):
    return [
        Attention("Causal", CAUSAL, length=8192, case="causal"),
        Attention("Sliding window", "q >= kv && q - kv < 1024", length=8192, case="window"),
        Attention(
            "Window and first tokens",
            "window: int; kv <= q && (q - kv < window || kv < 4)",
            tiles=INTERVALS,
            names={"window": 14},
            case="first_tokens",
        ),
        Attention(
            "Padding",
            "valid: bool 2d; valid[b, kv]",
            tiles=INTERVALS,
            names={"valid": np.arange(64)[None] < 40},
            case="padding",
        ),
        Attention(
            "Left padding",
            "start: int32 1d; kv >= start[b] && kv <= q",
            names={"start": np.array([24])},
            case="left_padding",
        ),
        Attention("Prefix LM", "q >= kv || kv < 2000", tiles=INTERVALS, length=8192, case="prefix"),
        Attention(
            "Documents",
            "ids: int32 1d; q >= kv && ids[q] == ids[kv]",
            tiles=INTERVALS,
            length=8192,
            names={"ids": runs(16, 8192, 3)},
            case="documents",
        ),
        Attention("Block-causal", "kv / 8 <= q / 8", tiles=INTERVALS, case="block_causal"),
        Attention(
            "Dilated",
            "step: int; kv <= q && (q - kv) % step == 0",
            tiles=PAIRS,
            names={"step": 3},
            case="dilated",
        ),
        Attention(
            "Strided (Sparse Transformer)",
            "kv <= q && (q - kv < 8 || (q - kv) % 8 == 0)",
            tiles=PAIRS,
            case="strided",
        ),
        Attention(
            "2-D neighbourhood",
            "abs(q / 64 - kv / 64) <= 8 && abs(q % 64 - kv % 64) <= 8",
            tiles=INTERVALS,
            length=1024,
            case="neighbourhood",
        ),
        Attention(
            "Butterfly",
            "((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0",
            tiles=PAIRS,
            length=8192,
            case="butterfly",
        ),
        Attention("Window that grows with the head", "kv <= q && q - kv < 4 << h", heads=4),
        Attention(
            "Hash buckets (Reformer)",
            "bucket: int32 2d; bucket[h, q] == bucket[h, kv]",
            tiles=INTERVALS,
            names={"bucket": random.integers(0, 6, (1, 64))},
        ),
    ]


def scores(random):
    return [
        Attention(
            "ALiBi",
            CAUSAL,
            "score + exp2(-0.5 * to_float(h + 1)) * to_float(kv - q)",
            length=8192,
            case="alibi",
        ),
        Attention("Softcap", CAUSAL, "50.0 * tanh(score / 50.0)", case="softcap"),
        Attention(
            "Bias of a key",
            "",
            "bias: fp32 2d; score + bias[b, kv]",
            names={"bias": random.normal(size=(1, 64))},
            case="key_bias",
        ),
        Attention(
            "Forget gates (FoX)",
            CAUSAL,
            "f: fp32 3d; score + (f[b, h, q] - f[b, h, kv])",
            names={"f": -np.cumsum(random.exponential(size=(1, 1, 64)) ** 3 / 8, axis=2)},
            case="forget_gates",
        ),
        Attention(
            "Relative bias",
            "",
            "table: fp16 2d grad; score + table[h, max(min(kv - q, 31), -32) + 32]",
            names={"table": np.cumsum(random.normal(size=(1, 64)), axis=1)},
            case="relative_bias",
        ),
        Attention(
            "Bias of a pair, causal",
            CAUSAL,
            "bias: bf16 4d grad; score + bias[b, h, q, kv]",
            names={"bias": random.normal(size=(1, 1, 64, 64))},
            case="bias",
        ),
    ]


# --- the figures ---


def rows_of(attention, rows):
    return [
        row for row in rows if row["case"] == attention.case and row["flashjit_tflops"] and row["flex_tflops"]
    ]


def speeds(row):
    return (
        f"{float(row['flashjit_tflops']):.0f} / {float(row['flex_tflops']):.0f} = {float(row['ratio']):.2f}x"
    )


def caption(attention, rows):
    """The speeds at the largest head dimension that was measured."""
    measured = rows_of(attention, rows)
    if not measured:
        return ""
    dim = max(values(measured, "head_dim"))
    lines = [f"{PASSES[row['pass']]} d{dim}: {speeds(row)}" for row in select(measured, head_dim=dim)]
    return "\n".join(lines)


def plotting():
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        sys.exit(f"gallery: matplotlib is needed for the picture: {error}")
    return matplotlib, plt


def draw(rows, path, matplotlib, plt):
    all_of_them = attentions()
    figure, axes = plt.subplots(4, 5, figsize=(17.5, 19 if rows else 17.5), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.15)
    scores = matplotlib.colormaps["viridis"].with_extremes(bad=GREY)
    plain = matplotlib.colors.ListedColormap([BLUE]).with_extremes(bad=GREY)
    for attention, axis in zip(all_of_them, axes.flat, strict=True):
        lines = textwrap.wrap(attention.program(), 37)
        axis.set_title(attention.name, fontsize=13, fontweight="bold", pad=8 + 13 * len(lines))
        axis.text(
            0.5,
            1.02,
            "\n".join(lines),
            transform=axis.transAxes,
            ha="center",
            va="bottom",
            fontsize=9.5,
            family="monospace",
        )
        if attention.case == "softcap":  # depends on no position
            x = np.linspace(-150, 150, 201)
            axis.plot(x, x, color="#999999", linestyle="--", linewidth=1)
            axis.plot(x, softcapped(attention.score, x), color=BLUE, linewidth=3)
            axis.set_ylim(-80, 80)
            axis.set_aspect(300 / 160)
            axis.tick_params(labelsize=8)
        else:
            side = int(attention.heads**0.5)
            heads = [
                np.pad(head, 1 if side > 1 else 0, constant_values=np.nan) for head in attention.picture()
            ]
            picture = np.block([heads[row * side : (row + 1) * side] for row in range(side)])
            axis.imshow(picture, cmap=scores if attention.score else plain, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if side > 1:
                axis.axhline(picture.shape[0] / 2 - 0.5, color="white", linewidth=3)
                axis.axvline(picture.shape[1] / 2 - 0.5, color="white", linewidth=3)
        axis.set_xlabel(caption(attention, rows), fontsize=10.5)
    axes[0][0].set_ylabel("q, down; kv, to the right", fontsize=10)
    heading = "Attentions of one line: which pairs attend (blue), and scores of zero products"
    if rows:
        heading += f"\nTFLOP/s of flashjit / FlexAttention, bf16, {origin(rows)}"
    figure.suptitle(heading, fontsize=15)
    figure.savefig(path, dpi=100)


# --- the section of the page ---


def table(rows):
    columns = sorted(
        {(row["head_dim"], row["pass"]) for row in rows}, key=lambda at: (at[0], list(PASSES).index(at[1]))
    )
    lines = []
    for attention in attentions():
        known = {(row["head_dim"], row["pass"]): row for row in rows_of(attention, rows)}
        text = attention.program().replace("|", "\\|")  # a table's cell ends at a bar
        lines.append(
            [
                attention.name,
                f"`{text}`",
                attention.tiles if attention.mask else "-",
                *(speeds(known[at]) if at in known else "" for at in columns),
            ]
        )
    return markdown(
        ["Attention", "Score or mask", "Tiles", *(f"d{dim} {PASSES[name]}" for dim, name in columns)], lines
    )


def compile_times(rows):
    """Medians over the attentions; both passes together."""
    ours, flex = (
        [float(row[f"{who}_compile_ms"]) for row in rows if row["pass"] == "fwd" and row[f"{who}_compile_ms"]]
        for who in ("flashjit", "flex")
    )
    if not ours or not flex:
        return ""
    return (
        f" Compiling both passes took {statistics.median(ours) / 1e3:.1f} s, FlexAttention's "
        f"{statistics.median(flex) / 1e3:.1f} s (medians)."
    )


def about_programs(rows):
    """What the programs' texts leave open, of those that were measured."""
    cases, text = values(rows, "case"), ""
    if {"first_tokens", "dilated"} <= set(cases):
        text += " Scalars: window 1024, step 3."
    if "bias" in cases:
        rates = [
            f"{PASSES[row['pass']]} {float(row['bias_gbs']):.0f}" for row in rows if row["case"] == "bias"
        ]
        text += f" Biases are measured without their gradient; the bias of a pair is read at {' and '.join(rates)} GB/s."
    return text


def measured(rows):
    shapes = sorted(
        {(row["seqlen"], row["batch"], row["heads"], row["head_dim"]) for row in rows if row["ratio"]}
    )
    sizes = "; ".join(f"{short(s)} tokens, batch {b}, {h} heads of {d}" for s, b, h, d in shapes)
    text = (
        f"{origin(rows)}. Cells are TFLOP/s of flashjit / FlexAttention = ratio, measured by "
        "[variants.py](../bench/variants.py) in one process on the same tensors, checked before they are "
        f"timed. Pairs that attend count; bf16; {sizes}. flashjit's times include building the tile lists in every call; "
        f"FlexAttention's block masks are built beforehand.{about_programs(rows)}{compile_times(rows)}"
    )
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def section(rows, png):
    """The text between the page's markers, without a newline at its end."""
    parts = [
        f"![Masks and scores of twenty attentions]({link(png, PAGE)})",
        table(rows),
        """\
ALiBi, softcap, forget gates and the last row are measured or drawn with a causal mask. *Tiles* says how the tiles without a pair
that attends are skipped: by the `bounds` of the loop, or by tile lists, built from intervals or by looking at pairs
([programs](programs.md)).""",
    ]
    if rows:
        parts.append(measured(rows))
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--csv",
        default=os.path.join(RESULTS, "h200_variants.csv"),
        help="the table of variants.py; without this file no figures are shown (default %(default)s)",
    )
    parser.add_argument("--tables", action="store_true", help="write the table only, and leave the picture")
    arguments = parser.parse_args()
    rows = read(arguments.csv) if os.path.exists(arguments.csv) else []
    png, of_stages = (os.path.join(RESULTS, name) for name in ("gallery.png", "gallery_stages.png"))
    if not arguments.tables:
        modules = plotting()
        draw(rows, png, *modules)
        gallery_stages.draw(of_stages, modules[1])
    replace(PAGE, "gallery", section(rows, png))
    replace(PAGE, "stages", gallery_stages.section(of_stages, PAGE))
    return 0


if __name__ == "__main__":
    sys.exit(main())

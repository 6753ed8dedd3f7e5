"""Programs of the stages beside score and mask, for gallery.py: weights in place of the softmax, rows of Q and K, elements of O, and O
as codes.

flashjit's reference computes each picture from the very text in its title.
"""

import dataclasses
import os
import re
import sys
import textwrap

from plot_rows import ROOT, link, markdown

try:
    import numpy as np
except ImportError as error:
    sys.exit(f"gallery: NumPy is needed: {error}")
sys.path.insert(0, os.path.join(ROOT, "tools", "python"))
import flashjit  # noqa: E402

DIM = 16  # of rows of Q
LINES = ("#0072B2", "#D55E00", "#009E73")
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of codes of 4 bits


@dataclasses.dataclass
class Program:
    """One picture: of `stage`, a field of specs. values: what the program is applied to, weight_mod to scores, q_mod to rows [rows,
    DIM], out_mod and out to elements of O. names: what it captures. labels: of its lines, one for each head. text of out: the format
    that O is stored in, whose `scale` is a name."""

    name: str
    stage: str
    text: str
    values: np.ndarray
    axis: str
    names: dict = dataclasses.field(default_factory=dict)
    labels: tuple = ("",)

    def results(self):
        """weight_mod, out_mod and out: [heads, values]; q_mod: [rows, DIM], the changed rows."""
        stages = {
            "weight_mod": self._weights,
            "q_mod": self._rows,
            "out_mod": self._elements,
            "out": self._codes,
        }
        return stages[self.stage]()

    def _in_fp32(self):
        """The program, with captured tensors in fp32."""
        return re.sub(r"\b[bf][fp]16\b", "fp32", self.text.replace(" grad;", ";"))

    def _captures(self):
        return {
            name: value.astype(np.float32) if isinstance(value, np.ndarray) else value
            for name, value in self.names.items()
        }

    def _weights(self):
        """Each the O of one key whose value is 1."""
        q = np.zeros((1, 1, len(self.values), 8), np.float32)
        q[0, 0, :, 0] = self.values
        key, one = np.eye(1, 8, dtype=np.float32)[None, None], np.ones((1, 1, 1, 8), np.float32)
        options = f"score{{{self._in_fp32()}}}:weight_mod"
        return flashjit.forward(q, key, one, scale=1.0, options=options, captures=self._captures())[0][
            ..., 0
        ][0]

    def _rows(self):
        """Column c is the LSE of one key with a 1 there."""
        rows, keys = self.values.astype(np.float32)[None, None], np.eye(DIM, dtype=np.float32)[None, None]
        options = f"q_mod{{{self._in_fp32()}}}:mask{{only: int; kv == only}}"
        columns = [
            flashjit.forward(
                rows, keys, keys, scale=1.0, options=options, captures={**self._captures(), "only": column}
            )[1][0, 0]
            for column in range(DIM)
        ]
        return np.stack(columns, -1)

    def _elements(self):
        """O of one key is its value."""
        heads = len(self.labels)
        value = np.broadcast_to(self.values.astype(np.float32), (1, heads, 1, len(self.values))).copy()
        q = np.zeros((1, heads, 1, 8), np.float32)
        options = f"out_mod{{{self._in_fp32()}}}"
        return flashjit.forward(q, q, value, options=options, captures=self._captures())[0][0, :, 0]

    def _codes(self):
        """What codes of O stand for."""
        import torch

        value = torch.tensor(self.values, dtype=torch.float32)[None, None, None]
        key = torch.zeros(1, 1, 1, DIM)
        scale = torch.tensor(self.names["scale"])
        if self.text.startswith("e4m3"):
            out = flashjit.attention(key, key, value, out_dtype=torch.float8_e4m3fn, out_scale=scale)
            return (out.float() * scale).numpy()[0, 0]
        out, blocks = flashjit.attention(key, key, value, out_dtype=torch.float4_e2m1fn_x2, out_scale=scale)
        byte = out.view(torch.uint8).numpy()[0, 0, 0]
        code = np.stack((byte & 15, byte >> 4), -1).reshape(-1)
        of_block = np.repeat((blocks.float() * scale).numpy()[0, 0, 0], 16)
        return (np.where(code > 7, -1, 1) * LEVELS[code & 7] * of_block)[None]


def programs():
    scores = np.linspace(-6, 6, 97)
    elements = np.linspace(-4, 4, 128)
    ones = np.ones((64, DIM))
    ramp = np.ones((DIM, DIM)) * np.linspace(0.1, 3, DIM)[:, None]
    angles = np.arange(64)[:, None] * 10000.0 ** -(np.arange(DIM // 2) * 2 / DIM)
    return [
        Program("Sigmoid attention", "weight_mod", "bias: float; sigmoid(score + bias)", scores, "score", {"bias": -2.0}),
        Program("ReLU attention", "weight_mod", "n: float; max(score, 0.0) / n", scores, "score", {"n": 8.0}),
        Program("SiLU / n (HSTU)", "weight_mod", "n: float; score * sigmoid(score) / n", scores, "score", {"n": 8.0}),
        Program(
            "RoPE of a row of ones",
            "q_mod",
            "c: fp32 2d; s: fp32 2d; element * c[q, column / 2] + element_at(column ^ 1) * s[q, column / 2] * to_float(2 * "
            "(column & 1) - 1)",
            ones,
            "column, to the right; q, down",
            {"c": np.cos(angles), "s": np.sin(angles)},
        ),
        Program(
            "RMS norm of a head",
            "q_mod",
            f"w: fp32 1d grad; element * rsqrt(sum_of_squares / {DIM}.0 + 1e-6) * w[column]",
            ramp,
            "column, right; growing rows, down",
            {"w": np.linspace(0.5, 1.5, DIM)},
        ),
        Program(
            "Output gate of heads (Qwen3-Next)",
            "out_mod",
            "gate: bf16 3d grad; out * sigmoid(gate[b, q, h])",
            elements,
            "element of O",
            {"gate": np.array([-2.0, 0.0, 2.0]).reshape(1, 1, 3)},
            ("gate -2", "gate 0", "gate 2"),
        ),
        Program("Softcap of O", "out_mod", "2.0 * tanh(out / 2.0)", elements, "element of O"),
        Program(
            "Values of int8, a scale per head",
            "out_mod",
            "s: fp32 1d; s[h] * max(min(round(out / s[h]), 127.0), -127.0)",
            elements,
            "element of O",
            {"s": np.array([0.02, 0.5])},
            ("scale 0.02", "scale 0.5"),
        ),
        Program("FP8 with one scale", "out", "e4m3", elements, "element of O", {"scale": 1 / 64}),
        Program(
            "NVFP4, a scale for 16 columns", "out", "e2m1:g16:e4m3:apart:scaled", elements, "element of O", {"scale": 1 / 64}
        ),
    ]  # fmt: skip


def draw(path, plt):
    figure, axes = plt.subplots(2, 5, figsize=(20, 9.5), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.15)
    for program, axis in zip(programs(), axes.flat, strict=True):
        lines = textwrap.wrap(program.text, 40)
        axis.set_title(program.name, fontsize=13, fontweight="bold", pad=8 + 13 * len(lines))
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
        results = program.results()
        if program.stage == "q_mod":
            axis.imshow(results, cmap="viridis", aspect="auto", interpolation="nearest")
        else:
            if program.stage in ("out_mod", "out"):
                axis.plot(program.values, program.values, color="#999999", linestyle="--", linewidth=1)
            for line, label, color in zip(results, program.labels, LINES):
                axis.plot(program.values, line, color=color, linewidth=2.5, label=label)
            if any(program.labels):
                axis.legend(fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_xlabel(f"{program.stage}: {program.axis}", fontsize=10.5)
    figure.suptitle(
        "Programs in place of the softmax, of rows of Q and K, and of elements of O, and O as codes",
        fontsize=15,
    )
    figure.savefig(path, dpi=100)


def section(png, page):
    """The text between the page's markers, without a newline at its end."""
    rows = [[program.name, program.stage, f"`{program.text}`".replace("|", "\\|")] for program in programs()]
    return "\n\n".join(
        [
            f"![Programs of weights, of rows of Q and K, and of O, and O as codes]({link(png, page)})",
            markdown(["Program", "Stage", "Text"], rows),
        ]
    )

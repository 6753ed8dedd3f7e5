"""What a call is, besides its arrays: the text of its spec, and what its operands and results are called."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._values import ELEMENTS
from ._programs import Program

#: Arrays besides Q, K, V and captures, in the order of the operands.
FIXED = tuple(
    "kv_lengths page_table cu_seqlens_q cu_seqlens_kv sinks rng q_scale k_scale v_scale k_block_scale v_block_scale out_scale".split()
)
#: Types of arrays that have scales.
CODES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}
Q_CODES = ":q_codes"
#: Formats of O as codes, in specs.
FP8, FP8_ROWS, NVFP4 = "e4m3", "e4m3:row:fp32:apart", "e2m1:g16:e4m3:apart:scaled"
SWIZZLED = ":swizzled_scales"
TYPES_OF_OUT_CODES = {
    FP8: np.dtype(jnp.float8_e4m3fn),
    FP8_ROWS: np.dtype(jnp.float8_e4m3fn),
    NVFP4: np.dtype("uint8"),
}
_OUT_FORMAT = re.compile(r":out\{([^}]*)\}")
TANGENT = "_tangent"
_SPEC_WORDS = {"kv_lengths": ":kvlen", "cu_seqlens_q": ":varlen", "sinks": ":sinks", "rng": ":dropout"}
_MARK = re.compile(r"@(b|h|h_kv)(?::c\d+:\d+)?@")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a call is, besides its arrays.

    fixed: which of FIXED are given. batch: of the call as written. folds: the sizes of axes that vmap put in front of the batch,
    the first one first: entry b of the batch is entry b % batch of the call as written. pages: the rows of a page where K and V
    are a cache, 0 where that has slots; None: they are no cache. codes: what the spec says of O as codes, and of K and V, and Q, of 8 bits, or of
    formats; dim_v: V's columns where K or V is in a format, else None. longest: of packed sequences, whose number is `batch`,
    the most queries and keys of one. accurate: O is float32 for the backward pass. two_terms: P and dS are two elements each. weight_mod: the program's score is the weight
    of a pair, without a softmax and so without an LSE. keeps_before_mod: O before out_mod is a result of the forward pass, too, for the
    backward pass.
    """

    layout: str
    scale: float
    program: Program
    batch: int
    dropout: float = 0.0
    deterministic: bool = False
    fixed: tuple[str, ...] = ()
    folds: tuple[int, ...] = ()
    pages: int | None = None
    codes: str = ""
    dim_v: int | None = None
    longest: tuple[int, int] | None = None
    accurate: bool = False
    two_terms: bool = False
    weight_mod: bool = False
    keeps_before_mod: bool = False

    @property
    def out_format(self) -> str:
        """The format of O as codes; "" where it has elements."""
        found = _OUT_FORMAT.search(self.codes)
        return found[1] if found else ""

    def out_type(self, q: Any) -> Any:
        if self.out_format:
            return TYPES_OF_OUT_CODES[self.out_format]
        return np.dtype("float32") if self.accurate else self.rounded_type(q)

    def columns_of_out(self, v: Any) -> int:
        return self.columns_v(v) // 2 if self.out_format == NVFP4 else self.columns_v(v)

    def out_block_scale(self, q: Any, v: Any) -> tuple[tuple[int, ...], Any]:
        """Sizes and type of O's scales: like q with a row's scales, or with swizzled scales one matrix in q's layout."""
        if self.out_format != NVFP4:
            return (*q.shape[:3], 1), np.dtype("float32")
        scales, dtype = self.columns_v(v) // 16, np.dtype(jnp.float8_e4m3fn)
        if SWIZZLED not in self.codes:
            return (*q.shape[:3], scales), dtype
        heads, length = (q.shape[i] for i in ((2, 1) if self.layout == "BTNH" else (1, 2)))
        rows, columns = -(-q.shape[0] * length // 128) * 128, heads * scales
        return (1, rows, 1, columns) if self.layout == "BTNH" else (1, 1, rows, columns), dtype

    def rounded_type(self, q: Any) -> Any:
        return np.dtype(jnp.bfloat16) if self.codes.endswith(Q_CODES) else q.dtype

    def columns_v(self, v: Any) -> int:
        return v.shape[3] if self.dim_v is None else self.dim_v

    def spec(self, q: Any, v: Any, grads: tuple[bool, ...] = ()) -> str:
        """As text. grads: which captures have a gradient or a tangent."""
        dim_v = self.columns_v(v)
        dims = f"d{q.shape[3]}" if q.shape[3] == dim_v else f"d{q.shape[3]}x{dim_v}"
        text = f"{ELEMENTS[str(self.rounded_type(q))]}:{dims}"
        for kind, program in self.program.texts().items():
            own = self._declarations(kind, grads)
            text += f":{kind}{{{'; '.join([*own, self._placed(program)])}}}"
        words = _SPEC_WORDS if self.pages is None else {**_SPEC_WORDS, "kv_lengths": cache_option(self.pages)}
        text += "".join(words.get(name, "") for name in self.fixed)
        options = (
            ":det" * self.deterministic
            + ":fp32_out" * self.accurate
            + ":two_terms" * (self.accurate and self.two_terms)
        )
        options += ":weight_mod" * self.weight_mod
        return text + self.codes + options

    def _declarations(self, kind: str, grads: tuple[bool, ...]) -> list[str]:
        """What a program declares. A mask has no gradients."""
        return [
            f"c{i}: {c.type} {c.rank + len(c.folds)}d"
            + " grad" * (kind != "mask" and any(grads) and grads[i])
            for i, c in enumerate(self.program.captures)
            if kind in c.programs
        ]

    def results(self) -> list[str]:
        """What attention gives, and what has tangents."""
        return ["out"] + ["out_block_scale"] * (":" in self.out_format) + ["lse"] * (not self.weight_mod)

    def outputs(self) -> list[str]:
        """What the forward pass makes."""
        return self.results() + ["before_mod"] * self.keeps_before_mod

    def saved(self) -> list[str]:
        """What the backward pass reads of it."""
        return ["before_mod" if self.keeps_before_mod else "out", *self.results()[1:]]

    def _placed(self, text: str) -> str:
        """The text with its marks resolved."""
        for number, capture in enumerate(self.program.captures):
            begin = "".join(f"{self._place(fold)}, " for fold in capture.folds)
            text = text.replace(f"@c{number}@", begin)
        inner = "b" if not self.folds else "0" if self.batch == 1 else f"(b % {self.batch})"
        return _MARK.sub(lambda mark: inner if mark[1] == "b" else mark[1], text)

    def _place(self, fold: int) -> str:
        """The index along the axis of a vmap."""
        inside = self.batch * math.prod(self.folds[:fold])
        text = "b" if inside == 1 else f"b / {inside}"
        return text if fold == len(self.folds) - 1 else f"{text} % {self.folds[fold]}"

    def reads_batch(self) -> bool:
        """Whether a program says more of b than which entries it reads of captures that are as long as the batch."""
        text = "".join(self.program.texts().values())
        folded = any(capture.folds for capture in self.program.captures)
        return "@b@" in text or folded or bool(self.folds) and "@b:" in text

    def reads_heads(self) -> bool:
        return any("@h@" in text or "@h_kv@" in text for text in self.program.texts().values())


def cache_option(pages: int) -> str:
    return f":pages{pages}" if pages else ":cache"


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Which gradients a backward pass makes besides dQ, dK and dV. dlse: whether it is given a gradient of the LSE."""

    dlse: bool = False
    sinks: bool = False
    captures: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class GradientTangents:
    """Which gradients have tangents made, and which arrays have some: of q, k, v, dout, dlse, sinks, and of all captures that have
    gradients."""

    gradients: Gradients
    tangents: tuple[str, ...]


#: Beside a call: which gradients a backward pass makes, which arrays have tangents, or both; None: the forward pass.
Derivative = Gradients | GradientTangents | tuple[str, ...] | None


def kind_of(derivative: Derivative) -> str:
    """The function that computes it."""
    if derivative is None:
        return "forward"
    names = {Gradients: "backward", GradientTangents: "backward_tangent", tuple: "tangent"}
    return names[type(derivative)]


def gradients_of(derivative: Derivative) -> Gradients | None:
    """The gradients that are made, or that have tangents made."""
    if isinstance(derivative, GradientTangents):
        return derivative.gradients
    return derivative if isinstance(derivative, Gradients) else None


def tangents_of(derivative: Derivative) -> tuple[str, ...]:
    """The arrays that have tangents."""
    if isinstance(derivative, GradientTangents):
        return derivative.tangents
    return derivative if isinstance(derivative, tuple) else ()


def operand_names(problem: Problem, derivative: Derivative) -> list[str]:
    names = ["q", "k", "v"]
    if derivative is not None:
        names += problem.saved()
    gradients = gradients_of(derivative)
    if gradients is not None:
        names += ["dout"] + ["dlse"] * gradients.dlse
    names += [*problem.fixed, *[f"c{i}" for i in range(len(problem.program.captures))]]
    return names + [f"{name}{TANGENT}" for name in tangents_of(derivative)]


def result_names(problem: Problem, derivative: Derivative) -> list[str]:
    """Tangents of gradients have the names of the gradients."""
    gradients = gradients_of(derivative)
    if gradients is None:
        return problem.outputs() if derivative is None else [f"{name}{TANGENT}" for name in problem.results()]
    names = ["dq", "dk", "dv"] + ["dsinks"] * gradients.sinks
    return names + [f"dc{i}" for i, wanted in enumerate(gradients.captures) if wanted]


def differentiated(problem: Problem, derivative: Derivative) -> tuple[bool, ...]:
    """For each capture, whether its gradient is made or its tangent is read."""
    gradients = gradients_of(derivative)
    if gradients is not None:
        return gradients.captures
    return tuple(f"c{i}" in tangents_of(derivative) for i in range(len(problem.program.captures)))

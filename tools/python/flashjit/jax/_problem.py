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
FIXED = tuple("kv_lengths page_table cu_seqlens_q cu_seqlens_kv sinks rng q_scale k_scale v_scale".split())
#: Of arrays that have scales.
CODES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}
Q_CODES = ":q_codes"
TANGENT = "_tangent"
_SPEC_WORDS = {"kv_lengths": ":kvlen", "cu_seqlens_q": ":varlen", "sinks": ":sinks", "rng": ":dropout"}
_MARK = re.compile(r"@([bh])(?::c\d+:\d+)?@")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a call is, besides its arrays.

    fixed: which of FIXED are given. batch: of the call as written. folds: the sizes of axes that vmap put in front of the batch,
    the first one first: entry b of the batch is entry b % batch of the call as written. pages: the rows of a page where K and V
    are a cache, 0 where that has slots; None: they are no cache. codes: what the spec says of K and V, and Q, of 8 bits. longest: of
    packed sequences, whose number is `batch`, the most queries and keys of one.
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
    longest: tuple[int, int] | None = None

    def out_type(self, q: Any) -> Any:
        return np.dtype(jnp.bfloat16) if self.codes.endswith(Q_CODES) else q.dtype

    def spec(self, q: Any, v: Any, grads: tuple[bool, ...] = ()) -> str:
        """As text. grads: which captures have a gradient or a tangent."""
        dims = f"d{q.shape[3]}" if q.shape[3] == v.shape[3] else f"d{q.shape[3]}x{v.shape[3]}"
        captures = self.program.captures
        lines = [f"c{i}: {c.type} {c.rank + len(c.folds)}d" for i, c in enumerate(captures)]
        text = f"{ELEMENTS[str(self.out_type(q))]}:{dims}"
        if self.program.score:
            own = [
                line + (" grad" if any(grads) and grads[i] else "")
                for i, line in enumerate(lines)
                if captures[i].in_score
            ]
            text += f":score{{{'; '.join([*own, self._placed(self.program.score)])}}}"
        if self.program.mask:
            own = [line for line, capture in zip(lines, captures) if capture.in_mask]
            text += f":mask{{{'; '.join([*own, self._placed(self.program.mask)])}}}"
        words = _SPEC_WORDS if self.pages is None else {**_SPEC_WORDS, "kv_lengths": cache_option(self.pages)}
        text += "".join(words.get(name, "") for name in self.fixed)
        return text + self.codes + ":det" * self.deterministic

    def _placed(self, text: str) -> str:
        """The text with its marks resolved."""
        for number, capture in enumerate(self.program.captures):
            begin = "".join(f"{self._place(fold)}, " for fold in capture.folds)
            text = text.replace(f"@c{number}@", begin)
        inner = "b" if not self.folds else "0" if self.batch == 1 else f"(b % {self.batch})"
        return _MARK.sub(lambda mark: inner if mark[1] == "b" else "h", text)

    def _place(self, fold: int) -> str:
        """The index along the axis of a vmap."""
        inside = self.batch * math.prod(self.folds[:fold])
        text = "b" if inside == 1 else f"b / {inside}"
        return text if fold == len(self.folds) - 1 else f"{text} % {self.folds[fold]}"

    def reads_batch(self) -> bool:
        """Whether a program says more of b than which entries it reads of captures that are as long as the batch."""
        text = self.program.score + self.program.mask
        folded = any(capture.folds for capture in self.program.captures)
        return "@b@" in text or folded or bool(self.folds) and "@b:" in text

    def reads_heads(self) -> bool:
        return "@h@" in self.program.score + self.program.mask


def cache_option(pages: int) -> str:
    return f":pages{pages}" if pages else ":cache"


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Which gradients a backward pass makes besides those of Q, K and V. dlse: whether it is given one of the LSE."""

    dlse: bool = False
    sinks: bool = False
    captures: tuple[bool, ...] = ()


#: Beside a call: which gradients a backward pass makes, which arrays have tangents; None: the forward pass.
Derivative = Gradients | tuple[str, ...] | None


def operand_names(problem: Problem, derivative: Derivative) -> list[str]:
    names = ["q", "k", "v"]
    if derivative is not None:
        names += ["out", "lse"]
    if isinstance(derivative, Gradients):
        names += ["dout"] + ["dlse"] * derivative.dlse
    names += [*problem.fixed, *[f"c{i}" for i in range(len(problem.program.captures))]]
    return names + [f"{name}{TANGENT}" for name in derivative] if isinstance(derivative, tuple) else names


def result_names(problem: Problem, derivative: Derivative) -> list[str]:
    if not isinstance(derivative, Gradients):
        return ["out", "lse"] if derivative is None else [f"out{TANGENT}", f"lse{TANGENT}"]
    names = ["dq", "dk", "dv"] + ["dsinks"] * derivative.sinks
    return names + [f"dc{i}" for i, wanted in enumerate(derivative.captures) if wanted]


def differentiated(problem: Problem, derivative: Derivative) -> tuple[bool, ...]:
    """Of each capture, whether its gradient is made or its tangent is read."""
    if isinstance(derivative, Gradients):
        return derivative.captures
    return tuple(f"c{i}" in (derivative or ()) for i in range(len(problem.program.captures)))

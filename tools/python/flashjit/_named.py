"""Masks and scores that attention() has by name: causal, and as programs a sliding window and a soft cap."""

from __future__ import annotations

import math
import operator
from typing import Any

from ._checks import check_mapping, check_number
from .errors import InvalidArgument, WrongType

#: The masks of a spec, by the argument `causal`.
CAUSAL = {False: "", True: "causal", "bottom_right": "causal", "top_left": "causal_top_left"}
SOFTCAP = "softcap * tanh(score / softcap)"
#: The key that query q is at, aligned at the last of each, as `causal` is.
AT_LAST = "q + seqlen_kv - seqlen_q"


def window_text(at: str, left: str | None, right: str | None) -> list[str]:
    """The conditions of a window around key `at`; its sides are numbers or names of captures, None without a limit."""
    return [f"kv >= {at} - {left}"] * (left is not None) + [f"kv <= {at} + {right}"] * (right is not None)


def with_named(
    causal: Any, score_mod: Any, mask_mod: Any, captures: Any, window: Any, softcap: Any
) -> tuple[Any, Any, Any]:
    """score_mod, mask_mod and captures of attention(), with a window and a soft cap among them."""
    if captures is not None:
        check_mapping("captures", captures)
    named: dict[str, Any] = {}
    if softcap is not None:
        check_number("softcap", softcap)
        if not 0 <= softcap < math.inf:
            raise InvalidArgument(f"softcap is {softcap}: give a positive number, or None for no cap.")
        if softcap > 0:
            _refuse_second("softcap", "score_mod", score_mod)
            score_mod, named["softcap"] = SOFTCAP, float(softcap)
    left, right = sides_of(window)
    if causal:
        right = None  # which `causal` says
    if left is not None or right is not None:
        _refuse_second("window", "mask_mod", mask_mod)
        if left is not None:
            named["window_left"] = left
        if right is not None:
            named["window_right"] = right
        at = "q" if causal == "top_left" else AT_LAST
        sides = ("window_left" if left is not None else None, "window_right" if right is not None else None)
        mask_mod = " && ".join(window_text(at, *sides))
    if not named:
        return score_mod, mask_mod, captures
    for name in named:
        if captures is not None and name in captures:
            raise InvalidArgument(
                f"captures has {name!r}, which is what {name.partition('_')[0]} is called in programs: rename it."
            )
    return score_mod, mask_mod, {**(captures or {}), **named}


def sides_of(window: Any) -> tuple[Any, Any]:
    """Left and right; None: no limit."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise WrongType(
            f"window is {window!r}: give (left, right), how many keys before and after its own a query sees, "
            "such as (1023, 0); None or -1 for no limit."
        )
    sides = []
    for given in window:
        try:
            side = -1 if given is None else operator.index(given)
        except TypeError:  # also of an array with several elements
            side = None
        if side is None or isinstance(given, bool) or not -1 <= side < 2**31:
            raise InvalidArgument(
                f"window is {tuple(window)}: its sides are ints from 0 to 2^31 - 1, None or -1."
            )
        sides.append(None if side == -1 else side)
    return sides[0], sides[1]


def weights_of(
    weight_mod: Any, score_mod: Any, softcap: Any, return_lse: bool, lse: Any, row_max: bool
) -> Any:
    """The program of the weights, if any, which takes the place of a score's and of the softmax; else the score's."""
    if weight_mod is None:
        return score_mod
    for name, given, why in (
        ("score_mod", score_mod is not None, "write its formula in weight_mod, too"),
        ("softcap", softcap is not None, "write its formula in weight_mod, too"),
        (
            "return_lse or lse",
            return_lse or lse is not None,
            "without a softmax there is no LSE, so leave it out",
        ),
        ("return_row_max", row_max, "without a softmax no row has a largest score, so leave it out"),
    ):
        if given:
            raise InvalidArgument(f"weight_mod and {name} are both given: {why}.")
    return weight_mod


def _refuse_second(name: str, role: str, program: Any) -> None:
    if program is not None:
        raise InvalidArgument(f"{name} and {role} are both given: write {name}'s formula in {role}, too.")

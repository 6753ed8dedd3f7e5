"""Whether tile lists belong to a call, and if not, what is different, in the words of attention()'s arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ._call_types import BuiltLists
from ._library import spec_options
from ._tensors import SPEC_TYPES
from .errors import InvalidArgument
from .programs import NAMED_MASKS

_OPTION = re.compile(r":(\w+)(\{[^}]*\})?")
_DIMS = re.compile(r"d\d+(x\d+)?")
_BLOCKS = re.compile(r"map(\d+)x(\d+)")
_NAMED = re.compile(r"\b(softcap|window)(_left|_right)?: ")  # as _named.py declares what it writes
_TRACED = re.compile(r"\b([cs]\d+)\b")
_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv")
_ARGUMENTS = {
    "score": "score_mod",
    "mask": "mask_mod",
    "causal": "causal=True",
    "causal_top_left": 'causal="top_left"',
}


def check_built(lists: BuiltLists, plan: Any) -> None:
    """The library compares the tile configurations too, and block maps. No program's text is shown: the lists' names of tensors
    mean others in the call."""
    if lists.spec is plan.spec and lists.shape == plan.shape and lists.device == plan.device:
        return
    found = [*_of_programs(lists.spec_text, plan.spec_text), *_of_tensors(lists, plan)]
    found = found or ["with programs that have other captured tensors in common"]
    raise InvalidArgument(
        f"lists were built for another call: {'; '.join(found)}. Give this call's arguments to flashjit.torch.TileLists() too."
    )


def _of_programs(built: str, called: str) -> Iterator[str]:
    """The masks, programs and options that two specs' texts do not share."""
    theirs, ours = (_options(text) for text in (built, called))
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        if name not in ours:
            yield f"with {name}, which this call lacks"
        elif name not in theirs:
            yield f"without {name}, which this call has"
        elif theirs[name] != ours[name]:
            yield f"with another {name}"


def _options(text: str) -> dict[str, str]:
    """A spec's options after its head dimensions, by the arguments of attention() that give them."""
    found = {}
    for option, program in _OPTION.findall(":" + text.partition(":")[2]):
        for name, spelled in NAMED_MASKS.items():
            before, beside, mask = program.partition(f"({spelled}) && (")
            if option == "mask" and beside:  # `causal` beside a mask is a part of it
                program = before + mask.removesuffix(")}") + "}"
                found[_ARGUMENTS[name]] = ""
        if not _DIMS.fullmatch(option):
            found[_argument(option, program)] = _with_own_names(program)
    return found


def _with_own_names(program: str) -> str:
    """A trace numbers the captured tensors of all programs together: here each program's alone."""
    order = list(dict.fromkeys(_TRACED.findall(program)))
    return _TRACED.sub(lambda found: f"{found[1][0]}{order.index(found[1])}", program)


def _argument(option: str, program: str) -> str:
    named, blocks = _NAMED.search(program), _BLOCKS.fullmatch(option)
    if named:
        return named[1]
    if blocks:
        return f"a block_mask of blocks ({blocks[1]}, {blocks[2]})"
    return _ARGUMENTS.get(option) or dict(spec_options()).get(option) or option


def _of_tensors(lists: BuiltLists, plan: Any) -> Iterator[str]:
    """Where types, head dimensions, sizes and devices differ."""
    (type_a, dims_a), (type_b, dims_b) = (text.split(":")[:2] for text in (lists.spec_text, plan.spec_text))
    types = {name: str(dtype).removeprefix("torch.") for dtype, name in SPEC_TYPES.items()}
    pairs = [
        ("", types.get(type_a, type_a), types.get(type_b, type_b)),
        ("head_dim ", dims_a[1:], dims_b[1:]),
        *((f"{name} ", a, b) for name, a, b in zip(_SIZES, lists.shape, plan.shape)),
        ("tensors on ", lists.device, plan.device),
    ]
    return (f"for {what}{a}, and this call has {what}{b}" for what, a, b in pairs if a != b)

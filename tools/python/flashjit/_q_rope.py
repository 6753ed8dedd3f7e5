"""Q in two tensors, as latent attention has it: the columns that meet V's, and the rotated ones behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._launch import is_watched
from ._tensors import KV_TYPES, PLAIN, describe, readable
from .errors import InvalidArgument, WrongType


def read_q_rope(
    q: Tensor, q_rope: Tensor | None, k: Tensor, v_columns: int | None, q_mod: Any
) -> tuple[Tensor, Tensor | None]:
    """Q's two tensors as kernels read them; or one that has all columns, where a derivative or a program may be asked for. Without
    q_rope Q is one."""
    if q_rope is None:
        return q, None
    _check(q, q_rope, k, v_columns)
    if q_mod is not None or q.dtype in KV_TYPES or not _computes_at_once(q, q_rope, k):
        return torch.cat((q, q_rope), -1), None
    return q, readable(q_rope, "q_rope")


def _check(q: Tensor, q_rope: Tensor, k: Any, v_columns: int | None) -> None:
    for name, tensor in (("q", q), ("q_rope", q_rope)):
        if not isinstance(tensor, Tensor):
            raise WrongType(f"{name} is a {type(tensor).__name__}: give a torch.Tensor.")
    if v_columns is None:
        raise InvalidArgument(
            "q_rope is given without v_columns: it has Q's columns after V's, which are K's first ones; give v_columns in "
            "place of v, or Q as one tensor."
        )
    if q.dim() != 4 or q_rope.dim() != 4 or q.shape[:3] != q_rope.shape[:3] or q.shape[3] != v_columns:
        raise InvalidArgument(
            f"q is {list(q.shape)} and q_rope {list(q_rope.shape)}: they must be [batch, heads_q, seqlen_q, columns], with the "
            f"{v_columns} columns of v_columns in q and the others in q_rope."
        )
    columns = q.shape[3] + q_rope.shape[3]
    if isinstance(k, Tensor) and k.dtype != torch.uint8 and k.shape[-1] != columns:  # uint8: rows in a format
        raise InvalidArgument(
            f"q and q_rope have {columns} columns together, and k is {list(k.shape)}: k must have as many."
        )
    if q.dtype != q_rope.dtype or q.device != q_rope.device:
        raise InvalidArgument(
            f"q is {describe(q)} and q_rope {describe(q_rope)}: they must have one type, on one device."
        )


def _computes_at_once(q: Tensor, q_rope: Tensor, k: Tensor) -> bool:
    """Whether the tensors go to the library as they are, without autograd, torch.compile and others that watch."""
    if torch.compiler.is_compiling() or not all([type(x) in PLAIN for x in (q, q_rope, k)]):
        return False
    if torch.is_grad_enabled() and (q.requires_grad or q_rope.requires_grad or k.requires_grad):
        return False
    changed = torch._C._is_any_autocast_enabled() or q.is_neg() or q_rope.is_neg() or k.is_neg()
    return not (changed or forward_ad._current_level >= 0 or is_watched())

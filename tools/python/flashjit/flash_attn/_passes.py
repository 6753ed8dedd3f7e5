"""The passes one by one, as libraries with an autograd of their own call them: ring attention, context
parallelism.

Nothing here is recorded by autograd, whether tensors require gradients or not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._operators import draw, operator_arguments
from .._problem import read_problem
from ..errors import InvalidArgument
from ._attend import Options, attend, with_batch
from ._kvcache import Place, attend_cache


class Packing(NamedTuple):
    """Offsets and longest sequences of packed rows."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dropout_p: float, packing: Packing | None
) -> Any:
    """O and LSE in flash-attn's layouts, and the state of the dropout mask's generator, or None."""
    with torch.no_grad():
        q, k, v = _inner_layout(packing, *(x.detach() for x in (q, k, v)))
        rng = draw(q) if dropout_p else None
        if rng is None:
            names = "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"
            named: dict[str, Any] = {} if packing is None else dict(zip(names, packing))
            out, lse = attend(q, k, v, options, True, **named)
        else:
            arguments = _arguments(q, options, dropout_p, False, rng, packing)
            out, lse = torch.ops.flashjit.attention_forward(q, k, v, *arguments)
        if packing is not None:
            lse = lse.squeeze(0)
        return _outer_layout(packing, out), lse, rng


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Any, Any, Any],
    options: Options,
    dropout_p: float,
    deterministic: bool,
    rng: Tensor | None,
    packing: Packing | None,
) -> None:
    """Writes dQ, dK and dV into `gradients`, but for those that are None. O and LSE may be of more keys than
    these, as in a ring."""
    if dropout_p and rng is None:
        raise InvalidArgument(
            "dropout_p is given without rng_state: give the one that the forward pass returned."
        )
    with torch.no_grad():
        dout, q, k, v, out = _inner_layout(packing, *(x.detach() for x in (dout, q, k, v, out)))
        lse = lse.detach()
        if packing is not None:
            lse = lse.unsqueeze(0)
        arguments = _arguments(q, options, dropout_p, deterministic, rng, packing)
        found = torch.ops.flashjit.attention_backward(dout, None, q, k, v, out, lse, *arguments)
        for given, gradient in zip(gradients, found):
            if given is not None:
                given.copy_(_outer_layout(packing, gradient))


def _inner_layout(packing: Packing | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) if packing is None else with_batch(x) for x in tensors)


def _outer_layout(packing: Packing | None, x: Tensor) -> Tensor:
    return x.transpose(1, 2) if packing is None else x.squeeze(0).transpose(0, 1)


def _arguments(
    q: Tensor,
    options: Options,
    dropout_p: float,
    deterministic: bool,
    rng: Tensor | None,
    packing: Packing | None,
) -> tuple[Any, ...]:
    """The operators' arguments after their first tensors."""
    programs = {
        "causal": False,
        "score_mod": None,
        "mask_mod": None,
        "captures": None,
        **options.programs(q.shape[0] if packing is None else packing.cu_seqlens_q.shape[0] - 1, q.shape[1]),
    }
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing or (None,) * 4
    fixed, values, problem = read_problem(
        programs["causal"],
        options.scale,
        dropout_p,
        programs["score_mod"],
        programs["mask_mod"],
        programs["captures"],
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        options.sinks,
        None,
        deterministic or None,
        False,
    )
    return operator_arguments(fixed, values, problem, rng)


# --- By flash-attn 2's names --------------------------------------------------------------------------------


def _options(
    softmax_scale: Any, causal: bool, left: int, right: int, softcap: Any, alibi_slopes: Tensor | None
) -> Options:
    slopes = None if alibi_slopes is None else alibi_slopes.detach()
    return Options(softmax_scale, causal, (left, right), softcap, slopes)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, Any]:
    """O, LSE [b, hq, sq], None for the dropout mask, and the state that the backward pass draws it from, None
    without dropout."""
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    out, lse, rng = forward(q, k, v, options, dropout_p, None)
    return out, lse, None, rng


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, None, Any]:
    """_flash_attn_forward() of packed rows. LSE is [hq, all rows]."""
    options = _options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    )._replace(leftpad=leftpad_k)
    if block_table is not None:
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        place = Place(block_table, name_of_lengths="cu_seqlens_k" if seqused_k is None else "seqused_k")
        found = attend_cache(q, k, v, None, lengths, place, options, True, cu_seqlens_q, max_seqlen_q)
        return *found, None, None
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse, rng = forward(q, k, v, options._replace(used_k=seqused_k), dropout_p, packing)
    return out, lse, None, rng


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk and dv. Returns None: the sums of dO O are not kept."""
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, dropout_p, deterministic, rng_state, None
    )


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """_flash_attn_backward() of packed rows."""
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, dropout_p, deterministic, rng_state, packing
    )

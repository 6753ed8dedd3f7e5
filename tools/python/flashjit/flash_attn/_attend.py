"""attention() with flash-attn's options, on which all of its functions are built."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._attention import attention
from .._launch import is_watched
from .._named import SOFTCAP, window_text
from .._sdpa import supported
from .._tensors import KV_TYPES, describe
from ..errors import InvalidArgument, Unsupported
from ..programs import repeated

Window = Sequence[int]
EVERYTHING = (-1, -1)


class Options(NamedTuple):
    """How scores are made and masked."""

    scale: float | None = None
    causal: bool = False
    window: Window | None = EVERYTHING
    softcap: float | None = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    leftpad: Tensor | None = None
    used_q: Tensor | None = None  # rows that each sequence has of those in its place
    used_k: Tensor | None = None
    chunk: int = 0  # a query attends to the keys of its own chunk of so many

    def has_window(self) -> bool:
        return self.chunk > 0 or any(side is not None and side >= 0 for side in self.window or ())

    def programs(self, batch: int, heads: int) -> dict[str, Any]:
        """causal, score_mod, mask_mod and captures of attention()."""
        left, right = self.window or EVERYTHING
        if self.causal:
            right = 0
        has_left, has_right = left is not None and left >= 0, right is not None and right >= 0
        padded = self.leftpad is not None or self.used_q is not None or self.used_k is not None
        masked = has_left or padded or self.chunk > 0
        named = right == 0 and not masked  # flashjit's own causal mask
        if (named or not (masked or has_right)) and not self.softcap and self.slopes is None:
            return {"causal": named}
        captures: dict[str, Any] = {}
        if has_right and not named:
            captures["right"] = int(right)
        if has_left:
            captures["left"] = int(left)
        if self.chunk > 0:
            captures["chunk"] = int(self.chunk)
        if self.softcap:
            captures["softcap"] = float(self.softcap)
        if self.slopes is not None:
            captures["slopes"] = _checked_slopes(self.slopes, batch, heads)
        if padded:
            captures.update(
                _checked_rows(batch, cache_leftpad=self.leftpad, seqused_q=self.used_q, seqused_k=self.used_k)
            )
        score, mask = _programs(tuple(captures), 0 if self.slopes is None else self.slopes.dim())
        if torch.compiler.is_compiling():
            return {"causal": named, "score_mod": score, "mask_mod": mask, "captures": captures}
        return {"causal": named, "mask_mod": repeated(score, mask, captures)}


@functools.cache
def _programs(given: tuple[str, ...], dims_of_slopes: int) -> tuple[str | None, str | None]:
    """Texts of the score and of the mask. given: the captures."""
    queries = "seqused_q[b]" if "seqused_q" in given else "seqlen_q"
    keys = "seqused_k[b]" if "seqused_k" in given else "seqlen_kv"
    at = f"q + {keys} - {queries}"  # the key that query q is at
    score = SOFTCAP if "softcap" in given else "score"
    if dims_of_slopes:
        score += f" - slopes[{'h' if dims_of_slopes == 1 else 'b, h'}] * to_float(abs({at} - kv))"
    conditions = {
        "right": window_text(at, None, "right")[0],
        "left": window_text(at, "left", None)[0],
        "chunk": f"{at} >= 0 && kv / chunk == ({at}) / chunk",
        "cache_leftpad": "kv >= cache_leftpad[b]",
        "seqused_q": "q < seqused_q[b]",
        "seqused_k": "kv < seqused_k[b]",
    }
    mask = " && ".join(conditions[name] for name in given if name in conditions)
    return None if score == "score" else score, mask or None


def _checked_slopes(slopes: Tensor, batch: int, heads: int) -> Tensor:
    sizes = (heads,), (batch, heads)
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point() or tuple(slopes.shape) not in sizes:
        raise InvalidArgument(
            f"alibi_slopes is {describe(slopes)}: it must be float32 [{heads}] or "
            f"[{batch}, {heads}], one slope for each head of q. With heads on several "
            "ranks, give the slopes of this rank's heads."
        )
    return slopes.float()


def _checked_rows(batch: int, **given: Tensor | None) -> dict[str, Tensor]:
    for name, value in given.items():
        if value is not None and (
            not isinstance(value, Tensor) or value.dtype != torch.int32 or tuple(value.shape) != (batch,)
        ):
            raise InvalidArgument(
                f"{name} is {describe(value)}: it must be int32 [{batch}], one number for each sequence."
            )
    return {name: value for name, value in given.items() if value is not None}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    wants_lse: bool,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    out: Tensor | None = None,
    recorder: Any = None,
    **more: Any,
) -> tuple[Tensor, Any]:
    """O and LSE, or None, of tensors [b, h, s, d], or of packed ones. out: where O goes, as check_out() wants it, in the same
    layout. recorder: of a call that is new to the front. more: attention()'s other arguments."""
    if recorder is not None:
        more["_recorder"] = recorder
    offsets = more.get("cu_seqlens_q")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InvalidArgument(
                f"{name} has {x.dim()} dimensions: give [batch, length, heads, head_dim], or packed rows to a varlen function."
            )
    programs = options.programs(q.shape[0] if offsets is None else offsets.shape[0] - 1, q.shape[1])
    dim_v, scale = v.shape[3], options.scale
    if q.shape[3] % 8 or dim_v % 8 or scale is not None:
        q, k, v, scale = supported(q, k, v, scale)
    place = out if out is not None and _is_written_directly(out, dim_v, q, k, v) else None
    found = attention(
        q,
        k,
        v,
        out=place,
        scale=scale,
        dropout_p=dropout_p,
        deterministic=deterministic or None,
        return_lse=wants_lse,
        sinks=options.sinks,
        **programs,
        **more,
    )
    o, lse = found if wants_lse else (found, None)
    o = o if o.shape[3] == dim_v else o[..., :dim_v]
    return o if out is None or place is not None else written(out, o), lse


def _is_written_directly(out: Tensor, dim_v: int, *given: Tensor) -> bool:
    """Whether a kernel can write there: else a copy is made. given: q, k and v."""
    if dim_v % 8 or torch.compiler.is_compiling() or is_watched() or out.data_ptr() % 16:
        return False
    size, memory = out.element_size(), out.untyped_storage()._cdata
    return (
        out.stride(3) == 1
        and not any(stride * size % 16 for stride in out.stride()[:3])
        and all(x.untyped_storage()._cdata != memory for x in given)
    )


# --- Arguments ----------------------------------------------------------------------------------------------


def missing(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise Unsupported(f"{name} is given: flashjit.flash_attn does not have it; leave it out.")


def either(a: Any, b: Any, names: str) -> Any:
    """The argument that is given by one of its two names."""
    if a is not None and b is not None:
        raise InvalidArgument(f"{names} are one argument by two names: give one.")
    return b if a is None else a


def scales(
    q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> dict[str, Any]:
    """attention()'s scales. As in FlashAttention-3, descales count only with FP8 tensors, where None is 1."""
    given: dict[str, Any] = {}
    if q.dtype in KV_TYPES:
        given["q_scale"] = q_descale
    if k.dtype in KV_TYPES:
        given.update(k_scale=k_descale, v_scale=v_descale)
    one = q.new_ones((), dtype=torch.float32) if None in given.values() else None
    return {name: one if scale is None else scale for name, scale in given.items()}


def check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    """That O of q and v, whose last dimensions are theirs, fits the caller's memory."""
    if out is None:
        return
    size = [*q.shape[:-1], v.shape[-1]]
    dtype = torch.bfloat16 if q.dtype in KV_TYPES else q.dtype
    if list(out.shape) != size or out.dtype != dtype or out.device != q.device:
        name = str(dtype).removeprefix("torch.")
        raise InvalidArgument(f"out is {describe(out)}: it must be {name} {size} on {q.device}.")


def written(out: Tensor, result: Tensor) -> Tensor:
    """The result, in `out`."""
    if result.requires_grad:
        raise Unsupported(
            "out is given with tensors that require gradients: leave it out, or call under torch.no_grad()."
        )
    if out.shape != result.shape or out.dtype != result.dtype:
        raise InvalidArgument(f"out is {describe(out)}: it must be {describe(result)}.")
    return out.copy_(result)


# --- Packed rows --------------------------------------------------------------------------------------------


def with_batch(x: Tensor) -> Tensor:
    """[1, heads, rows, dim] of [rows, heads, dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def places(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The sequence of each row, and its place there. Rows past the last sequence count as that one's."""
    row = torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True, out_int32=True).clamp(
        max=cu_seqlens.shape[0] - 2
    )
    return sequence, row - cu_seqlens[sequence]

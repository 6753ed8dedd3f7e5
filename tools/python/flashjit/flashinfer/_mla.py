"""FlashInfer's wrapper for latent attention, MLA: K is a latent and its rotated part, and V the latent."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._attention import attention
from .._tensors import SPEC_TYPES, describe, say_once
from .._transforms import refuse_lost_gradients
from ..errors import InvalidArgument, Unsupported
from ..flash_attn._attend import with_batch
from ._batch import _Paged
from ._rows import check_ints, check_lse, check_tensor, sizes
from ._said import check_pages, check_room, check_values
from ._scores import LOG2E, constant, read_scores, refuse

_SCALED = 128  # columns that share a scale of ckv_scale_arr
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}  # of latents of 8 bits


class BatchMLAPagedAttentionWrapper(_Paged):
    """Packed queries (nope, rope) over pages of latents."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, None)
        self._indices_buffer = kv_indices

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Any,
        kv_data_type: Any,
        use_profiler: bool = False,
    ) -> None:
        """Keeps the arguments, which are FlashInfer's."""
        refuse(use_profiler=use_profiler)
        whole = sizes(num_heads, 1, head_dim_ckv, head_dim_kpe or None, page_size)
        self._sizes = whole._replace(head_dim_v=head_dim_kpe)  # 0: a model without a rotated part
        self._keep_types(q_data_type, kv_data_type, None)
        if self._q_dtype not in SPEC_TYPES or self._kv_dtype not in (*SPEC_TYPES, *_FORMATS):
            raise Unsupported(
                f"q_data_type is {self._q_dtype} and kv_data_type {self._kv_dtype}: give q_data_type of 16 or 32 bits, and "
                "kv_data_type alike or float8_e4m3fn or float8_e5m2."
            )
        self._scores = read_scores("NONE", None, causal, -1, sm_scale)
        lengths = check_ints("kv_len_arr", kv_len_arr)
        check_room("kv_len_arr", lengths, kv_indptr, page_size)
        self._keep_pages(kv_indptr, kv_indices, lengths, self._indices_buffer)
        self._keep_queries(qo_indptr)

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        """O [all rows, h, 512] of q_nope [all rows, h, 512] and q_pe [all rows, h, 64] over ckv_cache [pages, rows of a
        page, 512] and kpe_cache [pages, rows of a page, 64]; with return_lse also LSE [all rows, h], of base 2 or e.

        The two caches are best views of one tensor [pages, rows of a page, 576]; else they are copied in each call.
        ckv_scale, kpe_scale: numbers, of caches of 8 bits alone; where they differ, q_pe is multiplied in a launch of its own.
        ckv_scale_arr, in place of ckv_scale: float32 [pages, rows of a page, 4], of 128 columns each. Where there is a rotated part
        each call makes a tensor of its scale and these. kv_len and page_table say what plan() was given, and are compared on the CPU
        alone."""
        refuse(o_scale=o_scale)
        self._check_types(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        check_tensor("q_pe", q_pe, "all rows, h, 64")
        check_tensor("ckv_cache", ckv_cache, "pages, rows of a page, 512")
        check_tensor("kpe_cache", kpe_cache, "pages, rows of a page, 64")
        rows = self._planned(q_nope, ckv_cache[:, None], kpe_cache[:, None])
        if q_pe.shape != (*q_nope.shape[:2], kpe_cache.shape[2]):
            raise InvalidArgument(
                f"q_pe is {describe(q_pe)}: it must be [{q_nope.shape[0]}, {q_nope.shape[1]}, {kpe_cache.shape[2]}], with the "
                "rows and heads of q_nope and the columns of kpe_cache."
            )
        table, lengths = self._pages
        check_values("kv_len", kv_len, "kv_len_arr of plan()", lengths)
        pages = -(-lengths // ckv_cache.shape[1]) if lengths.is_cpu else None
        check_pages("page_table", page_table, table, pages, "kv_indptr and kv_indices of plan()")
        check_lse(lse, q_nope.shape[:2], "all rows, h")
        refuse_lost_gradients("flashjit.flashinfer", q_nope, q_pe, ckv_cache, kpe_cache)
        with torch.no_grad():
            latents, of_codes, ratio = _read_latents(
                joined_columns(ckv_cache, kpe_cache)[:, None], ckv_cache, ckv_scale, ckv_scale_arr, kpe_scale
            )
            q_pe = q_pe if ratio == 1 else q_pe * ratio
            found = attention(
                with_batch(q_nope),
                latents,
                v_columns=ckv_cache.shape[-1],
                **of_codes,
                q_rope=with_batch(q_pe) if q_pe.shape[-1] else None,
                causal=self._scores.causal,
                scale=self._scores.sm_scale,
                return_lse=return_lse or lse is not None,
                out=None if out is None else with_batch(out),
                **rows.named(),
                **self._pages.named(),
            )
            o4, natural = found if isinstance(found, tuple) else (found, None)
            o = o4[0].transpose(0, 1) if out is None else out
            if natural is None:
                return o
            packed = natural[0].transpose(0, 1)
            if not return_lse_base_on_e:
                packed = packed * LOG2E
            packed = packed.contiguous() if lse is None else lse.copy_(packed)
            return (o, packed) if return_lse else o

    def _check_types(self, **given: Any) -> None:
        for name, x in given.items() if self._rows is not None else ():
            planned = self._q_dtype if name[0] == "q" else self._kv_dtype
            if isinstance(x, Tensor) and x.dtype != planned:
                raise InvalidArgument(
                    f"{name}.dtype is {x.dtype}, but plan() was given {planned}: give a tensor of this type, or plan again."
                )


def _read_latents(
    latents: Tensor, ckv_cache: Tensor, ckv_scale: Any, ckv_scale_arr: Tensor | None, kpe_scale: Any
) -> tuple[Tensor, dict[str, Any], float]:
    """K as attention() takes it, its arguments for 8 bits, and what the rotated columns of Q are multiplied with: one scale is K's."""
    if latents.dtype not in _FORMATS:
        if not all(x is None for x in (ckv_scale, ckv_scale_arr, kpe_scale)):
            raise InvalidArgument(
                f"ckv_scale, ckv_scale_arr and kpe_scale are for caches of 8 bits, and ckv_cache is {latents.dtype}: leave them "
                "out."
            )
        return latents, {}, 1.0
    if (ckv_scale is None) == (ckv_scale_arr is None):
        raise InvalidArgument(
            "Exactly one of ckv_scale or ckv_scale_arr is needed with caches of 8 bits: "
            f"{'neither is given: give one.' if ckv_scale is None else 'both are given: leave one out.'}"
        )
    numbers = {"ckv_scale": ckv_scale} if ckv_scale_arr is None else {}
    if latents.shape[-1] > ckv_cache.shape[-1] or numbers:
        numbers["kpe_scale"] = kpe_scale
    for name, scale in numbers.items():
        if isinstance(scale, Tensor) or scale is None or not (0 < float(scale) < math.inf):
            raise InvalidArgument(f"{name} is {scale!r}: with caches of 8 bits give a finite number above 0.")
    codes, form = latents.view(torch.uint8), _FORMATS[latents.dtype]
    if ckv_scale_arr is not None:
        return codes, _block_scales(ckv_cache, ckv_scale_arr, latents.shape[-1], kpe_scale, form), 1.0
    of_codes = {"k_format": form, "k_scale": constant(float(ckv_scale), latents.device)}
    return codes, of_codes, float(kpe_scale) / float(ckv_scale)


def _block_scales(
    ckv_cache: Tensor, scales: Tensor, columns: int, kpe_scale: Any, form: str
) -> dict[str, Any]:
    """attention()'s arguments for scales of 128 columns each, and one for the columns that come after: of 64 columns then."""
    rank = ckv_cache.shape[-1]
    shape = (*ckv_cache.shape[:-1], rank // _SCALED)
    if rank % _SCALED or (columns - rank) % (_SCALED // 2):
        raise Unsupported(
            f"ckv_scale_arr is given, ckv_cache has {rank} columns and kpe_cache {columns - rank}: scales are of {_SCALED} columns "
            f"each, and of {_SCALED // 2} beside them, so give multiples of these, or ckv_scale."
        )
    of_floats = isinstance(scales, Tensor) and scales.dtype == torch.float32
    if not of_floats or scales.shape != shape:
        given = describe(scales) if isinstance(scales, Tensor) else f"a {type(scales).__name__}"
        raise InvalidArgument(
            f"Invalid {'shape' if of_floats else 'type'} of ckv_scale_arr, which is {given}: give torch.float32 {list(shape)}, ckv_cache's pages and rows, and a scale for {_SCALED} "
            "columns."
        )
    if columns == rank:
        return {"k_format": f"{form}:g{_SCALED}:fp32:apart", "k_block_scale": scales[:, None]}
    say_once(
        "ckv_scale_arr is copied in each call, since the rotated columns have a scale of their own: store rows as "
        'KvFormat("fp8_ds_mla") and call flashjit.attention() to save the time.'
    )
    half = _SCALED // 2
    joined = scales.new_full((*shape[:-1], columns // half), float(kpe_scale))
    joined[..., : rank // half] = scales.repeat_interleave(2, -1)
    return {"k_format": f"{form}:g{half}:fp32:apart", "k_block_scale": joined[:, None]}


def joined_columns(left: Tensor, right: Tensor) -> Tensor:
    """[pages, rows, both columns]: a view where they are neighbours in one tensor, else a copy."""
    if left.shape[:-1] != right.shape[:-1] or left.dtype != right.dtype:
        raise InvalidArgument(
            f"ckv_cache is {list(left.shape)} {left.dtype} and kpe_cache {list(right.shape)} {right.dtype}: they must have "
            "the same pages and rows, and one type."
        )
    if not right.shape[-1]:
        return left
    columns = left.shape[-1] + right.shape[-1]
    if left.stride() == right.stride() and right.data_ptr() - left.data_ptr() == (
        left.shape[-1] * left.element_size()
    ):
        return left.as_strided((*left.shape[:-1], columns), left.stride())
    say_once(
        "ckv_cache and kpe_cache are copied in each call: make them views of one tensor [pages, rows of a page, "
        f"{columns}] to save the time."
    )
    return torch.cat((left, right), -1)

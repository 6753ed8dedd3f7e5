"""FlashInfer's wrapper for blocks of any sizes, which differ by head of K and V: of video models that sort their tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._attention import attention
from .._named import SOFTCAP
from .._tensors import describe
from .._transforms import refuse_lost_gradients
from ..errors import InvalidArgument
from ..programs import repeated
from ._batch import _Wrapper
from ._rows import check_lse, check_tensor, sizes
from ._scores import LOG2E, read_scores, refuse

_MASK = "blocks[h_kv, row_block[h_kv, q], column_block[h_kv, kv]]"


class VariableBlockSparseAttentionWrapper(_Wrapper):
    """Each query attends to the blocks of keys that its block names."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "HND", False, None)
        self._captures: dict[str, Any] = {}

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """block_mask_map: bool [hkv, MB, NB]: which blocks of keys each block of queries sees. block_row_sz [hkv, MB] and block_col_sz
        [hkv, NB]: how many queries and keys the blocks of a head have; the sum is the same for all heads."""
        refuse(
            causal=causal or None,
            pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        self._sizes = sizes(num_qo_heads, num_kv_heads, head_dim, None)
        self._keep_types(q_data_type, kv_data_type, None)
        self._scores = read_scores("NONE", logits_soft_cap, False, -1, sm_scale)
        given = (
            ("block_mask_map", block_mask_map, 3),
            ("block_row_sz", block_row_sz, 2),
            ("block_col_sz", block_col_sz, 2),
        )
        for name, x, dims in given:
            if not isinstance(x, Tensor) or x.dim() != dims or x.shape[0] != num_kv_heads:
                raise InvalidArgument(
                    f"{name} is {describe(x)}: give a tensor of {dims} dimensions, of which the first is num_kv_heads, "
                    f"{num_kv_heads}."
                )
        wanted = (num_kv_heads, block_row_sz.shape[1], block_col_sz.shape[1])
        if block_mask_map.shape != wanted:
            raise InvalidArgument(
                f"block_mask_map is {describe(block_mask_map)}: it must be {list(wanted)}, with the blocks of block_row_sz and "
                "block_col_sz."
            )
        self._captures = {
            "blocks": block_mask_map.to(self.device).bool().contiguous(),
            "row_block": self._block_of("block_row_sz", block_row_sz),
            "column_block": self._block_of("block_col_sz", block_col_sz),
        }
        if self._scores.logits_soft_cap:
            self._captures["softcap"] = float(self._scores.logits_soft_cap)

    begin_forward = plan

    def _block_of(self, name: str, sizes_of_blocks: Tensor) -> Tensor:
        """The block of each row, int32 [hkv, rows]."""
        counts = sizes_of_blocks.cpu().long()
        rows = counts.sum(1)
        if (counts < 0).any() or (rows != rows[0]).any():
            raise InvalidArgument(
                f"{name} has rows that sum up to {rows.tolist()}: blocks have 0 rows or more, and the heads as many rows in all."
            )
        blocks = torch.arange(counts.shape[1], dtype=torch.int32)
        return torch.stack([blocks.repeat_interleave(x) for x in counts]).to(self.device)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """O [hq, M, d] of q [hq, M, d], k and v [hkv, N, d]; with return_lse also LSE [hq, M], of base 2. A mask of the pairs is read
        in the kernel, which leaves out tiles without a pair."""
        if self._sizes is None:
            raise InvalidArgument("run() is called before plan(): call that first.")
        captures = self._captures
        rows = {"q": "row_block", "k": "column_block", "v": "column_block"}
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, x, "heads, rows, d")
            heads = self._sizes.heads_q if name == "q" else self._sizes.heads_kv
            wanted = (heads, captures[rows[name]].shape[1], self._sizes.head_dim)
            if tuple(x.shape) != wanted:
                raise InvalidArgument(f"{name} is {describe(x)}: plan() was given {list(wanted)}.")
        check_lse(lse, q.shape[:2], "hq, M")
        wants = return_lse or lse is not None
        refuse_lost_gradients("flashjit.flashinfer", q, k, v)
        with torch.no_grad():
            found = attention(
                q[None],
                k[None],
                v[None],
                scale=self._scores.sm_scale,
                mask_mod=repeated(SOFTCAP if "softcap" in captures else None, _MASK, captures),
                return_lse=wants,
                out=None if out is None else out[None],
            )
        o, natural = found if wants else (found, None)
        result = o[0] if out is None else out
        if natural is None:
            return result
        lse = natural[0] * LOG2E if lse is None else lse.copy_(natural[0] * LOG2E)
        return (result, lse) if return_lse else result

    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward = run

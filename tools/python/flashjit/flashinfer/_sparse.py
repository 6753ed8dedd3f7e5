"""FlashInfer's wrapper for block-sparse attention of one sequence, whose blocks come as a BSR matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._problem import BlockMap
from .._tensors import describe
from ..errors import InvalidArgument
from ._batch import _Wrapper
from ._rows import Rows, check_ints, check_tensor, heads_first, results, run, sizes
from ._scores import Scales, read_mask, read_scores, refuse


class BlockSparseAttentionWrapper(_Wrapper):
    """Blocks of R queries and C keys. Where both are multiples of 16 up to 256, the others cost nothing; else, and with a mask
    within blocks, plan() makes a mask of all pairs."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, None)
        self._blocks: dict[str, Any] = {}

    def plan(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
    ) -> None:
        """indptr [M / R + 1] and indices: the blocks of keys of each block of queries; or block_mask, bool [M / R, N / C]. mask:
        bool [blocks, R, C]: which pairs of each block attend."""
        refuse(packed_mask=packed_mask)
        self._sizes = sizes(num_qo_heads, num_kv_heads, head_dim, None)
        self._keys = N
        for name, value in (("M", M), ("N", N), ("R", R), ("C", C)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name} is {value!r}: give an int of at least 1.")
        if M % R or N % C:
            raise InvalidArgument(f"M is {M} and N {N}: they must be multiples of R, {R}, and C, {C}.")
        self._keep_types(q_data_type, kv_data_type, o_data_type)
        places, blocks = self._read_blocks(indptr, indices, block_mask, M // R, N // C)
        whole = mask is None and all(size in range(16, 257, 16) for size in (R, C))
        self._blocks = {"block_mask": BlockMap(blocks, (R, C))} if whole else {}
        pairs = None
        if not whole:
            pairs = blocks[:, :, None, None].expand(-1, -1, R, C)
            if mask is not None:
                wanted = [len(places[0]), R, C]
                if list(mask.shape) != wanted:
                    raise InvalidArgument(
                        f"mask is {describe(mask)}: it must be {wanted}, the pairs of each block."
                    )
                if int(blocks.sum()) != len(places[0]):
                    raise InvalidArgument("indices name a block twice, and mask has two for it: join them.")
                pairs = torch.zeros_like(pairs, dtype=torch.bool)
                pairs[places] = mask.to(self.device).bool()
            pairs = pairs.transpose(1, 2).reshape(M, N)
        if pairs is not None and causal:
            pairs = pairs & torch.ones_like(pairs).tril(N - M)
        given = read_mask(pairs, None, torch.tensor([M * N]), self.device)
        self._scores = read_scores(pos_encoding_mode, logits_soft_cap, causal, -1, sm_scale, *given)
        self._rows = Rows(None, M, M)

    begin_forward = plan

    def _read_blocks(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        block_mask: Tensor | None,
        rows: int,
        columns: int,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The places of the blocks that attend, and bool [rows, columns] of all of them."""
        if block_mask is not None:
            if indptr is not None or indices is not None:
                raise InvalidArgument("block_mask is given beside indptr or indices: leave it or them out.")
            if list(block_mask.shape) != [rows, columns]:
                raise InvalidArgument(f"block_mask is {describe(block_mask)}: it must be {[rows, columns]}.")
            blocks = block_mask.to(self.device).bool()
            return blocks.nonzero(as_tuple=True), blocks
        if indptr is None or indices is None:
            raise InvalidArgument("give indptr and indices, or block_mask.")
        ends, listed = check_ints("indptr", indptr).cpu(), check_ints("indices", indices).cpu()
        if ends.numel() != rows + 1:
            raise InvalidArgument(
                f"indptr is {describe(indptr)}: it must have {rows + 1} numbers, one more than M / R."
            )
        if ends[0] != 0 or (ends.diff() < 0).any():
            raise InvalidArgument(
                f"indptr begins with {int(ends[0])} and has steps down to {int(ends.diff().min())}: it begins with 0 and does not fall."
            )
        if int(ends[-1]) != listed.numel():
            raise InvalidArgument(
                f"indptr ends at {int(ends[-1])}, but indices has {listed.numel()}: give as many."
            )
        if listed.numel() and not (0 <= int(listed.min()) and int(listed.max()) < columns):
            raise InvalidArgument(
                f"indices has {int(listed.min())} to {int(listed.max())}: give 0 to {columns - 1}, blocks of keys."
            )
        row = torch.arange(rows).repeat_interleave(ends.diff().long())
        places = (row.to(self.device), listed.to(self.device).long())
        blocks = torch.zeros(rows, columns, dtype=torch.bool, device=self.device)
        blocks[places] = True
        return places, blocks

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Any = None,
        scale_k: Any = None,
        scale_v: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """O [M, hq, d] of q [M, hq, d], k and v [N, hkv, d]; with return_lse also LSE [M, hq], of base 2."""
        dims = "N, hkv, d"
        keys, values = (
            heads_first(check_tensor(name, x, dims), "NHD")[None] for name, x in (("k", k), ("v", v))
        )
        rows = self._planned(q, keys, values)
        if k.shape[0] != self._keys:
            raise InvalidArgument(f"k is {describe(k)}: plan() was given N={self._keys}, its keys.")
        scales = Scales(scale_q, scale_k, scale_v)
        wants = return_lse or lse is not None
        found = run(q, keys, values, rows, self._scores, scales, self._out_dtype, out, wants, **self._blocks)
        return results(found, lse, return_lse)

    forward = run

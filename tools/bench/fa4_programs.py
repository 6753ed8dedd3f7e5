"""Masks and scores of variants.py as FlashAttention-4 takes them: functions in CuTe's Python, and lists of the blocks that attend. Those are
what FlexAttention's BACKEND="FLASH" writes and calls."""

import functools

from variants import PREFIX, WINDOW, Case

BLOCK = 128
SOFTCAP = 50.0


def masks(cute, cutlass, utils):
    """Name -> the mask. Arguments are vectors of one element, and so must constants be."""
    one = lambda x: utils.scalar_to_ssa(x, cutlass.Int32)

    @cute.jit
    def causal(b, h, q, kv, seqlen_info, aux_tensors):
        return kv <= q

    @cute.jit
    def window(b, h, q, kv, seqlen_info, aux_tensors):
        return (kv <= q) & (kv > q - one(WINDOW))

    @cute.jit
    def documents(b, h, q, kv, seqlen_info, aux_tensors):
        ids = aux_tensors[0]
        return (kv <= q) & (one(ids[q[0]]) == one(ids[kv[0]]))

    @cute.jit
    def prefix(b, h, q, kv, seqlen_info, aux_tensors):
        return (kv <= q) | (kv < one(PREFIX))

    return {"causal": causal, "window": window, "documents": documents, "prefix": prefix}


def scores(cute, cutlass, utils):
    """Name -> the score, and its gradient."""

    @cute.jit
    def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((h + 1).to(cutlass.Float32) * -0.5, fastmath=True)
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    @cute.jit
    def same(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return grad

    return {
        "alibi": (alibi, same),
        "softcap": (utils.create_softcap_scoremod(SOFTCAP), utils.create_softcap_scoremod_bwd(SOFTCAP)),
    }


@functools.cache
def functions():
    """(name of a case) -> its mask, score and gradient of the score; each has its name as what FlashAttention-4 finds its kernel by."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    of_masks, of_scores = masks(cute, cutlass, utils), scores(cute, cutlass, utils)
    found = {name: (mask, None, None) for name, mask in of_masks.items()}
    for name, (score, gradient) in of_scores.items():
        found[name] = of_masks["causal"], score, gradient
    for name, made in found.items():
        for role, function in zip(("mask", "score", "gradient"), made):
            if function and not hasattr(function, "__cute_hash__"):
                function.__cute_hash__ = f"flashjit's {role} {name}"
    return found


def blocks_of(case: Case, length, device):
    """BlockMask's lists: of keys for the forward pass, of queries for the backward pass."""
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(case.mask_mod, None, None, length, length, device=device, BLOCK_SIZE=BLOCK)
    return [
        tuple(getattr(made, name.format(side)) for name in ("{}_num_blocks", "{}_indices"))
        + tuple(getattr(made, name.format(side)) for name in ("full_{}_num_blocks", "full_{}_indices"))
        for side in ("kv", "q")
    ]


class FlashAttention4:
    """One problem; tensors are [batch, heads, length, dim]. blocks: as from blocks_of()."""

    def __init__(self, case, q, k, v, dout, blocks=None):
        if case.name not in functions():
            raise ValueError(f"{case.name} is not among FlashAttention-4's functions here")
        self.mask, self.score, self.gradient = functions()[case.name]
        self.q, self.k, self.v, self.dout = (x.transpose(1, 2) for x in (q, k, v, dout))
        self.blocks = blocks or blocks_of(case, q.shape[2], q.device)
        self.captures = list(case.captures.values()) or None
        self.kept = None

    def how(self, side):
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        blocks = BlockSparseTensorsTorch(*self.blocks[side], block_size=(BLOCK, BLOCK))
        return dict(
            score_mod=self.score, mask_mod=self.mask, block_sparse_tensors=blocks, aux_tensors=self.captures
        )

    def forward(self):
        from flash_attn.cute.interface import _flash_attn_fwd

        return _flash_attn_fwd(self.q, self.k, self.v, return_lse=True, **self.how(0))[:2]

    def fwd(self):
        return self.forward()[0].transpose(1, 2)

    def bwd(self):
        from flash_attn.cute.interface import _flash_attn_bwd

        if self.kept is None:
            self.kept = self.forward()
        found = _flash_attn_bwd(
            self.q,
            self.k,
            self.v,
            self.kept[0],
            self.dout,
            self.kept[1],
            score_mod_bwd=self.gradient,
            **self.how(1),
        )
        return tuple(x.transpose(1, 2) for x in found[:3])

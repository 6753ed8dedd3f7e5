"""flash_attn.bert_padding: rows of padded batches, packed, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x by their numbers."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with these rows, and zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x by their numbers, and x itself."""
    return x[indices], x


class IndexFirstAxis:
    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    apply = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    apply = staticmethod(index_first_axis_residual)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of [b, s, ...] where the mask [b, s] is not 0, packed.

    Returns the rows, their numbers in [b * s], cu_seqlens int32 [b + 1], the longest sequence, and how many
    rows of each sequence attention_mask alone keeps. unused_mask: rows to keep too, which attention_mask
    leaves out.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return (
        hidden_states.flatten(0, 1)[indices],
        indices,
        _offsets(lengths),
        int(lengths.max()),
        attention_mask.sum(-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """unpad_input() where a row of the batch has several sequences, whose lengths attention_mask_in_length
    [b, s] has: 2, 3, 0, 0, 0, 0 are two sequences of 2 and 3 rows, and one row of padding."""
    rows = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[-1], device=rows.device) < rows
    lengths = attention_mask_in_length[attention_mask_in_length != 0].int()
    indices = kept.flatten().nonzero().flatten()
    return hidden_states.flatten(0, 1)[indices], indices, _offsets(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input(): [batch, seqlen, ...], zeros where no row was kept."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

"""SGLang's trees of drafts: which of a step's own keys each draft sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._engines import Tree
from ..errors import InvalidArgument


def is_tree(spec_info: Any) -> bool:
    """Whether a verification's drafts may have siblings. Chains are causal, and their masks are not read."""
    return getattr(spec_info, "tree_topk", 1) != 1 and getattr(spec_info, "custom_mask", None) is not None


def read(mask: Tensor, before: Tensor, drafts: int) -> Tree:
    """The tree of each sequence.

    mask: bool, of one sequence after another: [drafts, keys before + drafts], or [drafts, drafts].
    before: [sequences]: how many keys each has before its drafts. A graph's padding sequences may be missing from mask."""
    steps = torch.arange(drafts, device=before.device)
    if mask.numel() == before.numel() * drafts**2:
        own = mask.view(-1, drafts, drafts)
    elif mask.numel() < drafts**2:
        raise InvalidArgument(
            f"custom_mask has {mask.numel()} elements: it must have at least {drafts} for each of the {drafts} drafts."
        )
    else:
        width = before.long() + drafts
        first = (width.cumsum(0) - width) * drafts + before
        places = first[:, None, None] + width[:, None, None] * steps[:, None] + steps
        own = mask[places.clamp_(max=mask.numel() - 1)]
    own = own.bool()
    return Tree((own.long() << steps).sum(2), own.sum(2, dtype=torch.int32) - 1)

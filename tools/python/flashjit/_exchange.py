"""What ranks send each other, on PyTorch's process groups."""
from __future__ import annotations

import weakref
from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InvalidArgument


class Travel:
    """Tensors on their way to the next rank, while the previous one's come in."""

    def __init__(self, tensors: Sequence[Tensor], group: Any) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.arriving = [torch.empty_like(x) for x in tensors]
        everyone: Any = dist.group.WORLD
        place = lambda step: dist.get_global_rank(group or everyone, (rank + step) % ranks)
        operations = [dist.P2POp(dist.isend, x, place(1), group) for x in tensors]
        operations += [dist.P2POp(dist.irecv, x, place(-1), group) for x in self.arriving]
        self.sent = tensors  # until they have arrived
        self.work = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self.work:
            work.wait()
        return self.arriving


class Gathering:
    """All ranks' tensors on their way here: [ranks, ...]."""

    def __init__(self, x: Tensor, group: Any) -> None:
        x = x.contiguous()
        self.parts = x.new_empty((dist.get_world_size(group), *x.shape))
        self.sent = x  # until it has arrived
        self.work: Any = dist.all_gather_into_tensor(self.parts.flatten(0, 1), x, group=group, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.parts


def scattered_sum(parts: Tensor, group: Any) -> Tensor:
    """This rank's part, [...], of the sum over all ranks of [ranks, ...]."""
    parts = parts.contiguous()
    result = parts.new_empty(parts.shape[1:])
    dist.reduce_scatter_tensor(result, parts.flatten(0, 1), group=group)
    return result


class AllToAll(torch.autograd.Function):
    """[ranks, ...]: part i goes to rank i; part i of the result is from rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return AllToAll.apply(grad, ctx.group), None


#: By group, which it does not keep alive.
_agreed: "weakref.WeakKeyDictionary[Any, set[Any]]" = weakref.WeakKeyDictionary()


def check_agreement(tensors: Sequence[Tensor], arguments: dict[str, Any], first: dict[str, Any], group: Any) -> None:
    """Once for each kind of call: all ranks tell each other what they were given, so that none waits for another for ever.

    first: what may differ from call to call.
    """
    mine = (*((tuple(x.shape), str(x.dtype)) for x in tensors), *arguments.values())
    agreed = _agreed.setdefault(group or dist.group.WORLD, set())
    if mine in agreed:
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (*mine, *first.values()), group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise InvalidArgument(f"rank {rank} was given {other}, but rank 0 {everyone[0]} (sizes and types of q, k and v; "
                                  f"{', '.join([*arguments, *first])}): give all ranks the same.")
    agreed.add(mine)

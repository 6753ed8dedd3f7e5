"""What ranks send each other, on PyTorch's process groups."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InvalidArgument

#: Ranks of a group, and tensors that go there or come from there.
Peers = Sequence[tuple[int, Sequence[Tensor]]]


def _start(sent: Peers, arriving: Peers, group: Any) -> Any:
    """One batch of transfers."""
    everyone: Any = dist.group.WORLD
    place = lambda rank: dist.get_global_rank(group or everyone, rank)
    operations = [dist.P2POp(dist.isend, x, place(rank), group) for rank, tensors in sent for x in tensors]
    operations += [
        dist.P2POp(dist.irecv, x, place(rank), group) for rank, tensors in arriving for x in tensors
    ]
    return dist.batch_isend_irecv(operations) if operations else []


#: Clock cycles, about 30 us, by which NCCL's kernel begins before a step's kernels. Where these come first and take all multiprocessors,
#: it waits for their end, and the peers' NCCL, which waits for it, holds multiprocessors of theirs: a fifth of a forward pass on four GPUs.
HEAD_START = 60000


class Travel:
    """Tensors on their way to the next rank, while the previous one's come in. They begin before what the stream gets next."""

    def __init__(self, tensors: Sequence[Tensor], group: Any) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.arriving = [torch.empty_like(x) for x in tensors]
        self.sent = tensors  # until they have arrived
        self.work = _start([((rank + 1) % ranks, tensors)], [((rank - 1) % ranks, self.arriving)], group)
        if tensors[0].is_cuda:
            with torch.cuda.device(tensors[0].device):
                torch.cuda._sleep(HEAD_START)

    def wait(self) -> list[Tensor]:
        for work in self.work:
            work.wait()
        return self.arriving


@contextlib.contextmanager
def beside(*transfers: Any) -> Iterator[None]:
    """Work beside transfers. Where it raises an error they are waited for, too: all ranks may go on using the group."""
    try:
        yield
    except Exception:
        for transfer in transfers:
            if transfer:
                transfer.wait()
        raise


class Exchange:
    """Tensors on their way to each rank, while other ranks' tensors come in. A rank's tensors for itself stay where they are."""

    def __init__(
        self, to: Sequence[Sequence[Tensor]], places: Sequence[Sequence[Tensor]], group: Any
    ) -> None:
        """to[i]: what goes to rank i, and places[i]: where what comes from it is put; this rank's own are not touched."""
        rank = dist.get_rank(group)
        others = [i for i in range(dist.get_world_size(group)) if i != rank]
        self.sent = [(i, [x.contiguous() for x in to[i]]) for i in others]  # until they have arrived
        self.places = [(i, list(places[i])) for i in others]
        self.arriving = [
            (i, [x if x.is_contiguous() else x.new_empty(x.shape) for x in places[i]]) for i in others
        ]
        self.work = _start(self.sent, self.arriving, group)

    def wait(self) -> None:
        for work in self.work:
            work.wait()
        for (_, places), (_, arrived) in zip(self.places, self.arriving):
            for place, x in zip(places, arrived):
                if place is not x:
                    place.copy_(x)
        self.sent = self.arriving = self.places = self.work = []  # their memory


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
_agreed: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def check_agreement(
    tensors: Sequence[Tensor], arguments: dict[str, Any], first: dict[str, Any], group: Any
) -> None:
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
            raise InvalidArgument(
                f"rank {rank} was given {other}, but rank 0 {everyone[0]} (sizes and types of q, k and v; "
                f"{', '.join([*arguments, *first])}): give all ranks the same."
            )
    agreed.add(mine)

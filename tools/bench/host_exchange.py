"""torch.distributed's transfers through the host's memory, by gloo: ranks that share a GPU, which NCCL refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Work:
    """A transfer. Its tensor is on the GPU when wait() returns."""

    def __init__(self, works: list[Any], target: Tensor | None = None, host: Tensor | None = None) -> None:
        self.works, self.target, self.host = works, target, host

    def wait(self, *_: Any) -> None:
        for work in self.works:
            work.wait()
        if self.target is not None and self.host is not None:
            self.target.copy_(self.host)


def _batch_isend_irecv(ops: list[Any]) -> list[_Work]:
    """As torch.distributed's; a rank may send to itself."""
    own, me, works = [], dist.get_rank(), []
    for op in ops:
        sends = op.op is dist.isend
        if op.peer == me:
            if sends:
                own.append(op.tensor.clone())
            else:
                op.tensor.copy_(own.pop(0))
            continue
        host = op.tensor.cpu() if sends else torch.empty(op.tensor.shape, dtype=op.tensor.dtype)
        work = op.op(host, op.peer, group=op.group)
        works.append(_Work([work], None if sends else op.tensor, host))
    return works


def _through_host(function: Any) -> Any:
    """A collective of an output and an input."""

    def call(output: Tensor, given: Tensor, *args: Any, async_op: bool = False, **named: Any) -> Any:
        host = torch.empty(output.shape, dtype=output.dtype)
        function(host, given.cpu(), *args, **named)
        output.copy_(host)
        return _Work([]) if async_op else None

    return call


def install() -> None:
    dist.batch_isend_irecv = _batch_isend_irecv
    for name in ("all_gather_into_tensor", "all_to_all_single"):
        setattr(dist, name, _through_host(getattr(dist, name)))
    broadcast = dist.broadcast

    def through_host(tensor: Tensor, *args: Any, **named: Any) -> None:
        host = tensor.detach().cpu()
        broadcast(host, *args, **named)
        with torch.no_grad():
            tensor.copy_(host)

    dist.broadcast = through_host

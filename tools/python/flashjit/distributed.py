"""Attention over sequences that several processes share: ring, all_gather and ulysses, on PyTorch's process groups.

Each rank has a shard of the sequence, [batch, heads, rows, head_dim], of Q, K and V; shard() says which rows. O and the
gradients come back as shards. A mask, a window or a program means what it means on the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._attention import draw_rng
from ._call_types import NO_RNG
from ._checks import check_number, check_whole
from ._chunks import LAYOUTS, Chunk, chunks
from ._exchange import Gathering, check_agreement
from ._pieces import Rule
from ._problem import autocast, causal_option, check_types
from ._schemes import AllGather, Job, Ring, ring_of_heads, ulysses
from ._shards import check_layout, in_order
from ._shards import positions as _positions
from ._tensor_checks import check_four_dims
from ._tensors import describe, is_differentiated
from .errors import InvalidArgument, Unsupported, WrongType
from .programs import program_of

__all__ = ["LAYOUTS", "SCHEMES", "Chunk", "chunks", "distributed_attention", "positions", "shard", "unshard"]

SCHEMES = ("auto", "ring", "all_gather", "ulysses", "two_level")


class _Groups(NamedTuple):
    """One group, or two levels: the ranks of `inner` have neighbouring parts of a shard that is their group's in `outer`."""

    outer: Any
    inner: Any = None

    @property
    def inner_ranks(self) -> int:
        return 1 if self.inner is None else dist.get_world_size(self.inner)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.outer) * self.inner_ranks


def _groups(group: Any) -> _Groups:
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim > 2:
            raise InvalidArgument(
                f"group is a mesh of {group.ndim} dimensions: give one of one dimension, or of two, where "
                "the ranks of the second share heads."
            )
        return _Groups(*(group.get_group(i) for i in range(group.ndim)))
    groups = tuple(group) if isinstance(group, (tuple, list)) else (group,)
    if len(groups) not in (1, 2) or not all(x is None or isinstance(x, dist.ProcessGroup) for x in groups):
        raise InvalidArgument(
            f"group is {group!r}: give a process group, a device mesh, or two process groups, (outer, inner)."
        )
    return _Groups(*groups)


def positions(rank: int, ranks: int, rows: int, layout: str = "zigzag", inner_ranks: int = 1) -> Tensor:
    """The position in the whole sequence of each row of a rank's shard, int64 [rows]: for rotary embeddings and losses. With two
    levels ranks that differ in rank % inner_ranks alone share heads."""
    for name, value, least in (
        ("rank", rank, 0),
        ("ranks", ranks, 1),
        ("rows", rows, 0),
        ("inner_ranks", inner_ranks, 1),
    ):
        check_whole(name, value)
        if value < least:
            raise InvalidArgument(f"{name} is {value}: give {least} or more.")
    if rank >= ranks or ranks % inner_ranks:
        raise InvalidArgument(
            f"rank is {rank}, ranks {ranks} and inner_ranks {inner_ranks}: rank must be less than ranks, which "
            "inner_ranks must divide."
        )
    outer, inner = divmod(rank, inner_ranks)
    return _positions(outer, ranks // inner_ranks, rows * inner_ranks, layout)[
        inner * rows : (inner + 1) * rows
    ]


def shard(x: Tensor, dim: int = 2, *, layout: str = "zigzag", group: Any = None) -> Tensor:
    """This rank's rows of a whole tensor, along `dim`, whose size must divide into the ranks; zigzag: into twice as many."""
    groups = _groups(group)
    _check_dim(x, dim)
    outer, rows = dist.get_world_size(groups.outer), x.shape[dim]
    check_layout(layout, outer, rows)
    if rows % groups.ranks:
        raise InvalidArgument(
            f"the sequence has {rows} rows, which do not divide into {groups.ranks} ranks: pad it to "
            f"{-(-rows // groups.ranks) * groups.ranks}."
        )
    mine = _positions(dist.get_rank(groups.outer), outer, rows // outer, layout)
    if groups.inner is not None:
        mine = mine.chunk(groups.inner_ranks)[dist.get_rank(groups.inner)]
    return x.index_select(dim, mine.to(x.device))


def _check_dim(x: Tensor, dim: Any) -> None:
    check_whole("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise InvalidArgument(f"dim is {dim}, but x is {list(x.shape)}: give one of its dimensions.")


def unshard(x: Tensor, dim: int = 2, *, layout: str = "zigzag", group: Any = None) -> Tensor:
    """The whole tensor, from all ranks' shards. No gradients."""
    groups = _groups(group)
    _check_dim(x, dim)
    x = x.detach().movedim(dim, 0)
    if groups.inner is not None:
        x = Gathering(x, groups.inner).wait().flatten(0, 1)
    parts = Gathering(x, groups.outer).wait()
    return (
        in_order(parts.flatten(2)[:, None, None], layout)[0, 0].unflatten(1, x.shape[1:]).movedim(0, dim)
        if x.dim() > 1
        else in_order(parts[:, None, None, :, None], layout)[0, 0, :, 0]
    )


@torch.compiler.disable
def distributed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scheme: str = "auto",
    layout: str = "zigzag",
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    score_mod: Any = None,
    mask_mod: Any = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    reserved_sms: int = 0,
    group: Any = None,
) -> Any:
    """attention() of a sequence that the ranks of `group` share, with gradients.

    q: [batch, heads_q, rows, head_dim], k and v: [batch, heads_kv, rows, ...]: this rank's shard, as shard() makes it with
        the same layout; every rank has as many rows.
    scheme: "ring": K and V go round, a step's kernels run while the next block travels, and O and LSE are joined in float32;
        blocks without a visible pair are passed on uncomputed. "all_gather": every rank gathers K and V once.
        "ulysses": an all-to-all gives each rank all rows of its share of the heads: heads_q must divide into the ranks.
        "two_level": ulysses between the ranks of the inner group, a ring between the ranks of the outer one. "auto": two_level with
        two groups; with one, all_gather in a forward pass alone where it sends less than ulysses, else ulysses, or ring where the
        heads do not divide into the ranks.
    causal: a query sees the keys at its own position and before. window: with causal, how many of these it sees at most.
    dropout_p: probability to drop a pair; seeded by PyTorch's generator, which all ranks seed alike. The mask equals that of
        attention() on the whole sequence.
    score_mod, mask_mod: functions as attention() takes them; q_idx and kv_idx are positions in the whole sequence. Tensors that
        they capture are the same on all ranks and have no gradients. There is no weight_mod, out_mod, q_mod and k_mod here.
    cu_seqlens: documents are packed one after the other in the whole sequence, from row cu_seqlens[i] to cu_seqlens[i + 1];
        the batch is 1, masks and programs count in each document, and `b` is its number. On the host: a tensor on a GPU is
        waited for.
    sinks: float32 [heads_q], the same on all ranks: one more logit of each head, without a value. Its gradient is that of this
        rank's rows: the sum over the ranks is the whole one, as for any parameter that all ranks have.
    return_lse: also LSE, float32 [batch, heads_q, rows], which has gradients too.
    reserved_sms: how many multiprocessors a ring's kernels leave to transfers while these are under way.
    group: a process group, a mesh of one dimension, or with "two_level" (outer group, inner group) or a mesh of two dimensions.

    torch.compile breaks its graph here. Raises flashjit.InvalidArgument on every rank where ranks disagree on sizes, types or
    arguments.
    """
    groups = _groups(group)
    check_types(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_four_dims(name, x)
    q, k, v = (x.resolve_neg() for x in autocast(q, k, v))
    if scheme == "auto":
        backward = torch.is_grad_enabled() and q.requires_grad
        scheme = (
            "two_level"
            if groups.inner is not None
            else _fastest(q.shape[1], k.shape[1], groups.ranks, backward)
        )
    _check_arguments(q, scheme, causal, window, scale, dropout_p, reserved_sms, groups)
    rng = draw_rng(q) if dropout_p else NO_RNG
    documents = None if cu_seqlens is None else _documents(cu_seqlens)
    _check_everywhere(
        (q, k, v),
        dict(
            scheme=scheme,
            layout=layout,
            causal=causal,
            window=window,
            scale=scale,
            dropout_p=dropout_p,
            no_score_mod=score_mod is None,
            no_mask_mod=mask_mod is None,
            cu_seqlens=documents,
            no_sinks=sinks is None,
            return_lse=return_lse,
        ),
        rng,
        groups,
    )
    _check_sizes(q, k, v, sinks)
    sinks = None if sinks is None else sinks.resolve_neg()
    check_layout(layout, dist.get_world_size(groups.outer), q.shape[2] * groups.ranks)
    _check_documents(documents, q, layout, groups.ranks)
    if not q.shape[2]:  # no document has a row
        documents = None
    _check_captures(score_mod, mask_mod)
    job = Job(
        Rule(bool(causal), window, scale, score_mod, mask_mod, documents, dropout_p, 0, q.shape[1]),
        layout,
        groups.outer,
        rng,
        reserved_sms,
    )
    if scheme == "two_level":
        out, lse = ring_of_heads(q, k, v, sinks, job, groups.inner)
    elif scheme == "ulysses":
        out, lse = ulysses(q, k, v, sinks, job)
    else:
        out, lse = (Ring if scheme == "ring" else AllGather).apply(q, k, v, sinks, job)
    return (out, lse) if return_lse else out


def _fastest(heads: int, heads_kv: int, ranks: int, backward: bool) -> str:
    """The scheme that "auto" takes with one group."""
    if (
        not backward and ranks * heads_kv < heads + heads_kv
    ):  # all ranks' K and V have fewer bytes than a rank's Q, K, V and O
        return "all_gather"
    divides = heads % ranks == 0 and heads_kv > 0 and (heads_kv % ranks == 0 or ranks % heads_kv == 0)
    return "ulysses" if divides else "ring"


def _check_arguments(
    q: Tensor,
    scheme: str,
    causal: bool,
    window: int | None,
    scale: float | None,
    dropout_p: float,
    reserved_sms: int,
    groups: _Groups,
) -> None:
    if scheme not in SCHEMES:
        raise InvalidArgument(f"scheme is {scheme!r}: give one of {', '.join(SCHEMES)}.")
    if (scheme == "two_level") != (groups.inner is not None):
        raise InvalidArgument(
            f"scheme is {scheme!r} and group {'two groups' if groups.inner else 'one group'}: give two with "
            '"two_level", (outer, inner), and else one.'
        )
    causal_option(causal)
    if window is not None and (not causal or not isinstance(window, Integral) or window < 1):
        raise InvalidArgument(
            f"window is {window} and causal is {causal}: a window is of 1 key or more, with causal=True."
        )
    check_number("dropout_p", dropout_p)
    if scale is not None:
        check_number("scale", scale)
        if not 0 < scale < math.inf:
            raise InvalidArgument(f"scale is {scale}: it must be finite and above 0.")
    check_whole("reserved_sms", reserved_sms)
    if reserved_sms < 0:
        raise InvalidArgument(f"reserved_sms is {reserved_sms}: give 0 or more.")
    if not 0 <= dropout_p < 1:
        raise InvalidArgument(f"dropout_p is {dropout_p}: it must be at least 0 and less than 1.")


def _check_everywhere(
    tensors: tuple[Tensor, ...], arguments: dict[str, Any], rng: Any, groups: _Groups
) -> None:
    captured = isinstance(rng, Tensor) and rng.is_cuda  # in a graph, whose every replay draws
    first = {"seed of dropout": None if captured else tuple(map(int, rng))}
    check_agreement(tensors, arguments, first, groups.outer)
    if groups.inner is not None:
        check_agreement(tensors, arguments, first, groups.inner)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, sinks: Any) -> None:
    """What all ranks have alike, once they know that."""
    for name, x in (("k", k), ("v", v)):
        if x.shape[2] != q.shape[2]:
            raise InvalidArgument(
                f"q has {q.shape[2]} rows and {name} {x.shape[2]}: they are shards of one sequence, of as many rows."
            )
    if sinks is not None and (not isinstance(sinks, Tensor) or tuple(sinks.shape) != (q.shape[1],)):
        raise InvalidArgument(f"sinks is {describe(sinks)}: it must be float32 [{q.shape[1]}].")


def _documents(cu_seqlens: Any) -> tuple[int, ...]:
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if (
        not isinstance(offsets, Iterable)
        or not (offsets := list(offsets))
        or not all(isinstance(x, Integral) for x in offsets)
    ):
        raise WrongType(
            f"cu_seqlens is {describe(cu_seqlens) if isinstance(cu_seqlens, Tensor) else repr(cu_seqlens)}: give the row at "
            "which each document begins, and all rows, whole numbers."
        )
    return tuple(map(int, offsets))


def _check_documents(documents: tuple[int, ...] | None, q: Tensor, layout: str, ranks: int) -> None:
    if documents is None:
        return
    rows = q.shape[2] * ranks
    if documents[0] != 0 or documents[-1] != rows or any(a > b for a, b in zip(documents, documents[1:])):
        raise InvalidArgument(
            f"cu_seqlens goes from {documents[0]} to {documents[-1]} for {rows} rows of all ranks: it must begin "
            "with 0, not fall, and end with the rows; make padding a document of its own."
        )
    if q.shape[0] != 1:
        raise InvalidArgument(f"q has a batch of {q.shape[0]}: with cu_seqlens it is 1.")
    if layout == "striped":
        raise Unsupported(
            "packed documents in the layout 'striped': use 'zigzag' or 'contiguous', whose rows are neighbours."
        )


def _check_captures(score_mod: Any, mask_mod: Any) -> None:
    if score_mod is None and mask_mod is None or not torch.is_grad_enabled():
        return
    program = program_of(score_mod, mask_mod, None)
    if is_differentiated(*program.tensors):
        raise Unsupported(
            "a tensor that score_mod captures requires a gradient, which ranks would have to add up: give its detach()."
        )

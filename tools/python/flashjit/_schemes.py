"""Attention over a shared sequence: ring, all_gather and ulysses, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._call_types import NO_RNG, Placed, Rng, contiguous
from ._chunks import Chunk, chunks, parts_of_heads
from ._exchange import AllToAll, Exchange, Gathering, Travel, beside, scattered_sum
from ._kept_plans import plan_of
from ._pieces import Piece, Rule
from ._plans import Plan
from ._problem import read_problem
from ._shards import by_rank, copy_rows, in_order
from ._tensors import laid_out, readable
from .errors import InvalidArgument


class Job(NamedTuple):
    rule: Rule
    layout: str
    group: Any
    rng: Rng = NO_RNG
    reserved_sms: int = 0  # left to transfers, while there are any

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def chunks(self, rank: int, rows: int) -> tuple[Chunk, ...]:
        return chunks(rank, self.ranks, rows, self.layout)

    def pieces_with(self, owner: int, q: Tensor) -> list[Piece]:
        """Pieces of this rank's queries and the keys of `owner`."""
        return self.rule.pieces(self.chunks(self.rank, q.shape[2]), self.chunks(owner, q.shape[2]), q.device)

    def pieces_with_all(self, q: Tensor) -> list[Piece]:
        """Pieces of this rank's queries and the whole sequence by position: each query is in one, if it sees any key."""
        whole = Chunk(0, q.shape[2] * self.ranks, 0)
        return [
            piece
            for rows in self.chunks(self.rank, q.shape[2])
            for piece in self.rule.pieces(
                (rows,), (self.rule.seen_by(rows) if self.rule.causal else whole,), q.device
            )
        ]


def _cut(x: Tensor, chunk: Chunk) -> Tensor:
    return x if chunk.rows == x.shape[2] else x[:, :, chunk.begin : chunk.end]


class State:
    """O and LSE of the keys so far, in float32, which further keys join where it lies."""

    def __init__(self, q: Tensor, dim_v: int) -> None:
        self.q, self.dim_v = q, dim_v
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(
        self, piece: Piece, dtype: torch.dtype, k: Tensor, v: Tensor, rng: Rng, reserved_sms: int
    ) -> None:
        """Joins the keys of a piece. dtype: of O from now on, with the last one."""
        rows, given = piece.rows, (self.q, k, v, rng, piece, dtype)
        if self.out is None and rows.rows == self.q.shape[2]:
            self.out, self.lse = compute(*given, reserved_sms=reserved_sms)
            return
        before, lse = self.whole()
        if before.dtype != dtype:
            self.out = torch.empty_like(before, dtype=dtype)
            for others in (slice(0, rows.begin), slice(rows.end, None)):
                self.out[:, :, others] = before[:, :, others]
        lse = lse[:, :, rows.begin : rows.end]
        _, joined = compute(*given, reserved_sms=reserved_sms, out=self.out, state=(before, lse))
        if rows.rows == self.q.shape[2]:
            self.lse = joined
        else:
            lse.copy_(joined)

    def whole(self) -> tuple[Tensor, Tensor]:
        if self.out is None or self.lse is None:
            self.out = self.q.new_zeros((*self.q.shape[:3], self.dim_v), dtype=torch.float32)
            self.lse = self.q.new_full(self.q.shape[:3], -math.inf, dtype=torch.float32)
        return self.out, self.lse


class _Call(NamedTuple):
    """What a piece's plan is called with."""

    plan: Plan
    qkv: tuple[Tensor, Tensor, Tensor]
    rest: tuple[Any, Any, Any]  # the fixed tensors, the values and the random numbers' seed

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        piece: Piece,
        sinks: Tensor | None,
        rng: Rng,
        reserved_sms: int = 0,
        **types: bool,
    ) -> _Call:
        qkv = (
            readable(_cut(q, piece.rows), "q"),
            readable(_cut(k, piece.keys), "k"),
            readable(_cut(v, piece.keys), "v"),
        )
        given = {
            "causal": False,
            "dropout_p": 0.0,
            "score_mod": None,
            "mask_mod": None,
            "cu_seqlens_q": None,
            "cu_seqlens_kv": None,
            "max_seqlen_q": None,
            "max_seqlen_kv": None,
            **piece.given,
        }
        fixed, values, problem = read_problem(
            captures=None,
            block_mask=None,
            sinks=sinks,
            kv_lengths=None,
            deterministic=None,
            wants_grad=False,
            **types,
            **given,
        )
        if reserved_sms:
            problem = problem._replace(reserved_sms=reserved_sms)
        if piece.place is not None:
            problem, rng = (
                problem._replace(options=problem.options + ":dropout_place"),
                Placed(rng, piece.place),
            )
        fixed = contiguous(fixed)
        return _Call(plan_of(*qkv, fixed, values, problem), qkv, (fixed, values, rng))


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng: Rng,
    piece: Piece,
    dtype: torch.dtype,
    *,
    sinks: Tensor | None = None,
    reserved_sms: int = 0,
    out: Tensor | None = None,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """O, of `dtype`, and LSE of a piece's rows. out: where all rows' O is. state: all rows' O and these rows' LSE, which the
    piece's keys join."""
    call = _Call.of(
        q, k, v, piece, sinks, rng, reserved_sms, fp32_out=dtype != q.dtype, running_state=state is not None
    )
    if state is not None:
        state = _cut(state[0], piece.rows), state[1].contiguous()
    return call.plan.forward(
        *call.qkv, *call.rest, True, out=None if out is None else _cut(out, piece.rows), state=state
    )


class Sums:
    """Gradients like some tensors, added up in float32."""

    def __init__(self, *like: Tensor) -> None:
        self.like = like
        self.sums: list[Tensor | None] = [None] * len(like)

    def add(self, index: int, chunk: Chunk, part: Tensor) -> None:
        if self.sums[index] is None and chunk.rows == self.like[index].shape[2]:
            self.sums[index] = part
        else:
            _cut(self.of(index), chunk).add_(part)

    def add_keys(self, piece: Piece, parts: list[Tensor]) -> None:
        """dK and dV of dQ, dK and dV."""
        for i in range(2):
            self.add(i, piece.keys, parts[1 + i])

    def of(self, index: int) -> Tensor:
        total = self.sums[index]
        if total is None:
            total = self.sums[index] = torch.zeros(
                self.like[index].shape, dtype=torch.float32, device=self.like[index].device
            )
        return total


class Saved(NamedTuple):
    """The backward pass's tensors of all of this rank's rows. With O and LSE of all keys, P and D of a piece equal the whole
    softmax's."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    sinks: Tensor | None = None
    rng: Rng = NO_RNG

    def gradients(
        self, k: Tensor, v: Tensor, piece: Piece, fp32: bool = True, reserved_sms: int = 0
    ) -> tuple[list[Tensor], Any]:
        """dQ, dK and dV of a piece, in float32 or in the tensors' type, and dsinks."""
        rows = piece.rows
        plan, qkv, rest = _Call.of(self.q, k, v, piece, self.sinks, self.rng, reserved_sms, fp32_grads=fp32)

        def of_rows(x: Tensor) -> Tensor:
            return x[:, :, rows.begin : rows.end].contiguous()

        out = laid_out(_cut(self.out, rows), plan.out_size, plan.out_stride)
        found, dsinks, _ = plan.backward(
            _cut(self.dout, rows),
            None if self.dlse is None else of_rows(self.dlse),
            *qkv,
            out,
            of_rows(self.lse),
            *rest,
        )
        return found, dsinks


def _begin_backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Saved, Tensor, Tensor, Tensor]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    dout, dlse = (x if x is None else x.resolve_neg() for x in (dout, dlse))
    return (
        Saved(q, out, lse, torch.zeros_like(out) if dout is None else dout, dlse, sinks, ctx.job.rng),
        q,
        k,
        v,
    )


def _end_forward(ctx: Any, job: Job, *saved: Any) -> None:
    ctx.job = job
    ctx.save_for_backward(*saved)
    ctx.set_materialize_grads(False)


class Ring(torch.autograd.Function):
    """K and V go round, and so do dK and dV, a step behind."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        state = State(q, v.shape[3])
        block = [k.contiguous(), v.contiguous()]
        steps = [job.pieces_with((job.rank - step) % job.ranks, q) for step in range(job.ranks)]
        last = [piece for pieces in steps for piece in pieces][-1:]
        for step, pieces in enumerate(steps):
            travel = Travel(block, job.group) if step + 1 < job.ranks else None
            reserved = job.reserved_sms if travel else 0
            with beside(travel):
                for piece in pieces:
                    dtype = q.dtype if sinks is None and piece is last[0] else torch.float32
                    state.add(piece, dtype, block[0], block[1], job.rng, reserved)
            block, travel = travel.wait() if travel else block, None
        out, lse = state.whole()
        if sinks is not None:  # which all keys share
            joined = torch.logaddexp(lse, sinks.float()[None, :, None])
            out, lse = out * _weight(lse, joined)[..., None], joined
        out = out.to(q.dtype)
        _end_forward(ctx, job, q, k, v, sinks, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        saved, q, k, v = _begin_backward(ctx, dout, dlse)
        job: Job = ctx.job
        dsinks = None if saved.sinks is None else _sink_gradients(saved, saved.sinks)
        saved = saved._replace(sinks=None)
        dq = Sums(q)
        sums: list[Tensor] = []
        coming: Travel | None = None
        block = [k.contiguous(), v.contiguous()]
        for step in range(job.ranks):
            travel = Travel(block, job.group) if step + 1 < job.ranks else None
            dkv = Sums(k, v)
            reserved = job.reserved_sms if travel or coming else 0
            with beside(travel, coming):
                for piece in job.pieces_with((job.rank - step) % job.ranks, q):
                    parts, _ = saved.gradients(block[0], block[1], piece, reserved_sms=reserved)
                    dq.add(0, piece.rows, parts[0])
                    dkv.add_keys(piece, parts)
                    del parts  # their memory
            sums = [dkv.of(i).contiguous() for i in range(2)]
            if coming:  # the sums of the ranks that had this block before
                for total, before in zip(sums, coming.wait()):
                    total.add_(before)
                coming = None
                del before  # their memory
            coming = Travel(sums, job.group) if job.ranks > 1 else None
            block, travel = travel.wait() if travel else block, None
        dk, dv = coming.wait() if coming else sums
        return dq.of(0).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _weight(logit: Tensor, lse: Tensor) -> Tensor:
    """exp(logit - lse), and 0 where logit is -inf, even if lse is -inf, too."""
    return torch.where(logit.isneginf(), 0.0, (logit - lse).exp())


def _sink_gradients(saved: Saved, sinks: Tensor) -> Tensor:
    """The gradient from this rank's rows: the sink has the weight exp(sink - LSE), and no value."""
    d = (saved.dout.float() * saved.out.float()).sum(-1)
    weight = _weight(sinks.float()[None, :, None], saved.lse)
    return (weight * ((0 if saved.dlse is None else saved.dlse) - d)).sum((0, 2)).to(sinks.dtype)


class AllGather(torch.autograd.Function):
    """Each rank has all keys by position, so that each chunk of its queries is one call, which sees what it sees on one GPU."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        keys, values = (
            in_order(x.wait(), job.layout) for x in [Gathering(k, job.group), Gathering(v, job.group)]
        )
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for piece in job.pieces_with_all(q):
            rows = piece.rows
            lse[:, :, rows.begin : rows.end] = compute(
                q, keys, values, job.rng, piece, q.dtype, sinks=sinks, out=out
            )[1]
        _end_forward(ctx, job, q, k, v, sinks, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        saved, q, k, v = _begin_backward(ctx, dout, dlse)
        job: Job = ctx.job
        keys, values = (
            in_order(x.wait(), job.layout) for x in [Gathering(k, job.group), Gathering(v, job.group)]
        )
        dq, dkv = torch.empty_like(q), Sums(keys, values)
        dsinks: Tensor | None = None
        for piece in job.pieces_with_all(q):
            parts, of_sinks = saved.gradients(keys, values, piece)
            dq[:, :, piece.rows.begin : piece.rows.end] = parts[0]
            dkv.add_keys(piece, parts)
            del parts  # their memory
            if of_sinks is not None:
                dsinks = of_sinks if dsinks is None else dsinks + of_sinks
        dk, dv = (scattered_sum(by_rank(dkv.of(i), job.ranks, job.layout), job.group) for i in range(2))
        if saved.sinks is not None and dsinks is not None:
            dsinks = dsinks.to(saved.sinks.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, None


class Part(NamedTuple):
    """One of `parts` equal parts of each rank's heads: their rows come from all ranks, and go back."""

    job: Job
    number: int
    parts: int

    def of_rank(self, x: Tensor, rank: int) -> Tensor:
        """A rank's heads of [batch, heads, ...] or [heads]; where there are fewer than ranks, the one that its queries have."""
        dim, parts = min(1, x.dim() - 1), self.job.ranks * self.parts
        heads = x.shape[dim]
        return x.narrow(dim, (rank * self.parts + self.number) * heads // parts, max(1, heads // parts))

    def mine(self, x: Tensor) -> Tensor:
        return self.of_rank(x, self.job.rank)

    def rule(self, heads: int) -> Rule:
        """For this rank's heads, so many."""
        return self.job.rule._replace(head=(self.job.rank * self.parts + self.number) * heads)

    def piece(self, q: Tensor) -> Piece:
        """The piece of all rows of this rank's heads."""
        rows = Chunk(0, q.shape[2], 0)
        (piece,) = self.rule(q.shape[1]).pieces((rows,), (rows,), q.device)
        return piece


class Spreading:
    """All ranks' rows of this rank's heads on their way here."""

    def __init__(self, part: Part, shards: Sequence[Tensor]) -> None:
        self.layout = part.job.layout
        to = [[part.of_rank(x, rank) for x in shards] for rank in range(part.job.ranks)]
        own = to[part.job.rank]
        self.parts = [own if mine is own else [x.new_empty(x.shape) for x in own] for mine in to]
        self.exchange = Exchange(to, self.parts, part.job.group)

    def wait(self) -> list[Tensor]:
        """By position."""
        self.exchange.wait()
        parts, self.parts = self.parts, []  # their memory
        return [in_order(of_ranks, self.layout) for of_ranks in zip(*parts)]


class Returning:
    """All ranks' heads of this rank's rows on their way back, part after part."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shards: list[Tensor] = []
        self.exchange: Exchange | None = None

    def send(self, part: Part, tensors: Sequence[Tensor]) -> None:
        """All rows of a part's heads by position."""
        job = self.job
        self.shards = self.shards or [
            x.new_empty(x.shape[0], x.shape[1] * job.ranks * part.parts, x.shape[2] // job.ranks, x.shape[3])
            for x in tensors
        ]
        places = [[part.of_rank(x, rank) for x in self.shards] for rank in range(job.ranks)]
        own = places[job.rank]
        self.wait()  # for the memory of what has left
        to = [own if place is own else [x.new_empty(x.shape) for x in own] for place in places]
        for rank, rows in enumerate(to):
            for shard, x in zip(rows, tensors):
                copy_rows(shard, x, rank, job.ranks, job.layout)
        self.exchange = Exchange(to, places, job.group)

    def wait(self) -> list[Tensor]:
        """The shards."""
        if self.exchange:
            self.exchange.wait()
        return self.shards


class Heads(torch.autograd.Function):
    """Each rank computes all rows of its share of the heads. The transfers of a part run beside the kernels of another."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        count = parts_of_heads(job.ranks, q.shape[0] * q.shape[2] * job.ranks, q.shape[1], k.shape[1])
        parts = [Part(job, number, count) for number in range(count)]
        coming = [Spreading(part, (q, k, v)) for part in parts]
        saved: list[Tensor] = []
        back = Returning(job)
        for part, spreading in zip(parts, coming):
            rows, keys, values = spreading.wait()
            with beside(*coming, back):
                out, lse = compute(
                    rows,
                    keys,
                    values,
                    job.rng,
                    part.piece(rows),
                    q.dtype,
                    sinks=None if sinks is None else part.mine(sinks),
                )
            back.send(part, [out, lse[..., None]])
            saved += [rows, keys, values, out, lse]
        out, lse = back.wait()
        _end_forward(ctx, job, sinks, *saved)
        ctx.parts, ctx.heads_kv = parts, k.shape[1]
        return out, lse[..., 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        sinks, *saved = ctx.saved_tensors
        job: Job = ctx.job
        given = [x.resolve_neg() for x in (dout, None if dlse is None else dlse[..., None]) if x is not None]
        coming = [Spreading(part, given) for part in ctx.parts]
        dsinks, back = None if sinks is None else torch.zeros_like(sinks), Returning(job)

        def of_part(
            part: Part, spreading: Spreading, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
        ) -> Any:
            arrived = spreading.wait()
            of_lse = None if dlse is None else arrived.pop()[..., 0]
            rows = Saved(
                q,
                out,
                lse,
                arrived.pop() if arrived else torch.zeros_like(out),
                of_lse,
                None if sinks is None else part.mine(sinks),
                job.rng,
            )
            return rows.gradients(k, v, part.piece(q), fp32=False)

        for part, spreading in zip(ctx.parts, coming):
            tensors, saved = saved[:5], saved[5:]
            with beside(*coming, back):
                grads, of_sinks = of_part(part, spreading, *tensors)
            back.send(part, grads)
            if dsinks is not None:
                part.mine(dsinks).copy_(of_sinks)
            del grads  # their memory
        dq, *dkv = back.wait()
        if ctx.heads_kv < job.ranks:  # each of its heads went to several
            dkv = [x.unflatten(1, (ctx.heads_kv, -1)).sum(2) for x in dkv]
        return dq, *dkv, dsinks, None


def _check_heads(q: Tensor, k: Tensor, ranks: int) -> None:
    heads, heads_kv = q.shape[1], k.shape[1]
    if heads % ranks:
        raise InvalidArgument(
            f"q has {heads} heads for {ranks} ranks: ulysses gives each rank as many; use ring or all_gather."
        )
    if not heads_kv or heads_kv % ranks and ranks % heads_kv:
        raise InvalidArgument(
            f"k has {heads_kv} heads for {ranks} ranks: one must divide the other for ulysses; use ring "
            "or all_gather."
        )


def ulysses(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job) -> tuple[Tensor, Tensor]:
    _check_heads(q, k, job.ranks)
    return Heads.apply(q, k, v, sinks, job)


def share_heads(q: Tensor, k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[ranks, batch, heads / ranks, rows, dim] each: this rank's heads of all ranks' rows."""
    ranks = dist.get_world_size(group)
    _check_heads(q, k, ranks)
    if k.shape[1] < ranks:
        k, v = (
            x.repeat_interleave(ranks // k.shape[1], 1) for x in (k, v)
        )  # each rank's queries have one head of K
    return tuple(AllToAll.apply(x.unflatten(1, (ranks, -1)).movedim(1, 0), group) for x in (q, k, v))  # type: ignore[return-value]


def return_heads(x: Tensor, group: Any) -> Tensor:
    """The inverse, of O: [batch, heads, rows, dim] of [ranks, batch, heads / ranks, rows, dim]."""
    return AllToAll.apply(x, group).movedim(0, 1).flatten(1, 2)


def ring_of_heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job, inner: Any
) -> tuple[Tensor, Tensor]:
    """Two levels: the ranks of `inner` share the heads of their rows, which are neighbours, and the ranks of job.group form a ring."""
    heads = Part(job._replace(group=inner), 0, 1)
    shared = [x.movedim(0, 2).flatten(2, 3) for x in share_heads(q, k, v, inner)]
    own_sinks = None if sinks is None else heads.mine(sinks)
    out, lse = Ring.apply(*shared, own_sinks, job._replace(rule=heads.rule(shared[0].shape[1])))
    out, lse = (
        return_heads(x.unflatten(2, (heads.job.ranks, -1)).movedim(2, 0), inner)
        for x in (out, lse[..., None])
    )
    return out, lse[..., 0]

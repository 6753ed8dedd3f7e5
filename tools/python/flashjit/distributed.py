"""Attention over sequences that several processes share: ring, all_gather and ulysses, on PyTorch's process groups.

Each rank has a shard of the sequence, [batch, heads, rows, head_dim], of Q, K and V; shard() says which rows. O and the
gradients come back as shards. A mask, a window or a program means what it means on the whole sequence.
"""
from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Sequence, Union

import torch
import torch.distributed as dist
from torch import Tensor

from ._attention import attention
from ._plans import NO_RNG, plan_of, readable
from ._problem import read_problem
from .errors import InvalidArgument, Unsupported

LAYOUTS = ("contiguous", "zigzag", "striped")
SCHEMES = ("ring", "all_gather", "ulysses")


class Chunk(NamedTuple):
    """Rows of a shard that are neighbours in the sequence, or `step` apart: row i is at position first + step * i."""

    begin: int
    end: int
    first: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.first + self.step * (self.end - self.begin - 1)


def chunks(rank: int, ranks: int, rows: int, layout: str) -> tuple[Chunk, ...]:
    """What a rank has of a sequence: `rows` rows. contiguous: rows rank * rows and on. zigzag: of twice as many blocks as
    ranks, block `rank` and the one as far from the end, so that a causal mask leaves all ranks the same work. striped: each
    ranks-th row, from `rank` on."""
    if layout == "contiguous":
        return (Chunk(0, rows, rank * rows),)
    if layout == "striped":
        return (Chunk(0, rows, rank, ranks),)
    half = rows // 2
    return Chunk(0, half, rank * half), Chunk(half, rows, (2 * ranks - 1 - rank) * half)


def positions(rank: int, ranks: int, rows: int, layout: str = "zigzag") -> Tensor:
    """The position in the whole sequence of each row of a rank's shard, int64 [rows]: for rotary embeddings and losses."""
    _check_layout(layout, ranks, rows * ranks)
    return torch.cat([c.first + c.step * torch.arange(c.end - c.begin) for c in chunks(rank, ranks, rows, layout)])


def shard(x: Tensor, dim: int = 2, *, layout: str = "zigzag", group: Any = None) -> Tensor:
    """This rank's rows of a whole tensor, along `dim`, whose size must divide into the ranks; zigzag: into twice as many."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _check_layout(layout, ranks, x.shape[dim])
    return x.index_select(dim, positions(rank, ranks, x.shape[dim] // ranks, layout).to(x.device))


def unshard(x: Tensor, dim: int = 2, *, layout: str = "zigzag", group: Any = None) -> Tensor:
    """The whole tensor, from all ranks' shards. No gradients."""
    ranks = dist.get_world_size(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    order = torch.cat([positions(rank, ranks, x.shape[dim], layout) for rank in range(ranks)])
    return torch.cat(parts, dim).index_select(dim, order.argsort().to(x.device))


def distributed_attention(q: Tensor, k: Tensor, v: Tensor, *, scheme: str = "ring", layout: str = "zigzag",
                          causal: bool = False, window: Union[int, None] = None, scale: Union[float, None] = None,
                          score_mod: Any = None, mask_mod: Any = None, return_lse: bool = False, group: Any = None) -> Any:
    """attention() of a sequence that the ranks of `group` share, with gradients.

    q: [batch, heads_q, rows, head_dim], k and v: [batch, heads_kv, rows, ...]: this rank's shard, as shard() makes it with
        the same layout; every rank has as many rows.
    scheme: "ring": K and V go round, a step's kernels run while the next block travels, and O and LSE are joined in float32;
        blocks of which nothing is visible are passed on uncomputed. "all_gather": every rank gathers K and V once.
        "ulysses": an all-to-all gives each rank all rows of its share of the heads: heads_q must divide into the ranks.
    causal: a query sees the keys at its own position and before. window: and no more than so many of them.
    score_mod, mask_mod: functions as attention() takes them; q_idx and kv_idx are positions in the whole sequence.
    return_lse: also LSE, float32 [batch, heads_q, rows], which has gradients too.

    Raises flashjit.InvalidArgument on every rank where ranks disagree on sizes, types or arguments.
    """
    if scheme not in SCHEMES:
        raise InvalidArgument(f"scheme is {scheme!r}: give one of {', '.join(SCHEMES)}.")
    if window is not None and (not causal or window < 1):
        raise InvalidArgument(f"window is {window} and causal is {causal}: a window is of 1 key or more, with causal=True.")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _check_agreement(q, k, v, (scheme, layout, causal, window, scale, score_mod is None, mask_mod is None, return_lse), group)
    _check_layout(layout, ranks, q.shape[2] * ranks)
    rule = _Rule(causal, window, scale, score_mod, mask_mod)
    if scheme == "ulysses":
        return _ulysses(q, k, v, rule, layout, return_lse, group)
    run = _Ring if scheme == "ring" else _AllGather
    out, lse = run.apply(q, k, v, _Job(rule, layout, rank, ranks, group))
    return (out, lse) if return_lse else out


class _Rule(NamedTuple):
    """What attends to what, by positions in the whole sequence."""

    causal: bool
    window: Union[int, None]
    scale: Union[float, None]
    score_mod: Any
    mask_mod: Any

    def arguments(self, q: Chunk, kv: Chunk) -> Union[dict[str, Any], None]:
        """What attention() of one chunk and another is given; None: no pair attends."""
        given: dict[str, Any] = {"scale": self.scale}
        shift = lambda index, chunk: index * chunk.step + chunk.first if chunk.step > 1 else index + chunk.first
        if self.score_mod is not None:
            given["score_mod"] = lambda s, b, h, i, j: self.score_mod(s, b, h, shift(i, q), shift(j, kv))
        tests: list[Callable[..., Any]] = []
        if self.mask_mod is not None:
            tests.append(lambda b, h, i, j: self.mask_mod(b, h, i, j))
        if self.causal:
            if kv.first > q.last or (self.window is not None and q.first - kv.last >= self.window):
                return None
            if self.window is not None and q.last - kv.first >= self.window:
                window = self.window
                tests.append(lambda b, h, i, j: i - j < window)
            if kv.last > q.first:
                if not tests and q == kv:
                    given["causal"] = True
                else:
                    tests.append(lambda b, h, i, j: i >= j)
        if tests:
            def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
                i, j = shift(i, q), shift(j, kv)
                result = tests[0](b, h, i, j)
                for test in tests[1:]:
                    result = result & test(b, h, i, j)
                return result
            given["mask_mod"] = mask
        return given


class _Job(NamedTuple):
    rule: _Rule
    layout: str
    rank: int
    ranks: int
    group: Any

    def chunks(self, rank: int, rows: int) -> tuple[Chunk, ...]:
        return chunks(rank, self.ranks, rows, self.layout)

    def pieces(self, owner: int, rows: int) -> list[tuple[Chunk, Chunk, dict[str, Any]]]:
        """The calls of attention() that this rank's queries and the keys of `owner` make."""
        mine, theirs = self.chunks(self.rank, rows), self.chunks(owner, rows)
        simple = self.rule.causal and self.rule.window is None and self.rule.score_mod is self.rule.mask_mod is None
        if owner == self.rank and simple:  # positions ascend within a shard
            whole = Chunk(0, rows, 0)
            return [(whole, whole, {"scale": self.rule.scale, "causal": True})]
        found = [(a, b, given) for a in mine for b in theirs if (given := self.rule.arguments(a, b)) is not None]
        if not (simple and len(mine) == 2 and len(found) == 2):
            return found
        # zigzag: both queries' chunks see one of the keys', or one sees both: one call.
        (a, b, given), (c, d, _) = found
        return [(Chunk(min(a.begin, c.begin), max(a.end, c.end), 0), Chunk(min(b.begin, d.begin), max(b.end, d.end), 0), given)]


def _cut(x: Tensor, chunk: Chunk) -> Tensor:
    return x if chunk.end - chunk.begin == x.shape[2] else x[:, :, chunk.begin:chunk.end]


class _State:
    """O and LSE of the keys so far, in float32."""

    def __init__(self, q: Tensor, dim_v: int) -> None:
        self.out = torch.zeros((*q.shape[:3], dim_v), dtype=torch.float32, device=q.device)
        self.lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)

    def add(self, rows: Chunk, out: Tensor, lse: Tensor) -> None:
        """Joins what disjoint keys gave: LSE = log(exp(LSE) + exp(LSE_i)), O = sum of exp(LSE_i - LSE) O_i."""
        mine, before = _cut(self.out, rows), self.lse[:, :, rows.begin:rows.end]
        joined = torch.logaddexp(before, lse)
        weight = lambda part: torch.where(joined == -math.inf, 0.0, (part - joined).exp())[..., None]
        mine.copy_(mine * weight(before) + out.float() * weight(lse))
        before.copy_(joined)


def _compute(state: _State, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[tuple[Chunk, Chunk, dict[str, Any]]]) -> None:
    for rows, keys, given in pieces:
        out, lse = attention(_cut(q, rows), _cut(k, keys), _cut(v, keys), return_lse=True, **given)
        state.add(rows, out, lse)


def _gradients(grads: Sequence[Tensor], tensors: Sequence[Tensor], dout: Tensor, dlse: Union[Tensor, None],
               pieces: Sequence[tuple[Chunk, Chunk, dict[str, Any]]]) -> None:
    """Adds a block's dQ, dK and dV to float32 sums. With O and LSE of all keys, P and D are those of the whole softmax."""
    dq, dk, dv = grads
    q, k, v, out, lse = tensors
    for rows, keys, given in pieces:
        parts = readable(_cut(q, rows), "q"), readable(_cut(k, keys), "k"), readable(_cut(v, keys), "v")
        fixed, values, problem = read_problem(given.get("causal", False), given["scale"], 0.0, given.get("score_mod"),
                                              given.get("mask_mod"), None, None, None, None, None, None, None, None, False, False)
        plan = plan_of(*parts, fixed, values, problem)
        like_out = lambda x: torch.empty_strided(plan.out_size, plan.out_stride, dtype=q.dtype, device=q.device).copy_(x)
        cut_lse = lambda x: x[:, :, rows.begin:rows.end].contiguous()
        found, _, _ = plan.backward(like_out(_cut(dout, rows)), None if dlse is None else cut_lse(dlse), *parts,
                                    like_out(_cut(out, rows)), cut_lse(lse), fixed, values, NO_RNG)
        for total, part, chunk in zip((dq, dk, dv), found, (rows, keys, keys)):
            _cut(total, chunk).add_(part)


class _Travel:
    """Tensors on their way to the next rank, while the previous one's come in."""

    def __init__(self, tensors: Sequence[Tensor], job: _Job) -> None:
        self.arriving = [torch.empty_like(x) for x in tensors]
        place = lambda step: dist.get_global_rank(job.group or dist.group.WORLD, (job.rank + step) % job.ranks)
        operations = [dist.P2POp(dist.isend, x, place(1), job.group) for x in tensors]
        operations += [dist.P2POp(dist.irecv, x, place(-1), job.group) for x in self.arriving]
        self.sent, self.work = tensors, dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self.work:
            work.wait()
        return self.arriving


def _results(ctx: Any, state: _State, q: Tensor, k: Tensor, v: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
    """O, rounded, and LSE, which the backward pass finds in ctx."""
    out = state.out.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, state.lse)
    ctx.job = job
    ctx.set_materialize_grads(False)
    return out, state.lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        state = _State(q, v.shape[3])
        block = [k.contiguous(), v.contiguous()]
        for step in range(job.ranks):
            travel = _Travel(block, job) if step + 1 < job.ranks else None
            _compute(state, q, *block, job.pieces((job.rank - step) % job.ranks, q.shape[2]))
            block = travel.wait() if travel else block
        return _results(ctx, state, q, k, v, job)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Union[Tensor, None], dlse: Union[Tensor, None]) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        job: _Job = ctx.job
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        block = [k.contiguous(), v.contiguous()]
        for step in range(job.ranks):
            travel = _Travel(block, job) if step + 1 < job.ranks else None
            _gradients((dq, dk, dv), (q, *block, out, lse), dout, dlse, job.pieces((job.rank - step) % job.ranks, q.shape[2]))
            if job.ranks > 1:  # the sums follow their block, and are home after as many steps as there are ranks
                dk, dv = _Travel([dk, dv], job).wait()
            block = travel.wait() if travel else block
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        state = _State(q, v.shape[3])
        for owner, block in enumerate(zip(_gathered(k, job), _gathered(v, job))):
            _compute(state, q, *block, job.pieces(owner, q.shape[2]))
        return _results(ctx, state, q, k, v, job)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Union[Tensor, None], dlse: Union[Tensor, None]) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        job: _Job = ctx.job
        dout = torch.zeros_like(out) if dout is None else dout
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = (torch.zeros((job.ranks, *x.shape), dtype=torch.float32, device=x.device) for x in (k, v))
        for owner, block in enumerate(zip(_gathered(k, job), _gathered(v, job))):
            _gradients((dq, dk[owner], dv[owner]), (q, *block, out, lse), dout, dlse, job.pieces(owner, q.shape[2]))
        for total in (dk, dv):
            dist.all_reduce(total, group=job.group)
        return dq.to(q.dtype), dk[job.rank].to(k.dtype), dv[job.rank].to(v.dtype), None


def _gathered(x: Tensor, job: _Job) -> list[Tensor]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(job.ranks)]
    dist.all_gather(parts, x.contiguous(), group=job.group)
    return parts


class _AllToAll(torch.autograd.Function):
    """[ranks, ...]: part i goes to rank i; part i of the result is from rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None


def _ulysses(q: Tensor, k: Tensor, v: Tensor, rule: _Rule, layout: str, return_lse: bool, group: Any) -> Any:
    ranks = dist.get_world_size(group)
    heads, heads_kv = q.shape[1], k.shape[1]
    if heads % ranks:
        raise InvalidArgument(f"q has {heads} heads for {ranks} ranks: ulysses gives each rank as many; use ring or all_gather.")
    if heads_kv % ranks:
        if ranks % heads_kv:
            raise InvalidArgument(f"k has {heads_kv} heads for {ranks} ranks: one must divide the other for ulysses; use ring "
                                  "or all_gather.")
        k, v = (x.repeat_interleave(ranks // heads_kv, 1) for x in (k, v))  # each rank's queries have one head of K
    if rule.score_mod is not None or rule.mask_mod is not None:
        raise Unsupported("ulysses takes no score_mod and mask_mod yet, which may read h, another head on each rank: use ring "
                          "or all_gather.")
    order = torch.cat([positions(rank, ranks, q.shape[2], layout) for rank in range(ranks)]).argsort().to(q.device)

    def to_heads(x: Tensor) -> Tensor:  # [b, h, rows, d] -> [b, h / ranks, all rows, d], by position
        parts = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
        return torch.cat(_AllToAll.apply(parts, group).unbind(0), 2).index_select(2, order)

    def to_rows(x: Tensor) -> Tensor:  # and back
        parts = torch.stack(x.index_select(2, order.argsort()).chunk(ranks, 2))
        return torch.cat(_AllToAll.apply(parts, group).unbind(0), 1)
    whole = Chunk(0, q.shape[2] * ranks, 0)
    out, lse = attention(*map(to_heads, (q, k, v)), return_lse=True, **rule.arguments(whole, whole))
    return (to_rows(out), to_rows(lse[..., None])[..., 0]) if return_lse else to_rows(out)


def _check_layout(layout: str, ranks: int, rows: int) -> None:
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout is {layout!r}: give one of {', '.join(LAYOUTS)}.")
    parts = 2 * ranks if layout == "zigzag" else ranks
    if rows % parts:
        raise InvalidArgument(f"the sequence has {rows} rows, which do not divide into {parts} for {ranks} ranks and the layout "
                              f"{layout!r}: pad it to {-(-rows // parts) * parts}.")


_agreed: set[Any] = set()


def _check_agreement(q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...], group: Any) -> None:
    """Once for each kind of call: all ranks tell each other what they were given, so that none waits for another for ever."""
    mine = tuple((tuple(x.shape), str(x.dtype)) for x in (q, k, v)) + arguments
    key = (group, mine)
    if key in _agreed:
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise InvalidArgument(f"rank {rank} was given {other}, but rank 0 {everyone[0]} (sizes and types of q, k and v; "
                                  "scheme, layout, causal, window, scale, no score_mod, no mask_mod, return_lse): give all ranks "
                                  "the same.")
    _agreed.add(key)

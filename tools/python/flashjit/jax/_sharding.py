"""How XLA divides a call among devices: by batch and by heads, where what is computed does not depend on which they are.

Lengths and head_dim are on each device as a whole. A program that reads b or h other than as an index of captures that are
divided likewise, dropout, arrays of 8 bits, packed sequences, and a batch that vmap made, keep the batch or the heads together, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._problem import TANGENT, Derivative, Problem, operand_names, result_names

KEEP_CALLS = 1024


def requires_devices(primitive: Any) -> None:
    """Tells JAX that the primitive's lowering looks at the devices, as it does for the calls that JAX itself partitions."""
    try:
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)
    except (ImportError, AttributeError):  # then _divided() is false
        pass


@functools.cache
def _divided() -> bool:
    try:
        from jax._src import dispatch

        return hasattr(dispatch, "prim_requires_devices_during_lowering")
    except ImportError:
        return False


@functools.lru_cache(KEEP_CALLS)
def partitioned(shard: Any, problem: Problem, derivative: Derivative) -> Callable[..., Any]:
    """The call of one device's arrays, made one of arrays that XLA divides."""

    def call(*arrays: Any) -> Any:
        return shard.bind(*arrays, problem=problem, derivative=derivative)

    if not _divided():
        return call
    rule = _Rule(problem, derivative)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        axes = rule.axes(mesh, arguments)
        on_device = functools.partial(rule.on_device, call, axes)
        operands, made = (
            rule.shardings(mesh, names, axes) for names in (rule.operand_names, rule.result_names)
        )
        return mesh, on_device, made, tuple(operands)

    def infer(mesh: Any, arguments: Any, results: Any) -> Any:
        return rule.shardings(mesh, rule.result_names, rule.axes(mesh, arguments))

    whole = custom_partitioning(call)
    whole.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=lambda mesh, operands, results: rule.of_shardy([x.shape for x in operands]),
    )
    return whole


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The mesh axes by which a call is divided. kv_heads: the axes of heads, or none where K has one head for all."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()


class _Rule:
    """What each dimension is: "batch", "heads", "kv_heads", or another name, by which nothing is divided."""

    def __init__(self, problem: Problem, derivative: Derivative) -> None:
        self.problem = problem
        self.operand_names = operand_names(problem, derivative)
        self.result_names = result_names(problem, derivative)
        alike = "rng" not in problem.fixed and not problem.codes
        in_order = problem.pages is not None and "page_table" not in problem.fixed  # entry b has slot b
        packed = problem.longest is not None
        self.by_batch = alike and not problem.reads_batch() and not in_order and not packed
        self.by_heads = alike and not problem.reads_heads()
        self.heads = 2 if problem.layout == "BTNH" else 1

    def kinds(self, name: str) -> tuple[str, ...]:
        plain = name if name in self.operand_names else name.removeprefix("d")
        plain = plain.removesuffix(TANGENT)
        if plain in ("kv_lengths", "sinks", "rng"):
            return ({"kv_lengths": "batch", "sinks": "heads", "rng": "state"}[plain],)
        if plain.startswith("cu_seqlens"):
            return (plain,)
        if plain.endswith("_scale"):
            return tuple(f"{plain}_{d}" for d in range(4))
        if plain == "page_table":
            return ("batch", "columns")[: 2 if self.problem.pages else 1]
        if plain in ("q", "out", "lse", "before_mod", "dout", "dlse"):
            out = "out_row" if self.problem.out_format else "dim_v"
            lasts = {"q": "dim", "lse": "one", "dlse": "one", "out": out}
            rows, last = ("heads", "queries"), lasts.get(plain, "dim_v")
        elif plain in ("k", "v"):
            in_format = self.problem.dim_v is not None  # then the last dimension is a row's bytes
            last = f"{plain}_row" if in_format else "dim" if plain == "k" else "dim_v"
            rows = ("kv_heads", "keys")
        else:
            capture = self.problem.program.captures[int(plain.removeprefix("c"))]
            along = {"h": "heads", "h_kv": "kv_heads"}
            if not self.problem.longest:
                along["b"] = "batch"
            own = (*[""] * len(capture.folds), *capture.along)
            return tuple(along.get(mark, f"{plain}_{d}") for d, mark in enumerate(own))
        first = "pages" if plain in ("k", "v") and self.problem.pages is not None else "batch"
        return (first, *(rows if self.heads == 1 else reversed(rows)), last)

    def axes(self, mesh: Any, arguments: Sequence[Any]) -> _Axes:
        """The axes of Q, as far as the call can be divided by them."""
        q, k = arguments[0], arguments[1]
        spec = [_names(entry) for entry in (*q.sharding.spec, *[None] * 4)]
        heads = spec[self.heads] if self.by_heads else ()
        parts = math.prod(mesh.shape[axis] for axis in heads)
        if k.shape[self.heads] > 1 and k.shape[self.heads] % parts:
            heads = ()
        return _Axes(spec[0] if self.by_batch else (), heads, heads if k.shape[self.heads] > 1 else ())

    def shardings(self, mesh: Any, names: Sequence[str], axes: _Axes) -> list[NamedSharding]:
        by = dataclasses.asdict(axes)
        return [
            NamedSharding(mesh, PartitionSpec(*[by.get(kind) or None for kind in self.kinds(name)]))
            for name in names
        ]

    def on_device(self, call: Callable[..., Any], axes: _Axes, *arrays: Any) -> Any:
        """The call of one device's part. Gradients of what several devices have are added up."""
        summed = []
        for name, result in zip(self.result_names, call(*arrays)):
            kinds = self.kinds(name)
            own = axes.heads if "heads" in kinds else axes.kv_heads if "kv_heads" in kinds else ()
            others = (*(() if "batch" in kinds else axes.batch), *[a for a in axes.heads if a not in own])
            summed.append(jax.lax.psum(result, others) if others else result)
        return summed

    def of_shardy(self, operands: Sequence[Sequence[int]]) -> tuple[str, dict[str, Any]]:
        """The same for Shardy, as an equation of factors and their properties."""
        q, k = operands[0][self.heads], operands[1][self.heads]
        of_q = "heads" if k in (1, q) else "(heads group)"
        of_k = "kv_head" if k == 1 else "heads"
        written = {"heads": of_q, "kv_heads": of_k}
        texts = [
            ", ".join(" ".join(written.get(kind, kind) for kind in self.kinds(name)) for name in names)
            for names in (self.operand_names, self.result_names)
        ]
        factors = dict.fromkeys(re.findall(r"\w+", " ".join(texts)))  # in the order that Shardy wants
        divided = {name for name, on in (("batch", self.by_batch), ("heads", self.by_heads)) if on}
        sizes = {"group": q // k} if "group" in factors else {}
        return " -> ".join(texts), {
            "need_replication_factors": tuple(f for f in factors if f not in divided),
            **sizes,
        }


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of a PartitionSpec's entry."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)

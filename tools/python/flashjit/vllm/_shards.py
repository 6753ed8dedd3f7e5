"""Decode context parallelism: each rank's cache has a part of the keys, which the heads of Q of all ranks attend to."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import parallel_state

from .._engines import Batch, Layer
from .._merge import merge
from ..errors import Unsupported
from ..flash_attn._attend import with_batch


def ranks(kv_cache_spec: Any = None) -> tuple[int, int]:
    """How many ranks share the keys of a cache, and this one's number."""
    try:
        if hasattr(parallel_state, "get_dcp_world_size_and_rank"):
            return parallel_state.get_dcp_world_size_and_rank(getattr(kv_cache_spec, "dcp_sharded", True))  # type: ignore[no-any-return]
        group = parallel_state.get_dcp_group()
    except AssertionError:  # vLLM has made no groups
        return 1, 0
    return group.world_size, group.rank_in_group


class Shard:
    """A rank's part of the keys: `interleave` of them in turn."""

    def __init__(self, world: int, rank: int, interleave: int, most_sequences: int, device: Any) -> None:
        self.world, self.rank, self.interleave = world, rank, interleave
        self._lengths = torch.zeros(most_sequences, dtype=torch.int32, device=device)  # which graphs read

    def of(self, batch: Batch) -> Batch:
        """The keys before a step's own that are here. All queries see them."""
        old = batch.lengths - batch.cu_seqlens.diff()
        rounds = old // (self.world * self.interleave)
        rest = old - rounds * self.world * self.interleave - self.rank * self.interleave
        lengths = self._lengths[: old.shape[0]]
        lengths.copy_(rounds * self.interleave + rest.clamp(0, self.interleave))
        most = -(-batch.most_kv // (self.world * self.interleave)) * self.interleave
        return batch._replace(lengths=lengths, most_kv=most, causal=False)


def refuse(window: Any, slopes: Any, heads_kv: int) -> None:
    """Layers whose masks and scores depend on where a key is, when the model is loaded."""
    for name, given in (("sliding_window", window), ("alibi_slopes", slopes)):
        if given is not None:
            raise Unsupported(
                f"{name} is given with decode context parallelism, where a key's place in the cache is not its place in the "
                "sequence: choose another backend, or decode_context_parallel_size 1."
            )
    if heads_kv != 1:
        raise Unsupported(
            f"a rank has {heads_kv} heads of K and V: decode context parallelism is for one, so choose a "
            "tensor_parallel_size of at least the model's."
        )


def _combine(config: Any) -> Any:
    """vLLM's function that joins the ranks' parts and gives each its heads."""
    by_all_to_all = getattr(getattr(config, "parallel_config", None), "dcp_comm_backend", "") == "a2a"
    name = "dcp_a2a_lse_reduce" if by_all_to_all else "cp_lse_ag_out_rs"
    for module in ("dcp", "dcp_alltoall", "common"):  # vLLM 0.26 has no `dcp`
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(f"vllm.v1.attention.ops.{module}"), name)
    raise Unsupported(f"this vLLM has no {name}: choose another dcp_comm_backend.")


class Across:
    """A layer's attention over all ranks' keys."""

    def __init__(self) -> None:
        from vllm.config import get_current_vllm_config_or_none

        self._combine = _combine(get_current_vllm_config_or_none())

    def attend(
        self,
        over_cache: Any,
        described: Layer,
        own: tuple[Tensor, Tensor, Tensor],
        batch: Batch,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """over_cache: O and LSE [heads, rows] of Q [rows, heads, d] over this rank's earlier keys. own: Q, K and V of the step."""
        group, (q, k, v) = parallel_state.get_dcp_group(), own
        of_all, lse = over_cache(group.all_gather(q.contiguous(), dim=1))
        before, of_before = self._combine(of_all, lse.transpose(0, 1), group, return_lse=True)
        after, of_after = described.attend(
            q, k, v, batch._replace(table=None, most_kv=batch.most_q), wants_lse=True, sinks=sinks
        )
        assert of_after is not None
        states = [(with_batch(before), of_before.transpose(0, 1)[None]), (with_batch(after), of_after[None])]
        merge(states, out=with_batch(out))

"""SGLang's draft models: the steps of a draft, each one a decoding of its branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._backend import FlashjitBackend


class FlashjitDraftBackend:
    """A backend for each step of a draft but the last, which does not attend."""

    needs_cpu_seq_lens = False
    forward_metadata = None

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends = [
            _Step(model_runner, step, topk, speculative_num_steps)
            for step in range(speculative_num_steps - 1)
        ]
        self.attn_backend_list = self.attn_backends

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for step in self.attn_backends:
            step.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for step in self.attn_backends:
            step.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        for step in self.attn_backends:
            step.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for step in self.attn_backends:
            step.init_forward_metadata_in_graph(forward_batch)


class _Step(FlashjitBackend):
    """Each branch of a request is a sequence: the request's keys, then the branch's own of this step and of those before."""

    def __init__(self, model_runner: Any, step: int, topk: int, steps: int) -> None:
        super().__init__(model_runner)
        self.branches, self._own, self._steps = topk, step + 1, steps

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs * self.branches, max_num_tokens)

    def _new_keys(self, forward_batch: Any) -> int:
        return self._own

    def _shape(self, forward_batch: Any) -> tuple[Tensor, int, Tensor | None]:
        return (forward_batch.seq_lens + self._own).repeat_interleave(self.branches), 1, None

    def _tokens(self, forward_batch: Any, longest: int) -> Tensor:
        """SGLang's table has the keys of a chain, and of several branches those before. out_cache_loc: [requests, branches, steps]."""
        tokens = super()._tokens(forward_batch, longest)
        if self.branches == 1:
            return tokens
        tokens = tokens.repeat_interleave(self.branches, 0)
        own = forward_batch.out_cache_loc.view(-1, self._steps)[:, : self._own]
        at = forward_batch.seq_lens.long()[:, None] + torch.arange(self._own, device=tokens.device)
        pages = (at // self.page_size).clamp(max=tokens.shape[1] - 1).repeat_interleave(self.branches, 0)
        return tokens.scatter(1, pages, own.to(tokens.dtype))

#!/usr/bin/env python3
"""Drafts by SGLang's model runner on flashjit, beside transformers' of the same tokens: a tiny model of random weights.

    tools/bench/sglang_drafts.py [--models llama] [--topk 2] [--steps 4] [--page 1] [--device cuda]

SGLang's own factory makes the backends of a draft model. Its runner, pools and layers extend prompts, decode the steps of a draft,
each with `topk` branches of given tokens, verify all branches as one tree, and extend by a chain of tokens, as after a verification.
Prints the largest difference of a log probability. Needs what sglang_tokens.py needs.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from typing import Any

from sglang_tokens import imported, loaded, prompts
from vllm_tokens import VOCABULARY, make

FAR = 1e-4  # no two log probabilities are further apart


class Runner:
    """SGLang's, with prompts in its pool."""

    def __init__(self, folder: str, engine: Any, args: argparse.Namespace) -> None:
        import torch

        runner = loaded(folder, "flashjit", engine, args)
        self.torch, self.runner = torch, runner.torch_runner
        self.runner.draft_attention_backend = "flashjit"
        ids = prompts()
        requests = engine.prepare_synthetic_inputs_for_latency_test(len(ids), 0, custom_inputs=ids)
        _, _, self.batch = runner.extend(requests)
        self.on_host = torch.tensor([len(x) for x in ids])
        self.seq_lens = self.on_host.to(args.device)

    def factory(self, topk: int, steps: int) -> Any:
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        return DraftBackendFactory(self.runner, topk, steps)

    def branches(self, count: int) -> Any:
        """New slots of a pool with pages of one row, [requests, count]."""
        return self.runner.token_to_kv_pool_allocator.alloc(len(self.seq_lens) * count).view(-1, count).long()

    def chain(self, count: int) -> Any:
        """Slots behind each request's keys, [requests, count], which its table names: in its last page, then in a new one."""
        page, table = self.runner.page_size, self.runner.req_to_token_pool.req_to_token
        found = []
        for request, n in zip(self.batch.req_pool_indices, self.seq_lens.tolist()):
            room = -n % page
            new = self.runner.token_to_kv_pool_allocator.alloc(-(-count // page) * page)
            last = table[request, n - 1] + 1 + self.torch.arange(room, device=table.device)
            found.append(self.torch.cat((last, new))[:count])
            table[request, n : n + count] = found[-1].int()
        return self.torch.stack(found).long()

    def forward(self, mode: str, backend: Any, tokens: Any, positions: Any, places: Any, **more: Any) -> Any:
        """Log probabilities, [rows, vocabulary]. Metadata are made before."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        batch = self.described(mode, tokens, positions, places, **more)
        with self.torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            found = self.runner.model.forward(batch.input_ids, batch.positions, batch)
        return found.next_token_logits.float().log_softmax(-1).cpu()

    def described(self, mode: str, tokens: Any, positions: Any, places: Any, **more: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        of_draft = more.pop("spec_info", None) or EagleDraftInput()
        on_host = more.pop("on_host", self.on_host)
        seq_lens = on_host.to(self.seq_lens.device)
        return ForwardBatch(
            forward_mode=getattr(ForwardMode, mode),
            batch_size=len(seq_lens),
            input_ids=tokens.flatten().to(seq_lens.device),
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=seq_lens,
            seq_lens_cpu=on_host,
            seq_lens_sum=int(on_host.sum()),
            out_cache_loc=places.flatten(),
            positions=positions.flatten(),
            return_logprob=False,
            spec_algorithm=self.runner.spec_algorithm,
            spec_info=of_draft,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **more,
        )


def drafted(on: Runner, tokens: Any) -> Any:
    """Log probabilities of a draft's steps, [requests, branches, steps, vocabulary]. tokens: [requests, branches, steps]."""
    count, topk, steps = tokens.shape
    backends = on.factory(topk, steps + 1).create_decode_backend()
    places = on.chain(steps + 1) if topk == 1 else on.branches(topk * (steps + 1))
    places = places.view(count, topk, steps + 1)
    positions = on.seq_lens[:, None].expand(-1, topk)
    backends.init_forward_metadata(on.described("DECODE", tokens[..., 0], positions, places))
    found = [
        on.forward("DECODE", backend, tokens[..., i], positions + i, places[..., i])
        for i, backend in enumerate(backends.attn_backends)
    ]
    return on.torch.stack(found, 1).view(count, topk, steps, -1)


def extended(on: Runner, tokens: Any) -> Any:
    """Log probabilities of a draft's extension, [requests, steps, vocabulary]. tokens: [requests, steps]."""
    count, steps = tokens.shape
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    backend = on.factory(1, 2).create_draft_extend_backend()
    places = on.chain(steps)
    widths = on.torch.full((count,), steps, dtype=on.torch.int32, device=on.seq_lens.device)
    more = {
        "on_host": on.on_host + steps,
        "spec_info": EagleDraftExtendInput(num_tokens_per_req=steps),
        "extend_seq_lens": widths,
        "extend_seq_lens_cpu": widths.tolist(),
    }
    more |= {"extend_prefix_lens": on.seq_lens.int(), "extend_prefix_lens_cpu": on.on_host.tolist()}
    positions = on.seq_lens[:, None] + on.torch.arange(steps, device=on.seq_lens.device)
    backend.init_forward_metadata(on.described("DRAFT_EXTEND_V2", tokens, positions, places, **more))
    return on.forward("DRAFT_EXTEND_V2", backend, tokens, positions, places, **more).view(count, steps, -1)


def verified(on: Runner, roots: Any, tokens: Any) -> Any:
    """Log probabilities of a tree's verification by the target's backend, [requests, branches, 1 + steps, vocabulary], the root's with
    each branch. roots: [requests]. tokens: [requests, branches, steps]."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    torch, (count, topk, steps), device = on.torch, tokens.shape, on.seq_lens.device
    nodes = 1 + topk * steps
    branch, step = torch.arange(nodes - 1) // steps, torch.arange(nodes - 1) % steps
    seen = torch.eye(nodes, dtype=torch.bool)
    seen[:, 0] = True
    seen[1:, 1:] = (branch[:, None] == branch) & (step[:, None] >= step)
    masks = [
        torch.cat((torch.ones(nodes, n, dtype=torch.bool), seen), 1).flatten() for n in on.on_host.tolist()
    ]
    depth = torch.cat((torch.zeros(1, dtype=torch.long), step + 1)).to(device)
    given, places = torch.cat((roots[:, None], tokens.flatten(1)), 1), on.chain(nodes)
    positions = on.seq_lens[:, None] + depth
    spec = EagleVerifyInput(
        draft_token=given.flatten().to(device),
        custom_mask=torch.cat(masks).to(device),
        positions=positions.flatten(),
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=steps,
        topk=topk,
        draft_token_num=nodes,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=int(on.on_host.sum()),
        seq_lens_cpu=on.on_host,
    )
    backend = on.runner.attn_backend
    backend.init_forward_metadata(on.described("TARGET_VERIFY", given, positions, places, spec_info=spec))
    found = on.forward("TARGET_VERIFY", backend, given, positions, places, spec_info=spec)
    found = found.view(count, nodes, -1)
    root = found[:, None, :1].expand(-1, topk, -1, -1)
    return torch.cat((root, found[:, 1:].view(count, topk, steps, -1)), 2)


def exact(folder: str, branches: Any) -> Any:
    """transformers' log probabilities behind each token of branches [requests, branches, steps]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for prompt, of_request in zip(prompts(), branches):
            rows = [torch.cat((torch.tensor(prompt), branch))[None] for branch in of_request]
            steps = branches.shape[2]
            found.append(torch.stack([model(x).logits[0, -steps:].log_softmax(-1) for x in rows]))
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["llama"])
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--page", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(dtype="float32", graphs=False, own="torch_native")
    args = parser.parse_args()
    if args.topk > 1 and args.page > 1:
        parser.error(
            "SGLang has pages of one row where a draft has several branches: give --page 1 or --topk 1"
        )
    engine = imported(args.device)
    import torch

    errors = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder) / "model"
            make(name, made)
            on = Runner(str(made), engine, args)
            size = (len(prompts()), args.topk, args.steps)
            tokens = torch.randint(3, VOCABULARY, size, generator=torch.Generator().manual_seed(0))
            wanted = exact(str(made), tokens)
            of_steps = (drafted(on, tokens) - wanted).abs().max()
            of_extension = (extended(on, tokens[:, 0]) - wanted[:, 0]).abs().max()
            roots = torch.full((len(prompts()),), 7)
            with_roots = torch.cat((roots[:, None, None].expand(-1, args.topk, 1), tokens), 2)
            of_tree = (verified(on, roots, tokens) - exact(str(made), with_roots)).abs().max()
            errors += [of_steps, of_extension, of_tree]
            print(
                f"{name}: {args.steps} steps of {args.topk} branches within {of_steps:.1e}, extensions by {args.steps} tokens "
                f"within {of_extension:.1e}, verification of the tree within {of_tree:.1e}",
                flush=True,
            )
    if not max(errors) < FAR:
        sys.exit(f"a log probability differs by {max(errors):.1e}: float32 is exact to {FAR}")


if __name__ == "__main__":
    main()

"""What serve.py compares with: PyTorch's attention over a padded static cache, a batch after the other."""

import torch
import torch.nn.functional as F
from serve_steps import Clock, Graph


class Padded:
    """Batches of as many sequences, each padded to its longest prompt, that end when their last sequence does."""

    def __init__(self, model, options, length):
        weight = model.head.weight
        self.model, self.device, self.slots = model, weight.device, options.slots
        heads, dim = model.blocks[0].heads, model.tokens.weight.shape[1] // model.blocks[0].heads
        size = (len(model.blocks), 2, self.slots, heads, length, dim)
        self.cache = torch.zeros(size, dtype=weight.dtype, device=self.device)
        self.lengths = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        self.keys = torch.arange(length, device=self.device)
        self.batch = torch.arange(self.slots, device=self.device)
        for layer, block in enumerate(model.blocks):
            block.attention = lambda q, k, v, layer=layer: self.attend(layer, q, k, v)
        self.prefill(torch.zeros(self.slots, 1, dtype=torch.int64, device=self.device))
        self.step = Graph(self.run, self.device)

    def attend(self, layer, q, k, v):
        keys, values = self.cache[layer]
        if q.shape[2] > 1 or self.whole:
            keys[:, :, : q.shape[2]], values[:, :, : q.shape[2]] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        keys[self.batch, :, self.lengths], values[self.batch, :, self.lengths] = k[:, :, 0], v[:, :, 0]
        seen = self.keys <= self.lengths[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None, None])

    @torch.no_grad()
    def prefill(self, ids):
        self.whole = True
        logits = self.model(ids)
        self.tokens.copy_(logits[self.batch, (self.lengths - 1).clamp(min=0)].argmax(-1))
        self.whole = False

    @torch.no_grad()
    def run(self):
        logits = self.model(self.tokens[:, None], self.lengths[:, None])
        self.tokens.copy_(logits[:, 0].argmax(-1))
        self.lengths += 1

    def serve(self, requests):
        """The tokens of each request, and the timeline."""
        results, clock = [], Clock(self.device)
        for begin in range(0, len(requests), self.slots):
            batch = requests[begin : begin + self.slots]
            ids = torch.zeros(self.slots, max(len(request.prompt) for request in batch), dtype=torch.int64)
            for i, request in enumerate(batch):
                ids[i, : len(request.prompt)] = torch.tensor(request.prompt)
            lengths = [len(request.prompt) for request in batch] + [1] * (self.slots - len(batch))
            self.lengths.copy_(torch.tensor(lengths))
            self.prefill(ids.to(self.device))
            steps = [self.tokens.clone()]
            clock.tick(len(batch))
            for n in range(1, max(request.wanted for request in batch)):
                self.step.replay()
                steps.append(self.tokens.clone())
                clock.tick(sum(n < request.wanted for request in batch))
            tokens = torch.stack(steps).tolist()
            results += [[step[i] for step in tokens[: request.wanted]] for i, request in enumerate(batch)]
        return results, clock.timeline()

"""The device's side of serve.py's engine: K and V in pages, in 16 bits or in a KV format, and two steps as CUDA graphs."""

import flashjit
import numpy
import torch
from serve_steps import Graph


class Pages:
    """A model whose attention reads and writes pages.

    Two steps: of one token of each slot, and of up to `chunk` packed rows of any. A step is told what it computes by int32 arrays,
    `told` on the host and `known` on the device, which one copy moves.
    """

    def __init__(self, model, options, length):
        weight = model.head.weight
        self.model, self.device, self.slots, self.chunk = model, weight.device, options.slots, options.chunk
        heads, dim = model.blocks[0].heads, model.tokens.weight.shape[1] // model.blocks[0].heads
        pages = (len(model.blocks), 2, options.pages, options.page, heads)
        if options.format:
            self.pool, self.given = self.in_format(options.format, pages, dim)
        else:
            self.pool = torch.zeros(*pages, dim, dtype=weight.dtype, device=self.device)
            self.given = [{}] * len(model.blocks)
        self.tokens = torch.zeros(self.slots, dtype=torch.int64, device=self.device)  # the last of each slot
        self.make_arrays(-(-length // options.page))
        self.packed = False
        for layer, block in enumerate(model.blocks):
            block.attention = lambda q, k, v, layer=layer: self.attend(layer, q, k, v)
        self.step_of_chunks = Graph(self.run_chunks, self.device)
        self.step_of_tokens = Graph(self.run_tokens, self.device)

    def make_arrays(self, columns):
        """columns: of the page table."""
        sizes = {
            "ids": self.chunk,
            "source": self.chunk,  # the slot whose last token is read, or -1: `ids` has it
            "positions": self.chunk,
            "offsets": self.slots + 1,
            "lengths": self.slots,
            "table": self.slots * columns,
        }
        self.host = numpy.zeros(sum(sizes.values()), dtype=numpy.int32)
        self.control = torch.zeros(len(self.host), dtype=torch.int32, device=self.device)
        split = numpy.cumsum(list(sizes.values()))[:-1].tolist()
        self.told = dict(zip(sizes, numpy.split(self.host, split)))
        self.known = dict(zip(sizes, self.control.tensor_split(split)))
        self.told["table"] = self.told["table"].reshape(self.slots, columns)
        self.known["table"] = self.known["table"].view(self.slots, columns)

    def in_format(self, name, pages, dim):
        """Pages of rows in a KV format, and what calls of each layer are told of it."""
        form = flashjit.KvFormat(name)
        layers, _, count, rows, heads = pages
        given = {"k_format": form, "v_format": form}
        if form.has_scale:
            given |= dict.fromkeys(("k_scale", "v_scale"), torch.ones((), device=self.device))
        told = [dict(given) for _ in range(layers)]
        if ":apart" in name:
            for layer in told:
                for scales in ("k_block_scale", "v_block_scale"):
                    layer[scales] = form.block_scales((count, heads, rows, dim), self.device)
        return torch.zeros(*pages, form.row_bytes(dim), dtype=torch.uint8, device=self.device), told

    def attend(self, layer, q, k, v):
        """New keys go into the pages, and attention sees them there."""
        pages_k, pages_v = self.pool[layer].transpose(2, 3)
        where = {"page_table": self.known["table"], "kv_lengths": self.known["lengths"], **self.given[layer]}
        if self.packed:
            where["cu_seqlens_q"] = self.known["offsets"]
        flashjit.append(k, v, pages_k, pages_v, **where)
        most = self.chunk if self.packed else None
        return flashjit.attention(q, pages_k, pages_v, causal=True, max_seqlen_q=most, **where)

    @torch.no_grad()
    def run_chunks(self):
        """Packed rows of all slots: chunks of prompts, and the last tokens of those that generate."""
        self.packed = True
        source, ids = self.known["source"], self.known["ids"]
        ids = torch.where(source >= 0, self.tokens[source.clamp(min=0)], ids)
        logits = self.model(ids[None], self.known["positions"])
        last = (self.known["offsets"][1:] - 1).clamp(min=0)
        self.tokens.copy_(logits[0, last].argmax(-1))

    @torch.no_grad()
    def run_tokens(self):
        """One row of each slot. Empty ones have no keys, and nothing is written for them."""
        self.packed = False
        logits = self.model(self.tokens[:, None], (self.known["lengths"] - 1).clamp(min=0)[:, None])
        self.tokens.copy_(logits[:, 0].argmax(-1))

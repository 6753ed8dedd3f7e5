"""Serves the GPT of gpt.py: 64 prompts of unlike lengths by continuous batching, with chunked prefill, a cache in pages and CUDA graphs,
beside PyTorch's attention over a padded static cache.

    python3 tools/examples/python/serve.py --model gpt.pt --csv serve.csv --png serve.png

--model is loaded where it exists; else the model is trained on this repository's text first, and saved there. Both generate greedily,
as many tokens for each prompt as it wants. Needs a GPU; --device cpu with small sizes uses the CPU reference. Exit code: 1 if too few
of the tokens are the same.
"""

import argparse
import csv
import pathlib
import sys
import time
from dataclasses import dataclass, field

import flashjit
import gpt
import numpy
import torch
import torch.nn.functional as F


@dataclass
class Request:
    prompt: list
    wanted: int  # tokens
    keys: int = 0  # in the cache
    generated: int = 0
    pages: list = field(default_factory=list)


class Clock:
    """When each step was done, without waiting for it."""

    def __init__(self, device):
        self.device, self.times = device, []
        self.start = self._now()

    def _now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def tick(self, tokens):
        self.times.append((self._now(), tokens))

    def timeline(self):
        """(seconds, tokens so far) of each step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        done, line = 0, []
        for at, tokens in self.times:
            done += tokens
            line.append(
                (self.start.elapsed_time(at) / 1e3 if self.device.type == "cuda" else at - self.start, done)
            )
        return line


class Graph:
    """A function as a CUDA graph; on the CPU just the function."""

    def __init__(self, function, device):
        self.replay = function
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles and loads
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
            self.replay = graph.replay


# --- flashjit: pages, and one step for whatever there is to do -------------------------------------------------------


class Engine:
    """Slots for sequences, pages for their keys, and two steps: of one token of each slot, and of up to `chunk` rows of any."""

    def __init__(self, model, options, length):
        weight = model.head.weight
        self.model, self.device, self.slots, self.chunk = model, weight.device, options.slots, options.chunk
        self.rows, columns = options.page, -(-length // options.page)
        heads, width = model.blocks[0].heads, model.tokens.weight.shape[1]
        self.pool = torch.zeros(
            len(model.blocks),
            2,
            options.pages,
            options.page,
            heads,
            width // heads,
            dtype=weight.dtype,
            device=self.device,
        )
        # What the host says before each step, in one copy.
        sizes = {
            "ids": self.chunk,
            "source": self.chunk,
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
        self.tokens = torch.zeros(self.slots, dtype=torch.int64, device=self.device)  # the last of each slot
        self.free_pages, self.active, self.packed = list(range(options.pages)), [None] * self.slots, False
        for layer, block in enumerate(model.blocks):
            block.attention = lambda q, k, v, layer=layer: self.attend(layer, q, k, v)
        self.step_of_chunks, self.step_of_tokens = (
            Graph(self.run_chunks, self.device),
            Graph(self.run_tokens, self.device),
        )

    def attend(self, layer, q, k, v):
        """New keys go into the pages, and attention sees them there."""
        pages_k, pages_v = self.pool[layer].transpose(2, 3)
        where = {"page_table": self.known["table"], "kv_lengths": self.known["lengths"]}
        if self.packed:
            where["cu_seqlens_q"] = self.known["offsets"]
        flashjit.append(k, v, pages_k, pages_v, **where)
        return flashjit.attention(
            q, pages_k, pages_v, causal=True, max_seqlen_q=self.chunk if self.packed else None, **where
        )

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

    def admit(self, waiting):
        for slot, request in enumerate(self.active):
            if request is None and waiting:
                needed = -(-(len(waiting[0].prompt) + waiting[0].wanted) // self.rows)
                if needed > len(self.free_pages):
                    return
                request = self.active[slot] = waiting.pop(0)
                request.pages = [self.free_pages.pop() for _ in range(needed)]
                self.told["table"][slot, :needed] = request.pages

    def counts(self):
        """How many rows of each slot the next step has."""
        budget, counts = self.chunk - sum(request is not None for request in self.active), []
        for request in self.active:
            if request is None:
                counts.append(0)
                continue
            more = min(max(len(request.prompt) - request.keys - 1, 0), budget)
            budget -= more
            counts.append(1 + more)
        return counts

    def tell(self, counts):
        """The next step, for the device. Returns which slots generate a token by it."""
        told, row, done = self.told, 0, []
        for slot, (request, count) in enumerate(zip(self.active, counts)):
            rows = slice(row, row + count)
            told["source"][rows], told["offsets"][slot + 1] = slot, row + count
            if request is None:
                told["lengths"][slot] = 0
                continue
            begin, end = request.keys, request.keys + count
            if begin < len(request.prompt):
                told["ids"][rows], told["source"][rows] = request.prompt[begin:end], -1
            told["positions"][rows], told["lengths"][slot] = range(begin, end), end
            if end >= len(request.prompt):
                done.append(slot)
            request.keys, row = end, row + count
        self.control.copy_(torch.from_numpy(self.host))
        return done

    def serve(self, requests):
        """The tokens of each request, and the timeline."""
        waiting, found, steps, clock = list(requests), {}, [], Clock(self.device)
        while waiting or any(self.active):
            self.admit(waiting)
            counts = self.counts()
            chunks = any(request and request.keys < len(request.prompt) for request in self.active)
            done = self.tell(counts)
            (self.step_of_chunks if chunks else self.step_of_tokens).replay()
            steps.append(self.tokens.clone())
            for slot in done:
                request = self.active[slot]
                found.setdefault(id(request), []).append((len(steps) - 1, slot))
                request.generated += 1
                if request.generated == request.wanted:
                    self.free_pages += request.pages
                    self.active[slot] = None
            clock.tick(len(done))
        timeline, tokens = clock.timeline(), torch.stack(steps).tolist()
        return [[tokens[step][slot] for step, slot in found[id(request)]] for request in requests], timeline


# --- PyTorch: a padded batch after the other -------------------------------------------------------------------------


class Padded:
    """Batches of as many sequences, each padded to its longest prompt, that end when their last sequence does."""

    def __init__(self, model, options, length):
        weight = model.head.weight
        self.model, self.device, self.slots, self.length = model, weight.device, options.slots, length
        heads, width = model.blocks[0].heads, model.tokens.weight.shape[1]
        self.cache = torch.zeros(
            len(model.blocks),
            2,
            self.slots,
            heads,
            length,
            width // heads,
            dtype=weight.dtype,
            device=self.device,
        )
        self.lengths = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        self.keys, self.batch = (
            torch.arange(length, device=self.device),
            torch.arange(self.slots, device=self.device),
        )
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
        results, clock = [], Clock(self.device)
        for begin in range(0, len(requests), self.slots):
            batch = requests[begin : begin + self.slots]
            longest = max(len(request.prompt) for request in batch)
            ids = torch.zeros(self.slots, longest, dtype=torch.int64)
            for i, request in enumerate(batch):
                ids[i, : len(request.prompt)] = torch.tensor(request.prompt)
            self.lengths.copy_(
                torch.tensor([len(request.prompt) for request in batch] + [1] * (self.slots - len(batch)))
            )
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


ENGINES = {"flashjit": Engine, "pytorch": Padded}


# --- The model, the prompts, and what comes of them ------------------------------------------------------------------


def load(options, text):
    """The model and what it was made with: loaded, or trained and saved."""
    path = pathlib.Path(options.model) if options.model else None
    if path and path.exists():
        saved = torch.load(path, weights_only=True)
        model = gpt.GPT(*saved["sizes"], gpt.ATTENTION["flashjit"])
        model.load_state_dict(saved["weights"])
    else:
        _, _, model = gpt.train("flashjit", text, options, options.steps)
        if path:
            sizes = (options.layers, options.width, options.heads, options.length)
            torch.save({"sizes": sizes, "weights": model.state_dict()}, path)
    kind = torch.bfloat16 if options.device == "cuda" else torch.float32
    return model.to(options.device, kind).eval()


def prompts(options, text, length):
    """Pieces of the text of unlike lengths, evenly spread by their logarithm, and how much each wants."""
    random = torch.Generator().manual_seed(options.seed)
    made = []
    for _ in range(options.prompts):
        share = torch.rand(1, generator=random).item()
        size = int(16 * ((length - options.wants) / 16) ** share)
        wanted = torch.randint(options.wants // 8, options.wants + 1, (1,), generator=random).item()
        begin = torch.randint(0, len(text) - size, (1,), generator=random).item()
        made.append(Request(text[begin : begin + size].tolist(), max(1, wanted)))
    return made


def write(path, timelines):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["engine", "seconds", "tokens"])
        for name, timeline in timelines.items():
            writer.writerows([name, f"{seconds:.5f}", tokens] for seconds, tokens in timeline)


def read(path):
    """What write() wrote."""
    timelines = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            timelines.setdefault(row["engine"], []).append((float(row["seconds"]), int(row["tokens"])))
    return timelines


def plot(path, timelines):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (name, timeline), style in zip(timelines.items(), ("-", "--")):
        seconds, tokens = timeline[-1]
        what = {"flashjit": "pages, continuous batching", "pytorch": "padded static cache"}[name]
        axes.plot(*zip(*timeline), style, label=f"{name}, {what}: {tokens / seconds:,.0f} tokens/s")
    axes.set(
        xlabel="seconds",
        ylabel="tokens generated",
        title="A small GPT, prompts and answers of unlike lengths",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", metavar="FILE", help="load the model from here, or save it here")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument(
        "--wants", type=int, default=512, help="the most tokens that a prompt wants; the fewest are an eighth"
    )
    parser.add_argument("--slots", type=int, default=32, help="sequences at a time")
    parser.add_argument("--chunk", type=int, default=1024, help="rows of a step while prompts are read")
    parser.add_argument("--page", type=int, default=16, help="rows of a page")
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--csv", help="write when how many tokens were there")
    parser.add_argument("--png", help="draw it here; needs matplotlib")
    parser.add_argument(
        "--draw", metavar="CSV", help="serve nothing: draw what --csv wrote, e.g. on another machine"
    )
    for name, kind, value in (
        ("steps", int, 300),
        ("layers", int, 6),
        ("width", int, 384),
        ("heads", int, 6),
        ("length", int, 4096),
        ("batch", int, 16),
        ("rate", float, 1e-3),
        ("seed", int, 1),
    ):
        parser.add_argument(f"--{name}", type=kind, default=value, help="as of gpt.py")
    options = parser.parse_args()
    if options.draw:
        plot(options.png or options.draw.removesuffix(".csv") + ".png", read(options.draw))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("serve: PyTorch finds no GPU; --device cpu with small sizes runs without", file=sys.stderr)
        return 77
    text = gpt.corpus()
    model = load(options, text)
    length = model.positions.weight.shape[0]
    answers, timelines = {}, {}
    for name, engine in ENGINES.items():
        made = engine(model, options, length)
        made.serve(prompts(options, text, length)[:2])  # warm
        answers[name], timelines[name] = made.serve(prompts(options, text, length))
        seconds, tokens = timelines[name][-1]
        print(
            f"{name:9} {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens per second",
            flush=True,
        )
    pairs = [(a, b) for x, y in zip(*answers.values()) for a, b in zip(x, y)]
    same = sum(a == b for a, b in pairs) / len(pairs)
    rates = [tokens / seconds for (seconds, tokens) in (timeline[-1] for timeline in timelines.values())]
    print(f"{same:.1%} of the tokens are the same; {rates[0] / rates[1]:.2f} of PyTorch's speed")
    if options.csv:
        write(options.csv, timelines)
    if options.png:
        plot(options.png, timelines)
    return 0 if same > 0.5 else 1  # in bf16 sequences part where two tokens are nearly as likely


if __name__ == "__main__":
    sys.exit(main())

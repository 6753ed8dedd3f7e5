"""The host's side of serve.py's engine: which request has which slot and pages, and how many rows each gives to the next step."""

from dataclasses import dataclass, field

import torch
from serve_pages import Pages
from serve_steps import Clock


@dataclass
class Request:
    prompt: list
    wanted: int  # tokens
    keys: int = 0  # in the cache
    generated: int = 0
    pages: list = field(default_factory=list)


class Engine:
    """Continuous batching: requests take slots as others leave them, and prompts are read in chunks beside tokens."""

    def __init__(self, model, options, length):
        self.pages, self.rows = Pages(model, options, length), options.page
        self.free_pages, self.active = list(range(options.pages)), [None] * options.slots

    def admit(self, waiting):
        for slot, request in enumerate(self.active):
            if request is None and waiting:
                needed = -(-(len(waiting[0].prompt) + waiting[0].wanted) // self.rows)
                if needed > len(self.free_pages):
                    return
                request = self.active[slot] = waiting.pop(0)
                request.pages = [self.free_pages.pop() for _ in range(needed)]
                self.pages.told["table"][slot, :needed] = request.pages

    def counts(self):
        """How many rows of each slot the next step has."""
        budget, counts = self.pages.chunk - sum(request is not None for request in self.active), []
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
        told, row, done = self.pages.told, 0, []
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
        self.pages.control.copy_(torch.from_numpy(self.pages.host))
        return done

    def serve(self, requests):
        """The tokens of each request, and the timeline."""
        waiting, found, steps, clock = list(requests), {}, [], Clock(self.pages.device)
        while waiting or any(self.active):
            self.admit(waiting)
            counts = self.counts()
            chunks = any(request and request.keys < len(request.prompt) for request in self.active)
            done = self.tell(counts)
            (self.pages.step_of_chunks if chunks else self.pages.step_of_tokens).replay()
            steps.append(self.pages.tokens.clone())
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

"""What both engines of serve.py need to run steps on a GPU without waiting for them: CUDA graphs, and times of steps."""

import time

import torch


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
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        done, line = 0, []
        for at, tokens in self.times:
            done += tokens
            line.append((self.start.elapsed_time(at) / 1e3 if on_gpu else at - self.start, done))
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

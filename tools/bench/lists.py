"""Time the making of tile lists alone, on one GPU: what a call whose mask has no bounds pays before its main kernel, or
pays once where flashjit.build_lists() makes them for many calls.

Each case is captured into a CUDA graph REPEATS times, so that no time of the host counts; the median of replays counts.
A document mask at 64k tokens must take at most 100 us.

    FLASHJIT_LIBRARY=build/libflashjit.so PYTHONPATH=tools/python python3 tools/bench/lists.py

Exit code: 0 done, 1 the limit is missed, 3 something is missing here.
"""

import argparse
import ctypes
import sys

try:
    import torch
except ImportError as error:
    print(f"lists: PyTorch is needed: {error}", file=sys.stderr)
    sys.exit(3)

from flashjit import _library, runtime

REPEATS, REPLAYS, LIMIT_US = 20, 21, 100
DOCUMENTS = "mask{ids: int32 1d; q >= kv && ids[q] == ids[kv]}"
BUTTERFLY = "mask{((q / 128 ^ kv / 128) & (q / 128 ^ kv / 128) - 1) == 0}"
CASES = [  # name, spec, whether the limit holds for it
    ("documents d64", f"bf16:d64:{DOCUMENTS}", True),
    ("documents d128", f"bf16:d128:{DOCUMENTS}", True),
    ("documents d128 det", f"bf16:d128:{DOCUMENTS}:det", True),
    ("documents of each batch", "bf16:d128:mask{ids: int32 2d; q >= kv && ids[b, q] == ids[b, kv]}", False),
    ("window and first tokens", "bf16:d128:mask{kv <= q && (q - kv < 1024 || kv < 4)}", False),
    ("butterfly", f"bf16:d64:{BUTTERFLY}", False),
]


def document_ids(length):
    """int32 [length]: runs of 1 to 4096 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(length, dtype=torch.int32)
    at = 0
    while at < length:
        at += int(torch.randint(1, 4097, (), generator=generator))
        ids[at:] += 1
    return ids.cuda()


def capture_struct(name, tensor):
    capture = _library.Capture(
        name=name.encode(), data=tensor.data_ptr(), rank=tensor.dim(), type=_library.ELEMENT_TYPES["int32"]
    )
    capture.size[: tensor.dim()], capture.stride[: tensor.dim()] = tensor.shape, tensor.stride()
    return capture


class Lists:
    """One spec's lists at one shape; build() launches what makes them."""

    def __init__(self, spec, shape, backward):
        self.spec, self.shape, self.backward = (
            _library.spec_handle(spec),
            _library.shape_struct(shape),
            backward,
        )
        runtime().prepare(spec, shape, backward=backward)
        self.bytes = runtime().list_bytes(spec, shape, backward=backward)
        self.memory = torch.empty(self.bytes, dtype=torch.uint8, device="cuda")
        ids = document_ids(shape[4])
        self.ids = ids.expand(shape[0], -1).contiguous() if "2d" in spec else ids
        self.captures = (_library.Capture * 1)(capture_struct("ids", self.ids))
        self.args = _library.ListArgs(
            struct_size=ctypes.sizeof(_library.ListArgs),
            memory=self.memory.data_ptr(),
            memory_bytes=self.bytes,
            captures=ctypes.addressof(self.captures),
            capture_count=1 if "ids" in spec else 0,
        )

    def build(self):
        made = ctypes.c_void_p()
        _library.check(
            _library.library().flashjit_build_lists(
                runtime().address,
                int(self.backward),
                self.spec.address,
                ctypes.byref(self.shape),
                ctypes.byref(self.args),
                torch.cuda.current_stream().cuda_stream,
                ctypes.byref(made),
            )
        )
        _library.library().flashjit_tile_lists_destroy(made)


def median_us(build):
    build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            build()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return sorted(times)[len(times) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=65536, help="tokens (default %(default)s)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("lists: PyTorch finds no GPU", file=sys.stderr)
        return 3
    torch.zeros(1, device="cuda")
    shape = (given.batch, given.heads, given.heads, given.length, given.length)
    print(f"{torch.cuda.get_device_name()}, {given.batch} x {given.heads} heads x {given.length} tokens")
    missed = 0
    for name, spec, limited in CASES:
        for backward in (False, True):
            lists = Lists(spec, shape, backward)
            us = median_us(lists.build)
            miss = limited and given.length <= 65536 and us > LIMIT_US
            missed += miss
            print(
                f"{'bwd' if backward else 'fwd'} {name:26} {us:8.1f} us  {lists.bytes / 2**20:7.2f} MiB"
                f"{'  MORE THAN ' + str(LIMIT_US) + ' us' if miss else ''}",
                flush=True,
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

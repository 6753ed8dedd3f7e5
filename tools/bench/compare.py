"""Compare flashjit with PyTorch's FlashAttention-2 and cuDNN on one GPU, in one process, on the same tensors.

Dense: bf16, head dims 64, 128 and 256, lengths 512 to 16k, causal and full; 16k tokens in all, hidden size 2048; flashjit
as it chooses itself, and its portable family sm80. Sparse: a block map of 128-blocks, 12.5% of every row, against
flashjit's own dense time. Results are checked before they are timed. Launches of all peers take turns, each between two
CUDA events, and the median counts.

    python3 tools/bench/compare.py --lib build/libflashjit.so --csv dense.csv

Ratios are speeds: fa2_ms / flashjit_ms and so on; for the sparse table sparse_ms / dense_ms (a share of the time).
Exit code: 0 when every point of flashjit ran and was right, 1 when one was not, 3 when there is no GPU or PyTorch.
"""
import argparse
import csv
import ctypes
import datetime
import os
import statistics
import subprocess
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"compare: PyTorch is needed: {error}", file=sys.stderr)
    sys.exit(3)

TOKENS, HIDDEN = 16384, 2048
BLOCK, DENSITY = 128, 0.125
PASSES = {"fwd": 0, "bwd": 1}
# What the heuristic takes in the family sm80, by pass and head dim: forced, for the portable family's own figures.
SM80_TILES = {("fwd", 64): "sm80:br128:bc80:w4:qreg", ("fwd", 128): "sm80:br128:bc48:w4",
              ("fwd", 256): "sm80:br128:bc64:w8", ("bwd", 64): "sm80:br32:bc128:w4",
              ("bwd", 128): "sm80:br64:bc128:w8", ("bwd", 256): "sm80:br64:bc64:w8:split2"}
HEAD_START_CYCLES = 1_000_000  # the GPU waits this long, about 0.5 ms, while the host queues the next launch

# Two right results differ by the rounding of bf16, in the tensor as a whole and in its worst element.
OURS = {"flashjit", "sm80"}
NORM_LIMIT = {"out": 0.01, "dq": 0.02, "dk": 0.02, "dv": 0.02}
WORST_LIMIT = 0.05  # of the largest magnitude


# --- the C ABI, as include/flashjit/flashjit.h has it ---


class Options(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("cache_dir", ctypes.c_char_p),
                ("packs", ctypes.POINTER(ctypes.c_char_p)), ("pack_count", ctypes.c_size_t), ("jit", ctypes.c_int32),
                ("template_dir", ctypes.c_char_p), ("log", ctypes.c_void_p), ("log_user", ctypes.c_void_p)]


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv")]


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]


class BlockMap(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_int64 * 4)]


_TAIL = [("softmax_scale", ctypes.POINTER(ctypes.c_float)), ("kv_lengths", ctypes.c_void_p), ("block_map", BlockMap),
         ("dropout_p", ctypes.c_double), ("seed", ctypes.c_uint64), ("offset", ctypes.c_uint64),
         ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t)]


class Capture(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("grad", ctypes.c_void_p),
                ("rank", ctypes.c_int32), ("type", ctypes.c_int32), ("size", ctypes.c_int64 * 4),
                ("stride", ctypes.c_int64 * 4), ("scalar", ctypes.c_double)]


_PROGRAM = [("captures", ctypes.POINTER(Capture)), ("capture_count", ctypes.c_size_t), ("cu_seqlens_q", ctypes.c_void_p),
            ("cu_seqlens_kv", ctypes.c_void_p), ("sinks", ctypes.c_void_p)]


class ForwardArgs(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor),
                ("lse", ctypes.c_void_p)] + _TAIL + _PROGRAM


class BackwardArgs(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor),
                ("lse", ctypes.c_void_p), ("dout", Tensor), ("dq", Tensor), ("dk", Tensor), ("dv", Tensor)] + _TAIL + _PROGRAM


class FlashJit:
    """The shared library with one runtime; every call that fails raises RuntimeError with the library's message."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(os.path.abspath(path))
        self.lib.flashjit_last_error_message.restype = ctypes.c_char_p
        self.lib.flashjit_last_error_detail.restype = ctypes.c_char_p
        self.lib.flashjit_version.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        signatures = {
            "flashjit_runtime_create": [ctypes.POINTER(Options), ctypes.POINTER(pointer)],
            "flashjit_spec_create": [ctypes.c_char_p, ctypes.POINTER(pointer)],
            "flashjit_forward": [pointer, pointer, ctypes.POINTER(ForwardArgs), pointer],
            "flashjit_backward": [pointer, pointer, ctypes.POINTER(BackwardArgs), pointer],
            "flashjit_prepare": [pointer, ctypes.c_int32, pointer, ctypes.POINTER(Shape), ctypes.c_char_p],
            "flashjit_workspace_bytes": [pointer, ctypes.c_int32, pointer, ctypes.POINTER(Shape),
                                         ctypes.POINTER(ctypes.c_size_t)],
        }
        for name, arguments in signatures.items():
            getattr(self.lib, name).argtypes = arguments
            getattr(self.lib, name).restype = ctypes.c_int32
        self.runtime = pointer()
        self.call("flashjit_runtime_create", None, ctypes.byref(self.runtime))

    def call(self, name, *arguments):
        if getattr(self.lib, name)(*arguments) != 0:
            message = self.lib.flashjit_last_error_message().decode(errors="replace")
            detail = self.lib.flashjit_last_error_detail().decode(errors="replace")
            raise RuntimeError(f"{name}: {message}" + (f"\n{detail[:2000]}" if detail else ""))

    def spec(self, text):
        handle = ctypes.c_void_p()
        self.call("flashjit_spec_create", text.encode(), ctypes.byref(handle))
        return handle

    def workspace(self, pass_name, spec, shape, config):
        """Compiles and loads the kernel, of the configuration if one is given, and lends it memory."""
        self.call("flashjit_prepare", self.runtime, PASSES[pass_name], spec, ctypes.byref(shape),
                  config.encode() if config else None)
        size = ctypes.c_size_t()
        self.call("flashjit_workspace_bytes", self.runtime, PASSES[pass_name], spec, ctypes.byref(shape),
                  ctypes.byref(size))
        return torch.empty(max(size.value, 256), dtype=torch.uint8, device="cuda"), size.value


def view(tensor):
    return Tensor(tensor.data_ptr(), (ctypes.c_int64 * 4)(*tensor.shape), (ctypes.c_int64 * 4)(*tensor.stride()))


def capture_array(captures):
    """Tensors by the names that a program declares."""
    sizes = lambda values: (ctypes.c_int64 * 4)(*values)
    return (Capture * len(captures))(*(Capture(name.encode(), x.data_ptr(), None, x.dim(), 0, sizes(x.shape),
                                               sizes(x.stride()), 0.0) for name, x in captures.items()))


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class Ours:
    """One problem for flashjit: its outputs, its workspaces, and the calls."""

    def __init__(self, jit, spec_text, q, k, v, dout, block_map=None, tiles=None, captures=None):
        b, h, s, _ = q.shape
        self.jit, self.spec, self.inputs = jit, jit.spec(spec_text), (q, k, v, dout, block_map)
        self.captures = capture_array(captures or {})
        shape = Shape(b, h, k.shape[1], s, k.shape[2])
        poisoned = lambda like: torch.full_like(like, float("nan"))
        self.out, self.dq, self.dk, self.dv = poisoned(dout), poisoned(q), poisoned(k), poisoned(v)
        self.lse = torch.full((b, h, s), float("nan"), device="cuda", dtype=torch.float32)
        dim = q.shape[3]
        self.spaces = {name: jit.workspace(name, self.spec, shape, tiles and tiles[name, dim]) for name in PASSES}
        tensors = {"q": view(q), "k": view(k), "v": view(v), "out": view(self.out)}
        self.forward_args = self._args(ForwardArgs, "fwd", tensors)
        gradients = {"dout": view(dout), "dq": view(self.dq), "dk": view(self.dk), "dv": view(self.dv)}
        self.backward_args = self._args(BackwardArgs, "bwd", {**tensors, **gradients})

    def _args(self, kind, pass_name, tensors):
        space, size = self.spaces[pass_name]
        args = kind(struct_size=ctypes.sizeof(kind), lse=self.lse.data_ptr(), workspace=space.data_ptr(),
                    workspace_bytes=size, **tensors)
        args.captures, args.capture_count = self.captures, len(self.captures)
        block_map = self.inputs[4]
        if block_map is not None:
            args.block_map = BlockMap(block_map.data_ptr(), (ctypes.c_int64 * 4)(*block_map.shape))
        return args

    def forward(self):
        self.jit.call("flashjit_forward", self.jit.runtime, self.spec, ctypes.byref(self.forward_args), stream())

    def backward(self):
        self.jit.call("flashjit_backward", self.jit.runtime, self.spec, ctypes.byref(self.backward_args), stream())

    def results(self):
        return {"out": self.out, "dq": self.dq, "dk": self.dk, "dv": self.dv}


class Peer:
    """One problem for a backend of scaled_dot_product_attention."""

    def __init__(self, backend, q, k, v, dout, causal):
        self.backend, self.dout, self.causal = backend, dout, causal
        self.inputs = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
        self.out = self._attention()

    def _attention(self):
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*self.inputs, is_causal=self.causal)

    def forward(self):
        with torch.no_grad():
            return self._attention()

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self):
        dq, dk, dv = self.backward()
        return {"out": self.out.detach(), "dq": dq, "dk": dk, "dv": dv}


# --- checking and timing ---


def differences(ours, reference):
    """What is wrong with each of our tensors; empty when all are right."""
    wrong = []
    for name, expected in reference.items():
        a, b = ours[name].float(), expected.float()
        norm = ((a - b).norm() / b.norm().clamp_min(1e-30)).item()
        worst = ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        if not (norm <= NORM_LIMIT[name] and worst <= WORST_LIMIT):  # NaN fails too
            wrong.append(f"{name}: relative norm {norm:.3g} (limit {NORM_LIMIT[name]}), worst {worst:.3g} "
                         f"of the largest (limit {WORST_LIMIT})")
    return wrong


def interleaved_ms(calls, rounds):
    """Median milliseconds of each call; the calls take turns. calls: name -> function."""
    for function in calls.values():
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    pairs = {name: [] for name in calls}
    for _ in range(rounds):
        for name, function in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            function()
            end.record()
            pairs[name].append((start, end))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in events) for name, events in pairs.items()}


def reason(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class Report:
    """Rows as CSV and as lines of a table, and the failures to end with."""

    def __init__(self, path, columns, constants):
        self.columns, self.constants = columns, constants
        self.file = open(path, "w", newline="") if path else None
        self.writer = csv.writer(self.file) if self.file else None
        if self.writer:
            self.writer.writerow(columns)
        self.failures = []

    def row(self, **values):
        values = {**self.constants, **values}
        text = {name: f"{x:.4f}" if isinstance(x, float) else str(x) for name, x in values.items()}
        if self.writer:
            self.writer.writerow([text.get(name, "") for name in self.columns])
            self.file.flush()

    def failure(self, text):
        self.failures.append(text)
        print(f"FAILED {text}", flush=True)


def tensors(batch, heads, length, dim):
    torch.manual_seed(length + dim)
    return tuple(torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))


def teraflops(batch, heads, length, dim, causal, pass_name, ms):
    operations = 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
    return operations * (2.5 if pass_name == "bwd" else 1.0) / ms / 1e9


def dense_point(jit, portable, report, dim, length, causal, rounds):
    batch, heads = TOKENS // length, HIDDEN // dim
    label = f"bf16 d{dim} {'causal' if causal else 'full'} b{batch} h{heads} s{length}"
    q, k, v, dout = tensors(batch, heads, length, dim)
    spec = f"bf16:d{dim}" + (":causal" if causal else "")
    people = {}
    for name, make in {
        "flashjit": lambda: Ours(jit, spec, q, k, v, dout),
        "sm80": lambda: Ours(portable, spec, q, k, v, dout, tiles=SM80_TILES),
        "fa2": lambda: Peer(SDPBackend.FLASH_ATTENTION, q, k, v, dout, causal),
        "cudnn": lambda: Peer(SDPBackend.CUDNN_ATTENTION, q, k, v, dout, causal),
    }.items():
        try:
            people[name] = make()
            people[name].forward()
            people[name].backward()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that cannot is left out, the rest goes on
            people.pop(name, None)
            (report.failure if name in OURS else print)(f"{label}: {name} does not run: {reason(error)}")
    reference = people.get("fa2") or people.get("cudnn")
    for name in people.keys() & OURS:
        if reference is None:
            report.failure(f"{label}: no peer to check {name} against")
            continue
        for text in differences(people[name].results(), reference.results()):
            report.failure(f"{label}: {name}: {text}")
    for pass_name in PASSES:
        method = "forward" if pass_name == "fwd" else "backward"
        ms = interleaved_ms({name: getattr(person, method) for name, person in people.items()}, rounds)
        ratio = lambda ours, peer: ms[peer] / ms[ours] if {ours, peer} <= ms.keys() else ""
        report.row(**{"pass": pass_name}, dtype="bf16", head_dim=dim, causal=int(causal), batch=batch, heads=heads,
                   seqlen=length, **{f"{name}_ms": x for name, x in ms.items()},
                   ratio_cudnn=ratio("flashjit", "cudnn"), ratio_fa2=ratio("flashjit", "fa2"),
                   sm80_ratio_fa2=ratio("sm80", "fa2"))
        rates = "  ".join(f"{name} {teraflops(batch, heads, length, dim, causal, pass_name, x):5.0f}"
                          for name, x in ms.items())
        print(f"{pass_name} {label:34} TFLOP/s: {rates}", flush=True)


def window_map(length):
    """uint8 [1, 1, n, n]: in every row a window of exactly DENSITY of the blocks, around the diagonal."""
    n = length // BLOCK
    width = max(1, round(DENSITY * n))
    begin = (torch.arange(n) - width // 2).clamp(0, n - width)[:, None]
    column = torch.arange(n)[None, :]
    return ((column >= begin) & (column < begin + width)).to(torch.uint8)[None, None].contiguous().cuda()


def masked_reference(q, k, v, dout, block_map):
    """O and gradients of the first batch entry's first head in fp32, with the map written out."""
    q, k, v = (x[0, 0].float().requires_grad_() for x in (q, k, v))
    keep = block_map[0, 0].bool().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~keep, float("-inf"))
    out = torch.softmax(scores, dim=-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout[0, 0].float())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def sparse_point(jit, report, dim, length, rounds):
    batch, heads = TOKENS // length, HIDDEN // dim
    label = f"bf16 d{dim} map{BLOCK}x{BLOCK} b{batch} h{heads} s{length}"
    q, k, v, dout = tensors(batch, heads, length, dim)
    block_map = window_map(length)
    density = block_map.float().mean().item()
    dense = Ours(jit, f"bf16:d{dim}", q, k, v, dout)
    sparse = Ours(jit, f"bf16:d{dim}:map{BLOCK}x{BLOCK}", q, k, v, dout, block_map)
    for problem in (dense, sparse):
        problem.forward()
        problem.backward()
    torch.cuda.synchronize()
    first_head = {name: tensor[0, 0] for name, tensor in sparse.results().items()}
    for text in differences(first_head, masked_reference(q, k, v, dout, block_map)):
        report.failure(f"{label}: {text}")
    for pass_name, method in (("fwd", "forward"), ("bwd", "backward")):
        ms = interleaved_ms({"sparse": getattr(sparse, method), "dense": getattr(dense, method)}, rounds)
        ratio = ms["sparse"] / ms["dense"]
        report.row(**{"pass": pass_name}, dtype="bf16", head_dim=dim, density=density, batch=batch, heads=heads,
                   seqlen=length, sparse_ms=ms["sparse"], dense_ms=ms["dense"], ratio=ratio)
        print(f"{pass_name} {label:34} sparse {ms['sparse']:8.3f} ms  dense {ms['dense']:8.3f} ms  "
              f"share of the time {ratio:.3f} at density {density:.3f}", flush=True)


def guarded(report, label, point, *arguments):
    """Runs one point; whatever happens to it, the next one runs."""
    try:
        point(*arguments)
    except Exception as error:
        report.failure(f"{label}: {reason(error)}")
    try:
        torch.cuda.empty_cache()
    except Exception:
        pass  # a broken context is reported by the next point


def commit_name():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
        return run.stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default="build/libflashjit.so", help="the shared library (default %(default)s)")
    parser.add_argument("--csv", help="write the dense table here, the sparse one beside it as *_sparse.csv")
    parser.add_argument("--quick", action="store_true", help="4k and few rounds only")
    parser.add_argument("--commit", default=None, help="what the CSV calls this version (default: git's)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("compare: PyTorch finds no GPU", file=sys.stderr)
        return 3
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the primary context current, which flashjit then uses

    jit, portable = FlashJit(arguments.lib), FlashJit(arguments.lib)
    constants = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                 "device": torch.cuda.get_device_name(), "commit": arguments.commit or commit_name()}
    print(f"{constants['device']}, flashjit {jit.lib.flashjit_version().decode()} ({constants['commit']}), "
          f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    lengths, rounds = ((4096,), 7) if arguments.quick else ((512, 1024, 2048, 4096, 8192, 16384), 15)
    start, kind = list(constants), ["pass", "dtype", "head_dim"]
    sizes = ["batch", "heads", "seqlen"]
    sparse_csv = "_sparse".join(os.path.splitext(arguments.csv)) if arguments.csv else None
    dense = Report(arguments.csv, start + kind + ["causal"] + sizes + ["flashjit_ms", "sm80_ms", "fa2_ms", "cudnn_ms", "ratio_cudnn", "ratio_fa2",
                                                            "sm80_ratio_fa2"],
                   constants)
    sparse = Report(sparse_csv, start + kind + ["density"] + sizes + ["sparse_ms", "dense_ms", "ratio"], constants)
    for dim in (64, 128, 256):
        for length in lengths:
            for causal in (False, True):
                guarded(dense, f"d{dim} s{length} causal={causal}", dense_point, jit, portable, dense, dim, length,
                        causal, rounds)
            if dim <= 128 and length >= 4096:
                guarded(sparse, f"d{dim} s{length} sparse", sparse_point, jit, sparse, dim, length, rounds)
    failures = dense.failures + sparse.failures
    print(f"{len(failures)} failures" + "".join(f"\n  {text}" for text in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

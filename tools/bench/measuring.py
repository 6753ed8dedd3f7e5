"""What the measurements share: flashjit and other libraries called, checked against a reference, timed, and a table of it."""

import argparse
import csv
import ctypes
import datetime
import os
import random
import statistics
import subprocess
import sys

try:
    import torch
    import torch.nn.functional as F  # noqa: F401  (taken from here, as what follows)
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: F401
except ImportError as error:
    print(f"PyTorch is needed: {error}", file=sys.stderr)
    sys.exit(3)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
from flashjit import _library as abi  # noqa: E402

BLOCK = 128
PASSES = ("fwd", "bwd")
SEED, OFFSET = 20251, 7  # of the dropout masks
HEAD_START_CYCLES = 1_000_000  # the GPU waits this long, about 0.5 ms, while the host queues the next launch

# Two right results differ by the rounding of bf16, in the tensor as a whole and in its worst element.
OURS = {"flashjit", "sm80"}
PEERS = ("fa2", "cudnn", "fa3", "fa4")
NORM_LIMIT = {"out": 0.01, "dq": 0.02, "dk": 0.02, "dv": 0.02}
WORST_LIMIT = 0.05  # of the largest magnitude


def use_library(path):
    """The shared library that all runtimes of this process are of."""
    os.environ["FLASHJIT_LIBRARY"] = os.path.abspath(path)


def view(tensor):
    return abi.Tensor(
        tensor.data_ptr(), (ctypes.c_int64 * 4)(*tensor.shape), (ctypes.c_int64 * 4)(*tensor.stride())
    )


def capture_array(captures):
    """Tensors and numbers by the names that a program declares."""
    sizes = lambda values: (ctypes.c_int64 * abi.MAX_CAPTURE_DIMS)(*values)
    tensor = lambda name, x: abi.Capture(
        name, x.data_ptr(), None, x.dim(), 0, sizes(x.shape), sizes(x.stride()), 0.0
    )
    number = lambda name, x: abi.Capture(name=name, scalar=x)
    return (abi.Capture * len(captures))(
        *(
            (tensor if isinstance(x, torch.Tensor) else number)(name.encode(), x)
            for name, x in captures.items()
        )
    )


class Ours:
    """One problem for flashjit: its outputs, its workspaces, and the calls. tiles: a configuration by pass and head
    dimension, if not what the library chooses. lists: whether tile lists, of passes that walk some, are made beforehand,
    not in every call. dropout: its probability, where the spec has dropout. kv_lengths: int32 [batch], where it has kvlen."""

    def __init__(
        self,
        runtime,
        spec,
        q,
        k,
        v,
        dout,
        block_map=None,
        tiles=None,
        captures=None,
        passes=PASSES,
        lists=False,
        dropout=0.0,
        kv_lengths=None,
    ):
        b, h, s, dim = q.shape
        self.dropout, self.kv_lengths = dropout, kv_lengths
        self.runtime, self.spec, self.inputs = runtime, abi.spec_handle(spec), (q, k, v, dout, block_map)
        self.captures = capture_array(captures or {})
        shape = (b, h, k.shape[1], s, k.shape[2])
        if not tiles and len(passes) == 2:
            runtime.prepare_both(spec, shape)
        poisoned = lambda like: torch.full_like(like, float("nan"))
        self.out, self.dq, self.dk, self.dv = poisoned(dout), poisoned(q), poisoned(k), poisoned(v)
        self.lse = torch.full((b, h, s), float("nan"), device=q.device, dtype=torch.float32)
        self.spaces = {
            name: self._workspace(name, spec, shape, tiles and tiles[name, dim]) for name in passes
        }
        tensors = {"q": view(q), "k": view(k), "v": view(v), "out": view(self.out)}
        self.forward_args = self._args(abi.ForwardArgs, "fwd", tensors)
        gradients = {"dout": view(dout), "dq": view(self.dq), "dk": view(self.dk), "dv": view(self.dv)}
        if "bwd" in passes:
            self.backward_args = self._args(abi.BackwardArgs, "bwd", {**tensors, **gradients})
        self.lists = {
            name: self._build_lists(name, spec, shape)
            for name in passes
            if lists and runtime.list_bytes(spec, shape, backward=name == "bwd")
        }
        for name, (handle, _) in self.lists.items():
            (self.backward_args if name == "bwd" else self.forward_args).lists = handle.address

    def _workspace(self, name, spec, shape, config):
        """Compiles and loads the kernel, of the configuration if one is given, and lends it memory."""
        self.runtime.prepare(spec, shape, backward=name == "bwd", config=config)
        size = self.runtime.workspace_bytes(spec, shape, backward=name == "bwd")
        return torch.empty(max(size, 256), dtype=torch.uint8, device=self.inputs[0].device), size

    def _build_lists(self, name, spec, shape):
        """One pass's tile lists, and their memory."""
        size = self.runtime.list_bytes(spec, shape, backward=name == "bwd")
        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        args = abi.ListArgs(
            struct_size=ctypes.sizeof(abi.ListArgs),
            memory=memory.data_ptr(),
            memory_bytes=size,
            captures=ctypes.addressof(self.captures),
            capture_count=len(self.captures),
        )
        handle = abi.Handle(
            "flashjit_build_lists",
            "flashjit_tile_lists_destroy",
            self.runtime.address,
            int(name == "bwd"),
            self.spec.address,
            ctypes.byref(abi.shape_struct(shape)),
            ctypes.byref(args),
            torch.cuda.current_stream().cuda_stream,
        )
        return handle, memory

    def _args(self, kind, pass_name, tensors):
        space, size = self.spaces[pass_name]
        args = kind(
            struct_size=ctypes.sizeof(kind),
            lse=self.lse.data_ptr(),
            workspace=space.data_ptr(),
            workspace_bytes=size,
            dropout_p=self.dropout,
            seed=SEED,
            offset=OFFSET,
            **tensors,
        )
        args.captures, args.capture_count = ctypes.addressof(self.captures), len(self.captures)
        if self.kv_lengths is not None:
            args.kv_lengths = self.kv_lengths.data_ptr()
        block_map = self.inputs[4]
        if block_map is not None:
            args.block_map = abi.BlockMap(block_map.data_ptr(), (ctypes.c_int64 * 4)(*block_map.shape))
        return args

    def _call(self, function, args):
        abi.check(
            function(
                self.runtime.address,
                self.spec.address,
                ctypes.byref(args),
                torch.cuda.current_stream().cuda_stream,
            )
        )

    def forward(self):
        self._call(abi.library().flashjit_forward, self.forward_args)

    def backward(self):
        self._call(abi.library().flashjit_backward, self.backward_args)

    def results(self):
        return {"out": self.out, "dq": self.dq, "dk": self.dk, "dv": self.dv}


def differences(ours, reference):
    """What is wrong with each of our tensors; empty when all are right."""
    wrong = []
    for name, expected in reference.items():
        a, b = ours[name].float(), expected.float()
        norm = ((a - b).norm() / b.norm().clamp_min(1e-30)).item()
        worst = ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        if not (norm <= NORM_LIMIT[name] and worst <= WORST_LIMIT):  # NaN fails too
            wrong.append(
                f"{name}: relative norm {norm:.3g} (limit {NORM_LIMIT[name]}), worst {worst:.3g} "
                f"of the largest (limit {WORST_LIMIT})"
            )
    return wrong


def interleaved_ms(calls, rounds):
    """Median milliseconds of each call. They take turns, in another order each round: what a kernel leaves in L2 moves the
    next one by up to 2%. calls: name -> function."""
    for function in calls.values():
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    pairs = {name: [] for name in calls}
    order = random.Random(rounds)
    for _ in range(rounds):
        for name, function in order.sample(list(calls.items()), len(calls)):
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
    """Rows as CSV and as lines of a table, and the failures to end with. A file is there from its first row on: of a run that
    ends before, the last one's stays."""

    def __init__(self, path, columns, constants):
        self.columns, self.constants, self.path = columns, constants, path
        self.file = self.writer = None
        self.failures, self.rows = [], []

    def row(self, **values):
        values = {**self.constants, **values}
        self.rows.append(values)
        text = {name: f"{x:.4f}" if isinstance(x, float) else str(x) for name, x in values.items()}
        if self.path and not self.file:
            self.file = open(self.path, "w", newline="")
            self.writer = csv.writer(self.file)
            self.writer.writerow(self.columns)
        if self.writer:
            self.writer.writerow([text.get(name, "") for name in self.columns])
            self.file.flush()

    def failure(self, text):
        self.failures.append(text)
        print(f"FAILED {text}", flush=True)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensors(batch, heads, length, dim, heads_kv=None, dtype="bf16"):
    """Q, K, V and dO."""
    torch.manual_seed(length + dim)
    random = lambda heads: torch.randn(batch, heads, length, dim, device="cuda", dtype=DTYPES[dtype])
    return random(heads), random(heads_kv or heads), random(heads_kv or heads), random(heads)


def teraflops(batch, heads, length, dim, causal, pass_name, ms):
    operations = 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
    return operations * (2.5 if pass_name == "bwd" else 1.0) / ms / 1e9


def running(report, label, makers, methods):
    """Name -> what its maker made, of those whose methods run. A peer that cannot is left out, the rest goes on; one that lacks
    a method has no time for it."""
    people = {}
    for name, make in makers.items():
        try:
            person = make()
            for method in methods:
                if hasattr(person, method):
                    getattr(person, method)()
            torch.cuda.synchronize()
            people[name] = person
        except Exception as error:
            (report.failure if name in OURS else print)(f"{label}: {name} does not run: {reason(error)}")
    return people


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


def parser_of(doc, csv="write the table here"):
    """The options that scripts share; each adds its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lib", default="build/libflashjit.so", help="the shared library (default %(default)s)"
    )
    parser.add_argument("--csv", help=csv)
    parser.add_argument("--commit", default=None, help="what the CSV calls this version (default: git's)")
    return parser


def without_gpu(script):
    """Whether there is none, which is then said."""
    if torch.cuda.is_available():
        return False
    print(f"{script}: PyTorch finds no GPU", file=sys.stderr)
    return True


def constants_of(arguments):
    """What all rows of a run have."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "commit": arguments.commit or commit_name(),
    }


def ended(*reports):
    """The exit code of a script, whose failures are listed."""
    failures = [text for report in reports for text in report.failures]
    print(f"{len(failures)} failures" + "".join(f"\n  {text}" for text in failures))
    return 1 if failures else 0


def command(script, arguments, columns, measure):
    """The exit code of a script with one table. measure(report, flashjit, arguments) fills it."""
    if without_gpu(script):
        return 3
    use_library(arguments.lib)
    import flashjit

    constants = constants_of(arguments)
    del constants["date"]  # these tables have none
    report = Report(arguments.csv, [*constants, *columns], constants)
    measure(report, flashjit, arguments)
    return ended(report)


def commit_name():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        run = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10
        )
        return run.stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"

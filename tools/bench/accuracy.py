"""Errors of flashjit, of PyTorch's FlashAttention-2 and of cuDNN against fp64, on the same inputs, on one GPU.

    python3 tools/bench/accuracy.py --lib build/libflashjit.so --csv tools/bench/results/h100_accuracy.csv

Each line has the relative RMS error and the largest error of O, dQ, dK and dV, over several draws of the inputs, and
their ratios to the better peer's. A Markdown table of the ratios comes last, as tools/docs/accuracy.md shows it.
Exit code: 0, 1 where a ratio is beyond its limit, 3 where there is no GPU or PyTorch.
"""
import argparse
import csv
import dataclasses
import itertools
import math
import os
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"accuracy: PyTorch is needed: {error}", file=sys.stderr)
    sys.exit(3)

TENSORS = ("O", "dQ", "dK", "dV")
PEERS = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
RMS_LIMIT, LARGEST_LIMIT = 1.02, 1.2  # of the better peer's error
DRAWS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one kind, and what is computed of them."""
    inputs: str
    dtype: torch.dtype
    dim: int
    causal: bool
    length: int = 512
    heads: int = 4
    heads_kv: int = 4

    def __str__(self):
        heads = "" if self.heads == self.heads_kv else f" {self.heads}/{self.heads_kv} heads"
        return f"{str(self.dtype)[6:]} d{self.dim} {self.length}{heads} {'causal' if self.causal else 'full'} {self.inputs}"


def normal(case, q, k, v):
    pass


def strong_key(case, q, k, v):
    """Most rows attend to one key, whose score is 5 above the logarithm of the others' sum."""
    direction = F.normalize(torch.randn(case.dim, device="cuda"), dim=0)
    root = math.sqrt(case.dim)
    k[:, :, 7] = direction * 3 * root
    q += direction * (math.log(case.length) + 5) / 3


def outliers(case, q, k, v):
    """Two channels and the first token are large, as models of language have them; fp16 holds less."""
    for tensor in (q, k):
        tensor[..., [3, case.dim // 2 + 1]] *= 50
        tensor[:, :, 0] *= 200 if case.dtype == torch.bfloat16 else 20


def common_offset(case, q, k, v):
    """All keys have one vector in common."""
    k += 4 * torch.randn(case.dim, device="cuda")


def long_key(case, q, k, v):
    """The first key has norm 120."""
    k[:, :, 0] = 120 * F.normalize(k[:, :, 0], dim=-1)


INPUTS = {function.__name__.replace("_", " "): function
          for function in (normal, strong_key, outliers, common_offset, long_key)}


def cases():
    """What the page's table has."""
    for dtype, dim, inputs, causal in itertools.product((torch.bfloat16, torch.float16), (64, 128, 256), INPUTS, (False, True)):
        yield Case(inputs, dtype, dim, causal)
    for dim, causal in itertools.product((64, 128, 256), (False, True)):
        yield Case("normal", torch.bfloat16, dim, causal, length=2048)
        yield Case("normal", torch.bfloat16, dim, causal, length=333)
        yield Case("normal", torch.bfloat16, dim, causal, heads=8, heads_kv=2)


def draw(case, seed):
    """Q, K, V and dO."""
    torch.manual_seed(seed)
    heads = (case.heads, case.heads_kv, case.heads_kv, case.heads)
    q, k, v, dout = (torch.randn(1, h, case.length, case.dim, device="cuda") for h in heads)
    INPUTS[case.inputs](case, q, k, v)
    return [x.to(case.dtype) for x in (q, k, v, dout)]


def gradients(function, q, k, v, dout):
    """O, dQ, dK and dV of a function of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def exact(case, q, k, v, dout):
    """The same in fp64."""
    def attention(q, k, v):
        k, v = (x.repeat_interleave(case.heads // case.heads_kv, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(case.dim)
        if case.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool, device="cuda").triu(1), -math.inf)
        return torch.softmax(scores, 3) @ v

    return gradients(attention, *(x.double() for x in (q, k, v)), dout.double())


def peer(case, backend):
    def attention(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.heads_kv)

    return attention


def measure(case, ours, draws=DRAWS):
    """{name: {tensor: (RMS error, largest error)}}, relative to the tensor's RMS and to its largest element. `ours` is
    flashjit.attention; a peer that refuses the case is left out."""
    sums = {}
    for seed in range(draws):
        inputs = draw(case, seed)
        want = exact(case, *inputs)
        functions = {"flashjit": lambda q, k, v: ours(q, k, v, causal=case.causal),
                     **{name: peer(case, backend) for name, backend in PEERS.items()}}
        for name, function in functions.items():
            try:
                got = gradients(function, *inputs)
            except RuntimeError:
                if name == "flashjit":
                    raise
                continue
            for tensor, x, y in zip(TENSORS, got, want):
                error = x.double() - y
                entry = sums.setdefault(name, {}).setdefault(tensor, [0.0, 0.0, 0.0])
                entry[0] += error.square().sum().item()
                entry[1] += y.square().sum().item()
                entry[2] += (error.abs().max() / y.abs().max()).item()
    return {name: {tensor: (math.sqrt(error / size), largest / draws) for tensor, (error, size, largest) in tensors.items()}
            for name, tensors in sums.items()}


def ratios(errors):
    """{tensor: (RMS ratio, largest ratio)} of flashjit's errors to the better peer's."""
    peers = [errors[name] for name in PEERS if name in errors]
    return {tensor: tuple(errors["flashjit"][tensor][i] / min(one[tensor][i] for one in peers) for i in (0, 1))
            for tensor in TENSORS}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", help="libflashjit.so; default: the installed package's")
    parser.add_argument("--csv", help="file for the errors of all")
    parser.add_argument("--only", default="", help="cases whose name has this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("accuracy: no GPU here", file=sys.stderr)
        sys.exit(3)
    if arguments.lib:
        os.environ["FLASHJIT_LIBRARY"] = os.path.abspath(arguments.lib)
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
    import flashjit

    rows, table, beyond = [], [], 0
    for case in cases():
        if arguments.only not in str(case):
            continue
        errors = measure(case, flashjit.attention)
        found = ratios(errors)
        over = [t for t, (rms, largest) in found.items() if rms > RMS_LIMIT or largest > LARGEST_LIMIT]
        beyond += len(over)
        table.append(f"| {case} | " + " | ".join(f"{rms:.2f}, {largest:.2f}" for rms, largest in found.values()) + " |")
        print(table[-1], "beyond its limit: " + ", ".join(over) if over else "", flush=True)
        rows += [{"case": str(case), "library": name, "tensor": tensor, "rms": f"{rms:.3e}", "largest": f"{largest:.3e}"}
                 for name, tensors in errors.items() for tensor, (rms, largest) in tensors.items()]
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    print("\n| inputs | " + " | ".join(TENSORS) + " |\n|---" + "|---" * len(TENSORS) + "|", *table, sep="\n")
    print(f"{beyond} ratios are beyond {RMS_LIMIT} (RMS) or {LARGEST_LIMIT} (largest)")
    sys.exit(beyond != 0)


if __name__ == "__main__":
    main()

"""Trains a small GPT on this repository's own text, once with flashjit and once with PyTorch's attention, from the same
seed: the loss curves coincide, and the tokens per second can be compared.

    python3 tools/examples/python/gpt.py --seconds 90 --csv gpt.csv --png gpt.png

About 12 million parameters, bytes as tokens, bf16 by autocast, causal attention with heads of 64. Needs a GPU; --device cpu
with small sizes uses the CPU reference, to see that everything is wired up. Exit code: 1 if the curves diverge.
"""

import argparse
import csv
import math
import pathlib
import sys
import time

import flashjit
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[3]
SUFFIXES = (".md", ".hpp", ".cpp", ".cuh", ".py", ".h")


def corpus():
    """The bytes of this repository's text, in the order of the files' names."""
    files = sorted(
        path
        for path in ROOT.rglob("*")
        if path.suffix in SUFFIXES
        and path.is_file()
        and not any(part.startswith((".", "build")) for part in path.relative_to(ROOT).parts)
    )
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


ATTENTION = {
    "flashjit": lambda q, k, v: flashjit.attention(q, k, v, causal=True),
    "pytorch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


class Block(torch.nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (
            qkv[:, :, i].transpose(1, 2) for i in range(3)
        )  # views: flashjit reads them where they lie
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(torch.nn.Module):
    def __init__(self, layers, width, heads, length, attention):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(256, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                torch.nn.init.normal_(parameter, std=scale)

    def forward(self, ids, positions=None):
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(name, text, options, steps):
    """(losses by step, tokens per second after the first steps, the model)."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.length, ATTENTION[name]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    random = torch.Generator().manual_seed(options.seed)
    text = text.to(device)
    losses, start, warm = [], None, min(20, steps // 2)
    for step in range(steps):
        if step == warm:
            start = synchronized_time(device)
        begin = torch.randint(0, len(text) - options.length - 1, (options.batch, 1), generator=random).to(
            device
        )
        window = text[begin + torch.arange(options.length + 1, device=device)].long()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % 100 == 0 or step + 1 == steps:
            print(f"{name:9} step {step:5}  loss {loss.item():.4f}", flush=True)
    seconds = synchronized_time(device) - start
    parameters = sum(p.numel() for p in model.parameters())
    rate = (steps - warm) * options.batch * options.length / seconds
    print(f"{name:9} {parameters / 1e6:.1f} million parameters, {rate:,.0f} tokens per second", flush=True)
    return torch.stack(losses).tolist(), rate, model


def steps_within(text, options):
    """How many steps there is time for, by a short run of both."""
    if options.seconds is None:
        return options.steps
    start = time.perf_counter()
    per_step = sum(options.batch * options.length / train(name, text, options, 40)[1] for name in ATTENTION)
    left = options.seconds - (time.perf_counter() - start)
    return max(2, min(options.steps, int(left / per_step)))


def synchronized_time(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def smooth(values, span=20):
    return [
        sum(values[max(0, i - span + 1) : i + 1]) / len(values[max(0, i - span + 1) : i + 1])
        for i in range(len(values))
    ]


def write(path, losses, rates):
    names = list(losses)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["step", *(f"{name}_loss" for name in names), *(f"{name}_tokens_per_second" for name in names)]
        )
        for step, row in enumerate(zip(*losses.values())):
            writer.writerow(
                [step, *(f"{loss:.5f}" for loss in row), *(f"{rates[name]:.0f}" for name in names)]
            )


def read(path):
    """What write() wrote."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return (
        {name: [float(row[f"{name}_loss"]) for row in rows] for name in ATTENTION},
        {name: float(rows[0][f"{name}_tokens_per_second"]) for name in ATTENTION},
    )


def plot(path, losses, rates):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (name, values), style in zip(losses.items(), ("-", "--")):
        axes.plot(smooth(values), style, label=f"{name}: {rates[name]:,.0f} tokens/s")
    axes.set(xlabel="step", ylabel="loss (mean of 20 steps)", title="A small GPT, from the same seed")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, help="fewer steps where both trainings would take longer than this"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", help="write the losses of each step, and the speeds, here")
    parser.add_argument("--png", help="draw the curves here; needs matplotlib")
    parser.add_argument(
        "--draw", metavar="CSV", help="train nothing: draw what --csv wrote, e.g. on another machine"
    )
    options = parser.parse_args()
    if options.draw:
        plot(options.png or options.draw.removesuffix(".csv") + ".png", *read(options.draw))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpt: PyTorch finds no GPU; --device cpu with small sizes runs without", file=sys.stderr)
        return 77
    text = corpus()
    print(f"{len(text):,} bytes of text")
    losses, rates, steps = {}, {}, steps_within(text, options)
    for name in ATTENTION:
        losses[name], rates[name], _ = train(name, text, options, steps)
    apart = max(abs(a - b) for a, b in zip(*map(smooth, losses.values())))
    print(
        f"the smoothed curves are at most {apart:.4f} apart; speed {rates['flashjit'] / rates['pytorch']:.2f} of PyTorch's"
    )
    if options.csv:
        write(options.csv, losses, rates)
    if options.png:
        plot(options.png, losses, rates)
    return 0 if apart < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())

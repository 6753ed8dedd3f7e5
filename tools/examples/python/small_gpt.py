"""The small GPT that gpt.py trains and serve.py serves: its text, its model, its training.

Bytes are tokens. Blocks compute Q, K and V as views of one matrix product, which flashjit reads where they lie.
"""

import math
import pathlib
import time

import flashjit
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[3]
SUFFIXES = (".md", ".hpp", ".cpp", ".cuh", ".py", ".h")
ATTENTION = {
    "flashjit": lambda q, k, v: flashjit.attention(q, k, v, causal=True),
    "pytorch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


def corpus():
    """The bytes of this repository's text, in the order of the files' names."""
    hidden = lambda path: any(part.startswith((".", "build")) for part in path.relative_to(ROOT).parts)
    files = sorted(
        path for path in ROOT.rglob("*") if path.suffix in SUFFIXES and path.is_file() and not hidden(path)
    )
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def add_options(parser):
    """The model's sizes and how it is trained."""
    sizes = {"layers": 6, "width": 384, "heads": 6, "length": 4096, "batch": 16, "rate": 1e-3, "seed": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


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
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))  # views
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


def synchronized_time(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(name, text, options, steps):
    """(losses by step, tokens per second after the first steps, the model), with ATTENTION[name]."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.length, ATTENTION[name]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    rate = lambda step: min(1, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    random = torch.Generator().manual_seed(options.seed)
    text = text.to(device)
    losses, start, warm = [], None, min(20, steps // 2)
    for step in range(steps):
        if step == warm:
            start = synchronized_time(device)
        begin = torch.randint(0, len(text) - options.length - 1, (options.batch, 1), generator=random)
        window = text[begin.to(device) + torch.arange(options.length + 1, device=device)].long()
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
    speed = (steps - warm) * options.batch * options.length / seconds
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name:9} {parameters / 1e6:.1f} million parameters, {speed:,.0f} tokens per second", flush=True)
    return torch.stack(losses).tolist(), speed, model

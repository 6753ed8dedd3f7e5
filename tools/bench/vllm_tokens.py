#!/usr/bin/env python3
"""vLLM on flashjit beside vLLM on its own attention: tokens and log probabilities of tiny models of random weights.

    tools/bench/vllm_tokens.py --models llama qwen3 gemma2 mistral gpt_oss [--own CPU_ATTN]

Each model runs twice, in processes of its own: prompts, two with a common prefix, with prefix caching and chunked prefill,
greedily. It prints how many tokens agree and the largest difference of a log probability. Needs vLLM and transformers; without
a GPU vLLM's CPU wheel, whose platform knows no other backend than CPU_ATTN, by whose name flashjit then runs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

VOCABULARY = 512
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}


def config_of(name: str) -> object:
    import transformers as t

    common = {**COMMON, **HEADS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    made = {
        "llama": lambda: t.LlamaConfig(**common),
        "qwen3": lambda: t.Qwen3Config(**common),
        "gemma2": lambda: t.Gemma2Config(
            **common, sliding_window=32, query_pre_attn_scalar=32, hidden_act="gelu_pytorch_tanh"
        ),
        "mistral": lambda: t.MistralConfig(**common, sliding_window=32),
        "gpt_oss": lambda: t.GptOssConfig(
            **common, sliding_window=32, num_local_experts=4, num_experts_per_tok=2
        ),
    }
    return made[name]()


def make(name: str, folder: pathlib.Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)  # so that tokens differ
    model.save_pretrained(folder)


def generate(folder: str, flashjit: bool, own: str, answer: pathlib.Path, more: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    if flashjit and own == "CPU_ATTN":
        from flashjit.vllm import BACKEND
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    calls = count_calls() if flashjit else []
    backend = own if own == "CPU_ATTN" or not flashjit else "CUSTOM"
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=own == "CPU_ATTN",
        max_model_len=256,
        max_num_batched_tokens=64,  # chunks
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        attention_backend=backend,
        block_size=32,
        **more,
    )
    shared = [(7 * i * i + 3) % VOCABULARY for i in range(70)]
    prompts = [
        shared + [5, 6, 7],
        shared + [8, 9],
        [11, 12, 13],
        [(5 * i + 1) % VOCABULARY for i in range(40)],
    ]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)
    found = engine.generate(
        [{"prompt_token_ids": [x + 3 if x < 3 else x for x in prompt]} for prompt in prompts], sampling
    )
    result = []
    for request in found:
        output = request.outputs[0]
        chances = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        result.append({"tokens": list(output.token_ids), "logprobs": chances})
    if flashjit and not calls:
        sys.exit("vLLM did not call flashjit")
    answer.write_text(json.dumps(result))


def count_calls() -> list[int]:
    """The rows of each call of flashjit's layers, as they are made."""
    from flashjit._engines import Layer

    calls: list[int] = []
    attend = Layer.attend

    def counted(layer: Layer, q: object, *args: object, **named: object) -> object:
        calls.append(len(q))  # type: ignore[arg-type]
        return attend(layer, q, *args, **named)  # type: ignore[arg-type]

    Layer.attend = counted  # type: ignore[method-assign,assignment]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["llama", "qwen3", "gemma2", "mistral", "gpt_oss"])
    parser.add_argument("--own", default="CPU_ATTN", help="the backend of vLLM to compare with")
    parser.add_argument("--engine", default="{}", help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        folder, which, answer = args.one
        generate(folder, which == "flashjit", args.own, pathlib.Path(answer), json.loads(args.engine))
        return
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            make(name, pathlib.Path(folder) / "model")
            print(f"{name}: {compare(pathlib.Path(folder), args.own, args.engine)}", flush=True)


def compare(folder: pathlib.Path, own: str, engine: str) -> str:
    answers = {}
    for which in ("own", "flashjit"):
        answer = folder / f"{which}.json"
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [sys.executable, __file__, "--own", own, "--engine", engine]
        command += ["--one", str(folder / "model"), which, str(answer)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not answer.exists():
            return f"{which} failed: {(run.stdout + run.stderr)[-2500:]}"
        answers[which] = json.loads(answer.read_text())
    pairs = [
        (mine, theirs)
        for ours, others in zip(answers["flashjit"], answers["own"])
        for mine, theirs in zip(zip(*ours.values()), zip(*others.values()))
    ]
    same = sum(mine[0] == theirs[0] for mine, theirs in pairs)
    largest = max(abs(mine[1] - theirs[1]) for mine, theirs in pairs if mine[0] == theirs[0])
    return f"{same} of {len(pairs)} tokens equal, log probabilities within {largest:.1e}"


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""SGLang on flashjit beside SGLang on its own attention: tokens and log probabilities of tiny models of random weights.

    tools/bench/sglang_tokens.py --models llama qwen3 mistral [--page 16] [--device cuda --own triton --dtype bfloat16]

SGLang's model runner, pools, batches and layers run in this process, as in its benchmark of one batch: prompts are extended in
two parts, then decoded greedily. Each model runs twice, in processes of its own. It prints how many tokens agree and the
largest difference of a log probability. Needs SGLang and transformers; the packages that SGLang imports and does not call here
need not be installed. On a GPU (--device cuda) flashjit decodes in CUDA graphs, and SGLang's other layers are PyTorch's, as its
own kernels are one such package.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from vllm_tokens import VOCABULARY, make

FIRST = 37  # tokens of each prompt that are extended at first
DECODED = 24
ALWAYS_ABSENT = (
    "compressed_tensors",
    "xgrammar",
    "llguidance",
    "openai_harmony",
    "tvm_ffi",
    "outlines",
    "gguf",
)


def prompts() -> list[list[int]]:
    shared = [(7 * i * i + 3) % VOCABULARY for i in range(70)]
    made = [
        [*shared, 5, 6, 7],
        [*shared, 8, 9],
        [11 + i for i in range(39)],
        [(5 * i + 1) % VOCABULARY for i in range(60)],
    ]
    return [[x + 3 if x < 3 else x for x in prompt] for prompt in made]


def without_own_kernels() -> None:
    """SGLang's layers by PyTorch, and rows stored in its pool by PyTorch, too."""
    os.environ.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    import sglang.kernels.ops.kvcache.kvcache as kernels

    kernels.can_use_store_cache = lambda *_, **__: False
    import sglang.srt.layers.attention.triton_backend as triton

    triton.is_arch_support_pdl = lambda: False


def imported(device: str) -> Any:
    """SGLang's benchmark of one batch, where flashjit is one of the backends."""
    import absent_packages

    absent_packages.install("sglang", ALWAYS_ABSENT + (("sgl_kernel",) if device == "cuda" else ()))
    if device == "cuda":
        without_own_kernels()
    import flashjit.sglang
    import sglang.benchmark.one_batch as engine

    flashjit.sglang.register()
    return engine


def generate(folder: str, which: str, answer: pathlib.Path, args: argparse.Namespace) -> None:
    engine = imported(args.device)
    from vllm_tokens import count_calls

    calls = count_calls()
    runner = loaded(folder, "flashjit" if which == "flashjit" else args.own, engine, args)
    found = list(steps(runner, engine))
    if which == "flashjit" and not calls:
        sys.exit("SGLang did not call flashjit")
    answer.write_text(json.dumps(found))


def steps(runner: Any, engine: Any) -> Iterator[dict[str, list[Any]]]:
    """The tokens that follow each prompt and their log probabilities, step by step."""
    ids = prompts()
    requests = engine.prepare_synthetic_inputs_for_latency_test(
        len(ids), 0, custom_inputs=[x[:FIRST] for x in ids]
    )
    runner.extend(requests)
    options = argparse.Namespace(cut_len=FIRST)
    requests = engine.prepare_extend_inputs_for_correctness_test(options, ids, requests, runner.torch_runner)
    tokens, logits, batch = runner.extend(requests)
    for _ in range(DECODED):
        chances = logits.float().log_softmax(-1).max(-1).values
        yield {"tokens": tokens.tolist(), "logprobs": chances.tolist()}
        tokens, logits = runner.decode(tokens, batch)


def loaded(folder: str, backend: str, engine: Any, args: argparse.Namespace) -> Any:
    """SGLang's runner with the model, as its benchmark makes it."""
    arguments = engine.ServerArgs(
        model_path=folder,
        device=args.device,
        attention_backend=backend,
        dtype=args.dtype,
        skip_tokenizer_init=True,
        page_size=args.page,
        max_total_tokens=4096,
        mem_fraction_static=0.3,
        disable_cuda_graph=not args.graphs or args.device == "cpu" or backend == "torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        context_length=512,
        max_running_requests=8,
        disable_prefill_cuda_graph=True,
        **({"cuda_graph_bs_decode": [len(prompts())]} if args.device == "cuda" else {}),
    )
    arguments.resolve_once()
    engine._set_envs_and_config(arguments)
    ports = engine.PortArgs.init_new(arguments)
    rank = engine.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    engine.publish(arguments, role="scheduler", ranks=engine.SpawnRanks(world_rank=rank, gpu_id=0))
    engine._init_process_global_configs()
    engine.get_tokenizer = lambda *_, **__: None
    return engine.load_model(arguments, ports, 0, 0)[0]


def compare(folder: pathlib.Path, given: list[str]) -> str:
    answers = {}
    for which in ("flashjit", "own"):
        answer = folder / f"{which}.json"
        command = [sys.executable, __file__, *given, "--one", str(folder / "model"), which, str(answer)]
        run = subprocess.run(command, capture_output=True, text=True)
        if not answer.exists():
            sys.exit(f"{which} failed: {(run.stdout + run.stderr)[-1500:]}")
        answers[which] = json.loads(answer.read_text())
    pairs = [
        pair
        for ours, others in zip(answers["flashjit"], answers["own"])
        for pair in zip(ours["tokens"], others["tokens"], ours["logprobs"], others["logprobs"])
    ]
    same = sum(mine == theirs for mine, theirs, *_ in pairs)
    largest = max(abs(mine - theirs) for *_, mine, theirs in pairs)
    return f"{same} of {len(pairs)} tokens equal, log probabilities within {largest:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["llama", "qwen3", "mistral"])
    parser.add_argument("--own", default="torch_native", help="the backend of SGLang to compare with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--page", type=int, default=1)
    parser.set_defaults(graphs=True)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        folder, which, answer = args.one
        generate(folder, which, pathlib.Path(answer), args)
        return
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            make(name, pathlib.Path(folder) / "model")
            given = ["--own", args.own, "--device", args.device, "--dtype", args.dtype]
            found = compare(pathlib.Path(folder), [*given, "--page", str(args.page)])
            print(f"{name}, pages of {args.page}: {found}", flush=True)


if __name__ == "__main__":
    main()

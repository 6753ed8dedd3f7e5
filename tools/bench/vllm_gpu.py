#!/usr/bin/env python3
"""vLLM on a GPU: tokens of small models of random weights on flashjit and on vLLM's own backends, and tokens per second.

    tools/bench/vllm_gpu.py tokens --models llama mistral gpt_oss deepseek gemma2 --results /tmp/vllm-gpu
    tools/bench/vllm_gpu.py speeds --results /tmp/vllm-gpu

tokens: bfloat16, heads of 128, CUDA graphs of whole steps, prefix caching, chunks of 256 tokens; Llama also with drafts by
n-grams, FP8 caches, without graphs, and compiled. In bfloat16 two backends may round to another token: after it a sequence is not
compared, and the gap of the two tokens' log probabilities is printed. Each backend's log probabilities are also compared with
transformers' in float32 for the same tokens.
speeds: a Llama of 8 layers with the sizes of 8B; the engines are made at the same time, and measured in turns.

All engines are forks of one process, which has imported vLLM, --processes at a time; what each model gave is printed when its last
engine has ended. Needs vLLM and transformers; packages of servers and parsers stand empty. vLLM 0.26 calls flashjit's MLA CUSTOM.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import time
import traceback
from typing import Any

import absent_packages

VOCABULARY = 2048
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 128}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 99,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
}
#: vLLM imports them for servers and structured output.
UNUSED = (
    "cbor2",
    "jiter",
    "llguidance",
    "lmformatenforcer",
    "mistral_common",
    "openai_harmony",
    "outlines_core",
    "pybase64",
)
UNUSED += ("tvm_ffi", "xgrammar", "zmq")
OWN = {"deepseek": ["TRITON_MLA"], "gemma2": ["TRITON_ATTN"]}  # others: also FLASH_ATTN
OURS = ("CUSTOM", "FLASHJIT_MLA", "FLASHJIT_MLA_SPARSE")
#: Without graphs, vLLM's kernels and its newer runner.
PLAIN = {"enforce_eager": True, "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
#: (sequences, tokens of a prompt, new tokens)
SHAPES = ((1, 128, 128), (1, 7000, 128), (32, 1024, 128), (64, 2000, 64), (8, 7000, 1))
ready = multiprocessing.Value("i", 0)
failed = multiprocessing.Value("i", 0)


def config_of(name: str) -> Any:
    import transformers as t

    usual, window = {**SIZES, **HEADS}, {"sliding_window": 64}
    made = {
        "llama": lambda: t.LlamaConfig(**usual),
        "multiquery": lambda: t.LlamaConfig(**{**usual, "num_key_value_heads": 1}),
        "mistral": lambda: t.MistralConfig(**usual, **window),
        "gemma2": lambda: t.Gemma2Config(**usual, **window, query_pre_attn_scalar=128),
        "gpt_oss": lambda: t.GptOssConfig(**usual, **window, num_local_experts=4, num_experts_per_tok=2),
        "deepseek": lambda: t.DeepseekV2Config(**SIZES, **LATENT),
        "deepseek_sparse": lambda: t.DeepseekV3Config(
            **{**SIZES, **LATENT, "q_lora_rank": 256, "index_topk": 24}
        ),
    }
    return made[name]()


def make(name: str, folder: pathlib.Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4 if "lm_head" in key else 2)  # so that tokens differ
            if "sinks" in key:
                weight.normal_()
    model.to(torch.bfloat16).save_pretrained(folder)


def prompts() -> list[dict[str, list[int]]]:
    """Two share a prefix of 300 tokens."""
    tokens = VOCABULARY - 3
    shared = [(7 * i * i + 3) % tokens + 3 for i in range(300)]
    made = [[*shared, 5, 6, 7], [*shared, 8, 9], [11, 12, 13], [(5 * i + 1) % tokens + 3 for i in range(90)]]
    made += [[(j * 37 + i * (2 * j + 3)) % tokens + 3 for i in range(17 + 61 * j)] for j in range(12)]
    return [{"prompt_token_ids": prompt} for prompt in made]


def engine_of(folder: pathlib.Path, backend: str, more: dict[str, Any]) -> Any:
    from vllm import LLM

    if backend in OURS:
        backend = register(backend)
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "attention_backend": backend,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.02,
        "compilation_config": graphs([1, 4, 16, 64, 256]),
    }
    return LLM(str(folder), **{**arguments, **more})


def graphs(sizes: list[int]) -> dict[str, Any]:
    return {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}


def register(backend: str) -> str:
    """The name by which this vLLM takes the backend."""
    import flashjit.vllm as ours
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    ours.register()
    if backend in AttentionBackendEnum.__members__:
        return backend
    path = {"FLASHJIT_MLA": ours.LATENT_BACKEND, "FLASHJIT_MLA_SPARSE": ours.SPARSE_LATENT_BACKEND}[backend]
    register_backend(AttentionBackendEnum.CUSTOM, path)
    AttentionBackendEnum.CUSTOM.get_class().get_name = staticmethod(lambda: "CUSTOM")
    return "CUSTOM"


def count_calls() -> list[int]:
    from flashjit.vllm import _latent, _sparse_latent
    from vllm_tokens import count_calls as of_layers

    calls, decode = of_layers(), _latent.decode
    impl: Any = _sparse_latent.FlashjitSparseLatentImpl
    sparse = impl.forward_mqa

    def counted(*args: Any) -> Any:
        calls.append(len(args[2].seq_lens))
        return decode(*args)

    def counted_sparse(self: Any, *args: Any) -> Any:
        calls.append(args[2].num_decode_tokens)
        return sparse(self, *args)

    _latent.decode, impl.forward_mqa = counted, counted_sparse
    return calls


def tokens(folder: pathlib.Path, backend: str, answer: pathlib.Path, more: dict[str, Any]) -> None:
    from vllm import SamplingParams

    ours = backend in OURS
    calls = count_calls() if ours else []
    engine = engine_of(folder, backend, more)
    sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5, detokenize=False)
    found = engine.generate(prompts()[:1], sampling, use_tqdm=False)  # its prefix is kept
    found += engine.generate(prompts(), sampling, use_tqdm=False)
    if ours and not calls:
        raise RuntimeError("vLLM did not call flashjit")
    answer.write_text(json.dumps([described(request) for request in found]))


def described(request: Any) -> dict[str, Any]:
    output = request.outputs[0]
    return {
        "prompt": list(request.prompt_token_ids),
        "tokens": list(output.token_ids),
        "cached": request.num_cached_tokens,
        "top": [{str(token): x.logprob for token, x in step.items()} for step in output.logprobs],
    }


def speeds(folder: pathlib.Path, backend: str, answer: pathlib.Path, more: dict[str, Any]) -> None:
    import torch
    from vllm import SamplingParams

    engine, draw, found = engine_of(folder, backend, more), random.Random(0), {}

    def once(batch: int, length: int, new: int) -> float:
        given = [{"prompt_token_ids": draw.choices(range(3, VOCABULARY), k=length)} for _ in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        engine.generate(given, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    for shape in SHAPES:
        once(*shape)  # kernels are compiled
    if os.environ.get("VLLM_GPU_WARM"):
        return
    with ready.get_lock():
        ready.value += 1
    until = float(os.environ["VLLM_GPU_UNTIL"])
    while ready.value + failed.value < more_engines() and time.time() < until:
        time.sleep(0.05)
    with (answer.parent / "turn").open("w") as turn:
        for batch, length, new in SHAPES:
            fcntl.flock(turn, fcntl.LOCK_EX)
            times = [once(batch, length, new) for _ in range(3)]
            fcntl.flock(turn, fcntl.LOCK_UN)
            found[f"{batch} x ({length} + {new})"] = batch * new / min(times)
            answer.write_text(json.dumps(found))
            time.sleep(0.02)  # another engine's turn


def more_engines() -> int:
    return int(os.environ["VLLM_GPU_ENGINES"])


def prepare() -> None:
    """Imports what the forks need. Nothing touches the GPU."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    absent_packages.stand_for(UNUSED)
    import flashjit.vllm._backend
    import flashjit.vllm._latent
    import flashjit.vllm._sparse_latent  # noqa: F401
    import torch
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # which would import vLLM again for each engine
    assert not torch.cuda.is_initialized()


def start(work: Any, folder: pathlib.Path, backend: str, answer: pathlib.Path, more: dict[str, Any]) -> Any:
    def child() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no engine outlives this process
        log = os.open(f"{answer}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if more is PLAIN:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        try:
            work(folder, backend, answer, more)
        except BaseException:
            traceback.print_exc()
            with failed.get_lock():
                failed.value += 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def wait(children: list[Any], seconds: float) -> None:
    end = time.time() + seconds
    for child in children:
        child.join(max(0.1, end - time.time()))
        if child.is_alive():
            child.kill()


def runs_of(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Arguments of vLLM's engine by backend and kind of run."""
    mine = "FLASHJIT_MLA" if name == "deepseek" else "CUSTOM"
    runs: dict[tuple[str, str], dict[str, Any]] = {
        (backend, ""): {} for backend in (mine, *OWN.get(name, ["TRITON_ATTN", "FLASH_ATTN"]))
    }
    if name == "llama":
        runs[mine, "ngram"] = {"speculative_config": DRAFTS}
        runs[mine, "eager"] = {"enforce_eager": True}
        if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
            runs[mine, "compiled"] = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 16]}}
        runs[mine, "fp8"] = runs["TRITON_ATTN", "fp8"] = {"kv_cache_dtype": "fp8"}
    return runs


def compare_tokens(args: argparse.Namespace) -> None:
    end = time.time() + args.seconds
    prepare()
    makers = [
        start(made, args.results / name, name, args.results / f"{name}-made", {}) for name in args.models
    ]
    wait(makers, args.seconds)
    waiting = [(name, *key, more) for name in args.models for key, more in runs_of(name).items()]
    waiting.sort(key=lambda run: (bool(run[2]), run[1] == "FLASH_ATTN"))  # most telling first
    left = {name: sum(run[0] == name for run in waiting) for name in args.models}
    answers: dict[str, dict[tuple[str, str], pathlib.Path]] = {name: {} for name in args.models}
    running: list[tuple[Any, Any, pathlib.Path]] = []
    while (waiting or running) and time.time() < end:
        while waiting and len(running) < args.processes:
            name, backend, kind, more = run = waiting.pop(0)
            answer = answers[name][backend, kind] = args.results / f"{name}-{backend}{kind}.json"
            running.append((run, start(tokens, args.results / name, backend, answer, more), answer))
        time.sleep(0.1)
        for run, child, answer in [each for each in running if not each[1].is_alive()]:
            running.remove((run, child, answer))
            left[run[0]] -= 1
            if not answer.exists() and run[2] != "plain":
                print(run[:3], "failed, and is tried again:", last_of(answer), flush=True)
                waiting.append((run[0], run[1], "plain", PLAIN))
                left[run[0]] += 1
            if not left[run[0]]:
                start(reported, args.results / run[0], run[0], args.results / run[0], answers[run[0]])
    for _, child, _ in running:
        child.kill()
    for name in args.models:
        if left[name]:
            start(reported, args.results / name, name, args.results / name, answers[name])
    wait(multiprocessing.active_children(), 60)


def made(folder: pathlib.Path, name: str, *_: Any) -> None:
    if not folder.exists():
        make(name, folder)


def reported(folder: pathlib.Path, name: str, _: Any, answers: Any) -> None:
    with open(f"{folder}.txt", "w") as text, contextlib.redirect_stdout(text):
        report(name, answers, folder.parent)


def last_of(answer: pathlib.Path) -> str:
    return pathlib.Path(f"{answer}.log").read_text()[-700:]


def report(name: str, answers: dict[tuple[str, str], pathlib.Path], results: pathlib.Path) -> None:
    found = {}
    for (backend, kind), answer in answers.items():
        if answer.exists():
            found[backend, kind] = json.loads(answer.read_text())
        else:
            print(f"{name} {backend} {kind} failed: {last_of(answer)}")
    for (backend, kind), mine in found.items():
        if backend in ("CUSTOM", "FLASHJIT_MLA"):
            for (own, other), theirs in found.items():
                if own not in ("CUSTOM", "FLASHJIT_MLA") and other in ("", kind):
                    print(f"{name} {kind} beside {own} {other}: {difference(mine, theirs)}", flush=True)
    for (backend, kind), text in against_float32(results / name, found).items():
        print(f"{name} {backend} {kind} beside float32: {text}", flush=True)


def difference(mine: list[Any], theirs: list[Any]) -> str:
    same, total, largest, gaps = 0, 0, 0.0, []
    for a, b in zip(mine, theirs):
        total += len(a["tokens"])
        for x, y, top, other in zip(a["tokens"], b["tokens"], a["top"], b["top"]):
            largest = max([largest, *(abs(top[token] - other[token]) for token in {*top} & {*other})])
            if x != y:
                gaps.append(round(other[str(y)] - other.get(str(x), -99.0), 4))
                break
            same += 1
    return f"{same} of {total} tokens equal, {len(gaps)} sequences differ by {gaps}, log probabilities within {largest:.3f}"


def against_float32(folder: pathlib.Path, answers: dict[Any, list[Any]]) -> dict[Any, str]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).cuda()
    result = {}
    for key, requests in answers.items():
        errors = []
        for request in requests:
            ids = torch.tensor([request["prompt"] + request["tokens"]], device="cuda")
            with torch.no_grad():
                exact = model(ids).logits[0].log_softmax(-1)[len(request["prompt"]) - 1 :].cpu()
            for row, token, top in zip(exact, request["tokens"], request["top"]):
                errors.append(abs(float(row[token]) - top[str(token)]))
        errors.sort()
        mean, most = sum(errors) / len(errors), errors[int(len(errors) * 0.99)]
        result[key] = f"mean {mean:.4f}, 99% {most:.3f}, largest {errors[-1]:.3f} of {len(errors)}"
    return result


def compare_speeds(args: argparse.Namespace) -> None:
    import transformers

    folder = args.results / "large"
    transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    more = {
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 12 << 30,
        "gpu_memory_utilization": 0.2,
        "load_format": "dummy",
        "enable_prefix_caching": False,
        "compilation_config": graphs([1, 8, 32, 64]),
    }
    os.environ["VLLM_GPU_UNTIL"] = str(time.time() + 0.65 * args.seconds)  # then without those that lag
    os.environ["VLLM_GPU_ENGINES"] = str(len(args.backends))
    prepare()
    answers = {name: args.results / f"speed-{name}.json" for name in args.backends}
    wait([start(speeds, folder, name, answer, more) for name, answer in answers.items()], args.seconds)
    for name, answer in answers.items():
        found = json.loads(answer.read_text()) if answer.exists() else {}
        print(name, *(f"{shape}: {speed:.0f}" for shape, speed in found.items()), sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tokens", "speeds"))
    parser.add_argument("--models", nargs="*", default=["llama", "mistral", "gpt_oss", "deepseek", "gemma2"])
    parser.add_argument("--backends", nargs="*", default=["CUSTOM", "FLASH_ATTN", "TRITON_ATTN"])
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("/tmp/vllm-gpu"))
    parser.add_argument("--processes", type=int, default=16, help="engines at the same time")
    parser.add_argument("--seconds", type=float, default=300, help="for all engines")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    (compare_tokens if args.what == "tokens" else compare_speeds)(args)


if __name__ == "__main__":
    main()

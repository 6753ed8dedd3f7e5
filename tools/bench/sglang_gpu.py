#!/usr/bin/env python3
"""SGLang on flashjit on a GPU, in bfloat16, beside transformers in float32. Little of it needs the GPU, and what is there counts.

    tools/bench/sglang_gpu.py make FOLDER                  models and transformers' tokens, without a GPU
    tools/bench/sglang_gpu.py run FOLDER [--cases llama]   on the GPU: each step is written as it ends
    tools/bench/sglang_gpu.py judge FOLDER                 what run gave, without a GPU

SGLang's model runner, pools and layers run as in sglang_tokens.py: prompts are extended in two parts, then decoded greedily, in
CUDA graphs or without. run prints the seconds at which each stage began, and step by step how many tokens are transformers'. A
sequence counts up to its first other token. judge asks transformers about the tokens that came. --device cpu rehearses it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import sglang_tokens

#: Names of runs: model, rows of a page, graphs, backend.
CASES = {
    "llama": ("llama", 16, True, "flashjit"),
    "llama_pages_1": ("llama", 1, True, "flashjit"),
    "llama_eager": ("llama", 16, False, "flashjit"),
    "qwen3": ("qwen3", 1, True, "flashjit"),
    "mistral": ("mistral", 16, True, "flashjit"),
    "gemma2": ("gemma2", 16, True, "flashjit"),
    "llama_triton": ("llama", 16, True, "triton"),
}
BEGUN = time.time()


def make(folder: pathlib.Path, names: list[str]) -> None:
    import torch
    import transformers
    import vllm_tokens

    vllm_tokens.COMMON.update(hidden_size=256, intermediate_size=512)
    vllm_tokens.HEADS.update(head_dim=128)
    for name in sorted({CASES[case][0] for case in names}):
        vllm_tokens.make(name, folder / name)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)
        model.save_pretrained(folder / name)  # weights that both types have
        model = model.float()
        found = []
        for prompt in sglang_tokens.prompts():
            ids, tokens, logprobs = list(prompt), [], []
            for _ in range(sglang_tokens.DECODED):
                chances = last_chances(model, ids, 1)[0]
                tokens.append(int(chances.argmax()))
                logprobs.append(float(chances.max()))
                ids.append(tokens[-1])
            found.append({"tokens": tokens, "logprobs": logprobs})
        (folder / f"{name}.reference.json").write_text(json.dumps(found))
        print(f"{name} is made", flush=True)


def last_chances(model: Any, ids: list[int], rows: int) -> Any:
    """Log probabilities of the tokens behind the last rows of ids."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -rows:].log_softmax(-1)


def run_case(folder: pathlib.Path, results: pathlib.Path, case: str, device: str) -> None:
    """Writes a line for each step, and prints it beside the reference."""
    name, page, graphs, backend = CASES[case]
    say = lambda text: print(f"{case} {time.time() - BEGUN:.1f} s: {text}", flush=True)
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # which else compiles small functions for half a minute
    say("imports")
    engine = sglang_tokens.imported(device)
    import vllm_tokens

    calls = vllm_tokens.count_calls()
    args = argparse.Namespace(
        device=device, dtype="bfloat16" if device == "cuda" else "float32", page=page, graphs=graphs
    )
    say("loads")
    runner = sglang_tokens.loaded(str(folder / name), backend, engine, args)
    say("runs")
    reference = json.loads((folder / f"{name}.reference.json").read_text())
    together, same, largest = [True] * len(reference), 0, 0.0
    with (results / f"{case}.jsonl").open("w") as lines:
        for at, step in enumerate(sglang_tokens.steps(runner, engine)):
            lines.write(json.dumps(step) + "\n")
            lines.flush()
            for i, (wanted, token, chance) in enumerate(zip(reference, step["tokens"], step["logprobs"])):
                together[i] = together[i] and token == wanted["tokens"][at]
                if together[i]:
                    same, largest = same + 1, max(largest, abs(chance - wanted["logprobs"][at]))
            say(
                f"step {at}: {same} of {(at + 1) * len(reference)} tokens are the reference's, log probabilities within {largest:.2g}"
            )
    say(f"done, {len(calls)} calls of flashjit from Python")


def judge(folder: pathlib.Path, results: pathlib.Path) -> None:
    import torch
    import transformers

    for case, (name, *_) in CASES.items():
        if not (results / f"{case}.jsonl").exists():
            continue
        steps = [json.loads(line) for line in (results / f"{case}.jsonl").read_text().splitlines()]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        errors, best = [], 0
        for i, prompt in enumerate(sglang_tokens.prompts() if steps else ()):
            tokens = [step["tokens"][i] for step in steps]
            chances = last_chances(model, prompt + tokens[:-1], len(tokens))
            best += sum(int(row.argmax()) == token for row, token in zip(chances, tokens))
            errors += [
                abs(float(row[token]) - step["logprobs"][i])
                for row, token, step in zip(chances, tokens, steps)
            ]
        if errors:
            errors.sort()
            print(
                f"{case}: {best} of {len(errors)} tokens are transformers' best; errors of log probabilities: mean "
                f"{sum(errors) / len(errors):.2g}, 99% {errors[int(0.99 * (len(errors) - 1))]:.2g}, largest {errors[-1]:.2g}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("make", "run", "judge", "one"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--results", type=pathlib.Path, help="where run writes; the folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=3, help="so many cases at a time, in their order")
    args = parser.parse_args()
    args.results = args.results or args.folder
    for folder in (args.folder, args.results):
        folder.mkdir(parents=True, exist_ok=True)
    if args.action == "make":
        make(args.folder, args.cases)
    elif args.action == "judge":
        judge(args.folder, args.results)
    elif args.action == "one":
        run_case(args.folder, args.results, args.cases[0], args.device)
    else:
        sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    """Cases in processes of their own, as SGLang has one engine a process. Returns how many failed."""
    waiting, running, failed = list(args.cases), [], 0
    while waiting or running:
        while waiting and len(running) < args.processes:
            command = [sys.executable, __file__, "one", str(args.folder), "--cases", waiting.pop(0)]
            command += ["--results", str(args.results), "--device", args.device]
            running.append(subprocess.Popen(command))
        failed += sum(process.poll() not in (None, 0) for process in running)
        running = [process for process in running if process.poll() is None]
        time.sleep(0.1)
    return failed


if __name__ == "__main__":
    main()

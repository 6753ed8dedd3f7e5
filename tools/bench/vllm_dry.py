#!/usr/bin/env python3
"""vLLM 0.26 as on an H200, but with its tensors on the CPU: tokens of small models on flashjit beside transformers'.

    mkdir stub && ln -s /usr/local/cuda/lib64/stubs/libcuda.so stub/libcuda.so.1
    LD_LIBRARY_PATH=stub tools/bench/vllm_dry.py --models llama mistral gemma2 [--runner 1 [--shared]] [--prompts 17]
        [--engine '{"kv_cache_dtype": "int4_per_token_head"}']
    ... --runner 1 --models deepseek deepseek_sparse [--engine '{"kv_cache_dtype": "fp8"}']
    ... --runner 1 --models multiquery --ranks 2

For machines without a GPU: shows what an engine imports, chooses and asks of the backend before anything is tried on one. vLLM's CUDA
wheel, its engine, scheduler, prefix cache and model runner (1 or 2) run in fp32, without graphs and without vLLM's own kernels; the
kernels of runner 2 are interpreted by Triton, which takes NumPy before 2.3. --shared is for cascade attention, which runner 1 has:
all prompts share 300 tokens. --ranks is for decode context parallelism, each rank a process. Where a cache rounds, transformers rounds K
and V alike. Needs what vllm_gpu.py needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import types
from typing import Any

import cache_rounding
import vllm_gpu
import vllm_latents_dry

PLAIN = {
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 28,
    "compilation_config": {"mode": 0, "custom_ops": ["none"]},
    "kernel_config": {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}},
}
COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


class Nothing:
    """Stands for streams and events."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...


def pretend_h200() -> None:
    """Before vLLM is imported."""
    import torch

    properties = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=150 << 30,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda *_: properties.name
    cuda.Event = cuda.Stream = torch.Event = torch.Stream = Nothing  # type: ignore[assignment, misc]
    cuda.current_stream = cuda.stream = Nothing
    cuda.set_stream = cuda.synchronize = torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment, method-assign]
    for name in ("zeros", "empty", "tensor", "full", "ones", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, without_pinning(getattr(torch, name)))


def without_pinning(function: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **named: Any) -> Any:
        if str(named.get("device")).startswith("cuda"):  # as models name their platform's
            named["device"] = "cpu"
        return function(*args, **named)

    return made


def choose_platform() -> None:
    import vllm.platforms as platforms
    import vllm.platforms.cuda as cuda
    from vllm.platforms.interface import DeviceCapability

    class Platform(cuda.NonNvmlCudaPlatform):
        dist_backend = "gloo"
        get_device_capability = classmethod(lambda *_, **__: DeviceCapability(9, 0))
        get_device_total_memory = classmethod(lambda *_, **__: 150 << 30)
        get_device_name = classmethod(lambda *_, **__: "NVIDIA H200")
        num_compute_units = classmethod(lambda *_, **__: 132)
        get_device_communicator_cls = classmethod(lambda *_: COMMUNICATOR)
        use_custom_op_collectives = classmethod(lambda *_: False)
        opaque_attention_op = classmethod(lambda *_, **__: False)
        is_pin_memory_available = classmethod(lambda *_, **__: False)
        get_current_memory_usage = classmethod(lambda *_, **__: 0.0)

    platforms._current_platform = platforms.current_platform = Platform()


def put_on_cpu(runner: int, cascade: bool) -> None:
    """The worker's tensors."""
    import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
    import vllm.utils.cpu_triton_utils as kernels
    import vllm.v1.worker.gpu.buffer_utils as buffers
    from vllm.v1.worker import cpu_model_runner, gpu_worker
    from vllm.v1.worker.cpu import model_runner
    from vllm.v1.worker.workspace import init_workspace_manager

    shm_broadcast.MessageQueue.create_from_process_group = lambda *_, **__: None  # each rank schedules
    buffers.is_uva_available = lambda: True
    buffers.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    kernels.compute_slot_mapping_kernel = Slots()
    kind = cpu_model_runner.CPUModelRunner if runner == 1 else model_runner.CPUModelRunner
    if cascade:
        kind.num_sms, kind.cascade_attn_enabled = 132, property(lambda _: True, lambda *_: None)
    kind._dummy_sampler_run = lambda *_, **__: __import__("torch").zeros(1)

    def init_device(self: Any) -> None:
        import torch
        import vllm.triton_utils
        import vllm.v1.sample.ops.topk_topp_sampler as sampler

        self.device = self.device_config.device = torch.device("cpu")
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        init_workspace_manager(self.device, 1)
        if runner == 1:
            vllm.triton_utils.HAS_TRITON = sampler.HAS_TRITON = False
        self.model_runner = kind(self.vllm_config, self.device)

    worker = gpu_worker.Worker
    worker.init_device = init_device
    worker._scoped_allocator_max_split = lambda *_, **__: contextlib.nullcontext()
    worker.determine_available_memory = lambda self: (self.model_runner.profile_run(), 1 << 28)[1]
    worker.compile_or_warm_up_model = lambda _: gpu_worker.CompilationTimes(language_model=0.0, encoder=0.0)


class Slots:
    """Runner 1's kernel of slots, whose grid is given first."""

    def __getitem__(self, _: Any) -> Any:
        return self

    def __call__(
        self,
        count: int,
        _: int,
        starts: Any,
        at: Any,
        table: Any,
        __: int,
        rows: int,
        out: Any,
        KV_CACHE_BLOCK_SIZE: int,
        BLOCKS_PER_KV_BLOCK: int,
        TOTAL_CP_WORLD_SIZE: int,
        TOTAL_CP_RANK: int,
        CP_KV_CACHE_INTERLEAVE_SIZE: int,
        **___: Any,
    ) -> None:
        world, turn = TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
        for i in range(len(starts) - 1):
            chosen = slice(int(starts[i]), int(starts[i + 1]))
            if chosen.stop > count:
                break
            block, place = at[chosen].long() // (KV_CACHE_BLOCK_SIZE * world), at[chosen].long()
            place = place % (KV_CACHE_BLOCK_SIZE * world)
            own = place // turn % world == TOTAL_CP_RANK
            place = place // (world * turn) * turn + place % turn
            slots = table[i, block * BLOCKS_PER_KV_BLOCK + place // rows].long() * rows + place % rows
            out[chosen] = slots.where(own, -1)
        out[count:] = -1


def print_beside_transformers(folder: pathlib.Path, answer: pathlib.Path, cache_type: str) -> None:
    import torch
    import transformers

    rounds = cache_type.endswith("_per_token_head")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=cache_rounding.attention_over(cache_type) if rounds else "eager",
    )
    if folder.name.startswith("deepseek") and cache_type.startswith("fp8"):
        vllm_latents_dry.round_in_transformers(model, cache_type)
    same = total = 0
    farthest = 0.0
    for request in json.loads(answer.read_text()):
        ids = torch.tensor([request["prompt"] + request["tokens"]])
        mask = vllm_latents_dry.mask_of(model, ids.shape[1])
        with torch.no_grad():
            rows = model(ids, attention_mask=mask).logits[0].log_softmax(-1)[len(request["prompt"]) - 1 : -1]
        for row, token, top in zip(rows, request["tokens"], request["top"]):
            total, same = total + 1, same + (int(row.argmax()) == token)
            farthest = max(farthest, abs(float(row[token]) - top[str(token)]))
    print(
        f"{folder.name}: {same} of {total} tokens are transformers', log probabilities within {farthest:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["llama", "mistral", "gemma2"])
    parser.add_argument("--runner", type=int, choices=(1, 2), default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument(
        "--shared", action="store_true", help="prompts with a common prefix, and cascade attention"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="for decode context parallelism, of a model with one head of K and V",
    )
    parser.add_argument("--engine", default="{}", help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("/tmp/vllm-dry"))
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(args.runner - 1)
    if args.runner == 2:
        os.environ["TRITON_INTERPRET"] = "1"
    if args.ranks > 1:
        os.environ.update(
            TRITON_INTERPRET="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getpid() % 500)
        )
        PLAIN.update(
            tensor_parallel_size=args.ranks,
            decode_context_parallel_size=args.ranks,
            distributed_executor_backend="external_launcher",
        )
    PLAIN.update(json.loads(args.engine))
    given = vllm_gpu.prompts()[: args.prompts]
    if args.shared:
        PLAIN["disable_cascade_attn"] = False
        shared = vllm_gpu.prompts()[0]["prompt_token_ids"][:300]
        given = [{"prompt_token_ids": shared + list(range(20, 23 + i))} for i in range(max(args.prompts, 8))]
    vllm_gpu.prompts = lambda: given
    vllm_gpu.absent_packages.stand_for(vllm_gpu.UNUSED)
    pretend_h200()
    choose_platform()
    vllm_gpu.prepare()
    put_on_cpu(args.runner, args.shared)
    vllm_latents_dry.put_on_cpu(PLAIN.get("kv_cache_dtype", "auto"))
    for name in args.models:  # in processes of their own, as torch's threads do not outlive a fork
        folder, answer = args.results / name, args.results / f"{name}.json"
        answer.unlink(missing_ok=True)
        vllm_gpu.start(vllm_gpu.made, folder, name, args.results / f"{name}-made", {}).join()
        running = []
        for rank in range(args.ranks):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks))
            own = answer if rank == 0 else args.results / f"{name}-rank{rank}.json"
            backend = {"deepseek": "FLASHJIT_MLA", "deepseek_sparse": "FLASHJIT_MLA_SPARSE"}.get(
                name, "CUSTOM"
            )
            running.append(vllm_gpu.start(vllm_gpu.tokens, folder, backend, own, PLAIN))
        for process in running:
            process.join()
        if not answer.exists():
            print(f"{name} failed: {vllm_gpu.last_of(answer)}")
            continue
        whole = multiprocessing.get_context("spawn")  # where torch is itself
        process = whole.Process(
            target=print_beside_transformers, args=(folder, answer, PLAIN.get("kv_cache_dtype", "auto"))
        )
        process.start()
        process.join()


if __name__ == "__main__":
    main()

"""Sigmoid attention, without a softmax: FlashInfer's attention with a transform of logits beside weight_mod. Our softmax is a problem of its
own, so that the same run has its time. Where FlashInfer's modules are not compiled beforehand, nvcc compiles them at the first call."""

import functools
import math
import typing

import racing
from measuring import torch

HIDDEN, LENGTHS = 2048, (2048, 4096, 8192, 16384)
#: A product z of Q and K weighs 1 / (1 + exp2(slope * z + shift)). factor is 1: a sigmoid has none, but modules that are compiled take it.
SCALARS = "slope", "shift", "factor"
SIGMOID = """REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(float(logits) * slope + shift));
  })"""
#: Each back end's interface reads the scalars and leaves out the softmax in its own way.
VARIANTS = {
    "fa3": """struct Weights : AttentionVariantBase {
  float slope, shift;
  template <typename MainloopParams, typename BlockCoord>
  __device__ Weights(const MainloopParams& params, const BlockCoord& block_coord) {
    slope = params.additional_params.slope;
    shift = params.additional_params.shift;
  }
  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return DefaultUpdater<NUM_ROWS_PER_THREAD>();
  }
  %s
};""",
    "fa2": """struct Weights : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint32_t window_left, qo_len, kv_len;
  float slope, shift;
  template <typename Params>
  __device__ __host__ Weights(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    slope = params.slope;
    shift = params.shift;
  }
  %s
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return output; })
};""",
}


class Problem(typing.NamedTuple):
    weights: str
    dim: int
    causal: bool
    length: int

    @property
    def name(self):
        mask = "causal" if self.causal else "full"
        return f"{self.weights}, d{self.dim} {mask}, 1 x {self.length} tokens, {self.heads} heads"

    @property
    def heads(self):
        return HIDDEN // self.dim


def problems():
    for dim in (128, 64):
        for causal in (True, False):
            for length in LENGTHS:
                for weights in ("sigmoid", "softmax"):
                    yield Problem(weights, dim, causal, length)


def jit_arguments(backend, dim):
    """The arguments of flashinfer.jit.gen_customize_single_prefill_module."""
    types = [torch.bfloat16] * 3
    scalars = list(SCALARS), ["double"] * len(SCALARS)
    uri = f"weights_sigmoid_{backend}_d{dim}"
    return backend, uri, *types, dim, dim, [], [], *scalars, "Weights", VARIANTS[backend] % SIGMOID


@functools.cache
def module(backend, dim):
    from flashinfer.jit import gen_customize_single_prefill_module

    return gen_customize_single_prefill_module(*jit_arguments(backend, dim)).build_and_load()


def expected(problem, q, k, v):
    """O in fp32: q, k, v [tokens, heads, dim]."""
    if problem.weights == "softmax":
        return racing.attention_in_fp32(q, k, v, problem.causal)
    sigmoid = lambda scores: torch.sigmoid(scores - math.log(problem.length))
    return racing.attention_in_fp32(q, k, v, problem.causal, weigh=sigmoid)


def ours(flashjit, problem, q, k, v):
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    bias = -math.log(problem.length)
    sigmoid = lambda score, b, h, q, kv: torch.sigmoid(score + bias)
    how = {} if problem.weights == "softmax" else {"weight_mod": sigmoid}
    return lambda: flashjit.attention(*heads_first, causal=problem.causal, **how)[0].transpose(0, 1)


def theirs(flashinfer, problem, backend, q, k, v):
    slope, shift = -(problem.dim**-0.5) / math.log(2), math.log2(problem.length)
    call = flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module
    how = {"mask_mode": int(problem.causal)}  # MaskMode.NON_CAUSAL and CAUSAL
    return lambda: call(module(backend, problem.dim), q, k, v, slope, shift, 1.0, **how)


def heat(problem, device="cuda"):
    import flashinfer
    import flashjit

    torch.manual_seed(problem.length)
    shape = problem.length, problem.heads, problem.dim
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    calls = {"flashjit": [ours(flashjit, problem, q, k, v)]}
    if problem.weights == "sigmoid":
        for backend in VARIANTS:
            calls[f"FlashInfer, {backend}"] = [theirs(flashinfer, problem, backend, q, k, v)]
    pairs = racing.pairs([problem.length], [problem.length], problem.causal)
    operations = 4.0 * HIDDEN * pairs
    return racing.Heat(problem.name, calls, (expected(problem, q, k, v),), 0.01, operations)


RACE = racing.Race(
    "weights",
    ("flashinfer",),
    "pip install flashinfer-python",
    problems,
    heat,
    {"FlashInfer": "flashinfer-python"},
)

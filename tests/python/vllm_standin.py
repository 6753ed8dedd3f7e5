"""The parts of vLLM 0.32 that flashjit.vllm touches, for tests where vLLM is not installed."""

import enum
import sys
import types
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2


class AttentionBackendEnum(enum.Enum):
    CUSTOM = "CUSTOM"


@dataclass
class MultipleOf:
    base: int


class AttentionBackend:
    """Asks as vLLM's validate_configuration() does."""

    @classmethod
    def validate(cls, head_size, dtype, kv_cache_dtype, block_size, capability):
        reasons = []
        if not cls.supports_head_size(head_size):
            reasons.append("head_size not supported")
        if dtype not in cls.supported_dtypes:
            reasons.append("dtype not supported")
        if not cls.supports_compute_capability(capability):
            reasons.append("compute capability not supported")
        reason = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, False, False, False, False, capability
        )
        return reasons + [reason] * (reason is not None)


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.device = device


class AttentionImpl(Generic[T]):
    need_to_return_lse_for_decode = False


class MLACommonMetadataBuilder(AttentionMetadataBuilder[T]):
    pass


class MLACommonImpl(AttentionImpl[T]):
    def __init__(self, *args, **named):
        self.kv_lora_rank, self.scale = named["kv_lora_rank"], named["scale"]


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True
    mm_req_doc_ranges: Any = None
    seq_lens_cpu_upper_bound: Any = None


registered: dict[Any, str] = {}


def register_backend(backend, class_path=None):
    registered[backend] = class_path


def install(monkeypatch):
    """Puts the modules in place, as far as a test goes."""
    here = {name: value for name, value in globals().items() if not name.startswith("_")}
    names = (
        "vllm",
        "vllm.v1",
        "vllm.v1.attention",
        "vllm.v1.attention.backend",
        "vllm.v1.attention.backends",
        "vllm.v1.attention.backends.registry",
        "vllm.model_executor",
        "vllm.model_executor.layers",
        "vllm.model_executor.layers.attention",
        "vllm.model_executor.layers.attention.mla_attention",
    )
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(here, MLACommonBackend=AttentionBackend, MLACommonMetadata=object)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"].envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    for name in ("flashjit.vllm._backend", "flashjit.vllm._latent"):
        monkeypatch.delitem(sys.modules, name, raising=False)

"""The parts of vLLM 0.32 that flashjit.vllm touches, for tests where vLLM is not installed."""

import enum
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def normal(*size):
    return torch.randn(*size, device=DEVICE)


def described(old, new, table, **changed):
    """How vLLM describes requests with `old` keys and `new` tokens each, and where the tokens of the first begin, of the next, ..."""
    starts = torch.tensor([0, *new]).cumsum(0).int()
    lengths = [n + m for n, m in zip(old, new)]
    given = {
        "query_start_loc": starts.to(DEVICE),
        "query_start_loc_cpu": starts,
        "seq_lens": ints(*lengths),
        "num_reqs": len(new),
        "num_actual_tokens": sum(new),
        "max_query_len": max(new),
        "max_seq_len": max(lengths),
        "block_table_tensor": table,
        "slot_mapping": None,
    }
    return CommonAttentionMetadata(**{**given, **changed}), starts


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

    def __new__(cls, *args, **named):
        self = super().__new__(cls)
        self.dcp_world_size, self.dcp_rank = get_dcp_world_size_and_rank(True)
        return self


class MLAAttentionImpl(AttentionImpl[T]):
    pass


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


class Group:
    """Ranks as threads of a process: what each one gives is there for all when the last one has come."""

    def __init__(self, world):
        self.world_size, self.barrier = world, threading.Barrier(world)
        self.given = [None] * world

    @property
    def rank_in_group(self):
        return RANK.number

    def exchange(self, x):
        self.given[self.rank_in_group] = x
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_gather(self, x, dim):
        return torch.cat(self.exchange(x), dim)


RANK = threading.local()
groups: list[Group] = []


def get_dcp_group():
    assert groups
    return groups[-1]


def get_dcp_world_size_and_rank(dcp_sharded):
    return (groups[-1].world_size, RANK.number) if groups and dcp_sharded else (1, 0)


def get_current_vllm_config_or_none():
    return None


def cp_lse_ag_out_rs(out, lse, group, return_lse=False):
    """out: [rows, heads of all ranks, d]. lse: [rows, heads of all ranks], of base e."""
    outs, lses = zip(*group.exchange((out, lse)))
    joined = torch.stack(lses).logsumexp(0)
    whole = sum(x * (y - joined).exp().nan_to_num(0.0)[..., None] for x, y in zip(outs, lses))
    own = slice(*(group.rank_in_group + i for i in range(2)))
    heads = slice(*(x * out.shape[1] // group.world_size for x in (own.start, own.stop)))
    return whole[:, heads], joined[:, heads]


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
        "vllm.v1.attention.ops",
        "vllm.v1.attention.ops.dcp",
        "vllm.config",
        "vllm.distributed",
        "vllm.distributed.parallel_state",
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
    sys.modules["vllm.distributed"].parallel_state = sys.modules["vllm.distributed.parallel_state"]
    sys.modules["vllm.v1.attention.ops"].dcp = sys.modules["vllm.v1.attention.ops.dcp"]
    groups.clear()
    for name in (
        "flashjit.vllm._backend",
        "flashjit.vllm._latent",
        "flashjit.vllm._sparse_latent",
        "flashjit.vllm._shards",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)

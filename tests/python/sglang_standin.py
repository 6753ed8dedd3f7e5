"""The parts of SGLang 0.5.23 that flashjit.sglang touches, for tests where SGLang is not installed."""

import enum
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch


class AttentionArch(enum.Enum):
    MLA = 1
    MHA = 2


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(enum.Enum):
    EXTEND = 1
    DECODE = 2
    TARGET_VERIFY = 3
    DRAFT_EXTEND_V2 = 4

    def is_decode_or_idle(self):
        return self is ForwardMode.DECODE

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY


class AttentionBackend:
    def __init__(self):
        pass


@dataclass
class KVWriteLoc:
    loc: Any
    swa_loc: Any = None

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc)


class Pool:
    """Keys and values of one layer by token, NaN where nothing was stored."""

    def __init__(self, tokens, heads, dim, dim_v, dtype, device):
        self.k = torch.full((tokens, heads, dim), float("nan"), device=device).to(dtype)
        self.v = torch.full((tokens, heads, dim_v), float("nan"), device=device).to(dtype)

    def set_kv_buffer(self, layer, where, k, v, k_scale=None, v_scale=None):
        for cache, x, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            x = x.view(-1, *cache.shape[1:])
            cache[where.loc] = (x if scale is None else x / scale).to(cache.dtype)

    def set_mla_kv_buffer(self, layer, where, k, k_rope):
        self.k[where.loc] = torch.cat((k, k_rope), -1).to(self.k.dtype)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


class DraftBackendFactory:
    """Has a fixed table of names, as SGLang's."""

    def __init__(self, draft_model_runner, topk, speculative_num_steps):
        self.draft_model_runner, self.topk = draft_model_runner, topk
        self.speculative_num_steps = speculative_num_steps

    def _create_backend(self, backend_name, backend_map, error_template, stamps_children=False):
        wanted = self.draft_model_runner.draft_attention_backend
        if wanted not in backend_map:
            raise ValueError(error_template.format(backend_type=wanted))
        stamp, backend = backend_map[wanted]()
        for each in (backend, *(backend.attn_backends if stamps_children else ())):
            each.decode_attention_backend_str = stamp
        return backend

    def create_decode_backend(self):
        return self._create_backend("decode_attention_backend", {}, "no {backend_type}", stamps_children=True)

    def create_draft_extend_backend(self):
        return self._create_backend("prefill_attention_backend", {}, "no {backend_type}")


registered: dict[str, Any] = {}
chosen: dict[str, list[str]] = {"attention": [], "draft_attention": [], "deterministic_attention": []}


def register_attention_backend(name):
    def decorate(function):
        registered[name] = function
        return function

    return decorate


def add_attention_backend_choices(names):
    chosen["attention"].extend(names)


def add_draft_attention_backend_choices(names):
    chosen["draft_attention"].extend(names)


def add_deterministic_attention_backend_choices(names):
    chosen["deterministic_attention"].extend(names)


def install(monkeypatch):
    """Puts the modules in place, as far as a test goes."""
    here = {name: value for name, value in globals().items() if not name.startswith("_")}
    for name in (
        "sglang",
        "sglang.srt",
        "sglang.srt.arg_groups",
        "sglang.srt.arg_groups.choices",
        "sglang.srt.configs",
        "sglang.srt.configs.model_config",
        "sglang.srt.layers",
        "sglang.srt.layers.attention",
        "sglang.srt.layers.attention.attention_registry",
        "sglang.srt.layers.attention.base_attn_backend",
        "sglang.srt.layers.radix_attention",
        "sglang.srt.speculative",
        "sglang.srt.speculative.draft_utils",
        "sglang.srt.mem_cache",
        "sglang.srt.mem_cache.memory_pool",
    ):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(here)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["sglang.srt.arg_groups"].choices = sys.modules["sglang.srt.arg_groups.choices"]
    monkeypatch.setattr(DraftBackendFactory, "_create_backend", DraftBackendFactory._create_backend)
    for name in ("_backend", "_drafts"):
        monkeypatch.delitem(sys.modules, f"flashjit.sglang.{name}", raising=False)

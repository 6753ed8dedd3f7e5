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
        self.k[where.loc] = torch.cat((k, k_rope), -1)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


registered: dict[str, Any] = {}
choices: list[str] = []


def register_attention_backend(name):
    def decorate(function):
        registered[name] = function
        return function

    return decorate


def add_attention_backend_choices(names):
    choices.extend(names)


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
        "sglang.srt.mem_cache",
        "sglang.srt.mem_cache.memory_pool",
    ):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(here)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashjit.sglang._backend", raising=False)

"""The C interface by ctypes, made by tools/make_bindings.py from include/flashjit/*.h: edit these, and run it."""

from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from typing import Any

FORWARD = 0
BACKWARD = 1
APPEND = 2
MERGE = 3
QUANTIZE = 4
JVP = 5
BACKWARD_JVP = 6
MAX_CAPTURE_DIMS = 6

#: flashjit_element_type, by the name that programs use.
ELEMENT_TYPES = {
    "fp32": 1,
    "fp16": 2,
    "bf16": 3,
    "int32": 4,
    "int64": 5,
    "int16": 6,
    "int8": 7,
    "uint8": 8,
    "bool": 9,
}


class Shape(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("heads_q", c_int64),
        ("heads_kv", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_kv", c_int64),
    ]


class Device(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("arch", c_char * 16),
        ("compute_capability", c_int32),
        ("multiprocessors", c_int32),
        ("shared_per_block", c_int32),
        ("shared_per_sm", c_int32),
        ("registers_per_sm", c_int32),
        ("l2_bytes", c_int64),
    ]


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("size", c_int64 * 4), ("stride", c_int64 * 4)]


class BlockMap(Structure):
    _fields_ = [("data", c_void_p), ("size", c_int64 * 4)]


class PageTable(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("sequences", c_int64),
        ("columns", c_int64),
        ("stride", c_int64),
        ("starts", c_void_p),
    ]


class Scales(Structure):
    _fields_ = [("data", c_void_p), ("size", c_int64 * 4), ("stride", c_int64 * 4)]


class Indices(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("size", c_int64 * 4),
        ("stride", c_int64 * 4),
        ("topk_length", c_void_p),
        ("topk_length_stride", c_int64 * 2),
    ]


class Capture(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("data", c_void_p),
        ("grad", c_void_p),
        ("rank", c_int32),
        ("type", c_int32),
        ("size", c_int64 * MAX_CAPTURE_DIMS),
        ("stride", c_int64 * MAX_CAPTURE_DIMS),
        ("scalar", c_double),
    ]


class DropoutPlace(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("head", c_int64),
        ("heads", c_int64),
        ("q", c_int64),
        ("kv", c_int64),
        ("q_step", c_int64),
        ("kv_step", c_int64),
    ]


class PartialState(Structure):
    _fields_ = [("out", Tensor), ("lse", c_void_p), ("lse_stride", c_int64 * 3)]


class Options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("cache_dir", c_char_p),
        ("packs", POINTER(c_char_p)),
        ("pack_count", c_size_t),
        ("jit", c_int32),
        ("template_dir", c_char_p),
        ("log", c_void_p),
        ("log_user", c_void_p),
        ("nvrtc", c_char_p),
        ("cache_limit", c_uint64),
        ("tune_in_background", c_int32),
        ("compile_in_background", c_int32),
    ]


class ForwardArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("lse_stride", c_int64 * 3),
        ("softmax_scale", c_void_p),
        ("kv_lengths", c_void_p),
        ("block_map", BlockMap),
        ("dropout_p", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("captures", c_void_p),
        ("capture_count", c_size_t),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_kv", c_void_p),
        ("sinks", c_void_p),
        ("batch_size", c_int64),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_kv", c_int64),
        ("lists", c_void_p),
        ("rng_state", c_void_p),
        ("zero_unused_rows", c_int32),
        ("page_table", PageTable),
        ("row_max", c_void_p),
        ("k_scale", Scales),
        ("v_scale", Scales),
        ("q_scale", Scales),
        ("indices", Indices),
        ("dropout_place", DropoutPlace),
        ("reserved_sms", c_int32),
        ("prefix_length", c_void_p),
        ("state", PartialState),
        ("out_before_mod", Tensor),
        ("k_block_scale", Tensor),
        ("v_block_scale", Tensor),
        ("skip_softmax_threshold", c_void_p),
        ("skip_softmax_counts", c_void_p),
        ("q_rope", Tensor),
        ("out_scale", c_void_p),
        ("out_block_scale", Tensor),
    ]


class JvpArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("forward", c_void_p),
        ("q_tangent", Tensor),
        ("k_tangent", Tensor),
        ("v_tangent", Tensor),
        ("out_tangent", Tensor),
        ("lse_tangent", c_void_p),
        ("sinks_tangent", c_void_p),
    ]


class BackwardArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("lse_stride", c_int64 * 3),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("softmax_scale", c_void_p),
        ("kv_lengths", c_void_p),
        ("block_map", BlockMap),
        ("dropout_p", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("captures", c_void_p),
        ("capture_count", c_size_t),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_kv", c_void_p),
        ("sinks", c_void_p),
        ("dsinks", c_void_p),
        ("batch_size", c_int64),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_kv", c_int64),
        ("lists", c_void_p),
        ("rng_state", c_void_p),
        ("zero_unused_rows", c_int32),
        ("dlse", c_void_p),
        ("indices", Indices),
        ("dropout_place", DropoutPlace),
        ("reserved_sms", c_int32),
    ]


class BackwardJvpArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backward", c_void_p),
        ("q_tangent", Tensor),
        ("k_tangent", Tensor),
        ("v_tangent", Tensor),
        ("dout_tangent", Tensor),
        ("dlse_tangent", c_void_p),
        ("sinks_tangent", c_void_p),
        ("capture_tangents", c_void_p),
    ]


class Rope(Structure):
    _fields_ = [
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("table_rows", c_int64),
        ("stride", c_int64),
        ("type", c_int32),
        ("theta", c_float),
        ("dims", c_int32),
        ("interleaved", c_int32),
        ("positions", c_void_p),
        ("sections", c_int32 * 3),
        ("interleaved_sections", c_int32),
    ]


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("type", c_int32), ("eps", c_float)]


class AppendArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("k", Tensor),
        ("v", Tensor),
        ("k_cache", Tensor),
        ("v_cache", Tensor),
        ("kv_lengths", c_void_p),
        ("page_table", PageTable),
        ("q", Tensor),
        ("q_out", Tensor),
        ("rope", Rope),
        ("cu_seqlens_q", c_void_p),
        ("batch_size", c_int64),
        ("max_seqlen_kv", c_int64),
        ("k_scale", Scales),
        ("v_scale", Scales),
        ("slots", c_void_p),
        ("slots_type", c_int32),
        ("k_norm", Norm),
        ("q_norm", Norm),
        ("k_block_scale", Tensor),
        ("v_block_scale", Tensor),
    ]


class MergeArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("states", c_void_p),
        ("state_count", c_size_t),
        ("out", Tensor),
        ("lse", c_void_p),
        ("lse_stride", c_int64 * 3),
        ("states_type", c_int32),
        ("out_type", c_int32),
    ]


class CacheArgs(Structure):
    _fields_ = [("spec", c_void_p), ("args", c_void_p)]


class OverArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("caches", c_void_p),
        ("cache_count", c_size_t),
        ("out", Tensor),
        ("lse", c_void_p),
        ("lse_stride", c_int64 * 3),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class QuantizeArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("x", Tensor),
        ("codes", Tensor),
        ("scale", Scales),
        ("hadamard", c_int32),
        ("rope", Rope),
        ("block_scale", Tensor),
    ]


class ListArgs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("memory", c_void_p),
        ("memory_bytes", c_size_t),
        ("kv_lengths", c_void_p),
        ("block_map", BlockMap),
        ("captures", c_void_p),
        ("capture_count", c_size_t),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_kv", c_void_p),
    ]


class EntryReport(Structure):
    _fields_ = [
        ("entry", c_char_p),
        ("registers", c_int32),
        ("spill_bytes", c_int32),
        ("shared_bytes", c_int32),
        ("threads", c_int32),
    ]


class KernelReport(Structure):
    _fields_ = [
        ("spec", c_char_p),
        ("config", c_char_p),
        ("config_source", c_char_p),
        ("key", c_char_p),
        ("origin", c_char_p),
        ("render_ms", c_double),
        ("compile_ms", c_double),
        ("load_ms", c_double),
        ("entries", c_void_p),
        ("entry_count", c_size_t),
    ]


#: What each function returns and takes.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "flashjit_version": (c_char_p, []),
    "flashjit_status_name": (c_char_p, [c_int32]),
    "flashjit_spec_option": (c_int32, [c_size_t, c_void_p, c_void_p]),
    "flashjit_last_error_message": (c_char_p, []),
    "flashjit_last_error_detail": (c_char_p, []),
    "flashjit_runtime_create": (c_int32, [c_void_p, c_void_p]),
    "flashjit_runtime_destroy": (None, [c_void_p]),
    "flashjit_stop_tuning": (c_int32, [c_void_p]),
    "flashjit_spec_create": (c_int32, [c_char_p, c_void_p]),
    "flashjit_spec_destroy": (None, [c_void_p]),
    "flashjit_forward": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_backward": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_jvp": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_backward_jvp": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_append": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_merge": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_attention_over": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "flashjit_attention_over_workspace_bytes": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "flashjit_quantize": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_kv_row": (c_int32, [c_char_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "flashjit_kv_block_scales": (c_int32, [c_char_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "flashjit_head_dims": (None, [c_void_p, c_void_p, c_void_p]),
    "flashjit_kv_format_name": (c_int32, [c_size_t, c_void_p, c_void_p]),
    "flashjit_prepare": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_char_p, c_void_p, c_void_p]),
    "flashjit_prepare_both": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_prepare_first_calls": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "flashjit_prepare_range": (
        c_int32,
        [
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
        ],
    ),
    "flashjit_workspace_bytes": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "flashjit_list_bytes": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "flashjit_build_lists": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "flashjit_tile_lists_destroy": (None, [c_void_p]),
    "flashjit_current_device": (c_int32, [c_void_p, c_void_p]),
    "flashjit_device_of": (c_int32, [c_char_p, c_void_p]),
    "flashjit_can": (c_int32, [c_int32, c_void_p, c_void_p, c_void_p]),
    "flashjit_reference_forward": (c_int32, [c_void_p, c_void_p]),
    "flashjit_reference_backward": (c_int32, [c_void_p, c_void_p]),
    "flashjit_reference_jvp": (c_int32, [c_void_p, c_void_p]),
    "flashjit_reference_backward_jvp": (c_int32, [c_void_p, c_void_p]),
    "flashjit_reference_append": (c_int32, [c_void_p, c_void_p]),
    "flashjit_reference_merge": (c_int32, [c_void_p, c_void_p]),
    "flashjit_reference_quantize": (c_int32, [c_void_p, c_void_p]),
}

// The C interface, made by tools/make_bindings.py from include/flashjit/*.h: edit these, and run it.

use core::ffi::{c_char, c_void};

pub type flashjit_status = i32;
pub type flashjit_pass = i32;
pub type flashjit_jit = i32;
pub type flashjit_switch = i32;
pub type flashjit_element_type = i32;
pub type flashjit_kernel_receiver = Option<unsafe extern "C" fn(user: *mut c_void, report: *const flashjit_kernel_report)>;
pub type flashjit_range_progress = Option<unsafe extern "C" fn(user: *mut c_void, made: usize, configurations: usize) -> i32>;

pub const FLASHJIT_OK: i32 = 0;
pub const FLASHJIT_INVALID_ARGUMENT: i32 = 1;
pub const FLASHJIT_UNSUPPORTED: i32 = 2;
pub const FLASHJIT_NO_DRIVER: i32 = 3;
pub const FLASHJIT_NO_DEVICE: i32 = 4;
pub const FLASHJIT_NO_COMPILER: i32 = 5;
pub const FLASHJIT_COMPILE_FAILED: i32 = 6;
pub const FLASHJIT_KERNEL_MISSING: i32 = 7;
pub const FLASHJIT_IO: i32 = 8;
pub const FLASHJIT_CUDA: i32 = 9;
pub const FLASHJIT_INTERNAL: i32 = 10;
pub const FLASHJIT_FORWARD: i32 = 0;
pub const FLASHJIT_BACKWARD: i32 = 1;
pub const FLASHJIT_APPEND: i32 = 2;
pub const FLASHJIT_MERGE: i32 = 3;
pub const FLASHJIT_QUANTIZE: i32 = 4;
pub const FLASHJIT_JVP: i32 = 5;
pub const FLASHJIT_BACKWARD_JVP: i32 = 6;
pub const FLASHJIT_JIT_DEFAULT: i32 = 0;
pub const FLASHJIT_JIT_ON: i32 = 1;
pub const FLASHJIT_JIT_OFF: i32 = 2;
pub const FLASHJIT_SWITCH_DEFAULT: i32 = 0;
pub const FLASHJIT_SWITCH_ON: i32 = 1;
pub const FLASHJIT_SWITCH_OFF: i32 = 2;
pub const FLASHJIT_ELEMENT_UNTOLD: i32 = 0;
pub const FLASHJIT_ELEMENT_FP32: i32 = 1;
pub const FLASHJIT_ELEMENT_FP16: i32 = 2;
pub const FLASHJIT_ELEMENT_BF16: i32 = 3;
pub const FLASHJIT_ELEMENT_INT32: i32 = 4;
pub const FLASHJIT_ELEMENT_INT64: i32 = 5;
pub const FLASHJIT_ELEMENT_INT16: i32 = 6;
pub const FLASHJIT_ELEMENT_INT8: i32 = 7;
pub const FLASHJIT_ELEMENT_UINT8: i32 = 8;
pub const FLASHJIT_ELEMENT_BOOL: i32 = 9;
pub const FLASHJIT_MAX_CAPTURES: usize = 24;
pub const FLASHJIT_MAX_CAPTURE_DIMS: usize = 6;

#[repr(C)]
pub struct flashjit_runtime {
    _private: [u8; 0],
}

#[repr(C)]
pub struct flashjit_spec {
    _private: [u8; 0],
}

#[repr(C)]
pub struct flashjit_tile_lists {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_shape {
    pub batch: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_device {
    pub struct_size: usize,
    pub arch: [c_char; 16],
    pub compute_capability: i32,
    pub multiprocessors: i32,
    pub shared_per_block: i32,
    pub shared_per_sm: i32,
    pub registers_per_sm: i32,
    pub l2_bytes: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_tensor {
    pub data: *mut c_void,
    pub size: [i64; 4],
    pub stride: [i64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_block_map {
    pub data: *const u8,
    pub size: [i64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_page_table {
    pub data: *const i32,
    pub sequences: i64,
    pub columns: i64,
    pub stride: i64,
    pub starts: *const i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_scales {
    pub data: *mut f32,
    pub size: [i64; 4],
    pub stride: [i64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_indices {
    pub data: *const i32,
    pub size: [i64; 4],
    pub stride: [i64; 4],
    pub topk_length: *const i32,
    pub topk_length_stride: [i64; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_capture {
    pub name: *const c_char,
    pub data: *const c_void,
    pub grad: *mut f32,
    pub rank: i32,
    pub element: flashjit_element_type,
    pub size: [i64; FLASHJIT_MAX_CAPTURE_DIMS],
    pub stride: [i64; FLASHJIT_MAX_CAPTURE_DIMS],
    pub scalar: f64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_dropout_place {
    pub batch: i64,
    pub head: i64,
    pub heads: i64,
    pub q: i64,
    pub kv: i64,
    pub q_step: i64,
    pub kv_step: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_partial_state {
    pub out: flashjit_tensor,
    pub lse: *const f32,
    pub lse_stride: [i64; 3],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_options {
    pub struct_size: usize,
    pub cache_dir: *const c_char,
    pub packs: *const *const c_char,
    pub pack_count: usize,
    pub jit: flashjit_jit,
    pub template_dir: *const c_char,
    pub log: Option<unsafe extern "C" fn(user: *mut c_void, line: *const c_char)>,
    pub log_user: *mut c_void,
    pub nvrtc: *const c_char,
    pub cache_limit: u64,
    pub tune_in_background: flashjit_switch,
    pub compile_in_background: flashjit_switch,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_forward_args {
    pub struct_size: usize,
    pub q: flashjit_tensor,
    pub k: flashjit_tensor,
    pub v: flashjit_tensor,
    pub out: flashjit_tensor,
    pub lse: *mut f32,
    pub lse_stride: [i64; 3],
    pub softmax_scale: *const f32,
    pub kv_lengths: *const i32,
    pub block_map: flashjit_block_map,
    pub dropout_p: f64,
    pub seed: u64,
    pub offset: u64,
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
    pub captures: *const flashjit_capture,
    pub capture_count: usize,
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_kv: *const i32,
    pub sinks: *const f32,
    pub batch_size: i64,
    pub max_seqlen_q: i64,
    pub max_seqlen_kv: i64,
    pub lists: *const flashjit_tile_lists,
    pub rng_state: *const u64,
    pub zero_unused_rows: i32,
    pub page_table: flashjit_page_table,
    pub row_max: *mut f32,
    pub k_scale: flashjit_scales,
    pub v_scale: flashjit_scales,
    pub q_scale: flashjit_scales,
    pub indices: flashjit_indices,
    pub dropout_place: flashjit_dropout_place,
    pub reserved_sms: i32,
    pub prefix_length: *const i32,
    pub state: flashjit_partial_state,
    pub out_before_mod: flashjit_tensor,
    pub k_block_scale: flashjit_tensor,
    pub v_block_scale: flashjit_tensor,
    pub skip_softmax_threshold: *const f32,
    pub skip_softmax_counts: *mut i64,
    pub q_rope: flashjit_tensor,
    pub out_scale: *const f32,
    pub out_block_scale: flashjit_tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_jvp_args {
    pub struct_size: usize,
    pub forward: *const flashjit_forward_args,
    pub q_tangent: flashjit_tensor,
    pub k_tangent: flashjit_tensor,
    pub v_tangent: flashjit_tensor,
    pub out_tangent: flashjit_tensor,
    pub lse_tangent: *mut f32,
    pub sinks_tangent: *const f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_backward_args {
    pub struct_size: usize,
    pub q: flashjit_tensor,
    pub k: flashjit_tensor,
    pub v: flashjit_tensor,
    pub out: flashjit_tensor,
    pub lse: *const f32,
    pub lse_stride: [i64; 3],
    pub dout: flashjit_tensor,
    pub dq: flashjit_tensor,
    pub dk: flashjit_tensor,
    pub dv: flashjit_tensor,
    pub softmax_scale: *const f32,
    pub kv_lengths: *const i32,
    pub block_map: flashjit_block_map,
    pub dropout_p: f64,
    pub seed: u64,
    pub offset: u64,
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
    pub captures: *const flashjit_capture,
    pub capture_count: usize,
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_kv: *const i32,
    pub sinks: *const f32,
    pub dsinks: *mut f32,
    pub batch_size: i64,
    pub max_seqlen_q: i64,
    pub max_seqlen_kv: i64,
    pub lists: *const flashjit_tile_lists,
    pub rng_state: *const u64,
    pub zero_unused_rows: i32,
    pub dlse: *const f32,
    pub indices: flashjit_indices,
    pub dropout_place: flashjit_dropout_place,
    pub reserved_sms: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_backward_jvp_args {
    pub struct_size: usize,
    pub backward: *const flashjit_backward_args,
    pub q_tangent: flashjit_tensor,
    pub k_tangent: flashjit_tensor,
    pub v_tangent: flashjit_tensor,
    pub dout_tangent: flashjit_tensor,
    pub dlse_tangent: *const f32,
    pub sinks_tangent: *const f32,
    pub capture_tangents: *const *const f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_rope {
    pub cos: *const c_void,
    pub sin: *const c_void,
    pub table_rows: i64,
    pub stride: i64,
    pub element: flashjit_element_type,
    pub theta: f32,
    pub dims: i32,
    pub interleaved: i32,
    pub positions: *const i32,
    pub sections: [i32; 3],
    pub interleaved_sections: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_norm {
    pub weight: *const c_void,
    pub element: flashjit_element_type,
    pub eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_append_args {
    pub struct_size: usize,
    pub k: flashjit_tensor,
    pub v: flashjit_tensor,
    pub k_cache: flashjit_tensor,
    pub v_cache: flashjit_tensor,
    pub kv_lengths: *const i32,
    pub page_table: flashjit_page_table,
    pub q: flashjit_tensor,
    pub q_out: flashjit_tensor,
    pub rope: flashjit_rope,
    pub cu_seqlens_q: *const i32,
    pub batch_size: i64,
    pub max_seqlen_kv: i64,
    pub k_scale: flashjit_scales,
    pub v_scale: flashjit_scales,
    pub slots: *const c_void,
    pub slots_type: flashjit_element_type,
    pub k_norm: flashjit_norm,
    pub q_norm: flashjit_norm,
    pub k_block_scale: flashjit_tensor,
    pub v_block_scale: flashjit_tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_merge_args {
    pub struct_size: usize,
    pub states: *const flashjit_partial_state,
    pub state_count: usize,
    pub out: flashjit_tensor,
    pub lse: *mut f32,
    pub lse_stride: [i64; 3],
    pub states_type: flashjit_element_type,
    pub out_type: flashjit_element_type,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_cache_args {
    pub spec: *const flashjit_spec,
    pub args: *const flashjit_forward_args,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_over_args {
    pub struct_size: usize,
    pub caches: *const flashjit_cache_args,
    pub cache_count: usize,
    pub out: flashjit_tensor,
    pub lse: *mut f32,
    pub lse_stride: [i64; 3],
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_quantize_args {
    pub struct_size: usize,
    pub x: flashjit_tensor,
    pub codes: flashjit_tensor,
    pub scale: flashjit_scales,
    pub hadamard: i32,
    pub rope: flashjit_rope,
    pub block_scale: flashjit_tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_list_args {
    pub struct_size: usize,
    pub memory: *mut c_void,
    pub memory_bytes: usize,
    pub kv_lengths: *const i32,
    pub block_map: flashjit_block_map,
    pub captures: *const flashjit_capture,
    pub capture_count: usize,
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_kv: *const i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_entry_report {
    pub entry: *const c_char,
    pub registers: i32,
    pub spill_bytes: i32,
    pub shared_bytes: i32,
    pub threads: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct flashjit_kernel_report {
    pub spec: *const c_char,
    pub config: *const c_char,
    pub config_source: *const c_char,
    pub key: *const c_char,
    pub origin: *const c_char,
    pub render_ms: f64,
    pub compile_ms: f64,
    pub load_ms: f64,
    pub entries: *const flashjit_entry_report,
    pub entry_count: usize,
}

crate::zeros_with_size!(
    flashjit_device,
    flashjit_options,
    flashjit_forward_args,
    flashjit_jvp_args,
    flashjit_backward_args,
    flashjit_backward_jvp_args,
    flashjit_append_args,
    flashjit_merge_args,
    flashjit_over_args,
    flashjit_quantize_args,
    flashjit_list_args,
);

extern "C" {
    pub fn flashjit_version() -> *const c_char;
    pub fn flashjit_status_name(status: flashjit_status) -> *const c_char;
    pub fn flashjit_spec_option(index: usize, option: *mut *const c_char, argument: *mut *const c_char) -> i32;
    pub fn flashjit_last_error_message() -> *const c_char;
    pub fn flashjit_last_error_detail() -> *const c_char;
    pub fn flashjit_runtime_create(options: *const flashjit_options, runtime: *mut *mut flashjit_runtime) -> flashjit_status;
    pub fn flashjit_runtime_destroy(runtime: *mut flashjit_runtime);
    pub fn flashjit_stop_tuning(runtime: *mut flashjit_runtime) -> flashjit_status;
    pub fn flashjit_spec_create(text: *const c_char, spec: *mut *mut flashjit_spec) -> flashjit_status;
    pub fn flashjit_spec_destroy(spec: *mut flashjit_spec);
    pub fn flashjit_forward(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        args: *const flashjit_forward_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_backward(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        args: *const flashjit_backward_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_jvp(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        args: *const flashjit_jvp_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_backward_jvp(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        args: *const flashjit_backward_jvp_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_append(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        args: *const flashjit_append_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_merge(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        args: *const flashjit_merge_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_attention_over(
        runtime: *mut flashjit_runtime,
        args: *const flashjit_over_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_attention_over_workspace_bytes(
        runtime: *mut flashjit_runtime,
        args: *const flashjit_over_args,
        bytes: *mut usize,
    ) -> flashjit_status;
    pub fn flashjit_quantize(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        args: *const flashjit_quantize_args,
        stream: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_kv_row(
        format: *const c_char,
        head_dim: i32,
        bytes: *mut i64,
        alignment: *mut i32,
        has_scale: *mut i32,
    ) -> flashjit_status;
    pub fn flashjit_kv_block_scales(
        format: *const c_char,
        head_dim: i32,
        columns: *mut i64,
        keys: *mut i32,
        element: *mut *const c_char,
    ) -> flashjit_status;
    pub fn flashjit_head_dims(step: *mut i32, most: *mut i32, most_v: *mut i32);
    pub fn flashjit_kv_format_name(index: usize, name: *mut *const c_char, parts: *mut *const c_char) -> i32;
    pub fn flashjit_prepare(
        runtime: *mut flashjit_runtime,
        pass: flashjit_pass,
        spec: *const flashjit_spec,
        shape: *const flashjit_shape,
        config: *const c_char,
        receiver: flashjit_kernel_receiver,
        user: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_prepare_both(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        shape: *const flashjit_shape,
        receiver: flashjit_kernel_receiver,
        user: *mut c_void,
    ) -> flashjit_status;
    pub fn flashjit_prepare_first_calls(
        runtime: *mut flashjit_runtime,
        spec: *const flashjit_spec,
        shape: *const flashjit_shape,
    ) -> flashjit_status;
    pub fn flashjit_prepare_range(
        runtime: *mut flashjit_runtime,
        pass: flashjit_pass,
        spec: *const flashjit_spec,
        first: *const flashjit_shape,
        last: *const flashjit_shape,
        step: *const flashjit_shape,
        progress: flashjit_range_progress,
        receiver: flashjit_kernel_receiver,
        user: *mut c_void,
        made: *mut usize,
        configurations: *mut usize,
        workspace_bytes: *mut usize,
    ) -> flashjit_status;
    pub fn flashjit_workspace_bytes(
        runtime: *mut flashjit_runtime,
        pass: flashjit_pass,
        spec: *const flashjit_spec,
        shape: *const flashjit_shape,
        bytes: *mut usize,
    ) -> flashjit_status;
    pub fn flashjit_list_bytes(
        runtime: *mut flashjit_runtime,
        pass: flashjit_pass,
        spec: *const flashjit_spec,
        shape: *const flashjit_shape,
        bytes: *mut usize,
    ) -> flashjit_status;
    pub fn flashjit_build_lists(
        runtime: *mut flashjit_runtime,
        pass: flashjit_pass,
        spec: *const flashjit_spec,
        shape: *const flashjit_shape,
        args: *const flashjit_list_args,
        stream: *mut c_void,
        lists: *mut *mut flashjit_tile_lists,
    ) -> flashjit_status;
    pub fn flashjit_tile_lists_destroy(lists: *mut flashjit_tile_lists);
    pub fn flashjit_current_device(runtime: *mut flashjit_runtime, device: *mut flashjit_device) -> flashjit_status;
    pub fn flashjit_device_of(arch: *const c_char, device: *mut flashjit_device) -> flashjit_status;
    pub fn flashjit_can(
        pass: flashjit_pass,
        spec: *const flashjit_spec,
        shape: *const flashjit_shape,
        device: *const flashjit_device,
    ) -> flashjit_status;
    pub fn flashjit_reference_forward(spec: *const flashjit_spec, args: *const flashjit_forward_args) -> flashjit_status;
    pub fn flashjit_reference_backward(spec: *const flashjit_spec, args: *const flashjit_backward_args) -> flashjit_status;
    pub fn flashjit_reference_jvp(spec: *const flashjit_spec, args: *const flashjit_jvp_args) -> flashjit_status;
    pub fn flashjit_reference_backward_jvp(spec: *const flashjit_spec, args: *const flashjit_backward_jvp_args) -> flashjit_status;
    pub fn flashjit_reference_append(spec: *const flashjit_spec, args: *const flashjit_append_args) -> flashjit_status;
    pub fn flashjit_reference_merge(spec: *const flashjit_spec, args: *const flashjit_merge_args) -> flashjit_status;
    pub fn flashjit_reference_quantize(spec: *const flashjit_spec, args: *const flashjit_quantize_args) -> flashjit_status;
}

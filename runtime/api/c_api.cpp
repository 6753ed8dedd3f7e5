#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "api/c_arguments.hpp"
#include "api/c_call.hpp"
#include "api/c_reports.hpp"
#include "api/read_struct.hpp"
#include "flashjit/flashjit.h"
#include "flashjit/flashjit.hpp"
#include "flashjit/reference.hpp"
#include "plan/spec_options.hpp"
#include "support/kv_names.hpp"
#include "support/refuse.hpp"

namespace flashjit::c_api {
namespace {

KernelSpec kernel_spec(const flashjit_spec* spec, flashjit_pass pass) {
  if (pass >= FLASHJIT_FORWARD && pass <= FLASHJIT_BACKWARD_JVP) return {get(spec), static_cast<Pass>(pass)};
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("pass is {}: give FLASHJIT_FORWARD (0), FLASHJIT_BACKWARD (1), FLASHJIT_APPEND (2), "
                  "FLASHJIT_MERGE (3), FLASHJIT_QUANTIZE (4), FLASHJIT_JVP (5) or FLASHJIT_BACKWARD_JVP (6).",
                  pass));
}

AttentionShape attention_shape(const flashjit_shape* shape) {
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] =
      required(shape, "shape", "give the sizes of the problem");
  return {batch, heads_q, heads_kv, seqlen_q, seqlen_kv};
}

std::optional<JitMode> jit_mode(flashjit_jit jit) {
  switch (jit) {
    case FLASHJIT_JIT_DEFAULT:
      return std::nullopt;
    case FLASHJIT_JIT_ON:
      return JitMode::on;
    case FLASHJIT_JIT_OFF:
      return JitMode::off;
  }
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("jit is {}: give FLASHJIT_JIT_DEFAULT (0), FLASHJIT_JIT_ON (1) or FLASHJIT_JIT_OFF (2).",
                  jit));
}

std::optional<bool> switched(const char* name, flashjit_switch value) {
  switch (value) {
    case FLASHJIT_SWITCH_DEFAULT:
      return std::nullopt;
    case FLASHJIT_SWITCH_ON:
      return true;
    case FLASHJIT_SWITCH_OFF:
      return false;
  }
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("{} is {}: give FLASHJIT_SWITCH_DEFAULT (0), FLASHJIT_SWITCH_ON (1) or FLASHJIT_SWITCH_OFF "
                  "(2).",
                  name, value));
}

RuntimeOptions runtime_options(const flashjit_options* given) {
  RuntimeOptions options;
  if (!given) return options;
  const auto c = read_struct("flashjit_options", given);
  if (c.cache_dir) options.cache_dir = c.cache_dir;
  if (c.pack_count > 0) required(c.packs, "packs", "give pack_count paths");
  for (std::size_t i = 0; i < c.pack_count; ++i)
    options.packs.emplace_back(&required(c.packs[i], "a path in packs", "give a folder"));
  options.jit = jit_mode(c.jit);
  if (c.template_dir) options.template_dir = c.template_dir;
  if (c.nvrtc) options.nvrtc = c.nvrtc;
  if (c.cache_limit != 0) options.cache_limit = c.cache_limit;
  options.tune_in_background = switched("tune_in_background", c.tune_in_background);
  options.compile_in_background = switched("compile_in_background", c.compile_in_background);
  if (c.log)
    options.log = [log = c.log, user = c.log_user](std::string_view line) {
      log(user, std::string(line).c_str());
    };
  return options;
}

DeviceInfo device_info(const flashjit_device* given) {
  const auto c = read_struct("flashjit_device", given);
  const std::string_view arch(c.arch, ::strnlen(c.arch, sizeof c.arch));
  if (arch.empty() || arch.size() == sizeof c.arch)
    refuse("device.arch is {}: let flashjit_current_device() or flashjit_device_of() set the device.",
           arch.empty() ? "empty" : "longer than 15 bytes");
  DeviceInfo device;
  device.name = device.arch = arch;
  device.compute_capability = c.compute_capability;
  device.multiprocessors = c.multiprocessors;
  device.shared_per_block = c.shared_per_block;
  device.shared_per_sm = c.shared_per_sm;
  device.registers_per_sm = c.registers_per_sm;
  device.l2_bytes = c.l2_bytes;
  return device;
}

/// Sets what the caller's struct has besides its size, which is checked before a driver is asked.
template <class Ask>
void set_device(flashjit_device* given, const Ask& ask) {
  flashjit_device set = read_struct("flashjit_device", given);
  const DeviceInfo device = ask();
  device.arch.copy(set.arch, sizeof set.arch - 1);
  set.arch[std::min(device.arch.size(), sizeof set.arch - 1)] = 0;
  set.compute_capability = device.compute_capability;
  set.multiprocessors = device.multiprocessors;
  set.shared_per_block = device.shared_per_block;
  set.shared_per_sm = device.shared_per_sm;
  set.registers_per_sm = device.registers_per_sm;
  set.l2_bytes = device.l2_bytes;
  *given = set;
}

KvFormat kv_format(const char* text) {
  return parse_kv_format(&required(text, "format", "give a KV format such as \"nvfp4\""));
}
KvRow kv_row(const KvFormat& format, std::int32_t head_dim) {
  if (head_dim < 0 || head_dim > plan::kMaxHeadDim)
    refuse("head_dim is {}; give 1 to {}, or 0 to check the format alone.", head_dim, plan::kMaxHeadDim);
  format.validate_row(head_dim);
  return format.row(head_dim);
}

}  // namespace
}  // namespace flashjit::c_api

using namespace flashjit::c_api;

extern "C" {

const char* flashjit_version(void) noexcept { return FLASHJIT_VERSION; }

int32_t flashjit_spec_option(size_t index, const char** option, const char** argument) noexcept {
  if (index >= flashjit::plan::kSpecOptions.size()) return 0;
  // Texts of the program, which end with 0.
  if (option) *option = flashjit::plan::kSpecOptions[index].text.data();
  if (argument) *argument = flashjit::plan::kSpecOptions[index].argument.data();
  return 1;
}

flashjit_status flashjit_kv_row(const char* format, int32_t head_dim, int64_t* bytes, int32_t* alignment,
                                int32_t* has_scale) noexcept {
  return guarded([&] {
    const flashjit::KvFormat parsed = kv_format(format);
    if (has_scale) *has_scale = parsed.has_argument();
    if (head_dim == 0) return;
    const flashjit::KvRow row = kv_row(parsed, head_dim);
    if (bytes) *bytes = row.bytes;
    if (alignment) *alignment = row.alignment;
  });
}

flashjit_status flashjit_kv_block_scales(const char* format, int32_t head_dim, int64_t* columns,
                                         int32_t* keys, const char** type) noexcept {
  return guarded([&] {
    const flashjit::KvFormat parsed = kv_format(format);
    if (keys) *keys = parsed.has_block_scales() ? std::max(parsed.keys, 1) : 0;
    if (type) *type = flashjit::name_of(parsed.scale_type).data();  // a text of the program
    if (head_dim == 0) return;
    const flashjit::KvRow row = kv_row(parsed, head_dim);
    if (columns) *columns = row.scale_columns;
  });
}

void flashjit_head_dims(int32_t* step, int32_t* most, int32_t* most_v) noexcept {
  if (step) *step = flashjit::plan::kHeadDimStep;
  if (most) *most = flashjit::plan::kMaxHeadDim;
  if (most_v) *most_v = flashjit::plan::kMaxHeadDimV;
}

int32_t flashjit_kv_format_name(size_t index, const char** name, const char** parts) noexcept {
  const auto& named = flashjit::named_kv_formats();
  if (index >= named.size()) return 0;
  // Texts of the program, which end with 0.
  if (name) *name = named[index].name.data();
  if (parts) *parts = named[index].parts.data();
  return 1;
}

flashjit_status flashjit_runtime_create(const flashjit_options* options,
                                        flashjit_runtime** runtime) noexcept {
  return guarded([&] {
    flashjit_runtime*& created = required(runtime, "runtime", "give the address of a flashjit_runtime*");
    created = nullptr;
    created = new flashjit_runtime{flashjit::Runtime(runtime_options(options))};
  });
}

void flashjit_runtime_destroy(flashjit_runtime* runtime) noexcept { delete runtime; }

flashjit_status flashjit_stop_tuning(flashjit_runtime* runtime) noexcept {
  return guarded([&] { get(runtime).stop_tuning(); });
}

flashjit_status flashjit_spec_create(const char* text, flashjit_spec** spec) noexcept {
  return guarded([&] {
    flashjit_spec*& created = required(spec, "spec", "give the address of a flashjit_spec*");
    created = nullptr;
    created = new flashjit_spec{
        flashjit::parse_spec(&required(text, "text", "give a spec such as \"bf16:d128:causal\""))};
  });
}

void flashjit_spec_destroy(flashjit_spec* spec) noexcept { delete spec; }

flashjit_status flashjit_jvp(flashjit_runtime* runtime, const flashjit_spec* spec,
                             const flashjit_jvp_args* args, CUstream_st* stream) noexcept {
  return guarded([&] {
    Captures room;
    get(runtime).jvp(get(spec), jvp_args(args, room), stream);
  });
}

flashjit_status flashjit_backward_jvp(flashjit_runtime* runtime, const flashjit_spec* spec,
                                      const flashjit_backward_jvp_args* args, CUstream_st* stream) noexcept {
  return guarded([&] {
    Captures room;
    get(runtime).backward_jvp(get(spec), backward_jvp_args(args, room), stream);
  });
}

flashjit_status flashjit_append(flashjit_runtime* runtime, const flashjit_spec* spec,
                                const flashjit_append_args* args, CUstream_st* stream) noexcept {
  return guarded([&] { get(runtime).append(get(spec), append_args(args), stream); });
}

flashjit_status flashjit_merge(flashjit_runtime* runtime, const flashjit_spec* spec,
                               const flashjit_merge_args* args, CUstream_st* stream) noexcept {
  return guarded([&] {
    States room;
    get(runtime).merge(get(spec), merge_args(args, room), stream);
  });
}

flashjit_status flashjit_attention_over(flashjit_runtime* runtime, const flashjit_over_args* args,
                                        CUstream_st* stream) noexcept {
  return guarded([&] {
    Caches room;
    flashjit::attention_over(get(runtime), over_args(args, room), stream);
  });
}

flashjit_status flashjit_attention_over_workspace_bytes(flashjit_runtime* runtime,
                                                        const flashjit_over_args* args,
                                                        size_t* bytes) noexcept {
  return guarded([&] {
    size_t& needed = required(bytes, "bytes", "give the address of a size_t");
    Caches room;
    needed = flashjit::attention_over_workspace_bytes(get(runtime), over_args(args, room));
  });
}

flashjit_status flashjit_quantize(flashjit_runtime* runtime, const flashjit_spec* spec,
                                  const flashjit_quantize_args* args, CUstream_st* stream) noexcept {
  return guarded([&] { get(runtime).quantize(get(spec), quantize_args(args), stream); });
}

flashjit_status flashjit_prepare(flashjit_runtime* runtime, flashjit_pass pass, const flashjit_spec* spec,
                                 const flashjit_shape* shape, const char* config,
                                 flashjit_kernel_receiver receiver, void* user) noexcept {
  return guarded([&] {
    const auto given = config ? std::optional(flashjit::parse_config(config)) : std::nullopt;
    tell(get(runtime).prepare(kernel_spec(spec, pass), attention_shape(shape), given), receiver, user);
  });
}

flashjit_status flashjit_prepare_both(flashjit_runtime* runtime, const flashjit_spec* spec,
                                      const flashjit_shape* shape, flashjit_kernel_receiver receiver,
                                      void* user) noexcept {
  return guarded([&] {
    for (const flashjit::KernelReport& report : get(runtime).prepare_both(get(spec), attention_shape(shape)))
      tell(report, receiver, user);
  });
}

flashjit_status flashjit_prepare_first_calls(flashjit_runtime* runtime, const flashjit_spec* spec,
                                             const flashjit_shape* shape) noexcept {
  return guarded([&] { get(runtime).prepare_first_calls(get(spec), attention_shape(shape)); });
}

flashjit_status flashjit_prepare_range(flashjit_runtime* runtime, flashjit_pass pass,
                                       const flashjit_spec* spec, const flashjit_shape* first,
                                       const flashjit_shape* last, const flashjit_shape* step,
                                       flashjit_range_progress progress, flashjit_kernel_receiver receiver,
                                       void* user, size_t* made, size_t* configurations,
                                       size_t* workspace_bytes) noexcept {
  return guarded([&] {
    const flashjit::ShapeRange range{attention_shape(first), attention_shape(last),
                                     step ? attention_shape(step) : flashjit::AttentionShape{}};
    flashjit::RangeProgress told;
    if (progress) told = [&](size_t so_far, size_t all) { return progress(user, so_far, all) != 0; };
    const flashjit::RangeReport report = get(runtime).prepare_range(kernel_spec(spec, pass), range, told);
    for (const flashjit::KernelReport& kernel : report.kernels) tell(kernel, receiver, user);
    if (made) *made = report.kernels.size();
    if (configurations) *configurations = report.configurations;
    if (workspace_bytes) *workspace_bytes = report.workspace_bytes;
  });
}

flashjit_status flashjit_workspace_bytes(flashjit_runtime* runtime, flashjit_pass pass,
                                         const flashjit_spec* spec, const flashjit_shape* shape,
                                         size_t* bytes) noexcept {
  return guarded([&] {
    size_t& needed = required(bytes, "bytes", "give the address of a size_t");
    needed = get(runtime).workspace_bytes(kernel_spec(spec, pass), attention_shape(shape));
  });
}

flashjit_status flashjit_list_bytes(flashjit_runtime* runtime, flashjit_pass pass, const flashjit_spec* spec,
                                    const flashjit_shape* shape, size_t* bytes) noexcept {
  return guarded([&] {
    size_t& needed = required(bytes, "bytes", "give the address of a size_t");
    needed = get(runtime).list_bytes(kernel_spec(spec, pass), attention_shape(shape));
  });
}

flashjit_status flashjit_build_lists(flashjit_runtime* runtime, flashjit_pass pass, const flashjit_spec* spec,
                                     const flashjit_shape* shape, const flashjit_list_args* args,
                                     CUstream_st* stream, flashjit_tile_lists** lists) noexcept {
  return guarded([&] {
    flashjit_tile_lists*& made = required(lists, "lists", "give the address of a flashjit_tile_lists*");
    made = nullptr;
    const auto known = flashjit::read_struct("flashjit_list_args", args);
    Captures room;
    made = new flashjit_tile_lists{get(runtime).build_lists(kernel_spec(spec, pass), attention_shape(shape),
                                                            list_args(known, room), stream)};
  });
}

void flashjit_tile_lists_destroy(flashjit_tile_lists* lists) noexcept { delete lists; }

flashjit_status flashjit_current_device(flashjit_runtime* runtime, flashjit_device* device) noexcept {
  return guarded([&] { set_device(device, [&] { return get(runtime).device(); }); });
}

flashjit_status flashjit_device_of(const char* arch, flashjit_device* device) noexcept {
  return guarded([&] {
    set_device(device, [&] {
      return flashjit::DeviceInfo::parse(&required(arch, "arch", "give an architecture such as \"sm_90a\""));
    });
  });
}

flashjit_status flashjit_can(flashjit_pass pass, const flashjit_spec* spec, const flashjit_shape* shape,
                             const flashjit_device* device) noexcept {
  return guarded([&] {
    const flashjit::KernelSpec asked = kernel_spec(spec, pass);
    const flashjit::DeviceInfo info = device_info(device);
    const flashjit::Support support =
        shape ? flashjit::can(asked, attention_shape(shape), info) : flashjit::can(asked, info);
    if (!support) throw flashjit::Error(flashjit::ErrorCode::unsupported, support.reason);
  });
}

flashjit_status flashjit_reference_forward(const flashjit_spec* spec,
                                           const flashjit_forward_args* args) noexcept {
  return guarded([&] {
    Captures room;
    flashjit::reference_forward(get(spec),
                                forward_args(flashjit::read_struct("flashjit_forward_args", args), room));
  });
}

flashjit_status flashjit_reference_backward(const flashjit_spec* spec,
                                            const flashjit_backward_args* args) noexcept {
  return guarded([&] {
    Captures room;
    flashjit::reference_backward(get(spec),
                                 backward_args(flashjit::read_struct("flashjit_backward_args", args), room));
  });
}

flashjit_status flashjit_reference_jvp(const flashjit_spec* spec, const flashjit_jvp_args* args) noexcept {
  return guarded([&] {
    Captures room;
    flashjit::reference_jvp(get(spec), jvp_args(args, room));
  });
}

flashjit_status flashjit_reference_backward_jvp(const flashjit_spec* spec,
                                                const flashjit_backward_jvp_args* args) noexcept {
  return guarded([&] {
    Captures room;
    flashjit::reference_backward_jvp(get(spec), backward_jvp_args(args, room));
  });
}

flashjit_status flashjit_reference_append(const flashjit_spec* spec,
                                          const flashjit_append_args* args) noexcept {
  return guarded([&] { flashjit::reference_append(get(spec), append_args(args)); });
}

flashjit_status flashjit_reference_merge(const flashjit_spec* spec,
                                         const flashjit_merge_args* args) noexcept {
  return guarded([&] {
    States room;
    flashjit::reference_merge(get(spec), merge_args(args, room));
  });
}

flashjit_status flashjit_reference_quantize(const flashjit_spec* spec,
                                            const flashjit_quantize_args* args) noexcept {
  return guarded([&] { flashjit::reference_quantize(get(spec), quantize_args(args)); });
}

}  // extern "C"

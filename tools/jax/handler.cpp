/// XLA's calls of attention: a typed FFI handler for each function and platform.

#include <xla/ffi/api/ffi.h>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "call.hpp"
#include "flashjit/flashjit.h"
#include "library.hpp"

namespace {

using namespace flashjit_jax;

/// The library's functions on the GPU, on a stream.
struct Launch {
  CUstream_st* stream;

  flashjit_status operator()(const flashjit_spec* spec, const flashjit_forward_args& args) const {
    return library().forward(library().runtime, spec, &args, stream);
  }
  flashjit_status operator()(const flashjit_spec* spec, const flashjit_backward_args& args) const {
    return library().backward(library().runtime, spec, &args, stream);
  }
  flashjit_status operator()(const flashjit_spec* spec, const flashjit_jvp_args& args) const {
    return library().jvp(library().runtime, spec, &args, stream);
  }
  flashjit_status operator()(const flashjit_spec* spec, const flashjit_backward_jvp_args& args) const {
    return library().backward_jvp(library().runtime, spec, &args, stream);
  }
};

/// The same on the CPU.
struct Compute {
  flashjit_status operator()(const flashjit_spec* spec, const flashjit_forward_args& args) const {
    return library().reference_forward(spec, &args);
  }
  flashjit_status operator()(const flashjit_spec* spec, const flashjit_backward_args& args) const {
    return library().reference_backward(spec, &args);
  }
  flashjit_status operator()(const flashjit_spec* spec, const flashjit_jvp_args& args) const {
    return library().reference_jvp(spec, &args);
  }
  flashjit_status operator()(const flashjit_spec* spec, const flashjit_backward_jvp_args& args) const {
    return library().reference_backward_jvp(spec, &args);
  }
};

template <class Run>
ffi::Error run(flashjit_pass pass, const Call& call, const Memory& memory, const Run& function) {
  const flashjit_spec* spec = library().spec(call.spec());
  if (!spec) return error_of(FLASHJIT_INVALID_ARGUMENT);
  if (pass == FLASHJIT_FORWARD) return error_of(function(spec, call.forward()));
  if (ffi::Error error = call.begin_results(memory); error.failure()) return error;
  if (pass == FLASHJIT_JVP) {
    const auto forward = call.forward();
    return error_of(function(spec, call.jvp(forward)));
  }
  const auto backward = call.backward();
  if (pass == FLASHJIT_BACKWARD_JVP) return error_of(function(spec, call.backward_jvp(backward)));
  return error_of(function(spec, backward));
}

/// Compiles and loads before a stream is captured into a CUDA graph, in which nothing may be loaded.
ffi::Error prepare(flashjit_pass pass, const Call& call, std::int32_t device) {
  if (!call.has_buffers()) return ffi::Error::Success();  // an XLA that gives none before it executes
  const flashjit_spec* spec = library().spec(call.spec());
  if (!spec) return error_of(FLASHJIT_INVALID_ARGUMENT);
  const flashjit_shape shape = call.shape();
  std::string key(call.spec());
  for (const std::int64_t part : {std::int64_t{device}, std::int64_t{pass}, shape.batch, shape.heads_q,
                                  shape.heads_kv, shape.seqlen_q, shape.seqlen_kv})
    key += ' ' + std::to_string(part);
  if (!library().is_new(key)) return ffi::Error::Success();
  const ffi::Error error =
      error_of(library().prepare(library().runtime, pass, spec, &shape, nullptr, nullptr, nullptr));
  if (error.success()) library().keep(std::move(key));
  return error;
}

ffi::Error append(bool launches, const Call& call, const Rotation& rotation, CUstream_st* stream) {
  const flashjit_spec* spec = library().spec(call.spec());
  if (!spec) return error_of(FLASHJIT_INVALID_ARGUMENT);
  if (ffi::Error error = call.begin_results(Memory(stream, launches)); error.failure()) return error;
  const auto args = call.append(rotation);
  return error_of(launches ? library().append(library().runtime, spec, &args, stream)
                           : library().reference_append(spec, &args));
}

using Text = std::string_view;

template <flashjit_pass pass>
ffi::Error on_gpu(CUstream_st* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                  Text layout, Text names, Text results, float scale, float dropout,
                  std::int64_t max_seqlen_q, std::int64_t max_seqlen_kv) {
  return run(pass,
             Call({spec, layout, names, results, scale, dropout, max_seqlen_q, max_seqlen_kv}, args, rets),
             Memory(stream, true), Launch{stream});
}

template <flashjit_pass pass>
ffi::Error before_gpu(std::int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                      Text layout, Text names, Text results, float scale, float dropout,
                      std::int64_t max_seqlen_q, std::int64_t max_seqlen_kv) {
  return prepare(
      pass, Call({spec, layout, names, results, scale, dropout, max_seqlen_q, max_seqlen_kv}, args, rets),
      device);
}

template <flashjit_pass pass>
ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec, Text layout, Text names,
                  Text results, float scale, float dropout, std::int64_t max_seqlen_q,
                  std::int64_t max_seqlen_kv) {
  return run(pass,
             Call({spec, layout, names, results, scale, dropout, max_seqlen_q, max_seqlen_kv}, args, rets),
             Memory(nullptr, false), Compute{});
}

ffi::Error append_on_gpu(CUstream_st* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                         Text layout, Text names, Text results, float theta, std::int64_t dims,
                         std::int64_t interleaved) {
  return append(true, Call({spec, layout, names, results, 1, 0}, args, rets), {theta, dims, interleaved},
                stream);
}

ffi::Error before_append(std::int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec,
                         Text layout, Text names, Text results, float, std::int64_t, std::int64_t) {
  return prepare(FLASHJIT_APPEND, Call({spec, layout, names, results, 1, 0}, args, rets), device);
}

ffi::Error append_on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, Text spec, Text layout, Text names,
                         Text results, float theta, std::int64_t dims, std::int64_t interleaved) {
  return append(false, Call({spec, layout, names, results, 1, 0}, args, rets), {theta, dims, interleaved},
                nullptr);
}

template <class Binding>
auto with_names(Binding&& binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Text>("spec")
      .template Attr<Text>("layout")
      .template Attr<Text>("args")
      .template Attr<Text>("results");
}

template <class Binding>
auto with_rotation(Binding&& binding) {
  return with_names(std::move(binding))
      .template Attr<float>("theta")
      .template Attr<std::int64_t>("rope_dims")
      .template Attr<std::int64_t>("interleaved");
}

template <class Binding>
auto with_all(Binding&& binding) {
  return with_names(std::move(binding))
      .template Attr<float>("scale")
      .template Attr<float>("dropout")
      .template Attr<std::int64_t>("max_seqlen_q")
      .template Attr<std::int64_t>("max_seqlen_kv");
}

auto on_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>(); }
auto on_device() { return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>(); }
auto on_host() { return ffi::Ffi::Bind(); }

}  // namespace

/// Null, or why the library at `path` cannot be used. Called once, before all handlers.
extern "C" const char* flashjit_jax_open(const char* path, flashjit_runtime* runtime) {
  return library().open(path, runtime);
}

/// The version of XLA's interface that the handlers were built for: major * 1000 + minor.
extern "C" std::int32_t flashjit_jax_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_forward, on_gpu<FLASHJIT_FORWARD>, with_all(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_backward, on_gpu<FLASHJIT_BACKWARD>, with_all(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_tangent, on_gpu<FLASHJIT_JVP>, with_all(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_backward_tangent, on_gpu<FLASHJIT_BACKWARD_JVP>,
                              with_all(on_stream()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_append, append_on_gpu, with_rotation(on_stream()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_forward, before_gpu<FLASHJIT_FORWARD>,
                              with_all(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_backward, before_gpu<FLASHJIT_BACKWARD>,
                              with_all(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_tangent, before_gpu<FLASHJIT_JVP>, with_all(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_backward_tangent, before_gpu<FLASHJIT_BACKWARD_JVP>,
                              with_all(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_prepare_append, before_append, with_rotation(on_device()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_forward, on_cpu<FLASHJIT_FORWARD>, with_all(on_host()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_backward, on_cpu<FLASHJIT_BACKWARD>,
                              with_all(on_host()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_tangent, on_cpu<FLASHJIT_JVP>, with_all(on_host()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_backward_tangent, on_cpu<FLASHJIT_BACKWARD_JVP>,
                              with_all(on_host()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashjit_jax_reference_append, append_on_cpu, with_rotation(on_host()));

#include "flashjit/runtime.hpp"

#include "call/arguments.hpp"
#include "call/engine.hpp"

namespace flashjit {

struct Runtime::Impl : Engine {
  using Engine::Engine;
};

Engine& engine_of(Runtime& runtime) { return *runtime.impl_; }

// NOLINTNEXTLINE(performance-unnecessary-value-param): as the public interface has it
Runtime::Runtime(RuntimeOptions options)
    : impl_(std::make_unique<Impl>(resolve_settings(options, read_environment()))) {}
Runtime::~Runtime() = default;
Runtime::Runtime(Runtime&&) noexcept = default;
Runtime& Runtime::operator=(Runtime&&) noexcept = default;

void Runtime::forward(const AttentionSpec& spec, const ForwardArgs& args, Stream stream) {
  impl_->forward(spec, args, stream);
}

void Runtime::backward(const AttentionSpec& spec, const BackwardArgs& args, Stream stream) {
  impl_->backward(spec, args, stream);
}

void Runtime::jvp(const AttentionSpec& spec, const JvpArgs& args, Stream stream) {
  impl_->jvp(spec, args, stream);
}

void Runtime::backward_jvp(const AttentionSpec& spec, const BackwardJvpArgs& args, Stream stream) {
  impl_->backward_jvp(spec, args, stream);
}

void Runtime::append(const AttentionSpec& spec, const AppendArgs& args, Stream stream) {
  impl_->append(spec, args, stream);
}

void Runtime::merge(const AttentionSpec& spec, const MergeArgs& args, Stream stream) {
  impl_->merge(spec, args, stream);
}

void Runtime::quantize(const AttentionSpec& spec, const QuantizeArgs& args, Stream stream) {
  impl_->quantize(spec, args, stream);
}

KernelReport Runtime::prepare(const KernelSpec& spec, const AttentionShape& shape,
                              const std::optional<TileConfig>& config) {
  return impl_->prepare(spec, shape, config);
}

std::array<KernelReport, 2> Runtime::prepare_both(const AttentionSpec& spec, const AttentionShape& shape) {
  return impl_->prepare_both(spec, shape);
}

void Runtime::prepare_first_calls(const AttentionSpec& spec, const AttentionShape& shape) {
  impl_->prepare_first_calls(spec, shape);
}

RangeReport Runtime::prepare_range(const KernelSpec& spec, const ShapeRange& range,
                                   const RangeProgress& progress) {
  return impl_->prepare_range(spec, range, progress);
}

std::size_t Runtime::workspace_bytes(const KernelSpec& spec, const AttentionShape& shape) {
  return impl_->workspace_bytes(spec, shape);
}

std::size_t Runtime::workspace_bytes(const ForwardArgs& args, const AttentionSpec& given) {
  const AttentionSpec spec = spec_of(args, given);
  return workspace_bytes(spec, shape_of(spec, args), Pass::forward);
}

std::size_t Runtime::workspace_bytes(const BackwardArgs& args, const AttentionSpec& given) {
  const AttentionSpec spec = spec_of(args, given);
  return workspace_bytes(spec, shape_of(spec, args), Pass::backward);
}

std::size_t Runtime::workspace_bytes(const JvpArgs& args, const AttentionSpec& given) {
  const AttentionSpec spec = spec_of(args, given);
  return workspace_bytes(spec, shape_of(spec, args), Pass::jvp);
}

std::size_t Runtime::workspace_bytes(const BackwardJvpArgs& args, const AttentionSpec& given) {
  const AttentionSpec spec = spec_of(args, given);
  return workspace_bytes(spec, shape_of(spec, args), Pass::backward_jvp);
}

std::size_t Runtime::list_bytes(const KernelSpec& spec, const AttentionShape& shape) {
  return impl_->list_bytes(spec, shape);
}

TileLists Runtime::build_lists(const KernelSpec& spec, const AttentionShape& shape, const ListArgs& args,
                               Stream stream) {
  return impl_->build_lists(spec, shape, args, stream);
}

void Runtime::stop_tuning() { impl_->stop_tuning(); }

DeviceInfo Runtime::device() { return impl_->device(); }

std::string to_string(KernelOrigin origin) {
  switch (origin) {
    case KernelOrigin::memory:
      return "memory";
    case KernelOrigin::pack:
      return "pack";
    case KernelOrigin::disk:
      return "disk";
    case KernelOrigin::compiled:
      return "compiled";
  }
  throw Error(ErrorCode::internal, "a KernelOrigin without a name");
}

}  // namespace flashjit

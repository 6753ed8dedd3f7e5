// Calls whose kernel is not there yet: another of the same spec computes them, one that is there or one that
// is compiled sooner, while the better one is compiled beside them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "call/engine.hpp"
#include "plan/plain_config.hpp"

namespace flashjit {
namespace {

std::string loaded_key(const plan::ExecutionPlan& plan, CUdevice device) {
  return fmt::format("{} {}", to_string(plan.spec), device);
}

/// How far two shapes are apart, by the ratios of their lengths.
double distance(const AttentionShape& a, const AttentionShape& b) {
  const auto ratio = [](std::int64_t x, std::int64_t y) {
    return std::abs(std::log2(static_cast<double>(x + 1) / static_cast<double>(y + 1)));
  };
  return ratio(a.batch, b.batch) + ratio(a.seqlen_q, b.seqlen_q) + ratio(a.seqlen_kv, b.seqlen_kv) +
         ratio(a.heads_q, b.heads_q) + ratio(a.heads_kv, b.heads_kv);
}

/// Whether another configuration may compute a call. Lists are built for one configuration.
bool may_fall_back(const plan::ExecutionPlan& better) {
  return better.config_source != ConfigSource::given && better.workspace.list_bytes() == 0;
}

}  // namespace

void Engine::note_loaded(const plan::ExecutionPlan& plan, CUdevice device) {
  if (!settings_.compile_in_background || plan.spec.part != plan::BatchPart::all) return;
  const std::unique_lock lock(mutex_);
  std::vector<Loaded>& all = loaded_[loaded_key(plan, device)];
  if (std::ranges::none_of(all, [&](const Loaded& one) { return one.config == plan.config; }))
    all.push_back({plan.config, plan.shape});
}

std::vector<TileConfig> Engine::configs_in_memory(const plan::ExecutionPlan& better, CUdevice device) const {
  std::vector<Loaded> all;
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = loaded_.find(loaded_key(better, device)); found != loaded_.end())
      all = found->second;
  }
  std::ranges::sort(all, {}, [&](const Loaded& one) { return distance(one.shape, better.shape); });
  std::vector<TileConfig> configs;
  for (const Loaded& one : all) configs.push_back(one.config);
  return configs;
}

Engine::OperationPtr Engine::fallback(const plan::ExecutionPlan& better, const DeviceInfo& info,
                                      CUdevice device, bool may_compile) {
  if (!settings_.compile_in_background || !may_fall_back(better)) return nullptr;
  std::vector<TileConfig> configs = configs_in_memory(better, device);
  if (configs.empty() && may_compile)
    if (const auto plain = plan::plain_config(better, info)) configs = {*plain};
  if (configs.empty()) return nullptr;
  const bool brings_decodes = !better.decodes || library_.brings(*better.decodes, info, driver());
  if (brings_decodes && library_.brings(better, info, driver())) return nullptr;
  for (const TileConfig& config : configs) {
    if (!plan::traits(config.family).admits(better.spec, config, info)) continue;
    plan::ExecutionPlan plan =
        plan::make_plan(better.spec, better.shape, info, library_.records(), config, better.spec.checks);
    plan.config_source = ConfigSource::heuristic;
    plan.fold_gqa = better.fold_gqa;  // its spec and shape are folded already
    if (plan.workspace.bytes > better.workspace.bytes || plan.workspace.list_bytes() > 0) continue;
    compile_in_background(better, info, device);
    try {
      return load(std::move(plan), info, device, false, better.workspace);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::compile_failed) throw;
    }
  }
  return nullptr;
}

void Engine::compile_in_background(const plan::ExecutionPlan& better, const DeviceInfo& info,
                                   CUdevice device) {
  device::Context context = device::current_context(driver());
  const std::unique_lock lock(mutex_);
  const std::string key = fmt::format("{} {} {}", to_string(better.spec), to_string(better.config), device);
  if (tuning_stopped_ || !compiled_.insert(key).second) return;
  if (!compiler_) compiler_ = std::make_unique<Worker>();
  compiler_->want([this, better, &info, device, context = std::move(context)](const std::stop_token&) {
    try {
      context.make_current_apart();
      load(better, info, device, false);
      {
        const std::unique_lock lock(mutex_);
        ++generation_;
        operations_.clear();  // making one anew costs microseconds
      }
      settings_.log(fmt::format("compiled {} in the background: calls use {} from now on",
                                to_string(better.spec), to_string(better.config)));
    } catch (const std::exception& error) {
      settings_.log(
          fmt::format("cannot compile {} with {} in the background, calls keep another configuration: {}",
                      to_string(better.spec), to_string(better.config), error.what()));
    }
  });
}

}  // namespace flashjit

#include "call/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <iterator>
#include <span>
#include <type_traits>

#include "call/append_arguments.hpp"
#include "call/arguments.hpp"
#include "call/backward_jvp_arguments.hpp"
#include "call/captures.hpp"
#include "call/decoded_cache.hpp"
#include "call/jvp_arguments.hpp"
#include "call/parameters.hpp"
#include "call/q_rope.hpp"
#include "call/row_mods.hpp"
#include "device/tensor_maps.hpp"
#include "plan/decoded_cache.hpp"

namespace flashjit {
namespace {

/// Shapes that a process calls again and again are few; one that never repeats a shape must not grow for
/// ever.
constexpr std::size_t kOperationLimit = 4096;

std::string given_key(const KernelSpec& spec, const AttentionShape& shape) {
  const plan::Problem problem = plan::fold_gqa(spec, shape);
  return fmt::format("{} {}", to_string(problem.spec), to_string(problem.shape));
}

plan::Checks checks_of(const Settings& settings) {
  return {.check_indices = settings.check_indices, .check_waits = settings.check_waits};
}

std::string tuned_key(const KernelSpec& spec, const AttentionShape& shape, CUdevice device) {
  return fmt::format("{} {}", given_key(spec, shape), device);
}

/// Whether another configuration may do: where the first does not compile, or where a record chose it and
/// there is neither its kernel nor a compiler.
bool may_try_another(const plan::ExecutionPlan& first, ErrorCode code) {
  if (code == ErrorCode::compile_failed) return true;
  const bool is_missing = code == ErrorCode::kernel_missing || code == ErrorCode::no_compiler;
  if (first.decodes && is_missing) return true;
  const bool by_record =
      first.config_source != ConfigSource::given && first.config_source != ConfigSource::heuristic;
  return by_record && is_missing;
}

bool has_work(const plan::ExecutionPlan& plan) {
  return std::ranges::any_of(plan.launches, [](const plan::Launch& launch) { return launch.blocks > 0; });
}

/// Zeros where the plan's kernels take none.
template <class Args>
device::TensorMaps tensor_maps(const device::Driver& driver, const plan::ExecutionPlan& plan,
                               const Args& args, const Params& params) {
  if (!plan.tensor_boxes) return {};
  const auto maps_with = [&](const ConstTensorView& o, const char* o_name) {
    const auto seen = args_of_kernels(plan, args);
    return device::make_tensor_maps(driver, *plan.tensor_boxes, plan.spec.dtype, plan::kv_type_of_main(plan),
                                    seen.q, q_rope_of(args), seen.k, args.v, o, o_name, params.captures);
  };
  if constexpr (requires { args.dout; })
    return maps_with(dout_of_kernels(plan, args), "dout");
  else
    return maps_with(args.out, "out");
}

/// The tensor maps of a kernel of O's tangent.
device::JvpTensorMaps tensor_maps(const device::Driver& driver, const plan::ExecutionPlan& plan,
                                  const JvpArgs& args, const Params&) {
  if (!plan.tensor_boxes) return {};
  return device::make_jvp_tensor_maps(driver, *plan.tensor_boxes, plan.spec.dtype,
                                      {.q = args.q,
                                       .k = args.k,
                                       .v = args.v,
                                       .q_tangent = args.q_tangent,
                                       .k_tangent = args.k_tangent,
                                       .v_tangent = args.v_tangent});
}

using Bytes = std::span<const std::byte>;

/// Sends launches to a stream.
struct ToStream {
  const device::Driver& driver;
  Stream stream;

  template <class Maps>
  void add(const auto& step, unsigned blocks, Bytes params, const Maps& maps) const {
    std::array<void*, 2> parameters{const_cast<std::byte*>(params.data()), const_cast<Maps*>(&maps)};
    device::launch(driver, step.kernel, blocks, step.threads, step.shared_bytes, stream, parameters,
                   step.early);
  }
};

/// Keeps launches, so that the same call can repeat them.
struct ToRecord {
  const device::Driver& driver;
  std::vector<RecordedLaunch>& launches;

  void add(const auto& step, unsigned blocks, Bytes params, const device::TensorMaps& maps) const {
    std::vector<std::uint64_t> words(params.size() / sizeof(std::uint64_t));
    std::memcpy(words.data(), params.data(), params.size());
    launches.push_back(
        {step.kernel, blocks, step.threads, step.shared_bytes, step.early, std::move(words), maps});
  }
};

/// Launches in order the steps of an operation that `wanted` says yes to. `reserved_sms`:
/// multiprocessors that persistent kernels leave to others.
template <class Maps = device::TensorMaps, class To, class Steps, class Wanted>
void launch_steps(const To& to, const Steps& steps, Bytes params, const Maps& maps, Wanted wanted,
                  int reserved_sms = 0) {
  for (const auto& step : steps)
    if (wanted(step)) to.add(step, step.blocks_without(static_cast<unsigned>(reserved_sms)), params, maps);
}

/// The entry that append() does not launch. One of the two is for rows as they come: calls without Q,
/// rotation and norms.
template <class Steps>
plan::Step skipped_step(const Steps& steps, const AppendParams& p) {
  const bool as_they_come = p.heads_q == 0 && p.rope.pairs == 0 && p.k_norm.weight == nullptr;
  const bool has_both =
      std::ranges::any_of(steps, [](const auto& step) { return step.purpose == plan::Step::append_lanes; });
  return has_both && as_they_come ? plan::Step::append : plan::Step::append_lanes;
}

/// Refuses memory that kernels in the current context cannot reach.
void check_reachable(const device::Driver& driver, CUdevice device, const NamedPointer& named) {
  const auto address = reinterpret_cast<CUdeviceptr>(named.pointer);
  unsigned memory_type = 0;
  if (driver.pointer_get_attribute(&memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS) {
    int pageable = 0;
    driver.device_get_attribute(&pageable, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, device);
    if (pageable) return;
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is at {}, which is no memory that CUDA knows: give device memory.",
                            named.name, named.pointer));
  }
  int owner = device;
  driver.pointer_get_attribute(&owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
  if (memory_type != CU_MEMORYTYPE_DEVICE || owner == device) return;
  CUdeviceptr seen_here = 0;
  if (driver.pointer_get_attribute(&seen_here, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address) == CUDA_SUCCESS)
    return;
  throw Error(
      ErrorCode::no_device,
      fmt::format("{} is memory of device {}, but the current context is on device {}: make a context of the "
                  "tensors' device current.",
                  named.name, owner, device));
}

}  // namespace

Engine::Engine(Settings settings, std::shared_ptr<const device::Driver> driver,
               MakeBackgroundTuner make_tuner)
    : settings_(std::move(settings)),
      make_tuner_(std::move(make_tuner)),
      driver_(std::move(driver)),
      library_(settings_) {}

void Engine::forward(const AttentionSpec& spec, const ForwardArgs& args, Stream stream) {
  run(spec, Pass::forward, args, stream);
}

void Engine::backward(const AttentionSpec& spec, const BackwardArgs& args, Stream stream) {
  run(spec, Pass::backward, args, stream);
}

void Engine::jvp(const AttentionSpec& spec, const JvpArgs& args, Stream stream) {
  run(spec, Pass::jvp, args, stream);
}

void Engine::backward_jvp(const AttentionSpec& spec, const BackwardJvpArgs& args, Stream stream) {
  run(spec, Pass::backward_jvp, args, stream);
}

void Engine::append(const AttentionSpec& spec, const AppendArgs& args, Stream stream) {
  run_plain(spec, Pass::append, args, stream);
}

void Engine::merge(const AttentionSpec& spec, const MergeArgs& args, Stream stream) {
  run_plain(spec, Pass::merge, args, stream);
}

void Engine::quantize(const AttentionSpec& spec, const QuantizeArgs& args, Stream stream) {
  run_plain(spec, Pass::quantize, args, stream);
}

template <class Args>
void Engine::run_plain(const AttentionSpec& spec, Pass pass, const Args& args, Stream stream) {
  check_arguments(spec, args);
  const CUdevice device = device::current_device(*driver());
  const OperationPtr operation = operation_of(spec, pass, shape_of(spec, args), {}, pass, device, stream);
  check_pointers_once(*operation, args, device);
  if (operation->steps.empty()) return;
  const auto params = make_params(spec, args);
  std::optional<plan::Step> skipped;
  if constexpr (std::is_same_v<Args, AppendArgs>) skipped = skipped_step(operation->steps, params);
  launch_steps(ToStream{*driver(), stream}, operation->steps, std::as_bytes(std::span(&params, 1)), {},
               [&](const Operation::Step& step) { return step.purpose != skipped; });
}

template <class Args>
void Engine::run(const AttentionSpec& spec, Pass pass, const Args& args, Stream stream) {
  const AttentionShape shape = check_arguments(spec, args);
  const device::Driver& driver = *this->driver();
  const CUdevice device = device::current_device(driver);
  const OperationPtr operation = operation_of(spec, pass, shape, args.captures, pass, device, stream);
  const plan::WorkspaceLayout& workspace = operation->plan.workspace;
  if (args.lists) check_lists(*args.lists, operation->name, args.block_map);
  check_workspace(args.workspace, args.lists ? workspace.bytes_without_lists() : workspace.bytes);
  check_pointers_once(*operation, args, device);
  if (operation->steps.empty()) return;
  launch(*operation, args, ToStream{driver, stream});
}

template <class Args>
RecordedLaunches Engine::record(const Operation& operation, const Args& args, const device::Driver& driver) {
  RecordedLaunches launches;
  if (!operation.steps.empty()) launch(operation, args, ToRecord{driver, launches});
  return launches;
}

template <class Args>
void Engine::know(const AttentionSpec& spec, Pass pass, const CallWords& call, const Args& args,
                  const Args& moved) {
  const std::uint64_t generation = generation_;
  const CUdevice device = device::current_device(*driver());
  const AttentionShape shape = shape_of(spec, args);
  const OperationPtr operation = find(CallKeyView(spec, pass, shape, device));
  if (!operation) return;
  const device::Driver& as_addresses = driver_of_addresses();
  const RecordedPlaces places{places_of(spec, shape, args), places_of(spec, shape, moved)};
  known_.keep(call,
              KnownCall::make({operation, device, generation}, call, record(*operation, args, *driver()),
                              record(*operation, args, as_addresses), record(*operation, moved, as_addresses),
                              places));
}
template void Engine::know(const AttentionSpec&, Pass, const CallWords&, const ForwardArgs&,
                           const ForwardArgs&);
template void Engine::know(const AttentionSpec&, Pass, const CallWords&, const BackwardArgs&,
                           const BackwardArgs&);

bool Engine::launch_known(const CallWords& call, Stream stream) {
  const std::shared_ptr<const KnownCall> known = known_.find(call);
  if (!known) return false;
  const device::Driver& driver = *this->driver();
  return known->is_valid(device::current_device(driver), generation_) && known->launch(driver, call, stream);
}

template <class Args, class To>
void Engine::launch(const Operation& operation, const Args& args, const To& to) {
  const auto skipped = args.lists ? plan::LaunchedWhen::lists_are_made : plan::LaunchedWhen::lists_are_given;
  const plan::ExecutionPlan& plan = operation.plan;
  const auto launch_with = [&](const Args& computed) {
    const auto params = make_params(plan, computed);
    launch_steps(
        to, operation.steps, plan::PackedParams(operation.params, params).bytes(),
        tensor_maps(to.driver, plan, computed, params),
        [&](const Operation::Step& step) {
          return step.when != skipped && step.purpose != plan::Step::decode_cache;
        },
        args.partial.reserved_sms);
  };
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    if (plan.config.decode_cache) {
      const ForwardArgs stored = plan.fold_gqa ? fold_gqa(args) : args;
      const plan::PackedParams params(operation.params, decode_cache_params(plan, stored));
      launch_steps(to, operation.steps, params.bytes(), {},
                   [](const Operation::Step& step) { return step.purpose == plan::Step::decode_cache; });
      launch_with(with_decoded_cache(plan, stored));
    } else if (plan.fold_gqa) {
      launch_with(fold_gqa(args));
    } else {
      launch_with(args);
    }
  } else {
    launch_with(args);
  }
  if (operation.decodes) launch(*operation.decodes, args, to);
}

TileLists Engine::build_lists(const KernelSpec& spec, const AttentionShape& shape, const ListArgs& args,
                              Stream stream) {
  check_arguments(spec, shape, args);
  const device::Driver& driver = *this->driver();
  const CUdevice device = device::current_device(driver);
  // Masks have no gradients, so that none need be given.
  const OperationPtr operation =
      operation_of(spec, spec.pass, shape, args.captures, Pass::forward, device, stream);
  check_list_memory(args.memory, operation->plan.workspace.list_bytes());
  check_pointers(args, device);
  const plan::PackedParams params(operation->params, make_params(operation->plan, args));
  launch_steps(ToStream{driver, stream}, operation->steps, params.bytes(), {},
               [](const Operation::Step& step) { return step.when == plan::LaunchedWhen::lists_are_made; });
  return {.data = args.memory.data,
          .built_for = operation->name,
          .block_map_size = {args.block_map.size[0], args.block_map.size[1]}};
}

Engine::OperationPtr Engine::operation_of(const AttentionSpec& spec, Pass pass, const AttentionShape& shape,
                                          std::span<const Capture> captures, Pass captures_of,
                                          CUdevice device, Stream stream) {
  if (OperationPtr known = find(CallKeyView(spec, pass, shape, device))) {
    check_captures(known->plan.spec.programs.declarations, captures, captures_of);
    return known;
  }
  const KernelSpec normalized = KernelSpec{spec, pass}.normalized();  // append and others drop programs
  check_captures(
      expr::declarations(normalized.score, normalized.mask, normalized.epilogue.out_mod, normalized.prologue),
      captures, captures_of);
  return add({spec, pass}, shape, device, {}, is_capturing(stream) ? Asker::capturing_call : Asker::call);
}

template <class Args>
void Engine::check_pointers_once(const Operation& operation, const Args& args, CUdevice device) {
  if (operation.pointers_checked.load(std::memory_order_relaxed)) return;
  check_pointers(args, device);
  operation.pointers_checked.store(true, std::memory_order_relaxed);
}

template <class Args>
void Engine::check_pointers(const Args& args, CUdevice device) {
  for (const NamedPointer& named : pointers_of(args)) check_reachable(*driver(), device, named);
}

KernelReport Engine::prepare(const KernelSpec& spec, const AttentionShape& shape,
                             const std::optional<TileConfig>& config) {
  const CUdevice device = device::current_device(*driver());
  const OperationPtr operation = add(spec, shape, device, config, Asker::prepare);
  KernelReport report{.spec = operation->plan.spec,
                      .config = operation->plan.config,
                      .config_source = operation->plan.config_source};
  if (!operation->kernel) return report;
  const ReadyKernel& kernel = *operation->kernel;
  report.key = kernel.key;
  report.entries = kernel.entries;
  if (operation->made) {
    report.origin = kernel.origin;
    report.render_ms = kernel.render_ms;
    report.compile_ms = kernel.compile_ms;
    report.load_ms = kernel.load_ms;
  }
  return report;
}

template <class Made>
std::array<Made, 2> Engine::in_both_passes(const std::function<Made(Pass)>& make) {
  const device::Context context = device::current_context(driver());
  // Nearly all of the time is the compiler's, which works in as many threads as ask.
  std::future<Made> backward = std::async(std::launch::async, [&] {
    context.make_current();
    return make(Pass::backward);
  });
  Made forward = make(Pass::forward);
  return {std::move(forward), backward.get()};
}

std::array<KernelReport, 2> Engine::prepare_both(const AttentionSpec& spec, const AttentionShape& shape) {
  return in_both_passes<KernelReport>([&](Pass pass) { return prepare({spec, pass}, shape, {}); });
}

void Engine::prepare_first_calls(const AttentionSpec& spec, const AttentionShape& shape) {
  const CUdevice device = device::current_device(*driver());
  in_both_passes<OperationPtr>([&](Pass pass) { return add({spec, pass}, shape, device, {}, Asker::call); });
}

plan::WorkspaceLayout Engine::workspace(const KernelSpec& spec, const AttentionShape& shape) {
  const CUdevice device = device::current_device(*driver());
  if (const OperationPtr operation = find(CallKeyView(spec, spec.pass, shape, device)))
    return operation->workspace_of_better.value_or(operation->plan.workspace);
  return plan(spec, shape, devices_.info(*driver(), device), remembered(spec, shape, device)).workspace;
}

std::size_t Engine::workspace_bytes(const KernelSpec& spec, const AttentionShape& shape) {
  return workspace(spec, shape).bytes;
}

std::size_t Engine::list_bytes(const KernelSpec& spec, const AttentionShape& shape) {
  return workspace(spec, shape).list_bytes();
}

DeviceInfo Engine::device() { return devices_.info(*driver(), device::current_device(*driver())); }

Engine::OperationPtr Engine::find(const CallKeyView& key) const {
  const std::shared_lock lock(mutex_);
  const auto found = operations_.find(key);
  return found == operations_.end() ? nullptr : found->second;
}

Engine::OperationPtr Engine::add(const KernelSpec& spec, const AttentionShape& shape, CUdevice device,
                                 const std::optional<TileConfig>& config, Asker asker) {
  std::uint64_t generation = 0;
  {
    const std::shared_lock lock(mutex_);
    generation = generation_;
  }
  const DeviceInfo& info = devices_.info(*driver(), device);
  const std::optional<Chosen> chosen =
      config ? Chosen{*config, ConfigSource::given} : remembered(spec, shape, device);
  plan::ExecutionPlan best = plan(spec, shape, info, chosen);
  const bool waits = asker == Asker::prepare || spec.reproducible.any();
  OperationPtr operation = waits ? nullptr : fallback(best, info, device, asker == Asker::call);
  if (!operation) operation = build(std::move(best), info, device, asker == Asker::capturing_call);
  keep(CallKeyView(spec, spec.pass, shape, device), operation, generation, config);
  if (settings_.tune_in_background && operation->kernel && is_attention(spec.pass))
    tune_in_background(operation->plan, device);
  return operation;
}

void Engine::keep(const CallKeyView& key, OperationPtr operation, std::uint64_t generation,
                  const std::optional<TileConfig>& config) {
  const plan::ExecutionPlan& plan = operation->plan;
  const std::string given = config ? given_key(plan.spec, plan.shape) : "";
  const std::unique_lock lock(mutex_);
  if (config) {
    given_.insert_or_assign(given, *config);
    ++generation_;
    // Other devices' operations of this spec and shape are stale, too; making one anew costs microseconds.
    operations_.clear();
  } else if (generation != generation_) {
    return;
  }
  if (operations_.size() >= kOperationLimit) operations_.clear();
  operations_.insert_or_assign(CallKey(key), std::move(operation));
}

std::optional<Engine::Chosen> Engine::remembered(const KernelSpec& spec, const AttentionShape& shape,
                                                 CUdevice device) const {
  const std::shared_lock lock(mutex_);
  if (!given_.empty()) {
    const auto given = given_.find(given_key(spec, shape));
    if (given != given_.end()) return Chosen{given->second, ConfigSource::given};
  }
  if (!tuned_.empty()) {
    const auto tuned = tuned_.find(tuned_key(spec, shape, device));
    if (tuned != tuned_.end()) return Chosen{tuned->second, ConfigSource::tuned};
  }
  return {};
}

void Engine::tune_in_background(const plan::ExecutionPlan& plan, CUdevice device) {
  if (plan.config_source == ConfigSource::given || plan.config_source == ConfigSource::tuned) return;
  if (plan.workspace.list_bytes() > 0) return;  // the caller may hold lists of the present tiles
  if (plan.decodes) return;                     // a tuner times one kernel of all sequences
  device::Context context = device::current_context(driver());
  const std::unique_lock lock(mutex_);
  if (tuning_stopped_) return;
  if (!wanted_.insert(tuned_key(plan.spec, plan.shape, device)).second) return;
  if (!tuner_)
    tuner_ = make_tuner_(settings_, [this](const auto& job, const auto& best) { adopt(job, best); });
  tuner_->want({plan.spec, plan.shape, plan.config, plan.workspace.bytes, std::move(context)});
}

void Engine::stop_tuning() {
  // Without the lock, which their threads may wait for.
  std::unique_ptr<BackgroundTuner> ended;
  std::unique_ptr<Worker> ended_compiler;
  const std::unique_lock lock(mutex_);
  tuning_stopped_ = true;
  ended = std::move(tuner_), ended_compiler = std::move(compiler_);
}

void Engine::adopt(const BackgroundJob& job, const TileConfig& best) {
  const CUdevice device = job.context.device();
  const DeviceInfo& info = devices_.info(*driver(), device);
  // Loaded before calls know of it, so that none waits.
  load(plan(job.spec, job.shape, info, Chosen{best, ConfigSource::tuned}), info, device, false);
  const std::unique_lock lock(mutex_);
  tuned_.insert_or_assign(tuned_key(job.spec, job.shape, device), best);
  ++generation_;
  operations_
      .clear();  // one spec may be written in several ways; making an operation anew costs microseconds
}

plan::ExecutionPlan Engine::plan(const KernelSpec& spec, const AttentionShape& shape, const DeviceInfo& info,
                                 const std::optional<Chosen>& chosen) {
  spec.validate();
  shape.validate();
  check_limits(shape);
  const plan::Checks checks = checks_of(settings_);
  if (!chosen) return plan::make_plan(spec, shape, info, library_.records(), {}, checks);
  plan::ExecutionPlan plan = plan::make_plan(spec, shape, info, library_.records(), chosen->config, checks);
  plan.config_source = chosen->source;
  return plan;
}

std::vector<plan::ExecutionPlan> Engine::alternatives(const plan::ExecutionPlan& failed,
                                                      const DeviceInfo& info) {
  std::vector<plan::ExecutionPlan> plans;
  if (failed.config_source == ConfigSource::given) return plans;
  for (const plan::FamilyTraits& family : plan::families()) {
    if (!family.supports(failed.spec, info)) continue;
    const TileConfig config = family.heuristic(failed.spec, failed.shape, info);
    const bool is_same = config == failed.config && !failed.decodes;
    if (is_same || !family.admits(failed.spec, config, info)) continue;
    plans.push_back(
        plan::make_plan(failed.spec, failed.shape, info, library_.records(), config, failed.spec.checks));
    plans.back().config_source = ConfigSource::heuristic;
    plans.back().fold_gqa = failed.fold_gqa;  // its spec and shape are folded already
  }
  return plans;
}

Engine::OperationPtr Engine::build(plan::ExecutionPlan first, const DeviceInfo& info, CUdevice device,
                                   bool capturing) {
  std::vector<plan::ExecutionPlan> plans = {std::move(first)};
  for (std::size_t i = 0;; ++i) {
    try {
      return load(plans[i], info, device, capturing);
    } catch (const Error& error) {
      if (!may_try_another(plans[0], error.code())) throw;
      if (i == 0) std::ranges::move(alternatives(plans[0], info), std::back_inserter(plans));
      if (i + 1 == plans.size()) throw;
      settings_.log(fmt::format("{} does not work: {} Trying {}.", to_string(plans[i].config),
                                error.message(), to_string(plans[i + 1].config)));
    }
  }
}

Engine::OperationPtr Engine::load(plan::ExecutionPlan plan, const DeviceInfo& info, CUdevice device,
                                  bool capturing, const std::optional<plan::WorkspaceLayout>& of_better) {
  auto operation = std::make_shared<Operation>();
  operation->workspace_of_better = of_better;
  operation->plan = std::move(plan);
  const plan::ExecutionPlan& planned = operation->plan;
  operation->params = plan::params_layout(planned);
  operation->name =
      fmt::format("{} {} {}", to_string(planned.spec), to_string(planned.shape), to_string(planned.config));
  if (!has_work(planned)) return operation;
  // Loading a module while a stream captures would spoil the capture.
  if (capturing && !library_.holds(planned, info))
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} with {} is not loaded yet and the stream is capturing a graph: call "
                            "Runtime::prepare() before the capture begins.",
                            to_string(planned.spec), to_string(planned.shape)));
  if (planned.decodes) operation->decodes = load(*planned.decodes, info, device, capturing);
  auto [kernel, made] = library_.get(planned, info, driver());
  kernel->loaded->make_ready(device);
  operation->kernel = std::move(kernel);
  operation->made = made;
  // What was timed is another compiler's code: as good a lead, but no measurement of this kernel.
  const std::string& timed = planned.tuned_nvrtc;
  if (planned.config_source == ConfigSource::tuned && !timed.empty() && timed != operation->kernel->compiler)
    operation->plan.config_source = ConfigSource::tuned_elsewhere;
  note_loaded(planned, device);
  for (const plan::Launch& launch : planned.launches) {
    if (launch.blocks == 0) continue;
    const plan::Entry& entry = planned.entries[launch.entry];
    operation->steps.push_back(
        {operation->kernel->loaded->kernel(launch.entry), static_cast<unsigned>(launch.blocks),
         static_cast<unsigned>(entry.threads), static_cast<unsigned>(entry.shared_bytes), launch.when,
         planned.steps[launch.entry], launch.early,
         static_cast<unsigned>(entry.persistent && !planned.schedule.stream_k && !planned.schedule.fixed_parts
                                   ? entry.min_blocks
                                   : 0),
         static_cast<unsigned>(entry.cluster)});
  }
  return operation;
}

unsigned Engine::Operation::Step::blocks_without(unsigned reserved_sms) const {
  const unsigned left_out = reserved_sms * blocks_per_sm / cluster * cluster;
  return std::max(blocks - std::min(left_out, blocks), std::min(blocks, cluster));
}

const std::shared_ptr<const device::Driver>& Engine::driver() {
  driver_once_.run([&] {
    if (!driver_) driver_ = device::Driver::open(settings_.libcuda);
  });
  return driver_;
}

bool Engine::is_capturing(Stream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return driver()->stream_is_capturing(stream, &status) == CUDA_SUCCESS &&
         status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

}  // namespace flashjit

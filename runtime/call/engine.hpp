// What a Runtime does: from a call to its launches.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "call/background.hpp"
#include "call/call_key.hpp"
#include "call/kernel_library.hpp"
#include "call/known_calls.hpp"
#include "call/settings.hpp"
#include "device/device_info.hpp"
#include "device/driver.hpp"
#include "flashjit/runtime.hpp"
#include "plan/params_layout.hpp"
#include "plan/plan.hpp"
#include "support/once.hpp"
#include "support/worker.hpp"

namespace flashjit {

class Engine {
 public:
  /// `driver` replaces the one that settings name, which is opened when first needed; `make_tuner` for the
  /// tuner of shapes in use.
  explicit Engine(Settings settings, std::shared_ptr<const device::Driver> driver = {},
                  MakeBackgroundTuner make_tuner = make_background_tuner);

  void forward(const AttentionSpec& spec, const ForwardArgs& args, Stream stream);
  void backward(const AttentionSpec& spec, const BackwardArgs& args, Stream stream);
  void jvp(const AttentionSpec& spec, const JvpArgs& args, Stream stream);
  void backward_jvp(const AttentionSpec& spec, const BackwardJvpArgs& args, Stream stream);
  /// Whether a call that differs from this one in its memory alone was known, which is then launched.
  bool launch_known(const CallWords& call, Stream stream);
  /// Remembers a call's launches, after it. `moved`: it with addresses moved by distance_of_address().
  template <class Args>
  void know(const AttentionSpec& spec, Pass pass, const CallWords& call, const Args& args, const Args& moved);
  KnownCalls& known() { return known_; }
  void append(const AttentionSpec& spec, const AppendArgs& args, Stream stream);
  void merge(const AttentionSpec& spec, const MergeArgs& args, Stream stream);
  void quantize(const AttentionSpec& spec, const QuantizeArgs& args, Stream stream);
  KernelReport prepare(const KernelSpec& spec, const AttentionShape& shape,
                       const std::optional<TileConfig>& config);
  std::array<KernelReport, 2> prepare_both(const AttentionSpec& spec, const AttentionShape& shape);
  void prepare_first_calls(const AttentionSpec& spec, const AttentionShape& shape);
  RangeReport prepare_range(const KernelSpec& spec, const ShapeRange& range, const RangeProgress& progress);
  std::size_t workspace_bytes(const KernelSpec& spec, const AttentionShape& shape);
  std::size_t list_bytes(const KernelSpec& spec, const AttentionShape& shape);
  TileLists build_lists(const KernelSpec& spec, const AttentionShape& shape, const ListArgs& args,
                        Stream stream);
  void stop_tuning();
  DeviceInfo device();

 private:
  /// A spec and shape on a device, ready to launch.
  struct Operation {
    struct Step {
      CUkernel kernel;
      unsigned blocks, threads, shared_bytes;
      plan::LaunchedWhen when;
      plan::Step purpose;
      bool early;
      unsigned blocks_per_sm;  ///< of persistent kernels that any number of blocks can compute, else 0
      unsigned cluster;

      /// With multiprocessors left to others.
      unsigned blocks_without(unsigned reserved_sms) const;
    };
    plan::ExecutionPlan plan;
    std::string name;                           ///< spec, shape and configuration: what lists are built for
    std::shared_ptr<const ReadyKernel> kernel;  ///< null: there is nothing to launch
    std::vector<Step> steps;
    plan::ParamsLayout params;                      ///< of the kernel's entries
    bool made = false;                              ///< the kernel was not in memory before
    std::shared_ptr<const Operation> decodes = {};  ///< launched after this one: ExecutionPlan::decodes
    /// A fallback has the workspace that callers give, so that a call with the better kernel has enough.
    std::optional<plan::WorkspaceLayout> workspace_of_better = {};
    mutable std::atomic<bool> pointers_checked = false;  ///< the driver was asked about one call's pointers
  };
  using OperationPtr = std::shared_ptr<const Operation>;
  using OperationTable = std::unordered_map<CallKey, OperationPtr, CallKeyHash, CallKeyEqual>;

  template <class Args>
  void run(const AttentionSpec& spec, Pass pass, const Args& args, Stream stream);
  /// A pass without workspace, lists and captures.
  template <class Args>
  void run_plain(const AttentionSpec& spec, Pass pass, const Args& args, Stream stream);
  /// Launches the operation's steps, without the ones that make lists if the caller gave these.
  template <class Args, class To>
  void launch(const Operation& operation, const Args& args, const To& to);
  /// What launch() would launch, with the tensor maps of `driver`.
  template <class Args>
  RecordedLaunches record(const Operation& operation, const Args& args, const device::Driver& driver);
  template <class Args>
  void check_pointers_once(const Operation& operation, const Args& args, CUdevice device);
  template <class Args>
  void check_pointers(const Args& args, CUdevice device);

  /// The operation of a call, made on the first one, whose captures were checked.
  OperationPtr operation_of(const AttentionSpec& spec, Pass pass, const AttentionShape& shape,
                            std::span<const Capture> captures, Pass captures_of, CUdevice device,
                            Stream stream);
  plan::WorkspaceLayout workspace(const KernelSpec& spec, const AttentionShape& shape);
  OperationPtr find(const CallKeyView& key) const;
  /// What `make` makes of the forward and of the backward pass, at once.
  template <class Made>
  std::array<Made, 2> in_both_passes(const std::function<Made(Pass)>& make);
  /// Who asks for an operation: a call may get a fallback.
  enum class Asker : std::uint8_t { prepare, call, capturing_call };
  /// Makes the operation and keeps it. `config` is remembered for the spec and shape once it is known to
  /// work.
  OperationPtr add(const KernelSpec& spec, const AttentionShape& shape, CUdevice device,
                   const std::optional<TileConfig>& config, Asker asker);
  /// Where the kernel must be compiled: the operation of another of its spec that is in memory, else, where
  /// the call `may_compile`, of one that is compiled sooner; the kernel is compiled in the background. Null:
  /// the call waits.
  OperationPtr fallback(const plan::ExecutionPlan& better, const DeviceInfo& info, CUdevice device,
                        bool may_compile);
  std::vector<TileConfig> configs_in_memory(const plan::ExecutionPlan& better, CUdevice device) const;
  void compile_in_background(const plan::ExecutionPlan& better, const DeviceInfo& info, CUdevice device);
  void keep(const CallKeyView& key, OperationPtr operation, std::uint64_t generation,
            const std::optional<TileConfig>& config);
  /// A configuration that was chosen in this process, and by whom.
  struct Chosen {
    TileConfig config;
    ConfigSource source;  ///< given or tuned
  };
  std::optional<Chosen> remembered(const KernelSpec& spec, const AttentionShape& shape,
                                   CUdevice device) const;

  /// Asks for tuning once a shape, where it is switched on and nothing better than a lead is known.
  void tune_in_background(const plan::ExecutionPlan& plan, CUdevice device);
  /// What was tuned is loaded, and calls use it from then on.
  void adopt(const BackgroundJob& job, const TileConfig& best);

  plan::ExecutionPlan plan(const KernelSpec& spec, const AttentionShape& shape, const DeviceInfo& info,
                           const std::optional<Chosen>& chosen);
  /// The heuristics of the families that can do otherwise what the plan failed to; none for a given
  /// configuration.
  std::vector<plan::ExecutionPlan> alternatives(const plan::ExecutionPlan& failed, const DeviceInfo& info);
  OperationPtr build(plan::ExecutionPlan plan, const DeviceInfo& info, CUdevice device, bool capturing);
  void note_loaded(const plan::ExecutionPlan& plan, CUdevice device);
  /// `of_better`: see Operation.
  OperationPtr load(plan::ExecutionPlan plan, const DeviceInfo& info, CUdevice device, bool capturing,
                    const std::optional<plan::WorkspaceLayout>& of_better = {});

  const std::shared_ptr<const device::Driver>& driver();
  bool is_capturing(Stream stream);

  const Settings settings_;
  const MakeBackgroundTuner make_tuner_;
  Once driver_once_;
  std::shared_ptr<const device::Driver> driver_;
  device::DeviceTable devices_;
  KernelLibrary library_;
  KnownCalls known_;

  mutable std::shared_mutex mutex_;  // guards what follows
  OperationTable operations_;
  std::map<std::string, TileConfig> given_;  // "<spec> <shape>"
  std::map<std::string, TileConfig> tuned_;  // "<spec> <shape> <device>"
  std::set<std::string> wanted_;             // of tuned_: what was asked to be tuned
  /// Counts changes of given_ and tuned_: a plan made before a change is not kept after it. Known calls read
  /// it without the lock.
  std::atomic<std::uint64_t> generation_ = 0;
  /// A configuration whose kernel is in memory, and a shape that it was loaded for.
  struct Loaded {
    TileConfig config;
    AttentionShape shape;
  };
  std::map<std::string, std::vector<Loaded>> loaded_;  // "<spec> <device>"
  std::set<std::string> compiled_;    // "<spec> <config> <device>": asked for in the background
  std::unique_ptr<Worker> compiler_;  // made when first wanted
  bool tuning_stopped_ = false;
  std::unique_ptr<BackgroundTuner> tuner_;  // made when first wanted; last, so that its thread ends first
};

}  // namespace flashjit

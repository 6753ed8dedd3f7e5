// All kernels that calls in a range of shapes choose, before any call waits for one.
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "call/engine.hpp"
#include "device/resources.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

/// Planning takes tens of microseconds a shape.
constexpr std::size_t kMostShapes = std::size_t{1} << 16;

/// The sizes from first to last, as ShapeRange has them.
std::vector<std::int64_t> sizes_of_range(std::string_view name, std::int64_t first, std::int64_t last,
                                         std::int64_t step) {
  if (first < 1 || first > last)
    refuse("{} goes from {} to {}: begin with 1 or more, and end with no less.", name, first, last);
  if (step < 0) refuse("the step of {} is {}: give 0 for powers of two, or 1 or more.", name, step);
  step = std::min(step, last);  // a larger one adds nothing
  std::vector<std::int64_t> sizes = {first};
  std::int64_t power = 1;
  while (step == 0 && power <= first) power *= 2;
  for (std::int64_t size = step ? first + step : power; size < last; size = step ? size + step : 2 * size) {
    if (sizes.size() >= kMostShapes)
      refuse("{} has more than {} sizes from {} to {}: give a larger step, or 0 for powers of two.", name,
             kMostShapes, first, last);
    sizes.push_back(size);
  }
  if (last != first) sizes.push_back(last);
  return sizes;
}

/// Makes kernels in several threads, while the thread that wants them hears how it goes.
class KernelCrew {
 public:
  using Make = std::function<KernelReport(const AttentionShape&)>;

  KernelCrew(const std::vector<AttentionShape>& wanted, const device::Context& context, Make make)
      : wanted_(wanted), make_(std::move(make)) {
    const std::size_t cores = std::max(std::thread::hardware_concurrency(), 1u);
    for (std::size_t i = 0; i < std::min(cores, wanted.size()); ++i)
      threads_.emplace_back([this, &context] { work(context); });
  }
  /// Finishes the kernels under way.
  ~KernelCrew() { end(); }
  KernelCrew(const KernelCrew&) = delete;
  KernelCrew& operator=(const KernelCrew&) = delete;

  void end() {
    {
      const std::scoped_lock lock(mutex_);
      next_ = wanted_.size();
    }
    threads_.clear();
  }

  /// Waits until more than `count` kernels are made, or one failed. Returns how many are made.
  std::size_t wait_beyond(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return made_.size() > count || error_; });
    return made_.size();
  }

  bool failed() {
    const std::scoped_lock lock(mutex_);
    return error_ != nullptr;
  }

  /// After end(). Throws what a thread threw.
  std::vector<KernelReport> reports() {
    if (error_) std::rethrow_exception(error_);
    return std::move(made_);
  }

 private:
  void work(const device::Context& context) try {
    context.make_current();
    for (;;) {
      std::size_t mine = 0;
      {
        const std::scoped_lock lock(mutex_);
        if (next_ == wanted_.size()) return;
        mine = next_++;
      }
      KernelReport report = make_(wanted_[mine]);
      const std::scoped_lock lock(mutex_);
      made_.push_back(std::move(report));
      changed_.notify_all();
    }
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    if (!error_) error_ = std::current_exception();
    next_ = wanted_.size();
    changed_.notify_all();
  }

  const std::vector<AttentionShape>& wanted_;
  const Make make_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::size_t next_ = 0;
  std::vector<KernelReport> made_;
  std::exception_ptr error_;
  std::vector<std::jthread> threads_;  // last, so that they end first
};

}  // namespace

std::vector<AttentionShape> ShapeRange::shapes() const {
  if (first.heads_q != last.heads_q || first.heads_kv != last.heads_kv)
    refuse("first has {} heads of Q and {} of K and V, last has {} and {}: give a range for each.",
           first.heads_q, first.heads_kv, last.heads_q, last.heads_kv);
  if (first.heads_kv < 1) refuse("heads_kv is {}: give 1 or more.", first.heads_kv);
  last.validate();  // the largest shape: then the others are right, too
  const auto batches = sizes_of_range("batch", first.batch, last.batch, step.batch);
  const auto lengths_q = sizes_of_range("seqlen_q", first.seqlen_q, last.seqlen_q, step.seqlen_q);
  const auto lengths_kv = sizes_of_range("seqlen_kv", first.seqlen_kv, last.seqlen_kv, step.seqlen_kv);
  const std::size_t count = batches.size() * lengths_q.size() * lengths_kv.size();  // each at most 2^16
  if (count > kMostShapes)
    refuse("the range has {} shapes, {} are allowed: give larger steps, or 0 for powers of two.", count,
           kMostShapes);
  std::vector<AttentionShape> all;
  for (const std::int64_t batch : batches)
    for (const std::int64_t seqlen_q : lengths_q)
      for (const std::int64_t seqlen_kv : lengths_kv)
        all.push_back({batch, first.heads_q, first.heads_kv, seqlen_q, seqlen_kv});
  return all;
}

RangeReport Engine::prepare_range(const KernelSpec& spec, const ShapeRange& range,
                                  const RangeProgress& progress) {
  const std::vector<AttentionShape> shapes = range.shapes();
  const device::Context context = device::current_context(driver());
  const CUdevice device = context.device();
  const DeviceInfo& info = devices_.info(*driver(), device);
  RangeReport report{.shapes = shapes.size()};
  std::set<std::string> seen;
  std::vector<AttentionShape> wanted;  // a shape for each configuration
  for (const AttentionShape& shape : shapes) {
    const plan::ExecutionPlan planned = plan(spec, shape, info, remembered(spec, shape, device));
    report.workspace_bytes = std::max(report.workspace_bytes, planned.workspace.bytes);
    if (seen.insert(name_of(planned)).second) wanted.push_back(shape);
  }
  report.configurations = wanted.size();

  const auto goes_on = [&](std::size_t made) { return !progress || progress(made, wanted.size()); };
  if (!goes_on(0)) return report;
  KernelCrew crew(wanted, context, [&](const AttentionShape& shape) { return prepare(spec, shape, {}); });
  for (std::size_t made = 0; made < wanted.size() && !crew.failed();) {
    made = crew.wait_beyond(made);
    if (!goes_on(made)) break;
  }
  crew.end();
  report.kernels = crew.reports();
  for (const AttentionShape& shape : wanted)  // another configuration, where the planned one does not compile
    report.workspace_bytes = std::max(report.workspace_bytes, workspace_bytes(spec, shape));
  return report;
}

}  // namespace flashjit

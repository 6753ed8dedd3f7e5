#include "packing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "support/stderr.hpp"
#include "support/text.hpp"

namespace flashjit::command {

using State = PackOutcome::State;

std::string to_string(const PackItem& item) {
  return fmt::format("{} {}", item.device.arch, name_of(item.plan));
}

std::vector<PackItem> items_of(const DeviceInfo& device, plan::ExecutionPlan plan, bool chosen_again) {
  const std::shared_ptr<const plan::ExecutionPlan> decodes = plan.decodes;
  std::vector<PackItem> items;
  items.push_back({device, std::move(plan), chosen_again || decodes});
  if (decodes) items.push_back({device, *decodes, true});
  return items;
}

std::string to_string(PackOutcome::State state) {
  switch (state) {
    case State::skipped:
      return "skipped";
    case State::compiled:
      return "compiled";
    case State::kept:
      return "already there";
    case State::failed:
      break;
  }
  return "failed";
}

namespace {

/// Makes a runtime choose the packed configuration for this spec and shape.
void write_choice(const cache::Store& store, const PackItem& item, const std::string& compiler_tag) {
  plan::TuningRecord record;
  record.spec = item.plan.spec;
  record.shape = item.plan.shape;
  record.arch = item.device.arch;
  record.nvrtc = compiler_tag;
  record.library = library_version();
  record.best = item.plan.config;
  plan::write_record(store.records_folder(), record);
}

PackOutcome pack_one(const PackItem& item, cache::Store& store, const render::TemplateSet& templates,
                     const compile::Compiler& compiler) {
  PackOutcome outcome;
  try {
    const BuiltKernel built = build_kernel(item.plan, item.device, templates, compiler, &store);
    if (!item.chosen_again) write_choice(store, item, compiler.tag());
    outcome.report = built.report;
    outcome.spills_in_main_loop = spills_in_main_loop(built.kernel, built.source.entries);
    outcome.state = built.report.origin == KernelOrigin::compiled ? State::compiled : State::kept;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::io) throw;  // the folder is bad: no other kernel would fare better
    outcome.state = State::failed;
    outcome.message = error.message();
    outcome.detail = error.detail();
  }
  return outcome;
}

}  // namespace

std::vector<PackOutcome> pack_all(const std::vector<PackItem>& items, cache::Store& store,
                                  const render::TemplateSet& templates, const compile::Compiler& compiler,
                                  int jobs) {
  std::vector<PackOutcome> outcomes(items.size());
  Progress progress("pack", items.size());
  std::mutex mutex;
  std::size_t next = 0;
  std::exception_ptr fatal;
  const auto work = [&] {
    std::unique_lock lock(mutex);
    while (next < items.size() && !fatal && !interrupted()) {
      const std::size_t i = next++;
      lock.unlock();
      std::exception_ptr failure;
      try {
        outcomes[i] = pack_one(items[i], store, templates, compiler);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      if (failure)
        fatal = failure;
      else
        progress.step(to_string(items[i]) + ": " + to_string(outcomes[i].state));
    }
  };
  const std::size_t wanted =
      jobs > 0 ? static_cast<std::size_t>(jobs) : std::max(1u, std::thread::hardware_concurrency());
  {
    std::vector<std::jthread> workers;
    for (std::size_t t = 0; t < std::min(wanted, items.size()); ++t) workers.emplace_back(work);
  }
  if (fatal) std::rethrow_exception(fatal);
  return outcomes;
}

Json to_json(const PackItem& item, const PackOutcome& outcome) {
  Json entries = Json::array();
  for (const EntryReport& entry : outcome.report.entries) entries.push_back(to_json(entry));
  return {{"arch", item.device.arch},
          {"spec", to_string(item.plan.spec)},
          {"shape", to_string(item.plan.shape)},
          {"config", to_string(item.plan.config)},
          {"part", to_string(item.plan.spec.part)},
          {"config_source", to_string(item.plan.config_source)},
          {"state", to_string(outcome.state)},
          {"key", outcome.report.key},
          {"render_ms", outcome.report.render_ms},
          {"compile_ms", outcome.report.compile_ms},
          {"load_ms", outcome.report.load_ms},
          {"spills_in_main_loop", outcome.spills_in_main_loop},
          {"entries", std::move(entries)},
          {"message", outcome.message},
          {"detail", outcome.detail}};
}

void warn_of_failures(const std::vector<PackItem>& items, const std::vector<PackOutcome>& outcomes) {
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (outcomes[i].state != State::failed) continue;
    warn(fmt::format("{}: {}", to_string(items[i]), outcomes[i].message));
    if (!outcomes[i].detail.empty()) write_to_stderr(fmt::format("{}\n", outcomes[i].detail));
  }
}

std::size_t count(const std::vector<PackOutcome>& outcomes, PackOutcome::State state) {
  return static_cast<std::size_t>(std::count_if(
      outcomes.begin(), outcomes.end(), [&](const PackOutcome& outcome) { return outcome.state == state; }));
}

}  // namespace flashjit::command

// flashjit job: the quickstart's main job. Layers of a real transformer through dense and block-sparse
// attention, both passes: on the GPU against the reference; without one on the CPU, with the same kernels
// compiled into a pack.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "attention.hpp"
#include "flashjit/patterns.hpp"
#include "gpu.hpp"
#include "packing.hpp"
#include "support/environment.hpp"
#include "tools/parts/npy.hpp"

namespace flashjit::command {
namespace {

struct JobOptions {
  std::string data = "tests/data";
  std::string pack;
  int device = 0;
  bool cpu = false;
};

constexpr BlockSize kBlock{32, 32};
constexpr int kRadius = 1;  // blocks to either side of the diagonal

/// One attention of one layer; its spec's pass is backward, which runs the forward too.
struct Task {
  std::string layer, kind;  ///< "layer0"; "dense" or "block-sparse"
  reference::Problem problem;
};

std::vector<std::string> find_layers(const std::filesystem::path& folder) {
  constexpr std::string_view kEnding = "_q.npy";
  std::vector<std::string> layers;
  std::error_code problem;
  for (const auto& file : std::filesystem::directory_iterator(folder, problem)) {
    const std::string name = file.path().filename().string();
    if (name.ends_with(kEnding)) layers.push_back(name.substr(0, name.size() - kEnding.size()));
  }
  if (layers.empty())
    throw Error(ErrorCode::io,
                fmt::format("'{}' holds no layer: wanted are layer0_q.npy, layer0_k.npy, layer0_v.npy and "
                            "layer0_dout.npy; give --data flashjit's tests/data",
                            folder.string()));
  std::sort(layers.begin(), layers.end());
  return layers;
}

int head_dim_of(const std::string& path) {
  const std::vector<std::int64_t> shape = npy::read(path).shape;
  if (shape.size() == 4 && shape[3] > 0 && shape[3] <= 512) return static_cast<int>(shape[3]);
  throw Error(ErrorCode::invalid_argument,
              fmt::format("'{}' has the sizes [{}]; wanted are [batch, heads, length, dim up to 512]", path,
                          fmt::join(shape, ", ")));
}

std::vector<Task> tasks_of_layer(const std::filesystem::path& folder, const std::string& layer) {
  const auto file = [&](const char* tensor) {
    return (folder / fmt::format("{}_{}.npy", layer, tensor)).string();
  };
  const InputFiles files{file("q"), file("k"), file("v"), file("dout"), {}, {}};
  AttentionSpec spec{.pass = Pass::backward, .dtype = DType::bf16};
  spec.head_dim = head_dim_of(files.q);
  spec.head_dim_v = head_dim_of(files.v);
  spec.validate();
  Task dense{layer, "dense", read_problem(spec.normalized(), files, Layout::bhsd)};

  Task sparse = dense;
  sparse.kind = "block-sparse";
  sparse.problem.spec.block_map = kBlock;
  const BlockPattern blocks =
      empty_pattern(dense.problem.shape.seqlen_q, dense.problem.shape.seqlen_kv, kBlock);
  sparse.problem.block_map = local_window(blocks.rows, blocks.columns, kRadius).blocks;
  return {std::move(dense), std::move(sparse)};
}

std::vector<Task> read_tasks(const JobOptions& options) {
  std::vector<Task> tasks;
  for (const std::string& layer : find_layers(options.data))
    for (Task& task : tasks_of_layer(options.data, layer)) tasks.push_back(std::move(task));
  return tasks;
}

AttentionSpec with_pass(AttentionSpec spec, Pass pass) {
  spec.pass = pass;
  return spec.normalized();
}

// Resources of all entries of a kernel in one cell: the largest, except that spills add up.
struct Resources {
  int registers = 0, spill_bytes = 0, shared_bytes = 0;
};
Resources resources_of(const KernelReport& report) {
  Resources most;
  for (const EntryReport& entry : report.entries) {
    most.registers = std::max(most.registers, entry.registers);
    most.spill_bytes += entry.spill_bytes;
    most.shared_bytes = std::max(most.shared_bytes, entry.shared_bytes);
  }
  return most;
}

// ---- with a GPU ----

/// One kernel's part of a task.
struct KernelRun {
  const Task* task;
  KernelReport report;
  double launch_ms = 0;
  std::vector<Comparison> comparisons;
};

std::vector<KernelRun> run_task(const Task& task, Runtime& runtime, const device::PrimaryContext& gpu) {
  const reference::Problem& problem = task.problem;
  const Results exact = reference_results(problem);
  const Results rounded = reference_results(problem, reference::Precision::rounded);
  KernelRun forward{&task, runtime.prepare(with_pass(problem.spec, Pass::forward), problem.shape), 0, {}};
  KernelRun backward{&task, runtime.prepare(problem.spec, problem.shape), 0, {}};
  LaunchTimes times;
  const std::vector<Comparison> all =
      compare(run_on_gpu(runtime, gpu, problem, &times), exact, rounded, problem);
  forward.launch_ms = times.forward;
  forward.comparisons.assign(all.begin(), all.begin() + 2);
  backward.launch_ms = times.backward;
  backward.comparisons.assign(all.begin() + 2, all.end());
  return {std::move(forward), std::move(backward)};
}

Json run_json(const KernelRun& run) {
  Json line{{"layer", run.task->layer}, {"attention", run.task->kind}};
  line.update(to_json(run.report));
  line["launch_ms"] = run.launch_ms;
  Json outputs = Json::array();
  for (const Comparison& comparison : run.comparisons) outputs.push_back(to_json(comparison));
  line["outputs"] = std::move(outputs);
  return line;
}

void print_runs(const std::vector<KernelRun>& runs) {
  Table kernels({"layer", "kernel", "config", "origin", "render ms", "compile ms", "load ms", "launch ms",
                 "registers", "spill bytes", "shared bytes"});
  Table errors({"layer", "kernel", "output", "error", "limit", "ok"});
  for (const KernelRun& run : runs) {
    const std::string spec = to_string(run.report.spec);
    const Resources most = resources_of(run.report);
    kernels.add({run.task->layer, spec, to_string(run.report.config), to_string(run.report.origin),
                 format_ms(run.report.render_ms), format_ms(run.report.compile_ms),
                 format_ms(run.report.load_ms), format_ms(run.launch_ms), std::to_string(most.registers),
                 std::to_string(most.spill_bytes), std::to_string(most.shared_bytes)});
    for (const Comparison& comparison : run.comparisons)
      errors.add({run.task->layer, spec, comparison.output, fmt::format("{:.2e}", comparison.error),
                  fmt::format("{:.2e}", comparison.limit), comparison.ok() ? "yes" : "NO"});
  }
  kernels.print();
  fmt::print("\n");
  errors.print();
}

int job_on_gpu(const std::vector<Task>& tasks, const device::PrimaryContext& gpu, bool json) {
  Runtime runtime(runtime_options());
  const std::string name = runtime.device().name;
  std::vector<KernelRun> runs;
  for (const Task& task : tasks)
    for (KernelRun& run : run_task(task, runtime, gpu)) runs.push_back(std::move(run));

  bool ok = true;
  Json lines = Json::array();
  for (const KernelRun& run : runs) {
    ok = ok && all_ok(run.comparisons);
    lines.push_back(run_json(run));
  }
  const std::string cache = read_environment().cache_dir;
  if (json) {
    print_json({{"computed_by", name}, {"ok", ok}, {"cache", cache}, {"kernels", std::move(lines)}});
  } else {
    fmt::print("On {}, against the fp64 reference:\n\n", name);
    print_runs(runs);
    fmt::print("\n{}\nKernels are kept in {}; a second run finds them there.\n",
               ok ? "Every output is within its limit." : "NOT every output is within its limit.", cache);
  }
  return ok ? kOk : kCheckFailed;
}

// ---- without a GPU ----

/// Something that must hold of the reference's results, checked another way.
struct Check {
  std::string layer, kind, what;
  double error, limit;

  bool ok() const { return error <= limit; }
};

/// O row by row from the definition, for a problem without dropout, lengths and mask program.
std::vector<double> direct_out(const reference::Problem& problem) {
  const auto& [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = problem.shape;
  const std::int64_t d = problem.spec.head_dim, dv = problem.spec.v_dim();
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  const std::int64_t columns = problem.spec.has_block_map() ? (seqlen_kv + kBlock.kv - 1) / kBlock.kv : 0;
  const auto attends = [&](std::int64_t q, std::int64_t kv) {
    return columns == 0 ||
           problem.block_map[static_cast<std::size_t>(q / kBlock.q * columns + kv / kBlock.kv)] != 0;
  };
  std::vector<double> out;
  for (std::int64_t bh = 0; bh < batch * heads_q; ++bh) {
    const std::int64_t kv_head = bh / heads_q * heads_kv + bh % heads_q / (heads_q / heads_kv);
    for (std::int64_t q = 0; q < seqlen_q; ++q) {
      const double* q_row = problem.q.data() + (bh * seqlen_q + q) * d;
      std::vector<double> row(static_cast<std::size_t>(dv), 0);
      double sum = 0;
      for (std::int64_t kv = 0; kv < seqlen_kv; ++kv) {
        if (!attends(q, kv)) continue;
        const double* k_row = problem.k.data() + (kv_head * seqlen_kv + kv) * d;
        const double* v_row = problem.v.data() + (kv_head * seqlen_kv + kv) * dv;
        double s = 0;
        for (std::int64_t i = 0; i < d; ++i) s += q_row[i] * k_row[i];
        const double weight = std::exp(scale * s);  // fp64 needs no maximum for a real layer's scores
        sum += weight;
        for (std::int64_t i = 0; i < dv; ++i) row[static_cast<std::size_t>(i)] += weight * v_row[i];
      }
      for (double& value : row) out.push_back(sum > 0 ? value / sum : 0);
    }
  }
  return out;
}

/// |<a, b> - <c, d>| as a share of the sum of the products' sizes.
double inner_product_difference(const std::vector<double>& a, const std::vector<double>& b,
                                const std::vector<double>& c, const std::vector<double>& d) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += a[i] * b[i];
    size += std::fabs(a[i] * b[i]);
  }
  for (std::size_t i = 0; i < c.size(); ++i) difference -= c[i] * d[i];
  return size > 0 ? std::fabs(difference) / size : std::fabs(difference);
}

double largest_difference(const Results& a, const Results& b) {
  double largest = 0;
  for (auto member : {&Results::out, &Results::lse, &Results::dq, &Results::dk, &Results::dv})
    largest = std::max(largest, reference::max_abs_error(a.*member, b.*member));
  return largest;
}

std::vector<Check> check_on_cpu(const Task& task) {
  constexpr double kExact = 1e-9;  // fp64 summed in another order
  const reference::Problem& problem = task.problem;
  const Results results = reference_results(problem);
  std::vector<Check> checks;
  const auto add = [&](std::string what, double error) {
    checks.push_back({task.layer, task.kind, std::move(what), error, kExact});
  };
  add("O = softmax(Q K^T) V by its definition", reference::max_abs_error(results.out, direct_out(problem)));
  add("<dV, V> = <dO, O>", inner_product_difference(results.dv, problem.v, problem.dout, results.out));
  add("<dQ, Q> = <dK, K>", inner_product_difference(results.dq, problem.q, results.dk, problem.k));
  if (problem.spec.has_block_map()) {
    reference::Problem full = problem, dense = problem;
    std::fill(full.block_map.begin(), full.block_map.end(), std::uint8_t{1});
    dense.spec.block_map = {};
    dense.block_map.clear();
    add("a full block map = none", largest_difference(reference_results(full), reference_results(dense)));
  }
  return checks;
}

/// The kernels that the tasks would run, for each architecture, each once.
std::vector<PackItem> pack_items(const std::vector<Task>& tasks) {
  const plan::TuningRecords records = chosen_records();
  std::vector<PackItem> items;
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const DeviceInfo device = DeviceInfo::parse(arch);
    for (const Task& task : tasks)
      for (Pass pass : {Pass::forward, Pass::backward}) {
        PackItem item{
            device, plan::make_plan(with_pass(task.problem.spec, pass), task.problem.shape, device, records)};
        const bool known = std::any_of(items.begin(), items.end(), [&](const PackItem& other) {
          return to_string(other) == to_string(item);
        });
        if (!known) items.push_back(std::move(item));
      }
  }
  return items;
}

std::string pack_folder(const JobOptions& options) {
  if (!options.pack.empty()) return options.pack;
  const std::string cache = read_environment().cache_dir;
  if (!cache.empty()) return (std::filesystem::path(cache) / "quickstart-pack").string();
  throw Error(ErrorCode::invalid_argument,
              "there is no folder for the pack: HOME is not set; give --pack DIR");
}

void print_checks(const std::vector<Check>& checks) {
  Table table({"layer", "attention", "check", "error", "limit", "ok"});
  for (const Check& check : checks)
    table.add({check.layer, check.kind, check.what, fmt::format("{:.2e}", check.error),
               fmt::format("{:.2e}", check.limit), check.ok() ? "yes" : "NO"});
  table.print();
}

void print_packed(const std::vector<PackItem>& items, const std::vector<PackOutcome>& outcomes) {
  Table table({"arch", "kernel", "config", "origin", "render ms", "compile ms", "load ms", "registers",
               "spill bytes", "shared bytes"});
  for (std::size_t i = 0; i < items.size(); ++i) {
    const KernelReport& report = outcomes[i].report;
    const Resources most = resources_of(report);
    const std::string origin = outcomes[i].state == PackOutcome::State::kept ? to_string(KernelOrigin::pack)
                                                                             : to_string(outcomes[i].state);
    table.add({items[i].device.arch, to_string(items[i].plan.spec), to_string(items[i].plan.config), origin,
               format_ms(report.render_ms), format_ms(report.compile_ms), format_ms(report.load_ms),
               std::to_string(most.registers), std::to_string(most.spill_bytes),
               std::to_string(most.shared_bytes)});
  }
  table.print();
}

int job_on_cpu(const std::vector<Task>& tasks, const JobOptions& options, const std::string& why, bool json) {
  std::vector<Check> checks;
  for (const Task& task : tasks)
    for (Check& check : check_on_cpu(task)) checks.push_back(std::move(check));
  const bool ok = std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.ok(); });
  if (!json) {
    fmt::print("{}\nComputed by the CPU reference in fp64, and checked in other ways:\n\n", why);
    print_checks(checks);
    std::fflush(stdout);  // what follows takes seconds
  }

  const std::string folder = pack_folder(options);
  const std::vector<PackItem> items = pack_items(tasks);
  cache::Store store(folder, cache::Store::Access::read_write, warn);
  const std::vector<PackOutcome> outcomes = pack_all(items, store, chosen_templates(), *chosen_compiler(), 0);
  if (json) {
    Json check_list = Json::array(), kernels = Json::array();
    for (const Check& check : checks)
      check_list.push_back({{"layer", check.layer},
                            {"attention", check.kind},
                            {"check", check.what},
                            {"error", std::isfinite(check.error) ? Json(check.error) : Json(nullptr)},
                            {"limit", check.limit},
                            {"ok", check.ok()}});
    for (std::size_t i = 0; i < items.size(); ++i) kernels.push_back(to_json(items[i], outcomes[i]));
    print_json({{"computed_by", "CPU reference"},
                {"reason", why},
                {"ok", ok},
                {"checks", std::move(check_list)},
                {"pack", folder},
                {"kernels", std::move(kernels)}});
  } else {
    fmt::print("\nThe same kernels, compiled for shipping:\n\n");
    print_packed(items, outcomes);
    fmt::print(
        "\n{}\nThe pack is {}; a second run finds its kernels there, and FLASHJIT_PACKS={} uses them on a "
        "GPU.\n",
        ok ? "Every check holds." : "NOT every check holds.", folder, folder);
  }
  warn_of_failures(items, outcomes);
  if (count(outcomes, PackOutcome::State::skipped) > 0) return kInterrupted;
  if (count(outcomes, PackOutcome::State::failed) > 0) return kFailed;
  return ok ? kOk : kCheckFailed;
}

/// The GPU, or null and why there is none.
std::unique_ptr<device::PrimaryContext> open_gpu(const JobOptions& options, std::string* why) {
  if (options.cpu) {
    *why = "--cpu: no GPU is used.";
    return nullptr;
  }
  try {
    return std::make_unique<device::PrimaryContext>(chosen_driver(), options.device);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::no_driver && error.code() != ErrorCode::no_device) throw;
    *why = "No GPU is used: " + error.message();
    return nullptr;
  }
}

int job(const JobOptions& options, bool json) {
  const std::vector<Task> tasks = read_tasks(options);
  std::string why;
  const std::unique_ptr<device::PrimaryContext> gpu = open_gpu(options, &why);
  return gpu ? job_on_gpu(tasks, *gpu, json) : job_on_cpu(tasks, options, why, json);
}

}  // namespace

void add_job(CLI::App& app, Context& context) {
  auto options = std::make_shared<JobOptions>();
  CLI::App* command = add_subcommand(
      app, context, "job",
      "The quickstart's main job: attention of a real transformer's layers, checked, with a table",
      "flashjit job --data tests/data", [options, &context] { return job(*options, context.json); });
  command->add_option("--data", options->data, "Folder with layer<N>_{q,k,v,dout}.npy; default tests/data");
  command->add_option(
      "--pack", options->pack,
      "Without a GPU: folder for the compiled kernels; default quickstart-pack in the cache folder");
  command->add_option("--device", options->device, "CUDA device, counted from 0 (default)");
  command->add_flag("--cpu", options->cpu, "Do as if there were no GPU");
}

}  // namespace flashjit::command

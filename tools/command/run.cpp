// flashjit run: one attention on .npy files, on the GPU or by the CPU reference.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "attention.hpp"
#include "expr/declarations.hpp"
#include "gpu.hpp"
#include "plan/analysed_spec.hpp"
#include "plan/spec_options.hpp"
#include "support/paths.hpp"
#include "tools/parts/npy.hpp"

namespace flashjit::command {
namespace {

struct RunOptions {
  std::string spec, layout = "bhsd", out_dir;
  InputFiles files;
  double dropout_p = 0;
  std::uint64_t seed = 0, offset = 0;
  std::optional<double> scale;
  std::string config;
  int device = 0;
  bool cpu = false, force = false;
};

KernelSpec spec_of(const RunOptions& options) {
  KernelSpec spec = parse_spec(options.spec);
  const bool backward = !options.files.dout.empty();
  require_attention(spec);
  if (plan::names_pass(options.spec) && (spec.pass == Pass::backward) != backward)
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format(
            "the spec '{}' asks for the {} pass and --dout is{} given; give --dout for the backward pass "
            "(which runs the forward too) and only then",
            options.spec, spec.pass == Pass::backward ? "backward" : "forward", backward ? "" : " not"));
  spec.pass = backward ? Pass::backward : Pass::forward;
  spec.validate();
  return spec.normalized();
}

reference::Problem problem_of(const RunOptions& options, Layout layout) {
  const KernelSpec given = spec_of(options);
  check_files(given, options.files);
  reference::Problem problem = read_problem(given, options.files, layout);
  problem.softmax_scale = options.scale;
  problem.dropout_p = options.dropout_p;
  problem.seed = options.seed;
  problem.offset = options.offset;
  reference::check_problem(problem);
  const KernelSpec& spec = problem.spec;
  if (spec.kv.shared_kv && problem.v != reference::first_columns(problem.k, spec.head_dim, spec.v_dim()))
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("the spec has shared_kv, so V is the first {} columns of K, and --v has others; give "
                    "--v those, or leave shared_kv out",
                    spec.v_dim()));
  return problem;
}

struct OutputFile {
  std::string name;
  std::vector<std::int64_t> shape;  ///< [b, h, s, d]; lse [b, h, s]; dsinks [h]; like its capture
  const std::vector<double>* values;
  bool is_tensor = false;  ///< in the layout of Q
};

std::string grad_file(const std::string& capture) { return "grad_" + capture + ".npy"; }

std::vector<OutputFile> output_files(const reference::Problem& problem, const Results& results) {
  const auto& [batch, hq, hkv, sq, skv] = problem.shape;
  const std::int64_t d = problem.spec.head_dim, dv = problem.spec.v_dim();
  const bool packed = problem.spec.varlen;
  const std::int64_t b = packed ? 1 : batch;
  const std::int64_t q_rows = packed ? problem.cu_seqlens_q.back() : sq;
  const std::int64_t kv_rows = packed ? problem.cu_seqlens_kv.back() : skv;
  std::vector<OutputFile> files{{"out.npy", {b, hq, q_rows, dv}, &results.out, true}};
  if (!problem.spec.score.is_weight()) files.push_back({"lse.npy", {b, hq, q_rows}, &results.lse});
  if (problem.spec.pass == Pass::forward) {
    if (problem.spec.epilogue.row_max) files.push_back({"row_max.npy", {b, hq, q_rows}, &results.row_max});
    return files;
  }
  files.push_back({"dq.npy", {b, hq, q_rows, d}, &results.dq, true});
  files.push_back({"dk.npy", {b, hkv, kv_rows, d}, &results.dk, true});
  files.push_back({"dv.npy", {b, hkv, kv_rows, dv}, &results.dv, true});
  if (plan::finds_sink_grads(problem.spec)) files.push_back({"dsinks.npy", {hq}, &results.dsinks});
  for (std::size_t i = 0; i < results.capture_grads.size(); ++i)
    if (!results.capture_grads[i].empty())
      files.push_back(
          {grad_file(problem.captures[i].name), problem.captures[i].size, &results.capture_grads[i]});
  return files;
}

/// Before anything is computed, so that no work is lost to a refusal at its end.
void check_out_dir(const RunOptions& options, const KernelSpec& spec) {
  const std::filesystem::path folder = path_of(options.out_dir);
  std::error_code problem;
  std::filesystem::create_directories(folder, problem);
  if (!std::filesystem::is_directory(folder, problem))
    throw Error(
        ErrorCode::io,
        fmt::format("'{}' cannot be made a folder; give --out-dir one that can be written", folder.string()));
  if (options.force) return;
  std::vector<std::string> names{"out.npy"};
  if (!spec.score.is_weight()) names.emplace_back("lse.npy");
  if (spec.pass == Pass::backward) {
    names.insert(names.end(), {"dq.npy", "dk.npy", "dv.npy"});
    if (plan::finds_sink_grads(spec)) names.emplace_back("dsinks.npy");
    for (const expr::Declaration& d :
         expr::declarations(spec.score, spec.mask, spec.epilogue.out_mod, spec.prologue))
      if (d.wants_grad) names.push_back(grad_file(d.name));
  } else if (spec.epilogue.row_max) {
    names.emplace_back("row_max.npy");
  }
  for (const std::string& name : names)
    if (std::filesystem::exists(std::filesystem::symlink_status(folder / name, problem)))
      throw Error(ErrorCode::io,
                  fmt::format("'{}' is there already; say --force to replace it, or give another "
                              "--out-dir",
                              (folder / name).string()));
}

void write_result(const RunOptions& options, const OutputFile& file, Layout layout) {
  std::vector<std::int64_t> shape = file.shape;
  std::vector<double> values = *file.values;
  if (layout == Layout::bshd && file.is_tensor) {
    values = swap_heads_and_length(values, shape);
    std::swap(shape[1], shape[2]);
  }
  npy::write(path_of(options.out_dir) / file.name,
             npy::from_doubles(npy::Type::float32, std::move(shape), values));
}

Results compute(const RunOptions& options, const reference::Problem& problem, std::string* where) {
  if (options.cpu) {
    *where = "CPU reference";
    return reference_results(problem);
  }
  const device::PrimaryContext gpu(chosen_driver(), options.device);
  Runtime runtime(runtime_options());
  *where = runtime.device().name;
  if (!options.config.empty()) runtime.prepare(problem.spec, problem.shape, parse_config(options.config));
  return run_on_gpu(runtime, gpu, problem);
}

int run(const RunOptions& options, bool json) {
  const Layout layout = options.layout == "bshd" ? Layout::bshd : Layout::bhsd;
  if (options.cpu && !options.config.empty())
    throw Error(ErrorCode::invalid_argument, "--config chooses a GPU kernel; leave it out with --cpu");
  const reference::Problem problem = problem_of(options, layout);
  check_out_dir(options, problem.spec);
  std::string where;
  const Results results = compute(options, problem, &where);

  Json written = Json::array();
  Table table({"file", "shape", "computed by"});
  for (const OutputFile& file : output_files(problem, results)) {
    write_result(options, file, layout);
    const std::string path = (path_of(options.out_dir) / file.name).string();
    written.push_back(path);
    table.add({path, fmt::format("[{}]", fmt::join(file.shape, ", ")), where});
  }
  if (json)
    print_json({{"spec", to_string(problem.spec)},
                {"shape", to_string(problem.shape)},
                {"computed_by", where},
                {"files", written}});
  else
    table.print();
  return kOk;
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command =
      add_subcommand(app, context, "run", "Compute one attention on .npy files, on the GPU or on the CPU",
                     "flashjit run --spec bf16:d32:causal --q q.npy --k k.npy --v v.npy --dout dout.npy "
                     "--out-dir results --cpu",
                     [options, &context] { return run(*options, context.json); });
  command
      ->add_option("--spec", options->spec, "What is computed: bf16:d128:causal, fp16:d64:dropout:kvlen, ...")
      ->required();
  command->add_option("--q", options->files.q, "Q, float16 or float32")->required();
  command->add_option("--k", options->files.k, "K")->required();
  command->add_option("--v", options->files.v, "V")->required();
  command->add_option("--dout", options->files.dout, "dO; with it the gradients are computed too");
  for (const OptionFile& file : option_files())
    command->add_option(std::string(file.flag), options->files.of_options[file.flag],
                        fmt::format("{}; for specs with {}", file.holds, file.option));
  command->add_option("--capture", options->files.captures,
                      "name=file.npy of a tensor that a program declares; repeatable");
  command->add_option("--scalar", options->files.scalars,
                      "name=value of a scalar that a program declares; repeatable");
  command->add_option("--layout", options->layout, "Memory order of the files: bhsd (default) or bshd")
      ->check(CLI::IsMember({"bhsd", "bshd"}));
  command->add_option("--scale", options->scale, "softmax_scale; default 1 / sqrt(head_dim)");
  command->add_option("--dropout-p", options->dropout_p,
                      "Dropout probability in [0, 1); for specs with dropout");
  command->add_option("--seed", options->seed, "Seed of the dropout mask; default 0")->check(whole_number());
  command->add_option("--offset", options->offset, "Offset of the dropout mask; default 0")
      ->check(whole_number());
  command->add_option("--config", options->config, "Tile configuration to use instead of the chosen one");
  command
      ->add_option("--out-dir", options->out_dir,
                   "Folder for out.npy, lse.npy, row_max.npy, dq.npy, dk.npy, dv.npy, dsinks.npy, "
                   "grad_<name>.npy (float32)")
      ->required();
  command->add_flag("--force", options->force, "Replace result files that are there already");
  command->add_flag("--cpu", options->cpu, "Compute in fp64 on the CPU");
  command->add_option("--device", options->device, "CUDA device, counted from 0 (default)");
}

}  // namespace flashjit::command

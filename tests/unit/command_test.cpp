// The `flashjit` command from outside: help, exit codes, files in and out. Kernels are tests/compile's.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "reference/reference.hpp"
#include "support/built.hpp"
#include "tests/support/run_command.hpp"
#include "tools/parts/npy.hpp"

namespace flashjit {
namespace {

using test::CommandResult;
using test::TemporaryDirectory;

::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no '" << part << "' in:\n" << text;
}

class Command : public ::testing::Test {
 protected:
  CommandResult run(const std::string& arguments, const std::string& environment = "") const {
    return test::run_command(folder_, arguments, environment);
  }
  std::string file(const std::string& name) const { return folder_.file(name); }

  /// Values between -1 and 1 that differ from tensor to tensor; all are multiples of 1/64, which bf16 holds.
  void write_tensor(const std::string& name, std::vector<std::int64_t> shape, int salt,
                    npy::Type type = npy::Type::float32) const {
    std::int64_t count = 1;
    for (std::int64_t size : shape) count *= size;
    std::vector<double> values;
    for (std::int64_t i = 0; i < count; ++i)
      values.push_back(static_cast<double>((i * 37 + salt * 11) % 128 - 64) / 64);
    npy::write(file(name), npy::from_doubles(type, std::move(shape), values));
  }
  void write_inputs() const {
    write_tensor("q.npy", {1, 2, 5, 16}, 1);
    write_tensor("k.npy", {1, 2, 7, 16}, 2);
    write_tensor("v.npy", {1, 2, 7, 16}, 3);
    write_tensor("dout.npy", {1, 2, 5, 16}, 4);
  }
  std::string inputs() const {
    return fmt::format("--q {} --k {} --v {}", file("q.npy"), file("k.npy"), file("v.npy"));
  }
  std::vector<double> result(const std::string& name) const {
    return npy::to_doubles(npy::read(file("results/" + name)));
  }

  TemporaryDirectory folder_;
};

TEST_F(Command, HelpOfEverySubcommandShowsAnExample) {
  EXPECT_EQ(run("--help").code, 0);
  for (const char* name : {"run", "verify", "tune", "bench", "pack", "cache", "cache list", "cache show",
                           "cache verify", "cache prune", "cache clear", "inspect", "doctor"}) {
    const CommandResult help = run(fmt::format("{} --help", name));
    EXPECT_EQ(help.code, 0) << name;
    EXPECT_TRUE(contains(help.out, "Example:")) << name;
    EXPECT_TRUE(contains(help.out, fmt::format("flashjit {}", name))) << name;
    if (std::string(name) == "cache") continue;  // its parts have it
    EXPECT_TRUE(contains(help.out, "--json")) << name;
  }
}

TEST_F(Command, VersionIsTheLibrarys) { EXPECT_EQ(run("--version").out, "flashjit " FLASHJIT_VERSION "\n"); }

TEST_F(Command, BadUsageExitsWith2AndSaysWhy) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "subcommand"},
      {"fly", "fly"},
      {"run --spec bf16:d16", "--q"},
      {"verify --spec bf16:d16:sideways --shape b1:hq1:hkv1:sq8:skv8", "sideways"},
      {"verify --spec bf16:d16 --shape b1:hq3:hkv2:sq8:skv8", "heads"},
      {"pack --arch sm_80 --out pack", "--spec"},
      {"pack --spec bf16:d16 --arch sm_12 --out pack", "sm_12"},
      {"pack --suite no-such-suite --arch sm_80 --out pack", "no-such-suite"},
      {"pack --suite /dev/zero --arch sm_80 --out pack", "more than 64 MiB of the suite file '/dev/zero'"},
      {"pack --spec bf16:d13 --arch sm_80 --out pack", "13"},
      {"run --spec bf16:d16 --q q --k k --v v --seed -1", "--seed"},
      {"verify --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8 --seed -1", "--seed"},
      {"tune --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8 --report /no/such/folder/page.html",
       "/no/such/folder"},
      {"tune --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8 --prune -1", "--prune"},
      {"tune --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8 --families sm70", "sm70"},
      {"tune --spec bf16:d16", "--shape"},
      {"inspect", "--spec"},
      {"inspect --spec bf16:d16 --key 00", "--key"},
      {"inspect --key 00", "00"},
      {"cache prune --max-size lots", "lots"},
      {"cache prune --max-size 99999999999G", "99999999999G"},
      {"cache clear", "--yes"},
      {"cache list --dir /no/such/folder", "/no/such/folder"},
      {"cache show 00", "00"},
      {"verify --spec bf16:d32 --data /no/such/folder", "/no/such/folder"},
      {"verify --spec bf16:d32", "--data"},
      {"verify --spec jvp:bf16:d32 --shape b1:hq1:hkv1:sq8:skv8", "neither forward nor backward"},
      {"bench --spec merge:bf16:d32 --shape b1:hq1:hkv1:sq8:skv8", "is not of attention"},
      {"verify --spec bf16:d32:varlen --data " + test::sources() + "/tests/data", "varlen"},
      {"verify --spec bf16:d64 --data " + test::sources() + "/tests/data", "head dimension"},
  };
  for (const auto& [arguments, named] : cases) {
    const CommandResult result = run(arguments);
    EXPECT_EQ(result.code, 2) << arguments << '\n' << result.err;
    EXPECT_TRUE(contains(result.err, named)) << arguments;
  }
}

TEST_F(Command, UsageErrorsAreJsonToo) {
  const CommandResult result = run("pack --json");
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.json()["error"]["code"], "invalid_argument");
}

TEST_F(Command, ErrorsAreJsonToo) {
  const CommandResult result = run("inspect --spec bf16:d13 --json");
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.json()["error"]["code"], "invalid_argument");
  EXPECT_TRUE(contains(result.json()["error"]["message"].get<std::string>(), "13"));
}

TEST_F(Command, WithoutADriverTheGpuCommandsExitWith3) {
  write_inputs();
  for (const std::string& arguments : {std::string("verify --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8"),
                                       "run --spec bf16:d16 " + inputs() + " --out-dir " + file("results"),
                                       std::string("tune --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8"),
                                       std::string("bench --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8")}) {
    const CommandResult result = run(arguments);
    EXPECT_EQ(result.code, 3) << arguments << '\n' << result.err;
    EXPECT_TRUE(contains(result.err, "/no/libcuda.so")) << arguments;
  }
}

TEST_F(Command, DoctorSaysThatNothingCanRunAndWhatToDo) {
  const CommandResult result = run("doctor --json", "FLASHJIT_CACHEDIR=typo FLASHJIT_LIBRARY=/a/library.so");
  EXPECT_EQ(result.code, 3);
  const nlohmann::json report = result.json();
  EXPECT_FALSE(report["kernels_can_run"].get<bool>());
  EXPECT_FALSE(report["reason"].get<std::string>().empty());
  std::map<std::string, std::string> found;
  for (const auto& finding : report["findings"]) found[finding["subject"]] = finding["text"];
  EXPECT_TRUE(contains(found["FLASHJIT_CACHEDIR"], "no such variable"));
  EXPECT_EQ(found["FLASHJIT_LIBRARY"], "'/a/library.so', for the Python package");
}

/// By the CPU, until the time is over.
TEST_F(Command, VerifyOfEverythingLeavesAReport) {
  const CommandResult done = run("verify --all --cpu --seconds 1 --seed 5 --report " + file("report.json"));
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_TRUE(contains(done.out, "the report to send is in")) << done.out;
  const auto report = nlohmann::json::parse(read_file(file("report.json")));
  EXPECT_TRUE(report["ok"].get<bool>());
  EXPECT_EQ(report["seed"], 5);
  ASSERT_FALSE(report["kernels"].empty());
  EXPECT_TRUE(report["kernels"][0]["ok"].get<bool>());
  EXPECT_FALSE(report["machine"].empty());
  for (const char* wrong : {"verify --all --spec bf16:d16", "verify --all --all-configs",
                            "verify --report r.json --spec bf16:d16 --shape b1:hq1:hkv1:sq8:skv8", "verify"})
    EXPECT_EQ(run(wrong).code, 2) << wrong;
}

/// The fake driver computes nothing, so that all is wrong; but kernels are there before it is their turn.
TEST_F(Command, VerifyOfEverythingCompilesAhead) {
  const CommandResult done = run("verify --all --seconds 1 --seed 5 --report " + file("report.json"),
                                 "FLASHJIT_NVRTC='" + test::built(FLASHJIT_FAKE_NVRTC) +
                                     "' FLASHJIT_LIBCUDA='" + test::built(FLASHJIT_FAKE_CUDA) + "'");
  EXPECT_EQ(done.code, 1) << done.err;
  const auto report = nlohmann::json::parse(read_file(file("report.json")));
  std::size_t stored = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.path() / "cache"))
    stored += entry.path().extension() == ".cubin";
  ASSERT_FALSE(report["left_out"].empty());
  EXPECT_GT(stored, report["kernels"].size());
  for (const auto& kernel : report["kernels"]) EXPECT_EQ(kernel["failure"], "");
}

TEST_F(Command, DoctorRefusesAWrongVariable) {
  const CommandResult result = run("doctor", "FLASHJIT_JIT=maybe");
  EXPECT_EQ(result.code, 2);
  EXPECT_TRUE(contains(result.err, "maybe"));
}

/// Real input: the quickstart's first layer.
TEST_F(Command, RunTakesTheShippedLayers) {
  const std::string layer = test::sources() + "/tests/data/layer0_";
  const CommandResult done = run(fmt::format(
      "run --cpu --spec bf16:d32 --q {0}q.npy --k {0}k.npy --v {0}v.npy --dout {0}dout.npy --out-dir {1}",
      layer, file("results")));
  ASSERT_EQ(done.code, 0) << done.err;
  const npy::Array q = npy::read(layer + "q.npy");
  EXPECT_EQ(npy::read(file("results/dq.npy")).shape, q.shape);
  EXPECT_EQ(npy::read(file("results/out.npy")).shape, q.shape);
  for (const char* name : {"out.npy", "lse.npy", "dq.npy", "dk.npy", "dv.npy"})
    for (double value : result(name)) ASSERT_TRUE(std::isfinite(value)) << name;
}

TEST_F(Command, VerifyComputesTheShippedLayers) {
  const CommandResult done =
      run("verify --cpu --json --spec bf16:d32:map32x32 --data " + test::sources() + "/tests/data");
  ASSERT_EQ(done.code, 0) << done.err;
  const nlohmann::json kernels = done.json()["kernels"];
  ASSERT_EQ(kernels.size(), 4u) << "two passes of two layers";
  EXPECT_EQ(kernels[3]["spec"], "bwd:bf16:d32:map32x32");
  EXPECT_EQ(kernels[3]["inputs"], "layer5");
  EXPECT_EQ(kernels[3]["shape"], "b1:hq12:hkv12:sq180:skv180");
  for (const auto& kernel : kernels)
    for (const auto& output : kernel["outputs"])
      EXPECT_GT(output["limit"], 0) << kernel.dump() << " real inputs are no zeros";
}

TEST_F(Command, RunOnTheCpuGivesTheReferencesResults) {
  write_inputs();
  const CommandResult run_result = run("run --cpu --json --spec bf16:d16:causal " + inputs() + " --dout " +
                                       file("dout.npy") + " --out-dir " + file("results"));
  ASSERT_EQ(run_result.code, 0) << run_result.err;
  EXPECT_EQ(run_result.json()["files"].size(), 5u);
  EXPECT_EQ(run_result.json()["shape"], "b1:hq2:hkv2:sq5:skv7");

  reference::Problem problem;
  problem.spec = parse_spec("bwd:bf16:d16:causal");
  problem.shape = {1, 2, 2, 5, 7};
  problem.q = npy::to_doubles(npy::read(file("q.npy")));
  problem.k = npy::to_doubles(npy::read(file("k.npy")));
  problem.v = npy::to_doubles(npy::read(file("v.npy")));
  problem.dout = npy::to_doubles(npy::read(file("dout.npy")));
  const reference::Forward forward = reference::forward(problem);
  const reference::Backward backward = reference::backward(problem);
  EXPECT_LT(reference::max_abs_error(result("out.npy"), forward.out), 1e-6);
  EXPECT_LT(reference::max_abs_error(result("lse.npy"), forward.lse), 1e-6);
  EXPECT_LT(reference::max_abs_error(result("dq.npy"), backward.dq), 1e-6);
  EXPECT_LT(reference::max_abs_error(result("dk.npy"), backward.dk), 1e-6);
  EXPECT_LT(reference::max_abs_error(result("dv.npy"), backward.dv), 1e-6);
  EXPECT_EQ(npy::read(file("results/out.npy")).shape, (std::vector<std::int64_t>{1, 2, 5, 16}));
}

TEST_F(Command, RunTakesPackedSequencesAndSinks) {
  write_inputs();
  const auto write = [&](const char* name, npy::Type type, const std::vector<double>& values) {
    npy::write(file(name), npy::from_doubles(type, {std::ssize(values)}, values));
  };
  write("cuq.npy", npy::Type::int32, {0, 2, 5});
  write("cukv.npy", npy::Type::int32, {0, 6, 7});
  write("sinks.npy", npy::Type::float32, {0.5, -1});
  const std::string spec = "run --cpu --json --spec bf16:d16:causal:varlen:sinks " + inputs() + " --dout " +
                           file("dout.npy") + " --out-dir " + file("results");
  const std::string packing = " --cu-seqlens-q " + file("cuq.npy") + " --cu-seqlens-kv " + file("cukv.npy");
  const std::string all = spec + packing + " --sinks " + file("sinks.npy");
  const CommandResult done = run(all);
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.json()["files"].size(), 6u);
  EXPECT_EQ(done.json()["shape"], "b2:hq2:hkv2:sq3:skv6");
  EXPECT_EQ(npy::read(file("results/out.npy")).shape, (std::vector<std::int64_t>{1, 2, 5, 16}));
  EXPECT_EQ(npy::read(file("results/dk.npy")).shape, (std::vector<std::int64_t>{1, 2, 7, 16}));
  EXPECT_EQ(npy::read(file("results/lse.npy")).shape, (std::vector<std::int64_t>{1, 2, 5}));
  EXPECT_EQ(npy::read(file("results/dsinks.npy")).shape, (std::vector<std::int64_t>{2}));

  for (const auto& [arguments, message] : std::vector<std::pair<std::string, std::string>>{
           {spec + packing, "the spec has \"sinks\": give --sinks, float32 [heads]"},
           {spec, "the spec has \"varlen\": give --cu-seqlens-q"},
           {all + " --scalar window=4", "declare no scalar 'window'; they declare none"},
           {all + " --scalar window", "'window' is no \"name=value\""},
           {all + " --capture bias=" + file("q.npy"), "declare no captured tensor 'bias'"}}) {
    const CommandResult refused = run(arguments);
    EXPECT_EQ(refused.code, 2) << arguments;
    EXPECT_TRUE(contains(refused.err, message)) << refused.err;
  }
}

/// [1, heads, length, 16] as [1, length, heads, 16].
std::vector<double> lengths_first(const std::vector<double>& values, std::int64_t heads,
                                  std::int64_t length) {
  std::vector<double> swapped;
  for (std::int64_t s = 0; s < length; ++s)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t d = 0; d < 16; ++d)
        swapped.push_back(values[static_cast<std::size_t>((h * length + s) * 16 + d)]);
  return swapped;
}

TEST_F(Command, LayoutsAgree) {
  write_inputs();
  ASSERT_EQ(run("run --cpu --spec bf16:d16 " + inputs() + " --out-dir " + file("results")).code, 0);
  const std::vector<double> bhsd = result("out.npy");
  for (const auto& [name, length] :
       {std::pair<const char*, std::int64_t>{"q.npy", 5}, {"k.npy", 7}, {"v.npy", 7}}) {
    const std::vector<double> values = lengths_first(npy::to_doubles(npy::read(file(name))), 2, length);
    npy::write(file(name), npy::from_doubles(npy::Type::float32, {1, length, 2, 16}, values));
  }
  ASSERT_EQ(
      run("run --cpu --force --layout bshd --spec bf16:d16 " + inputs() + " --out-dir " + file("results"))
          .code,
      0);
  EXPECT_EQ(npy::read(file("results/out.npy")).shape, (std::vector<std::int64_t>{1, 5, 2, 16}));
  EXPECT_EQ(result("out.npy"), lengths_first(bhsd, 2, 5));
}

TEST_F(Command, RunWritesTheLargestScores) {
  write_inputs();
  const std::string command =
      "run --cpu --spec bf16:d16:row_max " + inputs() + " --out-dir " + file("results");
  ASSERT_EQ(run(command).code, 0);
  EXPECT_EQ(npy::read(file("results/row_max.npy")).shape, (std::vector<std::int64_t>{1, 2, 5}));
  const std::vector<double> largest = result("row_max.npy"), lse = result("lse.npy");
  for (std::size_t i = 0; i < lse.size(); ++i) EXPECT_LT(largest[i], lse[i]);
  std::filesystem::remove(file("results/out.npy"));
  std::filesystem::remove(file("results/lse.npy"));
  EXPECT_TRUE(contains(run(command).err, "row_max.npy' is there already"));
}

TEST_F(Command, RunRefusesWhatItWouldIgnore) {
  write_inputs();
  const std::string files = inputs() + " --out-dir " + file("results");
  const CommandResult indices = run("run --cpu --spec bf16:d16:indices " + files);
  EXPECT_EQ(indices.code, 2);
  EXPECT_TRUE(contains(indices.err, "has indices, which no file can give")) << indices.err;
  const CommandResult twice =
      run("run --cpu --spec 'bf16:d16:score{w: float; w * score}' --scalar w=1 --scalar w=2 " + files);
  EXPECT_EQ(twice.code, 2);
  EXPECT_TRUE(contains(twice.err, "scalar 'w' is given twice")) << twice.err;
  const std::string bias = " --capture bias=" + file("bias.npy");
  npy::write(file("bias.npy"), npy::from_doubles(npy::Type::float32, {7}, std::vector<double>(7)));
  const CommandResult tensors =
      run("run --cpu --spec 'bf16:d16:score{bias: fp32 1d; score + bias[kv]}'" + bias + bias + " " + files);
  EXPECT_EQ(tensors.code, 2);
  EXPECT_TRUE(contains(tensors.err, "tensor 'bias' is given twice")) << tensors.err;
  const CommandResult shared = run("run --cpu --spec bf16:d16:shared_kv " + files);
  EXPECT_EQ(shared.code, 2);
  EXPECT_TRUE(contains(shared.err, "V is the first 16 columns of K")) << shared.err;
  std::filesystem::copy_file(file("k.npy"), file("v.npy"), std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(run("run --cpu --spec bf16:d16:shared_kv " + files).code, 0);
}

TEST_F(Command, SeedsHave64Bits) {
  write_inputs();
  const CommandResult result = run("run --cpu --spec bf16:d16 --seed 18446744073709551616 " + inputs() +
                                   " --out-dir " + file("results"));
  EXPECT_EQ(result.code, 2);
  EXPECT_TRUE(contains(result.err, "no whole number below 2^64")) << result.err;
}

TEST_F(Command, RunKeepsFilesUnlessForced) {
  write_inputs();
  const std::string arguments = "run --cpu --spec bf16:d16 " + inputs() + " --out-dir " + file("results");
  ASSERT_EQ(run(arguments).code, 0);
  write_file_atomically(file("results/lse.npy"), "mine");
  const CommandResult refused = run(arguments);
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "--force"));
  EXPECT_EQ(read_file(file("results/lse.npy")), "mine");
  EXPECT_EQ(run(arguments + " --force").code, 0);
  EXPECT_EQ(result("lse.npy").size(), 10u);
}

TEST_F(Command, RunRefusesWhatDoesNotFit) {
  write_inputs();
  write_tensor("short.npy", {1, 2, 6, 16}, 3);
  write_tensor("flat.npy", {7, 16}, 3);
  write_tensor("bytes.npy", {1, 2, 7, 16}, 3, npy::Type::int32);
  write_tensor("lengths.npy", {1}, 100, npy::Type::int32);
  npy::write(file("long_lengths.npy"), npy::from_doubles(npy::Type::int32, {1}, {8}));
  npy::write(file("map.npy"), npy::from_doubles(npy::Type::uint8, {1, 2}, {1, 1}));
  const std::string whole = read_file(file("v.npy"));
  write_file_atomically(file("truncated.npy"), whole.substr(0, whole.size() - 1));
  write_file_atomically(file("text.npy"), "no numbers here");
  const std::string qk = fmt::format("--q {} --k {}", file("q.npy"), file("k.npy"));
  const auto with_v = [&](const char* name) {
    return fmt::format("--spec bf16:d16 {} --v {}", qk, file(name));
  };
  const std::vector<std::pair<std::string, std::string>> cases{
      {with_v("short.npy"), "length 6"},
      {with_v("flat.npy"), "four dimensions"},
      {with_v("bytes.npy"), "int32"},
      {with_v("truncated.npy"), "truncated.npy"},
      {with_v("text.npy"), "text.npy"},
      {with_v("missing.npy"), "missing.npy"},
      {"--spec bf16:d24 " + inputs(), "head dimension 16"},
      {"--spec bwd:bf16:d16 " + inputs(), "--dout"},
      {"--spec fwd:bf16:d16 --dout " + file("dout.npy") + " " + inputs(), "--dout"},
      {"--spec bf16:d16:kvlen " + inputs(), "give --kv-lengths, int32 [batch]"},
      {"--spec bf16:d16 --kv-lengths " + file("lengths.npy") + " " + inputs(), "the spec has no \"kvlen\""},
      {"--spec bf16:d16:kvlen --kv-lengths " + file("long_lengths.npy") + " " + inputs(), "8"},
      {"--spec bf16:d16:map16x16 " + inputs(), "give --block-map"},
      {"--spec bf16:d16:map16x16 --block-map " + file("map.npy") + " " + inputs(), "block columns 2"},
      {"--spec bf16:d16 --dropout-p 0.5 " + inputs(), "dropout"},
      {"--spec bf16:d16:dropout --dropout-p 1 " + inputs(), "dropout_p is 1"},
      {"--spec bf16:d16 --scale 0 " + inputs(), "softmax_scale is 0"},
      {"--spec bf16:d16 --scale nan " + inputs(), "softmax_scale is nan"},
      {"--spec bf16:d16 --layout sbhd " + inputs(), "sbhd"},
  };
  for (const auto& [arguments, named] : cases) {
    const CommandResult refused = run("run --cpu --out-dir " + file("results") + " " + arguments);
    EXPECT_EQ(refused.code, 2) << arguments << '\n' << refused.err;
    EXPECT_TRUE(contains(refused.err, named)) << arguments;
    EXPECT_FALSE(std::filesystem::exists(file("results/out.npy"))) << arguments;
  }
}

TEST_F(Command, EmptyCacheIsListedAndVerified) {
  EXPECT_EQ(run("cache list --json").json()["entries"].size(), 0u);
  EXPECT_EQ(run("cache verify").code, 0);
  EXPECT_EQ(run("cache prune --max-size 1G").code, 0);
  EXPECT_EQ(run("cache clear --yes").code, 0);
}

TEST_F(Command, InspectShowsTheSourceWithoutACompiler) {
  const CommandResult result = run("inspect --spec fwd:bf16:d64:causal --arch sm_80 --source");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(contains(result.out, "flashjit_forward"));
  EXPECT_TRUE(contains(result.out, "struct Problem"));
}

}  // namespace
}  // namespace flashjit

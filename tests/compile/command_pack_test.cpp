// `flashjit pack` and what can be done with its folder: needs NVRTC and no GPU.
#include <gtest/gtest.h>

#include <string>

#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

using test::CommandResult;
using test::run_command;
using test::TemporaryDirectory;

class Pack : public ::testing::Test {
 protected:
  CommandResult run(const std::string& arguments, const std::string& environment = "") const {
    return run_command(folder_, arguments, environment);
  }
  std::string pack() const { return folder_.file("pack"); }
  /// The smallest kernels there are: one pass, plain family.
  CommandResult make(const std::string& more = "") const {
    return run("pack --json --spec fwd:fp32:d16 --arch sm_80 --out " + pack() + " " + more);
  }
  std::string only_key() const {
    return run("cache list --json --dir " + pack()).json()["entries"].at(0)["key"];
  }

  TemporaryDirectory folder_;
};

TEST_F(Pack, HoldsTheKernelsAndSkipsThemTheSecondTime) {
  const CommandResult first = make();
  ASSERT_EQ(first.code, 0) << first.err;
  ASSERT_EQ(first.json()["kernels"].size(), 1u);
  const auto kernel = first.json()["kernels"][0];
  EXPECT_EQ(kernel["state"], "compiled");
  EXPECT_GT(kernel["entries"][0]["registers"].get<int>(), 0);
  EXPECT_EQ(make().json()["kernels"][0]["state"], "already there");

  const auto list = run("cache list --json --dir " + pack()).json();
  ASSERT_EQ(list["entries"].size(), 1u);
  EXPECT_EQ(list["entries"][0]["spec"], kernel["spec"]);
  EXPECT_EQ(list["entries"][0]["key"], kernel["key"]);
  EXPECT_EQ(list["entries"][0]["damage"], "");
  EXPECT_EQ(run("cache verify --dir " + pack()).code, 0);
}

TEST_F(Pack, WritesARecordForEveryShape) {
  ASSERT_EQ(make("--shape b1:hq2:hkv2:sq64:skv64 --shape b1:hq2:hkv2:sq4096:skv4096").code, 0);
  std::size_t records = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(pack() + "/v1/tuning"))
    records += file.path().extension() == ".json";
  EXPECT_EQ(records, 2u);
}

TEST_F(Pack, ASpecWithoutAPassIsBoth) {
  const CommandResult result = run("pack --json --spec fp32:d16 --arch sm_80 --out " + pack());
  ASSERT_EQ(result.code, 0) << result.err;
  ASSERT_EQ(result.json()["kernels"].size(), 2u);
  EXPECT_EQ(result.json()["kernels"][0]["spec"], "fwd:fp32:d16");
  EXPECT_EQ(result.json()["kernels"][1]["spec"], "bwd:fp32:d16");
}

TEST_F(Pack, TakesASuite) {
  write_file_atomically(folder_.file("suite"),
                        "# shipped\nfwd:fp32:d16 b1:hq1:hkv1:sq8:skv8  # one\n\nfwd:fp32:d24\n");
  const CommandResult result =
      run("pack --json --suite " + folder_.file("suite") + " --arch sm_80,sm_75 --out " + pack());
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.json()["kernels"].size(), 4u);
  write_file_atomically(folder_.file("suite"), "fwd:fp32:d16\nfwd:fp32:d17\n");
  const CommandResult refused =
      run("pack --suite " + folder_.file("suite") + " --arch sm_80 --out " + pack());
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("suite:2:"), std::string::npos) << refused.err;
}

TEST_F(Pack, DamageIsFoundAndRepaired) {
  ASSERT_EQ(make().code, 0);
  const std::filesystem::path cubin = pack() + "/v1/sm_80/" + only_key() + "/kernel.cubin";
  std::string bytes = read_file(cubin);
  bytes[bytes.size() / 2] ^= 1;
  write_file_atomically(cubin, bytes);
  EXPECT_EQ(run("cache verify --dir " + pack()).code, 1);
  const CommandResult repaired = run("cache verify --repair --json --dir " + pack());
  EXPECT_EQ(repaired.code, 0) << repaired.err;
  EXPECT_EQ(repaired.json()["removed"].size(), 1u);
  EXPECT_EQ(run("cache verify --dir " + pack()).code, 0);
  EXPECT_EQ(make().json()["kernels"][0]["state"], "compiled");
}

TEST_F(Pack, ShowPruneAndClear) {
  ASSERT_EQ(make().code, 0);
  const std::string key = only_key();
  const CommandResult shown = run("cache show --json --dir " + pack() + " " + key.substr(0, 8));
  ASSERT_EQ(shown.code, 0) << shown.err;
  EXPECT_EQ(shown.json()["key"], key);
  EXPECT_EQ(run("cache prune --max-size 1G --dir " + pack()).code, 0);
  EXPECT_EQ(run("cache list --json --dir " + pack()).json()["entries"].size(), 1u);
  EXPECT_EQ(run("cache prune --max-size 0 --dir " + pack()).code, 0);
  EXPECT_EQ(run("cache list --json --dir " + pack()).json()["entries"].size(), 0u);
  ASSERT_EQ(make().code, 0);
  EXPECT_EQ(run("cache clear --yes --records --dir " + pack()).code, 0);
  EXPECT_EQ(run("cache list --json --dir " + pack()).json()["entries"].size(), 0u);
}

TEST_F(Pack, InspectReadsItByKey) {
  ASSERT_EQ(make().code, 0);
  const std::string by_key = "inspect --dir " + pack() + " --key " + only_key().substr(0, 10);
  EXPECT_NE(run(by_key + " --source").out.find("flashjit_forward"), std::string::npos);
  EXPECT_NE(run(by_key + " --ptx").out.find(".entry flashjit_forward"), std::string::npos);
  const auto table = run(by_key + " --json").json();
  EXPECT_GT(table["kernels"][0]["entries"][0]["registers"].get<int>(), 0);
  EXPECT_GT(table["kernels"][0]["entries"][0]["blocks_per_multiprocessor"].get<int>(), 0);
}

TEST_F(Pack, InspectSaysWhichFamilyAndWhy) {
  const CommandResult result = run("inspect --json --spec fwd:fp32:d16 --arch sm_80");
  ASSERT_EQ(result.code, 0) << result.err;
  const auto families = result.json()["kernels"][0]["families"];
  ASSERT_GE(families.size(), 2u);
  for (const auto& family : families)
    EXPECT_NE(family["supported"].get<bool>(), !family["reason"].get<std::string>().empty());
}

TEST_F(Pack, WithoutNvrtcItSaysSo) {
  const CommandResult result =
      run("pack --spec fwd:fp32:d16 --arch sm_80 --out " + pack(), "FLASHJIT_NVRTC=/no/libnvrtc.so");
  EXPECT_EQ(result.code, 3);
  EXPECT_NE(result.err.find("/no/libnvrtc.so"), std::string::npos) << result.err;
}

TEST_F(Pack, RefusesAFolderThatIsAFile) {
  write_file_atomically(pack(), "mine");
  const CommandResult result = make();
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_EQ(read_file(pack()), "mine");
}

}  // namespace
}  // namespace flashjit

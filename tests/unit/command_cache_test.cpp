// `flashjit pack` and `flashjit cache` on packs: the manifest, verify, prune. NVRTC is that of tests/fake.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "cache/digest.hpp"
#include "support/text.hpp"
#include "tests/support/built.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

namespace fs = std::filesystem;
using test::CommandResult;

class CommandCache : public ::testing::Test {
 protected:
  CommandResult run(const std::string& arguments, const std::string& environment = "") const {
    return test::run_command(folder_, arguments,
                             "FLASHJIT_NVRTC=" + test::built(FLASHJIT_FAKE_NVRTC) + " " + environment);
  }
  std::string pack() const { return folder_.file("pack"); }
  std::string manifest() const { return pack() + "/v1/SHA256SUMS"; }
  void make(const std::string& specs = "--spec fwd:bf16:d64") const {
    const CommandResult made = run(fmt::format("pack {} --arch sm_80 --out {}", specs, pack()));
    ASSERT_EQ(made.code, 0) << made.err;
  }
  CommandResult verify(const std::string& more = "") const {
    return run(fmt::format("cache verify --dir {}{}", pack(), more));
  }
  /// verify fails and says so.
  void expect_found(const std::string& part) const {
    const CommandResult found = verify();
    EXPECT_EQ(found.code, 1) << part;
    EXPECT_NE(found.err.find(part), std::string::npos) << found.err;
  }
  std::string only(const std::string& name) const {
    for (const auto& file : fs::recursive_directory_iterator(pack()))
      if (file.path().filename() == name) return file.path().string();
    return {};
  }
  void edit(const std::string& from, const std::string& to) const {
    std::string text = read_file(manifest());
    ASSERT_NE(text.find(from), std::string::npos);
    write_file_atomically(manifest(), text.replace(text.find(from), from.size(), to));
  }

  test::TemporaryDirectory folder_;
};

TEST_F(CommandCache, APacksManifestNamesEveryFileAsSha256sumReadsIt) {
  make("--spec bf16:d64");
  std::size_t files = 0;
  for (const auto& file : fs::recursive_directory_iterator(pack() + "/v1")) files += file.is_regular_file();
  const std::string text = read_file(manifest());
  EXPECT_EQ(files - 1, static_cast<std::size_t>(std::ranges::count(text, '\n')));
  EXPECT_GE(files, 8u);
  EXPECT_EQ(
      std::system(fmt::format("cd '{}/v1' && sha256sum --check --strict --quiet SHA256SUMS", pack()).c_str()),
      0);
  EXPECT_EQ(verify().code, 0);
}

TEST_F(CommandCache, APackIsSignedByItsManifestsDigest) {
  make();
  const CommandResult again = run("pack --json --spec fwd:bf16:d64 --arch sm_80 --out " + pack());
  const std::string digest = again.json()["manifest_sha256"];
  EXPECT_EQ(digest.size(), 64u);
  EXPECT_EQ(std::system(fmt::format("echo '{}  {}' | sha256sum --check --quiet", digest, manifest()).c_str()),
            0);
  EXPECT_EQ(verify(" --sha256 " + digest).code, 0);
  make("--spec fwd:bf16:d128");
  EXPECT_EQ(verify().code, 0) << "a pack may grow";
  EXPECT_EQ(verify(" --sha256 " + digest).code, 1) << "but is another one then";
  fs::remove(manifest());
  EXPECT_EQ(verify().code, 0);
  EXPECT_EQ(verify(" --sha256 " + digest).code, 1);
}

TEST_F(CommandCache, WhatAPackKeepsIsSound) {
  make();
  for (const char* name : {"kernel.cu", "kernel.cubin", "meta.json"}) {
    const std::string path = only(name), text = read_file(path);
    std::string flipped = text;
    flipped[text.size() / 2] ^= 1;
    write_file_atomically(path, flipped);
    make();
    EXPECT_EQ(verify().code, 0) << name << ": " << verify().err;
  }
  write_file_atomically(only("kernel.cu"), "damaged");
  const CommandResult again = run("pack --spec fwd:bf16:d128 --arch sm_80 --out " + pack());
  EXPECT_NE(again.err.find("kernel.cu does not match its digest"), std::string::npos) << again.err;
  EXPECT_EQ(verify().code, 0) << "what it held besides is checked, too";
}

TEST_F(CommandCache, DamagedBytesAreNotPrintedAsTheyAre) {
  make();
  const std::string line = read_file(manifest());
  write_file_atomically(manifest(), line + line.substr(0, 64) + "  a\xff\x1b[2J\n");
  write_file_atomically(only("meta.json"), "{\"spec\": \"\xff\xfe\x1b[2J");
  for (const auto& file : fs::recursive_directory_iterator(pack() + "/v1/tuning"))
    if (file.is_regular_file()) write_file_atomically(file.path(), "{\"a\x80\xc3\": \xff");
  for (const CommandResult& said : {verify(), verify(" --json"), run("cache list --dir " + pack())})
    for (const std::string& text : {said.out, said.err})
      for (const std::string_view one : split(text, '\n')) EXPECT_EQ(one, printable(one));
}

TEST_F(CommandCache, PacksOfTheSameInputAreTheSame) {
  const auto digest_of = [&](const std::string& name, const std::string& environment) {
    return run("pack --json --spec bf16:d64 --arch sm_80,sm_90a --out " + folder_.file(name), environment)
        .json()["manifest_sha256"]
        .get<std::string>();
  };
  EXPECT_EQ(digest_of("one", ""), digest_of("other", "FAKE_NVRTC_MS=20"));
}

TEST_F(CommandCache, WhatAForgedEntrySaysIsNotPrintedAsItIs) {
  make();
  nlohmann::json meta = nlohmann::json::parse(read_file(only("meta.json")));
  meta["kernel"]["spec"] = "fwd:\x1b[2J\nsound \u202e";
  meta["digest"] = cache::digest_of(meta["kernel"].dump());
  write_file_atomically(only("meta.json"), meta.dump());
  const std::string key = fs::path(only("meta.json")).parent_path().filename();
  for (const std::string& arguments : {std::string("list"), std::string("list --json"), "show " + key,
                                       "show --json " + key, std::string("verify")}) {
    const CommandResult said = run(fmt::format("cache {} --dir {}", arguments, pack()));
    for (const std::string& text : {said.out, said.err})
      for (const std::string_view one : split(text, '\n')) EXPECT_EQ(one, printable(one)) << arguments;
  }
}

TEST_F(CommandCache, APackIsForThisUserAlone) {
  const ::mode_t before = ::umask(0);
  make();
  ::umask(before);
  EXPECT_TRUE(fs::exists(manifest()));
  for (const auto& item : fs::recursive_directory_iterator(pack())) {
    const fs::perms mode = item.status().permissions() & fs::perms::all;
    EXPECT_EQ(mode,
              item.is_directory() ? fs::perms::owner_all : fs::perms::owner_read | fs::perms::owner_write)
        << item.path();
  }
}

TEST_F(CommandCache, WhatTheDeadLeftIsNoPartOfAPack) {
  make();
  const std::string sound = read_file(manifest());
  const fs::path records = fs::path(pack()) / "v1" / "tuning" / "sm_80";
  ASSERT_TRUE(fs::exists(records));
  for (const fs::path& folder : {fs::path(pack()) / "v1", records})
    write_file_atomically(folder / ".tmp-0123456789abcdef01234567", "half");
  EXPECT_EQ(verify().code, 0);
  make();
  EXPECT_EQ(read_file(manifest()), sound);
  // Under such a name, too, a record would be read.
  write_file_atomically(records / ".tmp-0.json", "{}");
  expect_found(".tmp-0.json is not named");
  EXPECT_EQ(run("cache clear --yes --records --dir " + pack()).code, 0);
  EXPECT_TRUE(fs::is_empty(pack()));
}

TEST_F(CommandCache, EveryKindOfDifferenceFromTheManifestIsFound) {
  make();
  const std::string record = fs::path(pack()) / "v1" / "tuning";
  write_file_atomically(pack() + "/v1/sm_80/more", "x");
  expect_found("sm_80/more is not named");
  fs::remove(pack() + "/v1/sm_80/more");

  const std::string cubin = only("kernel.cubin"), bytes = read_file(cubin);
  fs::remove(cubin);
  expect_found("kernel.cubin is missing");
  write_file_atomically(folder_.file("elsewhere"), bytes);
  fs::create_symlink(folder_.file("elsewhere"), cubin);
  expect_found("kernel.cubin is reached through a link");
  fs::remove(cubin);
  write_file_atomically(cubin, bytes);
  EXPECT_EQ(verify().code, 0);

  // What an entry's own digests do not show: its folder shows a whole kernel in place of another,
  // but only the manifest shows a changed record.
  for (const auto& file : fs::recursive_directory_iterator(record)) {
    if (!file.is_regular_file()) continue;
    std::string text = read_file(file.path());
    const std::size_t at = text.find("\"library\"");
    ASSERT_NE(at, text.npos);
    text.insert(at, 1, ' ');
    write_file_atomically(file.path(), text);
  }
  expect_found(".json has changed");
}

TEST_F(CommandCache, NamesInAManifestCannotLeaveThePack) {
  make();
  write_file_atomically(folder_.file("secret"), "x");
  const std::string sound = read_file(manifest());
  for (const char* name : {"../secret", "../../secret", "/etc/passwd", "sm_80/../../secret", "./a", "a//b",
                           "a/", "a/..", ".", "..", ""}) {
    write_file_atomically(manifest(), sound);
    edit(sound.substr(66, sound.find('\n') - 66), name);
    const CommandResult found = verify();
    EXPECT_EQ(found.code, 1) << name;
    EXPECT_NE(found.err.find("line 1 of SHA256SUMS"), std::string::npos) << name << ": " << found.err;
  }
  for (const std::string& text : std::vector<std::string>{
           std::string("nonsense\n"), std::string("\n\n"), sound + sound.substr(0, sound.find('\n')),
           sound.substr(1), std::string(100, 'a'), sound.substr(0, sound.size() / 2)}) {
    write_file_atomically(manifest(), text);
    EXPECT_EQ(verify().code, 1) << text;
  }
}

TEST_F(CommandCache, HugeFilesOfAPackAreNotRead) {
  make();
  for (const std::string& file : {manifest(), only("kernel.cu"), only("kernel.cubin")}) {
    const std::string sound = read_file(file);
    fs::resize_file(file, std::uintmax_t{1} << 40);  // sparse
    expect_found("1099511627776 bytes");
    write_file_atomically(file, sound);
    EXPECT_EQ(verify().code, 0);
  }
}

TEST_F(CommandCache, ARepairedPackLosesItsManifestBecauseItIsAnotherOne) {
  make("--spec bf16:d64");
  const std::string cubin = only("kernel.cubin");
  write_file_atomically(cubin, "damaged");
  EXPECT_EQ(verify().code, 1);
  EXPECT_EQ(verify(" --repair").code, 0);
  EXPECT_FALSE(fs::exists(manifest()));
  EXPECT_EQ(verify().code, 0);
  make("--spec bf16:d64");
  EXPECT_TRUE(fs::exists(manifest()));
  EXPECT_EQ(verify().code, 0);
}

TEST_F(CommandCache, VerifyFindsDamagedRecordsAndRepairRemovesThem) {
  make();
  fs::remove(manifest());
  for (const auto& file : fs::recursive_directory_iterator(pack() + "/v1/tuning"))
    if (file.is_regular_file()) write_file_atomically(file.path(), "{");
  EXPECT_EQ(verify(" --json").json()["damaged"].size(), 1u);
  EXPECT_EQ(verify().code, 1);
  EXPECT_EQ(verify(" --repair").code, 0);
  EXPECT_EQ(verify().code, 0);
}

TEST_F(CommandCache, PruneTakesItsLimitFromTheEnvironmentUnlessItIsGiven) {
  make("--spec fwd:bf16:d64 --spec fwd:bf16:d128");
  const auto left = [&](const std::string& more, const std::string& environment) {
    return run(fmt::format("cache prune --json --dir {}{}", pack(), more), environment).json();
  };
  EXPECT_EQ(left("", "")["removed"], 0);
  EXPECT_EQ(left(" --max-size 1G", "FLASHJIT_CACHE_LIMIT=1")["removed"], 0);
  const int bytes = left("", "")["bytes"];
  EXPECT_EQ(left("", fmt::format("FLASHJIT_CACHE_LIMIT={}", bytes - 1))["removed"], 1);
  EXPECT_EQ(run("cache prune --dir " + pack(), "FLASHJIT_CACHE_LIMIT=much").code, 2);
}

TEST_F(CommandCache, ClearLeavesNothingOfAPack) {
  make();
  EXPECT_EQ(run("cache clear --yes --records --dir " + pack()).code, 0);
  EXPECT_TRUE(fs::is_empty(pack()));
}

}  // namespace
}  // namespace flashjit

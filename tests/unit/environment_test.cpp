// The environment: defaults, precedence, and values that are not allowed.
#include "support/environment.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "flashjit/error.hpp"

namespace flashjit {
namespace {

using Variables = std::map<std::string, std::string>;

Environment read(const Variables& variables) {
  return read_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(const Variables& variables) {
  try {
    read(variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.message();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

TEST(Environment, DefaultsWhenNothingIsSet) {
  const Environment environment = read({});
  EXPECT_EQ(environment.cache_dir, "");
  EXPECT_TRUE(environment.packs.empty());
  EXPECT_TRUE(environment.jit);
  EXPECT_FALSE(environment.verbose);
  EXPECT_FALSE(environment.quiet);
  EXPECT_EQ(environment.template_dir + environment.nvrtc + environment.libcuda, "");
}

TEST(Environment, CacheDirPrecedence) {
  EXPECT_EQ(read({{"HOME", "/home/a"}}).cache_dir, "/home/a/.cache/flashjit");
  EXPECT_EQ(read({{"HOME", "/"}}).cache_dir, "/.cache/flashjit");
  EXPECT_EQ(read({{"HOME", "/home/a"}, {"XDG_CACHE_HOME", "/x"}}).cache_dir, "/x/flashjit");
  EXPECT_EQ(read({{"XDG_CACHE_HOME", "/x/"}}).cache_dir, "/x/flashjit");
  EXPECT_EQ(read({{"HOME", "/home/a"}, {"XDG_CACHE_HOME", "/x"}, {"FLASHJIT_CACHE_DIR", "here"}}).cache_dir,
            "here");
}

TEST(Environment, CacheLimitIsASizeOrOff) {
  EXPECT_EQ(read({}).cache_limit, std::uint64_t{2} << 30);
  EXPECT_EQ(read({{"FLASHJIT_CACHE_LIMIT", ""}}).cache_limit, std::uint64_t{2} << 30);
  EXPECT_EQ(read({{"FLASHJIT_CACHE_LIMIT", "512M"}}).cache_limit, std::uint64_t{512} << 20);
  EXPECT_EQ(read({{"FLASHJIT_CACHE_LIMIT", "1000"}}).cache_limit, 1000u);
  EXPECT_EQ(read({{"FLASHJIT_CACHE_LIMIT", "off"}}).cache_limit, UINT64_MAX);
  for (const char* bad : {"on", "-1", "1T", "M", "99999999999G", "1 G"})
    EXPECT_NE(refusal({{"FLASHJIT_CACHE_LIMIT", bad}}).find("FLASHJIT_CACHE_LIMIT"), std::string::npos)
        << bad;
}

TEST(Environment, EmptyAndRelativeFoldersCountAsNotSet) {
  EXPECT_EQ(read({{"HOME", ""}}).cache_dir, "");
  EXPECT_EQ(read({{"HOME", "relative"}}).cache_dir, "");
  EXPECT_EQ(read({{"HOME", "/h"}, {"XDG_CACHE_HOME", "relative"}}).cache_dir, "/h/.cache/flashjit");
  EXPECT_EQ(read({{"HOME", "/h"}, {"XDG_CACHE_HOME", ""}, {"FLASHJIT_CACHE_DIR", ""}}).cache_dir,
            "/h/.cache/flashjit");
}

TEST(Environment, PacksAreSeparatedByColons) {
  EXPECT_EQ(read({{"FLASHJIT_PACKS", "/a:b c::/d:"}}).packs, (std::vector<std::string>{"/a", "b c", "/d"}));
}

TEST(Environment, JitIsOnOrOff) {
  EXPECT_TRUE(read({{"FLASHJIT_JIT", "on"}}).jit);
  EXPECT_TRUE(read({{"FLASHJIT_JIT", ""}}).jit);
  EXPECT_FALSE(read({{"FLASHJIT_JIT", "off"}}).jit);
  EXPECT_EQ(refusal({{"FLASHJIT_JIT", "0"}}),
            "the environment variable FLASHJIT_JIT is '0'; set it to on or off, or unset it");
}

void expect_switch(const char* name, bool Environment::*is_on, const char* neither) {
  EXPECT_FALSE(read({}).*is_on);
  EXPECT_FALSE(read({{name, "off"}}).*is_on);
  EXPECT_TRUE(read({{name, "on"}}).*is_on);
  EXPECT_EQ(refusal({{name, neither}}), std::string("the environment variable ") + name + " is '" + neither +
                                            "'; set it to on or off, or unset it");
}

TEST(Environment, CheckingIndicesIsOnOrOff) {
  expect_switch("FLASHJIT_CHECK_INDICES", &Environment::check_indices, "1");
}

TEST(Environment, CheckingWaitsIsOnOrOff) {
  expect_switch("FLASHJIT_CHECK_WAITS", &Environment::check_waits, "10");
}

TEST(Environment, TuningInTheBackgroundIsOnOrOff) {
  expect_switch("FLASHJIT_TUNE_IN_BACKGROUND", &Environment::tune_in_background, "yes");
}

TEST(Environment, LogLevels) {
  EXPECT_TRUE(read({{"FLASHJIT_LOG", "debug"}}).verbose);
  EXPECT_TRUE(read({{"FLASHJIT_LOG", "quiet"}}).quiet);
  const Environment info = read({{"FLASHJIT_LOG", "info"}});
  EXPECT_FALSE(info.verbose || info.quiet);
  EXPECT_EQ(refusal({{"FLASHJIT_LOG", "loud"}}),
            "the environment variable FLASHJIT_LOG is 'loud'; set it to quiet, info or debug, or unset it");
}

TEST(Environment, PathsAreTakenAsGiven) {
  const Environment environment =
      read({{"FLASHJIT_TEMPLATE_DIR", "t"}, {"FLASHJIT_NVRTC", "n"}, {"FLASHJIT_LIBCUDA", "c"}});
  EXPECT_EQ(environment.template_dir, "t");
  EXPECT_EQ(environment.nvrtc, "n");
  EXPECT_EQ(environment.libcuda, "c");
}

TEST(Environment, EveryVariableThatIsReadIsListed) {
  std::set<std::string> read_names, listed;
  read_environment([&](const char* name) -> const char* {
    read_names.insert(name);
    return nullptr;
  });
  // The two that are not ours only serve a default.
  EXPECT_EQ(read_names.erase("HOME") + read_names.erase("XDG_CACHE_HOME"), 2u);
  for (const EnvironmentVariable& variable : environment_variables()) {
    EXPECT_TRUE(variable.name.starts_with("FLASHJIT_")) << variable.name;
    EXPECT_FALSE(variable.description.empty()) << variable.name;
    EXPECT_TRUE(listed.emplace(variable.name).second) << variable.name << " is listed twice";
  }
  EXPECT_EQ(read_names, listed);
}

}  // namespace
}  // namespace flashjit

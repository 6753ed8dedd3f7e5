// The library called when the process, or a thread, has nearly ended: in atexit handlers, in destructors of
// static and of thread_local objects. Each in a process of its own, which gtest starts anew.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "flashjit/flashjit.h"
#include "tests/support/built.hpp"
#include "tests/support/fakes.hpp"

namespace flashjit {
namespace {

constexpr const char* kWrong = "a spec that is none, of a length that no string keeps within itself";

/// Ends the process: with 0 where all is as it should be.
void expect(bool right, int code) {
  if (!right) ::_exit(code);
}

flashjit_status make_spec(const char* text, flashjit_spec** made) { return flashjit_spec_create(text, made); }

bool fails() {
  flashjit_spec* spec = nullptr;
  return make_spec(kWrong, &spec) == FLASHJIT_INVALID_ARGUMENT && spec == nullptr;
}

flashjit_runtime* runtime() {
  static flashjit_runtime* made = nullptr;
  flashjit_options options{};
  options.struct_size = sizeof options;
  options.cache_dir = "";
  if (made == nullptr) expect(flashjit_runtime_create(&options, &made) == FLASHJIT_OK, 10);
  return made;
}

/// A call that fails, and calls that use all that the library makes once.
void use_all() {
  expect(fails(), 11);
  const flashjit_shape shape{1, 2, 2, 128, 128};
  std::size_t bytes = 0;
  flashjit_spec* spec = nullptr;
  expect(make_spec("bf16:d64", &spec) == FLASHJIT_OK, 12);
  expect(flashjit_workspace_bytes(runtime(), FLASHJIT_FORWARD, spec, &shape, &bytes) == FLASHJIT_OK, 13);
  expect(
      flashjit_prepare(runtime(), FLASHJIT_FORWARD, spec, &shape, nullptr, nullptr, nullptr) == FLASHJIT_OK,
      14);
  flashjit_spec_destroy(spec);
}

struct AtDestruction {
  ~AtDestruction() { action(); }
  void (*action)();
};

class AtExit : public testing::Test {
 protected:
  AtExit() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  const test::Variable nvrtc_{"FLASHJIT_NVRTC", test::built(FLASHJIT_FAKE_NVRTC)};
  const test::Variable libcuda_{"FLASHJIT_LIBCUDA", test::built(FLASHJIT_FAKE_CUDA)};
  const test::Variable log_{"FLASHJIT_LOG", "quiet"};
};

TEST_F(AtExit, AHandlerMayCallTheLibraryAndFail) {
  const auto run = [] {
    std::atexit([] {
      use_all();
      expect(std::strcmp(flashjit_last_error_message(), "") == 0, 15);
      expect(std::strcmp(flashjit_last_error_detail(), "") == 0, 16);
      flashjit_runtime_destroy(runtime());
      ::_exit(0);
    });
    use_all();
    expect(std::strstr(flashjit_last_error_message(), "no string keeps") != nullptr, 17);
    std::exit(1);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST_F(AtExit, ADestructorOfAStaticObjectMay) {
  const auto run = [] {
    static AtDestruction last{[] { ::_exit(0); }};
    static AtDestruction object{use_all};
    use_all();
    std::exit(1);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST_F(AtExit, TheEndOfAThreadMay) {
  const auto run = [] {
    std::thread([] {
      thread_local AtDestruction object{use_all};
      expect(object.action != nullptr, 18);
      use_all();
    }).join();
    use_all();
    std::_Exit(0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace flashjit

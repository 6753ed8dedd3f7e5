// Any bytes as a program and as a spec: refused with an Error, or read and printed so that they come back.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "flashjit/error.hpp"
#include "tests/program_text.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (!flashjit::testing_support::program_text_holds(text)) std::abort();
  if (!flashjit::testing_support::spec_text_holds(text)) std::abort();
  return 0;
}

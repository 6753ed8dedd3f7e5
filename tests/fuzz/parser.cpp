// Any bytes for one parser of tests/parsers.hpp, which CMake names.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "tests/support/parsers.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashjit::test;
  static const std::vector<Parser> all = parsers();
  static const Parser& parser = *std::ranges::find(all, FLASHJIT_FUZZED, &Parser::name);
  if (parser.read({reinterpret_cast<const char*>(data), size}) == Outcome::broken) std::abort();
  return 0;
}

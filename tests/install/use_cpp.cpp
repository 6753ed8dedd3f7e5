// An installed flashjit from C++: values round-trip, and an Error crosses the library's border as itself.
#include <flashjit/flashjit.hpp>

#include <cstdio>

int main() {
  const flashjit::AttentionSpec spec{
      .dtype = flashjit::DType::fp16, .head_dim = 64, .mask = flashjit::causal()};
  const std::string text = flashjit::to_string(spec);
  std::printf("%s\n", text.c_str());
  if (flashjit::parse_spec(text) != spec.normalized()) return 1;

  flashjit::AttentionSpec window{.head_dim = 64};
  window.score = flashjit::programs::softcap(50);
  window.mask = flashjit::expr::q >= flashjit::expr::kv && flashjit::programs::documents(1);
  std::printf("%s\n", flashjit::to_string(window).c_str());
  if (flashjit::parse_spec(flashjit::to_string(window)) != window.normalized()) return 6;

  try {
    flashjit::parse_spec("fp16:d7");
    return 2;
  } catch (const flashjit::Error& error) {
    std::printf("refused: %s\n", error.what());
    if (error.code() != flashjit::ErrorCode::invalid_argument) return 3;
  }

  flashjit::Runtime runtime({.cache_dir = ""});
  try {
    std::printf("device: %s\n", runtime.device().name.c_str());  // no context is current here
    return 5;
  } catch (const flashjit::Error& error) {
    std::printf("no device: %s\n", error.what());
    const bool expected =
        error.code() == flashjit::ErrorCode::no_driver || error.code() == flashjit::ErrorCode::no_device;
    if (!expected) return 4;
  }
  return 0;
}

// What the table of prepared operations is searched by on every call: made without building a string.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "flashjit/spec.hpp"
#include "plan/spec_options.hpp"

namespace flashjit {

/// Spec, shape and device of a call, as a view of the caller's spec. tests/unit/key_test.cpp does not compile
/// with a field of the spec that it does not change, and looks for each change here.
struct CallKeyView {
  std::array<std::int64_t, 10> numbers;
  std::string_view score, mask, out_mod, q_mod, k_mod;

  CallKeyView(std::array<std::int64_t, 10> numbers_, std::string_view score_, std::string_view mask_,
              std::string_view out_mod_, std::string_view q_mod_, std::string_view k_mod_)
      : numbers(numbers_), score(score_), mask(mask_), out_mod(out_mod_), q_mod(q_mod_), k_mod(k_mod_) {}
  CallKeyView(const AttentionSpec& spec, Pass pass, const AttentionShape& shape, int device)
      : numbers{flags(spec, pass),
                two(spec.head_dim, spec.v_dim()),
                two(spec.block_map.q, spec.block_map.kv),
                two(spec.kv.page_size, device),
                shape.batch,
                shape.heads_q,
                shape.heads_kv,
                shape.seqlen_q,
                shape.seqlen_kv,
                formats(spec.kv, spec.epilogue.out_format)},
        score(spec.score.text()),
        mask(spec.mask.text()),
        out_mod(spec.epilogue.out_mod.text()),
        q_mod(spec.prologue.q_mod.text()),
        k_mod(spec.prologue.k_mod.text()) {}

  bool operator==(const CallKeyView&) const = default;

 private:
  static std::int64_t flags(const AttentionSpec& spec, Pass pass) {
    constexpr auto kEach = std::make_index_sequence<plan::kSpecOptions.size()>();
    const auto options = [&]<std::size_t... i>(std::index_sequence<i...>) {
      return ((std::int64_t{plan::kSpecOptions[i].is_on(spec) && !means_nothing(i, pass)} << i) | ...);
    };
    return static_cast<std::int64_t>(pass) | static_cast<std::int64_t>(spec.dtype) << 8 |
           options(kEach) << 16;
  }
  /// The formats of K, V and O, or 0: a hash, as a code book may have 256 values.
  static std::int64_t formats(const KvLayout& kv, const KvFormat& out) {
    if (!kv.quantized() && !out.quantized()) return 0;
    return static_cast<std::int64_t>((hash_of(kv.k_format) * 3 + hash_of(kv.v_format)) * 3 + hash_of(out));
  }
  static std::uint64_t hash_of(const KvFormat& f) {
    const std::uint8_t parts[] = {
        static_cast<std::uint8_t>(f.code),       static_cast<std::uint8_t>(f.scales),
        static_cast<std::uint8_t>(f.scale_type), static_cast<std::uint8_t>(f.zero),
        static_cast<std::uint8_t>(f.packing),    static_cast<std::uint8_t>(f.second_scale),
        static_cast<std::uint8_t>(f.tail_type),  static_cast<std::uint8_t>(f.block),
        static_cast<std::uint8_t>(f.tail),       static_cast<std::uint8_t>(f.tail >> 8),
        static_cast<std::uint8_t>(f.keys),       static_cast<std::uint8_t>(f.zero_bits)};
    const bool has_text = !f.book.empty() || !f.decode.empty();
    return XXH3_64bits_withSeed(parts, sizeof parts,
                                !has_text          ? 0
                                : f.decode.empty() ? XXH3_64bits(f.book.data(), f.book.size() * 4)
                                                   : XXH3_64bits(f.decode.data(), f.decode.size()));
  }
  static constexpr bool means_nothing(std::size_t option, Pass pass) {
    return plan::kSpecOptions[option].text == "det" && !gives_gradients(pass);
  }
  static std::int64_t two(int high, int low) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
                                     static_cast<std::uint32_t>(low));
  }
};

/// The same, owning its text: what the table keeps.
struct CallKey {
  explicit CallKey(const CallKeyView& view)
      : numbers(view.numbers),
        score(view.score),
        mask(view.mask),
        out_mod(view.out_mod),
        q_mod(view.q_mod),
        k_mod(view.k_mod) {}
  operator CallKeyView() const { return {numbers, score, mask, out_mod, q_mod, k_mod}; }

  std::array<std::int64_t, 10> numbers;
  std::string score, mask, out_mod, q_mod, k_mod;
};

struct CallKeyHash {
  using is_transparent = void;
  std::size_t operator()(const CallKeyView& key) const {
    std::uint64_t hash = XXH3_64bits(key.numbers.data(), sizeof key.numbers);
    if (!key.mask.empty()) hash = XXH3_64bits_withSeed(key.mask.data(), key.mask.size(), hash);
    if (!key.score.empty()) hash = XXH3_64bits_withSeed(key.score.data(), key.score.size(), ~hash);
    if (!key.out_mod.empty()) hash = XXH3_64bits_withSeed(key.out_mod.data(), key.out_mod.size(), hash + 1);
    if (!key.q_mod.empty()) hash = XXH3_64bits_withSeed(key.q_mod.data(), key.q_mod.size(), hash + 2);
    if (!key.k_mod.empty()) hash = XXH3_64bits_withSeed(key.k_mod.data(), key.k_mod.size(), hash + 3);
    return hash;
  }
};

struct CallKeyEqual {
  using is_transparent = void;
  bool operator()(const CallKeyView& a, const CallKeyView& b) const { return a == b; }
};

}  // namespace flashjit

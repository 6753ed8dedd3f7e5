// The host's side of paged_decode.cpp: the sizes, the memory, and what an engine decides between two steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "example.hpp"

namespace paged {

constexpr std::int64_t kSequences = 4, kHeads = 8, kHeadsKv = 2, kDim = 64, kPageRows = 16, kPages = 48,
                       kColumns = 12, kSteps = 100;
constexpr std::int64_t kPrompts[kSequences] = {3, 70, 1, 41}, kLongest = 70, kPromptRows = 115;
constexpr unsigned short kNan = 0x7fff;  // rows of pages that are no keys may hold anything
using Bf16 = unsigned short;

/// What the calls read and write: in host memory for the reference, in device memory for the kernels.
struct Memory {
  Bf16 *q, *k, *v, *out, *k_cache, *v_cache;
  std::int32_t *lengths, *table, *offsets;
};

/// What an engine decides between two steps, and what the results must be.
class Engine {
 public:
  Engine() : random_(1) {
    for (std::vector<Bf16>* cache : {&k_cache_, &v_cache_})
      cache->assign(kPages * kPageRows * kHeadsKv * kDim, kNan);
    for (std::int64_t page = 0; page < kPages; ++page) free_.push_back(static_cast<std::int32_t>(page));
    std::shuffle(free_.begin(), free_.end(), random_);
  }

  Memory memory() {
    return {q_.data(),       k_.data(),       v_.data(),     out_.data(),    k_cache_.data(),
            v_cache_.data(), lengths_.data(), table_.data(), offsets_.data()};
  }

  /// New keys of each sequence, with the pages for them and the rows of Q, K and V that a model would give.
  void grow(const std::vector<std::int64_t>& counts) {
    std::int64_t rows = 0;
    for (std::int64_t b = 0; b < kSequences; ++b) {
      for (std::int64_t n = 0; n < counts[b]; ++n, ++lengths_[b]) {
        if (lengths_[b] % kPageRows != 0) continue;
        table_[b * kColumns + lengths_[b] / kPageRows] = free_.back();
        free_.pop_back();
      }
      rows += counts[b];
      offsets_[b + 1] = static_cast<std::int32_t>(rows);
    }
    fill(q_, rows * kHeads * kDim), fill(k_, rows * kHeadsKv * kDim), fill(v_, rows * kHeadsKv * kDim);
    out_.assign(q_.size(), kNan);
  }

  /// Whether results are those that the reference has left in memory().out.
  bool has(const std::vector<Bf16>& got) const {
    for (std::size_t i = 0; i < out_.size(); ++i)
      if (!(std::abs(value_of(got[i]) - value_of(out_[i])) < 0.02f)) return false;  // nor is NaN right
    return true;
  }

  const std::vector<Bf16>&q = q_, &k = k_, &v = v_;
  const std::vector<std::int32_t>&lengths = lengths_, &table = table_, &offsets = offsets_;

 private:
  static float value_of(Bf16 bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  void fill(std::vector<Bf16>& values, std::int64_t count) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    values.resize(static_cast<std::size_t>(count));
    for (Bf16& value : values) {
      const float x = uniform(random_);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &x, sizeof bits);
      value = static_cast<Bf16>(bits >> 16);
    }
  }

  std::mt19937 random_;
  std::vector<Bf16> q_, k_, v_, out_, k_cache_, v_cache_;
  std::vector<std::int32_t> free_, lengths_ = std::vector<std::int32_t>(kSequences),
                                   table_ = std::vector<std::int32_t>(kSequences * kColumns, -1),
                                   offsets_ = std::vector<std::int32_t>(kSequences + 1);
};

template <class T>
void copy(const cuda_functions& cuda, T* to, const std::vector<T>& from) {
  cuda.upload(reinterpret_cast<CUdeviceptr>(to), from.data(), from.size() * sizeof(T));
}

inline void send(const cuda_functions& cuda, const Memory& device, const Engine& engine) {
  copy(cuda, device.q, engine.q), copy(cuda, device.k, engine.k), copy(cuda, device.v, engine.v);
  copy(cuda, device.lengths, engine.lengths), copy(cuda, device.table, engine.table);
  copy(cuda, device.offsets, engine.offsets);
}

}  // namespace paged

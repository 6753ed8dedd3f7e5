// Rows of one sequence that ranks share, and both passes of all rows on one GPU: for one_sequence.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "example.hpp"

namespace one_sequence {

constexpr std::int64_t kHeads = 32, kHeadsKv = 8, kDim = 128;

/// bf16 bits that depend on the head, the row in the whole sequence and the column alone.
inline std::vector<unsigned short> values(unsigned seed, std::int64_t heads,
                                          const std::vector<std::int64_t>& rows) {
  std::vector<unsigned short> result;
  result.reserve(heads * rows.size() * kDim);
  for (std::int64_t head = 0; head < heads; ++head)
    for (const std::int64_t row : rows)
      for (std::int64_t column = 0; column < kDim; ++column) {
        unsigned x = seed + static_cast<unsigned>((head * 1000003 + row) * kDim + column);
        x = (x ^ x >> 16) * 0x45d9f3bu, x = (x ^ x >> 16) * 0x45d9f3bu, x ^= x >> 16;
        result.push_back(static_cast<unsigned short>((x & 0x8000u) | 0x3e80u | (x & 0x17fu)));  // +-[1/4, 2)
      }
  return result;
}
inline float to_float(unsigned short bits) {
  const unsigned whole = static_cast<unsigned>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &whole, sizeof value);
  return value;
}

/// The rows of a rank: of twice as many blocks as ranks, one and the one as far from the end.
inline std::vector<std::int64_t> zigzag_rows(int rank, int ranks, std::int64_t rows) {
  const std::int64_t block = rows / ranks / 2;
  std::vector<std::int64_t> result;
  for (const std::int64_t which :
       {static_cast<std::int64_t>(rank), static_cast<std::int64_t>(2 * ranks - 1 - rank)})
    for (std::int64_t i = 0; i < block; ++i) result.push_back(which * block + i);
  return result;
}

/// The largest difference from one GPU's rows, relative to its largest value.
inline double difference(const std::vector<unsigned short>& got, const std::vector<unsigned short>& whole,
                         std::int64_t heads, const std::vector<std::int64_t>& rows, std::int64_t all) {
  double most = 0, largest = 0;
  for (std::int64_t head = 0; head < heads; ++head)
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::int64_t column = 0; column < kDim; ++column) {
        const double expected = to_float(whole[(head * all + rows[i]) * kDim + column]);
        most = std::fmax(most, std::fabs(to_float(got[(head * rows.size() + i) * kDim + column]) - expected));
        largest = std::fmax(largest, std::fabs(expected));
      }
  return most / largest;
}

struct Tensors {
  unsigned short *q, *k, *v, *dout, *out, *dq, *dk, *dv;
  float* lse;
};
inline Tensors make_tensors(const cuda_functions& cuda, const std::vector<std::int64_t>& rows) {
  const auto upload = [&](unsigned seed, std::int64_t heads) {
    return example::upload(cuda, values(seed, heads, rows));
  };
  const auto make = [&](std::int64_t heads, std::int64_t dim) {
    return static_cast<unsigned short*>(make_filled(&cuda, 0x7fff, heads * rows.size() * dim));
  };
  return {upload(1, kHeads),    upload(2, kHeadsKv),  upload(3, kHeadsKv),
          upload(4, kHeads),    make(kHeads, kDim),   make(kHeads, kDim),
          make(kHeadsKv, kDim), make(kHeadsKv, kDim), reinterpret_cast<float*>(make(kHeads, 2))};
}

/// Both passes on this GPU alone.
inline void run_alone(const cuda_functions& cuda, flashjit::Runtime& runtime,
                      const flashjit::AttentionSpec& spec, const Tensors& t, std::int64_t rows) {
  const auto of_q = [&](void* data) { return flashjit::TensorView::bhsd(data, 1, kHeads, rows, kDim); };
  const auto of_kv = [&](void* data) { return flashjit::TensorView::bhsd(data, 1, kHeadsKv, rows, kDim); };
  const flashjit::AttentionShape shape{1, kHeads, kHeadsKv, rows, rows};
  runtime.forward(spec,
                  {.q = of_q(t.q),
                   .k = of_kv(t.k),
                   .v = of_kv(t.v),
                   .out = of_q(t.out),
                   .lse = t.lse,
                   .workspace = example::workspace(cuda, runtime, spec, shape)},
                  nullptr);
  runtime.backward(spec,
                   {.q = of_q(t.q),
                    .k = of_kv(t.k),
                    .v = of_kv(t.v),
                    .out = of_q(t.out),
                    .lse = t.lse,
                    .dout = of_q(t.dout),
                    .dq = of_q(t.dq),
                    .dk = of_kv(t.dk),
                    .dv = of_kv(t.dv),
                    .workspace = example::workspace(cuda, runtime, spec, shape, flashjit::Pass::backward)},
                   nullptr);
}

}  // namespace one_sequence

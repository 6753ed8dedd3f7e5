// A cache on the GPU: its tensors, its launches and its limits.
#pragma once

#include <optional>

#include "tests/support/attention_case.hpp"
#include "tests/support/cache_case.hpp"

namespace flashjit::test {

/// A case's cache on the GPU.
class CacheRun {
 public:
  explicit CacheRun(const CacheCase& test)
      : test_(test),
        cache_(make_cache(test)),
        exact_(reference::forward(cache_.problem)),
        rounded_(reference::forward(cache_.problem, reference::Precision::rounded)),
        q_(to_device(test.spec.q_type(), first_q_columns())),
        q_rope_(to_device(test.spec.q_type(), last_q_columns())),
        k_(to_device(test.spec.kv_type(), cache_.k.values)),
        v_(to_device(test.spec.kv_type(), cache_.v.values)),
        k_scale_(to_device(DType::fp32, cache_.k_scale.values)),
        v_scale_(to_device(DType::fp32, cache_.v_scale.values)),
        q_scale_(to_device(DType::fp32, cache_.q_scale.values)),
        lengths_(to_device(cache_.problem.kv_lengths)),
        cu_seqlens_q_(to_device(cache_.problem.cu_seqlens_q)),
        sinks_(to_device(DType::fp32, cache_.problem.sinks)),
        indices_(to_device(cache_.problem.indices)),
        table_(to_device(cache_.table)),
        starts_(to_device(cache_.starts)),
        prefix_length_(to_device(std::vector<std::int32_t>{cache_.problem.prefix_length})),
        captures_(gpu().driver(), test.spec, cache_.problem.captures),
        out_(cache_.problem.q.size() / test.spec.head_dim * test.spec.v_dim() * size_of(test.spec.dtype)),
        lse_(exact_.lse.size() * sizeof(float)) {}

  const Cache& cache() const { return cache_; }
  const reference::Forward& exact() const { return exact_; }
  const reference::Forward& rounded() const { return rounded_; }
  std::vector<double> out() const { return decode(test_.spec.out_type(), out_.content()); }
  std::vector<double> lse() const { return decode(DType::fp32, lse_.content()); }
  /// Gives later launches another Q, as values or codes.
  void put_q(const std::vector<double>& q) { q_ = to_device(test_.spec.q_type(), q); }

  /// Of its call.
  ForwardArgs args(const GuardedMemory& work) {
    const auto [batch, heads_q, heads_kv, seqlen_q, seqlen_kv] = test_.shape;
    const DType dtype = test_.spec.kv_type();
    const bool varlen = test_.spec.varlen;
    const std::int64_t b = varlen ? 1 : batch, d = test_.spec.head_dim, dv = test_.spec.v_dim();
    const std::int64_t rows = varlen ? cache_.problem.cu_seqlens_q.back() : seqlen_q;
    const std::int64_t d_rope = test_.spec.prologue.q_rope ? d - dv : 0;
    const void* v = test_.layout == PoolLayout::interleaved ? k_.data() : v_.data();
    const ConstTensorView k = cache_.k.view(static_cast<const void*>(k_.data()), dtype);
    ForwardArgs args{.q = ConstTensorView::bhsd(q_.data(), b, heads_q, rows, d - d_rope),
                     .k = k,
                     .v = test_.spec.kv.shared_kv ? k.first_columns(dv) : cache_.v.view(v, dtype),
                     .out = TensorView::bhsd(out_.data(), b, heads_q, rows, dv),
                     .lse = static_cast<float*>(lse_.data()),
                     .kv_lengths = static_cast<const std::int32_t*>(lengths_.data()),
                     .workspace = {work.data(), work.bytes()},
                     .captures = captures_.view(),
                     .max_seqlen_kv = seqlen_kv,
                     .sinks = static_cast<const float*>(sinks_.data()),
                     .page_table = cache_.table_view(static_cast<const std::int32_t*>(table_.data()),
                                                     static_cast<const std::int32_t*>(starts_.data())),
                     .k_scale = cache_.k_scale.view(k_scale_.data()),
                     .v_scale = cache_.v_scale.view(v_scale_.data()),
                     .q_scale = cache_.q_scale.view(q_scale_.data())};
    if (d_rope > 0) args.q_rope = ConstTensorView::bhsd(q_rope_.data(), b, heads_q, rows, d_rope);
    if (const auto& scale = cache_.problem.softmax_scale) args.softmax_scale = static_cast<float>(*scale);
    if (test_.spec.indices && rows * b > 0)
      args.indices =
          IndicesView::contiguous(static_cast<const std::int32_t*>(indices_.data()), b, rows, heads_kv,
                                  std::ssize(cache_.problem.indices) / (b * rows * heads_kv));
    if (test_.spec.kv.shared_prefix)
      args.prefix_length = static_cast<const std::int32_t*>(prefix_length_.data());
    if (varlen) {
      args.cu_seqlens_q = static_cast<const std::int32_t*>(cu_seqlens_q_.data());
      args.batch_size = batch;
      args.max_seqlen_q = seqlen_q;
    }
    return args;
  }
  /// Launches into outputs of any content.
  void launch(Runtime& runtime, const std::optional<TileConfig>& config = {}) {
    if (config) runtime.prepare(test_.spec, test_.shape, *config);
    const GuardedMemory work(runtime.workspace_bytes(test_.spec, test_.shape));
    runtime.forward(test_.spec, args(work), nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(out_.guards_intact() && lse_.guards_intact() && work.guards_intact());
  }
  /// Launches and compares O and LSE.
  void check(Runtime& runtime, const std::optional<TileConfig>& config = {}) {
    launch(runtime, config);
    const auto [error, limit] =
        reference::judge(decode(test_.spec.dtype, out_.content()), exact_.out, rounded_.out, 2);
    EXPECT_LE(error, limit) << "out";
    EXPECT_LE(reference::max_abs_error(
                  reference::existing_rows(cache_.problem, decode(DType::fp32, lse_.content())),
                  reference::existing_rows(cache_.problem, exact_.lse)),
              test_.spec.prologue.q_codes ? 4e-3 : 1e-3)  // as in tools/command/attention.cpp
        << "LSE";
  }

  /// With a prefix, and a length of the first sequence, that may be wrong: nothing outside of the tensors is
  /// written. For specs with shared_prefix.
  void check_wrong_prefix(Runtime& runtime, std::int32_t prefix, std::int32_t length) {
    std::vector<std::int32_t> lengths = cache_.problem.kv_lengths;
    lengths[0] = length;
    prefix_length_.upload(&prefix, sizeof prefix);
    lengths_.upload(lengths.data(), lengths.size() * sizeof(lengths[0]));
    const GuardedMemory work(runtime.workspace_bytes(test_.spec, test_.shape));
    runtime.forward(test_.spec, args(work), nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(out_.guards_intact() && lse_.guards_intact() && work.guards_intact());
  }

  /// With a page that does not exist in the first sequence and a wrong length of the second one: nothing
  /// outside of the tensors is written, and O of the last sequence stays right. For specs without varlen.
  void check_wrong_entries(Runtime& runtime, std::int32_t page, std::int32_t length) {
    std::vector<std::int32_t> table = cache_.table, lengths = cache_.problem.kv_lengths;
    table[0] = page, lengths[0] = 1, lengths[1] = length;
    table_.upload(table.data(), table.size() * sizeof(table[0]));
    lengths_.upload(lengths.data(), lengths.size() * sizeof(lengths[0]));
    const GuardedMemory work(runtime.workspace_bytes(test_.spec, test_.shape));
    runtime.forward(test_.spec, args(work), nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(out_.guards_intact() && lse_.guards_intact() && work.guards_intact());
    const auto last = [&](std::vector<double> values) {
      values.erase(values.begin(), values.end() - std::ssize(values) / test_.shape.batch);
      return values;
    };
    const auto [error, limit] = reference::judge(last(decode(test_.spec.dtype, out_.content())),
                                                 last(exact_.out), last(rounded_.out), 2);
    EXPECT_LE(error, limit);
  }

 private:
  /// Q, or with q_rope its columns that V has, too, and the others.
  std::vector<double> first_q_columns() const {
    if (!test_.spec.prologue.q_rope) return cache_.q;
    return reference::first_columns(cache_.q, test_.spec.head_dim, test_.spec.v_dim());
  }
  std::vector<double> last_q_columns() const {
    std::vector<double> columns;
    if (!test_.spec.prologue.q_rope) return columns;
    for (std::int64_t i = 0; i < std::ssize(cache_.q); ++i)
      if (i % test_.spec.head_dim >= test_.spec.v_dim()) columns.push_back(cache_.q[i]);
    return columns;
  }

  CacheCase test_;
  Cache cache_;
  reference::Forward exact_, rounded_;
  device::DeviceBuffer q_, q_rope_, k_, v_, k_scale_, v_scale_, q_scale_, lengths_, cu_seqlens_q_, sinks_,
      indices_, table_, starts_, prefix_length_;
  DeviceCaptures captures_;
  GuardedMemory out_, lse_;
};

/// Skips where the family cannot do it.
inline void check_cache(Runtime& runtime, const CacheCase& test) {
  SCOPED_TRACE(to_string(test.spec) + " " + to_string(test.shape));
  const plan::FamilyTraits& family = plan::traits(test.family);
  if (const Support able = family.supports(test.spec, gpu().info); !able)
    GTEST_SKIP() << to_string(test.family) << ": " << able.reason;
  CacheRun(test).check(runtime, family.heuristic(test.spec, test.shape, gpu().info));
}

}  // namespace flashjit::test

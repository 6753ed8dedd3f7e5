// One softmax over several caches as the emulator runs it.
#include "flashjit/caches.hpp"

#include <cmath>
#include <memory>

#include "tests/support/cache_run.hpp"

namespace flashjit::test {
namespace {

/// O and LSE over the keys of all parts, in fp64.
reference::Forward joined_softmax(const std::vector<const reference::Forward*>& parts) {
  reference::Forward all = *parts[0];
  const std::size_t columns = all.out.size() / all.lse.size();
  for (std::size_t row = 0; row < all.lse.size(); ++row) {
    double largest = -INFINITY, sum = 0;
    for (const auto* part : parts) largest = std::max(largest, part->lse[row]);
    if (largest == -INFINITY) continue;  // no part has a key: O is 0
    for (const auto* part : parts) sum += std::exp(part->lse[row] - largest);
    all.lse[row] = largest + std::log(sum);
    for (std::size_t i = row * columns; i < (row + 1) * columns; ++i) {
      all.out[i] = 0;
      for (const auto* part : parts) all.out[i] += std::exp(part->lse[row] - all.lse[row]) * part->out[i];
    }
  }
  return all;
}

class EmulatedCaches : public GpuTest {
 protected:
  /// The caches have the same queries, as these are drawn first from the seed.
  void expect_joined(std::initializer_list<CacheCase> cases) {
    std::vector<std::unique_ptr<CacheRun>> runs;
    std::vector<CacheArgs> caches;
    const GuardedMemory none(0);
    for (const CacheCase& one : cases) {
      runs.push_back(std::make_unique<CacheRun>(one));
      CacheArgs& cache = caches.emplace_back(CacheArgs{one.spec, runs.back()->args(none)});
      cache.args.q = caches[0].args.q;
      cache.args.lse = nullptr, cache.args.out.data = nullptr, cache.args.workspace = {};
      ASSERT_EQ(runs[0]->cache().problem.q, runs.back()->cache().problem.q);
    }
    SCOPED_TRACE(to_string(caches[0].spec) + " and " + to_string(caches.back().spec));
    std::vector<const reference::Forward*> exact, rounded;
    for (const auto& run : runs) exact.push_back(&run->exact()), rounded.push_back(&run->rounded());
    const reference::Forward wanted = joined_softmax(exact), near = joined_softmax(rounded);

    const DType type = caches[0].spec.out_type();
    const GuardedMemory out(wanted.out.size() * size_of(type)), lse(wanted.lse.size() * sizeof(float));
    OverArgs args{.caches = caches, .out = {}, .lse = static_cast<float*>(lse.data())};
    const auto& q = caches[0].args.q.size;
    args.out = TensorView::bhsd(out.data(), q[0], q[1], q[2], caches[0].spec.v_dim(), type);
    const GuardedMemory work(attention_over_workspace_bytes(runtime_.get(), args));
    args.workspace = {work.data(), work.bytes()};
    attention_over(runtime_.get(), args, nullptr);
    gpu().context->synchronize();
    EXPECT_TRUE(out.guards_intact() && lse.guards_intact() && work.guards_intact());
    const auto [error, limit] = reference::judge(decode(type, out.content()), wanted.out, near.out, 2);
    EXPECT_LE(error, limit) << "out";
    const reference::Problem& problem = runs[0]->cache().problem;
    EXPECT_LE(reference::max_abs_error(reference::existing_rows(problem, decode(DType::fp32, lse.content())),
                                       reference::existing_rows(problem, wanted.lse)),
              1e-3)
        << "LSE";
  }

  TemporaryRuntime runtime_;
};

CacheCase cache_case(const char* spec, const AttentionShape& shape, unsigned seed) {
  return {.spec = parse_spec(std::string("fwd:") + spec), .shape = shape, .seed = seed};
}

/// A window's pages beside lists of compressed keys, whose pages have other sizes.
TEST_F(EmulatedCaches, OfAWindowAndOfListsAreOneSoftmax) {
  expect_joined({cache_case("bf16:d64:causal:varlen:pages16:sinks", {3, 4, 2, 6, 90}, 1),
                 cache_case("bf16:d64:varlen:pages3:indices", {3, 4, 2, 6, 130}, 1)});
}

TEST_F(EmulatedCaches, OfThreeLayoutsAreOneSoftmax) {
  expect_joined({cache_case("fp16:d64x32:cache", {3, 4, 2, 3, 70}, 2),
                 cache_case("fp16:d64x32:pages16:mask{kv % 3 != 1}", {3, 4, 1, 3, 50}, 2),
                 cache_case("fp16:d64x32:pages5:fp32_out", {3, 4, 4, 3, 20}, 2)});
}

TEST_F(EmulatedCaches, OfOtherFormatsAreOneSoftmax) {
  expect_joined({cache_case("bf16:d64:cache:fp32_out", {2, 2, 1, 1, 100}, 4),
                 cache_case("bf16:d64:kve4m3:pages16", {2, 2, 1, 1, 200}, 4)});
}

TEST_F(EmulatedCaches, OfOneIsItsOwnCall) {
  expect_joined({cache_case("bf16:d64:causal:varlen:pages4:sinks", {3, 4, 2, 5, 40}, 3)});
}

}  // namespace
}  // namespace flashjit::test

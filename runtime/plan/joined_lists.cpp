#include "plan/joined_lists.hpp"

#include <algorithm>

#include "plan/tiles.hpp"
#include "templates/common/params.cuh"

namespace flashjit::plan {
namespace {

constexpr int kJoiningThreads = 256;  // templates/auxiliary/join_lists.cuh
constexpr std::int64_t kMostJoinedBytes = std::int64_t{1} << 30;

JoinedLists lists_of(const AttentionShape& shape) {
  const std::int64_t queries = packed_heads(shape, kMostJoinedQueries).queries;
  if (queries == 0) return {};
  const std::int64_t keys = tiles(shape.seqlen_kv, 4) * 4;  // a word has the queries of four
  return {.count = shape.batch * shape.heads_kv * tiles(shape.seqlen_q, queries),
          .capacity = queries * std::min<std::int64_t>(keys, kJoinedKeysOfQuery)};
}

}  // namespace

Support may_join_lists(const AnalysedSpec& spec) {
  if (spec.pass != Pass::forward || !spec.indices)
    return Support::no("join_lists is for the forward pass with indices");
  if (spec.decodes_kv() && !spec.kv.shared_kv)
    return Support::no("join_lists is for K and V in formats that are decoded with shared_kv alone");
  return Support::yes();
}

bool gains_by_joined_lists(const AnalysedSpec& spec, const AttentionShape& shape) {
  constexpr std::int64_t kFewestQueries = 128, kBytesOfKey = 5;
  if (!may_join_lists(spec) || !spec.kv.shared_kv || shape.heads_kv == 0 || shape.seqlen_q < kFewestQueries)
    return false;
  if (packed_heads(shape, kMostJoinedQueries).queries < 2) return false;
  const JoinedLists lists = lists_of(shape);
  return lists.count <= kMostJoinedBytes / kBytesOfKey / std::max<std::int64_t>(lists.capacity, 1);
}

void add_join_lists(KernelPlan& kernel) {
  Entry entry = auxiliary_entry("join_lists");
  entry.threads = kJoiningThreads;
  entry.min_blocks = 5;  // their reads hide behind others'
  kernel.steps.insert(kernel.steps.begin(), Step::join_lists);
  kernel.entries.insert(kernel.entries.begin(), std::move(entry));
}

JoinedLists joined_lists(const KernelPlan& kernel, const AttentionShape& shape) {
  return kernel.config.join_lists ? lists_of(shape) : JoinedLists{};
}

}  // namespace flashjit::plan

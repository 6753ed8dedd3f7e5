// A call whose K and V are decoded once: what the entry that does so gets, and what the others get.
#pragma once

#include "flashjit/runtime.hpp"
#include "plan/plan.hpp"
#include "templates/auxiliary/decode_cache_params.cuh"

namespace flashjit {

/// Takes arguments and a workspace that were checked, with heads folded as the plan's are.
DecodeCacheParams decode_cache_params(const plan::ExecutionPlan& plan, const ForwardArgs& args);
/// The same call over elements in its workspace: [batch, heads_kv, seqlen_kv, dim], which for a cache are
/// slots.
ForwardArgs with_decoded_cache(const plan::ExecutionPlan& plan, ForwardArgs args);

}  // namespace flashjit

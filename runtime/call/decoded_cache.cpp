#include "call/decoded_cache.hpp"

#include "call/parameters.hpp"
#include "call/tensor_checks.hpp"

namespace flashjit {

DecodeCacheParams decode_cache_params(const plan::ExecutionPlan& plan, const ForwardArgs& args) {
  const ForwardArgs decoded = with_decoded_cache(plan, args);
  return {make_params(plan, args), tensor_param(decoded.k), tensor_param(decoded.v)};
}

ForwardArgs with_decoded_cache(const plan::ExecutionPlan& plan, ForwardArgs args) {
  const plan::AnalysedSpec& spec = plan.spec;
  const AttentionShape& shape = plan.shape;
  const auto elements = [&](std::size_t offset, std::int64_t dim) {
    const void* data = static_cast<const char*>(args.workspace.data) + offset;
    return ConstTensorView::bhsd(data, shape.batch, shape.heads_kv, shape.seqlen_kv, dim);
  };
  args.k = elements(plan.workspace.decoded_k, spec.head_dim);
  args.v = spec.kv.shared_kv ? args.k.first_columns(spec.v_dim())
                             : elements(plan.workspace.decoded_v, spec.v_dim());
  args.page_table = {};
  args.k_block_scale = args.v_block_scale = {};
  return args;
}

}  // namespace flashjit

#include "call/parameters.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "call/captures.hpp"
#include "call/out_codes.hpp"
#include "call/row_mods.hpp"
#include "call/sink_arguments.hpp"
#include "call/skip_softmax.hpp"
#include "call/tensor_checks.hpp"
#include "plan/tiles.hpp"
#include "support/dropout.hpp"

namespace flashjit {
namespace {

void set_dropout(Params& params, const AttentionSpec& spec, double p, std::uint64_t seed,
                 std::uint64_t offset) {
  const auto dropout = dropout_parameters(spec.dropout ? p : 0.0);
  params.drop_share = dropout.drop_share;
  params.keep_scale = static_cast<float>(dropout.keep_scale);
  params.seed_lo = static_cast<unsigned>(seed);
  params.seed_hi = static_cast<unsigned>(seed >> 32);
  params.offset_lo = static_cast<unsigned>(offset);
  params.offset_hi = static_cast<unsigned>(offset >> 32);
}

DropoutPlaceParam dropout_place_param(const DropoutPlace& place, const AttentionShape& shape) {
  const std::int64_t heads = place.heads ? place.heads : shape.heads_q;
  const bool neighbours = place.q_step == 1 && place.kv_step == 1;
  return {.first_head = static_cast<unsigned>(place.batch * heads + place.head),
          .heads = static_cast<int>(heads),
          .q = static_cast<int>(place.q),
          .q_step = static_cast<int>(place.q_step),
          .kv = static_cast<int>(place.kv),
          .kv_step = static_cast<int>(place.kv_step),
          .whole_cells = neighbours && place.q % 16 == 0 && place.kv % 16 == 0};
}

void set_block_map(Params& params, const BlockMapView& map) {
  params.block_map = map.data;
  params.map_batch = static_cast<int>(map.size[0]);
  params.map_heads = static_cast<int>(map.size[1]);
  params.map_rows = static_cast<int>(map.size[2]);
  params.map_columns = static_cast<int>(map.size[3]);
}

template <class T>
void set_part(T*& pointer, bool needed, void* memory, std::size_t offset) {
  if (needed) pointer = reinterpret_cast<T*>(static_cast<char*>(memory) + offset);
}

void set_workspace(Params& params, const plan::ExecutionPlan& plan, void* memory) {
  const plan::WorkspaceLayout& at = plan.workspace;
  set_part(params.d, plan.needs.row_stats, memory, at.d);
  set_part(params.lse_padded, plan.needs.row_stats, memory, at.lse_padded);
  set_part(params.row_terms, plan.needs.row_terms, memory, at.row_terms);
  set_part(params.dq_accum, plan.needs.dq_accum, memory, at.dq_accum);
  params.num_splits = static_cast<int>(plan.needs.num_splits);
  params.head_groups = static_cast<int>(plan.head_groups);
  const bool forward = plan.spec.pass != Pass::backward, split = plan.needs.num_splits > 0;
  const bool parts = split && forward && !plan.needs.whole_tiles;
  set_part(params.o_splits, parts, memory, at.o_splits);
  set_part(params.lse_splits, parts, memory, at.lse_splits);
  set_part(params.dk_splits, split && !forward, memory, at.dk_splits);
  set_part(params.dv_splits, split && !forward, memory, at.dv_splits);
  const bool cascade = plan.needs.cascade_tiles > 0;
  set_part(params.partial_tiles, parts && plan.needs.part_rows > 0 && !cascade, memory, at.partial_tiles);
  set_part(params.segments_of_tile, cascade, memory, at.segments_of_tile);
  set_part(params.semaphores, plan.needs.semaphores, memory, at.semaphores);
  const auto [lists, keys_of_list] = plan.needs.joined_lists;
  set_part(params.joined_lists.lengths, lists > 0, memory, at.joined_lengths);
  set_part(params.joined_lists.keys, lists > 0, memory, at.joined_keys);
  set_part(params.joined_lists.queries, lists > 0, memory, at.joined_queries);
  params.joined_lists.capacity = static_cast<int>(keys_of_list);
}

/// `memory` is where the lists begin: the workspace's end, or memory of their own.
void set_lists(Params& params, const plan::ExecutionPlan& plan, void* memory) {
  const plan::WorkspaceLayout& at = plan.workspace;
  const bool lists = plan.needs.list_sets > 0;
  set_part(params.lists.count, lists, memory, 0);
  set_part(params.lists.entries, lists, memory, at.list_entries - at.list_count);
  set_part(params.lists.rank, lists && plan.needs.ranks, memory, at.list_rank - at.list_count);
  set_part(params.lists.term_bounds, lists && plan.needs.term_bounds > 0, memory,
           at.term_bounds - at.list_count);
}

/// What masks see of a call.
template <class Args>
Params mask_params(const plan::ExecutionPlan& plan, const Args& args, Pass pass) {
  const AttentionSpec& spec = plan.spec;
  const AttentionShape& shape = plan.shape;
  Params params{};
  params.kv_lengths = args.kv_lengths;
  params.batch = static_cast<int>(shape.batch);
  params.heads_q = static_cast<int>(shape.heads_q);
  params.heads_kv = static_cast<int>(shape.heads_kv);
  params.seqlen_q = static_cast<int>(shape.seqlen_q);
  params.seqlen_kv = static_cast<int>(shape.seqlen_kv);
  params.seqlen_q_padded = static_cast<int>(plan::padded_seqlen_q(shape));
  params.heads_cleared = static_cast<int>(plan.heads_cleared);
  params.lpt_heads = static_cast<int>(plan.lpt_heads);
  if (spec.has_block_map()) set_block_map(params, args.block_map);
  set_captures(params, plan.spec.programs.declarations, args.captures, pass);
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.cu_seqlens_kv = args.cu_seqlens_kv;
  return params;
}

template <class Args>
Params common_params(const plan::ExecutionPlan& plan, const Args& args, Pass pass) {
  const AttentionSpec& spec = plan.spec;
  Params params = mask_params(plan, args, pass);
  params.rows_q = static_cast<int>(args.q.size[2]);
  params.rows_kv = static_cast<int>(args.k.size[2]);
  params.q = tensor_param(args.q);
  params.k = tensor_param(args.k);
  params.v = tensor_param(args.v);
  params.o = tensor_param(args.out);
  params.lse = rows_param(args.lse, args.lse_strides, rows_of(args.q));
  params.softmax_scale =
      args.softmax_scale.value_or(static_cast<float>(1 / std::sqrt(double(spec.head_dim))));
  params.softmax_scale_log2 = params.softmax_scale * std::numbers::log2e_v<float>;
  set_dropout(params, spec, args.dropout_p, args.seed, args.offset);
  params.rng_state = reinterpret_cast<const unsigned*>(args.rng_state);
  if (spec.partial.dropout_place)
    params.dropout_place = dropout_place_param(args.partial.dropout_place, plan.shape);
  params.zero_unused_rows = args.zero_unused_rows;
  set_workspace(params, plan, args.workspace.data);
  set_lists(params, plan,
            args.lists ? args.lists->data
                       : static_cast<char*>(args.workspace.data) + plan.workspace.bytes_without_lists());
  set_sinks(params, args);
  if (spec.indices) params.indices = indices_param(args.indices);
  if (plan.config.pack_gqa)
    params.packed = plan::packed_heads(plan.shape, plan::most_queries(plan.spec, plan.config));
  return params;
}

}  // namespace

ConstTensorView dout_of_kernels(const plan::ExecutionPlan& plan, const BackwardArgs& args) {
  ConstTensorView dout = args.dout;
  if (plan.spec.epilogue.out_mod.empty()) return dout;
  dout.data = static_cast<const char*>(args.workspace.data) + plan.workspace.dout;
  dout.stride = {dout.size[1] * dout.size[2] * dout.size[3], dout.size[2] * dout.size[3], dout.size[3], 1};
  return dout;
}

ForwardArgs fold_gqa(ForwardArgs args) {
  const std::int64_t heads_kv = args.k.size[1], group = args.q.size[1] / heads_kv;
  const auto fold = [&](auto& tensor) {
    tensor.size[1] = heads_kv, tensor.size[2] = group;
    tensor.stride[2] = tensor.stride[1];
    tensor.stride[1] *= group;
  };
  const RowStrides lse = row_strides(args.lse_strides, rows_of(args.q));
  args.lse_strides = {lse.batch, lse.head * group, lse.head};
  fold(args.q);
  if (args.q_rope.data) fold(args.q_rope);
  fold(args.out);
  fold(args.out_block_scale);
  fold(args.partial.state.out);
  return args;
}

Params make_params(const plan::ExecutionPlan& plan, const ForwardArgs& given, Pass pass) {
  const ForwardArgs args = args_of_kernels(plan, given);
  Params params = common_params(plan, args, pass);
  params.given = {.q = tensor_param(given.q), .k = tensor_param(given.k), .dq = {}, .dk = {}};
  params.page_table = page_table_param(args.page_table, args.k);
  params.row_max = args.row_max;
  if (plan.spec.prologue.q_rope) params.q_rope = tensor_param(args.q_rope);
  if (!plan.spec.epilogue.out_mod.empty()) params.out_mod = tensor_param(args.out_before_mod);
  set_out_scales(params, plan.spec, args);
  set_skip_softmax(params, plan.spec, args);
  params.k_scale = scale_param(args.k_scale);
  params.v_scale = scale_param(plan.spec.kv.shared_kv ? args.k_scale : args.v_scale);
  if (plan.spec.kv.quantized()) {
    params.k_block_scale = tensor_param(args.k_block_scale);
    params.v_block_scale = tensor_param(plan.spec.kv.shared_kv ? args.k_block_scale : args.v_block_scale);
  }
  params.q_scale = scale_param(args.q_scale);
  if (args.prefix_length) params.prefix_length = args.prefix_length;
  if (plan.spec.partial.running_state) {
    params.o_state = tensor_param(args.partial.state.out);
    params.lse_state = args.partial.state.lse;
  }
  return params;
}

Params make_params(const plan::ExecutionPlan& plan, const ListArgs& args) {
  Params params = mask_params(plan, args, Pass::forward);
  params.rows_q = params.rows_kv = std::numeric_limits<int>::max();
  set_lists(params, plan, args.memory.data);
  return params;
}

Params make_params(const plan::ExecutionPlan& plan, const BackwardArgs& given) {
  const BackwardArgs args = args_of_kernels(plan, given);
  Params params = common_params(plan, args, Pass::backward);
  params.given = {tensor_param(given.q), tensor_param(given.k), tensor_param(given.dq),
                  tensor_param(given.dk)};
  params.dout = tensor_param(dout_of_kernels(plan, args));
  if (!plan.spec.epilogue.out_mod.empty()) params.out_mod = tensor_param(args.dout);
  params.dq = tensor_param(args.dq);
  params.dk = tensor_param(args.dk);
  params.dv = tensor_param(args.dv);
  params.dsinks = args.dsinks;
  params.dlse = args.dlse;
  return params;
}

}  // namespace flashjit

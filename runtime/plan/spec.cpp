#include "flashjit/spec.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string_view>

#include "expr/declarations.hpp"
#include "expr/float_scalars.hpp"
#include "expr/kv_decode.hpp"
#include "flashjit/error.hpp"
#include "plan/analysed_spec.hpp"
#include "plan/spec_options.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

constexpr int kMinBlock = 16, kMaxBlock = 256, kBlockStep = 16;

void require_multiple(std::string_view field, int value, int step, int min, int max) {
  if (value < min || value > max || value % step != 0) {
    refuse("{} is {}; it must be a multiple of {} from {} to {}", field, value, step, min, max);
  }
}

void require_count(std::string_view field, std::int64_t value, std::int64_t max) {
  if (value < 0 || value > max) refuse("{} is {}; it must be from 0 to {}", field, value, max);
}

/// The formats of K and V for messages.
std::string format_text(const AttentionSpec& spec) {
  const auto text = [&](const KvFormat& format) {
    return format.quantized() ? to_string(format) : to_string(spec.dtype);
  };
  const std::string k = text(spec.kv.k_format), v = text(spec.kv.v_format);
  return k == v ? k : fmt::format("{} and {}", k, v);
}

/// Keys that share scales are of one sequence and one page.
void check_groups_of_keys(const AttentionSpec& spec) {
  if (spec.varlen && !spec.kv.is_cache())
    refuse(
        "K and V are {}, where keys share scales, and varlen packs sequences that begin anywhere; give them "
        "in a cache, or without packing",
        format_text(spec));
  for (const int keys : {spec.kv.k_format.keys, spec.kv.v_format.keys})
    if (keys > 0 && spec.kv.is_paged() && spec.kv.page_size % keys != 0)
      refuse("kv.page_size is {}, but {} keys share scales; it must be a multiple", spec.kv.page_size, keys);
}

/// What quantized K and V ask for, and what they alone can have.
void check_formats(const AttentionSpec& spec) {
  const KvFormat &k = spec.kv.k_format, &v = spec.kv.v_format;
  k.validate_row(spec.head_dim, "head_dim");
  if (spec.kv.shared_kv)
    v.validate();
  else
    v.validate_row(spec.v_dim(), "head_dim_v");
  if (spec.kv.key_scales && !k.has_argument() && !v.has_argument())
    refuse(
        "key_scales is set, but K and V are {}, which has no scales at the call; set kv.k_format to e4m3, "
        "e5m2 "
        "or int8, or leave it out",
        format_text(spec));
  if (spec.kv.hadamard && (!k.quantized() || spec.kv.shared_kv))
    refuse("hadamard is set, and {}; it is for K in codes beside V in rows of its own, so leave it out",
           spec.kv.shared_kv ? "shared_kv, too: V, in K's rows, would be rotated and O with it"
                             : "K is " + std::string(to_string(spec.dtype)) + ", where it changes nothing");
  if (std::max(k.keys, v.keys) > 0) check_groups_of_keys(spec);
  if (!spec.prologue.q_codes && spec.epilogue.pv_sums != PvSums::of_tile)
    refuse(
        "pv_sums is set, but Q is {}: only products of codes are summed with few bits; set q_codes, or leave "
        "it out",
        to_string(spec.dtype));
  if (!spec.prologue.q_codes) return;
  if (!spec.has_scales())
    refuse(
        "q_codes is set, but K and V are {}; set kv.k_format and kv.v_format to e4m3 or e5m2, which Q is "
        "then, "
        "too, or leave it out",
        format_text(spec));
  if (spec.kv_type() == DType::int8)
    refuse("q_codes is set and K and V are int8; products of 8 bits take e4m3 and e5m2");
}

StoredKvRow stored_row(const AttentionSpec& spec, const KvFormat& format, int dim) {
  if (!format.quantized()) return {spec.dtype, dim};
  const KvRow row = format.row(dim);
  const KvFormat::Code code = format.code;
  return {!format.is_plain_8bit()        ? DType::int8
          : code == KvFormat::Code::e4m3 ? DType::e4m3
          : code == KvFormat::Code::e5m2 ? DType::e5m2
                                         : DType::int8,
          row.bytes, row.alignment};
}

/// Formats whose elements are an expression are encoded by search.
void check_encodes(const AttentionSpec& spec) {
  for (const KvFormat* format : {&spec.kv.k_format, &spec.kv.v_format})
    if (!format->decode.empty()) decode_extremes(*format);
}

[[noreturn]] void refuse_beside_indices(const char* option) {
  refuse("indices is set beside {}; a list of keys for each query is not for that, so leave one out", option);
}

void check_running_state(const AttentionSpec& spec) {
  if (!spec.partial.running_state) return;
  const char* beside = spec.kv.is_cache()    ? "a cache"
                       : spec.indices        ? "indices"
                       : spec.kv.quantized() ? "quantized K and V"
                                             : nullptr;
  if (beside)
    refuse("running_state is set beside {}; merge() joins the states of such calls, so leave one out",
           beside);
  if (const char* once = plan::counted_once(spec))
    refuse(
        "running_state is set beside {}; they count once, so give the {} to the call that makes the first "
        "state",
        once, once);
}

/// What a softmax alone has, or what joins parts of its rows.
void check_weight_mod(const AttentionSpec& spec) {
  if (!spec.score.is_weight()) return;
  if (spec.score.empty())
    refuse(
        "weight_mod is set and its program is empty or the score itself; it gives the weight of a pair, so "
        "give one, as sigmoid(score + bias), or leave weight_mod out");
  const char* option = spec.dropout                        ? "dropout"
                       : spec.sinks                        ? "sinks"
                       : spec.epilogue.row_max             ? "row_max"
                       : spec.indices                      ? "indices"
                       : spec.prologue.q_codes             ? "q_codes"
                       : spec.reproducible.batch_invariant ? "batch_invariant"
                       : spec.partial.running_state        ? "running_state"
                                                           : nullptr;
  if (option)
    refuse(
        "weight_mod is set and {} is, too; weights that a program gives have no softmax, which {} is for, so "
        "leave one out",
        option, option);
}

/// What has no maximum to be far below, or trains.
void check_skip_softmax(const AttentionSpec& spec) {
  if (!spec.epilogue.skip_softmax) return;
  const char* option = spec.score.is_weight() ? "weight_mod" : spec.dropout ? "dropout" : nullptr;
  if (option)
    refuse(
        "skip_softmax is set and {} is, too; it leaves out keys that a softmax at inference gives little "
        "weight, so leave one out",
        option);
}

/// What is done to O after the kernels that out_mod is part of, or by other kernels.
void check_out_mod(const AttentionSpec& spec) {
  const char* option = spec.indices                        ? "indices"
                       : spec.reproducible.batch_invariant ? "batch_invariant"
                       : spec.partial.running_state        ? "running_state"
                                                           : nullptr;
  if (!spec.epilogue.out_mod.empty() && option)
    refuse("out_mod is set and {} is, too; it changes O where one kernel has all of it, so leave one out",
           option);
}

/// Tiles of scales are of four blocks, and a head has whole ones.
void check_swizzled_scales(const AttentionSpec& spec) {
  constexpr int kColumns = 64;
  const KvFormat& format = spec.epilogue.out_format;
  if (!format.has_block_scales() || format.block != kColumns / 4)
    refuse("swizzled_scales is set and out_format is {}; it is for NVFP4, e2m1:g16:e4m3:apart:scaled",
           to_string(format));
  if (spec.v_dim() % kColumns != 0)
    refuse("swizzled_scales is set and head_dim_v is {}; give a multiple of {}", spec.v_dim(), kColumns);
}

/// Refuses an out_format that O is not stored in, and options with which the kernel's O is not complete.
void check_out_format(const AttentionSpec& spec) {
  const KvFormat& format = spec.epilogue.out_format;
  if (spec.epilogue.swizzled_scales) check_swizzled_scales(spec);
  if (!format.quantized()) return;
  format.validate_row(spec.v_dim(), "head_dim_v");
  constexpr std::string_view kFormats[] = {"e4m3", "e4m3:row:fp32:apart", "e2m1:g16:e4m3:apart:scaled"};
  if (std::ranges::find(kFormats, to_string(format)) == std::end(kFormats))
    refuse("out_format is {}; O is stored as {}, or left as elements", to_string(format),
           fmt::join(kFormats, ", "));
  const char* option = spec.partial.running_state ? "running_state"
                       : spec.partial.fp32_out    ? "fp32_out"
                                                  : nullptr;
  if (option)
    refuse("out_format is {} and {} is set, too; O becomes codes where it is complete, so leave one out",
           to_string(format), option);
}

/// What is done to Q and K by other calls, or where there is more than Q and K of one call.
void check_row_mods(const AttentionSpec& spec) {
  expr::check_prologue(spec.prologue);
  if (!spec.prologue.has_programs()) return;
  const char* program = spec.prologue.q_mod.empty() ? "k_mod" : "q_mod";
  const bool k_mod = !spec.prologue.k_mod.empty();
  if (k_mod && (spec.kv.is_cache() || spec.kv.quantized()))
    refuse(
        "k_mod is set and K is {}; append() normalizes and rotates rows as it stores them, once for all "
        "calls, so leave k_mod out",
        spec.kv.is_cache() ? "in a cache" : "quantized");
  if (k_mod && spec.kv.shared_kv)
    refuse("k_mod is set and shared_kv is, too; V is K's columns as they are given, so leave one out");
  const char* option = spec.indices                 ? "indices"
                       : spec.prologue.q_codes      ? "q_codes"
                       : spec.has_scales()          ? "K and V of 8 bits"
                       : spec.partial.running_state ? "running_state"
                       : spec.partial.add_grads     ? "add_grads"
                                                    : nullptr;
  if (option)
    refuse("{} is set, which does not go with {}; change {} before the call, and leave {} out", program,
           option, k_mod ? "Q and K" : "Q", program);
}

/// Q's last columns in a tensor of their own, which the forward pass reads beside latents.
void check_q_rope(const AttentionSpec& spec) {
  if (!spec.prologue.q_rope) return;
  if (!spec.kv.shared_kv || spec.v_dim() >= spec.head_dim)
    refuse(
        "q_rope is set, head_dim is {} and head_dim_v is {}{}; Q's columns behind V's are then apart, as in "
        "latent attention, so set shared_kv and more columns of K than of V, or give Q as one tensor",
        spec.head_dim, spec.v_dim(), spec.kv.shared_kv ? "" : ", and shared_kv is not set");
  const char* option = spec.prologue.q_codes ? "q_codes" : !spec.prologue.q_mod.empty() ? "q_mod" : nullptr;
  if (option)
    refuse("q_rope is set and {} is, too; {} is for Q in one tensor, so leave one out", option, option);
}

/// Likewise of passes, before these forget that K and V are shared.
void check_q_rope(const AttentionSpec& spec, Pass pass) {
  if (spec.prologue.q_rope && (pass == Pass::jvp || gives_gradients(pass)))
    refuse("the pass is {} and q_rope is set; derivatives are for Q in one tensor, so join its parts",
           to_string(pass));
}

/// What has no tangent, or none yet.
void refuse_without_tangent(const AttentionSpec& spec, Pass pass) {
  const std::string name = to_string(pass);
  const char* without = pass == Pass::jvp ? "forward" : "backward";
  if (!spec.epilogue.out_mod.empty())
    refuse("the pass is {} and out_mod is set; it has no tangent yet, so leave it out or call the {} pass",
           name, without);
  if (spec.prologue.has_programs())
    refuse(
        "the pass is {} and {} is set; it has no tangent yet, so leave it out or call the {} pass, or change "
        "Q and K before",
        name, spec.prologue.q_mod.empty() ? "k_mod" : "q_mod", without);
  if (spec.score.is_weight())
    refuse(
        "the pass is {} and weight_mod is set; weights that a program gives have no tangents yet, so leave "
        "it out or call the {} pass",
        name, without);
  const char* option = spec.kv.is_cache()           ? "a cache"
                       : spec.kv.quantized()        ? "quantized K and V"
                       : spec.indices               ? "indices"
                       : spec.partial.running_state ? "running_state"
                       : spec.epilogue.row_max      ? "row_max"
                       : spec.epilogue.skip_softmax ? "skip_softmax"
                                                    : nullptr;
  if (option)
    refuse(
        "the pass is {} and {} is set; tangents are for K and V as tensors of Q's type, so leave it out or "
        "call the {} pass",
        name, option, without);
}

}  // namespace

DType AttentionSpec::kv_type() const {
  const bool reads_codes = kv.k_format.is_plain_8bit() && kv.k_format == kv.v_format && !kv.shared_kv;
  return reads_codes ? stored_k().type : dtype;
}

StoredKvRow AttentionSpec::stored_k() const { return stored_row(*this, kv.k_format, head_dim); }
StoredKvRow AttentionSpec::stored_out() const {
  if (!epilogue.out_format.quantized()) return {out_type(), v_dim()};
  StoredKvRow row = stored_row(*this, epilogue.out_format, v_dim());
  if (epilogue.out_format.code == KvFormat::Code::e4m3) row.type = DType::e4m3;
  return row;
}
StoredKvRow AttentionSpec::stored_v() const {
  if (kv.shared_kv && kv.k_format.quantized()) return stored_k();  // the same rows
  return stored_row(*this, kv.v_format, v_dim());
}

AttentionSpec AttentionSpec::normalized() const {
  AttentionSpec out = *this;
  out.head_dim_v = v_dim();
  if (dtype == DType::fp32)
    out.partial.fp32_out = out.partial.fp32_grads = out.partial.two_terms = false;
  else if (partial.add_grads)
    out.partial.fp32_grads = true;
  expr::declare_float_scalars(out.score, out.mask, out.epilogue.out_mod, out.prologue);
  if (kv.shared_kv) out.kv.v_format = kv.k_format;
  return out;
}

KernelSpec KernelSpec::normalized() const {
  if (pass == Pass::append)
    return {{.dtype = dtype,
             .head_dim = head_dim,
             .head_dim_v = v_dim(),
             .kv = {.kind = kv.kind,
                    .page_size = kv.page_size,
                    .shared_kv = kv.shared_kv && kv.k_format.quantized(),  // V is not written
                    .k_format = kv.k_format,
                    .v_format = kv.shared_kv ? kv.k_format : kv.v_format,
                    .key_scales = kv.key_scales,
                    .hadamard = kv.hadamard},
             .varlen = varlen},
            pass};
  if (pass == Pass::merge) return {{.dtype = dtype, .head_dim = v_dim(), .head_dim_v = v_dim()}, pass};
  if (pass == Pass::quantize)
    return {
        {.dtype = dtype, .head_dim = head_dim, .head_dim_v = head_dim, .kv = KvLayout{}.with(kv.k_format)},
        pass};
  KernelSpec out{AttentionSpec::normalized(), pass};
  out.kv.hadamard = false;  // Q and K come rotated
  // Passes without gradients are deterministic without being asked.
  if (!gives_gradients(pass))
    out.reproducible.deterministic = out.partial.fp32_grads = out.partial.add_grads = false;
  if (pass == Pass::jvp || pass == Pass::backward_jvp) out.partial.two_terms = false;
  if (pass == Pass::jvp) out.reproducible.batch_invariant = out.kv.shared_kv = false;
  if (gives_gradients(pass)) {
    out.epilogue.row_max = out.reproducible.batch_invariant = out.kv.shared_kv = out.partial.running_state =
        false;
    out.partial.fp32_out = pass == Pass::backward && out.saved_out_type() != dtype;
  }
  return out;
}

void AttentionSpec::validate() const {
  parse_dtype(to_string(dtype));  // refuses numbers that a cast made an enumerator
  if (size_of(dtype) == 1)
    refuse(
        "dtype is {}; O has it, so give fp16, bf16 or fp32: K and V of 8 bits are kv.k_format and "
        "kv.v_format (\"kve4m3\"), and with q_codes Q is of their type",
        to_string(dtype));
  require_multiple("head_dim", head_dim, plan::kHeadDimStep, plan::kHeadDimStep, plan::kMaxHeadDim);
  require_multiple("head_dim_v", v_dim(), plan::kHeadDimStep, plan::kHeadDimStep, plan::kMaxHeadDimV);
  expr::declarations(score, mask, epilogue.out_mod, prologue);  // refuses what they disagree on
  if (varlen && kv.is_padded())
    refuse(
        "varlen and kv_lengths are both set; with varlen a sequence's own length says how many keys it has, "
        "so leave kv_lengths out");
  if (kv.kind > KvLayout::Kind::paged) refuse("kv.kind is {}; it has no name", static_cast<int>(kv.kind));
  if (kv.is_paged() ? kv.page_size < 1 || kv.page_size > plan::kMostPageSize : kv.page_size != 0)
    refuse("kv.page_size is {}; it must be the tokens of a page, 1 or more, in a paged cache, and else 0",
           kv.page_size);
  check_formats(*this);
  if (kv.shared_prefix && (!kv.is_paged() || !varlen))
    refuse(
        "shared_prefix is set without {}; it is for packed queries over pages, so set that, too, or leave it "
        "out",
        kv.is_paged() ? "varlen" : "pages");
  check_running_state(*this);
  check_weight_mod(*this);
  check_out_mod(*this);
  check_out_format(*this);
  check_row_mods(*this);
  check_q_rope(*this);
  check_skip_softmax(*this);
  if (indices && (has_block_map() || dropout || prologue.q_codes))
    refuse_beside_indices(has_block_map() ? "block_map" : dropout ? "dropout" : "q_codes");
  if (partial.dropout_place && !dropout)
    refuse("dropout_place is set without dropout, whose mask it is about; set dropout, or leave it out");
  if (kv.shared_kv && v_dim() > head_dim)
    refuse(
        "shared_kv is set, head_dim is {} and head_dim_v is {}; V is then K's first columns, so "
        "head_dim_v is at most head_dim",
        head_dim, v_dim());
  if (kv.shared_kv && kv.v_format.quantized() && kv.v_format != kv.k_format)
    refuse("shared_kv is set, and V is {} and K is {}; V is then K's memory, so leave kv.v_format out",
           to_string(kv.v_format), to_string(kv.k_format));
  if (block_map != BlockSize{}) {
    require_multiple("block_map.q", block_map.q, kBlockStep, kMinBlock, kMaxBlock);
    require_multiple("block_map.kv", block_map.kv, kBlockStep, kMinBlock, kMaxBlock);
  }
}

void KernelSpec::validate() const {
  parse_pass(to_string(pass));  // refuses numbers that a cast made an enumerator
  check_q_rope(*this, pass);
  AttentionSpec::validate();
  if (pass == Pass::quantize && !kv.k_format.quantized())
    refuse("the pass is quantize and K and V are {}; set kv.k_format to e4m3, e5m2 or int8",
           format_text(*this));
  if (pass == Pass::append && !kv.is_cache())
    refuse("the pass is append and the spec has no cache: set kv to KvLayout::paged(page_size) or slots()");
  if (pass == Pass::append && std::max(kv.k_format.keys, kv.v_format.keys) > 0)
    refuse(
        "the pass is append and K and V are {}, where {} keys share scales, which new rows would change; "
        "keep "
        "the newest keys in 16 bits, quantize() a group once it is whole, and merge() attention over both",
        format_text(*this), std::max(kv.k_format.keys, kv.v_format.keys));
  if (pass == Pass::append || pass == Pass::quantize) check_encodes(*this);
  if (pass != Pass::forward && is_attention(pass) && epilogue.out_format.quantized())
    refuse(
        "the pass is {} and out_format is {}; codes of O are for inference and have no derivative, so leave "
        "it "
        "out or call the forward pass",
        to_string(pass), to_string(epilogue.out_format));
  if (pass == Pass::jvp || pass == Pass::backward_jvp) refuse_without_tangent(*this, pass);
  if (pass != Pass::backward) return;
  if (kv.is_cache())
    refuse(
        "the pass is backward and {} is set; the backward pass needs K and V as tensors without pages and "
        "slots, so leave it out",
        kv.is_paged() ? "pages" : "cache");
  if (kv.quantized())
    refuse("the pass is backward and K and V are {}; the backward pass needs them in the type of Q{}",
           format_text(*this), prologue.q_codes ? " and Q in that of O" : "");
  if (indices && reproducible.deterministic) refuse_beside_indices("deterministic");
  if (epilogue.skip_softmax)
    refuse(
        "the pass is backward and skip_softmax is set; O without the skipped keys has no gradient here, so "
        "leave it out of both passes");
}

void AttentionShape::validate() const {
  require_count("batch", batch, plan::kMostOfACount);
  require_count("heads_q", heads_q, plan::kMostOfACount);
  require_count("heads_kv", heads_kv, plan::kMostOfACount);
  require_count("seqlen_q", seqlen_q, plan::kMaxLength);
  require_count("seqlen_kv", seqlen_kv, plan::kMaxLength);
  if (heads_kv == 0 ? heads_q != 0 : heads_q % heads_kv != 0) {
    refuse("heads_q is {} and heads_kv is {}; heads_q must be a multiple of heads_kv", heads_q, heads_kv);
  }
  // No memory holds so much, and what planning multiplies these with fits into 64 bits.
  constexpr std::int64_t kMostRows = std::int64_t{1} << 48;
  const std::int64_t heads = batch * std::max(heads_q, heads_kv);  // each below 2^31
  if (const std::int64_t length = std::max({seqlen_q, seqlen_kv, std::int64_t{1}});
      heads > kMostRows / length)
    refuse(
        "{} has {} heads in all, of {} rows; batch * heads * length is at most 2^48, so that no size "
        "overflows: give "
        "smaller sizes",
        to_string(*this), heads, length);
}

}  // namespace flashjit

namespace flashjit::plan {

bool is_plain(const AttentionSpec& spec) {
  return spec.score.empty() && spec.epilogue.out_mod.empty() && !spec.prologue.has_programs() &&
         !spec.dropout && !spec.varlen && !spec.sinks && !spec.has_block_map() &&
         (spec.mask.empty() || is_causal(spec.mask));
}

const char* counted_once(const AttentionSpec& spec) { return spec.sinks ? "sinks" : nullptr; }

bool finds_sink_grads(const KernelSpec& spec) {
  return spec.sinks && (spec.pass == Pass::backward || spec.pass == Pass::backward_jvp);
}

}  // namespace flashjit::plan

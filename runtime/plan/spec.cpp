#include "flashjit/spec.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "expr/declarations.hpp"
#include "expr/float_scalars.hpp"
#include "flashjit/error.hpp"
#include "plan/analysed_spec.hpp"
#include "plan/config_switches.hpp"
#include "plan/spec_options.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

constexpr int kMinHeadDim = 8, kMaxHeadDimV = 512, kHeadDimStep = 8;
constexpr int kMostPageSize = 1 << 30;
constexpr int kMinBlock = 16, kMaxBlock = 256, kBlockStep = 16;
constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
// Kernels count queries and keys in 32 bits, and their last tile reaches past the end.
constexpr std::int64_t kMaxLength = kMaxInt - 1023;

void require_multiple(std::string_view field, int value, int step, int min, int max) {
  if (value < min || value > max || value % step != 0) {
    refuse("{} is {}; it must be a multiple of {} from {} to {}", field, value, step, min, max);
  }
}

void require_count(std::string_view field, std::int64_t value, std::int64_t max) {
  if (value < 0 || value > max) refuse("{} is {}; it must be from 0 to {}", field, value, max);
}

/// Reads a text of fields separated by ':', front to back. Errors quote the field and the whole text.
class FieldReader {
 public:
  /// `allowed` says what may be there.
  FieldReader(std::string_view what, std::string_view text, std::string (*allowed)())
      : what_(what), text_(text), allowed_(allowed), fields_(fields_of(text)) {}

  bool done() const { return next_ == fields_.size(); }
  std::string_view peek() const { return done() ? std::string_view() : fields_[next_]; }

  /// The next field, which must be there.
  std::string_view take(std::string_view meaning) {
    if (done()) refuse("the {} {} ends before {}; {}", what_, quoted(text_), meaning, allowed_());
    return fields_[next_++];
  }

  /// Runs the parser of one field; its error then quotes the field and the whole text, too.
  template <class Parse>
  auto in_field(std::string_view field, Parse parse) const {
    try {
      return parse();
    } catch (const Error& error) {
      refuse("the {} {} has a wrong field {}: {}", what_, quoted(text_), quoted(field), error.message());
    }
  }

  /// The number of the next field, which must begin with `prefix`.
  std::int64_t take_number(std::string_view prefix, std::int64_t min, std::int64_t max) {
    const std::string_view field = take(quoted(prefix) + " and a number");
    if (!begins(field, prefix)) misplaced(field, prefix);
    return in_field(field, [&] { return number_after(prefix, field.substr(prefix.size()), min, max); });
  }

  /// Whether the field is the option `name`, which may occur once.
  bool flag(std::string_view field, std::string_view name) {
    if (field != name) return false;
    once(field, name);
    return true;
  }

  /// The number in an option such as "s2", which may occur once; nothing when the field is another option.
  std::optional<int> number(std::string_view field, std::string_view prefix, int min, int max) {
    if (!begins(field, prefix)) return {};
    once(field, prefix);
    return in_field(
        field, [&] { return static_cast<int>(number_after(prefix, field.substr(prefix.size()), min, max)); });
  }

  /// The element type in an option such as "kve4m3", which may occur once; nothing when it is another.
  std::optional<DType> type(std::string_view field, std::string_view prefix) {
    if (!field.starts_with(prefix)) return {};
    for (const DTypeInfo& info : dtypes()) {
      if (field.substr(prefix.size()) != info.name) continue;
      once(field, prefix);
      return info.dtype;
    }
    return {};
  }

  /// The two numbers in a field such as "map128x64"; "map128" means "map128x128".
  std::optional<std::array<int, 2>> pair(std::string_view field, std::string_view prefix) {
    if (!begins(field, prefix)) return {};
    once(field, prefix);
    const auto parts = split(field.substr(prefix.size()), 'x');
    if (parts.size() > 2) unknown(field);
    const auto number = [&](std::string_view part) {
      return static_cast<int>(number_after(prefix, part, 1, 1 << 20));  // which of these, validate() says
    };
    return in_field(field, [&] { return std::array{number(parts.front()), number(parts.back())}; });
  }

  /// The text in braces of a field such as "mask{kv <= q}", which may occur once.
  std::optional<std::string_view> program(std::string_view field, std::string_view name) {
    if (!field.starts_with(name) || !field.substr(name.size()).starts_with('{')) return {};
    once(field, name);
    if (!field.ends_with('}'))
      refuse("the {} {} has the field {}, whose '{{' has no '}}' at its end; {}", what_, quoted(text_),
             quoted(field), allowed_());
    return field.substr(name.size() + 1, field.size() - name.size() - 2);
  }

  /// Notes an option that may occur once, in any spelling.
  void once(std::string_view field, std::string_view name) {
    if (std::find(seen_.begin(), seen_.end(), name) != seen_.end()) {
      refuse("the {} {} says twice what {} says; {}", what_, quoted(text_), quoted(field), allowed_());
    }
    seen_.push_back(name);
  }

  [[noreturn]] void misplaced(std::string_view field, std::string_view expected) const {
    refuse("the {} {} has {} where {} and a number should stand; {}", what_, quoted(text_), quoted(field),
           quoted(expected), allowed_());
  }

  [[noreturn]] void unknown(std::string_view field) const {
    refuse("the {} {} has the unknown field {}; {}", what_, quoted(text_), quoted(field), allowed_());
  }

  /// Validates the value that the whole text describes.
  template <class Value>
  void validate(const Value& value) const {
    try {
      value.validate();
    } catch (const Error& error) {
      refuse("the {} {} is out of range: {}", what_, quoted(text_), error.message());
    }
  }

 private:
  /// The pieces between the ':' outside of braces.
  static std::vector<std::string_view> fields_of(std::string_view text) {
    std::vector<std::string_view> fields;
    for (std::size_t begin = 0, at = 0;; ++at) {
      if (at < text.size() && text[at] == '{') at = std::min(text.find('}', at), text.size());
      if (at < text.size() && text[at] != ':') continue;
      fields.push_back(text.substr(begin, at - begin));
      if (at >= text.size()) return fields;
      begin = at + 1;
    }
  }

  /// A prefix ends where the letters end: "s" does not begin "split".
  static bool begins(std::string_view field, std::string_view prefix) {
    if (!field.starts_with(prefix)) return false;
    return field.size() == prefix.size() ||
           std::isalpha(static_cast<unsigned char>(field[prefix.size()])) == 0;
  }

  static std::int64_t number_after(std::string_view prefix, std::string_view text, std::int64_t min,
                                   std::int64_t max) {
    return parse_int(text, fmt::format("the number after {}", quoted(prefix)), min, max);
  }

  std::string_view what_, text_;
  std::string (*allowed_)();
  std::vector<std::string_view> fields_;
  std::vector<std::string_view> seen_;
  std::size_t next_ = 0;
};

// What a text may have, for messages.

std::string spec_allowed() {
  std::string allowed =
      "write [fwd:|bwd:|append:|merge:|quantize:]fp16|bf16|fp32:d<dim>[x<dim of V>] and then, each at most "
      "once, score{<program>}, a mask (causal or causal_top_left or mask{<program>}), map<queries>x<keys>, "
      "pages<rows>, kv<e4m3|e5m2|int8>, kv{<format>}, k{<format>}, v{<format>}";
  for (const plan::SpecOption& option : plan::kSpecOptions) allowed += fmt::format(", {}", option.text);
  return allowed;
}
std::string shape_allowed() {
  return "write b<batch>:hq<query heads>:hkv<KV heads>:sq<queries>:skv<keys>, such as "
         "b2:hq32:hkv8:sq4096:skv4096";
}
std::string config_allowed() {
  std::string allowed = "write <family>:br<rows>:bc<rows>:w<warps> and then, each at most once";
  for (const plan::ConfigSwitch& one : plan::kConfigSwitches)
    allowed += one.on ? fmt::format(", {}", one.text) : fmt::format(", {}<1 to {}>", one.text, one.max);
  return allowed;
}

/// "k{<format>}", "v{<format>}", or of both "kv{<format>}" and, of 8 bits with scales at the call, "kve4m3".
bool read_format(FieldReader& reader, std::string_view field, AttentionSpec& spec) {
  const auto set = [&](KvFormat& to, const char* what, std::string_view text) {
    reader.once(field, what);
    to = reader.in_field(field, [&] { return parse_kv_format(text); });
  };
  const auto set_both = [&](std::string_view text) {
    set(spec.kv.k_format, "the format of K", text);
    set(spec.kv.v_format, "the format of V", text);
  };
  if (const auto both = reader.program(field, "kv"))
    set_both(*both);
  else if (const auto k = reader.program(field, "k"))
    set(spec.kv.k_format, "the format of K", *k);
  else if (const auto v = reader.program(field, "v"))
    set(spec.kv.v_format, "the format of V", *v);
  else if (const auto type = reader.type(field, "kv"); type && size_of(*type) == 1)
    set_both(to_string(*type));
  else if (type && *type != spec.dtype)
    reader.in_field(field, [&] {
      refuse(
          "K and V are {} and Q is {}; they have the type of Q, or are quantized, such as e4m3, e5m2 or int8",
          to_string(*type), to_string(spec.dtype));
    });
  else
    return type.has_value();
  return true;
}

void read_option(FieldReader& reader, std::string_view field, AttentionSpec& spec) {
  for (const plan::SpecOption& option : plan::kSpecOptions) {
    if (field != option.text) continue;
    const bool is_layout = field == "kvlen" || field == "cache";  // which one text may name once
    reader.once(field, is_layout ? "the layout of K and V" : field);
    return option.turn_on(spec);
  }
  if (const auto blocks = reader.pair(field, "map")) {
    spec.block_map = {(*blocks)[0], (*blocks)[1]};
  } else if (const auto page_size = reader.number(field, "pages", 1, kMostPageSize)) {
    reader.once(field, "the layout of K and V");
    spec.kv.kind = KvLayout::Kind::paged;
    spec.kv.page_size = *page_size;
  } else if (read_format(reader, field, spec)) {
    return;
  } else if (field == "causal" || field == "causal_top_left") {
    reader.once(field, "mask");
    spec.mask = MaskProgram(field);
  } else if (const auto score = reader.program(field, "score")) {
    spec.score = reader.in_field(field, [&] { return ScoreProgram(*score); });
  } else if (const auto mask = reader.program(field, "mask")) {
    spec.mask = reader.in_field(field, [&] { return MaskProgram(*mask); });
  } else {
    reader.unknown(field);
  }
}

/// The formats of K and V for messages.
std::string format_text(const AttentionSpec& spec) {
  const auto text = [&](const KvFormat& format) {
    return format.quantized() ? to_string(format) : to_string(spec.dtype);
  };
  const std::string k = text(spec.kv.k_format), v = text(spec.kv.v_format);
  return k == v ? k : fmt::format("{} and {}", k, v);
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
  if (!spec.q_codes) return;
  if (!spec.has_scales())
    refuse(
        "q_codes is set, but K and V are {}; set kv.k_format and kv.v_format to e4m3 or e5m2, which Q is "
        "then, "
        "too, or leave it out",
        format_text(spec));
  if (spec.kv_type() == DType::int8)
    refuse("q_codes is set and K and V are int8; products of 8 bits are those of e4m3 and e5m2");
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

void read_option(FieldReader& reader, std::string_view field, TileConfig& config) {
  for (const plan::ConfigSwitch& one : plan::kConfigSwitches) {
    if (one.on && reader.flag(field, one.text)) {
      config.*one.on = true;
      return;
    }
    if (!one.number) continue;
    if (const auto number = reader.number(field, one.text, 1, one.max)) {
      config.*one.number = *number;
      return;
    }
  }
  reader.unknown(field);
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
  if (spec.sinks)
    refuse(
        "running_state is set beside sinks; a sink counts once, so give the sinks to the call that makes the "
        "first state");
}

/// What has no tangent, or none yet.
void refuse_without_tangent(const AttentionSpec& spec) {
  const char* option = spec.kv.is_cache()           ? "a cache"
                       : spec.kv.quantized()        ? "quantized K and V"
                       : spec.indices               ? "indices"
                       : spec.partial.running_state ? "running_state"
                       : spec.row_max               ? "row_max"
                                                    : nullptr;
  if (option)
    refuse(
        "the pass is jvp and {} is set; tangents are for K and V as tensors of Q's type, so leave it out or "
        "call the forward pass",
        option);
}

}  // namespace

bool plan::names_pass(std::string_view spec_text) {
  const std::string_view first = spec_text.substr(0, spec_text.find(':'));
  return first == "fwd" || first == "bwd" || first == "append" || first == "merge" || first == "quantize" ||
         first == "jvp";
}

DType AttentionSpec::kv_type() const {
  const bool reads_codes = kv.k_format.is_plain_8bit() && kv.k_format == kv.v_format && !kv.shared_kv;
  return reads_codes ? stored_k().type : dtype;
}

StoredKvRow AttentionSpec::stored_k() const { return stored_row(*this, kv.k_format, head_dim); }
StoredKvRow AttentionSpec::stored_v() const {
  if (kv.shared_kv && kv.k_format.quantized()) return stored_k();  // the same rows
  return stored_row(*this, kv.v_format, v_dim());
}

AttentionSpec AttentionSpec::normalized() const {
  AttentionSpec out = *this;
  out.head_dim_v = v_dim();
  if (dtype == DType::fp32)
    out.partial.fp32_out = out.partial.fp32_grads = false;
  else if (partial.add_grads)
    out.partial.fp32_grads = true;
  expr::declare_float_scalars(out.score, out.mask);
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
                    .key_scales = kv.key_scales},
             .varlen = varlen},
            pass};
  if (pass == Pass::merge) return {{.dtype = dtype, .head_dim = v_dim(), .head_dim_v = v_dim()}, pass};
  if (pass == Pass::quantize)
    return {
        {.dtype = dtype, .head_dim = head_dim, .head_dim_v = head_dim, .kv = KvLayout{}.with(kv.k_format)},
        pass};
  KernelSpec out{AttentionSpec::normalized(), pass};
  // Passes without gradients are deterministic without being asked.
  if (pass != Pass::backward) out.deterministic = out.partial.fp32_grads = out.partial.add_grads = false;
  if (pass == Pass::jvp) out.batch_invariant = out.kv.shared_kv = false;
  if (pass == Pass::backward)
    out.row_max = out.batch_invariant = out.kv.shared_kv = out.partial.fp32_out = out.partial.running_state =
        false;
  return out;
}

void AttentionSpec::validate() const {
  parse_dtype(to_string(dtype));  // refuses numbers that a cast made an enumerator
  require_multiple("head_dim", head_dim, kHeadDimStep, kMinHeadDim, plan::kMaxHeadDim);
  require_multiple("head_dim_v", v_dim(), kHeadDimStep, kMinHeadDim, kMaxHeadDimV);
  expr::declarations(score, mask);  // refuses what they disagree on
  if (varlen && kv.is_padded())
    refuse(
        "varlen and kv_lengths are both set; with varlen a sequence's own length says how many keys it has, "
        "so leave kv_lengths out");
  if (kv.kind > KvLayout::Kind::paged) refuse("kv.kind is {}; it has no name", static_cast<int>(kv.kind));
  if (kv.is_paged() ? kv.page_size < 1 || kv.page_size > kMostPageSize : kv.page_size != 0)
    refuse("kv.page_size is {}; it must be the tokens of a page, 1 or more, in a paged cache, and else 0",
           kv.page_size);
  check_formats(*this);
  if (kv.shared_prefix && (!kv.is_paged() || !varlen))
    refuse(
        "shared_prefix is set without {}; it is for packed queries over pages, so set that, too, or leave it "
        "out",
        kv.is_paged() ? "varlen" : "pages");
  check_running_state(*this);
  if (indices && (has_block_map() || dropout || q_codes))
    refuse_beside_indices(has_block_map() ? "block_map" : dropout ? "dropout" : "q_codes");
  if (partial.dropout_place && !dropout)
    refuse("dropout_place is set without dropout, whose mask it is about; set dropout, or leave it out");
  if (kv.shared_kv && v_dim() > head_dim)
    refuse(
        "shared_kv is set, head_dim is {} and head_dim_v is {}; V is then K's first columns, of which there "
        "are "
        "at most head_dim",
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
  AttentionSpec::validate();
  if (pass == Pass::quantize && !kv.k_format.quantized())
    refuse("the pass is quantize and K and V are {}; set kv.k_format to e4m3, e5m2 or int8",
           format_text(*this));
  if (pass == Pass::append && !kv.is_cache())
    refuse("the pass is append and the spec has no cache: set kv to KvLayout::paged(page_size) or slots()");
  if (pass == Pass::jvp) refuse_without_tangent(*this);
  if (pass != Pass::backward) return;
  if (kv.is_cache())
    refuse(
        "the pass is backward and {} is set; the backward pass needs K and V as tensors without pages and "
        "slots, so leave it out",
        kv.is_paged() ? "pages" : "cache");
  if (kv.quantized())
    refuse("the pass is backward and K and V are {}; the backward pass needs them in the type of Q{}",
           format_text(*this), q_codes ? " and Q in that of O" : "");
  if (indices && deterministic) refuse_beside_indices("deterministic");
}

void AttentionShape::validate() const {
  require_count("batch", batch, kMaxInt);
  require_count("heads_q", heads_q, kMaxInt);
  require_count("heads_kv", heads_kv, kMaxInt);
  require_count("seqlen_q", seqlen_q, kMaxLength);
  require_count("seqlen_kv", seqlen_kv, kMaxLength);
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

namespace {

/// The text of a normalized spec.
std::string text_of(const AttentionSpec& spec) {
  std::string out = fmt::format("{}:d{}", to_string(spec.dtype), spec.head_dim);
  const auto append = [&]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
  };
  if (spec.head_dim_v != spec.head_dim) append("x{}", spec.head_dim_v);
  const KvFormat &k = spec.kv.k_format, &v = spec.kv.v_format;
  if (k == v && k.is_plain_8bit()) {
    append(":kv{}", to_string(k));
  } else if (k == v && k.quantized()) {
    append(":kv{{{}}}", to_string(k));
  } else {
    if (k.quantized()) append(":k{{{}}}", to_string(k));
    if (v.quantized()) append(":v{{{}}}", to_string(v));
  }
  if (!spec.score.empty()) append(":score{{{}}}", spec.score.text());
  if (plan::is_causal(spec.mask)) {  // a spec has these by their names
    append(":{}", spec.mask.text());
  } else if (!spec.mask.empty()) {
    append(":mask{{{}}}", spec.mask.text());
  }
  for (const plan::SpecOption& option : plan::kSpecOptions) {
    if (option.text == "det" && spec.has_block_map())
      append(":map{}x{}", spec.block_map.q, spec.block_map.kv);
    if (option.text == "cache" && spec.kv.is_paged()) {
      append(":pages{}", spec.kv.page_size);  // which says that it is a cache
    } else if (option.is_on(spec)) {
      append(":{}", option.text);
    }
  }
  return out;
}

}  // namespace

std::string to_string(const AttentionSpec& spec) { return text_of(spec.normalized()); }

std::string to_string(const KernelSpec& spec) {
  return fmt::format("{}:{}", to_string(spec.pass), text_of(spec.normalized()));
}

std::string to_string(const AttentionShape& s) {
  return fmt::format("b{}:hq{}:hkv{}:sq{}:skv{}", s.batch, s.heads_q, s.heads_kv, s.seqlen_q, s.seqlen_kv);
}

std::string to_string(const TileConfig& config) {
  const TileConfig defaults;
  std::string out =
      fmt::format("{}:br{}:bc{}:w{}", to_string(config.family), config.br, config.bc, config.warps);
  for (const plan::ConfigSwitch& one : plan::kConfigSwitches) {
    if (one.value(config) == one.value(defaults)) continue;
    out += fmt::format(":{}", one.text);
    if (one.number) out += fmt::format("{}", config.*one.number);
  }
  return out;
}

KernelSpec parse_spec(std::string_view text) {
  FieldReader reader("spec", text, spec_allowed);
  KernelSpec spec;
  if (plan::names_pass(text)) spec.pass = parse_pass(reader.take("the pass"));

  const std::string_view dtype = reader.take("the element type");
  spec.dtype = reader.in_field(dtype, [&] { return parse_dtype(dtype); });

  const std::string_view dims = reader.take("the head dimension");
  const auto head_dims = reader.pair(dims, "d");
  if (!head_dims) reader.misplaced(dims, "d");
  spec.head_dim = (*head_dims)[0];
  spec.head_dim_v = (*head_dims)[1];

  while (!reader.done()) read_option(reader, reader.take("a field"), spec);
  reader.validate(spec);
  return {spec.AttentionSpec::normalized(), spec.pass};  // with what the other pass has, such as `det`
}

AttentionShape parse_shape(std::string_view text) {
  FieldReader reader("shape", text, shape_allowed);
  AttentionShape shape;
  shape.batch = reader.take_number("b", 0, kMaxInt);
  shape.heads_q = reader.take_number("hq", 0, kMaxInt);
  shape.heads_kv = reader.take_number("hkv", 0, kMaxInt);
  shape.seqlen_q = reader.take_number("sq", 0, kMaxLength);
  shape.seqlen_kv = reader.take_number("skv", 0, kMaxLength);
  if (!reader.done()) reader.unknown(reader.peek());
  reader.validate(shape);
  return shape;
}

TileConfig parse_config(std::string_view text) {
  FieldReader reader("tile configuration", text, config_allowed);
  TileConfig config;
  const std::string_view family = reader.take("the kernel family");
  config.family = reader.in_field(family, [&] { return parse_family(family); });
  config.br = static_cast<int>(reader.take_number("br", 1, 1024));
  config.bc = static_cast<int>(reader.take_number("bc", 1, 1024));
  config.warps = static_cast<int>(reader.take_number("w", 1, 32));
  while (!reader.done()) read_option(reader, reader.take("a field"), config);
  return config;
}

}  // namespace flashjit

// Specs, shapes, tile configurations as text, and back.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"
#include "plan/analysed_spec.hpp"
#include "plan/config_switches.hpp"
#include "plan/spec_options.hpp"
#include "support/dtypes.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit {
namespace {

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
    const auto [before, is_new] = seen_.try_emplace(name, field);
    if (is_new) return;
    if (before->second == field) refuse("the {} {} has {} twice", what_, quoted(text_), quoted(field));
    refuse("the {} {} has both {} and {}, which exclude each other; give one", what_, quoted(text_),
           quoted(before->second), quoted(field));
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
  std::map<std::string_view, std::string_view> seen_;  // by what they say
  std::size_t next_ = 0;
};

// What a text may have, for messages.

std::string spec_allowed() {
  std::string allowed =
      "write [fwd:|bwd:|jvp:|bwd_jvp:|append:|merge:|quantize:]fp16|bf16|fp32:d<dim>[x<dim of V>] and then, "
      "each at "
      "most "
      "once, score{<program>}, a mask (causal or causal_top_left or mask{<program>}), out_mod{<program>}, "
      "q_mod{<program>}, k_mod{<program>}, out{<format>}, "
      "map<queries>x<keys>, "
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
    // What one text may name once.
    const bool is_layout = field == "kvlen" || field == "cache", is_sums = field.starts_with("sums");
    reader.once(field, is_layout ? "the layout of K and V" : is_sums ? "pv_sums" : field);
    return option.turn_on(spec);
  }
  if (const auto blocks = reader.pair(field, "map")) {
    spec.block_map = {(*blocks)[0], (*blocks)[1]};
  } else if (const auto page_size = reader.number(field, "pages", 1, plan::kMostPageSize)) {
    reader.once(field, "the layout of K and V");
    spec.kv.kind = KvLayout::Kind::paged;
    spec.kv.page_size = *page_size;
  } else if (read_format(reader, field, spec)) {
    return;
  } else if (field == "causal" || field == "causal_top_left") {
    reader.once(field, "mask");
    spec.mask = MaskProgram(field);
  } else if (const auto score = reader.program(field, "score")) {
    const bool is_weight = spec.score.is_weight();  // which the text may say first
    spec.score = reader.in_field(field, [&] { return ScoreProgram(*score); });
    if (is_weight) spec.score = weights(spec.score);
  } else if (const auto mask = reader.program(field, "mask")) {
    spec.mask = reader.in_field(field, [&] { return MaskProgram(*mask); });
  } else if (const auto out_mod = reader.program(field, "out_mod")) {
    spec.epilogue.out_mod = reader.in_field(field, [&] { return OutProgram(*out_mod); });
  } else if (const auto out = reader.program(field, "out")) {
    spec.epilogue.out_format = reader.in_field(field, [&] { return parse_kv_format(*out); });
  } else if (const auto q_mod = reader.program(field, "q_mod")) {
    spec.prologue.q_mod = reader.in_field(field, [&] { return RowProgram(*q_mod); });
  } else if (const auto k_mod = reader.program(field, "k_mod")) {
    spec.prologue.k_mod = reader.in_field(field, [&] { return RowProgram(*k_mod); });
  } else {
    reader.unknown(field);
  }
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
  if (!spec.epilogue.out_mod.empty()) append(":out_mod{{{}}}", spec.epilogue.out_mod.text());
  if (spec.epilogue.out_format.quantized()) append(":out{{{}}}", to_string(spec.epilogue.out_format));
  if (!spec.prologue.q_mod.empty()) append(":q_mod{{{}}}", spec.prologue.q_mod.text());
  if (!spec.prologue.k_mod.empty()) append(":k_mod{{{}}}", spec.prologue.k_mod.text());
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

bool plan::names_pass(std::string_view spec_text) {
  const std::string_view first = spec_text.substr(0, spec_text.find(':'));
  return first == "fwd" || first == "bwd" || first == "append" || first == "merge" || first == "quantize" ||
         first == "jvp" || first == "bwd_jvp";
}

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
  shape.batch = reader.take_number("b", 0, plan::kMostOfACount);
  shape.heads_q = reader.take_number("hq", 0, plan::kMostOfACount);
  shape.heads_kv = reader.take_number("hkv", 0, plan::kMostOfACount);
  shape.seqlen_q = reader.take_number("sq", 0, plan::kMaxLength);
  shape.seqlen_kv = reader.take_number("skv", 0, plan::kMaxLength);
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

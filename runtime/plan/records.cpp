#include "plan/records.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "flashjit/error.hpp"
#include "support/file.hpp"
#include "support/json.hpp"
#include "support/refuse.hpp"
#include "support/text.hpp"

namespace flashjit::plan {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 1;

/// One object of the record; every field is there and has its type, or Error(io) names it.
class ObjectReader {
 public:
  explicit ObjectReader(const Json& json) : json_(json) {
    if (!json.is_object()) damaged("an object should stand where there is {}", json.type_name());
  }

  const Json& get(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end()) damaged("'{}' is missing", name);
    return *found;
  }

  std::string text(const char* name) const {
    const Json& value = get(name);
    if (!value.is_string()) wrong_type(name, value, "a string");
    return value.get<std::string>();
  }

  double milliseconds(const char* name) const {
    const Json& value = get(name);
    if (!value.is_number()) wrong_type(name, value, "a number");
    const double ms = value.get<double>();
    if (!std::isfinite(ms) || ms < 0) damaged("'{}' is {}; it must be finite and not negative", name, ms);
    return ms;
  }

  int count(const char* name) const {
    const Json& value = get(name);
    if (!value.is_number_integer()) wrong_type(name, value, "an integer");
    const auto number = value.get<std::int64_t>();
    if (number < 0 || number > std::numeric_limits<int>::max())
      damaged("'{}' is {}; it must not be negative and must fit 31 bits", name, value.dump());
    return static_cast<int>(number);
  }

  const Json& array(const char* name) const {
    const Json& value = get(name);
    if (!value.is_array()) wrong_type(name, value, "an array");
    return value;
  }

  /// A field in one of the textual forms that flashjit's own parsers read.
  template <class Parse>
  auto parsed(const char* name, Parse parse) const {
    const std::string value = text(name);
    try {
      return parse(value);
    } catch (const Error& error) {
      damaged("'{}' cannot be read: {}", name, error.message());
    }
  }

 private:
  [[noreturn]] static void wrong_type(const char* name, const Json& value, const char* expected) {
    damaged("'{}' is {} where {} should stand", name, value.type_name(), expected);
  }

  const Json& json_;
};

/// Text that may be a folder's name: architectures name folders.
std::string checked_arch(std::string_view arch) {
  const bool safe = arch.starts_with("sm_") && arch.size() <= 16 &&
                    std::all_of(arch.begin() + 3, arch.end(),
                                [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z'); });
  if (!safe || arch.size() == 3) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the architecture is {}; it must be like sm_80 or sm_90a", quoted(arch)));
  }
  return std::string(arch);
}

Json to_value(const Timing& timing) {
  Json out{{"config", to_string(timing.config)}, {"ms", timing.ms}};
  if (!timing.skipped.empty()) out["skipped"] = timing.skipped;
  if (timing.registers > 0) out["registers"] = timing.registers;
  if (timing.spill_bytes > 0) out["spill_bytes"] = timing.spill_bytes;
  return out;
}

Timing timing_of(const Json& json) {
  const ObjectReader reader(json);
  Timing out;
  out.config = reader.parsed("config", parse_config);
  out.ms = reader.milliseconds("ms");
  if (json.contains("skipped")) out.skipped = reader.text("skipped");
  if (json.contains("registers")) out.registers = reader.count("registers");
  if (json.contains("spill_bytes")) out.spill_bytes = reader.count("spill_bytes");
  return out;
}

TuningRecord record_of(const std::string& text) {
  const Json json = parse_json(text);
  const ObjectReader reader(json);
  if (reader.get("format") != kFormat) {
    damaged("'format' is {}; this version reads format {}", quoted(reader.get("format").dump()), kFormat);
  }
  TuningRecord out;
  out.spec = reader.parsed("spec", parse_spec);
  out.shape = reader.parsed("shape", parse_shape);
  out.arch = reader.parsed("arch", checked_arch);
  out.device = reader.text("device");
  out.driver = reader.text("driver");
  out.nvrtc = reader.text("nvrtc");
  out.library = reader.text("library");
  out.best = reader.parsed("best", parse_config);
  for (const Json& timing : reader.array("timings")) out.timings.push_back(timing_of(timing));
  return out;
}

/// Letters, digits, '_' and '-' only, at most kLongest of them; what that loses, a digest keeps apart.
std::string file_stem(const std::string& text) {
  constexpr std::size_t kLongest = 120;
  bool lossless = text.size() <= kLongest;
  std::string out = text.substr(0, kLongest);
  for (char& c : out) {
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_') continue;
    lossless = lossless && c == ':';
    c = '-';
  }
  if (!lossless) {
    const XXH128_hash_t digest = XXH3_128bits(text.data(), text.size());
    out += fmt::format("-{:016x}{:016x}", digest.high64, digest.low64);
  }
  return out;
}

/// What could not be read again must not be written.
void require_readable(const std::string& json) {
  try {
    record_of(json);
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_argument, "the tuning record cannot be written: " + error.message());
  }
}

/// Two tensors of Q are loaded in another way than one; all else is the same.
std::string problem_key(KernelSpec spec, const std::string& arch) {
  spec.prologue.q_rope = false;
  return fmt::format("{}/{}", arch, to_string(spec));
}

/// |log2| of the ratio of two sizes, up to where larger ones are all alike; an empty size counts as one.
double log_ratio(std::int64_t a, std::int64_t b, std::int64_t alike) {
  const auto log = [&](std::int64_t size) {
    return std::log2(static_cast<double>(std::clamp<std::int64_t>(size, 1, alike)));
  };
  return std::abs(log(a) - log(b));
}

constexpr std::int64_t kLong = 16384;  // a loop this long hides its beginning and end
constexpr std::int64_t kManyRows = std::int64_t{128} * 132 * 32;  // many waves of blocks on a large GPU
constexpr int kUsualTile = 128;

/// In octaves of a length.
double distance(const AttentionShape& a, const AttentionShape& b) {
  // In floating point: the product of a record's sizes may leave 64 bits.
  const auto rows = [](const AttentionShape& shape) {
    const double product = static_cast<double>(shape.batch) * static_cast<double>(shape.heads_q) *
                           static_cast<double>(shape.seqlen_q);
    return static_cast<std::int64_t>(std::min(product, static_cast<double>(kManyRows)));
  };
  const auto group = [](const AttentionShape& shape) {
    return shape.heads_q / std::max<std::int64_t>(shape.heads_kv, 1);
  };
  const auto ragged = [](std::int64_t length) { return length % kUsualTile != 0; };
  const double raggedness =
      0.25 * ((ragged(a.seqlen_q) != ragged(b.seqlen_q)) + (ragged(a.seqlen_kv) != ragged(b.seqlen_kv)));
  return log_ratio(a.seqlen_q, b.seqlen_q, kLong) + log_ratio(a.seqlen_kv, b.seqlen_kv, kLong) +
         log_ratio(rows(a), rows(b), kManyRows) + 0.25 * log_ratio(group(a), group(b), kLong) + raggedness;
}

/// Twice the length with as many heads is near. Beyond, a heuristic knows more, as waves and padding are
/// others: a study on an H100 found its choice for such shapes within 2% of the best, the record's up to 29%
/// slower.
constexpr double kTooFar = 3.1;
/// What ships is for the shapes of common models and hardly others: there the heuristic was made.
constexpr double kTooFarShipped = 0.3;

// What a record is further away for, in the same unit.
constexpr double kOtherDevice = 1.0, kOtherVersion = 0.25, kOtherType = 0.5, kShipped = 2.0;

/// A name that is not known is no other device: of one built by hand it is the architecture.
bool same_device(const TuningRecord& record, const DeviceInfo& device) {
  return record.device.empty() || device.name == device.arch || record.device == device.name;
}

/// A driver that is not known, of a device built by hand or of a record, is no other.
bool same_versions(const TuningRecord& record, const DeviceInfo& device) {
  const bool same_driver = record.driver.empty() || device.driver.empty() || record.driver == device.driver;
  return same_driver && (record.library.empty() || record.library == library_version());
}

/// The spec with the other 16-bit type: its kernels differ in an operand of the same instructions.
std::optional<KernelSpec> twin(KernelSpec spec) {
  if (spec.dtype == DType::fp16)
    spec.dtype = DType::bf16;
  else if (spec.dtype == DType::bf16)
    spec.dtype = DType::fp16;
  else
    return {};
  return spec;
}

}  // namespace

std::string to_json(const TuningRecord& record) {
  Json timings = Json::array();
  for (const Timing& timing : record.timings) timings.push_back(to_value(timing));
  const nlohmann::ordered_json out{
      {"format", kFormat},     {"spec", to_string(record.spec)}, {"shape", to_string(record.shape)},
      {"arch", record.arch},   {"device", record.device},        {"driver", record.driver},
      {"nvrtc", record.nvrtc}, {"library", record.library},      {"best", to_string(record.best)},
      {"timings", timings},
  };
  // A device's name is not ours: bytes that are no UTF-8 are replaced rather than refused.
  return out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

TuningRecord parse_record(const std::string& json) {
  constexpr const char* kMessage = "the tuning record is damaged: {:.300}; delete it and tune again";
  try {
    return record_of(json);
  } catch (const Json::exception& error) {
    damaged(kMessage, printable(error.what()));
  } catch (const Error& error) {
    damaged(kMessage, error.message());
  }
}

std::filesystem::path record_path(const TuningRecord& record) {
  return std::filesystem::path(checked_arch(record.arch)) /
         (file_stem(fmt::format("{}__{}", to_string(record.spec), to_string(record.shape))) + ".json");
}

void write_record(const std::filesystem::path& folder, const TuningRecord& record) {
  const std::string json = to_json(record);
  require_readable(json);
  const std::filesystem::path path = folder / record_path(record);
  for (const std::filesystem::path& own : {folder.parent_path(), folder, path.parent_path()})
    if (is_link(own))
      throw Error(ErrorCode::io, fmt::format("cannot write '{}': '{}' is a link to somewhere else",
                                             path.string(), own.string()));
  if (const std::string cause = make_private_folders(path.parent_path()); !cause.empty())
    throw Error(ErrorCode::io, cause);
  write_file_atomically(path, json, Audience::user);
}

void TuningRecords::load(const std::filesystem::path& folder, std::vector<std::string>* warnings) {
  const auto warn = [&](std::string text) {
    if (warnings) warnings->push_back(std::move(text));
  };
  std::error_code error;
  if (!std::filesystem::exists(folder, error) && !error) return;  // nothing was tuned yet

  std::vector<std::filesystem::path> paths;
  std::filesystem::recursive_directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (entry->path().extension() == ".json" && entry->is_regular_file(ignored))
      paths.push_back(entry->path());
  }
  if (error)
    warn(fmt::format("cannot list the tuning records in '{}': {}", folder.string(), error.message()));

  // The order of a folder's listing is the file system's; the order of ties is not.
  std::sort(paths.begin(), paths.end());
  for (const std::filesystem::path& path : paths) {
    try {
      add(parse_record(read_file(path, kMaxJsonBytes)));
    } catch (const Error& failure) {
      warn(printable(fmt::format("passed over '{}': {}", path.string(), failure.message())));
    }
  }
}

void TuningRecords::load(const std::vector<EmbeddedFile>& files, std::vector<std::string>* warnings) {
  for (const EmbeddedFile& file : files) {
    try {
      add(parse_record(std::string(file.bytes)));
    } catch (const Error& failure) {
      if (warnings)
        warnings->push_back(printable(fmt::format("passed over '{}': {}", file.path, failure.message())));
    }
  }
}

void TuningRecords::add(TuningRecord record, Origin origin) {
  auto& records = by_problem_[problem_key(record.spec, record.arch)];
  records.push_back({std::move(record), origin});
}

TuningRecords::Match TuningRecords::find(const KernelSpec& spec, const AttentionShape& shape,
                                         const DeviceInfo& device,
                                         const std::function<bool(const TileConfig&)>& usable) const {
  Match match;
  double nearest = std::numeric_limits<double>::infinity();
  const auto look = [&](const KernelSpec& of, double further) {
    const auto found = by_problem_.find(problem_key(of, device.arch));
    if (found == by_problem_.end()) return;
    for (const auto& [record, origin] : found->second) {
      const bool same_shape = record.shape == shape;
      const bool current = same_device(record, device) && same_versions(record, device);
      const double shapes_apart = same_shape ? 0 : distance(record.shape, shape);
      if (shapes_apart > (origin == Origin::shipped ? kTooFarShipped : kTooFar)) continue;
      double far = further + shapes_apart;
      if (!same_device(record, device)) far += kOtherDevice;
      if (!same_versions(record, device)) far += kOtherVersion;
      if (origin == Origin::shipped) far += kShipped;
      const bool exact = same_shape && current && further == 0;
      if (exact && origin == Origin::own) far = -1;  // shapes of distance 0 are not all the same shape
      if (far >= nearest || (usable && !usable(record.best))) continue;
      nearest = far;
      match = {&record, same_shape && further == 0, exact};
    }
  };
  const auto look_by_type = [&](const KernelSpec& of, double further) {
    look(of, further);
    if (const auto other = twin(of)) look(*other, further + kOtherType);
  };
  look_by_type(spec, 0);
  if (spec.partial.fp32_out) {  // the products are the same
    KernelSpec plain = spec;
    plain.partial.fp32_out = false;
    look_by_type(plain, kOtherType);
  }
  return match;
}

std::size_t TuningRecords::size() const {
  std::size_t count = 0;
  for (const auto& [problem, records] : by_problem_) count += records.size();
  return count;
}

}  // namespace flashjit::plan

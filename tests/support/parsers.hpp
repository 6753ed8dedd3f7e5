// Every parser of what comes from outside, and what holds for any bytes that it is given: refused with an
// Error, or read and written so that they come back. Shared by the tests and by tests/fuzz.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cache/digest.hpp"
#include "cache/meta.hpp"
#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"
#include "plan/records.hpp"
#include "plan/shipped.hpp"
#include "support/json.hpp"
#include "tests/support/program_text.hpp"
#include "tools/parts/manifest.hpp"
#include "tools/parts/npy.hpp"
#include "tools/parts/suite.hpp"

namespace flashjit::test {

/// `reads` says whether what was read came back; an Error of this code, with a message, is a refusal.
template <class Reads>
Outcome outcome_of(ErrorCode refusal, Reads&& reads) {
  try {
    return reads() ? Outcome::read : Outcome::broken;
  } catch (const Error& error) {
    return error.code() == refusal && !error.message().empty() ? Outcome::refused : Outcome::broken;
  }
}

inline Outcome read_shape(std::string_view text) {
  return outcome_of(ErrorCode::invalid_argument, [&] {
    const AttentionShape shape = parse_shape(text);
    return parse_shape(to_string(shape)) == shape;
  });
}

inline Outcome read_config(std::string_view text) {
  return outcome_of(ErrorCode::invalid_argument, [&] {
    const TileConfig config = parse_config(text);
    return parse_config(to_string(config)) == config;
  });
}

inline Outcome read_device(std::string_view text) {
  return outcome_of(ErrorCode::invalid_argument, [&] { return DeviceInfo::parse(text).arch == text; });
}

inline Outcome read_npy(std::string_view bytes) {
  return outcome_of(ErrorCode::io, [&] {
    const npy::Array array = npy::parse(std::string(bytes), "fuzz.npy");
    return array.bytes.size() <= bytes.size() && npy::parse(npy::serialize(array), "again.npy") == array &&
           npy::to_doubles(array).size() == static_cast<std::size_t>(array.elements());
  });
}

inline Outcome read_meta(std::string_view text) {
  return outcome_of(ErrorCode::io, [&] {
    const cache::Meta meta = cache::parse_meta(std::string(text));
    return cache::parse_meta(cache::to_json(meta)) == meta;
  });
}

/// The text as the body of a meta.json that has the right digest, which bytes at random never have.
inline Outcome read_meta_body(std::string_view text) {
  std::string file;
  try {
    const nlohmann::json body = parse_json(std::string(text));
    const std::string bytes = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    file = nlohmann::json{{"format", 3}, {"digest", cache::digest_of(bytes)}, {"kernel", body}}.dump();
  } catch (const std::exception&) {
    return Outcome::refused;  // no JSON, or none that can be written again: read_meta() has met it
  }
  return read_meta(file);
}

inline Outcome read_record(std::string_view text) {
  return outcome_of(ErrorCode::io, [&] {
    const plan::TuningRecord record = plan::parse_record(std::string(text));
    return plan::parse_record(plan::to_json(record)) == record && plan::record_path(record).is_relative();
  });
}

/// Each record comes back alone: those of several devices are not written together.
inline Outcome read_shipped(std::string_view text) {
  return outcome_of(ErrorCode::io, [&] {
    return std::ranges::all_of(plan::parse_shipped(text), [](const plan::TuningRecord& record) {
      return plan::parse_shipped(plan::shipped_text({record})) == std::vector{record};
    });
  });
}

inline Outcome read_suite(std::string_view text) {
  return outcome_of(ErrorCode::invalid_argument, [&] {
    const std::vector<autotune::SuiteProblem> problems = autotune::parse_suite(text, "suite");
    std::string again;
    for (const auto& [spec, shape] : problems)
      again.append(to_string(spec))
          .append(shape ? " " : "")
          .append(shape ? to_string(*shape) : "")
          .append("\n");
    return autotune::parse_suite(again, "again") == problems;
  });
}

inline Outcome read_manifest(std::string_view text) {
  return outcome_of(ErrorCode::io, [&] {
    const std::vector<command::ManifestLine> lines = command::parse_manifest(text);
    const bool inside = std::ranges::all_of(lines, [](const command::ManifestLine& line) {
      return (std::filesystem::path("/pack") / line.path).lexically_normal().string() == "/pack/" + line.path;
    });
    return inside && command::parse_manifest(command::to_text(lines)) == lines;
  });
}

inline cache::Meta example_meta() {
  return {.arch = "sm_80",
          .spec = "fwd:bf16:d64",
          .config = "simt:br64:bc64:w8",
          .compiler = "nvrtc13.0.88",
          .source_digest = std::string(32, 'a'),
          .text = std::string(32, 'b'),
          .headers = {{"flashjit/a.cuh", std::string(32, 'c')}},
          .entries = {{.name = "forward", .header = "flashjit/a.cuh", .function = "f", .threads = 256}},
          .cubin = std::string(32, 'd'),
          .cubin_bytes = 100,
          .resources = {{.entry = "forward", .registers = 168}},
          .log = "ptxas info"};
}

inline plan::TuningRecord example_record() {
  return {.spec = parse_spec("fwd:bf16:d64:causal").normalized(),
          .shape = {2, 4, 2, 1024, 1024},
          .arch = "sm_90a",
          .device = "NVIDIA H100",
          .driver = "13.0",
          .nvrtc = "nvrtc13.0.88",
          .library = "0.1.0",
          .best = parse_config("sm80:br128:bc64:w4:s2"),
          .timings = {{parse_config("sm80:br128:bc64:w4:s2"), 1.25, ""},
                      {parse_config("sm80:br128:bc128:w8"), 0, "spills 32 bytes"}}};
}

struct Parser {
  std::string name;
  Outcome (*read)(std::string_view);
  std::vector<std::string> seeds;  ///< that it reads
};

inline std::vector<Parser> parsers() {
  const std::string meta = cache::to_json(example_meta());
  return {
      {"program",
       read_program,
       {"slopes: fp32 1d grad; score + slopes[h] * to_float(kv - q)", "w: int; q >= kv && q - kv < w",
        "50.0 * tanh(score / 50.0)", "kv / 8 <= q / 8 || (q ^ kv) % 4 == 0",
        "select(h == 0, score, -score)"}},
      {"spec",
       read_spec,
       {"fwd:bf16:d128:causal", "bwd:fp16:d64x32:dropout:map128x64:det", "bf16:d72:varlen:sinks",
        "fwd:fp32:d8:kvlen:score{score * 2.0}:mask{w: int; q - kv < w}"}},
      {"shape", read_shape, {"b2:hq32:hkv8:sq4096:skv4096", "b0:hq1:hkv1:sq0:skv1"}},
      {"config",
       read_config,
       {"sm80:br128:bc64:w4:s2", "simt:br64:bc64:w8",
        to_string(TileConfig{Family::sm90, 128, 64, 8, 2, true, 2, 2})}},
      {"device", read_device, {"sm_80", "sm_90a", "sm_120"}},
      {"npy",
       read_npy,
       {npy::serialize(npy::from_doubles(npy::Type::float32, {2, 3}, {1, 2, 3, 4, 5, 6})),
        npy::serialize(npy::from_doubles(npy::Type::int32, {}, {7})),
        npy::serialize(npy::from_doubles(npy::Type::float16, {0, 4}, {}))}},
      {"meta", read_meta, {meta}},
      {"meta_body", read_meta_body, {parse_json(meta).at("kernel").dump()}},
      {"record", read_record, {plan::to_json(example_record())}},
      {"shipped",
       read_shipped,
       {"# tuned\n" + plan::shipped_text({example_record()}),
        "arch sm_80\ndriver 12.8\n\nbwd:fp16:d64:mask{q - kv < 8} b1:hq2:hkv1:sq77:skv99 simt:br64:bc64:w8"}},
      {"suite",
       read_suite,
       {"# models\nfwd:bf16:d128:causal b1:hq8:hkv2:sq77:skv99  # the first\n\nbf16:d64\n",
        "bwd:fp16:d64:mask{w: int; q - kv < w} b0:hq1:hkv1:sq0:skv1"}},
      {"manifest",
       read_manifest,
       {command::to_text(
            {{std::string(64, '0'), "sm_90a/key/kernel.cubin"}, {std::string(64, 'f'), "..a/..b"}}),
        ""}},
  };
}

}  // namespace flashjit::test

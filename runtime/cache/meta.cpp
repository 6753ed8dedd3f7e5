#include "cache/meta.hpp"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "cache/digest.hpp"
#include "flashjit/error.hpp"
#include "support/json.hpp"
#include "support/text.hpp"

namespace flashjit::cache {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 3;

// A compiler's log may hold any bytes: those that are no UTF-8 are replaced.
std::string dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

Json entry_json(const plan::Entry& entry) {
  return {{"name", entry.name},
          {"header", entry.header},
          {"function", entry.function},
          {"threads", entry.threads},
          {"min_blocks", entry.min_blocks},
          {"cluster", entry.cluster},
          {"shared_bytes", entry.shared_bytes},
          {"hot", entry.hot},
          {"tensor_maps", entry.tensor_maps},
          {"params", entry.params},
          {"problem", entry.problem},
          {"persistent", entry.persistent}};
}

Json resources_json(const EntryResources& used) {
  return {{"entry", used.entry},
          {"registers", used.registers},
          {"spill_stores", used.spill_stores},
          {"spill_loads", used.spill_loads},
          {"stack", used.stack},
          {"static_shared", used.static_shared}};
}

int int_field(const Json& json, const char* name) {
  const Json& value = json.at(name);
  const auto number = value.is_number_integer() ? value.get<std::int64_t>() : -1;
  if (number < 0 || number > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::io, fmt::format("'{}' is not an integer from 0 to 2147483647", name));
  }
  return static_cast<int>(number);
}

std::string text_field(const Json& json, const char* name) { return json.at(name).get<std::string>(); }

plan::Entry parse_entry(const Json& json) {
  return {.name = text_field(json, "name"),
          .header = text_field(json, "header"),
          .function = text_field(json, "function"),
          .threads = int_field(json, "threads"),
          .min_blocks = int_field(json, "min_blocks"),
          .cluster = int_field(json, "cluster"),
          .shared_bytes = int_field(json, "shared_bytes"),
          .hot = json.at("hot").get<bool>(),
          .tensor_maps = json.at("tensor_maps").get<bool>(),
          .params = json.value("params", plan::Entry{}.params),  // which older caches and packs leave out
          .problem = json.value("problem", plan::Entry{}.problem),
          .persistent = json.at("persistent").get<bool>()};
}

EntryResources parse_resources(const Json& json) {
  return {.entry = text_field(json, "entry"),
          .registers = int_field(json, "registers"),
          .spill_stores = int_field(json, "spill_stores"),
          .spill_loads = int_field(json, "spill_loads"),
          .stack = int_field(json, "stack"),
          .static_shared = int_field(json, "static_shared")};
}

Meta parse_body(const Json& body) {
  Meta meta;
  meta.arch = text_field(body, "arch");
  meta.spec = text_field(body, "spec");
  meta.config = text_field(body, "config");
  meta.compiler = text_field(body, "compiler");
  meta.source_digest = text_field(body, "source_digest");
  meta.text = text_field(body, "text");
  meta.headers = body.at("headers").get<std::map<std::string, std::string>>();
  for (const Json& entry : body.at("entries")) meta.entries.push_back(parse_entry(entry));
  meta.cubin = text_field(body, "cubin");
  meta.cubin_bytes = body.at("cubin_bytes").get<std::uintmax_t>();
  for (const Json& used : body.at("resources")) meta.resources.push_back(parse_resources(used));
  meta.log = text_field(body, "log");
  return meta;
}

std::map<std::string, std::string> header_digests(const KernelSource& source) {
  std::map<std::string, std::string> digests;
  for (const Header& header : source.headers) digests[header.name] = digest_of(header.text);
  return digests;
}

/// Without the lines that tell how long ptxas took, at most as long as a meta.json may be.
std::string log_to_keep(const std::string& log) {
  constexpr std::size_t kLongest = 256 << 10;
  std::string kept;
  for (const std::string_view line : split(log, '\n')) {
    if (kept.size() + line.size() > kLongest) break;
    if (line.find("Compile time") != line.npos) continue;
    if (!kept.empty()) kept += '\n';
    kept += line;
  }
  return kept;
}

}  // namespace

Meta make_meta(const KernelSource& source, const std::string& digest, const CompiledKernel& kernel) {
  return {.arch = source.arch,
          .spec = to_string(source.spec),
          .config = to_string(source.config),
          .compiler = kernel.compiler,
          .source_digest = digest,
          .text = digest_of(source.text),
          .headers = header_digests(source),
          .entries = source.entries,
          .cubin = digest_of(kernel.cubin),
          .cubin_bytes = kernel.cubin.size(),
          .resources = kernel.resources,
          .log = log_to_keep(kernel.log)};
}

std::string to_json(const Meta& meta) {
  Json entries = Json::array(), resources = Json::array();
  for (const plan::Entry& entry : meta.entries) entries.push_back(entry_json(entry));
  for (const EntryResources& used : meta.resources) resources.push_back(resources_json(used));
  const Json body = {{"arch", meta.arch},
                     {"spec", meta.spec},
                     {"config", meta.config},
                     {"compiler", meta.compiler},
                     {"source_digest", meta.source_digest},
                     {"text", meta.text},
                     {"headers", meta.headers},
                     {"entries", entries},
                     {"cubin", meta.cubin},
                     {"cubin_bytes", meta.cubin_bytes},
                     {"resources", resources},
                     {"log", meta.log}};
  return dump({{"format", kFormat}, {"digest", digest_of(dump(body, -1))}, {"kernel", body}}, 1) + "\n";
}

Meta parse_meta(const std::string& json) {
  try {
    const Json file = parse_json(json);
    if (const int format = int_field(file, "format"); format != kFormat) {
      throw Error(ErrorCode::io,
                  fmt::format("meta.json has format {}, this flashjit reads {}", format, kFormat));
    }
    const Json& body = file.at("kernel");
    if (text_field(file, "digest") != digest_of(dump(body, -1))) {
      throw Error(ErrorCode::io, "meta.json does not match its own digest");
    }
    return parse_body(body);
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::io, fmt::format("meta.json cannot be read: {}", printable(error.what())));
  }
}

std::string difference(const Meta& meta, const KernelSource& source, const std::string& digest) {
  if (meta.arch != source.arch) return "architecture";
  if (meta.spec != to_string(source.spec)) return "spec";
  if (meta.config != to_string(source.config)) return "configuration";
  if (meta.text != digest_of(source.text)) return "source text";
  if (meta.headers != header_digests(source)) return "headers";
  if (meta.entries != source.entries) return "entries";
  if (meta.source_digest != digest) return "options";
  return {};
}

}  // namespace flashjit::cache

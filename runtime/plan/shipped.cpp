#include "plan/shipped.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <utility>

#include "flashjit/error.hpp"
#include "support/text.hpp"
#include "support/until_unload.hpp"

namespace flashjit::plan {

std::map<std::string, std::string> embedded_record_texts();  // made by tools/embed_files.cmake

namespace {

/// The lines above the records: a word, and the field it fills.
constexpr std::array kHead{std::pair{"arch", &TuningRecord::arch}, std::pair{"device", &TuningRecord::device},
                           std::pair{"driver", &TuningRecord::driver},
                           std::pair{"nvrtc", &TuningRecord::nvrtc},
                           std::pair{"library", &TuningRecord::library}};

/// Takes the last word off a line: a program in a spec may have blanks.
std::string take_last_word(std::string& line) {
  const std::size_t blank = line.rfind(' ');
  if (blank == std::string::npos)
    throw Error(ErrorCode::io,
                fmt::format("{} should be a spec, a shape and a configuration", flashjit::quoted(line)));
  std::string word = line.substr(blank + 1);
  line.resize(blank);
  return word;
}

bool read_head(const std::string& line, TuningRecord& common) {
  for (const auto& [word, field] : kHead) {
    if (!line.starts_with(std::string(word) + ' ')) continue;
    common.*field = line.substr(std::string_view(word).size() + 1);
    return true;
  }
  return false;
}

TuningRecord read_record(std::string line, const TuningRecord& common) {
  TuningRecord record = common;
  record.best = parse_config(take_last_word(line));
  record.shape = parse_shape(take_last_word(line));
  record.spec = parse_spec(line).normalized();
  return record;
}

}  // namespace

std::vector<TuningRecord> parse_shipped(std::string_view text) {
  std::vector<TuningRecord> records;
  TuningRecord common;
  for (int number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty() || line.front() == '#' || read_head(line, common)) continue;
    try {
      if (common.arch.empty())
        throw Error(ErrorCode::io, "a line 'arch sm_90a' should stand before the records");
      records.push_back(read_record(line, common));
    } catch (const Error& error) {
      throw Error(ErrorCode::io, fmt::format("line {} of the shipped records: {}", number, error.message()));
    }
  }
  return records;
}

std::string shipped_text(const std::vector<TuningRecord>& records) {
  if (records.empty())
    throw Error(ErrorCode::invalid_argument, "there are no records to ship; tune the problems first");
  std::string text;
  for (const auto& [word, field] : kHead) {
    const std::string& value = records.front().*field;
    const auto other = std::ranges::find_if(
        records, [&value, field = field](const TuningRecord& record) { return record.*field != value; });
    if (other != records.end())
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the records are of more than one {}: {} and {}; tune all again on one", word,
                              flashjit::quoted(value), flashjit::quoted((*other).*field)));
    text += fmt::format("{} {}\n", word, value);
  }
  for (const TuningRecord& record : records)
    text +=
        fmt::format("{} {} {}\n", to_string(record.spec), to_string(record.shape), to_string(record.best));
  return text;
}

const std::vector<TuningRecord>& shipped_records() {
  static const std::vector<TuningRecord>& records = until_unload([] {
    std::vector<TuningRecord> all;
    for (const auto& [name, text] : embedded_record_texts()) {
      std::vector<TuningRecord> of_file = parse_shipped(text);
      std::ranges::move(of_file, std::back_inserter(all));
    }
    return all;
  }());
  return records;
}

}  // namespace flashjit::plan

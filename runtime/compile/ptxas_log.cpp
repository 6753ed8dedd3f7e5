// Reading what ptxas prints under -v, for example:
//   ptxas info    : Compiling entry function 'flashjit_forward' for 'sm_90a'
//   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
//   ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
#include <algorithm>
#include <cctype>
#include <charconv>
#include <string_view>

#include "compile/compiler.hpp"

namespace flashjit::compile {
namespace {

// The number before `unit`; 0 when the line does not have it.
int number_before(std::string_view line, std::string_view unit) {
  const std::size_t end = line.find(unit);
  if (end == line.npos) return 0;
  std::size_t begin = end;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(line[begin - 1]))) --begin;
  int number = 0;
  std::from_chars(line.data() + begin, line.data() + end, number);
  return number;
}

// The name of the entry that the line begins to report on; empty when it begins none.
std::string_view entry_begun(std::string_view line) {
  constexpr std::string_view kBegin = "Compiling entry function '", kSymbolPrefix = "flashjit_";
  const std::size_t begin = line.find(kBegin);
  if (begin == line.npos) return {};
  std::string_view name = line.substr(begin + kBegin.size());
  name = name.substr(0, name.find('\''));
  if (name.starts_with(kSymbolPrefix)) name.remove_prefix(kSymbolPrefix.size());
  return name;
}

}  // namespace

std::vector<EntryResources> parse_ptxas_log(const std::string& log) {
  std::vector<EntryResources> resources;
  for (std::size_t begin = 0; begin < log.size();) {
    const std::size_t end = std::min(log.find('\n', begin), log.size());
    const std::string_view line = std::string_view(log).substr(begin, end - begin);
    begin = end + 1;
    if (const std::string_view name = entry_begun(line); !name.empty()) {
      resources.push_back({.entry = std::string(name)});
    }
    if (resources.empty()) continue;
    EntryResources& entry = resources.back();
    // Functions that were not inlined report after their entry: their spills are the entry's.
    entry.stack += number_before(line, " bytes stack frame");
    entry.spill_stores += number_before(line, " bytes spill stores");
    entry.spill_loads += number_before(line, " bytes spill loads");
    if (line.find("Used ") == line.npos) continue;
    entry.registers = number_before(line, " registers");
    entry.static_shared = number_before(line, " bytes smem");
  }
  return resources;
}

}  // namespace flashjit::compile

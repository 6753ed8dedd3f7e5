#include "api/c_reports.hpp"

#include <string>
#include <vector>

namespace flashjit::c_api {

void tell(const KernelReport& report, flashjit_kernel_receiver receiver, void* user) {
  if (!receiver) return;
  std::vector<flashjit_entry_report> entries;
  for (const EntryReport& entry : report.entries)
    entries.push_back(
        {entry.entry.c_str(), entry.registers, entry.spill_bytes, entry.shared_bytes, entry.threads});
  const std::string spec = to_string(report.spec), config = to_string(report.config),
                    source = to_string(report.config_source), origin = to_string(report.origin);
  const flashjit_kernel_report told{.spec = spec.c_str(),
                                    .config = config.c_str(),
                                    .config_source = source.c_str(),
                                    .key = report.key.c_str(),
                                    .origin = origin.c_str(),
                                    .render_ms = report.render_ms,
                                    .compile_ms = report.compile_ms,
                                    .load_ms = report.load_ms,
                                    .entries = entries.data(),
                                    .entry_count = entries.size()};
  receiver(user, &told);
}

}  // namespace flashjit::c_api

// The naive reference kernels of templates/auxiliary/reference.cuh as one source.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "plan/family.hpp"
#include "render/render.hpp"
#include "templates/auxiliary/reference_params.cuh"

namespace flashjit::test {

using auxiliary::kReferenceThreads;

// The entries of the reference's source, by their place.
enum ReferenceEntry : std::size_t { kFill, kForwardExact, kForwardRounded, kBackwardExact, kBackwardRounded };

inline std::vector<plan::Entry> reference_entries() {
  std::vector<plan::Entry> entries;
  for (const char* name :
       {"fill", "forward_exact", "forward_rounded", "backward_exact", "backward_rounded"}) {
    entries.push_back({.name = name,
                       .header = "flashjit/auxiliary/reference.cuh",
                       .function = "",
                       .threads = kReferenceThreads});
  }
  return entries;
}

inline std::string entry_text(const char* name, const char* params, const char* function) {
  return fmt::format(
      "extern \"C\" __global__ void flashjit_{}(const __grid_constant__ flashjit::auxiliary::{} p) {{\n"
      "  flashjit::auxiliary::{}(p);\n}}\n",
      name, params, function);
}

/// The Problem as a real kernel gets it, with the reference's entries instead of the family's.
inline KernelSource reference_source(const KernelSpec& spec, const DeviceInfo& device) {
  const plan::FamilyTraits& family = plan::simt_traits();
  KernelSource source = render::render(spec, family.heuristic(spec, {1, 1, 1, 1, 1}, device), device,
                                       render::TemplateSet::embedded());
  const std::string_view last = "}  // namespace flashjit\n";
  const std::size_t begin = source.text.find("namespace flashjit {");
  const std::size_t end = source.text.find(last, begin) + last.size();
  source.text =
      "#include \"flashjit/auxiliary/reference.cuh\"\n" + source.text.substr(begin, end - begin) + "\n" +
      entry_text("fill", "FillParams", "fill<flashjit::Problem>") +
      entry_text("forward_exact", "ReferenceParams", "reference_forward<flashjit::Problem, double>") +
      entry_text("forward_rounded", "ReferenceParams", "reference_forward<flashjit::Problem, float>") +
      entry_text("backward_exact", "ReferenceParams", "reference_backward<flashjit::Problem, double>") +
      entry_text("backward_rounded", "ReferenceParams", "reference_backward<flashjit::Problem, float>");
  source.headers.clear();
  for (const auto& [name, text] : render::TemplateSet::embedded().all())
    source.headers.push_back({name, text});
  source.entries = reference_entries();
  return source;
}

}  // namespace flashjit::test

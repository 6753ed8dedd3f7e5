// Programs' hooks in a kernel that calls each of them, without any attention around.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "expr/emit.hpp"
#include "render/render.hpp"
#include "support/built.hpp"
#include "support/file.hpp"
#include "tests/support/program_params.cuh"

namespace flashjit::test {

constexpr int kProgramThreads = 128;

/// One entry for each of the programs, in their order; `element` is the Problem's.
inline KernelSource program_source(const std::vector<expr::Trees>& programs, const std::string& arch,
                                   const std::string& element, const expr::EmitOptions& options = {}) {
  KernelSource source;
  source.arch = arch;
  source.text = "#include \"program_kernel.cuh\"\n";
  for (std::size_t i = 0; i < programs.size(); ++i) {
    source.text += fmt::format(
        "\nstruct Program{0} {{\n  using Element = {1};\n{2}}};\n"
        "extern \"C\" __global__ void __launch_bounds__({3}) flashjit_program{0}(\n"
        "    const __grid_constant__ flashjit::test::ProgramParams p) {{\n"
        "  flashjit::test::evaluate<Program{0}>(p);\n}}\n",
        i, element, emit_hooks(programs[i], options), kProgramThreads);
    source.entries.push_back(
        {.name = fmt::format("program{}", i), .header = "", .function = "", .threads = kProgramThreads});
  }
  for (const auto& [name, text] : render::TemplateSet::embedded().all())
    source.headers.push_back({name, text});
  for (const char* name : {"program_kernel.cuh", "program_params.cuh"})
    source.headers.push_back({name, read_file(test::sources() + "/tests/support/" + name)});
  return source;
}

}  // namespace flashjit::test

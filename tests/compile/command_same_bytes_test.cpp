// A cubin's bytes are a function of its source: nothing that the process compiled before changes them. Needs
// NVRTC and no GPU.
#include <gtest/gtest.h>

#include <filesystem>

#include "compile/compiler.hpp"
#include "plan/plan.hpp"
#include "render/render.hpp"
#include "tests/support/run_command.hpp"

namespace flashjit {
namespace {

constexpr const char* kShape = "b4:hq32:hkv8:sq4096:skv4096";

KernelSource source_of(const std::string& spec, const std::string& arch) {
  const DeviceInfo device = DeviceInfo::parse(arch);
  const plan::ExecutionPlan plan = plan::make_plan(parse_spec(spec), parse_shape(kShape), device, {});
  return render::render(plan.spec, plan.config, device, render::TemplateSet::embedded());
}

std::string cubin_of_new_process(const std::string& spec, const std::string& arch) {
  const test::TemporaryDirectory folder;
  const std::string arguments = "--spec " + spec + " --shape " + kShape + " --arch " + arch;
  const test::CommandResult packed =
      run_command(folder, "pack --out " + folder.file("pack") + " " + arguments);
  EXPECT_EQ(packed.code, 0) << packed.err;
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder.file("pack")))
    if (file.path().extension() == ".cubin") return read_file(file.path());
  return {};
}

TEST(SameBytes, WhateverTheProcessCompiledBefore) {
  const std::shared_ptr<const compile::Compiler> compiler = compile::Compiler::open();
  // Few registers are left in it: it spills where NVRTC optimises less.
  const std::string spec = "bwd:bf16:d128:causal", arch = "sm_90a";
  const KernelSource source = source_of(spec, arch);
  const std::string first = compiler->compile(source).cubin;
  const auto expect_same = [&](const char* after) {
    EXPECT_TRUE(compiler->compile(source).cubin == first) << "after " << after;
  };
  expect_same("itself");

  const KernelSource other = source_of("fwd:fp16:d64:dropout:score{50.0 * tanh(score / 50.0)}", "sm_80");
  compiler->compile(other);
  expect_same("another kernel");
  compiler->ptx(other);
  expect_same("PTX");
  compiler->check(other);
  expect_same("a check");
  KernelSource broken = other;
  broken.text += "\nint x = nowhere;\n";
  EXPECT_THROW(compiler->compile(broken), Error);
  EXPECT_THROW(compiler->check(broken), Error);
  expect_same("errors");

  EXPECT_TRUE(cubin_of_new_process(spec, arch) == first) << "in a process of its own";
}

}  // namespace
}  // namespace flashjit

// From a spec and a configuration to CUDA source.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "render/kernel_source.hpp"

namespace flashjit::render {

/// The templates by name ("flashjit/common/params.cuh"), as embedded at build time or read from a folder.
class TemplateSet {
 public:
  static const TemplateSet& embedded();
  /// `folder` is a copy of templates/. Throws Error(io) when it is not there or holds none.
  static TemplateSet from_folder(const std::filesystem::path& folder);
  /// Throws Error(internal) naming the template that is missing.
  const std::string& get(const std::string& name) const;
  const std::map<std::string, std::string>& all() const { return texts_; }

 private:
  std::map<std::string, std::string> texts_;
};

/// Deterministic: equal arguments give equal text. The text names no path, date or version.
KernelSource render(const plan::KernelPlan& kernel, const DeviceInfo& device, const TemplateSet& templates);
/// The kernel that the configuration's family plans for the spec.
KernelSource render(const KernelSpec& spec, const TileConfig& config, const DeviceInfo& device,
                    const TemplateSet& templates, const plan::Checks& checks = {});

}  // namespace flashjit::render

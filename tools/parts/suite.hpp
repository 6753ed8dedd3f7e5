// Suite files: the problems that `tune`, `pack` and the benches are given, as text.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flashjit/spec.hpp"

namespace flashjit::autotune {

/// A spec and, where a line has one, a shape.
struct SuiteProblem {
  KernelSpec spec;
  std::optional<AttentionShape> shape;

  bool operator==(const SuiteProblem&) const = default;
};

/// The spec of each pass that the text asks for: the one it names, else forward and backward, or forward
/// where the spec has no backward pass. Validated, normalized.
std::vector<KernelSpec> parse_passes(std::string_view spec_text);
/// "spec [shape]" a line, '#' begins a comment. Both passes where a line names none. Throws
/// Error(invalid_argument) with `name`, which is the file's, and the line.
std::vector<SuiteProblem> parse_suite(std::string_view text, std::string_view name);

}  // namespace flashjit::autotune

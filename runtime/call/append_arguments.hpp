// Arguments of append(), merge() and quantize(): what arguments.hpp does for attention.
#pragma once

#include <vector>

#include "call/arguments.hpp"
#include "templates/auxiliary/append_params.cuh"

namespace flashjit {

AttentionShape shape_of(const AttentionSpec& spec, const AppendArgs& args);
AttentionShape shape_of(const AttentionSpec& spec, const MergeArgs& args);
AttentionShape shape_of(const AttentionSpec& spec, const QuantizeArgs& args);

void check_arguments(const AttentionSpec& spec, const AppendArgs& args);
void check_arguments(const AttentionSpec& spec, const MergeArgs& args);
void check_arguments(const AttentionSpec& spec, const QuantizeArgs& args);

AppendParams make_params(const AttentionSpec& spec, const AppendArgs& args);
MergeParams make_params(const AttentionSpec& spec, const MergeArgs& args);
QuantizeParams make_params(const AttentionSpec& spec, const QuantizeArgs& args);

std::vector<NamedPointer> pointers_of(const AppendArgs& args);
std::vector<NamedPointer> pointers_of(const MergeArgs& args);
std::vector<NamedPointer> pointers_of(const QuantizeArgs& args);

}  // namespace flashjit

// The checks of a call's arguments. No driver, no allocation.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "call/captures.hpp"
#include "call/tensor_checks.hpp"
#include "flashjit/runtime.hpp"

namespace flashjit {

/// The sizes that q and k tell, with spec.varlen the sizes of the batch and its longest sequences;
/// check_arguments() says whether the others agree.
AttentionShape shape_of(const AttentionSpec& spec, const ForwardArgs& args);
AttentionShape shape_of(const AttentionSpec& spec, const BackwardArgs& args);

/// Everything that can be checked without a plan or a device, but for the captures: see captures.hpp. Throws
/// Error(invalid_argument) that names the argument, what it is, what is allowed and what to do. Returns the
/// call's shape_of().
AttentionShape check_arguments(const AttentionSpec& spec, const ForwardArgs& args);
AttentionShape check_arguments(const AttentionSpec& spec, const BackwardArgs& args);

void check_arguments(const AttentionSpec& spec, const AttentionShape& shape, const ListArgs& args);

/// Throws Error(invalid_argument) when the workspace is too small or misaligned.
void check_workspace(const Workspace& workspace, std::size_t needed);
/// The same of the memory that lists are built in.
void check_list_memory(const Workspace& memory, std::size_t needed);
/// Throws Error(invalid_argument) unless the lists were built for the call that `wanted` names, with its map.
void check_lists(const TileLists& lists, std::string_view wanted, const BlockMapView& map);

/// Throws Error(invalid_argument) when a padded length would not fit the kernels' 32-bit indices.
void check_limits(const AttentionShape& shape);

/// Every pointer that is not null.
std::vector<NamedPointer> pointers_of(const ForwardArgs& args);
std::vector<NamedPointer> pointers_of(const BackwardArgs& args);
std::vector<NamedPointer> pointers_of(const ListArgs& args);

}  // namespace flashjit

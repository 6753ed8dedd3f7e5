// The element types that a family takes.
#pragma once

#include <initializer_list>

#include "flashjit/error.hpp"
#include "flashjit/spec.hpp"

namespace flashjit::plan {

/// Whether the spec's element type is one of those that a family lists, and that of K and V the same or one
/// of `of_kv`.
Support takes_dtype(std::initializer_list<DType> listed, std::initializer_list<DType> of_kv,
                    const AttentionSpec& spec);

}  // namespace flashjit::plan

// The entries combine_parts and combine_cascade of this family.
#pragma once

#include "flashjit/sm90/layout.cuh"
#include "flashjit/tma/combine_parts.cuh"

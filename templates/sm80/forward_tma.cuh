// The forward pass whose K and V TMA copies: forward(p, maps) of forward.cuh.
#pragma once

#include "flashjit/sm80/forward.cuh"
#include "flashjit/sm80/kv_loader_tma.cuh"

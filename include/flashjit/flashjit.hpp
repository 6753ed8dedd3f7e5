// flashjit: attention kernels generated, compiled at run time, tuned and cached. This header is all of it.
#pragma once

#include "flashjit/attention_programs.hpp"
#include "flashjit/caches.hpp"
#include "flashjit/can.hpp"
#include "flashjit/distributed.hpp"
#include "flashjit/error.hpp"
#include "flashjit/expr.hpp"
#include "flashjit/pack.hpp"
#include "flashjit/patterns.hpp"
#include "flashjit/programs.hpp"
#include "flashjit/reference.hpp"
#include "flashjit/runtime.hpp"
#include "flashjit/spec.hpp"
#include "flashjit/tensor.hpp"
#include "flashjit/types.hpp"

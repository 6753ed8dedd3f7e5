/** @file
 * Kernels for a range of shapes at once, before requests come.
 */
#ifndef FLASHJIT_PREPARE_RANGE_H
#define FLASHJIT_PREPARE_RANGE_H

#include "flashjit/flashjit.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How many of the kernels are made, at first none; 0 stops it. Called in the thread that called. */
typedef int32_t (*flashjit_range_progress)(void* user, size_t made, size_t configurations);

/** flashjit_prepare() for all shapes from `first` to `last`, which have the same heads: each batch with each
 * seqlen_q and seqlen_kv. A step of 0, or no `step`, means the ends and the powers of two between them;
 * another one first, first + step and so on, and last. Compiles on all cores. Stopped by `progress` (null:
 * nobody is told) it finishes the kernels under way and returns FLASHJIT_OK; those made stay in memory and in
 * the cache. Results may be null: kernels made, configurations that the shapes choose, and the most bytes of
 * workspace that a call of these shapes needs. Refused: a size of `first` that is 0 or above that of `last`,
 * heads that differ, negative steps, more than 2^16 shapes. */
FLASHJIT_C_API flashjit_status flashjit_prepare_range(flashjit_runtime* runtime, flashjit_pass pass,
                                                      const flashjit_spec* spec, const flashjit_shape* first,
                                                      const flashjit_shape* last, const flashjit_shape* step,
                                                      flashjit_range_progress progress, void* user,
                                                      size_t* made, size_t* configurations,
                                                      size_t* workspace_bytes) FLASHJIT_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* FLASHJIT_PREPARE_RANGE_H */

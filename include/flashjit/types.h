/** @file
 * Types that all of the C interface shares: status codes, handles, and views of memory.
 */
#ifndef FLASHJIT_TYPES_H
#define FLASHJIT_TYPES_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#include "flashjit/windows_export.h"
#else
#define FLASHJIT_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#define FLASHJIT_NOEXCEPT noexcept
#else
#define FLASHJIT_NOEXCEPT
#endif

/** The CUDA driver's and the CUDA runtime's stream handle: cudaStream_t and CUstream are this type. Null is
 * the legacy default stream, however the caller was compiled. With per-thread default streams, pass
 * cudaStreamPerThread. */
struct CUstream_st;

/** One of the codes below; all but FLASHJIT_OK are errors. */
typedef int32_t flashjit_status;
enum {
  FLASHJIT_OK = 0,
  FLASHJIT_INVALID_ARGUMENT = 1, /**< the caller's values are wrong */
  FLASHJIT_UNSUPPORTED = 2,      /**< a valid request that no kernel family supports */
  FLASHJIT_NO_DRIVER = 3,        /**< libcuda is missing or too old */
  FLASHJIT_NO_DEVICE = 4,        /**< no CUDA device, no current context, or the wrong device */
  FLASHJIT_NO_COMPILER = 5,      /**< NVRTC is missing */
  FLASHJIT_COMPILE_FAILED = 6,   /**< NVRTC refused the source */
  FLASHJIT_KERNEL_MISSING = 7,   /**< compiling is off and neither a pack nor the cache has the kernel */
  FLASHJIT_IO = 8,               /**< a file could not be read or written */
  FLASHJIT_CUDA = 9,             /**< the driver returned an error */
  FLASHJIT_INTERNAL = 10         /**< a bug in flashjit, or the host ran out of memory */
};

/** The function that a kernel is for. */
typedef int32_t flashjit_pass;
enum {
  FLASHJIT_FORWARD = 0,
  FLASHJIT_BACKWARD = 1,
  FLASHJIT_APPEND = 2,
  FLASHJIT_MERGE = 3,
  FLASHJIT_QUANTIZE = 4,
  FLASHJIT_JVP = 5,
  FLASHJIT_BACKWARD_JVP = 6
};

/** Whether to compile a kernel that is in no pack and not in the cache. */
typedef int32_t flashjit_jit;
enum {
  FLASHJIT_JIT_DEFAULT = 0, /**< the environment variable FLASHJIT_JIT, else on */
  FLASHJIT_JIT_ON = 1,
  FLASHJIT_JIT_OFF = 2
};

/** An option that is on or off. */
typedef int32_t flashjit_switch;
enum {
  FLASHJIT_SWITCH_DEFAULT = 0, /**< what the option's environment variable says, else off */
  FLASHJIT_SWITCH_ON = 1,
  FLASHJIT_SWITCH_OFF = 2
};

/** Compiles, caches and launches kernels; created by flashjit_runtime_create(). */
typedef struct flashjit_runtime flashjit_runtime;
/** What is computed, parsed from text; created by flashjit_spec_create(). */
typedef struct flashjit_spec flashjit_spec;
/** Tile lists, created by flashjit_build_lists(). */
typedef struct flashjit_tile_lists flashjit_tile_lists;

/** Sizes of a problem. heads_q is a multiple of heads_kv. */
typedef struct flashjit_shape {
  int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
} flashjit_shape;

/** A GPU, as far as its kernels depend on it. Set struct_size, and let flashjit_current_device() or
 * flashjit_device_of() set the rest. */
typedef struct flashjit_device {
  size_t struct_size;
  char arch[16];              /**< what kernels are compiled for, such as "sm_90a" */
  int32_t compute_capability; /**< 80, 90, ... */
  int32_t multiprocessors;
  int32_t shared_per_block; /**< bytes: the most that one thread block may have */
  int32_t shared_per_sm;    /**< bytes */
  int32_t registers_per_sm;
  int64_t l2_bytes;
} flashjit_device;

/** A view of device memory: sizes and strides in elements, in the order batch, heads, length, dim. The last
 * stride is 1; pointer and other strides are multiples of 16 bytes. */
typedef struct flashjit_tensor {
  void* data;
  int64_t size[4];
  int64_t stride[4];
} flashjit_tensor;

/** uint8 on the device, contiguous: see BlockMapView of flashjit/tensor.hpp. */
typedef struct flashjit_block_map {
  const uint8_t* data;
  int64_t size[4];
} flashjit_block_map;

/** Which pages of K and V have a sequence's keys: int32 [sequences, columns] on the device. Key n of sequence
 * b is row n % rows of page data[b * stride + n / rows], where the spec says "pages<rows>". With "cache",
 * whose slots hold all keys of a sequence, it has one column: the slot of each. Zero: slots are in order. */
typedef struct flashjit_page_table {
  const int32_t* data;
  int64_t sequences, columns;
  int64_t stride; /**< from one sequence to the next, in elements; 0: columns */
  /** [sequences] or more on the device, as in CSR: entries lie in one row, of `columns` in all, where
   * sequence b's begin at data[starts[b]]. Give max_seqlen_kv then: its default is all entries times
   * page_size. Null: each has a row. */
  const int32_t* starts;
} flashjit_page_table;

/** Scales of quantized Q, K or V: fp32 on the device, see ScaleView of flashjit/tensor.hpp. */
typedef struct flashjit_scales {
  float* data;       /**< null: there are none */
  int64_t size[4];   /**< sequences, pages, KV heads, rows: 1, or 0, is one for all */
  int64_t stride[4]; /**< in elements; not read where the size is 1 */
} flashjit_scales;

/** Which keys each query attends to where the spec says "indices": int32 [sequences or 1, queries, KV heads,
 * top-k] on the device, with "varlen" packed like Q: [1, rows of Q, KV heads, top-k]. Each entry is a key of
 * its own, the n-th row of its sequence's K, in pages too; -1 and other numbers are no key. */
typedef struct flashjit_indices {
  const int32_t* data; /**< null: there are none */
  int64_t size[4];
  int64_t stride[4]; /**< in elements, the last 1; not read where the size is 1 */
  /** [sequences or 1, queries] on the device: how many first entries of a query's lists count; null: all. */
  const int32_t* topk_length;
  int64_t topk_length_stride[2]; /**< in elements; 0 repeats a length */
} flashjit_indices;

/** The element type of a captured tensor, if the caller states it. */
typedef int32_t flashjit_element_type;
enum {
  FLASHJIT_ELEMENT_UNTOLD = 0, /**< not checked against the program */
  FLASHJIT_ELEMENT_FP32 = 1,
  FLASHJIT_ELEMENT_FP16 = 2,
  FLASHJIT_ELEMENT_BF16 = 3,
  FLASHJIT_ELEMENT_INT32 = 4,
  FLASHJIT_ELEMENT_INT64 = 5,
  FLASHJIT_ELEMENT_INT16 = 6,
  FLASHJIT_ELEMENT_INT8 = 7,
  FLASHJIT_ELEMENT_UINT8 = 8,
  FLASHJIT_ELEMENT_BOOL = 9
};

/** The most captures of a call, 16 tensors and 8 scalars, and the most dimensions of one. */
enum { FLASHJIT_MAX_CAPTURES = 24, FLASHJIT_MAX_CAPTURE_DIMS = 6 };

/** A value for a name that a program of the spec declares: a scalar, or a tensor on the device. */
typedef struct flashjit_capture {
  const char* name;
  const void* data; /**< of a tensor, aligned to its element; null for a scalar */
  float* grad;      /**< if the program declares "grad": fp32, contiguous, added to: zero it first */
  int32_t rank;     /**< of a tensor, 1 to 6; 0: a scalar */
  flashjit_element_type type;
  int64_t size[FLASHJIT_MAX_CAPTURE_DIMS];   /**< the first `rank` count; each at least 1 */
  int64_t stride[FLASHJIT_MAX_CAPTURE_DIMS]; /**< in elements, 0 or more */
  double scalar;                             /**< an integer if declared int */
} flashjit_capture;

/** Where a call is in a larger problem's dropout mask: see DropoutPlace of flashjit/tensor.hpp. */
typedef struct flashjit_dropout_place {
  int64_t batch, head;
  int64_t heads; /**< of a batch entry there; 0: as many as here */
  int64_t q, kv;
  int64_t q_step, kv_step; /**< 0: 1 */
} flashjit_dropout_place;

/** O and LSE of the same queries over some of their keys. */
typedef struct flashjit_partial_state {
  flashjit_tensor out; /**< [batch, heads, rows, dim of V], read only */
  const float* lse;    /**< [batch, heads, rows] */
  /** In elements: batch, heads, rows; zeros: contiguous. A running state has the strides of lse. */
  int64_t lse_stride[3];
} flashjit_partial_state;

#ifdef __cplusplus
}
#endif

#endif /* FLASHJIT_TYPES_H */

/* The host's side of paged_decode.c: the sizes, the memory, and what an engine decides between two steps. */
#ifndef FLASHJIT_EXAMPLES_PAGED_HOST_H
#define FLASHJIT_EXAMPLES_PAGED_HOST_H

#include <flashjit/flashjit.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda_by_hand.h"

enum {
  kSequences = 4,
  kHeads = 8,
  kHeadsKv = 2,
  kDim = 64,
  kPageRows = 16,
  kColumns = 8, /* of the page table: at most 128 keys of a sequence */
  kPages = 32,
  kSteps = 100,
  kQElements = kSequences * kHeads * kDim,
  kKvElements = kSequences * kHeadsKv * kDim,
  kCacheElements = kPages * kPageRows * kHeadsKv * kDim
};

/* What the calls read and write: in host memory for the reference, in device memory for the kernels. */
typedef struct {
  unsigned short *q, *k, *v, *out, *k_cache, *v_cache;
  int32_t *lengths, *table;
} memory;

/* Device memory as the kernels begin with it. */
static memory memory_of_device(const cuda_functions* cuda) {
  const unsigned short nan = 0x7fff; /* rows of pages that are no keys may hold anything */
  memory device;
  device.q = make_filled(cuda, nan, kQElements), device.out = make_filled(cuda, nan, kQElements);
  device.k = make_filled(cuda, nan, kKvElements), device.v = make_filled(cuda, nan, kKvElements);
  device.k_cache = make_filled(cuda, nan, kCacheElements);
  device.v_cache = make_filled(cuda, nan, kCacheElements);
  device.lengths = make_filled(cuda, 0, 2 * kSequences);
  device.table = make_filled(cuda, 0, 2 * kSequences * kColumns);
  return device;
}

/* Numbers between -1 and 1, as what a model's projections would give. */
static void fill(unsigned short* values, int count) {
  int i;
  for (i = 0; i < count; ++i) {
    const float x = (float)rand() / (float)RAND_MAX * 2 - 1;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    values[i] = (unsigned short)(bits >> 16);
  }
}

static float value_of(unsigned short bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* What an engine decides between two steps: sequence b comes at step 20 b; each takes a page where its last
 * one is full. Until it comes a sequence has no keys, and nothing is written for it. */
static void grow(memory* m, int step, int* used_pages) {
  int b;
  for (b = 0; b < kSequences; ++b) {
    if (step < 20 * b) continue;
    if (m->lengths[b] % kPageRows == 0)
      m->table[b * kColumns + m->lengths[b] / kPageRows] = *used_pages * 7 % kPages, ++*used_pages;
    ++m->lengths[b];
  }
  fill(m->q, kQElements), fill(m->k, kKvElements), fill(m->v, kKvElements);
}

static int is_right(const memory* host, const unsigned short* out) {
  int i;
  for (i = 0; i < kQElements; ++i)
    if (!(fabsf(value_of(out[i]) - value_of(host->out[i])) < 0.02f)) return 0; /* NaN is not right either */
  return 1;
}

#define COPY_TO_DEVICE(member, count) \
  cuda->upload((CUdeviceptr)(size_t)device->member, host->member, (count) * sizeof *host->member)

/* What a step's kernels read. */
static void send(const cuda_functions* cuda, const memory* device, const memory* host) {
  COPY_TO_DEVICE(q, kQElements), COPY_TO_DEVICE(k, kKvElements), COPY_TO_DEVICE(v, kKvElements);
  COPY_TO_DEVICE(lengths, kSequences), COPY_TO_DEVICE(table, kSequences * kColumns);
}

/* Says what was prepared. */
static void told(void* user, const flashjit_kernel_report* report) {
  (void)user;
  fprintf(stderr, "%s: %s, %s in %.0f ms\n", report->spec, report->config, report->origin,
          report->compile_ms + report->load_ms);
}

#endif

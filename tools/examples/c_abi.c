/* Attention from C: reads a spec, asks what it needs, and runs one forward pass. Without a GPU it says why
 * not.
 *
 * Exit code: 0 done, 77 no GPU here, 1 failure. */
#include <stdio.h>
#include <stdlib.h>

#include "cuda_by_hand.h"
#include "flashjit/flashjit.h"

enum { kBatch = 2, kHeads = 4, kLength = 256, kDim = 64, kElements = kBatch * kHeads * kLength * kDim };

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, flashjit_last_error_message());
  return 1;
}

/* A tensor [batch, heads, length, dim] of bf16, every element the one whose bits are given. */
static int make_tensor(const cuda_functions* cuda, unsigned short bits, flashjit_tensor* tensor) {
  const flashjit_tensor made = {make_filled(cuda, bits, kElements),
                                {kBatch, kHeads, kLength, kDim},
                                {(int64_t)kHeads * kLength * kDim, (int64_t)kLength * kDim, kDim, 1}};
  *tensor = made;
  return made.data != NULL;
}

/* Equal values everywhere: whatever the weights, their average is that value. */
static int forward_is_right(const cuda_functions* cuda, flashjit_runtime* runtime,
                            const flashjit_spec* spec) {
  const unsigned short one = 0x3f80, half = 0x3f00, nan = 0x7fff;
  flashjit_forward_args args = {.struct_size = sizeof args};
  unsigned short* out = malloc(kElements * sizeof *out);
  int right = 1, i;
  if (!out || !make_tensor(cuda, one, &args.q) || !make_tensor(cuda, one, &args.k) ||
      !make_tensor(cuda, half, &args.v) || !make_tensor(cuda, nan, &args.out)) {
    fprintf(stderr, "no memory for the tensors\n");
    free(out);
    return 0;
  }
  if (flashjit_forward(runtime, spec, &args, NULL) != FLASHJIT_OK) {
    failed("flashjit_forward");
    free(out);
    return 0;
  }
  right = cuda->synchronize() == CUDA_SUCCESS &&
          cuda->download(out, (CUdeviceptr)(size_t)args.out.data, kElements * sizeof *out) == CUDA_SUCCESS;
  for (i = 0; i < kElements && right; ++i) right = out[i] == half;
  free(out);
  return right;
}

int main(void) {
  const flashjit_shape shape = {kBatch, kHeads, kHeads, kLength, kLength};
  flashjit_options options = {.struct_size = sizeof options};
  flashjit_runtime* runtime = NULL;
  flashjit_spec* spec = NULL;
  cuda_functions cuda;
  size_t bytes = 0;
  int exit_code = 77, has_gpu;
  flashjit_status status;

  printf("flashjit %s\n", flashjit_version());
  if (flashjit_runtime_create(&options, &runtime) != FLASHJIT_OK) return failed("flashjit_runtime_create");
  if (flashjit_spec_create("bf16:d64:causal", &spec) != FLASHJIT_OK) return failed("flashjit_spec_create");
  has_gpu = open_cuda(&cuda);
  status = flashjit_workspace_bytes(runtime, FLASHJIT_BACKWARD, spec, &shape, &bytes);
  if (has_gpu && status == FLASHJIT_OK) {
    printf("a backward pass would need a workspace of %zu bytes\n", bytes);
    exit_code = forward_is_right(&cuda, runtime, spec) ? 0 : 1;
    printf("forward: %s\n", exit_code == 0 ? "right" : "WRONG");
  } else if (status == FLASHJIT_NO_DRIVER || status == FLASHJIT_NO_DEVICE) {
    printf("no GPU here (%s): %s\n", flashjit_status_name(status), flashjit_last_error_message());
  } else {
    exit_code = failed("flashjit_workspace_bytes");
  }
  flashjit_spec_destroy(spec);
  flashjit_runtime_destroy(runtime);
  return exit_code;
}

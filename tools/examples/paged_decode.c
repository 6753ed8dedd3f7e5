/* The loop of an inference engine from C: a cache in pages, one CUDA graph for all steps, sequences that come
 * and grow. Each step is checked against the CPU reference, which takes the same arguments.
 *
 * Exit code: 0 right, 77 no GPU here, 1 wrong or failed. */
#include <stdio.h>

#include "flashjit/flashjit.h"
#include "paged_host.h"

static const char* const kSpec = "bf16:d64:causal:pages16";

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, flashjit_last_error_message());
  return 0;
}

/* bf16 [batch, heads, rows, dim], in memory [batch, rows, heads, dim]. */
static flashjit_tensor tensor(void* data, int64_t batch, int64_t heads, int64_t rows) {
  const flashjit_tensor made = {
      data, {batch, heads, rows, kDim}, {rows * heads * kDim, kDim, heads * kDim, 1}};
  return made;
}

/* One new token of each sequence: K rotated and stored with V, Q rotated where it is. */
static flashjit_append_args append_args(const memory* m) {
  flashjit_append_args args = {.struct_size = sizeof args};
  args.k = tensor(m->k, kSequences, kHeadsKv, 1);
  args.v = tensor(m->v, kSequences, kHeadsKv, 1);
  args.k_cache = tensor(m->k_cache, kPages, kHeadsKv, kPageRows);
  args.v_cache = tensor(m->v_cache, kPages, kHeadsKv, kPageRows);
  args.kv_lengths = m->lengths;
  args.page_table = (flashjit_page_table){.data = m->table, .sequences = kSequences, .columns = kColumns};
  args.q = args.q_out = tensor(m->q, kSequences, kHeads, 1);
  args.rope.theta = 10000.0f;
  return args;
}

static flashjit_forward_args forward_args(const memory* m, void* workspace, size_t bytes) {
  flashjit_forward_args args = {.struct_size = sizeof args};
  args.q = tensor(m->q, kSequences, kHeads, 1);
  args.k = tensor(m->k_cache, kPages, kHeadsKv, kPageRows);
  args.v = tensor(m->v_cache, kPages, kHeadsKv, kPageRows);
  args.out = tensor(m->out, kSequences, kHeads, 1);
  args.kv_lengths = m->lengths;
  args.page_table = (flashjit_page_table){.data = m->table, .sequences = kSequences, .columns = kColumns};
  args.workspace = workspace;
  args.workspace_bytes = bytes;
  return args;
}

/* Compiles, lends the workspace, and captures both launches. Lengths and tables may change afterwards: what
 * is launched depends on the bounds alone. */
static CUgraphExec capture(const cuda_functions* cuda, flashjit_runtime* runtime, const flashjit_spec* spec,
                           const memory* m, CUstream stream) {
  const flashjit_shape bounds = {kSequences, kHeads, kHeadsKv, 1, kColumns * kPageRows};
  size_t bytes = 0;
  void* workspace = NULL;
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  flashjit_append_args append;
  flashjit_forward_args forward;
  if (flashjit_prepare(runtime, FLASHJIT_APPEND, spec, &bounds, NULL, told, NULL) != FLASHJIT_OK ||
      flashjit_prepare(runtime, FLASHJIT_FORWARD, spec, &bounds, NULL, told, NULL) != FLASHJIT_OK ||
      flashjit_workspace_bytes(runtime, FLASHJIT_FORWARD, spec, &bounds, &bytes) != FLASHJIT_OK)
    return failed("prepare"), NULL;
  if (bytes && !(workspace = make_filled(cuda, 0, bytes / 2))) return NULL;
  append = append_args(m), forward = forward_args(m, workspace, bytes);
  cuda->begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  if (flashjit_append(runtime, spec, &append, stream) != FLASHJIT_OK) failed("flashjit_append");
  if (flashjit_forward(runtime, spec, &forward, stream) != FLASHJIT_OK) failed("flashjit_forward");
  cuda->end_capture(stream, &graph);
  return cuda->instantiate(&executable, graph, 0) == CUDA_SUCCESS ? executable : NULL;
}

static int run(const cuda_functions* cuda, flashjit_runtime* runtime, const flashjit_spec* spec, memory* host,
               memory* device) {
  static unsigned short out[kQElements];
  int step, used_pages = 0;
  CUstream stream = NULL;
  CUgraphExec graph;
  cuda->create_stream(&stream, CU_STREAM_NON_BLOCKING);
  graph = capture(cuda, runtime, spec, device, stream);
  if (!graph) return 0;
  for (step = 0; step < kSteps; ++step) {
    flashjit_append_args append = append_args(host);
    flashjit_forward_args forward = forward_args(host, NULL, 0);
    grow(host, step, &used_pages);
    send(cuda, device, host);
    if (cuda->launch_graph(graph, stream) != CUDA_SUCCESS || cuda->wait_for_stream(stream) != CUDA_SUCCESS ||
        cuda->download(out, (CUdeviceptr)(size_t)device->out, sizeof out) != CUDA_SUCCESS)
      return 0;
    if (flashjit_reference_append(spec, &append) != FLASHJIT_OK ||
        flashjit_reference_forward(spec, &forward) != FLASHJIT_OK)
      return failed("the reference");
    if (!is_right(host, out)) return printf("wrong at step %d\n", step), 0;
  }
  return 1;
}

int main(void) {
  static _Alignas(16) unsigned short q[kQElements], k[kKvElements], v[kKvElements], out[kQElements],
      k_cache[kCacheElements], v_cache[kCacheElements];
  static int32_t lengths[kSequences], table[kSequences * kColumns];
  const flashjit_options options = {.struct_size = sizeof options};
  memory host = {q, k, v, out, k_cache, v_cache, lengths, table}, device;
  flashjit_runtime* runtime = NULL;
  flashjit_spec* spec = NULL;
  cuda_functions cuda;
  int right;
  if (!open_cuda(&cuda)) return puts("no GPU here"), 77;
  device = memory_of_device(&cuda);
  if (flashjit_runtime_create(&options, &runtime) != FLASHJIT_OK ||
      flashjit_spec_create(kSpec, &spec) != FLASHJIT_OK)
    return failed("create"), 1;
  right = run(&cuda, runtime, spec, &host, &device);
  printf("%d steps of %d sequences: %s\n", kSteps, kSequences, right ? "right" : "WRONG");
  flashjit_spec_destroy(spec);
  flashjit_runtime_destroy(runtime);
  return right ? 0 : 1;
}

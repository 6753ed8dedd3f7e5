// One sequence on many GPUs of a host: a process for each, NCCL between them, and the result of one GPU, by
// every scheme.
//
//     one_sequence [GPUs, default 2] [rows of all, default 4096] [libnccl.so.2]
//
// NCCL is opened by hand, as libcuda is; a program of yours links what it likes.
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <flashjit/distributed.hpp>
#include <utility>

#include "one_sequence_ranks.hpp"
#include "one_sequence_rows.hpp"

namespace {

using namespace one_sequence;

/// Both passes of this rank's rows by one scheme, twice; milliseconds of the second time.
double run_shared(const cuda_functions& cuda, flashjit::SharedAttention& shared, const Tensors& mine) {
  using Clock = std::chrono::steady_clock;
  const auto space = [&](flashjit::Pass pass) {
    const std::size_t bytes = shared.workspace_bytes(pass);
    return flashjit::Workspace{make_filled(&cuda, 0, bytes / 2), bytes};
  };
  const flashjit::Workspace of_forward = space(flashjit::Pass::forward),
                            of_backward = space(flashjit::Pass::backward);
  CUstream stream = nullptr, copies = nullptr;
  cuda.create_stream(&stream, CU_STREAM_NON_BLOCKING), cuda.create_stream(&copies, CU_STREAM_NON_BLOCKING);
  cuda.synchronize();
  shared.prepare(flashjit::Pass::forward, of_forward, stream);
  shared.prepare(flashjit::Pass::backward, of_backward, stream);
  const auto both = [&] {
    shared.forward(
        {.q = mine.q, .k = mine.k, .v = mine.v, .out = mine.out, .lse = mine.lse, .workspace = of_forward},
        stream, copies);
    shared.backward({.q = mine.q,
                     .k = mine.k,
                     .v = mine.v,
                     .out = mine.out,
                     .lse = mine.lse,
                     .dout = mine.dout,
                     .dq = mine.dq,
                     .dk = mine.dk,
                     .dv = mine.dv,
                     .workspace = of_backward},
                    stream, copies);
    cuda.wait_for_stream(stream);
  };
  both();
  const auto begin = Clock::now();
  both();
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

bool run_rank(const cuda_functions& cuda, int rank, int ranks, std::int64_t rows, void* comm,
              const char* nccl) {
  flashjit::Runtime runtime;
  const flashjit::AttentionSpec spec{
      .dtype = flashjit::DType::bf16, .head_dim = kDim, .mask = flashjit::causal()};
  std::vector<std::int64_t> all(rows);
  for (std::int64_t i = 0; i < rows; ++i) all[i] = i;
  const std::vector<std::int64_t> own = zigzag_rows(rank, ranks, rows);
  const Tensors whole = make_tensors(cuda, all);
  run_alone(cuda, runtime, spec, whole, rows);

  using Scheme = flashjit::SharingScheme;
  bool right = true;
  for (const auto& [scheme, name] :
       {std::pair{Scheme::ring, "ring"}, {Scheme::all_gather, "all_gather"}, {Scheme::ulysses, "ulysses"}}) {
    if (scheme == Scheme::ulysses && kHeadsKv % ranks != 0) continue;
    const Tensors mine = make_tensors(cuda, own);
    flashjit::SharedAttention shared(
        runtime,
        {.spec = spec, .heads_q = kHeads, .heads_kv = kHeadsKv, .rows = rows / ranks, .scheme = scheme}, comm,
        nccl);
    const double ms = run_shared(cuda, shared, mine);
    double worst = 0;
    const auto compare = [&](const unsigned short* got, const unsigned short* expected, std::int64_t heads) {
      worst =
          std::fmax(worst, difference(example::download<unsigned short>(cuda, got, heads * own.size() * kDim),
                                      example::download<unsigned short>(cuda, expected, heads * rows * kDim),
                                      heads, own, rows));
    };
    compare(mine.out, whole.out, kHeads), compare(mine.dq, whole.dq, kHeads);
    compare(mine.dk, whole.dk, kHeadsKv), compare(mine.dv, whole.dv, kHeadsKv);
    std::printf(
        "GPU %d, %s: both passes in %.2f ms; the largest difference from one GPU is %.4f of the largest "
        "value\n",
        rank, name, ms, worst);
    right &= worst < 0.02;
  }
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::int64_t rows = argc > 2 ? std::atoll(argv[2]) : 4096;
  const char* nccl = argc > 3 ? argv[3] : "libnccl.so.2";
  return run_ranks(ranks, nccl, [&](const cuda_functions& cuda, int rank, void* comm) {
    return run_rank(cuda, rank, ranks, rows, comm, nccl);
  });
}

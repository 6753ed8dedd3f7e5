// One sequence on many GPUs of a host: a process for each, NCCL between them, and the result of one GPU, by
// every scheme.
//
//     one_sequence [GPUs, default 2] [rows of all, default 4096] [libnccl.so.2]
//
// NCCL is opened by hand, as libcuda is; a program of yours links what it likes.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <flashjit/distributed.hpp>
#include <utility>

#include "example.hpp"

namespace {

constexpr std::int64_t kHeads = 32, kHeadsKv = 8, kDim = 128;

struct NcclId {
  char text[128];
};
struct Nccl {
  int (*get_unique_id)(NcclId*) = nullptr;
  int (*init_rank)(void**, int, NcclId, int) = nullptr;
  int (*destroy)(void*) = nullptr;

  bool open(const char* path) {
    void* library = dlopen(path, RTLD_NOW);
    if (!library) return false;
    return look_up(library, "ncclGetUniqueId", &get_unique_id) &&
           look_up(library, "ncclCommInitRank", &init_rank) && look_up(library, "ncclCommDestroy", &destroy);
  }
};

/// bf16 bits that depend on the head, the row in the whole sequence and the column alone.
std::vector<unsigned short> values(unsigned seed, std::int64_t heads, const std::vector<std::int64_t>& rows) {
  std::vector<unsigned short> result;
  result.reserve(heads * rows.size() * kDim);
  for (std::int64_t head = 0; head < heads; ++head)
    for (const std::int64_t row : rows)
      for (std::int64_t column = 0; column < kDim; ++column) {
        unsigned x = seed + static_cast<unsigned>((head * 1000003 + row) * kDim + column);
        x = (x ^ x >> 16) * 0x45d9f3bu, x = (x ^ x >> 16) * 0x45d9f3bu, x ^= x >> 16;
        result.push_back(static_cast<unsigned short>((x & 0x8000u) | 0x3e80u | (x & 0x17fu)));  // +-[1/4, 2)
      }
  return result;
}
float to_float(unsigned short bits) {
  const unsigned whole = static_cast<unsigned>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &whole, sizeof value);
  return value;
}

/// The rows of a rank: of twice as many blocks as ranks, one and the one as far from the end.
std::vector<std::int64_t> zigzag_rows(int rank, int ranks, std::int64_t rows) {
  const std::int64_t block = rows / ranks / 2;
  std::vector<std::int64_t> result;
  for (const std::int64_t which :
       {static_cast<std::int64_t>(rank), static_cast<std::int64_t>(2 * ranks - 1 - rank)})
    for (std::int64_t i = 0; i < block; ++i) result.push_back(which * block + i);
  return result;
}

/// The largest difference from one GPU's rows, relative to its largest value.
double difference(const std::vector<unsigned short>& got, const std::vector<unsigned short>& whole,
                  std::int64_t heads, const std::vector<std::int64_t>& rows, std::int64_t all) {
  double most = 0, largest = 0;
  for (std::int64_t head = 0; head < heads; ++head)
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::int64_t column = 0; column < kDim; ++column) {
        const double expected = to_float(whole[(head * all + rows[i]) * kDim + column]);
        most = std::fmax(most, std::fabs(to_float(got[(head * rows.size() + i) * kDim + column]) - expected));
        largest = std::fmax(largest, std::fabs(expected));
      }
  return most / largest;
}

struct Tensors {
  unsigned short *q, *k, *v, *dout, *out, *dq, *dk, *dv;
  float* lse;
};
Tensors make_tensors(const cuda_functions& cuda, const std::vector<std::int64_t>& rows) {
  const auto upload = [&](unsigned seed, std::int64_t heads) {
    return example::upload(cuda, values(seed, heads, rows));
  };
  const auto make = [&](std::int64_t heads, std::int64_t dim) {
    return static_cast<unsigned short*>(make_filled(&cuda, 0x7fff, heads * rows.size() * dim));
  };
  return {upload(1, kHeads),    upload(2, kHeadsKv),  upload(3, kHeadsKv),
          upload(4, kHeads),    make(kHeads, kDim),   make(kHeads, kDim),
          make(kHeadsKv, kDim), make(kHeadsKv, kDim), reinterpret_cast<float*>(make(kHeads, 2))};
}

/// Both passes on this GPU alone.
void run_alone(const cuda_functions& cuda, flashjit::Runtime& runtime, const flashjit::AttentionSpec& spec,
               const Tensors& t, std::int64_t rows) {
  const auto of_q = [&](void* data) { return flashjit::TensorView::bhsd(data, 1, kHeads, rows, kDim); };
  const auto of_kv = [&](void* data) { return flashjit::TensorView::bhsd(data, 1, kHeadsKv, rows, kDim); };
  const flashjit::AttentionShape shape{1, kHeads, kHeadsKv, rows, rows};
  runtime.forward(spec,
                  {.q = of_q(t.q),
                   .k = of_kv(t.k),
                   .v = of_kv(t.v),
                   .out = of_q(t.out),
                   .lse = t.lse,
                   .workspace = example::workspace(cuda, runtime, spec, shape)},
                  nullptr);
  runtime.backward(spec,
                   {.q = of_q(t.q),
                    .k = of_kv(t.k),
                    .v = of_kv(t.v),
                    .out = of_q(t.out),
                    .lse = t.lse,
                    .dout = of_q(t.dout),
                    .dq = of_q(t.dq),
                    .dk = of_kv(t.dk),
                    .dv = of_kv(t.dv),
                    .workspace = example::workspace(cuda, runtime, spec, shape, flashjit::Pass::backward)},
                   nullptr);
}

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
  const char* path = argc > 3 ? argv[3] : "libnccl.so.2";
  std::vector<std::array<int, 2>> pipes(ranks);  // to read from, and to write to
  for (std::array<int, 2>& ends : pipes)
    if (pipe(ends.data()) != 0) return 1;
  // Before anything of CUDA: it does not work in a process that was forked after its first use.
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    alarm(300);  // where a peer ended early, the others would wait for it
    return example::run([&](const cuda_functions& cuda) {
      Nccl nccl;
      int devices = 0;
      cuda.device_count(&devices);
      if (!nccl.open(path) || devices < ranks) {
        std::printf("%d GPUs here, %d wanted, with NCCL\n", devices, ranks);
        std::exit(77);
      }
      use_device(&cuda, rank);
      NcclId id{};
      if (rank == 0) {
        nccl.get_unique_id(&id);
        for (int other = 1; other < ranks; ++other)
          if (write(pipes[other][1], &id, sizeof id) != sizeof id) return false;
      } else if (read(pipes[rank][0], &id, sizeof id) != sizeof id) {
        return false;
      }
      void* comm = nullptr;
      if (nccl.init_rank(&comm, ranks, id, rank) != 0) return false;
      const bool right = run_rank(cuda, rank, ranks, rows, comm, path);
      nccl.destroy(comm);
      return right;
    });
  }
  int code = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (const int own = WIFEXITED(status) ? WEXITSTATUS(status) : 1; own != 0 && code != 1) code = own;
  }
  return code;
}

// Ranks that share a sequence: a process each, with emulated devices and an NCCL of FIFOs, against the fp64
// reference of the whole.
#include "flashjit/distributed.hpp"
#include "flashjit/flashjit.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "expr/declarations.hpp"
#include "reference/reference.hpp"
#include "tests/support/built.hpp"
#include "tests/support/gpu_support.hpp"

namespace flashjit::test {
namespace {

struct Id {
  char text[128];
};
template <class Function>
Function nccl_function(const char* name) {
  void* library = ::dlopen(built(FLASHJIT_FAKE_NCCL).c_str(), RTLD_NOW);
  return reinterpret_cast<Function>(::dlsym(library, name));
}

constexpr std::int64_t kRows = 34;  // of a rank

struct SharedCase {
  const char* spec;
  int ranks;
  SharingScheme scheme;
  ShardLayout layout;
  std::int64_t window = 0;
  bool documents = false;
  bool in_c = false;
  int inner = 1;  ///< with two levels, how many ranks share heads

  int share_heads() const { return scheme == SharingScheme::ulysses ? ranks : inner; }
  std::int64_t heads_kv() const { return share_heads(); }
  std::int64_t heads() const { return 2 * heads_kv(); }
  std::int64_t batch() const { return documents ? 1 : 2; }
  /// Documents of many rows, of one, of none, and across ranks.
  std::vector<std::int64_t> ends() const {
    const std::int64_t all = kRows * ranks;
    return documents ? std::vector<std::int64_t>{0, 0, 9, 9, 10, all / 2 + 5, all - 3, all, all}
                     : std::vector<std::int64_t>{};
  }
};
void PrintTo(const SharedCase& test, std::ostream* out) {
  *out << test.spec << " on " << test.ranks
       << std::array{", ring", ", all_gather", ", ulysses"}[static_cast<std::size_t>(test.scheme)]
       << (test.layout == ShardLayout::zigzag ? ", zigzag" : ", contiguous") << ", window " << test.window
       << ", heads of " << test.share_heads() << (test.documents ? ", documents" : "")
       << (test.in_c ? ", in C" : "");
}

/// The value of a name that a case's programs declare, for the whole sequence.
reference::Captured captured(const SharedCase& test, const std::string& name) {
  reference::Captured made{.name = name};
  const auto fill = [&](std::int64_t size, auto value) {
    made.size = {size};
    for (std::int64_t i = 0; i < size; ++i) made.values.push_back(value(i));
  };
  if (name == "reach") made.values = {20};
  if (name == "slopes") fill(test.heads(), [](std::int64_t head) { return 0.0625 * (head + 1); });
  if (name == "ids")
    fill(kRows * test.ranks, [](std::int64_t row) { return static_cast<double>(row / 7 % 3); });
  return made;
}

/// Captures on the device, as a rank gives them.
class DeviceCaptures {
 public:
  explicit DeviceCaptures(const std::vector<reference::Captured>& all) {
    for (const reference::Captured& one : all) {
      if (one.size.empty()) {
        captures_.push_back({.name = one.name, .scalar = one.values[0]});
        continue;
      }
      memory_.push_back(one.name == "ids"
                            ? to_device(std::vector<std::int32_t>(one.values.begin(), one.values.end()))
                            : to_device(std::vector<float>(one.values.begin(), one.values.end())));
      captures_.push_back(Capture::tensor(one.name, memory_.back().data(), {one.size[0]}));
      if (one.name == "slopes") {
        grad_ = device_bytes(one.size[0] * sizeof(float));
        captures_.back().grad = static_cast<float*>(grad_.data());
      }
    }
  }
  std::span<const Capture> all() const { return captures_; }
  /// The gradient of slopes.
  device::DeviceBuffer& grad() { return grad_; }

 private:
  std::vector<device::DeviceBuffer> memory_;
  device::DeviceBuffer grad_ = device_bytes(0);
  std::vector<Capture> captures_;
};

reference::Problem whole_problem(const SharedCase& test) {
  KernelSpec spec = parse_spec(test.spec);
  const std::int64_t rows = kRows * test.ranks;
  if (test.window > 0) spec.mask = MaskProgram(fmt::format("q >= kv && q - kv < {}", test.window));
  reference::Problem problem{.spec = spec,
                             .shape = {test.batch(), test.heads(), test.heads_kv(), rows, rows}};
  if (test.documents) {
    problem.spec.varlen = true;
    const std::vector<std::int64_t> ends = test.ends();
    problem.shape.batch = std::ssize(ends) - 1;
    problem.cu_seqlens_q.assign(ends.begin(), ends.end());
    problem.cu_seqlens_kv = problem.cu_seqlens_q;
  }
  if (spec.dropout) problem.dropout_p = 0.25, problem.seed = 77, problem.offset = 5;
  for (const expr::Declaration& one : expr::declarations(problem.spec.score, problem.spec.mask))
    problem.captures.push_back(captured(test, one.name));
  if (spec.sinks)
    for (int head = 0; head < test.heads(); ++head) problem.sinks.push_back(1.5 - head);
  std::mt19937 random(test.ranks);
  std::normal_distribution<double> normal;
  const auto fill = [&](std::vector<double>& x, std::int64_t heads, int dim) {
    x.resize(test.batch() * heads * rows * dim);
    for (double& value : x) value = reference::round_to(spec.dtype, normal(random));
  };
  fill(problem.q, test.heads(), spec.head_dim);
  fill(problem.k, test.heads_kv(), spec.head_dim);
  fill(problem.v, test.heads_kv(), spec.v_dim());
  fill(problem.dout, test.heads(), spec.v_dim());
  if (!test.documents) fill(problem.dlse, test.heads(), 1);
  return problem;
}

/// Which rows are computed with a rank's heads: those of the ranks that share heads, in their order.
std::vector<std::int64_t> rows_of_heads(const SharedCase& test, int rank) {
  const bool whole = test.scheme == SharingScheme::ulysses;
  const std::int64_t place = whole ? 0 : rank / test.inner, places = whole ? 1 : test.ranks / test.inner;
  const std::int64_t count = kRows * test.ranks / places;
  const bool zigzag = test.layout == ShardLayout::zigzag && !whole;
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!zigzag) rows.push_back(place * count + i);
    if (zigzag && i < count / 2) rows.push_back(place * (count / 2) + i);
    if (zigzag && i >= count / 2) rows.push_back((2 * places - 2 - place) * (count / 2) + i);
  }
  return rows;
}

/// A rank's own.
std::vector<std::int64_t> rows_of(const SharedCase& test, int rank) {
  if (test.scheme == SharingScheme::ulysses) {
    SharedCase of_rows = test;
    of_rows.scheme = SharingScheme::ring;
    return rows_of_heads(of_rows, rank);
  }
  const std::vector<std::int64_t> all = rows_of_heads(test, rank);
  const auto first = all.begin() + rank % test.inner * kRows;
  return {first, first + kRows};
}

/// A rank's rows of [b, h, rows of all, dim].
std::vector<double> shard(const SharedCase& test, int rank, const std::vector<double>& x, std::int64_t heads,
                          int dim) {
  std::vector<double> result;
  for (std::int64_t head = 0; head < test.batch() * heads; ++head)
    for (const std::int64_t row : rows_of(test, rank)) {
      const auto first = x.begin() + (head * kRows * test.ranks + row) * dim;
      result.insert(result.end(), first, first + dim);
    }
  return result;
}

/// What a rank has of LSE [b, h, rows of all], without documents.
std::vector<double> shard_of_lse(const SharedCase& test, int rank, const std::vector<double>& x) {
  const std::vector<std::int64_t> rows = rows_of_heads(test, rank);
  const std::int64_t own = test.heads() / test.share_heads(), first_head = rank % test.share_heads() * own;
  const std::size_t chunks =
      test.layout == ShardLayout::zigzag && test.scheme != SharingScheme::ulysses ? 2 : 1;
  std::vector<double> result;
  for (std::size_t chunk = 0; chunk < chunks; ++chunk)
    for (std::int64_t b = 0; b < test.batch(); ++b)
      for (std::int64_t head = first_head; head < first_head + own; ++head)
        for (std::size_t i = chunk * rows.size() / chunks; i < (chunk + 1) * rows.size() / chunks; ++i)
          result.push_back(x[(b * test.heads() + head) * kRows * test.ranks + rows[i]]);
  return result;
}

void* communicator_of(int rank, int ranks, const Id& id) {
  void* comm = nullptr;
  nccl_function<int (*)(void**, int, Id, int)>("ncclCommInitRank")(&comm, ranks, id, rank);
  return comm;
}

/// A communicator of `ranks` of the world's, which have a name for it.
void* part_of_world(const Id& world, const std::string& name, int rank, int ranks) {
  Id id{};
  const std::string folder = fmt::format("{}/{}", world.text, name);
  std::filesystem::create_directory(folder);
  std::ranges::copy(folder, id.text);
  return communicator_of(rank, ranks, id);
}

void expect_ok(flashjit_status status) {
  if (status != FLASHJIT_OK) throw Error(ErrorCode::internal, flashjit_last_error_message());
}

/// What the arguments of both passes have alike.
template <class CArgs, class Args>
CArgs args_in_c(const Args& a, std::vector<flashjit_capture>& room) {
  CArgs args{};
  args.struct_size = sizeof args;
  args.q = a.q, args.k = a.k, args.v = a.v;
  args.out = a.out, args.lse = a.lse;
  args.softmax_scale = a.softmax_scale ? &*a.softmax_scale : nullptr;
  args.workspace = a.workspace.data;
  args.workspace_bytes = a.workspace.bytes;
  args.dropout_p = a.dropout_p;
  args.seed = a.seed;
  args.offset = a.offset;
  args.sinks = a.sinks;
  for (const Capture& one : a.captures) {
    flashjit_capture made{};
    made.name = one.name.data();
    made.data = one.data, made.grad = one.grad, made.rank = one.rank, made.scalar = one.scalar;
    std::ranges::copy(one.size, made.size);
    std::ranges::copy(one.stride, made.stride);
    room.push_back(made);
  }
  args.captures = room.data();
  args.capture_count = room.size();
  return args;
}

/// SharedAttention by the C interface.
class SharedInC {
 public:
  SharedInC(Runtime&, const SharedSequence& s, void* comm, const std::string& nccl) {
    flashjit_options options{};
    options.struct_size = sizeof options;
    options.cache_dir = "";
    expect_ok(flashjit_runtime_create(&options, &runtime_));
    flashjit_spec* spec = nullptr;
    expect_ok(flashjit_spec_create(to_string(s.spec).c_str(), &spec));
    const flashjit_shared_sequence sequence{
        .struct_size = sizeof sequence,
        .batch = s.batch,
        .heads_q = s.heads_q,
        .heads_kv = s.heads_kv,
        .rows = s.rows,
        .scheme = static_cast<flashjit_sharing_scheme>(s.scheme),
        .layout = s.layout == ShardLayout::zigzag ? FLASHJIT_ZIGZAG : FLASHJIT_CONTIGUOUS,
        .window = s.window,
        .documents = s.documents.empty() ? nullptr : s.documents.data(),
        .document_count = s.documents.empty() ? 0 : s.documents.size() - 1,
        .reserved_sms = s.reserved_sms,
        .heads_communicator = s.heads_communicator};
    expect_ok(flashjit_shared_create(runtime_, spec, &sequence, comm, nccl.c_str(), &shared_));
    flashjit_spec_destroy(spec);
  }
  ~SharedInC() { flashjit_shared_destroy(shared_), flashjit_runtime_destroy(runtime_); }

  std::size_t workspace_bytes(Pass pass) {
    std::size_t bytes = 0;
    expect_ok(flashjit_shared_workspace_bytes(shared_, static_cast<flashjit_pass>(pass), &bytes));
    return bytes;
  }
  void prepare(Pass pass, Workspace space, Stream stream) {
    expect_ok(
        flashjit_shared_prepare(shared_, static_cast<flashjit_pass>(pass), space.data, space.bytes, stream));
  }
  void forward(const SharedForwardArgs& a, Stream stream, Stream copies) {
    std::vector<flashjit_capture> captures;
    const auto args = args_in_c<flashjit_shared_forward_args>(a, captures);
    expect_ok(flashjit_shared_forward(shared_, &args, stream, copies));
  }
  void backward(const SharedBackwardArgs& a, Stream stream, Stream copies) {
    std::vector<flashjit_capture> captures;
    auto args = args_in_c<flashjit_shared_backward_args>(a, captures);
    args.dout = a.dout;
    args.dlse = a.dlse;
    args.dsinks = a.dsinks;
    args.dq = a.dq, args.dk = a.dk, args.dv = a.dv;
    expect_ok(flashjit_shared_backward(shared_, &args, stream, copies));
  }

 private:
  flashjit_runtime* runtime_ = nullptr;
  flashjit_shared_attention* shared_ = nullptr;
};

std::vector<double> sum_of_ranks(const std::vector<float>& mine, int ranks, void* comm) {
  std::vector<float> all(mine.size() * ranks);
  nccl_function<int (*)(const void*, void*, std::size_t, int, void*, void*)>("ncclAllGather")(
      mine.data(), all.data(), mine.size() * sizeof(float), 1, comm, nullptr);
  std::vector<double> sums(mine.size());
  for (std::size_t i = 0; i < all.size(); ++i) sums[i % sums.size()] += all[i];
  return sums;
}

/// What a rank finds wrong; it is empty where all is right.
template <class Shared>
std::string run_rank(const SharedCase& test, int rank, const Id& id) {
  void* comm = communicator_of(rank, test.ranks, id);
  void *of_rows = comm, *of_heads = nullptr;
  if (const int inner = test.inner; inner > 1) {
    of_rows = part_of_world(id, fmt::format("rows{}", rank % inner), rank / inner, test.ranks / inner);
    of_heads = part_of_world(id, fmt::format("heads{}", rank / inner), rank % inner, inner);
  }
  gpu().context->make_current();
  Runtime runtime(
      RuntimeOptions{.cache_dir = fmt::format("{}/kernels", id.text), .log = [](std::string_view) {}});
  const reference::Problem problem = whole_problem(test);
  const KernelSpec spec = parse_spec(test.spec);
  const int d = spec.head_dim, dv = spec.v_dim();
  Shared shared(runtime,
                {.spec = spec,
                 .batch = test.batch(),
                 .heads_q = test.heads(),
                 .heads_kv = test.heads_kv(),
                 .rows = kRows,
                 .scheme = test.scheme,
                 .layout = test.layout,
                 .window = test.window,
                 .documents = test.ends(),
                 .reserved_sms = 2,
                 .heads_communicator = of_heads},
                of_rows, built(FLASHJIT_FAKE_NCCL));
  const auto mine = [&](const std::vector<double>& x, std::int64_t heads, int dim) {
    return shard(test, rank, x, heads, dim);
  };
  const auto upload = [&](const std::vector<double>& x) { return to_device(spec.dtype, x); };
  const auto q = upload(mine(problem.q, test.heads(), d)), k = upload(mine(problem.k, test.heads_kv(), d)),
             v = upload(mine(problem.v, test.heads_kv(), dv)),
             dout = upload(mine(problem.dout, test.heads(), dv));
  const auto out = poisoned(dout.bytes()),
             lse = poisoned(test.batch() * test.heads() * kRows * sizeof(float)), dq = poisoned(q.bytes()),
             dk = poisoned(k.bytes()), dvalues = poisoned(v.bytes());
  const auto forward_space = poisoned(shared.workspace_bytes(Pass::forward)),
             backward_space = poisoned(shared.workspace_bytes(Pass::backward));
  const Workspace of_forward{forward_space.data(), forward_space.bytes()},
      of_backward{backward_space.data(), backward_space.bytes()};
  DeviceCaptures captures(problem.captures);
  const std::vector<double> own_dlse =
      test.documents ? std::vector<double>{} : shard_of_lse(test, rank, problem.dlse);
  const auto dlse = to_device(std::vector<float>(own_dlse.begin(), own_dlse.end()));
  const auto sinks = to_device(std::vector<float>(problem.sinks.begin(), problem.sinks.end()));
  device::DeviceBuffer dsinks = device_bytes(problem.sinks.size() * sizeof(float));
  shared.prepare(Pass::forward, of_forward, nullptr);
  shared.prepare(Pass::backward, of_backward, nullptr);
  for (int i = 0; i < 2; ++i) {  // again in memory that was used
    shared.forward({.q = q.data(),
                    .k = k.data(),
                    .v = v.data(),
                    .out = out.data(),
                    .lse = static_cast<float*>(lse.data()),
                    .workspace = of_forward,
                    .dropout_p = problem.dropout_p,
                    .seed = problem.seed,
                    .offset = problem.offset,
                    .captures = captures.all(),
                    .sinks = static_cast<const float*>(sinks.data())},
                   nullptr, nullptr);
    for (device::DeviceBuffer* sums : {&dsinks, &captures.grad()})
      if (sums->bytes()) sums->fill(0);
    shared.backward({.q = q.data(),
                     .k = k.data(),
                     .v = v.data(),
                     .out = out.data(),
                     .lse = static_cast<const float*>(lse.data()),
                     .dout = dout.data(),
                     .dq = dq.data(),
                     .dk = dk.data(),
                     .dv = dvalues.data(),
                     .workspace = of_backward,
                     .dropout_p = problem.dropout_p,
                     .seed = problem.seed,
                     .offset = problem.offset,
                     .captures = captures.all(),
                     .sinks = static_cast<const float*>(sinks.data()),
                     .dlse = static_cast<const float*>(dlse.data()),
                     .dsinks = static_cast<float*>(dsinks.data())},
                    nullptr, nullptr);
  }
  gpu().context->synchronize();
  std::string wrong;
  const auto check = [&](const char* name, const device::DeviceBuffer& got, const std::vector<double>& exact,
                         const std::vector<double>& rounded, std::int64_t heads, int dim) {
    const auto [error, limit] =
        reference::judge(from_device(spec.dtype, got), mine(exact, heads, dim), mine(rounded, heads, dim), 3);
    if (!(error <= limit)) wrong += fmt::format("{} is off by {} of {}; ", name, error, limit);
  };
  const auto exact = reference::forward(problem),
             rounded = reference::forward(problem, reference::Precision::rounded);
  const auto grads = reference::backward(problem),
             rounded_grads = reference::backward(problem, reference::Precision::rounded);
  check("out", out, exact.out, rounded.out, test.heads(), dv);
  check("dq", dq, grads.dq, rounded_grads.dq, test.heads(), d);
  check("dk", dk, grads.dk, rounded_grads.dk, test.heads_kv(), d);
  check("dv", dvalues, grads.dv, rounded_grads.dv, test.heads_kv(), dv);
  if (!test.documents) {
    const std::vector<float> got = device::download<float>(lse);
    const auto [error, limit] =
        reference::judge({got.begin(), got.end()}, shard_of_lse(test, rank, exact.lse),
                         shard_of_lse(test, rank, rounded.lse), 3);
    if (!(error <= limit)) wrong += fmt::format("lse is off by {} of {}; ", error, limit);
  }
  if (captures.grad().bytes()) {
    const auto [error, limit] = reference::judge_capture(
        spec.dtype, sum_of_ranks(device::download<float>(captures.grad()), test.ranks, comm),
        {grads.captures[0], grads.capture_squares[0], grads.capture_counts[0]}, rounded_grads.captures[0], 3);
    if (!(error <= limit)) wrong += fmt::format("the slopes' gradient is off by {} of {}; ", error, limit);
  }
  if (spec.sinks) {
    const auto [error, limit] = reference::judge_dsinks(
        problem.shape, sum_of_ranks(device::download<float>(dsinks), test.ranks, comm),
        {grads.dsinks, grads.dsink_rows}, {rounded_grads.dsinks, rounded_grads.dsink_rows}, 3);
    if (!(error <= limit)) wrong += fmt::format("dsinks are off by {} of {}; ", error, limit);
  }
  return wrong;
}

/// A process for each rank; `run` says what is wrong.
template <class Run>
void expect_right_on_all(int ranks, const Run& run) {
  Id id{};
  ASSERT_EQ(nccl_function<int (*)(Id*)>("ncclGetUniqueId")(&id), 0);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(240);
      std::string wrong;
      try {
        wrong = run(rank, id);
      } catch (const std::exception& error) {
        wrong = error.what();
      }
      if (!wrong.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, wrong.c_str());
      ::_exit(wrong.empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    int status = 0;
    ::waitpid(children[rank], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
  }
  std::filesystem::remove_all(id.text);
}

// Programs that see positions, heads, documents and lengths; by a tensor of positions, too.
constexpr const char
    *kAlibi = "bf16:d64:score{slopes: fp32 1d grad; score - slopes[h] * to_float(q - kv)}:causal:sinks",
    *kReach =
        "bf16:d64:mask{reach: int; ids: int32 1d; ids[q] == ids[kv] && q - kv < reach && "
        "kv - q < reach}:sinks",
    *kLater = "fp16:d32:mask{kv >= q + 40}:sinks",  // some rows see no key of their rank, or none
        *kOfDocuments =
            "bf16:d64:score{score + to_float(b * 2) * to_float(q - seqlen_q) / "
            "to_float(seqlen_kv)}:mask{kv <= q && q - kv < 12 + b}";

class EmulatedRanks : public GpuTestWith<SharedCase> {};

TEST_P(EmulatedRanks, ShareASequence) {
  expect_right_on_all(GetParam().ranks, [&](int rank, const Id& id) {
    return GetParam().in_c ? run_rank<SharedInC>(GetParam(), rank, id)
                           : run_rank<SharedAttention>(GetParam(), rank, id);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shared, EmulatedRanks,
    testing::Values(SharedCase{"bf16:d64:causal", 2, SharingScheme::ring, ShardLayout::zigzag},
                    SharedCase{"bf16:d32:causal", 3, SharingScheme::ring, ShardLayout::zigzag},
                    SharedCase{"fp16:d64", 2, SharingScheme::ring, ShardLayout::contiguous},
                    SharedCase{"fp32:d16x8:causal", 3, SharingScheme::ring, ShardLayout::contiguous},
                    SharedCase{"bf16:d64:causal", 3, SharingScheme::all_gather, ShardLayout::zigzag},
                    SharedCase{"bf16:d32x64:causal", 1, SharingScheme::ring, ShardLayout::zigzag},
                    SharedCase{"bf16:d64:causal", 2, SharingScheme::ring, ShardLayout::zigzag, 11},
                    SharedCase{"fp16:d64:causal", 3, SharingScheme::all_gather, ShardLayout::contiguous, 40},
                    SharedCase{"bf16:d64", 2, SharingScheme::all_gather, ShardLayout::contiguous, 0, true},
                    SharedCase{"bf16:d64:causal:dropout", 2, SharingScheme::ring, ShardLayout::zigzag},
                    SharedCase{"bf16:d64:causal:dropout", 2, SharingScheme::ring, ShardLayout::zigzag, 30,
                               true, true},
                    SharedCase{kAlibi, 2, SharingScheme::ring, ShardLayout::zigzag},
                    SharedCase{kReach, 3, SharingScheme::ring, ShardLayout::zigzag},
                    SharedCase{kLater, 2, SharingScheme::ring, ShardLayout::contiguous},
                    SharedCase{kOfDocuments, 2, SharingScheme::ring, ShardLayout::zigzag, 0, true},
                    SharedCase{"fp16:d32x64:causal:dropout:sinks", 3, SharingScheme::ulysses,
                               ShardLayout::contiguous, 25, true},
                    SharedCase{kAlibi, 4, SharingScheme::ring, ShardLayout::zigzag, 0, false, true, 2},
                    SharedCase{"bf16:d64:causal:dropout:sinks", 6, SharingScheme::ring, ShardLayout::zigzag,
                               25, true, false, 3},
                    SharedCase{kAlibi, 2, SharingScheme::ulysses, ShardLayout::zigzag, 0, false, true}));

class EmulatedRanksThatDiffer : public GpuTest {};

TEST_F(EmulatedRanksThatDiffer, AreToldOnAllRanks) {
  expect_right_on_all(2, [](int rank, const Id& id) -> std::string {
    void* comm = communicator_of(rank, 2, id);
    gpu().context->make_current();
    Runtime runtime(RuntimeOptions{.cache_dir = "", .log = [](std::string_view) {}});
    SharedAttention shared(runtime, {.spec = parse_spec("bf16:d32"), .heads_q = 1, .rows = 16 + 16 * rank},
                           comm, built(FLASHJIT_FAKE_NCCL));
    const auto space = poisoned(shared.workspace_bytes(Pass::forward));
    try {
      shared.prepare(Pass::forward, {space.data(), space.bytes()}, nullptr);
    } catch (const Error& error) {
      return error.message().find("rank 1 was given another shared sequence") == std::string::npos
                 ? error.message()
                 : "";
    }
    return "nothing was refused";
  });
}

TEST_F(EmulatedRanksThatDiffer, UlyssesNeedsHeadsForAllRanks) {
  expect_right_on_all(2, [](int rank, const Id& id) -> std::string {
    void* comm = communicator_of(rank, 2, id);
    gpu().context->make_current();
    Runtime runtime(RuntimeOptions{.cache_dir = "", .log = [](std::string_view) {}});
    try {
      SharedAttention(
          runtime,
          {.spec = parse_spec("bf16:d32"), .heads_q = 2, .rows = 16, .scheme = SharingScheme::ulysses}, comm,
          built(FLASHJIT_FAKE_NCCL));
    } catch (const Error& error) {
      return error.message().find("use ring or all_gather") == std::string::npos ? error.message() : "";
    }
    return "nothing was refused";
  });
}

/// A communicator of this process alone.
void* lone_communicator() {
  Id id{};
  nccl_function<int (*)(Id*)>("ncclGetUniqueId")(&id);
  void* comm = communicator_of(0, 1, id);
  std::filesystem::remove_all(id.text);
  return comm;
}

class SharedAttentionOfOne : public GpuTest {
 protected:
  /// What is said about a sequence; empty where it is accepted.
  std::string refusal(const SharedSequence& sequence, const std::string& nccl = built(FLASHJIT_FAKE_NCCL)) {
    return refusal_with(comm_, sequence, nccl);
  }
  std::string refusal_with(void* comm, const SharedSequence& sequence,
                           const std::string& nccl = built(FLASHJIT_FAKE_NCCL)) {
    return said([&] { SharedAttention(runtime_, sequence, comm, nccl); });
  }
  template <class Call>
  static std::string said(Call call) {
    try {
      call();
    } catch (const Error& error) {
      return error.message();
    }
    return "";
  }
  static testing::AssertionResult has(const std::string& message, const char* words) {
    return testing::AssertionResult(message.find(words) != std::string::npos) << message;
  }

  void* comm_ = lone_communicator();
  Runtime runtime_{RuntimeOptions{.cache_dir = "", .log = [](std::string_view) {}}};
  const KernelSpec plain_ = parse_spec("bf16:d32"), causal_ = parse_spec("bf16:d32:causal");
};

TEST_F(SharedAttentionOfOne, RefusesBadSequences) {
  EXPECT_TRUE(has(refusal({.spec = parse_spec("bf16:d32:varlen"), .rows = 8}), "nothing else"));
  EXPECT_TRUE(
      has(refusal({.spec = parse_spec("bf16:d32:score{part_q: int; score * to_float(part_q)}"), .rows = 8}),
          "does not begin with part_"));
  EXPECT_TRUE(has(refusal({.spec = {.head_dim = 0}, .rows = 8}), "head_dim is 0"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 8, .window = 3}), "with the mask causal"));
  EXPECT_TRUE(has(refusal({.spec = causal_, .rows = 8, .window = -1}), "window of a shared sequence is -1"));
  EXPECT_TRUE(
      has(refusal({.spec = causal_, .rows = 8, .window = std::int64_t{1} << 40}), "at most 2^31 - 1"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 8, .documents = {0, 5}}), "go from 0 to 5 for 8 rows"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 8, .documents = {8}}), "go from 8 to 8"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 8, .documents = {0, 6, 4, 8}}), "do not fall"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .batch = 2, .rows = 8, .documents = {0, 8}}), "has batch 2"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .batch = 0, .rows = 8}), "batch 0"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .heads_q = 3, .heads_kv = 2, .rows = 8}), "divide"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .heads_q = 0, .rows = 8}), "has batch 1, 0 heads"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .heads_q = -2, .rows = 8}), "-2 heads"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 0}), "0 rows"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 7}), "pad them to 8"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = std::int64_t{1} << 40}), "more than"));
  EXPECT_TRUE(
      has(refusal({.spec = plain_, .batch = std::int64_t{1} << 40, .rows = 8}), "batch is 1099511627776"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 8, .reserved_sms = -1}), "reserved_sms is -1"));
  EXPECT_TRUE(has(refusal({.spec = plain_, .rows = 8}, "/nowhere/libnccl.so"), "FLASHJIT_NCCL"));
}

TEST_F(SharedAttentionOfOne, RefusesBadSequencesInC) {
  flashjit_options options{};
  options.struct_size = sizeof options;
  flashjit_runtime* runtime = nullptr;
  ASSERT_EQ(flashjit_runtime_create(&options, &runtime), FLASHJIT_OK);
  flashjit_spec* spec = nullptr;
  ASSERT_EQ(flashjit_spec_create("bf16:d32", &spec), FLASHJIT_OK);
  flashjit_shared_sequence good{};
  good.struct_size = sizeof good;
  good.batch = good.heads_q = good.heads_kv = 1, good.rows = 8;
  const auto refused = [&](auto change) -> std::string {
    flashjit_shared_sequence sequence = good;
    change(sequence);
    flashjit_shared_attention* shared = nullptr;
    const bool failed = flashjit_shared_create(runtime, spec, &sequence, comm_,
                                               built(FLASHJIT_FAKE_NCCL).c_str(), &shared) != FLASHJIT_OK;
    flashjit_shared_destroy(shared);
    return failed ? flashjit_last_error_message() : "";
  };
  EXPECT_EQ(refused([](auto&) {}), "");
  EXPECT_TRUE(has(refused([](auto& s) { s.scheme = 3; }), "FLASHJIT_ULYSSES (2)"));
  EXPECT_TRUE(has(refused([](auto& s) { s.layout = -1; }), "layout is -1"));
  EXPECT_TRUE(
      has(refused([](auto& s) { s.document_count = 2; }), "documents is null, but document_count is 2"));
  flashjit_spec_destroy(spec);
  flashjit_runtime_destroy(runtime);
}

TEST_F(SharedAttentionOfOne, RefusesBadCommunicators) {
  EXPECT_TRUE(has(refusal_with(nullptr, {.spec = plain_, .rows = 8}), "communicator is null"));
  EXPECT_TRUE(has(refusal_with(nullptr, {.spec = plain_, .rows = 8, .heads_communicator = comm_}),
                  "communicator is null"));
  EXPECT_TRUE(
      has(refusal({.spec = plain_, .rows = 8, .scheme = SharingScheme::ulysses, .heads_communicator = comm_}),
          "heads_communicator"));
}

/// Before anything is sent: a pointer that kernels would refuse has then crossed to the other ranks.
TEST_F(SharedAttentionOfOne, RefusesBadCalls) {
  gpu().context->make_current();
  for (const SharingScheme scheme : {SharingScheme::ring, SharingScheme::ulysses}) {
    SharedAttention shared(runtime_, {.spec = plain_, .rows = 8, .scheme = scheme}, comm_,
                           built(FLASHJIT_FAKE_NCCL));
    const auto space = poisoned(shared.workspace_bytes(Pass::backward));
    constexpr std::size_t kTensor = 8 * 32;
    const auto memory = poisoned(5 * kTensor * sizeof(float));
    const auto odd = static_cast<char*>(memory.data()) + 2;
    float* const numbers = static_cast<float*>(memory.data());
    const auto written = [&](int i) { return numbers + i * kTensor; };
    const Workspace work{space.data(), space.bytes()};
    const auto forward = [&](auto change) {
      SharedForwardArgs args{.q = numbers, .k = numbers, .v = numbers, .out = written(1), .workspace = work};
      change(args);
      return said([&] { shared.forward(args, nullptr, nullptr); });
    };
    const auto backward = [&](auto change) {
      SharedBackwardArgs args{.q = numbers,
                              .k = numbers,
                              .v = numbers,
                              .out = numbers,
                              .lse = numbers,
                              .dout = numbers,
                              .dq = written(2),
                              .dk = written(3),
                              .dv = written(4),
                              .workspace = work};
      change(args);
      return said([&] { shared.backward(args, nullptr, nullptr); });
    };
    EXPECT_TRUE(has(forward([](auto& a) { a.q = nullptr; }), "q is null"));
    EXPECT_TRUE(has(forward([&](auto& a) { a.k = odd; }), "k is at"));
    EXPECT_TRUE(has(forward([](auto& a) { a.v = nullptr; }), "v is null"));
    EXPECT_TRUE(has(forward([](auto& a) { a.out = nullptr; }), "out is null"));
    EXPECT_TRUE(has(forward([&](auto& a) { a.lse = reinterpret_cast<float*>(odd); }), "lse is at"));
    EXPECT_TRUE(has(forward([&](auto& a) { a.sinks = numbers; }), "sinks is given"));
    EXPECT_TRUE(has(forward([](auto& a) { a.dropout_p = 0.5; }), "dropout"));
    EXPECT_TRUE(has(forward([&](auto& a) { a.out = numbers; }), "memory of q"));
    EXPECT_TRUE(has(backward([](auto& a) { a.dk = a.dv; }), "memory of dv"));
    EXPECT_TRUE(has(backward([](auto& a) { a.workspace = {}; }), "workspace_bytes()"));
    EXPECT_TRUE(has(backward([](auto& a) { a.workspace.data = static_cast<char*>(a.workspace.data) + 16; }),
                    "workspace is at"));
    EXPECT_TRUE(has(backward([](auto& a) { a.lse = nullptr; }), "lse is null"));
    EXPECT_TRUE(has(backward([](auto& a) { a.dout = nullptr; }), "dout is null"));
    EXPECT_TRUE(has(backward([](auto& a) { a.dq = nullptr; }), "dq is null"));
    EXPECT_TRUE(has(backward([&](auto& a) { a.dk = odd; }), "dk is at"));
    EXPECT_TRUE(has(backward([](auto& a) { a.dv = nullptr; }), "dv is null"));
    EXPECT_TRUE(has(backward([&](auto& a) { a.dsinks = numbers; }), "dsinks is given"));
  }
}

}  // namespace
}  // namespace flashjit::test

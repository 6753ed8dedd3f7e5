#include "flashjit/distributed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "device/nccl.hpp"
#include "device/resources.hpp"
#include "flashjit/attention_programs.hpp"
#include "support/environment.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

/// What a chunk of this rank's queries sees of a block of keys: its first rows, up to the last, or with the
/// last query at the last key. No rows: nothing.
struct Seen {
  std::int64_t rows = 0;
  bool causal = false;
};

/// Rows of a tensor [b, h, rows, dim] in memory.
struct Rows {
  void* data;
  std::int64_t heads, rows;
  int dim, element;  ///< bytes

  TensorView view(std::int64_t batch, std::int64_t begin, std::int64_t count) const {
    return {static_cast<char*>(data) + begin * dim * element,
            {batch, heads, count, dim},
            {heads * rows * dim, rows * dim, dim, 1}};
  }
};

/// Hands out a workspace, or with none counts what is needed.
class Places {
 public:
  explicit Places(void* data) : data_(static_cast<char*>(data)) {}
  template <class T = void>
  T* take(std::size_t bytes) {
    char* const place = data_ ? data_ + used_ : nullptr;
    used_ += (bytes + 255) / 256 * 256;
    return reinterpret_cast<T*>(place);
  }
  /// None if nothing is needed: behind the last place is nobody's memory.
  Workspace take_workspace(std::size_t bytes) { return bytes ? Workspace{take(bytes), bytes} : Workspace{}; }
  std::size_t used() const { return used_; }

 private:
  char* data_;
  std::size_t used_ = 0;
};

struct KvBlock {
  void *k = nullptr, *v = nullptr;
};

struct ForwardPlaces {
  std::array<KvBlock, 2> blocks;             ///< ring: that under way and that at work
  KvBlock all;                               ///< all_gather: every rank's
  std::array<void*, 2> state;                ///< O of each chunk of queries
  void* part;                                ///< and of a step
  std::array<std::array<float*, 2>, 2> lse;  ///< of each chunk, by turns
  float* part_lse;
  Workspace kernels;
};

struct BackwardPlaces {
  std::array<KvBlock, 2> blocks, sums;
  KvBlock all, all_sums;
  void* dq;
  float* zeros;  ///< the LSE of sums that merge() rounds
  Workspace kernels;
};

}  // namespace

struct SharedAttention::Impl {
  Runtime& runtime;
  SharedSequence s;
  void* comm;
  std::shared_ptr<const device::Nccl> nccl;
  std::shared_ptr<const device::Driver> driver;
  device::Event step_begins, arrived, sums_ready;
  int rank = 0, ranks = 1;

  Impl(Runtime& given, const SharedSequence& sequence, void* communicator, const Environment& environment,
       const std::string& library)
      : runtime(given),
        s(sequence),
        comm(communicator),
        nccl(device::Nccl::open(library.empty() ? environment.nccl : library)),
        driver(device::Driver::open(environment.libcuda)),
        step_begins(driver),
        arrived(driver),
        sums_ready(driver) {
    AttentionSpec plain{.dtype = s.spec.dtype, .head_dim = s.spec.head_dim, .head_dim_v = s.spec.v_dim()};
    if (!s.spec.mask.empty()) plain.mask = causal();
    AttentionSpec asked = s.spec;
    asked.pass = plain.pass;
    if (asked.normalized() != plain.normalized())
      refuse(
          "the spec of a shared sequence is {}: it has an element type, head dimensions, and the mask causal "
          "or "
          "none; nothing else.",
          to_string(s.spec));
    if (s.batch < 1 || s.heads_kv < 1 || s.heads_q % s.heads_kv != 0 || s.rows < 1)
      refuse(
          "a shared sequence has batch {}, {} heads, {} of K and V, and {} rows a rank: they are at least 1, "
          "and the "
          "heads of K and V divide the others.",
          s.batch, s.heads_q, s.heads_kv, s.rows);
    if (s.rows % chunks() != 0)
      refuse("{} rows a rank are odd, and zigzag has two blocks of them: pad them to {}.", s.rows,
             s.rows + 1);
    nccl->check(nccl->comm_count(comm, &ranks), "ncclCommCount");
    nccl->check(nccl->comm_user_rank(comm, &rank), "ncclCommUserRank");
  }

  int chunks() const { return s.layout == ShardLayout::zigzag ? 2 : 1; }
  std::int64_t chunk_rows() const { return s.rows / chunks(); }
  int element() const { return size_of(s.spec.dtype); }
  std::size_t k_bytes(int element) const { return s.batch * s.heads_kv * s.rows * s.spec.head_dim * element; }
  std::size_t v_bytes(int element) const { return s.batch * s.heads_kv * s.rows * s.spec.v_dim() * element; }
  std::size_t lse_bytes() const { return s.batch * s.heads_q * chunk_rows() * sizeof(float); }
  bool is_ring() const { return s.scheme == SharingScheme::ring && ranks > 1; }
  bool gathers() const { return s.scheme == SharingScheme::all_gather && ranks > 1; }

  Seen seen(int chunk, int owner) const {
    if (s.spec.mask.empty()) return {s.rows, false};
    if (s.layout == ShardLayout::contiguous) {
      if (owner > rank) return {};
      return {s.rows, owner == rank};
    }
    // Block `rank` of 2 * ranks sees first blocks alone; the other one all of these, and second ones of
    // higher ranks.
    if (chunk == 0) return owner > rank ? Seen{} : Seen{chunk_rows(), owner == rank};
    return {owner < rank ? chunk_rows() : s.rows, owner == rank};
  }
  AttentionSpec spec(Pass pass, bool causal_mask) const {
    AttentionSpec result{
        .pass = pass, .dtype = s.spec.dtype, .head_dim = s.spec.head_dim, .head_dim_v = s.spec.v_dim()};
    if (causal_mask) result.mask = causal();
    result.fp32_out = pass == Pass::forward;
    result.add_grads = pass == Pass::backward;
    return result;
  }
  AttentionShape shape(const Seen& what) const {
    return {s.batch, s.heads_q, s.heads_kv, chunk_rows(), what.rows};
  }
  /// All calls that this rank makes, each once.
  template <class Call>
  void for_each_call(Call call) const {
    for (int owner = 0; owner < ranks; ++owner)
      for (int chunk = 0; chunk < chunks(); ++chunk)
        if (const Seen what = seen(chunk, owner); what.rows > 0) call(what);
  }
  std::size_t kernel_bytes(Pass pass) const {
    std::size_t most = 0;
    for_each_call([&](const Seen& what) {
      most = std::max(most, runtime.workspace_bytes(spec(pass, what.causal), shape(what)));
    });
    return most;
  }

  KvBlock take_block(Places& places, int element, int count = 1) const {
    KvBlock block;
    block.k = places.take(k_bytes(element) * count);
    block.v = places.take(v_bytes(element) * count);
    return block;
  }
  ForwardPlaces forward_places(Places& places) const {
    ForwardPlaces p{};
    const std::size_t out = s.batch * s.heads_q * chunk_rows() * s.spec.v_dim() * sizeof(float);
    if (is_ring())
      for (KvBlock& block : p.blocks) block = take_block(places, element());
    if (gathers()) p.all = take_block(places, element(), ranks);
    for (int i = 0; i < chunks(); ++i) {
      p.state[i] = places.take(out);
      for (float*& lse : p.lse[i]) lse = places.take<float>(lse_bytes());
    }
    p.part = places.take(out);
    p.part_lse = places.take<float>(lse_bytes());
    p.kernels = places.take_workspace(kernel_bytes(Pass::forward));
    return p;
  }
  BackwardPlaces backward_places(Places& places) const {
    BackwardPlaces p{};
    constexpr int kFloat = sizeof(float);
    if (is_ring())
      for (KvBlock& block : p.blocks) block = take_block(places, element());
    if (gathers())
      p.all = take_block(places, element(), ranks), p.all_sums = take_block(places, kFloat, ranks);
    for (KvBlock& sum : p.sums) sum = take_block(places, kFloat);
    p.dq = places.take(s.batch * s.heads_q * s.rows * s.spec.head_dim * kFloat);
    p.zeros = places.take<float>(lse_bytes() * chunks());
    p.kernels = places.take_workspace(kernel_bytes(Pass::backward));
    return p;
  }
  std::size_t workspace_bytes(Pass pass) const {
    Places counted(nullptr);
    if (pass == Pass::forward)
      forward_places(counted);
    else
      backward_places(counted);
    return counted.used();
  }
  void check_workspace(Pass pass, const Workspace& given) const {
    if (const std::size_t needed = workspace_bytes(pass); !given.data || given.bytes < needed)
      refuse("the workspace has {} bytes: workspace_bytes() asks for {}.", given.data ? given.bytes : 0,
             needed);
  }

  Rows q_rows(const void* data) const {
    return {const_cast<void*>(data), s.heads_q, s.rows, s.spec.head_dim, element()};
  }
  Rows o_rows(const void* data) const {
    return {const_cast<void*>(data), s.heads_q, s.rows, s.spec.v_dim(), element()};
  }
  Rows k_rows(void* data, int element) const { return {data, s.heads_kv, s.rows, s.spec.head_dim, element}; }
  Rows v_rows(void* data, int element) const { return {data, s.heads_kv, s.rows, s.spec.v_dim(), element}; }
  KvBlock of_owner(const KvBlock& all, int owner, int element) const {
    return {static_cast<char*>(all.k) + owner * k_bytes(element),
            static_cast<char*>(all.v) + owner * v_bytes(element)};
  }

  void wait(CUstream stream, const device::Event& event) const { event.make_wait(stream); }
  /// A block goes to the next rank, and the previous one's comes in.
  void travel(const KvBlock& from, const KvBlock& to, int element, CUstream copies) const {
    const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    using N = device::Nccl;
    nccl->check(nccl->group_start(), "ncclGroupStart");
    nccl->check(nccl->send(from.k, k_bytes(element), N::kBytes, next, comm, copies), "ncclSend");
    nccl->check(nccl->send(from.v, v_bytes(element), N::kBytes, next, comm, copies), "ncclSend");
    nccl->check(nccl->recv(to.k, k_bytes(element), N::kBytes, previous, comm, copies), "ncclRecv");
    nccl->check(nccl->recv(to.v, v_bytes(element), N::kBytes, previous, comm, copies), "ncclRecv");
    nccl->check(nccl->group_end(), "ncclGroupEnd");
  }
  void gather(const KvBlock& mine, const KvBlock& all, CUstream stream, CUstream copies) const {
    step_begins.record(stream);
    wait(copies, step_begins);
    using N = device::Nccl;
    nccl->check(nccl->all_gather(mine.k, all.k, k_bytes(element()), N::kBytes, comm, copies),
                "ncclAllGather");
    nccl->check(nccl->all_gather(mine.v, all.v, v_bytes(element()), N::kBytes, comm, copies),
                "ncclAllGather");
    arrived.record(copies);
    wait(stream, arrived);
  }
  void clear(void* data, std::size_t bytes, CUstream stream) const {
    driver->check(driver->memset_d8_async(reinterpret_cast<CUdeviceptr>(data), 0, bytes, stream),
                  "cuMemsetD8Async");
  }

  /// Calls `step(owner, block)` for every rank's K and V, while the next block is under way.
  template <class Step>
  void for_each_block(const KvBlock& mine, const std::array<KvBlock, 2>& blocks, const KvBlock& all,
                      CUstream stream, CUstream copies, Step step) const {
    if (!is_ring()) {
      if (gathers()) gather(mine, all, stream, copies);
      for (int i = 0; i < ranks; ++i) {
        const int owner = (rank + ranks - i) % ranks;
        step(owner, gathers() && owner != rank ? of_owner(all, owner, element()) : mine);
      }
      return;
    }
    KvBlock now = mine;
    for (int i = 0; i < ranks; ++i) {
      const KvBlock& next = blocks[i % 2];
      if (i + 1 < ranks) {
        step_begins.record(stream);  // the step before has read what is overwritten now
        wait(copies, step_begins);
        travel(now, next, element(), copies);
        arrived.record(copies);
      }
      step((rank + ranks - i) % ranks, now);
      if (i + 1 < ranks) wait(stream, arrived);
      now = next;
    }
  }

  void forward(const SharedForwardArgs& args, CUstream stream, CUstream copies) {
    check_workspace(Pass::forward, args.workspace);
    Places places(args.workspace.data);
    const ForwardPlaces p = forward_places(places);
    std::array<int, 2> joined{};  // states so far, of each chunk
    const auto fp32_rows = [&](void* data) {
      return Rows{data, s.heads_q, chunk_rows(), s.spec.v_dim(), sizeof(float)}.view(s.batch, 0,
                                                                                     chunk_rows());
    };
    const KvBlock mine{const_cast<void*>(args.k), const_cast<void*>(args.v)};
    const auto step = [&](int owner, const KvBlock& block) {
      for (int i = 0; i < chunks(); ++i) {
        const Seen what = seen(i, owner);
        if (what.rows == 0) continue;
        const bool first = joined[i] == 0;
        float* const lse = first ? p.lse[i][0] : p.part_lse;
        runtime.forward(spec(Pass::forward, what.causal),
                        {.q = q_rows(args.q).view(s.batch, i * chunk_rows(), chunk_rows()),
                         .k = k_rows(block.k, element()).view(s.batch, 0, what.rows),
                         .v = v_rows(block.v, element()).view(s.batch, 0, what.rows),
                         .out = fp32_rows(first ? p.state[i] : p.part),
                         .lse = lse,
                         .softmax_scale = args.softmax_scale,
                         .workspace = p.kernels},
                        stream);
        if (!first) {
          const int turn = (joined[i] - 1) % 2;
          const std::array<PartialState, 2> states{PartialState{fp32_rows(p.state[i]), p.lse[i][turn]},
                                                   PartialState{fp32_rows(p.part), p.part_lse}};
          runtime.merge(s.spec,
                        {.states = states,
                         .out = fp32_rows(p.state[i]),
                         .lse = p.lse[i][1 - turn],
                         .states_type = DType::fp32,
                         .out_type = DType::fp32},
                        stream);
        }
        ++joined[i];
      }
    };
    for_each_block(mine, p.blocks, p.all, stream, copies, step);
    for (int i = 0; i < chunks(); ++i) {
      const std::array<PartialState, 1> state{
          PartialState{fp32_rows(p.state[i]), p.lse[i][(joined[i] - 1) % 2]}};
      runtime.merge(s.spec,
                    {.states = state,
                     .out = o_rows(args.out).view(s.batch, i * chunk_rows(), chunk_rows()),
                     .lse = args.lse ? args.lse + i * (lse_bytes() / sizeof(float)) : nullptr,
                     .states_type = DType::fp32},
                    stream);
    }
  }

  /// Sums in fp32 to the spec's type.
  void round(void* sums, void* to, std::int64_t heads, int dim, const float* zeros, CUstream stream) const {
    AttentionSpec of_dim = s.spec;
    of_dim.head_dim = of_dim.head_dim_v = dim;
    const std::array<PartialState, 1> state{
        PartialState{Rows{sums, heads, s.rows, dim, sizeof(float)}.view(s.batch, 0, s.rows), zeros}};
    runtime.merge(of_dim,
                  {.states = state,
                   .out = Rows{to, heads, s.rows, dim, element()}.view(s.batch, 0, s.rows),
                   .states_type = DType::fp32},
                  stream);
  }

  void backward(const SharedBackwardArgs& args, CUstream stream, CUstream copies) {
    check_workspace(Pass::backward, args.workspace);
    Places places(args.workspace.data);
    const BackwardPlaces p = backward_places(places);
    constexpr int kFloat = sizeof(float);
    clear(p.dq, s.batch * s.heads_q * s.rows * s.spec.head_dim * kFloat, stream);
    clear(p.zeros, lse_bytes() * chunks(), stream);
    const auto clear_block = [&](const KvBlock& block, int count) {
      clear(block.k, k_bytes(kFloat) * count, stream), clear(block.v, v_bytes(kFloat) * count, stream);
    };
    if (gathers())
      clear_block(p.all_sums, ranks);
    else
      clear_block(p.sums[0], 1);
    const KvBlock mine{const_cast<void*>(args.k), const_cast<void*>(args.v)};
    int steps = 0;
    const auto step = [&](int owner, const KvBlock& block) {
      // The sums of a block follow it: those of the ranks before have come when this one adds its own.
      const KvBlock sums = gathers() ? of_owner(p.all_sums, owner, kFloat) : p.sums[steps % 2];
      if (is_ring() && steps > 0) wait(stream, sums_ready);
      for (int i = 0; i < chunks(); ++i)
        if (const Seen what = seen(i, owner); what.rows > 0)
          add_gradients(args, p, i, what, block, sums, stream);
      ++steps;
      if (!is_ring()) return;
      step_begins.record(stream);
      wait(copies, step_begins);
      travel(sums, p.sums[steps % 2], kFloat, copies);
      sums_ready.record(copies);
    };
    for_each_block(mine, p.blocks, p.all, stream, copies, step);
    KvBlock home = p.sums[is_ring() ? steps % 2 : 0];
    if (is_ring()) wait(stream, sums_ready);
    if (gathers()) {
      step_begins.record(stream);
      wait(copies, step_begins);
      using N = device::Nccl;
      const auto scatter = [&](void* from, void* to, std::size_t bytes) {
        nccl->check(nccl->reduce_scatter(from, to, bytes / kFloat, N::kFloats, N::kSum, comm, copies),
                    "ncclReduceScatter");
      };
      scatter(p.all_sums.k, home.k, k_bytes(kFloat));
      scatter(p.all_sums.v, home.v, v_bytes(kFloat));
      arrived.record(copies);
      wait(stream, arrived);
    }
    round(p.dq, args.dq, s.heads_q, s.spec.head_dim, p.zeros, stream);
    round(home.k, args.dk, s.heads_kv, s.spec.head_dim, p.zeros, stream);
    round(home.v, args.dv, s.heads_kv, s.spec.v_dim(), p.zeros, stream);
  }
  void add_gradients(const SharedBackwardArgs& args, const BackwardPlaces& p, int chunk, const Seen& what,
                     const KvBlock& block, const KvBlock& sums, CUstream stream) {
    constexpr int kFloat = sizeof(float);
    const auto own = [&](const Rows& rows) { return rows.view(s.batch, chunk * chunk_rows(), chunk_rows()); };
    runtime.backward(spec(Pass::backward, what.causal),
                     {.q = own(q_rows(args.q)),
                      .k = k_rows(block.k, element()).view(s.batch, 0, what.rows),
                      .v = v_rows(block.v, element()).view(s.batch, 0, what.rows),
                      .out = own(o_rows(args.out)),
                      .lse = args.lse + chunk * (lse_bytes() / sizeof(float)),
                      .dout = own(o_rows(args.dout)),
                      .dq = own({p.dq, s.heads_q, s.rows, s.spec.head_dim, kFloat}),
                      .dk = k_rows(sums.k, kFloat).view(s.batch, 0, what.rows),
                      .dv = v_rows(sums.v, kFloat).view(s.batch, 0, what.rows),
                      .softmax_scale = args.softmax_scale,
                      .workspace = p.kernels},
                     stream);
  }

  /// What all ranks must have alike, as a number.
  std::uint64_t digest(Pass pass) const {
    AttentionSpec of_pass = s.spec;
    of_pass.pass = pass;
    return std::hash<std::string>{}(fmt::format("{} {} {} {} {} {} {}", to_string(of_pass), s.batch,
                                                s.heads_q, s.heads_kv, s.rows, static_cast<int>(s.scheme),
                                                static_cast<int>(s.layout)));
  }
  void prepare(Pass pass, const Workspace& workspace, CUstream stream) {
    check_workspace(pass, workspace);
    for_each_call([&](const Seen& what) { runtime.prepare(spec(pass, what.causal), shape(what)); });
    const std::uint64_t own = digest(pass);
    std::vector<std::uint64_t> all(ranks);
    if ((ranks + 1) * sizeof(own) > workspace.bytes) return;  // a problem too small to matter
    const auto place = reinterpret_cast<CUdeviceptr>(workspace.data);
    driver->check(driver->memcpy_htod(place, &own, sizeof(own)), "cuMemcpyHtoD");
    nccl->check(nccl->all_gather(workspace.data, static_cast<char*>(workspace.data) + sizeof(own),
                                 sizeof(own), device::Nccl::kBytes, comm, stream),
                "ncclAllGather");
    driver->check(driver->stream_synchronize(stream), "cuStreamSynchronize");
    driver->check(driver->memcpy_dtoh(all.data(), place + sizeof(own), all.size() * sizeof(own)),
                  "cuMemcpyDtoH");
    for (int other = 0; other < ranks; ++other)
      if (all[other] != all[0])
        refuse(
            "rank {} was given another shared sequence, or pass, than rank 0; rank {}, this one, has {} of "
            "batch {}, {} and "
            "{} heads, {} rows a rank: give all ranks the same.",
            other, rank, to_string(s.spec), s.batch, s.heads_q, s.heads_kv, s.rows);
  }
};

SharedAttention::SharedAttention(Runtime& runtime, const SharedSequence& sequence, void* communicator,
                                 const std::string& nccl)
    : impl_(std::make_unique<Impl>(runtime, sequence, communicator, read_environment(), nccl)) {}
SharedAttention::~SharedAttention() = default;
SharedAttention::SharedAttention(SharedAttention&&) noexcept = default;
SharedAttention& SharedAttention::operator=(SharedAttention&&) noexcept = default;

void SharedAttention::prepare(Pass pass, Workspace workspace, Stream stream) {
  impl_->prepare(pass, workspace, stream);
}
std::size_t SharedAttention::workspace_bytes(Pass pass) const { return impl_->workspace_bytes(pass); }
void SharedAttention::forward(const SharedForwardArgs& args, Stream stream, Stream copies) {
  impl_->forward(args, stream, copies);
}
void SharedAttention::backward(const SharedBackwardArgs& args, Stream stream, Stream copies) {
  impl_->backward(args, stream, copies);
}

}  // namespace flashjit

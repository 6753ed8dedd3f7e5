#include "flashjit/distributed.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "api/shared_schedule.hpp"
#include "device/nccl.hpp"
#include "device/resources.hpp"
#include "flashjit/attention_programs.hpp"
#include "support/environment.hpp"
#include "support/refuse.hpp"

namespace flashjit {
namespace {

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
  std::array<KvBlock, 2> blocks;  ///< ring: that under way and that at work
  KvBlock all;                    ///< all_gather: every rank's
  void* state;                    ///< O of all rows
  void* part;                     ///< and of a call
  std::array<float*, 2> lse;      ///< of each segment, by turns
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
  std::vector<RowChunk> segments;  ///< of this rank's rows

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
    AttentionSpec plain{.dtype = s.spec.dtype,
                        .head_dim = s.spec.head_dim,
                        .head_dim_v = s.spec.v_dim(),
                        .dropout = s.spec.dropout};
    if (!s.spec.mask.empty()) plain.mask = causal();
    AttentionSpec asked = s.spec;
    asked.pass = plain.pass;
    if (asked.normalized() != plain.normalized())
      refuse(
          "the spec of a shared sequence is {}: it has an element type, head dimensions, the mask causal or "
          "none, and "
          "dropout; nothing else.",
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
    if (s.window < 0 || (s.window > 0 && s.spec.mask.empty()))
      refuse(
          "the window of a shared sequence is {}: it is of 1 key or more with the mask causal, or 0 for "
          "none.",
          s.window);
    if (s.reserved_sms < 0) refuse("reserved_sms is {}: give 0 or more.", s.reserved_sms);
    nccl->check(nccl->comm_count(comm, &ranks), "ncclCommCount");
    nccl->check(nccl->comm_user_rank(comm, &rank), "ncclCommUserRank");
    check_documents();
    segments = segments_of(s, rank, ranks);
  }
  void check_documents() const {
    const auto& ends = s.documents;
    if (ends.empty()) return;
    if (ends.front() != 0 || ends.back() != s.rows * ranks || !std::ranges::is_sorted(ends))
      refuse(
          "the documents of a shared sequence go from {} to {} for {} rows of all ranks: they begin with 0, "
          "do not fall, "
          "and end with the rows.",
          ends.front(), ends.back(), s.rows * ranks);
    if (s.batch != 1) refuse("a shared sequence of documents has batch {}: it is 1.", s.batch);
  }

  int chunks() const { return s.layout == ShardLayout::zigzag ? 2 : 1; }
  int element() const { return size_of(s.spec.dtype); }
  std::size_t k_bytes(int element) const { return s.batch * s.heads_kv * s.rows * s.spec.head_dim * element; }
  std::size_t v_bytes(int element) const { return s.batch * s.heads_kv * s.rows * s.spec.v_dim() * element; }
  std::size_t lse_bytes(std::int64_t rows) const { return s.batch * s.heads_q * rows * sizeof(float); }
  /// Of a segment, in an LSE of all rows.
  float* lse_of(float* lse, const RowChunk& rows) const { return lse + s.batch * s.heads_q * rows.begin; }
  std::int64_t longest_segment() const {
    return std::ranges::max_element(segments, {}, &RowChunk::count)->count;
  }
  bool is_ring() const { return s.scheme == SharingScheme::ring && ranks > 1; }
  bool gathers() const { return s.scheme == SharingScheme::all_gather && ranks > 1; }

  AttentionSpec spec(Pass pass, CallMask mask) const {
    AttentionSpec result{.pass = pass,
                         .dtype = s.spec.dtype,
                         .head_dim = s.spec.head_dim,
                         .head_dim_v = s.spec.v_dim(),
                         .dropout = s.spec.dropout};
    if (mask == CallMask::causal) result.mask = causal();
    // Queries and keys are `shift` positions apart, which differs between calls; their kernels are the same.
    if (mask == CallMask::window || mask == CallMask::causal_window)
      result.mask = MaskProgram(fmt::format("shift: int; {}q + shift - kv < {}",
                                            mask == CallMask::window ? "" : "q + shift >= kv && ", s.window));
    result.fp32_out = pass == Pass::forward;
    result.add_grads = pass == Pass::backward;
    result.dropout_place = s.spec.dropout;
    return result;
  }
  AttentionShape shape(const SharedCall& call) const {
    return {s.batch, s.heads_q, s.heads_kv, segments[call.segment].count, call.keys.count};
  }
  /// What the two passes' arguments have alike. `capture` has the place of the call's own.
  template <class Args, class Given>
  void set_common(Args& args, const Given& given, const SharedCall& call, Capture& capture,
                  const Workspace& workspace, bool travelling) const {
    const RowChunk& rows = segments[call.segment];
    args.softmax_scale = given.softmax_scale;
    args.workspace = workspace;
    args.dropout_p = given.dropout_p;
    args.seed = given.seed;
    args.offset = given.offset;
    if (s.spec.dropout) args.dropout_place = {.batch = rows.document, .q = rows.first, .kv = call.keys.first};
    if (call.mask == CallMask::window || call.mask == CallMask::causal_window) {
      capture = {.name = "shift", .scalar = static_cast<double>(rows.first - call.keys.first)};
      args.captures = {&capture, 1};
    }
    if (is_ring() && travelling) args.reserved_sms = s.reserved_sms;
  }
  /// All calls that this rank makes, each once.
  template <class Call>
  void for_each_call(Call call) const {
    for (int owner = 0; owner < ranks; ++owner)
      for (const SharedCall& one : calls_with(s, rank, owner, ranks)) call(one);
  }
  std::size_t kernel_bytes(Pass pass) const {
    std::size_t most = 0;
    for_each_call([&](const SharedCall& call) {
      most = std::max(most, runtime.workspace_bytes(spec(pass, call.mask), shape(call)));
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
    if (is_ring())
      for (KvBlock& block : p.blocks) block = take_block(places, element());
    if (gathers()) p.all = take_block(places, element(), ranks);
    const std::int64_t longest = longest_segment();
    p.state = places.take(lse_bytes(s.rows) * s.spec.v_dim());
    for (float*& lse : p.lse) lse = places.take<float>(lse_bytes(s.rows));
    p.part = places.take(lse_bytes(longest) * s.spec.v_dim());
    p.part_lse = places.take<float>(lse_bytes(longest));
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
    p.zeros = places.take<float>(lse_bytes(s.rows));
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
    std::vector<int> joined(segments.size());  // states so far, of each segment
    const auto state = [&](const RowChunk& rows) {
      return Rows{p.state, s.heads_q, s.rows, s.spec.v_dim(), sizeof(float)}.view(s.batch, rows.begin,
                                                                                  rows.count);
    };
    const auto lse = [&](std::size_t segment, int turn) {
      return lse_of(p.lse[turn % 2], segments[segment]);
    };
    const KvBlock mine{const_cast<void*>(args.k), const_cast<void*>(args.v)};
    const auto step = [&](int owner, const KvBlock& block) {
      for (const SharedCall& call : calls_with(s, rank, owner, ranks)) {
        const RowChunk &rows = segments[call.segment], &keys = call.keys;
        int& count = joined[call.segment];
        const TensorView part =
            Rows{p.part, s.heads_q, rows.count, s.spec.v_dim(), sizeof(float)}.view(s.batch, 0, rows.count);
        ForwardArgs given{.q = q_rows(args.q).view(s.batch, rows.begin, rows.count),
                          .k = k_rows(block.k, element()).view(s.batch, keys.begin, keys.count),
                          .v = v_rows(block.v, element()).view(s.batch, keys.begin, keys.count),
                          .out = count == 0 ? state(rows) : part,
                          .lse = count == 0 ? lse(call.segment, 0) : p.part_lse};
        Capture capture;
        set_common(given, args, call, capture, p.kernels, owner != (rank + 1) % ranks);
        runtime.forward(spec(Pass::forward, call.mask), given, stream);
        if (count > 0) {
          const std::array<PartialState, 2> states{PartialState{state(rows), lse(call.segment, count - 1)},
                                                   PartialState{part, p.part_lse}};
          runtime.merge(s.spec,
                        {.states = states,
                         .out = state(rows),
                         .lse = lse(call.segment, count),
                         .states_type = DType::fp32,
                         .out_type = DType::fp32},
                        stream);
        }
        ++count;
      }
    };
    for_each_block(mine, p.blocks, p.all, stream, copies, step);
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const RowChunk& rows = segments[i];
      const std::array<PartialState, 1> whole{PartialState{state(rows), lse(i, joined[i] - 1)}};
      runtime.merge(s.spec,
                    {.states = whole,
                     .out = o_rows(args.out).view(s.batch, rows.begin, rows.count),
                     .lse = args.lse ? lse_of(args.lse, rows) : nullptr,
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
    clear(p.zeros, lse_bytes(s.rows), stream);
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
      for (const SharedCall& call : calls_with(s, rank, owner, ranks))
        add_gradients(args, p, call, block, sums, stream);
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
  void add_gradients(const SharedBackwardArgs& args, const BackwardPlaces& p, const SharedCall& call,
                     const KvBlock& block, const KvBlock& sums, CUstream stream) {
    constexpr int kFloat = sizeof(float);
    const RowChunk& rows = segments[call.segment];
    const auto own = [&](const Rows& all) { return all.view(s.batch, rows.begin, rows.count); };
    const auto seen = [&](const Rows& all) { return all.view(s.batch, call.keys.begin, call.keys.count); };
    BackwardArgs given{.q = own(q_rows(args.q)),
                       .k = seen(k_rows(block.k, element())),
                       .v = seen(v_rows(block.v, element())),
                       .out = own(o_rows(args.out)),
                       .lse = lse_of(const_cast<float*>(args.lse), rows),
                       .dout = own(o_rows(args.dout)),
                       .dq = own({p.dq, s.heads_q, s.rows, s.spec.head_dim, kFloat}),
                       .dk = seen(k_rows(sums.k, kFloat)),
                       .dv = seen(v_rows(sums.v, kFloat))};
    Capture capture;
    set_common(given, args, call, capture, p.kernels, true);
    runtime.backward(spec(Pass::backward, call.mask), given, stream);
  }

  /// What all ranks must have alike, as a number.
  std::uint64_t digest(Pass pass) const {
    AttentionSpec of_pass = s.spec;
    of_pass.pass = pass;
    return std::hash<std::string>{}(fmt::format(
        "{} {} {} {} {} {} {} {} {}", to_string(of_pass), s.batch, s.heads_q, s.heads_kv, s.rows,
        static_cast<int>(s.scheme), static_cast<int>(s.layout), s.window, fmt::join(s.documents, ",")));
  }
  void prepare(Pass pass, const Workspace& workspace, CUstream stream) {
    check_workspace(pass, workspace);
    for_each_call([&](const SharedCall& call) { runtime.prepare(spec(pass, call.mask), shape(call)); });
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

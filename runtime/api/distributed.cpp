#include "flashjit/distributed.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/shared_places.hpp"
#include "api/shared_programs.hpp"
#include "api/shared_schedule.hpp"
#include "api/shared_transfers.hpp"
#include "call/arguments.hpp"
#include "call/captures.hpp"
#include "call/tensor_checks.hpp"
#include "device/resources.hpp"
#include "support/environment.hpp"
#include "support/refuse.hpp"

namespace flashjit {
struct SharedAttention::Impl {
  Runtime& runtime;
  SharedSequence sequence;
  SharedSequence s;  ///< what is computed: `sequence`, or all rows of this rank's heads
  Transfers transfers;
  device::Event arrived, sums_ready;
  Communicator rows_comm, heads_comm;  ///< ranks that share the rows of `s`, and its heads
  HeadShares head_shares;
  std::vector<RowChunk> segments;              ///< of this rank's rows
  std::vector<std::vector<SharedCall>> calls;  ///< by the owner of the keys
  std::vector<expr::Declaration> declared;     ///< by the programs as they are given
  AttentionSpec plain;                         ///< of a call without a mask and without sinks
  MaskProgram moved_mask;

  Impl(Runtime& made, const SharedSequence& given, void* communicator, const Environment& environment,
       const std::string& library)
      : runtime(made),
        sequence(given),
        s(given),
        transfers(library.empty() ? environment.nccl : library, environment.libcuda),
        arrived(transfers.driver()),
        sums_ready(transfers.driver()) {
    check_spec();
    check_sizes();
    take_communicators(communicator);
    take_programs();
    const int ranks = rows_comm.ranks, all_ranks = ranks * heads_comm.ranks;
    if (s.rows > std::numeric_limits<std::int32_t>::max() / all_ranks)
      refuse("{} ranks of {} rows are more than programs and kernels can count.", all_ranks, s.rows);
    if (shares_heads()) take_heads();
    check_documents();
    segments = segments_of(s, rows_comm.rank, ranks);
    for (int owner = 0; owner < ranks; ++owner) calls.push_back(calls_with(s, rows_comm.rank, owner, ranks));
    std::vector<SharedCall*> latest(segments.size());
    for (int i = 0; i < ranks; ++i)
      for (SharedCall& call : calls[owner_at(i)]) latest[call.segment] = &call;
    for (SharedCall* call : latest) call->last = true;
  }
  void check_spec() const {
    s.spec.validate();
    if (s.spec.score.is_weight())
      refuse(
          "the spec of a shared sequence has weight_mod: parts of a row are joined by their LSE, which "
          "weights "
          "have not; give a score program, or call attention on one GPU.");
    const AttentionSpec allowed{.dtype = s.spec.dtype,
                                .head_dim = s.spec.head_dim,
                                .head_dim_v = s.spec.v_dim(),
                                .score = s.spec.score,
                                .mask = s.spec.mask,
                                .dropout = s.spec.dropout,
                                .sinks = s.spec.sinks};
    if (KernelSpec{s.spec}.normalized() != KernelSpec{allowed}.normalized())
      refuse(
          "the spec of a shared sequence is {}: it has an element type, head dimensions, programs, "
          "dropout and sinks; nothing else.",
          to_string(s.spec));
  }
  void check_sizes() const {
    if (s.batch < 1 || s.heads_q < 1 || s.heads_kv < 1 || s.heads_q % s.heads_kv != 0 || s.rows < 1)
      refuse(
          "a shared sequence has batch {}, {} heads, {} of K and V, and {} rows a rank: they are at least 1, "
          "and the heads of K and V divide the others.",
          s.batch, s.heads_q, s.heads_kv, s.rows);
    AttentionShape{s.batch, s.heads_q, s.heads_kv, 1, 1}.validate();
    if (s.rows % chunks() != 0)
      refuse("{} rows a rank are odd, and zigzag has two blocks of them: pad them to {}.", s.rows,
             s.rows + 1);
    if (s.window < 0 || (s.window > 0 && s.spec.mask != causal()))
      refuse(
          "the window of a shared sequence is {}: it is of 1 key or more with the mask causal, or 0 for "
          "none.",
          s.window);
    if (s.window > std::numeric_limits<std::int32_t>::max())
      refuse("the window of a shared sequence is {}: give at most 2^31 - 1, or 0 for none.", s.window);
    if (s.reserved_sms < 0) refuse("reserved_sms is {}: give 0 or more.", s.reserved_sms);
  }
  void take_communicators(void* given) {
    if (!given) refuse("the communicator is null: give the ncclComm_t of the ranks that share the sequence.");
    if (is_ulysses() && sequence.heads_communicator)
      refuse(
          "heads_communicator is given with ulysses, whose ranks all share heads: leave it out, or use ring "
          "or all_gather for two levels.");
    void* const heads = is_ulysses() ? given : sequence.heads_communicator;
    if (heads) heads_comm = transfers.ranks_of(heads);
    if (!is_ulysses()) rows_comm = transfers.ranks_of(given);
  }
  /// All rows of the ranks that share heads, of a share of the heads.
  void take_heads() {
    const int peers = heads_comm.ranks;
    if (s.heads_q % peers != 0 || s.heads_kv % peers != 0)
      refuse(
          "{} heads, and {} of K and V, do not divide into the {} ranks that share them: use ring or "
          "all_gather.",
          s.heads_q, s.heads_kv, peers);
    s.rows *= peers;
    s.heads_q /= peers;
    s.heads_kv /= peers;
    if (is_ulysses()) s.layout = ShardLayout::contiguous;
    head_shares = {s.batch, sequence.rows, s.rows, element()};
    for (int peer = 0; peer < peers; ++peer)
      head_shares.chunks.push_back(is_ulysses()
                                       ? chunks_of(sequence, peer, peers)
                                       : std::vector<RowChunk>{{0, sequence.rows, peer * sequence.rows}});
  }
  void take_programs() {
    declared = expr::declarations(s.spec.score, mask_of(s));
    for (const expr::Declaration& one : declared)
      if (one.name.starts_with("part_"))
        refuse(
            "the program of a shared sequence declares '{}': give it a name that does not begin with part_.",
            one.name);
    const PartMoves moves{.heads = shares_heads(), .batch = !s.documents.empty()};
    plain = s.spec;
    plain.mask = {};
    plain.sinks = false;
    plain.partial.dropout_place = s.spec.dropout;
    plain.score = moved(s.spec.score, moves);
    moved_mask = moved(mask_of(s), moves);
    expr::declarations(plain.score, moved_mask);  // refuses too many
  }
  void check_documents() const {
    const auto& ends = s.documents;
    if (ends.empty()) return;
    const std::int64_t all_rows = s.rows * rows_comm.ranks;
    if (ends.front() != 0 || ends.back() != all_rows || !std::ranges::is_sorted(ends))
      refuse(
          "the documents of a shared sequence go from {} to {} for {} rows of all ranks: they begin with 0, "
          "do not fall, and end with the rows.",
          ends.front(), ends.back(), all_rows);
    if (s.batch != 1) refuse("a shared sequence of documents has batch {}: it is 1.", s.batch);
  }

  int chunks() const { return s.layout == ShardLayout::zigzag ? 2 : 1; }
  int element() const { return size_of(s.spec.dtype); }
  std::size_t k_bytes(int element) const { return s.batch * s.heads_kv * s.rows * s.spec.head_dim * element; }
  std::size_t v_bytes(int element) const { return s.batch * s.heads_kv * s.rows * s.spec.v_dim() * element; }
  std::size_t lse_bytes(std::int64_t rows) const { return s.batch * s.heads_q * rows * sizeof(float); }
  /// A segment's part of an LSE of all rows.
  float* lse_of(float* lse, const RowChunk& rows) const { return lse + s.batch * s.heads_q * rows.begin; }
  /// The rank whose keys a step has: at first this one, then the ranks before it.
  int owner_at(int step) const { return (rows_comm.rank + rows_comm.ranks - step) % rows_comm.ranks; }
  /// Whether any segment has several calls.
  bool joins() const {
    bool several = false;
    for_each_call([&](const SharedCall& call) { several |= !call.last; });
    return several;
  }
  bool is_ulysses() const { return sequence.scheme == SharingScheme::ulysses; }
  bool shares_heads() const { return heads_comm.handle != nullptr; }
  /// This rank's first head among all.
  std::int64_t first_head() const { return heads_comm.rank * s.heads_q; }
  bool is_ring() const { return s.scheme == SharingScheme::ring && rows_comm.ranks > 1; }
  bool gathers() const { return s.scheme == SharingScheme::all_gather && rows_comm.ranks > 1; }

  KernelSpec spec(Pass pass, const SharedCall& call) const {
    KernelSpec result{plain, pass};
    if (call.mask == CallMask::causal) result.mask = causal();
    if (call.mask == CallMask::program) result.mask = moved_mask;
    result.sinks = s.spec.sinks && call.first;  // one call of each row has it
    result.partial.fp32_out = pass == Pass::forward && !call.last;
    result.partial.running_state = pass == Pass::forward && !call.first;
    result.partial.add_grads = pass == Pass::backward;
    return result;
  }
  AttentionShape shape(const SharedCall& call) const {
    return {s.batch, s.heads_q, s.heads_kv, segments[call.segment].count, call.keys.count};
  }
  PartPlace place_of(const SharedCall& call) const {
    const RowChunk& rows = segments[call.segment];
    return {.q = rows.first,
            .kv = call.keys.first,
            .head = first_head(),
            .head_kv = first_head() * s.heads_kv / s.heads_q,
            .batch = rows.document,
            .length = length_of(s, rows.document, rows_comm.ranks)};
  }
  /// Values of the names that a call's programs declare: the caller's, and the call's place.
  std::vector<Capture> captures_of(const AttentionSpec& spec, std::span<const Capture> all,
                                   const SharedCall& call) const {
    const std::array<std::int64_t, 6> places = place_of(call).values();
    std::vector<Capture> values;
    for (const expr::Declaration& one : expr::declarations(spec.score, spec.mask)) {
      const auto part = std::ranges::find(kPartNames, one.name);
      if (part != kPartNames.end())
        values.push_back({.name = *part, .scalar = static_cast<double>(places[part - kPartNames.begin()])});
      else
        values.push_back(*std::ranges::find(all, one.name, &Capture::name));
    }
    return values;
  }
  /// What the two passes' arguments have alike.
  template <class Args, class Given>
  void set_common(Args& args, const Given& given, const SharedCall& call, std::span<const Capture> captures,
                  const Workspace& workspace, bool travelling) const {
    const RowChunk& rows = segments[call.segment];
    args.softmax_scale = given.softmax_scale;
    args.workspace = workspace;
    args.dropout_p = given.dropout_p;
    args.seed = given.seed;
    args.offset = given.offset;
    args.captures = captures;
    if (s.spec.dropout)
      args.partial.dropout_place = {.batch = rows.document,
                                    .head = first_head(),
                                    .heads = sequence.heads_q,
                                    .q = rows.first,
                                    .kv = call.keys.first};
    if (s.spec.sinks && call.first) args.sinks = given.sinks + first_head();
    if (is_ring() && travelling) args.partial.reserved_sms = s.reserved_sms;
  }
  /// The caller's arguments, as arguments of one call. They are checked before anything is sent.
  template <class Args, class Given>
  Args as_one_call(const Given& given) const {
    const auto view = [&](const void* data, std::int64_t heads, int dim) {
      return Rows{const_cast<void*>(data), heads, sequence.rows, dim, element()}.view(s.batch, 0,
                                                                                      sequence.rows);
    };
    const std::int64_t heads = sequence.heads_q, heads_kv = sequence.heads_kv;
    const int d = s.spec.head_dim, dv = s.spec.v_dim();
    Args args{};
    args.q = view(given.q, heads, d);
    args.k = view(given.k, heads_kv, d);
    args.v = view(given.v, heads_kv, dv);
    args.out = view(given.out, heads, dv);
    args.lse = const_cast<float*>(given.lse);
    args.dropout_p = given.dropout_p;
    args.sinks = given.sinks;
    if constexpr (std::is_same_v<Args, BackwardArgs>) {
      args.dout = view(given.dout, heads, dv);
      args.dq = view(given.dq, heads, d);
      args.dk = view(given.dk, heads_kv, d);
      args.dv = view(given.dv, heads_kv, dv);
      args.dlse = given.dlse;
      args.dsinks = given.dsinks;
    }
    return args;
  }
  template <class Args, class Given>
  void check_given(Pass pass, const Given& given) const {
    check_arguments(s.spec, as_one_call<Args>(given));
    check_workspace(pass, given.workspace);
    check_captures(declared, given.captures, pass);
  }
  /// All calls that this rank makes, each once.
  template <class Call>
  void for_each_call(Call call) const {
    for (const std::vector<SharedCall>& with_owner : calls)
      for (const SharedCall& one : with_owner) call(one);
  }
  std::size_t kernel_bytes(Pass pass) const {
    std::size_t most = 0;
    for_each_call([&](const SharedCall& call) {
      most = std::max(most, runtime.workspace_bytes(spec(pass, call), shape(call)));
    });
    return most;
  }

  KvBlock take_block(Places& places, int element, int count = 1) const {
    KvBlock block{.k_bytes = k_bytes(element), .v_bytes = v_bytes(element)};
    block.k = places.take(block.k_bytes * count);
    block.v = places.take(block.v_bytes * count);
    return block;
  }
  ForwardPlaces forward_places(Places& places) const {
    ForwardPlaces p{};
    if (is_ring())
      for (KvBlock& block : p.blocks) block = take_block(places, element());
    if (gathers()) p.all = take_block(places, element(), rows_comm.ranks);
    const std::int64_t rows = joins() ? s.rows : 0;
    p.state = places.take(lse_bytes(rows) * s.spec.v_dim());
    p.lse = places.take<float>(lse_bytes(rows));
    p.kernels = places.take_workspace(kernel_bytes(Pass::forward));
    return p;
  }
  BackwardPlaces backward_places(Places& places) const {
    BackwardPlaces p{};
    constexpr int kFloat = sizeof(float);
    if (is_ring())
      for (KvBlock& block : p.blocks) block = take_block(places, element());
    if (gathers()) {
      p.all = take_block(places, element(), rows_comm.ranks);
      p.all_sums = take_block(places, kFloat, rows_comm.ranks);
    }
    for (KvBlock& sum : p.sums) sum = take_block(places, kFloat);
    p.dq = places.take(s.batch * s.heads_q * s.rows * s.spec.head_dim * kFloat);
    p.zeros = places.take<float>(lse_bytes(s.rows));
    p.kernels = places.take_workspace(kernel_bytes(Pass::backward));
    return p;
  }
  HeadPlaces head_places(Places& places, Pass pass) const {
    const auto of_queries = [&](int dim) {
      return places.take(s.batch * s.heads_q * s.rows * dim * element());
    };
    HeadPlaces p{.q = of_queries(s.spec.head_dim),
                 .out = of_queries(s.spec.v_dim()),
                 .kv = take_block(places, element())};
    if (pass == Pass::forward) return p;
    p.dout = of_queries(s.spec.v_dim());
    p.dq = of_queries(s.spec.head_dim);
    p.dkv = take_block(places, element());
    return p;
  }
  std::size_t workspace_bytes(Pass pass) const {
    Places counted(nullptr);
    if (shares_heads()) head_places(counted, pass);
    if (pass == Pass::forward)
      forward_places(counted);
    else
      backward_places(counted);
    Places compared(nullptr);  // by compare_ranks()
    compared.take((std::max(rows_comm.ranks, heads_comm.ranks) + 1) * sizeof(std::uint64_t));
    return std::max(counted.used(), compared.used());
  }
  void check_workspace(Pass pass, const Workspace& given) const {
    const std::size_t needed = workspace_bytes(pass);
    if (needed > 0 && (!given.data || given.bytes < needed))
      refuse("the workspace has {} bytes: workspace_bytes() asks for {}.", given.data ? given.bytes : 0,
             needed);
    check_pointer("workspace", given.data, kPlaceAlignment);
  }

  Rows q_rows(const void* data) const {
    return {const_cast<void*>(data), s.heads_q, s.rows, s.spec.head_dim, element()};
  }
  Rows o_rows(const void* data) const {
    return {const_cast<void*>(data), s.heads_q, s.rows, s.spec.v_dim(), element()};
  }
  Rows fp32_rows(void* data, std::int64_t rows) const {
    return {data, s.heads_q, rows, s.spec.v_dim(), sizeof(float)};
  }
  Rows k_rows(void* data, int element) const { return {data, s.heads_kv, s.rows, s.spec.head_dim, element}; }
  Rows v_rows(void* data, int element) const { return {data, s.heads_kv, s.rows, s.spec.v_dim(), element}; }
  KvBlock given_block(const void* k, const void* v) const {
    return {const_cast<void*>(k), const_cast<void*>(v), k_bytes(element()), v_bytes(element())};
  }
  void clear(void* data, std::size_t bytes, CUstream stream) const {
    const device::Driver& driver = *transfers.driver();
    driver.check(driver.memset_d8_async(reinterpret_cast<CUdeviceptr>(data), 0, bytes, stream),
                 "cuMemsetD8Async");
  }

  void exchange(std::initializer_list<SharedHeads> tensors, bool back, CUstream stream,
                CUstream copies) const {
    transfers.exchange(tensors, head_shares, heads_comm, back, stream, copies);
  }

  /// Calls `step(owner, block)` for every rank's K and V, while the next block is under way.
  template <class Step>
  void for_each_block(const KvBlock& mine, const std::array<KvBlock, 2>& blocks, const KvBlock& all,
                      CUstream stream, CUstream copies, Step step) const {
    if (!is_ring()) {
      if (gathers()) transfers.gather(mine, all, rows_comm, stream, copies);
      for (int i = 0; i < rows_comm.ranks; ++i) {
        const int owner = owner_at(i);
        step(owner, gathers() && owner != rows_comm.rank ? all.of(owner) : mine);
      }
      return;
    }
    KvBlock now = mine;
    for (int i = 0; i < rows_comm.ranks; ++i) {
      const KvBlock& next = blocks[i % 2];
      const bool travels = i + 1 < rows_comm.ranks;
      if (travels) {
        transfers.travel(now, next, rows_comm, stream,
                         copies);  // the step before has read this block
        arrived.record(copies);
      }
      step(owner_at(i), now);
      if (travels) arrived.make_wait(stream);
      now = next;
    }
  }

  void forward(const SharedForwardArgs& args, CUstream stream, CUstream copies) {
    check_given<ForwardArgs>(Pass::forward, args);
    Places places(args.workspace.data);
    if (!shares_heads()) return forward_rows(args, forward_places(places), stream, copies);
    const HeadPlaces p = head_places(places, Pass::forward);
    const int d = s.spec.head_dim, dv = s.spec.v_dim();
    exchange({{args.q, p.q, s.heads_q, d}, {args.k, p.kv.k, s.heads_kv, d}, {args.v, p.kv.v, s.heads_kv, dv}},
             false, stream, copies);
    SharedForwardArgs whole = args;
    whole.q = p.q, whole.k = p.kv.k, whole.v = p.kv.v, whole.out = p.out;
    forward_rows(whole, forward_places(places), stream, copies);
    exchange({{args.out, p.out, s.heads_q, dv}}, true, stream, copies);
  }
  void forward_rows(const SharedForwardArgs& args, const ForwardPlaces& p, CUstream stream, CUstream copies) {
    const KvBlock mine = given_block(args.k, args.v);
    const auto step = [&](int owner, const KvBlock& block) {
      for (const SharedCall& call : calls[owner]) {
        const RowChunk &rows = segments[call.segment], &keys = call.keys;
        const TensorView state = fp32_rows(p.state, s.rows).view(s.batch, rows.begin, rows.count);
        float* const lse = call.last ? args.lse : p.lse;
        ForwardArgs given{.q = q_rows(args.q).view(s.batch, rows.begin, rows.count),
                          .k = k_rows(block.k, element()).view(s.batch, keys.begin, keys.count),
                          .v = v_rows(block.v, element()).view(s.batch, keys.begin, keys.count),
                          .out = call.last ? o_rows(args.out).view(s.batch, rows.begin, rows.count) : state,
                          .lse = lse ? lse_of(lse, rows) : nullptr};
        if (!call.first) given.partial.state = {state, lse_of(p.lse, rows)};
        const AttentionSpec spec = this->spec(Pass::forward, call);
        const std::vector<Capture> captures = captures_of(spec, args.captures, call);
        set_common(given, args, call, captures, p.kernels, owner != owner_at(-1));
        runtime.forward(spec, given, stream);
      }
    };
    for_each_block(mine, p.blocks, p.all, stream, copies, step);
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
    check_given<BackwardArgs>(Pass::backward, args);
    Places places(args.workspace.data);
    if (!shares_heads()) return backward_rows(args, backward_places(places), stream, copies);
    const HeadPlaces p = head_places(places, Pass::backward);
    const int d = s.spec.head_dim, dv = s.spec.v_dim();
    exchange({{args.q, p.q, s.heads_q, d},
              {args.k, p.kv.k, s.heads_kv, d},
              {args.v, p.kv.v, s.heads_kv, dv},
              {args.out, p.out, s.heads_q, dv},
              {args.dout, p.dout, s.heads_q, dv}},
             false, stream, copies);
    SharedBackwardArgs whole = args;
    whole.q = p.q, whole.k = p.kv.k, whole.v = p.kv.v, whole.out = p.out, whole.dout = p.dout;
    whole.dq = p.dq, whole.dk = p.dkv.k, whole.dv = p.dkv.v;
    backward_rows(whole, backward_places(places), stream, copies);
    exchange({{args.dq, p.dq, s.heads_q, d},
              {args.dk, p.dkv.k, s.heads_kv, d},
              {args.dv, p.dkv.v, s.heads_kv, dv}},
             true, stream, copies);
  }
  void backward_rows(const SharedBackwardArgs& args, const BackwardPlaces& p, CUstream stream,
                     CUstream copies) {
    constexpr int kFloat = sizeof(float);
    clear(p.dq, s.batch * s.heads_q * s.rows * s.spec.head_dim * kFloat, stream);
    clear(p.zeros, lse_bytes(s.rows), stream);
    const KvBlock& cleared = gathers() ? p.all_sums : p.sums[0];
    clear(cleared.k, cleared.k_bytes * (gathers() ? rows_comm.ranks : 1), stream);
    clear(cleared.v, cleared.v_bytes * (gathers() ? rows_comm.ranks : 1), stream);
    const KvBlock mine = given_block(args.k, args.v);
    int steps = 0;
    const auto step = [&](int owner, const KvBlock& block) {
      // The sums of a block follow it: earlier ranks' sums have come when this one adds its own.
      const KvBlock sums = gathers() ? p.all_sums.of(owner) : p.sums[steps % 2];
      if (is_ring() && steps > 0) sums_ready.make_wait(stream);
      for (const SharedCall& call : calls[owner]) add_gradients(args, p, call, block, sums, stream);
      ++steps;
      if (!is_ring()) return;
      transfers.travel(sums, p.sums[steps % 2], rows_comm, stream, copies);
      sums_ready.record(copies);
    };
    for_each_block(mine, p.blocks, p.all, stream, copies, step);
    const KvBlock& home = p.sums[is_ring() ? steps % 2 : 0];
    if (is_ring()) sums_ready.make_wait(stream);
    if (gathers()) transfers.reduce_scatter(p.all_sums, home, rows_comm, stream, copies);
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
    const AttentionSpec spec = this->spec(Pass::backward, call);
    const std::vector<Capture> captures = captures_of(spec, args.captures, call);
    set_common(given, args, call, captures, p.kernels, true);
    if (args.dlse) given.dlse = lse_of(const_cast<float*>(args.dlse), rows);
    if (spec.sinks && args.dsinks) given.dsinks = args.dsinks + first_head();
    runtime.backward(spec, given, stream);
  }

  /// What all ranks must have alike, as a number.
  std::uint64_t digest(Pass pass) const {
    return std::hash<std::string>{}(
        fmt::format("{} {} {} {} {} {} {} {} {}", to_string(KernelSpec{sequence.spec, pass}), sequence.batch,
                    sequence.heads_q, sequence.heads_kv, sequence.rows, static_cast<int>(sequence.scheme),
                    static_cast<int>(sequence.layout), sequence.window, fmt::join(sequence.documents, ",")));
  }
  void prepare(Pass pass, const Workspace& workspace, CUstream stream) {
    check_workspace(pass, workspace);
    for_each_call([&](const SharedCall& call) { runtime.prepare(spec(pass, call), shape(call)); });
    compare_ranks(digest(pass), heads_comm, workspace, stream);
    compare_ranks(digest(pass), rows_comm, workspace, stream);
  }
  void compare_ranks(std::uint64_t own, const Communicator& comm, const Workspace& workspace,
                     CUstream stream) const {
    if (!comm.handle) return;
    if (const auto other = transfers.differing_rank(own, workspace.data, comm, stream))
      refuse(
          "rank {} was given another shared sequence, or pass, than rank 0; rank {}, this one, has {} of "
          "batch {}, {} and {} heads, {} rows a rank: give all ranks the same.",
          *other, comm.rank, to_string(sequence.spec), sequence.batch, sequence.heads_q, sequence.heads_kv,
          sequence.rows);
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

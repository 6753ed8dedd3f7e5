#include "api/shared_transfers.hpp"

#include <algorithm>
#include <chrono>

namespace flashjit {
namespace {

using device::Nccl;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kHeadStart{30};  ///< of NCCL's kernels before a step's kernels

}  // namespace

Transfers::Transfers(const std::string& nccl, const std::string& driver)
    : nccl_(Nccl::open(nccl)), driver_(device::Driver::open(driver)), begins_(driver_), ends_(driver_) {}

Communicator Transfers::ranks_of(void* communicator) const {
  Communicator comm{.handle = communicator};
  nccl_->check(nccl_->comm_user_rank(communicator, &comm.rank), "ncclCommUserRank");
  nccl_->check(nccl_->comm_count(communicator, &comm.ranks), "ncclCommCount");
  return comm;
}

void Transfers::begin_after(CUstream stream, CUstream copies) const {
  begins_.record(stream);
  begins_.make_wait(copies);
}

void Transfers::end_before(CUstream stream, CUstream copies) const {
  ends_.record(copies);
  ends_.make_wait(stream);
}

void Transfers::travel(const KvBlock& from, const KvBlock& to, const Communicator& comm, CUstream stream,
                       CUstream copies) const {
  begin_after(stream, copies);
  const int next = (comm.rank + 1) % comm.ranks, previous = (comm.rank + comm.ranks - 1) % comm.ranks;
  const auto send = [&](const void* data, std::size_t bytes) {
    nccl_->check(nccl_->send(data, bytes, Nccl::kBytes, next, comm.handle, copies), "ncclSend");
  };
  const auto receive = [&](void* data, std::size_t bytes) {
    nccl_->check(nccl_->recv(data, bytes, Nccl::kBytes, previous, comm.handle, copies), "ncclRecv");
  };
  nccl_->check(nccl_->group_start(), "ncclGroupStart");
  send(from.k, from.k_bytes);
  send(from.v, from.v_bytes);
  receive(to.k, to.k_bytes);
  receive(to.v, to.v_bytes);
  nccl_->check(nccl_->group_end(), "ncclGroupEnd");
  let_transfers_begin(stream);
}

/// What `stream` gets next begins kHeadStart later. Where kernels take all multiprocessors before NCCL's,
/// it waits for their end, and the peers' NCCL, which waits for it, holds multiprocessors of theirs.
void Transfers::let_transfers_begin(CUstream stream) const {
  const auto pause = [](void*) {
    for (const auto begin = Clock::now(); Clock::now() - begin < kHeadStart;) continue;
  };
  driver_->check(driver_->launch_host_func(stream, pause, nullptr), "cuLaunchHostFunc");
}

void Transfers::gather(const KvBlock& mine, const KvBlock& all, const Communicator& comm, CUstream stream,
                       CUstream copies) const {
  begin_after(stream, copies);
  const auto gather_one = [&](const void* from, void* to, std::size_t bytes) {
    nccl_->check(nccl_->all_gather(from, to, bytes, Nccl::kBytes, comm.handle, copies), "ncclAllGather");
  };
  gather_one(mine.k, all.k, mine.k_bytes);
  gather_one(mine.v, all.v, mine.v_bytes);
  end_before(stream, copies);
}

void Transfers::reduce_scatter(const KvBlock& all, const KvBlock& mine, const Communicator& comm,
                               CUstream stream, CUstream copies) const {
  begin_after(stream, copies);
  const auto sum = [&](const void* from, void* to, std::size_t bytes) {
    nccl_->check(nccl_->reduce_scatter(from, to, bytes / sizeof(float), Nccl::kFloats, Nccl::kSum,
                                       comm.handle, copies),
                 "ncclReduceScatter");
  };
  sum(all.k, mine.k, mine.k_bytes);
  sum(all.v, mine.v, mine.v_bytes);
  end_before(stream, copies);
}

void Transfers::exchange(std::initializer_list<SharedHeads> tensors, const HeadShares& shares,
                         const Communicator& comm, bool back, CUstream stream, CUstream copies) const {
  begin_after(stream, copies);
  for (const SharedHeads& tensor : tensors)
    for (std::int64_t entry = 0; entry < shares.batch; ++entry)
      exchange(tensor, entry, shares, comm, back, copies);
  end_before(stream, copies);
}

void Transfers::exchange(const SharedHeads& tensor, std::int64_t entry, const HeadShares& shares,
                         const Communicator& comm, bool back, CUstream copies) const {
  const std::int64_t row = static_cast<std::int64_t>(tensor.dim) * shares.element;
  const auto move = [&](const void* base, std::int64_t first_row, std::int64_t count, int other, bool sends) {
    void* const data = static_cast<char*>(const_cast<void*>(base)) + first_row * row;
    if (sends)
      nccl_->check(nccl_->send(data, count * row, Nccl::kBytes, other, comm.handle, copies), "ncclSend");
    else
      nccl_->check(nccl_->recv(data, count * row, Nccl::kBytes, other, comm.handle, copies), "ncclRecv");
  };
  nccl_->check(nccl_->group_start(), "ncclGroupStart");
  for (int other = 0; other < comm.ranks; ++other)
    for (std::int64_t head = 0; head < tensor.heads; ++head) {
      const std::int64_t in_shard = ((entry * comm.ranks + other) * tensor.heads + head) * shares.shard_rows;
      const std::int64_t in_whole = (entry * tensor.heads + head) * shares.whole_rows;
      for (const RowChunk& chunk : shares.chunks[comm.rank])
        move(tensor.shard, in_shard + chunk.begin, chunk.count, other, !back);
      for (const RowChunk& chunk : shares.chunks[other])
        move(tensor.whole, in_whole + chunk.first, chunk.count, other, back);
    }
  nccl_->check(nccl_->group_end(), "ncclGroupEnd");
}

std::optional<int> Transfers::differing_rank(std::uint64_t own, void* memory, const Communicator& comm,
                                             CUstream stream) const {
  std::vector<std::uint64_t> all(comm.ranks);
  const auto place = reinterpret_cast<CUdeviceptr>(memory);
  driver_->check(driver_->memcpy_htod(place, &own, sizeof(own)), "cuMemcpyHtoD");
  nccl_->check(nccl_->all_gather(memory, static_cast<char*>(memory) + sizeof(own), sizeof(own), Nccl::kBytes,
                                 comm.handle, stream),
               "ncclAllGather");
  driver_->check(driver_->stream_synchronize(stream), "cuStreamSynchronize");
  driver_->check(driver_->memcpy_dtoh(all.data(), place + sizeof(own), all.size() * sizeof(own)),
                 "cuMemcpyDtoH");
  const auto other = std::ranges::find_if(all, [&](std::uint64_t number) { return number != all[0]; });
  return other == all.end() ? std::nullopt : std::optional(static_cast<int>(other - all.begin()));
}

}  // namespace flashjit

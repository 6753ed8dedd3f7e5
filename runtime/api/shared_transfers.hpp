// What the ranks that share a sequence send each other, by NCCL. Each transfer is queued on `copies`, after
// what `stream` has got so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/shared_schedule.hpp"
#include "device/driver.hpp"
#include "device/nccl.hpp"
#include "device/resources.hpp"

namespace flashjit {

/// One rank's K and V, or the sums of their gradients; or of all ranks, one after the other.
struct KvBlock {
  void *k = nullptr, *v = nullptr;
  std::size_t k_bytes = 0, v_bytes = 0;  ///< of one rank

  KvBlock of(int owner) const {
    return {static_cast<char*>(k) + owner * k_bytes, static_cast<char*>(v) + owner * v_bytes, k_bytes,
            v_bytes};
  }
};

/// The ranks of an ncclComm_t, and which of them this one is. Null: this rank alone.
struct Communicator {
  void* handle = nullptr;
  int rank = 0, ranks = 1;
};

/// A tensor of some rows and all heads, and of all rows and `heads` of them.
struct SharedHeads {
  const void *shard, *whole;
  std::int64_t heads;
  int dim;
};

/// How ranks share heads: which of all rows each has.
struct HeadShares {
  std::int64_t batch = 0;
  std::int64_t shard_rows = 0, whole_rows = 0;
  int element = 0;                                 ///< bytes
  std::vector<std::vector<RowChunk>> chunks = {};  ///< by rank
};

class Transfers {
 public:
  Transfers(const std::string& nccl, const std::string& driver);

  Communicator ranks_of(void* communicator) const;
  const std::shared_ptr<const device::Driver>& driver() const { return driver_; }

  /// A block goes to the next rank, and the previous one's comes in.
  void travel(const KvBlock& from, const KvBlock& to, const Communicator& comm, CUstream stream,
              CUstream copies) const;
  /// `all` gets every rank's block, and `stream` waits for it.
  void gather(const KvBlock& mine, const KvBlock& all, const Communicator& comm, CUstream stream,
              CUstream copies) const;
  /// `mine` gets the sum over all ranks of its fp32 block in `all`, and `stream` waits for it.
  void reduce_scatter(const KvBlock& all, const KvBlock& mine, const Communicator& comm, CUstream stream,
                      CUstream copies) const;
  /// All-to-all: rows of other ranks' heads go to these, and rows of this rank's heads come, each to its
  /// place; or, with `back`, the other way round. `stream` waits for them.
  void exchange(std::initializer_list<SharedHeads> tensors, const HeadShares& shares,
                const Communicator& comm, bool back, CUstream stream, CUstream copies) const;
  /// The first rank whose number is not rank 0's; `memory` on the device has comm.ranks + 1 numbers.
  std::optional<int> differing_rank(std::uint64_t own, void* memory, const Communicator& comm,
                                    CUstream stream) const;

 private:
  void begin_after(CUstream stream, CUstream copies) const;
  void end_before(CUstream stream, CUstream copies) const;
  void let_transfers_begin(CUstream stream) const;
  void exchange(const SharedHeads& tensor, std::int64_t entry, const HeadShares& shares,
                const Communicator& comm, bool back, CUstream copies) const;

  std::shared_ptr<const device::Nccl> nccl_;
  std::shared_ptr<const device::Driver> driver_;
  device::Event begins_, ends_;
};

}  // namespace flashjit

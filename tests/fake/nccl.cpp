// An NCCL for tests without GPUs: processes on one machine, whose device memory is the host's, as the
// emulator's is. Each pair of ranks has a FIFO in a folder that the unique id names. Calls of a group are
// done at its end, in order; what a rank sends is read beforehand, by a thread for each peer.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kFloats = 7;

struct Comm {
  std::string folder;
  int ranks = 0, rank = 0;
  std::map<int, int> to, from;  ///< file descriptors, by peer

  int open_fifo(int source, int target) const {
    const std::string path = folder + "/" + std::to_string(source) + "_" + std::to_string(target);
    ::mkfifo(path.c_str(), 0600);
    return ::open(path.c_str(), O_RDWR | O_CLOEXEC);  // does not wait for the other side
  }
};

struct Transfer {
  Comm* comm;
  int peer;
  bool sends;
  std::vector<char> sent;
  char* received = nullptr;
  std::size_t bytes = 0;
};

thread_local int depth = 0;
thread_local std::vector<Transfer> pending;

bool write_all(int fd, const char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::write(fd, data, bytes);
    if (done <= 0) return false;
    data += done, bytes -= static_cast<std::size_t>(done);
  }
  return true;
}
bool read_all(int fd, char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::read(fd, data, bytes);
    if (done <= 0) return false;
    data += done, bytes -= static_cast<std::size_t>(done);
  }
  return true;
}

int run_pending() {
  std::vector<Transfer> now;
  now.swap(pending);
  std::map<int, std::vector<const Transfer*>> to;
  for (const Transfer& transfer : now)
    if (transfer.sends) to[transfer.comm->to.at(transfer.peer)].push_back(&transfer);
  std::vector<std::thread> senders;
  for (const auto& [fd, transfers] : to)
    senders.emplace_back([fd = fd, &transfers = transfers] {
      for (const Transfer* transfer : transfers) write_all(fd, transfer->sent.data(), transfer->sent.size());
    });
  bool good = true;
  for (const Transfer& transfer : now)
    if (!transfer.sends)
      good = good && read_all(transfer.comm->from.at(transfer.peer), transfer.received, transfer.bytes);
  for (std::thread& sender : senders) sender.join();
  return good ? kSuccess : kSystemError;
}

std::size_t size_of(int type) { return type == kFloats ? sizeof(float) : 1; }

void queue_send(Comm* comm, const void* data, std::size_t bytes, int peer) {
  const char* from = static_cast<const char*>(data);
  pending.push_back({comm, peer, true, {from, from + bytes}});
}
void queue_recv(Comm* comm, void* data, std::size_t bytes, int peer) {
  pending.push_back({comm, peer, false, {}, static_cast<char*>(data), bytes});
}

}  // namespace

extern "C" {

struct FakeId {
  char text[128];
};

const char* ncclGetErrorString(int) { return "a peer is gone"; }
int ncclGetUniqueId(FakeId* id) {
  char folder[] = "/tmp/fake_nccl_XXXXXX";
  if (!::mkdtemp(folder)) return kSystemError;
  std::snprintf(id->text, sizeof id->text, "%s", folder);
  return kSuccess;
}
int ncclCommInitRank(void** out, int ranks, FakeId id, int rank) {
  auto* comm = new Comm{id.text, ranks, rank, {}, {}};
  for (int peer = 0; peer < ranks; ++peer) {
    comm->to[peer] = comm->open_fifo(rank, peer);
    comm->from[peer] = comm->open_fifo(peer, rank);
  }
  *out = comm;
  return kSuccess;
}
int ncclCommDestroy(void* comm) {
  delete static_cast<Comm*>(comm);
  return kSuccess;
}
int ncclCommCount(void* comm, int* count) {
  *count = static_cast<Comm*>(comm)->ranks;
  return kSuccess;
}
int ncclCommUserRank(void* comm, int* rank) {
  *rank = static_cast<Comm*>(comm)->rank;
  return kSuccess;
}
int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
int ncclGroupEnd() { return --depth == 0 ? run_pending() : kSuccess; }
int ncclSend(const void* data, std::size_t count, int type, int peer, void* comm, void*) {
  queue_send(static_cast<Comm*>(comm), data, count * size_of(type), peer);
  return depth == 0 ? run_pending() : kSuccess;
}
int ncclRecv(void* data, std::size_t count, int type, int peer, void* comm, void*) {
  queue_recv(static_cast<Comm*>(comm), data, count * size_of(type), peer);
  return depth == 0 ? run_pending() : kSuccess;
}
int ncclAllGather(const void* from, void* to, std::size_t count, int type, void* given, void*) {
  auto* comm = static_cast<Comm*>(given);
  const std::size_t bytes = count * size_of(type);
  for (int peer = 0; peer < comm->ranks; ++peer) queue_send(comm, from, bytes, peer);
  for (int peer = 0; peer < comm->ranks; ++peer)
    queue_recv(comm, static_cast<char*>(to) + peer * bytes, bytes, peer);
  return run_pending();
}
int ncclReduceScatter(const void* from, void* to, std::size_t count, int, int, void* given, void*) {
  auto* comm = static_cast<Comm*>(given);
  const std::size_t bytes = count * sizeof(float);
  std::vector<float> parts(count * comm->ranks);
  for (int peer = 0; peer < comm->ranks; ++peer) {
    queue_send(comm, static_cast<const char*>(from) + peer * bytes, bytes, peer);
    queue_recv(comm, parts.data() + peer * count, bytes, peer);
  }
  if (run_pending() != kSuccess) return kSystemError;
  auto* out = static_cast<float*>(to);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = 0;
    for (int peer = 0; peer < comm->ranks; ++peer) out[i] += parts[peer * count + i];
  }
  return kSuccess;
}
}

// A process for each GPU of a host, and NCCL between them, opened by hand as libcuda is: for
// one_sequence.cpp.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <vector>

#include "example.hpp"

namespace one_sequence {

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

/// Runs the function in a process for each rank, with an NCCL communicator. An exit code: 0 where all gave
/// true, 77 where there are too few GPUs or no NCCL, else 1.
inline int run_ranks(int ranks, const char* nccl_path,
                     const std::function<bool(const cuda_functions&, int rank, void* comm)>& function) {
  std::vector<std::array<int, 2>> pipes(ranks);  // to read from, and to write to
  for (std::array<int, 2>& ends : pipes)
    if (pipe(ends.data()) != 0) return 1;
  // Before anything of CUDA: it does not work in a process that was forked after its first use.
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    alarm(300);  // where a peer ended early, the others would wait for it
    std::exit(example::run([&](const cuda_functions& cuda) {
      Nccl nccl;
      int devices = 0;
      cuda.device_count(&devices);
      if (!nccl.open(nccl_path) || devices < ranks) {
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
      const bool right = function(cuda, rank, comm);
      nccl.destroy(comm);
      return right;
    }));
  }
  int code = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (const int own = WIFEXITED(status) ? WEXITSTATUS(status) : 1; own != 0 && code != 1) code = own;
  }
  return code;
}

}  // namespace one_sequence

// A child process whose system calls on files are counted, and of which one is made to fail or to be its
// last.
#pragma once

#include <cstdint>
#include <functional>

namespace flashjit::test {

/// What happens at the calls from number `first` on, counted from 0.
struct Fault {
  enum class Kind : std::uint8_t {
    none,
    kill,          ///< SIGKILL in place of call `first`, which must be one that changes files
    fail_one,      ///< call `first` is not made and gives `error`; close() is made, and gives it, too
    fail_all,      ///< so does it, and so do all later calls that change files
    fail_every,    ///< no call of the kind `first`, such as SYS_flock, is made: all give `error`; 0: success
    short_writes,  ///< write() number `first` and all later ones write half of what they are asked to
  };
  Kind kind = Kind::none;
  long first = 0;
  int error = 0;  ///< ENOSPC, ...
};

struct TracedRun {
  bool traced = false;  ///< false: this machine does not let processes be traced
  int calls = 0;  ///< on files; those that change them alone for Kind::kill, write() for Kind::short_writes
  bool killed = false;
  int exit_code = -1;  ///< what `body` returned, unless it was killed
};

/// Runs `body` in a forked child under ptrace. It must not start threads.
TracedRun run_traced(const std::function<int()>& body, Fault fault = {});

}  // namespace flashjit::test

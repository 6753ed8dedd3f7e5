#include "tests/support/traced_child.hpp"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace flashjit::test {
namespace {

constexpr std::array kChanging{
    SYS_write,     SYS_pwrite64, SYS_renameat2, SYS_unlinkat, SYS_mkdirat,   SYS_linkat,
    SYS_symlinkat, SYS_fsync,    SYS_fdatasync, SYS_flock,    SYS_ftruncate, SYS_truncate,
    SYS_utimensat, SYS_fchmod,   SYS_fchmodat,  SYS_openat,   SYS_close,
#ifdef SYS_open  // what newer architectures left out
    SYS_open,      SYS_creat,    SYS_rename,    SYS_renameat, SYS_unlink,    SYS_rmdir,
    SYS_mkdir,     SYS_link,     SYS_symlink,   SYS_chmod,
#endif
};
constexpr std::array kReading{
    SYS_read, SYS_pread64, SYS_getdents64, SYS_fstat, SYS_newfstatat, SYS_statx,
#ifdef SYS_open
    SYS_stat, SYS_lstat,   SYS_access,
#endif
};

template <class Calls>
bool is_one_of(const Calls& calls, std::uint64_t number) {
  return std::find(calls.begin(), calls.end(), static_cast<long>(number)) != calls.end();
}

bool is_counted(Fault::Kind kind, std::uint64_t number) {
  if (kind == Fault::Kind::short_writes) return number == SYS_write;
  return is_one_of(kChanging, number) || (kind != Fault::Kind::kill && is_one_of(kReading, number));
}

bool is_hit(const Fault& fault, int index, std::uint64_t number) {
  switch (fault.kind) {
    case Fault::Kind::none:
      return false;
    case Fault::Kind::kill:
    case Fault::Kind::fail_one:
      return index == fault.first;
    case Fault::Kind::fail_all:
      return index == fault.first || (index > fault.first && is_one_of(kChanging, number));
    case Fault::Kind::fail_every:
      return fault.first == static_cast<long>(number);
    case Fault::Kind::short_writes:
      return index >= fault.first;
  }
  return false;
}

/// Puts a call that does not exist in the place of the one that is about to be made.
void skip_call(pid_t child) {
#ifdef __x86_64__
  ::ptrace(PTRACE_POKEUSER, child, offsetof(user_regs_struct, orig_rax), -1L);
#endif
}
void set_result(pid_t child, long result) {
#ifdef __x86_64__
  ::ptrace(PTRACE_POKEUSER, child, offsetof(user_regs_struct, rax), result);
#endif
}

/// How many bytes a write() that is about to be made shall write; after it, what the child left there.
void set_length(pid_t child, std::uint64_t length) {
#ifdef __x86_64__
  ::ptrace(PTRACE_POKEUSER, child, offsetof(user_regs_struct, rdx), length);
#endif
}

bool can_fail_calls() {
#ifdef __x86_64__
  return true;
#else
  return false;
#endif
}

/// What was done to the call that is under way.
struct Meddled {
  bool failing = false;
  std::uint64_t length = 0;  ///< what it was asked to write; 0: it was not halved
};

Meddled meddle(pid_t child, const Fault& fault, const __ptrace_syscall_info& info) {
  switch (fault.kind) {
    case Fault::Kind::kill:
      ::kill(child, SIGKILL);
      return {};
    case Fault::Kind::short_writes:
      if (info.entry.args[2] < 2) return {};
      set_length(child, info.entry.args[2] / 2);
      return {.length = info.entry.args[2]};
    default:
      // A descriptor is free after close() whatever that gives.
      if (info.entry.nr != SYS_close) skip_call(child);
      return {.failing = true};
  }
}

void finish(pid_t child, const Fault& fault, const Meddled& meddled) {
  if (meddled.failing) set_result(child, -fault.error);
  if (meddled.length != 0) set_length(child, meddled.length);
}

pid_t start(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(0);
  ::raise(SIGSTOP);
  ::_exit(body());
}

}  // namespace

TracedRun run_traced(const std::function<int()>& body, Fault fault) {
  const bool fails = fault.kind != Fault::Kind::none && fault.kind != Fault::Kind::kill;
  if (fails && !can_fail_calls()) return {};
  const pid_t child = start(body);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFSTOPPED(status)) return {};
  TracedRun run{.traced = true};
  ::ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
  Meddled meddled;
  int deliver = 0;
  while (true) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, deliver);
    deliver = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) return run.exit_code = WEXITSTATUS(status), run;
    if (WIFSIGNALED(status)) return run.killed = true, run;
    if (WSTOPSIG(status) != (SIGTRAP | 0x80)) {
      deliver = WSTOPSIG(status);
      continue;
    }
    __ptrace_syscall_info info{};
    ::ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof info, &info);
    if (info.op == PTRACE_SYSCALL_INFO_EXIT) {
      finish(child, fault, std::exchange(meddled, {}));
      continue;
    }
    if (is_counted(fault.kind, info.entry.nr) && is_hit(fault, run.calls++, info.entry.nr))
      meddled = meddle(child, fault, info);
  }
}

}  // namespace flashjit::test

#include "traced_child.hpp"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace flashjit::test {
namespace {

constexpr std::array kChanging{
    SYS_write,     SYS_pwrite64, SYS_renameat2, SYS_unlinkat, SYS_mkdirat,   SYS_linkat,
    SYS_symlinkat, SYS_fsync,    SYS_fdatasync, SYS_flock,    SYS_ftruncate, SYS_truncate,
    SYS_utimensat, SYS_fchmod,   SYS_fchmodat,  SYS_openat,
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

bool is_hit(const Fault& fault, int index, bool changing, std::uint64_t number) {
  switch (fault.kind) {
    case Fault::Kind::none:
      return false;
    case Fault::Kind::kill:
    case Fault::Kind::fail_one:
      return index == fault.first;
    case Fault::Kind::fail_all:
      return index == fault.first || (index > fault.first && changing);
    case Fault::Kind::fail_every:
      return fault.first == static_cast<long>(number);
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

bool can_fail_calls() {
#ifdef __x86_64__
  return true;
#else
  return false;
#endif
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
  bool failing = false;
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
      if (failing) set_result(child, -fault.error);
      failing = false;
      continue;
    }
    const bool changing = is_one_of(kChanging, info.entry.nr);
    if (!changing && (fault.kind == Fault::Kind::kill || !is_one_of(kReading, info.entry.nr))) continue;
    if (is_hit(fault, run.calls++, changing, info.entry.nr)) {
      if (fault.kind == Fault::Kind::kill) {
        ::kill(child, SIGKILL);
      } else {
        skip_call(child);
        failing = true;
      }
    }
  }
}

}  // namespace flashjit::test

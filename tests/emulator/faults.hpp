// What the launching thread does when a kernel faults, and when it takes long.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

namespace flashjit_emulator {

/// Calls them, on a stack of its own, as long as it lives: on_fault with the address, which must not return,
/// and on_alarm after each few seconds of the process's time.
class FaultHandler {
 public:
  static constexpr int kSecondsOfAlarm = 5;
  using OnFault = void (*)(const void* address);
  using OnAlarm = void (*)();

  FaultHandler(OnFault on_fault, OnAlarm on_alarm) {
    launcher = ::pthread_self();
    fault = on_fault;
    alarm = on_alarm;
    static char stack[1 << 16];
    const stack_t own{stack, 0, sizeof stack};
    ::sigaltstack(&own, &stack_before_);
    handle(SIGSEGV, &fault_before_);
    handle(SIGPROF, &alarm_before_);
    set_timer(kSecondsOfAlarm);
  }
  ~FaultHandler() {
    set_timer(0);
    ::sigaction(SIGPROF, &alarm_before_, nullptr);
    ::sigaction(SIGSEGV, &fault_before_, nullptr);
    ::sigaltstack(&stack_before_, nullptr);
  }
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  static inline pthread_t launcher;
  static inline OnFault fault;
  static inline OnAlarm alarm;

  static void take(int signal, siginfo_t* info, void*) {
    const bool is_own = ::pthread_equal(launcher, ::pthread_self()) != 0;
    if (signal == SIGSEGV && !is_own) ::signal(signal, SIG_DFL);  // it comes again, and ends the process
    if (!is_own) return;
    if (signal == SIGSEGV)
      fault(info->si_addr);
    else
      alarm();
  }
  static void handle(int signal, struct sigaction* before) {
    struct sigaction action = {};
    action.sa_sigaction = take;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
    ::sigaction(signal, &action, before);
  }
  static void set_timer(int seconds) {
    const itimerval timer{{seconds, 0}, {seconds, 0}};
    ::setitimer(ITIMER_PROF, &timer, nullptr);
  }

  struct sigaction fault_before_ = {}, alarm_before_ = {};
  stack_t stack_before_ = {};
};

}  // namespace flashjit_emulator

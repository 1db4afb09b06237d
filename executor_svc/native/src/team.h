// The threads of one parallel region. They meet after every kernel, some three hundred times in a decode step of a small
// model, so what waiting costs decides much: OpenMP's own barrier spins for a number of rounds that is fixed when it is
// loaded. Where each thread has a CPU of its own it should spin longer than two threads' shares of a kernel differ, for
// sleeping and waking take longer. Where another process has one of the CPUs, a thread that spins keeps the thread it
// waits for from running: it should sleep at once, and the system moves the other to the CPU that has become free. Which
// of both it is shows in how often waiting took too long lately.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

class Team {
 public:
  // To be set before the first meeting.
  int size = 1;

  // Returns when all have called it; what any of them wrote before is then seen by all.
  void meet() {
    if (size == 1) return;
    const uint32_t now = meetings.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived.store(0, std::memory_order_relaxed);
      meetings.store(now + 1);
      if (sleeping.load()) wake();
      return;
    }
    if (spin(now)) return;
    sleeping.fetch_add(1);
    while (meetings.load() == now) sleep(now);
    sleeping.fetch_sub(1);
  }

 private:
  static constexpr int64_t PATIENT_NS = 250'000, HASTY_NS = 2'000;
  static constexpr int TOO_LONG = 2, MANY = 32 * TOO_LONG, MOST = 40 * TOO_LONG;  // a third of all
  static constexpr int TRY_AGAIN = 2048;  // waits of the hasty kind, after which patience is tried again

  // Whether all came while this spun.
  bool spin(uint32_t now) {
    int seen = trouble.load(std::memory_order_relaxed);
    if (seen >= MANY && hurried.fetch_add(1, std::memory_order_relaxed) % TRY_AGAIN == TRY_AGAIN - 1) seen = 0;
    const bool hasty = seen >= MANY;
    const int64_t end = time_ns() + (hasty ? HASTY_NS : PATIENT_NS);
    do {
      for (int i = 0; i < 8; ++i) {
        if (meetings.load(std::memory_order_acquire) != now) {
          trouble.store(seen > 0 ? seen - 1 : 0, std::memory_order_relaxed);
          return true;
        }
        relax();
      }
    } while (time_ns() < end);
    trouble.store(seen + TOO_LONG < MOST ? seen + TOO_LONG : MOST, std::memory_order_relaxed);
    return false;
  }
  static int64_t time_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
  }
  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
#if defined(__linux__)
  void sleep(uint32_t now) { syscall(SYS_futex, &meetings, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &meetings, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { sched_yield(); }
  void wake() {}
#endif

  std::atomic<uint32_t> meetings{0};
  std::atomic<int> arrived{0}, sleeping{0};
  // Of the whole process. Races between threads cost an update, nothing else.
  static inline std::atomic<int> trouble{0};
  static inline std::atomic<uint32_t> hurried{0};
  static_assert(sizeof(std::atomic<uint32_t>) == 4, "what the system sleeps on");
};

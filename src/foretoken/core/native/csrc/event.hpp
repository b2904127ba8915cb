// Threads that sleep until something holds: a futex on Linux, a condition variable elsewhere.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#endif

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    asm volatile("yield");
#endif
}

// The state that `ready` reads is changed before `wake` is called, both in sequentially consistent order.
class Event {
   public:
    // Sleeps until `ready` returns true.
    template <class Ready>
    void wait(Ready ready) {
        sleepers.fetch_add(1);
        sleep(ready);
        sleepers.fetch_sub(1);
    }

    // Has all sleepers ask again.
    void wake() {
        if (sleepers.load()) rouse();
    }

   private:
    std::atomic<uint32_t> sleepers{0};
#if defined(__linux__)
    std::atomic<uint32_t> signal{0};

    template <class Ready>
    void sleep(Ready ready) {
        for (;;) {
            const uint32_t seen = signal.load();
            if (ready()) return;
            syscall(SYS_futex, &signal, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        }
    }

    void rouse() {
        signal.fetch_add(1);
        syscall(SYS_futex, &signal, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
#else
    std::mutex mutex;
    std::condition_variable changed;

    template <class Ready>
    void sleep(Ready ready) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, ready);
    }

    void rouse() {
        { std::lock_guard<std::mutex> lock(mutex); }
        changed.notify_all();
    }
#endif
};

// What tests/core/test_pool.py asks of the pool's threads.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "entry.hpp"

extern "C" {

// Runs `loops` loops of `items` items. Each item adds one to its number, and reads all of the loop before.
// `slow`: every `slow`-th item sleeps for a moment. Returns the number of wrong ones.
int64_t sums(int threads, int loops, int64_t items, int64_t grain, int slow) {
    std::vector<std::atomic<int64_t>> counts(items);
    std::atomic<int64_t> wrong{0};
    in_parallel(threads, [&](Member& member) {
        for (int loop = 0; loop < loops; loop++)
            member.each(items, grain, [&](int64_t i) {
                if (slow && (i * 7 + loop) % slow == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
                wrong += counts[i]++ != loop;
                wrong += counts[items - 1 - i] < loop;
            });
    });
    for (auto& count : counts) wrong += count != loops;
    return wrong.load();
}

// Counts how many threads have computed an item of a loop in which each item takes some time.
int computing(int threads, int64_t items) {
    std::vector<std::atomic<int>> used(MAX_THREADS);
    in_parallel(threads, [&](Member& member) {
        member.each(items, 1, [&](int64_t) {
            used[member.thread] = 1;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        });
    });
    int count = 0;
    for (auto& each : used) count += each;
    return count;
}

// Fails in one item of the second of three loops: as where memory is short, by a wrong argument, by another exception, or by
// what is none. Returns the status.
int32_t fails(int threads, int64_t items, int64_t at, int how) {
    return guarded([&] {
        in_parallel(threads, [&](Member& member) {
            for (int loop = 0; loop < 3; loop++)
                member.each(items, 1, [&](int64_t i) {
                    if (loop != 1 || i != at) return;
                    if (how == NO_MEMORY) throw std::bad_alloc();
                    if (how == BAD_ARGUMENT) refuse("item %lld", (long long)i);
                    if (how == INTERNAL) throw std::runtime_error("a bug");
                    throw how;
                });
        });
    }, "%lld items", (long long)items);
}

}  // extern "C"

// Work shared by the threads of the process's pool (pool.cpp): what kernels include.
//
// A team runs one function in several threads. The function is a sequence of loops, the same in each thread. The items of a
// loop are claimed in chunks: each thread begins with a share of its own, in order, and then takes half of what another one
// has left. A loop is over when its items are done by any threads, so none waits for a thread that computes no item; a
// thread that comes late goes on with the loop that is current. Which thread computes an item never matters to the
// result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "status.hpp"

constexpr int MAX_THREADS = 256;

// Items [first, last).
struct Share {
    int64_t first, last;
    Share(int64_t n, int thread, int threads) : first(n * thread / threads), last(n * (thread + 1) / threads) {}
    Share(int64_t first, int64_t last) : first(first), last(last) {}
};

// What is left of a thread's share: the number of the loop, then first and last item. A word of an earlier loop stands for a
// share of which no item is claimed.
struct alignas(64) Left {
    std::atomic<uint64_t> word{0};
};

constexpr int ITEM_BITS = 20;
constexpr uint64_t ITEM_MASK = (1u << ITEM_BITS) - 1;
constexpr uint64_t MAX_LOOPS = 1u << (64 - 2 * ITEM_BITS);

struct Team {
    int threads = 1;
    uint64_t loops = 0;       // number of the last loop of earlier runs
    uint64_t loops_then = 0;  // and after this run
    alignas(64) std::atomic<uint64_t> finished{0};  // items of all loops of this run
    alignas(64) std::atomic<bool> failed{false};
    Left* left = nullptr;  // of each thread
};

// Runs one thread's part. Returns false if it failed.
using Body = bool (*)(void* context, Team& team, int thread) noexcept;

// The functions of the process's pool, for all libraries of kernels. No exception crosses from one library to another.
struct PoolFunctions {
    // Runs the body here and in up to `threads` - 1 threads that are free. Returns false if one of them failed.
    bool (*run)(int threads, Body body, void* context) noexcept;
    // Waits until `finished` is at least `items`. Returns false if another thread failed.
    bool (*wait)(Team& team, uint64_t items) noexcept;
    // Resumes threads that wait for items.
    void (*wake)(Team& team) noexcept;
};

OF_THIS_LIBRARY inline const PoolFunctions* POOL = nullptr;  // without one, kernels compute in the calling thread

// Another thread of the team failed.
struct Stopped {};

// One loop, as one thread sees it.
class Loop {
   public:
    Loop(Team& team, int thread, uint64_t number, uint64_t target, int64_t n, int64_t grain)
        : team(team), thread(thread), victim(thread), number(number), target(target), n(n), per((n >> ITEM_BITS) + 1),
          slots((n + per - 1) / per), grain(std::max<int64_t>(grain / per, 1)) {}

    // Claims the next items. Returns false if none are left to claim.
    bool next(Share& items) {
        if (team.threads == 1) {
            items = {0, n};
            return n && !claimed++;
        }
        for (;;) {
            const bool taken = victim == thread ? take(items) : steal(items);
            if (taken) {
                items.last = std::min(items.last, n);
                claimed += items.last - items.first;
                return true;
            }
            flush();
            if (victim == thread) others = 0;
            if (++others >= team.threads) return false;
            victim = (thread + others) % team.threads;
        }
    }

    // Counts the items that were claimed as done, and resumes the threads that wait for the last one.
    void flush() {
        if (!claimed || team.threads == 1) return;
        const uint64_t done = team.finished.fetch_add((uint64_t)claimed) + (uint64_t)claimed;
        claimed = 0;
        if (done == target) POOL->wake(team);
    }

   private:
    Team& team;
    const int thread;
    int victim, others = 0;
    const uint64_t number, target;
    const int64_t n, per, slots, grain;  // a slot is `per` items, so that its number fits
    int64_t claimed = 0;

    uint64_t word_of(int64_t first, int64_t last) const {
        return number << 2 * ITEM_BITS | (uint64_t)first << ITEM_BITS | (uint64_t)last;
    }

    // What is left of a thread's share; nothing if the loop is over.
    Share left_in(uint64_t word, int owner) const {
        const uint64_t at = word >> 2 * ITEM_BITS;
        if (at < number) return {slots, owner, team.threads};
        if (at > number) return {0, 0};
        return {(int64_t)(word >> ITEM_BITS & ITEM_MASK), (int64_t)(word & ITEM_MASK)};
    }

    // Claims a chunk of this thread's own share.
    bool take(Share& items) {
        std::atomic<uint64_t>& word = team.left[thread].word;
        uint64_t seen = word.load();
        for (;;) {
            const Share left = left_in(seen, thread);
            if (left.first >= left.last) return false;
            const int64_t until = std::min(left.first + grain, left.last);
            if (!word.compare_exchange_weak(seen, word_of(until, left.last))) continue;
            items = {left.first * per, until * per};
            return true;
        }
    }

    // Moves the second half of another thread's share to this one's, and claims a chunk of it.
    bool steal(Share& items) {
        std::atomic<uint64_t>& word = team.left[victim].word;
        uint64_t seen = word.load();
        for (;;) {
            const Share left = left_in(seen, victim);
            if (left.first >= left.last) return false;
            const int64_t count = left.last - left.first, from = count <= grain ? left.first : left.last - std::max(count / 2, grain);
            if (!word.compare_exchange_weak(seen, word_of(left.first, from))) continue;
            const int64_t until = std::min(from + grain, left.last);
            if (until < left.last) {
                team.left[thread].word.store(word_of(until, left.last));  // it is empty, so no other thread writes it
                victim = thread;
            }
            items = {from * per, until * per};
            return true;
        }
    }
};

// A thread of a team, in the function that the team runs.
class Member {
   public:
    Team& team;
    const int thread, threads;

    Member(Team& team, int thread) : team(team), thread(thread), threads(team.threads), number(team.loops) {}

    // Begins a loop over n items; `grain` of them are claimed at once. Every thread calls it with the same numbers.
    Loop begin(int64_t n, int64_t grain = 1) {
        target += (uint64_t)n;
        return {team, thread, ++number, target, n, grain};
    }

    // The same loop, for whose items each thread makes something of its own first: calls make() unless others have done all of
    // the loop.
    template <class Make>
    Loop begin(int64_t n, int64_t grain, Make make) {
        if (!passed(n)) make_early(make);
        return begin(n, grain);
    }

    // Waits until all items of the loop are done. Throws Stopped.
    void end(Loop& loop) {
        loop.flush();
        if (threads == 1 || team.finished.load() >= target) return;
        if (!POOL->wait(team, target)) throw Stopped();
    }

    // Calls f(item) for n items, each in one thread, and waits for all of them.
    template <class F>
    void each(int64_t n, int64_t grain, F f) {
        Loop loop = begin(n, grain);
        for (Share items(0, 0); loop.next(items);)
            for (int64_t i = items.first; i < items.last; i++) f(i);
        end(loop);
    }

    uint64_t loops() const { return number; }

   private:
    uint64_t number, target = 0;

    // May read rows that other threads overwrite meanwhile: they have then done all of the loop, and this thread uses nothing of
    // what it made. ThreadSanitizer knows the function by its name.
    template <class Make>
#ifdef __SANITIZE_THREAD__
    __attribute__((noinline))
#endif
    static void make_early(Make& make) { make(); }

    // Returns whether others have done a loop of n items, the next one of this thread.
    bool passed(int64_t n) const { return threads > 1 && team.finished.load() >= target + (uint64_t)n; }
};

// Runs f(member) in up to `threads` threads. Throws the first exception of a thread, once all threads have stopped.
template <class F>
void in_parallel(int threads, F f) {
    struct Run {
        F& f;
        std::atomic<bool> failed{false};
        std::exception_ptr error{};
    } run{f};
    const Body body = [](void* context, Team& team, int thread) noexcept {
        Run& here = *(Run*)context;
        Member member(team, thread);
        try {
            here.f(member);
        } catch (const Stopped&) {
            return false;
        } catch (...) {
            if (!here.failed.exchange(true)) here.error = std::current_exception();
            return false;
        }
        if (thread == 0) team.loops_then = member.loops();
        return true;
    };
    Team alone;
    if (!(POOL && threads > 1 ? POOL->run(threads, body, &run) : body(&run, alone, 0))) std::rethrow_exception(run.error);
}

// Calls f(item) for n items in up to `threads` threads. Throws as `in_parallel` does.
template <class F>
void in_parallel_each(int threads, int64_t n, int64_t grain, F f) {
    in_parallel((int)std::min<int64_t>(threads, n), [&](Member& member) { member.each(n, grain, f); });
}

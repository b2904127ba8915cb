// The threads of the process, shared by all its engines and libraries of kernels. pool.hpp says how they share work.
//
// A thread that waits spins for a while and then sleeps until it is woken. Where the system gives the cores of the threads
// to other programs, no thread spins for longer than it takes to fall asleep.
#include "pool.hpp"

#include <chrono>
#include <mutex>
#include <new>
#include <thread>

#include "event.hpp"

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#include <time.h>
#endif

namespace {

using Nanoseconds = int64_t;
constexpr Nanoseconds MICROSECOND = 1000, MILLISECOND = 1000 * MICROSECOND;

constexpr Nanoseconds BRIEF = 2 * MICROSECOND;          // every wait spins this long
constexpr Nanoseconds WINDOW = 20 * MILLISECOND;        // of which a part may be lost to other programs
constexpr Nanoseconds SHARED_FOR = 50 * MILLISECOND;    // no thread spins longer, where more was lost

constexpr int TEAMS = 8;                                // that run at once; further callers compute alone

// The word of a team: the number of its run, whether it is closed, and how many workers are inside.
constexpr uint64_t CLOSED = 1ull << 31, NEXT_RUN = 1ull << 32;

Nanoseconds now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns for how long this thread has had a core; `otherwise` where that is not known.
Nanoseconds time_on_core(Nanoseconds otherwise) {
#if !defined(_WIN32)  // whose clock of a thread counts whole ticks of 16 ms
    timespec time;
    if (!clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time)) return time.tv_sec * 1000 * MILLISECOND + time.tv_nsec;
#endif
    return otherwise;
}

// A team and those who are in it. It is never freed, so a late thread may look at it at any time.
struct PooledTeam : Team {
    Body body = nullptr;
    void* context = nullptr;
    std::atomic<bool> taken{false};
    std::atomic<int> wanted{0};  // its threads, for workers that are not inside
    alignas(64) std::atomic<uint64_t> inside{CLOSED};
    Event progress;  // items are done, or a worker has left
    Left shares[MAX_THREADS];
    PooledTeam() { left = shares; }
};

struct Pool {
    PooledTeam teams[TEAMS];
    Event work;                         // a team has opened
    std::atomic<uint32_t> opened{0};    // how often
    std::atomic<int> busy{0};           // threads in teams, callers included
    std::atomic<Nanoseconds> shared_until{0};
    std::atomic<Nanoseconds> team_spin{200 * MICROSECOND}, idle_spin{2 * MILLISECOND};
    std::mutex growing;
    std::atomic<int> workers{0};
};

alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool& pool = *new (storage) Pool;  // never destroyed: its threads run until the process ends

// How much of the time in which a worker wanted a core it had one. Callers are not asked: they lose time to workers that they
// wake, where the system puts those on their core.
class Presence {
   public:
    // Begins a part of the time, or goes on with the next one.
    void begin() { since = now(), on_core = time_on_core(since); }
    void add_sleep(Nanoseconds time) { since += time; }

    // Ends a part. If a quarter of the time was lost, cores are shared for the next moment.
    void end() {
        const Nanoseconds time = now(), core = time_on_core(time);
        wanted += time - since, lost += (time - since) - (core - on_core);
        since = time, on_core = core;
        if (wanted < WINDOW) return;
        if (lost * 4 > wanted) pool.shared_until.store(time + SHARED_FOR, std::memory_order_relaxed);
        wanted = lost = 0;
    }

   private:
    Nanoseconds since = 0, on_core = 0, wanted = 0, lost = 0;
};

thread_local Presence presence;

// Waits until `ready`: spins for `spin` at most, less where cores are shared, then sleeps.
template <class Ready>
void wait_for(Event& event, Nanoseconds spin, Ready ready) {
    const Nanoseconds start = now();
    Nanoseconds limit = BRIEF;
    for (bool longer = false;;) {
        for (int i = 0; i < 16; i++) {
            if (ready()) return;
            pause_briefly();
        }
        const Nanoseconds time = now();
        if (time - start < limit) continue;
        if (longer || time < pool.shared_until.load(std::memory_order_relaxed)) break;
        longer = true, limit = spin;
    }
    const Nanoseconds asleep = now();
    event.wait(ready);
    presence.add_sleep(now() - asleep);
}

bool wait_for_items(Team& team, uint64_t items) noexcept {
    PooledTeam& pooled = static_cast<PooledTeam&>(team);
    wait_for(pooled.progress, pool.team_spin, [&] { return team.finished.load() >= items || team.failed.load(); });
    return team.finished.load() >= items;
}

void wake_waiting(Team& team) noexcept { static_cast<PooledTeam&>(team).progress.wake(); }

// Runs one thread's part of a team.
void take_part(PooledTeam& team, int thread) {
    if (team.body(team.context, team, thread)) return;
    team.failed.store(true);
    team.progress.wake();
}

// Takes part in an open team that this worker has not served. Returns false if there is none, or enough threads are busy.
bool serve(int thread, uint64_t* served) {
    for (int i = 0; i < TEAMS; i++) {
        PooledTeam& team = pool.teams[i];
        uint64_t inside = team.inside.load();
        const uint64_t number = inside / NEXT_RUN;
        auto open = [&] { return !(inside & CLOSED) && inside / NEXT_RUN == number; };
        const int wanted = team.wanted.load();
        if (!open() || number == served[i] || thread >= wanted) continue;
        bool entered = false;
        if (pool.busy.fetch_add(1) < wanted)
            while (open() && !(entered = team.inside.compare_exchange_weak(inside, inside + 1))) {}
        if (entered && thread < team.threads) take_part(team, thread);
        pool.busy.fetch_sub(1);
        if (!entered) continue;
        served[i] = number;
        if ((team.inside.fetch_sub(1) - 1) % NEXT_RUN == CLOSED) team.progress.wake();
        presence.end();
        return true;
    }
    return false;
}

// The loop of a worker, until the process ends. Worker w is always thread w + 1 of a team, so that in each pass a thread
// reads the same weights.
void work(int thread) {
    uint64_t served[TEAMS] = {};
    presence.begin();
    for (;;) {
        const uint32_t opened = pool.opened.load();
        if (!serve(thread, served)) wait_for(pool.work, pool.idle_spin, [&] { return pool.opened.load() != opened; });
    }
}

// Starts workers until there are `count`, or as many as the system grants. They take no signals.
void grow(int count) {
    if (pool.workers.load() >= count) return;
    std::lock_guard<std::mutex> lock(pool.growing);
#if !defined(_WIN32)
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    try {
        for (; pool.workers.load() < count; pool.workers.fetch_add(1)) std::thread(work, pool.workers.load() + 1).detach();
    } catch (const std::exception&) {  // the system or its memory has no more; the caller then does their work
    }
#if !defined(_WIN32)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

// Returns a team that no caller uses, or null.
PooledTeam* take_team() {
    for (PooledTeam& team : pool.teams)
        if (!team.taken.load() && !team.taken.exchange(true)) return &team;
    return nullptr;
}

// Marks all shares as untouched.
void reset(PooledTeam& team) {
    for (Left& left : team.shares) left.word.store(0);
    team.loops = 0;
}

bool run(int threads, Body body, void* context) noexcept {
    threads = std::min(threads, MAX_THREADS);
    PooledTeam* taken = threads > 1 ? take_team() : nullptr;
    if (!taken) {
        Team alone;
        return body(context, alone, 0);
    }
    PooledTeam& team = *taken;
    grow(threads - 1);
    if (team.loops > MAX_LOOPS / 2) reset(team);
    team.threads = threads, team.body = body, team.context = context;
    team.wanted.store(threads);
    team.finished.store(0), team.failed.store(false);
    pool.busy.fetch_add(1);
    team.inside.store((team.inside.load() / NEXT_RUN + 1) * NEXT_RUN);
    pool.opened.fetch_add(1);
    pool.work.wake();
    take_part(team, 0);
    team.inside.fetch_or(CLOSED);
    wait_for(team.progress, pool.team_spin, [&] { return team.inside.load() % NEXT_RUN == CLOSED; });
    const bool failed = team.failed.load();
    if (failed) reset(team);
    else team.loops = team.loops_then;
    team.taken.store(false);
    if (pool.busy.fetch_sub(1) > 1) {  // workers that found enough threads busy may look again
        pool.opened.fetch_add(1);
        pool.work.wake();
    }
    return !failed;
}

constexpr PoolFunctions FUNCTIONS = {run, wait_for_items, wake_waiting};

#if !defined(_WIN32)
// The child of a fork has none of the threads.
void start_again() {
    const Nanoseconds team_spin = pool.team_spin.load(), idle_spin = pool.idle_spin.load();
    new (storage) Pool;
    pool.team_spin.store(team_spin), pool.idle_spin.store(idle_spin);
}

const bool forks = (pthread_atfork(nullptr, nullptr, start_again), true);
#endif

}  // namespace

extern "C" {

// Returns the functions that libraries of kernels are given.
const void* foretoken_pool() { return &FUNCTIONS; }

// Sets for how many microseconds a thread spins in a team, and between teams, before it sleeps.
void foretoken_pool_spin(int team, int idle) {
    pool.team_spin.store(team * MICROSECOND);
    pool.idle_spin.store(idle * MICROSECOND);
}

// Returns the number of threads that the pool has started.
int foretoken_pool_workers() { return pool.workers.load(); }

}  // extern "C"

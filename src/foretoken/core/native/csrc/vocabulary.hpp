// Sampling parameters that change single logits, and the facts about a row that callers ask for: its largest tokens and
// the log-probability of one of them. Everything is computed for one row at a time, in an order that depends on its
// numbers alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "exponential.hpp"

// Changes of one row of logits, in the order of a SamplingLaw: mask, bans, biases, penalties.
struct Adjustment {
    const uint8_t* allowed;  // [n] one byte a token, or null for all
    const int64_t* banned;   // ids that are forbidden in any case
    const int64_t* ends;     // ids that are forbidden unless no others are allowed
    const int64_t* biased;   // ids, with `biases` added to their logits
    const float* biases;
    const int64_t* seen;      // unique ids of prompt and output
    const int32_t* generated;  // how often each of `seen` was generated
    int64_t banned_count, end_count, biased_count, seen_count;
    float repetition, frequency, presence;
};

// Ids beyond a row, of a draft with a smaller vocabulary for instance, change nothing.
inline bool within(int64_t id, int64_t n) { return id >= 0 && id < n; }

inline void forbid_all(float* x, int64_t n, const int64_t* ids, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (within(ids[i], n)) x[ids[i]] = -INFINITY;
}

// Whether any token except `ends` is allowed.
inline bool others_allowed(const Adjustment& a, int64_t n) {
    if (!a.allowed) return true;
    int64_t count = 0;
    for (int64_t v = 0; v < n; v++) count += a.allowed[v];
    for (int64_t i = 0; i < a.end_count; i++) {
        const int64_t* before = std::find(a.ends, a.ends + i, a.ends[i]);
        count -= before == a.ends + i && within(a.ends[i], n) && a.allowed[a.ends[i]];
    }
    return count > 0;
}

// Forbids tokens of x [n] by -inf. Returns whether one is left.
inline bool forbid(float* x, int64_t n, const Adjustment& a) {
    if (a.allowed)
        for (int64_t v = 0; v < n; v++) x[v] = a.allowed[v] ? x[v] : -INFINITY;
    const bool ends = a.end_count && others_allowed(a, n);
    forbid_all(x, n, a.banned, a.banned_count);
    if (ends) forbid_all(x, n, a.ends, a.end_count);
    if (!a.allowed) {
        if (!a.banned_count && !ends) return true;
        for (int64_t v = 0; v < n; v++)
            if (x[v] > -INFINITY) return true;
        return false;
    }
    for (int64_t v = 0; v < n; v++)
        if (x[v] != -INFINITY) return true;
    // A draft with a smaller vocabulary may give all allowed tokens -inf: then all are equally probable.
    bool any = false;
    auto in = [](const int64_t* ids, int64_t count, int64_t v) { return std::find(ids, ids + count, v) != ids + count; };
    for (int64_t v = 0; v < n; v++)
        if (a.allowed[v] && !in(a.banned, a.banned_count, v) && !(ends && in(a.ends, a.end_count, v))) x[v] = 0.0f, any = true;
    return any;
}

// Applies all changes to x [n]. Returns whether a token is left.
inline bool adjust(float* x, int64_t n, const Adjustment& a) {
    if ((a.allowed || a.banned_count || a.end_count) && !forbid(x, n, a)) return false;
    for (int64_t i = 0; i < a.biased_count; i++)
        if (within(a.biased[i], n)) x[a.biased[i]] += a.biases[i];
    for (int64_t i = 0; i < a.seen_count; i++) {
        if (!within(a.seen[i], n)) continue;
        float& value = x[a.seen[i]];
        if (a.repetition != 1.0f) value = value > 0.0f ? value / a.repetition : value * a.repetition;
        if (const int32_t times = a.generated[i]) {
            const float counted = a.frequency * (float)times;
            value -= counted + a.presence;
        }
    }
    return true;
}

// Writes the ids of the `count` largest of x [n], largest first, lower ids first on ties; NaN counts as the largest.
// below(from, to, bound): whether no element of a run of RUN elements exceeds `bound`, and none is NaN.
template <int64_t RUN, class Below>
inline void largest_ids(const float* x, int64_t n, int64_t count, int64_t* ids, Below below) {
    struct Entry {
        float x;
        int64_t id;
    };
    auto before = [](const Entry& a, const Entry& b) {
        if (std::isnan(a.x) != std::isnan(b.x)) return std::isnan(a.x);
        return a.x > b.x || (!(a.x < b.x) && a.id < b.id);
    };
    if (!count) return;
    std::vector<Entry> heap;  // its first entry is the last of those found so far
    heap.reserve(count + 1);
    for (int64_t from = 0; from < n; from += RUN) {
        const int64_t to = std::min(n, from + RUN);
        if ((int64_t)heap.size() == count && !std::isnan(heap[0].x) && below(from, to, heap[0].x)) continue;
        for (int64_t v = from; v < to; v++) {
            const Entry entry{x[v], v};
            if ((int64_t)heap.size() == count) {
                if (!before(entry, heap[0])) continue;
                std::pop_heap(heap.begin(), heap.end(), before);
                heap.pop_back();
            }
            heap.push_back(entry);
            std::push_heap(heap.begin(), heap.end(), before);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), before);
    for (int64_t i = 0; i < (int64_t)heap.size(); i++) ids[i] = heap[i].id;
}

inline void largest_ids(const float* x, int64_t n, int64_t count, int64_t* ids) {
    largest_ids<8 * LANES>(x, n, count, ids, [x](int64_t from, int64_t to, float bound) {
        unsigned any = 0;
        for (int64_t v = from; v < to; v += LANES)
            any |= ~bits(less_or_equal(load_first(x + v, to - v, -INFINITY), floats(bound))) & 0xffff;  // NaN is not less
        return !any;
    });
}

// The logarithm of the sum of exponentials of x [n], and how many numbers are larger than x[token].
inline double log_sum(const float* x, int64_t n, int64_t token, int64_t& larger) {
    static constexpr int64_t CHUNK = 512;  // tokens of one partial sum
    Floats top = floats(-INFINITY);
    const Floats chosen = floats(x[token]);
    larger = 0;
    for (int64_t v = 0; v < n; v += LANES) {
        const Floats values = load_first(x + v, n - v, -INFINITY);
        top = largest_of(top, values);
        larger += __builtin_popcount(bits(greater(values, chosen)));
    }
    const float largest = largest_lane(top);
    double total = 0.0;
    for (int64_t from = 0; from < n; from += CHUNK) {
        Floats sum = floats(0.0f);
        for (int64_t v = from; v < std::min(n, from + CHUNK); v += LANES)
            sum = sum + exponential(load_first(x + v, n - v, -INFINITY) - floats(largest));
        total += sum_of(sum);
    }
    return (double)largest + std::log(total);
}

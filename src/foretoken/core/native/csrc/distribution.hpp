// The distribution of a row of logits under temperature and filters: five numbers determine every token's probability.
//
// Sums go over chunks of fixed size, in order, so results do not depend on the number of threads or on the other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "exponential.hpp"
#include "maximum.hpp"

namespace {

constexpr int64_t CHUNK = 4096;      // tokens of one partial sum
constexpr int64_t ALONE = 1 << 15;   // up to this many numbers one thread is faster than two
constexpr int64_t GROUP = 32;        // tokens whose maximum is compared first where few are kept

// Parameters of a SamplingLaw. floor: log of min_p; top_k: 0 for all; top_p: 1 for all.
struct FilterSpec {
    float inverse, floor;
    int32_t top_k;
    float top_p;
};

// p(v) = exp((x_v - top) inverse) / mass where x_v > lowest, or x_v = lowest and v <= last; else 0.
struct Distribution {
    float top, inverse, lowest, over;  // over: 1 / mass
    int32_t last;
};

struct Entry {
    float x;
    int32_t id;
};

inline int64_t chunks(int64_t n) { return (n + CHUNK - 1) / CHUNK; }
inline int sharing(int64_t numbers, int threads) { return numbers < ALONE ? 1 : threads; }

inline Floats power(Floats x, const Distribution& dist) { return exponential((x - floats(dist.top)) * floats(dist.inverse)); }

// Probabilities of sixteen tokens from id `at` on.
inline Floats chances(Floats x, int64_t at, const Distribution& dist) {
    static constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats lowest = floats(dist.lowest);
    const Ints ids = add_ints(ints((int)at), load_ints(numbers));
    Mask kept = either(greater(x, lowest), both(equal(x, lowest), less_or_equal(ids, ints(dist.last))));
    if (std::isnan(dist.over)) kept = all_lanes();  // a row without a distribution is NaN everywhere
    return keep(kept, power(x, dist) * floats(dist.over));
}

// First pass over a chunk: its largest entry (NaN if any entry is), and the sum of exponentials relative to it.
struct Look {
    float top;
    double sum;
};

// groups: null, or receives the maximum of every GROUP tokens, [chunk / GROUP].
Look look(const float* x, int64_t n, float inverse, bool sum, float* groups) {
    Maximum maximum;
    for (int64_t from = 0; from < n; from += GROUP * LANES) {
        Floats largest = floats(-INFINITY);
        for (int64_t i = from; i < std::min(n, from + GROUP * LANES); i += LANES) {
            const Floats v = load_first(x + i, n - i, -INFINITY);
            maximum.add(v);
            largest = largest_of(largest, v);
        }
        if (groups) store(groups + from / GROUP, largest);
    }
    const Distribution own{maximum.value(), inverse, 0.0f, 0.0f, 0};
    if (!sum || !std::isfinite(own.top)) return {own.top, 0.0};
    Floats all = floats(0.0f);
    for (int64_t i = 0; i < n; i += LANES) all = all + power(load_first(x + i, n - i, -INFINITY), own);
    return {own.top, sum_of(all)};
}

// Sum of the exponentials of a chunk that are at least the limit. `lowest` becomes the smallest x among them.
double summed(const float* x, int64_t n, const Distribution& dist, float floor, float& lowest) {
    Floats sum = floats(0.0f), low = floats(INFINITY);
    for (int64_t i = 0; i < n; i += LANES) {
        const Floats v = load_first(x + i, n - i, -INFINITY);
        const Floats y = (v - floats(dist.top)) * floats(dist.inverse);
        const Mask kept = greater_or_equal(y, floats(floor));
        sum = sum + keep(kept, exponential(y));
        low = select(kept, smallest_of(low, v), low);
    }
    lowest = std::min(lowest, smallest_lane(low));
    return sum_of(sum);
}

// A row, and the maximum of each GROUP of its tokens: lane l of GROUP vectors, sixteen groups side by side.
struct Row {
    const float* x;
    int64_t n;
    const float* groups;
    int64_t group_count() const { return (n + GROUP * LANES - 1) / (GROUP * LANES) * LANES; }
};

// Collects the entries of a row that are not under `bound`, in rising order of ids.
void collect(const Row& row, float bound, std::vector<Entry>& entries) {
    entries.clear();
    const Floats b = floats(bound);
    for (int64_t from = 0; from < row.n; from += GROUP * LANES) {
        if (!bits(greater_or_equal(load(row.groups + from / GROUP), b))) continue;
        for (int64_t i = from; i < std::min(row.n, from + GROUP * LANES); i += LANES) {
            const Mask kept = greater_or_equal(load_first(row.x + i, row.n - i, 0.0f), b);
            for (unsigned hit = bits(kept) & bits(first_lanes(row.n - i)); hit; hit &= hit - 1)
                entries.push_back({row.x[i + __builtin_ctz(hit)], (int32_t)(i + __builtin_ctz(hit))});
        }
    }
}

float kth(std::vector<float>& values, int64_t k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[k - 1];
}

// Returns the k-th largest entry of a row. At least k entries, and few others, reach the k-th largest group maximum.
float kth_of_row(const Row& row, int64_t k, std::vector<Entry>& entries) {
    std::vector<float> values(row.groups, row.groups + row.group_count());
    collect(row, k <= row.group_count() ? kth(values, k) : -INFINITY, entries);
    values.clear();
    for (const Entry& e : entries) values.push_back(e.x);
    return kth(values, k);
}

float power_of(float x, const Distribution& dist) { return first_lane(power(floats(x), dist)); }

// Returns a number that falls as x rises; 0 and -0 have the same.
uint32_t falling_key(float x) {
    uint32_t bits;
    x += 0.0f;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000 ? bits : ~bits & 0x7fffffff;
}

// Sorts entries by falling x. Equal ones, which come in rising order of ids, stay in it.
void sort_entries(std::vector<Entry>& entries) {
    constexpr size_t FEW = 512;  // up to this many are compared, more are distributed by eleven bits at a time
    if (entries.size() <= FEW) {
        std::sort(entries.begin(), entries.end(),
                  [](const Entry& a, const Entry& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); });
        return;
    }
    constexpr int BITS = 11, BUCKETS = 1 << BITS;
    std::vector<Entry> other(entries.size());
    for (int shift = 0; shift < 32; shift += BITS) {
        uint32_t starts[BUCKETS + 1] = {};
        for (const Entry& e : entries) starts[(falling_key(e.x) >> shift & (BUCKETS - 1)) + 1]++;
        for (int i = 0; i < BUCKETS; i++) starts[i + 1] += starts[i];
        for (const Entry& e : entries) other[starts[falling_key(e.x) >> shift & (BUCKETS - 1)]++] = e;
        entries.swap(other);
    }
}

// Selects the nucleus: the most probable entries preceded by less than top_p of `total`, lowest ids first on ties.
// Returns whether `entries`, the head of the row, contains all of it.
bool nucleus(std::vector<Entry>& entries, double total, float top_p, bool whole, Distribution& dist) {
    sort_entries(entries);
    const float over = (float)(1.0 / total);
    double before = 0.0, mass = 0.0;
    size_t count = 0;
    float values[LANES], powers[LANES];
    for (; count < entries.size(); count++) {
        if (count % LANES == 0) {
            for (size_t i = 0; i < LANES; i++) values[i] = entries[std::min(count + i, entries.size() - 1)].x;
            store(powers, power(load(values), dist));
        }
        const float e = powers[count % LANES], p = e * over;
        if (count && (float)(before + p) - p >= top_p) break;
        before += p, mass += e;
        dist.lowest = entries[count].x, dist.last = entries[count].id;
    }
    dist.over = (float)(1.0 / mass);
    return count < entries.size() || whole;
}

// Applies top_k and top_p to a row whose top is known. total: mass of the entries that min_p keeps, whose smallest is
// dist.lowest.
void narrow(const Row& row, const FilterSpec& f, double total, Distribution& dist, std::vector<Entry>& entries) {
    const bool few = f.top_k > 0 && f.top_k < row.n;
    if (few) {
        const float smallest = kth_of_row(row, f.top_k, entries);
        auto outside = [&](const Entry& e) { return e.x < smallest || (e.x - dist.top) * f.inverse < f.floor; };
        entries.erase(std::remove_if(entries.begin(), entries.end(), outside), entries.end());
        total = 0.0, dist.lowest = INFINITY;
        for (const Entry& e : entries) total += power_of(e.x, dist), dist.lowest = std::min(dist.lowest, e.x);
        dist.over = (float)(1.0 / total);
    }
    if (f.top_p >= 1.0f) return;
    if (few) {
        nucleus(entries, total, f.top_p, true, dist);
        return;
    }
    const float lowest = dist.lowest;
    for (double floor : {1e-3, 1e-5, (1.0 - f.top_p) / (double)row.n, 0.0}) {
        const float bound = floor > 0.0 ? dist.top + (float)std::log(floor * total) / f.inverse : -INFINITY;
        collect(row, std::max(bound, lowest), entries);
        if (nucleus(entries, total, f.top_p, bound <= lowest, dist)) return;
    }
}

}  // namespace

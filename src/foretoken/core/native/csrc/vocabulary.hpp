// The largest logits of a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vector.hpp"

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

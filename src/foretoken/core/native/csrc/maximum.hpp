// The largest of some logits, by one rule in all kernels: of equal ones the first, 0 and -0 being equal, and none if an
// element is NaN or the largest is not finite.
#pragma once

#include <algorithm>

#include "vector.hpp"

// The largest element so far. A maximum of vectors may drop a NaN, so these are looked for.
class Maximum {
   public:
    void add(Floats v) { lost |= bits(unordered(v, v)), largest = largest_of(largest, v); }
    // NaN if any element was.
    float value() const { return lost ? NAN : largest_lane(largest); }

   private:
    Floats largest = floats(-INFINITY);
    unsigned lost = 0;
};

// Returns the largest of n logits, NaN if one of them is. Four maxima at once, because each waits for the one before it.
inline float maximum_of(const float* x, int64_t n) {
    constexpr int COUNT = 4;
    Maximum maxima[COUNT];
    int64_t i = 0;
    for (; i + COUNT * LANES <= n; i += COUNT * LANES)
        for (int at = 0; at < COUNT; at++) maxima[at].add(load(x + i + at * LANES));
    for (; i < n; i += LANES) maxima[0].add(load_first(x + i, n - i, -INFINITY));
    float largest = maxima[0].value();
    for (int at = 1; at < COUNT; at++) {
        const float other = maxima[at].value();
        if (!(other <= largest)) largest = std::isnan(largest) ? largest : other;
    }
    return largest;
}

// Returns the place of the largest of n logits, -1 where there is none. `top` receives the largest.
inline int64_t argmax(const float* x, int64_t n, float& top) {
    constexpr int64_t PART = 2048;  // only the first part with the largest is searched
    int64_t first = 0;
    top = -INFINITY;
    for (int64_t from = 0; from < n; from += PART) {
        const float largest = maximum_of(x + from, std::min(PART, n - from));
        if (!(largest <= top)) top = largest, first = from;
        if (std::isnan(top)) return -1;
    }
    if (!std::isfinite(top)) return -1;
    for (int64_t i = first; i < n; i += LANES)
        if (const unsigned hit = bits(equal(load_first(x + i, n - i, -INFINITY), floats(top)))) return i + __builtin_ctz(hit);
    return -1;
}

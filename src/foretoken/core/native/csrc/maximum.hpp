// The largest of some logits, by one rule in all kernels: of equal ones the first, 0 and -0 being equal, and none where an
// element is NaN or the largest is not finite.
#pragma once

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

// Returns the place of the largest of n logits, -1 where there is none. `top` receives the largest.
inline int64_t argmax(const float* x, int64_t n, float& top) {
    Maximum maximum;
    for (int64_t i = 0; i < n; i += LANES) maximum.add(load_first(x + i, n - i, -INFINITY));
    top = maximum.value();
    if (!std::isfinite(top)) return -1;
    for (int64_t i = 0; i < n; i += LANES)
        if (const unsigned hit = bits(equal(load_first(x + i, n - i, -INFINITY), floats(top)))) return i + __builtin_ctz(hit);
    return -1;
}

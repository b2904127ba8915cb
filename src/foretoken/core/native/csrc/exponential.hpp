// The exponential function of all kernels.
#pragma once

#include "vector.hpp"

// exp with a relative error below 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2]. -inf gives 0.
inline Floats exponential(Floats x) {
    x = largest_of(x, floats(-104.0f));
    Floats n = rounded(x * floats(1.44269504f));
    Floats r = subtract_product(n, floats(0.693359375f), x);
    r = subtract_product(n, floats(-2.12194440e-4f), r);
    Floats p = floats(1.9875691e-4f);
    p = multiply_add(p, r, floats(1.3981999e-3f));
    p = multiply_add(p, r, floats(8.3334519e-3f));
    p = multiply_add(p, r, floats(4.1665795e-2f));
    p = multiply_add(p, r, floats(1.6666665e-1f));
    p = multiply_add(p, r, floats(0.5f));
    p = multiply_add(r * r, p, r + floats(1.0f));
    return scaled_by_power(p, n);
}

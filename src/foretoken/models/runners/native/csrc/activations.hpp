// Activations of MLPs, of sixteen floats at once.
#pragma once

#include "simd.hpp"

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, SQUARED_RELU = 4 };

// erf with an absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Floats error_function(Floats x) {
    const Floats t = floats(1.0f) / multiply_add(floats(0.3275911f), absolute(x), floats(1.0f));
    Floats p = floats(1.061405429f);
    p = multiply_add(p, t, floats(-1.453152027f));
    p = multiply_add(p, t, floats(1.421413741f));
    p = multiply_add(p, t, floats(-0.284496736f));
    p = multiply_add(p, t, floats(0.254829592f));
    const Floats size = floats(1.0f) - p * t * exponential(floats(0.0f) - x * x);
    return select(greater_or_equal(x, floats(0.0f)), size, floats(0.0f) - size);
}

// Not inlined: every shape of register tile would have a copy of each.
__attribute__((noinline)) inline Floats other_activation(Floats v, int kind) {
    const Floats zero = floats(0.0f), half = v * floats(0.5f);
    if (kind == GELU_TANH) return gelu(v);
    if (kind == GELU) return multiply_add(half, error_function(v * floats(0.70710678f)), half);
    const Floats positive = select(less_or_equal(v, zero), zero, v);  // NaN stays
    return kind == RELU ? positive : positive * positive;
}

inline Floats activate(Floats v, int kind) { return kind == SILU ? silu(v) : other_activation(v, kind); }

// gpt-oss: (up + 1) gate / (1 + exp(-slope gate)), with gate at most `limit`, and up within it. NaN stays.
__attribute__((noinline)) inline Floats clamped_gate(Floats gate, Floats up, float limit, float slope) {
    gate = smallest_of(floats(limit), gate);
    up = largest_of(floats(-limit), smallest_of(floats(limit), up));
    return (up + floats(1.0f)) * gate / (floats(1.0f) + exponential(smallest_of(floats(80.0f), gate * floats(-slope))));
}

// RMS norm (1910.07467) and layer norm (1607.06450) of one row.
#pragma once

#include "specs.hpp"

inline float mean_of(const float* x, int64_t count) {
    Floats sum = floats(0.0f);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum = sum + load(x + i);
    float total = sum_of(sum);
    for (; i < count; i++) total += x[i];
    return total / (float)count;
}

// The root mean square of x - mean is 1 / the result.
template <bool centered>
inline float inverse_deviation(const float* x, float mean, int64_t count, float eps) {
    Floats sum = floats(0.0f);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats v = centered ? load(x + i) - floats(mean) : load(x + i);
        sum = multiply_add(v, v, sum);
    }
    float total = sum_of(sum);
    for (; i < count; i++) total += (x[i] - mean) * (x[i] - mean);
    return 1.0f / std::sqrt(total / (float)count + eps);
}

template <bool centered>
inline void normalize_with(const float* x, const NormSpec& norm, int64_t count, float eps, float* out) {
    const float mean = centered ? mean_of(x, count) : 0.0f, factor = inverse_deviation<centered>(x, mean, count, eps);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats v = centered ? load(x + i) - floats(mean) : load(x + i);
        const Floats scaled = v * floats(factor) * load(norm.weight + i);
        store(out + i, norm.bias ? scaled + load(norm.bias + i) : scaled);
    }
    for (; i < count; i++) {
        const float scaled = (x[i] - mean) * factor * norm.weight[i];
        out[i] = norm.bias ? scaled + norm.bias[i] : scaled;
    }
}

// out = x / rms(x) * weight, or (x - mean) / deviation * weight, plus a bias; out = x without a norm.
inline void normalize(const ModelSpec& m, const float* x, const NormSpec& norm, int64_t count, float* out) {
    if (!norm) {
        if (out != x) std::memcpy(out, x, sizeof(float) * count);
    } else if (m.centered) {
        normalize_with<true>(x, norm, count, m.eps, out);
    } else {
        normalize_with<false>(x, norm, count, m.eps, out);
    }
}

// The exponential function of all kernels.
#pragma once

#include <immintrin.h>

// exp with a relative error below 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2]. -inf gives 0.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

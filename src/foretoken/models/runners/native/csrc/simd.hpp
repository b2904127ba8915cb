// Vectors of sixteen floats, and the types (kinds) of weights and activations.
//
// Everything is stored in words of four bytes: one float32, two bfloat16 or four int8. A vector holds sixteen words, so
// one loop handles every kind, and only `Unit<kind>` depends on the content of a word.
#pragma once

#include "exponential.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>

// PACKED: bfloat16 stored in 12 bits (packed.hpp). From GROUPED on: codes of four and eight bits with scales in groups of
// inputs (grouped.hpp).
enum Kind : int { F32 = 0, BF16 = 1, INT8 = 2, PACKED = 3, GROUPED = 4 };

constexpr int LANES = 16;

constexpr int per_word(Kind kind) { return kind == F32 ? 1 : kind == BF16 || kind == PACKED ? 2 : 4; }

using Word = uint32_t;

inline __m512 from_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

// Round to nearest even, as the hardware's conversion does.
inline __m256i to_bf16(__m512 v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

// Multiply-add of a vector of words and one word: 16, 32 or 64 products, summed into sixteen lanes.
template <Kind kind>
struct Unit;

template <>
struct Unit<F32> {
    using Sum = __m512;
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum sum, __m512i weights, Word x) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(_mm512_set1_epi32((int)x)), sum);
    }
    static __m512 value(Sum sum) { return sum; }
};

#ifdef __AVX512BF16__
template <>
struct Unit<BF16> {
    using Sum = __m512;
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum sum, __m512i weights, Word x) {
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)x));
    }
    static __m512 value(Sum sum) { return sum; }
};
#else
template <>
struct Unit<BF16> {  // the even elements, then the odd ones
    using Sum = __m512;
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum sum, __m512i weights, Word x) {
        const __m512i high = _mm512_set1_epi32((int)0xffff0000);
        __m512i both = _mm512_set1_epi32((int)x);
        sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), sum);
        return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(weights, high)),
                               _mm512_castsi512_ps(_mm512_and_si512(both, high)), sum);
    }
    static __m512 value(Sum sum) { return sum; }
};
#endif

#ifdef __AVX512VNNI__
// The instruction multiplies unsigned by signed bytes: activations have an offset of 128, which is subtracted at the end.
// Inline assembly, because GCC 12 copies every sum before its intrinsic and back after it, which takes twice the registers:
// with the intrinsic a pass of a 0.74 B model took 21.7 instead of 15.7 ms at 16 rows, 166 instead of 117 at 128 (Zen 5).
template <>
struct Unit<INT8> {
    using Sum = __m512i;
    static Sum zero() { return _mm512_setzero_si512(); }
    static Sum add(Sum sum, __m512i weights, Word x) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_epi32((int)x)), "v"(weights));
        return sum;
    }
};
#endif

#ifdef __AMX_INT8__
constexpr int OFFSET = 0;  // tiles multiply signed by signed
#else
constexpr int OFFSET = 128;
#endif

// tanh(x) = 1 - 2 / (exp(2x) + 1); absolute error below 1e-6, enough for a softcap or GELU.
inline __m512 hyperbolic_tangent(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-20.0f)), _mm512_set1_ps(20.0f));
    __m512 e = exponential(_mm512_add_ps(x, x));
    return _mm512_div_ps(_mm512_sub_ps(e, _mm512_set1_ps(1.0f)), _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
}

inline __m512 silu(__m512 x) {
    __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// GELU with the tanh approximation (1606.08415, section 2).
inline __m512 gelu(__m512 x) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 inner = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x), _mm512_set1_ps(0.79788456f));
    __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, hyperbolic_tangent(inner), half);
}

// Replaces NaN, infinity, and numbers that bf16 rounds to infinity by 0.
inline __m512 finite(__m512 x) {
    const __m512 most = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f7f0000));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(x), most, _CMP_LE_OQ), x);
}

// The larger of each pair, NaN if either is: a row with NaN must not become a row of finite numbers.
inline __m512 larger(__m512 a, __m512 b) {
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), _mm512_add_ps(a, b));
}

inline float largest(__m512 v) {
    return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) ? NAN : _mm512_reduce_max_ps(v);
}

// Stores sixteen floats as words of a kind; `at` counts elements. For INT8, which needs a scale per row, see `encode`.
template <Kind kind>
inline void put(Word* words, int64_t at, __m512 v) {
    if constexpr (kind == F32)
        _mm512_storeu_ps((float*)words + at, v);
    else
        _mm256_storeu_si256((__m256i*)((uint16_t*)words + at), to_bf16(v));
}

template <Kind kind>
inline __m512 get(const Word* words, int64_t at) {
    if constexpr (kind == F32)
        return _mm512_loadu_ps((const float*)words + at);
    else
        return from_bf16(_mm256_loadu_si256((const __m256i*)((const uint16_t*)words + at)));
}

// Stores a row of `count` floats (a multiple of 16) as words. Returns the row's scale: the value of one int8 step.
template <Kind kind>
inline float encode(const float* row, int64_t count, Word* words) {
    if constexpr (kind != INT8) {
        for (int64_t i = 0; i < count; i += LANES) put<kind>(words, i, _mm512_loadu_ps(row + i));
        return 1.0f;
    } else {
        __m512 most = _mm512_setzero_ps();
        for (int64_t i = 0; i < count; i += LANES) most = larger(most, _mm512_abs_ps(_mm512_loadu_ps(row + i)));
        float top = largest(most);
        float scale = top == 0.0f ? 1.0f : top / 127.0f;
        __m512 inverse = _mm512_set1_ps(1.0f / scale);
        for (int64_t i = 0; i < count; i += LANES) {
            __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + i), inverse));
            q = _mm512_add_epi32(q, _mm512_set1_epi32(OFFSET));
            _mm_storeu_si128((__m128i*)((int8_t*)words + i), _mm512_cvtepi32_epi8(q));
        }
        return scale;
    }
}

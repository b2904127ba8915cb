// Types (kinds) of weights and activations, and functions of sixteen floats.
//
// Everything is stored in words of four bytes: one float32, two bfloat16 or four int8. A vector holds sixteen words, so
// one loop handles every kind, and only `Unit<kind>` depends on the content of a word.
#pragma once

#include "exponential.hpp"

#include <type_traits>
#include <utility>

// PACKED: bfloat16 stored in 12 bits (packed.hpp). From GROUPED on: codes of four and eight bits with scales in groups of
// inputs (grouped.hpp).
enum Kind : int { F32 = 0, BF16 = 1, INT8 = 2, PACKED = 3, GROUPED = 4 };

#ifdef __AVX512BF16__
constexpr bool BF16_PRODUCTS = true;  // there is an instruction for the two products of a word of bfloat16
#else
constexpr bool BF16_PRODUCTS = false;
#endif

// x86 without an instruction for products of bytes (VNNI) multiplies int8 weights as numbers of 16 bits, two multiplications
// for four products of a lane; as bytes it takes three, one for the signs.
#if defined(__SSE2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define WIDE_BYTES
constexpr bool WIDENED = true;
#else
constexpr bool WIDENED = false;
#endif

constexpr int per_word(Kind kind) { return kind == F32 ? 1 : kind == BF16 || kind == PACKED ? 2 : 4; }

// Words of an input row for each word of the weights. Without an instruction for its products, both bfloat16 numbers of a
// word are widened to float32 once, when the row is stored, and not again in every product. So are bytes to 16 bits: the even
// ones of a word, then the odd ones.
constexpr int input_words(Kind kind) {
    return (kind == INT8 ? WIDENED : !BF16_PRODUCTS && (kind == BF16 || kind == PACKED)) ? 2 : 1;
}

using Word = uint32_t;

// Calls f(0), ..., f(R - 1) with constants, so that arrays indexed by them are registers.
template <class F, int... r>
__attribute__((always_inline)) inline void each_of(F&& f, std::integer_sequence<int, r...>) {
    (f(std::integral_constant<int, r>()), ...);
}

template <int R, class F>
__attribute__((always_inline)) inline void each(F&& f) {
    each_of(f, std::make_integer_sequence<int, R>());
}

// Multiply-add of a vector of words and the input of one word: 16, 32 or 64 products, summed into sixteen lanes.
template <Kind kind>
struct Unit;

template <>
struct Unit<F32> {
    using Sum = Floats;
    static Sum zero() { return floats(0.0f); }
    INLINE static Sum add(Sum sum, Ints weights, const Word* x) {
        return multiply_add(as_floats(weights), floats(*(const float*)x), sum);
    }
};

#ifdef __AVX512BF16__
template <>
struct Unit<BF16> {
    using Sum = Floats;
    static Sum zero() { return floats(0.0f); }
    INLINE static Sum add(Sum sum, Ints weights, const Word* x) {
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)*x));
    }
};
#else
template <>
struct Unit<BF16> {  // the even elements, then the odd ones
    using Sum = Floats;
    static Sum zero() { return floats(0.0f); }
    INLINE static Sum add(Sum sum, Ints weights, const Word* x) {
        const float* values = (const float*)x;
        sum = multiply_add(as_floats(shift_left<16>(weights)), floats(values[0]), sum);
        return multiply_add(as_floats(and_bits(weights, ints((int)0xffff0000))), floats(values[1]), sum);
    }
};
#endif

// Where an instruction multiplies unsigned by signed bytes, activations have an offset of 128, which is subtracted at the end.
template <>
struct Unit<INT8> {
    using Sum = Ints;
    static Sum zero() { return ints(0); }
#ifdef WIDE_BYTES
    INLINE static Sum add(Sum sum, Ints weights, const Word* x) {
        sum = add_pairs(sum, shift_right_signed16<8>(shift_left16<8>(weights)), ints((int)x[0]));
        return add_pairs(sum, shift_right_signed16<8>(weights), ints((int)x[1]));
    }
#else
    INLINE static Sum add(Sum sum, Ints weights, const Word* x) {
        if constexpr (UNSIGNED_BYTES) return add_products(sum, ints((int)*x), weights);
        return add_products(sum, weights, ints((int)*x));
    }
#endif
};

#ifdef __AMX_INT8__
constexpr int OFFSET = 0;  // tiles multiply signed by signed
#else
constexpr int OFFSET = UNSIGNED_BYTES ? 128 : 0;
#endif

// tanh(x) = 1 - 2 / (exp(2x) + 1); absolute error below 1e-6, enough for a softcap or GELU.
inline Floats hyperbolic_tangent(Floats x) {
    x = smallest_of(largest_of(x, floats(-20.0f)), floats(20.0f));
    const Floats e = exponential(x + x);
    return (e - floats(1.0f)) / (e + floats(1.0f));
}

// 1 / (1 + exp(-x)); exp stays within its range, and NaN stays NaN.
inline Floats logistic(Floats x) {
    return floats(1.0f) / (floats(1.0f) + exponential(smallest_of(floats(80.0f), floats(0.0f) - x)));
}

inline Floats silu(Floats x) { return x / (floats(1.0f) + exponential(floats(0.0f) - x)); }

// GELU with the tanh approximation (1606.08415, section 2).
inline Floats gelu(Floats x) {
    const Floats cube = x * x * x;
    const Floats inner = multiply_add(cube, floats(0.044715f), x) * floats(0.79788456f);
    const Floats half = x * floats(0.5f);
    return multiply_add(half, hyperbolic_tangent(inner), half);
}

// Replaces NaN, infinity, and numbers that bf16 rounds to infinity by 0.
inline Floats finite(Floats x) { return keep(less_or_equal(absolute(x), as_floats(ints(0x7f7f0000))), x); }

// The larger of each pair, NaN if either is: a row with NaN must not become a row of finite numbers.
inline Floats larger(Floats a, Floats b) { return select(unordered(a, b), a + b, largest_of(a, b)); }

inline float largest(Floats v) { return bits(unordered(v, v)) ? NAN : largest_lane(v); }

// Stores sixteen floats as words of a kind; `at` counts elements. For INT8, which needs a scale per row, see `encode`.
template <Kind kind>
inline void put(Word* words, int64_t at, Floats v) {
    if constexpr (kind == F32)
        store((float*)words + at, v);
    else
        store_bf16((uint16_t*)words + at, v);
}

template <Kind kind>
inline Floats get(const Word* words, int64_t at) {
    if constexpr (kind == F32)
        return load((const float*)words + at);
    else
        return load_bf16((const uint16_t*)words + at);
}

// Stores sixteen floats as words of an input row of a float kind.
template <Kind kind>
inline void put_input(Word* words, int64_t at, Floats v) {
    if constexpr (input_words(kind) == 1) return put<kind>(words, at, v);
    uint16_t rounded[LANES];
    store_bf16(rounded, v);
    store((float*)words + at, load_bf16(rounded));
}

// Stores sixteen bytes of an input row of int8.
inline void put_bytes(Word* words, int64_t at, Ints v) {
    if constexpr (!WIDENED) return store_int8((int8_t*)words + at, v);
    int8_t narrow[LANES];
    store_int8(narrow, v);
    int16_t* wide = (int16_t*)words + at;
    for (int i = 0; i < LANES; i++) wide[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = narrow[i];
}

// Stores a row of `count` floats (a multiple of 16) as an input row. Returns the row's scale: the value of one int8 step.
template <Kind kind>
inline float encode(const float* row, int64_t count, Word* words) {
    if constexpr (kind != INT8) {
        for (int64_t i = 0; i < count; i += LANES) put_input<kind>(words, i, load(row + i));
        return 1.0f;
    } else {
        Floats maxima = floats(0.0f);
        for (int64_t i = 0; i < count; i += LANES) maxima = larger(maxima, absolute(load(row + i)));
        const float top = largest(maxima), scale = top == 0.0f ? 1.0f : top / 127.0f;
        const Floats inverse = floats(1.0f / scale);
        for (int64_t i = 0; i < count; i += LANES) put_bytes(words, i, add_ints(to_ints(load(row + i) * inverse), ints(OFFSET)));
        return scale;
    }
}

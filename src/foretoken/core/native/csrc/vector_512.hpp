// Vectors of sixteen numbers in one register of AVX-512.
#pragma once

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

constexpr bool ONE_REGISTER = true;

INLINE Floats floats(float x) { return _mm512_set1_ps(x); }
INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Floats load(const float* at) { return _mm512_loadu_ps(at); }
INLINE void store(float* at, Floats v) { _mm512_storeu_ps(at, v); }
INLINE Ints load_ints(const void* at) { return _mm512_loadu_si512(at); }
INLINE void store_ints(void* at, Ints v) { _mm512_storeu_si512(at, v); }


// Sixteen bytes, four times.
INLINE Ints repeated(const void* at) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)at)); }

// Lanes below `count`.
INLINE Mask first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count > 0 ? (Mask)((1u << count) - 1) : 0;
}
// Only the first `count` numbers are in memory; `rest` takes the place of the others.
INLINE Floats load_first(const float* at, int64_t count, float rest) {
    return _mm512_mask_loadu_ps(floats(rest), first_lanes(count), at);
}
INLINE void store_first(float* at, int64_t count, Floats v) { _mm512_mask_storeu_ps(at, first_lanes(count), v); }

// Compilers know + - * / of Floats.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }        // a b + c
INLINE Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
INLINE Floats largest_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }    // b where either is NaN
INLINE Floats smallest_of(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats absolute(Floats a) { return _mm512_abs_ps(a); }
INLINE Floats rounded(Floats a) { return _mm512_roundscale_ps(a, 0); }
INLINE Floats scaled_by_power(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }  // a 2^n for whole n

INLINE Mask less_or_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
INLINE Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE Mask greater_or_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE Mask different(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
INLINE Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
INLINE Mask less_or_equal(Ints a, Ints b) { return _mm512_cmple_epi32_mask(a, b); }
INLINE Mask both(Mask a, Mask b) { return a & b; }
INLINE Mask either(Mask a, Mask b) { return a | b; }
INLINE Mask all_lanes() { return 0xffff; }
INLINE unsigned bits(Mask m) { return m; }
INLINE Floats select(Mask m, Floats a, Floats b) { return _mm512_mask_mov_ps(b, m, a); }  // a where m, else b
INLINE Floats keep(Mask m, Floats a) { return _mm512_maskz_mov_ps(m, a); }                // a where m, else 0

INLINE float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
INLINE float largest_lane(Floats a) { return _mm512_reduce_max_ps(a); }
INLINE float smallest_lane(Floats a) { return _mm512_reduce_min_ps(a); }
INLINE float first_lane(Floats a) { return _mm512_cvtss_f32(a); }
INLINE int32_t sum_of(Ints a) { return _mm512_reduce_add_epi32(a); }

INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Ints subtract_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
INLINE Ints and_bits(Ints a, Ints b) { return _mm512_and_si512(a, b); }
INLINE Ints xor_bits(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
INLINE Ints or_bits(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int n> INLINE Ints shift_left(Ints a) { return _mm512_slli_epi32(a, n); }
template <int n> INLINE Ints shift_left16(Ints a) { return _mm512_slli_epi16(a, n); }    // in halves of 16 bits
template <int n> INLINE Ints shift_right_signed16(Ints a) { return _mm512_srai_epi16(a, n); }
template <int n> INLINE Ints shift_right16(Ints a) { return _mm512_srli_epi16(a, n); }
INLINE Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
INLINE Ints as_ints(Floats a) { return _mm512_castps_si512(a); }
INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
INLINE Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }  // nearest

INLINE Ints bytes(int8_t x) { return _mm512_set1_epi8(x); }
INLINE Ints bits_from(Ints mask, Ints a, Ints b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }  // a where mask has ones
// In each run of sixteen bytes: the entries of a table; the lower and upper halves of two runs, interleaved.
INLINE Ints look_up(Ints table, Ints at) { return _mm512_shuffle_epi8(table, at); }
INLINE Ints interleave_low(Ints a, Ints b) { return _mm512_unpacklo_epi8(a, b); }
INLINE Ints interleave_high(Ints a, Ints b) { return _mm512_unpackhi_epi8(a, b); }
// In each run of sixteen bytes: the even (or odd) bytes of a, then those of b.
INLINE Ints even_bytes(Ints a, Ints b) {
    const Ints low = _mm512_set1_epi16(255);
    return _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
}
INLINE Ints odd_bytes(Ints a, Ints b) {
    return _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
}
using ByteMask = __mmask64;
INLINE ByteMask equal_bytes(Ints a, uint8_t b) { return _mm512_cmpeq_epi8_mask(a, _mm512_set1_epi8((char)b)); }
INLINE Ints with_bytes(Ints a, ByteMask m, uint8_t b) { return _mm512_mask_mov_epi8(a, m, _mm512_set1_epi8((char)b)); }
INLINE ByteMask no_bytes() { return 0; }
INLINE ByteMask either(ByteMask a, ByteMask b) { return a | b; }
INLINE bool every(ByteMask m) { return !~m; }

INLINE Floats load_bf16(const uint16_t* at) {
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}
// Rounds to nearest even, as the hardware's conversion does.
INLINE void store_bf16(uint16_t* at, Floats v) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(v));
#else
    Ints whole = _mm512_castps_si512(v);
    Ints odd = _mm512_and_si512(_mm512_srli_epi32(whole, 16), _mm512_set1_epi32(1));
    Ints sum = _mm512_add_epi32(whole, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
#endif
}
INLINE Floats load_half(const uint16_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
INLINE Ints load_int8(const int8_t* at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)); }
INLINE void store_int8(int8_t* at, Ints v) { _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(v)); }
INLINE void store_saturated(int8_t* at, Ints v) { _mm_storeu_si128((__m128i*)at, _mm512_cvtsepi32_epi8(v)); }
INLINE uint16_t to_half(float x) { return (uint16_t)_cvtss_sh(x, 0); }

// sum += four products of bytes in each lane. With VNNI one factor is unsigned and the other signed, elsewhere both are
// signed.
#ifdef __AVX512VNNI__
constexpr bool UNSIGNED_BYTES = true;
// Inline assembly, because GCC 12 copies every sum before its intrinsic and back after it, which takes twice the registers:
// with the intrinsic a pass of a 0.74 B model took 21.7 instead of 15.7 ms at 16 rows, 166 instead of 117 at 128 (Zen 5).
INLINE Ints add_products(Ints sum, Ints positive, Ints other) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(positive), "v"(other));
    return sum;
}
// The same with one word for all lanes.
INLINE void add_products(Ints& sum, Ints positive, const uint32_t& word) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(positive), "m"(word));
}
#else
constexpr bool UNSIGNED_BYTES = false;
// |w| times x with the sign of w: the sum of two products, at most 2 * 128 * 127, fits into 16 bits. x is never -128.
INLINE Ints add_products(Ints sum, Ints w, Ints x) {
    const Ints turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    const Ints pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
INLINE void add_products(Ints& sum, Ints w, const uint32_t& word) { sum = add_products(sum, w, ints((int)word)); }
#endif
// sum += two products of numbers of 16 bits in each lane.
INLINE Ints add_pairs(Ints sum, Ints a, Ints b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }

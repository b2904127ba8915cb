// Vectors of sixteen numbers in several registers: two with AVX2, four with NEON or the instructions that every x86-64 has.
//
// Most operations are those of the compilers' own vectors. What they do not offer is in the functions on one register,
// `piece_...`, at the beginning.
#pragma once

#ifdef __AVX2__
constexpr int PIECE = 32;
#else
constexpr int PIECE = 16;
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__clang__)
__asm__(".arch armv8.2-a+dotprod");  // GNU's assembler knows the instruction, and GCC its function, from this version on
#endif
#endif

constexpr bool ONE_REGISTER = false;
constexpr int PIECES = 64 / PIECE, PIECE_LANES = PIECE / 4;

typedef float FloatPiece __attribute__((vector_size(PIECE)));
typedef int32_t IntPiece __attribute__((vector_size(PIECE)));
typedef uint32_t WordPiece __attribute__((vector_size(PIECE)));
typedef int16_t ShortPiece __attribute__((vector_size(PIECE)));
typedef uint16_t HalfPiece __attribute__((vector_size(PIECE)));
typedef int8_t SignedPiece __attribute__((vector_size(PIECE)));
typedef uint8_t BytePiece __attribute__((vector_size(PIECE)));

struct Floats { FloatPiece p[PIECES]; };
struct Ints { IntPiece p[PIECES]; };
struct Mask { IntPiece p[PIECES]; };  // all ones or zero in each lane

INLINE FloatPiece piece(float x) {
#if defined(__AVX2__)
    return (FloatPiece)_mm256_set1_ps(x);
#else
    return FloatPiece{x, x, x, x};
#endif
}
INLINE IntPiece piece(int32_t x) { return IntPiece{} + x; }

// a b + c
INLINE FloatPiece piece_multiply_add(FloatPiece a, FloatPiece b, FloatPiece c) {
#if defined(__AVX2__)
    return (FloatPiece)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (FloatPiece)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The nearest whole numbers, to even.
INLINE IntPiece piece_to_ints(FloatPiece a) {
#if defined(__AVX2__)
    return (IntPiece)_mm256_cvtps_epi32((__m256)a);
#elif defined(__ARM_NEON)
    return (IntPiece)vcvtnq_s32_f32((float32x4_t)a);
#elif defined(__SSE2__)
    return (IntPiece)_mm_cvtps_epi32((__m128)a);
#else
    IntPiece out;
    for (int i = 0; i < PIECE_LANES; i++) out[i] = (int32_t)std::nearbyint(a[i]);
    return out;
#endif
}

INLINE FloatPiece piece_rounded(FloatPiece a) {
#if defined(__AVX2__)
    return (FloatPiece)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__ARM_NEON)
    return (FloatPiece)vrndnq_f32((float32x4_t)a);
#else
    const FloatPiece magic = piece(12582912.0f);  // 1.5 * 2^23: no fraction is left; larger numbers have none
    const IntPiece small = (a < 4194304.0f) & (a > -4194304.0f);
    const FloatPiece near = (a + magic) - magic;
    return (FloatPiece)(((IntPiece)near & small) | ((IntPiece)a & ~small));
#endif
}

// In each run of sixteen bytes, the entries of a table with sixteen.
INLINE BytePiece piece_look_up(BytePiece table, BytePiece at) {
#if defined(__AVX2__)
    return (BytePiece)_mm256_shuffle_epi8((__m256i)table, (__m256i)at);
#elif defined(__ARM_NEON)
    return (BytePiece)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)at);
#else
    alignas(PIECE) uint8_t from[PIECE], to[PIECE];
    std::memcpy(from, &table, PIECE), std::memcpy(to, &at, PIECE);
    for (int i = 0; i < PIECE; i++) to[i] = from[to[i]];
    BytePiece out;
    std::memcpy(&out, to, PIECE);
    return out;
#endif
}

// sum += four products of bytes in each lane. With VNNI `a` is unsigned and `b` signed; elsewhere both are signed.
#if defined(__AVXVNNI__)
constexpr bool UNSIGNED_BYTES = true;
INLINE IntPiece piece_add_products(IntPiece sum, IntPiece a, IntPiece b) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
#else
constexpr bool UNSIGNED_BYTES = false;
INLINE IntPiece piece_add_products(IntPiece sum, IntPiece a, IntPiece b) {
#if defined(__AVX2__)
    // |a| times b with the sign of a: the sum of two products, at most 2 * 128 * 127, fits into 16 bits. b is never -128.
    const __m256i turned = _mm256_sign_epi8((__m256i)b, (__m256i)a);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), turned);
    return sum + (IntPiece)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
#elif defined(__ARM_NEON)
    const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(x, y));
    return sum + (IntPiece)vpaddq_s32(low, high);
#else
    const ShortPiece even_a = ((ShortPiece)((HalfPiece)a << 8)) >> 8, odd_a = (ShortPiece)a >> 8;
    const ShortPiece even_b = ((ShortPiece)((HalfPiece)b << 8)) >> 8, odd_b = (ShortPiece)b >> 8;
#if defined(__SSE2__)
    return sum + (IntPiece)_mm_madd_epi16((__m128i)even_a, (__m128i)even_b) +
           (IntPiece)_mm_madd_epi16((__m128i)odd_a, (__m128i)odd_b);
#else
    for (int i = 0; i < PIECE_LANES; i++)
        for (int j = 2 * i; j < 2 * i + 2; j++) sum[i] += (int)even_a[j] * even_b[j] + (int)odd_a[j] * odd_b[j];
    return sum;
#endif
#endif
}
#endif

#if defined(__SSE2__)
// sum += two products of numbers of 16 bits in each lane.
INLINE IntPiece piece_add_pairs(IntPiece sum, IntPiece a, IntPiece b) {
#if defined(__AVX2__)
    return sum + (IntPiece)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (IntPiece)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

// sum += a b + c d over four bytes in each lane, where a and c are at most 63 and not negative.
INLINE IntPiece piece_add_small(IntPiece sum, IntPiece a, IntPiece b, IntPiece c, IntPiece d) {
#if defined(__AVX2__) && !defined(__AVXVNNI__)
    const __m256i first = _mm256_maddubs_epi16((__m256i)a, (__m256i)b), second = _mm256_maddubs_epi16((__m256i)c, (__m256i)d);
    return sum + (IntPiece)_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
#else
    return piece_add_products(piece_add_products(sum, a, b), c, d);
#endif
}

#define EACH_PIECE _Pragma("GCC unroll 4") for (int i = 0; i < PIECES; i++)

// Applies an expression of p[i] to every register.
#define OF_PIECES(Type, expression) \
    Type out;                       \
    EACH_PIECE out.p[i] = (expression); \
    return out

INLINE Floats floats(float x) { OF_PIECES(Floats, piece(x)); }
INLINE Ints ints(int32_t x) { OF_PIECES(Ints, piece(x)); }
// Registers in memory. A copy of all of them at once would go through the stack.
typedef float FloatsAt __attribute__((vector_size(PIECE), aligned(1), may_alias));
typedef int32_t IntsAt __attribute__((vector_size(PIECE), aligned(1), may_alias));
INLINE Floats load(const float* at) { OF_PIECES(Floats, ((const FloatsAt*)at)[i]); }
INLINE void store(float* at, Floats v) { EACH_PIECE ((FloatsAt*)at)[i] = v.p[i]; }
INLINE Ints load_ints(const void* at) { OF_PIECES(Ints, ((const IntsAt*)at)[i]); }
INLINE void store_ints(void* at, Ints v) { EACH_PIECE ((IntsAt*)at)[i] = v.p[i]; }


// Sixteen bytes, four times.
INLINE Ints repeated(const void* at) {
    alignas(64) char all[64];
    for (int i = 0; i < 4; i++) std::memcpy(all + 16 * i, at, 16);
    return load_ints(all);
}

// Only the first `count` numbers are in memory; `rest` takes the place of the others.
INLINE Floats load_first(const float* at, int64_t count, float rest) {
    if (count >= LANES) return load(at);
    alignas(64) float all[LANES];
    for (int i = 0; i < LANES; i++) all[i] = i < count ? at[i] : rest;
    return load(all);
}
INLINE void store_first(float* at, int64_t count, Floats v) {
    if (count >= LANES) return store(at, v);
    alignas(64) float all[LANES];
    store(all, v);
    for (int i = 0; i < count; i++) at[i] = all[i];
}

INLINE Floats operator+(Floats a, Floats b) { OF_PIECES(Floats, a.p[i] + b.p[i]); }
INLINE Floats operator-(Floats a, Floats b) { OF_PIECES(Floats, a.p[i] - b.p[i]); }
INLINE Floats operator*(Floats a, Floats b) { OF_PIECES(Floats, a.p[i] * b.p[i]); }
INLINE Floats operator/(Floats a, Floats b) { OF_PIECES(Floats, a.p[i] / b.p[i]); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { OF_PIECES(Floats, piece_multiply_add(a.p[i], b.p[i], c.p[i])); }
INLINE Floats subtract_product(Floats a, Floats b, Floats c) {  // c - a b
    OF_PIECES(Floats, piece_multiply_add(-a.p[i], b.p[i], c.p[i]));
}
INLINE Floats largest_of(Floats a, Floats b) { OF_PIECES(Floats, a.p[i] > b.p[i] ? a.p[i] : b.p[i]); }  // b where either is NaN
INLINE Floats smallest_of(Floats a, Floats b) { OF_PIECES(Floats, a.p[i] < b.p[i] ? a.p[i] : b.p[i]); }
INLINE Floats absolute(Floats a) { OF_PIECES(Floats, (FloatPiece)((IntPiece)a.p[i] & piece(0x7fffffff))); }
INLINE Floats rounded(Floats a) { OF_PIECES(Floats, piece_rounded(a.p[i])); }
// a 2^n for whole n, by two factors, so that small results are rounded once.
INLINE FloatPiece piece_power(IntPiece n) { return (FloatPiece)((n + 127) << 23); }
INLINE Floats scaled_by_power(Floats a, Floats n) {
    Floats out;
    EACH_PIECE {
        FloatPiece m = n.p[i] < 254.0f ? n.p[i] : piece(254.0f);
        m = m > -252.0f ? m : piece(-252.0f);
        const IntPiece whole = piece_to_ints(m), half = whole >> 1;
        out.p[i] = a.p[i] * piece_power(half) * piece_power(whole - half);
    }
    return out;
}

INLINE Mask less_or_equal(Floats a, Floats b) { OF_PIECES(Mask, a.p[i] <= b.p[i]); }
INLINE Mask greater(Floats a, Floats b) { OF_PIECES(Mask, a.p[i] > b.p[i]); }
INLINE Mask greater_or_equal(Floats a, Floats b) { OF_PIECES(Mask, a.p[i] >= b.p[i]); }
INLINE Mask equal(Floats a, Floats b) { OF_PIECES(Mask, a.p[i] == b.p[i]); }
INLINE Mask different(Floats a, Floats b) { OF_PIECES(Mask, a.p[i] != b.p[i]); }
INLINE Mask unordered(Floats a, Floats b) { OF_PIECES(Mask, (a.p[i] != a.p[i]) | (b.p[i] != b.p[i])); }
INLINE Mask less_or_equal(Ints a, Ints b) { OF_PIECES(Mask, a.p[i] <= b.p[i]); }
INLINE Mask both(Mask a, Mask b) { OF_PIECES(Mask, a.p[i] & b.p[i]); }
INLINE Mask either(Mask a, Mask b) { OF_PIECES(Mask, a.p[i] | b.p[i]); }
INLINE Mask all_lanes() { OF_PIECES(Mask, piece(-1)); }
INLINE Floats select(Mask m, Floats a, Floats b) {  // a where m, else b
    OF_PIECES(Floats, (FloatPiece)(((IntPiece)a.p[i] & m.p[i]) | ((IntPiece)b.p[i] & ~m.p[i])));
}
INLINE Floats keep(Mask m, Floats a) { OF_PIECES(Floats, (FloatPiece)((IntPiece)a.p[i] & m.p[i])); }  // a where m, else 0
INLINE unsigned bits(Mask m) {
    unsigned out = 0;
#if defined(__AVX2__)
    EACH_PIECE out |= (unsigned)_mm256_movemask_ps((__m256)m.p[i]) << (i * PIECE_LANES);
#elif defined(__SSE2__)
    EACH_PIECE out |= (unsigned)_mm_movemask_ps((__m128)m.p[i]) << (i * PIECE_LANES);
#else
    for (int lane = 0; lane < LANES; lane++) out |= (m.p[lane / PIECE_LANES][lane % PIECE_LANES] & 1u) << lane;
#endif
    return out;
}
INLINE Mask first_lanes(int64_t count) {
    const IntPiece n = piece((int32_t)(count < LANES ? count : LANES));
    Mask out;
    for (int lane = 0; lane < LANES; lane++) out.p[lane / PIECE_LANES][lane % PIECE_LANES] = lane;
    EACH_PIECE out.p[i] = out.p[i] < n;
    return out;
}

// Folds the lanes by halves, as a register of AVX-512 is reduced.
template <class T, class V, class F>
INLINE T folded(V v, F f) {
    T lanes[LANES];
    std::memcpy(lanes, &v, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = f(lanes[i], lanes[i + width]);
    return lanes[0];
}
INLINE float sum_of(Floats v) { return folded<float>(v, [](float a, float b) { return a + b; }); }
INLINE float largest_lane(Floats v) { return folded<float>(v, [](float a, float b) { return a > b ? a : b; }); }
INLINE float smallest_lane(Floats v) { return folded<float>(v, [](float a, float b) { return a < b ? a : b; }); }
INLINE float first_lane(Floats v) { return v.p[0][0]; }
INLINE int32_t sum_of(Ints v) { return folded<int32_t>(v, [](int32_t a, int32_t b) { return a + b; }); }

INLINE Ints add_ints(Ints a, Ints b) { OF_PIECES(Ints, a.p[i] + b.p[i]); }
INLINE Ints subtract_ints(Ints a, Ints b) { OF_PIECES(Ints, a.p[i] - b.p[i]); }
INLINE Ints and_bits(Ints a, Ints b) { OF_PIECES(Ints, a.p[i] & b.p[i]); }
INLINE Ints xor_bits(Ints a, Ints b) { OF_PIECES(Ints, a.p[i] ^ b.p[i]); }
INLINE Ints or_bits(Ints a, Ints b) { OF_PIECES(Ints, a.p[i] | b.p[i]); }
template <int n> INLINE Ints shift_left(Ints a) { OF_PIECES(Ints, (IntPiece)((WordPiece)a.p[i] << n)); }
template <int n> INLINE Ints shift_left16(Ints a) { OF_PIECES(Ints, (IntPiece)((HalfPiece)a.p[i] << n)); }  // in halves of 16 bits
template <int n> INLINE Ints shift_right16(Ints a) { OF_PIECES(Ints, (IntPiece)((HalfPiece)a.p[i] >> n)); }
template <int n> INLINE Ints shift_right_signed16(Ints a) { OF_PIECES(Ints, (IntPiece)((ShortPiece)a.p[i] >> n)); }
INLINE Floats as_floats(Ints a) { OF_PIECES(Floats, (FloatPiece)a.p[i]); }
INLINE Ints as_ints(Floats a) { OF_PIECES(Ints, (IntPiece)a.p[i]); }
INLINE Floats to_floats(Ints a) { OF_PIECES(Floats, __builtin_convertvector(a.p[i], FloatPiece)); }
INLINE Ints to_ints(Floats a) { OF_PIECES(Ints, piece_to_ints(a.p[i])); }  // nearest

INLINE Ints bytes(int8_t x) { OF_PIECES(Ints, (IntPiece)(SignedPiece{} + x)); }
INLINE Ints bits_from(Ints mask, Ints a, Ints b) {  // a where mask has ones
    OF_PIECES(Ints, (a.p[i] & mask.p[i]) | (b.p[i] & ~mask.p[i]));
}
// In each run of sixteen bytes: the entries of a table; the lower and upper halves of two runs, interleaved.
INLINE Ints look_up(Ints table, Ints at) { OF_PIECES(Ints, (IntPiece)piece_look_up((BytePiece)table.p[i], (BytePiece)at.p[i])); }

#if defined(__AVX2__)
#define RUNS(a, b, f) (IntPiece) f((__m256i)(a), (__m256i)(b))
INLINE IntPiece piece_low(IntPiece a, IntPiece b) { return RUNS(a, b, _mm256_unpacklo_epi8); }
INLINE IntPiece piece_high(IntPiece a, IntPiece b) { return RUNS(a, b, _mm256_unpackhi_epi8); }
INLINE IntPiece piece_narrowed(IntPiece a, IntPiece b) { return RUNS(a, b, _mm256_packus_epi16); }
#undef RUNS
#else
INLINE IntPiece piece_low(IntPiece a, IntPiece b) {
    return (IntPiece)__builtin_shufflevector((BytePiece)a, (BytePiece)b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
INLINE IntPiece piece_high(IntPiece a, IntPiece b) {
    return (IntPiece)__builtin_shufflevector((BytePiece)a, (BytePiece)b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
INLINE IntPiece piece_narrowed(IntPiece a, IntPiece b) {
    return (IntPiece)__builtin_shufflevector((BytePiece)a, (BytePiece)b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
#endif
INLINE Ints interleave_low(Ints a, Ints b) { OF_PIECES(Ints, piece_low(a.p[i], b.p[i])); }
INLINE Ints interleave_high(Ints a, Ints b) { OF_PIECES(Ints, piece_high(a.p[i], b.p[i])); }
// In each run of sixteen bytes: the even (or odd) bytes of a, then those of b.
INLINE Ints even_bytes(Ints a, Ints b) {
    const HalfPiece low = HalfPiece{} + 255;
    OF_PIECES(Ints, piece_narrowed((IntPiece)((HalfPiece)a.p[i] & low), (IntPiece)((HalfPiece)b.p[i] & low)));
}
INLINE Ints odd_bytes(Ints a, Ints b) {
    OF_PIECES(Ints, piece_narrowed((IntPiece)((HalfPiece)a.p[i] >> 8), (IntPiece)((HalfPiece)b.p[i] >> 8)));
}
struct ByteMask { IntPiece p[PIECES]; };
INLINE ByteMask equal_bytes(Ints a, uint8_t b) { OF_PIECES(ByteMask, (IntPiece)((BytePiece)a.p[i] == b)); }
INLINE Ints with_bytes(Ints a, ByteMask m, uint8_t b) {
    OF_PIECES(Ints, (a.p[i] & ~m.p[i]) | ((IntPiece)(BytePiece{} + b) & m.p[i]));
}
INLINE ByteMask no_bytes() { OF_PIECES(ByteMask, piece(0)); }
INLINE ByteMask either(ByteMask a, ByteMask b) { OF_PIECES(ByteMask, a.p[i] | b.p[i]); }
INLINE bool every(ByteMask m) {
    int32_t all[LANES], rest = -1;
    std::memcpy(all, &m, sizeof all);
    for (int32_t one : all) rest &= one;
    return rest == -1;
}

INLINE Floats load_bf16(const uint16_t* at) {
    typedef uint16_t Short __attribute__((vector_size(PIECE / 2)));
    Floats out;
    EACH_PIECE {
        Short half;
        std::memcpy(&half, at + i * PIECE_LANES, sizeof half);
#if defined(__AVX2__)
        out.p[i] = (FloatPiece)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
#else
        out.p[i] = (FloatPiece)(__builtin_convertvector(half, WordPiece) << 16);
#endif
    }
    return out;
}
// Rounds to nearest even.
INLINE void store_bf16(uint16_t* at, Floats v) {
    typedef uint16_t Short __attribute__((vector_size(PIECE / 2)));
    EACH_PIECE {
        const WordPiece whole = (WordPiece)v.p[i], sum = whole + ((whole >> 16 & 1) + 0x7fff);
        const Short half = __builtin_convertvector(sum >> 16, Short);
        std::memcpy(at + i * PIECE_LANES, &half, sizeof half);
    }
}

// A number of 16 bits as float, and back to the nearest, to even.
inline float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t whole;
    if (rest >= 0x7c00) whole = rest << 13 | 0x7f800000;
    else whole = 0x38000000 + (rest << 13);  // the exponents differ by 112
    float value;
    if (rest < 0x400) value = (float)rest * 0x1p-24f;
    else std::memcpy(&value, &whole, 4);
    uint32_t out;
    std::memcpy(&out, &value, 4);
    out |= sign;
    std::memcpy(&value, &out, 4);
    return value;
}
inline uint16_t to_half(float x) {
#ifdef __F16C__
    return (uint16_t)_cvtss_sh(x, 0);
#else
    uint32_t whole;
    std::memcpy(&whole, &x, 4);
    const uint16_t sign = (uint16_t)(whole >> 16 & 0x8000);
    whole &= 0x7fffffff;
    if (whole > 0x7f800000) return sign | 0x7e00 | (uint16_t)(whole >> 13 & 0x3ff);
    if (whole >= 0x47800000) return sign | 0x7c00;
    float magnitude;
    std::memcpy(&magnitude, &whole, 4);
    if (whole < 0x38800000) return sign | (uint16_t)std::nearbyint(magnitude * 0x1p24f);
    return sign | (uint16_t)((whole + 0xfff + (whole >> 13 & 1) - 0x38000000) >> 13);
#endif
}
INLINE Floats load_half(const uint16_t* at) {
    Floats out;
#ifdef __F16C__
    EACH_PIECE out.p[i] = (FloatPiece)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + i * PIECE_LANES)));
#else
    for (int lane = 0; lane < LANES; lane++) out.p[lane / PIECE_LANES][lane % PIECE_LANES] = from_half(at[lane]);
#endif
    return out;
}
typedef int8_t FewBytes __attribute__((vector_size(PIECE / 4)));
INLINE Ints load_int8(const int8_t* at) {
    Ints out;
    EACH_PIECE {
        FewBytes few;
        std::memcpy(&few, at + i * PIECE_LANES, sizeof few);
        out.p[i] = __builtin_convertvector(few, IntPiece);
    }
    return out;
}
INLINE void store_int8(int8_t* at, Ints v) {
    EACH_PIECE {
        const FewBytes few = __builtin_convertvector(v.p[i], FewBytes);
        std::memcpy(at + i * PIECE_LANES, &few, sizeof few);
    }
}
INLINE void store_saturated(int8_t* at, Ints v) {
    EACH_PIECE {
        v.p[i] = v.p[i] < 127 ? v.p[i] : piece(127);
        v.p[i] = v.p[i] > -128 ? v.p[i] : piece(-128);
    }
    store_int8(at, v);
}

INLINE Ints add_products(Ints sum, Ints a, Ints b) { OF_PIECES(Ints, piece_add_products(sum.p[i], a.p[i], b.p[i])); }
INLINE void add_products(Ints& sum, Ints a, const uint32_t& word) { sum = add_products(sum, a, ints((int)word)); }
#if defined(__SSE2__)
INLINE Ints add_pairs(Ints sum, Ints a, Ints b) { OF_PIECES(Ints, piece_add_pairs(sum.p[i], a.p[i], b.p[i])); }
#endif

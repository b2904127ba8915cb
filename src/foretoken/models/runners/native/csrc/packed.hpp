// Products with bf16 weights stored in 12 bits, without loss.
//
// The exponents of a trained matrix have little entropy: sixteen values cover nearly all of them. So a weight is stored as one
// byte of sign and mantissa and a four-bit code for its exponent. A step (one word of the input, 64 weights) that has any other
// exponent is stored raw, beside the matrix. Weights are restored in registers and multiplied in the order of the raw matrix,
// so results have the same bits, at three quarters of the memory.
//
// Two steps of a unit take 192 bytes: 64 of signs and mantissas for each step (first block, second block), then for each 32
// bytes of codes: of the first block in the low half, of the second in the high half.
#pragma once

#include <vector>

#include "grouped.hpp"

constexpr int PAIR_BYTES = 192, STEP_WORDS = BLOCKS * LANES;

// The tables of a matrix stored in 12 bits: the exponents of the codes, and the raw steps.
struct Exponents {
    uint16_t bits[32];     // exponent of each code, in its place in bf16; twice, because look-ups take five bits
    const int32_t* from;   // [units + 1] into steps
    const int32_t* steps;  // raw steps of each unit, ascending
    const Word* words;     // [raw steps][STEP_WORDS]
};

// bf16 of 32 bytes of sign and mantissa, and exponents in their place.
__attribute__((always_inline)) inline __m512i join_bf16(const uint8_t* bytes, __m512i exponents) {
    const __m512i low = _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i*)bytes)), high = _mm512_slli_epi16(low, 8);
    const __m512i sign = _mm512_set1_epi16((short)0x8000), exponent = _mm512_set1_epi16(0x7f80);
    const __m512i both = _mm512_ternarylogic_epi32(sign, high, low, 0xca);     // the sign from `high`, the rest from `low`
    return _mm512_ternarylogic_epi32(exponent, exponents, both, 0xca);
}

// Both blocks of a step of the unit that begins at `unit`.
__attribute__((always_inline)) inline void restore_step(const uint8_t* unit, int64_t k, __m512i table, __m512i& a,
                                                        __m512i& b) {
    const uint8_t *pair = unit + k / 2 * PAIR_BYTES, *bytes = pair + k % 2 * 64;
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i*)(pair + 128 + k % 2 * 32)));
    a = join_bf16(bytes, _mm512_permutexvar_epi16(codes, table));
    b = join_bf16(bytes + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
}

// Calls step(k, a, b) with the restored weights of every step of a unit, in order.
template <class Step>
__attribute__((always_inline)) inline void each_step(const Matrix& w, int64_t unit, Step step) {
    const Exponents& e = *w.exponents;
    const __m512i table = _mm512_loadu_si512(e.bits);
    const uint8_t* at = (const uint8_t*)w.data + unit * w.steps / 2 * PAIR_BYTES;
    int64_t k = 0;
    for (int32_t raw = e.from[unit];; raw++) {
        const int64_t stop = raw < e.from[unit + 1] ? e.steps[raw] : w.steps;
        for (; k < stop; k++) {
            __m512i a, b;
            restore_step(at, k, table, a, b);
            step(k, a, b);
        }
        if (k == w.steps) return;
        const Word* words = e.words + (int64_t)raw * STEP_WORDS;
        step(k++, _mm512_loadu_si512(words), _mm512_loadu_si512(words + LANES));
    }
}

template <int R, class Store>
inline void packed_tile(const Matrix& w, const Word* x, int64_t stride, int row, int64_t unit, Store& store) {
    using U = Unit<BF16>;
    const uint8_t* next = (const uint8_t*)w.data + (unit * w.steps + FEW_AHEAD) / 2 * PAIR_BYTES;
    __m512 low[R], high[R];
    each<R>([&](auto r) __attribute__((always_inline)) { low[r()] = high[r()] = U::zero(); });
    each_step(w, unit, [&](int64_t k, __m512i a, __m512i b) __attribute__((always_inline)) {
        ask(next + k * (PAIR_BYTES / 2));
        ask(next + k * (PAIR_BYTES / 2) + 64);
        each<R>([&](auto r) __attribute__((always_inline)) {
            const Word value = x[r() * stride + k];
            low[r()] = U::add(low[r()], a, value);
            high[r()] = U::add(high[r()], b, value);
        });
    });
    each<R>([&](auto r) __attribute__((always_inline)) {
        store(row + r(), unit, finish(w, unit * BLOCKS, low[r()]), finish(w, unit * BLOCKS + 1, high[r()]));
    });
}

template <int R, class Store>
inline void pick_packed(int rows, const Matrix& w, const Word* x, int64_t stride, int64_t unit, Store& store) {
    if (rows == R) packed_tile<R>(w, x, stride, 0, unit, store);
    else if constexpr (R > 1) pick_packed<R - 1>(rows, w, x, stride, unit, store);
}

// Multiplies all rows of x [rows][stride words] with this thread's share of the matrix. Weights of a unit that several tiles
// need are restored once, into a buffer.
//
// Measured on two cores of a Zen 4, interleaved passes of a 0.74 B model after 512 tokens, speedup over raw bf16: 1 row 1.27,
// 2 rows 1.14, 4 rows 1.36, 8 rows 1.07, 12 rows 0.74, 16 rows 0.93. So it is not the default.
template <class Store>
inline void packed_product(const Matrix& w, const Word* x, int64_t stride, int rows, int thread, int threads, Store store) {
    constexpr int TALLEST = tallest(BF16);
    const Share share(w.units, thread, threads);
    if (rows <= TALLEST) {
        for (int64_t unit = share.first; unit < share.last; unit++)
            pick_packed<TALLEST>(rows, w, x, stride, unit, store);
        return;
    }
    static thread_local std::vector<Word> buffer;
    buffer.resize(w.steps * STEP_WORDS + LANES);
    Word* to = (Word*)(((uintptr_t)buffer.data() + 63) / 64 * 64);
    const int most = rows <= TALL_UNTIL ? TALLEST : MOST_ROWS, tiles = (rows + most - 1) / most;
    for (int64_t unit = share.first; unit < share.last; unit++) {
        each_step(w, unit, [&](int64_t k, __m512i a, __m512i b) __attribute__((always_inline)) {
            _mm512_store_si512(to + k * LANES, a);
            _mm512_store_si512(to + (w.steps + k) * LANES, b);
        });
        const Word* next = w.data + (unit + 1) * w.steps / 2 * (PAIR_BYTES / 4);
        Matrix restored = w;
        restored.data = to - unit * w.steps * STEP_WORDS;
        for (int t = 0; t < tiles; t++) {
            const int first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
            pick_tile<BF16, TALLEST>(count, restored, x + first * stride, stride, nullptr, first, unit,
                                       {t, tiles, next, PAIR_BYTES / 8}, store);
        }
    }
}

// The words of one output, for a tied embedding.
inline void unpack_exponents(const Matrix& w, int64_t output, int64_t words, Word* to) {
    const Exponents& e = *w.exponents;
    const int64_t unit = output / STEP_WORDS;
    const int lane = output % LANES, block = output / LANES % BLOCKS;
    const uint8_t* at = (const uint8_t*)w.data + unit * w.steps / 2 * PAIR_BYTES;
    for (int64_t k = 0; k < words; k++) {
        const uint8_t *pair = at + k / 2 * PAIR_BYTES, *bytes = pair + k % 2 * 64 + block * 32 + lane * 2;
        const uint8_t* codes = pair + 128 + k % 2 * 32 + lane * 2;
        to[k] = 0;
        for (int half = 0; half < 2; half++) {
            const uint16_t exponent = e.bits[block ? codes[half] >> 4 : codes[half] & 15];
            const uint16_t value = (uint16_t)((bytes[half] & 128) << 8 | exponent | (bytes[half] & 127));
            to[k] |= (Word)value << (16 * half);
        }
    }
    for (int32_t raw = e.from[unit]; raw < e.from[unit + 1]; raw++)
        if (e.steps[raw] < words) to[e.steps[raw]] = e.words[(int64_t)raw * STEP_WORDS + block * LANES + lane];
}

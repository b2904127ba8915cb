// Products with bf16 weights stored in 12 bits, without loss.
//
// The upper byte of a bf16 number holds its sign and seven bits of its exponent, and in a trained matrix sixteen values of it
// cover nearly all weights. So a weight is stored as its lower byte and a code of four bits for the upper one. A pair of steps
// (two words of the input, 128 weights) with another upper byte is kept raw beside the matrix. Weights are restored in
// registers and multiplied in the order of the raw matrix, so results have the same bits, at three quarters of the memory.
//
// A pair takes 192 bytes: 64 lower bytes for each step, then 64 bytes of codes, of the first step in their low half and of the
// second step in their high half. Sixteen bytes of a vector belong to one lane of both blocks: eight to the first block, eight
// to the second, so that interleaving lower and upper bytes gives the two vectors of a step.
#pragma once

#include <vector>

#include "grouped.hpp"

constexpr int PAIR_BYTES = 192, PAIR_LINES = PAIR_BYTES / 64, STEP_WORDS = BLOCKS * LANES;
constexpr int PAIRS_AHEAD = 24;  // pairs that a unit's only tile prefetches ahead

// The tables of a matrix stored in 12 bits: the upper bytes of the codes, and the raw pairs.
struct UpperBytes {
    const uint8_t* bytes;  // [units][16]
    const int32_t* from_unit;  // [units + 1]; number of the first raw pair
    const int32_t* pairs;  // raw pairs of each unit, ascending
    const Word* words;     // [raw pairs][two steps][STEP_WORDS]
};

// The byte of a step in which number `i` (of 32) of a block has its lower byte and its code.
constexpr int place_of(int block, int i) { return i / 8 * 16 + block * 8 + i % 8; }

// Looks up the low half of each code.
__attribute__((always_inline)) inline Ints upper_bytes(Ints codes, Ints table) {
#ifdef __AVX512VBMI__
    return _mm512_permutexvar_epi8(codes, table);  // takes six bits, and the table repeats every sixteen bytes
#else
    return look_up(table, and_bits(codes, bytes(15)));
#endif
}

// Calls step(k, a, b) with both blocks of every step of the pairs [p, last) of a unit, in order. Calls ahead(p) before each
// pair that is not raw. raw: the first raw pair from p on; then, the first from `last` on.
template <class Ahead, class Step>
INLINE void each_step(const Matrix& w, int64_t unit, int64_t p, int64_t last, int32_t& raw, Ahead ahead, Step step) {
    const UpperBytes& upper = *w.upper;
    const Ints table = repeated(upper.bytes + unit * 16);
    const uint8_t* at = (const uint8_t*)w.data + unit * w.steps / 2 * PAIR_BYTES;
    for (;; raw++) {
        const bool found = raw < upper.from_unit[unit + 1] && upper.pairs[raw] < last;
        const int64_t stop = found ? upper.pairs[raw] : last;
        for (; p < stop; p++) {
            ahead(p);
            const uint8_t* pair = at + p * PAIR_BYTES;
            const Ints codes = load_ints(pair + 128);
            Ints low = load_ints(pair), high = upper_bytes(codes, table);
            step(2 * p, interleave_low(low, high), interleave_high(low, high));
            low = load_ints(pair + 64), high = upper_bytes(shift_right16<4>(codes), table);
            step(2 * p + 1, interleave_low(low, high), interleave_high(low, high));
        }
        if (!found) return;
        const Word* words = upper.words + (int64_t)raw * 2 * STEP_WORDS;
        for (int i = 0; i < 2; i++, words += STEP_WORDS)
            step(2 * p + i, load_ints(words), load_ints(words + LANES));
        p++;
    }
}

template <class Ahead, class Step>
INLINE void each_step(const Matrix& w, int64_t unit, Ahead ahead, Step step) {
    int32_t raw = w.upper->from_unit[unit];
    each_step(w, unit, 0, w.steps / 2, raw, ahead, step);
}

// One unit times `R` rows in registers, as `register_tile`. A unit's only tile prefetches a little ahead; of several tiles,
// each prefetches its part of the next unit. Below eight rows prefetching into the second level of caches was slower.
template <int R, class Store>
inline void packed_tile(const Matrix& w, const Word* x, int64_t stride, int row, int64_t unit, TileOf tile, Store& store) {
    using U = Unit<BF16>;
    const int64_t pairs = w.steps / 2, lines = (PAIR_LINES + tile.count - 1) / tile.count;
    const uint8_t* next = (const uint8_t*)w.data + unit * pairs * PAIR_BYTES;
    if (tile.count == 1) next += PAIRS_AHEAD * PAIR_BYTES;
    else next += pairs * PAIR_BYTES + pairs * PAIR_BYTES * tile.number / tile.count;
    Floats low[R], high[R];
    each<R>([&](auto r) __attribute__((always_inline)) { low[r()] = high[r()] = U::zero(); });
    auto ahead = [&](int64_t p) __attribute__((always_inline)) {
        for (int64_t i = 0; i < lines; i++) ask<R < MOST_ROWS>(next + (p * lines + i) * 64);
    };
    each_step(w, unit, ahead, [&](int64_t k, Ints a, Ints b) __attribute__((always_inline)) {
        each<R>([&](auto r) __attribute__((always_inline)) {
            const Word* values = x + r() * stride + k * input_words(BF16);
            low[r()] = U::add(low[r()], a, values);
            high[r()] = U::add(high[r()], b, values);
        });
    });
    each<R>([&](auto r) __attribute__((always_inline)) {
        store(row + r(), unit, finish(w, unit * BLOCKS, low[r()]), finish(w, unit * BLOCKS + 1, high[r()]));
    });
}

template <int R, class Store>
inline void pick_packed(int rows, const Matrix& w, const Word* x, int64_t stride, int row, int64_t unit, TileOf tile,
                        Store& store) {
    if (rows == R) packed_tile<R>(w, x, stride, row, unit, tile, store);
    else if constexpr (R > 1) pick_packed<R - 1>(rows, w, x, stride, row, unit, tile, store);
}

// Restores each unit of the share as a raw matrix has it, and multiplies that.
template <class Store>
inline void restored_product(const Matrix& w, const Word* x, int64_t stride, int rows, Share share, Store& store) {
    static thread_local std::vector<Word> memory;
    memory.resize(w.steps * STEP_WORDS + LANES);
    Word* restored = (Word*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    for (Share one = share; one.first < share.last; one.first++) {
        one.last = one.first + 1;
        const uint8_t* next = (const uint8_t*)w.data + one.last * w.steps / 2 * PAIR_BYTES;
        auto ahead = [&](int64_t p) { for (int i = 0; i < PAIR_LINES; i++) ask<false>(next + p * PAIR_BYTES + i * 64); };
        each_step(w, one.first, ahead, [&](int64_t k, Ints a, Ints b) __attribute__((always_inline)) {
            store_ints(restored + k * LANES, a);
            store_ints(restored + (w.steps + k) * LANES, b);
        });
        Matrix raw = w;
        raw.data = restored - one.first * w.steps * STEP_WORDS;
        Units unit(one);
        product<BF16>(raw, x, stride, nullptr, rows, unit, store);
    }
}

// Multiplies all rows of x [rows][stride words] with the units of the matrix that this thread takes. Each tile restores for
// itself; for tiles of AMX, a unit is restored once for all rows. More than BOTH_ROWS rows with narrow registers: chunks.hpp.
//
// Measured on two cores of a Zen 4, products of a matrix of 0.3 G weights in turns, raw time over this: 1 row 1.44, 4 rows
// 1.46, 16 rows 0.97, 20 to 34 rows 0.90 to 0.91. In tiles of at most twelve rows, 9 to 12 rows take 0.8 of what they took in
// two tiles of eight. A first tile that keeps what it restored for
// the others, 16 KiB at a time, was slower: 16 rows 0.73, 24 rows 0.70, 34 rows 0.78, 128 rows 0.94.
template <class Store>
inline void packed_product(const Matrix& w, const Word* x, int64_t stride, int rows, Units& work, Store store) {
    constexpr int TALLEST = ONE_REGISTER ? tallest(BF16) : BOTH_ROWS;
    Share share(0, 0);
    if (TILES) {
        while (work.next(share)) restored_product(w, x, stride, rows, share, store);
        return;
    }
    const int tiles = (rows + TALLEST - 1) / TALLEST;
    while (work.next(share))
        for (int64_t unit = share.first; unit < share.last; unit++)
            for (int t = 0; t < tiles; t++) {
                const int first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
                pick_packed<TALLEST>(count, w, x + first * stride, stride, first, unit, {t, tiles}, store);
            }
}

// The words of one output, for a tied embedding.
inline void unpack_row(const Matrix& w, int64_t output, int64_t words, Word* to) {
    const UpperBytes& upper = *w.upper;
    const int64_t unit = output / STEP_WORDS;
    const int lane = output % LANES, block = output / LANES % BLOCKS;
    const uint8_t* at = (const uint8_t*)w.data + unit * w.steps / 2 * PAIR_BYTES;
    for (int64_t k = 0; k < words; k++) {
        const uint8_t *pair = at + k / 2 * PAIR_BYTES, *lower = pair + k % 2 * 64, *codes = pair + 128;
        to[k] = 0;
        for (int half = 0; half < 2; half++) {
            const int place = place_of(block, lane * 2 + half), code = codes[place] >> (k % 2 * 4) & 15;
            to[k] |= (Word)(upper.bytes[unit * 16 + code] << 8 | lower[place]) << (16 * half);
        }
    }
    for (int32_t raw = upper.from_unit[unit]; raw < upper.from_unit[unit + 1]; raw++)
        for (int i = 0; i < 2; i++)
            if (const int64_t k = upper.pairs[raw] * 2 + i; k < words)
                to[k] = upper.words[((int64_t)raw * 2 + i) * STEP_WORDS + block * LANES + lane];
}

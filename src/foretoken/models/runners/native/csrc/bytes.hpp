// Products with keys and values that are stored as int8 with a float scale for each row and head.
//
// The other factor, a query or the weights of a page's keys, is rounded to whole numbers of fifteen bits and a sign, kept as two
// bytes: 255 * high + low. That is finer than bfloat16, and sums of whole numbers are exact, so they do not depend on their
// order.
#pragma once

#include <algorithm>

#include "simd.hpp"

constexpr int BYTES_OFFSET = UNSIGNED_BYTES ? 128 : 0;  // what stored bytes are larger by
constexpr float BYTE_BASE = 255.0f, MOST_WHOLE = 127.0f * BYTE_BASE;
constexpr int BYTE_ROWS = ONE_REGISTER ? 4 : 2, BYTE_BLOCKS = ONE_REGISTER ? 2 : 1;  // whose sums stay in registers

// One factor of a product: bytes in words, and what makes numbers of the sums. `steps` words of high bytes, then as many of low
// bytes.
struct WholeRow {
    const Word* words;
    float scale;         // the value of one step
    int32_t high, low;   // sums of the bytes times BYTES_OFFSET
};

// The high and low bytes of whole numbers within MOST_WHOLE.
INLINE void split(Floats whole, Ints& high, Ints& low) {
    const Floats upper = rounded(whole * floats(1.0f / BYTE_BASE));
    high = to_ints(upper);
    low = to_ints(subtract_product(upper, floats(BYTE_BASE), whole));
}

// Rounds `count` finite floats (a multiple of sixteen), the largest of which is `top`, to a row in `to`, of count / 2 words.
inline WholeRow whole_row(const float* x, int64_t count, float top, Word* to) {
    const bool tiny = top < 1e-30f;  // whose inverse may overflow
    const float scale = tiny ? 0.0f : top / MOST_WHOLE;
    const Floats inverse = floats(tiny ? 0.0f : MOST_WHOLE / top);
    int8_t *high_bytes = (int8_t*)to, *low_bytes = high_bytes + count;
    Ints high_sum = ints(0), low_sum = ints(0);
    for (int64_t i = 0; i < count; i += LANES) {
        Ints high, low;
        split(rounded(load(x + i) * inverse), high, low);
        store_int8(high_bytes + i, high), store_int8(low_bytes + i, low);
        high_sum = add_ints(high_sum, high), low_sum = add_ints(low_sum, low);
    }
    return {to, scale, BYTES_OFFSET ? BYTES_OFFSET * sum_of(high_sum) : 0, BYTES_OFFSET ? BYTES_OFFSET * sum_of(low_sum) : 0};
}

// Sums of products of R rows with B blocks of sixteen outputs, [block][steps][16] words.
template <int R, int B>
struct ByteSums {
    Ints high[R][B], low[R][B];

    INLINE void clear() {
        each<R>([&](auto r) __attribute__((always_inline)) {
            each<B>([&](auto b) __attribute__((always_inline)) { high[r()][b()] = low[r()][b()] = ints(0); });
        });
    }

    // Adds the products of one word of each row. `at`: of the first block.
    INLINE void add(const Word* at, int64_t block_words, int r, const Word& high_word, const Word& low_word) {
        each<B>([&](auto b) __attribute__((always_inline)) {
            const Ints stored = load_ints(at + b() * block_words);
            add_products(high[r][b()], stored, high_word);
            add_products(low[r][b()], stored, low_word);
        });
    }

    INLINE void add_all(const Word* at, int64_t steps, const WholeRow* rows) {
        for (int64_t k = 0; k < steps; k++) {
            Ints stored[B];
            each<B>([&](auto b) __attribute__((always_inline)) { stored[b()] = load_ints(at + (b() * steps + k) * LANES); });
            each<R>([&](auto r) __attribute__((always_inline)) {
                const Word *high_word = rows[r()].words + k, *low_word = high_word + steps;
                each<B>([&](auto b) __attribute__((always_inline)) {
                    add_products(high[r()][b()], stored[b()], *high_word);
                    add_products(low[r()][b()], stored[b()], *low_word);
                });
            });
        }
    }

    // The sums of a row and block, in steps of the row.
    INLINE Floats of(int r, int b, const WholeRow& row) const {
        const Floats upper = to_floats(subtract_ints(high[r][b], ints(row.high)));
        return multiply_add(upper, floats(BYTE_BASE), to_floats(subtract_ints(low[r][b], ints(row.low))));
    }
};

// Multiplies rows with blocks [0, blocks) of sixteen outputs. Calls store(row, block, sums) with sixteen of them.
template <int R, class Store>
inline void byte_tile(const Word* at, int64_t steps, int blocks, const WholeRow* rows, int row, Store& store) {
    int block = 0;
    auto run = [&](auto count) __attribute__((always_inline)) {
        constexpr int B = decltype(count)::value;
        for (; block + B <= blocks; block += B) {
            ByteSums<R, B> sums;
            sums.clear();
            sums.add_all(at + block * steps * LANES, steps, rows);
            each<R>([&](auto r) __attribute__((always_inline)) {
                each<B>([&](auto b) __attribute__((always_inline)) { store(row + r(), block + b(), sums.of(r(), b(), rows[r()])); });
            });
        }
    };
    run(std::integral_constant<int, BYTE_BLOCKS>());
    if constexpr (BYTE_BLOCKS > 1) run(std::integral_constant<int, 1>());
}

template <int R, class Store>
inline void pick_byte_tile(int count, const Word* at, int64_t steps, int blocks, const WholeRow* rows, int row, Store& store) {
    if (count == R) byte_tile<R>(at, steps, blocks, rows, row, store);
    else if constexpr (R > 1) pick_byte_tile<R - 1>(count, at, steps, blocks, rows, row, store);
}

template <class Store>
inline void byte_product(const Word* at, int64_t steps, int blocks, const WholeRow* rows, int count, Store store) {
    for (int row = 0; row < count; row += BYTE_ROWS)
        pick_byte_tile<BYTE_ROWS>(std::min(count - row, BYTE_ROWS), at, steps, blocks, rows + row, row, store);
}

// Inputs of products of many rows, as their tiles read them: [tile][steps][rows of the tile], a step's words of a row
// beside each other.
//
// So a tile reads one stream of memory. Its rows where they are would be as many streams, and at distances of a power of two
// all of them would use the same lines of the cache.
#pragma once

#include "simd.hpp"

// Writes R rows of `steps` times WORDS words beside each other, so that a step's operands are at constant distances from one
// address. Row by row for a few steps, so that rows that use the same lines of the cache do no harm.
template <int R, int WORDS = 1>
inline void side_by_side(const Word* x, int64_t stride, int64_t steps, int rows, Word* to) {
    if (rows == R) {
        auto some = [&](int64_t from, int count) __attribute__((always_inline)) {
            for (int r = 0; r < R; r++)
                for (int k = 0; k < count; k++)
                    for (int i = 0; i < WORDS; i++)
                        to[((from + k) * R + r) * WORDS + i] = x[r * stride + (from + k) * WORDS + i];
        };
        int64_t from = 0;
        for (; from + LANES <= steps; from += LANES) some(from, LANES);
        some(from, int(steps - from));
    } else if constexpr (R > 1) {
        side_by_side<R - 1, WORDS>(x, stride, steps, rows, to);
    }
}

// The rows of a product in tiles of about the same height, at most `tallest`.
struct RowTiles {
    const int rows, count;
    RowTiles(int rows, int tallest) : rows(rows), count((rows + tallest - 1) / tallest) {}
    int first(int tile) const { return int((int64_t)rows * tile / count); }
    int height(int tile) const { return first(tile + 1) - first(tile); }
};

// Products where a vector takes several registers: a unit is multiplied in chunks of steps.
//
// A chunk's weights, raw or restored from 12 bits, stay in the first level of caches while all tiles of rows multiply them;
// between chunks, the sums are kept in memory. So memory is read in order and evenly while products are computed, whatever
// the number of rows, and weights in 12 bits are restored once for all rows.
//
// What is prefetched goes to the second level of caches: as many lines as memory delivers meanwhile are more than a core can
// wait for in the first level, and loads behind them would wait as well.
#pragma once

#include "packed.hpp"

constexpr int CHUNK_STEPS = 64, CHUNK_ROWS = 5;  // rows of a tile
constexpr int ASK_EVERY = 8, CHUNKS_AHEAD = 8;   // steps; of what is prefetched

// Part of a unit: the weights of both blocks, and what to prefetch while they are multiplied.
struct Chunk {
    const Word* weights[BLOCKS];
    const char *next[BLOCKS], *end[BLOCKS];
    int64_t steps;
};

// The chunks of a raw matrix.
class RawChunks {
   public:
    explicit RawChunks(const Matrix& w) : w(w) {}

    void begin(int64_t unit) { at = w.data + unit * BLOCKS * w.steps * LANES; }

    Chunk chunk(int64_t first) {
        Chunk c{};
        c.steps = std::min<int64_t>(CHUNK_STEPS, w.steps - first);
        int64_t ahead = first + CHUNKS_AHEAD * CHUNK_STEPS;
        ahead += ahead / w.steps * w.steps;  // each earlier unit has two blocks
        for (int block = 0; block < BLOCKS; block++) {
            c.weights[block] = at + (block * w.steps + first) * LANES;
            c.next[block] = (const char*)(at + (block * w.steps + ahead) * LANES);
            c.end[block] = c.next[block] + c.steps * LANES * sizeof(Word);
        }
        return c;
    }

   private:
    const Matrix& w;
    const Word* at = nullptr;
};

// The chunks of a matrix in 12 bits, restored.
class RestoredChunks {
   public:
    explicit RestoredChunks(const Matrix& w) : w(w) {}

    void begin(int64_t unit) {
        number = unit, raw = w.upper->from[unit];
        at = (const char*)w.data + unit * w.steps / 2 * PAIR_BYTES;
    }

    Chunk chunk(int64_t first) {
        Chunk c{};
        c.steps = std::min<int64_t>(CHUNK_STEPS, w.steps - first);
        const int64_t ahead = (first + CHUNKS_AHEAD * CHUNK_STEPS) / 2 * PAIR_BYTES, half = c.steps / 2 * PAIR_BYTES / BLOCKS;
        for (int block = 0; block < BLOCKS; block++) {
            c.weights[block] = words[block];
            c.next[block] = at + ahead + block * half, c.end[block] = c.next[block] + half;
        }
        auto keep = [&](int64_t k, Ints low, Ints high) __attribute__((always_inline)) {
            store_ints(words[0] + (k - first) * LANES, low), store_ints(words[1] + (k - first) * LANES, high);
        };
        each_step(w, number, first / 2, (first + c.steps) / 2, raw, [](int64_t) {}, keep);
        return c;
    }

   private:
    const Matrix& w;
    int64_t number = 0;
    int32_t raw = 0;
    const char* at = nullptr;
    alignas(64) Word words[BLOCKS][CHUNK_STEPS * LANES];
};

// `R` rows of a chunk's block in registers. sums: [rows][BLOCKS], from the block's; lines: that are asked for at once.
template <Kind kind, int R>
INLINE void chunk_tile(Chunk& c, int block, const Word* x, int64_t stride, typename Unit<kind>::Sum* sums, int lines) {
    using U = Unit<kind>;
    const Word* weights = c.weights[block];
    const char*& next = c.next[block];
    typename U::Sum own[R];
    each<R>([&](auto r) __attribute__((always_inline)) { own[r()] = sums[r() * BLOCKS]; });
    for (int64_t first = 0; first < c.steps; first += ASK_EVERY) {
        for (int i = 0; i < lines && next < c.end[block]; i++, next += 64) prefetch_far(next);
        for (int64_t k = first; k < first + ASK_EVERY; k++) {
            const Ints values = load_ints(weights + k * LANES);
            each<R>([&](auto r) __attribute__((always_inline)) {
                own[r()] = U::add(own[r()], values, x + r() * stride + k * input_words(kind));
            });
        }
    }
    each<R>([&](auto r) __attribute__((always_inline)) { sums[r() * BLOCKS] = own[r()]; });
}

template <Kind kind, int R>
inline void pick_chunk_tile(int rows, Chunk& c, const Word* x, int64_t stride, typename Unit<kind>::Sum* sums, int lines) {
    if (rows == R)
        for (int block = 0; block < BLOCKS; block++) chunk_tile<kind, R>(c, block, x, stride, sums + block, lines);
    else if constexpr (R > 1)
        pick_chunk_tile<kind, R - 1>(rows, c, x, stride, sums, lines);
}

// Multiplies all rows of x [rows][stride words] with the units of the share. Chunks: RawChunks or RestoredChunks.
// It is static because `sums` of a function that is not would be shared by all libraries of a process, and those for other
// instruction sets align it otherwise.
template <Kind kind, class Chunks, class Store>
static void multiply_chunks(const Matrix& w, const Word* x, int64_t stride, const float* scales, int rows, Share share, Store& store) {
    static thread_local std::vector<typename Unit<kind>::Sum> sums;
    Chunks chunks(w);
    const int tiles = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, turns = tiles * CHUNK_STEPS / ASK_EVERY;
    for (int64_t unit = share.first; unit < share.last; unit++) {
        sums.assign(rows * BLOCKS, Unit<kind>::zero());
        chunks.begin(unit);
        for (int64_t k = 0; k < w.steps; k += CHUNK_STEPS) {
            Chunk c = chunks.chunk(k);
            const int lines = (int)(((c.end[0] - c.next[0]) / 64 + turns - 1) / turns);
            for (int t = 0; t < tiles; t++) {
                const int first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
                const Word* inputs = x + first * stride + k * input_words(kind);
                pick_chunk_tile<kind, CHUNK_ROWS>(count, c, inputs, stride, &sums[first * BLOCKS], lines);
            }
        }
        for (int r = 0; r < rows; r++) {
            const auto *both = &sums[r * BLOCKS];
            if constexpr (kind == INT8)
                store(r, unit, finish(w, unit * BLOCKS, both[0], scales[r]), finish(w, unit * BLOCKS + 1, both[1], scales[r]));
            else
                store(r, unit, finish(w, unit * BLOCKS, both[0]), finish(w, unit * BLOCKS + 1, both[1]));
        }
    }
}

// Whether rows are multiplied in chunks: those that one tile would not hold, and of weights in 12 bits all that are not
// multiplied as they are restored. From eight rows on raw weights gain nothing, because arithmetic takes longer than reading.
constexpr bool in_chunks(Kind kind, int rows) {
    if (ONE_REGISTER || kind == F32) return false;
    return kind == PACKED ? rows > BOTH_ROWS : rows > BOTH_ALONE && rows < 8;
}

// Multiplies all rows of x [rows][stride words] with the units of the matrix that this thread takes.
template <Kind kind, class Store>
inline void chunked_product(const Matrix& w, const Word* x, int64_t stride, const float* scales, int rows, Units& work, Store store) {
    constexpr Kind numbers = kind == PACKED ? BF16 : kind;
    using Chunks = std::conditional_t<kind == PACKED, RestoredChunks, RawChunks>;
    Share share(0, 0);
    while (work.next(share)) multiply_chunks<numbers, Chunks>(w, x, stride, scales, rows, share, store);
}

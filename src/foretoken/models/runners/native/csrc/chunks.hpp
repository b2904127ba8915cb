// Products of many rows, and of some where a vector takes several registers: a unit is multiplied in chunks of steps.
//
// A chunk's weights, raw or restored from 12 bits, stay in the first level of caches, or in the second where a step takes
// longer than reading it from there, while all tiles of rows multiply them; between chunks, the sums are kept in memory. So
// memory is read in order and evenly while products are computed, whatever the number of rows, and weights in 12 bits are
// restored once for all rows.
//
// What is prefetched goes to the second level of caches: as many lines as memory delivers meanwhile are more than a core can
// wait for in the first level, and loads behind them would wait as well.
#pragma once

#include "packed.hpp"

constexpr int CHUNK_STEPS = ONE_REGISTER ? 1024 : 64, CHUNK_ROWS = ONE_REGISTER ? 12 : 5;  // rows of a tile
constexpr int CHUNK_BLOCKS = ONE_REGISTER ? BLOCKS : 1;  // whose sums a tile has in registers
constexpr int ASK_EVERY = 8, CHUNKS_AHEAD = ONE_REGISTER ? 1 : 8;  // steps; of what is prefetched
constexpr int ASK_TILES = 8;  // the last ones of a chunk prefetch: what is asked for earlier may leave the cache before it is read
constexpr int MANY_ROWS = 32;  // from here on, inputs are arranged

// Steps of the chunks of a matrix, which are about equal.
inline int64_t chunk_steps(const Matrix& w) {
    const int64_t count = (w.steps + CHUNK_STEPS - 1) / CHUNK_STEPS;
    return padded((w.steps + count - 1) / count, TILE_STEPS);
}

// Part of a unit: the weights of both blocks, and what to prefetch while they are multiplied.
struct Chunk {
    const Word* weights[BLOCKS];
    const char *next[BLOCKS], *end[BLOCKS];
    int64_t steps;
};

// The chunks of a raw matrix.
class RawChunks {
   public:
    static constexpr int MEMORY = 0;

    RawChunks(const Matrix& w, int64_t steps, Word*) : w(w), steps(steps) {}

    void begin(int64_t unit) { at = w.data + unit * BLOCKS * w.steps * LANES; }

    Chunk chunk(int64_t first) {
        Chunk c{};
        c.steps = std::min(steps, w.steps - first);
        int64_t ahead = first + CHUNKS_AHEAD * steps;
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
    const int64_t steps;  // of a chunk
    const Word* at = nullptr;
};

// The chunks of a matrix in 12 bits, restored in `memory`.
class RestoredChunks {
   public:
    static constexpr int MEMORY = BLOCKS * CHUNK_STEPS * LANES;  // words

    RestoredChunks(const Matrix& w, int64_t steps, Word* memory) : w(w), steps(steps), words{memory, memory + CHUNK_STEPS * LANES} {}

    void begin(int64_t unit) {
        number = unit, raw = w.upper->from_unit[unit];
        at = (const char*)w.data + unit * w.steps / 2 * PAIR_BYTES;
    }

    Chunk chunk(int64_t first) {
        Chunk c{};
        c.steps = std::min(steps, w.steps - first);
        const int64_t ahead = (first + CHUNKS_AHEAD * steps) / 2 * PAIR_BYTES, half = c.steps / 2 * PAIR_BYTES / BLOCKS;
        for (int block = 0; block < BLOCKS; block++) {
            c.weights[block] = words[block];
            c.next[block] = at + ahead + block * half, c.end[block] = c.next[block] + half;
        }
        auto keep = [low_words = words[0] - first * LANES, high_words = words[1] - first * LANES](int64_t k, Ints low, Ints high)
            __attribute__((always_inline)) { store_ints(low_words + k * LANES, low), store_ints(high_words + k * LANES, high); };
        each_step(w, number, first / 2, (first + c.steps) / 2, raw, [](int64_t) {}, keep);
        return c;
    }

   private:
    const Matrix& w;
    const int64_t steps;  // of a chunk
    int64_t number = 0;
    int32_t raw = 0;
    const char* at = nullptr;
    Word* const words[BLOCKS];
};

// Rows of inputs for the steps of a chunk: where they are, with the words from one row to the next, or arranged.
struct TileInput {
    const Word* at;
    int64_t stride;  // 0: arranged
};

// `R` rows and B blocks of a chunk in registers. sums: [rows][BLOCKS], from the first of the blocks; lines: that are asked for
// at once.
template <Kind kind, int R, int B, bool arranged>
INLINE void chunk_tile(Chunk& c, int block, const TileInput& x, typename Unit<kind>::Sum* sums, int lines) {
    using U = Unit<kind>;
    constexpr int words = input_words(kind), step_words = arranged ? R * words : words;
    const int64_t row_words = arranged ? words : x.stride;
    typename U::Sum own[R][B];
    each<R>([&](auto r) __attribute__((always_inline)) {
        each<B>([&](auto b) __attribute__((always_inline)) { own[r()][b()] = sums[r() * BLOCKS + b()]; });
    });
    const Word *weights[B], *at = x.at;
    each<B>([&](auto b) __attribute__((always_inline)) { weights[b()] = c.weights[block + b()]; });
    for (int64_t first = 0; first < c.steps; first += ASK_EVERY) {
        each<B>([&](auto b) __attribute__((always_inline)) {
            const char *&next = c.next[block + b()], *end = c.end[block + b()];
            for (int i = 0; i < lines && next < end; i++, next += 64) prefetch_far(next);
        });
        for (int k = 0; k < ASK_EVERY; k++, at += step_words) {
            Ints values[B];
            each<B>([&](auto b) __attribute__((always_inline)) { values[b()] = load_ints(weights[b()] + (first + k) * LANES); });
            each<R>([&](auto r) __attribute__((always_inline)) {
                each<B>([&](auto b) __attribute__((always_inline)) {
                    own[r()][b()] = U::add(own[r()][b()], values[b()], at + r() * row_words);
                });
            });
        }
    }
    each<R>([&](auto r) __attribute__((always_inline)) {
        each<B>([&](auto b) __attribute__((always_inline)) { sums[r() * BLOCKS + b()] = own[r()][b()]; });
    });
}

// Not inlined into every kind of store.
template <Kind kind, int R, bool arranged>
__attribute__((noinline)) void pick_chunk_tile(int rows, Chunk& c, const TileInput& x, typename Unit<kind>::Sum* sums, int lines) {
    if (rows == R)
        for (int block = 0; block < BLOCKS; block += CHUNK_BLOCKS)
            chunk_tile<kind, R, CHUNK_BLOCKS, arranged>(c, block, x, sums + block, lines);
    else if constexpr (R > 1)
        pick_chunk_tile<kind, R - 1, arranged>(rows, c, x, sums, lines);
}

// Multiplies all rows of x with the units of the share. Chunks: RawChunks or RestoredChunks. Where a tile's results go is
// prefetched while it is computed, because rows lie far apart.
// It is static because `memory` of a function that is not would be shared by all libraries of a process, and those for other
// instruction sets align it otherwise.
template <Kind kind, bool arranged, class Chunks, class Store>
static void multiply_chunks(const Matrix& w, const Word* x, int64_t stride, const float* scales, int rows, Share share, Store& store) {
    using Sum = typename Unit<kind>::Sum;
    struct Slot {
        alignas(Sum) Word words[sizeof(Sum) / sizeof(Word)];  // a vector of Sum would drop its attributes
    };
    static thread_local std::vector<Slot> memory;
    constexpr int restored = Chunks::MEMORY * sizeof(Word) / sizeof(Sum);
    if ((int)memory.size() < restored + rows * BLOCKS) memory.resize(restored + rows * BLOCKS);
    Sum* const sums = (Sum*)memory.data() + restored;
    const int64_t steps = chunk_steps(w);
    Chunks chunks(w, steps, (Word*)memory.data());
    const RowTiles tiles(rows, CHUNK_ROWS);
    const int asking = std::min(tiles.count, ASK_TILES), words = input_words(kind);
    for (int64_t unit = share.first; unit < share.last; unit++) {
        chunks.begin(unit);
        for (int64_t k = 0; k < w.steps; k += steps) {
            Chunk c = chunks.chunk(k);
            const int64_t turns = asking * c.steps / ASK_EVERY;
            const int lines = (int)(((c.end[0] - c.next[0]) / 64 + turns - 1) / turns);
            for (int t = 0; t < tiles.count; t++) {
                const int first = tiles.first(t), count = tiles.height(t), last = first + count;
                const Word* inputs = arranged ? x + (first * w.steps + k * count) * words : x + first * stride + k * words;
                if (k == 0) std::fill(sums + first * BLOCKS, sums + last * BLOCKS, Unit<kind>::zero());
                const bool ends = k + steps >= w.steps;
                for (int r = first; ends && r < last; r++) store.ask(r, unit);
                pick_chunk_tile<kind, CHUNK_ROWS, arranged>(count, c, {inputs, stride}, sums + first * BLOCKS, t < tiles.count - asking ? 0 : lines);
                for (int r = first; ends && r < last; r++) {
                    const Sum* both = sums + r * BLOCKS;
                    if constexpr (kind == INT8)
                        store(r, unit, finish(w, unit * BLOCKS, both[0], scales[r]), finish(w, unit * BLOCKS + 1, both[1], scales[r]));
                    else
                        store(r, unit, finish(w, unit * BLOCKS, both[0]), finish(w, unit * BLOCKS + 1, both[1]));
                }
            }
        }
    }
}

// Whether rows are multiplied in chunks where they are: those that one tile would not hold, and of weights in 12 bits all that
// are not multiplied as they are restored. From eight rows on raw weights gain nothing, because arithmetic takes longer than
// reading.
constexpr bool in_chunks(Kind kind, int rows) {
    if (ONE_REGISTER || kind == F32) return false;
    return kind == PACKED ? rows > BOTH_ROWS : rows > BOTH_ALONE && rows < 8;
}

// Whether rows are arranged, and multiplied in chunks.
constexpr bool in_arranged_chunks(Kind kind, int rows) { return ONE_REGISTER && !(TILES && kind != F32) && rows >= MANY_ROWS; }

// Multiplies all rows of x with the units of the matrix that this thread takes. x: [rows][stride words], or arranged.
template <Kind kind, bool arranged, class Store>
inline void chunked_product(const Matrix& w, const Word* x, int64_t stride, const float* scales, int rows, Units& work, Store store) {
    constexpr Kind numbers = kind == PACKED ? BF16 : kind;
    using Chunks = std::conditional_t<kind == PACKED, RestoredChunks, RawChunks>;
    Share share(0, 0);
    while (work.next(share)) multiply_chunks<numbers, arranged, Chunks>(w, x, stride, scales, rows, share, store);
}

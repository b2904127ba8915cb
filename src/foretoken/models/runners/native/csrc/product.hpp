// Products of a few rows with a packed matrix, y[r, n] = sum_k x[r, k] w[n, k].
//
// A matrix is packed into blocks of sixteen outputs; a block is `steps` vectors, one for each word of the input. Each output
// element is summed over k in one fixed order, whatever the number of rows, so a row's result does not depend on the other
// rows. On CPUs with AMX, the same layout is read as tiles of sixteen vectors.
#pragma once

#include "pool.hpp"
#include "simd.hpp"

constexpr int BLOCKS = 2;         // blocks of sixteen outputs in a unit of work
constexpr int TILE_STEPS = 16;    // the number of steps is a multiple of this

// Rows of a register tile: 16 sums, 2 weights, 1 input. More rows fit, but compilers then spill registers. Measured on a
// Zen 4 without AMX, products of a 0.74 B model at 32 and 150 rows: bf16 115 and 600 ms with 14 rows, 112 and 490 ms with 8;
// int8 101 and 620 ms with 14 rows, 59 and 260 ms with 8.
constexpr int MOST_ROWS = ONE_REGISTER ? 8 : 6;

// With an instruction for the products of a word, twelve rows do not spill, and up to twenty rows they save one pass through
// the weights. Measured on a Zen 5, a pass of that model at nine and twenty rows: bf16 25.5 and 36.2 ms with 8 rows, 23.6
// and 33.7 ms with 12; int8 15.3 and 19.5 ms with 8, 12.6 and 19.1 ms with 12. From 24 rows on it gains nothing.
constexpr int TALL_ROWS = 12, TALL_UNTIL = 20;

// Narrow registers take both blocks of a unit at once up to this many rows, and of bf16 in a unit's only tile, which waits for
// memory, up to four: 7.5 instead of 10.6 ms for 134 MB in one thread of a Zen 4 with AVX2; arithmetic alone takes 5.2 ms.
// Weights of more rows are multiplied in chunks (chunks.hpp).
constexpr int BOTH_ROWS = 2, BOTH_ALONE = 4;

// Where a block of sixteen outputs takes several registers, tiles are one block wide, unless they have few rows.
constexpr int tallest(Kind kind) {
    if (!ONE_REGISTER) return kind == F32 ? MOST_ROWS : kind == BF16 ? 5 : 4;
#ifdef __AVX512BF16__
    return kind == F32 ? MOST_ROWS : TALL_ROWS;
#else
    return kind == INT8 && UNSIGNED_BYTES ? TALL_ROWS : MOST_ROWS;
#endif
}

constexpr int GROUP_META = 3;     // floats per group of an activation row (grouped.hpp)

struct UpperBytes;

struct Matrix {
    const Word* data;        // [blocks][steps][16], or [units][groups] records; 64-byte aligned
    const float* scales;     // [outputs]; null unless int8
    const float* bias;       // [outputs] or null
    const int32_t* sums;     // [outputs], or null: sum of each row of int8 weights, for the offset of activations
    int64_t units;           // blocks / BLOCKS
    int64_t steps;           // words of an input row
    int32_t kind;            // a Kind
    int32_t group;           // inputs that share a scale; 0: all (this and the next fields: see grouped.hpp)
    int32_t record_bytes;
    int32_t record_groups;   // groups of a record
    int32_t zero;            // is subtracted from every level
    uint8_t levels[16];      // levels of the codes of four bits
    const UpperBytes* upper;  // of weights stored in 12 bits (packed.hpp), else null

    int64_t groups() const { return group ? steps * 4 / group : 0; }
    int64_t records() const { return groups() / record_groups; }
    int64_t scale_words() const { return group ? groups() * GROUP_META : 1; }  // floats beside an input row
};

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The units of a matrix that a thread multiplies: those that it claims of a loop, or all in a range.
class Units {
   public:
    Units(Loop& loop) : loop(&loop) {}
    explicit Units(Share range) : range(range) {}
    bool next(Share& units) {
        if (loop) return loop->next(units);
        if (range.first >= range.last) return false;
        units = range, range.first = range.last;
        return true;
    }

   private:
    Loop* loop = nullptr;
    Share range{0, 0};
};

inline Floats finish(const Matrix& w, int64_t block, Floats v) {
    return w.bias ? v + load(w.bias + block * LANES) : v;
}

inline Floats finish(const Matrix& w, int64_t block, Ints v, float scale) {
    if (OFFSET) {
        Ints sums = load_ints(w.sums + block * LANES);
        v = subtract_ints(v, shift_left<7>(sums));
    }
    const Floats scales = load(w.scales + block * LANES) * floats(scale);
    return finish(w, block, to_floats(v) * scales);
}

// Prefetching: weights are prefetched while products are computed. If a unit has one tile, the tile prefetches the same step
// of the next unit; a tile of few rows, which finishes a step as soon as its weights arrive, prefetches FEW_AHEAD steps
// ahead. If a unit has several tiles, each prefetches its part of the next unit. What is read in a unit's time goes to the
// second level of caches: in the first, as many lines as memory delivers would be more than a core can wait for, and the loads
// of inputs would wait behind them. Measured on a Zen 4, ms for a pass of a 0.74 B model at a memory bandwidth of 34 GB/s,
// first / second level: bf16 at one row 43, at five 52 / 43, at eight 55 / 45, at ten 61 / 48; int8 at one row 22, at six
// 29 / 22, at ten 31 / 24.
//
// Measured on a Zen 5 without AMX, ms for a pass of a 0.74 B model, prefetching the next unit / 48 steps ahead: at a memory
// bandwidth of 71 GB/s one row 20.4 / 19.9, four rows 22.3 / 21.2, seven rows 23.3 / 22.5; at 47 GB/s one row 30.3 / 30.4,
// four rows 31.3 / 31.1, seven rows 32.0 / 32.1; int8 at the lower bandwidth four rows 17.3 / 18.9, eight rows 18.1 / 18.8.
// Prefetching both took 34 instead of 43 ms at eight rows on a Zen 4, but cost a tenth on the Zen 5.
constexpr int FEW_AHEAD = 48;

constexpr int few_rows(Kind kind) { return kind == INT8 ? 2 : 4; }

// Prefetches a line of weights: those of few rows, which are read soon, into the first level of caches, others into the second.
template <bool soon>
INLINE void ask(const void* line) {
    if constexpr (soon) prefetch(line);
    else prefetch_far(line);
}

// Tile `number` of the `count` tiles of a unit, and what comes next in memory: `words` words per step, or null for the next unit.
struct TileOf {
    int number, count;
    const Word* next = nullptr;
    int64_t words = BLOCKS * LANES;
};

// One unit times `R` rows in registers. Calls store(row, unit, low, high) with sixteen and sixteen outputs. The step is not
// a function of its own: its sums would then be kept in memory (measured: a quarter slower at 32 rows).
template <Kind kind, int R, class Store>
inline void register_tile(const Matrix& w, const Word* x, int64_t stride, const float* scales, int row, int64_t unit,
                          TileOf tile, Store& store) {
    using U = Unit<kind>;
    const int64_t block_words = w.steps * LANES;
    const Word *low = w.data + unit * BLOCKS * block_words, *high = low + block_words;
    const Word *next = high + block_words, *next_high = next + block_words;
    typename U::Sum sums[R][BLOCKS];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = U::zero();
    auto step = [&](int64_t k) __attribute__((always_inline)) {
        Ints a = load_ints(low + k * LANES), b = load_ints(high + k * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const Word* values = x + r * stride + k * input_words(kind);
            sums[r][0] = U::add(sums[r][0], a, values);
            sums[r][1] = U::add(sums[r][1], b, values);
        }
    };
    if (tile.count > 1 || tile.next) {
        const int64_t share = (tile.words + tile.count - 1) / tile.count;  // words per step
        const Word* part = (tile.next ? tile.next : next) + w.steps * tile.words * tile.number / tile.count;
        for (int64_t k = 0; k < w.steps; k++) {
            ask<false>(part + k * share);
            if (share > LANES) ask<false>(part + k * share + LANES);
            step(k);
        }
    } else {
        const int64_t ahead = R <= few_rows(kind) && w.steps > FEW_AHEAD ? FEW_AHEAD : w.steps, turn = w.steps - ahead;
        for (int64_t k = 0; k < turn; k++) {
            ask<R <= few_rows(kind)>(low + (k + ahead) * LANES);
            ask<R <= few_rows(kind)>(high + (k + ahead) * LANES);
            step(k);
        }
        for (int64_t k = turn; k < w.steps; k++) {
            ask<R <= few_rows(kind)>(next + (k - turn) * LANES);
            ask<R <= few_rows(kind)>(next_high + (k - turn) * LANES);
            step(k);
        }
    }
    for (int r = 0; r < R; r++) {
        int64_t block = unit * BLOCKS;
        if constexpr (kind == INT8)
            store(row + r, unit, finish(w, block, sums[r][0], scales[r]), finish(w, block + 1, sums[r][1], scales[r]));
        else
            store(row + r, unit, finish(w, block, sums[r][0]), finish(w, block + 1, sums[r][1]));
    }
}

// One block after the other times `R` rows in registers. Each block prefetches its part of what comes next: where several tiles
// take turns into the first level of caches, since into the second it was 3 to 8 % slower (AVX2).
template <Kind kind, int R, class Store>
inline void narrow_tile(const Matrix& w, const Word* x, int64_t stride, const float* scales, int row, int64_t unit,
                        TileOf tile, Store& store) {
    using U = Unit<kind>;
    const int64_t block_words = w.steps * LANES;
    const Word* at = w.data + unit * BLOCKS * block_words;
    Floats results[BLOCKS][R];
    for (int block = 0; block < BLOCKS; block++, at += block_words) {
        typename U::Sum sums[R];
        each<R>([&](auto r) __attribute__((always_inline)) { sums[r()] = U::zero(); });
        const int64_t words = tile.next ? tile.words : BLOCKS * LANES, share = (words / BLOCKS + tile.count - 1) / tile.count;
        const Word* next = tile.next ? tile.next : w.data + (unit + 1) * BLOCKS * block_words;
        next += w.steps * words * (tile.number * BLOCKS + block) / (tile.count * BLOCKS);
        for (int64_t k = 0; k < w.steps; k++) {
            if (share * k / LANES != share * (k - 1) / LANES) tile.count > 1 ? prefetch(next + k * share) : prefetch_far(next + k * share);
            const Ints weights = load_ints(at + k * LANES);
            each<R>([&](auto r) __attribute__((always_inline)) {
                sums[r()] = U::add(sums[r()], weights, x + r() * stride + k * input_words(kind));
            });
        }
        each<R>([&](auto r) __attribute__((always_inline)) {
            if constexpr (kind == INT8) results[block][r()] = finish(w, unit * BLOCKS + block, sums[r()], scales[r()]);
            else results[block][r()] = finish(w, unit * BLOCKS + block, sums[r()]);
        });
    }
    for (int r = 0; r < R; r++) store(row + r, unit, results[0][r], results[1][r]);
}

template <Kind kind, int R, class Store>
inline void pick_tile(int rows, const Matrix& w, const Word* x, int64_t stride, const float* scales, int row,
                      int64_t unit, TileOf tile, Store& store) {
    if (rows == R) {
        if constexpr (ONE_REGISTER || R <= BOTH_ROWS) return register_tile<kind, R>(w, x, stride, scales, row, unit, tile, store);
        if constexpr (kind == BF16 && R <= BOTH_ALONE)
            if (tile.count == 1) return register_tile<kind, R>(w, x, stride, scales, row, unit, tile, store);
        narrow_tile<kind, R>(w, x, stride, scales, row, unit, tile, store);
    }
    else if constexpr (R > 1)
        pick_tile<kind, R - 1>(rows, w, x, stride, scales, row, unit, tile, store);
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr bool TILES = true;

#define MULTIPLY(c, a, b)                        \
    do {                                         \
        if constexpr (kind == BF16)              \
            _tile_dpbf16ps(c, a, b);             \
        else                                     \
            _tile_dpbssd(c, a, b);               \
    } while (0)

// Tiles 0-3 hold sums, 4 and 5 rows of x (`upper` rows in 4, `lower` in 5), 6 and 7 blocks of w. A thread keeps its
// configuration between products, because setting it costs as much as a small product.
inline thread_local int configured = -1;

inline void configure_tiles(int upper, int lower) {
    if (configured == upper * 32 + lower) return;
    configured = upper * 32 + lower;
    alignas(64) uint8_t config[64] = {1};
    uint16_t* bytes = (uint16_t*)(config + 16);
    const int rows[8] = {upper, upper, lower, lower, upper, lower, TILE_STEPS, TILE_STEPS};
    for (int t = 0; t < 8; t++) {
        config[48 + t] = (uint8_t)rows[t];
        bytes[t] = 64;
    }
    _tile_loadconfig(config);
}

inline void release_tiles() {
    _tile_release();
    configured = -1;
}

// Loading a tile requests its cache lines one after another and waits; prefetching all lines of a step overlaps them.
// Measured: a fifth faster from memory and a quarter faster from the L2 cache; prefetching further ahead is slower.
inline void fetch_tile(const Word* tile) {
#pragma GCC unroll 16
    for (int i = 0; i < TILE_STEPS; i++) prefetch(tile + i * LANES);
}

template <Kind kind, class Store>
inline void emit_tile(const Matrix& w, const Word* low, const Word* high, int rows, const float* scales, int row,
                      int64_t unit, Store& store) {
    for (int r = 0; r < rows; r++) {
        Ints a = load_ints(low + r * LANES), b = load_ints(high + r * LANES);
        int64_t block = unit * BLOCKS;
        if constexpr (kind == INT8)
            store(row + r, unit, finish(w, block, a, scales[r]), finish(w, block + 1, b, scales[r]));
        else
            store(row + r, unit, finish(w, block, as_floats(a)), finish(w, block + 1, as_floats(b)));
    }
}

// Up to 32 rows times every unit of the share. Up to sixteen rows leave two sums free, for two units at once.
template <Kind kind, class Store>
inline void tile_rows(const Matrix& w, const Word* x, int64_t stride, const float* scales, int row, int rows,
                      Share share, Store& store) {
    alignas(64) Word sums[4][TILE_STEPS * LANES];
    const int upper = rows < TILE_STEPS ? rows : TILE_STEPS, lower = rows - upper;
    const int64_t bytes = stride * (int64_t)sizeof(Word), block = w.steps * LANES;
    const bool paired = lower == 0;
    configure_tiles(upper, paired ? upper : lower);
    for (int64_t unit = share.first; unit < share.last; unit += paired ? 2 : 1) {
        const Word* at = w.data + unit * BLOCKS * block;
        const bool second = paired && unit + 1 < share.last;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int64_t k = 0; k < w.steps; k += TILE_STEPS) {
            for (int i = 0; i < (second ? 2 * BLOCKS : BLOCKS); i++) fetch_tile(at + i * block + k * LANES);
            _tile_loadd(4, x + k, bytes);
            _tile_loadd(6, at + k * LANES, 64);
            MULTIPLY(0, 4, 6);
            _tile_loadd(7, at + block + k * LANES, 64);
            MULTIPLY(1, 4, 7);
            if (second) {
                _tile_loadd(6, at + 2 * block + k * LANES, 64);
                MULTIPLY(2, 4, 6);
                _tile_loadd(7, at + 3 * block + k * LANES, 64);
                MULTIPLY(3, 4, 7);
            } else if (lower) {
                _tile_loadd(5, x + TILE_STEPS * stride + k, bytes);
                MULTIPLY(2, 5, 6);
                MULTIPLY(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        emit_tile<kind>(w, sums[0], sums[1], upper, scales, row, unit, store);
        if (second || lower) {
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            if (second) emit_tile<kind>(w, sums[2], sums[3], upper, scales, row, unit + 1, store);
            else emit_tile<kind>(w, sums[2], sums[3], lower, scales + upper, row + upper, unit, store);
        }
    }
}

// Few rows: all claimed units at once. Many rows: two units for all rows, so that weights are read from memory once.
template <Kind kind, class Store>
inline void tile_product(const Matrix& w, const Word* x, int64_t stride, const float* scales, int rows, Share share,
                         Store& store) {
    const int64_t step = rows <= 2 * TILE_STEPS ? w.units : 2;
    for (Share part = share; part.first < share.last; part.first += step) {
        part.last = part.first + step < share.last ? part.first + step : share.last;
        for (int row = 0; row < rows; row += 2 * TILE_STEPS) {
            int count = rows - row < 2 * TILE_STEPS ? rows - row : 2 * TILE_STEPS;
            tile_rows<kind>(w, x + row * stride, stride, scales + row, row, count, part, store);
        }
    }
}
#else
constexpr bool TILES = false;

template <Kind kind, class Store>
inline void tile_product(const Matrix&, const Word*, int64_t, const float*, int, Share, Store&) {}

inline void release_tiles() {}
#endif

// Units of a matrix that a thread claims at once: enough that claiming costs nothing, and few enough to share the rest out.
inline int64_t units_at_once(const Matrix& w, int rows, int threads) {
    constexpr int64_t LEAST = TILES ? 2 : 1, WORDS = 1 << 14;
    const int64_t words = w.steps * BLOCKS * LANES * ((rows + MOST_ROWS - 1) / MOST_ROWS);
    return std::max(LEAST, std::min(WORDS / std::max<int64_t>(words, 1), w.units / (4 * threads)));
}

// Multiplies all rows of x [rows][stride words] with the units of the matrix that this thread claims.
template <Kind kind, class Store>
inline void product(const Matrix& w, const Word* x, int64_t stride, const float* scales, int rows, Units& work, Store store) {
    Share share(0, 0);
    if constexpr (TILES && kind != F32) {
        if (w.steps % TILE_STEPS == 0) {
            while (work.next(share)) tile_product<kind>(w, x, stride, scales, rows, share, store);
            return;
        }
    }
    const int max_rows = rows <= TALL_UNTIL ? tallest(kind) : std::min(MOST_ROWS, tallest(kind));
    const int tiles = (rows + max_rows - 1) / max_rows;
    while (work.next(share))
        for (int64_t unit = share.first; unit < share.last; unit++)
            for (int t = 0; t < tiles; t++) {
                int first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
                pick_tile<kind, tallest(kind)>(count, w, x + first * stride, stride, scales + first, first, unit, {t, tiles}, store);
            }
}

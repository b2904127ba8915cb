// What depends on the kind of a matrix: products, and the encoding of their inputs.
//
// kind.cpp holds the functions of one kind. A library is linked from the kinds that its models have.
#pragma once

#include "activations.hpp"
#include "chunks.hpp"
#include "maximum.hpp"
#include "vocabulary.hpp"

// Rows of words with a fixed stride, and beside each row the scales that its kind has.
struct Input {
    Word* words;
    float* scales;
    int64_t stride, scale_stride;
    const Word* arranged = nullptr;  // the same rows as tiles of many rows read them, where `arranges` says so
};

constexpr bool is_float(Kind kind) { return kind == F32 || kind == BF16 || kind == PACKED; }
constexpr bool is_grouped(int kind) { return kind >= GROUPED; }
constexpr int KIND_COUNT = GROUPED + GROUPED_KINDS;
inline bool is_float(const Matrix& w) { return is_float((Kind)w.kind); }
inline bool arranges(const Matrix& w, int rows) { return !is_grouped(w.kind) && in_arranged_chunks((Kind)w.kind, rows); }

// Words from one input row to the next. There is a cache line between them: at a distance that is a power of two, all rows of
// a tile would use the same lines of the first cache (twelve rows of 4 KiB: 56 ms a pass in place of 49).
inline int64_t input_stride(const Matrix& w) { return w.steps * input_words((Kind)w.kind) + LANES; }

// Zeroes the words of a row after its first `count` numbers of a float kind.
inline void clear_tail(const Matrix& w, int64_t count, Word* words) {
    const Kind kind = (Kind)w.kind;
    for (int64_t k = count / per_word(kind) * input_words(kind); k < input_stride(w); k++) words[k] = 0;
}

// Arranges tile `t` of an input's rows, for a matrix with the same kind and steps as `w`.
inline void arrange(const Matrix& w, const Input& x, const RowTiles& tiles, int t, Word* to) {
    const int first = tiles.first(t), words = input_words((Kind)w.kind);
    to += first * w.steps * words;
    if (words == 1) side_by_side<CHUNK_ROWS>(x.words + first * x.stride, x.stride, w.steps, tiles.height(t), to);
    else side_by_side<CHUNK_ROWS, 2>(x.words + first * x.stride, x.stride, w.steps, tiles.height(t), to);
}

// Stores sixteen floats of an input row of a float kind, and zeroes what follows the last of its `count` numbers; `at` counts
// numbers.
inline void put_floats(const Matrix& w, Word* words, int64_t at, int64_t count, Floats v) {
    if (w.kind == F32) put_input<F32>(words, at, v);
    else put_input<BF16>(words, at, v);
    if (at + LANES >= count) clear_tail(w, count, words);
}

// What is added to the products of some rows: for each row the numbers of all outputs, or null. Nothing is added to a row
// that has none, not even zero, so that its bits stay as they are.
struct Added {
    const float* const* rows = nullptr;  // null: no row has any

    // What is added to the rows from this one on.
    Added from(int64_t row) const { return {rows ? rows + row : nullptr}; }

    void operator()(int row, int64_t unit, Floats& low, Floats& high) const {
        if (!rows || !rows[row]) return;
        const float* at = rows[row] + unit * BLOCKS * LANES;
        low = low + load(at), high = high + load(at + LANES);
    }
};

// Loads sixteen floats of an input row of a float kind; see ``put_floats``.
inline Floats get_floats(const Matrix& w, const Word* words, int64_t at) {
    if (w.kind == F32 || input_words((Kind)w.kind) == 2) return load((const float*)words + at);
    return get<BF16>(words, at);
}

// The largest logit of each unit in each row, and its token, by the rule of maximum.hpp: NaN if a logit of the unit is.
struct UnitMaxima {
    float* largest;   // [rows][units]
    int32_t* tokens;  // [rows][units]
    int64_t units, vocab;

    void add(int row, int64_t unit, Floats low, Floats high) const {
        const int64_t token = unit * BLOCKS * LANES, left = vocab - token;
        if (left < BLOCKS * LANES)  // the last unit may be padded
            low = select(first_lanes(left), low, floats(-INFINITY)), high = select(first_lanes(left - LANES), high, floats(-INFINITY));
        Maximum maximum;
        maximum.add(low), maximum.add(high);
        const float top = maximum.value();
        const unsigned hits = bits(equal(low, floats(top))) | bits(equal(high, floats(top))) << LANES;
        largest[row * units + unit] = top;
        tokens[row * units + unit] = (int32_t)token + (hits ? __builtin_ctz(hits) : 0);
    }
    // Returns the likeliest token of a row, -1 where there is none.
    int32_t token(int64_t row) const {
        float top;
        const int64_t unit = argmax(largest + row * units, units, top);
        return unit < 0 ? -1 : tokens[row * units + unit];
    }
    // Writes the `count` likeliest tokens of a row of logits, the likeliest first.
    void rank(int64_t row, const float* logits, int64_t count, int64_t* ids) const {
        const float* of_row = largest + row * units;
        largest_ids<BLOCKS * LANES>(logits, vocab, count, ids, [of_row](int64_t from, int64_t, float bound) {
            return of_row[from / (BLOCKS * LANES)] <= bound;
        });
    }
};

// Stores the two blocks of a unit in rows of floats, with the strides of a row and a unit.
struct RowStore {
    float* to;
    int64_t row_stride;
    bool add = false;      // to what is there
    float factor = 1.0f;   // of the product
    float cap = 0.0f;      // of logits; 0: none
    int64_t unit_stride = BLOCKS * LANES;
    int64_t first_unit = 0;  // whose numbers are the first of a row
    Added added{};
    int64_t block_stride = LANES;  // between the two blocks
    const UnitMaxima* maxima = nullptr;  // of what is stored, or in place of it where `to` is null

    void operator()(int row, int64_t unit, Floats low, Floats high) const {
        added(row, unit - first_unit, low, high);
        float* at = to ? to + row * row_stride + (unit - first_unit) * unit_stride : nullptr;
        low = low * floats(factor), high = high * floats(factor);
        if (add) {
            low = low + load(at);
            high = high + load(at + block_stride);
        }
        if (cap != 0.0f) low = soft(low), high = soft(high);
        if (maxima) maxima->add(row, unit, low, high);
        if (!to) return;
        store(at, low);
        store(at + block_stride, high);
    }
    // Prefetches what will be stored to.
    void ask(int row, int64_t unit) const {
        if (!to) return;
        const float* at = to + row * row_stride + (unit - first_unit) * unit_stride;
        prefetch(at), prefetch(at + block_stride);
    }
    Floats soft(Floats v) const {
        return floats(cap) * hyperbolic_tangent(v / floats(cap));
    }
};

// Stores activations of a unit as an input row of `down`, or as floats that are encoded later. Gated, gate and up are the two
// halves of a unit, and activation(gate) * up is stored.
struct ActivatedStore {
    const Matrix& down;
    Word* words;    // input rows, if `down` is of a float kind
    float* floats;  // else rows of `stride`
    int64_t stride; // numbers of a row, a multiple of sixteen
    int activation;
    bool gated;
    int64_t first_unit = 0;  // whose numbers are the first of a row
    float limit = 0.0f;      // of gate and up in gpt-oss's activation; 0: activation(gate) * up
    float slope = 0.0f;
    Added added{};
    float gate_factor = 1.0f;  // of the gate before its activation
    const float* row_factors = nullptr;  // of the product of each row, before the activation; null: 1

    void operator()(int row, int64_t unit, Floats low, Floats high) const {
        unit -= first_unit;
        added(row, unit, low, high);
        if (row_factors) low = low * ::floats(row_factors[row]), high = high * ::floats(row_factors[row]);
        if (gated) return keep(row, unit * LANES, limit != 0.0f ? clamped_gate(low, high, limit, slope) : activate(low * ::floats(gate_factor), activation) * high);
        keep(row, unit * BLOCKS * LANES, activate(low, activation));
        if (unit * BLOCKS * LANES + LANES < stride) keep(row, unit * BLOCKS * LANES + LANES, activate(high, activation));
    }
    void ask(int row, int64_t unit) const {
        const int64_t at = (unit - first_unit) * (gated ? 1 : BLOCKS) * LANES;
        if (is_float(down)) prefetch(words + row * input_stride(down) + at / per_word((Kind)down.kind) * input_words((Kind)down.kind));
        else prefetch(floats + row * stride + at);
    }
    void keep(int row, int64_t at, Floats v) const {
        if (is_float(down)) put_floats(down, words + row * input_stride(down), at, stride, v);
        else store(floats + row * stride + at, v);
    }
};

// The functions of a kind; those of kinds that are not linked are null.
struct KindFunctions {
    // Multiply all rows of x with the units of the matrix that this thread takes.
    void (*rows)(const Matrix& w, const Input& x, int rows, Units work, RowStore store);
    void (*activated)(const Matrix& w, const Input& x, int rows, Units work, ActivatedStore store);
    // Stores `count` floats (a multiple of 16) as an input row of the matrix.
    void (*encode)(const Matrix& w, const float* row, int64_t count, Word* words, float* scales);
    // The float32 weights of one output, of grouped kinds.
    void (*unpack)(const Matrix& w, int64_t output, int64_t count, float* to);
};

extern KindFunctions FUNCTIONS[KIND_COUNT];  // each kind's object fills in its own when the library is loaded

inline const KindFunctions& functions(const Matrix& w) { return FUNCTIONS[w.kind]; }

// What the blocks of a pass share: its rows, the residual stream, and the inputs of products.
//
// The residual stream is float32; inputs of products are rounded to the kind of the weights.
#pragma once

#include "lora.hpp"

// Every thread prepares a copy of a product's input, which saves a loop, if it has up to REPEATED_ROWS rows, or up to MOST_REPEATED
// of REPEATED_NUMBERS numbers in all.
constexpr int REPEATED_ROWS = 4, MOST_REPEATED = 16, REPEATED_NUMBERS = 8192;

inline bool repeats(const Matrix& w, int rows) {
    return rows <= REPEATED_ROWS || (rows <= MOST_REPEATED && rows * w.steps * per_word((Kind)w.kind) <= REPEATED_NUMBERS);
}

// Words of such a copy: its rows, with a line between them, and their scales, at most three for sixteen numbers.
inline int64_t repeated_words(const Widest& widest) {
    return std::max<int64_t>(REPEATED_ROWS * (widest.words + widest.scales), REPEATED_NUMBERS * 5 / 4);
}

enum InputNumber : int { NORMED, ATTENDED, ACTIVATED };  // inputs of products

template <Kind kv>
struct Rows {
    const ModelSpec& m;
    BatchSpec b;  // after the last layer's keys and values: only the rows with logits
    Member& member;
    const Widest widest;
    const int64_t width;     // of a row of the residual stream
    float *hidden, *branch;  // the residual stream; what is normalized before it is added
    Word *own, *inputs[3];   // this thread's copies of rows; rows of products' inputs
    Word* arranged;          // the input of the current product, if it has many rows
    float* input_scales;
    Lora lora;

    Rows(const ModelSpec& m, const BatchSpec& b, Workspace& w, Member& member)
        : m(m), b(b), member(member), widest(m), width(padded(m.hidden, 32)), hidden((float*)w.hidden.data),
          branch((float*)w.branch.data), own((Word*)w.own_words[member.thread].data),
          inputs{(Word*)w.normed.data, (Word*)w.attended.data, (Word*)w.activated.data}, arranged((Word*)w.arranged.data), input_scales((float*)w.scales.data),
          lora(w, member) {}

    // Allocates the memory, before threads start.
    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        const int64_t width = padded(m.hidden, 32);
        const Widest widest(m);
        Lora::reserve(m, b, w);
        w.hidden.room<float>(b.rows * width);
        w.branch.room<float>(b.rows * width);
        w.scales.room<float>(b.rows * widest.scales);
        for (Buffer* input : {&w.normed, &w.attended, &w.activated}) input->room<Word>(b.rows * widest.words);
        if (b.rows >= MANY_ROWS) w.arranged.room<Word>(b.rows * widest.words);
        if ((int)w.own_words.size() < threads) w.own_words.resize(threads), w.own_attention.resize(threads);
        for (int t = 0; t < threads; t++)
            w.own_words[t].room<Word>(repeated_words(widest) + std::max({(m.joined ? 2 : 1) * width, padded((int64_t)m.fused_layers * m.fused_width, LANES), padded(m.latent.query_rank, LANES), (int64_t)m.layer_inputs.width}));
    }

    int sequence_of(int row) const {
        return int(std::upper_bound(b.sequence_from, b.sequence_from + b.sequences + 1, row) - b.sequence_from) - 1;
    }

    // Multiplies rows that other loops have written.
    template <class Store>
    void multiply(const Matrix& w, Input x, int rows, const Store& store) const {
        if (arranges(w, rows)) {
            const RowTiles tiles(rows, CHUNK_ROWS);
            member.each(tiles.count, 1, [&](int64_t t) { arrange(w, x, tiles, (int)t, arranged); });
            x.arranged = arranged;
        }
        Loop units = member.begin(w.units, units_at_once(w, rows, member.threads));
        multiply_units(w, x, rows, units, store);
        member.end(units);
    }

    // Prepares the rows of a product's input and multiplies them: many rows are prepared in a loop, few ones completely by each
    // thread, which saves a loop. fill(row, words, scales) writes one.
    template <class Fill, class Store>
    void multiply_prepared(const Matrix& w, InputNumber number, int rows, Fill fill, const Store& store) {
        Input x = input(w, number);
        auto one = [&](int64_t r) { fill(r, x.words + r * x.stride, x.scales + r * x.scale_stride); };
        if (!repeats(w, rows)) {
            member.each(rows, 1, one);
            return multiply(w, x, rows, store);
        }
        x.words = own, x.scales = (float*)(own + rows * x.stride);
        Loop units = member.begin(w.units, units_at_once(w, rows, member.threads), [&] {
            for (int r = 0; r < rows; r++) one(r);
        });
        multiply_units(w, x, rows, units, store);
        member.end(units);
    }

    // Multiplies what other loops have written: input rows of a float kind, else rows of `count` floats, a multiple of sixteen.
    template <class Store>
    void multiply_written(const Matrix& w, InputNumber number, const float* from, int64_t count, const Store& store) {
        if (is_float(w)) multiply(w, input(w, number), b.rows, store);
        else multiply_encoded(w, number, from, count, store);
    }

    // Multiplies rows of `count` floats, a multiple of sixteen.
    template <class Store>
    void multiply_encoded(const Matrix& w, InputNumber number, const float* from, int64_t count, const Store& store) {
        multiply_prepared(w, number, b.rows, [&](int64_t r, Word* words, float* scales) {
            functions(w).encode(w, from + r * count, count, words, scales);
        }, store);
    }

    // Multiplies the residual stream after a norm.
    template <class Store>
    void multiply_normed(const Matrix& w, const NormSpec& norm, const Store& store) {
        multiply_prepared(w, NORMED, b.rows, normed(w, norm), store);
    }

    // A function that writes an input row: the residual stream after a norm.
    auto normed(const Matrix& w, const NormSpec& norm) {
        return [this, &w, norm](int64_t r, Word* words, float* scales) { normalize_row(w, hidden + r * width, norm, words, scales); };
    }

    void normalize_row(const Matrix& w, const float* x, const NormSpec& norm, Word* words, float* scales) {
        float* row = own_row();
        normalize(m, x, norm, m.hidden, row);
        std::fill(row + m.hidden, row + padded(m.hidden, LANES), 0.0f);
        functions(w).encode(w, row, padded(m.hidden, LANES), words, scales);
    }

    // Memory of this thread for a row, a latent of queries or a layer's own input, or for two rows of an EAGLE-3 head.
    float* own_row() const { return (float*)(own + repeated_words(widest)); }

    // Adds a product times a factor to the residual stream. A norm is that of the product, or of the sum. multiply(store) stores
    // the product.
    template <class Multiply>
    void residual(const NormSpec& norm, float factor, const Added& added, Multiply multiply) {
        const bool branches = norm && !m.norm_sums;
        RowStore store{branches ? branch : hidden, width};
        store.added = added;
        if (!branches) store.add = true, store.factor = factor;
        multiply(store);
        if (branches) return add_branch(norm, factor);
        if (norm) member.each(b.rows, 1, [&](int64_t r) { normalize(m, hidden + r * width, norm, m.hidden, hidden + r * width); });
    }

    // What adapters add to a product of the residual stream after a norm.
    Added added_to_normed(int layer, LoraSpec LoraLayer::*product, const NormSpec& norm) {
        return lora(layer, product, m.hidden, [&](int64_t row, float* to) {
            normalize(m, hidden + row * width, norm, m.hidden, to);
        });
    }

    // What adapters add to a product with `w`, whose input are rows of `count` floats, or of words if `w` is of a float kind.
    Added added_to(int layer, LoraSpec LoraLayer::*product, const Matrix& w, InputNumber number, const float* from, int64_t count) {
        return lora(layer, product, count, [&](int64_t row, float* to) {
            if (!is_float(w)) return (void)std::memcpy(to, from + row * count, sizeof(float) * count);
            const Word* words = inputs[number] + row * input_stride(w);
            for (int64_t i = 0; i < count; i += LANES) store(to + i, get_floats(w, words, i));
        });
    }

    // Adds `branch` to the residual stream after a norm.
    void add_branch(const NormSpec& norm, float factor) {
        member.each(b.rows, 1, [&](int64_t r) {
            normalize(m, branch + r * width, norm, m.hidden, branch + r * width);
            for (int64_t i = 0; i < m.hidden; i++) hidden[r * width + i] += factor * branch[r * width + i];
        });
    }

    // Multiplies the residual stream by a factor.
    void scale(float factor) {
        if (factor == 1.0f) return;
        member.each(b.rows, 1, [&](int64_t r) {
            for (int64_t i = 0; i < m.hidden; i++) hidden[r * width + i] *= factor;
        });
    }

   private:
    // The rows of a product's input.
    Input input(const Matrix& w, InputNumber number) const { return {inputs[number], input_scales, input_stride(w), w.scale_words()}; }

    static void multiply_units(const Matrix& w, const Input& x, int rows, Loop& units, const RowStore& store) {
        functions(w).rows(w, x, rows, units, store);
    }
    static void multiply_units(const Matrix& w, const Input& x, int rows, Loop& units, const ActivatedStore& store) {
        functions(w).activated(w, x, rows, units, store);
    }
};

// A forward pass of a Llama-like decoder: one team of threads, and a loop for each of its phases.
//
// The residual stream is float32; inputs of products are rounded to the kind of the weights.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "attention.hpp"
#include "last.hpp"

constexpr int REPEATED_ROWS = 4;  // up to this many rows, every thread prepares its own copy, which saves a loop

// Aligned memory that only grows. It is zeroed, because padding must be zero.
struct Buffer {
    char* data = nullptr;
    size_t size = 0;
    template <class T>
    T* room(int64_t count) {
        size_t need = padded(count * sizeof(T), 64);
        if (need > size) {
            release();
            data = (char*)operator new(need + need / 2, ALIGNMENT);
            size = need + need / 2;
            std::memset(data, 0, size);
        }
        return (T*)data;
    }
    void release() {
        if (data) operator delete(data, ALIGNMENT);
        data = nullptr;
        size = 0;
    }
    ~Buffer() { release(); }

   private:
    static constexpr std::align_val_t ALIGNMENT{64};
};

// The longest input row of a model's products: its words, and the floats beside it.
struct Widest {
    int64_t words = 0, scales = 0;
    bool encoded = false;  // some rows are floats first
    explicit Widest(const ModelSpec& m) {
        add(m.head);
        for (int i = 0; i < m.layer_count; i++)
            for (const Matrix* w : {&m.layers[i].qkv, &m.layers[i].out, &m.layers[i].gate_up, &m.layers[i].down}) add(*w);
        scales = padded(scales, LANES);
    }
    void add(const Matrix& w) {
        words = std::max(words, w.steps), scales = std::max(scales, w.scale_words()), encoded |= !is_float(w);
    }
};

// Queries of one sequence that attention computes together.
struct QueryTile {
    int32_t sequence, first, last;
};

// Buffers of one model, reused by its passes.
struct Workspace {
    Buffer hidden, embedded, branch, qkv, queries, mixed, inner, scales, normed, attended, activated;
    std::vector<Buffer> own_words, own_scores;
    Answered answered;
    std::vector<QueryTile> tiles, answered_tiles;
};

template <Kind kv>
struct Pass {
    const ModelSpec& m;
    BatchSpec b;  // after the last layer's KV projection: only the rows with logits
    const BatchSpec& answered;
    Member& member;
    const std::vector<QueryTile>*tiles, &answered_tiles;
    const PageLayout layout{m, kv};
    const Widest widest{m};
    const int64_t width, qkv_width, inner_width;
    float *hidden, *embedded, *branch, *qkv, *mixed, *inner, *scores;
    Word *queries, *own;
    Word* inputs[3];       // rows of products' inputs: normed, attended, activated
    float* input_scales;

    static int64_t score_length(const BatchSpec& b) { return padded(b.reach, PAGE) + LANES; }

    Pass(const ModelSpec& m, const BatchSpec& b, Workspace& w, Member& member)
        : m(m), b(b), answered(w.answered.batch), member(member), tiles(&w.tiles), answered_tiles(w.answered_tiles), width(padded(m.hidden, 32)),
          qkv_width(padded((m.heads + 2 * m.kv_heads) * m.head_dim, 32)), inner_width(padded(m.inner, 16)) {
        hidden = (float*)w.hidden.data, embedded = m.joined ? (float*)w.embedded.data : hidden;
        branch = (float*)w.branch.data, qkv = (float*)w.qkv.data;
        mixed = (float*)w.mixed.data, inner = (float*)w.inner.data, queries = (Word*)w.queries.data;
        own = (Word*)w.own_words[member.thread].data, scores = (float*)w.own_scores[member.thread].data;
        inputs[0] = (Word*)w.normed.data, inputs[1] = (Word*)w.attended.data, inputs[2] = (Word*)w.activated.data;
        input_scales = (float*)w.scales.data;
    }

    // Allocates the memory of a pass, before its threads start.
    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        const int64_t rows = b.rows, width = padded(m.hidden, 32), heads = m.heads * m.head_dim;
        w.answered.plan(m, b);
        tile(m, b, w.tiles);
        tile(m, w.answered.batch, w.answered_tiles);
        w.hidden.room<float>(rows * width);
        if (m.joined) w.embedded.room<float>(rows * width);
        w.branch.room<float>(rows * width);
        w.qkv.room<float>(rows * padded((m.heads + 2 * m.kv_heads) * m.head_dim, 32));
        w.queries.room<Word>(rows * heads / per_word(kv));
        const Widest widest(m);
        w.scales.room<float>(rows * widest.scales);
        for (Buffer* input : {&w.normed, &w.attended, &w.activated}) input->room<Word>(rows * widest.words);
        if (widest.encoded) {
            w.mixed.room<float>(rows * heads);
            w.inner.room<float>(rows * padded(m.inner, 16));
        }
        if ((int)w.own_words.size() < threads) w.own_words.resize(threads), w.own_scores.resize(threads);
        for (int t = 0; t < threads; t++) {
            w.own_words[t].room<Word>(REPEATED_ROWS * (widest.words + widest.scales) + (m.joined ? 2 : 1) * width);
            w.own_scores[t].room<float>(TILE_QUERIES * (score_length(b) + 2 * m.head_dim));
        }
    }

    static void tile(const ModelSpec& m, const BatchSpec& b, std::vector<QueryTile>& tiles) {
        const int most = std::max(1, TILE_QUERIES / (m.heads / m.kv_heads));
        tiles.clear();
        for (int s = 0; s < b.sequences; s++)
            for (int first = b.sequence_from[s], last; first < b.sequence_from[s + 1]; first = last)
                tiles.push_back({s, first, last = std::min(first + most, b.sequence_from[s + 1])});
    }

    // The rows of a product's input: 0 normed, 1 attended, 2 activated.
    Input input(const Matrix& w, int number) const {
        return {inputs[number], input_scales, w.steps, w.scale_words()};
    }

    // Prepares the rows of a product's input: few rows completely in each thread, which others may be ahead of; many rows in
    // a loop. Calls fill(row, words, scales).
    template <class Fill>
    Input prepare(const Matrix& w, int number, int rows, Fill fill) {
        Input to = input(w, number);
        auto one = [&](int64_t r) { fill(r, to.words + r * to.stride, to.scales + r * to.scale_stride); };
        if (rows > REPEATED_ROWS) {
            member.each(rows, 1, one);
            return to;
        }
        to.words = own, to.scales = (float*)(own + REPEATED_ROWS * widest.words);
        if (!member.passed(w.units))
            for (int r = 0; r < rows; r++) one(r);
        return to;
    }

    // out = x / rms(x) * weight (1910.07467), over `count` elements; out = x without a weight
    void normalize(const float* x, const float* weight, int64_t count, float* out) const {
        if (!weight) {
            if (out != x) std::memcpy(out, x, sizeof(float) * count);
            return;
        }
        Floats sum = floats(0.0f);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            Floats v = load(x + i);
            sum = multiply_add(v, v, sum);
        }
        float total = sum_of(sum);
        for (int64_t j = i; j < count; j++) total += x[j] * x[j];
        const float factor = 1.0f / std::sqrt(total / (float)count + m.eps);
        for (i = 0; i + LANES <= count; i += LANES)
            store(out + i, load(x + i) * floats(factor) * load(weight + i));
        for (; i < count; i++) out[i] = x[i] * factor * weight[i];
    }

    void normalize_row(const Matrix& w, const float* x, const float* weight, Word* words, float* scales) {
        float* row = own_row();
        normalize(x, weight, m.hidden, row);
        std::fill(row + m.hidden, row + padded(m.hidden, LANES), 0.0f);
        functions(w).encode(w, row, padded(m.hidden, LANES), words, scales);
    }

    // The input of the first attention of an EAGLE-3 head: embedding and features, concatenated.
    void join_row(const Matrix& w, int64_t r, const float* weight, Word* words, float* scales) {
        float* row = own_row();
        normalize(embedded + r * width, weight, m.hidden, row);
        normalize(hidden + r * width, m.norm_first ? nullptr : m.feature_norm, m.hidden, row + m.hidden);
        functions(w).encode(w, row, 2 * m.hidden, words, scales);
    }

    float* own_row() const { return (float*)(own + REPEATED_ROWS * (widest.words + widest.scales)); }

    // Starts the residual stream: from embeddings, or from the caller's features.
    void begin() {
        if (!b.features || m.joined) embed();
        if (!b.features) return;
        member.each(b.rows, 1, [&](int64_t r) {
            normalize(b.features + r * m.hidden, m.norm_first ? m.feature_norm : nullptr, m.hidden, hidden + r * width);
        });
    }

    void embed() {
        const Floats scale = floats(m.embedding_scale);
        member.each(b.rows, 1, [&](int64_t r) {
            float* to = embedded + r * width;
            embedding(b.tokens[r], to);
            for (int64_t i = 0; i < width; i += LANES) store(to + i, (load(to + i) * scale));
        });
    }

    // The embedding of a token. A tied or quantized one is unpacked from its packed matrix.
    void embedding(int token, float* to) {
        if (!m.embedding && is_grouped(m.table.kind)) {
            std::fill(to + m.hidden, to + width, 0.0f);
            return functions(m.table).unpack(m.table, token, m.hidden, to);
        }
        const Word* row = m.embedding ? m.embedding + token * (width / per_word(kv)) : unpack(token);
        for (int64_t i = 0; i < width; i += LANES) store(to + i, get<kv>(row, i));
    }

    const Word* unpack(int token) {
        if (m.table.kind == PACKED) {
            unpack_row(m.table, token, std::min<int64_t>(m.table.steps, width / 2), own);
            for (int64_t k = m.table.steps; k < width / 2; k++) own[k] = 0;
            return own;
        }
        const Word* lane = m.table.data + token / LANES * m.table.steps * LANES + token % LANES;
        for (int64_t k = 0; k < width / per_word(kv); k++) own[k] = k < m.table.steps ? lane[k * LANES] : 0;
        return own;
    }

    void multiply(const Matrix& w, const Input& x, int rows, const RowStore& store) const {
        Loop units = member.begin(w.units, units_at_once(w, rows, member.threads));
        functions(w).rows(w, x, rows, units, store);
        member.end(units);
    }

    // Adds a product to the residual stream, after a norm if the architecture has one.
    void residual(const Matrix& w, Input x, const float* norm) {
        float* to = norm ? branch : hidden;
        multiply(w, x, b.rows, {to, width, !norm});
        if (!norm) return;
        member.each(b.rows, 1, [&](int64_t r) {
            normalize(branch + r * width, norm, m.hidden, branch + r * width);
            for (int64_t i = 0; i < m.hidden; i++) hidden[r * width + i] += branch[r * width + i];
        });
    }

    // In place: the norm of each head (Qwen3, Gemma 3), then the rotary embedding (RoFormer, 2104.09864).
    void turn(float* head, const float* norm, int rope, int position) const {
        if (norm) normalize(head, norm, m.head_dim, head);
        if (rope < 0) return;
        const float *cosines = m.ropes[rope] + (int64_t)position * 2 * m.half, *sines = cosines + m.half;
        for (int i = 0; i < m.half; i++) {
            const float a = head[i], c = head[i + m.half];
            head[i] = a * cosines[i] - c * sines[i];
            head[i + m.half] = c * cosines[i] + a * sines[i];
        }
    }

    int sequence_of(int row) const {
        return int(std::upper_bound(b.sequence_from, b.sequence_from + b.sequences + 1, row) - b.sequence_from) - 1;
    }

    // Converts queries to words, and writes keys and values to the cache.
    void spread(int number) {
        const LayerSpec& layer = m.layers[number];
        const int per_row = m.heads + 2 * m.kv_heads;
        alignas(64) Word words[512];
        member.each((int64_t)b.rows * per_row, 8, [&](int64_t item) {
            const int row = int(item / per_row), head = int(item % per_row), kv_head = head - m.heads;
            float* x = qkv + row * qkv_width + head * m.head_dim;
            if (kv_head < 0) {
                turn(x, layer.q_norm, layer.rope, b.positions[row]);
                encode<kv>(x, m.head_dim, queries + ((int64_t)row * m.heads + head) * layout.key_words);
                return;
            }
            Word* const* pages = b.pages[sequence_of(row)];
            const int place = b.places[row];
            if (kv_head >= m.kv_heads) {
                // A masked key has weight 0, and 0 times infinity is NaN.
                for (int i = 0; i < m.head_dim; i += LANES) store(x + i, finite(load(x + i)));
                encode<kv>(x, m.head_dim, layout.value(pages, number, kv_head - m.kv_heads, place));
                return;
            }
            turn(x, layer.k_norm, layer.rope, b.positions[row]);
            encode<kv>(x, m.head_dim, words);
            Word* lane = layout.keys(pages, number, kv_head, place / LANES) + place % LANES;
            for (int64_t k = 0; k < layout.key_words; k++) lane[k * LANES] = words[k];
        });
    }

    // Removes the rows without logits; the others move up, in order.
    void leave() {
        member.each(1, 1, [&](int64_t) {
            for (int i = 0; i < answered.rows; i++) {
                const int row = b.outputs[i];
                if (row == i) continue;
                std::memcpy(hidden + i * width, hidden + row * width, sizeof(float) * width);
                const int64_t words = (int64_t)m.heads * layout.key_words;
                std::memcpy(queries + i * words, queries + row * words, sizeof(Word) * words);
            }
        });
        b = answered, tiles = &answered_tiles;
    }

    void attend(int number) {
        const Matrix& out = m.layers[number].out;
        clear_tails(out, 1, m.heads * m.head_dim);
        float* mixed = scores + TILE_QUERIES * score_length(b);
        Word* own_queries = (Word*)(mixed + TILE_QUERIES * m.head_dim);
        Attention<kv> attention{m, b, layout, queries, own_queries, scores, mixed, score_length(b)};
        member.each((int64_t)tiles->size() * m.kv_heads, 1, [&](int64_t item) {
            const QueryTile& tile = (*tiles)[item / m.kv_heads];
            attention.run(tile.sequence, number, int(item % m.kv_heads), tile.first, tile.last,
                          [&](int row, int at, const float* values) { keep(out, row, at, values); });
        });
    }

    // Zeroes the padding after `count` numbers in each row of an input that is written without `encode_row`.
    void clear_tails(const Matrix& w, int number, int64_t count) {
        if (!is_float(w) || count / per_word((Kind)w.kind) == w.steps) return;
        member.each(b.rows, 8, [&](int64_t r) { clear_tail(w, count, inputs[number] + r * w.steps); });
    }

    void keep(const Matrix& w, int row, int head, const float* values) {
        for (int i = 0; i < m.head_dim; i += LANES) {
            Floats v = load(values + i);
            if (is_float(w)) put_floats(w, inputs[1] + row * w.steps, head * m.head_dim + i, v);
            else store(mixed + ((int64_t)row * m.heads + head) * m.head_dim + i, v);
        }
    }

    Input attention_input(const Matrix& w) {
        if (is_float(w)) return input(w, 1);
        const int64_t count = m.heads * m.head_dim;
        return prepare(w, 1, b.rows, [&](int64_t r, Word* words, float* scales) {
            functions(w).encode(w, mixed + r * count, count, words, scales);
        });
    }

    // The input of `down`: silu(gate) * up.
    Input gate(const Matrix& w, Input x, const Matrix& down) {
        clear_tails(down, 2, inner_width);
        Loop units = member.begin(w.units, units_at_once(w, b.rows, member.threads));
        functions(w).gated(w, x, b.rows, units, {down, inputs[2], inner, inner_width, (bool)m.gelu});
        member.end(units);
        if (is_float(down)) return input(down, 2);
        return prepare(down, 2, b.rows, [&](int64_t r, Word* words, float* scales) {
            functions(down).encode(down, inner + r * inner_width, inner_width, words, scales);
        });
    }

    void tap(int number) {
        for (int t = 0; t < b.tap_count; t++) {
            if (b.tap_layers[t] != number) continue;
            member.each(b.rows, 1, [&](int64_t i) {
                const float* row = hidden + i * width;
                float* to = b.taps[t] + i * m.hidden;
                if (number == m.layer_count) normalize(row, m.norm, m.hidden, to);
                else std::memcpy(to, row, sizeof(float) * m.hidden);
            });
        }
    }

    void head() {
        Input x = prepare(m.head, 0, b.output_count, [&](int64_t i, Word* words, float* scales) {
            normalize_row(m.head, hidden + b.outputs[i] * width, m.norm, words, scales);
        });
        const int64_t stride = m.head.units * BLOCKS * LANES;
        multiply(m.head, x, b.output_count, {b.logits, stride, false, m.logit_cap});
    }

    void run() {
        begin();
        for (int number = 0; number < m.layer_count; number++) {
            const LayerSpec& layer = m.layers[number];
            tap(number);
            Input x = prepare(layer.qkv, 0, b.rows, [&](int64_t r, Word* words, float* scales) {
                if (m.joined && number == 0) join_row(layer.qkv, r, layer.norm, words, scales);
                else normalize_row(layer.qkv, hidden + r * width, layer.norm, words, scales);
            });
            multiply(layer.qkv, x, b.rows, {qkv, qkv_width});
            spread(number);
            if (number == m.layer_count - 1 && answered.rows < b.rows) leave();
            if (!b.rows) break;
            attend(number);
            residual(layer.out, attention_input(layer.out), layer.after_attention);
            x = prepare(layer.gate_up, 0, b.rows, [&](int64_t r, Word* words, float* scales) {
                normalize_row(layer.gate_up, hidden + r * width, layer.mlp_norm, words, scales);
            });
            residual(layer.down, gate(layer.gate_up, x, layer.down), layer.after_mlp);
        }
        tap(m.layer_count);
        tap(m.layer_count + 1);
        if (b.logits) head();
    }
};

// The token mixer "attention" of a layer: projections, norms and rotations of heads, the KV cache, attention, and the output.
#pragma once

#include "attention.hpp"
#include "rows.hpp"

// Rotates the first numbers of a head in place (RoFormer, 2104.09864).
inline void rotate(float* head, const RopeSpec& rope, int position) {
    const int half = rope.half;
    const float *cosines = rope.table + (int64_t)position * 2 * half, *sines = cosines + half;
    auto turn = [&](int i, float& a, float& c) {
        const float first = a, second = c;
        a = first * cosines[i] - second * sines[i];
        c = second * cosines[i] + first * sines[i];
    };
    if (rope.paired)
        for (int i = 0; i < half; i++) turn(i, head[2 * i], head[2 * i + 1]);
    else
        for (int i = 0; i < half; i++) turn(i, head[i], head[i + half]);
}

template <Kind kv>
struct AttentionMixer {
    Rows<kv>& p;
    const ModelSpec& m;
    const PageLayout layout;
    const std::vector<QueryTile>*tiles, &answered_tiles;
    const int64_t qkv_width, heads_width;
    float *qkv, *mixed, *scores;
    Word* queries;

    AttentionMixer(Rows<kv>& rows, Workspace& w)
        : p(rows), m(rows.m), layout(m, kv), tiles(&w.tiles), answered_tiles(w.answered_tiles),
          qkv_width(row_numbers(m)), heads_width((int64_t)m.heads * m.head_dim),
          qkv((float*)w.qkv.data), mixed((float*)w.mixed.data), scores((float*)w.own_scores[p.member.thread].data),
          queries((Word*)w.queries.data) {}

    static int64_t row_numbers(const ModelSpec& m) {
        return padded(((1 + m.gated_attention) * m.heads + 2 * m.kv_heads) * m.head_dim, 32);
    }
    static int64_t score_length(const BatchSpec& b) { return padded(std::max(b.reach, b.source_reach), PAGE) + LANES; }

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        const int64_t rows = b.rows, heads = m.heads * m.head_dim;
        tile(m, b, w.tiles);
        tile(m, w.answered.batch, w.answered_tiles);
        w.qkv.room<float>(rows * row_numbers(m));
        w.queries.room<Word>(rows * heads / per_word(kv) * input_words(kv));
        if (Widest(m).encoded) w.mixed.room<float>(rows * heads);
        for (int t = 0; t < threads; t++) w.own_scores[t].room<float>(TILE_QUERIES * (score_length(b) + 2 * m.head_dim));
    }

    static void tile(const ModelSpec& m, const BatchSpec& b, std::vector<QueryTile>& tiles) {
        const int max_rows = TILE_QUERIES / heads_at_once(m);
        tiles.clear();
        for (int s = 0; s < b.sequences; s++)
            for (int first = b.sequence_from[s], last; first < b.sequence_from[s + 1]; first = last)
                tiles.push_back({s, first, last = std::min(first + max_rows, b.sequence_from[s + 1])});
    }

    // Computes queries, and writes keys and values of all rows to the cache.
    void enter(const AttentionSpec& layer, const Input& x, const Added& added) {
        RowStore store{qkv, qkv_width};
        store.added = added;
        p.multiply(layer.qkv, x, p.b.rows, store);
        if (layer.q_norm && m.norm_heads == ALL_HEADS) normalize_all(layer);
        spread(layer);
    }

    // Computes queries alone.
    void ask(const AttentionSpec& layer, const Input& x) {
        p.multiply(layer.qkv, x, p.b.rows, {qkv, qkv_width});
        each_head(m.heads, [&](int row, int head, float* x) { keep_query(row, head, x); });
    }

    // Calls f(row, head, numbers) for the first `heads` heads of the rows that were computed.
    template <class F>
    void each_head(int heads, F f) {
        p.member.each((int64_t)p.b.rows * heads, 8, [&](int64_t item) {
            const int row = int(item / heads), head = int(item % heads);
            f(row, head, qkv + row * qkv_width + head * m.head_dim);
        });
    }

    // Writes one head of keys, or behind those one of values, to cache row `place`.
    void remember(const AttentionSpec& layer, Word* const* pages, int place, int head, float* x) const {
        if (head >= m.kv_heads) {
            // A masked key has weight 0, and 0 times infinity is NaN.
            for (int i = 0; i < m.head_dim; i += LANES) store(x + i, finite(load(x + i)));
            return cache(x, layout.value(pages, layer.cache_layer, head - m.kv_heads, place));
        }
        alignas(64) Word words[512];
        cache(x, words);
        Word* lane = layout.keys(pages, layer.cache_layer, head, place / LANES) + place % LANES;
        for (int64_t k = 0; k < layout.key_words; k++) lane[k * LANES] = words[k];
    }

    // Moves what was computed of a row, where rows leave the pass.
    void move_row(int to, int from) {
        const int64_t words = (int64_t)m.heads * layout.query_words;
        std::memcpy(queries + to * words, queries + from * words, sizeof(Word) * words);
        if (m.gated_attention) std::memcpy(gates(to), gates(from), sizeof(float) * heads_width);
    }

    void rows_left() { tiles = &answered_tiles; }

    // Computes attention over the cache.
    void mix(const LayerSpec& of) { attend(of.attention, p.b); }

    // Computes attention over the keys and values that each row of `b` sees.
    void attend(const AttentionSpec& layer, const BatchSpec& b) {
        p.clear_tails(layer.out, ATTENDED, heads_width);
        float* values = scores + TILE_QUERIES * score_length(p.b);
        Word* own_queries = (Word*)(values + TILE_QUERIES * m.head_dim);
        Attention<kv> attention{m, b, layer, layout, queries, own_queries, scores, values, score_length(p.b)};
        const int parts = m.heads / heads_at_once(m);
        p.member.each((int64_t)tiles->size() * parts, 1, [&](int64_t item) {
            const QueryTile& tile = (*tiles)[item / parts];
            attention.run(tile.sequence, int(item % parts), tile.first, tile.last,
                          [&](int row, int at, const float* values) { keep(layer.out, row, at, values); });
        });
    }

    // Adds the output to the residual stream.
    void leave(const LayerSpec& of, int number) {
        const Matrix& out = of.attention.out;
        add(out, of.after_mixer, p.added_to(number, &LoraLayer::out, out, ATTENDED, mixed, heads_width));
    }

    void add(const Matrix& out, const NormSpec& norm, const Added& added = {}) {
        p.residual(out, is_float(out) ? p.input(out, ATTENDED) : p.encoded(out, ATTENDED, mixed, heads_width), norm,
                   m.attention_factor, added);
    }

   private:
    void normalize_all(const AttentionSpec& layer) {
        p.member.each(p.b.rows, 1, [&](int64_t r) {
            float *q = qkv + r * qkv_width, *k = q + heads_width;
            normalize(m, q, layer.q_norm, heads_width, q);
            normalize(m, k, layer.k_norm, (int64_t)m.kv_heads * m.head_dim, k);
        });
    }

    // Converts queries to words, and writes keys and values to the cache.
    void spread(const AttentionSpec& layer) {
        each_head(m.heads + 2 * m.kv_heads, [&](int row, int head, float* x) {
            const int kv_head = head - m.heads;
            const int position = p.b.positions[row];
            if (m.clip != 0.0f) clip(x);
            if (kv_head < 0) {
                turn(x, layer.q_norm, layer, head, position);
                if (layer.grows) scale(x, m.query_scales[position]);
                return keep_query(row, head, x);
            }
            if (kv_head < m.kv_heads) turn(x, layer.k_norm, layer, kv_head, position);
            remember(layer, p.b.pages[p.sequence_of(row)], p.b.places[row], kv_head, x);
        });
    }

    void keep_query(int row, int head, const float* x) {
        encode<kv>(x, m.head_dim, queries + ((int64_t)row * m.heads + head) * layout.query_words);
    }

    // Stores a head's numbers as the cache has them.
    void cache(const float* x, Word* to) const {
        for (int i = 0; i < m.head_dim; i += LANES) put<kv>(to, i, load(x + i));
    }

    // In place: the norm of each head (Qwen3, Gemma 3), and the rotary embedding.
    void turn(float* head, NormSpec norm, const AttentionSpec& layer, int number, int position) const {
        if (norm.weight) norm.weight += (int64_t)number * layer.norm_stride;
        if (norm.bias) norm.bias += (int64_t)number * layer.norm_stride;
        if (m.norm_heads == BEFORE_ROTATION) normalize(m, head, norm, m.head_dim, head);
        if (layer.rope >= 0) rotate(head, m.ropes[layer.rope], position);
        if (m.norm_heads == AFTER_ROTATION) normalize(m, head, norm, m.head_dim, head);
    }

    void clip(float* x) const {
        for (int i = 0; i < m.head_dim; i++) x[i] = std::min(std::max(x[i], -m.clip), m.clip);
    }

    void scale(float* x, float factor) const {
        for (int i = 0; i < m.head_dim; i++) x[i] *= factor;
    }

    float* gates(int64_t row) const { return qkv + row * qkv_width + heads_width + 2 * m.kv_heads * m.head_dim; }

    void keep(const Matrix& out, int row, int head, const float* values) {
        for (int i = 0; i < m.head_dim; i += LANES) {
            Floats v = load(values + i);
            if (m.gated_attention) v = v * logistic(load(gates(row) + head * m.head_dim + i));
            if (is_float(out)) put_floats(out, p.inputs[ATTENDED] + row * input_stride(out), head * m.head_dim + i, v);
            else store(mixed + ((int64_t)row * m.heads + head) * m.head_dim + i, v);
        }
    }
};

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

// An item of attention is a tile of rows and a head of keys. With fewer items than FEW_ITEMS per thread, each stretch of their
// keys is an item. Keys of one stretch have smaller tiles instead, of LEAST_QUERIES at least, until each thread has two items.
constexpr int FEW_ITEMS = 4, LEAST_QUERIES = 12;

inline int stretches_of(int keys) { return ceiling(keys, STRETCH); }

template <Kind kv>
struct AttentionMixer {
    Rows<kv>& p;
    const ModelSpec& m;
    const Tiles*tiles, &answered_tiles;
    const int64_t qkv_width;
    float *qkv, *mixed, *own, *stretches;
    Word* queries;

    AttentionMixer(Rows<kv>& rows, Workspace& w)
        : p(rows), m(rows.m), tiles(&w.tiles), answered_tiles(w.answered_tiles), qkv_width(row_numbers(m)),
          qkv((float*)w.qkv.data), mixed((float*)w.mixed.data), own((float*)w.own_attention[p.member.thread].data),
          stretches((float*)w.stretches.data), queries((Word*)w.queries.data) {}

    static int64_t row_numbers(const ModelSpec& m) {
        return padded(largest_of_layers(m, [&](const AttentionSpec& layer) {
            return ((1 + m.gated_attention) * m.heads + 2 * layer.kv_heads) * layer.head_dim;
        }), 32);
    }

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        const int64_t rows = b.rows, dim = largest_of_layers(m, [](const AttentionSpec& layer) { return layer.head_dim; });
        const int64_t heads = m.heads * dim;
        tile(m, b, w, threads);
        const int64_t queries = std::min<int64_t>(rows * m.heads, (int64_t)FEW_ITEMS * threads * TILE_QUERIES);
        w.stretches.room<float>(queries * stretches_of(std::max(b.reach, b.source_reach)) * Softmax::numbers(dim));
        w.qkv.room<float>(rows * row_numbers(m));
        w.queries.room<Word>(rows * m.heads * largest_of_layers(m, [&](const AttentionSpec& layer) {
            return PageLayout(m, layer, kv).query_words;
        }));
        if (Widest(m).encoded) w.mixed.room<float>(rows * heads);
        for (int t = 0; t < threads; t++) w.own_attention[t].room<float>(Attention<kv>::numbers(m));
    }

    // The rows of each sequence in tiles, for each number of heads that are computed together.
    static void tile(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        w.tiles.clear(), w.answered_tiles.clear();
        for (int i = 0; i < m.layer_count; i++) {
            if (!m.layers[i].attends) continue;
            const int heads = heads_at_once(m, m.layers[i].attention);
            int rows = TILE_QUERIES / heads;
            if (const int items = b.sequences * (m.heads / heads); b.reach <= STRETCH && items && items < 2 * threads)
                rows = std::min(rows, std::max(ceiling(b.rows, b.sequences * ceiling(2 * threads, items)), ceiling(LEAST_QUERIES, heads)));
            w.tiles.add(heads, rows, b), w.answered_tiles.add(heads, rows, w.answered.batch);
        }
    }

    // Computes queries, and writes keys and values of all rows to the cache. fill: writes an input row; see `multiply_prepared`.
    template <class Fill>
    void enter(const AttentionSpec& layer, Fill fill, const Added& added) {
        RowStore store{qkv, qkv_width};
        store.added = added;
        p.multiply_prepared(layer.qkv, NORMED, p.b.rows, fill, store);
        if (layer.q_norm && m.norm_heads == ALL_HEADS) normalize_all(layer);
        spread(layer, PageLayout(m, layer, kv));
    }

    // Computes queries alone, of the residual stream after a norm.
    void ask(const AttentionSpec& layer, const NormSpec& norm) {
        p.multiply_normed(layer.qkv, norm, RowStore{qkv, qkv_width});
        each_head(layer, m.heads, [&](int row, int head, float* query) { keep_query(layer, row, head, query); });
    }

    // Calls f(row, head, numbers) for the first `heads` heads of the rows that were computed.
    template <class F>
    void each_head(const AttentionSpec& layer, int heads, F f) {
        p.member.each((int64_t)p.b.rows * heads, 8, [&](int64_t item) {
            const int row = int(item / heads), head = int(item % heads);
            f(row, head, qkv + row * qkv_width + head * layer.head_dim);
        });
    }

    // Writes one head of keys, or behind those one of values, to cache row `place`.
    void remember(const AttentionSpec& layer, const PageLayout& layout, Word* const* pages, int place, int head, float* x) const {
        const CacheRows<kv> rows{layout, layer.head_dim};
        if (head < layer.kv_heads) rows.put_key(pages, head, place, x);
        else rows.put_value(pages, head - layer.kv_heads, place, x);
    }

    // Moves what was computed of a row, where rows leave the pass.
    void move_row(const AttentionSpec& layer, int to, int from) {
        const int64_t words = (int64_t)m.heads * PageLayout(m, layer, kv).query_words;
        std::memcpy(queries + to * words, queries + from * words, sizeof(Word) * words);
        if (m.gated_attention) std::memcpy(gates(layer, to), gates(layer, from), sizeof(float) * width(layer));
    }

    void rows_left() { tiles = &answered_tiles; }

    // Computes attention over the cache.
    void mix(const LayerSpec& of) { attend(of.attention, p.b); }

    // Computes attention over the keys and values that each row of `b` sees.
    void attend(const AttentionSpec& layer, const BatchSpec& b) {
        Attention<kv> attention(m, b, layer, PageLayout(m, layer, kv), queries, own);
        const int together = heads_at_once(m, layer), parts = m.heads / together;
        const std::vector<QueryTile>& cut = tiles->of(together);
        const int64_t items = (int64_t)cut.size() * parts, count = stretches_of(b.reach);
        const bool windowed = layer.window && std::abs(layer.window) <= STRETCH;
        const bool apart = count > 1 && !windowed && p.member.threads > 1 && items < FEW_ITEMS * p.member.threads;
        // The tiles of a head of keys one after another, so that a thread reads its keys once.
        auto each_tile = [&](int64_t of, auto run) {
            p.member.each(items * of, 1, [&](int64_t item) {
                const QueryTile& tile = cut[item / of % cut.size()];
                run(tile.sequence, int(item / of / cut.size()), tile.first, tile.last, int(item % of));
            });
        };
        if (!apart)
            return each_tile(1, [&](int sequence, int part, int first, int last, int) {
                attention.run(sequence, part, first, last, [&](int row, int head, const float* values) { keep(layer, row, head, values); });
            });
        const int64_t numbers = Softmax::numbers(layer.head_dim);
        each_tile(count, [&](int sequence, int part, int first, int last, int number) {
            attention.run_stretch(sequence, part, first, last, number, [&](int row, int head, const Softmax& of) {
                std::memcpy(stretches + (((int64_t)row * m.heads + head) * count + number) * numbers, of.mixed, sizeof(float) * numbers);
            });
        });
        p.member.each((int64_t)b.rows * m.heads, 4, [&](int64_t item) {
            const int row = int(item / m.heads), head = int(item % m.heads);
            keep(layer, row, head, attention.join(row, head, stretches + item * count * numbers));
        });
    }

    // Adds the output to the residual stream.
    void leave(const LayerSpec& of, int number) {
        const AttentionSpec& layer = of.attention;
        add(layer, of.after_mixer, p.added_to(number, &LoraLayer::out, layer.out, ATTENDED, mixed, width(layer)));
    }

    void add(const AttentionSpec& layer, const NormSpec& norm, const Added& added = {}) {
        p.residual(norm, m.attention_factor, added, [&](const RowStore& store) {
            p.multiply_written(layer.out, ATTENDED, mixed, width(layer), store);
        });
    }

   private:
    // Numbers of all heads of a row.
    int64_t width(const AttentionSpec& layer) const { return (int64_t)m.heads * layer.head_dim; }

    void normalize_all(const AttentionSpec& layer) {
        p.member.each(p.b.rows, 1, [&](int64_t r) {
            float *q = qkv + r * qkv_width, *k = q + width(layer);
            normalize(m, q, layer.q_norm, width(layer), q);
            normalize(m, k, layer.k_norm, (int64_t)layer.kv_heads * layer.head_dim, k);
        });
    }

    // Converts queries to words, and writes keys and values to the cache.
    void spread(const AttentionSpec& layer, const PageLayout& layout) {
        each_head(layer, m.heads + (layer.shares ? 0 : 2 * layer.kv_heads), [&](int row, int head, float* x) {
            const int kv_head = head - m.heads;
            const int position = p.b.positions[row];
            if (m.clip != 0.0f) clip(layer, x);
            if (kv_head < 0) {
                turn(x, layer.q_norm, layer, head, position);
                if (layer.grows) scale(layer, x, m.query_scales[position]);
                return keep_query(layer, row, head, x);
            }
            if (kv_head < layer.kv_heads) turn(x, layer.k_norm, layer, kv_head, position);
            else normalize(m, x, layer.v_norm, layer.head_dim, x);
            remember(layer, layout, p.b.pages[p.sequence_of(row)], p.b.places[row], kv_head, x);
        });
    }

    void keep_query(const AttentionSpec& layer, int row, int head, const float* x) {
        const int64_t words = PageLayout(m, layer, kv).query_words;
        encode_query<kv>(x, layer.head_dim, queries + ((int64_t)row * m.heads + head) * words);
    }

    // In place: the norm of each head (Qwen3, Gemma 3), and the rotary embedding.
    void turn(float* head, NormSpec norm, const AttentionSpec& layer, int number, int position) const {
        if (norm.weight) norm.weight += (int64_t)number * layer.norm_stride;
        if (norm.bias) norm.bias += (int64_t)number * layer.norm_stride;
        if (m.norm_heads == BEFORE_ROTATION) normalize(m, head, norm, layer.head_dim, head);
        if (layer.rope >= 0) rotate(head, m.ropes[layer.rope], position);
        if (m.norm_heads == AFTER_ROTATION) normalize(m, head, norm, layer.head_dim, head);
    }

    void clip(const AttentionSpec& layer, float* x) const {
        for (int i = 0; i < layer.head_dim; i++) x[i] = std::min(std::max(x[i], -m.clip), m.clip);
    }

    void scale(const AttentionSpec& layer, float* x, float factor) const {
        for (int i = 0; i < layer.head_dim; i++) x[i] *= factor;
    }

    float* gates(const AttentionSpec& layer, int64_t row) const {
        return qkv + row * qkv_width + width(layer) + 2 * layer.kv_heads * layer.head_dim;
    }

    void keep(const AttentionSpec& layer, int row, int head, const float* values) {
        const Matrix& out = layer.out;
        const int dim = layer.head_dim;
        for (int i = 0; i < dim; i += LANES) {
            Floats v = load(values + i);
            if (m.gated_attention) v = v * logistic(load(gates(layer, row) + head * dim + i));
            if (is_float(out)) put_floats(out, p.inputs[ATTENDED] + row * input_stride(out), head * dim + i, width(layer), v);
            else store(mixed + ((int64_t)row * m.heads + head) * dim + i, v);
        }
    }
};

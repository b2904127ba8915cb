// What a row of attention sees, and its scores.
//
// A row sees its prefix and, in a draft tree, its ancestors after the prefix; together they are its keys 0 .. n - 1 in the
// order of their positions.
#pragma once

#include "kv_cache.hpp"

constexpr int TILE_QUERIES = 32;
constexpr float no_scales[TILE_QUERIES] = {};  // scales for products without scales

inline int ceiling(int n, int by) { return (n + by - 1) / by; }

// Query heads that are computed together: those of a head of keys, or where they do not fit, the largest equal part of them.
inline int heads_at_once(const ModelSpec& m, const AttentionSpec& layer) {
    const int group = m.heads / layer.kv_heads;
    int parts = 1;
    while (group % parts || group / parts > TILE_QUERIES) parts++;
    return group / parts;
}

// Writes a query as scores read it.
template <Kind kv>
inline void encode_query(const float* x, int64_t count, Word* words) {
    if constexpr (kv == INT8) {
        Floats maxima = floats(0.0f);
        for (int64_t i = 0; i < count; i += LANES) maxima = larger(maxima, absolute(load(x + i)));
        const WholeRow row = whole_row(x, count, largest(maxima), words);
        Word* facts = words + count / 2;
        std::memcpy(facts, &row.scale, 4), std::memcpy(facts + 1, &row.high, 4), std::memcpy(facts + 2, &row.low, 4);
    } else {
        encode<kv>(x, count, words);
    }
}

template <Kind kv>
struct AttentionRows {
    const ModelSpec& m;
    const BatchSpec& b;
    const AttentionSpec& layer;
    const PageLayout layout;
    const Word* all_queries;  // [rows][heads][words of a head]

    // The rows of a block see each other, except in layers where they see those before them alone.
    int prefix(int row) const { return layer.ordered ? std::min(b.prefix[row], b.positions[row] + 1) : b.prefix[row]; }

    int keys_of(int row) const { return prefix(row) + b.branch_from[row + 1] - b.branch_from[row]; }

    int start(int row) const {
        const int window = layer.window, from = b.positions[row] + 1 - window;
        if (window < 0) return b.positions[row] / -window * -window;
        return window && from > 0 ? from : 0;
    }

    const Word* query(int row, int head) const { return all_queries + ((int64_t)row * m.heads + head) * layout.query_words; }

    // Makes scores of products. Copied to where scores are stored: what is read through `this` is read again after each store.
    struct Scale {
        float factor, cap;
        Floats operator()(Floats v) const {
            v = v * floats(factor);
            return cap == 0.0f ? v : floats(cap) * hyperbolic_tangent(v / floats(cap));
        }
    };

    Scale scale() const { return {m.scale, m.score_cap}; }

    // The keys of a page from cache row `from` on, as a packed matrix with one output per key.
    Matrix keys_of_page(Word* const* pages, int kv_head, int64_t from) const {
        Matrix keys = {};
        keys.data = layout.keys(pages, kv_head, from / LANES);
        keys.units = (PAGE - from % PAGE) / LANES / BLOCKS, keys.steps = layout.key_words;
        return keys;
    }

    // Scores of queries with the keys of a page: calls score(query, key, sixteen scores). Meanwhile `next`, as many words, is
    // prefetched; null: nothing.
    template <class Score>
    void score_page(Word* const* pages, int kv_head, int64_t page, const Word* queries, int count, const Word* next, Score score) const {
        const Matrix keys = keys_of_page(pages, kv_head, page * PAGE);
        auto store = [score, scaled = scale()](int q, int64_t unit, Floats low, Floats high) {
            score(q, int(unit * BLOCKS * LANES), scaled(low));
            score(q, int(unit * BLOCKS * LANES + LANES), scaled(high));
        };
        Units whole(Share(0, keys.units));
        if (TILES || !next) return product<kv>(keys, queries, layout.query_words, no_scales, count, whole, store);
        const RowTiles tiles(count, tallest(kv));
        for (int64_t unit = 0; unit < keys.units; unit++)
            for (int t = 0; t < tiles.count; t++) {
                const TileOf tile{int(unit * tiles.count + t), int(keys.units * tiles.count), next, PAGE};
                pick_tile<kv, tallest(kv)>(tiles.height(t), keys, queries + tiles.first(t) * layout.query_words, layout.query_words, no_scales,
                                           tiles.first(t), unit, tile, store);
            }
    }

    // The scores of queries with one key, by the same product as in a page, so that they are bitwise the same.
    template <class Score>
    void score_key(Word* const* pages, int kv_head, int place, const Word* queries, int count, Score score) const {
        const int width = BLOCKS * LANES;
        Matrix keys = keys_of_page(pages, kv_head, place / width * width);
        keys.units = 1;
        alignas(64) float lanes[BLOCKS * LANES];
        Units whole(Share(0, 1));
        const Scale scaled = scale();
        product<kv>(keys, queries, layout.query_words, no_scales, count, whole, [&](int q, int64_t, Floats low, Floats high) {
            store(lanes, scaled(low));
            store(lanes + LANES, scaled(high));
            score(q, lanes[place % width]);
        });
    }
};

// The token mixer "attention" with one latent for the keys and values of all heads (multi-head latent attention, 2405.04434).
//
// The cache has a row's normed latent and its rotated key, once for all heads. Queries take the matrix that would make a head's
// keys of the latent (`absorb`), and the mix of latents is multiplied by the one that makes its values (`expand`), so that
// keys and values of heads are never made. That is the same function of the cache in a prompt and in a step: a row's bits
// do not depend on how many rows a pass has, as they would if keys were made of the latents where that is less arithmetic.
#pragma once

#include "attention_latent.hpp"
#include "mixer_attention.hpp"

template <Kind kv>
struct LatentMixer {
    Rows<kv>& p;
    const ModelSpec& m;
    const LatentSpec& shape;
    const Tiles*tiles, &answered_tiles;
    const int64_t first_width, query_width, head_dim;
    float *first, *expanded, *absorbed, *values, *scores, *head_scales, *mixes;
    Word *queries, *head_words;

    LatentMixer(Rows<kv>& rows, Workspace& w)
        : p(rows), m(rows.m), shape(m.latent), tiles(&w.tiles), answered_tiles(w.answered_tiles),
          first_width(first_numbers(m)), query_width(query_numbers(m)), head_dim(head_numbers(m)), first((float*)w.qkv.data),
          expanded((float*)w.latent_queries.data), absorbed((float*)w.absorbed.data), values((float*)w.mixed.data),
          scores((float*)w.own_attention[p.member.thread].data), head_scales((float*)w.head_scales.data),
          mixes((float*)w.latent_mixes.data), queries((Word*)w.queries.data), head_words((Word*)w.head_words.data) {}

    // A row of the first product: queries or their latent, then the latent and the rotary key.
    static int64_t first_numbers(const ModelSpec& m) {
        const LatentSpec& s = m.latent;
        return padded((s.query_rank ? s.query_rank : m.heads * (s.plain + s.rotated)) + s.rank + s.rotated, 32);
    }
    static int64_t query_numbers(const ModelSpec& m) { return padded(m.heads * (m.latent.plain + m.latent.rotated), 32); }

    static int64_t head_numbers(const ModelSpec& m) { return m.latent.rank + m.latent.rotated; }
    static int64_t query_words(const ModelSpec& m) { return head_numbers(m) / per_word(kv) * input_words(kv); }

    static int64_t score_length(const BatchSpec& b) { return padded(b.reach, PAGE) + LANES; }

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        const int64_t rows = b.rows, heads = rows * m.heads;
        AttentionMixer<kv>::tile(m, b, w, threads);
        w.qkv.room<float>(rows * first_numbers(m));
        if (m.latent.query_rank) w.latent_queries.room<float>(rows * query_numbers(m));
        w.absorbed.room<float>(heads * head_numbers(m));
        w.queries.room<Word>(heads * query_words(m));
        w.mixed.room<float>(heads * m.latent.value);
        int64_t words = 0, scales = 0;
        for (int i = 0; i < m.layer_count; i++)
            if (m.layers[i].attends)
                for (const Matrix* of : {&m.layers[i].attention.absorb, &m.layers[i].attention.expand})
                    words = std::max(words, input_stride(*of)), scales = std::max(scales, of->scale_words());
        w.head_words.room<Word>(heads * words);
        w.head_scales.room<float>(heads * scales);
        if (w.adapted.head_widths.input) w.latent_mixes.room<float>(heads * m.latent.rank);
        for (int t = 0; t < threads; t++)
            w.own_attention[t].room<float>(TILE_QUERIES * (score_length(b) + 2 * head_numbers(m)));
    }

    // Computes queries, and writes latents and keys of all rows to the cache.
    void enter(const LayerSpec& of, int number) {
        const AttentionSpec& layer = of.attention;
        RowStore store{first, first_width};
        store.added = p.added_to_normed(number, &LoraLayer::qkv, of.norm);
        p.multiply_normed(layer.qkv, of.norm, store);
        const float* of_heads = first;
        int64_t stride = first_width;
        if (shape.query_rank) {
            RowStore to{expanded, query_width};
            to.added = p.lora(number, &LoraLayer::query_up, shape.query_rank, [&](int64_t r, float* row) {
                normalize_with<false>(first + r * first_width, layer.q_norm, shape.query_rank, shape.eps, row);
            });
            p.multiply_prepared(layer.query_up, NORMED, p.b.rows, [&](int64_t r, Word* words, float* scales) {
                norm_and_encode(layer.query_up, layer.q_norm, first + r * first_width, words, scales);
            }, to);
            of_heads = expanded, stride = query_width;
        }
        const int64_t per_head = shape.plain + shape.rotated;
        p.member.each((int64_t)p.b.rows * (m.heads + 1), 4, [&](int64_t item) {
            const int row = int(item / (m.heads + 1)), head = int(item % (m.heads + 1));
            if (head == m.heads) return keep(layer, row);
            const Input to = input(layer.absorb, head);
            functions(layer.absorb).encode(layer.absorb, of_heads + row * stride + head * per_head, shape.plain,
                                           to.words + row * to.stride, to.scales + row * to.scale_stride);
        });
        const Added added = p.lora.of_heads(number, &LoraLayer::absorb, shape.plain, [&](int64_t place, float* to) {
            const int64_t head = place / p.b.rows, row = place % p.b.rows;
            std::memcpy(to, of_heads + row * stride + head * per_head, sizeof(float) * shape.plain);
        });
        multiply_heads(layer.absorb, absorbed, m.heads * head_dim, head_dim, added);
        p.member.each((int64_t)p.b.rows * m.heads, 4, [&](int64_t item) {
            const int64_t row = item / m.heads, head = item % m.heads;
            float *query = absorbed + item * head_dim, *turned = query + shape.rank;
            std::memcpy(turned, of_heads + row * stride + head * per_head + shape.plain, sizeof(float) * shape.rotated);
            if (layer.rope >= 0) rotate(turned, m.ropes[layer.rope], p.b.positions[row]);
            if (layer.grows)
                for (int64_t i = 0; i < head_dim; i++) query[i] *= m.query_scales[p.b.positions[row]];
            encode<kv>(query, head_dim, queries + item * query_words(m));
        });
    }

    // Moves what was computed of a row, where rows leave the pass.
    void move_row(int to, int from) {
        const int64_t words = (int64_t)m.heads * query_words(m);
        std::memcpy(queries + to * words, queries + from * words, sizeof(Word) * words);
    }

    void rows_left() { tiles = &answered_tiles; }

    // Computes attention over the cache, and the values of heads.
    void mix(const LayerSpec& of, int number) {
        const AttentionSpec& layer = of.attention;
        const bool kept = p.lora.changes_heads();
        const int64_t length = score_length(p.b);
        float* mixed = scores + TILE_QUERIES * length;
        Word* own_queries = (Word*)(mixed + TILE_QUERIES * head_dim);
        LatentAttention<kv> attention{{m, p.b, layer, PageLayout(m, layer, kv), queries}, own_queries, scores, mixed, length};
        const int together = heads_at_once(m, layer), parts = m.heads / together;
        const std::vector<QueryTile>& own = tiles->of(together);
        p.member.each((int64_t)own.size() * parts, 1, [&](int64_t item) {
            const QueryTile& tile = own[item / parts];
            attention.run(tile.sequence, int(item % parts), tile.first, tile.last, [&](int row, int head, const float* latent) {
                const Input to = input(layer.expand, head);
                functions(layer.expand).encode(layer.expand, latent, shape.rank, to.words + row * to.stride,
                                               to.scales + row * to.scale_stride);
                if (kept) std::memcpy(mixes + (head * (int64_t)p.b.rows + row) * shape.rank, latent, sizeof(float) * shape.rank);
            });
        });
        const Added added = p.lora.of_heads(number, &LoraLayer::expand, shape.rank, [&](int64_t place, float* to) {
            std::memcpy(to, mixes + place * shape.rank, sizeof(float) * shape.rank);
        });
        multiply_heads(layer.expand, values, m.heads * shape.value, shape.value, added);
    }

    // Adds the output to the residual stream.
    void leave(const LayerSpec& of, int number) {
        const int64_t count = m.heads * shape.value;
        const Added added = p.lora(number, &LoraLayer::out, count, [&](int64_t row, float* to) {
            std::memcpy(to, values + row * count, sizeof(float) * count);
        });
        p.residual(of.after_mixer, m.attention_factor, added, [&](const RowStore& store) {
            p.multiply_encoded(of.attention.out, ATTENDED, values, count, store);
        });
    }

   private:
    // The rows of a head's input: behind each other, head after head.
    Input input(const Matrix& w, int64_t head) const {
        const int64_t stride = input_stride(w), rows = p.b.rows;
        return {head_words + head * rows * stride, head_scales + head * rows * w.scale_words(), stride, w.scale_words()};
    }

    // Multiplies the rows of each head by its own units of the matrix, and adds what adapters add to them.
    void multiply_heads(const Matrix& w, float* to, int64_t row_stride, int64_t head_stride, const Added& added) const {
        const int64_t units = w.units / m.heads;
        Loop loop = p.member.begin(w.units, units_at_once(w, p.b.rows, p.member.threads));
        for (Share items(0, 0); loop.next(items);)
            for (int64_t at = items.first, end; at < items.last; at = end) {
                const int64_t head = at / units;
                end = std::min(items.last, (head + 1) * units);
                RowStore store{to + head * head_stride, row_stride};
                store.first_unit = head * units;
                store.added = added.from(head * p.b.rows);
                functions(w).rows(w, input(w, head), p.b.rows, Units(Share(at, end)), store);
            }
        p.member.end(loop);
    }

    void norm_and_encode(const Matrix& w, const NormSpec& norm, const float* x, Word* words, float* scales) const {
        float* row = p.own_row();
        normalize_with<false>(x, norm, shape.query_rank, shape.eps, row);
        functions(w).encode(w, row, shape.query_rank, words, scales);
    }

    // Writes a row's normed latent and its rotated key to the cache. A masked one has weight 0, and 0 times infinity is NaN.
    void keep(const AttentionSpec& layer, int row) {
        alignas(64) Word words[MAX_LATENT];
        const int position = p.b.positions[row], place = p.b.places[row];
        const int64_t queries_before = shape.query_rank ? shape.query_rank : m.heads * (shape.plain + shape.rotated);
        float *latent = first + row * first_width + queries_before, *key = latent + shape.rank;
        normalize_with<false>(latent, layer.k_norm, shape.rank, shape.eps, latent);
        if (layer.rope >= 0) rotate(key, m.ropes[layer.rope], position);
        for (int64_t i = 0; i < head_dim; i += LANES) put<kv>(words, i, finite(load(latent + i)));
        const PageLayout layout(m, layer, kv);
        Word* lane = layout.keys(p.b.pages[p.sequence_of(row)], 0, place / LANES) + place % LANES;
        for (int64_t k = 0; k < layout.key_words; k++) lane[k * LANES] = words[k];
    }
};

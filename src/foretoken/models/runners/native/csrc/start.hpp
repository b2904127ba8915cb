// The start of the residual stream: embeddings, the caller's features, those that are made from states of a target, or a product
// of embeddings and features.
#pragma once

#include "rows.hpp"

template <Kind kv>
struct Start {
    Rows<kv>& p;
    const ModelSpec& m;
    float* embedded;  // [rows][width]; the residual stream itself, unless a head reads features, too

    Start(Rows<kv>& rows, Workspace& w) : p(rows), m(rows.m), embedded(apart(m) ? (float*)w.embedded.data : rows.hidden) {}

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w) {
        if (apart(m)) w.embedded.room<float>(b.rows * padded(m.hidden, 32));
    }

    void run() {
        if (embeds(m, p.b)) embed();
        if (p.b.states || m.fuses_embedding) return fuse();
        if (!p.b.features) return;
        p.member.each(p.b.rows, 1, [&](int64_t r) {
            normalize(m, p.b.features + r * m.hidden, m.norm_first ? m.feature_norm : NormSpec{}, m.hidden, p.hidden + r * p.width);
        });
    }

    // A function that writes an input row of the first attention of an EAGLE-3 head: embedding and features, concatenated.
    auto joined(const Matrix& w, const NormSpec& norm) {
        return [this, &w, norm](int64_t r, Word* words, float* scales) {
            float* row = p.own_row();
            normalize(m, embedded + r * p.width, norm, m.hidden, row);
            normalize(m, p.hidden + r * p.width, m.norm_first ? NormSpec{} : m.feature_norm, m.hidden, row + m.hidden);
            functions(w).encode(w, row, 2 * m.hidden, words, scales);
        };
    }

   private:
    static bool apart(const ModelSpec& m) { return m.joined || m.fuses_embedding; }

    // Makes features from the states of several layers of a target, or the residual stream from embeddings and features.
    void fuse() {
        auto fill = [&](int64_t r, Word* words, float* scales) {
            float* row = p.own_row();
            const int first = m.fuses_embedding, layers = m.fused_layers - first;
            if (first) std::copy_n(embedded + r * p.width, m.fused_width, row);
            for (int i = 0; i < layers; i++) {
                const float* state = p.b.states ? p.b.states[r * layers + i] : p.b.features + r * m.fused_width;
                normalize(m, state, first ? m.feature_norm : NormSpec{}, m.fused_width, row + (first + i) * m.fused_width);
            }
            functions(m.fusion).encode(m.fusion, row, (int64_t)m.fused_layers * m.fused_width, words, scales);
        };
        p.multiply_prepared(m.fusion, NORMED, p.b.rows, fill, RowStore{p.hidden, p.width});
        if (!m.norm_first || !m.feature_norm) return;
        p.member.each(p.b.rows, 1, [&](int64_t r) { normalize(m, p.hidden + r * p.width, m.feature_norm, m.hidden, p.hidden + r * p.width); });
    }

    void embed() {
        const Floats scale = floats(m.embedding_scale);
        p.member.each(p.b.rows, 1, [&](int64_t r) {
            float* to = embedded + r * p.width;
            embedding(p.b.tokens[r], to);
            for (int64_t i = 0; i < p.width; i += LANES) store(to + i, (load(to + i) * scale));
            if (m.positions) {
                const float* learned = m.positions + (int64_t)p.b.positions[r] * m.hidden;
                for (int64_t i = 0; i < m.hidden; i++) to[i] += learned[i];
            }
            normalize(m, to, m.embedding_norm, m.hidden, to);
        });
    }

    // The embedding of a token. A tied or quantized one is unpacked from its packed matrix.
    void embedding(int token, float* to) {
        if (!m.embedding && is_grouped(m.table.kind)) {
            std::fill(to + m.hidden, to + p.width, 0.0f);
            return functions(m.table).unpack(m.table, token, m.hidden, to);
        }
        if ((m.embedding ? m.embedding_kind : m.table.kind) == F32) widen<F32>(token, to);
        else widen<BF16>(token, to);
    }

    template <Kind kind>
    void widen(int token, float* to) {
        const int64_t words = p.width / per_word(kind);
        const Word* row = m.embedding ? m.embedding + token * words : unpack(token, words);
        for (int64_t i = 0; i < p.width; i += LANES) store(to + i, get<kind>(row, i));
    }

    const Word* unpack(int token, int64_t words) {
        if (m.table.kind == PACKED) {
            unpack_row(m.table, token, std::min<int64_t>(m.table.steps, words), p.own);
            for (int64_t k = m.table.steps; k < words; k++) p.own[k] = 0;
            return p.own;
        }
        const Word* lane = m.table.data + token / LANES * m.table.steps * LANES + token % LANES;
        for (int64_t k = 0; k < words; k++) p.own[k] = k < m.table.steps ? lane[k * LANES] : 0;
        return p.own;
    }
};

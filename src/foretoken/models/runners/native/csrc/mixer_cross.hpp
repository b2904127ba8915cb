// Attention of a decoder's rows over the states of an encoder, whose keys and values are computed once.
#pragma once

#include "mixer_attention.hpp"

template <Kind kv>
struct CrossAttention {
    AttentionMixer<kv>& attention;
    Rows<kv>& p;
    const BatchSpec *sources, &answered_sources;

    CrossAttention(AttentionMixer<kv>& attention, Workspace& w)
        : attention(attention), p(attention.p), sources(&w.sources.batch), answered_sources(w.answered_sources.batch) {}

    static void reserve(const BatchSpec& b, Workspace& w) {
        w.sources.plan(b);
        w.answered_sources.plan(w.answered.batch);
    }

    void rows_left() { sources = &answered_sources; }

    // Adds attention over the sources to the residual stream.
    void run(const CrossSpec& cross) {
        attention.ask(cross.attention, cross.norm);
        attention.attend(cross.attention, *sources);
        attention.add(cross.attention, cross.after);
    }

    // Writes the keys and values of an encoder's states [rows][hidden] to the pages of a source.
    void remember(const CrossSpec& cross, const float* states, Word* const* pages) {
        const Matrix& w = cross.keys_values;
        p.multiply_prepared(w, NORMED, p.b.rows, [&](int64_t r, Word* words, float* scales) {
            p.normalize_row(w, states + r * p.m.hidden, NormSpec{}, words, scales);
        }, RowStore{attention.qkv, attention.qkv_width});
        const PageLayout layout(p.m, cross.attention, kv);
        attention.each_head(cross.attention, 2 * cross.attention.kv_heads, [&](int row, int head, float* numbers) {
            attention.remember(cross.attention, layout, pages, row, head, numbers);
        });
    }
};

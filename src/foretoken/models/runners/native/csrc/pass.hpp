// A forward pass of a decoder: one team of threads, and a loop for each of its phases.
//
// A layer has token mixers (mixer_*.hpp) and an MLP (mlp_*.hpp). They add to the residual stream, in this order:
//
//     enter      what needs all rows: a mixer's keys and values
//     mix        what needs only the rows that stay
//     leave      the output matrix, added to the residual stream
//
// The layers of an encoder-decoder's decoder have attention over the encoder's states between the two (mixer_cross.hpp). Layers
// with an input of their own add what they make of it after the MLP (layer_inputs.hpp).
//
// Rows without logits leave the pass behind the `enter` of the last layer that writes to the cache (last.hpp).
#pragma once

#include "layer_inputs.hpp"
#include "mixer_cross.hpp"
#include "mixer_latent.hpp"
#include "mixer_recurrent.hpp"
#include "mlp_dense.hpp"
#include "mlp_experts.hpp"
#include "start.hpp"

template <Kind kv>
struct Pass {
    const ModelSpec& m;
    const BatchSpec& answered;
    Rows<kv> p;
    Start<kv> start;
    AttentionMixer<kv> attention;
    CrossAttention<kv> cross;
    LatentMixer<kv> latent;
    RecurrentMixer<kv> recurrent;
    DenseMlp<kv> dense;
    ExpertMlp<kv> experts;
    OwnInputs<kv> inputs;
    const int leaving;  // the layer where rows without logits leave
    float* const unit_maxima;     // [outputs][units of the head]; see UnitMaxima
    int32_t* const unit_tokens;
    float* const ranked_logits;   // [outputs][padded vocab], where only the likeliest tokens are requested

    Pass(const ModelSpec& m, const BatchSpec& b, Workspace& w, Member& member)
        : m(m), answered(w.answered.batch), p(m, b, w, member), start(p, w), attention(p, w), cross(attention, w), latent(p, w),
          recurrent(p, w), dense(p, w), experts(p, w), inputs(p, w), leaving(last_writer(m)),
          unit_maxima((float*)w.unit_maxima.data), unit_tokens((int32_t*)w.unit_tokens.data), ranked_logits((float*)w.ranked_logits.data) {}

    // Allocates the memory of a pass, before its threads start.
    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        w.answered.plan(m, b);
        CrossAttention<kv>::reserve(b, w);
        Rows<kv>::reserve(m, b, w, threads);
        Start<kv>::reserve(m, b, w);
        if (m.latent.rank) LatentMixer<kv>::reserve(m, b, w, threads);
        else AttentionMixer<kv>::reserve(m, b, w, threads);
        RecurrentMixer<kv>::reserve(m, b, w, threads);
        DenseMlp<kv>::reserve(m, b, w);
        ExpertMlp<kv>::reserve(m, b, w, threads);
        OwnInputs<kv>::reserve(m, b, w);
        if (!b.likeliest && !b.ranked) return;
        w.unit_maxima.room<float>(b.output_count * m.head.units);
        w.unit_tokens.room<int32_t>(b.output_count * m.head.units);
        if (!b.logits && b.ranked) w.ranked_logits.room<float>(b.output_count * m.head.units * BLOCKS * LANES);
    }

    void run() {
        start.run();
        inputs.start();
        for (int number = 0; number < m.layer_count; number++) {
            const LayerSpec& layer = m.layers[number];
            tap(number);
            enter_mixers(layer, number);
            if (number == leaving && answered.rows < p.b.rows) drop_rows(layer);
            if (!p.b.rows) break;
            if (layer.parallel) enter_mlp(layer, number);
            leave_mixers(layer, number);
            if (layer.cross.attention.qkv.data) cross.run(layer.cross);
            if (!layer.parallel) enter_mlp(layer, number);
            leave_mlp(layer, number);
            inputs.run(layer.own_input, number);
            p.scale(layer.scalar);
        }
        tap(m.layer_count);
        tap(m.layer_count + 1);
        if (p.b.answers()) head();
    }

   private:
    void enter_mlp(const LayerSpec& layer, int number) {
        if (layer.mlp == EXPERTS) experts.enter(layer, number);
        else if (layer.mlp != NO_MLP) dense.enter(layer, number);
    }

    void leave_mlp(const LayerSpec& layer, int number) {
        if (layer.mlp == EXPERTS) {
            experts.leave(layer, number);
            if (layer.after_beside) dense.join(layer, number);
        } else if (layer.mlp != NO_MLP) {
            dense.leave(layer, number);
        }
    }

    // All mixers of a layer read the residual stream before one of them adds to it.
    void enter_mixers(const LayerSpec& layer, int number) {
        if (layer.recurs) recurrent.enter(layer, number);
        if (!layer.attends) return;
        if (m.latent.rank) return latent.enter(layer, number);
        const Matrix& qkv = layer.attention.qkv;
        const Added added = p.added_to_normed(number, &LoraLayer::qkv, layer.norm);
        if (m.joined && number == 0) attention.enter(layer.attention, start.joined(qkv, layer.norm), added);
        else attention.enter(layer.attention, p.normed(qkv, layer.norm), added);
    }

    void leave_mixers(const LayerSpec& layer, int number) {
        if (layer.attends && m.latent.rank) latent.mix(layer, number), latent.leave(layer, number);
        else if (layer.attends) attention.mix(layer), attention.leave(layer, number);
        if (layer.recurs) recurrent.mix(layer), recurrent.leave(layer, number);
    }

    // Removes the rows without logits; the others move up, in order.
    void drop_rows(const LayerSpec& layer) {
        p.member.each(1, 1, [&](int64_t) {
            for (int i = 0; i < answered.rows; i++) {
                const int row = p.b.outputs[i];
                if (row == i) continue;
                std::memcpy(p.hidden + i * p.width, p.hidden + row * p.width, sizeof(float) * p.width);
                if (layer.attends) m.latent.rank ? latent.move_row(i, row) : attention.move_row(layer.attention, i, row);
                if (layer.recurs) recurrent.move_row(i, row);
                inputs.move_row(i, row);
            }
        });
        p.b = answered;
        attention.rows_left(), latent.rows_left(), cross.rows_left(), p.lora.rows_left();
    }

    void tap(int number) {
        for (int t = 0; t < p.b.tap_count; t++) {
            if (p.b.tap_layers[t] != number) continue;
            p.member.each(p.b.rows, 1, [&](int64_t i) {
                const float* row = p.hidden + i * p.width;
                float* to = p.b.taps[t] + i * m.hidden;
                if (number == m.layer_count) normalize(m, row, m.norm, m.hidden, to);
                else std::memcpy(to, row, sizeof(float) * m.hidden);
            });
        }
    }

    void head() {
        const BatchSpec& b = p.b;
        const bool finds = b.likeliest || b.ranked;
        const int64_t stride = m.head.units * BLOCKS * LANES;
        float* logits = !b.logits && b.ranked ? ranked_logits : b.logits;
        const UnitMaxima maxima{unit_maxima, unit_tokens, m.head.units, m.vocab};
        RowStore store{logits, stride, false, m.logit_scale, m.logit_cap};
        store.maxima = finds ? &maxima : nullptr;
        p.multiply_prepared(m.head, NORMED, b.output_count, [&](int64_t i, Word* words, float* scales) {
            p.normalize_row(m.head, p.hidden + b.outputs[i] * p.width, m.norm, words, scales);
        }, store);
        p.member.each(finds ? b.output_count : 0, 1, [&](int64_t i) {
            if (b.likeliest) b.likeliest[i] = maxima.token(i);
            if (b.ranked) maxima.rank(i, logits + i * stride, b.ranks, b.ranked + i * b.ranks);
        });
    }
};

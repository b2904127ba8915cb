// Inputs of single layers beside the residual stream (Gemma 3n and 4): every token has an embedding for every layer.
//
// They are computed for all layers at the start of a pass: (norm(projection) + embedding) / sqrt(2).
#pragma once

#include "rows.hpp"

template <Kind kv>
struct OwnInputs {
    Rows<kv>& p;
    const LayerInputsSpec& s;
    const int64_t stride;     // numbers of a row of `inputs`
    float *inputs, *gated;    // [rows][layers][width]; the product of the gate [rows][width padded]

    OwnInputs(Rows<kv>& rows, Workspace& w)
        : p(rows), s(rows.m.layer_inputs), stride(s.stride()), inputs((float*)w.layer_inputs.data),
          gated((float*)w.gated_inputs.data) {}

    static int64_t gated_width(const LayerInputsSpec& s) { return padded(s.width, BLOCKS * LANES); }

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w) {
        if (!m.layer_inputs.width) return;
        w.layer_inputs.room<float>(b.rows * m.layer_inputs.stride());
        w.gated_inputs.room<float>(b.rows * gated_width(m.layer_inputs));
    }

    // Computes the inputs of all layers from the scaled embeddings, which are the residual stream at the start.
    void start() {
        if (!s.width) return;
        RowStore store_all{inputs, stride, false, s.projection_scale};
        store_all.added = p.added_to_normed(0, &LoraLayer::input_projection, NormSpec{});
        p.multiply_normed(s.projection, NormSpec{}, store_all);
        const int layers = p.m.layer_count;
        const Floats scale = floats(s.table_scale), half = floats(std::sqrt(0.5f));
        p.member.each((int64_t)p.b.rows * layers, 8, [&](int64_t item) {
            const int64_t row = item / layers, at = item % layers * s.width;
            const Kind kind = (Kind)p.m.embedding_kind;
            const Word* embedding = s.table + p.b.tokens[row] * (stride / per_word(kind));
            float* to = inputs + row * stride + at;
            normalize(p.m, to, s.norm, s.width, to);
            for (int i = 0; i < s.width; i += LANES)
                store(to + i, (load(to + i) + (kind == F32 ? get<F32>(embedding, at + i) : get<BF16>(embedding, at + i)) * scale) * half);
        });
    }

    // Adds what a layer makes of its input to the residual stream.
    void run(const LayerInputSpec& layer, int number) {
        if (!layer.gate.data) return;
        const int64_t width = gated_width(s);
        RowStore store_gate{gated, width};
        store_gate.added = p.added_to_normed(number, &LoraLayer::input_gate, NormSpec{});
        p.multiply_normed(layer.gate, NormSpec{}, store_gate);
        auto gate = [&](int64_t r, float* to) {
            const float *own = gated + r * width, *input = inputs + r * stride + (int64_t)number * s.width;
            for (int i = 0; i < s.width; i += LANES) store(to + i, activate(load(own + i), p.m.activation) * load(input + i));
        };
        const Added added = p.lora(number, &LoraLayer::input_up, s.width, gate);
        auto fill = [&](int64_t r, Word* words, float* scales) {
            float* row = p.own_row();
            gate(r, row);
            functions(layer.up).encode(layer.up, row, s.width, words, scales);
        };
        p.residual(layer.norm, 1.0f, added, [&](const RowStore& store) {
            p.multiply_prepared(layer.up, ACTIVATED, p.b.rows, fill, store);
        });
    }

    // Moves the inputs of a row, where rows leave the pass.
    void move_row(int to, int from) {
        if (s.width) std::memcpy(inputs + to * stride, inputs + from * stride, sizeof(float) * stride);
    }
};

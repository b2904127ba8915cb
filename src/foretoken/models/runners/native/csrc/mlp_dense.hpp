// The MLP of a dense layer: down(activation(gate) * up), or down(activation(up)).
#pragma once

#include "rows.hpp"

template <Kind kv>
struct DenseMlp {
    Rows<kv>& p;
    float *inner, *aside;

    DenseMlp(Rows<kv>& rows, Workspace& w) : p(rows), inner((float*)w.inner.data), aside((float*)w.aside.data) {}

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w) {
        int32_t largest = 0;
        for (int i = 0; i < m.layer_count; i++) largest = std::max(largest, m.layers[i].dense.inner);
        for (int i = 0; i < m.layer_count; i++)
            if (m.layers[i].after_beside) w.aside.room<float>(b.rows * padded(m.hidden, 32));
        if (Widest(m).encoded) w.inner.room<float>(b.rows * largest);
    }

    // Computes the input of `down` from the residual stream.
    void enter(const LayerSpec& layer, int number) { enter(layer.dense, layer.mlp_norm, number); }

    void enter(const MlpSpec& mlp, const NormSpec& norm, int number) {
        const Added added = p.added_to_normed(number, &LoraLayer::up, norm);
        const bool gated = mlp.gated;
        ActivatedStore store{mlp.down, p.inputs[ACTIVATED], inner, mlp.inner, p.m.activation, gated};
        store.added = added;
        store.gate_factor = p.m.gate_factor;
        p.multiply_normed(mlp.up, norm, store);
    }

    // Adds the output to the residual stream.
    void leave(const LayerSpec& layer, int number) {
        const MlpSpec& mlp = layer.dense;
        const Added added = added_to_down(mlp, number);
        p.residual(layer.after_mlp, p.m.mlp_factor, added, [&](const RowStore& store) { multiply_down(mlp, store); });
    }

    // Adds the output of an MLP beside experts to theirs, which is in `branch`, each after its norm, and both to the residual
    // stream.
    void join(const LayerSpec& layer, int number) {
        enter(layer.dense, layer.beside_norm, number);
        RowStore store{aside, p.width};
        store.added = added_to_down(layer.dense, number);
        multiply_down(layer.dense, store);
        p.member.each(p.b.rows, 1, [&](int64_t r) {
            float *to = p.branch + r * p.width, *own = aside + r * p.width;
            normalize(p.m, to, layer.after_experts, p.m.hidden, to);
            normalize(p.m, own, layer.after_beside, p.m.hidden, own);
            for (int64_t i = 0; i < p.m.hidden; i++) to[i] += own[i];
        });
        p.add_branch(layer.after_mlp, p.m.mlp_factor);
    }

   private:
    Added added_to_down(const MlpSpec& mlp, int number) {
        return p.added_to(number, &LoraLayer::down, mlp.down, ACTIVATED, inner, mlp.inner);
    }

    void multiply_down(const MlpSpec& mlp, const RowStore& store) {
        p.multiply_written(mlp.down, ACTIVATED, inner, mlp.inner, store);
    }
};

// The MLP of a dense layer: down(activation(gate) * up), or down(activation(up)).
#pragma once

#include "rows.hpp"

template <Kind kv>
struct DenseMlp {
    Rows<kv>& p;
    const int64_t inner_width;
    float* inner;

    DenseMlp(Rows<kv>& rows, Workspace& w) : p(rows), inner_width(padded(rows.m.inner, LANES)), inner((float*)w.inner.data) {}

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w) {
        if (Widest(m).encoded) w.inner.room<float>(b.rows * padded(m.inner, LANES));
    }

    // Computes the input of `down` from the residual stream.
    void enter(const LayerSpec& layer, int number) {
        const MlpSpec& mlp = layer.dense;
        const Added added = p.added_to_normed(number, &LoraLayer::up, layer.mlp_norm);
        p.clear_tails(mlp.down, ACTIVATED, inner_width);  // before `normed`, which the product must follow at once
        const Input x = p.normed(mlp.up, layer.mlp_norm);
        Loop units = p.member.begin(mlp.up.units, units_at_once(mlp.up, p.b.rows, p.member.threads));
        const bool gated = layer.mlp == GATED;
        ActivatedStore store{mlp.down, p.inputs[ACTIVATED], inner, inner_width, p.m.activation, gated};
        store.added = added;
        store.gate_factor = p.m.gate_factor;
        functions(mlp.up).activated(mlp.up, x, p.b.rows, units, store);
        p.member.end(units);
    }

    // Adds the output to the residual stream.
    void leave(const LayerSpec& layer, int number) {
        const Matrix& down = layer.dense.down;
        const Added added = p.added_to(number, &LoraLayer::down, down, ACTIVATED, inner, inner_width);
        const Input x = is_float(down) ? p.input(down, ACTIVATED) : p.encoded(down, ACTIVATED, inner, inner_width);
        p.residual(down, x, layer.after_mlp, p.m.mlp_factor, added);
    }
};

// One row's change of a recurrent state, for a few columns of one head.
//
// A state is a matrix [key_dim][value_dim] for each head. Its columns do not depend on each other, so it is stored and computed
// in strips of V vectors of columns, each [key_dim][V * 16], which stay in the first-level cache for all rows of a sequence.
// Every number is computed by the same operations in the same order, whichever rows share the pass.
#pragma once

#include "simd.hpp"

constexpr int PARTS = 4;  // sums that are independent of each other, so that additions overlap

// What one row does to the state of a head.
struct StateRow {
    const float *query, *key, *value;  // [key_dim], [key_dim], and the strip's columns of the value
    float decay;                       // the state is multiplied by it
    float beta;                        // strength of the change
    float* out;                        // the strip's columns of state . query; null: not needed
};

// Gated delta rule (2412.06464): S' = decay S + k (beta (v - decay S' k))^T, out = S' q. Without `corrects`, the part of the
// value that the state already predicts is not subtracted (Mamba-2, 2405.21060): S' = decay S + k (beta v)^T.
template <int V, bool corrects>
inline void change_state(const float* from, float* to, int64_t key_dim, const StateRow& row) {
    constexpr int64_t width = V * LANES;
    const Floats decay = floats(row.decay), beta = floats(row.beta);
    Floats change[V];
    for (int v = 0; v < V; v++) change[v] = load(row.value + v * LANES);
    if constexpr (corrects) {
        Floats sums[PARTS][V];
        for (auto& part : sums)
            for (Floats& sum : part) sum = floats(0.0f);
        for (int64_t i = 0; i < key_dim; i += PARTS)
            for (int part = 0; part < PARTS; part++) {
                const Floats key = floats(row.key[i + part]);
                for (int v = 0; v < V; v++)
                    sums[part][v] = multiply_add(key, load(from + (i + part) * width + v * LANES), sums[part][v]);
            }
        for (int v = 0; v < V; v++)
            change[v] = change[v] - ((sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v])) * decay;
    }
    Floats outs[PARTS][V];
    for (int v = 0; v < V; v++) change[v] = change[v] * beta;
    for (auto& part : outs)
        for (Floats& out : part) out = floats(0.0f);
    for (int64_t i = 0; i < key_dim; i += PARTS)
        for (int part = 0; part < PARTS; part++) {
            const Floats key = floats(row.key[i + part]), query = floats(row.query[i + part]);
            for (int v = 0; v < V; v++) {
                const int64_t at = (i + part) * width + v * LANES;
                const Floats state = multiply_add(key, change[v], load(from + at) * decay);
                if (to) store(to + at, state);
                if (row.out) outs[part][v] = multiply_add(query, state, outs[part][v]);
            }
        }
    if (row.out)
        for (int v = 0; v < V; v++)
            store(row.out + v * LANES, (outs[0][v] + outs[1][v]) + (outs[2][v] + outs[3][v]));
}

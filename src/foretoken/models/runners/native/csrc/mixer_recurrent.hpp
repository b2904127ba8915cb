// Recurrent token mixers: gated DeltaNet, Mamba-2 and short convolutions. models/state/replay.py has the order of rows.
//
// A row of the projections is [gates of heads | channels of the convolution | gate of the output]. All but the last are the
// row's inputs to the state, which are kept in a log until it is certain that the row stays.
#pragma once

#include "recurrence.hpp"
#include "rows.hpp"

constexpr int MAX_TAPS = 8;  // rows that a convolution reads; models/families/schema.py has the same number

template <Kind kv>
struct RecurrentMixer {
    Rows<kv>& p;
    const ModelSpec& m;
    const StateSpec& shape;
    const ReplaySpec* replay;
    const int64_t row_width, prepared_width, out_width;
    float *rows, *prepared, *mixed, *strips;

    RecurrentMixer(Rows<kv>& rows_, Workspace& w)
        : p(rows_), m(rows_.m), shape(m.state), replay(rows_.b.replay), row_width(row_numbers(m)),
          prepared_width(prepared_numbers(m)), out_width(shape.out), rows((float*)w.recurrent.data),
          prepared((float*)w.prepared.data), mixed((float*)w.recurrent_mixed.data),
          strips(w.own_states.empty() ? nullptr : (float*)w.own_states[p.member.thread].data) {}

    static int64_t row_numbers(const ModelSpec& m) { return padded(m.state.inputs + m.state.out, 32); }
    // A step's gates (decay and beta of each head), then its channels.
    static int64_t prepared_numbers(const ModelSpec& m) { return m.state.inputs; }
    static int vectors(const ModelSpec& m) { return m.state.value_dim % (2 * LANES) ? 1 : 2; }
    static int64_t strip_numbers(const ModelSpec& m) { return (int64_t)m.state.key_dim * vectors(m) * LANES; }

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        if (!b.replay) return;
        w.recurrent.room<float>(b.rows * row_numbers(m));
        w.prepared.room<float>(b.replay->steps * prepared_numbers(m));
        w.recurrent_mixed.room<float>(b.rows * m.state.out);
        if ((int)w.own_states.size() < threads) w.own_states.resize(threads);
        for (int t = 0; t < threads; t++) w.own_states[t].room<float>((b.replay->copies + 1) * strip_numbers(m));
    }

    // Computes what the state adds to each row, and changes the states.
    void enter(const LayerSpec& of, int number) {
        const RecurrentSpec& layer = of.recurrent;
        project(layer.into, of.norm, rows + gates_width(), number, &LoraLayer::recurrent_in);
        if (of.recurs != CONVOLUTION) project(layer.gates, of.norm, rows, number, &LoraLayer::recurrent_gates);
        prepare(of.recurs, layer);
        if (of.recurs != CONVOLUTION) recur(of.recurs, layer);
    }

    // Moves what was computed of a row, where rows leave the pass.
    void move_row(int to, int from) {
        std::memcpy(rows + to * row_width, rows + from * row_width, sizeof(float) * row_width);
        std::memcpy(mixed + to * out_width, mixed + from * out_width, sizeof(float) * out_width);
    }

    // Norms and gates what the state adds.
    void mix(const LayerSpec& of) {
        const RecurrentSpec& layer = of.recurrent;
        const int64_t groups = of.recurs == DELTA ? shape.value_heads : of.recurs == MAMBA ? shape.key_heads : 1;
        const int64_t count = out_width / groups;
        p.member.each(p.b.rows * groups, 4, [&](int64_t item) {
            const int64_t row = item / groups, at = item % groups * count;
            float* x = mixed + row * out_width + at;
            const float* gate = rows + row * row_width + shape.inputs + at;
            const NormSpec norm{layer.norm ? layer.norm + (of.recurs == MAMBA ? at : 0) : nullptr, nullptr};
            if (shape.norm_first) normalize(m, x, norm, count, x);
            for (int64_t i = 0; i < count; i += LANES) {
                const Floats g = load(gate + i);
                store(x + i, load(x + i) * (of.recurs == CONVOLUTION ? g : silu(g * floats(shape.gate_factor))));
            }
            if (!shape.norm_first) normalize(m, x, norm, count, x);
            for (int64_t i = 0; i < count; i += LANES) {
                const Floats v = load(x + i);
                if (is_float(layer.out)) put_floats(layer.out, p.inputs[ATTENDED] + row * input_stride(layer.out), at + i, out_width, v);
            }
        });
    }

    // Adds the output to the residual stream.
    void leave(const LayerSpec& of, int number) {
        const Matrix& out = of.recurrent.out;
        const Added added = p.added_to(number, &LoraLayer::recurrent_out, out, ATTENDED, mixed, out_width);
        p.residual(of.after_mixer, m.recurrent_factor, added, [&](const RowStore& store) {
            p.multiply_written(out, ATTENDED, mixed, out_width, store);
        });
    }

   private:
    // Multiplies the residual stream after a norm, with what adapters add.
    void project(const Matrix& w, const NormSpec& norm, float* to, int number, LoraSpec LoraLayer::*product) {
        RowStore store{to, row_width};
        store.added = p.added_to_normed(number, product, norm);
        p.multiply_normed(w, norm, store);
    }

    // The inputs of an encoded row of a sequence; null before the first row.
    const float* inputs_of(const RecurrentSpec& layer, int sequence, int32_t code) const {
        if (code >= 0) return rows + code * row_width;
        if (code == INT32_MIN) return nullptr;
        const int64_t place = (int64_t)layer.state_layer * replay->log_rows[sequence] + ~code;
        return replay->logs[sequence] + place * shape.inputs;
    }

    int sequence_of(int step) const {
        const int32_t* from = replay->first_step;
        return int(std::upper_bound(from, from + p.b.sequences + 1, step) - from) - 1;
    }

    // Applies the convolution of all steps, and copies the inputs that are kept.
    void prepare(int mixer, const RecurrentSpec& layer) {
        const int64_t heads = mixer == CONVOLUTION ? 1 : 2 * shape.key_heads + shape.value_heads;
        const int64_t items = replay->steps * heads;
        p.member.each(items + replay->moves, 4, [&](int64_t item) {
            if (item >= items) return keep_inputs(layer, int(item - items));
            const int step = int(item / heads), head = int(item % heads), sequence = sequence_of(step);
            const float* taps[MAX_TAPS];
            const int32_t* codes = replay->inputs + (int64_t)step * (shape.window + 1);
            for (int tap = 0; tap <= shape.window; tap++) taps[tap] = inputs_of(layer, sequence, codes[tap]);
            if (mixer != CONVOLUTION) prepare_head(mixer, layer, taps, head, prepared + step * prepared_width);
            else if (codes[0] >= 0) convolve_gated(layer, taps, mixed + codes[0] * out_width);
        });
    }

    void keep_inputs(const RecurrentSpec& layer, int move) {
        const int64_t stride = (int64_t)replay->moved_stride[move] * shape.inputs;
        std::memcpy(replay->moved_to[move] + layer.state_layer * stride, inputs_of(layer, replay->moved_of[move], replay->moved[move]),
                    sizeof(float) * shape.inputs);
    }

    int64_t gates_width() const { return padded(shape.gates, 32); }

    // A head of queries, keys or values, and the gates of a head of values.
    void prepare_head(int mixer, const RecurrentSpec& layer, const float* const* taps, int head, float* to) const {
        const bool keyed = head < 2 * shape.key_heads;
        const int64_t count = keyed ? shape.key_dim : shape.value_dim, value_head = head - 2 * shape.key_heads;
        const int64_t at = keyed ? head * count : 2 * shape.key_heads * shape.key_dim + value_head * count;
        convolve(layer, taps, at, count, to + gates_width());
        if (keyed && mixer == MAMBA) return;
        if (keyed)
            return unit_length(to + gates_width() + at, count, head < shape.key_heads ? 1.0f / std::sqrt((float)count) : 1.0f);
        const float* gates = taps[0];  // of DeltaNet: beta and the step of each head; of Mamba-2 the step alone
        const float x = gates[mixer == MAMBA ? value_head : shape.value_heads + value_head] * shape.step_factor + layer.step_bias[value_head];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        to[value_head] = std::exp(layer.decay[value_head] * softplus);
        to[shape.value_heads + value_head] = mixer == MAMBA ? softplus : 1.0f / (1.0f + std::exp(-gates[value_head]));
    }

    void convolve(const RecurrentSpec& layer, const float* const* taps, int64_t at, int64_t count, float* to) const {
        for (int64_t i = at; i < at + count; i += LANES) {
            Floats sum = layer.conv_bias ? load(layer.conv_bias + i) : floats(0.0f);
            for (int tap = 0; tap <= shape.window; tap++)
                if (taps[tap])
                    sum = multiply_add(load(layer.conv + (int64_t)tap * shape.channels + i), load(taps[tap] + gates_width() + i), sum);
            store(to + i, silu(sum));
        }
    }

    // The convolution of the product of two halves of the inputs.
    void convolve_gated(const RecurrentSpec& layer, const float* const* taps, float* to) const {
        for (int64_t i = 0; i < shape.channels; i += LANES) {
            Floats sum = layer.conv_bias ? load(layer.conv_bias + i) : floats(0.0f);
            for (int tap = 0; tap <= shape.window; tap++)
                if (taps[tap])
                    sum = multiply_add(load(layer.conv + (int64_t)tap * shape.channels + i),
                                       load(taps[tap] + i) * load(taps[tap] + shape.channels + i), sum);
            store(to + i, sum);
        }
    }

    // x / |x| times a factor.
    static void unit_length(float* x, int64_t count, float factor) {
        Floats sum = floats(0.0f);
        for (int64_t i = 0; i < count; i += LANES) sum = multiply_add(load(x + i), load(x + i), sum);
        const Floats scale = floats(factor / std::sqrt(sum_of(sum) + 1e-6f));
        for (int64_t i = 0; i < count; i += LANES) store(x + i, load(x + i) * scale);
    }

    // Runs the steps of all sequences, a head of values at a time.
    void recur(int mixer, const RecurrentSpec& layer) {
        p.member.each((int64_t)p.b.sequences * shape.value_heads, 1, [&](int64_t item) {
            const int sequence = int(item / shape.value_heads), head = int(item % shape.value_heads);
            if (mixer == DELTA) vectors(m) == 2 ? recur_head<2, true>(layer, sequence, head) : recur_head<1, true>(layer, sequence, head);
            else vectors(m) == 2 ? recur_head<2, false>(layer, sequence, head) : recur_head<1, false>(layer, sequence, head);
        });
    }

    template <int V, bool corrects>
    void recur_head(const RecurrentSpec& layer, int sequence, int head) {
        const int64_t strip = strip_numbers(m), all = (int64_t)shape.value_heads * shape.value_dim * shape.key_dim;
        const int64_t queries = gates_width() + (int64_t)head / (shape.value_heads / shape.key_heads) * shape.key_dim;
        const int64_t keys = queries + shape.key_heads * shape.key_dim;
        const int64_t values = gates_width() + 2 * shape.key_heads * shape.key_dim + (int64_t)head * shape.value_dim;
        for (int column = 0; column < shape.value_dim; column += V * LANES) {
            const int64_t at = layer.state_layer * all + ((int64_t)head * shape.value_dim + column) * shape.key_dim;
            float* own = replay->states[sequence] + at;
            for (int step = replay->first_step[sequence]; step < replay->first_step[sequence + 1]; step++) {
                const float* x = prepared + step * prepared_width;
                const int32_t row = replay->inputs[(int64_t)step * (shape.window + 1)];
                const int32_t source = replay->sources[step], to = replay->targets[step];
                // The first strip stays zero.
                const float* from = source == OWN_STATE ? own : strips + (source == ZERO_STATE ? 0 : source + 1) * strip;
                float* target = to == OWN_STATE ? own : to == NO_STATE ? nullptr : strips + (to + 1) * strip;
                const StateRow change{x + queries, x + keys, x + values + column, x[head], x[shape.value_heads + head],
                                      row < 0 ? nullptr : mixed + row * out_width + (int64_t)head * shape.value_dim + column};
                change_state<V, corrects>(from, target, shape.key_dim, change);
                if (change.out && layer.skip)
                    for (int i = 0; i < V * LANES; i += LANES)
                        store(change.out + i,
                              multiply_add(floats(layer.skip[head]), load(change.value + i), load(change.out + i)));
                if (replay->saves[step] >= 0)
                    std::memcpy(replay->snapshots[replay->saves[step]] + at, own, sizeof(float) * strip);
            }
        }
    }
};

// Checks of what Python passes, once a pass and before anything is read or written: a token, cache row, page, position or
// adapter that is out of range is refused, so that a wrong plan reads no foreign memory and changes no other sequence's cache.
//
// A pass is checked in time that grows with its rows and the branches of its trees. The contents of tables of pointers are
// trusted: the pages of a sequence, the tensors of a model.
#pragma once

#include "specs.hpp"

// Whether the library has the functions of a kind of matrices.
inline bool linked(int kind) { return kind >= 0 && kind < KIND_COUNT && FUNCTIONS[kind].rows; }

// Checks that the kernels of a model's matrices are linked.
inline void validate(const ModelSpec& m) {
    auto check = [](const Matrix& w, const char* part, int layer) {
        if (w.data && !linked(w.kind)) refuse("%s %d has weights of kind %d, whose kernels are not linked", part, layer, w.kind);
    };
    for (int i = 0; i < m.layer_count; i++) {
        each_matrix(m.layers[i], [&](const Matrix& w) { check(w, "layer", i); });
        const int router = m.layers[i].experts.router.weights.kind;
        if (m.layers[i].mlp == EXPERTS && router != F32 && router != BF16) refuse("the router of layer %d has weights of kind %d", i, router);
    }
    check(m.head, "the vocabulary head behind layer", m.layer_count);
    check(m.table, "the embedding before layer", 0);
    check(m.layer_inputs.projection, "the inputs of layers from", 0);
    check(m.fusion, "the features before layer", 0);
    if (m.embedding_kind != F32 && m.embedding_kind != BF16) refuse("an embedding of kind %d", m.embedding_kind);
}

// Checks a list of bounds: count + 1 numbers that ascend from 0 to `last`.
inline void check_bounds(const int32_t* bounds, int count, int last, const char* name) {
    if (!bounds || bounds[0] != 0 || bounds[count] != last) refuse("%s must lead from 0 to %d", name, last);
    for (int i = 0; i < count; i++)
        if (bounds[i] > bounds[i + 1]) refuse("%s descends from %d to %d", name, bounds[i], bounds[i + 1]);
}

// Which numbers of a plan a model uses.
struct PlanUse {
    bool tokens;               // embeddings are read
    bool learned;              // learned positions are added to them
    bool cache = false;        // rows see keys and values
    bool writes = false;       // and write their own
    bool table = false;        // positions are looked up
    bool states = false;       // there are recurrent layers
    bool sources = false;      // rows see the states of an encoder

    PlanUse(const ModelSpec& m, const BatchSpec& b)
        : tokens(embeds(m, b) || (m.layer_inputs.width && m.layer_count)), learned(m.positions && embeds(m, b)) {
        for (int i = 0; i < m.layer_count; i++) {
            const LayerSpec& layer = m.layers[i];
            states |= layer.recurs != NO_RECURRENCE, sources |= layer.cross.attention.qkv.data != nullptr;
            if (!layer.attends) continue;
            cache = true, writes |= !layer.attention.shares;
            table |= layer.attention.rope >= 0 || layer.attention.grows;
        }
    }
};

class PassCheck {
   public:
    PassCheck(const ModelSpec& m, const BatchSpec& b) : m(m), b(b), use(m, b) {}

    // further: null, or how many rows each sequence has beside those of the pass, behind its last one.
    void run(int threads, const int32_t* further = nullptr) const {
        if (threads < 1) refuse("%d threads; at least one is expected", threads);
        if (b.rows < 0 || b.sequences < 0 || b.reach < 0) refuse("%d rows of %d sequences that reach %d", b.rows, b.sequences, b.reach);
        if (m.fuses_embedding && !b.featured()) refuse("a pass without the features that its model reads");
        if (use.tokens && !b.tokens) refuse("a pass with neither tokens nor features");
        if (m.layer_count) {
            check_bounds(b.sequence_from, b.sequences, b.rows, "sequence_from");
            check_bounds(b.branch_from, b.rows, b.branch_count, "branch_from");
            if (!b.positions || !b.prefix) refuse("a pass without positions or prefix");
            if (use.cache && (!b.pages || !b.page_counts || !b.places)) refuse("a pass without pages or places");
            for (int s = 0; s < b.sequences; s++) check_sequence(s, further ? further[s] : 0);
        }
        if (use.tokens)
            for (int row = 0; row < b.rows; row++)
                if ((uint32_t)b.tokens[row] >= (uint32_t)m.embedding_rows)
                    refuse("token %d of row %d is outside the vocabulary of %d tokens", b.tokens[row], row, m.embedding_rows);
        if (b.states) check_states();
        check_outputs();
        if (use.states) check_replay();
        if (use.sources) check_sources();
    }

   private:
    const ModelSpec& m;
    const BatchSpec& b;
    const PlanUse use;

    void check_sequence(int s, int further) const {
        const int last = b.sequence_from[s + 1] - 1, room = use.cache ? PAGE * b.page_counts[s] : INT32_MAX;
        for (int row = b.sequence_from[s]; row <= last; row++) {
            const int more = row == last ? further : 0;
            check_position(row, more);
            if (!use.cache) continue;
            const int64_t place = b.places[row];
            const int branches = b.branch_from[row + 1] - b.branch_from[row];
            if (use.writes && (place < 0 || place >= b.reach || place + more >= room))
                refuse("row %d is written to cache row %lld, and its sequence has %d", row, (long long)(place + more), place + more < room ? b.reach : room);
            const int64_t keys = (int64_t)b.prefix[row] + branches;
            if (b.prefix[row] < 0 || keys > std::min(room, b.reach))
                refuse("row %d sees %lld keys, and its sequence has %d", row, (long long)keys, std::min(room, b.reach));
            if (m.biases && keys + more > m.bias_stride) refuse("row %d sees %lld keys, beyond the table of %lld biases", row, (long long)keys + more, (long long)m.bias_stride);
            for (int i = b.branch_from[row]; i < b.branch_from[row + 1]; i++)
                if ((uint32_t)b.branches[i] >= (uint32_t)std::min(room, b.reach))
                    refuse("row %d sees cache row %d, and its sequence has %d", row, b.branches[i], std::min(room, b.reach));
        }
        if (b.adapters && b.adapters[s]) {
            if (b.adapters[s]->layer_count < m.layer_count) refuse("sequence %d has an adapter of %d layers", s, b.adapters[s]->layer_count);
            if (!linked(F32)) refuse("sequence %d has an adapter, and the kernels of float32 matrices are not linked", s);
        }
    }

    void check_position(int row, int more) const {
        const int64_t position = b.positions[row];
        if (position < 0) refuse("row %d is at position %lld", row, (long long)position);
        if (use.table && position + more >= m.table_positions)
            refuse("row %d is at position %lld, beyond the tables of %d positions", row, (long long)position + more, m.table_positions);
        if (use.learned && position + more >= m.learned_positions)
            refuse("row %d is at position %lld, beyond the %d learned positions", row, (long long)position + more, m.learned_positions);
    }

    void check_states() const {
        if (b.features || !m.fused_layers) refuse("states of a target in a pass that %s", b.features ? "has features" : "cannot fuse them");
        const int layers = m.fused_layers - m.fuses_embedding;
        for (int i = 0; i < b.rows * layers; i++)
            if (!b.states[i]) refuse("row %d has no state of layer %d", i / layers, i % layers);
    }

    void check_outputs() const {
        const int count = b.answers();
        if (count && !b.outputs) refuse("a pass with %d rows of logits that does not name them", count);
        for (int i = 0; i < count; i++)
            if (b.outputs[i] < (i ? b.outputs[i - 1] + 1 : 0) || b.outputs[i] >= b.rows)
                refuse("logits of row %d, of %d rows; outputs must ascend", b.outputs[i], b.rows);
        if (b.ranked && (b.ranks < 1 || b.ranks > m.vocab)) refuse("the likeliest %d of %d tokens", b.ranks, m.vocab);
        for (int i = 0; i < b.tap_count; i++)
            if (b.tap_layers[i] < 0 || b.tap_layers[i] > m.layer_count + 1 || !b.taps[i])
                refuse("hidden states of layer %d, of %d layers", b.tap_layers[i], m.layer_count);
    }

    void check_sources() const {
        if (!b.source_pages || !b.source_counts || !b.source_lengths) refuse("a pass of an encoder-decoder without sources");
        for (int s = 0; s < b.sequences; s++)
            if (b.source_lengths[s] < 0 || b.source_lengths[s] > std::min<int64_t>(b.source_reach, (int64_t)PAGE * b.source_counts[s]))
                refuse("sequence %d has a source of %d tokens in %d pages", s, b.source_lengths[s], b.source_counts[s]);
    }

    void check_replay() const {
        if (!b.replay) refuse("a pass of recurrent layers without their steps");
        const ReplaySpec& r = *b.replay;
        if (r.steps < 0 || r.copies < 0 || r.moves < 0) refuse("%d steps with %d states, and %d moves", r.steps, r.copies, r.moves);
        check_bounds(r.first_step, b.sequences, r.steps, "first_step");
        for (int s = 0; s < b.sequences; s++)
            for (int step = r.first_step[s]; step < r.first_step[s + 1]; step++) {
                const int32_t source = r.sources[step], target = r.targets[step], save = r.saves[step];
                if (source < ZERO_STATE || source >= r.copies || target < NO_STATE || target >= r.copies || save < -1 || save >= r.snapshot_count)
                    refuse("step %d reads state %d, writes state %d and snapshot %d, of %d and %d", step, source, target, save, r.copies, r.snapshot_count);
                for (int tap = 0; tap <= m.state.window; tap++) check_code(r, s, r.inputs[(int64_t)step * (m.state.window + 1) + tap]);
            }
        for (int i = 0; i < r.moves; i++) {
            if ((uint32_t)r.moved_of[i] >= (uint32_t)b.sequences) refuse("inputs of sequence %d are kept, of %d", r.moved_of[i], b.sequences);
            check_code(r, r.moved_of[i], r.moved[i]);
        }
    }

    // Checks the code of a row; see RecurrentMixer::inputs_of.
    void check_code(const ReplaySpec& r, int s, int32_t code) const {
        if (code == INT32_MIN) return;
        if (code >= 0 ? code < b.sequence_from[s] || code >= b.sequence_from[s + 1] : ~code >= r.log_rows[s])
            refuse("sequence %d reads the inputs of row %d, which it does not have", s, code);
    }
};

// Latent attention of a few rows of one sequence over its cached latents, which are keys and values of all heads.
//
// Scores, the sum of the softmax and the weighted sum of latents all follow the order of the keys, wherever they lie and
// whatever else is in the pass. So a row's result depends on its own keys alone.
#pragma once

#include "attention_rows.hpp"

template <Kind kv>
struct LatentAttention : AttentionRows<kv> {
    using AttentionRows<kv>::m, AttentionRows<kv>::b, AttentionRows<kv>::layer, AttentionRows<kv>::layout;
    using AttentionRows<kv>::start, AttentionRows<kv>::keys_of;
    static constexpr int MIX_QUERIES = ONE_REGISTER ? 6 : 3, MIX_NUMBERS = ONE_REGISTER ? 4 : 2;  // whose sums stay in registers

    Word* queries;  // [TILE_QUERIES][words of a head]; the queries of one run
    float* scores;  // [TILE_QUERIES][length]
    float* mixed;   // [TILE_QUERIES][head_dim]
    int64_t length; // keys per row of scores

    // Rows [first, last) of a sequence with one part of the heads. Calls store(row, head, mixed [rank]).
    template <class Store>
    void run(int sequence, int part, int first, int last, Store store) {
        const int group = heads_at_once(m, layer), count = (last - first) * group, first_head = part * group;
        Word* const* pages = b.pages[sequence];
        int end_key = 0, first_key = b.reach;
        for (int row = first; row < last; row++) {
            if (this->prefix(row) > end_key) end_key = this->prefix(row);
            if (start(row) < first_key) first_key = start(row);
        }
        for (int q = 0; q < count; q++)
            std::memcpy(queries + q * layout.query_words, this->query(first + q / group, first_head + q % group),
                        sizeof(Word) * layout.query_words);
        for (int64_t page = first_key / PAGE; page * PAGE < end_key; page++)
            this->score_page(pages, 0, page, queries, count, nullptr, [&](int q, int key, Floats score) {
                ::store(scores + q * length + page * PAGE + key, score);
            });
        float scale[TILE_QUERIES];
        for (int q = 0; q < count; q++) {
            const int row = first + q / group;
            for (int j = first_branch(row); j < b.branch_from[row + 1]; j++)
                this->score_key(pages, 0, b.branches[j], queries + q * layout.query_words, 1, [&](int, float score) {
                    scores[q * length + this->prefix(row) + j - b.branch_from[row]] = score;
                });
            const float sink = layer.sinks ? layer.sinks[first_head + q % group] : -INFINITY;
            scale[q] = soften(scores + q * length, start(row), keys_of(row), first_key, end_key, sink);
        }
        for (int at = 0; at < layout.value_dim; at += MIX_NUMBERS)
            for (int q = 0; q < count; q += MIX_QUERIES)
                pick_latents<MIX_QUERIES>(std::min(count - q, MIX_QUERIES), pages, first, group, q, at, end_key);
        for (int q = 0; q < count; q++) {
            float* out = mixed + q * layer.head_dim;
            for (int i = 0; i < layout.value_dim; i += LANES) ::store(out + i, load(out + i) * floats(scale[q]));
            store(first + q / group, first_head + q % group, out);
        }
    }

   private:
    // The first key after the prefix that the row sees: its window or chunk may begin among them.
    int first_branch(int row) const { return b.branch_from[row] + std::max(start(row) - this->prefix(row), 0); }

    // Writes exp(score - largest) for keys [from, count) and zeros around them. Returns 1 / their sum, in which a sink counts
    // as one more key.
    static float soften(float* row, int from, int count, int first_key, int end_key, float sink) {
        const int begin = from / LANES * LANES, end = (count + LANES - 1) / LANES * LANES;
        for (int i = first_key / LANES * LANES; i < from; i++) row[i] = -INFINITY;
        for (int i = count; i < end; i++) row[i] = -INFINITY;
        Floats largest = floats(sink), sum = floats(0.0f);
        for (int i = begin; i < end; i += LANES) largest = largest_of(largest, load(row + i));
        largest = floats(largest_lane(largest));
        for (int i = first_key / LANES * LANES; i < begin; i += LANES) store(row + i, floats(0.0f));
        for (int i = begin; i < end; i += LANES) {
            Floats score = load(row + i);
            const Floats e = keep(different(score, floats(-INFINITY)), exponential(score - largest));
            sum = sum + e;
            store(row + i, e);
        }
        for (int i = end; i < end_key; i++) row[i] = 0.0f;
        const float total = sum_of(sum);
        return 1.0f / (sink == -INFINITY ? total : total + first_lane(exponential(floats(sink) - largest)));
    }

    template <int Q>
    void pick_latents(int count, Word* const* pages, int first, int group, int q, int at, int end_key) {
        if (count == Q) mix_latents<Q>(pages, first, group, q, at, end_key);
        else if constexpr (Q > 1) pick_latents<Q - 1>(count, pages, first, group, q, at, end_key);
    }

    // Weighted sums of numbers [at, at + MIX_NUMBERS) of the keys of Q queries, from the layout of keys: lane r of a sum adds up
    // keys r, r + 16, ..., in that order, and the lanes are added up at the end. A key after the prefix is added to the
    // lane that it has in plain decoding.
    template <int Q>
    void mix_latents(Word* const* pages, int first, int group, int q, int at, int end_key) {
        constexpr int D = MIX_NUMBERS;
        Floats sums[Q][D];
        for (auto& row : sums)
            for (Floats& sum : row) sum = floats(0.0f);
        const float* weights = scores + q * length;
        auto add = [&](const Word* words, auto weight) __attribute__((always_inline)) {
            Floats parts[D];
            numbers_of(words, parts);
            for (int i = 0; i < Q; i++) {
                const Floats w = weight(i);
                for (int d = 0; d < D; d++) sums[i][d] = multiply_add(w, parts[d], sums[i][d]);
            }
        };
        const int64_t word = at / per_word(kv), whole = end_key / LANES;
        for (int64_t block = 0; block < whole; block++)
            add(layout.keys(pages, 0, block) + word * LANES,
                [&](int i) { return load(weights + i * length + block * LANES); });
        if (end_key % LANES)  // scores after the prefix are those of a branch
            add(layout.keys(pages, 0, whole) + word * LANES, [&](int i) {
                alignas(64) float lanes[LANES] = {};
                std::memcpy(lanes, weights + i * length + whole * LANES, sizeof(float) * (end_key % LANES));
                return load(lanes);
            });
        for (int i = 0; i < Q; i++) {
            const int row = first + (q + i) / group;
            for (int j = b.branch_from[row]; j < b.branch_from[row + 1]; j++) {
                const int key = this->prefix(row) + j - b.branch_from[row];
                alignas(64) float lanes[LANES] = {}, numbers[D];
                lanes[key % LANES] = weights[i * length + key];
                latent_of(pages, b.branches[j], at, numbers);
                for (int d = 0; d < D; d++) sums[i][d] = multiply_add(load(lanes), floats(numbers[d]), sums[i][d]);
            }
            for (int d = 0; d < D; d++) mixed[(q + i) * layer.head_dim + at + d] = sum_of(sums[i][d]);
        }
    }

    // The numbers of sixteen keys, from words of a block: vectors of one number of all keys.
    static void numbers_of(const Word* words, Floats* to) {
        for (int d = 0; d < MIX_NUMBERS; d += per_word(kv)) {
            const Ints word = load_ints(words + d / per_word(kv) * LANES);
            if constexpr (kv == F32) {
                to[d] = as_floats(word);
            } else {
                to[d] = as_floats(shift_left<16>(word));
                to[d + 1] = as_floats(and_bits(word, ints((int)0xffff0000)));
            }
        }
    }

    // MIX_NUMBERS numbers of one key.
    void latent_of(Word* const* pages, int64_t place, int at, float* to) const {
        const Word* words = layout.keys(pages, 0, place / LANES) + place % LANES;
        for (int d = 0; d < MIX_NUMBERS; d++) {
            const Word word = words[(at + d) / per_word(kv) * LANES];
            const Word bits = kv == F32 ? word : (at + d) % 2 ? word & 0xffff0000 : word << 16;
            std::memcpy(to + d, &bits, sizeof(float));
        }
    }
};

// Attention of a few rows of one sequence over its cached keys, one head of keys and values at a time.
//
// A row sees its prefix and, in a draft tree, its ancestors after the prefix; together they are its keys 0 .. n - 1 in the
// order of their positions. Scores, the sum of the softmax and the weighted sum of values all follow that order, wherever
// the keys lie and whatever else is in the pass. So a row's result depends on its own keys alone.
#pragma once

#include "specs.hpp"

constexpr int TILE_QUERIES = 32;
constexpr int MIX_QUERIES = ONE_REGISTER ? 6 : 3, MIX_VECTORS = ONE_REGISTER ? 4 : 2;  // whose sums stay in registers
constexpr float no_scales[TILE_QUERIES] = {};  // scales for products without scales

// Query heads that are computed together: those of a head of keys, or where they do not fit, the largest equal part of them.
inline int heads_at_once(const ModelSpec& m, const AttentionSpec& layer) {
    const int group = m.heads / layer.kv_heads;
    int parts = 1;
    while (group % parts || group / parts > TILE_QUERIES) parts++;
    return group / parts;
}

template <Kind kv>
struct Attention {
    const ModelSpec& m;
    const BatchSpec& b;
    const AttentionSpec& layer;
    const PageLayout layout;
    const Word* all_queries;  // [rows][heads][words of a head]
    Word* queries;            // [TILE_QUERIES][words of a head]; the queries of one run
    float* scores;            // [TILE_QUERIES][length]
    float* mixed;             // [TILE_QUERIES][head_dim]
    int64_t length;           // keys per row of scores

    // Rows [first, last) of a sequence with one part of the heads that share a head of keys. Calls store(row, head, mixed
    // [head_dim]).
    template <class Store>
    void run(int sequence, int part, int first, int last, Store store) {
        const int group = heads_at_once(m, layer), count = (last - first) * group, first_head = part * group;
        const int kv_head = first_head / (m.heads / layer.kv_heads), dim = layer.head_dim;
        Word* const* pages = b.pages[sequence];
        int end_key = 0, first_key = b.reach;
        for (int row = first; row < last; row++) {
            if (prefix(row) > end_key) end_key = prefix(row);
            if (start(row) < first_key) first_key = start(row);
        }
        for (int q = 0; q < count; q++)
            std::memcpy(queries + q * layout.query_words, query(first + q / group, first_head + q % group),
                        sizeof(Word) * layout.query_words);
        for (int64_t page = first_key / PAGE; page * PAGE < end_key; page++) {
            const Matrix keys = keys_of_page(pages, kv_head, page * PAGE);
            Units whole(Share(0, keys.units));
            product<kv>(keys, queries, layout.query_words, no_scales, count, whole,
                        [&](int q, int64_t unit, Floats low, Floats high) {
                            float* at = scores + q * length + page * PAGE + unit * BLOCKS * LANES;
                            ::store(at, scaled(low));
                            ::store(at + LANES, scaled(high));
                        });
        }
        float scale[TILE_QUERIES];
        for (int q = 0; q < count; q++) {
            const int row = first + q / group;
            for (int j = first_branch(row); j < b.branch_from[row + 1]; j++) branch(pages, kv_head, row, q, j);
            if (layer.relative) shift(scores + q * length, b.positions[row], keys_of(row), layer.relative + (first_head + q % group) * (2 * m.farthest + 1));
            if (m.biases) slant(scores + q * length, start(row), keys_of(row), m.biases + (first_head + q % group) * m.bias_stride);
            const float sink = layer.sinks ? layer.sinks[first_head + q % group] : -INFINITY;
            scale[q] = soften(scores + q * length, start(row), keys_of(row), first_key, end_key, sink);
        }
        for (int at = 0; layout.latent && at < layout.value_dim; at += MIX_VECTORS)
            for (int q = 0; q < count; q += MIX_QUERIES)
                pick_latents<MIX_QUERIES>(std::min(count - q, MIX_QUERIES), pages, first, group, q, at, end_key);
        for (int at = 0; !layout.latent && at < dim; at += MIX_VECTORS * LANES)
            for (int q = 0; q < count; q += MIX_QUERIES)
                pick_vectors<MIX_VECTORS>(std::min((dim - at) / LANES, MIX_VECTORS), std::min(count - q, MIX_QUERIES),
                                          pages, kv_head, q, at, first_key, end_key);
        for (int q = 0; q < count; q++) {
            const int row = first + q / group;
            float* out = mixed + q * dim;
            for (int j = first_branch(row); j < b.branch_from[row + 1] && !layout.latent; j++)
                add(out, scores[q * length + b.prefix[row] + j - b.branch_from[row]],
                    layout.value(pages, kv_head, b.branches[j]));
            for (int i = 0; i < layout.value_dim; i += LANES)
                ::store(out + i, load(out + i) * floats(scale[q]));
            store(row, first_head + q % group, out);
        }
    }

   private:
    // The rows of a block see each other, except in layers where they see those before them alone.
    int prefix(int row) const { return layer.ordered ? std::min(b.prefix[row], b.positions[row] + 1) : b.prefix[row]; }

    int keys_of(int row) const { return prefix(row) + b.branch_from[row + 1] - b.branch_from[row]; }

    int start(int row) const {
        const int window = layer.window, from = b.positions[row] + 1 - window;
        if (window < 0) return b.positions[row] / -window * -window;
        return window && from > 0 ? from : 0;
    }

    // The first key after the prefix that the row sees: its window or chunk may begin among them.
    int first_branch(int row) const { return b.branch_from[row] + std::max(start(row) - b.prefix[row], 0); }

    const Word* query(int row, int head) const { return all_queries + ((int64_t)row * m.heads + head) * layout.query_words; }

    Floats scaled(Floats v) const {
        v = v * floats(m.scale);
        if (m.score_cap == 0.0f) return v;
        Floats cap = floats(m.score_cap);
        return cap * hyperbolic_tangent(v / cap);
    }

    // The keys of a page from cache row `from` on, as a packed matrix with one output per key.
    Matrix keys_of_page(Word* const* pages, int kv_head, int64_t from) const {
        return {layout.keys(pages, kv_head, from / LANES), nullptr, nullptr, nullptr,
                (PAGE - from % PAGE) / LANES / BLOCKS, layout.key_words};
    }

    // The score of one key after the prefix, by the same product as in the prefix, so that it is bitwise the same.
    void branch(Word* const* pages, int kv_head, int row, int q, int j) {
        const int width = BLOCKS * LANES, place = b.branches[j];
        Matrix keys = keys_of_page(pages, kv_head, place / width * width);
        keys.units = 1;
        alignas(64) float lanes[BLOCKS * LANES];
        Units whole(Share(0, 1));
        product<kv>(keys, queries + q * layout.query_words, layout.query_words, no_scales, 1, whole,
                    [&](int, int64_t, Floats low, Floats high) {
                        store(lanes, scaled(low));
                        store(lanes + LANES, scaled(high));
                    });
        scores[q * length + b.prefix[row] + j - b.branch_from[row]] = lanes[place % width];
    }

    // ALiBi (2108.12409): key i is at position i, and the last one is the row itself.
    static void slant(float* row, int from, int count, const float* biases) {
        for (int i = from; i < count; i++) row[i] += biases[i] - biases[count - 1];
    }

    // T5's relative positions (1910.10683, 2.1): adds the number of each distance, key - row, within [-farthest, farthest].
    void shift(float* row, int position, int count, const float* biases) const {
        const int near = std::max(position - m.farthest, 0), beyond = std::min(position + m.farthest + 1, count);
        biases += m.farthest;
        for (int i = 0; i < std::min(near, count); i++) row[i] += biases[-m.farthest];
        for (int i = near; i < beyond; i++) row[i] += biases[i - position];
        for (int i = std::max(beyond, 0); i < count; i++) row[i] += biases[m.farthest];
    }

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

    template <int V>
    void pick_vectors(int vectors, int count, Word* const* pages, int kv_head, int q, int at, int first_key, int end_key) {
        if (vectors == V) pick_mix<MIX_QUERIES, V>(count, pages, kv_head, q, at, first_key, end_key);
        else if constexpr (V > 1) pick_vectors<V - 1>(vectors, count, pages, kv_head, q, at, first_key, end_key);
    }

    // Weighted sum of values: keys [first_key, end_key) of Q queries times V vectors of each value row, in the order of the keys.
    template <int Q, int V>
    void pick_mix(int count, Word* const* pages, int kv_head, int q, int at, int first_key, int end_key) {
        if (count == Q) {
            Floats sums[Q][V];
            for (int i = 0; i < Q; i++)
                for (int v = 0; v < V; v++) sums[i][v] = floats(0.0f);
            const float* weights = scores + q * length;
            for (int key = first_key; key < end_key;) {
                const Word* value = layout.value(pages, kv_head, key);
                const int end = end_key < (key / PAGE + 1) * PAGE ? end_key : (key / PAGE + 1) * PAGE;
                for (; key < end; key++, value += layout.key_words) {
                    Floats parts[V];
                    for (int v = 0; v < V; v++) parts[v] = get<kv>(value, at + v * LANES);
#pragma GCC unroll 6
                    for (int i = 0; i < Q; i++) {
                        Floats weight = floats(weights[i * length + key]);
                        for (int v = 0; v < V; v++) sums[i][v] = multiply_add(weight, parts[v], sums[i][v]);
                    }
                }
            }
            for (int i = 0; i < Q; i++)
                for (int v = 0; v < V; v++) store(mixed + (q + i) * layer.head_dim + at + v * LANES, sums[i][v]);
        } else if constexpr (Q > 1) {
            pick_mix<Q - 1, V>(count, pages, kv_head, q, at, first_key, end_key);
        }
    }

    void add(float* out, float weight, const Word* value) const {
        for (int i = 0; i < layer.head_dim; i += LANES) {
            Floats sum = multiply_add(floats(weight), get<kv>(value, i), load(out + i));
            store(out + i, sum);
        }
    }

    template <int Q>
    void pick_latents(int count, Word* const* pages, int first, int group, int q, int at, int end_key) {
        if (count == Q) mix_latents<Q>(pages, first, group, q, at, end_key);
        else if constexpr (Q > 1) pick_latents<Q - 1>(count, pages, first, group, q, at, end_key);
    }

    // Weighted sums of numbers [at, at + MIX_VECTORS) of the keys of Q queries, from the layout of keys: lane r of a sum adds up
    // keys r, r + 16, ..., in that order, and the lanes are added up at the end. A key after the prefix is added to the
    // lane that it has in plain decoding.
    template <int Q>
    void mix_latents(Word* const* pages, int first, int group, int q, int at, int end_key) {
        constexpr int D = MIX_VECTORS;
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
                const int key = b.prefix[row] + j - b.branch_from[row];
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
        for (int d = 0; d < MIX_VECTORS; d += per_word(kv)) {
            const Ints word = load_ints(words + d / per_word(kv) * LANES);
            if constexpr (kv == F32) {
                to[d] = as_floats(word);
            } else {
                to[d] = as_floats(shift_left<16>(word));
                to[d + 1] = as_floats(and_bits(word, ints((int)0xffff0000)));
            }
        }
    }

    // MIX_VECTORS numbers of one key.
    void latent_of(Word* const* pages, int64_t place, int at, float* to) const {
        const Word* words = layout.keys(pages, 0, place / LANES) + place % LANES;
        for (int d = 0; d < MIX_VECTORS; d++) {
            const Word word = words[(at + d) / per_word(kv) * LANES];
            const Word bits = kv == F32 ? word : (at + d) % 2 ? word & 0xffff0000 : word << 16;
            std::memcpy(to + d, &bits, sizeof(float));
        }
    }
};

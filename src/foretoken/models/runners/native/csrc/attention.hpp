// Attention of a few rows of one sequence over its cached keys, one head of keys and values at a time.
//
// Keys are taken a page at a time, in the order of their positions, in one pass over the cache: scores, softmax with the
// largest score so far, weighted sum of values (2205.14135). A row's pages, and the order within them, follow from its own
// keys alone, wherever these lie and whatever else is in the pass, and so does its result. Meanwhile the next page is asked for.
#pragma once

#include "arranged.hpp"
#include "attention_rows.hpp"

// What comes next in memory, asked for a few lines at a time.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    void ask(int lines) {
        for (const char* until = std::min(at + 64 * lines, end); at < until; at += 64) prefetch_far(at);
    }
};

template <Kind kv>
class Attention : AttentionRows<kv> {
    using Base = AttentionRows<kv>;
    using Base::m, Base::b, Base::layer, Base::layout, Base::start, Base::prefix, Base::keys_of;
    static constexpr int MIX_QUERIES = ONE_REGISTER ? 6 : 3, MIX_VECTORS = ONE_REGISTER ? 4 : 2;  // whose sums stay in registers
    static constexpr int TALL_QUERIES = ONE_REGISTER ? 12 : 3, TALL_VECTORS = 2;  // of more queries, to convert values less often
    // Weights are rounded to bfloat16, so that one instruction adds the values of two keys.
    static constexpr bool PAIRED = kv == BF16 && BF16_PRODUCTS;
    static constexpr int ROW_WORDS = PAGE / 2;  // of a query's weights of one page, as bytes or bfloat16

   public:
    // memory: this thread's own, of `numbers` floats.
    Attention(const ModelSpec& m, const BatchSpec& b, const AttentionSpec& layer, const PageLayout& layout, const Word* all_queries,
              float* memory)
        : Base{m, b, layer, layout, all_queries}, scores(memory), sums(scores + TILE_QUERIES * PAGE),
          mixed(sums + TILE_QUERIES * LANES), bytes((Word*)(mixed + TILE_QUERIES * layer.head_dim)),
          queries(bytes + (kv == INT8 || PAIRED ? TILE_QUERIES * ROW_WORDS : 0)) {}

    static int64_t numbers(const ModelSpec& m) {
        return TILE_QUERIES * (PAGE + LANES + ROW_WORDS + largest_of_layers(m, [&](const AttentionSpec& layer) {
            return layer.head_dim + PageLayout(m, layer, kv).query_words;
        }));
    }

    // Rows [first, last) of a sequence with one part of the heads that share a head of keys. Calls store(row, head, mixed
    // [head_dim]).
    template <class Store>
    void run(int sequence, int part, int first, int last, Store store) {
        begin(sequence, part, first, last);
        int end_prefix = 0, end = 0, from = b.reach;
        for (int row = first; row < last; row++) {
            end_prefix = std::max(end_prefix, prefix(row)), end = std::max(end, keys_of(row));
            from = std::min(from, start(row));
        }
        for (from = from / PAGE * PAGE; from < end; from += PAGE) {
            page = from / PAGE;
            ahead = from + PAGE < end_prefix ? next_page() : Ahead();
            if (from < end_prefix) score();
            branched = score_branches();
            for (int row = first; row < last; row++) weigh(row);
            mix();
        }
        for (int q = 0; q < count; q++) {
            float* out = mixed + q * layer.head_dim;
            const Floats scale = floats(1.0f / total(q));
            for (int i = 0; i < layer.head_dim; i += LANES) ::store(out + i, load(out + i) * scale);
            store(row_of(q), head_of(q), out);
        }
    }

   private:
    float* const scores;  // [TILE_QUERIES][PAGE]; then the weights of keys, relative to the largest so far
    float* const sums;    // [TILE_QUERIES][LANES]; of the weights
    float* const mixed;   // [TILE_QUERIES][head_dim]; of values
    Word* const bytes;    // [TILE_QUERIES][ROW_WORDS]; of an int8 cache: weights times scales of values; or paired weights
    Word* const queries;  // [TILE_QUERIES][words of a head]
    float tops[TILE_QUERIES];            // largest scores so far
    WholeRow query_rows[TILE_QUERIES], weight_rows[TILE_QUERIES];  // of an int8 cache
    Word* const* pages;
    int first, count, group, first_head, kv_head;
    int page;       // the current one
    bool branched;  // some row has keys after its prefix in it
    Ahead ahead;

    int row_of(int q) const { return first + q / group; }
    int head_of(int q) const { return first_head + q % group; }
    float sink(int q) const { return layer.sinks ? layer.sinks[head_of(q)] : -INFINITY; }

    // Keys of a row in the current page: [start, end of the prefix), then up to `end` those after it.
    int first_in_page(int row) const { return std::max(start(row) - page * PAGE, 0); }
    int prefix_in_page(int row) const { return std::min(std::max(prefix(row) - page * PAGE, 0), PAGE); }
    int end_in_page(int row) const { return std::min(keys_of(row) - page * PAGE, PAGE); }
    // The cache row of key `i` of the current page, which is after the prefix.
    int branch(int row, int i) const { return b.branches[b.branch_from[row] + page * PAGE + i - prefix(row)]; }

    void begin(int sequence, int part, int from, int last) {
        pages = b.pages[sequence], group = heads_at_once(m, layer), first = from, count = (last - from) * group;
        first_head = part * group, kv_head = first_head / (m.heads / layer.kv_heads);
        std::fill(sums, sums + count * LANES, 0.0f), std::fill(mixed, mixed + count * layer.head_dim, 0.0f);
        for (int q = 0; q < count; q++) {
            Word* to = queries + q * layout.query_words;
            std::memcpy(to, this->query(row_of(q), head_of(q)), sizeof(Word) * layout.query_words);
            tops[q] = sink(q);
            if constexpr (kv == INT8) {
                WholeRow& row = query_rows[q];
                const Word* facts = to + 2 * layout.key_words;
                row.words = to;
                std::memcpy(&row.scale, facts, 4), std::memcpy(&row.high, facts + 1, 4), std::memcpy(&row.low, facts + 2, 4);
            }
        }
    }

    Word* half(int number, bool values) const {
        return pages[number] + layout.at(kv_head) + (values ? layout.half_words : 0);
    }

    Ahead next_page() const {
        const char* at = (const char*)half(page + 1, false);
        return {at, at + 2 * layout.half_words * sizeof(Word)};
    }

    // Lines to ask for at each of about eight moments of a page, or for each query.
    int some_lines() const { return int(2 * layout.half_words * sizeof(Word) / 64 / std::max(8, count)); }

    void score() {
        ahead.ask(some_lines());
        if constexpr (kv == INT8) {
            byte_product(half(page, false), layout.key_words, PAGE / LANES, query_rows, count, [&](int q, int block, Floats sums) {
                store(scores + q * PAGE + block * LANES, byte_scores(q, page * PAGE / LANES + block, sums));
            });
        } else {
            this->score_page(pages, kv_head, page, queries, count,
                             [to = scores](int q, int key, Floats score) { store(to + q * PAGE + key, score); });
        }
    }

    // Scores of an int8 cache; block: of sixteen keys.
    Floats byte_scores(int q, int block, Floats sums) const {
        const float* scales = layout.scales(half(block * LANES / PAGE, false)) + block * LANES % PAGE;
        return this->scale()(sums * load(scales) * floats(query_rows[q].scale));
    }

    // Computes the scores of keys after the prefix in the current page. Returns whether there are any.
    bool score_branches() {
        bool any = false;
        for (int q = 0; q < count; q += group) {
            const int row = row_of(q);
            for (int i = std::max(prefix_in_page(row), first_in_page(row)); i < end_in_page(row); i++) {
                const int place = branch(row, i);
                any = true;
                if constexpr (kv == INT8) {
                    alignas(64) float lanes[LANES];
                    const Word* keys = layout.keys(pages, kv_head, place / LANES);
                    byte_product(keys, layout.key_words, 1, query_rows + q, group, [&](int g, int, Floats sums) {
                        store(lanes, byte_scores(q + g, place / LANES, sums));
                        scores[(q + g) * PAGE + i] = lanes[place % LANES];
                    });
                } else {
                    this->score_key(pages, kv_head, place, queries + q * layout.query_words, group,
                                    [&](int g, float score) { scores[(q + g) * PAGE + i] = score; });
                }
            }
        }
        return any;
    }

    // Turns the scores of a row's queries into weights, exp(score - largest so far), and adds them up.
    void weigh(int row) {
        const int low = first_in_page(row), high = end_in_page(row);
        for (int q = (row - first) * group, end = q + group; q < end; q++) {
            ahead.ask(some_lines());
            float* weights = scores + q * PAGE;
            if (low < high) {
                if (layer.relative) shift(weights, row, low, high, layer.relative + head_of(q) * (2 * m.farthest + 1));
                if (m.biases) slant(weights, row, low, high, m.biases + head_of(q) * m.bias_stride);
                std::fill(weights, weights + low, -INFINITY), std::fill(weights + high, weights + PAGE, -INFINITY);
                soften(q, weights);
            } else if constexpr (PAIRED) {
                std::fill(bytes + q * ROW_WORDS, bytes + (q + 1) * ROW_WORDS, 0);
            } else {
                std::fill(weights, weights + PAGE, 0.0f);
            }
            if constexpr (kv == INT8) weigh_bytes(q, weights);
        }
    }

    void soften(int q, float* weights) {
        constexpr int VECTORS = PAGE / LANES;
        Floats largest = floats(tops[q]), all[VECTORS];
        each<VECTORS>([&](auto i) __attribute__((always_inline)) {
            all[i()] = load(weights + i() * LANES), largest = largest_of(largest, all[i()]);
        });
        if (const float top = largest_lane(largest); top > tops[q]) raise(q, top);
        const Floats top = floats(tops[q]);
        Floats sum = load(sums + q * LANES);
        each<VECTORS>([&](auto i) __attribute__((always_inline)) {
            const Floats e = keep(different(all[i()], floats(-INFINITY)), exponential(all[i()] - top));
            sum = sum + e;
            if constexpr (PAIRED) put<BF16>(bytes + q * ROW_WORDS, i() * LANES, e);
            else store(weights + i() * LANES, e);
        });
        store(sums + q * LANES, sum);
    }

    // Makes sums relative to a larger score.
    void raise(int q, float top) {
        if (tops[q] != -INFINITY) {
            const Floats factor = exponential(floats(tops[q] - top));
            float *sum = sums + q * LANES, *out = mixed + q * layer.head_dim;
            store(sum, load(sum) * factor);
            for (int i = 0; i < layer.head_dim; i += LANES) store(out + i, load(out + i) * factor);
        }
        tops[q] = top;
    }

    // The sum of a query's weights, in which a sink counts as one more key.
    float total(int q) const {
        const float sum = sum_of(load(sums + q * LANES));
        return layer.sinks ? sum + first_lane(exponential(floats(sink(q) - tops[q]))) : sum;
    }

    // ALiBi (2108.12409): key i is at position i, and the last one is the row itself.
    void slant(float* weights, int row, int low, int high, const float* biases) const {
        for (int i = low; i < high; i++) weights[i] += biases[page * PAGE + i] - biases[keys_of(row) - 1];
    }

    // T5's relative positions (1910.10683, 2.1): adds the number of each distance, key - row, within [-farthest, farthest].
    void shift(float* weights, int row, int low, int high, const float* biases) const {
        for (int i = low; i < high; i++)
            weights[i] += biases[m.farthest + std::min(std::max(page * PAGE + i - b.positions[row], -m.farthest), m.farthest)];
    }

    // Rounds weights times the scales of values.
    void weigh_bytes(int q, float* weights) {
        const float* scales = layout.scales(half(page, true));
        const int row = row_of(q);
        for (int i = std::max(prefix_in_page(row), first_in_page(row)); i < end_in_page(row); i++)
            weights[i] *= *BytePlace(layout, pages, kv_head, branch(row, i)).value_scale;
        Floats largest = floats(0.0f);
        for (int i = 0; i < PAGE; i += LANES) {
            const Floats scaled = load(weights + i) * load(scales + i);
            const Floats weight = branched ? select(first_lanes(prefix_in_page(row) - i), scaled, load(weights + i)) : scaled;
            store(weights + i, weight);
            largest = largest_of(largest, weight);
        }
        weight_rows[q] = whole_row(weights, PAGE, largest_lane(largest), bytes + q * ROW_WORDS);
    }

    // Adds the weighted values of the current page, in the order of the keys.
    void mix() {
        if constexpr (kv == INT8) {
            ahead.ask(8 * some_lines());
            const Word* values = half(page, true);
            if (branched) {
                for (int q = 0; q < count; q++) mix_branched_bytes(q, values);
            } else {
                byte_product(values, PAGE / 4, layer.head_dim / LANES, weight_rows, count,
                             [&](int q, int block, Floats sums) { add_bytes(q, block, sums); });
            }
            return;
        }
        if (branched) return mix_branched();
        const Word* values = half(page, true);
        const int64_t words = layout.key_words;
        auto value = [values, words](int key) __attribute__((always_inline)) { return values + key * words; };
        if (count > MIX_QUERIES) mix_some<TALL_QUERIES, TALL_VECTORS>(0, count, PAGE, value);
        else mix_some<MIX_QUERIES, MIX_VECTORS>(0, count, PAGE, value);
    }

    // The same where some rows have keys after their prefix.
    void mix_branched() {
        const Word* values = half(page, true);
        const int64_t words = layout.key_words;
        for (int q = 0; q < count; q++) {
            const int row = row_of(q), before = prefix_in_page(row), end = std::max(end_in_page(row), before);
            auto value = [&, values, words](int key) {
                return key < before || key >= end ? values + key * words : layout.value(pages, kv_head, branch(row, key));
            };
            mix_some<1, MIX_VECTORS>(q, 1, PAIRED ? end + end % 2 : end, value);
        }
    }

    // Adds the first keys of the page for `many` queries, Q queries and V vectors at once. value(key): where its value is.
    template <int Q, int V, class Value>
    void mix_some(int from, int many, int keys, const Value& value) {
        const RowTiles tiles(many, Q);
        const int dim = layer.head_dim;
        for (int at = 0; at < dim; at += V * LANES)
            for (int t = 0; t < tiles.count; t++) {
                const int q = from + tiles.first(t);
                ahead.ask(some_lines());
                const MixTile tile{PAIRED ? (const float*)bytes + q * ROW_WORDS : scores + q * PAGE, mixed + q * dim + at, dim, at, keys};
                pick_mix<Q, V>(tiles.height(t), std::min((dim - at) / LANES, V), tile, value);
            }
    }

    struct MixTile {
        const float* weights;  // [queries][PAGE], or paired weights [queries][ROW_WORDS]
        float* to;             // [queries][stride]
        int64_t stride;
        int at, keys;          // number of a value where `to` begins; keys of the page
    };

    template <int Q, int V, class Value>
    static void pick_mix(int count, int vectors, const MixTile& tile, const Value& value) {
        if (count == Q && vectors == V) return mix_tile<Q, V>(tile, value);
        if constexpr (Q > 1)
            if (count < Q) return pick_mix<Q - 1, V>(count, vectors, tile, value);
        if constexpr (V > 1) pick_mix<Q, V - 1>(count, vectors, tile, value);
    }

    template <int Q, int V, class Value>
    static void mix_tile(MixTile tile, Value value) {
        Floats sums[Q][V];
        each<Q>([&](auto q) __attribute__((always_inline)) {
            each<V>([&](auto v) __attribute__((always_inline)) { sums[q()][v()] = load(tile.to + q() * tile.stride + v() * LANES); });
        });
        if constexpr (PAIRED) {
            const Word* weight = (const Word*)tile.weights;
            for (int key = 0; key < tile.keys; key += 2, weight++) {
                Ints parts[V];
                get_pairs(value(key), value(key + 1), tile.at, parts);
                each<Q>([&](auto q) __attribute__((always_inline)) {
                    each<V>([&](auto v) __attribute__((always_inline)) {
                        sums[q()][v()] = Unit<BF16>::add(sums[q()][v()], parts[v()], weight + q() * ROW_WORDS);
                    });
                });
            }
        } else {
            const float* weight = tile.weights;
            for (int key = 0; key < tile.keys; key++, weight++) {
                Floats parts[V];
                get_values<kv>(value(key), tile.at, parts);
                each<Q>([&](auto q) __attribute__((always_inline)) {
                    const Floats own = floats(weight[q() * PAGE]);
                    each<V>([&](auto v) __attribute__((always_inline)) { sums[q()][v()] = multiply_add(own, parts[v()], sums[q()][v()]); });
                });
            }
        }
        each<Q>([&](auto q) __attribute__((always_inline)) {
            each<V>([&](auto v) __attribute__((always_inline)) { store(tile.to + q() * tile.stride + v() * LANES, sums[q()][v()]); });
        });
    }

    void add_bytes(int q, int block, Floats sums) {
        float* to = mixed + q * layer.head_dim + block * LANES;
        store(to, multiply_add(floats(weight_rows[q].scale), sums, load(to)));
    }

    // Adds the values of one query, some of whose keys are after the prefix.
    void mix_branched_bytes(int q, const Word* values) {
        const int row = row_of(q), before = prefix_in_page(row);
        const WholeRow& weights = weight_rows[q];
        alignas(64) Word kept[ROW_WORDS];
        std::memcpy(kept, weights.words, sizeof kept);
        int8_t *high = (int8_t*)kept, *low = high + PAGE;
        std::memset(high + before, 0, PAGE - before), std::memset(low + before, 0, PAGE - before);
        const WholeRow of_prefix{kept, weights.scale, weights.high, weights.low};
        const int8_t *all_high = (const int8_t*)weights.words, *all_low = all_high + PAGE;
        for (int block = 0; block < layer.head_dim / LANES; block++) {
            ByteSums<1, 1> sums;
            sums.clear();
            sums.add_all(values + block * PAGE / 4 * LANES, PAGE / 4, &of_prefix);
            for (int i = std::max(before, first_in_page(row)); i < end_in_page(row); i++) {
                const int place = branch(row, i), shift = place % 4 * 8;
                const Word upper = (Word)(uint8_t)all_high[i] << shift, lower = (Word)(uint8_t)all_low[i] << shift;
                const Word* at = layout.values(pages, kv_head, place / PAGE);
                sums.add(at + (block * PAGE / 4 + place % PAGE / 4) * LANES, 0, 0, upper, lower);
            }
            add_bytes(q, block, sums.of(0, 0, weights));
        }
    }
};

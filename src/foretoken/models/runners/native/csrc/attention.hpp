// Attention of a few rows of one sequence over its cached keys, one head of keys and values at a time.
//
// Keys are taken a page at a time, in the order of their positions, in one pass over the cache: scores, softmax with the
// largest score so far, weighted sum of values (2205.14135). A row's pages, and the order within them, follow from its own
// keys alone, wherever these lie and whatever else is in the pass, and so does its result. Meanwhile the next page is asked for.
#pragma once

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
    static constexpr int ROW_WORDS = PAGE / 2;  // of a query's weights of one page, as bytes

   public:
    // memory: this thread's own, of `numbers` floats.
    Attention(const ModelSpec& m, const BatchSpec& b, const AttentionSpec& layer, const PageLayout& layout, const Word* all_queries,
              float* memory)
        : Base{m, b, layer, layout, all_queries}, scores(memory), sums(scores + TILE_QUERIES * PAGE),
          mixed(sums + TILE_QUERIES * LANES), bytes((Word*)(mixed + TILE_QUERIES * layer.head_dim)),
          queries(bytes + (kv == INT8 ? TILE_QUERIES * ROW_WORDS : 0)) {}

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
            for (int q = 0; q < count; q++) weigh(q);
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
    Word* const bytes;    // [TILE_QUERIES][ROW_WORDS]; of an int8 cache: weights times scales of values
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

    // Lines to ask for at each of about eight moments of a page.
    int some_lines() const { return int(2 * layout.half_words * sizeof(Word) / 64 / 8); }

    void score() {
        ahead.ask(some_lines());
        if constexpr (kv == INT8) {
            byte_product(half(page, false), layout.key_words, PAGE / LANES, query_rows, count, [&](int q, int block, Floats sums) {
                store(scores + q * PAGE + block * LANES, byte_scores(q, page * PAGE / LANES + block, sums));
            });
        } else {
            this->score_page(pages, kv_head, page, queries, count,
                             [&](int q, int key, Floats score) { store(scores + q * PAGE + key, score); });
        }
    }

    // Scores of an int8 cache; block: of sixteen keys.
    Floats byte_scores(int q, int block, Floats sums) const {
        const float* scales = layout.scales(half(block * LANES / PAGE, false)) + block * LANES % PAGE;
        return this->scaled(sums * load(scales) * floats(query_rows[q].scale));
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

    // Turns the scores of a query into weights, exp(score - largest so far), and adds them up.
    void weigh(int q) {
        ahead.ask(some_lines());
        const int row = row_of(q), low = first_in_page(row), high = end_in_page(row);
        float* weights = scores + q * PAGE;
        if (low < high) {
            if (layer.relative) shift(weights, row, low, high, layer.relative + head_of(q) * (2 * m.farthest + 1));
            if (m.biases) slant(weights, row, low, high, m.biases + head_of(q) * m.bias_stride);
            std::fill(weights, weights + low, -INFINITY), std::fill(weights + high, weights + PAGE, -INFINITY);
            soften(q, weights);
        } else {
            std::fill(weights, weights + PAGE, 0.0f);
        }
        if constexpr (kv == INT8) weigh_bytes(q, weights);
    }

    void soften(int q, float* weights) {
        Floats largest = floats(tops[q]);
        for (int i = 0; i < PAGE; i += LANES) largest = largest_of(largest, load(weights + i));
        if (const float top = largest_lane(largest); top > tops[q]) raise(q, top);
        const Floats top = floats(tops[q]);
        Floats sum = load(sums + q * LANES);
        for (int i = 0; i < PAGE; i += LANES) {
            const Floats score = load(weights + i), e = keep(different(score, floats(-INFINITY)), exponential(score - top));
            sum = sum + e;
            store(weights + i, e);
        }
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
        const int width = MIX_VECTORS * LANES;
        for (int at = 0; at < layer.head_dim; at += width) {
            const int vectors = std::min(layer.head_dim - at, width) / LANES;
            if (branched) {
                for (int q = 0; q < count; q++) pick_vectors<MIX_VECTORS>(vectors, 1, q, at, prefix_in_page(row_of(q)));
                continue;
            }
            for (int q = 0; q < count; q += MIX_QUERIES) {
                ahead.ask(some_lines());
                pick_vectors<MIX_VECTORS>(vectors, std::min(count - q, MIX_QUERIES), q, at, PAGE);
            }
        }
        for (int q = 0; branched && q < count; q++) {
            const int row = row_of(q);
            for (int i = std::max(prefix_in_page(row), first_in_page(row)); i < end_in_page(row); i++)
                add(mixed + q * layer.head_dim, scores[q * PAGE + i], layout.value(pages, kv_head, branch(row, i)));
        }
    }

    template <int V>
    void pick_vectors(int vectors, int count, int q, int at, int keys) {
        if (vectors == V) pick_mix<MIX_QUERIES, V>(count, q, at, keys);
        else if constexpr (V > 1) pick_vectors<V - 1>(vectors, count, q, at, keys);
    }

    // The first keys of the page for Q queries times V vectors of each value row.
    template <int Q, int V>
    void pick_mix(int count, int q, int at, int keys) {
        if (count == Q) {
            Floats sums[Q][V];
            for (int i = 0; i < Q; i++)
                for (int v = 0; v < V; v++) sums[i][v] = load(mixed + (q + i) * layer.head_dim + at + v * LANES);
            const float* weights = scores + q * PAGE;
            const Word* value = half(page, true);
            for (int key = 0; key < keys; key++, value += layout.key_words) {
                Floats parts[V];
                get_values<kv>(value, at, parts);
#pragma GCC unroll 6
                for (int i = 0; i < Q; i++) {
                    Floats weight = floats(weights[i * PAGE + key]);
                    for (int v = 0; v < V; v++) sums[i][v] = multiply_add(weight, parts[v], sums[i][v]);
                }
            }
            for (int i = 0; i < Q; i++)
                for (int v = 0; v < V; v++) store(mixed + (q + i) * layer.head_dim + at + v * LANES, sums[i][v]);
        } else if constexpr (Q > 1) {
            pick_mix<Q - 1, V>(count, q, at, keys);
        }
    }

    void add(float* out, float weight, const Word* value) const {
        auto some = [&](int at, auto& parts) __attribute__((always_inline)) {
            get_values<kv>(value, at, parts);
            for (const Floats& part : parts) {
                store(out + at, multiply_add(floats(weight), part, load(out + at)));
                at += LANES;
            }
        };
        Floats two[2], one[1];
        int at = 0;
        for (; at + 2 * LANES <= layer.head_dim; at += 2 * LANES) some(at, two);
        if (at < layer.head_dim) some(at, one);
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

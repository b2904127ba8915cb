// Attention of a few rows of one sequence over its cached keys, one head of keys and values at a time.
//
// Keys are taken a page at a time, in the order of their positions, in one pass over the cache: scores, softmax with the
// largest score so far, weighted sum of values (2205.14135). A row's pages, and the order within them, follow from its own
// keys alone, wherever these lie and whatever else is in the pass, and so does its result.
//
// The next page is prefetched to the second level of caches while many queries multiply the current one, with AMX while they
// multiply its values. At one row, which waits for memory, that was slower than to the first level in one go (1.2 times one
// thread's time behind 6,000 tokens; at four and eight rows 0.93 times. Zen 5; with AMX, five and nine rows behind 1,000 tokens:
// 0.85 and 0.88 times).
//
// Each stretch of STRETCH positions has sums of its own, which are merged in order. So several threads may compute a row's
// stretches, and whether they do changes no bit.
#pragma once

#include "arranged.hpp"
#include "attention_rows.hpp"

constexpr int STRETCH = 16 * PAGE;  // merging adds 2 % to the work of eight rows behind 6,000 tokens (Zen 5)

// The softmax of a query over some of its keys, relative to the largest score.
struct Softmax {
    float* mixed;  // weighted values [dim], sums of weights by lane [LANES], the largest score
    int dim;

    static constexpr int64_t numbers(int64_t dim) { return dim + 2 * LANES; }
    float* sums() const { return mixed + dim; }
    float& top() const { return mixed[dim + LANES]; }

    void clear(float score) const { std::fill(mixed, sums() + LANES, 0.0f), top() = score; }

    // Adds the softmax over the keys that follow.
    void add(const Softmax& next) const {
        const float largest = next.top() > top() ? next.top() : top();
        auto factor = [&](float score) { return score == largest ? floats(1.0f) : exponential(floats(score - largest)); };
        const Floats before = factor(top()), after = factor(next.top());
        for (int i = 0; i < dim + LANES; i += LANES)
            store(mixed + i, multiply_add(load(next.mixed + i), after, load(mixed + i) * before));
        top() = largest;
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
        : Base{m, b, layer, layout, all_queries}, scores(memory), current(scores + TILE_QUERIES * PAGE),
          merged(current + TILE_QUERIES * Softmax::numbers(layer.head_dim)),
          bytes((Word*)(merged + TILE_QUERIES * Softmax::numbers(layer.head_dim))),
          queries(bytes + (kv == INT8 || PAIRED ? TILE_QUERIES * ROW_WORDS : 0)) {}

    static int64_t numbers(const ModelSpec& m) {
        return TILE_QUERIES * (PAGE + ROW_WORDS + largest_of_layers(m, [&](const AttentionSpec& layer) {
            return 2 * Softmax::numbers(layer.head_dim) + PageLayout(m, layer, kv).query_words;
        }));
    }

    // Rows [first, last) of a sequence with one part of the heads that share a head of keys. Calls store(row, head, mixed
    // [head_dim]).
    template <class Store>
    void run(int sequence, int part, int first, int last, Store store) {
        begin(sequence, part, first, last);
        for (int q = 0; q < count; q++) of_query(merged, q).clear(sink(head_of(q)));
        for (int number = from / STRETCH; number * STRETCH < end; number++)
            add_stretch(number, [&](int q, const Softmax& added) { of_query(merged, q).add(added); });
        for (int q = 0; q < count; q++) store(row_of(q), head_of(q), divided(head_of(q), of_query(merged, q)));
    }

    // The same for one stretch of keys. Calls store(row, head, softmax) for the rows that see any of them.
    template <class Store>
    void run_stretch(int sequence, int part, int first, int last, int number, Store store) {
        begin(sequence, part, first, last);
        if (from / STRETCH > number || end <= number * STRETCH) return;
        add_stretch(number, [&](int q, const Softmax& added) { store(row_of(q), head_of(q), added); });
    }

    // Merges the stretches of a row and head [stretches][Softmax::numbers]. Returns mixed [head_dim].
    const float* join(int row, int head, float* stretches) {
        const Softmax all = of_query(merged, 0);
        all.clear(sink(head));
        for (int number = start(row) / STRETCH; number * STRETCH < keys_of(row); number++)
            all.add({stretches + number * Softmax::numbers(all.dim), all.dim});
        return divided(head, all);
    }

   private:
    float* const scores;                  // [TILE_QUERIES][PAGE]; then the weights of keys, relative to the largest so far
    float *const current, *const merged;  // softmax of each query: over the current stretch, and over those before it
    Word* const bytes;    // [TILE_QUERIES][ROW_WORDS]; of an int8 cache: weights times scales of values; or paired weights
    Word* const queries;  // [TILE_QUERIES][words of a head]
    alignas(64) float tops[TILE_QUERIES], factors[TILE_QUERIES];  // largest scores of the stretch, and what sums before them are scaled by
    WholeRow query_rows[TILE_QUERIES], weight_rows[TILE_QUERIES];  // of an int8 cache
    Word* const* pages;
    int first, last, count, group, first_head, kv_head;
    int from, end_prefix, end;  // keys that some row sees, from the first of a page on; and those of them in a prefix
    int page;            // the current one
    bool branched;       // some row has keys after its prefix in it
    bool spreads;        // the next page is prefetched during products; with few queries, all at once, before they wait for it anyway
    const Word* next;    // keys of the next page, and its values behind them; null: none

    int row_of(int q) const { return first + q / group; }
    int head_of(int q) const { return first_head + q % group; }
    float sink(int head) const { return layer.sinks ? layer.sinks[head] : -INFINITY; }
    Softmax of_query(float* all, int q) const { return {all + q * Softmax::numbers(layer.head_dim), layer.head_dim}; }

    // Keys of a row in the current page: [start, end of the prefix), then up to `end` those after it.
    int first_in_page(int row) const { return std::max(start(row) - page * PAGE, 0); }
    int prefix_in_page(int row) const { return std::min(std::max(prefix(row) - page * PAGE, 0), PAGE); }
    int end_in_page(int row) const { return std::min(keys_of(row) - page * PAGE, PAGE); }
    // The cache row of key `i` of the current page, which is after the prefix.
    int branch(int row, int i) const { return b.branches[b.branch_from[row] + page * PAGE + i - prefix(row)]; }

    void begin(int sequence, int part, int first_row, int last_row) {
        pages = b.pages[sequence], group = heads_at_once(m, layer), first = first_row, last = last_row;
        count = (last - first) * group, first_head = part * group, kv_head = first_head / (m.heads / layer.kv_heads);
        spreads = kv != INT8 && ONE_REGISTER && count > MIX_QUERIES;
        from = b.reach, end_prefix = end = 0;
        for (int row = first; row < last; row++) {
            end_prefix = std::max(end_prefix, prefix(row)), end = std::max(end, keys_of(row));
            from = std::min(from, start(row) / PAGE * PAGE);
        }
        for (int q = 0; q < count; q++) {
            Word* to = queries + q * layout.query_words;
            std::memcpy(to, this->query(row_of(q), head_of(q)), sizeof(Word) * layout.query_words);
            if constexpr (kv == INT8) {
                WholeRow& row = query_rows[q];
                const Word* facts = to + 2 * layout.key_words;
                row.words = to;
                std::memcpy(&row.scale, facts, 4), std::memcpy(&row.high, facts + 1, 4), std::memcpy(&row.low, facts + 2, 4);
            }
        }
    }

    // Computes the softmax of each query over a stretch. Calls merge(q, softmax) where the query sees some of its keys.
    template <class Merge>
    void add_stretch(int number, Merge merge) {
        const int at = number * STRETCH, until = at + STRETCH;
        for (int q = 0; q < count; q++) of_query(current, q).clear(tops[q] = sink(head_of(q)));
        for (int key = std::max(from, at); key < std::min(end, until); key += PAGE) add_page(key / PAGE);
        for (int q = 0; q < count; q++)
            if (start(row_of(q)) < until && keys_of(row_of(q)) > at) of_query(current, q).top() = tops[q], merge(q, of_query(current, q));
    }

    // Divides the weighted values by the sum of weights, in which a sink counts as one more key.
    const float* divided(int head, const Softmax& all) const {
        float total = sum_of(load(all.sums()));
        if (layer.sinks) total += first_lane(exponential(floats(sink(head) - all.top())));
        for (int i = 0; i < all.dim; i += LANES) store(all.mixed + i, load(all.mixed + i) * floats(1.0f / total));
        return all.mixed;
    }

    void add_page(int number) {
        page = number;
        next = (page + 1) * PAGE < end_prefix ? half(page + 1, false) : nullptr;
        if (page * PAGE < end_prefix) score();
        branched = score_branches();
        weigh();
        mix();
    }

    Word* half(int number, bool values) const {
        return pages[number] + layout.at(kv_head) + (values ? layout.half_words : 0);
    }

    void score() {
        if constexpr (kv == INT8) {
            byte_product(half(page, false), layout.key_words, PAGE / LANES, query_rows, count, [&](int q, int block, Floats sums) {
                store(scores + q * PAGE + block * LANES, byte_scores(q, page * PAGE / LANES + block, sums));
            });
        } else {
            this->score_page(pages, kv_head, page, queries, count, spreads ? next : nullptr,
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

    // Turns scores into weights, exp(score - largest so far), and adds them up. When a larger score appears, earlier sums are
    // scaled by `factors`: those of all queries, because a branch for some would be mispredicted.
    void weigh() {
        alignas(64) float larger[TILE_QUERIES];
        each_query([&](int row, int low, int high, int q) {
            float* weights = scores + q * PAGE;
            larger[q] = tops[q];
            if (low >= high) return;
            if (layer.relative) shift(weights, row, low, high, layer.relative + head_of(q) * (2 * m.farthest + 1));
            if (m.biases) slant(weights, row, low, high, m.biases + head_of(q) * m.bias_stride);
            if (low > 0 || high < PAGE) std::fill(weights, weights + low, -INFINITY), std::fill(weights + high, weights + PAGE, -INFINITY);
            Floats largest = floats(tops[q]);
            each<PAGE / LANES>([&](auto i) __attribute__((always_inline)) { largest = largest_of(largest, load(weights + i() * LANES)); });
            const float top = largest_lane(largest);
            larger[q] = top > tops[q] ? top : tops[q];
        });
        for (int q = 0; q < count; q += LANES) {
            store(factors + q, exponential(load(tops + q) - load(larger + q)));
            store(tops + q, load(larger + q));
        }
        if (next && !spreads) prefetch_page();  // here, where nothing else is read from beyond the first level of caches
        each_query([&](int, int low, int high, int q) {
            float* weights = scores + q * PAGE;
            if (low < high) soften(floats(tops[q]), floats(factors[q]), of_query(current, q).sums(), weights, bytes + q * ROW_WORDS);
            else if constexpr (PAIRED) std::fill(bytes + q * ROW_WORDS, bytes + (q + 1) * ROW_WORDS, 0);
            else std::fill(weights, weights + PAGE, 0.0f);
            if constexpr (kv == INT8) weigh_bytes(q, weights);
        });
    }

    void prefetch_page() const {
        for (const Word *line = next, *const behind = next + 2 * layout.half_words; line < behind; line += LANES) prefetch(line);
    }

    // Calls f(row, first key of the page, end, query).
    template <class F>
    INLINE void each_query(F f) const {
        for (int row = first, q = 0; row < last; row++) {
            const int low = first_in_page(row), high = end_in_page(row);
            for (const int end_row = q + group; q < end_row; q++) f(row, low, high, q);
        }
    }

    // paired: where weights are stored as bfloat16, for values of two keys at once.
    INLINE static void soften(Floats top, Floats factor, float* sums, float* weights, Word* paired) {
        Floats sum = load(sums) * factor, e[PAGE / LANES];
        each<PAGE / LANES>([&](auto i) __attribute__((always_inline)) {
            const Floats score = load(weights + i() * LANES);
            e[i()] = keep(different(score, floats(-INFINITY)), exponential(score - top));
        });
        each<PAGE / LANES>([&](auto i) __attribute__((always_inline)) { sum = sum + e[i()]; });
        if constexpr (PAIRED) put_vectors(paired, e);
        else each<PAGE / LANES>([&](auto i) __attribute__((always_inline)) { store(weights + i() * LANES, e[i()]); });
        store(sums, sum);
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
        const Word* values = half(page, true);
        if constexpr (kv == INT8) {
            if (branched) {
                for (int q = 0; q < count; q++) mix_branched_bytes(q, values);
            } else {
                byte_product(values, PAGE / 4, layer.head_dim / LANES, weight_rows, count,
                             [&](int q, int block, Floats sums) { add_bytes(q, block, sums); });
            }
            return;
        }
        if (branched) return mix_branched();
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
        const int dim = layer.head_dim, stride = int(Softmax::numbers(dim)), turns = PAIRED ? keys / 2 : keys;
        const bool asks = spreads && next && many == count;  // for its part of the next page's values, and with AMX of its keys
        const Word* const wanted = TILES ? next : next + layout.half_words;
        const int64_t all = (TILES ? 2 : 1) * layout.half_words / LANES, all_turns = int64_t(tiles.count) * ceiling(dim, V * LANES) * turns;
        const int lines = asks ? int((all + all_turns - 1) / all_turns) : 0;
        int64_t line = 0;
        for (int at = 0; at < dim; at += V * LANES)
            for (int t = 0; t < tiles.count; t++, line += int64_t(lines) * turns) {
                const int q = from + tiles.first(t);
                const MixTile tile{PAIRED ? (const float*)bytes + q * ROW_WORDS : scores + q * PAGE, current + q * stride + at, factors + q, stride, at, keys,
                                   asks ? wanted + line * LANES : nullptr, line < all ? lines : 0};
                pick_mix<Q, V>(tiles.height(t), std::min((dim - at) / LANES, V), tile, value);
            }
    }

    struct MixTile {
        const float* weights;  // [queries][PAGE], or paired weights [queries][ROW_WORDS]
        float* to;             // [queries][stride]
        const float* factors;  // of what is there
        int64_t stride;
        int at, keys;          // number of a value where `to` begins; keys of the page
        const Word* next;      // is prefetched, `lines` cache lines for each step
        int lines;

        INLINE void ask() {
            for (int i = 0; i < lines; i++, next += LANES) prefetch_far(next);
        }
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
            each<V>([&](auto v) __attribute__((always_inline)) { sums[q()][v()] = load(tile.to + q() * tile.stride + v() * LANES) * floats(tile.factors[q()]); });
        });
        if constexpr (PAIRED) {
            const Word* weight = (const Word*)tile.weights;
            for (int key = 0; key < tile.keys; key += 2, weight++) {
                tile.ask();
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
                tile.ask();
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
        float* to = of_query(current, q).mixed + block * LANES;
        store(to, multiply_add(floats(weight_rows[q].scale), sums, load(to) * floats(factors[q])));
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

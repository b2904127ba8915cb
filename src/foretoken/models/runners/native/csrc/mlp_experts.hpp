// The MLP of a mixture of experts (1701.06538): each row takes a few of many experts, and perhaps a shared one.
//
// Rows are grouped by expert, so each expert that any row chose is read once a pass. Its units are computed for all of its
// rows, each element in the order of every other product, and a row adds up its own experts from the best to the last,
// then the shared one. So a row's result does not depend on what else was routed with it.
#pragma once

#include "rows.hpp"

constexpr int64_t ADDED_AT_ONCE = 512;  // numbers of a row
constexpr int ROUTED_AT_ONCE = 16;      // register tiles of router rows

// The sizes of a layer of experts.
struct ExpertSizes {
    int64_t inputs;         // floats of a row for the router
    int64_t up_units, down_units;       // of one expert
    int64_t inner, shared_inner;        // numbers between up and down, padded to sixteen
    bool shared;

    explicit ExpertSizes(const ExpertsSpec& s)
        : inputs(s.router.weights.steps * per_word((Kind)s.router.weights.kind)), up_units(s.up.units / s.router.experts),
          down_units(s.down.units / s.router.experts), inner(s.inner), shared_inner(s.shared_inner),
          shared(s.shared_up.units) {}
};

template <Kind kv>
struct ExpertMlp {
    Rows<kv>& p;
    ExpertRoom& room;

    ExpertMlp(Rows<kv>& rows, Workspace& w) : p(rows), room(w.experts) {}

    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        ExpertRoom& room = w.experts;
        room.layers.resize(m.layer_count), room.adapted.resize(m.layer_count);
        room.active = nullptr;
        if ((int)room.own.size() < threads) room.own.resize(threads);
        for (int i = 0; i < m.layer_count; i++)
            if (m.layers[i].mlp == EXPERTS) reserve(m, m.layers[i].experts, b.rows, room, room.layers[i], threads);
        if (!room.own[0].size) return;
        room.active = &room.active_by_rows[b.rows];
        room.active->assign(m.layer_count, 0);
    }

    // Computes what the experts of each row return.
    void enter(const LayerSpec& layer, int number) {
        const Work work(*this, layer.experts, number);
        prepare(work, layer.mlp_norm);
        route(work);
        multiply_up(work, layer.mlp_norm);
        multiply_down(work);
    }

    // Adds it to the residual stream; where there is a dense MLP beside, it stays in `branch`.
    void leave(const LayerSpec& layer, int number) {
        const Work work(*this, layer.experts, number);
        float* to = layer.after_mlp ? p.branch : p.hidden;
        const Floats scale = floats(p.m.mlp_factor);
        each_sum(work, [&](int64_t r, int64_t i, Floats sum) {
            float* at = to + r * p.width + i;
            store(at, layer.after_mlp ? sum : multiply_add(sum, scale, load(at)));
        });
        if (layer.after_mlp && !layer.after_beside) p.add_branch(layer.after_mlp, p.m.mlp_factor);
    }

    // Multiplies as many experts as the last pass over `rows` rows chose, and nothing else; before one was run, as many as
    // rows choose if every expert is as likely.
    static void floor(const ExpertsSpec& s, const std::vector<int32_t>* active, int number, Member& member, int rows,
                      const Input& x) {
        const int experts = s.router.experts, pairs = rows * s.router.chosen;
        const double missed = std::pow(1.0 - (double)s.router.chosen / experts, rows);
        int count = std::max(1, (int)std::lround(experts * (1.0 - missed)));
        if (active && (*active)[number]) count = (*active)[number];
        alignas(64) float sink[BLOCKS * LANES];
        for (int half = 0; half < 2; half++) {
            const Matrix &w = half ? s.down : s.up, &shared = half ? s.shared_down : s.shared_up;
            each_part(s, w, shared, member, rows, [&](int expert, Share units) {
                if (expert >= count) return;
                const Matrix& part = expert < 0 ? shared : w;
                const int of_expert = expert < 0 ? rows : int((int64_t)pairs * (expert + 1) / count - (int64_t)pairs * expert / count);
                const int64_t first = expert < 0 ? 0 : (int64_t)experts * expert / count * (w.units / experts);
                const Input own{x.words, x.scales, input_stride(part), part.scale_words()};
                functions(part).rows(part, own, of_expert, range(first, units),
                                     {sink, 0, false, 1.0f, 0.0f, 0});
            });
        }
    }

   private:
    // One layer of a pass.
    struct Work {
        const ExpertsSpec& s;
        const ExpertSizes sizes;
        const int number;  // of the layer
        Routing& routing;
        LoraItems& adapted;  // pairs of rows and experts
        const int rows;
        const int64_t pairs;  // of a row and one of its experts; those of rows and the shared expert follow them

        Work(ExpertMlp& mlp, const ExpertsSpec& s, int number)
            : s(s), sizes(s), number(number), routing(mlp.room.layers[number]), adapted(mlp.room.adapted[number]),
              rows(mlp.p.b.rows), pairs((int64_t)rows * s.router.chosen) {}

        // The rows of expert `number` of those that any row chose; -1: the shared one.
        ExpertRows at(int number) const {
            return number < 0 ? ExpertRows{0, (int32_t)pairs, int32_t(pairs + rows)} : routing.active[number];
        }
    };

    static void reserve(const ModelSpec& m, const ExpertsSpec& s, int rows, ExpertRoom& room, Routing& routing, int threads) {
        const ExpertSizes sizes(s);
        const int64_t pairs = (int64_t)rows * s.router.chosen, shared = sizes.shared ? rows : 0;
        routing.reserve(s.router, rows);
        room.normed.template room<float>(rows * sizes.inputs);
        room.logits.template room<float>(rows * s.router.width());
        room.words.template room<Word>(rows * input_stride(s.up));
        room.scales.template room<float>(rows * s.up.scale_words());
        room.shared_words.template room<Word>(shared * input_stride(s.shared_up));
        room.shared_scales.template room<float>(shared * s.shared_up.scale_words());
        room.shared_weights.template room<float>(shared);
        room.inner_words.template room<Word>(pairs * input_stride(s.down) + shared * input_stride(s.shared_down));
        room.inner.template room<float>(pairs * sizes.inner + shared * sizes.shared_inner);
        room.outputs.template room<float>((pairs + shared) * padded(m.hidden, BLOCKS * LANES));
        int64_t words = 0;
        for (const Matrix* w : {&s.up, &s.down, &s.shared_down}) words = std::max(words, input_stride(*w) + w->scale_words());
        for (int t = 0; t < threads; t++) room.own[t].template room<Word>(rows * words);
    }

    static Units range(int64_t first, Share units) { return Units(Share(first + units.first, first + units.last)); }

    static Input input(const Buffer& words, const Buffer& scales, const Matrix& w) {
        return {(Word*)words.data, (float*)scales.data, input_stride(w), w.scale_words()};
    }

    static void encode(const Matrix& w, const float* row, int64_t count, const Input& to, int64_t r) {
        functions(w).encode(w, row, count, to.words + r * to.stride, to.scales + r * to.scale_stride);
    }

    // The normed rows in float32 for the router, and as words for the experts.
    void prepare(const Work& work, const NormSpec& norm) {
        const ExpertsSpec& s = work.s;
        const int64_t inputs = work.sizes.inputs, hidden = p.m.hidden, count = padded(hidden, LANES);
        const Added added = p.added_to_normed(work.number, &LoraLayer::shared_gate, norm);
        p.member.each(work.rows, 1, [&](int64_t r) {
            float* row = (float*)room.normed.data + r * inputs;
            normalize(p.m, p.hidden + r * p.width, norm, hidden, row);
            std::fill(row + hidden, row + inputs, 0.0f);
            encode(s.up, row, count, input(room.words, room.scales, s.up), r);
            if (work.sizes.shared) {
                encode(s.shared_up, row, count, input(room.shared_words, room.shared_scales, s.shared_up), r);
                ((float*)room.shared_weights.data)[r] = s.shared_gate ? shared_weight(row, s.shared_gate, added, r) : 1.0f;
            }
            if (s.router_norm) normalize(p.m, p.hidden + r * p.width, s.router_norm, hidden, row);
        });
    }

    // The input of `down` for a pair: words, and floats where words are encoded later.
    Word* inner_words(const Work& work, int64_t pair) const {
        Word* words = (Word*)room.inner_words.data;
        if (pair < work.pairs) return words + pair * input_stride(work.s.down);
        return words + work.pairs * input_stride(work.s.down) + (pair - work.pairs) * input_stride(work.s.shared_down);
    }
    float* inner_floats(const Work& work, int64_t pair) const {
        float* floats = (float*)room.inner.data;
        if (pair < work.pairs) return floats + pair * work.sizes.inner;
        return floats + work.pairs * work.sizes.inner + (pair - work.pairs) * work.sizes.shared_inner;
    }

    // The weight of the shared expert.
    float shared_weight(const float* row, const float* gate, const Added& added, int64_t r) const {
        float own = product_of(row, gate);
        if (added.rows && added.rows[r]) own += *added.rows[r];
        return first_lane(logistic(floats(own)));
    }

    float product_of(const float* row, const float* weights) const {
        Floats sum = floats(0.0f);
        int64_t i = 0;
        for (; i + LANES <= p.m.hidden; i += LANES) sum = multiply_add(load(row + i), load(weights + i), sum);
        float total = sum_of(sum);
        for (; i < p.m.hidden; i++) total += row[i] * weights[i];
        return total;
    }

    // Which experts each row takes. Few rows are chosen for by the thread that orders them.
    void route(const Work& work) {
        const RouterSpec& router = work.s.router;
        const int rows = work.rows, at_once = ROUTED_AT_ONCE * ROUTER_ROWS;
        float *normed = (float*)room.normed.data, *logits = (float*)room.logits.data;
        const int64_t blocks = router.weights.units * BLOCKS, parts = (rows + at_once - 1) / at_once;
        p.member.each(blocks * parts, 1, [&](int64_t item) {
            const int first = int(item / blocks) * at_once, count = std::min(rows - first, at_once);
            router_logits(router, normed + first * work.sizes.inputs, work.sizes.inputs, count, item % blocks,
                          logits + first * router.width());
        });
        const Added added = p.lora(work.number, &LoraLayer::router, p.m.hidden, [&](int64_t r, float* to) {
            std::memcpy(to, normed + r * work.sizes.inputs, sizeof(float) * p.m.hidden);
        });
        auto choose = [&](int64_t r) {
            const int64_t at = r * router.chosen;
            for (int e = 0; added.rows && added.rows[r] && e < router.experts; e++) logits[r * router.width() + e] += added.rows[r][e];
            choose_experts(router, logits + r * router.width(), &work.routing.experts[at], &work.routing.weights[at]);
            for (int i = 0; work.s.expert_scales && i < router.chosen; i++)
                work.routing.weights[at + i] *= work.s.expert_scales[work.routing.experts[at + i]];
        };
        const bool few = rows <= REPEATED_ROWS;
        if (!few) p.member.each(rows, 4, choose);
        p.member.each(1, 1, [&](int64_t) {
            for (int r = 0; few && r < rows; r++) choose(r);
            work.routing.sort(router, rows);
            (*room.active)[work.number] = work.routing.count;
            p.lora.gather(work.adapted, work.routing, work.pairs, work.number);
        });
    }

    // Calls part(number, units) for what this thread claims of the shared expert (number -1) and of the experts from 0 on. There
    // are items for as many as the rows can choose, so that a thread that comes late knows the length of the loop.
    template <class Part>
    static void each_part(const ExpertsSpec& s, const Matrix& w, const Matrix& shared, Member& member, int rows, Part part) {
        const int64_t units = w.units / s.router.experts, max_active = Routing::max_active(s.router, rows);
        Matrix whole = w;
        whole.units = shared.units + max_active * units;
        Loop loop = member.begin(whole.units, units_at_once(whole, (int)(rows * s.router.chosen / max_active), member.threads));
        for (Share items(0, 0); loop.next(items);)
            for (int64_t at = items.first, end; at < items.last; at = end) {
                const int64_t number = at < shared.units ? -1 : (at - shared.units) / units;
                const int64_t begin = number < 0 ? 0 : shared.units + number * units;
                end = std::min(items.last, number < 0 ? shared.units : begin + units);
                part((int)number, Share(at - begin, end - begin));
            }
        member.end(loop);
    }

    Word* own() const { return (Word*)room.own[p.member.thread].data; }

    // The input rows of an expert beside each other: themselves if they are, else copies in this thread's memory.
    Input gathered(const Work& work, const ExpertRows& e) const {
        Input x = input(room.words, room.scales, work.s.up);
        const int32_t* from = &work.routing.row_of[e.first];
        const int count = e.last - e.first;
        if (from[count - 1] - from[0] == count - 1) {
            x.words += from[0] * x.stride, x.scales += from[0] * x.scale_stride;
            return x;
        }
        const Input to{own(), (float*)(own() + count * x.stride), x.stride, x.scale_stride};
        for (int i = 0; i < count; i++) {
            std::memcpy(to.words + i * x.stride, x.words + from[i] * x.stride, sizeof(Word) * x.stride);
            std::memcpy(to.scales + i * x.scale_stride, x.scales + from[i] * x.scale_stride, sizeof(float) * x.scale_stride);
        }
        return to;
    }

    // activation(gate) * up of every pair, or activation(up).
    void multiply_up(const Work& work, const NormSpec& norm) {
        const ExpertsSpec& s = work.s;
        const Added of_shared = p.added_to_normed(work.number, &LoraLayer::shared_up, norm);
        const Added of_pairs = p.lora.of_pairs(work.adapted, work.number, &LoraLayer::expert_up, p.m.hidden, [&](int64_t pair, float* to) {
            normalize(p.m, p.hidden + work.routing.row_of[pair] * p.width, norm, p.m.hidden, to);
        });
        int held = -1;
        Input x{};
        each_part(s, s.up, s.shared_up, p.member, work.rows, [&](int number, Share units) {
            if (number >= work.routing.count) return;
            const ExpertRows e = work.at(number);
            const bool shared = number < 0;
            if (shared) x = input(room.shared_words, room.shared_scales, s.shared_up);
            else if (number != held) x = gathered(work, e);
            held = number;
            const Matrix &up = shared ? s.shared_up : s.up, &down = shared ? s.shared_down : s.down;
            const int64_t first = shared ? 0 : e.expert * work.sizes.up_units;
            ActivatedStore store{down, inner_words(work, e.first), inner_floats(work, e.first),
                                 shared ? work.sizes.shared_inner : work.sizes.inner, p.m.activation, s.gated != 0, first,
                                 s.limit, s.slope};
            store.added = shared ? of_shared : of_pairs.from(e.first);
            if (s.scaled_inputs && !shared) store.row_factors = &work.routing.weight_of[e.first];
            functions(up).activated(up, x, e.last - e.first, range(first, units), store);
        });
    }

    void multiply_down(const Work& work) {
        const ExpertsSpec& s = work.s;
        const Added of_shared = p.lora(work.number, &LoraLayer::shared_down, work.sizes.shared_inner, [&](int64_t row, float* to) {
            inner_numbers(work, s.shared_down, work.pairs + row, work.sizes.shared_inner, to);
        });
        const Added of_pairs = p.lora.of_pairs(work.adapted, work.number, &LoraLayer::expert_down, work.sizes.inner, [&](int64_t pair, float* to) {
            inner_numbers(work, s.down, pair, work.sizes.inner, to);
        });
        int held = -2;
        Input x{};
        each_part(s, s.down, s.shared_down, p.member, work.rows, [&](int number, Share units) {
            if (number >= work.routing.count) return;
            const ExpertRows e = work.at(number);
            const bool shared = number < 0;
            const Matrix& down = shared ? s.shared_down : s.down;
            if (number != held) x = inner_input(work, down, e, shared ? work.sizes.shared_inner : work.sizes.inner);
            held = number;
            const int64_t first = shared ? 0 : e.expert * work.sizes.down_units;
            RowStore store{(float*)room.outputs.data + e.first * p.width, p.width};
            store.first_unit = first;
            store.added = shared ? of_shared : of_pairs.from(e.first);
            functions(down).rows(down, x, e.last - e.first, range(first, units), store);
        });
    }

    // The numbers of a pair before `down`.
    void inner_numbers(const Work& work, const Matrix& down, int64_t pair, int64_t count, float* to) const {
        if (!is_float(down)) return (void)std::memcpy(to, inner_floats(work, pair), sizeof(float) * count);
        const Word* words = inner_words(work, pair);
        for (int64_t i = 0; i < count; i += LANES) store(to + i, get_floats(down, words, i));
    }

    // The inputs of an expert's `down`. Kinds that are not floats are encoded here, in this thread's memory.
    Input inner_input(const Work& work, const Matrix& down, const ExpertRows& e, int64_t count) const {
        Input x{inner_words(work, e.first), (float*)own(), input_stride(down), down.scale_words()};
        if (is_float(down)) return x;
        x.words = own(), x.scales = (float*)(own() + (e.last - e.first) * input_stride(down));
        for (int i = 0; i < e.last - e.first; i++) encode(down, inner_floats(work, e.first) + i * count, count, x, i);
        return x;
    }

    // Calls f(row, at, sixteen floats) with the weighted sum of each row's experts, the best first, then the shared one.
    template <class F>
    void each_sum(const Work& work, F f) {
        const int64_t width = p.width, chunks = (width + ADDED_AT_ONCE - 1) / ADDED_AT_ONCE;
        const int chosen = work.s.router.chosen;
        const float *outputs = (float*)room.outputs.data, *shared = outputs + work.pairs * width;
        p.member.each(work.rows * chunks, 1, [&](int64_t item) {
            const int64_t r = item / chunks, from = item % chunks * ADDED_AT_ONCE;
            const int32_t* pairs = &work.routing.pairs[r * chosen];
            const float* weights = &work.routing.weights[r * chosen];
            const bool weighted = !work.s.scaled_inputs;
            for (int64_t i = from; i < std::min(width, from + ADDED_AT_ONCE); i += LANES) {
                Floats sum = floats(weighted ? weights[0] : 1.0f) * load(outputs + pairs[0] * width + i);
                for (int j = 1; j < chosen; j++)
                    sum = multiply_add(floats(weighted ? weights[j] : 1.0f), load(outputs + pairs[j] * width + i), sum);
                if (work.sizes.shared)
                    sum = multiply_add(floats(((float*)room.shared_weights.data)[r]), load(shared + r * width + i), sum);
                f(r, i, sum);
            }
        });
    }
};

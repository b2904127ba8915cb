// LoRA adapters (2106.09685): low-rank products that are added to those of a layer, for the rows of sequences that have one.
//
// The rows of each adapter are gathered, so that its matrices are read once for all of them. Everything is float32, and an
// element is summed in the order of every other product, so a row's result depends neither on the other rows nor on their
// adapters. It is added where the layer's own product is stored.
#pragma once

#include "norms.hpp"
#include "workspace.hpp"

struct Lora {
    Member& member;
    Adapted* adapted;
    Adapted& answered;
    float *inputs, *inner, *added, *added_heads, *added_pairs;
    std::vector<int64_t> starts;  // of the tiles' units, in the order of a loop

    Lora(Workspace& w, Member& member)
        : member(member), adapted(&w.adapted), answered(w.answered_adapted), inputs((float*)w.lora_inputs.data),
          inner((float*)w.lora_inner.data), added((float*)w.lora_added.data), added_heads((float*)w.lora_added_heads.data),
          added_pairs((float*)w.lora_added_pairs.data) {}

    // Plans the rows, and allocates the memory, before threads start. The answered batch is planned.
    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w) {
        int32_t chosen = 0;
        for (int i = 0; i < m.layer_count; i++)
            if (m.layers[i].mlp == EXPERTS) chosen = std::max(chosen, m.layers[i].experts.router.chosen);
        w.adapted.plan(b, m.heads);
        w.answered_adapted.plan(w.answered.batch, m.heads);
        const int64_t rows = (int64_t)w.adapted.rows.places.size();
        auto room = [&](int64_t items, const LoraWidths& widths, Buffer& results) {
            w.lora_inputs.room<float>(items * widths.input);
            w.lora_inner.room<float>(items * widths.inner);
            results.room<float>(items * widths.added);
        };
        room(rows, w.adapted.row_widths, w.lora_added);
        room(rows * m.heads, w.adapted.head_widths, w.lora_added_heads);
        room(rows * chosen, w.adapted.pair_widths, w.lora_added_pairs);
    }

    void rows_left() { adapted = &answered; }

    // Gathers the pairs of rows and experts whose adapter changes experts of a layer, by adapter, then by expert.
    void gather(LoraItems& items, const Routing& routing, int64_t pairs, int layer) const {
        items.clear(adapted->adapters.empty() ? 0 : pairs);
        for (const LoraAdapter* adapter : adapted->adapters) {
            if (!adapter->layers[layer].expert_up && !adapter->layers[layer].expert_down) continue;
            for (int i = 0; i < routing.count; i++) {
                const ExpertRows& e = routing.active[i];
                const int start = (int)items.places.size();
                for (int32_t pair = e.first; pair < e.last; pair++)
                    if (adapted->of_row[routing.row_of[pair]] == adapter) items.places.push_back(pair);
                items.cut(adapter, e.expert, start);
            }
        }
    }

    // Whether an adapter changes products of single heads.
    bool changes_heads() const { return adapted->head_widths.input; }

    // Computes what is added to a product of a layer. fill(row, to) stores the input of one of the pass's rows, `count` floats.
    template <class Fill>
    Added operator()(int layer, LoraSpec LoraLayer::*product, int64_t count, Fill fill) {
        auto spec = [&](const LoraTile& tile) { return &(tile.adapter->layers[layer].*product); };
        return compute(adapted->rows, adapted->row_widths, added, spec, count, fill);
    }

   private:
    // Returns a function that returns a tile's matrices of a head or expert.
    static auto of_parts(int layer, const LoraSpec* LoraLayer::*product) {
        return [=](const LoraTile& tile) {
            static const LoraSpec none{};
            const LoraSpec* parts = tile.adapter->layers[layer].*product;
            return parts ? parts + tile.part : &none;
        };
    }

   public:
    // The same for each head's product. fill(head * rows + row, to) stores its input; the result is by this number, too.
    template <class Fill>
    Added of_heads(int layer, const LoraSpec* LoraLayer::*product, int64_t count, Fill fill) {
        return compute(adapted->heads, adapted->head_widths, added_heads, of_parts(layer, product), count, fill);
    }

    // The same for pairs of rows and experts. fill(pair, to) stores the input of one.
    template <class Fill>
    Added of_pairs(LoraItems& pairs, int layer, const LoraSpec* LoraLayer::*product, int64_t count, Fill fill) {
        return compute(pairs, adapted->pair_widths, added_pairs, of_parts(layer, product), count, fill);
    }

   private:
    // Computes a product for all items. spec(tile) returns a tile's matrices.
    template <class Spec, class Fill>
    Added compute(LoraItems& items, const LoraWidths& widths, float* results, Spec spec, int64_t count, Fill fill) {
        int64_t steps = 0;
        for (const LoraTile& tile : items.tiles) steps = std::max(steps, spec(tile)->down.matrix.steps);
        if (!steps) return {};
        member.each((int64_t)items.places.size(), 1, [&](int64_t i) {
            const int32_t place = items.places[i];
            float* to = inputs + i * widths.input;
            fill(place, to);
            std::fill(to + count, to + std::max(steps, count), 0.0f);
            items.added[place] = spec(items.tile_of(i))->down.matrix.data ? results + i * widths.added : nullptr;
        });
        auto down = [&](const LoraTile& tile, auto f) { f(spec(tile)->down); };
        auto up = [&](const LoraTile& tile, auto f) {
            for (const LoraPart& part : spec(tile)->up) f(part);
        };
        multiply(items.tiles, down, inputs, widths.input, inner, widths.inner);
        multiply(items.tiles, up, inner, widths.inner, results, widths.added);
        return {items.added.data()};
    }

    // Multiplies each tile's items of x with parts of its adapter. parts(tile, f) calls f with each.
    template <class Parts>
    void multiply(const std::vector<LoraTile>& tiles, Parts parts, const float* x, int64_t x_width, float* to, int64_t width) {
        starts.assign(1, 0);
        for (const LoraTile& tile : tiles) {
            int64_t units = 0;
            parts(tile, [&](const LoraPart& part) { units += part.matrix.units; });
            starts.push_back(starts.back() + units);
        }
        const int64_t all = starts.back();
        Loop loop = member.begin(all, std::max<int64_t>(1, std::min<int64_t>(8, all / (4 * member.threads))));
        for (Share items(0, 0); loop.next(items);) {
            size_t t = std::upper_bound(starts.begin(), starts.end(), items.first) - starts.begin() - 1;
            for (; t < tiles.size() && starts[t] < items.last; t++) {
                const LoraTile& tile = tiles[t];
                int64_t begin = starts[t];  // of a part's units
                parts(tile, [&](const LoraPart& part) {
                    const Matrix& w = part.matrix;
                    const Share mine(std::max(items.first, begin) - begin, std::min(items.last, begin + w.units) - begin);
                    begin += w.units;
                    if (mine.first >= mine.last) return;
                    const Input rows{(Word*)(x + tile.first * x_width + part.first), nullptr, x_width, 0};
                    RowStore store{to + tile.first * width + part.to * LANES, width};
                    store.unit_stride = part.step * BLOCKS * LANES, store.block_stride = part.step * LANES;
                    functions(w).rows(w, rows, tile.last - tile.first, Units(mine), store);
                });
            }
        }
        member.end(loop);
    }
};

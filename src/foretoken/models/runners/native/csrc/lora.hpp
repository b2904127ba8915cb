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
    const int64_t input_width, inner_width, added_width;  // floats of a row
    float *inputs, *inner, *added;

    Lora(const ModelSpec& m, Workspace& w, Member& member)
        : Lora(Sizes(m, w.adapted), w, member) {}

    // Plans the rows, and allocates the memory, before threads start. The answered batch is planned.
    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w) {
        w.adapted.plan(b);
        w.answered_adapted.plan(w.answered.batch);
        const Sizes sizes(m, w.adapted);
        const int64_t rows = (int64_t)w.adapted.rows.size();
        w.lora_inputs.room<float>(rows * sizes.input);
        w.lora_inner.room<float>(rows * sizes.inner);
        w.lora_added.room<float>(rows * sizes.added);
    }

    void rows_left() { adapted = &answered; }

    // Computes what is added to a product of a layer. fill(row, to) stores the input of one of the pass's rows, `count` floats.
    template <class Fill>
    Added operator()(int layer, LoraSpec LoraLayer::*product, int64_t count, Fill fill) {
        auto spec = [&](const AdapterRows& tile) -> const LoraSpec& { return tile.layers[layer].*product; };
        int64_t steps = 0;
        for (const AdapterRows& tile : adapted->tiles) steps = std::max(steps, spec(tile).down.matrix.steps);
        if (!steps) return {};
        member.each((int64_t)adapted->rows.size(), 1, [&](int64_t r) {
            float* to = inputs + r * input_width;
            fill(adapted->rows[r], to);
            std::fill(to + count, to + std::max(steps, count), 0.0f);
            adapted->added[adapted->rows[r]] = spec(tile_of(r)).down.matrix.data ? added + r * added_width : nullptr;
        });
        multiply([&](const AdapterRows& tile, auto f) { f(spec(tile).down); }, inputs, input_width, inner, inner_width);
        auto up = [&](const AdapterRows& tile, auto f) {
            for (const LoraPart& part : spec(tile).up) f(part);
        };
        multiply(up, inner, inner_width, added, added_width);
        return {adapted->added.data()};
    }

   private:
    // The longest rows of all products.
    struct Sizes {
        int64_t input = 0, inner = 0, added = 0;
        Sizes(const ModelSpec& m, const Adapted& adapted) {
            for (const AdapterRows& tile : adapted.tiles)
                for (int i = 0; i < m.layer_count; i++)
                    for (const LoraSpec* s : {&tile.layers[i].qkv, &tile.layers[i].out, &tile.layers[i].up, &tile.layers[i].down}) {
                        input = std::max(input, s->down.matrix.steps);
                        inner = std::max(inner, width(s->down));
                        for (const LoraPart& part : s->up) added = std::max(added, width(part));
                    }
        }
        // Numbers of a result row up to the end of a part.
        static int64_t width(const LoraPart& part) {
            return part.matrix.units ? (part.to + (part.matrix.units * BLOCKS - 1) * part.step + 1) * LANES : 0;
        }
    };

    Lora(const Sizes& sizes, Workspace& w, Member& member)
        : member(member), adapted(&w.adapted), answered(w.answered_adapted), input_width(sizes.input), inner_width(sizes.inner),
          added_width(sizes.added), inputs((float*)w.lora_inputs.data), inner((float*)w.lora_inner.data),
          added((float*)w.lora_added.data) {}

    const AdapterRows& tile_of(int64_t r) const {
        return *std::find_if(adapted->tiles.begin(), adapted->tiles.end(), [&](const AdapterRows& tile) { return r < tile.last; });
    }

    // Multiplies each tile's rows of x with parts of its adapter. parts(tile, f) calls f with each.
    template <class Parts>
    void multiply(Parts parts, const float* x, int64_t x_width, float* to, int64_t width) {
        int64_t units = 0;
        for (const AdapterRows& tile : adapted->tiles) parts(tile, [&](const LoraPart& part) { units += part.matrix.units; });
        Loop loop = member.begin(units, std::max<int64_t>(1, std::min<int64_t>(8, units / (4 * member.threads))));
        for (Share items(0, 0); loop.next(items);) {
            int64_t begin = 0;  // of a part's units
            for (const AdapterRows& tile : adapted->tiles)
                parts(tile, [&](const LoraPart& part) {
                    const Matrix& w = part.matrix;
                    const Share mine(std::max(items.first, begin) - begin, std::min(items.last, begin + w.units) - begin);
                    begin += w.units;
                    if (mine.first >= mine.last) return;
                    const Input rows{(Word*)(x + tile.first * x_width + part.from), nullptr, x_width, 0};
                    RowStore store{to + tile.first * width + part.to * LANES, width};
                    store.unit_stride = part.step * BLOCKS * LANES, store.block_stride = part.step * LANES;
                    functions(w).rows(w, rows, tile.last - tile.first, Units(mine), store);
                });
        }
        member.end(loop);
    }
};

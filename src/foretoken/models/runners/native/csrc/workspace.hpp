// Memory of passes that grows with the number of rows and is reused by later passes.
#pragma once

#include <algorithm>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "last.hpp"

// Aligned memory that only grows. It is zeroed, because padding must be zero.
struct Buffer {
    char* data = nullptr;
    size_t size = 0;

    Buffer() = default;
    Buffer(Buffer&& other) noexcept : data(std::exchange(other.data, nullptr)), size(std::exchange(other.size, 0)) {}
    ~Buffer() { release(); }

    template <class T>
    T* room(int64_t count) {
        size_t need = padded(count * sizeof(T), 64);
        if (need > size) {
            release();
            data = (char*)operator new(need + need / 2, ALIGNMENT);
            size = need + need / 2;
            std::memset(data, 0, size);
        }
        return (T*)data;
    }
    void release() {
        if (data) operator delete(data, ALIGNMENT);
        data = nullptr;
        size = 0;
    }

   private:
    static constexpr std::align_val_t ALIGNMENT{64};
};

// The longest input row of a model's products: its words, and the floats beside it.
struct Widest {
    int64_t words = 0, scales = 0;
    bool encoded = false;  // some rows are floats first
    explicit Widest(const ModelSpec& m) {
        add(m.head);
        if (m.layer_inputs.width) add(m.layer_inputs.projection);
        if (m.fused_layers) add(m.fusion);
        for (int i = 0; i < m.layer_count; i++) each_matrix(m.layers[i], [&](const Matrix& w) { add(w); });
        scales = padded(scales, LANES);
    }
    void add(const Matrix& w) {
        words = std::max(words, input_stride(w)), scales = std::max(scales, w.scale_words()), encoded |= !is_float(w);
    }
};

// Queries of one sequence that attention computes together.
struct QueryTile {
    int32_t sequence, first, last;
};

// The tiles of a pass, for each number of heads that are computed together.
struct Tiles {
    void clear() { by_heads.clear(); }

    // Cuts the rows of each sequence into tiles of at most `rows` rows, unless that was done for this number of heads.
    void add(int heads, int rows, const BatchSpec& b) {
        const auto [at, missing] = by_heads.try_emplace(heads);
        for (int s = 0; missing && s < b.sequences; s++) {
            const int first = b.sequence_from[s];
            const RowTiles tiles(b.sequence_from[s + 1] - first, rows);
            for (int t = 0; t < tiles.count; t++) at->second.push_back({s, first + tiles.first(t), first + tiles.first(t + 1)});
        }
    }

    const std::vector<QueryTile>& of(int heads) const { return by_heads.at(heads); }

   private:
    std::map<int, std::vector<QueryTile>> by_heads;
};

// Items [first, last) of a list that take the same low-rank products: those of an adapter, and of one head or expert.
struct LoraTile {
    const LoraAdapter* adapter;
    int32_t part;  // number of the head or expert
    int32_t first, last;
};

// What low-rank products are computed for: places of the pass, those of each adapter beside each other.
struct LoraItems {
    static constexpr int TILE_ITEMS = 16;
    std::vector<LoraTile> tiles;
    std::vector<int32_t> places;
    std::vector<const float*> added;  // [all places of the pass]; see `Added`

    void clear(int64_t all) { tiles.clear(), places.clear(), added.assign(all, nullptr); }

    // Cuts the places that were appended from `start` on into tiles.
    void cut(const LoraAdapter* adapter, int part, int start) {
        for (int first = start, count = (int)places.size(); first < count; first += TILE_ITEMS)
            tiles.push_back({adapter, part, first, std::min(first + TILE_ITEMS, count)});
    }

    const LoraTile& tile_of(int64_t item) const {
        return *std::upper_bound(tiles.begin(), tiles.end(), item, [](int64_t at, const LoraTile& tile) { return at < tile.last; });
    }
};

// The rows of a pass that have an adapter.
struct Adapted {
    LoraItems rows;
    LoraItems heads;  // of rows; place: head * rows of the pass + row
    std::vector<const LoraAdapter*> adapters;  // all different
    std::vector<const LoraAdapter*> of_row;    // [rows of the pass], or empty; null: none
    LoraWidths row_widths{}, head_widths{}, pair_widths{};  // the largest of all adapters

    void plan(const BatchSpec& b, int head_count) {
        rows.clear(b.adapters ? b.rows : 0), adapters.clear(), of_row.assign(b.adapters ? b.rows : 0, nullptr);
        row_widths = head_widths = pair_widths = {};
        for (int s = 0; b.adapters && s < b.sequences; s++)
            if (b.adapters[s] && std::find(adapters.begin(), adapters.end(), b.adapters[s]) == adapters.end())
                gather(b, b.adapters[s], s);
        heads.clear(head_widths.input ? (int64_t)head_count * b.rows : 0);
        for (int head = 0; head_widths.input && head < head_count; head++)
            for (const LoraTile& tile : rows.tiles) {
                const int start = (int)heads.places.size();
                for (int i = tile.first; i < tile.last; i++) heads.places.push_back(head * b.rows + rows.places[i]);
                heads.cut(tile.adapter, head, start);
            }
    }

   private:
    // Adds the rows of all sequences with an adapter. sequence: the first of them.
    void gather(const BatchSpec& b, const LoraAdapter* adapter, int sequence) {
        const int start = (int)rows.places.size();
        for (int s = sequence; s < b.sequences; s++)
            for (int row = b.sequence_from[s]; b.adapters[s] == adapter && row < b.sequence_from[s + 1]; row++)
                rows.places.push_back(row), of_row[row] = adapter;
        rows.cut(adapter, 0, start);
        adapters.push_back(adapter);
        widen(row_widths, adapter->rows), widen(head_widths, adapter->heads), widen(pair_widths, adapter->pairs);
    }

    static void widen(LoraWidths& widths, const LoraWidths& by) {
        widths = {std::max(widths.input, by.input), std::max(widths.inner, by.inner), std::max(widths.added, by.added)};
    }
};

// Buffers of the layers of experts (mlp_experts.hpp).
struct ExpertRoom {
    Buffer normed, words, scales, shared_words, shared_scales, shared_weights, logits, inner_words, inner, outputs;
    std::vector<Buffer> own;      // of each thread
    std::vector<Routing> layers;  // of the pass that runs
    std::vector<LoraItems> adapted;  // pairs of rows and experts of each of these layers
    // Number of experts that the last pass chose, by layer, for each number of rows.
    std::map<int, std::vector<int32_t>> active_by_rows;
    std::vector<int32_t>* active = nullptr;  // of the pass that runs
};

// Buffers of one model. The names are those of the pass and its blocks.
struct Workspace {
    Buffer hidden, embedded, branch, aside, qkv, queries, mixed, inner, scales, normed, attended, activated, arranged;
    Buffer recurrent, prepared, recurrent_mixed;
    Buffer layer_inputs, gated_inputs, stretches;
    Buffer unit_maxima, unit_tokens, ranked_logits;
    Buffer latent_queries, absorbed, head_words, head_scales, latent_mixes;
    std::vector<Buffer> own_words, own_attention, own_states;
    Answered answered;
    SourcePlan sources, answered_sources;
    Tiles tiles, answered_tiles;
    ExpertRoom experts;
    Adapted adapted, answered_adapted;
    Buffer lora_inputs, lora_inner, lora_added, lora_added_heads, lora_added_pairs;
};

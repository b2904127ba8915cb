// Products with weights of four, six or eight bits that share a scale in groups of inputs.
//
// A weight is level(code) * scale + offset with one scale and offset per output and group; activations are int8 with one
// scale per row and group. Products are summed over integers inside a group, and groups are added in float32, in their
// order. So a row's result depends neither on the number of rows nor on the other rows.
//
// A unit (32 outputs) is a run of records, each of one or several groups of inputs: the scales of its outputs, their offsets if
// there are any, the parts of scales and offsets by group if there are two levels, then the codes of its groups, for each the
// first block's and the second's. All of it is read once, front to back.
#pragma once

#include <vector>

#include "arranged.hpp"
#include "levels.hpp"

// Rows of a tile, which takes both blocks of a unit at once, so that memory is read in order and inputs are loaded once for both.
// With eight rows the sums of floats do not fit into registers beside those of integers, so they are kept in memory, which
// costs nothing, since the multipliers are what is busy. Taller tiles are no faster for each row.
constexpr int GROUPED_ROWS = 8, IN_REGISTERS = 4;
constexpr int BYTES_AHEAD = 8192;  // what a unit's only tile prefetches ahead

// What an activation row stores for each group: its scale, what the group's integer sums start from, so that levels count
// from `zero`, and the sum of its codes, for offsets.
struct GroupMeta {
    float scale;
    int32_t start;
    float sum;
};
static_assert(sizeof(GroupMeta) == GROUP_META * sizeof(float));

enum ScaleKind : int { HALF = 0, SINGLE = 1, TWO_LEVELS = 2 };  // float16, float32, float16 of a record times int8 of a group

constexpr int WIDTHS[] = {4, 6, 8};

// A kind of grouped weights: GROUPED + the place of its bits in WIDTHS + 3 for offsets + 6 times the kind of scales.
template <int kind>
struct Variant {
    static constexpr int bits = WIDTHS[(kind - GROUPED) % 3], sides = (kind - GROUPED) / 3 % 2 + 1;
    static constexpr ScaleKind scales = (ScaleKind)((kind - GROUPED) / 6);
};
constexpr int GROUPED_KINDS = 18;

// Bytes of a record: its scales (and again its offsets), the parts of one group's scales, the codes of one group.
template <class V>
struct RecordLayout {
    static constexpr int floats = BLOCKS * LANES * (V::scales == SINGLE ? 4 : 2);
    static constexpr int parts = V::scales == TWO_LEVELS ? BLOCKS * LANES : 0;
    const int codes, first_codes;
    explicit RecordLayout(const Matrix& w)
        : codes(BLOCKS * LANES * w.group * V::bits / 8), first_codes(V::sides * (floats + w.record_groups * parts)) {}
};

// A group of a unit: where its record begins, where its parts and codes are.
template <class V>
struct GroupAt {
    const RecordLayout<V> layout;
    const uint8_t *record, *parts, *codes;
    int inside, record_groups, record_bytes;

    GroupAt(const Matrix& w, int64_t unit, int64_t group)
        : layout(w), record_groups(V::scales == TWO_LEVELS ? w.record_groups : 1), record_bytes(w.record_bytes) {
        enter((const uint8_t*)w.data + (unit * w.records() + group / record_groups) * record_bytes);
        for (int g = 0; g < group % record_groups; g++) advance();
    }

    void enter(const uint8_t* at) {
        record = at, parts = at + V::sides * layout.floats, codes = at + layout.first_codes, inside = 0;
    }

    void advance() {
        if (++inside == record_groups) return enter(record + record_bytes);
        parts += V::sides * layout.parts, codes += layout.codes;
    }

    // Sixteen scales (side 0) or offsets (side 1) of a block.
    __attribute__((always_inline)) Floats floats(int block, int side) const {
        const uint8_t* from = record + side * layout.floats;
        if constexpr (V::scales == SINGLE) return load((const float*)from + block * LANES);
        const Floats halves = load_half((const uint16_t*)from + block * LANES);
        if constexpr (V::scales == HALF) return halves;
        return halves * to_floats(load_int8((const int8_t*)parts + side * layout.parts + block * LANES));
    }
};

// Stores a row of floats as int8 words with a scale for each group. Padding after `count` becomes zero.
template <class V>
inline void encode_groups(const Matrix& w, const float* row, int64_t count, Word* words, GroupMeta* meta) {
    const int32_t lowered = !UNSIGNED_BYTES && large_levels(w, V::bits) ? 128 : 0;
    auto numbers = [&](int64_t i) {
        return count - i >= LANES ? load(row + i) : load_first(row + i, count - i, 0.0f);
    };
    for (int64_t g = 0; g < w.groups(); g++) {
        const int64_t first = g * w.group, last = first + w.group;
        Floats maxima = floats(0.0f);
        for (int64_t i = first; i < last; i += LANES) maxima = larger(maxima, absolute(numbers(i)));
        const float top = largest(maxima), scale = top == 0.0f ? 1.0f : top / 127.0f;
        const Floats inverse = floats(1.0f / scale);
        Ints total = ints(0);
        for (int64_t i = first; i < last; i += LANES) {
            Ints q = to_ints(numbers(i) * inverse);
            total = add_ints(total, q);
            store_saturated((int8_t*)words + i, q);
        }
        const int32_t sum = sum_of(total);
        meta[g] = {scale, (lowered - w.zero) * sum, (float)sum};
    }
}

// One unit times R rows, over one group: totals[block][r] += ((levels - zero) * x[r] * scales + offsets * x[r]) * the scale of
// x[r]. x is [words][R].
template <class V, bool SMALL, int R>
__attribute__((always_inline)) inline void add_group(const GroupAt<V>& at, Ints levels, int sixteens, const Word* x,
                                                     const GroupMeta* meta, int64_t groups, float (*totals)[R][LANES]) {
    Ints part[BLOCKS][R];
    each<R>([&](auto r) __attribute__((always_inline)) {
        const Ints start = ints(meta[r() * groups].start);
        each<BLOCKS>([&](auto b) __attribute__((always_inline)) { part[b()][r()] = start; });
    });
    add_levels<V::bits, SMALL>((const Ints*)at.codes, levels, sixteens, x, part);
    if constexpr (R > IN_REGISTERS) asm volatile("" : : : "memory");  // totals stay in memory, integers in registers
    each<BLOCKS>([&](auto b) __attribute__((always_inline)) {
        const Floats scales = at.floats(b(), 0), offsets = V::sides == 2 ? at.floats(b(), V::sides - 1) : scales;
        each<R>([&](auto r) __attribute__((always_inline)) {
            Floats value = to_floats(part[b()][r()]) * scales;
            if constexpr (V::sides == 2) value = multiply_add(offsets, floats(meta[r() * groups].sum), value);
            float* total = totals[b()][r()];
            store(total, multiply_add(value, floats(meta[r() * groups].scale), load(total)));
        });
    });
}

// Prefetches a share of memory: what lies between the end of the last call's and `until`. In assembly, because compilers
// remove a loop that does nothing else.
struct Fetch {
    const uint8_t* at;
    __attribute__((always_inline)) void upto(const uint8_t* until) {
#if defined(__x86_64__)
        for (; at < until; at += 64) asm volatile("prefetcht1 %0" : : "m"(*at));
#elif defined(__aarch64__)
        for (; at < until; at += 64) asm volatile("prfm pldl2keep, %0" : : "Q"(*at));
#endif
    }
};

// One unit times R rows. A unit's only tile prefetches a little ahead; of several tiles, each prefetches its part of the next
// unit.
template <class V, bool SMALL, int R, class Store>
inline void grouped_tile(const Matrix& w, const Word* x, const GroupMeta* meta, int row, int64_t unit, TileOf tile,
                         Store& store) {
    const int64_t groups = w.groups(), words = w.group / 4 * R;
    const int64_t bytes = w.record_bytes / w.record_groups, unit_bytes = bytes * groups;
    const int sixteens = w.group / LANES;
    Ints levels = repeated(w.levels);
    if constexpr (!UNSIGNED_BYTES && V::bits == 4 && !SMALL) levels = xor_bits(levels, ::bytes(-128));
    alignas(64) float totals[BLOCKS][R][LANES];
    each<BLOCKS * R>([&](auto i) __attribute__((always_inline)) { ::store(totals[i() / R][i() % R], floats(0.0f)); });
    GroupAt<V> at(w, unit, 0);
    Fetch fetch{at.record + (tile.count == 1 ? BYTES_AHEAD : unit_bytes + unit_bytes * tile.number / tile.count)};
    const uint8_t* next = fetch.at;
    for (int64_t g = 0; g < groups; g++, at.advance()) {
        next += bytes / tile.count;
        fetch.upto(next);
        add_group<V, SMALL, R>(at, levels, sixteens, x + g * words, meta + g, groups, totals);
    }
    for (int r = 0; r < R; r++)
        store(row + r, unit, finish(w, unit * BLOCKS, load(totals[0][r])),
              finish(w, unit * BLOCKS + 1, load(totals[1][r])));
}

template <class V, bool SMALL, int R, class Store>
inline void pick_grouped(int rows, const Matrix& w, const Word* x, const GroupMeta* meta, int row, int64_t unit,
                         TileOf tile, Store& store) {
    if (rows == R) grouped_tile<V, SMALL, R>(w, x, meta, row, unit, tile, store);
    else if constexpr (R > 1) pick_grouped<V, SMALL, R - 1>(rows, w, x, meta, row, unit, tile, store);
}

// Multiplies all rows of x [rows][stride words] with the units of the matrix that this thread takes.
template <class V, class Store>
inline void grouped_product(const Matrix& w, const Word* x, int64_t stride, const GroupMeta* meta, int rows, Units& work,
                            Store store) {
    Share share(0, 0);
    if (!work.next(share)) return;
    const bool large = large_levels(w, V::bits);
    const int tiles = (rows + GROUPED_ROWS - 1) / GROUPED_ROWS;
    static thread_local std::vector<Word> buffer;
    if (rows > 1) buffer.resize(std::max<size_t>(buffer.size(), rows * w.steps));
    const Word* arranged = rows > 1 ? buffer.data() : x;
    auto first_of = [&](int tile) { return rows * tile / tiles; };
    for (int t = 0; rows > 1 && t < tiles; t++) {
        const int first = first_of(t), count = first_of(t + 1) - first;
        side_by_side<GROUPED_ROWS>(x + first * stride, stride, w.steps, count, buffer.data() + first * w.steps);
    }
    do {
        for (int64_t unit = share.first; unit < share.last; unit++)
            for (int t = 0; t < tiles; t++) {
                const int first = first_of(t), count = first_of(t + 1) - first;
                const Word* words = arranged + first * w.steps;
                const GroupMeta* metas = meta + first * w.groups();
                if (V::bits != 8 && (UNSIGNED_BYTES || !large))
                    pick_grouped<V, V::bits != 8, GROUPED_ROWS>(count, w, words, metas, first, unit, {t, tiles}, store);
                else if constexpr (V::bits == 8 || (!UNSIGNED_BYTES && V::bits == 4))
                    pick_grouped<V, false, GROUPED_ROWS>(count, w, words, metas, first, unit, {t, tiles}, store);
            }
    } while (work.next(share));
}

// The float32 weights of one output, for a tied embedding.
template <class V>
inline void unpack_groups(const Matrix& w, int64_t output, int64_t count, float* to) {
    const int lane = output % LANES, block = output / LANES % BLOCKS;
    GroupAt<V> at(w, output / (BLOCKS * LANES), 0);
    for (int64_t g = 0; g < w.groups(); g++, at.advance()) {
        alignas(64) float scales[LANES], offsets[LANES] = {};
        store(scales, at.floats(block, 0));
        if (V::sides == 2) store(offsets, at.floats(block, 1));
        const uint8_t* codes = at.codes + block * at.layout.codes / BLOCKS + lane * 4;
        for (int64_t i = 0; i < w.group && g * w.group + i < count; i++) {
            const uint8_t code = code_at<V::bits>(codes + i / 16 * vectors_of(V::bits) * 64, i % 16);
            const int level = V::bits == 4 ? w.levels[code] : code;
            to[g * w.group + i] = (float)(level - w.zero) * scales[lane] + offsets[lane];
        }
    }
}

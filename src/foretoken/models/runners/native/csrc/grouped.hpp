// Products with weights of four, six or eight bits that share a scale in groups of inputs.
//
// A weight is level(code) * scale + offset with one scale and offset per output and group; activations are int8 with one
// scale per row and span of SPAN inputs (or a group, if it is longer). Products are summed over integers inside a group;
// groups are added in float32 inside a span, and spans to the result, in their order. So a row's result depends neither on
// the number of rows nor on the other rows.
//
// A unit (32 outputs) is a run of records, each of one or several groups of inputs: the scales of its outputs, their offsets if
// there are any, the parts of scales and offsets by group if there are two levels, then the codes of its groups, for each the
// first block's and the second's. All of it is read once, front to back.
#pragma once

#include <algorithm>
#include <vector>

#include "product.hpp"

constexpr int SPAN = 128;         // inputs of an activation row that share a scale; a multiple of shorter groups
// Rows of a tile: 12 integer sums, 12 float sums, and what is multiplied. With narrow registers, the integer sums of half a
// block and its unpacked weights.
constexpr int GROUPED_ROWS = ONE_REGISTER ? 12 : 8;
constexpr int BOTH_BLOCKS = 7;    // up to this many rows take a unit's two blocks at once, so that memory is read in order
constexpr int BYTES_AHEAD = 8192;  // what they prefetch ahead

// What an activation row stores for each group: the scale of its span, what the group's integer sums start from, so that
// levels count from `zero`, and the sum of its codes, for offsets.
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

// Levels above 127 are multiplied as signed bytes, 128 lower, where no instruction takes unsigned ones.
inline bool large_levels(const Matrix& w, int bits) {
    if (bits == 8) return true;
    return bits == 4 && *std::max_element(w.levels, w.levels + 16) > 63;
}

inline int64_t span_groups(const Matrix& w) { return w.group < SPAN ? SPAN / w.group : 1; }

// Stores a row of floats as int8 words with a scale for each span. Padding after `count` becomes zero.
template <class V>
inline void encode_groups(const Matrix& w, const float* row, int64_t count, Word* words, GroupMeta* meta) {
    const int64_t per = span_groups(w), groups = w.groups();
    const int32_t lowered = !UNSIGNED_BYTES && large_levels(w, V::bits) ? 128 : 0;
    auto numbers = [&](int64_t i) {
        return count - i >= LANES ? load(row + i) : load_first(row + i, count - i, 0.0f);
    };
    for (int64_t span = 0; span < groups; span += per) {
        const int64_t end = std::min(span + per, groups);
        Floats maxima = floats(0.0f);
        for (int64_t i = span * w.group; i < end * w.group; i += LANES) maxima = larger(maxima, absolute(numbers(i)));
        const float top = largest(maxima), scale = top == 0.0f ? 1.0f : top / 127.0f;
        const Floats inverse = floats(1.0f / scale);
        for (int64_t g = span; g < end; g++) {
            Ints total = ints(0);
            for (int64_t i = g * w.group; i < (g + 1) * w.group; i += LANES) {
                Ints q = to_ints(numbers(i) * inverse);
                total = add_ints(total, q);
                store_saturated((int8_t*)words + i, q);
            }
            const int32_t sum = sum_of(total);
            meta[g] = {scale, (lowered - w.zero) * sum, (float)sum};
        }
    }
}

// Sixteen inputs of a block are four words of inputs. In four bits they take two vectors, each of two words, the first in the
// low halves of bytes; in six bits a third vector has the upper two bits, the first word in its lowest; in eight bits four.
constexpr int vectors_of(int bits) { return bits / 2; }

// The levels of word `number` of sixteen inputs, signed in eight bits where products are.
template <int BITS, int number>
__attribute__((always_inline)) inline Ints levels_of(const Ints* codes, Ints levels) {
    if constexpr (BITS == 8 && UNSIGNED_BYTES) return load_ints(codes + number);
    if constexpr (BITS == 8) return xor_bits(load_ints(codes + number), bytes(-128));
    const Ints packed = load_ints(codes + number / 2);
    const Ints low = and_bits(number % 2 ? shift_right16<4>(packed) : packed, bytes(15));
    if constexpr (BITS == 4) return look_up(levels, low);
    const Ints upper = load_ints(codes + 2), mask = bytes(48);
    const Ints high = number < 2 ? shift_left16<number < 2 ? 4 - 2 * number : 0>(upper)
                                 : shift_right16<number < 2 ? 0 : 2 * number - 4>(upper);
    return bits_from(mask, high, low);  // two bits from `high`, the rest from `low`
}

#ifndef __AVX512F__
// The same of one register of sixteen inputs.
template <int BITS, int number>
INLINE IntPiece piece_levels(const Ints* codes, IntPiece levels, int i) {
    if constexpr (BITS == 8) {
        const IntPiece whole = codes[number].p[i];
        return UNSIGNED_BYTES ? whole : whole ^ piece((int32_t)0x80808080);
    }
    const IntPiece packed = codes[number / 2].p[i];
    const IntPiece low = (number % 2 ? (IntPiece)((HalfPiece)packed >> 4) : packed) & piece(0x0f0f0f0f);
    if constexpr (BITS == 4) return (IntPiece)piece_look_up((BytePiece)levels, (BytePiece)low);
    const HalfPiece upper = (HalfPiece)codes[2].p[i];
    const HalfPiece high = number < 2 ? upper << (number < 2 ? 4 - 2 * number : 0) : upper >> (number < 2 ? 0 : 2 * number - 4);
    return ((IntPiece)high & piece(0x30303030)) | low;
}

// part[r] += levels * x[r] over a group: one register of outputs after the other, so that the sums of all rows and four
// unpacked words fit into sixteen registers. SMALL: no level is above 63, so two sums of products fit into 16 bits.
template <int BITS, bool SMALL, int R>
INLINE void add_pieces(const Ints* codes, Ints levels, int sixteens, const Word* x, Ints (&part)[R]) {
    constexpr int VECTORS = vectors_of(BITS);
    for (int p = 0; p < PIECES; p++) {
        IntPiece sums[R];
        each<R>([&](auto r) __attribute__((always_inline)) { sums[r()] = part[r()].p[p]; });
        const Ints* at = codes;
        const Word* words = x;
        for (int i = 0; i < sixteens; i++, at += VECTORS, words += 4 * R)
            each<2>([&](auto half) __attribute__((always_inline)) {
                constexpr int first = half() * 2;
                const IntPiece a = piece_levels<BITS, first>(at, levels.p[p], p), b = piece_levels<BITS, first + 1>(at, levels.p[p], p);
                each<R>([&](auto r) __attribute__((always_inline)) {
                    const IntPiece x_a = piece((int32_t)words[first * R + r()]), x_b = piece((int32_t)words[(first + 1) * R + r()]);
                    if constexpr (SMALL) sums[r()] = piece_add_small(sums[r()], a, x_a, b, x_b);
                    else sums[r()] = piece_add_products(piece_add_products(sums[r()], a, x_a), b, x_b);
                });
            });
        each<R>([&](auto r) __attribute__((always_inline)) { part[r()].p[p] = sums[r()]; });
    }
}
#else
template <int BITS, bool SMALL, int R>
INLINE void add_pieces(const Ints*, Ints, int, const Word*, Ints (&)[R]) {}
#endif

// One block of a unit times R rows, over one group: sums[r] += (levels - zero) * x[r] * scales + offsets * x[r]. x is
// [words][R].
template <class V, bool SMALL, int R>
__attribute__((always_inline)) inline void add_group(const GroupAt<V>& at, int block, Ints levels, int sixteens,
                                                     const Word* x, const GroupMeta* meta, int64_t groups,
                                                     Floats (&sums)[R]) {
    Ints part[R];
    each<R>([&](auto r) __attribute__((always_inline)) { part[r()] = ints(meta[r() * groups].start); });
    const Ints* codes = (const Ints*)at.codes + block * sixteens * vectors_of(V::bits);
    if constexpr (!ONE_REGISTER) add_pieces<V::bits, SMALL, R>(codes, levels, sixteens, x, part);
    else for (int i = 0; i < sixteens; i++, codes += vectors_of(V::bits), x += 4 * R)
        each<4>([&](auto number) __attribute__((always_inline)) {
            const Ints weights = levels_of<V::bits, number()>(codes, levels);
            each<R>([&](auto r) __attribute__((always_inline)) { add_products(part[r()], weights, x[number() * R + r()]); });
        });
    const Floats scales = at.floats(block, 0);
    each<R>([&](auto r) __attribute__((always_inline)) {
        sums[r()] = multiply_add(to_floats(part[r()]), scales, sums[r()]);
    });
    if constexpr (V::sides == 2) {
        const Floats offsets = at.floats(block, 1);
        each<R>([&](auto r) __attribute__((always_inline)) {
            sums[r()] = multiply_add(offsets, floats(meta[r() * groups].sum), sums[r()]);
        });
    }
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

// One unit times R rows: both blocks at once for few rows, otherwise one after the other, so that twelve rows fit into
// registers. Each turn prefetches its part of the next unit.
template <class V, bool SMALL, int R, class Store>
inline void grouped_tile(const Matrix& w, const Word* x, const GroupMeta* meta, int row, int64_t unit, TileOf tile,
                         Store& store) {
    constexpr int AT_ONCE = R <= BOTH_BLOCKS ? BLOCKS : 1;
    const int64_t groups = w.groups(), words = w.group / 4 * R, per = span_groups(w);
    const int64_t bytes = w.record_bytes / w.record_groups, unit_bytes = bytes * groups;
    const int sixteens = w.group / LANES;
    Ints levels = repeated(w.levels);
    if constexpr (!UNSIGNED_BYTES && V::bits == 4 && !SMALL) levels = xor_bits(levels, ::bytes(-128));
    alignas(64) float totals[BLOCKS][R][LANES] = {};
    for (int block = 0; block < BLOCKS; block += AT_ONCE) {
        GroupAt<V> at(w, unit, 0);
        const int turn = tile.number * BLOCKS / AT_ONCE + block, turns = tile.count * BLOCKS / AT_ONCE;
        Fetch fetch{at.record + (turns == 1 ? BYTES_AHEAD : unit_bytes + unit_bytes * turn / turns)};
        const uint8_t* next = fetch.at;
        for (int64_t g = 0; g < groups;) {
            Floats sums[AT_ONCE][R];
            each<R>([&](auto r) __attribute__((always_inline)) {
                each<AT_ONCE>([&](auto b) __attribute__((always_inline)) { sums[b()][r()] = floats(0.0f); });
            });
            for (const int64_t end = std::min(g + per, groups); g < end; g++, at.advance()) {
                next += turns == 1 ? bytes : bytes / turns;
                fetch.upto(next);
                each<AT_ONCE>([&](auto b) __attribute__((always_inline)) {
                    add_group<V, SMALL, R>(at, block + b(), levels, sixteens, x + g * words, meta + g, groups, sums[b()]);
                });
            }
            asm volatile("" : : : "memory");  // so that the compiler keeps totals in memory and the sums in registers
            each<R>([&](auto r) __attribute__((always_inline)) {
                const Floats scale = floats(meta[r() * groups + g - 1].scale);
                each<AT_ONCE>([&](auto b) __attribute__((always_inline)) {
                    float* total = totals[block + b()][r()];
                    ::store(total, multiply_add(sums[b()][r()], scale, load(total)));
                });
            });
        }
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

// Writes rows of x [rows][stride] as [words][rows], so that a word's operands are at constant distances from one address.
inline void side_by_side(const Word* x, int64_t stride, int64_t words, int rows, Word* to) {
    for (int64_t k = 0; k < words; k++)
        for (int r = 0; r < rows; r++) to[k * rows + r] = x[r * stride + k];
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
        side_by_side(x + first * stride, stride, w.steps, count, buffer.data() + first * w.steps);
    }
    do {
        for (int64_t unit = share.first; unit < share.last; unit++)
            for (int t = 0; t < tiles; t++) {
                const int first = first_of(t), count = first_of(t + 1) - first;
                const Word* words = arranged + first * w.steps;
                const GroupMeta* metas = meta + first * w.groups();
                if (V::bits != 8 && (UNSIGNED_BYTES || !large))
                    pick_grouped<V, V::bits != 8, GROUPED_ROWS>(count, w, words, metas, first, unit, {t, tiles}, store);
                else if constexpr (V::bits == 8 || !UNSIGNED_BYTES && V::bits == 4)
                    pick_grouped<V, false, GROUPED_ROWS>(count, w, words, metas, first, unit, {t, tiles}, store);
            }
    } while (work.next(share));
}

// The code of input i, 0 to 15, in the vectors of sixteen inputs that begin with its output's bytes.
template <int BITS>
inline uint8_t code_at(const uint8_t* vectors, int64_t i) {
    const int64_t word = i / 4, byte = i % 4;
    if (BITS == 8) return vectors[word * 64 + byte];
    const uint8_t low = vectors[word / 2 * 64 + byte] >> word % 2 * 4 & 15;
    return BITS == 4 ? low : low | (vectors[128 + byte] >> word * 2 & 3) << 4;
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

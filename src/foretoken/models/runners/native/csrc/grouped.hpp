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
#include <type_traits>
#include <utility>
#include <vector>

#include "product.hpp"

constexpr int SPAN = 128;         // inputs of an activation row that share a scale; a multiple of shorter groups
constexpr int GROUPED_ROWS = 12;  // rows of a tile: 12 integer sums, 12 float sums, and what is multiplied
constexpr int BOTH_BLOCKS = 7;    // up to this many rows take a unit's two blocks at once, so that memory is read in order
constexpr int BYTES_AHEAD = 8192;  // what they prefetch ahead

// Calls f(0), ..., f(R - 1) with constants, so that arrays indexed by them are registers.
template <class F, int... r>
__attribute__((always_inline)) inline void each_of(F&& f, std::integer_sequence<int, r...>) {
    (f(std::integral_constant<int, r>()), ...);
}

template <int R, class F>
__attribute__((always_inline)) inline void each(F&& f) {
    each_of(f, std::make_integer_sequence<int, R>());
}

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
    __attribute__((always_inline)) __m512 floats(int block, int side) const {
        const uint8_t* from = record + side * layout.floats;
        if constexpr (V::scales == SINGLE) return _mm512_loadu_ps((const float*)from + block * LANES);
        const __m512 halves = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)((const uint16_t*)from + block * LANES)));
        if constexpr (V::scales == HALF) return halves;
        const __m128i part = _mm_loadu_si128((const __m128i*)(parts + side * layout.parts + block * LANES));
        return _mm512_mul_ps(halves, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part)));
    }
};

inline int64_t span_groups(const Matrix& w) { return w.group < SPAN ? SPAN / w.group : 1; }

// Stores a row of floats as int8 words with a scale for each span. Padding after `count` becomes zero.
inline void encode_groups(const Matrix& w, const float* row, int64_t count, Word* words, GroupMeta* meta) {
    const int64_t per = span_groups(w), groups = w.groups();
    auto load = [&](int64_t i) {
        const int64_t left = count - i;
        return left >= LANES ? _mm512_loadu_ps(row + i)
                             : _mm512_maskz_loadu_ps(left > 0 ? (__mmask16)((1u << left) - 1) : 0, row + i);
    };
    for (int64_t span = 0; span < groups; span += per) {
        const int64_t end = std::min(span + per, groups);
        __m512 most = _mm512_setzero_ps();
        for (int64_t i = span * w.group; i < end * w.group; i += LANES) most = larger(most, _mm512_abs_ps(load(i)));
        const float top = largest(most), scale = top == 0.0f ? 1.0f : top / 127.0f;
        const __m512 inverse = _mm512_set1_ps(1.0f / scale);
        for (int64_t g = span; g < end; g++) {
            __m512i total = _mm512_setzero_si512();
            for (int64_t i = g * w.group; i < (g + 1) * w.group; i += LANES) {
                __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load(i), inverse));
                total = _mm512_add_epi32(total, q);
                _mm_storeu_si128((__m128i*)((int8_t*)words + i), _mm512_cvtsepi32_epi8(q));
            }
            const int32_t sum = _mm512_reduce_add_epi32(total);
            meta[g] = {scale, -w.zero * sum, (float)sum};
        }
    }
}

// sum += levels * word, over four inputs of sixteen outputs.
__attribute__((always_inline)) inline void add_levels(__m512i& sum, __m512i levels, const Word& word) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(levels), "m"(word));
}

// Sixteen inputs of a block are four words of inputs. In four bits they take two vectors, each of two words, the first in the
// low halves of bytes; in six bits a third vector has the upper two bits, the first word in its lowest; in eight bits four.
constexpr int vectors_of(int bits) { return bits / 2; }

// The levels of word `number` of sixteen inputs.
template <int BITS, int number>
__attribute__((always_inline)) inline __m512i levels_of(const __m512i* codes, __m512i levels) {
    if constexpr (BITS == 8) return _mm512_load_si512(codes + number);
    const __m512i packed = _mm512_load_si512(codes + number / 2);
    const __m512i low = _mm512_and_si512(number % 2 ? _mm512_srli_epi16(packed, 4) : packed, _mm512_set1_epi8(15));
    if constexpr (BITS == 4) return _mm512_shuffle_epi8(levels, low);
    const __m512i upper = _mm512_load_si512(codes + 2), mask = _mm512_set1_epi8(48);
    const __m512i high = number < 2 ? _mm512_slli_epi16(upper, 4 - 2 * number) : _mm512_srli_epi16(upper, 2 * number - 4);
    return _mm512_ternarylogic_epi32(mask, high, low, 0xca);  // two bits from `high`, the rest from `low`
}

// One block of a unit times R rows, over one group: sums[r] += (levels - zero) * x[r] * scales + offsets * x[r]. x is
// [words][R].
template <class V, int R>
__attribute__((always_inline)) inline void add_group(const GroupAt<V>& at, int block, __m512i levels, int sixteens,
                                                     const Word* x, const GroupMeta* meta, int64_t groups,
                                                     __m512 (&sums)[R]) {
    __m512i part[R];
    each<R>([&](auto r) __attribute__((always_inline)) { part[r()] = _mm512_set1_epi32(meta[r() * groups].start); });
    const __m512i* codes = (const __m512i*)at.codes + block * sixteens * vectors_of(V::bits);
    for (int i = 0; i < sixteens; i++, codes += vectors_of(V::bits), x += 4 * R)
        each<4>([&](auto number) __attribute__((always_inline)) {
            const __m512i weights = levels_of<V::bits, number()>(codes, levels);
            each<R>([&](auto r) __attribute__((always_inline)) { add_levels(part[r()], weights, x[number() * R + r()]); });
        });
    const __m512 scales = at.floats(block, 0);
    each<R>([&](auto r) __attribute__((always_inline)) {
        sums[r()] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r()]), scales, sums[r()]);
    });
    if constexpr (V::sides == 2) {
        const __m512 offsets = at.floats(block, 1);
        each<R>([&](auto r) __attribute__((always_inline)) {
            sums[r()] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(meta[r() * groups].sum), sums[r()]);
        });
    }
}

// Prefetches a share of memory: what lies between the end of the last call's and `until`. In assembly, because compilers
// remove a loop that does nothing else.
struct Fetch {
    const uint8_t* at;
    __attribute__((always_inline)) void upto(const uint8_t* until) {
        for (; at < until; at += 64) asm volatile("prefetcht1 %0" : : "m"(*at));
    }
};

// One unit times R rows: both blocks at once for few rows, otherwise one after the other, so that twelve rows fit into
// registers. Each turn prefetches its part of the next unit.
template <class V, int R, class Store>
inline void grouped_tile(const Matrix& w, const Word* x, const GroupMeta* meta, int row, int64_t unit, TileOf tile,
                         Store& store) {
    constexpr int AT_ONCE = R <= BOTH_BLOCKS ? BLOCKS : 1;
    const int64_t groups = w.groups(), words = w.group / 4 * R, per = span_groups(w);
    const int64_t bytes = w.record_bytes / w.record_groups, unit_bytes = bytes * groups;
    const int sixteens = w.group / LANES;
    const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)w.levels));
    alignas(64) float totals[BLOCKS][R][LANES] = {};
    for (int block = 0; block < BLOCKS; block += AT_ONCE) {
        GroupAt<V> at(w, unit, 0);
        const int turn = tile.number * BLOCKS / AT_ONCE + block, turns = tile.count * BLOCKS / AT_ONCE;
        Fetch fetch{at.record + (turns == 1 ? BYTES_AHEAD : unit_bytes + unit_bytes * turn / turns)};
        const uint8_t* next = fetch.at;
        for (int64_t g = 0; g < groups;) {
            __m512 sums[AT_ONCE][R];
            each<R>([&](auto r) __attribute__((always_inline)) {
                each<AT_ONCE>([&](auto b) __attribute__((always_inline)) { sums[b()][r()] = _mm512_setzero_ps(); });
            });
            for (const int64_t end = std::min(g + per, groups); g < end; g++, at.advance()) {
                next += turns == 1 ? bytes : bytes / turns;
                fetch.upto(next);
                each<AT_ONCE>([&](auto b) __attribute__((always_inline)) {
                    add_group<V, R>(at, block + b(), levels, sixteens, x + g * words, meta + g, groups, sums[b()]);
                });
            }
            asm volatile("" : : : "memory");  // so that the compiler keeps totals in memory and the sums in registers
            each<R>([&](auto r) __attribute__((always_inline)) {
                const __m512 scale = _mm512_set1_ps(meta[r() * groups + g - 1].scale);
                each<AT_ONCE>([&](auto b) __attribute__((always_inline)) {
                    float* total = totals[block + b()][r()];
                    _mm512_store_ps(total, _mm512_fmadd_ps(sums[b()][r()], scale, _mm512_load_ps(total)));
                });
            });
        }
    }
    for (int r = 0; r < R; r++)
        store(row + r, unit, finish(w, unit * BLOCKS, _mm512_load_ps(totals[0][r])),
              finish(w, unit * BLOCKS + 1, _mm512_load_ps(totals[1][r])));
}

template <class V, int R, class Store>
inline void pick_grouped(int rows, const Matrix& w, const Word* x, const GroupMeta* meta, int row, int64_t unit,
                         TileOf tile, Store& store) {
    if (rows == R) grouped_tile<V, R>(w, x, meta, row, unit, tile, store);
    else if constexpr (R > 1) pick_grouped<V, R - 1>(rows, w, x, meta, row, unit, tile, store);
}

// Writes rows of x [rows][stride] as [words][rows], so that a word's operands are at constant distances from one address.
inline void side_by_side(const Word* x, int64_t stride, int64_t words, int rows, Word* to) {
    for (int64_t k = 0; k < words; k++)
        for (int r = 0; r < rows; r++) to[k * rows + r] = x[r * stride + k];
}

// Multiplies all rows of x [rows][stride words] with the units of the matrix that this thread claims.
template <class V, class Store>
inline void grouped_product(const Matrix& w, const Word* x, int64_t stride, const GroupMeta* meta, int rows, Loop& work,
                            Store store) {
    Share share(0, 0);
    if (!work.next(share)) return;
    const int tiles = (rows + GROUPED_ROWS - 1) / GROUPED_ROWS;
    static thread_local std::vector<Word> buffer;
    buffer.resize(std::max<size_t>(buffer.size(), rows * w.steps));
    auto first_of = [&](int tile) { return rows * tile / tiles; };
    for (int t = 0; t < tiles; t++) {
        const int first = first_of(t), count = first_of(t + 1) - first;
        side_by_side(x + first * stride, stride, w.steps, count, buffer.data() + first * w.steps);
    }
    do {
        for (int64_t unit = share.first; unit < share.last; unit++)
            for (int t = 0; t < tiles; t++) {
                const int first = first_of(t), count = first_of(t + 1) - first;
                pick_grouped<V, GROUPED_ROWS>(count, w, buffer.data() + first * w.steps, meta + first * w.groups(), first,
                                              unit, {t, tiles}, store);
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
        _mm512_store_ps(scales, at.floats(block, 0));
        if (V::sides == 2) _mm512_store_ps(offsets, at.floats(block, 1));
        const uint8_t* codes = at.codes + block * at.layout.codes / BLOCKS + lane * 4;
        for (int64_t i = 0; i < w.group && g * w.group + i < count; i++) {
            const uint8_t code = code_at<V::bits>(codes + i / 16 * vectors_of(V::bits) * 64, i % 16);
            const int level = V::bits == 4 ? w.levels[code] : code;
            to[g * w.group + i] = (float)(level - w.zero) * scales[lane] + offsets[lane];
        }
    }
}

// Products with weights of four or eight bits that share a scale in groups of inputs.
//
// A weight is level(code) * scale + offset with one scale and offset per output and group; activations are int8 with one
// scale per row and group. Products are summed over integers inside a group, and groups are added in float32 in their order,
// so a row's result depends neither on the number of rows nor on the other rows.
//
// A unit (32 outputs) is a run of records, each of one or several groups of inputs: the scales of its outputs, their offsets if
// there are any, the parts of scales and offsets by group if there are two levels, then the codes of its groups, for each the
// first block's and the second's. All of it is read once, front to back.
#pragma once

#include <type_traits>
#include <utility>

#include "product.hpp"

constexpr int GROUPED_ROWS = 8;   // 16 float sums, 8 integer sums, and the factors, fit into 32 registers
constexpr int GROUPS_AHEAD = 12;  // groups that few rows prefetch ahead

// Calls f(0), ..., f(R - 1) with constants, so that arrays indexed by them are registers.
template <class F, int... r>
__attribute__((always_inline)) inline void each_of(F&& f, std::integer_sequence<int, r...>) {
    (f(std::integral_constant<int, r>()), ...);
}

template <int R, class F>
__attribute__((always_inline)) inline void each(F&& f) {
    each_of(f, std::make_integer_sequence<int, R>());
}

// An activation row stores three floats per group: its scale, the start value of the group's integer sums (which subtracts
// `zero` from every level), and the scaled sum of its activations, for offsets.
struct GroupMeta {
    float scale;
    int32_t start;
    float sum;
};
static_assert(sizeof(GroupMeta) == GROUP_META * sizeof(float));

enum ScaleKind : int { HALF = 0, SINGLE = 1, TWO_LEVELS = 2 };  // float16, float32, float16 of a record times int8 of a group

// A kind of grouped weights: GROUPED + 1 for eight bits + 2 for offsets + 4 times the kind of scales.
template <int kind>
struct Variant {
    static constexpr int bits = (kind - GROUPED) & 1 ? 8 : 4, sides = (kind - GROUPED) & 2 ? 2 : 1;
    static constexpr ScaleKind scales = (ScaleKind)((kind - GROUPED) >> 2);
};

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

// Stores a row of floats as int8 words with a scale for each group. Padding after `count` becomes zero.
inline void encode_groups(const Matrix& w, const float* row, int64_t count, Word* words, GroupMeta* meta) {
    for (int64_t g = 0; g < w.groups(); g++) {
        const int64_t first = g * w.group, last = first + w.group;
        auto load = [&](int64_t i) {
            const int64_t left = count - i;
            return left >= LANES ? _mm512_loadu_ps(row + i)
                                 : _mm512_maskz_loadu_ps(left > 0 ? (__mmask16)((1u << left) - 1) : 0, row + i);
        };
        __m512 most = _mm512_setzero_ps();
        for (int64_t i = first; i < last; i += LANES) most = larger(most, _mm512_abs_ps(load(i)));
        const float top = largest(most), scale = top == 0.0f ? 1.0f : top / 127.0f;
        const __m512 inverse = _mm512_set1_ps(1.0f / scale);
        __m512i total = _mm512_setzero_si512();
        for (int64_t i = first; i < last; i += LANES) {
            __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load(i), inverse));
            total = _mm512_add_epi32(total, q);
            _mm_storeu_si128((__m128i*)((int8_t*)words + i), _mm512_cvtsepi32_epi8(q));
        }
        const int32_t sum = _mm512_reduce_add_epi32(total);
        meta[g] = {scale, -w.zero * sum, scale * (float)sum};
    }
}

// sum += levels * word, over four inputs of sixteen outputs.
__attribute__((always_inline)) inline void add_levels(__m512i& sum, __m512i levels, const Word& word) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(levels), "m"(word));
}

// One block of a unit times R rows, over one group: sums[r] += levels[codes] * x[r].
template <int BITS, int R>
__attribute__((always_inline)) inline void multiply_codes(const __m512i* codes, int64_t vectors, __m512i levels,
                                                          const Word* x, int64_t stride, __m512i (&sums)[R]) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t v = 0; v < vectors; v++) {
        const __m512i packed = _mm512_load_si512(codes + v);
        if constexpr (BITS == 8) {
            each<R>([&](auto r) __attribute__((always_inline)) { add_levels(sums[r()], packed, x[r() * stride + v]); });
        } else {
            const __m512i even = _mm512_shuffle_epi8(levels, _mm512_and_si512(packed, low));
            const __m512i odd = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(packed, 4), low));
            each<R>([&](auto r) __attribute__((always_inline)) { add_levels(sums[r()], even, x[r() * stride + 2 * v]); });
            each<R>([&](auto r) __attribute__((always_inline)) { add_levels(sums[r()], odd, x[r() * stride + 2 * v + 1]); });
        }
    }
}

// One block of a unit times R rows, over one group: sums[r] += (levels[codes] * x[r] - zero) * scales + offsets.
template <class V, int R>
__attribute__((always_inline)) inline void add_group(const GroupAt<V>& at, int block, __m512i levels, int64_t vectors,
                                                     const Word* x, int64_t stride, const GroupMeta* meta,
                                                     int64_t groups, __m512 (&sums)[R]) {
    __m512i part[R];
    each<R>([&](auto r) __attribute__((always_inline)) { part[r()] = _mm512_set1_epi32(meta[r() * groups].start); });
    multiply_codes<V::bits, R>((const __m512i*)at.codes + block * vectors, vectors, levels, x, stride, part);
    const __m512 scales = at.floats(block, 0);
    each<R>([&](auto r) __attribute__((always_inline)) {
        const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(meta[r() * groups].scale));
        sums[r()] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r()]), scale, sums[r()]);
    });
    if constexpr (V::sides == 2) {
        const __m512 offsets = at.floats(block, 1);
        each<R>([&](auto r) __attribute__((always_inline)) {
            sums[r()] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(meta[r() * groups].sum), sums[r()]);
        });
    }
}

template <class V, int R, class Store>
inline void grouped_tile(const Matrix& w, const Word* x, int64_t stride, const GroupMeta* meta, int row, int64_t unit,
                         TileOf tile, Store& store) {
    const int64_t groups = w.groups(), words = w.group / 4, vectors = w.group * V::bits / 32;
    const int64_t bytes = w.record_bytes / w.record_groups;
    GroupAt<V> at(w, unit, 0);
    const uint8_t* next = at.record + bytes * (R <= 4 && tile.count == 1 ? GROUPS_AHEAD : groups);
    const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)w.levels));
    __m512 low[R], high[R];
    each<R>([&](auto r) __attribute__((always_inline)) { low[r()] = high[r()] = _mm512_setzero_ps(); });
    for (int64_t g = 0; g < groups; g++, next += bytes, at.advance()) {
        if (tile.number == 0)
            for (int64_t line = 0; line < bytes; line += 64) ask(next + line);
        add_group<V, R>(at, 0, levels, vectors, x + g * words, stride, meta + g, groups, low);
        add_group<V, R>(at, 1, levels, vectors, x + g * words, stride, meta + g, groups, high);
    }
    const int64_t block = unit * BLOCKS;
    each<R>([&](auto r) __attribute__((always_inline)) {
        store(row + r(), unit, finish(w, block, low[r()]), finish(w, block + 1, high[r()]));
    });
}

template <class V, int R, class Store>
inline void pick_grouped(int rows, const Matrix& w, const Word* x, int64_t stride, const GroupMeta* meta, int row,
                         int64_t unit, TileOf tile, Store& store) {
    if (rows == R)
        grouped_tile<V, R>(w, x, stride, meta, row, unit, tile, store);
    else if constexpr (R > 1)
        pick_grouped<V, R - 1>(rows, w, x, stride, meta, row, unit, tile, store);
}

// Multiplies all rows of x [rows][stride words] with this thread's share of the matrix.
template <class V, class Store>
inline void grouped_product(const Matrix& w, const Word* x, int64_t stride, const GroupMeta* meta, int rows, int thread,
                            int threads, Store store) {
    const Share share(w.units, thread, threads);
    const int tiles = (rows + GROUPED_ROWS - 1) / GROUPED_ROWS;
    for (int64_t unit = share.first; unit < share.last; unit++)
        for (int t = 0; t < tiles; t++) {
            const int first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
            pick_grouped<V, GROUPED_ROWS>(count, w, x + first * stride, stride, meta + first * w.groups(), first, unit,
                                             {t, tiles}, store);
        }
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
            const int64_t word = i / 4;
            const uint8_t packed = codes[(V::bits == 8 ? word : word / 2) * 64 + i % 4];
            const int level = V::bits == 8 ? packed : w.levels[word % 2 ? packed >> 4 : packed & 15];
            to[g * w.group + i] = (float)(level - w.zero) * scales[lane] + offsets[lane];
        }
    }
}

// One product and one encoding of its input for matrices of any kind. A library holds the kinds of FORETOKEN_KINDS.
#pragma once

#include <type_traits>

#include "packed.hpp"

// Rows of words with a fixed stride, and beside each row the scales that its kind has.
struct Input {
    Word* words;
    float* scales;
    int64_t stride, scale_stride;
};

constexpr bool is_float(Kind kind) { return kind == F32 || kind == BF16 || kind == PACKED; }
constexpr bool is_grouped(int kind) { return kind >= GROUPED; }
constexpr int KIND_COUNT = GROUPED + 12;
inline bool is_float(const Matrix& w) { return is_float((Kind)w.kind); }

// Calls f(std::integral_constant<int, ...>) with the matrix's kind.
template <class F>
inline void by_kind(const Matrix& w, F&& f) {
    each<KIND_COUNT>([&](auto kind) {
        if constexpr (FORETOKEN_KINDS >> kind() & 1) {
            if (w.kind == kind()) f(kind);
        }
    });
}

// Multiplies all rows of x with this thread's share of the matrix. Calls store(row, unit, low, high).
template <class Store>
inline void multiply(const Matrix& w, const Input& x, int rows, int thread, int threads, Store store) {
    by_kind(w, [&](auto kind) {
        if constexpr (is_grouped(kind()))
            grouped_product<Variant<kind()>>(w, x.words, x.stride, (const GroupMeta*)x.scales, rows, thread, threads, store);
        else if constexpr (kind() == PACKED)
            packed_product(w, x.words, x.stride, rows, thread, threads, store);
        else
            product<(Kind)kind()>(w, x.words, x.stride, x.scales, rows, thread, threads, store);
    });
}

// Zeroes the words of a row after its first `count` numbers of a float kind.
inline void clear_tail(const Matrix& w, int64_t count, Word* words) {
    for (int64_t k = count / per_word((Kind)w.kind); k < w.steps; k++) words[k] = 0;
}

// Stores `count` floats (a multiple of 16) as an input row of the matrix.
inline void encode_row(const Matrix& w, const float* row, int64_t count, Word* words, float* scales) {
    by_kind(w, [&](auto kind) {
        if constexpr (is_grouped(kind())) {
            encode_groups(w, row, count, words, (GroupMeta*)scales);
        } else {
            *scales = encode<(Kind)kind()>(row, count, words);
            clear_tail(w, count, words);
        }
    });
}

// Stores sixteen floats of an input row of a float kind; `at` counts numbers.
inline void put_floats(const Matrix& w, Word* words, int64_t at, __m512 v) {
    if (w.kind == F32) put<F32>(words, at, v);
    else put<BF16>(words, at, v);
}

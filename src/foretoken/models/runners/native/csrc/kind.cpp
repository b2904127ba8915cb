// The functions of the kind FORETOKEN_KIND. build.py compiles them once for each kind that a model has.
#include "kinds.hpp"

namespace {

constexpr int KIND = FORETOKEN_KIND;

template <class Store>
void multiply(const Matrix& w, const Input& x, int rows, Units work, Store store) {
    if constexpr (is_grouped(KIND))
        return grouped_product<Variant<KIND>>(w, x.words, x.stride, (const GroupMeta*)x.scales, rows, work, store);
    else {
        constexpr Kind kind = (Kind)KIND;
        if constexpr (in_chunks(kind, CHUNK_ROWS))
            if (in_chunks(kind, rows)) return chunked_product<kind, false>(w, x.words, x.stride, x.scales, rows, work, store);
        if constexpr (in_arranged_chunks(kind, MANY_ROWS))
            if (x.arranged) return chunked_product<kind, true>(w, x.arranged, 0, x.scales, rows, work, store);
        if constexpr (kind == PACKED) packed_product(w, x.words, x.stride, rows, work, store);
        else product<kind>(w, x.words, x.stride, x.scales, rows, work, store);
    }
}

void encode_row(const Matrix& w, const float* row, int64_t count, Word* words, float* scales) {
    if constexpr (is_grouped(KIND)) {
        encode_groups<Variant<KIND>>(w, row, count, words, (GroupMeta*)scales);
    } else {
        *scales = encode<(Kind)KIND>(row, count, words);
        clear_tail(w, count, words);
    }
}

void unpack(const Matrix& w, int64_t output, int64_t count, float* to) {
    if constexpr (is_grouped(KIND)) unpack_groups<Variant<KIND>>(w, output, count, to);
}

const bool entered = (FUNCTIONS[KIND] = {multiply<RowStore>, multiply<ActivatedStore>, encode_row, unpack}, true);

}  // namespace

// Functions for Python that allocate memory and pack weights. They do not depend on the kinds that a model has.
#include <sys/mman.h>

#include <algorithm>

#include "grouped.hpp"

namespace {

// Packs the codes of one output and group: word k of its vectors holds four codes of a byte, or of half a byte twice.
template <int BITS>
void pack_codes(const uint8_t* codes, int64_t count, Word* to) {
    for (int64_t k = 0; k * 4 < count; k++) {
        Word word = 0;
        std::memcpy(&word, codes + k * 4, std::min<int64_t>(4, count - k * 4));
        if (BITS == 8) to[k * LANES] = word;
        else to[k / 2 * LANES] |= word << (k % 2 * 4);
    }
}

template <class V>
void pack_groups(const uint8_t* codes, const float* const* floats, const int8_t* const* parts, int64_t rows,
                 int64_t inputs, const Matrix& w, int64_t first, int64_t step, int threads) {
    const int64_t groups = (inputs + w.group - 1) / w.group, blocks = padded(rows, LANES) / LANES;
    const int64_t per = V::scales == TWO_LEVELS ? w.record_groups : 1, records = (groups + per - 1) / per;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, rows - block * LANES); lane++) {
            const int64_t row = block * LANES + lane, place = first + block * step;
            const int64_t number = place % BLOCKS * LANES + lane;
            GroupAt<V> at(w, place / BLOCKS, 0);
            for (int64_t g = 0; g < groups; g++, at.advance()) {
                for (int side = 0; side < V::sides; side++) {
                    uint8_t* where = (uint8_t*)at.record + side * at.layout.floats;
                    const float value = floats[side][row * records + g / per];
                    if (V::scales == SINGLE) ((float*)where)[number] = value;
                    else ((uint16_t*)where)[number] = (uint16_t)_cvtss_sh(value, 0);
                    if (V::scales == TWO_LEVELS)
                        ((int8_t*)at.parts)[side * at.layout.parts + number] = parts[side][row * groups + g];
                }
                pack_codes<V::bits>(codes + row * inputs + g * w.group, std::min<int64_t>(w.group, inputs - g * w.group),
                                    (Word*)at.codes + place % BLOCKS * at.layout.codes / BLOCKS / 4 + lane);
            }
        }
}

}  // namespace

extern "C" {

// Allocates weights and cache pages: zeroed, aligned, in huge pages if the system has them.
void* foretoken_allocate(int64_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
    madvise(data, bytes, MADV_HUGEPAGE);
    return data;
}

void foretoken_free(void* data, int64_t bytes) { munmap(data, bytes); }

// Packs rows [0, rows) of source [rows][words] into blocks first, first + step, ... of a packed matrix with `steps` vectors
// per block. Padding is not written and stays zero.
void foretoken_pack(const Word* source, int64_t rows, int64_t words, Word* packed, int64_t steps, int64_t first,
                    int64_t step, int threads) {
    const int64_t blocks = padded(rows, LANES) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        Word* to = packed + (first + block * step) * steps * LANES;
        const int64_t lanes = std::min<int64_t>(LANES, rows - block * LANES);
        for (int64_t k = 0; k < words; k += LANES)
            for (int64_t lane = 0; lane < lanes; lane++) {
                const Word* from = source + (block * LANES + lane) * words;
                for (int64_t i = k; i < std::min(k + LANES, words); i++) to[i * LANES + lane] = from[i];
            }
    }
}

// Packs rows [0, rows) of a matrix of groups into blocks first, first + step, ... of `to`.
//
// codes: [rows][inputs], one byte each; floats[side], parts[side]: scales (side 0) and offsets (side 1), or null. Floats are
// [rows][groups], or [rows][records] where there are two levels; parts are int8 [rows][groups].
void foretoken_pack_groups(const uint8_t* codes, const float* const* floats, const int8_t* const* parts, int64_t rows,
                           int64_t inputs, const Matrix* to, int64_t first, int64_t step, int threads) {
    each<12>([&](auto variant) {
        if (to->kind == GROUPED + variant())
            pack_groups<Variant<GROUPED + variant()>>(codes, floats, parts, rows, inputs, *to, first, step, threads);
    });
}

}  // extern "C"

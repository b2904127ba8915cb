// Functions for Python that allocate memory and pack weights. They do not depend on the kinds that a model has.
#include <sys/mman.h>

#include <algorithm>

#include "product.hpp"

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
// codes: [rows][inputs], one byte each; scales, offsets (or null): float32 [rows][ceil(inputs / group)].
void foretoken_pack_groups(const uint8_t* codes, const float* scales, const float* offsets, int64_t rows, int64_t inputs,
                           const Matrix* to, int64_t first, int64_t step, int threads) {
    const int64_t groups = (inputs + to->group - 1) / to->group, blocks = padded(rows, LANES) / LANES;
    const bool four = to->kind == GROUP4;
    const int64_t vectors = to->group / (four ? 8 : 4), header = BLOCKS * LANES * (to->wide_scales ? 4 : 2);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, rows - block * LANES); lane++) {
            const int64_t row = block * LANES + lane, place = first + block * step;
            for (int64_t g = 0; g < groups; g++) {
                uint8_t* at = (uint8_t*)to->data + (place / BLOCKS * to->groups() + g) * to->record_bytes;
                const int64_t number = place % BLOCKS * LANES + lane;
                auto store = [&](uint8_t* where, float value) {
                    if (to->wide_scales) ((float*)where)[number] = value;
                    else ((uint16_t*)where)[number] = (uint16_t)_cvtss_sh(value, 0);
                };
                store(at, scales[row * groups + g]);
                if (to->offsets) store(at + header, offsets[row * groups + g]);
                uint8_t* bytes = at + header * (to->offsets ? 2 : 1) + place % BLOCKS * vectors * 64 + lane * 4;
                for (int64_t i = 0; i < to->group && g * to->group + i < inputs; i++) {
                    const uint8_t code = codes[row * inputs + g * to->group + i];
                    const int64_t word = i / 4;
                    if (four) bytes[word / 2 * 64 + i % 4] |= code << (word % 2 * 4);
                    else bytes[word * 64 + i % 4] = code;
                }
            }
        }
}

}  // extern "C"

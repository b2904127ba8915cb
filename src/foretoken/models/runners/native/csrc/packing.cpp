// Functions for Python that allocate memory and pack weights. They do not depend on the kinds that a model has.
#include <sys/mman.h>

#include <algorithm>

#include "packed.hpp"

namespace {

// Packs the codes of one output and group into its words of the group's vectors; see `levels_of`.
template <int BITS>
void pack_codes(const uint8_t* codes, int64_t count, Word* to) {
    auto put = [&](int64_t k, Word word) {
        if (BITS == 8) {
            to[k * LANES] = word;
            return;
        }
        Word* vectors = to + k / 4 * vectors_of(BITS) * LANES;
        vectors[k % 4 / 2 * LANES] |= (word & 0x0f0f0f0f) << (k % 2 * 4);
        if (BITS == 6) vectors[2 * LANES] |= (word >> 4 & 0x03030303) << (k % 4 * 2);
    };
    Word word;
    for (int64_t k = 0; k < count / 4; k++) {
        std::memcpy(&word, codes + k * 4, 4);
        put(k, word);
    }
    if (count % 4) {
        word = 0;
        std::memcpy(&word, codes + count / 4 * 4, count % 4);
        put(count / 4, word);
    }
}

// The bytes of one step: lower and upper ones in the places of a packed step.
struct StepBytes {
    __m512i lower, upper;
    StepBytes(const Matrix& w, int64_t unit, int64_t k) {
        const Word* at = w.data + (unit * BLOCKS * w.steps + k) * LANES;
        const __m512i a = _mm512_load_si512(at), b = _mm512_load_si512(at + w.steps * LANES), low = _mm512_set1_epi16(255);
        lower = _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
        upper = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    }
};

// The codes of upper bytes, and whether each has one.
bool find_codes(__m512i upper, const uint8_t* bytes, __m512i& codes) {
    __mmask64 known = 0;
    codes = _mm512_setzero_si512();
    for (int code = 0; code < 16; code++) {
        const __mmask64 equal = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8((char)bytes[code]));
        codes = _mm512_mask_mov_epi8(codes, equal, _mm512_set1_epi8((char)code));
        known |= equal;
    }
    return !~known;
}

// The sixteen commonest upper bytes of a unit. In wide matrices every fourth step shows them.
void choose_bytes(const Matrix& w, int64_t unit, uint8_t* bytes) {
    int32_t counts[4][256] = {};
    alignas(64) uint8_t upper[64];
    for (int64_t k = 0; k < w.steps; k += w.steps < 512 ? 1 : 4) {
        _mm512_store_si512(upper, StepBytes(w, unit, k).upper);
        for (int i = 0; i < 64; i++) counts[i % 4][upper[i]]++;
    }
    uint8_t order[256];
    for (int i = 0; i < 256; i++) order[i] = (uint8_t)i, counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
    std::stable_sort(order, order + 256, [&](uint8_t a, uint8_t b) { return counts[0][a] > counts[0][b]; });
    std::memcpy(bytes, order, 16);
}

template <class V>
void pack_groups(const uint8_t* codes, const float* const* floats, const int8_t* const* parts, int64_t rows,
                 int64_t inputs, const Matrix& w, int64_t first, int64_t step, int threads) {
    const int64_t groups = (inputs + w.group - 1) / w.group, blocks = padded(rows, LANES) / LANES;
    const int64_t per = V::scales == TWO_LEVELS ? w.record_groups : 1, records = (groups + per - 1) / per;
    in_parallel_each(threads, blocks, 1, [&](int64_t block) {
        const int64_t place = first + block * step;
        GroupAt<V> at(w, place / BLOCKS, 0);
        for (int64_t g = 0; g < groups; g++, at.advance())  // all lanes of a group, while its cache lines are near
            for (int64_t lane = 0; lane < std::min<int64_t>(LANES, rows - block * LANES); lane++) {
                const int64_t row = block * LANES + lane, number = place % BLOCKS * LANES + lane;
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
    });
}

// A checksum of up to CHUNK bytes: each step is a bijection of a sum of eight bytes, so no single change is missed.
constexpr int64_t CHUNK = 1 << 20;

uint64_t checksum(const uint8_t* data, int64_t bytes) {
    constexpr int VECTORS = 4;
    const __m512i prime = _mm512_set1_epi64(0x9E3779B185EBCA87);
    __m512i sums[VECTORS];
    for (int i = 0; i < VECTORS; i++) sums[i] = _mm512_set1_epi64(bytes + i);
    for (int64_t at = 0; at < bytes; at += 64 * VECTORS)
        for (int i = 0; i < VECTORS; i++) {
            const int64_t left = std::min<int64_t>(64, bytes - at - 64 * i);
            if (left <= 0) break;
            const __m512i x = _mm512_maskz_loadu_epi8(~0ull >> (64 - left), data + at + 64 * i);
            const __m512i mixed = _mm512_mullo_epi64(_mm512_xor_si512(sums[i], x), prime);
            sums[i] = _mm512_xor_si512(mixed, _mm512_srli_epi64(mixed, 32));
        }
    uint64_t lanes[8 * VECTORS], sum = 0;
    std::memcpy(lanes, sums, sizeof lanes);
    for (uint64_t lane : lanes) sum = (sum ^ lane) * 0x9E3779B185EBCA87, sum ^= sum >> 32;
    return sum;
}

}  // namespace

extern "C" {

void foretoken_use_pool(const void* functions) { POOL = (const PoolFunctions*)functions; }

// A checksum of `bytes` bytes, to notice damage; not a cryptographic one.
uint64_t foretoken_checksum(const uint8_t* data, int64_t bytes, int threads) {
    const int64_t chunks = (bytes + CHUNK - 1) / CHUNK;
    std::atomic<uint64_t> sum{0};
    in_parallel_each(threads, chunks, 1, [&](int64_t chunk) {
        const int64_t at = chunk * CHUNK;
        sum += (checksum(data + at, std::min(CHUNK, bytes - at)) | 1) * (2 * chunk + 1);  // the order counts, too
    });
    return sum;
}

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
    in_parallel_each(threads, blocks, 1, [&](int64_t block) {
        Word* to = packed + (first + block * step) * steps * LANES;
        const int64_t lanes = std::min<int64_t>(LANES, rows - block * LANES);
        for (int64_t k = 0; k < words; k += LANES)
            for (int64_t lane = 0; lane < lanes; lane++) {
                const Word* from = source + (block * LANES + lane) * words;
                for (int64_t i = k; i < std::min(k + LANES, words); i++) to[i * LANES + lane] = from[i];
            }
    });
}

// Chooses the upper bytes with codes for each unit of a bf16 matrix, and counts its pairs of steps with another one.
// bytes: [units][16]; counts: [units].
void foretoken_choose_bytes(const Matrix* from, uint8_t* bytes, int32_t* counts, int threads) {
    in_parallel_each(threads, from->units, 1, [&](int64_t unit) {
        choose_bytes(*from, unit, bytes + unit * 16);
        counts[unit] = 0;
        __m512i codes;
        for (int64_t k = 0; k < from->steps; k += 2)
            counts[unit] += !(find_codes(StepBytes(*from, unit, k).upper, bytes + unit * 16, codes) &&
                              find_codes(StepBytes(*from, unit, k + 1).upper, bytes + unit * 16, codes));
    });
}

// Stores a bf16 matrix in 12 bits. `upper` has room for the raw pairs; its `bytes` and `from` are filled.
void foretoken_pack_bytes(const Matrix* from, uint8_t* to, const UpperBytes* upper, int threads) {
    in_parallel_each(threads, from->units, 1, [&](int64_t unit) {
        int32_t raw = upper->from[unit];
        uint8_t* pair = to + unit * from->steps / 2 * PAIR_BYTES;
        for (int64_t k = 0; k < from->steps; k += 2, pair += PAIR_BYTES) {
            const StepBytes first(*from, unit, k), second(*from, unit, k + 1);
            __m512i low, high;
            const bool known = find_codes(first.upper, upper->bytes + unit * 16, low) &
                               find_codes(second.upper, upper->bytes + unit * 16, high);
            _mm512_store_si512(pair, first.lower);
            _mm512_store_si512(pair + 64, second.lower);
            _mm512_store_si512(pair + 128, _mm512_or_si512(low, _mm512_slli_epi16(high, 4)));
            if (known) continue;
            Word* words = (Word*)upper->words + (int64_t)raw * 2 * STEP_WORDS;
            for (int i = 0; i < 2; i++)
                for (int block = 0; block < BLOCKS; block++, words += LANES)
                    std::memcpy(words, from->data + ((unit * BLOCKS + block) * from->steps + k + i) * LANES, 64);
            ((int32_t*)upper->pairs)[raw++] = (int32_t)(k / 2);
        }
    });
}

// Packs rows [0, rows) of a matrix of groups into blocks first, first + step, ... of `to`.
//
// codes: [rows][inputs], one byte each; floats[side], parts[side]: scales (side 0) and offsets (side 1), or null. Floats are
// [rows][groups], or [rows][records] where there are two levels; parts are int8 [rows][groups].
void foretoken_pack_groups(const uint8_t* codes, const float* const* floats, const int8_t* const* parts, int64_t rows,
                           int64_t inputs, const Matrix* to, int64_t first, int64_t step, int threads) {
    each<GROUPED_KINDS>([&](auto variant) {
        if (to->kind == GROUPED + variant())
            pack_groups<Variant<GROUPED + variant()>>(codes, floats, parts, rows, inputs, *to, first, step, threads);
    });
}

}  // extern "C"

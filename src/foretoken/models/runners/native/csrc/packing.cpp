// Functions for Python that allocate memory and pack weights. They do not depend on the kinds that a model has.
#if defined(_WIN32)
#include <cstddef>
// As windows.h declares them, which also defines INT8, near and other names that kernels use.
extern "C" __declspec(dllimport) void* VirtualAlloc(void* at, size_t bytes, unsigned long type, unsigned long access);
extern "C" __declspec(dllimport) int VirtualFree(void* at, size_t bytes, unsigned long type);
#else
#include <sys/mman.h>
#endif

#include <algorithm>

#include "entry.hpp"
#include "packed.hpp"

namespace {

constexpr int64_t HUGE_PAGE = 1 << 21;

// Returns the bytes of a mapping: from the size of a huge page on, whole ones.
inline int64_t mapped(int64_t bytes) { return bytes < HUGE_PAGE ? bytes : padded(bytes, HUGE_PAGE); }

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
    Ints lower, upper;
    StepBytes(const Matrix& w, int64_t unit, int64_t k) {
        const Word* at = w.data + (unit * BLOCKS * w.steps + k) * LANES;
        const Ints a = load_ints(at), b = load_ints(at + w.steps * LANES);
        lower = even_bytes(a, b), upper = odd_bytes(a, b);
    }
};

// The codes of upper bytes, and whether each has one.
bool find_codes(Ints upper, const uint8_t* bytes, Ints& codes) {
    ByteMask known = no_bytes();
    codes = ints(0);
    for (int code = 0; code < 16; code++) {
        const ByteMask equal = equal_bytes(upper, bytes[code]);
        codes = with_bytes(codes, equal, (uint8_t)code);
        known = either(known, equal);
    }
    return every(known);
}

// The sixteen commonest upper bytes of a unit. In wide matrices every fourth step shows them.
void choose_bytes(const Matrix& w, int64_t unit, uint8_t* bytes) {
    int32_t counts[4][256] = {};
    alignas(64) uint8_t upper[64];
    for (int64_t k = 0; k < w.steps; k += w.steps < 512 ? 1 : 4) {
        store_ints(upper, StepBytes(w, unit, k).upper);
        for (int i = 0; i < 64; i++) counts[i % 4][upper[i]]++;
    }
    uint8_t order[256];
    for (int i = 0; i < 256; i++) order[i] = (uint8_t)i, counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
    std::stable_sort(order, order + 256, [&](uint8_t a, uint8_t b) { return counts[0][a] > counts[0][b]; });
    std::memcpy(bytes, order, 16);
}

// Stores a unit of a bf16 matrix in 12 bits.
void pack_bytes(const Matrix& w, int64_t unit, uint8_t* to, const UpperBytes& upper) {
    int32_t raw = upper.from_unit[unit];
    uint8_t* pair = to + unit * w.steps / 2 * PAIR_BYTES;
    for (int64_t k = 0; k < w.steps; k += 2, pair += PAIR_BYTES) {
        const StepBytes first(w, unit, k), second(w, unit, k + 1);
        Ints low, high;
        const bool first_known = find_codes(first.upper, upper.bytes + unit * 16, low);
        const bool second_known = find_codes(second.upper, upper.bytes + unit * 16, high);
        store_ints(pair, first.lower);
        store_ints(pair + 64, second.lower);
        store_ints(pair + 128, or_bits(low, shift_left16<4>(high)));
        if (first_known && second_known) continue;
        Word* words = (Word*)upper.words + (int64_t)raw * 2 * STEP_WORDS;
        for (int i = 0; i < 2; i++)
            for (int block = 0; block < BLOCKS; block++, words += LANES)
                std::memcpy(words, w.data + ((unit * BLOCKS + block) * w.steps + k + i) * LANES, 64);
        ((int32_t*)upper.pairs)[raw++] = (int32_t)(k / 2);
    }
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
                    else ((uint16_t*)where)[number] = to_half(value);
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
    constexpr int COUNT = 32;
    constexpr uint64_t PRIME = 0x9E3779B185EBCA87;
    uint64_t lanes[COUNT], words[COUNT], sum = 0;
    for (int i = 0; i < COUNT; i++) lanes[i] = (uint64_t)bytes + i / 8;
    for (int64_t at = 0; at < bytes; at += sizeof words) {
        const int64_t count = std::min<int64_t>(sizeof words, bytes - at);
        auto mix = [&](int used) __attribute__((always_inline)) {
            for (int i = 0; i < used; i++) {
                const uint64_t mixed = (lanes[i] ^ words[i]) * PRIME;
                lanes[i] = mixed ^ mixed >> 32;
            }
        };
        if (count < (int64_t)sizeof words) std::memset(words, 0, sizeof words);
        std::memcpy(words, data + at, count);
        if (count == sizeof words) mix(COUNT);  // a fixed number of turns becomes vector instructions
        else mix((int)(count + 63) / 64 * 8);
    }
    for (uint64_t lane : lanes) sum = (sum ^ lane) * 0x9E3779B185EBCA87, sum ^= sum >> 32;
    return sum;
}

}  // namespace

extern "C" {

// Returns the layout of the structures that Python mirrors (bindings.py).
const LayoutField* foretoken_layout() {
    static const LayoutField fields[] = {
        LAYOUT(Matrix, data, scales, bias, sums, units, steps, kind, group, record_bytes, record_groups, zero, levels, upper)
        LAYOUT(UpperBytes, bytes, from_unit, pairs, words)
        {},
    };
    return fields;
}

// Writes a checksum of `bytes` bytes, to notice damage; not a cryptographic one.
int32_t foretoken_checksum(const uint8_t* data, int64_t bytes, uint64_t* result, int threads) {
    return guarded([&] {
        const int64_t chunks = (bytes + CHUNK - 1) / CHUNK;
        std::atomic<uint64_t> sum{0};
        in_parallel_each(threads, chunks, 1, [&](int64_t chunk) {
            const int64_t at = chunk * CHUNK;
            sum += (checksum(data + at, std::min(CHUNK, bytes - at)) | 1) * (2 * chunk + 1);  // the order counts, too
        });
        *result = sum;
    }, "a checksum of %lld bytes", (long long)bytes);
}

// Allocates weights and cache pages: zeroed, aligned, in huge pages if the system has them.
void* foretoken_allocate(int64_t bytes) {
#if defined(_WIN32)
    constexpr unsigned long reserved_and_committed = 0x3000, read_and_write = 0x04;
    return VirtualAlloc(nullptr, (size_t)bytes, reserved_and_committed, read_and_write);
#elif defined(__SANITIZE_ADDRESS__)  // which knows the bounds of memory from the heap
    void* data = nullptr;
    return posix_memalign(&data, 4096, (size_t)bytes) ? nullptr : std::memset(data, 0, (size_t)bytes);
#else
    const int64_t whole = mapped(bytes), margin = whole % HUGE_PAGE ? 0 : HUGE_PAGE;
    char* const data = (char*)mmap(nullptr, whole + margin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
    if (!margin) return data;
    const int64_t before = -(int64_t)data & (HUGE_PAGE - 1);
    if (before) munmap(data, before);
    munmap(data + before + whole, margin - before);
#if defined(MADV_HUGEPAGE)
    madvise(data + before, whole, MADV_HUGEPAGE);
#endif
    return data + before;
#endif
}

void foretoken_free(void* data, int64_t bytes) {
#if defined(_WIN32)
    (void)bytes;
    constexpr unsigned long released = 0x8000;
    VirtualFree(data, 0, released);
#elif defined(__SANITIZE_ADDRESS__)
    (void)bytes;
    free(data);
#else
    munmap(data, mapped(bytes));
#endif
}

// Packs rows [0, rows) of source [rows][words] into blocks first, first + step, ... of a packed matrix with `steps` vectors
// per block. Padding is not written and stays zero.
int32_t foretoken_pack(const Word* source, int64_t rows, int64_t words, Word* packed, int64_t steps, int64_t first, int64_t step,
                       int threads) {
    return guarded([&] {
        if (rows < 0 || words < 0 || words > steps || first < 0 || step < 1)
            refuse("%lld rows of %lld words do not fit into blocks of %lld", (long long)rows, (long long)words, (long long)steps);
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
    }, "%lld packed rows", (long long)rows);
}

// Chooses the upper bytes with codes for each unit of a bf16 matrix, and counts its pairs of steps with another one.
// bytes: [units][16]; counts: [units].
int32_t foretoken_choose_bytes(const Matrix* from, uint8_t* bytes, int32_t* counts, int threads) {
    return guarded([&] {
        in_parallel_each(threads, from->units, 1, [&](int64_t unit) {
            choose_bytes(*from, unit, bytes + unit * 16);
            counts[unit] = 0;
            Ints codes;
            for (int64_t k = 0; k < from->steps; k += 2)
                counts[unit] += !(find_codes(StepBytes(*from, unit, k).upper, bytes + unit * 16, codes) &&
                                  find_codes(StepBytes(*from, unit, k + 1).upper, bytes + unit * 16, codes));
        });
    }, "the upper bytes of %lld units", (long long)from->units);
}

// Stores a bf16 matrix in 12 bits. `upper` has room for the raw pairs; its `bytes` and `from_unit` are filled.
int32_t foretoken_pack_bytes(const Matrix* from, uint8_t* to, const UpperBytes* upper, int threads) {
    return guarded([&] {
        in_parallel_each(threads, from->units, 1, [&](int64_t unit) { pack_bytes(*from, unit, to, *upper); });
    }, "%lld units in 12 bits", (long long)from->units);
}

// Packs rows [0, rows) of a matrix of groups into blocks first, first + step, ... of `to`.
//
// codes: [rows][inputs], one byte each; floats[side], parts[side]: scales (side 0) and offsets (side 1), or null. Floats are
// [rows][groups], or [rows][records] where there are two levels; parts are int8 [rows][groups].
int32_t foretoken_pack_groups(const uint8_t* codes, const float* const* floats, const int8_t* const* parts, int64_t rows,
                              int64_t inputs, const Matrix* to, int64_t first, int64_t step, int threads) {
    return guarded([&] {
        const int64_t blocks = padded(rows, LANES) / LANES;
        if (to->kind < GROUPED || to->kind >= GROUPED + GROUPED_KINDS || to->group < 1) refuse("a matrix of kind %d has no groups", to->kind);
        if (rows < 0 || inputs < 0 || inputs > to->steps * 4 || first < 0 || step < 1 || (blocks && first + (blocks - 1) * step >= to->units * BLOCKS))
            refuse("%lld rows of %lld inputs do not fit into %lld units", (long long)rows, (long long)inputs, (long long)to->units);
        each<GROUPED_KINDS>([&](auto variant) {
            if (to->kind == GROUPED + variant())
                pack_groups<Variant<GROUPED + variant()>>(codes, floats, parts, rows, inputs, *to, first, step, threads);
        });
    }, "%lld packed rows", (long long)rows);
}

}  // extern "C"

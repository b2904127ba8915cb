// Rows of the KV cache: where they lie in a page, and how they are written and moved.
//
// The keys of sixteen rows form a block as in a packed matrix: [block][words of a head][16 rows]. Values are [row][words of a
// head]; those of latent attention are the first numbers of keys. Of an int8 cache, the values of a page are blocks of sixteen
// numbers, [block][16 words][16 numbers], whose words hold a number of four rows each, and the scales of the page's rows
// follow its keys and its values.
#pragma once

#include "bytes.hpp"
#include "specs.hpp"

// The place of a sequence's keys and values of one layer inside a page.
struct PageLayout {
    static constexpr int QUERY_FACTS = 4;  // words behind the bytes of a query: those of `WholeRow`, padded
    int64_t key_words, query_words;  // words of one row, and of a query
    int64_t half_words;              // words of all keys (or all values) of one head in one page
    int64_t first;                   // words of a page before those of the layer
    bool latent;                     // values are the first numbers of keys
    int value_dim;                   // numbers of a value
    PageLayout(const ModelSpec& m, const AttentionSpec& layer, Kind kind)
        : key_words(layer.head_dim / per_word(kind)),
          query_words(kind == INT8 ? 2 * key_words + QUERY_FACTS : key_words * input_words(kind)),
          half_words(PAGE * (key_words + (kind == INT8))),
          first((int64_t)PAGE * (layer.cache_at / per_word(kind) + (kind == INT8 ? layer.scales_at : 0))), latent(m.latent.rank),
          value_dim(latent ? m.latent.rank : layer.head_dim) {}
    int64_t at(int head) const { return first + (int64_t)head * (latent ? 1 : 2) * half_words; }
    Word* keys(Word* const* pages, int head, int64_t block) const {
        return pages[block / (PAGE / LANES)] + at(head) + block % (PAGE / LANES) * LANES * key_words;
    }
    Word* value(Word* const* pages, int head, int64_t row) const { return values(pages, head, row / PAGE) + row % PAGE * key_words; }
    Word* values(Word* const* pages, int head, int64_t page) const { return pages[page] + at(head) + half_words; }
    // The scales of the rows of an int8 page, of its keys or values.
    float* scales(Word* half) const { return (float*)(half + PAGE * key_words); }
};

// A row's place in an int8 page of a layer and head.
struct BytePlace {
    int8_t *key, *value;  // of the row's first number
    float *key_scale, *value_scale;

    BytePlace(const PageLayout& layout, Word* const* pages, int head, int64_t row) {
        const int64_t at = row % PAGE;
        Word *keys = pages[row / PAGE] + layout.at(head), *values = keys + layout.half_words;
        key = (int8_t*)(keys + at / LANES * LANES * layout.key_words + at % LANES);
        value = (int8_t*)(values + at / 4 * LANES) + at % 4;
        key_scale = layout.scales(keys) + at, value_scale = layout.scales(values) + at;
    }
    int8_t& key_byte(int64_t i) const { return key[i / 4 * LANES * 4 + i % 4]; }
    int8_t& value_byte(int64_t i) const { return value[i / LANES * PAGE * LANES + i % LANES * 4]; }
};

// Rounds finite numbers to int8. Returns their scale.
inline float to_bytes(const float* x, int64_t count, int8_t* bytes) {
    Floats maxima = floats(0.0f);
    for (int64_t i = 0; i < count; i += LANES) maxima = largest_of(maxima, absolute(load(x + i)));
    const float top = largest_lane(maxima), scale = top < 1e-30f ? 0.0f : top / 127.0f;
    const Floats inverse = floats(scale == 0.0f ? 0.0f : 1.0f / scale);
    for (int64_t i = 0; i < count; i += LANES) store_int8(bytes + i, add_ints(to_ints(load(x + i) * inverse), ints(BYTES_OFFSET)));
    return scale;
}

// Values of float caches. A word of bfloat16 holds numbers i and i + 16 of 32, so that a vector of words is two vectors of
// numbers, by a shift and a mask; sixteen numbers that are left at the end lie in order.
template <Kind kv>
inline void put_values(Word* to, const float* x, int dim) {
    int i = 0;
    if constexpr (kv == BF16)
        for (alignas(64) Word words[LANES]; i + 2 * LANES <= dim; i += 2 * LANES) {
            put<BF16>(words, 0, load(x + i)), put<BF16>(words, LANES, load(x + i + LANES));
            const uint16_t* halves = (const uint16_t*)words;
            for (int lane = 0; lane < LANES; lane++) to[i / 2 + lane] = halves[lane] | (Word)halves[LANES + lane] << 16;
        }
    for (; i < dim; i += LANES) put<kv>(to, i, load(x + i));
}

// Reads V vectors of the values of a row from number `at` on, which is a multiple of 32.
template <Kind kv, int V>
INLINE void get_values(const Word* value, int at, Floats (&to)[V]) {
    constexpr int pairs = kv == BF16 ? V / 2 : 0;
    each<pairs>([&](auto pair) __attribute__((always_inline)) {
        const Ints words = load_ints(value + at / 2 + pair() * LANES);
        to[2 * pair()] = as_floats(shift_left<16>(words));
        to[2 * pair() + 1] = as_floats(and_bits(words, ints((int)0xffff0000)));
    });
    for (int v = 2 * pairs; v < V; v++) to[v] = get<kv>(value, at + v * LANES);
}

// Stores N vectors as bfloat16.
template <int N>
INLINE void put_vectors(Word* to, const Floats (&x)[N]) {
#ifdef __AVX512BF16__
    each<N / 2>([&](auto i) __attribute__((always_inline)) {
        store_ints(to + i() * LANES, (Ints)_mm512_cvtne2ps_pbh(x[2 * i() + 1], x[2 * i()]));
    });
#else
    each<N>([&](auto i) __attribute__((always_inline)) { put<BF16>(to, i() * LANES, x[i()]); });
#endif
}

#ifdef __AVX512BF16__
// Reads V vectors of the values of two rows from number `at` on, which is a multiple of 32: words of both rows' numbers.
template <int V>
INLINE void get_pairs(const Word* first, const Word* second, int at, Ints (&to)[V]) {
    const __mmask32 upper = 0xaaaaaaaa;
    each<V / 2>([&](auto pair) __attribute__((always_inline)) {
        const Ints a = load_ints(first + at / 2 + pair() * LANES), b = load_ints(second + at / 2 + pair() * LANES);
        to[2 * pair()] = _mm512_mask_mov_epi16(a, upper, _mm512_slli_epi32(b, 16));
        to[2 * pair() + 1] = _mm512_mask_mov_epi16(_mm512_srli_epi32(a, 16), upper, b);
    });
    for (int v = V / 2 * 2; v < V; v++) {
        const uint16_t *a = (const uint16_t*)first + at + v * LANES, *b = (const uint16_t*)second + at + v * LANES;
        to[v] = or_bits(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a)),
                        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b)), 16));
    }
}
#endif

// Writes and moves rows of a cache of one kind.
template <Kind kv>
struct CacheRows {
    const PageLayout& layout;
    int dim;  // numbers of a head

    // Writes one head of keys. A masked key has weight 0, and 0 times infinity is NaN; so values and int8 keys are made finite.
    void put_key(Word* const* pages, int head, int64_t row, float* x) const {
        if constexpr (kv == INT8) {
            alignas(64) int8_t bytes[MAX_HEAD];
            make_finite(x);
            const BytePlace place(layout, pages, head, row);
            *place.key_scale = to_bytes(x, dim, bytes);
            for (int i = 0; i < dim; i++) place.key_byte(i) = bytes[i];
        } else {
            alignas(64) Word words[MAX_HEAD];
            for (int i = 0; i < dim; i += LANES) put<kv>(words, i, load(x + i));
            Word* lane = layout.keys(pages, head, row / LANES) + row % LANES;
            for (int64_t k = 0; k < layout.key_words; k++) lane[k * LANES] = words[k];
        }
    }

    void put_value(Word* const* pages, int head, int64_t row, float* x) const {
        make_finite(x);
        if constexpr (kv == INT8) {
            alignas(64) int8_t bytes[MAX_HEAD];
            const BytePlace place(layout, pages, head, row);
            *place.value_scale = to_bytes(x, dim, bytes);
            for (int i = 0; i < dim; i++) place.value_byte(i) = bytes[i];
        } else {
            put_values<kv>(layout.value(pages, head, row), x, dim);
        }
    }

    void move(Word* const* pages, int head, int64_t from, int64_t to) const {
        if constexpr (kv == INT8) {
            const BytePlace source(layout, pages, head, from), target(layout, pages, head, to);
            *target.key_scale = *source.key_scale, *target.value_scale = *source.value_scale;
            for (int i = 0; i < dim; i++)
                target.key_byte(i) = source.key_byte(i), target.value_byte(i) = source.value_byte(i);
        } else {
            if (!layout.latent)
                std::memcpy(layout.value(pages, head, to), layout.value(pages, head, from),
                            sizeof(Word) * layout.key_words);
            const Word* source = layout.keys(pages, head, from / LANES) + from % LANES;
            Word* target = layout.keys(pages, head, to / LANES) + to % LANES;
            for (int64_t k = 0; k < layout.key_words; k++) target[k * LANES] = source[k * LANES];
        }
    }

   private:
    void make_finite(float* x) const {
        for (int i = 0; i < dim; i += LANES) store(x + i, finite(load(x + i)));
    }
};

// What Python hands over: a model once, and the plan of each pass. Mirrored field by field in bindings.py.
#pragma once

#include "product.hpp"

constexpr int PAGE = 64;  // cache rows of one page

struct LayerSpec {
    Matrix qkv, out, gate_up, down;  // gate_up: blocks of gate and up alternate
    const float *norm, *q_norm, *k_norm, *after_attention, *mlp_norm, *after_mlp;  // null where there is none
    int32_t window;  // keys that a row sees, itself included; 0: all
    int32_t rope;    // which table; -1: none
};

struct ModelSpec {
    const LayerSpec* layers;
    const Word* embedding;      // [vocab][hidden padded to 32] in the cache's kind; null: read it out of the head
    const float* norm;          // null: none
    const float* feature_norm;  // on the features a pass is given; null: none
    Matrix head;
    const float* const* ropes;  // tables [positions][2 * half]: cosines, then sines
    int32_t layer_count, hidden, heads, kv_heads, head_dim, half, inner, vocab;
    int32_t gelu;               // else SiLU
    int32_t joined;             // layer 0's attention reads [norm(embedding), feature_norm(features)] (2503.01840)
    int32_t norm_first;         // feature_norm comes before the residual stream begins, not beside it
    float eps, scale, score_cap, logit_cap, embedding_scale;
};

struct BatchSpec {
    const int32_t *tokens, *positions, *places;    // [rows]; place: the row in its sequence's cache
    const int32_t *prefix;                         // [rows] cache rows 0 .. prefix - 1 are seen
    const int32_t *branch_from, *branches;         // [rows + 1], and the cache rows seen beyond the prefix, in order
    const int32_t *sequence_from;                  // [sequences + 1] rows of each sequence
    Word* const* const* pages;                     // [sequences] pages of each
    const int32_t *outputs;                        // [output_count] rows whose logits are wanted
    float* logits;                                 // [output_count][padded vocab], or null
    const int32_t *tap_layers;                     // [tap_count]
    float* const* taps;                            // [tap_count] -> [rows][hidden]
    const float* features;                         // [rows][hidden] where the residual stream begins, else null
    int32_t rows, sequences, output_count, tap_count, reach;
};

// Where a sequence's keys and values of one layer and head lie inside a page.
//
// Keys of sixteen rows form a block like a packed matrix's: [block][words of a head][16 rows]. Values: [row][head_dim].
struct PageLayout {
    int64_t key_words, half_words;  // words of one row; words of all keys (or all values) of one head in one page
    PageLayout(const ModelSpec& m, Kind kind)
        : key_words(m.head_dim / per_word(kind)), half_words(PAGE * key_words), kv_heads(m.kv_heads) {}
    int64_t at(int layer, int head) const { return ((int64_t)layer * kv_heads + head) * 2 * half_words; }
    Word* keys(Word* const* pages, int layer, int head, int64_t block) const {
        return pages[block / (PAGE / LANES)] + at(layer, head) + block % (PAGE / LANES) * LANES * key_words;
    }
    Word* value(Word* const* pages, int layer, int head, int64_t row) const {
        return pages[row / PAGE] + at(layer, head) + half_words + row % PAGE * key_words;
    }
    int kv_heads;
};

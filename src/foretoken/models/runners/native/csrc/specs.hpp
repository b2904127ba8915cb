// The arguments that Python passes: a model once, and the plan of each pass. bindings.py mirrors them field by field.
#pragma once

#include "kinds.hpp"

constexpr int PAGE = 64;  // cache rows of one page; models/state/pages.py has the same number

struct LayerSpec {
    Matrix qkv, out, gate_up, down;  // gate_up: blocks of gate and up alternate
    const float *norm, *q_norm, *k_norm, *after_attention, *mlp_norm, *after_mlp;  // null: none
    int32_t window;  // length of the attention window, the row itself included; 0: no window
    int32_t rope;    // index of the rotary table; -1: no rotation
};

struct ModelSpec {
    const LayerSpec* layers;
    const Word* embedding;      // [vocab][hidden padded to 32] in the cache's type; null: unpack rows of `table`
    Matrix table;               // the head where the two are tied
    const float* norm;          // null: none
    const float* feature_norm;  // norm of a pass's features; null: none
    Matrix head;
    const float* const* ropes;  // tables [positions][2 * half]: cosines, then sines
    int32_t layer_count, hidden, heads, kv_heads, head_dim, half, inner, vocab;
    int32_t gelu;               // else SiLU
    int32_t joined;             // input of layer 0's attention: [norm(embedding), feature_norm(features)] (2503.01840)
    int32_t norm_first;         // the residual stream starts from the normed features
    float eps, scale, score_cap, logit_cap, embedding_scale;
};

struct BatchSpec {
    const int32_t *tokens, *positions, *places;    // [rows]; places: cache row in the sequence
    const int32_t *prefix;                         // [rows]; cache rows 0 .. prefix - 1 are visible
    const int32_t *branch_from, *branches;         // [rows + 1], and the visible cache rows after the prefix, in order
    const int32_t *sequence_from;                  // [sequences + 1]; first row of each sequence
    Word* const* const* pages;                     // [sequences]; pages of each sequence
    const int32_t *outputs;                        // [output_count]; rows whose logits are needed
    float* logits;                                 // [output_count][padded vocab], or null
    const int32_t *tap_layers;                     // [tap_count]
    float* const* taps;                            // [tap_count] -> [rows][hidden]
    const float* features;                         // [rows][hidden]; start of the residual stream, or null
    int32_t rows, sequences, output_count, tap_count, reach;
};

// The place of a sequence's keys and values of one layer and head inside a page.
//
// The keys of sixteen rows form a block as in a packed matrix: [block][words of a head][16 rows]. Values: [row][head_dim].
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

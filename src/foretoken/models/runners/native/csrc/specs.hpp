// The arguments that Python passes: a model once, and the plan of each pass. bindings.py mirrors them field by field.
//
// A layer has token mixers and an MLP, each with its own description; `LayerSpec` says which kinds they are.
#pragma once

#include "router.hpp"

constexpr int PAGE = 64;  // cache rows of one page; models/state/pages.py has the same number

enum RecurrentKind : int32_t { NO_RECURRENCE = 0, DELTA = 1, CONVOLUTION = 2, MAMBA = 3 };
enum MlpKind : int32_t { GATED = 0, UNGATED = 1, EXPERTS = 2, NO_MLP = 3 };

// The weights of a norm; without a weight there is no norm.
struct NormSpec {
    const float *weight, *bias;
    explicit operator bool() const { return weight; }
};

struct AttentionSpec {
    Matrix qkv, out;
    Matrix query_up, absorb, expand;  // of latent attention (mixer_latent.hpp); those of all heads, one behind the other
    NormSpec q_norm, k_norm, v_norm;  // of latent attention: of the latents of queries, and of keys and values
    const float* sinks;   // [heads]; scores of a key without a value, which takes a share of each softmax; null: none
    const float* relative;  // [heads][2 * reach + 1], reach of `ModelSpec::farthest`: scores += the number of the key's position - the row's (T5); null: none
    int32_t kv_heads, head_dim;
    int32_t norm_stride;  // numbers between the weights of two heads in q_norm and k_norm; 0: all heads share them
    int32_t window;       // length of the attention window, the row itself included; 0: none; negative: rows see those of
                          // their chunk of that length
    int32_t rope;         // index of the rotary table; -1: no rotation
    int32_t cache_at;     // numbers of a token in the cache before its keys and values
    int32_t scales_at;    // scales of a token in an int8 cache before its own
    int32_t shares;       // the keys and values are those of a layer before it, and `qkv` are queries alone
    int32_t grows;        // queries are multiplied by `query_scales`
    int32_t ordered;      // rows see no key behind themselves, whatever their prefix
};

// Attention over the states of an encoder (mixer_cross.hpp).
struct CrossSpec {
    NormSpec norm, after;      // before and after it, as those of a mixer
    AttentionSpec attention;   // whose `qkv` are queries alone
    Matrix keys_values;        // of the encoder's states
};

// A recurrent mixer (mixer_recurrent.hpp): gated DeltaNet, Mamba-2, or a short convolution without a state.
struct RecurrentSpec {
    Matrix into, gates, out;         // `into`: channels of the convolution, then the gate of the output; gates: null without a state
    const float *conv, *conv_bias;   // [window + 1][channels], the row itself first; [channels] or null
    const float *decay, *step_bias;  // [value_heads]
    const float* norm;               // [value_dim]; of Mamba-2 [out]
    const float* skip;               // [value_heads]: this times the value is added to the output; or null
    int32_t state_layer;             // place in states, logs and snapshots
};

// down(activation(gate) * up), or down(activation(up)).
struct MlpSpec {
    Matrix up, down;  // GATED: blocks of gate and up alternate in `up`
    int32_t inner;    // numbers between them, padded to sixteen
    int32_t gated;
};

// What a layer does with its own input (layer_inputs.hpp): x += norm(up(activation(gate x) * input)).
struct LayerInputSpec {
    Matrix gate, up;
    NormSpec norm;
};

// A mixture of experts. Expert e has the units from e times their number in `up` and `down`.
struct ExpertsSpec {
    RouterSpec router;
    Matrix up, down;           // of all experts
    Matrix shared_up, shared_down;  // of the shared expert, if there is one
    const float* shared_gate;  // [hidden]; the shared expert's weight is the sigmoid of its product with the row; null: 1
    NormSpec router_norm;      // of the router's input; null: the router reads what the experts read
    const float* expert_scales;  // [experts]; factors of the weights; null: 1
    int32_t gated;             // experts are gated MLPs; else down(activation(up))
    int32_t scaled_inputs;     // a weight multiplies the expert's input, not its output
    int32_t inner, shared_inner;  // numbers between up and down, padded to sixteen
    float limit, slope;        // of gpt-oss's activation; see `ActivatedStore`
};

struct LayerSpec {
    NormSpec norm, after_mixer, mlp_norm, after_mlp;
    NormSpec beside_norm, after_beside, after_experts;  // of a dense MLP beside experts, and of what the experts return
    int32_t attends;   // attention is a token mixer
    int32_t recurs;    // a RecurrentKind: the other token mixer
    int32_t mlp;       // an MlpKind
    int32_t parallel;  // the MLP's input is that of the mixers; else their output is added before it
    AttentionSpec attention;
    CrossSpec cross;   // between the mixer and the MLP; without a matrix there is none
    RecurrentSpec recurrent;
    MlpSpec dense;     // with EXPERTS, an MLP beside them; without matrices there is none
    ExpertsSpec experts;
    LayerInputSpec own_input;  // after the MLP; without matrices there is none
    float scalar;      // factor of the residual stream after the layer
};

// Calls f with each matrix of a layer that all rows take.
template <class F>
inline void each_common_matrix(const LayerSpec& layer, F f) {
    if (layer.attends) f(layer.attention.qkv), f(layer.attention.out);
    for (const Matrix* w : {&layer.attention.query_up, &layer.attention.absorb, &layer.attention.expand})
        if (w->units) f(*w);
    if (layer.recurs) f(layer.recurrent.into), f(layer.recurrent.out);
    if (layer.recurs == DELTA || layer.recurs == MAMBA) f(layer.recurrent.gates);
    if (layer.cross.attention.qkv.data) f(layer.cross.attention.qkv), f(layer.cross.attention.out);
    if (layer.dense.up.data) f(layer.dense.up), f(layer.dense.down);
    if (layer.own_input.gate.data) f(layer.own_input.gate), f(layer.own_input.up);
}

// Calls f with each matrix of a layer, that for the states of an encoder included; those of all its experts are one.
template <class F>
inline void each_matrix(const LayerSpec& layer, F f) {
    each_common_matrix(layer, f);
    if (layer.cross.keys_values.data) f(layer.cross.keys_values);
    if (layer.mlp != EXPERTS) return;
    for (const Matrix* w : {&layer.experts.up, &layer.experts.down, &layer.experts.shared_up, &layer.experts.shared_down}) f(*w);
}

// A table [positions][2 * half]: cosines, then sines, of the first 2 * half numbers of a head.
struct RopeSpec {
    const float* table;
    int32_t half;
    int32_t paired;  // numbers 2 i and 2 i + 1 are rotated together; else i and i + half
};

// Sizes of recurrent layers, which are all equal. A row's inputs are its gates, padded, then its channels.
struct StateSpec {
    int32_t window;      // rows before a row that the convolution reads
    int32_t channels, out, gates, inputs;
    int32_t key_heads, value_heads, key_dim, value_dim;
    int32_t norm_first;  // Mamba-2 norms its output before it is multiplied by its gate; else after
    float gate_factor, step_factor;  // of the gate of the output, and of Mamba-2's steps before their bias
};

// Sizes of latent attention. The cache has one head of keys for all, of `rank` + `rotated` numbers; values are its first `rank`.
struct LatentSpec {
    int32_t rank, rotated;       // numbers of the latent and of the rotary key; rank 0: attention is not latent
    int32_t plain, value;        // of each head: numbers of a query that are not rotated, and of a value
    int32_t query_rank;          // numbers of the queries' latent; 0: queries are a product of the row
    float eps;                   // of the norms of latents
};

constexpr int MAX_HEAD = 512, MAX_LATENT = 1024;  // numbers of a head; rank + rotated

// Where the inputs of single layers come from (layer_inputs.hpp).
struct LayerInputsSpec {
    const Word* table;   // embeddings [vocab][layers * width padded to 32] of `embedding_kind`
    Matrix projection;   // of the scaled embedding
    NormSpec norm;       // of one layer's part of it
    int32_t width;       // numbers of one layer's input; 0: there are none
    float table_scale, projection_scale;
    int64_t stride() const { return projection.units * BLOCKS * LANES; }  // numbers of all layers
};

struct ModelSpec {
    const LayerSpec* layers;
    const Word* embedding;      // [vocab][hidden padded to 32] of `embedding_kind`; null: unpack rows of `table`
    Matrix table;               // the head where the two are tied
    const float* positions;     // learned positions [positions][hidden], added to the scaled embeddings; null: none
    NormSpec embedding_norm;    // after that
    NormSpec norm;
    NormSpec feature_norm;      // norm of a pass's features
    Matrix head;
    const RopeSpec* ropes;
    const float* biases;        // [heads][bias_stride]: scores += biases[position of the key] - biases[that of the row] (ALiBi)
    const float* query_scales;  // [positions]; queries are multiplied by it; null: none
    int64_t bias_stride;
    int32_t layer_count, hidden, heads, vocab;
    int32_t activation;         // an Activation
    int32_t centered;           // norms subtract the mean (layer norm); else RMS norm
    int32_t norm_heads;         // where q_norm and k_norm are: a HeadNorm
    int32_t joined;             // input of layer 0's attention: [norm(embedding), feature_norm(features)] (2503.01840)
    int32_t norm_first;         // the residual stream starts from the normed features
    float eps, scale, score_cap, logit_cap, embedding_scale;
    float attention_factor, recurrent_factor, mlp_factor;  // of what they add to the residual stream
    float gate_factor;          // of an MLP's gate before its activation
    float logit_scale;          // factor of the logits, before the cap
    int32_t gated_attention;    // the rows of `qkv` end with gates of the output
    StateSpec state;
    LatentSpec latent;
    LayerInputsSpec layer_inputs;
    float clip;                 // queries, keys and values are clipped to [-clip, clip]; 0: no bound
    int32_t norm_sums;          // norms after mixers and MLPs are those of the residual stream (BART); else of what is added to it
    int32_t farthest;           // distance from which on all relative positions are one
    int32_t embedding_kind;     // F32 or BF16; also of the embeddings for layers
    int32_t embedding_rows;     // tokens that have an embedding
    int32_t learned_positions;  // rows of `positions`
    int32_t table_positions;    // positions that rotary tables and `query_scales` have
    Matrix fusion;              // makes a row's features from the states of several layers of a target, one after another (2503.01840)
    int32_t fused_layers, fused_width;  // their number, and the numbers of each
    int32_t fuses_embedding;    // the first of them is the row's embedding; the other one has `feature_norm` (MTP, 2412.19437)
};

// Norms of queries and keys: of each head before or after its rotation, or of all heads together before it.
enum HeadNorm : int32_t { BEFORE_ROTATION = 0, AFTER_ROTATION = 1, ALL_HEADS = 2 };

constexpr int LORA_PARTS = 3;  // of a product; bindings.py has the same number

// A float32 matrix of a low-rank product, from a part of its input rows to a part of the result.
struct LoraPart {
    Matrix matrix;
    int32_t first;     // number of an input row
    int32_t to, step;  // block of sixteen numbers of the result where the first one goes, and the distance between blocks
};

// A low-rank product that is added to one of a layer's: up (down x) (LoRA, 2106.09685). The result has the outputs of the
// layer's own matrix, in their order. Without data in `down` there is none.
struct LoraSpec {
    LoraPart down, up[LORA_PARTS];
};

// What an adapter adds to one layer: to the product with the matrix of the same name.
struct LoraLayer {
    LoraSpec qkv, out, up, down;
    LoraSpec recurrent_in, recurrent_gates, recurrent_out;
    LoraSpec query_up, router, shared_up, shared_down, shared_gate;
    LoraSpec input_gate, input_up, input_projection;  // the last one, of all layers' inputs, is that of the first layer
    const LoraSpec *absorb, *expand;           // of each head; or null
    const LoraSpec *expert_up, *expert_down;   // of each expert; or null
};

// The longest rows of the low-rank products of a kind: floats of an input, of what is between the two halves, and of a result.
struct LoraWidths {
    int64_t input, inner, added;
};

struct LoraAdapter {
    const LoraLayer* layers;
    LoraWidths rows, heads, pairs;  // of products of rows; of rows and a head; of rows and an expert
    int32_t layer_count;
};

// The steps of recurrent layers in a pass; models/state/replay.py describes the fields.
struct ReplaySpec {
    const int32_t *first_step, *sources, *targets, *saves, *inputs;
    float* const* states;
    const float* const* logs;
    const int32_t* log_rows;
    float* const* snapshots;
    const int32_t *moved, *moved_of;
    float* const* moved_to;
    const int32_t* moved_stride;
    int32_t steps, copies, moves, snapshot_count;
};

constexpr int32_t OWN_STATE = -1, ZERO_STATE = -2, NO_STATE = -2;  // beside copies, from 0 on

struct BatchSpec {
    const int32_t *tokens, *positions, *places;    // [rows]; places: cache row in the sequence
    const int32_t *prefix;                         // [rows]; cache rows 0 .. prefix - 1 are visible
    const int32_t *branch_from, *branches;         // [rows + 1], and the visible cache rows after the prefix, in order
    const int32_t *sequence_from;                  // [sequences + 1]; first row of each sequence
    Word* const* const* pages;                     // [sequences]; pages of each sequence
    const int32_t* page_counts;                    // [sequences]; their number
    const int32_t *outputs;                        // [output_count]; rows whose logits are needed
    float* logits;                                 // [output_count][padded vocab], or null
    int32_t* likeliest;                            // [output_count], or null; argmax of the logits, -1 where there is none
    int64_t* ranked;                               // [output_count][ranks], or null; the likeliest tokens, the likeliest first
    const int32_t *tap_layers;                     // [tap_count]
    float* const* taps;                            // [tap_count] -> [rows][hidden]
    const float* features;                         // [rows][hidden]; start of the residual stream, or null
    const float* const* states;                    // [rows][fused_layers] -> [fused_width]; what features are made from, without the embedding; or null
    const ReplaySpec* replay;                      // the steps of recurrent layers, or null
    const LoraAdapter* const* adapters;            // [sequences]; the adapter of each sequence, or null; null: none
    Word* const* const* source_pages;              // [sequences]; keys and values of an encoder's states, or null
    const int32_t *source_counts, *source_lengths;  // [sequences]; the number of these pages, and of the states
    int32_t rows, sequences, output_count, tap_count, branch_count, ranks, reach;
    int32_t source_reach;                          // the largest of source_lengths

    bool featured() const { return features || states; }
    int answers() const { return logits || likeliest || ranked ? output_count : 0; }  // rows that the vocabulary head reads
};

// Whether a pass reads the embeddings of its rows.
inline bool embeds(const ModelSpec& m, const BatchSpec& b) { return !b.featured() || m.joined || m.fuses_embedding; }

// The last layer that writes to the cache or to a state: those behind it need only the rows whose logits are needed.
inline int last_writer(const ModelSpec& m) {
    int last = m.layer_count - 1;
    while (last > 0 && !(m.layers[last].attends && !m.layers[last].attention.shares) && !m.layers[last].recurs) last--;
    return last;
}

// The largest of some number of all layers with attention.
template <class F>
inline int64_t largest_of_layers(const ModelSpec& m, F number) {
    int64_t largest = 0;
    for (int i = 0; i < m.layer_count; i++)
        if (m.layers[i].attends) largest = std::max(largest, (int64_t)number(m.layers[i].attention));
    return largest;
}

// What a library of the decoder has once, whatever kinds of weights and caches are linked into it.
#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "entry.hpp"

#include "chains.hpp"

KindFunctions FUNCTIONS[KIND_COUNT];

extern "C" {

// Returns whether the kernels can run here. Requests the tile registers from the system if they are used.
int foretoken_ready() {
#if defined(__AMX_TILE__) && defined(__linux__)
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 1;
#endif
}

// Returns a bit for each kind of matrices whose kernels are linked.
uint32_t foretoken_kinds() {
    static_assert(KIND_COUNT <= 32);
    uint32_t kinds = 0;
    for (int kind = 0; kind < KIND_COUNT; kind++) kinds |= (uint32_t)linked(kind) << kind;
    return kinds;
}

// Returns the layout of the structures that Python mirrors (bindings.py).
const LayoutField* foretoken_layout() {
    static const LayoutField fields[] = {
        LAYOUT(Matrix, data, scales, bias, sums, units, steps, kind, group, record_bytes, record_groups, zero, levels, upper)
        LAYOUT(NormSpec, weight, bias)
        LAYOUT(AttentionSpec, qkv, out, query_up, absorb, expand, q_norm, k_norm, v_norm, sinks, relative, kv_heads, head_dim,
               norm_stride, window, rope, cache_at, scales_at, shares, grows, ordered)
        LAYOUT(CrossSpec, norm, after, attention, keys_values)
        LAYOUT(RecurrentSpec, into, gates, out, conv, conv_bias, decay, step_bias, norm, skip, state_layer)
        LAYOUT(MlpSpec, up, down, inner, gated)
        LAYOUT(LayerInputSpec, gate, up, norm)
        LAYOUT(RouterSpec, weights, correction, experts, chosen, scoring, normalized, groups, chosen_groups, group_score, scale,
               divisor_eps)
        LAYOUT(ExpertsSpec, router, up, down, shared_up, shared_down, shared_gate, router_norm, expert_scales, gated,
               scaled_inputs, inner, shared_inner, limit, slope)
        LAYOUT(LayerSpec, norm, after_mixer, mlp_norm, after_mlp, beside_norm, after_beside, after_experts, attends, recurs, mlp,
               parallel, attention, cross, recurrent, dense, experts, own_input, scalar)
        LAYOUT(RopeSpec, table, half, paired)
        LAYOUT(StateSpec, window, channels, out, gates, inputs, key_heads, value_heads, key_dim, value_dim, norm_first,
               gate_factor, step_factor)
        LAYOUT(LatentSpec, rank, rotated, plain, value, query_rank, eps)
        LAYOUT(LayerInputsSpec, table, projection, norm, width, table_scale, projection_scale)
        LAYOUT(ModelSpec, layers, embedding, table, positions, embedding_norm, norm, feature_norm, head, ropes, biases,
               query_scales, bias_stride, layer_count, hidden, heads, vocab, activation, centered, norm_heads, joined, norm_first,
               eps, scale, score_cap, logit_cap, embedding_scale, attention_factor, recurrent_factor, mlp_factor, gate_factor,
               logit_scale, gated_attention, state, latent, layer_inputs, clip, norm_sums, farthest, embedding_kind,
               embedding_rows, learned_positions, table_positions, fusion, fused_layers, fused_width, fuses_embedding)
        LAYOUT(LoraPart, matrix, first, to, step)
        LAYOUT(LoraSpec, down, up)
        LAYOUT(LoraLayer, qkv, out, up, down, recurrent_in, recurrent_gates, recurrent_out, query_up, router, shared_up,
               shared_down, shared_gate, input_gate, input_up, input_projection, absorb, expand, expert_up, expert_down)
        LAYOUT(LoraWidths, input, inner, added)
        LAYOUT(LoraAdapter, layers, rows, heads, pairs, layer_count)
        LAYOUT(ReplaySpec, first_step, sources, targets, saves, inputs, states, logs, log_rows, snapshots, moved, moved_of,
               moved_to, moved_stride, steps, copies, moves, snapshot_count)
        LAYOUT(BatchSpec, tokens, positions, places, prefix, branch_from, branches, sequence_from, pages, page_counts, outputs,
               logits, likeliest, ranked, tap_layers, taps, features, states, replay, adapters, source_pages, source_counts, source_lengths, rows, sequences,
               output_count, tap_count, branch_count, ranks, reach, source_reach)
        LAYOUT(SamplerSpec, kept, noise, rows, changes, races)
        LAYOUT(TreeSpec, width, steps, temperature, floor, kind)
        LAYOUT(DeeperSpec, model, workspace, pages, page_counts, cached, carried)
        LAYOUT(ChainSpec, limits, floors, bases, slopes, bounds, tokens, probabilities, parents, counts, tried, samplers, trees, choose,
               draw, lead, change, ids, successors, successors_workspace, deeper, longest, buckets, vocab, width, foreseen, deeper_count)
        {},
    };
    return fields;
}

}  // extern "C"

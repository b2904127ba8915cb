// Early exit of rows without logits. After the KV projection of the last layer that has one, a row only feeds the vocabulary
// head. So the rows whose logits are not needed (in a prompt, all but one) are dropped there.
#pragma once

#include <vector>

#include "specs.hpp"

// Returns the plan of `b` reduced to its output rows, which ascend. The arrays are valid until the next pass.
struct Answered {
    std::vector<int32_t> positions, prefix, branch_from, branches, sequence_from, outputs;
    BatchSpec batch;

    void plan(const ModelSpec& m, const BatchSpec& b) {
        batch = b;
        if (!fewer(m, b)) return;
        positions.clear(), prefix.clear(), branches.clear(), outputs.clear();
        branch_from.assign(1, 0), sequence_from.assign(1, 0);
        int sequence = 0;
        for (int i = 0; i < b.answers(); i++) {
            const int row = b.outputs[i];
            for (; b.sequence_from[sequence + 1] <= row; sequence++) sequence_from.push_back(i);
            positions.push_back(b.positions[row]);
            prefix.push_back(b.prefix[row]);
            branches.insert(branches.end(), b.branches + b.branch_from[row], b.branches + b.branch_from[row + 1]);
            branch_from.push_back((int32_t)branches.size());
            outputs.push_back(i);
        }
        sequence_from.resize(b.sequences + 1, b.answers());
        batch.rows = b.answers();
        batch.positions = positions.data(), batch.prefix = prefix.data(), batch.outputs = outputs.data();
        batch.branches = branches.data(), batch.branch_from = branch_from.data();
        batch.sequence_from = sequence_from.data();
    }

   private:
    // Returns whether rows can be dropped: no hidden states after that layer are requested.
    static bool fewer(const ModelSpec& m, const BatchSpec& b) {
        for (int t = 0; t < b.tap_count; t++)
            if (b.tap_layers[t] > last_writer(m)) return false;
        return m.layer_count && b.answers() < b.rows;
    }
};

// The plan of attention over the states of an encoder: a row sees all of its sequence's, and no draft.
struct SourcePlan {
    std::vector<int32_t> lengths, branch_from;
    BatchSpec batch;

    void plan(const BatchSpec& b) {
        batch = b;
        if (!b.source_pages) return;
        lengths.clear();
        for (int s = 0; s < b.sequences; s++)
            lengths.insert(lengths.end(), b.sequence_from[s + 1] - b.sequence_from[s], b.source_lengths[s]);
        branch_from.assign(b.rows + 1, 0);
        batch.pages = b.source_pages, batch.prefix = lengths.data(), batch.branch_from = branch_from.data();
        batch.reach = b.source_reach;
    }
};

// Trees of fixed candidates, grown as EAGLE-2 does (2406.16858, section 4): the best nodes of a level are expanded, and the best of
// all levels are kept. propose/tree.py is the reference, and grows the trees of models that run one pass per level.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "simd.hpp"

// The shape of a tree; width 0 stands for a chain.
struct TreeSpec {
    int32_t width;       // candidates of a node, and nodes expanded on a level
    int32_t steps;       // levels
    float temperature;   // of the probabilities that candidates are ranked by
    float floor;         // score below which a node is not expanded
};

// Returns the sum of exp((logit - top) / temperature).
inline float sum_of_powers(const float* logits, int count, float top, float temperature) {
    const Floats factor = floats(1.0f / temperature);
    Floats sums = floats(0.0f);
    float sum = 0.0f;
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats v = load(logits + i);
        sums = sums + keep(different(v, floats(-INFINITY)), exponential((v - floats(top)) * factor));
    }
    for (; i < count; i++) sum += std::exp((logits[i] - top) / temperature);
    return sum + sum_of(sums);
}

struct Tree {
    std::vector<int32_t> tokens, parents;
    std::vector<float> scores;    // log of the product of the probabilities down to a node
    std::vector<int> frontier;    // nodes whose logits come next; at first the root
    std::vector<int> scored;      // nodes whose logits were computed or come next, in their order
    std::vector<int> scored_as;   // [nodes]; the number of a node among these
    int level = 0;                // of the frontier

    // Adds the children of the frontier, and finds the next frontier among them.
    //
    // likely(i): the numbers of the likeliest logits of the frontier's i-th node, the likeliest first. logits(i): its `vocab` logits.
    // ids: the token of each logit, or null.
    template <class Likely, class Logits>
    void expand(const TreeSpec& spec, int budget, Likely likely, Logits logits, int vocab, const int32_t* ids) {
        const std::vector<int> parents_now = level ? frontier : std::vector<int>{-1};
        const int start = size();
        const float* summed = nullptr;  // the logits that `total` is of: nodes may share them
        float total = 0.0f;
        for (int i = 0; i < (int)parents_now.size(); i++) {
            const float above = parents_now[i] < 0 ? 0.0f : scores[parents_now[i]], *row = logits(i);
            const int64_t* best = likely(i);
            const float top = row[best[0]];
            if (!std::isfinite(top)) continue;
            if (row != summed) total = std::log(sum_of_powers(row, vocab, top, spec.temperature));
            summed = row;
            for (int k = 0; k < spec.width; k++) {
                const int64_t token = best[k];
                const float score = (row[token] - top) / spec.temperature - total;
                if (score == -INFINITY) break;
                tokens.push_back(ids ? ids[token] : (int32_t)token), parents.push_back(parents_now[i]);
                scores.push_back(above + std::min(0.0f, score)), scored_as.push_back(-1);
            }
        }
        const std::vector<int> all = best_of(0, budget);
        frontier.clear();
        for (int node : best_of(start, spec.width))
            if (scores[node] >= spec.floor && std::binary_search(all.begin(), all.end(), node)) frontier.push_back(node);
        for (int node : frontier) scored_as[node] = (int)scored.size(), scored.push_back(node);
        level++;
    }

    // Returns the number of a node's parent among the scored nodes, -1 for the root.
    int scored_parent(int node) const { return parents[node] < 0 ? -1 : scored_as[parents[node]]; }

    // Calls f with the nodes from the root's child down to `node`.
    template <class F>
    void each_above(int node, F f) const {
        if (parents[node] >= 0) each_above(parents[node], f);
        f(node);
    }

    // Writes the best `budget` nodes of all levels, parents first. Returns their number.
    int best(int budget, int32_t* to_tokens, int32_t* to_parents, float* to_scores) const {
        const std::vector<int> kept = best_of(0, budget);
        for (size_t i = 0; i < kept.size(); i++) {
            const int node = kept[i], parent = parents[node];
            to_tokens[i] = tokens[node], to_scores[i] = scores[node];
            to_parents[i] = parent < 0 ? -1 : int(std::lower_bound(kept.begin(), kept.end(), parent) - kept.begin());
        }
        return (int)kept.size();
    }

   private:
    int size() const { return (int)tokens.size(); }

    // Returns the `count` nodes of highest score from `start` on, ascending; of equal ones the older, so that parents are there.
    std::vector<int> best_of(int start, int count) const {
        std::vector<int> nodes(size() - start);
        std::iota(nodes.begin(), nodes.end(), start);
        const size_t kept = std::min<size_t>(count, nodes.size());
        std::partial_sort(nodes.begin(), nodes.begin() + kept, nodes.end(),
                          [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
        nodes.resize(kept);
        std::sort(nodes.begin(), nodes.end());
        return nodes;
    }
};

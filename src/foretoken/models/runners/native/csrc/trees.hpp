// Trees of fixed candidates, grown as EAGLE-2 does (2406.16858, section 4): the best nodes of a level are expanded, and the best of
// all levels are kept. propose/tree.py is the reference, and grows the trees of models that run one pass per level.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "simd.hpp"

// How the nodes of a tree are chosen: its best candidates, siblings sampled without replacement, or the most probable siblings and one
// sampled (drawn_trees.hpp).
enum TreeKind : int32_t { RANKED = 0, SAMPLED = 1, GREEDY_MULTI = 2 };

// The shape of a tree; width 0 stands for a chain.
struct TreeSpec {
    int32_t width;       // children of a node, and ranked nodes expanded on a level
    int32_t steps;       // levels
    float temperature;   // of the probabilities that candidates are ranked by, unless a sampler has their distribution
    float floor;         // score below which a node is not expanded
    int32_t kind;        // a TreeKind
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
    std::vector<double> reach;    // [nodes] of a sampled tree; the estimated acceptance of all tokens down to a node
    std::vector<int> frontier;    // nodes whose logits come next; at first the root
    std::vector<int> scored;      // nodes whose logits were computed or come next, in their order
    std::vector<int> scored_as;   // [nodes]; the number of a node among these
    int level = 0;                // of the frontier

    // The nodes that the next level grows below.
    std::vector<int> open() const { return level ? frontier : std::vector<int>{-1}; }

    void add(int32_t token, int parent, float score) {
        tokens.push_back(token), parents.push_back(parent), scores.push_back(score), scored_as.push_back(-1);
    }

    // Sets the next frontier.
    void advance(const std::vector<int>& nodes) {
        frontier = nodes;
        for (int node : frontier) scored_as[node] = (int)scored.size(), scored.push_back(node);
        level++;
    }

    // Adds the children of the frontier, and finds the next frontier among them.
    //
    // best, shares: the best tokens below each of its nodes, `stride` numbers apart, and the logs of their probabilities, in falling order.
    void expand(const TreeSpec& spec, int budget, const int32_t* best, const float* shares, int stride) {
        const int start = size();
        for (int node : open()) {
            for (int k = 0; k < spec.width && shares[k] > -INFINITY; k++)
                add(best[k], node, (node < 0 ? 0.0f : scores[node]) + std::min(0.0f, shares[k]));
            best += stride, shares += stride;
        }
        const std::vector<int> all = best_of(0, budget);
        std::vector<int> next;
        for (int node : best_of(start, spec.width))
            if (scores[node] >= spec.floor && std::binary_search(all.begin(), all.end(), node)) next.push_back(node);
        advance(next);
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

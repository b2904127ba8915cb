// Sampled trees: siblings without replacement, or the most probable ones and one sampled. propose/drawn_tree.py is the reference, and
// has the reasons.
#pragma once

#include <queue>
#include <tuple>

#include "status.hpp"
#include "trees.hpp"

// Draws the token at fraction `u` of n weights, -1 where there is none (core/native/sampling.cpp).
using Draw = int32_t (*)(const void* weights, int wide, int64_t n, double u, int64_t* token, double* total, int threads);

struct DrawnTree {
    static constexpr double MIN_FIRST = 0.5, MAX_FIRST = 0.95, LATER[] = {0.28, 0.19, 0.14, 0.1}, TYPICAL = 0.7;
    static constexpr int LATERS = 4;

    Tree& tree;
    const TreeSpec& spec;
    const int budget;
    const double* uniforms;  // [budget]
    float* rows;             // [budget][width], 0 at first; the distribution that a node's children are sampled from, behind the root's
    const int64_t width;
    const Draw draw;
    const int threads;

    // Samples children of the frontier, whose distributions are in `rows`, and finds those that have children.
    void expand() {
        const std::vector<int> nodes = tree.open();
        std::vector<double> firsts;
        for (int node : nodes) firsts.push_back(acceptance(row(node)));
        const std::vector<int> counts = plan(nodes, firsts, tree.level);
        const int start = (int)tree.tokens.size();
        for (size_t i = 0; i < nodes.size(); i++) {
            if (counts[i]) sample(nodes[i], counts[i]);
            else std::fill_n(row(nodes[i]), width, 0.0f);
        }
        std::vector<int> added(tree.tokens.size() - start);
        std::iota(added.begin(), added.end(), start);
        const std::vector<int> later = plan(added, std::vector<double>(added.size(), TYPICAL), tree.level + 1);
        std::vector<int> next;
        for (size_t i = 0; i < added.size(); i++)
            if (later[i]) next.push_back(added[i]);
        tree.advance(next);
    }

    float* row(int node) const { return rows + (node + 1) * width; }

   private:
    // The estimated acceptance of a token sampled from a distribution.
    double acceptance(const float* p) const {
        double sums[LANES] = {}, cubes = 0.0;
        int64_t v = 0;
        for (; v + LANES <= width; v += LANES)
            for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)p[v + lane] * p[v + lane] * p[v + lane];
        for (; v < width; v++) cubes += (double)p[v] * p[v] * p[v];
        for (double sum : sums) cubes += sum;
        return MIN_FIRST + (MAX_FIRST - MIN_FIRST) * cubes;
    }

    double reached(int node) const { return node < 0 ? 1.0 : tree.reach[node]; }

    // Samples at most `count` children of a node, and estimates the probability of reaching each.
    void sample(int node, int count) {
        std::vector<float> left(row(node), row(node) + width);
        count = std::min<int64_t>(count, width - std::count(left.begin(), left.end(), 0.0f));
        double above = reached(node), mass = 1.0;
        for (int rank = 0; rank < count; rank++) {
            const bool fixed = spec.kind == GREEDY_MULTI && rank < count - 1;
            int64_t token = -1;
            double total;
            if (fixed) {
                token = std::max_element(left.begin(), left.end()) - left.begin();
            } else {
                const int32_t status = draw(left.data(), 0, width, uniforms[tree.tokens.size()], &token, &total, threads);
                if (status == NO_MEMORY) throw std::bad_alloc();
                if (status != OK || token < 0) refuse("child %d of node %d cannot be drawn", rank, node);
            }
            const double share = left[token];
            left[token] = 0.0f;
            const double chance = fixed ? std::min(1.0, share / mass) : rank ? LATER[std::min(rank, LATERS) - 1]
                                                                             : MIN_FIRST + (MAX_FIRST - MIN_FIRST) * (share * share);
            mass = std::max(mass - share, 1e-9);
            tree.add((int32_t)token, node, (float)std::log(above * chance));
            tree.reach.push_back(above * chance);
            above *= 1.0 - chance;
        }
    }

    // Returns the number of children of each node: those among the best nodes of the expected tree that the budget covers.
    std::vector<int> plan(const std::vector<int>& nodes, const std::vector<double>& firsts, int depth) const {
        using Offer = std::tuple<double, int, int, int, double>;  // -reach, level, owner, rank among siblings, acceptance
        std::vector<int> counts(nodes.size());
        const int steps = spec.steps - depth;
        if (steps <= 0) return counts;
        std::priority_queue<Offer, std::vector<Offer>, std::greater<Offer>> offers;
        for (size_t i = 0; i < nodes.size(); i++) offers.push({-reached(nodes[i]) * firsts[i], 0, (int)i, 0, firsts[i]});
        for (int left = budget - (int)tree.tokens.size(); left > 0 && !offers.empty(); left--) {
            const auto [reach, level, owner, rank, chance] = offers.top();
            offers.pop();
            counts[owner] += level == 0;
            if (rank + 1 < spec.width) {
                const double later = LATER[std::min(rank, LATERS - 1)];
                offers.push({reach / chance * (1.0 - chance) * later, level, owner, rank + 1, later});
            }
            if (level + 1 < steps) offers.push({reach * TYPICAL, level + 1, owner, 0, TYPICAL});
        }
        return counts;
    }
};

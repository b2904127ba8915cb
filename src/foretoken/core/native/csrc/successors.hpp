// Trees of token recycling, read from a table of each token's likeliest successors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <queue>
#include <vector>

#include "status.hpp"

struct SuccessorTable {
    const int32_t* successors;  // [vocab][width], the likeliest first; -1 for none
    const double* hits;         // [width]; how often the successor of each rank came true
    int64_t vocab, width;
};

// Writes the `budget` heaviest nodes below a token, parents before children. A node's weight is the product of its ranks' rates
// (hits / trials) from the root down; of equal weights the one that was offered first is taken. Returns their number.
inline int64_t heaviest_tree(const SuccessorTable& t, double trials, int64_t root, int64_t budget, int64_t max_depth, int64_t* tokens,
                             int64_t* parents, double* weights) {
    std::vector<int64_t> ranks(t.width);
    std::vector<double> rates(t.width);
    for (int64_t rank = 0; rank < t.width; rank++) rates[rank] = t.hits[rank] / trials;
    std::iota(ranks.begin(), ranks.end(), 0);
    std::stable_sort(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) { return rates[a] > rates[b]; });
    struct Offer {
        double weight, base;  // base: weight of the parent
        int64_t serial, parent, depth, token, place;
        bool operator<(const Offer& other) const { return weight < other.weight || (weight == other.weight && serial > other.serial); }
    };
    std::priority_queue<Offer> offers;
    int64_t serial = 0, count = 0;
    // Offers the next known successor of `token`, from this place among the ranks on.
    auto offer = [&](int64_t parent, int64_t depth, int64_t token, int64_t place, double base) {
        if (token < 0 || token >= t.vocab) refuse("successors of token %lld, of %lld tokens", (long long)token, (long long)t.vocab);
        for (; place < t.width; place++)
            if (t.successors[token * t.width + ranks[place]] >= 0) {
                offers.push({base * rates[ranks[place]], base, serial++, parent, depth, token, place});
                return;
            }
    };
    offer(-1, 1, root, 0, 1.0);
    while (!offers.empty() && count < budget) {
        const Offer best = offers.top();
        offers.pop();
        const int64_t token = t.successors[best.token * t.width + ranks[best.place]];
        tokens[count] = token, parents[count] = best.parent, weights[count] = best.weight;
        offer(best.parent, best.depth, best.token, best.place + 1, best.base);
        if (best.depth < max_depth) offer(count, best.depth + 1, token, 0, best.weight);
        count++;
    }
    return count;
}

// Text to copy: what followed earlier occurrences of the end of a text, as a tree (suffix decoding, 2411.04975).
//
// propose/matches.py and propose/suffix.py do the same in Python, for texts of other requests too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

#include "status.hpp"

struct CopySearch {
    const int32_t* text;   // [count]; a negative number is a break, which no tree crosses
    int64_t count;
    double factor;         // a match of m tokens is followed for at most this factor times m tokens
    double min_prob;       // of a node
    int32_t depth, limit;  // tokens of a match and of a continuation, at most; occurrences that are counted, at most
    int32_t budget, top_k; // nodes; children of a node
};

// A tree of counted continuations, parents before children, with the probability that the text passes through each node.
struct CopyTree {
    std::vector<int32_t> tokens, parents;
    std::vector<double> probs;
    double score = 0.0;  // sum of the probabilities
    int length = 0;      // of the context that it follows
};

class Copies {
   public:
    explicit Copies(const CopySearch& s) : s(s) {
        if (s.count < 0 || s.depth < 1 || s.limit < 1 || s.budget < 1 || s.top_k < 1) refuse("a search of %lld tokens for %d nodes", (long long)s.count, s.budget);
    }

    // Returns the context length whose continuations promise most tokens; of equal ones the longest.
    CopyTree best() {
        find();
        const int steps = std::min(s.budget, s.depth);
        CopyTree best;
        for (size_t count = 1; count <= ends.size(); count++) {
            const int length = ends[count - 1].length;
            if (count < ends.size() && ends[count].length >= length) continue;
            const int followed = std::min<int64_t>((int64_t)(s.factor * length), s.budget);
            if (followed < 1 || best.score > followed || (best.score == followed && best.length >= length)) break;
            CopyTree tree = grow(count, steps, followed);
            tree.length = length;
            if (tree.score > best.score || (tree.score == best.score && length > best.length)) best = std::move(tree);
        }
        return best;
    }

   private:
    struct End {
        int64_t at;  // the token that followed
        int length;  // tokens before it that agree with the end of the text
    };
    struct Member {
        int64_t at;
        int weight;  // occurrences with this continuation
    };
    struct Offer {
        double prob;
        int64_t age;
        int32_t token, parent, depth;
        std::vector<Member> members;
        bool operator<(const Offer& other) const { return prob < other.prob || (prob == other.prob && age > other.age); }
    };

    int32_t back(int64_t at, int distance) const { return at >= distance ? s.text[at - distance] : -1; }

    // Finds the positions whose context agrees longest with the end of the text, the longest first, then the latest.
    void find() {
        const int most = (int)std::min<int64_t>(s.depth, s.count);
        if (!most || s.text[s.count - 1] < 0) return;
        std::vector<int64_t> places, closer;
        for (int64_t at = 1; at < s.count; at++)
            if (s.text[at - 1] == s.text[s.count - 1]) places.push_back(at);
        for (int distance = 2; distance <= most && (int64_t)places.size() > s.limit; distance++) {
            closer.clear();
            for (int64_t at : places)
                if (back(at, distance) == back(s.count, distance)) closer.push_back(at);
            if (closer.empty()) break;
            places.swap(closer);
        }
        for (size_t i = places.size(); i-- > 0 && (int64_t)ends.size() < s.limit;) {
            int length = 1;
            while (length < most && back(places[i], length + 1) >= 0 && back(places[i], length + 1) == back(s.count, length + 1)) length++;
            ends.push_back({places[i], length});
        }
        std::stable_sort(ends.begin(), ends.end(), [](const End& a, const End& b) { return a.length > b.length; });
    }

    // The token at a distance behind a position. Near the end it goes on with its own copy, as in text that repeats itself.
    int32_t ahead(int64_t at, int64_t distance) const { return s.text[at + distance % (s.count - at)]; }

    // The tree of the first occurrences, whose continuations are compared up to `steps` tokens and followed for `followed`.
    CopyTree grow(size_t count, int steps, int followed) {
        std::vector<Member> members;
        for (size_t i = 0; i < count; i++) {
            const auto same = std::find_if(members.begin(), members.end(), [&](const Member& m) {
                for (int k = 0; k < steps; k++)
                    if (ahead(m.at, k) != ahead(ends[i].at, k)) return false;
                return true;
            });
            if (same == members.end()) members.push_back({ends[i].at, 1});
            else same->weight++;
        }
        CopyTree tree;
        std::priority_queue<Offer> offers;
        offer(offers, members, 0, 1.0, -1, steps);
        while (!offers.empty() && (int)tree.tokens.size() < s.budget) {
            const Offer next = offers.top();
            offers.pop();
            tree.tokens.push_back(next.token), tree.parents.push_back(next.parent), tree.probs.push_back(next.prob);
            tree.score += next.prob;
            if (next.depth < followed) offer(offers, next.members, next.depth, next.prob, (int32_t)tree.tokens.size() - 1, steps);
        }
        return tree;
    }

    // Offers the likeliest tokens at a depth of continuations that agree up to there.
    void offer(std::priority_queue<Offer>& offers, const std::vector<Member>& members, int depth, double prob, int32_t parent, int steps) {
        struct Group {
            int32_t token;
            double weight;
            std::vector<Member> members;
        };
        std::vector<Group> groups;
        double total = 0.0;
        for (const Member& member : members) {
            const int32_t token = depth < steps ? ahead(member.at, depth) : -1;
            total += member.weight;
            if (token < 0) continue;
            auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.token == token; });
            if (group == groups.end()) group = groups.insert(groups.end(), Group{token, 0.0, {}});
            group->weight += member.weight, group->members.push_back(member);
        }
        std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.weight > b.weight; });
        if ((int)groups.size() > s.top_k) groups.resize(s.top_k);
        for (Group& group : groups) {
            const double share = members.size() == 1 ? prob : prob * group.weight / total;
            if (share > 0.0 && share >= s.min_prob) offers.push({share, age++, group.token, parent, depth + 1, std::move(group.members)});
        }
    }

    const CopySearch& s;
    std::vector<End> ends;
    int64_t age = 0;
};

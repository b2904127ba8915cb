// Rows of logits in the threads of a team: their distributions and tokens, with log-probabilities.
//
// Rows of probabilities are written only where all of them are needed.
#pragma once

#include <memory>
#include <optional>

#include "adjustment.hpp"
#include "draws.hpp"
#include "vocabulary.hpp"

namespace {

// Intermediate results of one row of n logits, by chunks of CHUNK tokens.
struct RowScratch {
    std::vector<Look> looks;
    std::vector<float> groups;  // the maximum of each GROUP of tokens
    std::vector<float> lowest;  // of those that min_p keeps
    std::vector<double> sums;
    std::vector<Best> races;
    std::vector<Entry> entries;
    std::unique_ptr<float[]> changed;  // [n]; not before `change`
    Distribution dist;
    bool possible = true;  // whether a token is left
    bool finite = true;    // whether the largest logit is; else there is no distribution

    RowScratch(int64_t n) : looks(chunks(n)), groups(chunks(n) * CHUNK / GROUP), lowest(chunks(n)), sums(chunks(n) * PARTS), races(runs(n)) {}
    static constexpr int64_t PARTS = 8;  // partial sums of a chunk
};

// The scratch of rows that are computed one after another.
class ScratchList {
   public:
    // count: number of rows if several threads compute them. A thread that is late may still read a row's scratch when others
    // are at the next row, so each row has its own then.
    ScratchList(int64_t n, int64_t count) : n(n), rows(count) {}

    RowScratch& of(Member& member, int64_t row) {
        std::unique_ptr<RowScratch>& scratch = rows[member.threads > 1 ? row : 0];
        if (member.threads > 1 || !scratch)
            member.each(1, 1, [&](int64_t) { scratch.reset(new RowScratch(n)); });
        return *scratch;
    }

   private:
    const int64_t n;
    std::vector<std::unique_ptr<RowScratch>> rows;
};

// Calls compute(member, item, scratch) for items with rows of n logits: one item in one thread where there are several, else in
// all of them. `compute` makes the same loops in each thread. rows: of an item, at most.
template <class F>
void each_row(int64_t items, int64_t rows, int64_t n, int threads, F compute) {
    // Short loops: two threads take as long as one at 49,152 tokens, and longer beside other programs.
    const int team = items * n <= 1 << 16 ? 1 : threads;
    const bool apart = items >= team;
    std::vector<ScratchList> scratch;
    for (int64_t i = 0; i < (apart ? team : items); i++) scratch.emplace_back(n, apart ? 1 : rows);
    in_parallel(team, [&](Member& member) {
        for (int64_t i = 0; !apart && i < items; i++) compute(member, i, scratch[i]);
        if (apart)
            member.each(items, 1, [&](int64_t i) {
                Team single;
                Member alone(single, 0);
                compute(alone, i, scratch[member.thread]);
            });
    });
}

// Computes the distribution of logits x [n] in the threads of a team.
void find_distribution(Member& member, const float* x, int64_t n, const FilterSpec& f, RowScratch& s) {
    const bool few = f.top_k > 0 && f.top_k < n, floored = f.floor > -INFINITY && !few;
    auto length = [&](int64_t c) { return std::min(CHUNK, n - c * CHUNK); };
    member.each(chunks(n), 1, [&](int64_t c) {
        s.looks[c] = look(x + c * CHUNK, length(c), f.inverse, !few && !floored, &s.groups[c * CHUNK / GROUP]);
    });
    member.each(1, 1, [&](int64_t) {
        float top = -INFINITY;
        for (const Look& each : s.looks) top = top >= each.top ? top : each.top;
        for (const Look& each : s.looks) top = std::isnan(each.top) ? NAN : top;
        s.finite = std::isfinite(top);
        s.dist = {top, f.inverse, -INFINITY, s.finite ? 0.0f : NAN, INT32_MAX};
    });
    if (!s.finite) return;
    if (floored)
        member.each(chunks(n), 1, [&](int64_t c) {
            s.lowest[c] = INFINITY;
            s.looks[c].sum = summed(x + c * CHUNK, length(c), s.dist, f.floor, s.lowest[c]);
        });
    member.each(1, 1, [&](int64_t) {
        double total = 0.0;
        if (floored) s.dist.lowest = *std::min_element(s.lowest.begin(), s.lowest.end());
        for (const Look& each : s.looks)
            total += each.sum * (floored ? 1.0 : std::exp(((double)each.top - s.dist.top) * s.dist.inverse));
        s.dist.over = (float)(1.0 / total);
        if (few || f.top_p < 1.0f) narrow({x, n, s.groups.data()}, f, total, s.dist, s.entries);
    });
}

// Writes the probabilities of n tokens from id `first` on, whose logits are x.
void write_chances(const float* x, int64_t n, int64_t first, const Distribution& dist, float* out) {
    for (int64_t v = 0; v < n; v += LANES) store_first(out + v, n - v, chances(load_first(x + v, n - v, 0.0f), first + v, dist));
}

constexpr int64_t BLOCK = GROUP * LANES;  // tokens whose groups are one vector

// Calls f(probabilities, first id, number of tokens) for runs of [from, from + count) of logits x, whose distribution was found, until
// it returns true. Runs without any probability are skipped.
template <class F>
void each_block(const RowScratch& s, const float* x, int64_t from, int64_t count, F f) {
    alignas(64) float p[BLOCK];
    for (int64_t at = from; at < from + count; at += BLOCK) {
        if (!bits(greater_or_equal(load(&s.groups[at / GROUP]), floats(s.dist.lowest)))) continue;
        const int64_t tokens = std::min(BLOCK, from + count - at);
        write_chances(x + at, tokens, at, s.dist, p);
        if (f(p, at, tokens)) return;
    }
}

// Computes all probabilities of each row. out: [rows][n].
void write_rows(const float* logits, int64_t stride, int64_t rows, int64_t n, const Distribution* distributions, float* out,
                int threads) {
    const int64_t each = chunks(n), items = rows * each;
    in_parallel_each(sharing(rows * n, threads), items, 1, [&](int64_t i) {
        const int64_t row = i / each, from = i % each * CHUNK;
        write_chances(logits + row * stride + from, std::min(CHUNK, n - from), from, distributions[row], out + row * n + from);
    });
}

// The source of a row's token.
enum TokenSource : int32_t {
    GIVEN,      // it is known, and only described
    LIKELIEST,  // the largest logit
    FRACTION,   // the token at a fraction of the total probability
    RACE,       // the winner of a race
};

struct TokenRow;

// The nodes of a draft of fixed candidates below a row. The row's token leads to one of them, whose token may lead on.
struct DraftNodes {
    const int64_t* ids;        // [nodes]
    const int32_t* parents;    // [nodes]; -1: the row
    TokenRow* const* rows;     // [deepest]; requests and results of the nodes that tokens lead to, by depth
    int32_t* path;             // [deepest]; result: these nodes
    int64_t stride;            // numbers between the logits of the row, and of each node behind it
    int32_t nodes, deepest;
    int32_t path_count;        // result
};

// All that is read of a row of logits: a token, its log-probability and rank among the unchanged logits, and the most probable
// tokens.
struct TokenRow {
    const float* logits;        // [n]
    const Adjustment* changes;  // null: none
    DraftNodes* below;          // null: none
    const int32_t* ids;         // [n]; the tokens whose noise a race takes; null: all
    FilterSpec filter;
    uint64_t noise;             // the bits of the fraction, or the key of the race; with a position the key that it is mixed into
    int32_t source;
    int32_t top_count;          // most probable tokens that are listed; -1: no log-probabilities
    int64_t* top_ids;           // [top_count]; result
    double* top_logprobs;       // [top_count]; result
    double logprob;             // result
    int64_t position;           // number of tokens that were generated before the step; -1 for noise that is complete
    int64_t index;              // depth of the row below it
    int64_t rank;               // result, from 1 on
    int64_t token;              // result; -1 where no token is possible
};

uint64_t splitmix(uint64_t z) {
    z = (z ^ z >> 30) * FIRST;
    z = (z ^ z >> 27) * SECOND;
    return z ^ z >> 31;
}

// The key of core/streams.py for the position of a row.
uint64_t key_of(const TokenRow& row) {
    const uint64_t position = row.position + (row.source == RACE ? row.index : 0);
    return row.position < 0 ? row.noise : splitmix(row.noise ^ position * SECOND);
}

double fraction_of(const TokenRow& row) {
    double u;
    if (row.position >= 0) return ((double)(splitmix(key_of(row) + (2 * row.index + 1) * GOLDEN) >> 12) + 0.5) * 0x1p-52;
    std::memcpy(&u, &row.noise, sizeof u);
    return u;
}

// Computes a TokenRow in the threads of a team.
class TokenChoice {
   public:
    // changes: null for none.
    TokenChoice(Member& member, TokenRow& row, const Adjustment* changes, int64_t n, RowScratch& s)
        : member(member), row(row), changes(changes), n(n), s(s) {}

    void run() {
        if (row.source != GIVEN) choose(changes ? change() : row.logits);
        if (row.top_count >= 0 && row.token >= 0) describe();
    }

   private:
    Member& member;
    TokenRow& row;
    const Adjustment* const changes;
    const int64_t n;
    RowScratch& s;

    // Calls f(first id, number of tokens) for the chunks of a row.
    template <class F>
    void each_chunk(F f) {
        member.each(chunks(n), 1, [&](int64_t c) { f(c * CHUNK, std::min(CHUNK, n - c * CHUNK)); });
    }

    // Returns the logits with their changes.
    const float* change() {
        member.each(1, 1, [&](int64_t) {
            if (!s.changed) s.changed.reset(new float[n]);
        });
        float* x = s.changed.get();
        each_chunk([&](int64_t from, int64_t count) { std::memcpy(x + from, row.logits + from, count * sizeof(float)); });
        member.each(1, 1, [&](int64_t) { s.possible = adjust(x, n, *changes); });
        return x;
    }

    void choose(const float* x) {
        const bool possible = !changes || s.possible;
        if (possible && row.source == LIKELIEST) {
            member.each(1, 1, [&](int64_t) {
                float top;
                row.token = argmax(x, n, top);
            });
            return;
        }
        if (possible) find_distribution(member, x, n, row.filter, s);
        if (!possible || !s.finite) member.each(1, 1, [&](int64_t) { row.token = -1; });
        else if (row.source == RACE) race(x);
        else draw(x);
    }

    void draw(const float* x) {
        each_chunk([&](int64_t from, int64_t count) {
            Weigher weigher;
            each_block(s, x, from, count, [&](const float* p, int64_t, int64_t tokens) { return weigher.add(p, tokens), false; });
            s.sums[from / CHUNK] = weigher.sum();
        });
        member.each(1, 1, [&](int64_t) {
            double total;
            Place place;
            if (place.find(s.sums.data(), chunks(n), fraction_of(row), total)) {
                const int64_t from = place.chunk * CHUNK;
                each_block(s, x, from, std::min(CHUNK, n - from),
                           [&](const float* p, int64_t first, int64_t tokens) { return place.pass(p, tokens, first); });
            }
            row.token = place.token;
        });
    }

    void race(const float* x) {
        const uint64_t key = key_of(row);
        member.each(runs(n), 1, [&](int64_t c) {
            Best best;
            each_block(s, x, c * RUN, std::min(RUN, n - c * RUN), [&](const float* p, int64_t first, int64_t tokens) {
                return best = raced(p, tokens, first, key, best, row.ids), false;
            });
            s.races[c] = best;
        });
        member.each(1, 1, [&](int64_t) { row.token = winner_of(s.races); });
    }

    // Computes log-probabilities: by exponentials relative to the largest logit, summed over PART tokens at a time, in order.
    void describe() {
        static constexpr int64_t PART = CHUNK / RowScratch::PARTS;
        const float* x = row.logits;
        const float chosen = x[row.token];
        each_chunk([&](int64_t from, int64_t count) {
            Floats top = floats(-INFINITY);
            int64_t larger = 0;
            for (int64_t v = from; v < from + count; v += LANES) {
                const Floats values = load_first(x + v, n - v, -INFINITY);
                top = largest_of(top, values);
                larger += __builtin_popcount(bits(greater(values, floats(chosen))));
            }
            s.looks[from / CHUNK] = {largest_lane(top), (double)larger};
        });
        float top = -INFINITY;
        double larger = 0.0;
        for (const Look& each : s.looks) top = each.top > top ? each.top : top, larger += each.sum;
        each_chunk([&](int64_t from, int64_t count) {
            for (int64_t part = from; part < from + count; part += PART) {
                Floats sum = floats(0.0f);
                for (int64_t v = part; v < std::min(from + count, part + PART); v += LANES)
                    sum = sum + exponential(load_first(x + v, n - v, -INFINITY) - floats(top));
                s.sums[part / PART] = sum_of(sum);
            }
        });
        member.each(1, 1, [&](int64_t) {
            double total = 0.0;
            for (int64_t part = 0; part * PART < n; part++) total += s.sums[part];
            total = (double)top + std::log(total);
            row.rank = (int64_t)larger + 1, row.logprob = (double)chosen - total;
            largest_ids(x, n, row.top_count, row.top_ids);
            for (int i = 0; i < row.top_count; i++) row.top_logprobs[i] = (double)x[row.top_ids[i]] - total;
        });
    }
};

// Follows the tokens of a row into the draft below it: exact for fixed candidates (verify/walk.py).
class DraftWalk {
   public:
    DraftWalk(Member& member, TokenRow& root, int64_t n, ScratchList& scratch)
        : member(member), root(root), n(n), scratch(scratch), below(root.below) {}

    void run() {
        choose(root, root.changes);
        if (!below) return;
        std::optional<PathChanges> changes;
        if (root.changes) changes.emplace(*root.changes);
        int64_t depth = 0;
        for (const TokenRow* row = &root; row->token >= 0 && step(row->token);) {
            TokenRow& next = *below->rows[depth++];
            member.each(1, 1, [&](int64_t) {
                next.logits = root.logits + (nodes[0] + 1) * below->stride, next.position = root.position, next.index = depth;
            });
            if (changes) changes->add(row->token);
            choose(next, changes ? &changes->now : nullptr, depth);
            row = &next;
        }
        member.each(1, 1, [&](int64_t) {
            below->path_count = (int32_t)depth;
            for (int32_t node = nodes[0]; node >= 0; node = below->parents[node]) below->path[--depth] = node;
        });
    }

   private:
    Member& member;
    TokenRow& root;
    const int64_t n;
    ScratchList& scratch;
    DraftNodes* const below;
    std::vector<int32_t> nodes{-1};  // all nodes with the path so far: duplicate children count as one

    void choose(TokenRow& row, const Adjustment* changes, int64_t depth = 0) {
        TokenChoice(member, row, changes, n, scratch.of(member, depth)).run();
    }

    // Moves to the children with a token. Returns whether there are any.
    bool step(int64_t token) {
        std::vector<int32_t> children;
        for (int32_t node : nodes)
            for (int32_t child = node + 1; child < below->nodes; child++)
                if (below->parents[child] == node && below->ids[child] == token) children.push_back(child);
        if (children.empty()) return false;
        nodes.swap(children);
        return true;
    }
};

}  // namespace

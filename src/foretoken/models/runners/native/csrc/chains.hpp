// Chains: the tokens that follow sequences, each the likeliest one after those before it or drawn, in one call; and trees of
// likely tokens.
//
// Each level is a pass over the newest tokens of every draft that goes on. In between nothing returns to Python, whose work for
// a pass takes longer than the pass of a small model. A head on a target's hidden states (EAGLE) reads its own tapped states
// behind the first pass, those of the row before.
#pragma once

#include "maximum.hpp"
#include "pass.hpp"
#include "trees.hpp"
#include "validate.hpp"

// Draws a token from the distribution of logits [n], which `row` [width] receives unless it is null; -1 where none is possible
// (core/native/sampling.cpp).
using Choose = int32_t (*)(const float* logits, int64_t n, const int32_t* ids, int64_t width, const void* kept, int races, const void* noise, float* row,
                           int64_t* token, int threads);

// How the tokens of a chain are drawn.
struct SamplerSpec {
    const void* kept;       // temperature and filters; null: the likeliest tokens are taken
    const uint64_t* noise;  // [limit]; the bits of uniform numbers, or the keys of races
    float* rows;            // [limit][width], or null; result: their distributions
    int32_t races;
};

struct ChainSpec {
    const int32_t* limits;          // [sequences]; the largest number of tokens of each chain
    const float* floors;            // [sequences][longest]; a chain ends before a token that is reached less likely
    const float *bases, *slopes;    // [sequences][buckets]; a token of probability p is accepted at the rate base + slope p
    const float* bounds;            // [buckets - 1]; the probabilities between buckets, ascending
    int32_t* tokens;                // [sequences][longest]; result, with the token that is left out
    float* probabilities;           // likewise; of a tree the scores
    int32_t* parents;               // [sequences][longest]; result, of a tree; -1: the last row of the sequence
    int32_t* counts;                // [sequences]; result: tokens of each chain, fewer than its limit where it ended
    int32_t* tried;                 // [sequences]; result: with the token that is left out; 0 where tokens are drawn
    const SamplerSpec* samplers;    // [sequences]
    const TreeSpec* trees;          // [sequences]
    Choose choose;
    const int32_t* ids;             // [vocab], ascending; the token of each logit; null: its number
    int32_t longest, buckets, vocab;  // vocab: logits of tokens that may be drafted
    int32_t width;                  // tokens of the distributions; vocab without ids
};

// The largest of some logits, the first of equal ones, and its softmax probability; token -1 where they are not finite.
struct Likeliest {
    int32_t token = -1;
    float probability = 0.0f;

    Likeliest(const float* logits, int count) {
        float top;
        token = (int32_t)argmax(logits, count, top);
        if (token >= 0) probability = 1.0f / sum_of_powers(logits, count, top, 1.0f);
    }
};

class Chains {
   public:
    // first: the pass over the pending tokens of all sequences, with logits of the last token of each. Its logits have room for
    // the widest level of all drafts.
    Chains(const ModelSpec& m, const BatchSpec& first, const ChainSpec& spec, int threads)
        : threads(threads), m(m), first(first), c(spec), stride(m.head.units * BLOCKS * LANES), batch(first), trees(first.sequences) {
        check();
        for (int s = 0; s < first.sequences; s++) {
            going.push_back(s), reach.push_back(1.0f), starts.push_back(s), c.counts[s] = c.tried[s] = 0;
            batch.ranks = std::max(batch.ranks, c.trees[s].width);
            widest += std::max(1, c.trees[s].width);
        }
        if (batch.ranks) ranked.resize((int64_t)widest * batch.ranks), batch.ranked = ranked.data();
        if (first.featured()) features.resize(widest * m.hidden), tapped = features, tap = tapped.data();
    }

    // Calls pass(batch) for each level.
    template <class F>
    void run(F pass) {
        for (int level = 0; !going.empty(); level++) {
            pass(batch);
            std::vector<int> still, sources;  // sequences that go on; the row of `batch` whose child each next row is
            for (size_t i = 0; i < going.size(); i++) {
                const int s = going[i], row = starts[i];
                if (!(c.trees[s].width ? grow(s, row) : extend(s, first.logits + row * stride))) continue;
                still.push_back(s);
                if (!c.trees[s].width) sources.push_back(batch.outputs[row]);
                for (int node : trees[s].frontier) sources.push_back(batch.outputs[row + trees[s].row_of_parent(node)]);
            }
            going = still;
            for (size_t i = 0; first.featured() && i < sources.size(); i++)
                std::copy_n(batch.taps[0] + (int64_t)sources[i] * m.hidden, m.hidden, &features[i * m.hidden]);
            plan(level + 1);
        }
    }

   private:
    // Checks the first pass and the rows of all drafts, so that the passes behind it need no further check.
    void check() {
        if (c.longest < 1 || c.buckets < 1) refuse("chains of %d tokens with %d buckets; at least one is expected", c.longest, c.buckets);
        if (c.vocab < 1 || c.vocab > stride || c.width < c.vocab || c.width > m.embedding_rows)
            refuse("chains of %d of %d tokens, and the model reads %d", c.vocab, c.width, m.embedding_rows);
        for (int i = 0; c.ids && i < c.vocab; i++)
            if (c.ids[i] < (i ? c.ids[i - 1] + 1 : 0) || c.ids[i] >= c.width) refuse("the token %d of logit %d among %d", c.ids[i], i, c.width);
        for (int s = 0; s < first.sequences; s++) {
            if (c.limits[s] < 1 || c.limits[s] > c.longest) refuse("chain %d has %d tokens, from 1 to %d are expected", s, c.limits[s], c.longest);
            const SamplerSpec& how = c.samplers[s];
            if (how.kept && !(c.choose && how.noise)) refuse("chain %d is drawn, without what it is drawn with", s);
            const TreeSpec& tree = c.trees[s];
            if (tree.width < 0 || tree.width > std::min(c.vocab, m.vocab) || (tree.width && (tree.steps < 1 || how.kept || !(tree.temperature > 0.0f))))
                refuse("a tree of %d tokens a node and %d levels", tree.width, tree.steps);
            further.push_back(tree.width ? (tree.steps - 1) * tree.width : c.limits[s] - 1);
        }
        PassCheck(m, first).run(threads, further.data());
        const PlanUse use(m, first);
        if (first.tap_count != (first.featured() ? 1 : 0) || use.states || use.sources) refuse("chains of a model that needs more than tokens");
        if (!first.logits || first.ranked || first.output_count != first.sequences) refuse("%d rows of logits for %d chains", first.output_count, first.sequences);
        for (int s = 0; s < first.sequences; s++)
            if (first.outputs[s] != first.sequence_from[s + 1] - 1 || first.branch_count)
                refuse("chain %d does not follow the last row of its sequence", s);
    }

    // Adds a token to a chain, or ends it. Returns whether it goes on.
    bool extend(int s, const float* logits) { return c.samplers[s].kept ? draw(s, logits) : take(s, logits); }

    // Adds a level to a tree, whose newest nodes have the logits from `row` on. Returns whether it goes on.
    bool grow(int s, int row) {
        Tree& tree = trees[s];
        tree.expand(c.trees[s], c.limits[s], [&](int i, int k) {
            const int64_t token = ranked[(int64_t)(row + i) * batch.ranks + k];
            return token < c.vocab ? token : -1;
        }, [&](int i) { return first.logits + (row + i) * stride; }, c.vocab, c.ids);
        if (tree.level < c.trees[s].steps && !tree.frontier.empty()) return true;
        const int64_t at = (int64_t)s * c.longest;
        c.counts[s] = tree.best(c.limits[s], c.tokens + at, c.parents + at, c.probabilities + at);
        return tree.frontier.clear(), false;
    }

    bool draw(int s, const float* logits) {
        const SamplerSpec& how = c.samplers[s];
        const int64_t depth = c.counts[s];
        float* row = how.rows ? how.rows + depth * c.width : nullptr;
        int64_t token;
        const int32_t status = c.choose(logits, c.vocab, c.ids, c.width, how.kept, how.races, how.noise + depth, row, &token, threads);
        if (status == NO_MEMORY) throw std::bad_alloc();
        if (status != OK) refuse("token %lld of chain %d cannot be drawn", (long long)depth, s);
        if (token < 0) return false;
        c.tokens[s * (int64_t)c.longest + depth] = (int32_t)token;
        return ++c.counts[s] < c.limits[s];
    }

    bool take(int s, const float* logits) {
        const Likeliest best(logits, c.vocab);
        if (best.token < 0) return false;
        const int depth = c.tried[s]++;
        const int64_t at = (int64_t)s * c.longest + depth;
        c.tokens[at] = c.ids ? c.ids[best.token] : best.token, c.probabilities[at] = best.probability;
        const int bucket = int(std::upper_bound(c.bounds, c.bounds + c.buckets - 1, best.probability) - c.bounds);
        reach[s] *= c.bases[s * c.buckets + bucket] + c.slopes[s * c.buckets + bucket] * best.probability;
        if (reach[s] < c.floors[at]) return false;
        return ++c.counts[s] < c.limits[s];
    }

    // Plans the pass over the newest tokens of the drafts that go on, `depth` tokens behind those of the first pass.
    void plan(int depth) {
        const int count = (int)going.size();
        tokens.clear(), positions.clear(), places.clear(), prefix.clear(), branches.clear(), pages.clear(), page_counts.clear(), adapters.clear();
        branch_from.assign(1, 0), sequence_from.assign(1, 0), starts.clear();
        batch.reach = 0;
        for (int s : going) {
            const int row = first.outputs[s], place = first.places[row] + 1;
            starts.push_back((int)tokens.size());
            auto add = [&](int token, int at, int keys) {
                tokens.push_back(token), positions.push_back(first.positions[row] + depth), places.push_back(at), prefix.push_back(keys);
                branch_from.push_back((int32_t)branches.size());
                batch.reach = std::max(batch.reach, at + 1);
            };
            if (!c.trees[s].width) add(c.tokens[(int64_t)s * c.longest + depth - 1], place + depth - 1, place + depth);
            for (int node : trees[s].frontier) {
                trees[s].each_above(node, [&](int above) { branches.push_back(place + trees[s].scored_as[above]); });
                add(trees[s].tokens[node], place + trees[s].scored_as[node], place);
            }
            pages.push_back(first.pages[s]), page_counts.push_back(first.page_counts[s]), sequence_from.push_back((int32_t)tokens.size());
            if (first.adapters) adapters.push_back(first.adapters[s]);
        }
        numbers.resize(tokens.size());
        for (size_t i = 0; i < numbers.size(); i++) numbers[i] = (int32_t)i;
        batch.tokens = tokens.data(), batch.positions = positions.data(), batch.places = places.data(), batch.branches = branches.data();
        batch.prefix = prefix.data(), batch.branch_from = branch_from.data(), batch.pages = pages.data(), batch.page_counts = page_counts.data();
        batch.sequence_from = sequence_from.data(), batch.outputs = numbers.data();
        if (first.adapters) batch.adapters = adapters.data();
        if (first.featured()) batch.features = features.data(), batch.states = nullptr, batch.taps = &tap;
        batch.rows = batch.output_count = (int)tokens.size(), batch.sequences = count, batch.branch_count = (int)branches.size();
    }

    const int threads;
    const ModelSpec& m;
    const BatchSpec& first;
    const ChainSpec& c;
    const int64_t stride;  // of logits
    BatchSpec batch;
    std::vector<Tree> trees;       // [sequences]
    int64_t widest = 0;            // rows of the widest level
    std::vector<int32_t> further;  // [sequences]; rows behind those of the first pass
    std::vector<int> going;        // sequences
    std::vector<int> starts;       // of each, the number of its first row with logits
    std::vector<float> reach;      // [sequences]; how likely all tokens of a chain are accepted
    std::vector<int64_t> ranked;   // [widest][ranks]; the likeliest tokens
    std::vector<float> features, tapped;  // [widest][hidden]; what a pass behind the first one reads, and its tapped states
    float* tap = nullptr;
    std::vector<int32_t> tokens, positions, places, prefix, branch_from, branches, sequence_from, page_counts, numbers;
    std::vector<Word* const*> pages;
    std::vector<const LoraAdapter*> adapters;
};

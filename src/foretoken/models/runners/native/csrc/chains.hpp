// Chains: the tokens that follow sequences, each the likeliest one after those before it or drawn, in one call; and trees of
// likely tokens.
//
// Each level is a pass over the newest tokens of every draft that goes on. In between nothing returns to Python, whose work for
// a pass takes longer than the pass of a small model. A head on a target's hidden states (EAGLE, MTP) reads its own tapped states
// behind the first pass, those of the row before. A model that foresees all levels (P-EAGLE, DFlash) runs the first pass alone;
// to its logits another model may add some that depend on the token before (DSpark, 2607.05147).
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
    const ModelSpec* successors;    // without layers: what it computes from a token is added to the logits behind it; or null
    void* successors_workspace;     // of its passes
    int32_t longest, buckets, vocab;  // vocab: logits of tokens that may be drafted
    int32_t width;                  // tokens of the distributions; vocab without ids
    int32_t foreseen;               // the last rows of each sequence in the first pass have the logits of all levels
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
    // first: the pass over the pending tokens of all sequences, with logits of the last token of each, or of all levels. Its logits
    // have room for the widest level of all drafts.
    Chains(const ModelSpec& m, const BatchSpec& first, const ChainSpec& spec, int threads)
        : threads(threads), m(m), first(first), c(spec), stride(m.head.units * BLOCKS * LANES), batch(first), trees(first.sequences) {
        check();
        int ranks = 0;
        for (int s = 0; s < first.sequences; s++) {
            going.push_back(s), reach.push_back(1.0f), starts.push_back(s), c.counts[s] = c.tried[s] = 0;
            ranks = std::max(ranks, c.trees[s].width);
            widest += std::max(1, c.trees[s].width);
            if (c.successors) tokens.push_back(first.tokens[first.sequence_from[s]]), numbers.push_back(s);
        }
        if (c.successors) conditional.resize(widest * stride);
        if (c.successors || c.vocab < m.vocab) ranked.resize(ranks);
        else if (ranks) ranked.resize(std::max<int64_t>(widest, first.output_count) * ranks), batch.ranks = ranks, batch.ranked = ranked.data();
        if (chained()) features.resize(widest * m.hidden), tapped = features, tap = tapped.data();
    }

    // Calls pass(model, batch) for each level.
    template <class F>
    void run(F pass) {
        for (level = 0; !going.empty(); level++) {
            if (!level || !c.foreseen) pass(m, batch);
            if (c.successors) add_successors(pass);
            std::vector<int> still, sources;  // sequences that go on; the row of `batch` whose child each next row is
            for (size_t i = 0; i < going.size(); i++) {
                const int s = going[i], row = starts[i];
                if (!(c.trees[s].width ? grow(s, row) : extend(s, logits(s, row)))) continue;
                still.push_back(s);
                if (!chained()) continue;
                if (!c.trees[s].width) sources.push_back(batch.outputs[row]);
                for (int node : trees[s].frontier) sources.push_back(batch.outputs[row + trees[s].row_of_parent(node)]);
            }
            going = still;
            for (size_t i = 0; i < sources.size(); i++)
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
            further.push_back(c.foreseen ? 0 : tree.width ? (tree.steps - 1) * tree.width : c.limits[s] - 1);
        }
        PassCheck(m, first).run(threads, further.data());
        const PlanUse use(m, first);
        if (first.tap_count != chained() || use.states || use.sources) refuse("chains of a model that needs more than tokens");
        if (!first.logits || first.ranked || first.branch_count) refuse("chains without logits, or behind trees");
        first_output.push_back(0);
        for (int s = 0, at = 0; s < first.sequences; s++) {
            while (at < first.output_count && first.outputs[at] < first.sequence_from[s + 1]) at++;
            const int count = at - first_output[s], levels = c.trees[s].width ? c.trees[s].steps : c.limits[s];
            if (c.foreseen ? count < levels : count != 1) refuse("%d rows of logits for the %d levels of chain %d", count, levels, s);
            if (first.outputs[at - 1] != first.sequence_from[s + 1] - 1) refuse("chain %d does not follow the last row of its sequence", s);
            first_output.push_back(at);
        }
        if (c.successors) check_successors();
    }

    void check_successors() const {
        const ModelSpec& other = *c.successors;
        validate(other);
        if (!c.foreseen || !first.tokens || other.layer_count || other.head.units != m.head.units || other.embedding_rows < m.embedding_rows)
            refuse("logits that follow from one of %d tokens, beside those of a model of %d", other.embedding_rows, m.embedding_rows);
    }

    // Whether passes behind the first one read the states of the one before.
    bool chained() const { return first.featured() && !c.foreseen; }

    // The row of the last pass that has the logits behind a row of the level.
    int64_t scored_row(int s, int row) const { return c.foreseen && !c.successors ? first_output[s] + level : row; }

    const float* logits(int s, int row) const {
        return (c.successors ? conditional.data() : first.logits) + scored_row(s, row) * stride;
    }

    // Computes the logits of a level from those that were foreseen and the tokens before.
    template <class F>
    void add_successors(F pass) {
        BatchSpec after{};
        after.tokens = tokens.data(), after.outputs = numbers.data(), after.logits = conditional.data();
        after.rows = after.output_count = (int)tokens.size();
        pass(*c.successors, after);
        for (size_t i = 0; i < going.size(); i++) {
            const float* foreseen = first.logits + (first_output[going[i]] + level) * stride;
            const int last = i + 1 < going.size() ? starts[i + 1] : (int)tokens.size();
            for (int row = starts[i]; row < last; row++)
                for (int64_t v = 0; v < stride; v++) conditional[row * stride + v] += foreseen[v];
        }
    }

    // Adds a token to a chain, or ends it. Returns whether it goes on.
    bool extend(int s, const float* logits) { return c.samplers[s].kept ? draw(s, logits) : take(s, logits); }

    // Adds a level to a tree, whose newest nodes have the logits from `row` on. Returns whether it goes on.
    bool grow(int s, int row) {
        Tree& tree = trees[s];
        tree.expand(c.trees[s], c.limits[s], [&](int i) {
            if (batch.ranks) return &ranked[scored_row(s, row + i) * batch.ranks];
            largest_ids(logits(s, row + i), c.vocab, c.trees[s].width, ranked.data());
            return ranked.data();
        }, [&](int i) { return logits(s, row + i); }, c.vocab, c.ids);
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
            const int row = first.sequence_from[s + 1] - 1, place = first.places[row] + 1;
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
        if (chained()) batch.features = features.data(), batch.states = nullptr, batch.taps = &tap;
        batch.rows = batch.output_count = (int)tokens.size(), batch.sequences = count, batch.branch_count = (int)branches.size();
    }

    const int threads;
    const ModelSpec& m;
    const BatchSpec& first;
    const ChainSpec& c;
    const int64_t stride;  // of logits
    BatchSpec batch;
    std::vector<Tree> trees;       // [sequences]
    int level = 0;
    int64_t widest = 0;            // rows of the widest level
    std::vector<int> first_output; // [sequences + 1]; of each sequence in the first pass
    std::vector<float> conditional;  // [widest][stride]; logits of a level, where there are successors
    std::vector<int32_t> further;  // [sequences]; rows behind those of the first pass
    std::vector<int> going;        // sequences
    std::vector<int> starts;       // of each, the number of its first row with logits
    std::vector<float> reach;      // [sequences]; how likely all tokens of a chain are accepted
    std::vector<int64_t> ranked;   // [rows of a pass][ranks]; the likeliest tokens, or those of one node
    std::vector<float> features, tapped;  // [widest][hidden]; what a pass behind the first one reads, and its tapped states
    float* tap = nullptr;
    std::vector<int32_t> tokens, positions, places, prefix, branch_from, branches, sequence_from, page_counts, numbers;
    std::vector<Word* const*> pages;
    std::vector<const LoraAdapter*> adapters;
};

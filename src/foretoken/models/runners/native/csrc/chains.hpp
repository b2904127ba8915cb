// Chains: the tokens that follow sequences, each the likeliest one after those before it or sampled, in one call; and trees
// of likely or sampled tokens.
//
// Each level is a pass over the newest tokens of every draft that goes on. In between nothing returns to Python, whose work for
// a pass takes longer than the pass of a small model. A head on a target's hidden states (EAGLE, MTP) reads its own tapped states
// behind the first pass, those of the row before. A model that foresees all levels (P-EAGLE, DFlash) runs the first pass alone;
// to its logits another model may add some that depend on the token before (DSpark, 2607.05147). Of several layers (MTP, 2412.19437,
// section 2.2) each drafts one level, on the states of the layer before it, and the last one all levels behind.
#pragma once

#include "drawn_trees.hpp"
#include "leader_spec.hpp"
#include "maximum.hpp"
#include "pass.hpp"
#include "validate.hpp"

// Draws a token from the distribution of logits [n], which `row` [width] receives unless it is null; -1 where none is possible.
// Without noise no token is sampled (core/native/sampling.cpp).
using Choose = int32_t (*)(const float* logits, int64_t n, const int32_t* ids, int64_t width, const void* kept, int races, const void* noise, float* row,
                           int64_t* token, int threads);

using Lead = int32_t (*)(const LeaderSpec* request, int threads);
using Change = int32_t (*)(const float* logits, int64_t n, const int32_t* ids, int64_t width, const void* changes, const int32_t* path, int64_t count,
                           float* out);

// Sampling of the tokens of a draft. A ranked tree has the leaders of races, or without races the most probable tokens.
struct SamplerSpec {
    const void* kept;       // temperature and filters; null: the likeliest tokens are taken
    const uint64_t* noise;  // [limit]; the bits of uniform numbers, or the keys of races, of a tree one for each level
    float* rows;            // [limit][width], or null; result: their distributions, of a tree those of a node's children
    const void* changes;    // of the logits at the draft's root, which its tokens add to (core/native/csrc/adjustment.hpp); or null
    int32_t races;
};

// A layer that drafts one level on the states of the layer before it. Its row of a token is computed from that token and from the
// state at the token before, so it has one row fewer.
struct DeeperSpec {
    const ModelSpec* model;
    void* workspace;             // of its passes
    Word* const* const* pages;   // [sequences]
    const int32_t* page_counts;  // [sequences]
    const int32_t* cached;       // [sequences]; rows that are computed
    float* carried;              // [sequences][hidden]; the state before its first new row; result: that before the next one
};

struct ChainSpec {
    const int32_t* limits;          // [sequences]; the largest number of tokens of each chain
    const float* floors;            // [sequences][longest]; a chain ends before a token that is reached less likely
    const float *bases, *slopes;    // [sequences][buckets]; a token of probability p is accepted at the rate base + slope p
    const float* bounds;            // [buckets - 1]; the probabilities between buckets, ascending
    int32_t* tokens;                // [sequences][longest]; result, with the token at which it ended
    float* probabilities;           // likewise; of a tree the scores
    int32_t* parents;               // [sequences][longest]; result, of a tree; -1: the last row of the sequence
    int32_t* counts;                // [sequences]; result: tokens of each chain, fewer than its limit where it ended
    int32_t* tried;                 // [sequences]; result: with the token at which it ended; 0 where tokens are sampled
    const SamplerSpec* samplers;    // [sequences]
    const TreeSpec* trees;          // [sequences]
    Choose choose;
    Draw draw;
    Lead lead;
    Change change;
    const int32_t* ids;             // [vocab], ascending; the token of each logit; null: its number
    const ModelSpec* successors;    // without layers: what it computes from a token is added to the logits behind it; or null
    void* successors_workspace;     // of its passes
    const DeeperSpec* deeper;       // [deeper_count]; the layers behind the first one
    int32_t longest, buckets, vocab;  // vocab: logits of tokens that may be drafted
    int32_t width;                  // tokens of the distributions; vocab without ids
    int32_t foreseen;               // the last rows of each sequence in the first pass have the logits of all levels
    int32_t deeper_count;
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
            if (!c.samplers[s].kept) ranks = std::max(ranks, c.trees[s].width);
            widest += c.trees[s].kind ? c.limits[s] : std::max(1, c.trees[s].width);
            spans.push_back({first.sequence_from[s], first.sequence_from[s + 1] - 1, 0});
            if (c.successors) tokens.push_back(first.tokens[first.sequence_from[s]]), outputs.push_back(s);
        }
        if (c.successors) conditional.resize(widest * stride);
        if (c.successors || c.vocab < m.vocab) ranked.resize(ranks);
        else if (ranks) ranked.resize(std::max<int64_t>(widest, first.output_count) * ranks), batch.ranks = ranks, batch.ranked = ranked.data();
    }

    // Calls pass(model, batch, workspace) for each level; a null workspace is that of the first model.
    template <class F>
    void run(F pass) {
        for (level = 0; !going.empty() || level <= c.deeper_count; level++) {
            if (level && c.deeper_count) run_deeper(pass);
            else if (!level || !c.foreseen) pass(m, batch, nullptr);
            if (c.successors) add_successors(pass);
            std::vector<int> still;  // sequences that go on
            for (size_t i = 0; i < going.size(); i++) {
                const int s = going[i], row = starts[i];
                if (c.trees[s].width ? grow(s, row) : extend(s, row)) still.push_back(s);
            }
            going = still;
            plan(level + 1);
        }
    }

   private:
    // Checks the first pass and the rows of all drafts, so that the passes behind it need no further check.
    void check() {
        if (c.longest < 1 || c.buckets < 1) refuse("chains of %d tokens with %d buckets; at least one is expected", c.longest, c.buckets);
        if (c.vocab < 1 || c.vocab > stride || c.width < c.vocab || (!c.ids && c.width > m.embedding_rows))
            refuse("chains of %d of %d tokens, and the model reads %d", c.vocab, c.width, m.embedding_rows);
        const int tokens = std::min(c.width, m.embedding_rows);
        for (int i = 0; c.ids && i < c.vocab; i++)
            if (c.ids[i] < (i ? c.ids[i - 1] + 1 : 0) || c.ids[i] >= tokens) refuse("the token %d of logit %d among %d", c.ids[i], i, tokens);
        for (int s = 0; s < first.sequences; s++) {
            if (c.limits[s] < 1 || c.limits[s] > c.longest) refuse("chain %d has %d tokens, from 1 to %d are expected", s, c.limits[s], c.longest);
            const SamplerSpec& how = c.samplers[s];
            const TreeSpec& tree = c.trees[s];
            const bool drawn = tree.width ? tree.kind || how.races : how.kept != nullptr;
            if (how.kept && !(c.choose && c.draw && c.lead && (how.noise || !drawn))) refuse("chain %d is drawn, without what it is drawn with", s);
            if (how.changes && !(c.change && (c.ids || c.vocab == c.width) && (how.kept || !tree.width))) refuse("the logits of chain %d cannot be changed", s);
            if (tree.width < 0 || tree.width > std::min(c.vocab, m.vocab) || (tree.width && (tree.steps < 1 || !(tree.temperature > 0.0f))))
                refuse("a tree of %d tokens a node and %d levels", tree.width, tree.steps);
            if (tree.kind && !(tree.width && how.kept && how.rows && !how.races)) refuse("the drawn tree %d has no distributions", s);
            further.push_back(c.foreseen ? 0 : tree.width && !tree.kind ? (tree.steps - 1) * tree.width : c.limits[s] - 1);
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
        for (int k = 0; k < c.deeper_count; k++) {
            const ModelSpec& other = *c.deeper[k].model;
            if (!chained() || other.hidden != m.hidden || other.head.units != m.head.units || !other.fuses_embedding || PlanUse(other, first).states)
                refuse("layer %d of %d numbers behind one of %d", k + 1, other.hidden, m.hidden);
        }
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
        after.tokens = tokens.data(), after.outputs = outputs.data(), after.logits = conditional.data();
        after.rows = after.output_count = (int)tokens.size();
        pass(*c.successors, after, c.successors_workspace);
        for (size_t i = 0; i < going.size(); i++) {
            const float* foreseen = first.logits + (first_output[going[i]] + level) * stride;
            const int last = i + 1 < going.size() ? starts[i + 1] : (int)tokens.size();
            for (int row = starts[i]; row < last; row++)
                for (int64_t v = 0; v < stride; v++) conditional[row * stride + v] += foreseen[v];
        }
    }

    // Adds a token to a chain, or ends it. Returns whether it goes on.
    bool extend(int s, int row) { return c.samplers[s].kept ? draw(s, row) : take(s, row); }

    // The logits behind nodes of a draft.
    struct NodeLogits {
        const float* x;
        int64_t stride;      // 0: the nodes share them
        const int32_t* ids;  // the token of each logit; null: its number
        int32_t count;
    };

    // Returns the logits behind the newest nodes of a draft, the first of which is `row`, as its request changes them.
    NodeLogits node_logits(int s, int row) {
        const bool shared = c.foreseen && !c.successors;
        if (!c.samplers[s].changes) return {logits(s, row), shared ? 0 : stride, c.ids, c.vocab};
        const std::vector<int> nodes = trees[s].open();
        changed.resize(nodes.size() * c.width);
        for (size_t i = 0; i < nodes.size(); i++) {
            const int32_t* chain = c.tokens + s * (int64_t)c.longest;
            std::vector<int32_t> path(chain, chain + c.counts[s]);
            if (nodes[i] >= 0) trees[s].each_above(nodes[i], [&](int above) { path.push_back(trees[s].tokens[above]); });
            const float* x = logits(s, row + (shared ? 0 : (int)i));
            expect(c.change(x, c.vocab, c.ids, c.width, c.samplers[s].changes, path.data(), (int64_t)path.size(), &changed[i * c.width]), s);
        }
        return {changed.data(), c.width, nullptr, c.width};
    }

    // Adds a level to a tree, whose newest nodes have the logits from `row` on. Returns whether it goes on.
    bool grow(int s, int row) {
        Tree& tree = trees[s];
        if (c.trees[s].kind) draw_level(s, row);
        else rank_level(s, row);
        if (tree.level < c.trees[s].steps && !tree.frontier.empty()) return true;
        const int64_t at = (int64_t)s * c.longest;
        c.counts[s] = tree.best(c.limits[s], c.tokens + at, c.parents + at, c.probabilities + at);
        return tree.frontier.clear(), false;
    }

    // Adds the best tokens below each node: the leaders of a race, the most probable ones, or the likeliest ones at a temperature.
    void rank_level(int s, int row) {
        const SamplerSpec& how = c.samplers[s];
        const NodeLogits behind = node_logits(s, row);
        const int width = c.trees[s].width, nodes = behind.stride ? (int)trees[s].open().size() : 1;
        std::vector<int32_t> best(nodes * width);
        std::vector<float> shares(nodes * width, -INFINITY);
        if (how.kept) {
            const uint64_t* key = how.races ? how.noise + level : nullptr;
            const LeaderSpec request{behind.x, behind.ids, how.kept, key, behind.stride, 0, nodes, behind.count, width, best.data(), shares.data()};
            expect(c.lead(&request, threads), s);
        }
        for (int i = 0; !how.kept && i < nodes; i++) rank(s, row + i, &best[i * width], &shares[i * width]);
        trees[s].expand(c.trees[s], c.limits[s], best.data(), shares.data(), behind.stride ? width : 0);
    }

    // Writes the likeliest tokens of a row at a temperature, and the logs of their probabilities.
    void rank(int s, int row, int32_t* to_tokens, float* to_shares) {
        const TreeSpec& spec = c.trees[s];
        const float* x = logits(s, row);
        const int64_t* best = batch.ranks ? &ranked[scored_row(s, row) * batch.ranks] : ranked.data();
        if (!batch.ranks) largest_ids(x, c.vocab, spec.width, ranked.data());
        const float top = x[best[0]];
        if (!std::isfinite(top)) return;
        const float total = std::log(sum_of_powers(x, c.vocab, top, spec.temperature));
        for (int k = 0; k < spec.width; k++) {
            to_tokens[k] = c.ids ? c.ids[best[k]] : (int32_t)best[k];
            to_shares[k] = (x[best[k]] - top) / spec.temperature - total;
        }
    }

    // Adds sampled siblings.
    void draw_level(int s, int row) {
        const SamplerSpec& how = c.samplers[s];
        DrawnTree drawn{trees[s], c.trees[s], c.limits[s], (const double*)how.noise, how.rows, c.width, c.draw, threads};
        const std::vector<int> nodes = trees[s].open();
        NodeLogits behind = node_logits(s, row);
        for (size_t i = 0; i < nodes.size(); i++, behind.x += behind.stride) {
            float* p = drawn.row(nodes[i]);
            if (i && !behind.stride) std::copy_n(drawn.row(nodes[0]), c.width, p);
            else if (choose(s, behind, nullptr, p) < 0) std::fill_n(p, c.width, 0.0f);
        }
        drawn.expand();
    }

    static void expect(int32_t status, int s) {
        if (status == NO_MEMORY) throw std::bad_alloc();
        if (status != OK) refuse("a token of chain %d cannot be drawn", s);
    }

    // Draws a token from the distribution of logits, which `row` receives unless it is null; -1 where none is possible.
    int64_t choose(int s, const NodeLogits& behind, const uint64_t* noise, float* row) {
        const SamplerSpec& how = c.samplers[s];
        int64_t token;
        expect(c.choose(behind.x, behind.count, behind.ids, c.width, how.kept, how.races, noise, row, &token, threads), s);
        return token;
    }

    bool draw(int s, int at) {
        const SamplerSpec& how = c.samplers[s];
        const int64_t depth = c.counts[s];
        float* row = how.rows ? how.rows + depth * c.width : nullptr;
        const int64_t token = choose(s, node_logits(s, at), how.noise + depth, row);
        if (token < 0) return false;
        c.tokens[s * (int64_t)c.longest + depth] = (int32_t)token;
        return ++c.counts[s] < c.limits[s];
    }

    bool take(int s, int row) {
        const NodeLogits behind = node_logits(s, row);
        float top;
        const int best = (int)argmax(behind.x, behind.count, top);
        if (best < 0) return false;
        const int depth = c.tried[s]++;
        const int64_t at = (int64_t)s * c.longest + depth;
        c.tokens[at] = behind.ids ? behind.ids[best] : best;
        const bool same = !c.samplers[s].changes;
        const float p = same ? 1.0f / sum_of_powers(behind.x, behind.count, top, 1.0f) : probability(logits(s, row), c.tokens[at]);
        c.probabilities[at] = p;
        const int bucket = int(std::upper_bound(c.bounds, c.bounds + c.buckets - 1, p) - c.bounds);
        reach[s] *= c.bases[s * c.buckets + bucket] + c.slopes[s * c.buckets + bucket] * p;
        if (reach[s] < c.floors[at]) return false;
        return ++c.counts[s] < c.limits[s];
    }

    // The rows of a sequence in the last pass.
    struct Span {
        int begun;  // the first of its pending tokens, as a row of the first pass
        int root;   // the row of its newest token; below 0: there is none, and -1 - s stands for the state that sequence s carries over
        int nodes;  // the row of its draft's first node, if the pass had the rows of all
    };

    // The probability of a token among unchanged logits.
    float probability(const float* logits, int token) const {
        const int32_t* end = c.ids + (c.ids ? c.vocab : 0);
        const int32_t* found = c.ids ? std::lower_bound(c.ids, end, token) : nullptr;
        if (c.ids && (found == end || *found != token)) return 0.0f;
        const float top = maximum_of(logits, c.vocab);
        return std::exp(logits[c.ids ? found - c.ids : token] - top) / sum_of_powers(logits, c.vocab, top, 1.0f);
    }

    // Runs the pass of the layer that drafts this level.
    template <class F>
    void run_deeper(F pass) {
        const DeeperSpec& layer = c.deeper[std::min(level, c.deeper_count) - 1];
        std::vector<int32_t> rows;
        for (int s : planned) rows.push_back(std::max(0, further[s] - scored(s)));
        if (level <= c.deeper_count) PassCheck(*layer.model, batch).run(threads, rows.data());
        if (batch.rows) pass(*layer.model, batch, layer.workspace);
    }

    // The number of a draft's nodes whose logits were computed or come next.
    int scored(int s) const { return c.trees[s].width ? (int)trees[s].scored.size() : c.counts[s]; }

    // Plans the pass over the newest tokens of the drafts that go on. A layer that begins there computes its rows of the pending tokens
    // of all sequences, and of all nodes.
    void plan(int next_level) {
        const bool begins = next_level <= c.deeper_count;
        const DeeperSpec* layer = c.deeper_count ? &c.deeper[std::min(next_level, c.deeper_count) - 1] : nullptr;
        tokens.clear(), positions.clear(), places.clear(), prefix.clear(), branches.clear(), pages.clear(), page_counts.clear(), adapters.clear();
        branch_from.assign(1, 0), sequence_from.assign(1, 0), starts.clear(), outputs.clear(), sources.clear(), planned.clear(), roots.clear();
        batch.reach = 0;
        for (int s = 0, next = 0; s < first.sequences; s++) {
            const Span last = spans[s];
            roots.push_back(last.root);
            if (begins) add_pending(s, *layer, next_level, last);
            if (next < (int)going.size() && going[next] == s) starts.push_back((int)outputs.size()), add_nodes(s, begins, last), next++;
            if ((int)tokens.size() == sequence_from.back()) continue;
            pages.push_back((layer ? layer->pages : first.pages)[s]), page_counts.push_back((layer ? layer->page_counts : first.page_counts)[s]);
            sequence_from.push_back((int32_t)tokens.size()), planned.push_back(s);
            if (first.adapters) adapters.push_back(first.adapters[s]);
        }
        if (chained()) gather(begins ? layer->carried : nullptr);
        batch.tokens = tokens.data(), batch.positions = positions.data(), batch.places = places.data(), batch.branches = branches.data();
        batch.prefix = prefix.data(), batch.branch_from = branch_from.data(), batch.pages = pages.data(), batch.page_counts = page_counts.data();
        batch.sequence_from = sequence_from.data(), batch.outputs = outputs.data();
        if (first.adapters) batch.adapters = adapters.data();
        batch.rows = (int)tokens.size(), batch.output_count = (int)outputs.size(), batch.sequences = (int)planned.size();
        batch.branch_count = (int)branches.size();
    }

    // Adds a row to the next pass. keys: cache rows that it sees before the branches that were added; source: the row of the last pass
    // whose state it reads.
    void add(int token, int position, int place, int keys, int source) {
        tokens.push_back(token), positions.push_back(position), places.push_back(place), prefix.push_back(keys), sources.push_back(source);
        branch_from.push_back((int32_t)branches.size());
        batch.reach = std::max(batch.reach, place + 1);
    }

    // Adds a layer's rows of the pending tokens of a sequence. behind: how many rows fewer than the first layer it has.
    void add_pending(int s, const DeeperSpec& layer, int behind, const Span& last) {
        const int start = first.sequence_from[s], end = first.sequence_from[s + 1], from = start + layer.cached[s] + behind - first.places[start];
        if (from < start) refuse("layer %d has %d rows of sequence %d, and the first one %d", behind, layer.cached[s], s, first.places[start]);
        spans[s] = {from, from < end ? (int)tokens.size() + end - 1 - from : -1 - s, 0};
        for (int row = from; row < end; row++)
            add(first.tokens[row], first.positions[row] - behind, first.places[row] - behind, first.places[row] - behind + 1,
                row > last.begun ? last.root - (end - row) : -1 - s);
    }

    // Adds the rows of a draft's newest nodes, which have logits, or of all.
    void add_nodes(int s, bool all, const Span& last) {
        const Tree& tree = trees[s];
        const int row = first.sequence_from[s + 1] - 1, fewer = std::min(std::min(level + 1, c.deeper_count), first.places[row] + 1);
        const int place = first.places[row] + 1 - fewer, position = first.positions[row] - fewer;
        const int count = scored(s), newest = count - (c.trees[s].width ? (int)tree.frontier.size() : 1), from = all ? 0 : newest;
        spans[s].nodes = (int)tokens.size() - from;
        for (int i = from; i < count; i++) {
            if (i >= newest) outputs.push_back((int32_t)tokens.size());
            int token = c.tokens[(int64_t)s * c.longest + i], parent = i - 1, depth = i + 1, keys = place + depth;
            if (c.trees[s].width) {
                const int node = tree.scored[i];
                tree.each_above(node, [&](int above) { branches.push_back(place + tree.scored_as[above]); });
                token = tree.tokens[node], parent = tree.scored_parent(node), depth = (int)branches.size() - branch_from.back(), keys = place;
            }
            add(token, position + depth, place + i, keys, parent < 0 ? last.root : last.nodes + parent);
        }
    }

    // Copies the states that the rows of the next pass read. carried: those of sequences before their new rows, which the newest states
    // of the last pass replace; or null.
    void gather(float* carried) {
        auto state = [&](int source) { return source < 0 ? carried + (int64_t)(-1 - source) * m.hidden : batch.taps[0] + (int64_t)source * m.hidden; };
        features.resize(sources.size() * m.hidden);
        for (size_t i = 0; i < sources.size(); i++) std::copy_n(state(sources[i]), m.hidden, &features[i * m.hidden]);
        for (int s = 0; carried && s < first.sequences; s++)
            if (roots[s] >= 0) std::copy_n(state(roots[s]), m.hidden, carried + (int64_t)s * m.hidden);
        tapped.resize(std::max(tapped.size(), features.size())), tap = tapped.data();
        batch.features = features.data(), batch.states = nullptr, batch.taps = &tap;
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
    std::vector<float> changed;    // [nodes][width]; logits of one draft, as its request changes them
    std::vector<int32_t> further;  // [sequences]; rows behind those of the first pass
    std::vector<int> going;        // sequences
    std::vector<int> starts;       // of each, the number of its first row with logits
    std::vector<float> reach;      // [sequences]; how likely all tokens of a chain are accepted
    std::vector<int64_t> ranked;   // [rows of a pass][ranks]; the likeliest tokens, or those of one node
    std::vector<float> features, tapped;  // [rows][hidden]; what a pass behind the first one reads, and its tapped states
    float* tap = nullptr;
    std::vector<Span> spans;       // [sequences]
    std::vector<int> roots;        // [sequences]; `root` of the spans of the last pass
    std::vector<int> planned;      // the sequences of a pass
    std::vector<int> sources;      // [rows]; the row of the last pass that a row reads
    std::vector<int32_t> tokens, positions, places, prefix, branch_from, branches, sequence_from, page_counts, outputs;
    std::vector<Word* const*> pages;
    std::vector<const LoraAdapter*> adapters;
};

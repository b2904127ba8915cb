// Chains: the tokens that follow sequences, each the likeliest one after those before it or drawn, in one call.
//
// Each level is a pass over the newest token of every chain that goes on. In between nothing returns to Python, whose work for
// a pass takes longer than the pass of a small model. A head on a target's hidden states (EAGLE) reads its own tapped states
// behind the first pass, those of the row before.
#pragma once

#include "maximum.hpp"
#include "pass.hpp"
#include "validate.hpp"

// Draws a token from the distribution of logits [n], which `row` receives; -1 where none is possible (core/native/sampling.cpp).
using Choose = int32_t (*)(const float* logits, int64_t n, const void* kept, int races, const void* noise, float* row, int64_t* token, int threads);

// How the tokens of a chain are drawn.
struct SamplerSpec {
    const void* kept;       // temperature and filters; null: the likeliest tokens are taken
    const uint64_t* noise;  // [limit]; the bits of uniform numbers, or the keys of races
    float* rows;            // [limit][width]; result: their distributions; [width] unless it keeps them
    int32_t races, keeps;
};

struct ChainSpec {
    const int32_t* limits;          // [sequences]; the largest number of tokens of each chain
    const float* floors;            // [sequences][longest]; a chain ends before a token that is reached less likely
    const float *bases, *slopes;    // [sequences][buckets]; a token of probability p is accepted at the rate base + slope p
    const float* bounds;            // [buckets - 1]; the probabilities between buckets, ascending
    int32_t* tokens;                // [sequences][longest]; result, with the token that is left out
    float* probabilities;           // likewise
    int32_t* counts;                // [sequences]; result: tokens of each chain, fewer than its limit where it ended
    int32_t* tried;                 // [sequences]; result: with the token that is left out; 0 where tokens are drawn
    const SamplerSpec* samplers;    // [sequences]
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
        float top, sum = 0.0f;
        token = (int32_t)argmax(logits, count, top);
        if (token < 0) return;
        Floats sums = floats(0.0f);
        int i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Floats v = load(logits + i);
            sums = sums + keep(different(v, floats(-INFINITY)), exponential(v - floats(top)));
        }
        for (; i < count; i++) sum += std::exp(logits[i] - top);
        sum += sum_of(sums);
        probability = 1.0f / sum;
    }
};

class Chains {
   public:
    // first: the pass over the pending tokens of all sequences, with logits of the last token of each.
    Chains(const ModelSpec& m, const BatchSpec& first, const ChainSpec& spec, int threads) : threads(threads), m(m), first(first), c(spec), batch(first) {
        check();
        for (int s = 0; s < first.sequences; s++) going.push_back(s), reach.push_back(1.0f), c.counts[s] = c.tried[s] = 0;
    }

    // Calls pass(batch) for each level.
    template <class F>
    void run(F pass) {
        for (int level = 0; !going.empty(); level++) {
            pass(batch);
            const int64_t stride = m.head.units * BLOCKS * LANES;
            size_t kept = 0;
            for (size_t i = 0; i < going.size(); i++) {
                if (!extend(going[i], first.logits + i * stride)) continue;
                if (first.features) std::copy_n(batch.taps[0] + (int64_t)batch.outputs[i] * m.hidden, m.hidden, &features[kept * m.hidden]);
                going[kept++] = going[i];
            }
            going.resize(kept);
            plan(level + 1);
        }
    }

   private:
    // Checks the first pass and the rows of all chains, so that the passes behind it need no further check.
    void check() {
        if (c.longest < 1 || c.buckets < 1) refuse("chains of %d tokens with %d buckets; at least one is expected", c.longest, c.buckets);
        if (c.vocab < 1 || c.vocab > m.head.units * BLOCKS * LANES || c.width < c.vocab || c.width > m.embedding_rows)
            refuse("chains of %d of %d tokens, and the model reads %d", c.vocab, c.width, m.embedding_rows);
        for (int i = 0; c.ids && i < c.vocab; i++)
            if (c.ids[i] < (i ? c.ids[i - 1] + 1 : 0) || c.ids[i] >= c.width) refuse("the token %d of logit %d among %d", c.ids[i], i, c.width);
        for (int s = 0; s < first.sequences; s++) {
            if (c.limits[s] < 1 || c.limits[s] > c.longest) refuse("chain %d has %d tokens, from 1 to %d are expected", s, c.limits[s], c.longest);
            const SamplerSpec& how = c.samplers[s];
            if (how.kept && !(c.choose && how.noise && how.rows)) refuse("chain %d is drawn, without what it is drawn with", s);
            further.push_back(c.limits[s] - 1);
        }
        PassCheck(m, first).run(threads, further.data());
        const PlanUse use(m, first);
        if (first.tap_count != (first.features ? 1 : 0) || use.states || use.sources) refuse("chains of a model that needs more than tokens");
        if (first.features) features.resize((int64_t)first.sequences * m.hidden), tapped = features, tap = tapped.data();
        if (c.ids) wide.assign(c.width, -INFINITY);
        if (!first.logits || first.output_count != first.sequences) refuse("%d rows of logits for %d chains", first.output_count, first.sequences);
        for (int s = 0; s < first.sequences; s++)
            if (first.outputs[s] != first.sequence_from[s + 1] - 1 || first.branch_count)
                refuse("chain %d does not follow the last row of its sequence", s);
    }

    // Adds a token to a chain, or ends it. Returns whether it goes on.
    bool extend(int s, const float* logits) { return c.samplers[s].kept ? draw(s, logits) : take(s, logits); }

    bool draw(int s, const float* logits) {
        const SamplerSpec& how = c.samplers[s];
        const int64_t depth = c.counts[s];
        float* row = how.rows + (how.keeps ? depth * c.width : 0);
        int64_t token;
        for (int i = 0; c.ids && i < c.vocab; i++) wide[c.ids[i]] = logits[i];
        const int32_t status = c.choose(c.ids ? wide.data() : logits, c.width, how.kept, how.races, how.noise + depth, row, &token, threads);
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

    // Plans the pass over the newest tokens of the chains that go on, `depth` tokens behind those of the first pass.
    void plan(int depth) {
        const int count = (int)going.size();
        tokens.clear(), positions.clear(), places.clear(), prefix.clear(), pages.clear(), page_counts.clear(), adapters.clear();
        batch.reach = 0;
        for (int s : going) {
            const int row = first.outputs[s], place = first.places[row] + depth;
            tokens.push_back(c.tokens[(int64_t)s * c.longest + depth - 1]);
            positions.push_back(first.positions[row] + depth), places.push_back(place), prefix.push_back(place + 1);
            pages.push_back(first.pages[s]), page_counts.push_back(first.page_counts[s]);
            if (first.adapters) adapters.push_back(first.adapters[s]);
            batch.reach = std::max(batch.reach, place + 1);
        }
        branch_from.assign(count + 1, 0), numbers.resize(count + 1);
        for (int i = 0; i <= count; i++) numbers[i] = i;
        batch.tokens = tokens.data(), batch.positions = positions.data(), batch.places = places.data();
        batch.prefix = prefix.data(), batch.branch_from = branch_from.data(), batch.pages = pages.data(), batch.page_counts = page_counts.data();
        batch.sequence_from = batch.outputs = numbers.data();
        if (first.adapters) batch.adapters = adapters.data();
        if (first.features) batch.features = features.data(), batch.taps = &tap;
        batch.rows = batch.sequences = batch.output_count = count;
    }

    const int threads;
    const ModelSpec& m;
    const BatchSpec& first;
    const ChainSpec& c;
    BatchSpec batch;
    std::vector<int32_t> further;  // [sequences]; rows behind those of the first pass
    std::vector<int> going;    // sequences
    std::vector<float> reach;  // [sequences]; how likely all tokens of a chain are accepted
    std::vector<float> features, tapped;  // [sequences][hidden]; what a pass behind the first one reads, and its tapped states
    float* tap = nullptr;
    std::vector<float> wide;   // [width]; logits of all tokens
    std::vector<int32_t> tokens, positions, places, prefix, branch_from, page_counts, numbers;
    std::vector<Word* const*> pages;
    std::vector<const LoraAdapter*> adapters;
};

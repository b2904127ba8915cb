// Chains: the tokens that follow sequences, each the likeliest one after those before it or drawn, in one call.
//
// Each level is a pass over the newest token of every chain that goes on. In between nothing returns to Python, whose work for
// a pass takes longer than the pass of a small model.
#pragma once

#include <cmath>

#include "pass.hpp"

// Draws a token from the distribution of logits [n], which `row` receives; -1 where none is possible (core/native/sampling.cpp).
using Choose = int64_t (*)(const float* logits, int64_t n, const void* kept, int races, const void* noise, float* row, int threads);

// How the tokens of a chain are drawn.
struct Sampler {
    const void* kept;       // temperature and filters; null: the likeliest tokens are taken
    const uint64_t* noise;  // [limit]; the bits of uniform numbers, or the keys of races
    float* rows;            // [limit][vocab]; result: their distributions; [vocab] unless it keeps them
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
    const Sampler* samplers;        // [sequences]
    Choose choose;
    int32_t longest, buckets, vocab;  // vocab: tokens that may be drafted
};

// The largest of some logits, the first of equal ones, and its softmax probability; token -1 where they are not finite.
struct Likeliest {
    int32_t token = -1;
    float probability = 0.0f;

    Likeliest(const float* logits, int count) {
        Floats tops = floats(-INFINITY), sums = floats(0.0f);
        unsigned lost = 0;  // NaN, which a maximum may drop
        int i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Floats v = load(logits + i);
            lost |= bits(unordered(v, v)), tops = largest_of(v, tops);
        }
        float top = largest_lane(tops), sum = 0.0f;
        for (; i < count; i++) lost |= std::isnan(logits[i]), top = std::max(top, logits[i]);
        if (lost || !std::isfinite(top)) return;
        for (i = 0; i + LANES <= count; i += LANES) {
            const Floats v = load(logits + i);
            sums = sums + keep(different(v, floats(-INFINITY)), exponential(v - floats(top)));
        }
        for (; i < count; i++) sum += std::exp(logits[i] - top);
        sum += sum_of(sums);
        token = int32_t(std::find(logits, logits + count, top) - logits), probability = 1.0f / sum;
    }
};

class Chains {
   public:
    // first: the pass over the pending tokens of all sequences, with logits of the last token of each.
    Chains(const ModelSpec& m, const BatchSpec& first, const ChainSpec& spec, int threads) : threads(threads), m(m), first(first), c(spec), batch(first) {
        for (int s = 0; s < first.sequences; s++) going.push_back(s), reach.push_back(1.0f), c.counts[s] = c.tried[s] = 0;
    }

    // Calls pass(batch) for each level. Returns false once it does.
    template <class F>
    bool run(F pass) {
        for (int level = 0; !going.empty(); level++) {
            if (!pass(batch)) return false;
            const int64_t stride = m.head.units * BLOCKS * LANES;
            size_t kept = 0;
            for (size_t i = 0; i < going.size(); i++)
                if (extend(going[i], first.logits + i * stride)) going[kept++] = going[i];
            going.resize(kept);
            plan(level + 1);
        }
        return true;
    }

   private:
    // Adds a token to a chain, or ends it. Returns whether it goes on.
    bool extend(int s, const float* logits) { return c.samplers[s].kept ? draw(s, logits) : take(s, logits); }

    bool draw(int s, const float* logits) {
        const Sampler& how = c.samplers[s];
        const int64_t depth = c.counts[s];
        float* row = how.rows + (how.keeps ? depth * c.vocab : 0);
        const int64_t token = c.choose(logits, c.vocab, how.kept, how.races, how.noise + depth, row, threads);
        if (token < 0) return false;
        c.tokens[s * (int64_t)c.longest + depth] = (int32_t)token;
        return ++c.counts[s] < c.limits[s];
    }

    bool take(int s, const float* logits) {
        const Likeliest best(logits, c.vocab);
        if (best.token < 0) return false;
        const int depth = c.tried[s]++;
        const int64_t at = (int64_t)s * c.longest + depth;
        c.tokens[at] = best.token, c.probabilities[at] = best.probability;
        const int bucket = int(std::upper_bound(c.bounds, c.bounds + c.buckets - 1, best.probability) - c.bounds);
        reach[s] *= c.bases[s * c.buckets + bucket] + c.slopes[s * c.buckets + bucket] * best.probability;
        if (reach[s] < c.floors[at]) return false;
        return ++c.counts[s] < c.limits[s];
    }

    // Plans the pass over the newest tokens of the chains that go on, `depth` tokens behind those of the first pass.
    void plan(int depth) {
        const int count = (int)going.size();
        tokens.clear(), positions.clear(), places.clear(), prefix.clear(), pages.clear(), adapters.clear();
        batch.reach = 0;
        for (int s : going) {
            const int row = first.outputs[s], place = first.places[row] + depth;
            tokens.push_back(c.tokens[(int64_t)s * c.longest + depth - 1]);
            positions.push_back(first.positions[row] + depth), places.push_back(place), prefix.push_back(place + 1);
            pages.push_back(first.pages[s]);
            if (first.adapters) adapters.push_back(first.adapters[s]);
            batch.reach = std::max(batch.reach, place + 1);
        }
        branch_from.assign(count + 1, 0), numbers.resize(count + 1);
        for (int i = 0; i <= count; i++) numbers[i] = i;
        batch.tokens = tokens.data(), batch.positions = positions.data(), batch.places = places.data();
        batch.prefix = prefix.data(), batch.branch_from = branch_from.data(), batch.pages = pages.data();
        batch.sequence_from = batch.outputs = numbers.data();
        if (first.adapters) batch.adapters = adapters.data();
        batch.rows = batch.sequences = batch.output_count = count;
    }

    const int threads;
    const ModelSpec& m;
    const BatchSpec& first;
    const ChainSpec& c;
    BatchSpec batch;
    std::vector<int> going;    // sequences
    std::vector<float> reach;  // [sequences]; how likely all tokens of a chain are accepted
    std::vector<int32_t> tokens, positions, places, prefix, branch_from, numbers;
    std::vector<Word* const*> pages;
    std::vector<const LoraAdapter*> adapters;
};

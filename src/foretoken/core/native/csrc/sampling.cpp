// Sampling kernels over whole vocabularies: logits to probabilities, the excess (p - q)+, a draw, an exponential race.
#include "entry.hpp"
#include "chain_verdict.hpp"
#include "copies.hpp"
#include "leaders.hpp"
#include "successors.hpp"
#include "token_row.hpp"

namespace {

// Refuses rows of logits or weights that cannot be. All rows may be the same one, 0 apart.
void check_rows(int64_t stride, int64_t rows, int64_t n) {
    if (n < 1 || n > INT32_MAX) refuse("rows of %lld tokens; at least one is expected, and at most 2^31 - 1", (long long)n);
    if (rows < 0 || (rows > 1 && stride != 0 && stride < n)) refuse("%lld rows of %lld tokens, %lld apart", (long long)rows, (long long)n, (long long)stride);
}

void check_fraction(double u) {
    if (!(u >= 0.0 && u <= 1.0)) refuse("the fraction %g of a total; it must be from 0 to 1", u);
}

void check_token_row(const TokenRow& row, int64_t n) {
    if (row.top_count > n) refuse("the largest %d of %lld tokens", row.top_count, (long long)n);
    if (row.source == GIVEN && (row.token < 0 || row.token >= n))
        refuse("token %lld is outside the vocabulary of %lld tokens", (long long)row.token, (long long)n);
    if (row.source == FRACTION) check_fraction(fraction_of(row));
}

void check_nodes(const DraftNodes& draft, int64_t n) {
    std::vector<int32_t> depths(draft.nodes);
    for (int32_t node = 0; node < draft.nodes; node++) {
        const int32_t parent = draft.parents[node];
        if (parent < -1 || parent >= node) refuse("node %d of a draft follows node %d; a parent comes before its child", node, parent);
        depths[node] = parent < 0 ? 1 : depths[parent] + 1;
        if (depths[node] > draft.deepest) refuse("node %d is at depth %d of a draft of %d levels", node, depths[node], draft.deepest);
    }
    for (int32_t level = 0; level < draft.deepest; level++)
        if (draft.rows[level]->top_count > n) refuse("the largest %d of %lld tokens", draft.rows[level]->top_count, (long long)n);
}

}  // namespace

extern "C" {

// Returns the layout of the structures that Python mirrors.
const LayoutField* foretoken_layout() {
    static const LayoutField fields[] = {
        LAYOUT(FilterSpec, inverse, floor, top_k, top_p)
        LAYOUT(Distribution, top, inverse, lowest, over, last)
        LAYOUT(SuccessorTable, successors, hits, vocab, width)
        LAYOUT(SampledChain, logits, ids, drawn_from, stride, n, count)
        LAYOUT(CopySearch, text, count, factor, min_prob, depth, limit, budget, top_k)
        LAYOUT(Adjustment, allowed, banned, ends, biased, biases, seen, generated, banned_count, end_count, biased_count, seen_count,
               end_steps, repetition, frequency, presence)
        LAYOUT(LeaderSpec, logits, ids, filter, keys, stride, key_stride, rows, n, count, tokens, scores)
        LAYOUT(DraftNodes, ids, parents, rows, path, stride, nodes, deepest, path_count)
        LAYOUT(TokenRow, logits, changes, below, ids, filter, noise, source, top_count, top_ids, top_logprobs, logprob, position, index, rank,
               token)
        {},
    };
    return fields;
}

// Computes the distributions of `rows` rows of logits [n], which are `stride` numbers apart.
int32_t foretoken_distributions(const float* logits, int64_t stride, int64_t rows, int64_t n, const FilterSpec* f,
                                Distribution* distributions, int threads) {
    return guarded([&] {
        check_rows(stride, rows, n);
        each_row(rows, 1, n, threads, [&](Member& member, int64_t r, ScratchList& list) {
            RowScratch& scratch = list.of(member, 0);
            find_distribution(member, logits + r * stride, n, *f, scratch);
            member.each(1, 1, [&](int64_t) { distributions[r] = scratch.dist; });
        });
    }, "the distributions of %lld rows of %lld tokens", (long long)rows, (long long)n);
}

// Writes the likeliest token of each row, the lowest id on ties; -1 where a logit is NaN or the largest is not finite.
int32_t foretoken_best(const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t* tokens, int threads) {
    return guarded([&] {
        check_rows(stride, rows, n);
        in_parallel_each(sharing(rows * n, threads), rows, 1, [&](int64_t r) {
            float top;
            tokens[r] = argmax(logits + r * stride, n, top);
        });
    }, "the likeliest tokens of %lld rows", (long long)rows);
}

// Computes all probabilities of each row. out: [rows][n].
int32_t foretoken_rows(const float* logits, int64_t stride, int64_t rows, int64_t n, const Distribution* distributions,
                       float* out, int threads) {
    return guarded([&] {
        check_rows(stride, rows, n);
        write_rows(logits, stride, rows, n, distributions, out, threads);
    }, "%lld rows of %lld tokens", (long long)rows, (long long)n);
}

// Computes the probability of one token of each row.
int32_t foretoken_chances(const float* logits, int64_t stride, int64_t rows, int64_t n, const Distribution* distributions,
                          const int64_t* tokens, float* out) {
    return guarded([&] {
        check_rows(stride, rows, n);
        for (int64_t r = 0; r < rows; r++)
            if (tokens[r] < 0 || tokens[r] >= n)
                refuse("token %lld of row %lld is outside the vocabulary of %lld tokens", (long long)tokens[r], (long long)r, (long long)n);
        for (int64_t r = 0; r < rows; r++)
            out[r] = first_lane(chances(floats(logits[r * stride + tokens[r]]), tokens[r], distributions[r]));
    }, "the probabilities of %lld tokens", (long long)rows);
}

// Writes (weight p - q)+ in float64, and its mass.
int32_t foretoken_excess(const void* p, int wide, const float* q, double weight, double* excess, int64_t n, double* mass,
                         int threads) {
    return guarded([&] {
        check_rows(n, 1, n);
        *mass = wide ? excess_of((const double*)p, q, weight, excess, n, threads)
                     : excess_of((const float*)p, q, weight, excess, n, threads);
    }, "the excess of %lld tokens", (long long)n);
}

// Writes the token at fraction `u` of the weights, -1 if none is possible, and their sum.
int32_t foretoken_draw(const void* w, int wide, int64_t n, double u, int64_t* token, double* total, int threads) {
    return guarded([&] {
        check_rows(n, 1, n), check_fraction(u);
        *token = wide ? drawn((const double*)w, n, u, *total, threads) : drawn((const float*)w, n, u, *total, threads);
    }, "a draw of %lld tokens", (long long)n);
}

// Writes the argmax of w / E under a key, the lowest id on ties; -1 where no weight is above 0.
int32_t foretoken_race(const void* w, int wide, int64_t n, uint64_t key, int64_t* token, int threads) {
    return guarded([&] {
        check_rows(n, 1, n);
        *token = wide ? winner((const double*)w, n, key, threads) : winner((const float*)w, n, key, threads);
    }, "a race of %lld tokens", (long long)n);
}

// Copies rows of logits [n] and applies the changes of each. A row without a possible token becomes NaN.
int32_t foretoken_adjust(const float* logits, int64_t stride, int64_t rows, int64_t n, const Adjustment* changes, float* out,
                         int threads) {
    return guarded([&] {
        check_rows(stride, rows, n);
        in_parallel_each(sharing(rows * n, threads), rows, 1, [&](int64_t r) {
            float* row = out + r * n;
            std::memcpy(row, logits + r * stride, n * sizeof(float));
            if (!adjust(row, n, changes[r])) std::fill(row, row + n, NAN);
        });
    }, "changes of %lld rows of %lld tokens", (long long)rows, (long long)n);
}

// Writes the ids of the `count` largest logits of each row, largest first. ids: [rows][count].
int32_t foretoken_largest(const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t count, int64_t* ids, int threads) {
    return guarded([&] {
        check_rows(stride, rows, n);
        if (count < 0 || count > n) refuse("the largest %lld of %lld tokens", (long long)count, (long long)n);
        in_parallel_each(sharing(rows * n, threads), rows, 1,
                         [&](int64_t r) { largest_ids(logits + r * stride, n, count, ids + r * count); });
    }, "the largest %lld of %lld tokens", (long long)count, (long long)n);
}

// Computes the tokens of rows of logits [n] and of the draft nodes below them, and what else they ask for.
int32_t foretoken_choose_tokens(TokenRow* const* rows, int64_t count, int64_t n, int threads) {
    return guarded([&] {
        check_rows(n, count, n);
        int64_t deepest = 0;
        for (int64_t r = 0; r < count; r++) {
            check_token_row(*rows[r], n);
            if (rows[r]->below) check_nodes(*rows[r]->below, n), deepest = std::max<int64_t>(deepest, rows[r]->below->deepest);
        }
        each_row(count, deepest + 1, n, threads, [&](Member& member, int64_t r, ScratchList& list) { DraftWalk(member, *rows[r], n, list).run(); });
    }, "the tokens of %lld rows of %lld logits", (long long)count, (long long)n);
}

// Writes the heaviest tree of successors below a token; see successors.hpp. Arrays have room for `budget` nodes.
int32_t foretoken_heaviest_tree(const SuccessorTable* table, double trials, int64_t root, int64_t budget, int64_t max_depth,
                                int64_t* tokens, int64_t* parents, double* weights, int64_t* count) {
    return guarded([&] {
        *count = heaviest_tree(*table, trials, root, budget, max_depth, tokens, parents, weights);
    }, "a tree of %lld tokens", (long long)budget);
}

// Writes how many tokens of a sampled chain are accepted, and the token behind them, -1 where none is possible.
int32_t foretoken_verify_chain(const SampledChain* chain, const FilterSpec* f, uint64_t key, int64_t* accepted, int64_t* token, int threads) {
    return guarded([&] {
        check_rows(chain->stride, chain->count + 1, chain->n);
        for (int64_t i = 0; i < chain->count; i++)
            if (chain->ids[i] < 0 || chain->ids[i] >= chain->n) refuse("the drafted token %lld, of %lld tokens", (long long)chain->ids[i], (long long)chain->n);
        ChainVerdict verdict(*chain, *f, key, threads);
        verdict.run();
        *accepted = verdict.accepted, *token = verdict.token;
    }, "a chain of %lld tokens", (long long)chain->count);
}

// Writes the tree of what followed the end of a text earlier, and the length of the context that it follows; see copies.hpp.
// Arrays have room for the search's budget of nodes.
int32_t foretoken_copies(const CopySearch* search, int32_t* tokens, int32_t* parents, double* probs, int32_t* count, int32_t* length) {
    return guarded([&] {
        const CopyTree tree = Copies(*search).best();
        std::copy(tree.tokens.begin(), tree.tokens.end(), tokens);
        std::copy(tree.parents.begin(), tree.parents.end(), parents);
        std::copy(tree.probs.begin(), tree.probs.end(), probs);
        *count = (int32_t)tree.tokens.size(), *length = tree.length;
    }, "a search of %lld tokens", (long long)search->count);
}

// Draws a token from the distribution of logits [n]; -1 where no token is possible. ids: the token of each logit, ascending, or
// null. noise: the key of a race, or a number u; null: no token is sampled, and it is 0. row: null, or [width]; receives the
// distribution.
int32_t foretoken_choose(const float* logits, int64_t n, const int32_t* ids, int64_t width, const FilterSpec* f, int races,
                         const void* noise, float* row, int64_t* token, int threads) {
    return guarded([&] {
        check_rows(n, 1, n);
        TokenRow request{};
        request.logits = logits, request.filter = *f, request.noise = noise ? *(const uint64_t*)noise : 0, request.ids = ids;
        request.source = !noise ? GIVEN : races ? RACE : FRACTION, request.top_count = request.position = -1;
        check_token_row(request, n);
        each_row(1, 1, n, threads, [&](Member& member, int64_t, ScratchList& list) {
            RowScratch& scratch = list.of(member, 0);
            if (!noise) find_distribution(member, logits, n, *f, scratch);
            TokenChoice(member, request, nullptr, n, scratch).run();
            if (!noise && !scratch.finite) request.token = -1;
            if (request.token < 0 || !row) return;
            if (ids) member.each(1, 1, [&](int64_t) { std::memset(row, 0, width * sizeof(float)); });
            member.each(chunks(n), 1, [&](int64_t c) {
                const int64_t first = c * CHUNK, count = std::min(CHUNK, n - first);
                if (!ids) return write_chances(logits + first, count, first, scratch.dist, row + first);
                float chances[CHUNK];
                write_chances(logits + first, count, first, scratch.dist, chances);
                for (int64_t i = 0; i < count; i++) row[ids[first + i]] = chances[i];
            });
        });
        *token = request.token < 0 || !ids ? request.token : ids[request.token];
    }, "a draw of %lld tokens", (long long)n);
}

// Writes logits [width] of a node of a draft with its changes, NaN where no token is possible. x: logits [n] of the tokens `ids`, ascending,
// or of all. changes: those at the draft's root. path: the tokens down to the node.
int32_t foretoken_change(const float* x, int64_t n, const int32_t* ids, int64_t width, const Adjustment* changes, const int32_t* path,
                         int64_t count, float* out) {
    return guarded([&] {
        if (n < 1 || n > width || (!ids && n < width)) refuse("%lld logits of %lld tokens", (long long)n, (long long)width);
        std::fill_n(out, width, -INFINITY);
        for (int64_t i = 0; i < n; i++) out[ids ? ids[i] : i] = x[i];
        PathChanges node(*changes);
        for (int64_t i = 0; i < count; i++) node.add(path[i]);
        if (!adjust(out, width, node.now)) std::fill_n(out, width, NAN);
    }, "changes of %lld logits", (long long)n);
}

// Writes the likeliest children of nodes of a draft; see leader_spec.hpp.
int32_t foretoken_leaders(const LeaderSpec* spec, int threads) {
    return guarded([&] {
        check_rows(spec->stride, spec->rows, spec->n);
        if (spec->count < 1 || spec->count > spec->n) refuse("the best %lld of %lld tokens", (long long)spec->count, (long long)spec->n);
        LeaderSearch(*spec).run(threads);
    }, "the best children of %lld nodes among %lld tokens", (long long)spec->rows, (long long)spec->n);
}

}  // extern "C"

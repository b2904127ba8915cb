// The router of a mixture of experts: which experts a row takes, and with what weights.
//
// Logits are computed in float32, each element in one order, so a row's choice depends on that row alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kinds.hpp"

constexpr int MAX_EXPERTS = 1024;  // models/families/experts.py refuses more

// How logits become scores.
enum Scoring : int32_t { SOFTMAX = 0, SIGMOID = 1 };

// How a group of experts is scored by its experts: by the best one, or by the sum of the best two.
enum GroupScore : int32_t { BEST = 0, BEST_TWO = 1 };

struct RouterSpec {
    Matrix weights;           // [experts], float32 or bf16, whatever the kind of the experts; `bias` is added to logits
    const float* correction;  // [experts]; added to scores where experts are chosen, not in their weights; null: none
    int32_t experts, chosen;  // how many there are, and how many a row takes
    int32_t scoring;          // a Scoring
    int32_t normalized;       // weights are divided by their sum
    int32_t groups, chosen_groups, group_score;  // only experts of the best groups are taken; groups is 0 or 1 for none
    float scale;              // factor of the weights
    float divisor_eps;        // is added to their sum

    int64_t width() const { return weights.units * BLOCKS * LANES; }  // floats of a row of logits
};

constexpr int ROUTER_ROWS = ONE_REGISTER ? 4 : 1;  // of a register tile
constexpr int CHAINS = 4;  // sums of a logit: steps k with the same k % CHAINS, so that additions overlap
static_assert(TILE_STEPS % CHAINS == 0);

// Logits of R rows for sixteen experts. x: float32 [rows][stride], with zeros as padding.
template <Kind kind, int R>
inline void router_tile(const Matrix& w, const float* x, int64_t stride, int64_t block, float* to, int64_t to_stride) {
    const Word* at = w.data + block * w.steps * LANES;
    Floats sums[R][CHAINS];
    each<R>([&](auto r) { each<CHAINS>([&](auto c) { sums[r()][c()] = floats(0.0f); }); });
    for (int64_t k = 0; k < w.steps; k += CHAINS, at += CHAINS * LANES)
        each<CHAINS>([&](auto c) __attribute__((always_inline)) {
            const Ints words = load_ints(at + c() * LANES);
            each<R>([&](auto r) __attribute__((always_inline)) {
                const float* row = x + r() * stride + (k + c()) * per_word(kind);
                Floats& sum = sums[r()][c()];
                if constexpr (kind == F32) {
                    sum = multiply_add(as_floats(words), floats(row[0]), sum);
                } else {
                    sum = multiply_add(as_floats(shift_left<16>(words)), floats(row[0]), sum);
                    sum = multiply_add(as_floats(and_bits(words, ints((int)0xffff0000))), floats(row[1]), sum);
                }
            });
        });
    each<R>([&](auto r) {
        const Floats total = (sums[r()][0] + sums[r()][1]) + (sums[r()][2] + sums[r()][3]);
        store(to + r() * to_stride, finish(w, block, total));
    });
}

template <Kind kind>
inline void router_rows(const Matrix& w, const float* x, int64_t stride, int rows, int64_t block, float* to, int64_t to_stride) {
    int r = 0;
    for (; r + ROUTER_ROWS <= rows; r += ROUTER_ROWS)
        router_tile<kind, ROUTER_ROWS>(w, x + r * stride, stride, block, to + r * to_stride, to_stride);
    for (; r < rows; r++) router_tile<kind, 1>(w, x + r * stride, stride, block, to + r * to_stride, to_stride);
}

// Logits of rows of x for block `block` of sixteen experts.
inline void router_logits(const RouterSpec& s, const float* x, int64_t stride, int rows, int64_t block, float* logits) {
    float* to = logits + block * LANES;
    if (s.weights.kind == F32) router_rows<F32>(s.weights, x, stride, rows, block, to, s.width());
    else router_rows<BF16>(s.weights, x, stride, rows, block, to, s.width());
}

// Writes the places of the `count` largest of n numbers, in descending order; of equal ones the lowest place is first. NaN
// is never larger, so the places are valid and different whatever the numbers are.
inline void largest_places(const float* numbers, int n, int count, int32_t* places) {
    int held = 0;
    for (int i = 0; i < n; i++) {
        if (held == count && !(numbers[i] > numbers[places[held - 1]])) continue;
        int at = held < count ? held++ : held - 1;
        for (; at > 0 && numbers[i] > numbers[places[at - 1]]; at--) places[at] = places[at - 1];
        places[at] = i;
    }
}

// Sets the numbers of experts outside the best groups to -inf.
inline void keep_best_groups(const RouterSpec& s, float* numbers) {
    const int size = s.experts / s.groups;
    float scores[MAX_EXPERTS];
    int32_t best[MAX_EXPERTS], two[2];
    bool kept[MAX_EXPERTS] = {};
    for (int g = 0; g < s.groups; g++) {
        const int count = s.group_score == BEST_TWO ? std::min(2, size) : 1;
        largest_places(numbers + g * size, size, count, two);
        scores[g] = numbers[g * size + two[0]];
        if (count == 2) scores[g] += numbers[g * size + two[1]];
    }
    largest_places(scores, s.groups, s.chosen_groups, best);
    for (int i = 0; i < s.chosen_groups; i++) kept[best[i]] = true;
    for (int e = 0; e < s.experts; e++)
        if (!kept[e / size]) numbers[e] = -INFINITY;
}

// Chooses a row's experts, the best first, and their weights. logits: [width()], which are changed.
inline void choose_experts(const RouterSpec& s, float* logits, int32_t* experts, float* weights) {
    float scores[MAX_EXPERTS], *numbers = logits;  // experts are chosen by `numbers`
    std::fill(logits + s.experts, logits + s.width(), -INFINITY);
    Floats maxima = floats(-INFINITY), sum = floats(0.0f);
    for (int e = 0; e < s.experts; e += LANES) maxima = larger(maxima, load(logits + e));
    const Floats top = floats(largest(maxima));
    for (int e = 0; e < s.experts; e += LANES) {
        const Floats v = load(logits + e);
        const Floats score = s.scoring == SIGMOID ? logistic(v) : exponential(v - top);
        sum = sum + score;
        store(scores + e, score);
    }
    // The total of a softmax counts only where weights are not normalized.
    const float whole = s.scoring == SOFTMAX ? sum_of(sum) : 1.0f;
    if (s.correction)
        for (int e = 0; e < s.experts; e++) numbers[e] = scores[e] / whole + s.correction[e];
    if (s.groups > 1) keep_best_groups(s, numbers);
    largest_places(numbers, s.experts, s.chosen, experts);
    float total = 0.0f;
    for (int i = 0; i < s.chosen; i++) total += weights[i] = scores[experts[i]];
    const float divisor = s.normalized ? total + s.divisor_eps : whole;
    for (int i = 0; i < s.chosen; i++) weights[i] = weights[i] / divisor * s.scale;
}

// The rows of one expert: pairs [first, last) of rows and experts.
struct ExpertRows {
    int32_t expert, first, last;
};

// What the rows of one layer chose.
struct Routing {
    std::vector<int32_t> experts;  // [rows][chosen], the best first
    std::vector<float> weights;    // [rows][chosen]
    std::vector<int32_t> pairs;    // [rows][chosen]; the place of each pair in the order of experts
    std::vector<int32_t> row_of;   // [pairs]
    std::vector<float> weight_of;  // [pairs]
    std::vector<int32_t> starts;   // [experts + 1]
    std::vector<ExpertRows> active;  // experts that any row chose, in order
    int count = 0;                  // of `active`

    void reserve(const RouterSpec& s, int rows) {
        const size_t all = (size_t)rows * s.chosen;
        for (auto* list : {&experts, &pairs, &row_of}) list->resize(std::max(list->size(), all));
        for (auto* list : {&weights, &weight_of}) list->resize(std::max(list->size(), all));
        starts.resize(std::max(starts.size(), (size_t)s.experts + 1));
        active.resize(std::max(active.size(), (size_t)max_active(s, rows)));
    }

    // The largest number of experts that rows can choose.
    static int max_active(const RouterSpec& s, int rows) { return (int)std::min<int64_t>(s.experts, (int64_t)rows * s.chosen); }

    // Orders pairs by their expert, then by their row.
    void sort(const RouterSpec& s, int rows) {
        const int all = rows * s.chosen;
        std::fill(starts.begin(), starts.begin() + s.experts + 1, 0);
        for (int p = 0; p < all; p++) starts[experts[p] + 1]++;
        count = 0;
        for (int e = 0; e < s.experts; e++) {
            starts[e + 1] += starts[e];
            if (starts[e + 1] > starts[e]) active[count++] = {e, starts[e], starts[e + 1]};
        }
        for (int p = 0; p < all; p++) {
            const int32_t at = starts[experts[p]]++;
            pairs[p] = at, row_of[at] = p / s.chosen, weight_of[at] = weights[p];
        }
    }
};

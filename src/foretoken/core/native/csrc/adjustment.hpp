// Sampling parameters that change single logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

// Changes of one row of logits, in the order of a SamplingLaw: mask, bans, biases, penalties.
struct Adjustment {
    const uint8_t* allowed;  // [n] one byte a token, or null for all
    const int64_t* banned;   // ids that are forbidden in any case
    const int64_t* ends;     // ids that are forbidden unless no others are allowed
    const int64_t* biased;   // ids, with `biases` added to their logits
    const float* biases;
    const int64_t* seen;      // unique ids of prompt and output
    const int32_t* generated;  // how often each of `seen` was generated
    int64_t banned_count, end_count, biased_count, seen_count;
    int64_t end_steps;  // number of tokens from this row on before which `ends` are forbidden
    float repetition, frequency, presence;
};

// Ids beyond a row, of a draft with a smaller vocabulary for instance, change nothing.
inline bool within(int64_t id, int64_t n) { return id >= 0 && id < n; }

inline void forbid_all(float* x, int64_t n, const int64_t* ids, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (within(ids[i], n)) x[ids[i]] = -INFINITY;
}

// Whether any token except `ends` is allowed.
inline bool others_allowed(const Adjustment& a, int64_t n) {
    if (!a.allowed) return true;
    int64_t count = 0;
    for (int64_t v = 0; v < n; v++) count += a.allowed[v];
    for (int64_t i = 0; i < a.end_count; i++) {
        const int64_t* before = std::find(a.ends, a.ends + i, a.ends[i]);
        count -= before == a.ends + i && within(a.ends[i], n) && a.allowed[a.ends[i]];
    }
    return count > 0;
}

// Forbids tokens of x [n] by -inf. Returns whether one is left.
inline bool forbid(float* x, int64_t n, const Adjustment& a) {
    if (a.allowed)
        for (int64_t v = 0; v < n; v++) x[v] = a.allowed[v] ? x[v] : -INFINITY;
    const bool ends = a.end_count && others_allowed(a, n);
    forbid_all(x, n, a.banned, a.banned_count);
    if (ends) forbid_all(x, n, a.ends, a.end_count);
    if (!a.allowed) {
        if (!a.banned_count && !ends) return true;
        for (int64_t v = 0; v < n; v++)
            if (x[v] > -INFINITY) return true;
        return false;
    }
    for (int64_t v = 0; v < n; v++)
        if (x[v] != -INFINITY) return true;
    // A draft with a smaller vocabulary may give all allowed tokens -inf: then all are equally probable.
    bool any = false;
    auto in = [](const int64_t* ids, int64_t count, int64_t v) { return std::find(ids, ids + count, v) != ids + count; };
    for (int64_t v = 0; v < n; v++)
        if (a.allowed[v] && !in(a.banned, a.banned_count, v) && !(ends && in(a.ends, a.end_count, v))) x[v] = 0.0f, any = true;
    return any;
}

// Applies all changes to x [n]. Returns whether a token is left.
inline bool adjust(float* x, int64_t n, const Adjustment& a) {
    if ((a.allowed || a.banned_count || a.end_count) && !forbid(x, n, a)) return false;
    for (int64_t i = 0; i < a.biased_count; i++)
        if (within(a.biased[i], n)) x[a.biased[i]] += a.biases[i];
    for (int64_t i = 0; i < a.seen_count; i++) {
        if (!within(a.seen[i], n)) continue;
        float& value = x[a.seen[i]];
        if (a.repetition != 1.0f) value = value > 0.0f ? value / a.repetition : value * a.repetition;
        if (const int32_t times = a.generated[i]) {
            const float counted = a.frequency * (float)times;
            value -= counted + a.presence;
        }
    }
    return true;
}

// The changes at a node of a draft: those at its root, and what the tokens between add.
class PathChanges {
   public:
    Adjustment now;

    explicit PathChanges(const Adjustment& root)
        : now(root), ends(root.end_count), seen(root.seen, root.seen + root.seen_count), generated(root.generated, root.generated + root.seen_count) {}

    // Adds the next token of the path.
    void add(int64_t token) {
        const auto at = std::find(seen.begin(), seen.end(), token) - seen.begin();
        if (at == (int64_t)seen.size()) seen.push_back(token), generated.push_back(0);
        generated[at]++, depth++;
        const bool penalizes = now.repetition != 1.0f || now.frequency != 0.0f || now.presence != 0.0f;
        now.seen = seen.data(), now.generated = generated.data(), now.seen_count = penalizes ? (int64_t)seen.size() : 0;
        now.end_count = depth < now.end_steps ? ends : 0;
    }

   private:
    const int64_t ends;
    int64_t depth = 0;
    std::vector<int64_t> seen;
    std::vector<int32_t> generated;
};

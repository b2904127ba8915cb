// The likeliest children of nodes of a draft: the most probable tokens, or the leaders of a race and their shares of all scores
// (propose/tree.py).
#pragma once

#include "leader_spec.hpp"
#include "token_row.hpp"

namespace {

// Returns -log u for numbers in (0, 1), to ten digits.
INLINE Doubles minus_log(Doubles u) {
    constexpr uint64_t ROOT = 0x3fe6a09e667f3bcd;  // bits of sqrt(1/2)
    const Lanes exponent = (Lanes)((Words)u - ROOT) >> 52;
    const Doubles m = (Doubles)((Words)u - ((Words)exponent << 52));  // from sqrt(1/2) to sqrt(2)
    const Doubles s = (m - 1.0) / (m + 1.0), q = s * s;               // log m = 2 artanh s
    const Doubles series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13))))));
    return -2.0 * s * series - __builtin_convertvector(exponent, Doubles) * 0.693147180559945309;
}

// The best of the tokens that were added, by ascending ids: the best first, lower ids first on ties.
struct Leaders {
    size_t count;
    double sum = 0.0;  // of all scores
    std::vector<Best> best;

    // A score that is not larger adds nothing.
    double least() const { return best.size() == count ? best.back().score : 0.0; }

    void add(double score, int64_t id) {
        if (!(score > least())) return;
        auto at = best.end();
        while (at != best.begin() && score > (at - 1)->score) --at;
        best.insert(at, {score, id});
        if (best.size() > count) best.pop_back();
    }
};

class LeaderSearch {
   public:
    LeaderSearch(const LeaderSpec& spec) : s(spec), found(spec.rows * chunks(spec.n), Leaders{(size_t)spec.count, 0.0, {}}) {
        for (int64_t r = 0; r < s.rows; r++) rows.emplace_back(s.n);
    }

    void run(int threads) {
        in_parallel(sharing(s.rows * s.n, threads), [&](Member& member) {
            for (int64_t r = 0; r < s.rows; r++) find_distribution(member, s.logits + r * s.stride, s.n, *(const FilterSpec*)s.filter, rows[r]);
            member.each(chunks(s.n), 1, [&](int64_t c) { search(c); });
            member.each(s.rows, 1, [&](int64_t r) { write(r); });
        });
    }

   private:
    const LeaderSpec& s;
    std::vector<RowScratch> rows;
    std::vector<Leaders> found;  // [rows][chunks]

    // Finds the best tokens of all rows in one chunk, whose noise they may share.
    void search(int64_t c) {
        alignas(64) double noise[CHUNK];
        bool known[CHUNK / BLOCK] = {};
        const int64_t from = c * CHUNK, count = std::min(CHUNK, s.n - from);
        for (int64_t r = 0; r < s.rows; r++) {
            if (!rows[r].finite) continue;
            const uint64_t* key = s.keys ? s.keys + r * s.key_stride : nullptr;
            if (s.key_stride) std::fill(std::begin(known), std::end(known), false);
            Leaders& leaders = found[r * chunks(s.n) + c];
            each_block(rows[r], s.logits + r * s.stride, from, count, [&](const float* p, int64_t first, int64_t tokens) {
                double* e = noise + (first - from);
                bool& drawn = known[(first - from) / BLOCK];
                if (key && !drawn) draw_noise(*key, first, tokens, e), drawn = true;
                Doubles sum = {};
                for (int64_t i = 0; i < tokens; i += WIDE) {
                    Doubles score = load_wide(p + i, tokens - i);
                    if (key) score = score / *(const Doubles*)(e + i);
                    sum += score;
                    for (unsigned hit = bits_of((Lanes)(score > leaders.least())); hit; hit &= hit - 1)
                        leaders.add(score[__builtin_ctz(hit)], first + i + __builtin_ctz(hit));
                }
                for (int lane = 0; lane < WIDE; lane++) leaders.sum += sum[lane];
                return false;
            });
        }
    }

    // Writes the exponentials of tokens, whole vectors of them; core/streams.py.
    void draw_noise(uint64_t key, int64_t first, int64_t count, double* out) const {
        Words number;
        for (int lane = 0; lane < WIDE; lane++) number[lane] = first + lane + 1;
        for (int64_t i = 0; i < count; i += WIDE, number += WIDE) {
            for (int lane = 0; s.ids && lane < WIDE; lane++) number[lane] = s.ids[std::min(first + i + lane, s.n - 1)] + 1;
            *(Doubles*)(out + i) = minus_log(fractions(number * GOLDEN + key));
        }
    }

    void write(int64_t r) const {
        Leaders all{(size_t)s.count, 0.0, {}};
        for (int64_t c = 0; c < chunks(s.n); c++) {
            const Leaders& chunk = found[r * chunks(s.n) + c];
            all.sum += chunk.sum;
            for (const Best& each : chunk.best) all.add(each.score, each.id);
        }
        all.best.resize(s.count, {0.0, 0});
        for (int64_t i = 0; i < s.count; i++) {
            const Best& each = all.best[i];
            s.tokens[r * s.count + i] = s.ids ? s.ids[each.id] : (int32_t)each.id;
            s.scores[r * s.count + i] = (float)std::log(s.keys && each.score > 0.0 ? each.score / all.sum : each.score);
        }
    }
};

}  // namespace

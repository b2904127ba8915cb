// Verifies a chain of sampled tokens by blocks (2403.10444); verify/block.py says how, and does the same for other devices.
#pragma once

#include "token_row.hpp"

namespace {

struct SampledChain {
    const float* logits;      // [count + 1][n], `stride` numbers apart; the first are the root's
    const int64_t* ids;       // [count]; the tokens
    const float* drawn_from;  // [count][n]; the distribution of each
    int64_t stride, n, count;
};

class ChainVerdict {
   public:
    int64_t accepted = 0, token = -1;  // token: -1 where none is possible

    ChainVerdict(const SampledChain& c, const FilterSpec& f, uint64_t key, int threads) : c(c), f(f), key(key), threads(threads), rows(c.count) {}

    void run() {
        find_weights();
        const int64_t n = c.count, known = (int64_t)w.size();
        if (known > n && number(2 * n) < w[n]) return take_all();
        for (int64_t tau = std::min(known, n) - 1; tau >= 0 && !take(tau); tau--) {}
    }

   private:
    // The number of a draw, as core/streams.py addresses it.
    double number(uint64_t counter) const { return ((double)(splitmix(key + counter * GOLDEN) >> 12) + 0.5) * 0x1p-52; }

    const float* logits(int64_t row) const { return c.logits + row * c.stride; }

    // Sets w to the first weights up to the first that is 0, exclusive: w_i = min(1, w_{i - 1} p(x_i) / q(x_i)).
    void find_weights() {
        w.assign(1, 1.0);
        for (int64_t i = 0; i < c.count; i++) {
            each_row(1, 1, c.n, threads, [&](Member& member, int64_t, ScratchList& list) {
                RowScratch& scratch = list.of(member, 0);
                find_distribution(member, logits(i), c.n, f, scratch);
                member.each(1, 1, [&](int64_t) { rows[i] = scratch.dist; });
            });
            const int64_t id = c.ids[i];
            const double p = first_lane(chances(floats(logits(i)[id]), id, rows[i])), q = c.drawn_from[i * c.n + id];
            const double weight = p > 0.0 && q > 0.0 ? std::min(1.0, w.back() * (p / q)) : 0.0;
            if (weight == 0.0) return;
            w.push_back(weight);
        }
    }

    void take_all() {
        TokenRow request{};
        const double u = number(2 * c.count + 1);
        request.logits = logits(c.count), request.filter = f, request.source = FRACTION;
        request.top_count = request.position = -1;
        std::memcpy(&request.noise, &u, sizeof u);
        each_row(1, 1, c.n, threads, [&](Member& member, int64_t, ScratchList& list) { TokenChoice(member, request, nullptr, c.n, list.of(member, 0)).run(); });
        accepted = c.count, token = request.token;
    }

    // Takes `tau` tokens and draws the next one from what the target has beyond the draft, unless fewer are accepted.
    bool take(int64_t tau) {
        const double u = tau ? number(2 * tau) : 0.0;
        if (tau && !(u < w[tau])) return false;
        static thread_local std::vector<float> p;
        static thread_local std::vector<double> excess;
        if ((int64_t)p.size() < c.n) p.resize(c.n), excess.resize(c.n);
        write_rows(logits(tau), c.stride, 1, c.n, &rows[tau], p.data(), threads);
        if (std::isnan(p[0])) return true;
        const double mass = excess_of(p.data(), c.drawn_from + tau * c.n, w[tau], excess.data(), c.n, threads), leaving = mass + (1.0 - w[tau]);
        if (tau && !(u < (leaving > 0.0 ? mass / leaving : 1.0))) return false;
        double total;
        const double fraction = number(2 * tau + 1);
        accepted = tau;
        token = mass > 0.0 ? drawn(excess.data(), c.n, fraction, total, threads) : drawn(p.data(), c.n, fraction, total, threads);
        return true;
    }

    const SampledChain& c;
    const FilterSpec& f;
    const uint64_t key;
    const int threads;
    std::vector<Distribution> rows;  // [count]
    std::vector<double> w;           // up to [count + 1]
};

}  // namespace

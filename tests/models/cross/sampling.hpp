// Sampling of whole vocabularies, against float64; and what tests/core/pool_cases.cpp asks of the pool.
#pragma once

#include <algorithm>
#include <cmath>

#include "checks.hpp"

struct Filter {
    float inverse, floor;
    int32_t top_k;
    float top_p;
};

struct Distribution {
    float top, inverse, lowest, over;
    int32_t last;
};

// The probabilities of a row in float64, for filters that are used one at a time.
inline std::vector<double> expected(const float* x, int n, const Filter& f) {
    std::vector<int> order(n);
    std::vector<double> p(n);
    const float top = *std::max_element(x, x + n);
    double total = 0.0, mass = 0.0;
    for (int i = 0; i < n; i++) order[i] = i, total += p[i] = std::exp(((double)x[i] - top) * f.inverse);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
    for (int i = 0; i < n; i++) {
        double& each = p[order[i]];
        if ((f.top_k && i >= f.top_k) || mass >= f.top_p * total || std::log(each) < f.floor) each = 0.0;
        mass += each;
    }
    for (double& each : p) each /= mass;
    return p;
}

// The winner of the exponential race, each token by itself.
inline int64_t race(const std::vector<float>& w, uint64_t key) {
    double best = 0.0;
    int64_t id = -1;
    for (size_t i = 0; i < w.size(); i++) {
        uint64_t z = key + (i + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u, z = (z ^ z >> 27) * 0x94D049BB133111EBu, z = (z ^ z >> 31) >> 12;
        const double score = w[i] / -std::log(((double)z + 0.5) * 0x1p-52);
        if (score > best) best = score, id = (int64_t)i;
    }
    return id;
}

inline void check_sampling(const Library& library) {
    constexpr int N = 40003, SMALL = 4099;
    auto distribute = library.of<int32_t(const float*, int64_t, int64_t, int64_t, const Filter*, Distribution*, int)>("foretoken_distributions");
    auto all = library.of<int32_t(const float*, int64_t, int64_t, int64_t, const Distribution*, float*, int)>("foretoken_rows");
    auto one = library.of<int32_t(const float*, int64_t, int64_t, int64_t, const Distribution*, const int64_t*, float*)>("foretoken_chances");
    auto draw = library.of<int32_t(const void*, int, int64_t, double, int64_t*, double*, int)>("foretoken_draw");
    auto winner = library.of<int32_t(const void*, int, int64_t, uint64_t, int64_t*, int)>("foretoken_race");
    auto excess = library.of<int32_t(const void*, int, const float*, double, double*, int64_t, double*, int)>("foretoken_excess");
    Random random{7};
    std::vector<float> logits(N);
    for (float& x : logits) x = 6 * (random.unit() + random.unit() + random.unit());
    const Filter filters[] = {{1.0f, -INFINITY, 0, 1.0f}, {1.4f, -INFINITY, 50, 1.0f}, {0.8f, -INFINITY, 0, 0.9f}, {1.0f, -3.0f, 0, 1.0f}};
    std::vector<float> base;
    for (int n : {N, SMALL})
        for (const Filter& f : filters) {
            const std::string name = "sampling of " + std::to_string(n) + " by filter " + std::to_string(&f - filters);
            Distribution dist, again;
            std::vector<float> p(n), q(n);
            distribute(logits.data(), n, 1, n, &f, &dist, 3), distribute(logits.data(), n, 1, n, &f, &again, 1);
            check(!std::memcmp(&dist, &again, sizeof dist), name + " on threads");
            all(logits.data(), n, 1, n, &dist, p.data(), 3);
            const std::vector<double> right = expected(logits.data(), n, f);
            // exponents of up to 50 are rounded twice
            for (int i = 0; i < n; i++) check(std::fabs(p[i] - right[i]) <= 8e-6 * right[i], name, " token ", i);
            for (int64_t i = 0; i < n; i += 911) {
                one(logits.data(), n, 1, n, &dist, &i, &q[0]);
                check(q[0] == p[i], name, " of one token");
            }
            report(name, p);
            for (double u : {0.0, 0.3, 0.77, 1.0}) {
                double total = 0.0, before = 0.0;
                int64_t token = -1;
                check(!draw(p.data(), 0, n, u, &token, &total, 3), name, " draw");
                for (int64_t i = 0; i < token; i++) before += p[i];
                check(std::fabs(total - 1.0) < 1e-5 && p[token] > 0, name + " draws");
                check(before <= u * total + 1e-9 && before + p[token] >= u * total - 1e-9, name + " draws the token of a fraction");
            }
            int64_t won = -1;
            for (uint64_t key = 1; key < 20; key += n == N ? 5 : 1)
                check(!winner(p.data(), 0, n, key * 0x123456789ABCDEFu, &won, 3) && won == race(p, key * 0x123456789ABCDEFu), name, " race");
            if (n == N && &f == filters) base = p;
            if (n == N && &f == filters + 2) {
                std::vector<double> left(n);
                double mass = 0.0, sum = 0.0;
                check(!excess(p.data(), 0, base.data(), 0.9, left.data(), n, &mass, 3), name, " excess");
                for (int i = 0; i < n; i++) {
                    sum += left[i];
                    check(left[i] == std::max(0.0, (double)p[i] * 0.9 - (double)base[i]), name, " excess");
                }
                check(std::fabs(mass - sum) < 1e-12, name + " mass of the excess");
            }
        }
    logits[17] = NAN;
    Distribution dist;
    std::vector<float> p(N);
    distribute(logits.data(), N, 1, N, filters, &dist, 3), all(logits.data(), N, 1, N, &dist, p.data(), 3);
    for (float x : p) check(std::isnan(x), "a row with NaN");
}

inline void check_pool(const Library& library) {
    auto sums = library.of<int64_t(int, int, int64_t, int64_t, int)>("sums");
    auto fails = library.of<int32_t(int, int64_t, int64_t, int)>("fails");
    for (int threads : {1, 2, 3, 8})
        for (int items : {0, 1, 7, 100, 2000}) {
            const std::string name = std::to_string(items) + " items on " + std::to_string(threads) + " threads";
            check(sums(threads, 10, items, 1, 0) == 0 && sums(threads, 10, items, 8, 13) == 0, name);
        }
    for (int at : {0, 10, 99}) {
        check(fails(2, 100, at, NO_MEMORY) == NO_MEMORY, "a failure is told");
        check(sums(3, 5, 100, 1, 0) == 0, "a team after one that failed");
    }
}

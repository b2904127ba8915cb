// Draws from weights: the token at a fraction of their sum, the excess (p - q)+, and exponential races.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "distribution.hpp"
#include "pool.hpp"

namespace {

// Sums the weights of a chunk in float64: elements i, i + 8, ... are added together, and those behind the last multiple of
// eight one by one.
class Weigher {
   public:
    // Adds the next n weights; n is a multiple of eight but in the last call. Without a call for zeros the sum is the same.
    template <class T>
    void add(const T* w, int64_t n) {
        int64_t i = 0;
        for (; i + SUMS <= n; i += SUMS)
            for (int lane = 0; lane < SUMS; lane++) sums[lane] += (double)w[i + lane];
        for (; i < n; i++) tail += w[i];
    }
    double sum() {
        for (int width = SUMS / 2; width; width /= 2)
            for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
        return sums[0] + tail;
    }

   private:
    static constexpr int SUMS = 8;
    double sums[SUMS] = {}, tail = 0.0;
};

template <class T>
double weigh(const T* w, int64_t n) {
    Weigher weigher;
    weigher.add(w, n);
    return weigher.sum();
}

// The place of a fraction of a total weight: in a chunk first, then at a token.
struct Place {
    int64_t chunk = -1, token = -1;
    double point, before = 0.0;  // before: the weight of the tokens passed

    // Finds the chunk at fraction `u` of the sums of chunks. Returns whether any token is possible.
    bool find(const double* sums, int64_t count, double u, double& total) {
        total = 0.0;
        for (int64_t c = 0; c < count; c++) total += sums[c];
        if (!(total > 0.0) || total == INFINITY) return false;
        point = u * total;
        int64_t c = 0;
        for (; c < count; c++) {
            if (sums[c] > 0.0) chunk = c;
            if (before + sums[c] > point) break;
            before += sums[c];
        }
        // Rounding can put the point past the end of the row or of a chunk: its last token with any mass is then right.
        if (c == count) before = -INFINITY;
        return true;
    }

    // Passes n tokens of the chunk, the first of which is `first`. Returns whether the point is among them.
    template <class T>
    bool pass(const T* w, int64_t n, int64_t first) {
        for (int64_t i = 0; i < n; i++) {
            if (w[i] > 0) token = first + i;
            before += w[i];
            if (before > point) return true;
        }
        return false;
    }
};

// Returns the token at fraction `u` of the total weight, -1 where the weight is 0. `total` receives the total weight.
template <class T>
int64_t drawn(const T* w, int64_t n, double u, double& total, int threads) {
    std::vector<double> sums(chunks(n));
    in_parallel_each(sharing(n, threads), chunks(n), 1, [&](int64_t c) {
        sums[c] = weigh(w + c * CHUNK, std::min(CHUNK, n - c * CHUNK));
    });
    Place place;
    if (!place.find(sums.data(), (int64_t)sums.size(), u, total)) return -1;
    const int64_t from = place.chunk * CHUNK;
    place.pass(w + from, std::min(CHUNK, n - from), from);
    return place.token;
}

template <class T>
double excess_of(const T* p, const float* q, double weight, double* excess, int64_t n, int threads) {
    std::vector<double> sums(chunks(n));
    in_parallel_each(sharing(n, threads), chunks(n), 1, [&](int64_t c) {
        const int64_t from = c * CHUNK, to = std::min(n, from + CHUNK);
        for (int64_t i = from; i < to; i++) {
            const double left = (double)p[i] * weight - (double)q[i];
            excess[i] = left < 0.0 ? 0.0 : left;  // NaN stays
        }
        sums[c] = weigh(excess + from, to - from);
    });
    double mass = 0.0;
    for (double sum : sums) mass += sum;
    return mass;
}

// The exponential race of a range of tokens under one key, with the random numbers of core/streams.py.
struct Best {
    double score = 0.0;
    int64_t id = -1;
};

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u, FIRST = 0xBF58476D1CE4E5B9u, SECOND = 0x94D049BB133111EBu;

// Numbers of 64 bits in one register.
#ifdef __AVX512F__
constexpr int REGISTER = 64;
#else
constexpr int REGISTER = PIECE;
#endif
typedef double Doubles __attribute__((vector_size(REGISTER)));
typedef uint64_t Words __attribute__((vector_size(REGISTER)));
typedef int64_t Lanes __attribute__((vector_size(REGISTER)));  // all ones where a comparison holds
constexpr int WIDE = REGISTER / 8;

// Bit i is set where lane i is.
INLINE unsigned bits_of(Lanes v) {
#if defined(__AVX512DQ__)
    return _mm512_movepi64_mask((__m512i)v);
#elif defined(__AVX2__)
    return (unsigned)_mm256_movemask_pd((__m256d)v);
#elif defined(__SSE2__)
    return (unsigned)_mm_movemask_pd((__m128d)v);
#else
    unsigned out = 0;
    for (int i = 0; i < WIDE; i++) out |= (unsigned)(v[i] & 1) << i;
    return out;
#endif
}

template <class T>
INLINE Doubles load_wide(const T* w, int64_t count) {
    typedef T Numbers __attribute__((vector_size(sizeof(T) * WIDE)));
    typedef T NumbersAt __attribute__((vector_size(sizeof(T) * WIDE), aligned(1), may_alias));
    if (count >= WIDE) return __builtin_convertvector(*(const NumbersAt*)w, Doubles);
    Numbers numbers = {};
    std::memcpy(&numbers, w, count * sizeof(T));
    return __builtin_convertvector(numbers, Doubles);
}

// Numbers in (0, 1) of counters under one key: SplitMix64 (core/streams.py).
INLINE Doubles fractions(Words z) {
    z = (z ^ z >> 30) * FIRST;
    z = (z ^ z >> 27) * SECOND;
    z = (z ^ z >> 31) >> 12;
    const Doubles whole = (Doubles)(z | 0x4330000000000000) - 0x1p52;  // z, which is below 2^52
    return (whole + 0.5) * 0x1p-52;
}

// Continues a race behind the tokens that have led to `best` with n further ones, the first of which is `first`. ids: null, or
// the tokens whose noise those of the race have.
template <class T>
Best raced(const T* w, int64_t n, int64_t first, uint64_t key, Best best, const int32_t* ids = nullptr) {
    Words counter = {};
    for (int lane = 0; lane < WIDE; lane++) counter[lane] = lane + 1;
    counter = (counter + (uint64_t)first) * GOLDEN + key;
    for (int64_t i = 0; i < n; i += WIDE, counter += WIDE * GOLDEN) {
        const Doubles weights = load_wide(w + i, n - i);
        // No exponential is under 2^-53: tokens that cannot win with that one are skipped.
        if (!bits_of((Lanes)(weights > best.score * 0x1p-53))) continue;
        Words z = counter;
        for (int lane = 0; ids && lane < WIDE; lane++) z[lane] = ((uint64_t)ids[std::min(first + i + lane, first + n - 1)] + 1) * GOLDEN + key;
        const Doubles u = fractions(z);
        // -log u >= 1 - u, so a score is at most weight / (1 - u), plus a margin for rounding.
        const Doubles bound = (1.0 - u) * (best.score * (1.0 - 1e-12));
        unsigned hit = bits_of((Lanes)(weights >= bound)) & bits_of((Lanes)(weights > 0.0));
        for (; hit; hit &= hit - 1) {
            const int lane = __builtin_ctz(hit);
            const double next = (double)w[i + lane] / -std::log(u[lane]);
            if (next > best.score) best = {next, first + i + lane};
        }
    }
    return best;
}

constexpr int64_t RUN = CHUNK * 8;  // tokens of one race: long, so that the best score so far excludes most of them
inline int64_t runs(int64_t n) { return (n + RUN - 1) / RUN; }

// Returns the winner of all races, the lowest id on ties.
int64_t winner_of(const std::vector<Best>& races) {
    Best best;
    for (const Best& each : races)
        if (each.score > best.score) best = each;
    return best.id;
}

template <class T>
int64_t winner(const T* w, int64_t n, uint64_t key, int threads) {
    std::vector<Best> races(runs(n));
    in_parallel_each(sharing(n, threads), runs(n), 1, [&](int64_t c) {
        races[c] = raced(w + c * RUN, std::min(RUN, n - c * RUN), c * RUN, key, Best());
    });
    return winner_of(races);
}

}  // namespace

// Sampling kernels over whole vocabularies: logits to probabilities, the excess (p - q)+, a draw, an exponential race.
//
// Five numbers (`Distribution`) determine every token's probability. Rows of probabilities are written only where all of
// them are needed. Sums go over chunks of fixed size, in order, so results do not depend on the number of threads or on
// the other rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "entry.hpp"
#include "exponential.hpp"
#include "maximum.hpp"
#include "successors.hpp"
#include "vocabulary.hpp"

namespace {

constexpr int64_t CHUNK = 4096;      // tokens of one partial sum
constexpr int64_t ALONE = 1 << 15;   // up to this many numbers one thread is faster than two
constexpr int64_t GROUP = 32;        // tokens whose maximum is compared first where few are kept

// Parameters of a SamplingLaw. floor: log of min_p; top_k: 0 for all; top_p: 1 for all.
struct FilterSpec {
    float inverse, floor;
    int32_t top_k;
    float top_p;
};

// p(v) = exp((x_v - top) inverse) / mass where x_v > lowest, or x_v = lowest and v <= last; else 0.
struct Distribution {
    float top, inverse, lowest, over;  // over: 1 / mass
    int32_t last;
};

struct Entry {
    float x;
    int32_t id;
};

inline int64_t chunks(int64_t n) { return (n + CHUNK - 1) / CHUNK; }
inline int sharing(int64_t numbers, int threads) { return numbers < ALONE ? 1 : threads; }

inline Floats power(Floats x, const Distribution& dist) { return exponential((x - floats(dist.top)) * floats(dist.inverse)); }

// Probabilities of sixteen tokens from id `at` on.
inline Floats chances(Floats x, int64_t at, const Distribution& dist) {
    static constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats lowest = floats(dist.lowest);
    const Ints ids = add_ints(ints((int)at), load_ints(numbers));
    Mask kept = either(greater(x, lowest), both(equal(x, lowest), less_or_equal(ids, ints(dist.last))));
    if (std::isnan(dist.over)) kept = all_lanes();  // a row without a distribution is NaN everywhere
    return keep(kept, power(x, dist) * floats(dist.over));
}

// First pass over a chunk: its largest entry (NaN if any entry is), and the sum of exponentials relative to it.
struct Look {
    float top;
    double sum;
};

// groups: null, or receives the maximum of every GROUP tokens, [chunk / GROUP].
Look look(const float* x, int64_t n, float inverse, bool sum, float* groups) {
    Maximum maximum;
    for (int64_t from = 0; from < n; from += GROUP * LANES) {
        Floats largest = floats(-INFINITY);
        for (int64_t i = from; i < std::min(n, from + GROUP * LANES); i += LANES) {
            const Floats v = load_first(x + i, n - i, -INFINITY);
            maximum.add(v);
            largest = largest_of(largest, v);
        }
        if (groups) store(groups + from / GROUP, largest);
    }
    const Distribution own{maximum.value(), inverse, 0.0f, 0.0f, 0};
    if (!sum || !std::isfinite(own.top)) return {own.top, 0.0};
    Floats all = floats(0.0f);
    for (int64_t i = 0; i < n; i += LANES) all = all + power(load_first(x + i, n - i, -INFINITY), own);
    return {own.top, sum_of(all)};
}

// Sum of the exponentials of a chunk that are not under the floor. `lowest` becomes the smallest x among them.
double summed(const float* x, int64_t n, const Distribution& dist, float floor, float& lowest) {
    Floats sum = floats(0.0f), low = floats(INFINITY);
    for (int64_t i = 0; i < n; i += LANES) {
        const Floats v = load_first(x + i, n - i, -INFINITY);
        const Floats y = (v - floats(dist.top)) * floats(dist.inverse);
        const Mask kept = greater_or_equal(y, floats(floor));
        sum = sum + keep(kept, exponential(y));
        low = select(kept, smallest_of(low, v), low);
    }
    lowest = std::min(lowest, smallest_lane(low));
    return sum_of(sum);
}

// A row, and the maximum of each GROUP of its tokens: lane l of GROUP vectors, sixteen groups side by side.
struct Row {
    const float* x;
    int64_t n;
    const float* groups;
    int64_t group_count() const { return (n + GROUP * LANES - 1) / (GROUP * LANES) * LANES; }
};

// Collects the entries of a row that are not under `bound`, in rising order of ids.
void collect(const Row& row, float bound, std::vector<Entry>& entries) {
    entries.clear();
    const Floats b = floats(bound);
    for (int64_t from = 0; from < row.n; from += GROUP * LANES) {
        if (!bits(greater_or_equal(load(row.groups + from / GROUP), b))) continue;
        for (int64_t i = from; i < std::min(row.n, from + GROUP * LANES); i += LANES) {
            const Mask kept = greater_or_equal(load_first(row.x + i, row.n - i, 0.0f), b);
            for (unsigned hit = bits(kept) & bits(first_lanes(row.n - i)); hit; hit &= hit - 1)
                entries.push_back({row.x[i + __builtin_ctz(hit)], (int32_t)(i + __builtin_ctz(hit))});
        }
    }
}

float kth(std::vector<float>& values, int64_t k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[k - 1];
}

// Returns the k-th largest entry of a row. At least k entries, and few others, reach the k-th largest group maximum.
float kth_of_row(const Row& row, int64_t k, std::vector<Entry>& entries) {
    std::vector<float> values(row.groups, row.groups + row.group_count());
    collect(row, k <= row.group_count() ? kth(values, k) : -INFINITY, entries);
    values.clear();
    for (const Entry& e : entries) values.push_back(e.x);
    return kth(values, k);
}

float power_of(float x, const Distribution& dist) { return first_lane(power(floats(x), dist)); }

// Selects the nucleus: the most probable entries preceded by less than top_p of `total`, lowest ids first on ties.
// Returns whether `entries`, the head of the row, contains all of it.
bool nucleus(std::vector<Entry>& entries, double total, float top_p, bool whole, Distribution& dist) {
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); });
    const float over = (float)(1.0 / total);
    double before = 0.0, mass = 0.0;
    size_t count = 0;
    for (; count < entries.size(); count++) {
        const float e = power_of(entries[count].x, dist), p = e * over;
        if (count && (float)(before + p) - p >= top_p) break;
        before += p, mass += e;
        dist.lowest = entries[count].x, dist.last = entries[count].id;
    }
    dist.over = (float)(1.0 / mass);
    return count < entries.size() || whole;
}

// Applies top_k and top_p to a row whose top is known. total: mass of the entries that min_p keeps, whose smallest is
// dist.lowest.
void narrow(const Row& row, const FilterSpec& f, double total, Distribution& dist) {
    static thread_local std::vector<Entry> entries;
    const bool few = f.top_k > 0 && f.top_k < row.n;
    if (few) {
        const float smallest = kth_of_row(row, f.top_k, entries);
        auto outside = [&](const Entry& e) { return e.x < smallest || (e.x - dist.top) * f.inverse < f.floor; };
        entries.erase(std::remove_if(entries.begin(), entries.end(), outside), entries.end());
        total = 0.0, dist.lowest = INFINITY;
        for (const Entry& e : entries) total += power_of(e.x, dist), dist.lowest = std::min(dist.lowest, e.x);
        dist.over = (float)(1.0 / total);
    }
    if (f.top_p >= 1.0f) return;
    if (few) {
        nucleus(entries, total, f.top_p, true, dist);
        return;
    }
    const float lowest = dist.lowest;
    for (double floor : {1e-3, 1e-5, (1.0 - f.top_p) / (double)row.n, 0.0}) {
        const float bound = floor > 0.0 ? dist.top + (float)std::log(floor * total) / f.inverse : -INFINITY;
        collect(row, std::max(bound, lowest), entries);
        if (nucleus(entries, total, f.top_p, bound <= lowest, dist)) return;
    }
}

// Sum of a chunk of weights, float64.
template <class T>
double weigh(const T* w, int64_t n) {
    constexpr int SUMS = 8;  // elements i, i + 8, ... are added together
    double sums[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (int lane = 0; lane < SUMS; lane++) sums[lane] += (double)w[i + lane];
    double tail = 0.0;
    for (; i < n; i++) tail += w[i];
    for (int width = SUMS / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    return sums[0] + tail;
}

// Returns the token at fraction `u` of the total weight, -1 where the weight is 0. `total` receives the total weight.
template <class T>
int64_t drawn(const T* w, int64_t n, double u, double& total, int threads) {
    std::vector<double> sums(chunks(n));
    in_parallel_each(sharing(n, threads), chunks(n), 1, [&](int64_t c) {
        sums[c] = weigh(w + c * CHUNK, std::min(CHUNK, n - c * CHUNK));
    });
    total = 0.0;
    for (double sum : sums) total += sum;
    if (!(total > 0.0) || total == INFINITY) return -1;
    const double point = u * total;
    double before = 0.0;
    int64_t c = 0, last = -1;
    for (; c < (int64_t)sums.size(); c++) {
        if (sums[c] > 0.0) last = c;
        if (before + sums[c] > point) break;
        before += sums[c];
    }
    // Rounding can put the point past the end of the row or of a chunk: its last token with any mass is then right.
    const int64_t from = last * CHUNK, to = std::min(n, from + CHUNK);
    if (c == (int64_t)sums.size()) before = -INFINITY;
    int64_t chosen = -1;
    for (int64_t i = from; i < to; i++) {
        if (w[i] > 0) chosen = i;
        before += w[i];
        if (before > point) break;
    }
    return chosen;
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

template <class T>
Best raced(const T* w, int64_t from, int64_t to, uint64_t key) {
    Best best;
    Words counter = {};
    for (int lane = 0; lane < WIDE; lane++) counter[lane] = lane + 1;
    counter = (counter + (uint64_t)from) * GOLDEN + key;
    for (int64_t i = from; i < to; i += WIDE, counter += WIDE * GOLDEN) {
        const Doubles weights = load_wide(w + i, to - i);
        // No exponential is under 2^-53: tokens that cannot win with that one are skipped.
        if (!bits_of((Lanes)(weights > best.score * 0x1p-53))) continue;
        Words z = counter;
        z = (z ^ z >> 30) * FIRST;
        z = (z ^ z >> 27) * SECOND;
        z = (z ^ z >> 31) >> 12;
        const Doubles whole = (Doubles)(z | 0x4330000000000000) - 0x1p52;  // z, which is below 2^52
        const Doubles u = (whole + 0.5) * 0x1p-52;
        // -log u >= 1 - u, so a score is at most weight / (1 - u), plus a margin for rounding.
        const Doubles bound = (1.0 - u) * (best.score * (1.0 - 1e-12));
        unsigned hit = bits_of((Lanes)(weights >= bound)) & bits_of((Lanes)(weights > 0.0));
        for (; hit; hit &= hit - 1) {
            const int lane = __builtin_ctz(hit);
            const double next = (double)w[i + lane] / -std::log(u[lane]);
            if (next > best.score) best = {next, i + lane};
        }
    }
    return best;
}

template <class T>
int64_t winner(const T* w, int64_t n, uint64_t key, int threads) {
    const int64_t width = n < ALONE ? n : CHUNK * 8;  // long runs, so that the best score so far excludes most tokens
    const int64_t runs = (n + width - 1) / width;
    std::vector<Best> results(runs);
    in_parallel_each(sharing(n, threads), runs, 1, [&](int64_t c) {
        results[c] = raced(w, c * width, std::min(n, (c + 1) * width), key);
    });
    Best best;
    for (const Best& each : results)
        if (each.score > best.score) best = each;
    return best.id;
}

// Computes the distributions of `rows` rows of logits [n], which are `stride` numbers apart.
void find_distributions(const float* logits, int64_t stride, int64_t rows, int64_t n, const FilterSpec& f,
                        Distribution* distributions, int threads) {
    const int64_t each = chunks(n), items = rows * each, groups = CHUNK / GROUP;
    const bool few = f.top_k > 0 && f.top_k < n, floored = f.floor > -INFINITY && !few;
    const bool narrowed = few || f.top_p < 1.0f;
    std::vector<Look> looks(items);
    std::vector<float> lowest(floored ? items : 0), tops(narrowed ? items * groups : 0);
    const int team = sharing(rows * n, threads);
    auto chunk = [&](int64_t i) { return logits + i / each * stride + i % each * CHUNK; };
    auto length = [&](int64_t i) { return std::min(CHUNK, n - i % each * CHUNK); };
    in_parallel(team, [&](Member& member) {
        member.each(items, 1, [&](int64_t i) {
            looks[i] = look(chunk(i), length(i), f.inverse, !few && !floored, narrowed ? &tops[i * groups] : nullptr);
        });
        member.each(rows, 1, [&](int64_t r) {
            float top = -INFINITY;
            for (int64_t i = r * each; i < (r + 1) * each; i++) top = top >= looks[i].top ? top : looks[i].top;
            for (int64_t i = r * each; i < (r + 1) * each; i++) top = std::isnan(looks[i].top) ? NAN : top;
            distributions[r] = {top, f.inverse, -INFINITY, std::isfinite(top) ? 0.0f : NAN, INT32_MAX};
        });
        if (floored)
            member.each(items, 1, [&](int64_t i) {
                lowest[i] = INFINITY;
                looks[i].sum = summed(chunk(i), length(i), distributions[i / each], f.floor, lowest[i]);
            });
        member.each(rows, 1, [&](int64_t r) {
            Distribution& dist = distributions[r];
            if (std::isnan(dist.over)) return;
            double total = 0.0;
            if (floored) dist.lowest = *std::min_element(&lowest[r * each], &lowest[r * each] + each);
            for (int64_t i = r * each; i < (r + 1) * each; i++)
                total += looks[i].sum * (floored ? 1.0 : std::exp(((double)looks[i].top - dist.top) * dist.inverse));
            dist.over = (float)(1.0 / total);
            if (narrowed) narrow({logits + r * stride, n, &tops[r * each * groups]}, f, total, dist);
        });
    });
}

// Computes all probabilities of each row. out: [rows][n].
void write_rows(const float* logits, int64_t stride, int64_t rows, int64_t n, const Distribution* distributions, float* out,
                int threads) {
    const int64_t each = chunks(n), items = rows * each;
    in_parallel_each(sharing(rows * n, threads), items, 1, [&](int64_t i) {
        const int64_t row = i / each, from = i % each * CHUNK, to = std::min(n, from + CHUNK);
        const float* x = logits + row * stride;
        for (int64_t v = from; v < to; v += LANES) {
            const Floats values = chances(load_first(x + v, to - v, 0.0f), v, distributions[row]);
            store_first(out + row * n + v, to - v, values);
        }
    });
}

// Refuses rows of logits or weights that cannot be. All rows may be the same one, 0 apart.
void check_rows(int64_t stride, int64_t rows, int64_t n) {
    if (n < 1 || n > INT32_MAX) refuse("rows of %lld tokens; at least one is expected, and at most 2^31 - 1", (long long)n);
    if (rows < 0 || (rows > 1 && stride != 0 && stride < n)) refuse("%lld rows of %lld tokens, %lld apart", (long long)rows, (long long)n, (long long)stride);
}

void check_fraction(double u) {
    if (!(u >= 0.0 && u <= 1.0)) refuse("the fraction %g of a total; it must be from 0 to 1", u);
}

}  // namespace

extern "C" {

// Returns the layout of the structures that Python mirrors.
const LayoutField* foretoken_layout() {
    static const LayoutField fields[] = {
        LAYOUT(FilterSpec, inverse, floor, top_k, top_p)
        LAYOUT(Distribution, top, inverse, lowest, over, last)
        LAYOUT(SuccessorTable, successors, hits, vocab, width)
        LAYOUT(Adjustment, allowed, banned, ends, biased, biases, seen, generated, banned_count, end_count, biased_count, seen_count,
               repetition, frequency, presence)
        {},
    };
    return fields;
}

// Computes the distributions of `rows` rows of logits [n], which are `stride` numbers apart.
int32_t foretoken_distributions(const float* logits, int64_t stride, int64_t rows, int64_t n, const FilterSpec* f,
                                Distribution* distributions, int threads) {
    return guarded([&] {
        check_rows(stride, rows, n);
        find_distributions(logits, stride, rows, n, *f, distributions, threads);
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

// Writes the token at fraction `u` of the weights, -1 where nothing can be drawn, and their sum.
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

// Writes the logarithm of the sum of exponentials of x [n], and how many numbers exceed x[token].
int32_t foretoken_log_sum(const float* x, int64_t n, int64_t token, double* sum, int64_t* larger) {
    return guarded([&] {
        check_rows(n, 1, n);
        if (token < 0 || token >= n) refuse("token %lld is outside the vocabulary of %lld tokens", (long long)token, (long long)n);
        *sum = log_sum(x, n, token, *larger);
    }, "the probability of a token");
}

// Writes the heaviest tree of successors below a token; see successors.hpp. Arrays have room for `budget` nodes.
int32_t foretoken_heaviest_tree(const SuccessorTable* table, double trials, int64_t root, int64_t budget, int64_t max_depth,
                                int64_t* tokens, int64_t* parents, double* weights, int64_t* count) {
    return guarded([&] {
        *count = heaviest_tree(*table, trials, root, budget, max_depth, tokens, parents, weights);
    }, "a tree of %lld tokens", (long long)budget);
}

// Draws a token from the distribution of logits [n], which `row` receives; -1 where no token is possible. noise: the key of a
// race, or a number u.
int32_t foretoken_choose(const float* logits, int64_t n, const FilterSpec* f, int races, const void* noise, float* row,
                         int64_t* token, int threads) {
    return guarded([&] {
        check_rows(n, 1, n);
        Distribution dist;
        *token = -1;
        // Three short loops: two threads take as long as one at 49,152 tokens, and longer beside other programs.
        if (n <= 1 << 16) threads = 1;
        find_distributions(logits, n, 1, n, *f, &dist, threads);
        if (std::isnan(dist.over)) return;
        write_rows(logits, n, 1, n, &dist, row, threads);
        if (races) {
            *token = winner(row, n, *(const uint64_t*)noise, threads);
            return;
        }
        double total, u = *(const double*)noise;
        check_fraction(u);
        *token = drawn(row, n, u, total, threads);
    }, "a draw of %lld tokens", (long long)n);
}

}  // extern "C"

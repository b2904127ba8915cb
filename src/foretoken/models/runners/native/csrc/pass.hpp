// A forward pass of a Llama-like decoder: one parallel region with barriers between its phases.
//
// The residual stream is float32; inputs of products are rounded to the kind of the weights.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "attention.hpp"
#include "last.hpp"

constexpr int REPEATED_ROWS = 4;  // up to this many rows are prepared by every thread for itself, which saves a barrier

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Aligned memory that only grows. It is zeroed, because padding must be zero.
struct Buffer {
    char* data = nullptr;
    size_t size = 0;
    template <class T>
    T* room(int64_t count) {
        size_t need = padded(count * sizeof(T), 64);
        if (need > size) {
            std::free(data);
            size = need + need / 2 / 64 * 64;
            data = (char*)std::aligned_alloc(64, size);
            if (!data) throw std::bad_alloc();
            std::memset(data, 0, size);
        }
        return (T*)data;
    }
    ~Buffer() { std::free(data); }
};

// A product's input: rows of words with a fixed stride, and the scale of each row.
struct Input {
    Word* words;
    float* scales;
    int64_t stride;
};

// Buffers of one model, reused by its passes.
struct Workspace {
    Buffer hidden, embedded, branch, qkv, queries, mixed, inner, scales, normed, attended, activated;
    std::vector<Buffer> own_words, own_scores;
    Answered answered;
};

template <Kind kind, Kind kv>
struct Pass {
    const ModelSpec& m;
    BatchSpec b;  // from the last layer's attention on, only the rows with logits
    const BatchSpec& answered;
    const int thread, threads;
    const PageLayout layout{m, kv};
    const int64_t width, qkv_width, inner_width;
    float *hidden, *embedded, *branch, *qkv, *mixed, *inner, *scores;
    Word *queries, *own;
    Input normed, attended, activated;

    static int64_t score_length(const BatchSpec& b) { return padded(b.reach, PAGE) + LANES; }

    Pass(const ModelSpec& m, const BatchSpec& b, Workspace& w, int thread, int threads)
        : m(m), b(b), answered(w.answered.batch), thread(thread), threads(threads), width(padded(m.hidden, 32)),
          qkv_width(padded((m.heads + 2 * m.kv_heads) * m.head_dim, 32)), inner_width(padded(m.inner, 16)) {
        hidden = (float*)w.hidden.data, embedded = m.joined ? (float*)w.embedded.data : hidden;
        branch = (float*)w.branch.data, qkv = (float*)w.qkv.data;
        mixed = (float*)w.mixed.data, inner = (float*)w.inner.data, queries = (Word*)w.queries.data;
        own = (Word*)w.own_words[thread].data, scores = (float*)w.own_scores[thread].data;
        float* scales = (float*)w.scales.data;
        normed = {(Word*)w.normed.data, scales, m.layers[0].qkv.steps};
        attended = {(Word*)w.attended.data, scales + b.rows, m.layers[0].out.steps};
        activated = {(Word*)w.activated.data, scales + 2 * b.rows, m.layers[0].down.steps};
    }

    // Allocates the memory of a pass, before its threads start.
    static void reserve(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
        const int64_t rows = b.rows, width = padded(m.hidden, 32), heads = m.heads * m.head_dim;
        w.answered.plan(m, b);
        w.hidden.room<float>(rows * width);
        if (m.joined) w.embedded.room<float>(rows * width);
        w.branch.room<float>(rows * width);
        w.qkv.room<float>(rows * padded((m.heads + 2 * m.kv_heads) * m.head_dim, 32));
        w.queries.room<Word>(rows * heads / per_word(kv));
        w.scales.room<float>(3 * rows);
        w.normed.room<Word>(rows * m.layers[0].qkv.steps);
        w.attended.room<Word>(rows * m.layers[0].out.steps);
        w.activated.room<Word>(rows * m.layers[0].down.steps);
        if (kind == INT8) {
            w.mixed.room<float>(rows * heads);
            w.inner.room<float>(rows * padded(m.inner, 16));
        }
        if ((int)w.own_words.size() < threads) w.own_words.resize(threads), w.own_scores.resize(threads);
        const int64_t widest = std::max({m.layers[0].qkv.steps, m.layers[0].out.steps, m.layers[0].down.steps});
        for (int t = 0; t < threads; t++) {
            w.own_words[t].room<Word>(3 * REPEATED_ROWS * (widest + LANES) + (m.joined ? 2 : 1) * width);
            w.own_scores[t].room<float>(TILE_QUERIES * (score_length(b) + 2 * m.head_dim));
        }
    }

    static void barrier() {
#pragma omp barrier
    }

    // Prepares the rows of a product's input: few rows completely in each thread, or a share of many rows per thread.
    // `slot` separates the zero padding of inputs of different widths.
    template <class Fill>
    Input prepare(Input shared, int slot, int rows, Fill fill) {
        if (rows > REPEATED_ROWS) {
            Share share(rows, thread, threads);
            for (int64_t r = share.first; r < share.last; r++)
                shared.scales[r] = fill(r, shared.words + r * shared.stride);
            barrier();
            return shared;
        }
        const int64_t widest = std::max({normed.stride, attended.stride, activated.stride}) + LANES;
        Word* words = own + slot * REPEATED_ROWS * widest;
        Input mine{words, (float*)(words + REPEATED_ROWS * (widest - LANES)), shared.stride};
        for (int r = 0; r < rows; r++) mine.scales[r] = fill(r, mine.words + r * mine.stride);
        return mine;
    }

    // out = x / rms(x) * weight (1910.07467), over `count` elements; out = x without a weight
    void normalise(const float* x, const float* weight, int64_t count, float* out) const {
        if (!weight) {
            if (out != x) std::memcpy(out, x, sizeof(float) * count);
            return;
        }
        __m512 sum = _mm512_setzero_ps();
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            __m512 v = _mm512_loadu_ps(x + i);
            sum = _mm512_fmadd_ps(v, v, sum);
        }
        float total = _mm512_reduce_add_ps(sum);
        for (int64_t j = i; j < count; j++) total += x[j] * x[j];
        const float factor = 1.0f / std::sqrt(total / (float)count + m.eps);
        for (i = 0; i + LANES <= count; i += LANES)
            _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)),
                                                    _mm512_loadu_ps(weight + i)));
        for (; i < count; i++) out[i] = x[i] * factor * weight[i];
    }

    float normalise_row(const float* x, const float* weight, Word* words) {
        float* row = own_row();
        normalise(x, weight, m.hidden, row);
        return encode<kind>(row, padded(m.hidden, LANES), words);
    }

    // The input of the first attention of an EAGLE-3 head: embedding and features, concatenated.
    float join_row(int64_t r, const float* weight, Word* words) {
        float* row = own_row();
        normalise(embedded + r * width, weight, m.hidden, row);
        normalise(hidden + r * width, m.norm_first ? nullptr : m.feature_norm, m.hidden, row + m.hidden);
        return encode<kind>(row, 2 * m.hidden, words);
    }

    float* own_row() const {
        return (float*)(own + 3 * REPEATED_ROWS * (std::max({normed.stride, attended.stride, activated.stride}) + LANES));
    }

    // Starts the residual stream: from embeddings, or from the caller's features.
    void begin() {
        if (!b.features || m.joined) embed();
        if (!b.features) return;
        Share share(b.rows, thread, threads);
        for (int64_t r = share.first; r < share.last; r++)
            normalise(b.features + r * m.hidden, m.norm_first ? m.feature_norm : nullptr, m.hidden, hidden + r * width);
    }

    void embed() {
        Share share(b.rows, thread, threads);
        const __m512 scale = _mm512_set1_ps(m.embedding_scale);
        for (int64_t r = share.first; r < share.last; r++) {
            const Word* row = m.embedding ? m.embedding + b.tokens[r] * (width / per_word(kv)) : unpack(b.tokens[r]);
            for (int64_t i = 0; i < width; i += LANES)
                _mm512_storeu_ps(embedded + r * width + i, _mm512_mul_ps(get<kv>(row, i), scale));
        }
    }

    // Unpacks a row of the head, for a tied embedding, which is then stored once.
    const Word* unpack(int token) {
        const Word* lane = m.head.data + token / LANES * m.head.steps * LANES + token % LANES;
        for (int64_t k = 0; k < width / per_word(kv); k++) own[k] = k < m.head.steps ? lane[k * LANES] : 0;
        return own;
    }

    // Adds a product to the residual stream, after a norm if the architecture has one.
    void residual(const Matrix& w, Input x, const float* norm) {
        float* to = norm ? branch : hidden;
        product<kind>(w, x.words, x.stride, x.scales, b.rows, thread, threads,
                      [&](int row, int64_t unit, __m512 low, __m512 high) {
                          float* at = to + row * width + unit * BLOCKS * LANES;
                          if (!norm) {
                              low = _mm512_add_ps(low, _mm512_loadu_ps(at));
                              high = _mm512_add_ps(high, _mm512_loadu_ps(at + LANES));
                          }
                          _mm512_storeu_ps(at, low);
                          _mm512_storeu_ps(at + LANES, high);
                      });
        barrier();
        if (!norm) return;
        Share share(b.rows, thread, threads);
        for (int64_t r = share.first; r < share.last; r++) {
            normalise(branch + r * width, norm, m.hidden, branch + r * width);
            for (int64_t i = 0; i < m.hidden; i++) hidden[r * width + i] += branch[r * width + i];
        }
        barrier();
    }

    // In place: the norm of each head (Qwen3, Gemma 3), then the rotary embedding (RoFormer, 2104.09864).
    void turn(float* head, const float* norm, int rope, int position) const {
        if (norm) normalise(head, norm, m.head_dim, head);
        if (rope < 0) return;
        const float *cosines = m.ropes[rope] + (int64_t)position * 2 * m.half, *sines = cosines + m.half;
        for (int i = 0; i < m.half; i++) {
            const float a = head[i], c = head[i + m.half];
            head[i] = a * cosines[i] - c * sines[i];
            head[i + m.half] = c * cosines[i] + a * sines[i];
        }
    }

    int sequence_of(int row) const {
        return int(std::upper_bound(b.sequence_from, b.sequence_from + b.sequences + 1, row) - b.sequence_from) - 1;
    }

    // Converts queries to words, and writes keys and values to the cache.
    void spread(int number) {
        const LayerSpec& layer = m.layers[number];
        const int per_row = m.heads + 2 * m.kv_heads;
        Share share((int64_t)b.rows * per_row, thread, threads);
        alignas(64) Word words[512];
        for (int64_t item = share.first; item < share.last; item++) {
            const int row = int(item / per_row), head = int(item % per_row), kv_head = head - m.heads;
            float* x = qkv + row * qkv_width + head * m.head_dim;
            if (kv_head < 0) {
                turn(x, layer.q_norm, layer.rope, b.positions[row]);
                encode<kv>(x, m.head_dim, queries + ((int64_t)row * m.heads + head) * layout.key_words);
                continue;
            }
            Word* const* pages = b.pages[sequence_of(row)];
            const int place = b.places[row];
            if (kv_head >= m.kv_heads) {
                // A masked key has weight 0, and 0 times infinity is NaN.
                for (int i = 0; i < m.head_dim; i += LANES) _mm512_storeu_ps(x + i, finite(_mm512_loadu_ps(x + i)));
                encode<kv>(x, m.head_dim, layout.value(pages, number, kv_head - m.kv_heads, place));
                continue;
            }
            turn(x, layer.k_norm, layer.rope, b.positions[row]);
            encode<kv>(x, m.head_dim, words);
            Word* lane = layout.keys(pages, number, kv_head, place / LANES) + place % LANES;
            for (int64_t k = 0; k < layout.key_words; k++) lane[k * LANES] = words[k];
        }
        barrier();
    }

    // Removes the rows without logits; the others move up, in order.
    void leave() {
        if (thread == 0)
            for (int i = 0; i < answered.rows; i++) {
                const int row = b.outputs[i];
                if (row == i) continue;
                std::memcpy(hidden + i * width, hidden + row * width, sizeof(float) * width);
                const int64_t words = (int64_t)m.heads * layout.key_words;
                std::memcpy(queries + i * words, queries + row * words, sizeof(Word) * words);
            }
        b = answered;
        barrier();
    }

    void attend(int number) {
        const int group = m.heads / m.kv_heads, tile = std::max(1, TILE_QUERIES / group);
        float* mixed = scores + TILE_QUERIES * score_length(b);
        Word* own_queries = (Word*)(mixed + TILE_QUERIES * m.head_dim);
        Attention<kv> attention{m, b, layout, queries, own_queries, scores, mixed, score_length(b)};
        int64_t item = 0;
        for (int s = 0; s < b.sequences; s++)
            for (int first = b.sequence_from[s]; first < b.sequence_from[s + 1]; first += tile)
                for (int head = 0; head < m.kv_heads; head++, item++)
                    if (item % threads == thread)
                        attention.run(s, number, head, first, std::min(first + tile, b.sequence_from[s + 1]),
                                      [&](int row, int at, const float* values) { keep(row, at, values); });
        barrier();
    }

    void keep(int row, int head, const float* values) {
        for (int i = 0; i < m.head_dim; i += LANES) {
            __m512 v = _mm512_loadu_ps(values + i);
            if constexpr (kind == INT8)
                _mm512_storeu_ps(mixed + ((int64_t)row * m.heads + head) * m.head_dim + i, v);
            else
                put<kind>(attended.words + row * attended.stride, head * m.head_dim + i, v);
        }
    }

    Input attention_input() {
        if constexpr (kind != INT8) return attended;
        const int64_t count = m.heads * m.head_dim;
        return prepare(attended, 1, b.rows, [&](int64_t r, Word* words) { return encode<kind>(mixed + r * count, count, words); });
    }

    // silu(gate) * up; gate and up are the two halves of a unit
    Input gate(const Matrix& w, Input x) {
        product<kind>(w, x.words, x.stride, x.scales, b.rows, thread, threads,
                      [&](int row, int64_t unit, __m512 gate, __m512 up) {
                          __m512 v = _mm512_mul_ps(m.gelu ? gelu(gate) : silu(gate), up);
                          if constexpr (kind == INT8)
                              _mm512_storeu_ps(inner + row * inner_width + unit * LANES, v);
                          else
                              put<kind>(activated.words + row * activated.stride, unit * LANES, v);
                      });
        barrier();
        if constexpr (kind != INT8) return activated;
        return prepare(activated, 2, b.rows,
                       [&](int64_t r, Word* words) { return encode<kind>(inner + r * inner_width, inner_width, words); });
    }

    void tap(int number) {
        for (int t = 0; t < b.tap_count; t++) {
            if (b.tap_layers[t] != number) continue;
            Share share(b.rows, thread, threads);
            for (int64_t i = share.first; i < share.last; i++) {
                const float* row = hidden + i * width;
                float* to = b.taps[t] + i * m.hidden;
                if (number == m.layer_count) normalise(row, m.norm, m.hidden, to);
                else std::memcpy(to, row, sizeof(float) * m.hidden);
            }
        }
    }

    void head() {
        Input x = prepare(normed, 0, b.output_count, [&](int64_t i, Word* words) {
            return normalise_row(hidden + b.outputs[i] * width, m.norm, words);
        });
        const int64_t stride = m.head.units * BLOCKS * LANES;
        const __m512 cap = _mm512_set1_ps(m.logit_cap);
        product<kind>(m.head, x.words, x.stride, x.scales, b.output_count, thread, threads,
                      [&](int row, int64_t unit, __m512 low, __m512 high) {
                          float* at = b.logits + row * stride + unit * BLOCKS * LANES;
                          if (m.logit_cap != 0.0f) {
                              low = _mm512_mul_ps(cap, hyperbolic_tangent(_mm512_div_ps(low, cap)));
                              high = _mm512_mul_ps(cap, hyperbolic_tangent(_mm512_div_ps(high, cap)));
                          }
                          _mm512_storeu_ps(at, low);
                          _mm512_storeu_ps(at + LANES, high);
                      });
    }

    void run() {
        begin();
        barrier();
        for (int number = 0; number < m.layer_count; number++) {
            const LayerSpec& layer = m.layers[number];
            tap(number);
            Input x = prepare(normed, 0, b.rows, [&](int64_t r, Word* words) {
                return m.joined && number == 0 ? join_row(r, layer.norm, words)
                                               : normalise_row(hidden + r * width, layer.norm, words);
            });
            product<kind>(layer.qkv, x.words, x.stride, x.scales, b.rows, thread, threads,
                          [&](int row, int64_t unit, __m512 low, __m512 high) {
                              float* at = qkv + row * qkv_width + unit * BLOCKS * LANES;
                              _mm512_storeu_ps(at, low);
                              _mm512_storeu_ps(at + LANES, high);
                          });
            barrier();
            spread(number);
            if (number == m.layer_count - 1 && answered.rows < b.rows) leave();
            if (!b.rows) break;
            attend(number);
            residual(layer.out, attention_input(), layer.after_attention);
            x = prepare(normed, 0, b.rows, [&](int64_t r, Word* words) {
                return normalise_row(hidden + r * width, layer.mlp_norm, words);
            });
            residual(layer.down, gate(layer.gate_up, x), layer.after_mlp);
        }
        tap(m.layer_count);
        tap(m.layer_count + 1);
        if (b.logits) head();
        release_tiles();
    }
};

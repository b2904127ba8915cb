// The library's functions for Python, for one kind of cache. build.py links them with library.cpp and kinds of weights.
#include "chains.hpp"

namespace {

constexpr Kind CACHE = (Kind)FORETOKEN_KV;

// Gives the tile registers back where a thread's part ends.
struct ReleasedTiles {
    ~ReleasedTiles() { release_tiles(); }
};

// Runs one pass. Returns false if memory is short.
bool pass(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
    try {
        Pass<CACHE>::reserve(m, b, w, threads);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return in_parallel(threads, [&](Member& member) {
        const ReleasedTiles released;
        Pass<CACHE>(m, b, w, member).run();
    });
}

}  // namespace

// The functions' names end with the kind of cache, so that one library may have several.
#define JOINED(name, kind) name##_##kind
#define WITH_KIND(name, kind) JOINED(name, kind)
#define OF_CACHE(name) WITH_KIND(name, FORETOKEN_KV)

extern "C" {

void* OF_CACHE(foretoken_open)() { return new Workspace(); }

void OF_CACHE(foretoken_close)(void* workspace) { delete (Workspace*)workspace; }

// Runs one pass. Returns 0, or 1 if memory is short.
int OF_CACHE(foretoken_run)(const ModelSpec* m, const BatchSpec* b, void* workspace, int threads) {
    return pass(*m, *b, *(Workspace*)workspace, threads) ? 0 : 1;
}

// Runs the pass `b` over pending tokens, and the passes of the chains behind them. Returns 0, or 1 if memory is short.
int OF_CACHE(foretoken_chains)(const ModelSpec* m, const BatchSpec* b, const ChainSpec* chains, void* workspace, int threads) {
    auto run = [&](const BatchSpec& level) { return pass(*m, level, *(Workspace*)workspace, threads); };
    try {
        return Chains(*m, *b, *chains, threads).run(run) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// Writes the keys and values of an encoder's states [rows][hidden] to the pages of a source, for all layers. Returns 0, or 1
// if memory is short.
int OF_CACHE(foretoken_remember)(const ModelSpec* m, const float* states, int rows, Word* const* pages, void* workspace, int threads) {
    Workspace& w = *(Workspace*)workspace;
    BatchSpec b{};
    const int32_t sequence_from[] = {0};
    b.rows = rows, b.sequence_from = sequence_from;
    try {
        Pass<CACHE>::reserve(*m, b, w, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return in_parallel(threads, [&](Member& member) {
        const ReleasedTiles released;
        Pass<CACHE> pass(*m, b, w, member);
        for (int i = 0; i < m->layer_count; i++) pass.cross.remember(m->layers[i].cross, states, pages);
    }) ? 0 : 1;
}

// Copies cache rows `sources` to `destination` onward, in order; every source lies at or after its destination.
void OF_CACHE(foretoken_move)(const ModelSpec* m, Word* const* pages, int destination, const int32_t* sources, int count) {
    for (int number = 0; number < m->layer_count; number++) {
        const AttentionSpec& layer = m->layers[number].attention;
        if (!m->layers[number].attends || layer.shares) continue;
        const PageLayout layout(*m, layer, CACHE);
        for (int head = 0; head < layer.kv_heads; head++)
            for (int i = 0; i < count; i++)
                if (sources[i] != destination + i)
                    CacheRows<CACHE>{layout, layer.head_dim}.move(pages, head, sources[i], destination + i);
    }
}

// Runs all products of a pass and nothing else: a lower bound for the time of a pass.
void OF_CACHE(foretoken_floor)(const ModelSpec* m, void* workspace, int rows, int threads) {
    Workspace& w = *(Workspace*)workspace;
    const Widest widest(*m);
    const Word* words = w.normed.room<Word>(rows * widest.words);
    const float* scales = w.scales.room<float>(rows * widest.scales);
    const Word* arranged = w.arranged.room<Word>(rows * widest.words);
    const auto known = w.experts.active_by_rows.find(rows);
    const std::vector<int32_t>* active = known == w.experts.active_by_rows.end() ? nullptr : &known->second;
    in_parallel(threads, [&](Member& member) {
        const ReleasedTiles released;
        alignas(64) float sink[BLOCKS * LANES];
        auto all = [&](const Matrix& p) {
            Input x{(Word*)words, (float*)scales, input_stride(p), p.scale_words()};
            if (arranges(p, rows)) x.arranged = arranged;
            Loop units = member.begin(p.units, units_at_once(p, rows, member.threads));
            functions(p).rows(p, x, rows, units, {sink, 0, false, 1.0f, 0.0f, 0});
            member.end(units);
        };
        if (m->layer_inputs.width) all(m->layer_inputs.projection);
        for (int i = 0; i < m->layer_count; i++) {
            each_common_matrix(m->layers[i], all);
            if (m->layers[i].mlp == EXPERTS)
                ExpertMlp<CACHE>::floor(m->layers[i].experts, active, i, member, rows, {(Word*)words, (float*)scales, 0, 0});
        }
        all(m->head);
    });
}

}  // extern "C"

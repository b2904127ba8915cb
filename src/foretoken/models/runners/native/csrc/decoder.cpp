// The library's functions for Python, for one kind of cache. build.py links them with library.cpp and kinds of weights.
#include "chains.hpp"

namespace {

constexpr Kind CACHE = (Kind)FORETOKEN_KV;

// Gives the tile registers back where a thread's part ends.
struct ReleasedTiles {
    ~ReleasedTiles() { release_tiles(); }
};

// Runs one pass, whose plan was checked.
void pass(const ModelSpec& m, const BatchSpec& b, Workspace& w, int threads) {
    Pass<CACHE>::reserve(m, b, w, threads);
    in_parallel(threads, [&](Member& member) {
        const ReleasedTiles released;
        Pass<CACHE>(m, b, w, member).run();
    });
}

void check_pages(int rows, int page_count, const char* what) {
    if (rows < 0 || rows > (int64_t)PAGE * page_count) refuse("%d rows of %s in %d pages", rows, what, page_count);
}

// Copies cache rows `sources` to `destination` onward, in order.
void move_rows(const ModelSpec& m, Word* const* pages, int destination, const int32_t* sources, int count) {
    for (int number = 0; number < m.layer_count; number++) {
        const AttentionSpec& layer = m.layers[number].attention;
        if (!m.layers[number].attends || layer.shares) continue;
        const PageLayout layout(m, layer, CACHE);
        for (int head = 0; head < layer.kv_heads; head++)
            for (int i = 0; i < count; i++)
                if (sources[i] != destination + i)
                    CacheRows<CACHE>{layout, layer.head_dim}.move(pages, head, sources[i], destination + i);
    }
}

// Runs all products of a pass and nothing else.
void run_products(const ModelSpec& m, Workspace& w, int rows, int threads) {
    const Widest widest(m);
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
        if (m.layer_inputs.width) all(m.layer_inputs.projection);
        if (m.fused_layers) all(m.fusion);
        for (int i = 0; i < m.layer_count; i++) {
            each_common_matrix(m.layers[i], all);
            if (m.layers[i].mlp == EXPERTS)
                ExpertMlp<CACHE>::floor(m.layers[i].experts, active, i, member, rows, {(Word*)words, (float*)scales, 0, 0});
        }
        all(m.head);
    });
}

}  // namespace

// The functions' names end with the kind of cache, so that one library may have several.
#define JOINED(name, kind) name##_##kind
#define WITH_KIND(name, kind) JOINED(name, kind)
#define OF_CACHE(name) WITH_KIND(name, FORETOKEN_KV)

extern "C" {

// Allocates what the passes of a model share. Refuses a model whose kernels are not linked.
int32_t OF_CACHE(foretoken_open)(const ModelSpec* m, void** workspace) {
    return guarded([&] {
        validate(*m);
        *workspace = new Workspace();
    }, "the passes of a model");
}

void OF_CACHE(foretoken_close)(void* workspace) { delete (Workspace*)workspace; }

// Runs one pass.
int32_t OF_CACHE(foretoken_run)(const ModelSpec* m, const BatchSpec* b, void* workspace, int threads) {
    return guarded([&] {
        PassCheck(*m, *b).run(threads);
        pass(*m, *b, *(Workspace*)workspace, threads);
    }, "a pass of %d rows over %d tokens", b->rows, b->reach);
}

// Checks the plan of a pass and nothing else.
int32_t OF_CACHE(foretoken_check)(const ModelSpec* m, const BatchSpec* b, int threads) {
    return guarded([&] { PassCheck(*m, *b).run(threads); }, "the check of a pass");
}

// Runs the pass `b` over pending tokens, and the passes of the chains behind them.
int32_t OF_CACHE(foretoken_chains)(const ModelSpec* m, const BatchSpec* b, const ChainSpec* chains, void* workspace, int threads) {
    return guarded([&] {
        Chains(*m, *b, *chains, threads).run([&](const ModelSpec& model, const BatchSpec& level, void* other) {
            pass(model, level, *(Workspace*)(other ? other : workspace), threads);
        });
    }, "chains behind a pass of %d rows over %d tokens", b->rows, b->reach);
}

// Writes the keys and values of an encoder's states [rows][hidden] to the pages of a source, for all layers.
int32_t OF_CACHE(foretoken_remember)(const ModelSpec* m, const float* states, int rows, Word* const* pages, int page_count,
                                     void* workspace, int threads) {
    return guarded([&] {
        check_pages(rows, page_count, "a source");
        if (threads < 1) refuse("%d threads; at least one is expected", threads);
        Workspace& w = *(Workspace*)workspace;
        BatchSpec b{};
        const int32_t sequence_from[] = {0};
        b.rows = rows, b.sequence_from = sequence_from;
        Pass<CACHE>::reserve(*m, b, w, threads);
        in_parallel(threads, [&](Member& member) {
            const ReleasedTiles released;
            Pass<CACHE> pass(*m, b, w, member);
            for (int i = 0; i < m->layer_count; i++) pass.cross.remember(m->layers[i].cross, states, pages);
        });
    }, "the keys and values of a source of %d tokens", rows);
}

// Copies cache rows `sources` to `destination` onward, in order; every source lies at or after its destination.
int32_t OF_CACHE(foretoken_move)(const ModelSpec* m, Word* const* pages, int page_count, int destination, const int32_t* sources, int count) {
    return guarded([&] {
        for (int i = 0; i < count; i++)
            if (destination < 0 || sources[i] < destination + i || sources[i] >= (int64_t)PAGE * page_count)
                refuse("cache row %d is moved to row %d, of %d pages", sources[i], destination + i, page_count);
        move_rows(*m, pages, destination, sources, count);
    }, "%d moved rows", count);
}

// Runs all products of a pass and nothing else: a lower bound for the time of a pass.
int32_t OF_CACHE(foretoken_floor)(const ModelSpec* m, void* workspace, int rows, int threads) {
    return guarded([&] {
        if (rows < 1 || threads < 1) refuse("the products of %d rows in %d threads", rows, threads);
        run_products(*m, *(Workspace*)workspace, rows, threads);
    }, "the products of %d rows", rows);
}

}  // extern "C"

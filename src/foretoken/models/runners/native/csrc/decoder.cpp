// The library's functions for Python. build.py compiles them once per machine and pair of kinds.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <omp.h>

#include "pass.hpp"

namespace {

constexpr Kind WEIGHTS = (Kind)FORETOKEN_KIND, CACHE = (Kind)FORETOKEN_KV;  // one pair per library

}  // namespace

extern "C" {

// Returns whether the kernels can run here. Requests the tile registers from the system if they are used.
int foretoken_ready() {
#ifdef __AMX_TILE__
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 1;
#endif
}

void* foretoken_open() { return new Workspace(); }

void foretoken_close(void* workspace) { delete (Workspace*)workspace; }

// Allocates weights and cache pages: zeroed, aligned, in huge pages if the system has them.
void* foretoken_allocate(int64_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
    madvise(data, bytes, MADV_HUGEPAGE);
    return data;
}

void foretoken_free(void* data, int64_t bytes) { munmap(data, bytes); }

// Packs rows [0, rows) of source [rows][words] into blocks first, first + step, ... of a packed matrix with `steps` vectors
// per block. Padding is not written and stays zero.
void foretoken_pack(const Word* source, int64_t rows, int64_t words, Word* packed, int64_t steps, int64_t first,
                    int64_t step, int threads) {
    const int64_t blocks = padded(rows, LANES) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        Word* to = packed + (first + block * step) * steps * LANES;
        const int64_t lanes = std::min<int64_t>(LANES, rows - block * LANES);
        for (int64_t k = 0; k < words; k += LANES)
            for (int64_t lane = 0; lane < lanes; lane++) {
                const Word* from = source + (block * LANES + lane) * words;
                for (int64_t i = k; i < std::min(k + LANES, words); i++) to[i * LANES + lane] = from[i];
            }
    }
}

// Runs one pass. Returns 0, or 1 if memory is short.
int foretoken_run(const ModelSpec* m, const BatchSpec* b, void* workspace, int threads) {
    Workspace& w = *(Workspace*)workspace;
    try {
        Pass<WEIGHTS, CACHE>::reserve(*m, *b, w, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
#pragma omp parallel num_threads(threads)
    Pass<WEIGHTS, CACHE>(*m, *b, w, omp_get_thread_num(), omp_get_num_threads()).run();
    return 0;
}

// Copies cache rows `sources` to `destination` onward, in order; every source lies at or after its destination.
void foretoken_move(const ModelSpec* m, Word* const* pages, int destination, const int32_t* sources, int count) {
    const PageLayout layout(*m, CACHE);
    for (int layer = 0; layer < m->layer_count; layer++)
        for (int head = 0; head < m->kv_heads; head++)
            for (int i = 0; i < count; i++) {
                const int from = sources[i], to = destination + i;
                if (from == to) continue;
                std::memcpy(layout.value(pages, layer, head, to), layout.value(pages, layer, head, from),
                            sizeof(Word) * layout.key_words);
                const Word* source = layout.keys(pages, layer, head, from / LANES) + from % LANES;
                Word* target = layout.keys(pages, layer, head, to / LANES) + to % LANES;
                for (int64_t k = 0; k < layout.key_words; k++) target[k * LANES] = source[k * LANES];
            }
}

// Runs all products of a pass and nothing else: a lower bound for the time of a pass.
void foretoken_floor(const ModelSpec* m, void* workspace, int rows, int threads) {
    Workspace& w = *(Workspace*)workspace;
    int64_t widest = 0;
    for (int i = 0; i < m->layer_count; i++)
        for (const Matrix* p : {&m->layers[i].qkv, &m->layers[i].out, &m->layers[i].gate_up, &m->layers[i].down})
            widest = std::max(widest, p->steps);
    const Word* x = w.normed.room<Word>(rows * widest);
    const float* scales = w.scales.room<float>(3 * rows);
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num();
        alignas(64) float sink[LANES];
        auto all = [&](const Matrix& p) {
            product<WEIGHTS>(p, x, p.steps, scales, rows, thread, threads, [&](int, int64_t, __m512 low, __m512 high) {
                _mm512_store_ps(sink, _mm512_add_ps(low, high));
                asm volatile("" : : "m"(sink));
            });
#pragma omp barrier
        };
        for (int i = 0; i < m->layer_count; i++) {
            all(m->layers[i].qkv);
            all(m->layers[i].out);
            all(m->layers[i].gate_up);
            all(m->layers[i].down);
        }
        all(m->head);
        release_tiles();
    }
}

}  // extern "C"

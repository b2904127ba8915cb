// What a machine can do at best: reading memory, and sums of products of int8 (vpdpbusd), by all threads at once.
#include <immintrin.h>

#include <cstdint>
#include <thread>
#include <vector>

namespace {

// Calls f(first, last) with an equal share of `count` items in each of `threads` threads.
template <class F>
void in_threads(int64_t count, int threads, F f) {
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back(f, count * t / threads, count * (t + 1) / threads);
    f(0, count / threads);
    for (auto& other : others) other.join();
}

}  // namespace

extern "C" {

// Reads `bytes` (a multiple of 64) once.
void read_memory(const char* data, int64_t bytes, int threads) {
    in_threads(bytes / 64, threads, [=](int64_t first, int64_t last) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t at = first; at < last; at++) {
            _mm_prefetch(data + at * 64 + 4096, _MM_HINT_T0);
            sum = _mm512_xor_si512(sum, _mm512_load_si512(data + at * 64));
        }
        asm volatile("" : : "v"(sum));
    });
}

// Runs `count` instructions of 64 products each, shared by the threads: registers only, in eight chains.
void multiply(int64_t count, int threads) {
#ifdef __AVX512VNNI__
    in_threads(count / 8, threads, [](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++)
            asm volatile("vpdpbusd %%zmm30, %%zmm31, %%zmm0\n vpdpbusd %%zmm30, %%zmm31, %%zmm1\n"
                         "vpdpbusd %%zmm30, %%zmm31, %%zmm2\n vpdpbusd %%zmm30, %%zmm31, %%zmm3\n"
                         "vpdpbusd %%zmm30, %%zmm31, %%zmm4\n vpdpbusd %%zmm30, %%zmm31, %%zmm5\n"
                         "vpdpbusd %%zmm30, %%zmm31, %%zmm6\n vpdpbusd %%zmm30, %%zmm31, %%zmm7\n"
                         : : : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
    });
#endif
}

}  // extern "C"

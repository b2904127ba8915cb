// Random passes of decoders, cases of the pool and of sampling, for kernels compiled with sanitizers (tests/models/sanitizers.py).
#include "random_passes.hpp"
#include "sampling.hpp"

// Arguments: a seed, the number of models, and the libraries of the pool, of tests/core/pool_cases.cpp, of packing, the decoder
// and sampling.
int main(int, char** arguments) {
    const int seed = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
    const Library pool(arguments[3]), cases(arguments[4]), packing(arguments[5]), decoder(arguments[6]), sampling(arguments[7]);
    const void* functions = pool.of<const void*()>("foretoken_pool")();
    for (const Library* each : {&cases, &packing, &decoder, &sampling})
        each->of<void(const void*)>("foretoken_use_pool")(functions);
    if (!decoder.of<int()>("foretoken_ready")()) return 2;  // allows the tile registers of AMX
    check_pool(cases);
    check_sampling(sampling);
    check_random_passes<BF16, BF16>(Packing(packing), decoder, seed, count);
    check_random_passes<BF16, INT8>(Packing(packing), decoder, seed, count);
    check_random_passes<BF16, PACKED>(Packing(packing), decoder, seed, count);
    check_random_passes<BF16, FOUR_BITS>(Packing(packing), decoder, seed, count);
    check_random_passes<INT8, BF16>(Packing(packing), decoder, seed, count);
    check_random_passes<INT8, INT8>(Packing(packing), decoder, seed, count);
    check_random_passes<INT8, PACKED>(Packing(packing), decoder, seed, count);
    check_random_passes<INT8, FOUR_BITS>(Packing(packing), decoder, seed, count);
    return failures ? 1 : 0;
}

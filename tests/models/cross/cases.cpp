// The kernels' libraries, on a processor that this machine may emulate, for tests/models/emulated.py.
//
// Checks results, and prints a checksum of each, to compare with those of another processor.
#include "decoder.hpp"
#include "products.hpp"
#include "sampling.hpp"
#include "texts.hpp"

// Arguments: the libraries of the pool, of tests/core/pool_cases.cpp, of packing, products, the decoder and sampling.
int main(int, char** paths) {
    const Library pool(paths[1]), cases(paths[2]), packing(paths[3]), products(paths[4]), decoder(paths[5]), sampling(paths[6]);
    const void* functions = pool.of<const void*()>("foretoken_pool")();
    for (const Library* each : {&cases, &packing, &decoder, &sampling})
        each->of<void(const void*)>("foretoken_use_pool")(functions);
    check_pool(cases);
    check_products(Packing(packing), products.of<Multiply>("multiply"));
    check_decoder<F32>(Packing(packing), decoder);
    check_decoder<BF16>(Packing(packing), decoder);
    check_decoder<F32, INT8>(Packing(packing), decoder);
    check_decoder<BF16, INT8>(Packing(packing), decoder);
    check_sampling(sampling);
    check_texts<F32>(Packing(packing), decoder, sampling);
    check_texts<BF16>(Packing(packing), decoder, sampling);
    check_texts<BF16, BF16, PACKED>(Packing(packing), decoder, sampling);
    check_texts<BF16, BF16, INT8>(Packing(packing), decoder, sampling);
    check_texts<BF16, INT8, FOUR_BITS>(Packing(packing), decoder, sampling);
    return failures ? 1 : 0;
}

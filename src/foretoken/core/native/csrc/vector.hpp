// Vectors of sixteen numbers: the operations that kernels use, on every set of instructions.
//
// The layout of packed weights is the same everywhere. With AVX-512 a vector is one register, elsewhere several.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

constexpr int LANES = 16;

#define INLINE __attribute__((always_inline)) inline

#ifdef __AVX512F__
#include "vector_512.hpp"
#else
#include "vector_pieces.hpp"
#endif

INLINE void prefetch(const void* line) { __builtin_prefetch(line, 0, 3); }
INLINE void prefetch_far(const void* line) { __builtin_prefetch(line, 0, 2); }  // beyond the first level of caches

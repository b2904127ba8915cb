// A request for the likeliest children of nodes of a draft, which leaders.hpp computes for the kernels of drafts.
#pragma once

#include <cstdint>

// The `count` best tokens of rows of logits [n], which are `stride` numbers apart.
struct LeaderSpec {
    const float* logits;
    const int32_t* ids;      // [n], ascending; the token of each logit, or null
    const void* filter;      // a FilterSpec
    const uint64_t* keys;    // of the races of rows; null: the most probable tokens
    int64_t stride, key_stride, rows, n, count;  // key_stride: 0 for one key of all rows, else 1
    int32_t* tokens;         // [rows][count]; result
    float* scores;           // [rows][count]; result: the log of a token's share of all scores; -infinity: there is no such token
};

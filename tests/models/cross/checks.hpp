// What all cases use: checks, checksums, random numbers, and the libraries.
#pragma once

#if defined(_WIN32)
// As windows.h declares them, which also defines names that kernels use.
extern "C" __declspec(dllimport) void* LoadLibraryA(const char* path);
extern "C" __declspec(dllimport) void* GetProcAddress(void* library, const char* name);
extern "C" __declspec(dllimport) unsigned long GetLastError();
#else
#include <dlfcn.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "specs.hpp"

inline int failures = 0;

inline std::string words(const std::string& part) { return part; }
template <class Number>
std::enable_if_t<std::is_arithmetic_v<Number>, std::string> words(Number part) { return std::to_string(part); }

// parts: what is wrong if it is not right; they are joined only then, since an emulator takes long for it.
template <class... Parts>
void check(bool right, const Parts&... parts) {
    if (right) return;
    failures++;
    std::printf("wrong: %s\n", (words(parts) + ...).c_str());
}

template <class T>
void report(const std::string& name, const std::vector<T>& values) {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < values.size() * sizeof(T); i++) hash = (hash ^ ((const uint8_t*)values.data())[i]) * 0x100000001b3;
    std::printf("%s: %016llx\n", name.c_str(), (unsigned long long)hash);
}

struct Random {
    uint64_t state;
    int below(int n) {
        state = state * 6364136223846793005 + 1442695040888963407;
        return (int)((state >> 33) % n);
    }
    float unit() { return (float)(below(1 << 24) - (1 << 23)) / (1 << 23); }  // from -1 to 1
};

struct Library {
    void* handle;
#if defined(_WIN32)
    explicit Library(const char* path) : handle(LoadLibraryA(path)) {
        if (!handle) std::printf("%s: error %lu\n", path, GetLastError()), std::exit(2);
    }
    void* symbol(const char* name) const { return GetProcAddress(handle, name); }
#else
    explicit Library(const char* path) : handle(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (!handle) std::printf("%s\n", dlerror()), std::exit(2);
    }
    void* symbol(const char* name) const { return dlsym(handle, name); }
#endif
    template <class F>
    F* of(const char* name) const {
        void* found = symbol(name);
        if (!found) std::printf("no %s\n", name), std::exit(2);
        return (F*)found;
    }
};

// The functions of packing.cpp.
struct Packing {
    void* (*allocate)(int64_t);
    int32_t (*words)(const Word*, int64_t, int64_t, Word*, int64_t, int64_t, int64_t, int);
    int32_t (*choose)(const Matrix*, uint8_t*, int32_t*, int);
    int32_t (*bytes)(const Matrix*, uint8_t*, const UpperBytes*, int);
    int32_t (*groups)(const uint8_t*, const float* const*, const int8_t* const*, int64_t, int64_t, const Matrix*, int64_t,
                   int64_t, int);
    explicit Packing(const Library& library)
        : allocate(library.of<void*(int64_t)>("foretoken_allocate")),
          words(library.of<int32_t(const Word*, int64_t, int64_t, Word*, int64_t, int64_t, int64_t, int)>("foretoken_pack")),
          choose(library.of<int32_t(const Matrix*, uint8_t*, int32_t*, int)>("foretoken_choose_bytes")),
          bytes(library.of<int32_t(const Matrix*, uint8_t*, const UpperBytes*, int)>("foretoken_pack_bytes")),
          groups(library.of<int32_t(const uint8_t*, const float* const*, const int8_t* const*, int64_t, int64_t,
                                 const Matrix*, int64_t, int64_t, int)>("foretoken_pack_groups")) {}

    template <class T>
    T* zeros(int64_t count) const { return (T*)allocate(count * (int64_t)sizeof(T)); }

    // Packs rows of words of a kind that has no groups.
    Matrix pack(const Word* source, int kind, int64_t outputs, int64_t count) const {
        Matrix w = {};
        w.kind = kind, w.steps = padded(count, TILE_STEPS), w.units = padded(outputs, 32) / 32;
        Word* data = zeros<Word>(w.units * 32 * w.steps);
        words(source, outputs, count, data, w.steps, 0, 1, 1);
        w.data = data;
        return w;
    }

    // Packs bytes with a scale for each output.
    Matrix of_bytes(const std::vector<int8_t>& values, const std::vector<float>& scales, int64_t inputs) const {
        const int64_t outputs = (int64_t)scales.size();
        Matrix w = pack((const Word*)values.data(), INT8, outputs, inputs / 4);
        float* own_scales = zeros<float>(w.units * 32);
        int32_t* sums = zeros<int32_t>(w.units * 32);
        for (int64_t i = 0; i < outputs * inputs; i++) own_scales[i / inputs] = scales[i / inputs], sums[i / inputs] += values[i];
        w.scales = own_scales, w.sums = sums;
        return w;
    }

    // A matrix of bfloat16 in 12 bits.
    Matrix in_12_bits(Matrix w) const {
        uint8_t* common = zeros<uint8_t>(w.units * 16);
        int32_t *counts = zeros<int32_t>(w.units), *from = zeros<int32_t>(w.units + 1);
        choose(&w, common, counts, 1);
        for (int64_t unit = 0; unit < w.units; unit++) from[unit + 1] = from[unit] + counts[unit];
        UpperBytes* upper = zeros<UpperBytes>(1);
        *upper = {common, from, zeros<int32_t>(from[w.units] + 1), zeros<Word>((from[w.units] + 1) * 2 * STEP_WORDS)};
        uint8_t* data = zeros<uint8_t>(w.units * w.steps / 2 * PAIR_BYTES);
        bytes(&w, data, upper, 1);
        w.data = (const Word*)data, w.kind = PACKED, w.upper = upper;
        return w;
    }
};

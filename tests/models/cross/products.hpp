// Products of every kind of weights, against float64, bit by bit over rows.
#pragma once

#include <cmath>

#include "checks.hpp"

constexpr int OUTPUTS = 80, INPUTS = 512, ROWS = 34, UNITS = 3, STRIDE = UNITS * BLOCKS * LANES;

// A packed matrix and its numbers.
struct Case {
    std::string name;
    Matrix w;
    std::vector<double> numbers;
    bool exact = false;  // results are whole numbers that float32 holds
};

inline uint16_t bf16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    return (uint16_t)(word >> 16);
}

inline float of_bf16(uint16_t half) {
    const uint32_t word = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

inline void add_floats(const Packing& packing, std::vector<Case>& cases) {
    Random random{1};
    std::vector<float> singles(OUTPUTS * INPUTS);
    std::vector<uint16_t> halves(OUTPUTS * INPUTS);
    std::vector<double> numbers(singles.size()), rounded(singles.size());
    for (size_t i = 0; i < singles.size(); i++) {
        numbers[i] = singles[i] = random.unit();
        halves[i] = bf16(i % 1237 == 5 ? singles[i] * 1e-9f : singles[i]);  // a few with a rare exponent
        rounded[i] = of_bf16(halves[i]);
    }
    cases.push_back({"float32", packing.pack((const Word*)singles.data(), F32, OUTPUTS, INPUTS), numbers});
    cases.push_back({"bfloat16", packing.pack((const Word*)halves.data(), BF16, OUTPUTS, INPUTS / 2), rounded});
    const Matrix w = packing.in_12_bits(cases.back().w);
    check(w.upper->from_unit[UNITS] > 0 && w.upper->from_unit[UNITS] < UNITS * w.steps / 2, "some pairs are raw");
    cases.push_back({"packed", w, rounded});
}

inline void add_int8(const Packing& packing, std::vector<Case>& cases, bool exact) {
    Random random{2};
    std::vector<int8_t> values(OUTPUTS * INPUTS);
    std::vector<double> numbers(values.size());
    std::vector<float> scales;
    for (int n = 0; n < OUTPUTS; n++) {
        scales.push_back(exact ? 1.0f : random.unit());
        for (int k = 0; k < INPUTS; k++) {
            const int i = n * INPUTS + k, value = n == 2 ? -128 : n == 5 ? 127 : i * 7919 % 256 - 128;
            values[i] = (int8_t)value, numbers[i] = (double)value * scales[n];
        }
    }
    const Matrix w = packing.of_bytes(values, scales, INPUTS);
    cases.push_back({exact ? "int8, exact" : "int8", w, numbers, exact});
}

// Codes of `bits` bits in groups. block: groups of a record, above 1 with two levels of scales; step: between levels of a table.
struct Groups {
    std::string name;
    int bits, offsets, scales, group, block, zero, step;
    int kind() const { return GROUPED + (bits - 4) / 2 + 3 * offsets + 6 * scales; }
};

const Groups GROUPS[] = {
    {"four bits", 4, 0, HALF, 32, 1, 8, 1},
    {"four bits in groups of 128", 4, 0, HALF, 128, 1, 8, 1},
    {"table of small levels", 4, 0, HALF, 32, 1, 20, 4},
    {"table of large levels", 4, 0, HALF, 32, 1, 120, 17},
    {"eight bits", 8, 0, HALF, 32, 1, 128, 1},
    {"four bits with offsets", 4, 1, SINGLE, 64, 1, 0, 1},
    {"six bits in two levels", 6, 0, TWO_LEVELS, 16, 16, 32, 1},
    {"four bits with offsets in two levels", 4, 1, TWO_LEVELS, 32, 8, 0, 1},
    {"six bits with offsets in two levels", 6, 1, TWO_LEVELS, 32, 8, 0, 1},
};

inline void add_groups(const Packing& packing, std::vector<Case>& cases, const Groups& g, bool exact) {
    Random random{3};
    const int groups = INPUTS / g.group, records = groups / g.block, sides = 1 + g.offsets, floats = g.scales == SINGLE ? 4 : 2;
    Matrix w = {};
    w.kind = g.kind(), w.units = UNITS, w.steps = INPUTS / 4, w.group = g.group, w.record_groups = g.block, w.zero = g.zero;
    w.record_bytes = sides * (32 * floats + (g.block > 1 ? g.block * 32 : 0)) + g.block * 32 * g.group * g.bits / 8;
    for (int i = 0; i < 16; i++) w.levels[i] = (uint8_t)(i * g.step);
    w.data = packing.zeros<Word>((int64_t)UNITS * records * w.record_bytes / 4);
    std::vector<uint8_t> codes(OUTPUTS * INPUTS);
    std::vector<double> numbers(codes.size());
    std::vector<float> wholes[2];
    std::vector<int8_t> parts[2];
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < OUTPUTS * records; i++)
            wholes[side].push_back(exact ? 1.0f - 2 * side : (float)(random.below(2047) - 1023) / 4096);
        for (int i = 0; i < OUTPUTS * groups; i++) parts[side].push_back((int8_t)(exact ? 1 : random.below(127) - 63));
    }
    auto number = [&](int side, int n, int k) {
        const double part = g.block > 1 ? parts[side][n * groups + k / g.group] : 1;
        return wholes[side][n * records + k / g.group / g.block] * part;
    };
    for (int n = 0; n < OUTPUTS; n++)
        for (int k = 0; k < INPUTS; k++) {
            const int i = n * INPUTS + k, code = n == 3 ? 0 : n == 4 ? (1 << g.bits) - 1 : i * 7919 % (1 << g.bits);
            codes[i] = (uint8_t)code;
            const int level = g.bits == 4 ? w.levels[code] : code;
            numbers[i] = (level - g.zero) * number(0, n, k) + (g.offsets ? number(1, n, k) : 0.0);
        }
    const float* of_floats[2] = {wholes[0].data(), wholes[1].data()};
    const int8_t* of_parts[2] = {parts[0].data(), parts[1].data()};
    packing.groups(codes.data(), of_floats, of_parts, OUTPUTS, INPUTS, &w, 0, 1, 1);
    cases.push_back({exact ? g.name + ", exact" : g.name, w, numbers, exact});
}

using Multiply = void(const Matrix*, const float*, int64_t, int, float*);

inline void check_products(const Packing& packing, Multiply* multiply) {
    std::vector<Case> cases;
    add_floats(packing, cases);
    for (bool exact : {true, false}) {
        add_int8(packing, cases, exact);
        for (const Groups& groups : GROUPS) add_groups(packing, cases, groups, exact);
    }
    // whole numbers with the largest in each span, so that activations in int8 are exact
    Random random{4};
    std::vector<float> x(ROWS * INPUTS), whole;
    for (size_t i = 0; i < x.size(); i++) x[i] = (float)(i % 16 == 0 ? 127 : i % 16 == 1 ? -127 : random.below(255) - 127);
    for (const Case& each : cases) {
        std::vector<float> all(ROWS * STRIDE), some(ROWS * STRIDE);
        multiply(&each.w, x.data(), INPUTS, ROWS, all.data());
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < OUTPUTS; n++) {
                double sum = 0.0, magnitude = 0.0;
                for (int k = 0; k < INPUTS; k++) {
                    const double product = x[r * INPUTS + k] * each.numbers[n * INPUTS + k];
                    sum += product, magnitude += std::fabs(product);
                }
                const double error = std::fabs(all[r * STRIDE + n] - sum);
                check(error <= (each.exact ? 0.0 : 1e-6 * magnitude),
                      each.name, " row ", r, " output ", n, " error ", error);
            }
        report(each.name, all);
        if (each.exact) continue;  // sums of whole numbers are the same in every order
        for (int rows = 1; rows < ROWS; rows++) {
            multiply(&each.w, x.data(), INPUTS, rows, some.data());
            check(!std::memcmp(some.data(), all.data(), rows * STRIDE * 4), each.name, " of ", rows, " rows");
            if (rows % 4 != 1) continue;  // rows at other places of a pass
            multiply(&each.w, &x[rows * INPUTS], INPUTS, ROWS - rows, some.data());
            check(!std::memcmp(some.data(), &all[rows * STRIDE], (ROWS - rows) * STRIDE * 4),
                  each.name, " from row ", rows);
        }
        if (each.name == "bfloat16") whole = all;
        if (each.name == "packed") check(whole == all, "packed weights give the bits of raw ones");
    }
}

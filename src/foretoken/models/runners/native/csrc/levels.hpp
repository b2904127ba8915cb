// The levels of weights in groups: how codes of four, six and eight bits are stored, and their products with inputs.
#pragma once

#include <algorithm>

#include "product.hpp"

// Levels above 127 are multiplied as signed bytes, 128 lower, where no instruction takes unsigned ones.
inline bool large_levels(const Matrix& w, int bits) {
    if (bits == 8) return true;
    return bits == 4 && *std::max_element(w.levels, w.levels + 16) > 63;
}

// Sixteen inputs of a block are four words of inputs. In four bits they take two vectors, each of two words, the first in the
// low halves of bytes; in six bits a third vector has the upper two bits, the first word in its lowest; in eight bits four.
constexpr int vectors_of(int bits) { return bits / 2; }

// The levels of word `number` of sixteen inputs, signed in eight bits where products are.
template <int BITS, int number>
__attribute__((always_inline)) inline Ints levels_of(const Ints* codes, Ints levels) {
    if constexpr (BITS == 8 && UNSIGNED_BYTES) return load_ints(codes + number);
    if constexpr (BITS == 8) return xor_bits(load_ints(codes + number), bytes(-128));
    const Ints packed = load_ints(codes + number / 2);
    const Ints low = and_bits(number % 2 ? shift_right16<4>(packed) : packed, bytes(15));
    if constexpr (BITS == 4) return look_up(levels, low);
    const Ints upper = load_ints(codes + 2), mask = bytes(48);
    const Ints high = number < 2 ? shift_left16<number < 2 ? 4 - 2 * number : 0>(upper)
                                 : shift_right16<number < 2 ? 0 : 2 * number - 4>(upper);
    return bits_from(mask, high, low);  // two bits from `high`, the rest from `low`
}

#ifndef __AVX512F__
// The same of one register of sixteen inputs.
template <int BITS, int number>
INLINE IntPiece piece_levels(const Ints* codes, IntPiece levels, int i) {
    if constexpr (BITS == 8) {
        const IntPiece whole = codes[number].p[i];
        return UNSIGNED_BYTES ? whole : whole ^ piece((int32_t)0x80808080);
    }
    const IntPiece packed = codes[number / 2].p[i];
    const IntPiece low = (number % 2 ? (IntPiece)((HalfPiece)packed >> 4) : packed) & piece(0x0f0f0f0f);
    if constexpr (BITS == 4) return (IntPiece)piece_look_up((BytePiece)levels, (BytePiece)low);
    const HalfPiece upper = (HalfPiece)codes[2].p[i];
    const HalfPiece high = number < 2 ? upper << (number < 2 ? 4 - 2 * number : 0) : upper >> (number < 2 ? 0 : 2 * number - 4);
    return ((IntPiece)high & piece(0x30303030)) | low;
}

// part[r] += levels * x[r] over a group: one register of outputs after the other, so that the sums of all rows and four
// unpacked words fit into sixteen registers. SMALL: no level is above 63, so two sums of products fit into 16 bits.
template <int BITS, bool SMALL, int R>
INLINE void add_pieces(const Ints* codes, Ints levels, int sixteens, const Word* x, Ints (&part)[R]) {
    constexpr int VECTORS = vectors_of(BITS);
    for (int p = 0; p < PIECES; p++) {
        IntPiece sums[R];
        each<R>([&](auto r) __attribute__((always_inline)) { sums[r()] = part[r()].p[p]; });
        const Ints* at = codes;
        const Word* words = x;
        for (int i = 0; i < sixteens; i++, at += VECTORS, words += 4 * R)
            each<2>([&](auto half) __attribute__((always_inline)) {
                constexpr int first = half() * 2;
                const IntPiece a = piece_levels<BITS, first>(at, levels.p[p], p), b = piece_levels<BITS, first + 1>(at, levels.p[p], p);
                each<R>([&](auto r) __attribute__((always_inline)) {
                    const IntPiece x_a = piece((int32_t)words[first * R + r()]), x_b = piece((int32_t)words[(first + 1) * R + r()]);
                    if constexpr (SMALL) sums[r()] = piece_add_small(sums[r()], a, x_a, b, x_b);
                    else sums[r()] = piece_add_products(piece_add_products(sums[r()], a, x_a), b, x_b);
                });
            });
        each<R>([&](auto r) __attribute__((always_inline)) { part[r()].p[p] = sums[r()]; });
    }
}
#else
template <int BITS, bool SMALL, int R>
INLINE void add_pieces(const Ints*, Ints, int, const Word*, Ints (&)[R]) {}
#endif

// part[block][r] += levels * x[r] over a group of a unit, whose codes lie one block after the other.
template <int BITS, bool SMALL, int R>
INLINE void add_levels(const Ints* codes, Ints levels, int sixteens, const Word* x, Ints (&part)[BLOCKS][R]) {
    const int64_t block_vectors = sixteens * vectors_of(BITS);
    if constexpr (!ONE_REGISTER) {
        for (int b = 0; b < BLOCKS; b++) add_pieces<BITS, SMALL, R>(codes + b * block_vectors, levels, sixteens, x, part[b]);
    } else {
        int i = 0;
        do {  // a loop that might end before it begins would cost registers
            each<4>([&](auto number) __attribute__((always_inline)) {
                Ints weights[BLOCKS];
                each<BLOCKS>([&](auto b) __attribute__((always_inline)) {
                    weights[b()] = levels_of<BITS, number()>(codes + b() * block_vectors, levels);
                });
                each<R>([&](auto r) __attribute__((always_inline)) {
                    const Ints word = ints((int)x[number() * R + r()]);
                    each<BLOCKS>([&](auto b) __attribute__((always_inline)) {
                        part[b()][r()] = add_products(part[b()][r()], weights[b()], word);
                    });
                });
            });
            codes += vectors_of(BITS), x += 4 * R;
        } while (++i < sixteens);
    }
}

// The code of input i, 0 to 15, in the vectors of sixteen inputs that begin with its output's bytes.
template <int BITS>
inline uint8_t code_at(const uint8_t* vectors, int64_t i) {
    const int64_t word = i / 4, byte = i % 4;
    if (BITS == 8) return vectors[word * 64 + byte];
    const uint8_t low = vectors[word / 2 * 64 + byte] >> word % 2 * 4 & 15;
    return BITS == 4 ? low : low | (vectors[128 + byte] >> word * 2 & 3) << 4;
}

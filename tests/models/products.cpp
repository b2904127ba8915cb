// One product of the kernels, for tests/models/test_products.py.
#include <vector>

#include "kinds.hpp"

KindFunctions FUNCTIONS[KIND_COUNT];

// out[r] = w x[r] for rows of `count` floats, a multiple of 16. out: [rows][padded outputs].
extern "C" void multiply(const Matrix* w, const float* x, int64_t count, int rows, float* out) {
    const int64_t scale_words = w->scale_words(), stride = input_stride(*w);
    std::vector<Word> words(rows * stride);
    std::vector<float> scales(rows * scale_words);
    std::vector<Word> arranged(words.size());
    for (int r = 0; r < rows; r++)
        functions(*w).encode(*w, x + r * count, count, &words[r * stride], &scales[r * scale_words]);
    Input input{words.data(), scales.data(), stride, scale_words};
    if (arranges(*w, rows)) {
        const RowTiles tiles(rows, CHUNK_ROWS);
        for (int t = 0; t < tiles.count; t++) arrange(*w, input, tiles, t, arranged.data());
        input.arranged = arranged.data();
    }
    Team alone;
    Member member(alone, 0);
    Loop units = member.begin(w->units);
    functions(*w).rows(*w, input, rows, units, {out, w->units * BLOCKS * LANES});
    member.end(units);
}

// The codecs of runtime/reference/matrix_codecs.py, with the same bits: matrix states in 8 bits.
//
// A matrix is worked on in groups of whole blocks of 64 values.  Loops over a block are left to the compiler, which
// makes vectors of them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

enum Codec { SYMMETRIC, TRIANGULAR, ORTHOGONAL, LOW_RANK, LOW_RANK_NONNEG };

constexpr int BLOCK = 64, TILE = 16;
constexpr float LAST = 127, TINY = 0x1p-126f;
constexpr int32_t INF = 0x7f800000, NAN_BITS = 0x7fc00000, LEAST = 0x20000000, MOST = 0x5f700000, OCTAVES = 32 << 8;

inline int32_t bits(float x) { int32_t b; memcpy(&b, &x, 4); return b; }
inline float from(int32_t b) { float x; memcpy(&x, &b, 4); return x; }
inline int32_t within(int32_t x) { return std::min(std::max(x, LEAST), MOST); }
inline uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

// Rounds to nearest, or with noise: a hash of a key and of places.
struct Rounding {
    bool noisy;
    uint32_t key;

    void operator()(const float *x, uint32_t place, float least, int8_t *codes) const {
        float kept[BLOCK];
        for (uint32_t j = 0; j < BLOCK; j++)
            kept[j] = noisy ? floorf(x[j] + (float)(int32_t)(mixed(mixed(place + j) + key) >> 8) * 0x1p-24f) : rintf(x[j]);
        for (int j = 0; j < BLOCK; j++)
            codes[j] = (int8_t)(int32_t)(kept[j] < least ? least : kept[j] > LAST ? LAST : kept[j]);
    }
};

inline void decode_roots(const int8_t *codes, const int16_t *ends, int n, float *root) {
    const int32_t low = (uint16_t)ends[0], step = (((uint16_t)ends[1] - low) << 15) / 255;
    for (int j = 0; j < n; j++)
        root[j] = from((codes[j] + 128) * step + (low << 15));
}

// Matrices, and the fields of each state.
struct States {
    Codec codec;
    int64_t rows, columns;
    float *x;
    int8_t *codes;
    int16_t *scales;  // of roots the two ends of a block
    float *diagonal;
    const int8_t *base_codes;  // of the roots that x is kept over; or null
    const int16_t *base_ends;

    bool folded() const { return codec == SYMMETRIC || codec == TRIANGULAR; }
    bool dense() const { return codec == LOW_RANK || codec == TRIANGULAR; }
    bool roots() const { return codec == LOW_RANK_NONNEG; }
    int64_t half() const { return (rows + 1) / 2; }
    int64_t count() const { return folded() ? half() * (rows - 1) : rows * columns; }
    int64_t group() const { return BLOCK * (folded() ? rows - 1 : BLOCK); }
    int64_t groups() const { return folded() ? (half() + BLOCK - 1) / BLOCK : (count() + group() - 1) / group(); }
    States of(int64_t k) const {
        const int64_t at = k * count(), block = k * ((count() + BLOCK - 1) / BLOCK), one = k * rows * columns;
        return {codec, rows, columns, x + one, codes + at, scales + (roots() ? 2 : 1) * block,
                folded() ? diagonal + k * rows : nullptr, base_codes ? base_codes + at : nullptr,
                base_codes ? base_ends + 2 * block : nullptr};
    }

    // What divides the columns, of symmetric matrices the rows, too: a positive matrix is at most 1 over it.
    std::vector<float> sizes() const {
        std::vector<float> out(diagonal, diagonal + rows);
        for (float &d : out) {
            d = fabsf(d) < TINY ? 1 : fabsf(d);
            d = codec == SYMMETRIC ? sqrtf(d) : d;
        }
        return out;
    }

    // Calls visit(place, row, column) for some columns of a group of the folded lower triangle, whose rows are one row
    // of it and a shorter one backwards.
    template <class Visit> void fold(int64_t first, int64_t tile, const Visit &visit) const {
        const int64_t width = rows - 1, end = std::min(first + BLOCK, half());
        for (int64_t a = first; a < end; a++) {
            const int64_t row = width - a, at = (a - first) * width;
            for (int64_t j = tile; j < std::min(tile + TILE, row); j++)
                visit(at + j, row, j);
            for (int64_t j = tile; a < row && j < std::min(tile + TILE, a); j++)
                visit(at + width - 1 - j, a, j);
        }
    }
    template <class Visit> void fold(int64_t first, const Visit &visit) const {
        for (int64_t tile = 0; tile < rows - 1; tile += TILE)
            fold(first, tile, visit);
    }

    void encode(int64_t g, const Rounding &rounded, float *y) const {
        const int64_t start = g * group(), n = std::min(count() - start, group());
        std::fill(y, y + n, 0.0f);  // what follows a middle row
        if (folded())
            for (int64_t i = 0; i < rows; i++)
                diagonal[i] = x[i * rows + i];
        const std::vector<float> size = folded() ? sizes() : std::vector<float>();
        if (codec == SYMMETRIC)
            fold(g * BLOCK, [&](int64_t at, int64_t i, int64_t j) { y[at] = x[i * rows + j] / size[i] / size[j]; });
        else if (codec == TRIANGULAR)
            fold(g * BLOCK, [&](int64_t at, int64_t i, int64_t j) { y[at] = x[j * rows + i] / size[j]; });
        else
            std::copy(x + start, x + start + n, y);
        for (int64_t b = 0; b < n; b += BLOCK) {
            const int64_t at = start + b, block = at / BLOCK;
            const int some = std::min<int64_t>(n - b, BLOCK);
            float *v = y + b, root[BLOCK];
            int32_t least = INT32_MAX, most = 0;
            int8_t made[BLOCK];
            if (base_codes)
                decode_roots(base_codes + at, base_ends + 2 * block, some, root);
            for (int j = 0; j < some && base_codes; j++)
                v[j] /= root[j];
            for (int j = 0; j < some && roots(); j++)
                v[j] = sqrtf(v[j] + 0.0f);
            std::fill(v + some, v + BLOCK, v[some - 1]);
            for (int j = 0; j < BLOCK; j++) {
                least = std::min(least, bits(fabsf(v[j])));
                most = std::max(most, bits(fabsf(v[j])));
            }
            if (roots()) {
                const int32_t high = (within(most) >> 15) + 1, low = std::max(within(least) >> 15, high - OCTAVES);
                const float step = (float)(((high - low) << 15) / 255);
                for (int j = 0; j < BLOCK; j++)
                    v[j] = std::max((float)(within(v[j] == v[j] ? bits(v[j]) : INF) - (low << 15)) / step, 0.0f) - (LAST + 1);
                scales[2 * block] = (int16_t)(most < INF ? low : -128);
                scales[2 * block + 1] = (int16_t)(most < INF ? high : -128);
            } else {
                const int32_t up = most < INF ? std::min(most + 0x7ff0, 0x7f7f8000) : NAN_BITS;
                const float by = from(std::max(up & ~0x7fff, bits(TINY)));
                for (int j = 0; j < BLOCK; j++)
                    v[j] = (dense() ? v[j] * 2 / (fabsf(v[j]) + by) : v[j] / by) * LAST;
                scales[block] = (int16_t)(up >> 15);
            }
            rounded(v, (uint32_t)at, roots() ? -LAST - 1 : -LAST, made);
            std::copy(made, made + some, codes + at);
        }
    }

    void decode(int64_t g, float *room) const {
        const int64_t start = g * group(), n = std::min(count() - start, group());
        float *y = folded() ? room : x + start;
        for (int64_t b = 0; b < n; b += BLOCK, y += BLOCK) {
            const int64_t at = start + b, block = at / BLOCK;
            const int some = std::min<int64_t>(n - b, BLOCK);
            const float by = from(scales[block] << 15 & INT32_MAX);
            float root[BLOCK];
            if (roots() || base_codes)
                decode_roots((roots() ? codes : base_codes) + at, (roots() ? scales : base_ends) + 2 * block, some, root);
            for (int j = 0; j < some; j++) {
                const float read = codes[at + j] * by / (dense() ? 2 * LAST - fabsf(codes[at + j]) : LAST);
                y[j] = roots() ? root[j] * root[j] : base_codes ? read * root[j] : read;
            }
        }
        if (!folded())
            return;
        const std::vector<float> size = sizes();
        for (int64_t a = g * BLOCK; a < std::min((g + 1) * BLOCK, half()); a++)
            for (const int64_t i : {a, rows - 1 - a})
                x[i * rows + i] = diagonal[i];
        // Rows [last, rows - first) and the shorter ones; the other triangle is written row by row, since the rows of a
        // column may share one set of a cache.
        const int64_t first = g * BLOCK, end = std::min(first + BLOCK, half()), last = rows - end;
        for (int64_t tile = 0; tile < rows - 1; tile += TILE) {
            float longer[TILE][BLOCK], shorter[TILE][BLOCK];
            for (int64_t j = tile + TILE; j < std::min(tile + 2 * TILE, rows - 1); j++)
                for (int64_t k = 0; k < BLOCK; k += 16) {
                    __builtin_prefetch(x + j * rows + last + k, 0, 2);
                    __builtin_prefetch(x + j * rows + first + k, 0, 2);
                }
            fold(first, tile, [&](int64_t at, int64_t i, int64_t j) {
                const float read = codec == SYMMETRIC ? room[at] * size[i] * size[j] : room[at] * size[j];
                x[i * rows + j] = codec == SYMMETRIC ? read : 0 * size[i];
                (i < last ? shorter[j - tile] + i - first : longer[j - tile] + i - last)[0] = read;
            });
            for (int64_t j = tile; j < std::min(tile + TILE, rows - 1); j++) {
                for (int64_t i = std::max(last, j + 1); i < rows - first; i++)
                    x[j * rows + i] = longer[j - tile][i - last];
                for (int64_t i = std::max(first, j + 1); i < std::min(end, last); i++)
                    x[j * rows + i] = shorter[j - tile][i - first];
            }
        }
    }
};

}  // namespace

// Encodes or decodes matrices; where there are streams, one key of each, rounds stochastically.
extern "C" __attribute__((visibility("default"))) void optgen_matrices(
    int32_t decode, int32_t codec, int64_t matrices, int64_t rows, int64_t columns, float *x, int8_t *codes,
    int16_t *scales, float *diagonal, const int8_t *base_codes, const int16_t *base_ends, const int64_t *streams,
    int32_t key, int32_t threads) {
    const States all = {(Codec)codec, rows, columns, x, codes, scales, diagonal, base_codes, base_ends};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t k = 0; k < matrices * all.groups(); k++) {
        static thread_local std::vector<float> room;
        room.resize(all.group() + BLOCK);
        const int64_t one = k / all.groups();
        if (decode)
            all.of(one).decode(k % all.groups(), room.data());
        else
            all.of(one).encode(
                k % all.groups(), {streams != nullptr, streams ? mixed((uint32_t)streams[one] + mixed(key)) : 0}, room.data());
    }
}

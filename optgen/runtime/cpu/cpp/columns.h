// Views along columns: encodings of transposed weights, which the sweep before has stored.
#pragma once
#include "sweep.h"

namespace {

// Codec C in blocks of ROWS neighbours of a column; CODES: the entry of a row of the table that has the address of codes,
// 0 of a tensor without such a view, before that of scales; NUMEL: that of the number of elements, before that of columns.
template <class C, int ROWS, class Weight, int CODES, int NUMEL, int WIDTH>
void encode_columns(const int64_t *table, int64_t tensors, int32_t threads) {
    typedef typename Weight::stored T;
    constexpr int across = 64;
    for (const int64_t *row = table; row < table + tensors * WIDTH; row += WIDTH) {
        const int64_t columns = row[CODES] ? row[NUMEL + 1] : 0, panels = columns ? row[NUMEL] / columns / ROWS : 0;
        const int64_t tiles = (columns + across - 1) / across;
        // Panels of the same columns follow one another: each writes the next part of the same lines.
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t k = 0; k < tiles * panels; k++) {
            const int64_t left = k / panels * across, panel = k % panels;
            const int count = (int)(columns - left < across ? columns - left : across);
            alignas(64) T turned[2][across * ROWS];
            alignas(64) char codes[across * ROWS], scales[across];
            const T *from = (const T *)row[0] + panel * ROWS * columns + left;
            for (int i = 0; i < ROWS; i++)
                memcpy(turned[0] + i * across, from + i * columns, count * sizeof(T));
            // A perfect shuffle moves the highest bit of an index to its end: after those of the row it is (column, row).
            constexpr int half = across * ROWS / 2;
            int last = 0;
            for (int bit = 1; bit < ROWS; bit *= 2, last ^= 1)
                for (int i = 0; i < half; i++) {
                    turned[!last][2 * i] = turned[last][i];
                    turned[!last][2 * i + 1] = turned[last][half + i];
                }
            char *const at[] = {(char *)turned[last], codes, scales};
            View<C, ROWS, 1, Weight, -1>::template make<ROWS, false>(at, count, nullptr);
            for (int j = 0; j < count; j++) {
                const int64_t block = (left + j) * panels + panel;
                memcpy((char *)row[CODES] + block * ROWS, codes + j * ROWS, ROWS);
                ((char *)row[CODES + 1])[block] = scales[j];
            }
        }
    }
}

}  // namespace

// The exports of a kernel whose last stage, number LAST - 1, a view along columns follows; 0: it has one sweep.
#define OPTGEN_EXPORT_COLUMNS(LAST, ...)                                                                              \
    extern "C" __attribute__((visibility("default"))) int32_t optgen_step(                                            \
        const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads) {          \
        const int32_t code = Runner<OPTGEN_KERNEL<OPTGEN_GRAD>>::step(table, tensors, scalars, keys, threads);        \
        encode_columns<__VA_ARGS__>(table, tensors, threads);                                                         \
        return code;                                                                                                  \
    }                                                                                                                 \
    extern "C" __attribute__((visibility("default"))) int32_t optgen_stages(                                          \
        const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads,            \
        int32_t begin, int32_t end) {                                                                                 \
        typedef Runner<OPTGEN_KERNEL<OPTGEN_GRAD>> All;                                                               \
        const int32_t code = All::stages(table, tensors, scalars, keys, threads, begin, end);                         \
        if (end == LAST)                                                                                              \
            encode_columns<__VA_ARGS__>(table, tensors, threads);                                                     \
        return code;                                                                                                  \
    }

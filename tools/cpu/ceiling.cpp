// The memory ceiling of an optimizer's step: the same streams, read or read and written side by side, and next to
// no arithmetic.  What depends on the machine (pages, buffers, which streams) is decided by the caller.
#include <stdint.h>

namespace {

// A run of words of one stream.  Loops of a known length become a few vector instructions.
template <int64_t COUNT>
inline uint64_t pass(uint64_t *at, int64_t changed) {
    uint64_t seen = 0;
    if (changed)
        for (int64_t i = 0; i < COUNT; i++) at[i] += 1;
    else
        for (int64_t i = 0; i < COUNT; i++) seen ^= at[i];
    return seen;
}

inline uint64_t pass(uint64_t *at, int64_t count, int64_t changed) {
    uint64_t seen = 0;
    for (; count >= 64; count -= 64, at += 64) seen ^= pass<64>(at, changed);
    for (; count >= 8; count -= 8, at += 8) seen ^= pass<8>(at, changed);
    for (; count > 0; count--, at++) seen ^= pass<1>(at, changed);
    return seen;
}

}  // namespace

// A piece of every stream at a time, run by run:
// base[r]     where run r lies in the first piece
// stride[r]   words of 8 bytes from there to where it lies in the next
// count[r]    its words
// changed[r]  0: read; 1: read, changed and written back
// Returns a value that depends on everything read, so that no compiler can leave out a load.
extern "C" uint64_t sweep(int64_t pieces, int64_t runs, uint64_t *const *base, const int64_t *stride,
                          const int64_t *count, const int64_t *changed, int threads) {
    uint64_t seen = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(^ : seen)
    for (int64_t k = 0; k < pieces; k++)
        for (int64_t r = 0; r < runs; r++) seen ^= pass(base[r] + stride[r] * k, count[r], changed[r]);
    return seen;
}

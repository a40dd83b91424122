// The base of generated CPU kernels: vectors, the walk over tensors, and the one exported function.
//
// Compiled for what the flags allow: AVX-512, AVX2 or anything.  -ffp-contract=off keeps products and sums
// apart unless a kernel says fma; -ffast-math is never used (linked in, it would flush subnormals to zero in
// the whole process).
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define OPTGEN_SIMD "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OPTGEN_SIMD "simd_avx2.h"
#else
#define OPTGEN_SIMD "simd_portable.h"
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

// A tile's function stands once in the file: copies of it for constant arguments would double the time to compile.
#if defined(__GNUC__) && !defined(__clang__)
#define OPTGEN_ONCE __attribute__((noinline, noclone))
#else
#define OPTGEN_ONCE __attribute__((noinline))
#endif

// Bytes of the first-level cache (runtime/cpu/native.py).
#ifndef OPTGEN_L1
#define OPTGEN_L1 32768
#endif

namespace {

#include OPTGEN_SIMD

// Byte (or half) K of every lane.  One permutation puts those of two neighbours together where N's kernel has pairs of
// them; `last` keeps the first one meanwhile.
template <int K, class N> inline void store_byte(uint8_t *p, int i, I x, I &last) {
#ifdef __AVX512VBMI__
    if constexpr (N::Of::PAIRS)
        return i & W ? store_bytes<K>(p + i - W, last, x) : void(last = x);
#endif
    store_byte<K>(p + i, x);
}
template <int K, class N> inline void store_half(uint16_t *p, int i, I x, I &last) {
#ifdef __AVX512VBMI__
    if constexpr (N::Of::PAIRS)
        return i & W ? store_halves<K>(p + i - W, last, x) : void(last = x);
#endif
    store_half<K>(p + i, x);
}

constexpr int VECTOR = 16;  // storage blocks whose values fill one register at the widest

// The elements of a tile, a multiple of 16 blocks: about 2048 where what is kept of them, `kept` arrays of 4 bytes,
// leaves a part of the first-level cache to what is on its way, else about 1024.  The part is smaller with long vectors:
// their loops are short, so that what the ends of loops take counts more.
constexpr int elements_of_tile(int block, int kept) {
    const int least = VECTOR * block, room = W == 16 ? OPTGEN_L1 / 4 * 3 : OPTGEN_L1 / 3 * 2;
    const int wanted = 2048 * 4 * kept <= room ? 2048 : 1024;
    return least < wanted ? wanted / least * least : least;
}

inline F widened(I x) { return as_float(x << 16); }
inline I extend16(I x) { return (x << 16) >> 16; }
inline M where(M c, M a, M b) { return (c & a) | (~c & b); }

// A table's entry of each lane's number.
template <int N> inline F lookup(const float (&table)[N], I at) { return gather(table, at); }
// The number of a table's entries that are <= x, 0 for a NaN; of 2^b - 1 entries, in b steps.
template <int N> inline I search(const float (&table)[N], F x) {
    static_assert((N & (N + 1)) == 0, "2^b - 1 entries");
    I found(0);
    for (int step = (N + 1) / 2; step; step /= 2) {
        const I next = found + I(step);
        found = where(gather(table, next - I(1)) <= x, next, found);
    }
    return found;
}

// Of two zeros the minimum is -0, the maximum +0, as on GPUs.  Strict maths.
inline F minimum(F a, F b) { return where(a == b, as_float(bits(a) | bits(b)), min(a, b)); }
inline F maximum(F a, F b) { return where(a == b, as_float(bits(a) & bits(b)), max(a, b)); }

struct Larger {
    I operator()(I a, I b) const { return max(a, b); }
};
struct Smaller {
    I operator()(I a, I b) const { return min(a, b); }
};
// The larger of what was found so far and x, the smaller of patterns >= 0; of a ragged block, lanes from `end` on left
// out.
template <bool RAGGED> inline I larger(I most, I x, int i, int end) {
    if (RAGGED && i + W > end)
        x = where(iota(i) < I(end), x, I(INT32_MIN));
    return max(most, x);
}
// Of |x|, compared as a float: a limit leaves out NaN.
template <bool RAGGED> inline I larger(I most, F x, int i, int end) {
    if (RAGGED && i + W > end)
        x = where(iota(i) < I(end), x, F(0.0f));
    return bits(at_least(abs(x), as_float(most)));
}
template <bool RAGGED> inline I smaller(I least, I x, int i, int end) {
    if (RAGGED && i + W > end)
        x = where(iota(i) < I(end), x, I(INT32_MAX));
    return min_unsigned(least, x);
}
inline I largest(const I *rows) { return across(rows, Larger()); }
inline I smallest(const I *rows) { return across(rows, Smaller()); }

// N entries from the b-th N on, on their way to the first-level cache; a line once.  Any address may be asked for.
template <int N, class T> inline void fetch(const T *p, int b) {
    constexpr int size = N * (int)sizeof(T);
    if (size % 64 == 0 || b * size % 64 == 0)
        for (int at = 0; at < size; at += 64)
            __builtin_prefetch((const char *)(p + (int64_t)b * N) + at);
}

// -- codes of fewer than 8 bits: a byte holds those of neighbours, the first one in its lowest bits

// Two neighbours in a byte, and a byte as two neighbours; codes may come with bits above theirs.  GCC's own vectors of
// the loop at the end take 40 cycles more for 16 parameters of AdamW in 4 bits.
template <int BITS> inline void pair(uint8_t *__restrict to, const uint8_t *__restrict from, int pairs) {
    constexpr int mask = (1 << BITS) - 1;
    int j = 0;
#if defined(__AVX2__)
    const __m256i low = _mm256_set1_epi8(mask), by = _mm256_set1_epi16(1 | 1 << (8 + BITS));
    for (; j + 32 <= pairs; j += 32) {
        const __m256i *at = (const __m256i *)(from + 2 * j);
        const __m256i first = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_loadu_si256(at), low), by);
        const __m256i second = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_loadu_si256(at + 1), low), by);
        const __m256i bytes = _mm256_packus_epi16(first, second);
        _mm256_storeu_si256((__m256i *)(to + j), _mm256_permute4x64_epi64(bytes, 0xd8));
    }
#endif
    for (; j < pairs; j++)
        to[j] = (uint8_t)((from[2 * j] & mask) | (from[2 * j + 1] & mask) << BITS);
}
template <int BITS> inline void part(uint8_t *__restrict to, const uint8_t *__restrict from, int pairs) {
    constexpr int mask = (1 << BITS) - 1;
    int j = 0;
#if defined(__AVX2__)
    const __m256i low = _mm256_set1_epi8(mask);
    for (; j + 32 <= pairs; j += 32) {
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(from + j)), 0xd8);
        const __m256i first = _mm256_and_si256(bytes, low);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, BITS), low);
        _mm256_storeu_si256((__m256i *)(to + 2 * j), _mm256_unpacklo_epi8(first, second));
        _mm256_storeu_si256((__m256i *)(to + 2 * j + 32), _mm256_unpackhi_epi8(first, second));
    }
#endif
    for (; j < pairs; j++) {
        to[2 * j] = (uint8_t)(from[j] & mask);
        to[2 * j + 1] = (uint8_t)(from[j] >> BITS & mask);
    }
}

// Codes of 1 and 2 bits are halved and paired until they are as wide as wanted, some at a time.
constexpr int CODES = 256;
template <int BITS> inline void unpack(uint8_t *__restrict to, const uint8_t *__restrict from, int count) {
    if constexpr (BITS == 4)
        return part<4>(to, from, count / 2);
    uint8_t wider[CODES / 2];
    for (int start = 0; BITS < 4 && start < count; start += CODES) {
        const int pairs = (count - start < CODES ? count - start : CODES) / 2;
        unpack<BITS < 4 ? 2 * BITS : 4>(wider, from + start * BITS / 8, pairs);
        part<BITS>(to + start, wider, pairs);
    }
}
template <int BITS> inline void pack(uint8_t *__restrict to, const uint8_t *__restrict from, int count) {
    if constexpr (BITS == 4)
        return pair<4>(to, from, count / 2);
    uint8_t wider[CODES / 2];
    for (int start = 0; BITS < 4 && start < count; start += CODES) {
        const int pairs = (count - start < CODES ? count - start : CODES) / 2;
        pair<BITS>(wider, from + start, pairs);
        pack<BITS < 4 ? 2 * BITS : 4>(to + start * BITS / 8, wider, pairs);
    }
}
// Codes behind the end of a row are written as 0.
template <int BLOCK> inline void no_codes(uint8_t *codes, int blocks, const int *live) {
    for (int b = 0; live && b < blocks; b++)
        memset(codes + b * BLOCK + live[b], 0, (size_t)(BLOCK - live[b]));
}

// -- gradients: the element type behind the pointer; a kernel reads them as F

struct float32 {
    typedef float stored;
    static F load(const float *p) { return ::load(p); }
};
struct bfloat16 {
    typedef uint16_t stored;
    static F load(const uint16_t *p) { return widened(raw(p)); }
};
struct float16 {
    typedef uint16_t stored;
    static F load(const uint16_t *p) { return widen_half(raw(p)); }
};

// -- random bits: a hash of the element's number, the tensor and the step (gpu/codecs.py says why)

constexpr int SHARE = 16;  // neighbours that share a hash
constexpr int PLACE = 8;  // bits of a step's place in its window
constexpr int P = -1;     // the weight, the last one to be dealt bits

// The bits that a value wants; rare ones, which not every step stores, have words of their own, drawn anew each time.
struct Want {
    int bits;
    bool rare;
};
// A value's bits: `bits` of a word, above its lowest `shift`.
struct Share {
    int word, shift, bits;
};
// The factor of the step's place in its window; whether every step hashes anew.
struct Word {
    int32_t at;
    bool anew;
};

// Which bits of which words each of N values is rounded by: keys.deal.
template <int N> struct Dealt {
    Share share[N];
    Word word[N];
    int words;

    constexpr const Share &of(int value) const { return share[value == P ? N - 1 : value]; }
};

template <int N> constexpr Dealt<N> dealt(const Want (&wants)[N]) {
    Dealt<N> out{};
    for (int rare = 0; rare < 2; rare++) {
        int top = 0;  // bits of the last word that are left
        for (int v = 0; v < N; v++) {
            if (!wants[v].bits || wants[v].rare != (bool)rare)
                continue;
            if (top < wants[v].bits)
                top = 32, out.words++;
            top -= wants[v].bits;
            out.share[v] = {out.words - 1, top, wants[v].bits};
        }
        // What the first rare value takes is another word.
        for (int v = N - 1, last = -1; v >= 0; v--) {
            Share &s = out.share[v];
            if (!wants[v].bits || wants[v].rare != (bool)rare || s.word == last)
                continue;
            last = s.word;
            if (s.shift + s.bits < 32)
                s.shift = 0;  // the last of several: a mask is enough
        }
    }
    for (int v = 0; v < N; v++) {
        const Share s = out.share[v];
        if (s.bits && wants[v].rare)
            out.word[s.word].anew = true;
        else if (s.bits >= PLACE)
            out.word[s.word].at += 1 << (s.shift + s.bits - PLACE);
    }
    return out;
}

constexpr int count(int mask) { return mask ? (mask & 1) + count(mask >> 1) : 0; }

// An element's words.
template <class Kernel> struct Noise {
    using Of = Kernel;
    I word[Kernel::NOISE.words ? Kernel::NOISE.words : 1];
};

// The pattern of a new value that rounding adds less than 2^16 to, NaN's without a payload where that could carry.
template <class N> inline I bits_or_nan(F a) { return N::Of::SHORT ? bits(a) : bits_or_nan(a); }

// Random bits of a codec: uniform on 0 .. 2^bits - 1; on 0 .. 2^WIDTH - 1, further bits of the word below its own; the
// midpoints of 2^bits cells of 0 .. 2^WIDTH.
template <int VALUE, class Kernel> inline I integer(const Noise<Kernel> &noise) {
    constexpr Share s = Kernel::NOISE.of(VALUE);
    const I x = s.shift ? lshr(noise.word[s.word], s.shift) : noise.word[s.word];
    return s.shift + s.bits == 32 ? x : x & (int32_t)((1u << s.bits) - 1);
}
template <int VALUE, int WIDTH, class Kernel> inline I fraction(const Noise<Kernel> &noise) {
    constexpr Share s = Kernel::NOISE.of(VALUE);
    constexpr int below = WIDTH - s.bits;
    if constexpr (s.shift + s.bits == 32)
        return lshr(noise.word[s.word], 32 - WIDTH);
    else if constexpr (below == 0)
        return integer<VALUE>(noise);
    else
        return integer<VALUE>(noise) << below | I(1 << (below - 1));
}
template <int VALUE, int WIDTH, class Kernel> inline I middle(const Noise<Kernel> &noise) {
    constexpr Share s = Kernel::NOISE.of(VALUE);
    constexpr int below = WIDTH - s.bits;
    if constexpr (s.shift + s.bits == 32 && below == 1)
        return lshr(noise.word[s.word], s.shift - 1) | I(1);
    else
        return integer<VALUE>(noise) << below | I(1 << (below - 1));
}

// The words of a tile's elements: of its hashes, two for SHARE elements, and those that a later loop reads again.
template <class Kernel> struct Words {
    static constexpr int DRAWN = Kernel::DRAWN, KEPT = Kernel::KEPT;
    static constexpr unsigned M1 = 0x7feb352d, M2 = 0x846ca68b, M3 = 0x9e3779b1;
    static constexpr int HASHES = Kernel::TILE < SHARE * VECTOR ? VECTOR : Kernel::TILE / SHARE;
    alignas(64) int32_t turned[count(DRAWN) ? count(DRAWN) : 1][HASHES];
    alignas(64) int32_t fixed[count(DRAWN) ? count(DRAWN) : 1][HASHES];
    alignas(64) int32_t kept_[count(KEPT) ? count(KEPT) : 1][count(KEPT) ? Kernel::TILE : 1];

    static constexpr uint32_t salt(int k) {
        return k == 0 ? 0 : k == 1 ? 0x3c6ef372 : k == 2 ? 0x1b873593 : k == 3 ? 0x5851f42d : (2 * k + 1) * M3;
    }
    static constexpr int below(int mask, int k) { return count(mask & ((1 << k) - 1)); }

    // For `size` elements, of which `first` is the number of the first one.
    Words(int size, int32_t first, int32_t stream_key, int32_t step_key) {
        for (int i = 0; DRAWN && i < (size + SHARE - 1) / SHARE; i += W)
            for (int k = 0; k < Kernel::NOISE.words; k++)
                if (DRAWN >> k & 1)
                    hash(k, i, first, stream_key, step_key);
    }
    inline void hash(int k, int i, int32_t first, int32_t stream_key, int32_t step_key) {
        const Word w = Kernel::NOISE.word[k];
        const int32_t place = step_key & ((1 << PLACE) - 1);
        I x = (lshr(I(first), 4) + iota(i)) ^ stream_key ^ (step_key & -(1 << PLACE));
        if (w.anew)  // far from what sets the hashes of a tensor apart
            x = x ^ (int32_t)(place * M2);
        x = (k ? x ^ (int32_t)salt(k) : x) * (int32_t)M1;
        x = (x ^ lshr(x, 16)) * (int32_t)M2;
        x = x ^ lshr(x, 15);
        I y = (x ^ lshr(x, 16)) * (int32_t)M3;
        y = (y ^ lshr(y, 15)) * (int32_t)M1;
        int32_t moved = w.anew ? 0 : place * w.at;
        for (const Share &s : Kernel::NOISE.share)
            if (!w.anew && s.word == k && s.bits && s.bits < PLACE) {  // no room for all bits of the place
                const int32_t highest = place & -(1 << (PLACE - s.bits));
                const int up = s.shift + s.bits - PLACE;
                moved ^= up >= 0 ? highest << up : highest >> -up;
            }
        ::store(turned[below(DRAWN, k)] + i, y ^ lshr(y, 16));
        ::store(fixed[below(DRAWN, k)] + i, x ^ moved);
    }
    // Each by its own distance: triangular numbers, and 16 more for the second eight.
    Noise<Kernel> at(int i) const {
        Noise<Kernel> out;
        const I lane = iota(i & (SHARE - 1)), n = lane & I(7), turn = (n * (n + I(1)) >> 1) + ((lane & I(8)) << 1);
        for (int k = 0; k < Kernel::NOISE.words; k++)
            if (DRAWN >> k & 1)
                out.word[k] = I(fixed[below(DRAWN, k)][(unsigned)i / SHARE]) ^ rotl(I(turned[below(DRAWN, k)][(unsigned)i / SHARE]), turn & I(31));
        return out;
    }
    void keep(const Noise<Kernel> &noise, int i) {
        for (int k = 0; k < Kernel::NOISE.words; k++)
            if (KEPT >> k & 1)
                ::store(kept_[below(KEPT, k)] + i, noise.word[k]);
    }
    Noise<Kernel> kept(int i) const {
        Noise<Kernel> out;
        for (int k = 0; k < Kernel::NOISE.words; k++)
            if (KEPT >> k & 1)
                out.word[k] = ::load(kept_[below(KEPT, k)] + i);
        return out;
    }
};

// -- the walk

// The unit that a column has one entry for: an element, a block; a row's columns; eight packed codes.
enum Kind : int32_t { ELEMENT, BLOCK_OF, ROW, COLUMN, MATRIX, WHOLE, EIGHTH };

struct Column {
    int bytes;  // per entry
    Kind kind;
    bool written;
};

constexpr int SIZES_OF_TENSOR = 6;  // of a table row, behind its addresses

// The scalars of a step, `width` for each of its lines, and the keys of their random bits.
struct Lines {
    const float *scalars;
    const int32_t *keys;
    int width;

    // The line of a tensor stands in the upper half of the entry that has its stream key.
    const float *of(int64_t entry) const { return scalars + (entry >> 32) * width; }
    int32_t key(int64_t entry) const { return keys[entry >> 32]; }
};

// A tensor, seen as rows of whole blocks: the last block of a row may hold fewer elements.  It may be a part of a larger
// one: elements are numbered as they stand there, each row in whole blocks.
struct Tensor {
    const int64_t *at;  // an address for each column
    int64_t numel, columns, blocks_per_row, blocks;
    int64_t number;  // of the first element
    int64_t pace;    // from a row to the next, in numbers
    bool apart;      // rows do not follow one another in the numbers
    int32_t stream_key;
};

template <class C, int N> struct Columns {
    C at[N];
    constexpr const C &operator[](int k) const { return at[k]; }
};

template <class Kernel> constexpr int width() { return sizeof(Kernel::COLUMNS) / sizeof(Column); }

// Where a column's entries of a block begin: by blocks, elements or packed eights.
inline int64_t place_of(Kind kind, int64_t block, int64_t element, int64_t eighth) {
    return kind == BLOCK_OF ? block : kind == EIGHTH ? eighth : kind == WHOLE ? 0 : element;
}

// A flat tensor is one long row.
template <class Kernel> Tensor read_row(const int64_t *row) {
    constexpr int n = width<Kernel>(), block = Kernel::BLOCK;
    Tensor t;
    t.at = row;
    const int64_t wide = row[n + 5];  // elements of a row of the larger one
    t.numel = row[n];
    t.columns = row[n + 1];
    t.pace = (wide + block - 1) / block * block;
    t.number = row[n + 3] * t.pace + row[n + 4];
    t.apart = t.columns != wide && t.columns != t.numel;
    if (t.columns % block == 0 && !t.apart)
        t.columns = t.numel;
    t.blocks_per_row = t.columns ? (t.columns + block - 1) / block : 0;
    t.blocks = t.columns ? t.numel / t.columns * t.blocks_per_row : 0;
    t.stream_key = (int32_t)row[n + 2];
    return t;
}

// The number of a block's first element.
template <class Kernel> inline int64_t number_of(const Tensor &t, int64_t block) {
    if (!t.apart)
        return t.number + block * Kernel::BLOCK;
    return t.number + block / t.blocks_per_row * t.pace + block % t.blocks_per_row * Kernel::BLOCK;
}

// A tile: where all blocks are whole, nothing looks at their ends, which saves a thirtieth of a step.
template <class Kernel, class... Known>
inline void tile(char *const *at, int count, const int *live, int64_t first, Known... known) {
    if (Kernel::BLOCK > 1 && live)
        Kernel::template tile<(Kernel::BLOCK > 1)>(at, count, live, first, known...);
    else
        Kernel::template tile<false>(at, count, live, first, known...);
}

// Blocks [first, first + count) of a tensor that are not all whole: copied to a tile of their own, behind `shift` empty
// ones; reductions leave out what a block lacks.
template <class Kernel>
void staged(const Tensor &t, int64_t first, int count, int shift, const float *scalars, int32_t step_key) {
    constexpr int n = width<Kernel>(), block = Kernel::BLOCK, most = Kernel::TILE / block;
    int64_t start[most], eights[most];
    int live[most];
    for (int b = 0; b < count; b++) {
        const int64_t row = (first + b) / t.blocks_per_row, lane = (first + b) % t.blocks_per_row * block;
        start[b] = row * t.columns + lane;
        eights[b] = row * ((t.columns + 7) / 8) + lane / 8;
        live[b] = (int)(t.columns - lane < block ? t.columns - lane : block);
    }
    alignas(64) static thread_local char room[n][Kernel::TILE * 4];
    char *at[n];
    for (int c = 0; c < n; c++) {
        const Column column = Kernel::COLUMNS[c];
        const char *from = (const char *)t.at[c];
        at[c] = column.kind == WHOLE ? (char *)from : room[c];
        if (column.kind == WHOLE)
            continue;
        if (column.kind == BLOCK_OF) {
            memcpy(room[c], from + first * column.bytes, (size_t)count * column.bytes);
            continue;
        }
        const bool packed = column.kind == EIGHTH;
        const int size = packed ? block / 8 : block;
        memset(room[c], 0, (size_t)shift * size * column.bytes);
        for (int b = 0; b < count; b++) {
            char *to = room[c] + (size_t)(shift + b) * size * column.bytes;
            const int n = packed ? (live[b] + 7) / 8 : live[b];
            memcpy(to, from + (packed ? eights : start)[b] * column.bytes, (size_t)n * column.bytes);
            memset(to + (size_t)n * column.bytes, 0, (size_t)(size - n) * column.bytes);
        }
    }
    tile<Kernel>(at, shift + count, live, number_of<Kernel>(t, first) - shift, scalars, step_key, t.stream_key);
    for (int c = 0; c < n; c++) {
        const Column column = Kernel::COLUMNS[c];
        if (!column.written)
            continue;
        char *to = (char *)t.at[c];
        if (column.kind == BLOCK_OF) {
            memcpy(to + first * column.bytes, room[c], (size_t)count * column.bytes);
            continue;
        }
        const bool packed = column.kind == EIGHTH;
        const int size = packed ? block / 8 : block;
        for (int b = 0; b < count; b++)
            memcpy(to + (packed ? eights : start)[b] * column.bytes, room[c] + (size_t)(shift + b) * size * column.bytes,
                   (size_t)(packed ? (live[b] + 7) / 8 : live[b]) * column.bytes);
    }
}

// Blocks [first, first + count) of a tensor, whole tiles where they lie flat in memory.
template <class Kernel> void walk(const Tensor &t, int64_t first, int64_t count, const float *scalars, int32_t step_key) {
    constexpr int n = width<Kernel>(), block = Kernel::BLOCK, most = Kernel::TILE / block;
    const bool flat = t.columns == t.numel;
    const int64_t end = first + count;
    while (first < end) {
        int64_t left = end - first, lane = first, start = first * block, packed = first * (block / 8);
        int64_t whole_end = t.numel;
        if (t.apart) {  // tiles of one row each
            lane = first % t.blocks_per_row;
            left = left < t.blocks_per_row - lane ? left : t.blocks_per_row - lane;
            start = first / t.blocks_per_row * t.columns + lane * block;
            packed = first / t.blocks_per_row * ((t.columns + 7) / 8) + lane * (block / 8);
            whole_end = t.columns;
        }
        const int64_t number = number_of<Kernel>(t, first);
        int now = (int)(left < most ? left : most), shift = 0;
        // Elements that are not stored in blocks are counted one by one: whole registers whose elements share a hash need
        // no copy.
        constexpr int unit = SHARE;
        if (block == 1) {
            shift = (int)(number % SHARE);
            if (shift)
                now = now < SHARE - shift ? now : SHARE - shift;
            else if (now >= unit)
                now -= now % unit;
        } else if ((flat || t.apart) && now > VECTOR) {
            now -= now % VECTOR;
        } else if ((flat || t.apart) && now > 1 && (lane + now) * block > whole_end) {
            now--;  // the ragged one by itself
        }
        const bool whole = (flat || t.apart) && !shift && (block == 1 ? now % unit == 0 : (lane + now) * block <= whole_end);
        if (whole) {
            // Elements are read and written where they lie, and so are the values of blocks that fill registers.
            alignas(64) char values[n][VECTOR * 8];
            const bool few = block > 1 && now % VECTOR;
            char *at[n];
            for (int c = 0; c < n; c++) {
                const Column column = Kernel::COLUMNS[c];
                at[c] = (char *)t.at[c] + place_of(column.kind, first, start, packed) * column.bytes;
                if (few && column.kind == BLOCK_OF) {
                    memset(values[c], 0, sizeof(values[c]));
                    at[c] = (char *)memcpy(values[c], at[c], (size_t)now * column.bytes);
                }
            }
            tile<Kernel>(at, now, nullptr, number, scalars, step_key, t.stream_key);
            for (int c = 0; few && c < n; c++) {
                const Column column = Kernel::COLUMNS[c];
                if (column.kind == BLOCK_OF && column.written)
                    memcpy((char *)t.at[c] + first * column.bytes, values[c], (size_t)now * column.bytes);
            }
        } else {
            staged<Kernel>(t, first, now, shift, scalars, step_key);
        }
        first += now;
    }
}

// One step over all tensors.  Work is cut by tiles, evenly; a tile's bits do not depend on who computes it.
template <class Kernel>
int32_t run(const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads) {
    constexpr int most = Kernel::TILE / Kernel::BLOCK, n = width<Kernel>(), row = n + SIZES_OF_TENSOR;
    const Lines lines = {scalars, keys, Kernel::SCALARS};
    int64_t tiles = 0;
    for (int64_t k = 0; k < tensors; k++)
        tiles += (read_row<Kernel>(table + k * row).blocks + most - 1) / most;
    if (threads > tiles)
        threads = tiles ? (int32_t)tiles : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
        const int64_t who = omp_get_thread_num(), all = omp_get_num_threads();
#else
        const int64_t who = 0, all = 1;
#endif
        int64_t low = tiles * who / all, high = tiles * (who + 1) / all;
        for (int64_t k = 0; k < tensors && low < high; k++) {
            const Tensor t = read_row<Kernel>(table + k * row);
            const int64_t own = (t.blocks + most - 1) / most;
            if (low < own) {
                const int64_t stop = high < own ? high : own, end = stop * most < t.blocks ? stop * most : t.blocks;
                walk<Kernel>(t, low * most, end - low * most, lines.of(t.at[n + 2]), lines.key(t.at[n + 2]));
                low = stop;
            }
            low -= own;
            high -= own;
        }
    }
    return 0;
}

// The functions behind the exported ones; kernels of several stages have their own (stages.h).
template <class Kernel, class = void> struct Runner {
    static int32_t step(const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys,
                        int32_t threads) {
        return run<Kernel>(table, tensors, scalars, keys, threads);
    }
    static int32_t stages(const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys,
                          int32_t threads, int32_t begin, int32_t end) {
        return begin == 0 && end == 1 ? step(table, tensors, scalars, keys, threads) : 1;
    }
};

}  // namespace

#define OPTGEN_EXPORT                                                                                                 \
    extern "C" __attribute__((visibility("default"))) int32_t optgen_step(                                            \
        const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads) {             \
        return Runner<OPTGEN_KERNEL<OPTGEN_GRAD>>::step(table, tensors, scalars, keys, threads);                  \
    }                                                                                                                 \
    extern "C" __attribute__((visibility("default"))) int32_t optgen_stages(                                          \
        const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads,               \
        int32_t begin, int32_t end) {                                                                                 \
        return Runner<OPTGEN_KERNEL<OPTGEN_GRAD>>::stages(table, tensors, scalars, keys, threads, begin, end);    \
    }

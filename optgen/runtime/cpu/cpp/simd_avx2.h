// F, I and M as one AVX2 register each: 8 floats, 8 whole numbers of 32 bits, 8 truths.

constexpr int W = 8;

struct F {
    __m256 v;
    F() = default;
    F(__m256 x) : v(x) {}
    F(float x) : v(_mm256_set1_ps(x)) {}
};
struct I {
    __m256i v;
    I() = default;
    I(__m256i x) : v(x) {}
    I(int32_t x) : v(_mm256_set1_epi32(x)) {}
};
struct M {
    __m256i v;  // all bits of a lane or none
};
#include "operators.h"

inline M mask(__m256 x) { return {_mm256_castps_si256(x)}; }
inline M operator<(F a, F b) { return mask(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)); }
inline M operator<=(F a, F b) { return mask(_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)); }
inline M operator==(F a, F b) { return mask(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)); }
inline M operator!=(F a, F b) { return mask(_mm256_cmp_ps(a.v, b.v, _CMP_NEQ_UQ)); }

inline I operator<<(I a, int k) { return _mm256_slli_epi32(a.v, k); }
inline I operator>>(I a, int k) { return _mm256_srai_epi32(a.v, k); }
inline I lshr(I a, int k) { return _mm256_srli_epi32(a.v, k); }
inline I rotl(I a, I k) {
    return _mm256_or_si256(_mm256_sllv_epi32(a.v, k.v), _mm256_srlv_epi32(a.v, (I(32) - k).v));
}
inline M operator<(I a, I b) { return {_mm256_cmpgt_epi32(b.v, a.v)}; }
inline M operator==(I a, I b) { return {_mm256_cmpeq_epi32(a.v, b.v)}; }

inline M operator<=(I a, I b) { return ~(b < a); }
inline M operator!=(I a, I b) { return ~(a == b); }

inline F where(M c, F a, F b) { return _mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(c.v)); }
inline I where(M c, I a, I b) { return _mm256_blendv_epi8(b.v, a.v, c.v); }
// The machine's own min and max give the second operand where either is NaN: right but for a NaN in the first.
inline F min(F a, F b) { return where(a == a, _mm256_min_ps(a.v, b.v), a); }
inline F max(F a, F b) { return where(a == a, _mm256_max_ps(a.v, b.v), a); }
// With a number for the first, which is no NaN, that is all.
inline F at_most(F most, F x) { return _mm256_min_ps(most.v, x.v); }
inline F at_least(F least, F x) { return _mm256_max_ps(least.v, x.v); }
inline I min(I a, I b) { return _mm256_min_epi32(a.v, b.v); }
inline I max(I a, I b) { return _mm256_max_epi32(a.v, b.v); }
inline I min_unsigned(I a, I b) { return _mm256_min_epu32(a.v, b.v); }
inline F abs(F a) { return _mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
inline F sqrt(F a) { return _mm256_sqrt_ps(a.v); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
inline F floor(F a) { return _mm256_floor_ps(a.v); }
inline F rint(F a) { return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline I bits(F a) { return _mm256_castps_si256(a.v); }
// Any NaN is the one without a payload, so that it stays NaN with something added to its pattern.
inline I bits_or_nan(F a) {
    const __m256 number = _mm256_cmp_ps(a.v, a.v, _CMP_EQ_OQ);
    return bits(_mm256_blendv_ps(_mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), a.v, number));
}
inline F as_float(I a) { return _mm256_castsi256_ps(a.v); }
inline I to_int(F a) { return _mm256_cvttps_epi32(a.v); }
inline I to_int(M a) { return _mm256_srli_epi32(a.v, 31); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a.v); }
// -1, 0 or 1; a zero keeps its sign, NaN stays NaN.
inline F sign(F x) {
    const __m256 one = _mm256_or_ps(_mm256_and_ps(x.v, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
    return _mm256_blendv_ps(x.v, one, _mm256_cmp_ps(x.v, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}

inline F gather(const float *p, I at) { return _mm256_i32gather_ps(p, at.v, 4); }

inline F load(const float *p) { return _mm256_loadu_ps(p); }
inline I load(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline I load(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
inline I load(const int8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
inline I load(const uint16_t *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I load(const int16_t *p) { return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline void store(float *p, F x) { _mm256_storeu_ps(p, x.v); }
inline void store(int32_t *p, I x) { _mm256_storeu_si256((__m256i *)p, x.v); }
// Halves from byte K of every lane, then bytes 1: gathered within 128 bits, then brought together.
template <int K> inline __m256i gathered(I x) {
    const int low = 0x05040100 + 0x01010101 * K, high = 0x0d0c0908 + 0x01010101 * K;
    const __m256i to = _mm256_setr_epi32(low, high, 0x0d090501, -1, low, high, 0x0d090501, -1);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x.v, to), _mm256_setr_epi32(0, 1, 4, 5, 2, 6, 3, 7));
}
template <int K> inline __m128i halves(I x) { return _mm256_castsi256_si128(gathered<K>(x)); }
template <int K> inline void store_half(uint16_t *p, I x) { _mm_storeu_si128((__m128i *)p, halves<K>(x)); }
template <int K> inline void store_byte(uint8_t *p, I x) {
    if (K == 1)  // compilers see that these come with the upper halves
        return _mm_storel_epi64((__m128i *)p, _mm256_extracti128_si256(gathered<2>(x), 1));
    const __m256i found = _mm256_shuffle_epi8(x.v, _mm256_set1_epi32(0x0c080400 + 0x01010101 * K));
    const __m256i order = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
    _mm_storel_epi64((__m128i *)p, _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(found, order)));
}
inline void store(uint8_t *p, I x) { store_byte<0>(p, x); }
inline void store(int8_t *p, I x) { store_byte<0>((uint8_t *)p, x); }
inline void store(uint16_t *p, I x) { store_half<0>(p, x); }
inline void store(int16_t *p, I x) { store_half<0>((uint16_t *)p, x); }

// Narrow numbers as they were loaded.
struct U8 {
    __m128i v;
};
struct U16 {
    __m128i v;
};
struct I16 {
    __m128i v;
};
inline U8 raw(const uint8_t *p) { return {_mm_loadl_epi64((const __m128i *)p)}; }
inline U16 raw(const uint16_t *p) { return {_mm_loadu_si128((const __m128i *)p)}; }
inline I16 raw(const int16_t *p) { return {_mm_loadu_si128((const __m128i *)p)}; }
inline I to_int(U8 x) { return _mm256_cvtepu8_epi32(x.v); }
inline I to_int(U16 x) { return _mm256_cvtepu16_epi32(x.v); }
inline I to_int(I16 x) { return _mm256_cvtepi16_epi32(x.v); }
// From copies in both halves of a register, which a load makes by itself, one shuffle puts bytes where they belong.
inline F widened(U16 x) {
    const __m256i to = _mm256_setr_epi64x(0x0302808001008080, 0x0706808005048080, 0x0b0a808009088080, 0x0f0e80800d0c8080);
    return as_float(I(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(x.v), to)));
}
inline F counter(U8 x) { return as_float(to_int(x) | I(0x4b000000)); }
// A half above a byte above 8 zeros.
inline I joined(U16 high, U8 low) {
    const __m256i to = _mm256_add_epi32(
        _mm256_set1_epi32((int)0x80800080), _mm256_setr_epi32(0, 0x100, 0x200, 0x300, 0x400, 0x500, 0x600, 0x700));
    return bits(widened(high)) | I(_mm256_shuffle_epi8(_mm256_broadcastq_epi64(low.v), to));
}

inline F widen_half(U16 x) { return _mm256_cvtph_ps(x.v); }
inline F widen_half(I x) { return _mm256_cvtph_ps(halves<0>(x)); }
inline I narrow_half(F x) { return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); }

inline I ramp() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline I iota(int i) { return ramp() + I(i); }

// Lane j: the largest (smallest) of the 8 lanes of rows[j]; a tree of 7 whole-register steps.
template <class Op> inline I across(const I *rows, Op op) {
    __m256i a[4], b[2];
    for (int j = 0; j < 4; j++) {  // rows j and j + 4: halves of 128 bits
        const __m256i x = rows[j].v, y = rows[j + 4].v;
        a[j] = op(I(_mm256_permute2x128_si256(x, y, 0x20)), I(_mm256_permute2x128_si256(x, y, 0x31))).v;
    }
    for (int j = 0; j < 2; j++)
        b[j] = op(I(_mm256_unpacklo_epi64(a[j], a[j + 2])), I(_mm256_unpackhi_epi64(a[j], a[j + 2]))).v;
    const __m256 x = _mm256_castsi256_ps(b[0]), y = _mm256_castsi256_ps(b[1]);
    const I even = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), odd = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd));
    return _mm256_permutevar8x32_epi32(op(even, odd).v, _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7));
}

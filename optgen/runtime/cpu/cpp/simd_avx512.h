// F, I and M as one AVX-512 register each: 16 floats, 16 whole numbers of 32 bits, 16 truths.

constexpr int W = 16;

struct F {
    __m512 v;
    F() = default;
    F(__m512 x) : v(x) {}
    F(float x) : v(_mm512_set1_ps(x)) {}
};
struct I {
    __m512i v;
    I() = default;
    I(__m512i x) : v(x) {}
    I(int32_t x) : v(_mm512_set1_epi32(x)) {}
};
struct M {
    __mmask16 v;
};
#include "operators.h"

inline M operator<(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline M operator<=(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline M operator==(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline M operator!=(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }

inline I operator<<(I a, int k) { return _mm512_slli_epi32(a.v, k); }
inline I operator>>(I a, int k) { return _mm512_srai_epi32(a.v, k); }
inline I lshr(I a, int k) { return _mm512_srli_epi32(a.v, k); }
inline I rotl(I a, I k) { return _mm512_rolv_epi32(a.v, k.v); }
inline M operator<(I a, I b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
inline M operator<=(I a, I b) { return {_mm512_cmple_epi32_mask(a.v, b.v)}; }
inline M operator==(I a, I b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
inline M operator!=(I a, I b) { return {_mm512_cmpneq_epi32_mask(a.v, b.v)}; }

inline F where(M c, F a, F b) { return _mm512_mask_blend_ps(c.v, b.v, a.v); }
inline I where(M c, I a, I b) { return _mm512_mask_blend_epi32(c.v, b.v, a.v); }
// The machine's own min and max give the second operand where either is NaN: right but for a NaN in the first.
inline F min(F a, F b) { return where(a == a, _mm512_min_ps(a.v, b.v), a); }
inline F max(F a, F b) { return where(a == a, _mm512_max_ps(a.v, b.v), a); }
// With a number for the first, which is no NaN, that is all.
inline F at_most(F most, F x) { return _mm512_min_ps(most.v, x.v); }
inline F at_least(F least, F x) { return _mm512_max_ps(least.v, x.v); }
inline I min(I a, I b) { return _mm512_min_epi32(a.v, b.v); }
inline I max(I a, I b) { return _mm512_max_epi32(a.v, b.v); }
inline I min_unsigned(I a, I b) { return _mm512_min_epu32(a.v, b.v); }
inline F abs(F a) { return _mm512_abs_ps(a.v); }
inline F sqrt(F a) { return _mm512_sqrt_ps(a.v); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
inline F floor(F a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline F rint(F a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline I bits(F a) { return _mm512_castps_si512(a.v); }
// Any NaN is the one without a payload, so that it stays NaN with something added to its pattern.
inline I bits_or_nan(F a) { return bits(_mm512_fixupimm_ps(a.v, a.v, _mm512_set1_epi32(0x33), 0)); }
inline F as_float(I a) { return _mm512_castsi512_ps(a.v); }
inline I to_int(F a) { return _mm512_cvttps_epi32(a.v); }
inline I to_int(M a) { return _mm512_maskz_set1_epi32(a.v, 1); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a.v); }
// -1, 0 or 1; a zero keeps its sign, NaN stays NaN.  A nibble for each kind of float, from the lowest: quiet NaN,
// signalling NaN, zero (each as it is), one, -infinity, infinity, less than zero, more than zero (-1 or 1).
inline F sign(F x) { return _mm512_fixupimm_ps(x.v, x.v, _mm512_set1_epi32((int)0xa9a9a000), 0); }

inline F gather(const float *p, I at) { return _mm512_i32gather_ps(at.v, p, 4); }

inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline I load(const int32_t *p) { return _mm512_loadu_si512(p); }
inline I load(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I load(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I load(const uint16_t *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
inline I load(const int16_t *p) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x.v); }
inline void store(int32_t *p, I x) { _mm512_storeu_si512(p, x.v); }

#ifdef __AVX512VBMI__
// Byte (or half) K of every lane, in one permutation; the conversions with truncation take two.
template <int K> inline __m512i bytes_of_lanes() {
    return _mm512_add_epi8(_mm512_setr_epi64(0x1c1814100c080400, 0x3c3834302c282420, 0, 0, 0, 0, 0, 0), _mm512_set1_epi8(K));
}
template <int K> inline void store_byte(uint8_t *p, I x) {
    _mm_storeu_si128((__m128i *)p, _mm512_castsi512_si128(_mm512_permutexvar_epi8(bytes_of_lanes<K>(), x.v)));
}
// Those of two vectors, from two registers.
template <int K> inline void store_bytes(uint8_t *p, I x, I y) {
    const __m512i to = _mm512_add_epi8(
        _mm512_setr_epi64(0x1c1814100c080400, 0x3c3834302c282420, 0x5c5854504c484440, 0x7c7874706c686460, 0, 0, 0, 0),
        _mm512_set1_epi8(K));
    _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(_mm512_permutex2var_epi8(x.v, to, y.v)));
}
template <int K> inline void store_halves(uint16_t *p, I x, I y) {
    const __m512i to = _mm512_add_epi8(
        _mm512_setr_epi64(
            0x0d0c090805040100, 0x1d1c191815141110, 0x2d2c292825242120, 0x3d3c393835343130, 0x4d4c494845444140,
            0x5d5c595855545150, 0x6d6c696865646160, 0x7d7c797875747170),
        _mm512_set1_epi8(K));
    _mm512_storeu_si512(p, _mm512_permutex2var_epi8(x.v, to, y.v));
}
#else
template <int K> inline void store_byte(uint8_t *p, I x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(lshr(x, 8 * K).v));
}
#endif
inline __m512i halves_of_lanes(int k) {
    const __m512i even = _mm512_setr_epi64(
        0x0006000400020000, 0x000e000c000a0008, 0x0016001400120010, 0x001e001c001a0018, 0, 0, 0, 0);
    return _mm512_add_epi16(even, _mm512_set1_epi16((short)(k / 2)));
}
template <int K> inline void store_half(uint16_t *p, I x) {
    if (K % 2)
        x = lshr(x, 8);
    const __m512i low = _mm512_permutexvar_epi16(halves_of_lanes(K), x.v);
    _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(low));
}
inline void store(uint8_t *p, I x) { store_byte<0>(p, x); }
inline void store(int8_t *p, I x) { store_byte<0>((uint8_t *)p, x); }
inline void store(uint16_t *p, I x) { store_half<0>(p, x); }
inline void store(int16_t *p, I x) { store_half<0>((uint16_t *)p, x); }

// Narrow numbers as they were loaded: what they become, one permutation says.
struct U8 {
    __m128i v;
};
struct U16 {
    __m256i v;
};
struct I16 {
    __m256i v;
};
inline U8 raw(const uint8_t *p) { return {_mm_loadu_si128((const __m128i *)p)}; }
inline U16 raw(const uint16_t *p) { return {_mm256_loadu_si256((const __m256i *)p)}; }
inline I16 raw(const int16_t *p) { return {_mm256_loadu_si256((const __m256i *)p)}; }
inline I to_int(U8 x) { return _mm512_cvtepu8_epi32(x.v); }
inline I to_int(U16 x) { return _mm512_cvtepu16_epi32(x.v); }
inline I to_int(I16 x) { return _mm512_cvtepi16_epi32(x.v); }
// The pattern of a bf16, above 16 zeros.
inline F widened(U16 x) {
    const __m512i to = _mm512_setr_epi64(
        0x0001000100000000, 0x0003000300020002, 0x0005000500040004, 0x0007000700060006, 0x0009000900080008,
        0x000b000b000a000a, 0x000d000d000c000c, 0x000f000f000e000e);
    return as_float(I(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, to, _mm512_castsi256_si512(x.v))));
}
#ifdef __AVX512VBMI__
// 2^23 + x: byte x below the pattern of 2^23.
inline F counter(U8 x) {
    const __m512i to = _mm512_setr_epi32(
        0x43424100, 0x43424101, 0x43424102, 0x43424103, 0x43424104, 0x43424105, 0x43424106, 0x43424107, 0x43424108,
        0x43424109, 0x4342410a, 0x4342410b, 0x4342410c, 0x4342410d, 0x4342410e, 0x4342410f);
    return as_float(I(_mm512_permutex2var_epi8(_mm512_castsi128_si512(x.v), to, _mm512_set1_epi32(0x4b000000))));
}
// A half above a byte above 8 zeros.
inline I joined(U16 high, U8 low) {
    const __m512i to = _mm512_setr_epi32(
        0x01004000, 0x03024100, 0x05044200, 0x07064300, 0x09084400, 0x0b0a4500, 0x0d0c4600, 0x0f0e4700, 0x11104800,
        0x13124900, 0x15144a00, 0x17164b00, 0x19184c00, 0x1b1a4d00, 0x1d1c4e00, 0x1f1e4f00);
    return _mm512_maskz_permutex2var_epi8(
        0xeeeeeeeeeeeeeeee, _mm512_castsi256_si512(high.v), to, _mm512_castsi128_si512(low.v));
}
#else
inline F counter(U8 x) { return as_float(to_int(x) | I(0x4b000000)); }
inline I joined(U16 high, U8 low) { return bits(widened(high)) | (to_int(low) << 8); }
#endif

inline F widen_half(U16 x) { return _mm512_cvtph_ps(x.v); }
inline F widen_half(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x.v)); }
inline I narrow_half(F x) { return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); }

inline I ramp() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline I iota(int i) { return ramp() + I(i); }

// Lane j: the largest (smallest) of the 16 lanes of rows[j]; a tree of 15 whole-register steps.
template <class Op> inline I across(const I *rows, Op op) {
    __m512i a[8], b[4], c[2];
    for (int j = 0; j < 8; j++) {  // rows j and j + 8: halves of 256 bits
        const __m512i x = rows[j].v, y = rows[j + 8].v;
        a[j] = op(I(_mm512_shuffle_i64x2(x, y, 0x44)), I(_mm512_shuffle_i64x2(x, y, 0xee))).v;
    }
    for (int j = 0; j < 4; j++) {  // quarters of 128 bits
        const __m512i x = a[j], y = a[j + 4];
        b[j] = op(I(_mm512_shuffle_i64x2(x, y, 0x88)), I(_mm512_shuffle_i64x2(x, y, 0xdd))).v;
    }
    for (int j = 0; j < 2; j++)
        c[j] = op(I(_mm512_unpacklo_epi64(b[j], b[j + 2])), I(_mm512_unpackhi_epi64(b[j], b[j + 2]))).v;
    const __m512 x = _mm512_castsi512_ps(c[0]), y = _mm512_castsi512_ps(c[1]);
    const I even = _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), odd = _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_epi32(order, op(even, odd).v);
}

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

inline F operator+(F a, F b) { return _mm512_add_ps(a.v, b.v); }
inline F operator-(F a, F b) { return _mm512_sub_ps(a.v, b.v); }
inline F operator*(F a, F b) { return _mm512_mul_ps(a.v, b.v); }
inline F operator/(F a, F b) { return _mm512_div_ps(a.v, b.v); }
inline F operator-(F a) { return -a.v; }
inline M operator<(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline M operator<=(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline M operator==(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline M operator!=(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }

inline I operator+(I a, I b) { return _mm512_add_epi32(a.v, b.v); }
inline I operator-(I a, I b) { return _mm512_sub_epi32(a.v, b.v); }
inline I operator*(I a, I b) { return _mm512_mullo_epi32(a.v, b.v); }
inline I operator&(I a, I b) { return a.v & b.v; }
inline I operator|(I a, I b) { return a.v | b.v; }
inline I operator^(I a, I b) { return a.v ^ b.v; }
inline I operator-(I a) { return _mm512_sub_epi32(_mm512_setzero_si512(), a.v); }
inline I operator<<(I a, int k) { return _mm512_slli_epi32(a.v, k); }
inline I operator>>(I a, int k) { return _mm512_srai_epi32(a.v, k); }
inline I lshr(I a, int k) { return _mm512_srli_epi32(a.v, k); }
inline I rotl(I a, I k) { return _mm512_rolv_epi32(a.v, k.v); }
inline M operator<(I a, I b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
inline M operator<=(I a, I b) { return {_mm512_cmple_epi32_mask(a.v, b.v)}; }
inline M operator==(I a, I b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
inline M operator!=(I a, I b) { return {_mm512_cmpneq_epi32_mask(a.v, b.v)}; }

inline M operator&(M a, M b) { return {(__mmask16)(a.v & b.v)}; }
inline M operator|(M a, M b) { return {(__mmask16)(a.v | b.v)}; }
inline M operator^(M a, M b) { return {(__mmask16)(a.v ^ b.v)}; }
inline M operator~(M a) { return {(__mmask16)~a.v}; }

inline F where(M c, F a, F b) { return _mm512_mask_blend_ps(c.v, b.v, a.v); }
inline I where(M c, I a, I b) { return _mm512_mask_blend_epi32(c.v, b.v, a.v); }
// The machine's own min and max give the second operand where either is NaN: right but for a NaN in the first.
inline F min(F a, F b) { return where(a == a, _mm512_min_ps(a.v, b.v), a); }
inline F max(F a, F b) { return where(a == a, _mm512_max_ps(a.v, b.v), a); }
inline I min(I a, I b) { return _mm512_min_epi32(a.v, b.v); }
inline I max(I a, I b) { return _mm512_max_epi32(a.v, b.v); }
inline F abs(F a) { return _mm512_abs_ps(a.v); }
inline F sqrt(F a) { return _mm512_sqrt_ps(a.v); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
inline F floor(F a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline F rint(F a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline I bits(F a) { return _mm512_castps_si512(a.v); }
inline F as_float(I a) { return _mm512_castsi512_ps(a.v); }
inline I to_int(F a) { return _mm512_cvttps_epi32(a.v); }
inline I to_int(M a) { return _mm512_maskz_set1_epi32(a.v, 1); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a.v); }

// 1 / x from the machine's estimate of 14 bits and one Newton step, within 2.7 ulp.
inline F reciprocal_of_normal(F x) {
    const __m512 r = _mm512_rcp14_ps(x.v);
    return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(x.v, r, _mm512_set1_ps(1.0f)), r);
}
// For 0 and Inf the step would make a NaN of a right estimate.
inline F reciprocal(F x) {
    const __m512 r = _mm512_rcp14_ps(x.v), e = _mm512_fnmadd_ps(x.v, r, _mm512_set1_ps(1.0f));
    return _mm512_mask_fmadd_ps(r, _mm512_cmp_ps_mask(e, e, _CMP_ORD_Q), e, r);
}

inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline I load(const int32_t *p) { return _mm512_loadu_si512(p); }
inline I load(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I load(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I load(const uint16_t *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
inline I load(const int16_t *p) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x.v); }
inline void store(int32_t *p, I x) { _mm512_storeu_si512(p, x.v); }
inline void store(uint8_t *p, I x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x.v)); }
inline void store(int8_t *p, I x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x.v)); }
inline void store(uint16_t *p, I x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x.v)); }
inline void store(int16_t *p, I x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x.v)); }

inline F widen_half(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x.v)); }
inline I narrow_half(F x) { return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); }

inline I ramp() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline I iota(int i) { return ramp() + I(i); }
// i is a multiple of W, so that the lane within eight is the same at every i.
inline I lane(int) { return ramp() & I(7); }
// Words i/8 and i/8 + 1, eight times each.
inline I spread(const int32_t *p, int i) {
    const __m512i low = _mm512_set1_epi32(p[i / 8]);
    return _mm512_mask_set1_epi32(low, 0xff00, p[i / 8 + 1]);
}

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

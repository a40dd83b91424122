// F, I and M as four numbers each, in the compilers' own vectors: for every other machine.

constexpr int W = 4;

typedef float V4f __attribute__((vector_size(16)));
typedef int32_t V4i __attribute__((vector_size(16)));
typedef uint32_t V4u __attribute__((vector_size(16)));
typedef double V4d __attribute__((vector_size(32)));

struct F {
    V4f v;
    F() = default;
    F(V4f x) : v(x) {}
    F(float x) : v(V4f{x, x, x, x}) {}
};
struct I {
    V4i v;
    I() = default;
    I(V4i x) : v(x) {}
    I(int32_t x) : v(V4i{x, x, x, x}) {}
};
struct M {
    V4i v;  // all bits of a lane or none
};
#include "operators.h"

inline I bits(F a) { return (V4i)a.v; }
inline F as_float(I a) { return (V4f)a.v; }

inline M operator<(F a, F b) { return {a.v < b.v}; }
inline M operator<=(F a, F b) { return {a.v <= b.v}; }
inline M operator==(F a, F b) { return {a.v == b.v}; }
inline M operator!=(F a, F b) { return {a.v != b.v}; }

inline I operator<<(I a, int k) { return a.v << k; }
inline I operator>>(I a, int k) { return a.v >> k; }
inline I lshr(I a, int k) { return (V4i)((V4u)a.v >> k); }
inline I rotl(I a, I k) { return (V4i)((V4u)a.v << (V4u)k.v | (V4u)a.v >> (-(V4u)k.v & 31)); }
inline M operator<(I a, I b) { return {a.v < b.v}; }
inline M operator<=(I a, I b) { return {a.v <= b.v}; }
inline M operator==(I a, I b) { return {a.v == b.v}; }
inline M operator!=(I a, I b) { return {a.v != b.v}; }

inline I where(M c, I a, I b) { return (c.v & a.v) | (~c.v & b.v); }
inline F where(M c, F a, F b) { return as_float(where(c, bits(a), bits(b))); }
// Any NaN is the one without a payload, so that it stays NaN with something added to its pattern.
inline I bits_or_nan(F a) { return where(a == a, bits(a), I(0x7fc00000)); }
// The second operand where the comparison fails, as machines do; a NaN in the first stays.
inline F min(F a, F b) { return where(a == a, where(a < b, a, b), a); }
inline F max(F a, F b) { return where(a == a, where(b < a, a, b), a); }
inline F at_most(F most, F x) { return where(most < x, most, x); }
inline F at_least(F least, F x) { return where(x < least, least, x); }
inline I min(I a, I b) { return where(a < b, a, b); }
inline I max(I a, I b) { return where(a < b, b, a); }
inline I min_unsigned(I a, I b) { return where(M{(V4u)a.v < (V4u)b.v}, a, b); }
inline F abs(F a) { return as_float(bits(a) & I(0x7fffffff)); }
inline F sqrt(F a) {
    F out;
    for (int j = 0; j < W; j++)
        out.v[j] = __builtin_sqrtf(a.v[j]);
    return out;
}
inline F fma(F a, F b, F c) {
#ifdef __FP_FAST_FMAF
    F out;
    for (int j = 0; j < W; j++)
        out.v[j] = __builtin_fmaf(a.v[j], b.v[j], c.v[j]);
    return out;
#else
    // Products of two floats are exact in double; a machine without the instruction would call a library for each.
    const V4d x = __builtin_convertvector(a.v, V4d), y = __builtin_convertvector(b.v, V4d);
    return __builtin_convertvector(x * y + __builtin_convertvector(c.v, V4d), V4f);
#endif
}
inline I to_int(F a) { return __builtin_convertvector(a.v, V4i); }
inline I to_int(M a) { return -a.v; }
inline F to_float(I a) { return __builtin_convertvector(a.v, V4f); }
// -1, 0 or 1; a zero keeps its sign, NaN stays NaN.
inline F sign(F x) { return where(F(0.0f) < abs(x), as_float((bits(x) & I(INT32_MIN)) | I(0x3f800000)), x); }
// From 2^23 on every float is whole; a zero keeps its sign.
inline F floor(F a) {
    const F cut = to_float(to_int(a)), low = where(a < cut, cut - F(1.0f), cut);
    return where(abs(a) < F(0x1p23f), as_float(bits(low) | (bits(a) & I(INT32_MIN))), a);
}
// |x| < 2^22: adding 1.5 * 2^23 leaves no bits below 1.
inline F rint(F a) { return (a + F(12582912.0f)) - F(12582912.0f); }

template <class T> inline I widen(const T *p) { return V4i{p[0], p[1], p[2], p[3]}; }
template <class T> inline void narrow(T *p, I x) {
    for (int j = 0; j < W; j++)
        p[j] = (T)x.v[j];
}
inline F gather(const float *p, I at) {
    F x;
    for (int j = 0; j < W; j++)
        x.v[j] = p[at.v[j]];
    return x;
}
inline F load(const float *p) { F x; memcpy(&x.v, p, 16); return x; }
inline I load(const int32_t *p) { I x; memcpy(&x.v, p, 16); return x; }
inline I load(const uint8_t *p) { return widen(p); }
inline I load(const int8_t *p) { return widen(p); }
inline I load(const uint16_t *p) { return widen(p); }
inline I load(const int16_t *p) { return widen(p); }
inline void store(float *p, F x) { memcpy(p, &x.v, 16); }
inline void store(int32_t *p, I x) { memcpy(p, &x.v, 16); }
inline void store(uint8_t *p, I x) { narrow(p, x); }
inline void store(int8_t *p, I x) { narrow(p, x); }
inline void store(uint16_t *p, I x) { narrow(p, x); }
inline void store(int16_t *p, I x) { narrow(p, x); }
template <int K> inline void store_byte(uint8_t *p, I x) { store(p, lshr(x, 8 * K)); }
template <int K> inline void store_half(uint16_t *p, I x) { store(p, lshr(x, 8 * K)); }

// Narrow numbers as they were loaded.
struct U8 {
    I v;
};
struct U16 {
    I v;
};
struct I16 {
    I v;
};
inline U8 raw(const uint8_t *p) { return {load(p)}; }
inline U16 raw(const uint16_t *p) { return {load(p)}; }
inline I16 raw(const int16_t *p) { return {load(p)}; }
inline I to_int(U8 x) { return x.v; }
inline I to_int(U16 x) { return x.v; }
inline I to_int(I16 x) { return x.v; }
inline F widened(U16 x) { return as_float(x.v << 16); }
inline F counter(U8 x) { return as_float(x.v | I(0x4b000000)); }
inline I joined(U16 high, U8 low) { return (high.v << 16) | (low.v << 8); }

// fp16 by whole numbers.  Normals: the exponent is rebiased; subnormals are their pattern times 2^-24, exactly.
inline F widen_half(I x) {
    const I size = x & I(0x7fff);
    const F normal = as_float((size << 13) + I(112 << 23)), tiny = to_float(size) * F(0x1p-24f);
    const F special = as_float((size << 13) | I(0x7f800000) | where(I(0x7c00) < size, I(0x400000), I(0)));
    const F out = where(size < I(0x400), tiny, where(size < I(0x7c00), normal, special));
    return as_float(bits(out) | ((x & I(0x8000)) << 16));
}
inline F widen_half(U16 x) { return widen_half(x.v); }
// Round to nearest even; NaN keeps the top of its payload and becomes quiet, as the machines' instruction does.
inline I narrow_half(F x) {
    const I size = bits(x) & I(0x7fffffff);
    const I normal = lshr(size - I(112 << 23) + I(0xfff) + (lshr(size, 13) & I(1)), 13);
    const I tiny = bits(as_float(size) + F(0.5f)) - bits(F(0.5f));  // units of 2^-24 are the last bits of 0.5 + x
    const I special = where(I(0x7f800000) < size, I(0x7e00) | (lshr(size, 13) & I(0x3ff)), I(0x7c00));
    const I out = where(size < I(113 << 23), tiny, where(size < I(0x477ff000), normal, special));
    return out | (lshr(bits(x), 16) & I(0x8000));
}

inline I ramp() { return V4i{0, 1, 2, 3}; }
inline I iota(int i) { return ramp() + I(i); }
// Lane j: the largest (smallest) of the lanes of rows[j].
template <class Op> inline I across(const I *rows, Op op) {
    I column[W];
    for (int k = 0; k < W; k++)
        column[k] = V4i{rows[0].v[k], rows[1].v[k], rows[2].v[k], rows[3].v[k]};
    return op(op(column[0], column[1]), op(column[2], column[3]));
}

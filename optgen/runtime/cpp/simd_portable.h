// F, I and M as one number each, for every other machine: the loops over elements are left to the compiler.

constexpr int W = 1;

struct F {
    float v;
    F() = default;
    F(float x) : v(x) {}
};
struct I {
    int32_t v;
    I() = default;
    I(int32_t x) : v(x) {}
};
struct M {
    bool v;
};

inline I bits(F a) { int32_t x; memcpy(&x, &a.v, 4); return x; }
inline F as_float(I a) { float x; memcpy(&x, &a.v, 4); return x; }

inline F operator+(F a, F b) { return a.v + b.v; }
inline F operator-(F a, F b) { return a.v - b.v; }
inline F operator*(F a, F b) { return a.v * b.v; }
inline F operator/(F a, F b) { return a.v / b.v; }
inline F operator-(F a) { return -a.v; }
inline M operator<(F a, F b) { return {a.v < b.v}; }
inline M operator<=(F a, F b) { return {a.v <= b.v}; }
inline M operator==(F a, F b) { return {a.v == b.v}; }
inline M operator!=(F a, F b) { return {a.v != b.v}; }

// Compiled with -fwrapv: whole numbers wrap, as they do in registers.
inline I operator+(I a, I b) { return a.v + b.v; }
inline I operator-(I a, I b) { return a.v - b.v; }
inline I operator*(I a, I b) { return a.v * b.v; }
inline I operator&(I a, I b) { return a.v & b.v; }
inline I operator|(I a, I b) { return a.v | b.v; }
inline I operator^(I a, I b) { return a.v ^ b.v; }
inline I operator-(I a) { return -a.v; }
inline I operator<<(I a, int k) { return (int32_t)((uint32_t)a.v << k); }
inline I operator>>(I a, int k) { return a.v >> k; }
inline I lshr(I a, int k) { return (int32_t)((uint32_t)a.v >> k); }
inline I rotl(I a, I k) { return (int32_t)((uint32_t)a.v << k.v | (uint32_t)a.v >> (32 - k.v)); }
inline M operator<(I a, I b) { return {a.v < b.v}; }
inline M operator<=(I a, I b) { return {a.v <= b.v}; }
inline M operator==(I a, I b) { return {a.v == b.v}; }
inline M operator!=(I a, I b) { return {a.v != b.v}; }

inline M operator&(M a, M b) { return {a.v && b.v}; }
inline M operator|(M a, M b) { return {a.v || b.v}; }
inline M operator^(M a, M b) { return {a.v != b.v}; }
inline M operator~(M a) { return {!a.v}; }

inline F where(M c, F a, F b) { return c.v ? a.v : b.v; }
inline I where(M c, I a, I b) { return c.v ? a.v : b.v; }
// The second operand where the comparison fails, as the machines with registers do; a NaN in the first stays.
inline F min(F a, F b) { return where(a == a, a.v < b.v ? a : b, a); }
inline F max(F a, F b) { return where(a == a, a.v > b.v ? a : b, a); }
inline I min(I a, I b) { return a.v < b.v ? a.v : b.v; }
inline I max(I a, I b) { return a.v > b.v ? a.v : b.v; }
inline F abs(F a) { return __builtin_fabsf(a.v); }
inline F sqrt(F a) { return __builtin_sqrtf(a.v); }
inline F fma(F a, F b, F c) { return __builtin_fmaf(a.v, b.v, c.v); }
inline F floor(F a) { return __builtin_floorf(a.v); }
// |x| < 2^22: adding 1.5 * 2^23 leaves no bits below 1.
inline F rint(F a) { return (a.v + 12582912.0f) - 12582912.0f; }
inline I to_int(F a) { return (int32_t)a.v; }
inline I to_int(M a) { return (int32_t)a.v; }
inline F to_float(I a) { return (float)a.v; }
inline F reciprocal(F x) { return F(1.0f) / x; }
inline F reciprocal_of_normal(F x) { return F(1.0f) / x; }

inline F load(const float *p) { return *p; }
inline I load(const int32_t *p) { return *p; }
inline I load(const uint8_t *p) { return *p; }
inline I load(const int8_t *p) { return *p; }
inline I load(const uint16_t *p) { return *p; }
inline I load(const int16_t *p) { return *p; }
inline void store(float *p, F x) { *p = x.v; }
inline void store(int32_t *p, I x) { *p = x.v; }
inline void store(uint8_t *p, I x) { *p = (uint8_t)x.v; }
inline void store(int8_t *p, I x) { *p = (int8_t)x.v; }
inline void store(uint16_t *p, I x) { *p = (uint16_t)x.v; }
inline void store(int16_t *p, I x) { *p = (int16_t)x.v; }

// fp16 by whole numbers.  Normals: the exponent is rebiased; subnormals are their pattern times 2^-24, exactly.
inline F widen_half(I x) {
    const I size = x & I(0x7fff);
    const F normal = as_float((size << 13) + I(112 << 23)), tiny = to_float(size) * F(0x1p-24f);
    const F special = as_float((size << 13) | I(0x7f800000) | where(I(0x7c00) < size, I(0x400000), I(0)));
    const F out = where(size < I(0x400), tiny, where(size < I(0x7c00), normal, special));
    return as_float(bits(out) | ((x & I(0x8000)) << 16));
}
// Round to nearest even; NaN keeps the top of its payload and becomes quiet, as the machines' instruction does.
inline I narrow_half(F x) {
    const I size = bits(x) & I(0x7fffffff);
    const I normal = lshr(size - I(112 << 23) + I(0xfff) + (lshr(size, 13) & I(1)), 13);
    const I tiny = bits(as_float(size) + F(0.5f)) - bits(F(0.5f));  // units of 2^-24 are the last bits of 0.5 + x
    const I special = where(I(0x7f800000) < size, I(0x7e00) | (lshr(size, 13) & I(0x3ff)), I(0x7c00));
    const I out = where(size < I(113 << 23), tiny, where(size < I(0x477ff000), normal, special));
    return out | (lshr(bits(x), 16) & I(0x8000));
}

inline I iota(int i) { return i; }
inline I lane(int i) { return i & 7; }
inline I spread(const int32_t *p, int i) { return p[i / 8]; }
template <class Op> inline I across(const I *rows, Op) { return *rows; }

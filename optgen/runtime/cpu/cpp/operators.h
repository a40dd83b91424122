// Operators of F, I and M that the compilers' own vectors have.  Compiled with -fwrapv: whole numbers wrap, as they do in
// registers.

typedef int32_t Numbers __attribute__((vector_size(4 * W)));

inline F operator+(F a, F b) { return a.v + b.v; }
inline F operator-(F a, F b) { return a.v - b.v; }
inline F operator*(F a, F b) { return a.v * b.v; }
inline F operator/(F a, F b) { return a.v / b.v; }
inline F operator-(F a) { return -a.v; }

inline I of_numbers(Numbers x) { return (decltype(I::v))x; }
inline I operator+(I a, I b) { return of_numbers((Numbers)a.v + (Numbers)b.v); }
inline I operator-(I a, I b) { return of_numbers((Numbers)a.v - (Numbers)b.v); }
inline I operator*(I a, I b) { return of_numbers((Numbers)a.v * (Numbers)b.v); }
inline I operator&(I a, I b) { return a.v & b.v; }
inline I operator|(I a, I b) { return a.v | b.v; }
inline I operator^(I a, I b) { return a.v ^ b.v; }
inline I operator-(I a) { return of_numbers(-(Numbers)a.v); }

inline M operator&(M a, M b) { return {(decltype(M::v))(a.v & b.v)}; }
inline M operator|(M a, M b) { return {(decltype(M::v))(a.v | b.v)}; }
inline M operator^(M a, M b) { return {(decltype(M::v))(a.v ^ b.v)}; }
inline M operator~(M a) { return {(decltype(M::v))~a.v}; }

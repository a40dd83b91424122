// A step of several stages: a rule's functions (generated/<rule>/kernels.h) on values that a plan's codecs
// (plans/<plan>/codecs.h) keep, and on the few values that stages leave for one another.
#pragma once
#include "stages.h"
#include "sweep.h"

namespace {

// -- codecs of what stages hand on

// Fields of a value of which loops over elements know nothing more.
struct Single : Codec {
    static constexpr int FIELDS = 1;
};

// A value that a stage neither reads nor writes.
struct untouched : Single {
    static constexpr int FIELDS = 0;

    untouched(char *, char *const *) {}
    Product times(F c, const In &, int) const { return {c, F(0.0f)}; }
    template <bool RAGGED, int VALUE, class N> F encode(Loop<0>, Head &, int, int, F x, const N &) const { return x; }
};

// A value for each row or matrix, read where there are more of others.
struct of_rows : Single {
    static constexpr bool WIDE = true;
    const float *__restrict at;
    int mask = -1;

    of_rows(char *first, char *const *) : at((const float *)first) {}
    void within(int row_mask) { mask = row_mask; }
    Product times(F c, const In &, int i) const { return {c, load(at + (unsigned)(i & mask))}; }
    template <bool RAGGED, int VALUE, class N> F encode(Loop<0>, Head &, int, int, F x, const N &) const { return x; }
};

// The value of a tensor.
struct of_tensor : Single {
    static constexpr bool WIDE = true;
    const F value;

    of_tensor(char *first, char *const *) : value(*(const float *)first) {}
    Product times(F c, const In &, int) const { return {c, value}; }
    template <bool RAGGED, int VALUE, class N> F encode(Loop<0>, Head &, int, int, F x, const N &) const { return x; }
};

// bf16 between two sweeps, which comes as the upper half of a word.
struct upper_half : Single {
    uint16_t *__restrict at;

    upper_half(char *first, char *const *) : at((uint16_t *)first) {}
    Product times(F c, const In &, int i) const { return {c, widened(::raw(at + i))}; }
    template <bool RAGGED, int VALUE, class N> F encode(Loop<0>, Head &, int i, int, F x, const N &) const {
        store_half<2>(at + i, bits(x));
        return x;
    }
};

// How a tile hands on what is reduced: in an array, which is folded; added to the totals of columns, or to 256 lanes where
// `mask` says so.
struct in_array {
    static constexpr bool PANELS = true;
    static void put(float *at, int, int i, F x) { store(at + i, x); }
};
template <Reduction R, bool LANES> struct in_total {
    static constexpr bool PANELS = false;
    static void put(float *at, int mask, int i, F x) {
        at += LANES ? i & mask : i;
        store(at, two(R, load(at), x));
    }
};

// A new value that is not stored but reduced, to S.  C reads the old one.
template <class C, class... S> struct reduced : C {
    static constexpr bool PANELS = (S::PANELS || ...);
    float *at[sizeof...(S)];
    int mask = -1;

    reduced(char *first, char *const *more) : C(first, more) {
        for (size_t k = 0; k < sizeof...(S); k++)
            at[k] = (float *)(C::FIELDS + k ? more[C::FIELDS + k - 1] : first);
    }
    void within(int row_mask) {
        C::within(row_mask);
        mask = row_mask;
    }
    template <bool RAGGED, int VALUE, class N> F encode(Loop<0>, Codec::Head &, int i, int, F x, const N &) {
        int k = 0;
        (S::put(at[k++], mask, i, x), ...);
        return x;
    }
};

// -- stages

// Small work that hands on the one value that it reads.
template <class From, class To> OPTGEN_INLINE void copy(From &from, To &to) { to.set(from.read()); }

struct no_gradient {
    typedef float stored;
    static F load(const float *) { return F(0.0f); }
};

// The constants of a stage's rule; a rule of one sweep has its own.
struct StageRule {
    static constexpr int APART = 0;
    static constexpr bool NEXT[MOST] = {}, ROOT[MOST] = {};
};

// The columns that a sweep prefetches: the elements that it reads.
template <int N> constexpr auto columns_of(const Columns<Place, N> &places) {
    Columns<Column, N> out{};
    for (int k = 0; k < N; k++) {
        const Place &p = places[k];
        const bool ahead = p.read && p.reduction == NONE && (p.kind == ELEMENT || p.kind == EIGHTH);
        out.at[k] = {p.bytes, ahead ? p.kind : BLOCK_OF, p.written};
    }
    return out;
}

// Layout is that of a sweep, and a stage's places; `G`: that of the gradient, -1 where it is not read; ORDER: of each
// scalar the position, of a size of the tensor -1 and less.
template <class Layout, class Rule, class Grad, class P, class... V>
struct Staged : Sweep<Layout, Rule, Grad, P, V...> {
    using Base = Sweep<Layout, Rule, Grad, P, V...>;
    static constexpr bool INDEXED = Base::DRAWN != 0;

    template <bool RAGGED>
    OPTGEN_ONCE static void tile(char *const *at, int extent, const int *live, int64_t first, int row_mask,
                                 const Known &known) {
        float given[Rule::SCALARS + 1];
        for (int k = 0; k < Rule::SCALARS; k++)
            given[k] = Layout::ORDER[k] < 0 ? known.extent[-1 - Layout::ORDER[k]] : known.scalars[Layout::ORDER[k]];
        Base::template work<RAGGED>(at, Layout::G < 0 ? nullptr : at[Layout::G < 0 ? 0 : Layout::G], extent, live, first,
                                    row_mask, given, known.step_key, known.stream_key);
    }
};

}  // namespace

// A step that is one sweep over elements: a rule (generated/<rule>/kernels.h) on values that a plan's codecs
// (plans/<plan>/codecs.h) keep.
//
// A codec that reduces over blocks takes several loops over the elements of a tile.  Loop K finds what loop K + 1
// scales by; between them stands a stage for the blocks' own values, a vector of blocks at a time.  A value that is
// relative to another begins in the loop in which the other's new root is known.
#pragma once
#include <type_traits>
#include <utility>

#include "optgen.h"

#define OPTGEN_INLINE inline __attribute__((always_inline))

namespace {

// Elements of the largest tile.
constexpr int most_of(int block) { return VECTOR * block > 2048 ? VECTOR * block : 2048; }

template <int K> struct Loop {};  // number of a codec's loop

// c * x in two factors: c meets what there are few of.
struct Product {
    F a, b;
};

// Defaults for codecs without values of blocks and without packed codes.
//
// NOISE      random bits of an element; 0: rounded to nearest
// LOOPS      in which a new value is stored; ROOT_LOOP: the one that knows the root that is read back of it
// READS      the loops that read the new value, DRAWS those that draw random bits, one bit each
// ROOTED     the root is encoded in the place of the value
// HAS_ROOT   there is a function `root`
// PANELS     is summed by rows
// WIDE       reads floats of more bits than bf16, whose NaNs may have any payload
struct Codec {
    static constexpr int NOISE = 0, LOOPS = 1, ROOT_LOOP = 0, READS = 1, DRAWS = 0;
    static constexpr bool ROOTED = false, HAS_ROOT = false, WIDE = false, PANELS = false;
    struct In {};                   // what is read of a block
    struct Head {};                 // what a loop reads and finds of a block
    In in(int) const { return {}; }
    void within(int) {}  // a tile of one row or of several: see Tile in stages.h
    void decode_blocks(int) const {}
    void unpack_codes(int) const {}
    template <int BLOCK> void pack_codes(int, const int *) const {}
    template <int K> void blocks(Loop<K>, int) const {}
    template <int K> Head head(Loop<K>, int) const { return {}; }
    template <int K, class H> void tail(Loop<K>, const H &, int) const {}
};

// A struct T of vectors for each block of a tile, set for W blocks at a time, read for one.
template <int BLOCK, class T> struct OfBlocks {
    static constexpr int COUNT = sizeof(T) / sizeof(I);
    alignas(64) int32_t kept[COUNT][most_of(BLOCK) / BLOCK];

    struct One {
        const int32_t *at;
        operator I() const { return I(*at); }
        operator F() const {
            float x;
            memcpy(&x, at, sizeof(x));
            return F(x);
        }
    };
    template <class... V> void set(int b, V... x) {
        int k = 0;
        (put(kept[k++] + b, x), ...);
    }
    T operator[](int b) const { return all(b, std::make_index_sequence<COUNT>()); }
    template <size_t... K> T all(int b, std::index_sequence<K...>) const { return {One{kept[K] + b}...}; }
    static void put(int32_t *at, I x) { store(at, x); }
    static void put(int32_t *at, F x) { store((float *)at, x); }
};

// fp32 as it is.
struct full_nearest : Codec {
    static constexpr int FIELDS = 1;
    static constexpr bool WIDE = true;
    float *__restrict code_at;

    full_nearest(char *first, char *const *) : code_at((float *)first) {}
    Product times(F c, const In &, int i) const { return {c, load(code_at + i)}; }
    template <bool RAGGED, int VALUE, class N> F encode(Loop<0>, Head &, int i, int, F x, const N &) const {
        store(code_at + i, x);
        return x;
    }
};

// A value of a rule: its place among them, its first column, the number by which random bits are dealt to it, the value
// that it is relative to (-1: none); whether the step writes it, and makes zeros +0; the column of its second field.
template <class C, int PLACE_, int AT, int VALUE_, int BASE_ = -1, bool WRITTEN_ = true, bool PLUS_ = false,
          int MORE_ = AT + 1>
struct Value : C {
    static constexpr int PLACE = PLACE_, VALUE = VALUE_, BASE = BASE_;
    static constexpr int MORE = MORE_;
    static constexpr bool WRITTEN = WRITTEN_, PLUS = PLUS_;
    explicit Value(char *const *at) : C(at[AT], at + MORE) {}
};

// Something that each value has of its own.
template <class V, class T> struct Of {
    T at;
};
template <class... T> struct All : T... {};

// The root of a new value as it is read back, and before it is rounded: a codec gives both, `unrounded` takes the other.
struct Roots {
    F read, own;
    Roots(F x) : read(x), own(x) {}
    Roots(F x, F y) : read(x), own(y) {}
    operator F() const { return read; }
};
template <class C> struct unrounded : C {
    using C::C;
    template <bool RAGGED, int VALUE, class... T> OPTGEN_INLINE F encode(T &&...given) {
        return Roots(C::template encode<RAGGED, VALUE>(given...)).own;
    }
};

// Bytes of the widest entries that are prefetched without blocks: more than that, or in a sweep that sums nothing, and the
// prefetches are in the way of the reads.
template <class Layout, class = void> constexpr int FETCHED = 0;
template <class Layout> constexpr int FETCHED<Layout, typename Layout::staged> = 2;

// A view of the weight: its codec C, which stores blocks of SIZE elements, its first column, and that of the tensor's
// scale, a power of two (-1: none).  It is made of the weight as the tile has stored it, of the kind Weight, while that
// is in the cache.
template <class C, int SIZE, int AT, class Weight, int SCALE> struct View {
    struct Nothing {
        using Of = View;
    };
    static constexpr bool SHORT = false, PAIRS = false;

    template <int L, bool RAGGED, int BLOCK>
    static void loop(C &kept, const typename Weight::stored *from, F by, int blocks, const int *live) {
        constexpr int parts = BLOCK / SIZE;
        for (int b = 0; b < blocks; b++) {
            const int end = b * SIZE + (RAGGED ? live[b / parts] - b % parts * SIZE : SIZE);
            auto head = kept.head(Loop<L>(), b);
            for (int k = 0; k < SIZE; k += W)
                kept.template encode<RAGGED, 0>(Loop<L>(), head, b * SIZE + k, end, Weight::load(from + b * SIZE + k) * by,
                                                Nothing());
            kept.tail(Loop<L>(), head, b);
        }
    }
    template <int BLOCK, bool RAGGED> static void make(char *const *at, int extent, const int *live) {
        C kept(at[AT], at + AT + 1);
        const F by(SCALE < 0 ? 1.0f : 1.0f / *(const float *)at[SCALE < 0 ? 0 : SCALE]);
        of<BLOCK, RAGGED>(kept, (const typename Weight::stored *)at[0], by, extent, live);
    }
    template <int BLOCK, bool RAGGED>
    static void of(C &kept, const typename Weight::stored *from, F by, int extent, const int *live) {
        static_assert(C::LOOPS == 2, "what is found of a block, and its codes");
        const int blocks = extent * (BLOCK / SIZE);
        loop<0, RAGGED, BLOCK>(kept, from, by, blocks, live);
        for (int b = 0; b < blocks; b += W)
            kept.blocks(Loop<1>(), b);
        loop<1, RAGGED, BLOCK>(kept, from, by, blocks, live);
        kept.template pack_codes<BLOCK>(extent, live);
    }
};
template <class... V> struct Views {
    template <int BLOCK, bool RAGGED> static void make(char *const *at, int extent, const int *live) {
        (V::template make<BLOCK, RAGGED>(at, extent, live), ...);
    }
};
template <class Layout, class = void> struct ViewsOf : Views<> {};
template <class Layout> struct ViewsOf<Layout, typename Layout::shows> : Layout::views {};

// Layout says the columns, their blocks and how noise is dealt; the weight P stands first, then the states V.
template <class Layout, class Rule, class Grad, class P, class... V> struct Sweep : Layout {
    static constexpr int BLOCK = Layout::BLOCK, COUNT = sizeof...(V);
    // True if the weight has values of blocks: it is encoded when the tile is done, from an array, as views are.
    static constexpr bool BLOCKED = P::LOOPS > 1;

    // The loop of the sweep in which a value's first one runs.
    template <class T> static constexpr int offset() {
        constexpr int root[] = {V::ROOT_LOOP..., 0};
        return T::BASE < 0 ? 0 : root[T::BASE < 0 ? 0 : T::BASE];
    }
    static constexpr int larger_of(int a, int b) { return a > b ? a : b; }
    static constexpr int loops() {
        int out = 1;
        ((out = V::WRITTEN ? larger_of(out, offset<V>() + V::LOOPS) : out), ...);
        return out;
    }
    static constexpr int LOOPS = loops();
    // True if all NaNs are made of bf16 ones or nothing: their patterns stay NaN with 0x80ff or less added.
    static constexpr bool SHORT = std::is_same<Grad, bfloat16>::value && !(P::WIDE || ... || V::WIDE);
    // True if a block is made of pairs of vectors.
    static constexpr bool PAIRS = BLOCK % (2 * W) == 0;
    // True if the weight waits for a later loop: one of 16 bits costs more to read and write than to wait for.
    static constexpr bool APART = BLOCK > 1 && LOOPS > 1 && Rule::APART > (Layout::COLUMNS[0].bytes < 4 ? 0 : 1);

    // True if it comes with loop 1, whose arrays it reads; with 16 registers, not 32, AdamW takes 5 % longer so.
    static constexpr bool JOINED = APART && W == 16;

    // The arrays of a value: what it is encoded from; its new value and the root of that, for the weight.
    template <class T> static constexpr bool input() { return T::WRITTEN && (offset<T>() || T::READS >> 1); }
    template <class T> static constexpr bool value_is_input() {
        return input<T>() && (offset<T>() || (!T::ROOTED && !T::PLUS && T::BASE < 0));
    }
    template <class T> static constexpr bool root_is_input() {
        return input<T>() && !offset<T>() && T::ROOTED && !T::PLUS && T::BASE < 0;
    }
    template <class T> static constexpr bool next() {
        return APART && Rule::NEXT[T::PLACE] && !value_is_input<T>();
    }
    template <class T> static constexpr bool root() { return APART && Rule::ROOT[T::PLACE] && !root_is_input<T>(); }

    template <class T> static constexpr int word_of() {
        return Layout::NOISE.of(T::VALUE).bits ? 1 << Layout::NOISE.of(T::VALUE).word : 0;
    }
    template <class T> static constexpr int drawn(int from) {
        return T::WRITTEN && T::DRAWS && (T::DRAWS << offset<T>()) >> from ? word_of<T>() : 0;
    }
    static constexpr int DRAWN = ((P::WRITTEN && P::DRAWS ? word_of<P>() : 0) | ... | drawn<V>(0));
    static constexpr int KEPT = ((P::WRITTEN && P::DRAWS && APART ? word_of<P>() : 0) | ... | drawn<V>(1));
    static constexpr int ARRAYS = (count(KEPT) + ... + (input<V>() + next<V>() + root<V>()));
    // Where rows are summed, as many blocks as a register values of them: their sums' order depends on it.
    static constexpr int PANEL = (V::PANELS || ... || false) ? VECTOR * BLOCK : elements_of_tile(BLOCK, ARRAYS);
    static constexpr int TILE = BLOCK == 1 ? 1024 : PANEL;
    static constexpr int ROOM = LOOPS > 1 ? TILE : W;

    struct Arrays {
        alignas(64) float input[COUNT + 1][ROOM], next[COUNT + 1][ROOM], root[COUNT + 1][ROOM], weight[BLOCKED ? TILE : W];
    };

    // A value in the first loop, as the rule reads and sets it.
    template <class T> struct Element {
        static constexpr int VALUE = T::VALUE;
        const T &kept;
        typename T::In in;
        const Noise<Sweep> &noise;
        int i;
        F base, x;

        Product factors(F c) const {
            Product found = kept.times(c, in, i);
            if constexpr (T::BASE >= 0)
                found.b = found.b * base;
            return found;
        }
        F times(F c) const {
            const Product found = factors(c);
            return found.a * found.b;
        }
        F plus(F c, F y) const {
            const Product found = factors(c);
            return fma(found.a, found.b, y);
        }
        F read() const { return times(F(1.0f)); }
        F read_root() const {
            if constexpr (T::HAS_ROOT)
                return kept.root(in, i);
            else
                return sqrt(read());
        }
        void set(F y) { x = y; }
        F next() const { return x; }
        F root() const { return sqrt(x); }
    };
    // And in the weight's loop.
    template <class T> struct Later {
        const Arrays &arrays;
        int i;

        F next() const { return load((value_is_input<T>() ? arrays.input : arrays.next)[T::PLACE] + i); }
        F root() const { return load((root_is_input<T>() ? arrays.input : arrays.root)[T::PLACE] + i); }
    };

    // The number of a value's loop in loop L of the sweep; -1: it has none there.
    template <int L, class T> static constexpr int loop_of() {
        return T::WRITTEN && L >= offset<T>() && L < offset<T>() + T::LOOPS ? L - offset<T>() : -1;
    }
    template <int L, class T> static auto head(const T &kept, int b) {
        if constexpr (loop_of<L, T>() >= 0)
            return kept.head(Loop<loop_of<L, T>()>(), b);
        else
            return Codec::Head();
    }
    template <int L, class T> using Head = Of<T, decltype(head<L, T>(*(const T *)nullptr, 0))>;
    template <int L, class T> static void blocks(T &kept, int b) {
        if constexpr (loop_of<L, T>() >= 0)
            kept.blocks(Loop<loop_of<L, T>()>(), b);
    }
    template <int L, class T, class H> static void tail(T &kept, const H &head, int b) {
        if constexpr (loop_of<L, T>() >= 0)
            kept.tail(Loop<loop_of<L, T>()>(), head, b);
    }
    // Loop L of a value; `given` is its new value in the first one.  Values that others are divided by come first.
    template <int L, bool RAGGED, bool RELATIVE, class T, class N>
    OPTGEN_INLINE static void encode(All<V...> &all, All<Head<L, V>...> &heads, Arrays &arrays, F given, F *roots, int i, int end,
                              const N &noise) {
        constexpr int k = loop_of<L, T>();
        float *at = arrays.input[T::PLACE] + i;
        if constexpr (RELATIVE != (T::BASE >= 0)) {
            return;
        } else if constexpr (k >= 0) {
            F x = given;
            if constexpr (L > 0 && (k == 0 || (T::READS >> k & 1)))
                x = load(at);
            if constexpr (k == 0) {
                if constexpr (T::BASE >= 0)
                    x = x / roots[T::BASE];
                if constexpr (T::PLUS)
                    x = x + F(0.0f);
                if constexpr (T::ROOTED)
                    x = sqrt(x);
                if constexpr (T::READS >> 1)
                    store(at, x);
            }
            auto &head = static_cast<Head<L, T> &>(heads).at;
            const F root =
                static_cast<T &>(all).template encode<RAGGED, T::VALUE>(Loop<k>(), head, i, end, x, noise);
            if constexpr (k == T::ROOT_LOOP)
                roots[T::PLACE] = root;
        } else if constexpr (L == 0 && T::WRITTEN) {
            store(at, given);
        }
        if constexpr (L == 0 && next<T>())
            store(arrays.next[T::PLACE] + i, given);
        if constexpr (L == 0 && root<T>())
            store(arrays.root[T::PLACE] + i, sqrt(given));
    }

    // Prefetches of what the first loop reads in the next tile, spread over the loops: see Layout::COLUMNS.
    static constexpr bool of_weight(int c) { return c == 0 || (c >= P::MORE && c < P::MORE + P::FIELDS - 1); }
    static constexpr bool ahead(int c) {
        return Layout::COLUMNS[c].kind != BLOCK_OF && Layout::COLUMNS[c].kind != WHOLE &&
               !(APART && of_weight(c)) && (BLOCK > 1 || Layout::COLUMNS[c].bytes <= FETCHED<Layout>);
    }
    static constexpr int before(int c) { return c == 0 ? 0 : before(c - 1) + ahead(c - 1); }
    static constexpr int GROUP = BLOCK > 1 ? BLOCK : 64;
    template <int C> static constexpr int bytes() {
        return Layout::COLUMNS[C].bytes * GROUP / (Layout::COLUMNS[C].kind == EIGHTH ? 8 : 1);
    }
    template <int PART, int C = 0> static void fetch_columns(char *const *at, int b) {
        constexpr int all = width<Layout>();
        if constexpr (C < all) {
            constexpr int mine = before(C), low = before(all) * PART / LOOPS, high = before(all) * (PART + 1) / LOOPS;
            if constexpr (ahead(C) && mine >= low && mine < high)
                fetch<bytes<C>()>(at[C], b + TILE / GROUP);
            fetch_columns<PART, C + 1>(at, b);
        }
    }
    template <int C = 0> static void fetch_weight(char *const *at, int b) {
        if constexpr (of_weight(C))
            fetch<bytes<C>()>(at[C], b);
        if constexpr (C < P::MORE + P::FIELDS - 2)
            fetch_weight<C + 1>(at, b);
    }

    // A tile of `extent` blocks, or elements where nothing is in blocks.
    template <bool RAGGED> struct Tile {
        P &p;
        All<V...> &all;
        const Rule &rule;
        Arrays &arrays;
        Words<Sweep> &words;
        const typename Grad::stored *__restrict g_at;
        char *const *at;
        const int *live;
        int extent;

        // The first loop's work on W elements.
        OPTGEN_INLINE void start(const All<Of<V, typename V::In>...> &ins, All<Head<0, V>...> &heads, int i, int end) const {
            const auto noise = words.at(i);
            const F g = Grad::load(g_at + i);
            All<Element<V>...> states{
                Element<V>{all, static_cast<const Of<V, typename V::In> &>(ins).at, noise, i, F(0.0f), F(0.0f)}...};
            (base<V>(states, ins, i), ...);
            if constexpr (Rule::APART) {
                rule.states(get(i), g, static_cast<Element<V> &>(states)...);
                if constexpr (!APART)
                    put(i, rule.weight(get(i), g, static_cast<Element<V> &>(states)...), noise);
            } else {
                put(i, rule.step(get(i), g, static_cast<Element<V> &>(states)...), noise);
            }
            words.keep(noise, i);
            F roots[COUNT + 1];
            (encode<0, RAGGED, false, V>(all, heads, arrays, static_cast<Element<V> &>(states).x, roots, i, end, noise), ...);
            (encode<0, RAGGED, true, V>(all, heads, arrays, static_cast<Element<V> &>(states).x, roots, i, end, noise), ...);
        }
        template <class T>
        OPTGEN_INLINE void base(All<Element<V>...> &states, const All<Of<V, typename V::In>...> &ins, int i) const {
            if constexpr (T::BASE >= 0)
                ((V::PLACE == T::BASE ? void(static_cast<Element<T> &>(states).base = root_of<V>(ins, i)) : void()), ...);
        }
        template <class T> OPTGEN_INLINE F root_of(const All<Of<V, typename V::In>...> &ins, int i) const {
            if constexpr (T::HAS_ROOT)
                return static_cast<T &>(all).root(static_cast<const Of<T, typename T::In> &>(ins).at, i);
            else
                return F(0.0f);
        }
        OPTGEN_INLINE F get(int i) const {
            const Product found = p.times(F(1.0f), p.in(i / BLOCK), i);
            return found.a * found.b;
        }
        template <class N> OPTGEN_INLINE void put(int i, F x, const N &noise) const {
            typename P::Head head;
            if constexpr (BLOCKED)
                store(arrays.weight + i, x);
            else if constexpr (P::WRITTEN)
                p.template encode<RAGGED, P::VALUE>(Loop<0>(), head, i, 0, x, noise);
        }

        template <int L> OPTGEN_INLINE void stage() const {
            for (int b = 0; b < extent; b += W)
                (blocks<L>(static_cast<V &>(all), b), ...);
        }
        template <int L> OPTGEN_INLINE void loop() const {
            for (int b = 0; b < extent; b++) {
                const int end = b * BLOCK + (RAGGED ? live[b] : BLOCK);
                if constexpr (L || !APART)
                    fetch_columns<L>(at, b);
                if constexpr (L == 1 && JOINED)
                    fetch_columns<0>(at, b);
                if constexpr (L == 0 && APART)
                    fetch_weight(at, b);
                const All<Of<V, typename V::In>...> ins{{static_cast<V &>(all).in(b)}...};
                All<Head<L, V>...> heads{{head<L>(static_cast<V &>(all), b)}...};
                // Counted from 0 so that compilers see how often, and write short loops out: 2 to 5 % faster.
                for (int k = 0; k < BLOCK; k += W) {
                    const int i = b * BLOCK + k;
                    if constexpr (L == 0) {
                        start(ins, heads, i, end);
                    } else {
                        const auto noise = words.kept(i);
                        F roots[COUNT + 1];
                        if constexpr (L == 1 && JOINED)
                            weight(i);
                        (encode<L, RAGGED, false, V>(all, heads, arrays, F(0.0f), roots, i, end, noise), ...);
                        (encode<L, RAGGED, true, V>(all, heads, arrays, F(0.0f), roots, i, end, noise), ...);
                    }
                }
                (tail<L>(static_cast<V &>(all), static_cast<Head<L, V> &>(heads).at, b), ...);
            }
        }
        OPTGEN_INLINE void weight(int i) const {
            put(i, rule.weight(get(i), Grad::load(g_at + i), Later<V>{arrays, i}...), words.kept(i));
        }
        // The weight's own loop: it hides how long the blocks' stage before it takes, 4 % of AdamW int8_split24.
        OPTGEN_INLINE void weights() const {
            for (int b = 0; b < extent; b++) {
                fetch_columns<0>(at, b);
                for (int k = 0; k < BLOCK; k += W)
                    weight(b * BLOCK + k);
            }
        }
        template <int L> OPTGEN_INLINE void rest() const {
            if constexpr (L < LOOPS) {
                stage<L>();
                if constexpr (L == 1 && APART && !JOINED)
                    weights();
                loop<L>();
                rest<L + 1>();
            }
        }
    };

    template <bool RAGGED>
    OPTGEN_ONCE static void tile(char *const *at, int extent, const int *live, int64_t first, const float *scalars,
                                 int32_t step_key, int32_t stream_key) {
        float given[Rule::SCALARS + 1];
        for (int k = 0; k < Rule::SCALARS; k++)
            given[k] = scalars[Layout::ORDER[k]];
        work<RAGGED>(at, at[1], extent, live, first, 0, given, step_key, stream_key);
    }
    template <bool RAGGED>
    OPTGEN_INLINE static void work(char *const *at, const char *g, int extent, const int *live, int64_t first,
                                   int row_mask, const float *scalars, int32_t step_key, int32_t stream_key) {
        P p(at);
        All<V...> all{V(at)...};
        (static_cast<V &>(all).within(row_mask), ...);
        const Rule rule(scalars);
        Arrays arrays;
        Words<Sweep> words(BLOCK * extent, (int32_t)first, stream_key, step_key);
        const Tile<RAGGED> now{p, all, rule, arrays, words, (const typename Grad::stored *)g, at, live, extent};
        if constexpr (BLOCK == 1) {
            for (int i = 0; i < extent; i += W) {
                if (i % GROUP == 0)
                    fetch_columns<0>(at, i / GROUP);
                All<Head<0, V>...> heads{};
                now.start({{static_cast<V &>(all).in(0)}...}, heads, i, extent);
            }
        } else {
            (static_cast<V &>(all).unpack_codes(BLOCK * extent), ...);
            for (int b = 0; b < extent; b += W) {
                p.decode_blocks(b);
                (static_cast<V &>(all).decode_blocks(b), ...);
            }
            now.template loop<0>();
            now.template rest<1>();
            (static_cast<V &>(all).template pack_codes<BLOCK>(extent, live), ...);
            if constexpr (BLOCKED && P::WRITTEN)
                View<P, BLOCK, 0, float32, -1>::template of<BLOCK, RAGGED>(p, arrays.weight, F(1.0f), extent, live);
            ViewsOf<Layout>::template make<BLOCK, RAGGED>(at, extent, live);
        }
    }
};

}  // namespace

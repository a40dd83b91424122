// The base of steps of several stages: sweeps over elements in tiles, the sums that they leave, and the work on
// few values (rows, columns, matrices, tensors) between them.
//
// The order in which values are added is that of optgen/runtime/records/sums.py, in strict and fast maths alike, so the number
// of threads does not change a bit.  A sweep's tile function writes what is to be summed to an array of the tile; the
// walks below add it up while it is in the cache.  Nothing here is a template over the kernel: stages describe
// themselves in tables, and a file is compiled once for each tile function.
#pragma once
#include "optgen.h"

namespace {

constexpr int LANES = 256, SEGMENT = 64 * LANES, PANEL_ROWS = 64;
constexpr int FEW = 1024;       // entries of few values that are worked on at a time
constexpr int MOST = 256;       // places of a stage: each state of a rule has up to five
constexpr int RUN = 8;          // panels of columns that one thread sums side by side
constexpr int MARGIN = 128;     // bytes before and behind a tile in a thread's room
constexpr int SIZES = 13;       // of a table row, behind its addresses
constexpr int TOGETHER = 256;   // results that one thread finishes at a time
constexpr int BLOCKS_OF_TILE = 128;

// The reduction of a value.
enum Reduction : int32_t { NONE, TOTAL, LARGEST };

// One of a stage's buffers.
struct Place {
    int column;   // of the table; of what is reduced: of the results
    int partial;  // column of a sweep's partial results, else -1
    int bytes;    // per entry
    Kind kind;    // of what is reduced: of what there is one result
    bool read, written;
    Reduction reduction;
};

// The values that all tiles of a tensor share.
struct Known {
    const float *scalars, *extent;
    int32_t step_key, stream_key;
};

// at        an address for each place: of the tile's first entry; of an array of the tile for values of rows and
//           matrices and for what is to be reduced; of the one value for tensors
// count     blocks, or elements where nothing is in blocks
// live      elements in each block; null where all blocks are full
// first     the number of the first element
// row_mask  0 where the tile lies within one row and one matrix: their values then fill one register; else -1,
//           or 255 where sums of the tensor are added to the lanes
typedef void Tile(char *const *at, int count, const int *live, int64_t first, int row_mask, const Known &known);

struct Stage {
    Tile *tile;
    const Place *places;
    int count;
    Kind space;     // over whose entries it runs
    int block, size;  // elements per storage block and per tile
    bool matrices;  // reads or reduces rows, columns or matrices
    bool indexed;   // reads the elements' numbers: those that share a hash must not be torn apart
};

template <class Piece> constexpr Stage stage() {
    return {tile<Piece, int, const Known &>, Piece::PLACES.at, (int)(sizeof(Piece::PLACES) / sizeof(Place)),
            Piece::SPACE, Piece::BLOCK, Piece::TILE, Piece::MATRICES, Piece::INDEXED};
}

constexpr int slot(int size) { return 4 * size + 2 * MARGIN + 4 * LANES; }

// Bytes of a thread's room: a tile of each place, and lanes to sum it in.
template <class Kernel> constexpr int room() {
    int most = 0;
    for (const Stage &s : Kernel::STAGES)
        most = s.count * slot(s.size) > most ? s.count * slot(s.size) : most;
    return most;
}

inline float *tile_room(const Stage &s, char *room, int place) {
    return (float *)(room + (size_t)place * slot(s.size) + MARGIN);
}
inline float *lane_room(const Stage &s, char *room, int place) {
    return (float *)(room + (size_t)place * slot(s.size) + 4 * s.size + 2 * MARGIN);
}

// A row of the table.
struct Shape {
    const int64_t *at;
    int64_t dense;  // address of fp32 room of the tensor's shape for each reduction of a sweep; or 0
    int64_t matrices, rows, columns;
    int64_t numel, grid_columns;
    int64_t stream;              // its key, and above it the line of its scalars
    int64_t row, column, width;  // where the first element stands in the tensor that this one is a part of; its columns
    float extent[3];             // of that tensor

    // Its share of the work: a part without elements still has values of rows, columns or the tensor.
    int64_t weight() const { return numel ? numel : 1; }
    // Whether rows do not follow one another in the numbers of the elements.
    bool apart() const { return grid_columns != width && grid_columns != numel; }
    // The number of the first element, where each row fills whole blocks in the count.
    int64_t number(int block) const { return row * pace(block) + column; }
    // From a row to the next, in numbers.
    int64_t pace(int block) const { return (width + block - 1) / block * block; }
};

struct Table {
    const int64_t *rows;
    int64_t tensors;
    int addresses;
    int64_t elements;

    Shape operator[](int64_t k) const {
        const int64_t *row = rows + k * (addresses + SIZES), *n = row + addresses;
        return {row,  n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9],
                {(float)n[10], (float)n[11], (float)n[12]}};
    }
};

// -- sums and maxima

// Of maxima a NaN wins, and a zero comes out positive.
inline F two(Reduction r, F a, F b) { return r == TOTAL ? a + b : max(a, b); }
inline float two(Reduction r, float a, float b) {
    return r == TOTAL ? a + b : a != a ? a : a < b || b != b ? b : a;
}
inline float first_of(Reduction r) { return r == TOTAL ? 0.0f : -INFINITY; }
inline float done(Reduction r, float x) { return r == TOTAL ? x : x + 0.0f; }

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

OPTGEN_ONCE void fill(float *x, int64_t count, float value) {
    int64_t i = 0;
    for (; i + W <= count; i += W)
        store(x + i, F(value));
    alignas(64) float rest[W];
    store(rest, F(value));
    memcpy(x + i, rest, (size_t)(count - i) * 4);
}

// The smallest power of two from n on that fills a register.  Folding no more than that changes nothing: what is
// missing counts as 0, and sums begin with a positive 0.
inline int until(int64_t n) {
    int out = W;
    while (out < n)
        out *= 2;
    return out;
}

// Upper half upon lower half until one value is left; n is a power of two, W at least.  Three halvings in one go.
template <Reduction r> OPTGEN_ONCE float fold(float *x, int n) {
    while (n >= 8 * W) {
        n /= 8;
        for (int i = 0; i < n; i += W) {
            const float *y = x + i;
            const F a = two(r, load(y), load(y + 4 * n)), b = two(r, load(y + n), load(y + 5 * n));
            const F c = two(r, load(y + 2 * n), load(y + 6 * n)), d = two(r, load(y + 3 * n), load(y + 7 * n));
            store(x + i, two(r, two(r, a, c), two(r, b, d)));
        }
    }
    while (n >= 2 * W) {
        n /= 2;
        for (int i = 0; i < n; i += W)
            store(x + i, two(r, load(x + i), load(x + i + n)));
    }
    float a[W];
    memcpy(a, x, sizeof(a));
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            a[i] = two(r, a[i], a[i + half]);
    return a[0];
}

inline float fold(Reduction r, float *x, int n) { return r == TOTAL ? fold<TOTAL>(x, n) : fold<LARGEST>(x, n); }

// x[0 .. n) folded as a panel; x is scratch, with room for the next power of two.
inline float fold_panel(Reduction r, float *x, int64_t n) {
    const int whole = until(n);
    fill(x + n, whole - n, first_of(r));
    return fold(r, x, whole);
}

// Fewer values than a register holds.
OPTGEN_ONCE void add_rest(Reduction r, float *to, const float *x, int64_t n) {
    alignas(64) float a[W] = {}, b[W] = {};
    memcpy(a, to, (size_t)n * 4);
    memcpy(b, x, (size_t)n * 4);
    store(a, two(r, load(a), load(b)));
    memcpy(to, a, (size_t)n * 4);
}

// Values added to the lanes, the first one to `lane`.
OPTGEN_ONCE void add_lanes(Reduction r, float *__restrict lanes, const float *__restrict x, int64_t n, int lane) {
    while (n > 0) {
        const int64_t now = least(n, LANES - lane);
        float *to = lanes + lane;
        int64_t i = 0;
        for (; i + W <= now; i += W)
            store(to + i, two(r, load(to + i), load(x + i)));
        add_rest(r, to + i, x + i, now - i);
        x += now;
        n -= now;
        lane = (int)((lane + now) % LANES);
    }
}

// One row more for a run of columns.
OPTGEN_ONCE void add_row(Reduction r, float *__restrict total, const float *__restrict x, int64_t n, bool first) {
    if (first)
        fill(total, n, first_of(r));
    int64_t i = 0;
    for (; i + W <= n; i += W)
        store(total + i, two(r, load(total + i), load(x + i)));
    add_rest(r, total + i, x + i, n - i);
}

// -- the division of work: by elements, in whole units of each tensor

inline int64_t bound(int64_t x, int64_t numel, int64_t units) {
    if (x <= 0)
        return 0;
    return x >= numel ? units : (x * units + numel - 1) / numel;
}

// work(tensor, low, high) for this thread's share of the units of every tensor.
template <class Units, class Work>
inline void share(const Table &table, int64_t who, int64_t all, Units units, Work work) {
    const int64_t low = table.elements * who / all, high = table.elements * (who + 1) / all;
    int64_t start = 0;
    for (int64_t k = 0; k < table.tensors && start < high; k++) {
        const Shape t = table[k];
        if (start + t.weight() > low) {
            const int64_t n = units(t), a = bound(low - start, t.weight(), n), b = bound(high - start, t.weight(), n);
            if (a < b)
                work(t, a, b);
        }
        start += t.weight();
    }
}

// -- sweeps

// The tensor as rows of whole blocks; where rows end with a block, it is one long row.
struct Grid {
    int64_t columns, per_row, blocks;

    Grid(const Shape &t, int block) {
        columns = t.grid_columns % block || t.apart() ? t.grid_columns : t.numel;
        per_row = (columns + block - 1) / block;
        blocks = columns ? t.numel / columns * per_row : 0;
    }

    // The number of a block's first element.
    int64_t number(const Shape &t, int block, int64_t which) const {
        if (!t.apart())
            return t.number(block) + which * block;
        return t.number(block) + which / per_row * t.pace(block) + which % per_row * block;
    }
};

// Whether a tensor's matrices are walked by blocks of rows and columns; else flat, and what is reduced is spilled.
inline bool by_panels(const Stage &s, const Shape &t) { return s.matrices && !t.dense; }

struct Panels {
    int64_t height, bands, panels, per_row;
    int64_t together;  // rows of a tile: several where at least three fit; two are faster one by one
    int64_t number;    // of the first element
    int64_t pace;      // from a row to the next, in numbers

    Panels(const Stage &s, const Shape &t) {
        per_row = (t.columns + s.block - 1) / s.block;
        number = t.number(s.block);
        pace = t.columns == t.grid_columns ? t.pace(s.block) : per_row * s.block;
        together = per_row ? s.size / (per_row * s.block) : 1;
        if (together < 3 || t.apart() || (s.indexed && (pace != per_row * s.block || (s.block == 1 && (t.columns | number) % SHARE))))
            together = 1;
        height = together > 1 ? PANEL_ROWS : 8;
        for (int c = 0; c < s.count; c++)
            if (s.places[c].reduction != NONE && s.places[c].kind == COLUMN)
                height = PANEL_ROWS;
        bands = (t.rows + height - 1) / height;
        panels = (t.columns + s.size - 1) / s.size;
    }
};

constexpr int UNIT = SHARE;  // elements that are not in blocks: whole registers, which share a hash

// n elements of a row, whose values lie `shift` lanes behind the start of the tile, through room of their own.  Where
// all blocks are full, and too few for a tile, only the blocks' own values take that way.
OPTGEN_ONCE void staged_row(const Stage &s, char *const *at, char *room, int64_t n, int shift, int64_t first,
                       const Known &known) {
    char *inside[MOST];
    int live[BLOCKS_OF_TILE];
    const int64_t blocks = (n + s.block - 1) / s.block, lanes = s.block > 1 ? blocks * s.block : shift + n;
    const int64_t padded = (lanes + UNIT - 1) / UNIT * UNIT;
    const bool full = s.block > 1 && n % s.block == 0;
    for (int64_t b = 0; s.block > 1 && b < blocks; b++)
        live[b] = (int)least(s.block, n - b * s.block);
    for (int c = 0; c < s.count; c++) {
        const Place &p = s.places[c];
        inside[c] = at[c];
        if (p.reduction != NONE && p.kind == COLUMN && !full) {
            inside[c] = (char *)tile_room(s, room, c);
            fill((float *)inside[c], padded, first_of(p.reduction));
        } else if (p.reduction != NONE) {
            inside[c] = at[c] - 4 * shift;
        } else if (p.kind == BLOCK_OF) {
            inside[c] = (char *)tile_room(s, room, c);
            memcpy(inside[c], at[c], (size_t)blocks * p.bytes);
        } else if (!full && p.kind == EIGHTH) {
            inside[c] = (char *)tile_room(s, room, c);
            memcpy(inside[c], at[c], (size_t)((n + 7) / 8) * p.bytes);
            memset(inside[c] + (n + 7) / 8 * p.bytes, 0, (size_t)(padded / 8 - (n + 7) / 8) * p.bytes);
        } else if (!full && (p.kind == ELEMENT || p.kind == COLUMN)) {
            inside[c] = (char *)tile_room(s, room, c);
            memset(inside[c], 0, (size_t)shift * p.bytes);
            memcpy(inside[c] + (size_t)shift * p.bytes, at[c], (size_t)n * p.bytes);
            memset(inside[c] + (size_t)(shift + n) * p.bytes, 0, (size_t)(padded - shift - n) * p.bytes);
        }
    }
    s.tile(inside, (int)(s.block > 1 ? blocks : lanes), s.block > 1 && !full ? live : nullptr, first - shift, 0, known);
    for (int c = 0; c < s.count; c++) {
        const Place &p = s.places[c];
        if (p.reduction != NONE && p.kind == COLUMN && !full)
            add_row(p.reduction, (float *)at[c], (const float *)inside[c] + shift, n, false);
        if (!p.written || p.reduction != NONE)
            continue;
        if (p.kind == BLOCK_OF)
            memcpy(at[c], inside[c], (size_t)blocks * p.bytes);
        else if (p.kind == EIGHTH && !full)
            memcpy(at[c], inside[c], (size_t)((n + 7) / 8) * p.bytes);
        else if (p.kind == ELEMENT && !full)
            memcpy(at[c], inside[c] + (size_t)shift * p.bytes, (size_t)n * p.bytes);
    }
}

// Columns [from, from + n) of a row, at most a panel; `row` counts through all matrices.
OPTGEN_ONCE void panel_of_row(const Stage &s, const Shape &t, const Panels &shape, char *const *values, char *room,
                         int64_t row, int64_t from, int64_t n, const Known &known) {
    char *at[MOST];
    const int64_t e = row * t.columns + from, b = row * shape.per_row + from / s.block;
    const int64_t number = shape.number + row * shape.pace + from;
    const int64_t matrix = t.matrices == 1 ? 0 : row / t.rows;
    for (int c = 0; c < s.count; c++) {
        const Place &p = s.places[c];
        at[c] = values[c];
        if (p.reduction != NONE && p.kind == COLUMN)
            at[c] = (char *)((float *)t.at[p.partial] + row / t.rows * shape.bands * t.columns +
                             row % t.rows / shape.height * t.columns + from);
        else if (p.reduction != NONE)
            at[c] = (char *)tile_room(s, room, c);
        else if (p.kind == ELEMENT)
            at[c] += e * p.bytes;
        else if (p.kind == BLOCK_OF)
            at[c] += b * p.bytes;
        else if (p.kind == EIGHTH)
            at[c] += (row * ((t.columns + 7) / 8) + from / 8) * p.bytes;
        else if (p.kind == COLUMN)
            at[c] += (matrix * t.columns + from) * 4;
    }
    if (s.block > 1) {
        if (n == s.size)
            s.tile(at, s.size / s.block, nullptr, number, 0, known);
        else
            staged_row(s, at, room, n, 0, number, known);
        return;
    }
    for (int64_t done = 0; done < n;) {
        const int shift = s.indexed ? (int)((number + done) % SHARE) : 0;
        int64_t now = n - done;
        if (shift)
            now = least(now, SHARE - shift);
        else if (now >= UNIT)
            now -= now % UNIT;
        if (shift || now % UNIT)
            staged_row(s, at, room, now, shift, number + done, known);
        else
            s.tile(at, (int)now, nullptr, number + done, 0, known);
        for (int c = 0; c < s.count; c++) {
            const Place &p = s.places[c];
            if (p.kind == ELEMENT || p.kind == COLUMN || p.reduction != NONE)
                at[c] += now * (p.reduction != NONE ? 4 : p.bytes);
        }
        done += now;
    }
}

// Values of rows, columns or matrices, one for each element of [e, e + n).
OPTGEN_ONCE void expand(const Place &p, const Shape &t, const float *from, float *to, int64_t e, int64_t n) {
    int64_t row = e / t.columns, column = e % t.columns, matrix = row / t.rows;
    for (int64_t i = 0; i < n;) {
        const int64_t now = least(n - i, t.columns - column);
        if (p.kind == COLUMN)
            memcpy(to + i, from + matrix * t.columns + column, (size_t)now * 4);
        else
            for (int64_t k = 0; k < now; k++)
                to[i + k] = from[p.kind == ROW ? row : matrix];
        i += now;
        column = 0;
        row++;
        matrix = row / t.rows;
    }
}

// The dense copy of a sweep's summands, of the shape of the tensor.
inline float *dense_copy(const Stage &s, const Shape &t, int place) {
    float *out = (float *)t.dense;
    for (int c = 0; out && c < place; c++)
        if (s.places[c].reduction != NONE)
            out += t.numel;
    return out;
}

// The lanes of `count` blocks from `first` on, without those behind the ends of rows.
inline void add_tile(Reduction r, float *lanes, const float *x, const Stage &s, const Grid &grid, int64_t first,
                     int count, int lane) {
    if (grid.columns % s.block == 0) {
        add_lanes(r, lanes, x, (int64_t)count * s.block, lane);
        return;
    }
    for (int b = 0; b < count; b++) {
        const int64_t left = grid.columns - (first + b) % grid.per_row * s.block;
        add_lanes(r, lanes, x + b * s.block, least(left, s.block), (lane + b * s.block) % LANES);
    }
}

// Blocks [first, first + count) of a tensor, at most a tile, behind `shift` empty ones; what is to be reduced goes to the
// room, in the order of the tile's lanes, and from there to the dense copy where there is one.
//
// True if sums of the tensor were added to the lanes already.
OPTGEN_ONCE bool flat_tile(const Stage &s, const Shape &t, const Grid &grid, int64_t first, int count, int shift,
                           char *room, const Known &known) {
    const int most = s.size / s.block;
    const int64_t lanes = (int64_t)count * s.block, padded = (shift + lanes + UNIT - 1) / UNIT * UNIT - shift;
    int64_t start[BLOCKS_OF_TILE], eights[BLOCKS_OF_TILE];
    int64_t length[BLOCKS_OF_TILE];
    int live[BLOCKS_OF_TILE];
    int runs = 1;  // stretches of elements that lie side by side: one where the blocks are of one row
    start[0] = first / grid.per_row * grid.columns + first % grid.per_row * s.block;
    eights[0] = first / grid.per_row * ((grid.columns + 7) / 8) + first % grid.per_row * s.block / 8;
    length[0] = least(lanes, grid.columns - first % grid.per_row * s.block);
    // Elements are read and written where they lie, and so are the values of a whole tile's blocks.
    const bool full = s.block == 1 ? !shift && count % UNIT == 0 : length[0] == lanes, whole = full && (s.block == 1 || count == most);
    if (!full && s.block > 1) {
        runs = first % grid.per_row + count <= grid.per_row ? 1 : count;
        for (int b = 0; b < count; b++) {
            const int64_t row = (first + b) / grid.per_row, lane = (first + b) % grid.per_row * s.block;
            live[b] = (int)least(s.block, grid.columns - lane);
            if (runs > 1) {
                start[b] = row * grid.columns + lane;
                eights[b] = row * ((grid.columns + 7) / 8) + lane / 8;
                length[b] = live[b];
            }
        }
    }
    const int64_t pace = runs > 1 ? s.block : lanes;
    const bool direct = !s.matrices && full && first * s.block % LANES == 0;
    char *at[MOST];
    for (int c = 0; c < s.count; c++) {
        const Place &p = s.places[c];
        at[c] = (char *)t.at[p.column];
        if (p.reduction != NONE) {
            float *to = direct ? lane_room(s, room, c) : tile_room(s, room, c);
            if (t.dense && full)
                to = dense_copy(s, t, c) + start[0];
            if (!direct && p.kind != ROW)
                fill(to, shift + padded, first_of(p.reduction));
            at[c] = (char *)to;
        } else if (p.kind == ROW || p.kind == COLUMN || p.kind == MATRIX) {
            float *to = tile_room(s, room, c) + shift;
            fill(to - shift, shift, 0.0f);
            for (int k = 0; k < runs; k++) {
                expand(p, t, (const float *)at[c], to + k * pace, start[k], length[k]);
                fill(to + k * pace + length[k], (runs > 1 ? pace : padded) - length[k], 0.0f);
            }
            at[c] = (char *)(to - shift);
        } else if (p.kind == BLOCK_OF) {
            at[c] += first * p.bytes;
            if (!whole) {
                memcpy(tile_room(s, room, c), at[c], (size_t)count * p.bytes);
                at[c] = (char *)tile_room(s, room, c);
            }
        } else if (p.kind == ELEMENT) {
            if (full) {
                at[c] += start[0] * p.bytes;
                continue;
            }
            char *to = (char *)tile_room(s, room, c) + shift * p.bytes;
            memset(to - shift * p.bytes, 0, (size_t)shift * p.bytes);
            for (int k = 0; k < runs; k++) {
                memcpy(to + k * pace * p.bytes, at[c] + start[k] * p.bytes, (size_t)length[k] * p.bytes);
                memset(to + (k * pace + length[k]) * p.bytes, 0,
                       (size_t)((runs > 1 ? pace : padded) - length[k]) * p.bytes);
            }
            at[c] = to - shift * p.bytes;
        } else if (p.kind == EIGHTH && full) {
            at[c] += eights[0] * p.bytes;
        } else if (p.kind == EIGHTH) {
            char *to = (char *)tile_room(s, room, c);
            for (int k = 0; k < runs; k++) {
                const int64_t n = (length[k] + 7) / 8, size = (runs > 1 ? pace : padded) / 8;
                memcpy(to + k * pace / 8 * p.bytes, at[c] + eights[k] * p.bytes, (size_t)n * p.bytes);
                memset(to + (k * pace / 8 + n) * p.bytes, 0, (size_t)(size - n) * p.bytes);
            }
            at[c] = to;
        }
    }
    const int64_t number = grid.number(t, s.block, first) - shift;
    s.tile(at, shift + count, full || s.block == 1 ? nullptr : live, number, direct ? LANES - 1 : -1, known);
    for (int c = 0; c < s.count; c++) {
        const Place &p = s.places[c];
        if (p.reduction != NONE) {
            const float *x = (const float *)at[c] + shift;
            for (int k = 0; t.dense && !full && k < runs; k++)
                memcpy(dense_copy(s, t, c) + start[k], x + k * pace, (size_t)length[k] * 4);
        } else if (p.written) {
            char *to = (char *)t.at[p.column];
            if (p.kind == BLOCK_OF && !whole)
                memcpy(to + first * p.bytes, at[c], (size_t)count * p.bytes);
            for (int k = 0; p.kind == EIGHTH && !full && k < runs; k++)
                memcpy(to + eights[k] * p.bytes, at[c] + k * pace / 8 * p.bytes, (size_t)((length[k] + 7) / 8) * p.bytes);
            for (int k = 0; p.kind == ELEMENT && !full && k < runs; k++)
                memcpy(to + start[k] * p.bytes, at[c] + (shift + k * pace) * p.bytes, (size_t)length[k] * p.bytes);
        }
    }
    return direct;
}

// A band of short rows, several to a tile.
OPTGEN_ONCE void sweep_narrow(const Stage &s, const Shape &t, const Panels &shape, int64_t matrix, int64_t band,
                              int64_t top, int64_t bottom, char *room, const Known &known) {
    const Grid grid(t, s.block);
    const int64_t pace = shape.per_row * s.block;
    alignas(64) float one[1024 * VECTOR];  // of a row in blocks of that many
    for (int64_t i = top; i < bottom; i += shape.together) {
        const int64_t row = matrix * t.rows + i, now = least(shape.together, bottom - i);
        flat_tile(s, t, grid, row * shape.per_row, (int)(now * shape.per_row), 0, room, known);
        for (int c = 0; c < s.count; c++) {
            const Place &p = s.places[c];
            const float *x = tile_room(s, room, c);
            for (int64_t k = 0; p.reduction != NONE && k < now; k++) {
                if (p.kind == COLUMN) {
                    add_row(p.reduction, (float *)t.at[p.partial] + (matrix * shape.bands + band) * t.columns,
                            x + k * pace, t.columns, i + k == top);
                } else {
                    memcpy(one, x + k * pace, (size_t)t.columns * 4);
                    ((float *)t.at[p.partial])[row + k] = fold_panel(p.reduction, one, t.columns);
                }
            }
        }
    }
}

// Units [low, high) of a tensor: a band of rows in a panel of columns each.
OPTGEN_ONCE void sweep_panels(const Stage &s, const Shape &t, int64_t low, int64_t high, char *room, const Known &known) {
    const Panels shape(s, t);
    char *values[MOST];
    while (low < high) {
        const int64_t band = low / shape.panels % shape.bands, matrix = low / shape.panels / shape.bands;
        const int64_t panel = low % shape.panels, run = least(least(high - low, shape.panels - panel), RUN);
        const int64_t top = band * shape.height, bottom = least(top + shape.height, t.rows);
        low += run;
        if (shape.together > 1) {
            sweep_narrow(s, t, shape, matrix, band, top, bottom, room, known);
            continue;
        }
        for (int64_t i = top; i < bottom; i++) {
            const int64_t row = matrix * t.rows + i;
            for (int c = 0; c < s.count; c++) {
                const Place &p = s.places[c];
                values[c] = (char *)t.at[p.column];
                if (p.reduction == NONE && (p.kind == ROW || p.kind == MATRIX)) {
                    const float *all = (const float *)values[c];
                    values[c] = (char *)tile_room(s, room, c);
                    store((float *)values[c], F(all[p.kind == ROW ? row : matrix]));
                }
            }
            for (int64_t k = panel; k < panel + run; k++) {
                const int64_t from = k * s.size, n = least(s.size, t.columns - from);
                for (int c = 0; i == top && c < s.count; c++) {
                    const Place &p = s.places[c];
                    if (p.reduction != NONE && p.kind == COLUMN)
                        fill((float *)t.at[p.partial] + (matrix * shape.bands + band) * t.columns + from, n,
                             first_of(p.reduction));
                }
                panel_of_row(s, t, shape, values, room, row, from, n, known);
                for (int c = 0; c < s.count; c++) {
                    const Place &p = s.places[c];
                    if (p.reduction != NONE && p.kind == ROW)
                        ((float *)t.at[p.partial])[row * shape.panels + k] = fold_panel(p.reduction, tile_room(s, room, c), n);
                }
            }
        }
    }
}

// Segments of a tensor where one is summed, else tiles: in the order of blocks.
inline bool sums_segments(const Stage &s) {
    for (int c = 0; c < s.count; c++)
        if (s.places[c].reduction != NONE)
            return !s.matrices;
    return false;
}

// Blocks that one thread works on at a time.
inline int64_t flat_unit(const Stage &s, const Grid &grid) {
    return (sums_segments(s) || grid.blocks != grid.per_row ? SEGMENT : s.size) / s.block;
}

OPTGEN_ONCE void sweep_flat(const Stage &s, const Shape &t, int64_t low, int64_t high, char *room, const Known &known) {
    const Grid grid(t, s.block);
    const bool segments = sums_segments(s);
    const int most = s.size / s.block;
    const int64_t unit = flat_unit(s, grid);
    for (int64_t k = low; k < high; k++) {
        const int64_t end = least((k + 1) * unit, grid.blocks);
        for (int c = 0; segments && c < s.count; c++)
            if (s.places[c].reduction != NONE)
                fill(lane_room(s, room, c), LANES, first_of(s.places[c].reduction));
        for (int64_t first = k * unit; first < end;) {
            int now = (int)least(most, end - first), shift = 0;
            // Tiles of one row each, where that does not leave them nearly empty, or where rows are apart.
            if (grid.per_row >= most || t.apart())
                now = (int)least(now, grid.per_row - first % grid.per_row);
            if (s.block == 1) {
                shift = s.indexed ? (int)(grid.number(t, 1, first) % SHARE) : 0;
                if (shift)
                    now = (int)least(now, SHARE - shift);
                else if (now >= UNIT)
                    now -= now % UNIT;
            }
            const bool added = flat_tile(s, t, grid, first, now, shift, room, known);
            for (int c = 0; segments && !added && c < s.count; c++) {
                const Place &p = s.places[c];
                const int lane = (int)((first - k * unit) * s.block % LANES);
                if (p.reduction != NONE)
                    add_tile(p.reduction, lane_room(s, room, c), tile_room(s, room, c) + shift, s, grid, first, now,
                             lane);
            }
            first += now;
        }
        for (int c = 0; segments && c < s.count; c++) {
            const Place &p = s.places[c];
            if (p.reduction != NONE)
                ((float *)t.at[p.partial])[k] = fold(p.reduction, lane_room(s, room, c), LANES);
        }
    }
}

inline int64_t sweep_units(const Stage &s, const Shape &t) {
    if (by_panels(s, t)) {
        const Panels shape(s, t);
        return t.matrices * shape.bands * shape.panels;
    }
    const Grid grid(t, s.block);
    return (grid.blocks + flat_unit(s, grid) - 1) / flat_unit(s, grid);
}

inline int64_t segments(const Stage &s, const Shape &t) {
    return (Grid(t, s.block).blocks * s.block + SEGMENT - 1) / SEGMENT;
}

// -- what sweeps left, put together

// Values in 256 lanes.
OPTGEN_ONCE float in_lanes(Reduction r, const float *x, int64_t n) {
    alignas(64) float lanes[LANES];
    const int used = until(least(n, LANES));
    fill(lanes, used, first_of(r));
    add_lanes(r, lanes, x, n, 0);
    return done(r, fold_panel(r, lanes, used));
}

inline int64_t entries(Kind kind, const Shape &t) {
    return kind == ROW      ? t.matrices * t.rows
           : kind == COLUMN ? t.matrices * t.columns
           : kind == MATRIX ? t.matrices
                            : 1;
}

// Results [low, high) of rows.
OPTGEN_ONCE void finish_rows(const Stage &s, const Place &p, const Shape &t, const float *dense, int64_t low, int64_t high,
                        char *room) {
    const int64_t panels = (t.columns + s.size - 1) / s.size;
    const float *parts = (const float *)t.at[p.partial];
    float *out = (float *)t.at[p.column], *x = tile_room(s, room, 0);
    for (int64_t row = low; row < high; row++) {
        float total = first_of(p.reduction);
        for (int64_t k = 0; k < panels; k++) {
            float one;
            if (dense) {
                const int64_t from = k * s.size, n = least(s.size, t.columns - from);
                memcpy(x, dense + row * t.columns + from, (size_t)n * 4);
                one = fold_panel(p.reduction, x, n);
            } else {
                one = parts[row * panels + k];
            }
            total = two(p.reduction, total, one);
        }
        out[row] = done(p.reduction, total);
    }
}

// Results [low, high) of columns, at most TOGETHER.
OPTGEN_ONCE void finish_columns(const Stage &s, const Place &p, const Shape &t, const float *dense, int64_t low, int64_t high,
                           char *room) {
    const int64_t bands = (t.rows + PANEL_ROWS - 1) / PANEL_ROWS;
    float *x = tile_room(s, room, 0);
    while (low < high) {
        const int64_t matrix = low / t.columns, from = low % t.columns, n = least(high - low, t.columns - from);
        float *out = (float *)t.at[p.column] + low;
        if (bands == 0)
            fill(out, n, first_of(p.reduction));
        for (int64_t band = 0; band < bands; band++) {
            const float *part = (const float *)t.at[p.partial] + (matrix * bands + band) * t.columns + from;
            if (dense) {
                const int64_t top = band * PANEL_ROWS, bottom = least(top + PANEL_ROWS, t.rows);
                for (int64_t i = top; i < bottom; i++)
                    add_row(p.reduction, x, dense + (matrix * t.rows + i) * t.columns + from, n, i == top);
                part = x;
            }
            add_row(p.reduction, out, part, n, band == 0);
        }
        for (int64_t i = 0; i < n; i++)
            out[i] = done(p.reduction, out[i]);
        low += n;
    }
}

// The results of a sweep's place [low, high) TOGETHER at a time.
OPTGEN_ONCE void finish(const Stage &s, int place, const Shape &t, int64_t low, int64_t high, char *room) {
    const Place &p = s.places[place];
    const float *dense = dense_copy(s, t, place);
    const int64_t all = entries(p.kind, t);
    for (int64_t k = low; k < high; k++) {
        const int64_t a = k * TOGETHER, b = least(a + TOGETHER, all);
        if (p.kind == ROW)
            finish_rows(s, p, t, dense, a, b, room);
        else if (p.kind == COLUMN)
            finish_columns(s, p, t, dense, a, b, room);
        else
            *(float *)t.at[p.column] = in_lanes(p.reduction, (const float *)t.at[p.partial], segments(s, t));
    }
}

// -- few values

// Entries [from, from + n) of what is reduced to matrices or to the tensor, `each` to a result.
OPTGEN_ONCE void reduce_few(const Place &p, const Shape &t, float *lanes, const float *x, int64_t from, int64_t n,
                       int64_t each) {
    while (n > 0) {
        const int64_t result = from / each, at = from % each, now = least(n, each - at);
        if (at == 0)
            fill(lanes, LANES, first_of(p.reduction));
        add_lanes(p.reduction, lanes, x, now, (int)(at % LANES));
        if (at + now == each)
            ((float *)t.at[p.column])[result] = done(p.reduction, fold_panel(p.reduction, lanes, until(least(each, LANES))));
        x += now;
        from += now;
        n -= now;
    }
}

// All entries of a tensor, a stretch at a time.
OPTGEN_ONCE void work_on_few(const Stage &s, const Shape &t, char *room, const Known &known) {
    const int64_t all = entries(s.space, t);
    for (int c = 0; all == 0 && c < s.count; c++) {  // a part of a tensor that has none of them
        const Place &p = s.places[c];
        if (p.reduction != NONE)
            fill((float *)t.at[p.column], entries(p.kind, t), done(p.reduction, first_of(p.reduction)));
    }
    const int64_t of_matrix = s.space == ROW ? t.rows : s.space == COLUMN ? t.columns : 1;
    for (int64_t from = 0; from < all; from += s.size) {
        const int64_t n = least(s.size, all - from), matrix = from / of_matrix;
        const bool whole = n % W == 0, single = (from + n - 1) / of_matrix == matrix;
        char *at[MOST];
        for (int c = 0; c < s.count; c++) {
            const Place &p = s.places[c];
            float *inside = tile_room(s, room, c);
            at[c] = (char *)t.at[p.column];
            if (p.reduction != NONE) {
                at[c] = (char *)inside;
            } else if (p.kind == s.space) {
                at[c] += from * 4;
                if (!whole) {
                    memcpy(inside, at[c], (size_t)n * 4);
                    fill(inside + n, W, 0.0f);
                    at[c] = (char *)inside;
                }
            } else if (p.kind == MATRIX) {
                const float *values = (const float *)at[c];
                if (single)
                    store(inside, F(values[matrix]));
                else
                    for (int64_t i = 0; i < n; i++)
                        inside[i] = values[(from + i) / of_matrix];
                at[c] = (char *)inside;
            }
        }
        s.tile(at, (int)n, nullptr, 0, single ? 0 : -1, known);
        for (int c = 0; c < s.count; c++) {
            const Place &p = s.places[c];
            if (p.reduction != NONE)
                reduce_few(p, t, lane_room(s, room, c), tile_room(s, room, c), from, n, p.kind == MATRIX ? of_matrix : all);
            else if (p.written && !whole)
                memcpy((float *)t.at[p.column] + from, at[c], (size_t)n * 4);
        }
    }
}

// -- the step

inline void wait(int64_t all) {
    if (all > 1) {
#pragma omp barrier
    }
}

// The work of one of `all` threads in stages [begin, end); they wait for each other after each sweep and what follows.
inline void work(const Stage *stages, int begin, int end, const Table &table, const Lines &lines, int64_t who, int64_t all,
                 char *room) {
    const auto known_of = [&](const Shape &t) {
        return Known{lines.of(t.stream), t.extent, lines.key(t.stream), (int32_t)t.stream};
    };
    for (int k = begin; k < end;) {
        const Stage &s = stages[k];
        if (s.space == ELEMENT) {
            share(table, who, all, [&](const Shape &t) { return sweep_units(s, t); },
                  [&](const Shape &t, int64_t low, int64_t high) {
                      const Known known = known_of(t);
                      by_panels(s, t) ? sweep_panels(s, t, low, high, room, known)
                                      : sweep_flat(s, t, low, high, room, known);
                  });
            k++;
            wait(all);
            bool reduced = false;
            for (int c = 0; c < s.count; c++) {
                const Place &p = s.places[c];
                if (p.reduction == NONE)
                    continue;
                reduced = true;
                share(table, who, all, [&](const Shape &t) { return (entries(p.kind, t) + TOGETHER - 1) / TOGETHER; },
                      [&](const Shape &t, int64_t low, int64_t high) { finish(s, c, t, low, high, room); });
            }
            if (!reduced)
                continue;
        } else {
            int next = k + 1;
            while (next < end && stages[next].space != ELEMENT)
                next++;
            share(table, who, all, [](const Shape &) { return (int64_t)1; },
                  [&](const Shape &t, int64_t, int64_t) {
                      const Known known = known_of(t);
                      for (int i = k; i < next; i++)
                          work_on_few(stages[i], t, room, known);
                  });
            k = next;
        }
        wait(all);
    }
}

// The same, tensor by tensor: later sweeps find in caches what earlier ones read.  All threads work on a tensor that is
// a good part of a thread's share; the others are dealt out whole, and no thread waits for another.
inline void work_by_tensors(const Stage *stages, int begin, int end, const Table &table, const Lines &lines, int64_t who,
                            int64_t all, char *room) {
    const auto one = [&](int64_t k) {
        return Table{table.rows + k * (table.addresses + SIZES), 1, table.addresses, table[k].weight()};
    };
    const auto large = [&](int64_t k) { return all > 1 && table[k].weight() * all * 4 > table.elements; };
    for (int64_t k = 0; k < table.tensors; k++)
        if (large(k))
            work(stages, begin, end, one(k), lines, who, all, room);
#pragma omp for schedule(dynamic) nowait
    for (int64_t k = 0; k < table.tensors; k++)
        if (!large(k))
            work(stages, begin, end, one(k), lines, 0, 1, room);
}

// A kernel whose struct lists its stages.
template <class Kernel> struct Runner<Kernel, typename Kernel::staged> {
    static constexpr int STAGES = sizeof(Kernel::STAGES) / sizeof(Stage);
    static constexpr int ADDRESSES = Kernel::ADDRESSES;

    static int32_t stages(const int64_t *rows, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads,
                          int32_t begin, int32_t end) {
        if (begin < 0 || end > STAGES)
            return 1;
        Table table = {rows, tensors, ADDRESSES, 0};
        for (int64_t k = 0; k < tensors; k++)
            table.elements += table[k].weight();
        if (threads > table.elements / FEW)
            threads = table.elements < FEW ? 1 : (int32_t)(table.elements / FEW);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#ifdef _OPENMP
            const int64_t who = omp_get_thread_num(), all = omp_get_num_threads();
#else
            const int64_t who = 0, all = 1;
#endif
            alignas(64) static thread_local char inside[room<Kernel>()];
            work_by_tensors(Kernel::STAGES, begin, end, table, {scalars, keys, Kernel::SCALARS}, who, all, inside);
        }
        return 0;
    }

    static int32_t step(const int64_t *rows, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads) {
        return stages(rows, tensors, scalars, keys, threads, 0, STAGES);
    }
};

}  // namespace

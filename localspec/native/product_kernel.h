// The kernels, for the instruction set of the source that includes this. It defines, before,
//     INLINE  attributes of every function here: always_inline and the target,
//     TARGET  the target alone,
//     struct V  its vectors: see products_avx512vnni.cpp.
// Everything lies in an unnamed namespace, so that no two sets share a symbol.

namespace {

using localspec::activations;
using localspec::block_scale;
using localspec::column;
using localspec::packed;
using localspec::rows_at;

using I = V::I;  // integers
using F = V::F;  // one float for every row

// Where the fields of a vector's rows begin. The numbers are those of the encoding's fields in packing.cpp.
struct places {
    const uint8_t * field[localspec::max_fields];
};

// Into the second cache: what a tile of many rows reads next would not fit into the first.
template <int N> INLINE void lines_ahead(const uint8_t * p) {
    for (int i = 0; i < N; i++) {
        __builtin_prefetch(p + i * 64, 0, 2);
    }
}

// An encoding says how the quants and scales of a block lie (packing.h has the pattern): lines(t) gives quants
// 4 t … 4 t + 3 and those half a block further on, weight = d * (quant - offset) + m.
struct nibbles {
    static constexpr int  block   = 32;
    static constexpr bool minimum = false;

    static INLINE void lines(const places & w, int64_t b, int t, I & first, I & second) {
        const I x = V::load(w.field[0] + (b * 4 + t) * 64);
        first     = V::low_nibbles(x);
        second    = V::low_nibbles(V::right(x, 4));
    }

    static INLINE void prefetch(const places & w, int64_t b) { lines_ahead<4>(w.field[0] + b * 4 * 64); }
};

struct five_bits : nibbles {
    static INLINE void lines(const places & w, int64_t b, int t, I & first, I & second) {
        nibbles::lines(w, b, t, first, second);
        const I bits = V::load(w.field[1] + b * 64);
        first        = V::insert(first, V::left(bits, 4 - t), 0x10);
        second       = V::insert(second, V::right(bits, t), 0x10);
    }

    static INLINE void prefetch(const places & w, int64_t b) {
        nibbles::prefetch(w, b);
        lines_ahead<1>(w.field[1] + b * 64);
    }
};

struct q4_0 : nibbles {
    static constexpr int offset = 8;

    static INLINE void scales(const places & w, int64_t b, F & d, F &) { d = V::halves(w.field[1] + b * 32); }
};

struct q4_1 : nibbles {
    static constexpr int  offset  = 0;
    static constexpr bool minimum = true;

    static INLINE void scales(const places & w, int64_t b, F & d, F & m) {
        d = V::halves(w.field[1] + b * 32);
        m = V::halves(w.field[2] + b * 32);
    }
};

struct q5_0 : five_bits {
    static constexpr int offset = 16;

    static INLINE void scales(const places & w, int64_t b, F & d, F &) { d = V::halves(w.field[2] + b * 32); }
};

struct q5_1 : five_bits {
    static constexpr int  offset  = 0;
    static constexpr bool minimum = true;

    static INLINE void scales(const places & w, int64_t b, F & d, F & m) {
        d = V::halves(w.field[2] + b * 32);
        m = V::halves(w.field[3] + b * 32);
    }
};

struct q8_0 {
    static constexpr int  block   = 32;
    static constexpr int  offset  = 128;  // lines give quant - offset, signed; V makes of it what it can multiply
    static constexpr bool minimum = false;

    static INLINE void lines(const places & w, int64_t b, int t, I & first, I & second) {
        first  = V::load(w.field[0] + (b * 8 + t) * 64);
        second = V::load(w.field[0] + (b * 8 + t + 4) * 64);
    }

    static INLINE void scales(const places & w, int64_t b, F & d, F &) { d = V::halves(w.field[1] + b * 32); }

    static INLINE void prefetch(const places & w, int64_t b) { lines_ahead<8>(w.field[0] + b * 8 * 64); }
};

struct iq4_nl : nibbles {
    static constexpr int offset = 128;

    static INLINE void lines(const places & w, int64_t b, int t, I & first, I & second) {
        nibbles::lines(w, b, t, first, second);
        first  = V::iq4_values(first);
        second = V::iq4_values(second);
    }

    static INLINE void scales(const places & w, int64_t b, F & d, F &) { d = V::halves(w.field[1] + b * 32); }
};

struct iq4_xs : iq4_nl {
    static INLINE void scales(const places & w, int64_t b, F & d, F &) {
        const int64_t super = b >> 3;
        const int     i     = b & 7;
        const I       low   = V::right(V::bytes(w.field[1] + (super * 4 + i / 2) * 16), 4 * (i & 1));
        const I       high  = V::left(V::right(V::words(w.field[2] + super * 32), 2 * i), 4);
        const I       scale = V::either(V::both(low, 0xF), V::both(high, 0x30));
        d                   = V::mul(V::halves(w.field[3] + super * 32), V::sub(V::floats(scale), V::all(32.0f)));
    }
};

// Scales and minima of 6 bits, those of blocks 4 … 7 in two pieces.
INLINE void k_scales(const uint8_t * scales, int i, I & scale, I & min) {
    if (i < 4) {
        scale = V::both(V::bytes(scales + i * 16), 63);
        min   = V::both(V::bytes(scales + (i + 4) * 16), 63);
    } else {
        const I low = V::bytes(scales + (i + 4) * 16);
        scale       = V::either(V::both(low, 0xF), V::left(V::right(V::bytes(scales + (i - 4) * 16), 6), 4));
        min         = V::either(V::right(low, 4), V::left(V::right(V::bytes(scales + i * 16), 6), 4));
    }
}

template <int FIELD> INLINE void k_floats(const places & w, int64_t b, F & d, F & m) {
    const int64_t super = b >> 3;
    I             scale, min;
    k_scales(w.field[FIELD] + super * 12 * 16, b & 7, scale, min);
    d = V::mul(V::halves(w.field[FIELD + 1] + super * 32), V::floats(scale));
    m = V::negative(V::mul(V::halves(w.field[FIELD + 2] + super * 32), V::floats(min)));
}

struct q4_k : nibbles {
    static constexpr int  offset  = 0;
    static constexpr bool minimum = true;

    static INLINE void scales(const places & w, int64_t b, F & d, F & m) { k_floats<1>(w, b, d, m); }
};

struct q5_k : five_bits {
    static constexpr int  offset  = 0;
    static constexpr bool minimum = true;

    static INLINE void scales(const places & w, int64_t b, F & d, F & m) { k_floats<2>(w, b, d, m); }
};

struct q6_k {
    static constexpr int  block   = 16;
    static constexpr int  offset  = 32;
    static constexpr bool minimum = false;

    static INLINE void lines(const places & w, int64_t b, int t, I & first, I & second) {
        const I x    = V::load(w.field[0] + (b * 2 + t) * 64);
        const I bits = V::load(w.field[1] + b * 64);
        first        = V::insert(V::low_nibbles(x), V::left(bits, 4 - 2 * t), 0x30);
        second       = V::insert(V::low_nibbles(V::right(x, 4)), V::right(bits, 2 * t), 0x30);
    }

    static INLINE void scales(const places & w, int64_t b, F & d, F &) {
        d = V::mul(V::halves(w.field[3] + (b >> 4) * 32), V::floats(V::signed_bytes(w.field[2] + b * 16)));
    }

    static INLINE void prefetch(const places & w, int64_t b) {
        lines_ahead<2>(w.field[0] + b * 2 * 64);
        lines_ahead<1>(w.field[1] + b * 64);
    }
};

// The rows of a tile, and those whose quants are fetched into the cache meanwhile. Left to itself the CPU fetches too late:
// it stops at every page, and a tile of a few columns computes while nothing is on its way.
struct tile_rows {
    places now[V::vectors];
    places next[V::vectors];
};

// V::vectors × N results: along k block by block, within a block in integers.
template <class E, int N>
INLINE void tile(const tile_rows & w, const column * columns, int64_t k, F (&result)[V::vectors][N]) {
    const int8_t *      x[N];
    const block_scale * scale[N];
    for (int c = 0; c < N; c++) {
        x[c]     = reinterpret_cast<const int8_t *>(columns[c].x);
        scale[c] = reinterpret_cast<const block_scale *>(columns[c].x + k);
        for (int v = 0; v < V::vectors; v++) {
            result[v][c] = V::all(0.0f);
        }
    }
    for (int64_t b = 0; b < k / E::block; b++) {
        for (int v = 0; v < V::vectors * V::rows / localspec::group_rows; v++) {
            E::prefetch(w.next[v * localspec::group_rows / V::rows], b);
        }
        I sum[V::vectors][N];
        for (int c = 0; c < N; c++) {
            for (int v = 0; v < V::vectors; v++) {
                sum[v][c] = V::template start<E::offset>(&scale[c][b].offset);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < E::block / 8; t++) {
            I low[V::vectors], high[V::vectors];
            for (int v = 0; v < V::vectors; v++) {
                E::lines(w.now[v], b, t, low[v], high[v]);
                V::template prepare<E::offset>(low[v], high[v]);
            }
            for (int c = 0; c < N; c++) {
                const I x_low  = V::four(x[c] + b * E::block + 4 * t);
                const I x_high = V::four(x[c] + b * E::block + 4 * t + E::block / 2);
                for (int v = 0; v < V::vectors; v++) {
                    sum[v][c] = V::template dot<E::offset>(sum[v][c], low[v], x_low, high[v], x_high);
                }
            }
        }
        for (int v = 0; v < V::vectors; v++) {
            F d, m;
            E::scales(w.now[v], b, d, m);
            for (int c = 0; c < N; c++) {
                result[v][c] = V::fma(V::floats(sum[v][c]), V::mul(d, V::all(scale[c][b].d)), result[v][c]);
                if (E::minimum) {
                    result[v][c] = V::fma(m, V::all(scale[c][b].sum), result[v][c]);
                }
            }
        }
    }
}

template <class E, int N>
TARGET void rows(const tile_rows & w, const column * columns, int64_t k, int64_t row, int64_t end) {
    F result[V::vectors][N];
    tile<E, N>(w, columns, k, result);
    for (int v = 0; v < V::vectors; v++, row += V::rows) {
        for (int c = 0; c < N; c++) {
            if (row + V::rows <= end) {
                V::store(columns[c].y + row, result[v][c]);
            } else if (row < end) {
                float last[V::rows];
                V::store(last, result[v][c]);
                __builtin_memcpy(columns[c].y + row, last, (end - row) * sizeof(float));
            }
        }
    }
}

TARGET places places_of(const packed & w, const uint8_t * data, int64_t plane, int64_t row) {
    places        at;
    const int64_t group = plane * w.groups() + row / localspec::group_rows;
    for (int f = 0; f < w.code->n_fields; f++) {
        const localspec::field & field = w.code->fields[f];
        at.field[f] = data + w.region(f) + field.size * (group * w.n_blocks * field.count * localspec::group_rows +
                                                         row % localspec::group_rows);
    }
    return at;
}

TARGET void places_of(const packed & w, const uint8_t * data, rows_at at, places (&places)[V::vectors]) {
    for (int v = 0; v < V::vectors; v++) {  // behind the last group the one before again: it is not stored
        const int64_t row = at.row + v * V::rows;
        places[v]         = places_of(w, data, at.plane, row < w.groups() * localspec::group_rows ? row : at.row);
    }
}

template <class E>
TARGET void product(const packed & w, const uint8_t * data, rows_at first, rows_at next, int64_t to, int64_t end,
                    const column * columns, int64_t n_columns) {
    constexpr int step = V::rows * V::vectors;
    const int64_t k    = w.n_blocks * ggml_blck_size(w.code->type);
    tile_rows     at;
    places_of(w, data, first, at.now);
    for (; to < end; to += step, first.row += step) {
        places_of(w, data, to + step < end ? rows_at{ first.plane, first.row + step } : next, at.next);
        for (int64_t c = 0; c < n_columns;) {
            const int64_t left  = n_columns - c;
            const int64_t tiles = (left + 3) / 4;
            const int64_t n     = (left + tiles - 1) / tiles;  // 5 are 3 and 2: a tile of one is the dearest
            const auto    tile  = n == 4 ? rows<E, 4> : n == 3 ? rows<E, 3> : n == 2 ? rows<E, 2> : rows<E, 1>;
            tile(at, columns + c, k, to, end);
            c += n;
        }
        __builtin_memcpy(at.now, at.next, sizeof(at.now));
    }
}

localspec::product_fn product_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:   return product<q4_0>;
        case GGML_TYPE_Q4_1:   return product<q4_1>;
        case GGML_TYPE_Q5_0:   return product<q5_0>;
        case GGML_TYPE_Q5_1:   return product<q5_1>;
        case GGML_TYPE_Q8_0:   return product<q8_0>;
        case GGML_TYPE_IQ4_NL: return product<iq4_nl>;
        case GGML_TYPE_Q4_K:   return product<q4_k>;
        case GGML_TYPE_Q5_K:   return product<q5_k>;
        case GGML_TYPE_Q6_K:   return product<q6_k>;
        case GGML_TYPE_IQ4_XS: return product<iq4_xs>;
        default:               return nullptr;
    }
}

}  // namespace

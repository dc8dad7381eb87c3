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

using I = V::I;  // integers
using F = V::F;  // one float for every row

// Where the fields of a vector's rows begin. The numbers are those of the encoding's fields in packing.cpp.
struct places {
    const uint8_t * field[localspec::max_fields];
};

// An encoding says how 32 (or 16) weights of every row become bytes and floats. lines(t) gives quants 4 t … 4 t + 3 of the
// block and those half a block further on; weight = d * (code - offset) + m.
struct nibbles {  // blocks of 32 by themselves, as Q4_0 has them
    static constexpr int  block   = 32;
    static constexpr bool minimum = false;

    static INLINE void lines(const places & w, int64_t b, int t, I & low, I & high) {
        const I x = V::load(w.field[0] + (b * 4 + t) * 64);
        low       = V::low_nibbles(x);
        high      = V::low_nibbles(V::right(x, 4));
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

struct five_bits : nibbles {
    static INLINE void lines(const places & w, int64_t b, int t, I & low, I & high) {
        nibbles::lines(w, b, t, low, high);
        const I bits = V::load(w.field[1] + b * 64);
        low          = V::insert(low, V::left(bits, 4 - t), 0x10);
        high         = V::insert(high, V::right(bits, t), 0x10);
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
    static constexpr int  offset  = 128;  // lines give code - offset, signed; V makes of it what it can multiply
    static constexpr bool minimum = false;

    static INLINE void lines(const places & w, int64_t b, int t, I & low, I & high) {
        low  = V::load(w.field[0] + (b * 8 + t) * 64);
        high = V::load(w.field[0] + (b * 8 + t + 4) * 64);
    }

    static INLINE void scales(const places & w, int64_t b, F & d, F &) { d = V::halves(w.field[1] + b * 32); }
};

struct iq4_nl : nibbles {
    static constexpr int offset = 128;

    static INLINE void lines(const places & w, int64_t b, int t, I & low, I & high) {
        nibbles::lines(w, b, t, low, high);
        low  = V::iq4_values(low);
        high = V::iq4_values(high);
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

INLINE void k_floats(const uint8_t * scales, const uint8_t * d_super, const uint8_t * m_super, int64_t b, F & d, F & m) {
    const int64_t super = b >> 3;
    I             scale, min;
    k_scales(scales + super * 12 * 16, b & 7, scale, min);
    d = V::mul(V::halves(d_super + super * 32), V::floats(scale));
    m = V::negative(V::mul(V::halves(m_super + super * 32), V::floats(min)));
}

struct q4_k {
    static constexpr int  block   = 32;
    static constexpr int  offset  = 0;
    static constexpr bool minimum = true;

    // Two blocks share their bytes.
    static INLINE void lines(const places & w, int64_t b, int t, I & low, I & high) {
        const uint8_t * line = w.field[0] + ((b >> 1) * 8 + t) * 64;
        low                  = V::low_nibbles(V::right(V::load(line), 4 * (b & 1)));
        high                 = V::low_nibbles(V::right(V::load(line + 4 * 64), 4 * (b & 1)));
    }

    static INLINE void scales(const places & w, int64_t b, F & d, F & m) {
        k_floats(w.field[1], w.field[2], w.field[3], b, d, m);
    }
};

struct q5_k : q4_k {
    static INLINE void lines(const places & w, int64_t b, int t, I & low, I & high) {
        q4_k::lines(w, b, t, low, high);
        const uint8_t * bits = w.field[1] + ((b >> 3) * 8 + t) * 64;
        low                  = V::insert(low, V::left(V::right(V::load(bits), b & 7), 4), 0x10);
        high                 = V::insert(high, V::left(V::right(V::load(bits + 4 * 64), b & 7), 4), 0x10);
    }

    static INLINE void scales(const places & w, int64_t b, F & d, F & m) {
        k_floats(w.field[2], w.field[3], w.field[4], b, d, m);
    }
};

struct q6_k {
    static constexpr int  block   = 16;
    static constexpr int  offset  = 32;
    static constexpr bool minimum = false;

    // Of 128 weights the quarters 0 and 2 share their low bits' bytes, 1 and 3 too, all four their high bits'.
    static INLINE void lines(const places & w, int64_t b, int t, I & low, I & high) {
        const int64_t   half    = b >> 3;
        const int       quarter = (b >> 1) & 3;
        const uint8_t * four    = w.field[0] + (half * 16 + (quarter & 1) * 8 + (b & 1) * 4 + t) * 64;
        const uint8_t * two     = w.field[1] + (half * 8 + (b & 1) * 4 + t) * 64;
        low                     = six_bits(V::load(four), V::load(two), quarter);
        high                    = six_bits(V::load(four + 2 * 64), V::load(two + 2 * 64), quarter);
    }

    static INLINE I six_bits(I four, I two, int quarter) {
        return V::insert(V::low_nibbles(V::right(four, 4 * (quarter >> 1))), V::left(V::right(two, 2 * quarter), 4), 0x30);
    }

    static INLINE void scales(const places & w, int64_t b, F & d, F &) {
        d = V::mul(V::halves(w.field[3] + (b >> 4) * 32), V::floats(V::signed_bytes(w.field[2] + b * 16)));
    }
};

// V::vectors × N results: along k block by block, within a block in integers.
template <class E, int N>
INLINE void tile(const places (&w)[V::vectors], const column * columns, int64_t k, F (&result)[V::vectors][N]) {
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
                E::lines(w[v], b, t, low[v], high[v]);
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
            E::scales(w[v], b, d, m);
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
TARGET void rows(const places (&w)[V::vectors], const column * columns, int64_t k, int64_t row, int64_t n_rows) {
    F result[V::vectors][N];
    tile<E, N>(w, columns, k, result);
    for (int v = 0; v < V::vectors; v++, row += V::rows) {
        for (int c = 0; c < N; c++) {
            if (row + V::rows <= n_rows) {
                V::store(columns[c].y + row, result[v][c]);
            } else if (row < n_rows) {
                float last[V::rows];
                V::store(last, result[v][c]);
                __builtin_memcpy(columns[c].y + row, last, (n_rows - row) * sizeof(float));
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

template <class E>
TARGET void product(const packed & w, const uint8_t * data, int64_t plane, int64_t first, int64_t last,
                    const column * columns, int64_t n_columns) {
    const int64_t k = w.n_blocks * ggml_blck_size(w.code->type);
    for (int64_t row = first; row < last; row += V::rows * V::vectors) {
        places at[V::vectors];
        for (int v = 0; v < V::vectors; v++) {  // behind the last group the one before again: it is not stored
            const int64_t there = row + v * V::rows;
            at[v]               = places_of(w, data, plane, there < last ? there : row);
        }
        for (int64_t c = 0; c < n_columns;) {
            const int64_t left  = n_columns - c;
            const int64_t tiles = (left + 3) / 4;
            const int64_t n     = (left + tiles - 1) / tiles;  // 5 are 3 and 2: a tile of one is the dearest
            const auto    fn    = n == 4 ? rows<E, 4> : n == 3 ? rows<E, 3> : n == 2 ? rows<E, 2> : rows<E, 1>;
            fn(at, columns + c, k, row, w.rows);
            c += n;
        }
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

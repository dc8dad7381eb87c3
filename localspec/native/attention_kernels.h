// The two halves of attention over one tile of rows, for the instruction set of `simd` (simd_avx2.h or simd_avx512.h,
// included before). Everything is written so that a row's operations and their order do not depend on the tile.
#pragma once

#include "attention_tiles.h"

namespace localspec::attention {
namespace {

using floats = simd::floats;

constexpr int      width       = simd::width;
constexpr uint16_t hidden      = 0xfc00;  // -inf as F16
constexpr float    minus_inf    = -__builtin_inff();
constexpr int64_t  cells_ahead  = 64;  // cells to prefetch ahead
constexpr double   weight_shift = 0x1.8p12;  // doubles of this size are multiples of 2^-40

// e^x for x <= 0, within about 1 ulp; 0 below the normal range, not a number if x is not.
INLINE floats exp_negative(floats x) {
    const floats lowest = simd::all(-87.3f);
    const floats inside = simd::max(lowest, x);
    const floats n = simd::round(simd::mul(inside, simd::all(1.44269504f)));
    floats r = simd::fnma(n, simd::all(0.693359375f), inside);
    r = simd::fnma(n, simd::all(-2.12194440e-4f), r);
    floats y = simd::fma(r, simd::all(1.9875691500e-4f), simd::all(1.3981999507e-3f));
    y = simd::fma(y, r, simd::all(8.3334519073e-3f));
    y = simd::fma(y, r, simd::all(4.1665795894e-2f));
    y = simd::fma(y, r, simd::all(1.6666665459e-1f));
    y = simd::fma(y, r, simd::all(5.0000001201e-1f));
    y = simd::add(simd::fma(simd::mul(r, r), y, r), simd::all(1.0f));
    return simd::zero_below(x, lowest, simd::scale(y, n));
}

// Rows of keys and values lie apart by those of the other heads, which no hardware prefetcher follows well. Into the
// second-level cache: the first has too few misses in flight to hide the memory's latency.
INLINE void prefetch(const char * row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
        _mm_prefetch(row + i, _MM_HINT_T1);
    }
}

// ---- scores

INLINE void transpose(const char * cells, size_t stride, int64_t size, float * out) {
    for (int64_t d = 0; d < size; d += simd::transposed32) {
        simd::transpose32(cells + d * sizeof *out, stride, out + d * tile_cells, tile_cells);
    }
}

template <class half> INLINE void transpose(const char * cells, size_t stride, int64_t size, half * out) {
    for (int64_t d = 0; d < size; d += simd::transposed16) {
        simd::transpose16(cells + d * sizeof *out, stride, size - d, (uint16_t *) out + d * tile_cells, tile_cells);
    }
}

// The `n` keys from `begin` on, transposed to [head_size][tile_cells]; behind the last are zeros.
template <class T> INLINE void transpose_keys(const head_cells & keys, int64_t begin, int64_t n, const scratch_memory & scratch) {
    const int64_t row = keys.head_size * sizeof(T);
    const char *  cells = keys.data + begin * keys.stride;
    size_t        stride = keys.stride;
    if (n < tile_cells) {
        stride = row;
        __builtin_memset(scratch.tile, 0, tile_cells * row);
        for (int64_t i = 0; i < n; ++i) {
            __builtin_memcpy((char *) scratch.tile + i * row, cells + i * keys.stride, row);
        }
        cells = (const char *) scratch.tile;
    }
    for (int64_t i = 0; i < tile_cells; i += width) {
        transpose(cells + i * stride, stride, keys.head_size, (T *) scratch.keys + i);
    }
}

// The queries of each register tile of rows as [head_size][rows of the tile].
INLINE void pack_queries(const row_tile & rows, int64_t head_size, float * out) {
    for (int64_t first = 0; first < rows.n; first += simd::max_score_rows) {
        const int64_t n = rows.n - first < simd::max_score_rows ? rows.n - first : simd::max_score_rows;
        for (int64_t r = 0; r < n; ++r) {
            for (int64_t d = 0; d < head_size; ++d) {
                out[d * n + r] = rows.query[first + r][d];
            }
        }
        out += head_size * n;
    }
}

INLINE bool all_hidden(const row_tile & rows, int64_t begin, int64_t n) {
    for (int64_t r = 0; r < rows.n; ++r) {
        const uint16_t * mask = rows.mask[r];
        if (!mask) {
            return false;
        }
        if (r > 0 && mask == rows.mask[r - 1]) {
            continue;  // another head of the same column
        }
        uint16_t difference = 0;
        for (int64_t i = begin; i < begin + n; ++i) {
            difference |= mask[i] ^ hidden;
        }
        if (difference) {
            return false;
        }
    }
    return true;
}

INLINE void hide(int64_t n_rows, float * scores, int64_t stride) {
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t i = 0; i < tile_cells; i += width) {
            simd::store(scores + r * stride + i, simd::all(minus_inf));
        }
    }
}

// The mask of one row over one tile of `n` cells: in place, or copied to `padded` with the missing cells hidden.
INLINE const uint16_t * tile_mask(const uint16_t * mask, int64_t begin, int64_t n, uint16_t * padded) {
    if (n == tile_cells) {
        return mask ? mask + begin : nullptr;
    }
    for (int64_t i = 0; i < tile_cells; ++i) {
        padded[i] = i >= n ? hidden : mask ? mask[begin + i] : 0;
    }
    return padded;
}

INLINE floats masked_score(floats product, floats scale, const uint16_t * mask) {
    if (!mask) {
        return simd::mul(product, scale);
    }
    const floats bias = simd::load((const f16 *) mask);
    return simd::keep_equal(bias, simd::all(minus_inf), simd::fma(product, scale, bias));
}

// Products of R rows with C vectors of keys. Each run of head_step dimensions is summed on its own. Meanwhile keys `ahead`
// are fetched, a few at a time: more misses at once than the core can keep track of would hold up everything else.
template <int R, int C, class T>
INLINE void multiply(const T * keys, const float * queries, const head_cells & ahead, floats (&total)[R][C]) {
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) {
            total[r][c] = simd::zero();
        }
    }
    int64_t cell = 0;
    for (int64_t run = 0; run < ahead.head_size; run += head_step) {
        for (; cell * ahead.head_size < (run + head_step) * ahead.n; ++cell) {
            prefetch(ahead.data + cell * ahead.stride, ahead.head_size * sizeof(T));
        }
        floats sum[R][C];
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < C; ++c) {
                sum[r][c] = simd::zero();
            }
        }
        for (int64_t d = run; d < run + head_step; ++d) {
            floats key[C];
            for (int c = 0; c < C; ++c) {
                key[c] = simd::load(keys + d * tile_cells + c * width);
            }
            for (int r = 0; r < R; ++r) {
                const floats query = simd::all(queries[d * R + r]);
                for (int c = 0; c < C; ++c) {
                    sum[r][c] = simd::fma(query, key[c], sum[r][c]);
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < C; ++c) {
                total[r][c] = simd::add(total[r][c], sum[r][c]);
            }
        }
    }
}

struct score_tile {
    const float *            queries;  // [head_size][R]
    const uint16_t * const * mask;     // [R] over all cells
    int64_t                  begin, n;  // of the cells
    float                    scale;
    float *                  scores;   // [R][tile_cells], `stride` apart
    int64_t                  stride;
};

template <class T, int R>
TARGET void score_rows(const T * keys, int64_t n_rows, const score_tile & tile, const head_cells & ahead) {
    if constexpr (R > 1) {
        if (n_rows < R) {
            return score_rows<T, R - 1>(keys, n_rows, tile, ahead);
        }
    }
    const uint16_t * mask[R];
    uint16_t         padded[R][tile_cells];
    for (int r = 0; r < R; ++r) {
        mask[r] = tile_mask(tile.mask[r], tile.begin, tile.n, padded[r]);
    }
    constexpr int vectors = 2 * R <= simd::max_score_rows ? 2 : 1;  // as many sums at once as hide the latency
    for (int64_t i = 0; i < tile_cells; i += vectors * width) {
        floats total[R][vectors];
        const head_cells fetched = {ahead.data, ahead.stride, i == 0 ? ahead.n : 0, ahead.head_size};
        multiply<R, vectors>(keys + i, tile.queries, fetched, total);
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < vectors; ++c) {
                const int64_t at = i + c * width;
                const floats score = masked_score(total[r][c], simd::all(tile.scale), mask[r] ? mask[r] + at : nullptr);
                simd::store(tile.scores + r * tile.stride + at, score);
            }
        }
    }
}

template <class T>
TARGET void scores_of(const row_tile & rows, const head_cells & keys, int64_t begin, int64_t end, float scale, float * scores,
               int64_t stride, const scratch_memory & scratch) {
    pack_queries(rows, keys.head_size, scratch.queries);
    const T * transposed = (const T *) scratch.keys;
    for (int64_t cell = begin; cell < end; cell += tile_cells) {
        const int64_t n = end - cell < tile_cells ? end - cell : tile_cells;
        if (all_hidden(rows, cell, n)) {
            hide(rows.n, scores + cell, stride);
            continue;
        }
        transpose_keys<T>(keys, cell, n, scratch);
        for (int64_t r = 0; r < rows.n; r += simd::max_score_rows) {
            const score_tile tile = {scratch.queries + r * keys.head_size, rows.mask + r, cell, n, scale,
                                     scores + r * stride + cell, stride};
            const head_cells ahead = {keys.data + (cell + cells_ahead) * keys.stride, keys.stride, r == 0 ? tile_cells : 0,
                                      keys.head_size};
            score_rows<T, simd::max_score_rows>(transposed, rows.n - r, tile, ahead);
        }
    }
}

// ---- values

INLINE float row_maximum(const float * scores, int64_t n) {
    floats even = simd::all(minus_inf), odd = even;
    for (int64_t i = 0; i < n; i += 2 * width) {
        even = simd::max(even, simd::load(scores + i));
        odd = simd::max(odd, simd::load(scores + i + width));
    }
    const float value = simd::max_of(simd::max(even, odd));
    return value == minus_inf ? 0.0f : value;  // no cell in sight: all weights become 0
}

// A row's weights are summed as integers: the bit patterns of doubles whose last bit is worth 2^-40.
struct weight_sum {
    simd::ints64 patterns;
    int64_t      n_tiles;

    INLINE void clear() {
        patterns = simd::zero64();
        n_tiles = 0;
    }

    INLINE void add(floats weights) { patterns = simd::add_bits(patterns, weights, weight_shift); }

    INLINE float value() const {
        uint64_t origin;
        const double shift = weight_shift;
        __builtin_memcpy(&origin, &shift, sizeof origin);
        const int64_t added = n_tiles * tile_cells / (width / 2);  // to each of the width / 2 integers
        return (float) ((double) simd::sum_of(simd::minus(patterns, (uint64_t) added * origin)) * 0x1p-40);
    }
};

INLINE bool any_visible(const float * scores, int64_t stride, int64_t n_rows) {
    bool visible = false;
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t i = 0; i < tile_cells; i += width) {
            visible |= simd::any_not_equal(simd::load(scores + r * stride + i), simd::all(minus_inf));
        }
    }
    return visible;
}

// weights[row][i] = exp(score - maximum) over one tile of cells.
INLINE void weigh(const float * scores, int64_t stride, int64_t n_rows, const float * maximum, float * weights,
           weight_sum * sums) {
    for (int64_t r = 0; r < n_rows; ++r) {
        weight_sum sum = sums[r];
        for (int64_t i = 0; i < tile_cells; i += width) {
            const floats w = exp_negative(simd::sub(simd::load(scores + r * stride + i), simd::all(maximum[r])));
            simd::store(weights + r * tile_cells + i, w);
            sum.add(w);
        }
        sum.n_tiles += 1;
        sums[r] = sum;
    }
}

// sums[row][d …] += weights[row][i] * value[i][d …], cell by cell, over D vectors of dimensions.
template <class T, int R, int D>
INLINE void add_register_tile(const float * weights, const char * values, size_t value_stride, int64_t n, float * sums,
                       int64_t stride) {
    floats sum[R][D];
    for (int r = 0; r < R; ++r) {
        for (int d = 0; d < D; ++d) {
            sum[r][d] = simd::load(sums + r * stride + d * width);
        }
    }
    for (int64_t i = 0; i < n; ++i, values += value_stride) {
        prefetch(values + cells_ahead * value_stride, D * width * sizeof(T));
        floats value[D];
        for (int d = 0; d < D; ++d) {
            value[d] = simd::load((const T *) values + d * width);
        }
        for (int r = 0; r < R; ++r) {
            const floats w = simd::all(weights[r * tile_cells + i]);
            for (int d = 0; d < D; ++d) {
                sum[r][d] = simd::fma(w, value[d], sum[r][d]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int d = 0; d < D; ++d) {
            simd::store(sums + r * stride + d * width, sum[r][d]);
        }
    }
}

template <class T, int R>
TARGET void add_rows(int64_t n_rows, const float * weights, const char * values, size_t value_stride, int64_t n,
              int64_t n_dims, float * sums) {
    if constexpr (R > 1) {
        if (n_rows < R) {
            return add_rows<T, R - 1>(n_rows, weights, values, value_stride, n, n_dims, sums);
        }
    }
    constexpr int wide = 2 * R <= simd::max_value_rows ? 4 : 2;  // as many sums at once as hide the latency
    int64_t d = 0;
    for (; d + wide * width <= n_dims; d += wide * width) {
        add_register_tile<T, R, wide>(weights, values + d * sizeof(T), value_stride, n, sums + d, n_dims);
    }
    for (; d < n_dims; d += width) {
        add_register_tile<T, R, 1>(weights, values + d * sizeof(T), value_stride, n, sums + d, n_dims);
    }
}

template <class T>
INLINE void widen(const char * values, size_t value_stride, int64_t n, int64_t n_dims, float * out) {
    for (int64_t i = 0; i < n; ++i) {
        prefetch(values + (i + cells_ahead) * value_stride, n_dims * sizeof(T));
        for (int64_t d = 0; d < n_dims; d += width) {
            simd::store(out + i * n_dims + d, simd::load((const T *) (values + i * value_stride) + d));
        }
    }
}

// Divides by the sum of weights and writes one row; whether all of it is finite.
INLINE bool finish_row(const float * sums, float weight, int64_t n_dims, float * result) {
    const floats factor = simd::all(weight == 0.0f ? 0.0f : 1.0f / weight);
    bool finite = true;
    for (int64_t d = 0; d < n_dims; d += width) {
        const floats value = simd::mul(simd::load(sums + d), factor);
        finite &= !simd::any_not_equal(simd::sub(value, value), simd::zero());
        simd::store(result + d, value);
    }
    return finite;
}

// One row again, where 0 * infinity may have come in through a cell of no weight: those cells are left out. For finite
// values this is the same result.
template <class T>
TARGET void redo_row(const float * scores, float maximum, const head_cells & values, int64_t begin, int64_t n_dims, float * result,
              const scratch_memory & scratch) {
    weight_sum weight;
    weight.clear();
    for (int64_t d = 0; d < n_dims; d += width) {
        simd::store(scratch.sums + d, simd::zero());
    }
    for (int64_t i = 0; i < values.n; ++i) {
        const float * w = scratch.weights + i % tile_cells;
        if (i % tile_cells == 0) {
            weigh(scores + i, 0, 1, &maximum, scratch.weights, &weight);
        }
        if (*w != 0.0f) {
            const char * value = values.data + i * values.stride + begin * sizeof(T);
            add_rows<T, 1>(1, w, value, values.stride, 1, n_dims, scratch.sums);
        }
    }
    finish_row(scratch.sums, weight.value(), n_dims, result);
}

template <class T>
TARGET void values_of(const row_tile & rows, const head_cells & values, int64_t begin, int64_t end, const float * scores,
               int64_t stride, const scratch_memory & scratch) {
    const int64_t n_dims = end - begin;
    const bool    widened = rows.n > simd::max_value_rows && sizeof(T) < sizeof(float);
    float         maximum[max_rows];
    weight_sum     weight[max_rows];
    for (int64_t r = 0; r < rows.n; ++r) {
        weight[r].clear();
        maximum[r] = row_maximum(scores + r * stride, (values.n + tile_cells - 1) / tile_cells * tile_cells);
    }
    for (int64_t i = 0; i < rows.n * n_dims; i += width) {
        simd::store(scratch.sums + i, simd::zero());
    }
    for (int64_t cell = 0; cell < values.n; cell += tile_cells) {
        const int64_t n = values.n - cell < tile_cells ? values.n - cell : tile_cells;
        const char *  tile = values.data + cell * values.stride + begin * sizeof(T);
        bool          ready = false;
        for (int64_t r = 0; r < rows.n; r += simd::max_value_rows) {
            const int64_t n_rows = rows.n - r < simd::max_value_rows ? rows.n - r : simd::max_value_rows;
            const float * tile_scores = scores + r * stride + cell;
            if (!any_visible(tile_scores, stride, n_rows)) {
                continue;
            }
            weigh(tile_scores, stride, n_rows, maximum + r, scratch.weights, weight + r);
            float * sums = scratch.sums + r * n_dims;
            if (!widened) {
                add_rows<T, simd::max_value_rows>(n_rows, scratch.weights, tile, values.stride, n, n_dims, sums);
                continue;
            }
            if (!ready) {
                widen<T>(tile, values.stride, n, n_dims, scratch.tile);
                ready = true;
            }
            add_rows<float, simd::max_value_rows>(n_rows, scratch.weights, (const char *) scratch.tile,
                                              n_dims * sizeof(float), n, n_dims, sums);
        }
    }
    bool finite[max_rows];
    for (int64_t r = 0; r < rows.n; ++r) {
        finite[r] = finish_row(scratch.sums + r * n_dims, weight[r].value(), n_dims, rows.result[r] + begin);
    }
    for (int64_t r = 0; r < rows.n; ++r) {
        if (!finite[r]) {
            redo_row<T>(scores + r * stride, maximum[r], values, begin, n_dims, rows.result[r] + begin, scratch);
        }
    }
}

constexpr attention_kernels kernels_of_simd = {
    scores_of<float>, scores_of<f16>, scores_of<bf16>, values_of<float>, values_of<f16>, values_of<bf16>,
};

}  // namespace
}  // namespace localspec::attention

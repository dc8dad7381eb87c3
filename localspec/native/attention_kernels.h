// The two halves of attention over one tile of rows, for the instruction set of `Simd` (simd_avx2.h or simd_avx512.h,
// included before). Everything is written so that a row's operations and their order do not depend on the tile.
#pragma once

#include "attention_tiles.h"

namespace localspec::attention {
namespace {

using Floats = Simd::Floats;

constexpr int      kWidth       = Simd::kWidth;
constexpr uint16_t kHidden      = 0xfc00;  // -inf as F16
constexpr float    kMinusInf    = -__builtin_inff();
constexpr int64_t  kAhead       = 128;  // cells to prefetch ahead
constexpr double   kWeightShift = 0x1.8p12;  // doubles of this size are multiples of 2^-40

// e^x for x <= 0, within about 1 ulp; 0 below the normal range, not a number if x is not.
INLINE Floats exp_negative(Floats x) {
    const Floats lowest = Simd::all(-87.3f);
    const Floats inside = Simd::max(lowest, x);
    const Floats n = Simd::round(Simd::mul(inside, Simd::all(1.44269504f)));
    Floats r = Simd::fnma(n, Simd::all(0.693359375f), inside);
    r = Simd::fnma(n, Simd::all(-2.12194440e-4f), r);
    Floats y = Simd::fma(r, Simd::all(1.9875691500e-4f), Simd::all(1.3981999507e-3f));
    y = Simd::fma(y, r, Simd::all(8.3334519073e-3f));
    y = Simd::fma(y, r, Simd::all(4.1665795894e-2f));
    y = Simd::fma(y, r, Simd::all(1.6666665459e-1f));
    y = Simd::fma(y, r, Simd::all(5.0000001201e-1f));
    y = Simd::add(Simd::fma(Simd::mul(r, r), y, r), Simd::all(1.0f));
    return Simd::zero_below(x, lowest, Simd::scale(y, n));
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
    for (int64_t d = 0; d < size; d += Simd::kTransposed32) {
        Simd::transpose32(cells + d * sizeof *out, stride, out + d * kCells, kCells);
    }
}

template <class Half> INLINE void transpose(const char * cells, size_t stride, int64_t size, Half * out) {
    for (int64_t d = 0; d < size; d += Simd::kTransposed16) {
        Simd::transpose16(cells + d * sizeof *out, stride, size - d, (uint16_t *) out + d * kCells, kCells);
    }
}

// The `n` keys from `begin` on, transposed to [head_size][kCells]; behind the last are zeros.
template <class T> INLINE void transpose_keys(const Cells & keys, int64_t begin, int64_t n, const Scratch & scratch) {
    const int64_t row = keys.head_size * sizeof(T);
    const char *  cells = keys.data + begin * keys.stride;
    size_t        stride = keys.stride;
    if (n < kCells) {
        stride = row;
        __builtin_memset(scratch.tile, 0, kCells * row);
        for (int64_t i = 0; i < n; ++i) {
            __builtin_memcpy((char *) scratch.tile + i * row, cells + i * keys.stride, row);
        }
        cells = (const char *) scratch.tile;
    }
    for (int64_t i = 0; i < kCells; ++i) {
        prefetch(cells + (i + kAhead) * stride, row);
    }
    for (int64_t i = 0; i < kCells; i += kWidth) {
        transpose(cells + i * stride, stride, keys.head_size, (T *) scratch.keys + i);
    }
}

// The queries of each register tile of rows as [head_size][rows of the tile].
INLINE void pack_queries(const Rows & rows, int64_t head_size, float * out) {
    for (int64_t first = 0; first < rows.n; first += Simd::kScoreRows) {
        const int64_t n = rows.n - first < Simd::kScoreRows ? rows.n - first : Simd::kScoreRows;
        for (int64_t r = 0; r < n; ++r) {
            for (int64_t d = 0; d < head_size; ++d) {
                out[d * n + r] = rows.query[first + r][d];
            }
        }
        out += head_size * n;
    }
}

INLINE bool all_hidden(const Rows & rows, int64_t begin, int64_t n) {
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
            difference |= mask[i] ^ kHidden;
        }
        if (difference) {
            return false;
        }
    }
    return true;
}

INLINE void hide(int64_t n_rows, float * scores, int64_t stride) {
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t i = 0; i < kCells; i += kWidth) {
            Simd::store(scores + r * stride + i, Simd::all(kMinusInf));
        }
    }
}

// The mask of one row over one tile of `n` cells: in place, or copied to `padded` with the missing cells hidden.
INLINE const uint16_t *tile_mask(const uint16_t * mask, int64_t begin, int64_t n, uint16_t * padded) {
    if (n == kCells) {
        return mask ? mask + begin : nullptr;
    }
    for (int64_t i = 0; i < kCells; ++i) {
        padded[i] = i >= n ? kHidden : mask ? mask[begin + i] : 0;
    }
    return padded;
}

INLINE Floats masked_score(Floats product, Floats scale, const uint16_t * mask) {
    if (!mask) {
        return Simd::mul(product, scale);
    }
    const Floats bias = Simd::load((const F16 *) mask);
    return Simd::keep_equal(bias, Simd::all(kMinusInf), Simd::fma(product, scale, bias));
}

// Products of R rows with C vectors of keys. Each run of kHeadStep dimensions is summed on its own.
template <int R, int C, class T>
INLINE void multiply(const T * keys, const float * queries, int64_t head_size, Floats (&total)[R][C]) {
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) {
            total[r][c] = Simd::zero();
        }
    }
    for (int64_t run = 0; run < head_size; run += kHeadStep) {
        Floats sum[R][C];
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < C; ++c) {
                sum[r][c] = Simd::zero();
            }
        }
        for (int64_t d = run; d < run + kHeadStep; ++d) {
            Floats key[C];
            for (int c = 0; c < C; ++c) {
                key[c] = Simd::load(keys + d * kCells + c * kWidth);
            }
            for (int r = 0; r < R; ++r) {
                const Floats query = Simd::all(queries[d * R + r]);
                for (int c = 0; c < C; ++c) {
                    sum[r][c] = Simd::fma(query, key[c], sum[r][c]);
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < C; ++c) {
                total[r][c] = Simd::add(total[r][c], sum[r][c]);
            }
        }
    }
}

struct ScoreTile {
    const float *            queries;  // [head_size][R]
    const uint16_t * const * mask;     // [R] over all cells
    int64_t                  begin, n; // of the cells
    int64_t                  head_size;
    float                    scale;
    float *                  scores;   // [R][kCells], `stride` apart
    int64_t                  stride;
};

template <class T, int R> TARGET void score_rows(const T * keys, int64_t n_rows, const ScoreTile & tile) {
    if constexpr (R > 1) {
        if (n_rows < R) {
            return score_rows<T, R - 1>(keys, n_rows, tile);
        }
    }
    const uint16_t * mask[R];
    uint16_t         padded[R][kCells];
    for (int r = 0; r < R; ++r) {
        mask[r] = tile_mask(tile.mask[r], tile.begin, tile.n, padded[r]);
    }
    constexpr int kVectors = 2 * R <= Simd::kScoreRows ? 2 : 1;  // as many sums at once as hide the latency
    for (int64_t i = 0; i < kCells; i += kVectors * kWidth) {
        Floats total[R][kVectors];
        multiply<R, kVectors>(keys + i, tile.queries, tile.head_size, total);
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < kVectors; ++c) {
                const int64_t at = i + c * kWidth;
                const Floats score = masked_score(total[r][c], Simd::all(tile.scale), mask[r] ? mask[r] + at : nullptr);
                Simd::store(tile.scores + r * tile.stride + at, score);
            }
        }
    }
}

template <class T>
TARGET void scores_of(const Rows & rows, const Cells & keys, int64_t begin, int64_t end, float scale, float * scores,
               int64_t stride, const Scratch & scratch) {
    pack_queries(rows, keys.head_size, scratch.queries);
    const T * transposed = (const T *) scratch.keys;
    for (int64_t cell = begin; cell < end; cell += kCells) {
        const int64_t n = end - cell < kCells ? end - cell : kCells;
        if (all_hidden(rows, cell, n)) {
            hide(rows.n, scores + cell, stride);
            continue;
        }
        transpose_keys<T>(keys, cell, n, scratch);
        for (int64_t r = 0; r < rows.n; r += Simd::kScoreRows) {
            const ScoreTile tile = {scratch.queries + r * keys.head_size, rows.mask + r, cell,  n, keys.head_size,
                                    scale, scores + r * stride + cell, stride};
            score_rows<T, Simd::kScoreRows>(transposed, rows.n - r, tile);
        }
    }
}

// ---- values

INLINE float row_maximum(const float * scores, int64_t n) {
    Floats even = Simd::all(kMinusInf), odd = even;
    for (int64_t i = 0; i < n; i += 2 * kWidth) {
        even = Simd::max(even, Simd::load(scores + i));
        odd = Simd::max(odd, Simd::load(scores + i + kWidth));
    }
    const float value = Simd::max_of(Simd::max(even, odd));
    return value == kMinusInf ? 0.0f : value;  // no cell in sight: all weights become 0
}

// A row's weights are summed as integers: the bit patterns of doubles whose last bit is worth 2^-40.
struct WeightSum {
    Simd::Ints64 patterns;
    int64_t      n_tiles;

    INLINE void clear() {
        patterns = Simd::zero64();
        n_tiles = 0;
    }

    INLINE void add(Floats weights) { patterns = Simd::add_bits(patterns, weights, kWeightShift); }

    INLINE float value() const {
        uint64_t origin;
        const double shift = kWeightShift;
        __builtin_memcpy(&origin, &shift, sizeof origin);
        const uint64_t sum = (uint64_t) Simd::sum_of(patterns) - (uint64_t) (n_tiles * kCells) * origin;
        return (float) ((double) (int64_t) sum * 0x1p-40);
    }
};

INLINE bool any_visible(const float * scores, int64_t stride, int64_t n_rows) {
    bool visible = false;
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t i = 0; i < kCells; i += kWidth) {
            visible |= Simd::any_not_equal(Simd::load(scores + r * stride + i), Simd::all(kMinusInf));
        }
    }
    return visible;
}

// weights[row][i] = exp(score - maximum) over one tile of cells.
INLINE void weigh(const float * scores, int64_t stride, int64_t n_rows, const float * maximum, float * weights,
           WeightSum * sums) {
    for (int64_t r = 0; r < n_rows; ++r) {
        WeightSum sum = sums[r];
        for (int64_t i = 0; i < kCells; i += kWidth) {
            const Floats w = exp_negative(Simd::sub(Simd::load(scores + r * stride + i), Simd::all(maximum[r])));
            Simd::store(weights + r * kCells + i, w);
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
    Floats sum[R][D];
    for (int r = 0; r < R; ++r) {
        for (int d = 0; d < D; ++d) {
            sum[r][d] = Simd::load(sums + r * stride + d * kWidth);
        }
    }
    for (int64_t i = 0; i < n; ++i, values += value_stride) {
        prefetch(values + kAhead * value_stride, D * kWidth * sizeof(T));
        Floats value[D];
        for (int d = 0; d < D; ++d) {
            value[d] = Simd::load((const T *) values + d * kWidth);
        }
        for (int r = 0; r < R; ++r) {
            const Floats w = Simd::all(weights[r * kCells + i]);
            for (int d = 0; d < D; ++d) {
                sum[r][d] = Simd::fma(w, value[d], sum[r][d]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int d = 0; d < D; ++d) {
            Simd::store(sums + r * stride + d * kWidth, sum[r][d]);
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
    constexpr int kWide = 2 * R <= Simd::kValueRows ? 4 : 2;  // as many sums at once as hide the latency
    int64_t d = 0;
    for (; d + kWide * kWidth <= n_dims; d += kWide * kWidth) {
        add_register_tile<T, R, kWide>(weights, values + d * sizeof(T), value_stride, n, sums + d, n_dims);
    }
    for (; d < n_dims; d += kWidth) {
        add_register_tile<T, R, 1>(weights, values + d * sizeof(T), value_stride, n, sums + d, n_dims);
    }
}

template <class T>
INLINE void widen(const char * values, size_t value_stride, int64_t n, int64_t n_dims, float * out) {
    for (int64_t i = 0; i < n; ++i) {
        prefetch(values + (i + kAhead) * value_stride, n_dims * sizeof(T));
        for (int64_t d = 0; d < n_dims; d += kWidth) {
            Simd::store(out + i * n_dims + d, Simd::load((const T *) (values + i * value_stride) + d));
        }
    }
}

// Divides by the sum of weights and writes one row; whether all of it is finite.
INLINE bool finish_row(const float * sums, float weight, int64_t n_dims, float * result) {
    const Floats factor = Simd::all(weight == 0.0f ? 0.0f : 1.0f / weight);
    bool finite = true;
    for (int64_t d = 0; d < n_dims; d += kWidth) {
        const Floats value = Simd::mul(Simd::load(sums + d), factor);
        finite &= !Simd::any_not_equal(Simd::sub(value, value), Simd::zero());
        Simd::store(result + d, value);
    }
    return finite;
}

// One row again, where 0 * infinity may have come in through a cell of no weight: those cells are left out. For finite
// values this is the same result.
template <class T>
TARGET void redo_row(const float * scores, float maximum, const Cells & values, int64_t begin, int64_t n_dims, float * result,
              const Scratch & scratch) {
    WeightSum weight;
    weight.clear();
    for (int64_t d = 0; d < n_dims; d += kWidth) {
        Simd::store(scratch.sums + d, Simd::zero());
    }
    for (int64_t i = 0; i < values.n; ++i) {
        const float * w = scratch.weights + i % kCells;
        if (i % kCells == 0) {
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
TARGET void values_of(const Rows & rows, const Cells & values, int64_t begin, int64_t end, const float * scores,
               int64_t stride, const Scratch & scratch) {
    const int64_t n_dims = end - begin;
    const bool    widened = rows.n > Simd::kValueRows && sizeof(T) < sizeof(float);
    float         maximum[kRows];
    WeightSum     weight[kRows];
    for (int64_t r = 0; r < rows.n; ++r) {
        weight[r].clear();
        maximum[r] = row_maximum(scores + r * stride, (values.n + kCells - 1) / kCells * kCells);
    }
    for (int64_t i = 0; i < rows.n * n_dims; i += kWidth) {
        Simd::store(scratch.sums + i, Simd::zero());
    }
    for (int64_t cell = 0; cell < values.n; cell += kCells) {
        const int64_t n = values.n - cell < kCells ? values.n - cell : kCells;
        const char *  tile = values.data + cell * values.stride + begin * sizeof(T);
        bool          ready = false;
        for (int64_t r = 0; r < rows.n; r += Simd::kValueRows) {
            const int64_t n_rows = rows.n - r < Simd::kValueRows ? rows.n - r : Simd::kValueRows;
            const float * tile_scores = scores + r * stride + cell;
            if (!any_visible(tile_scores, stride, n_rows)) {
                continue;
            }
            weigh(tile_scores, stride, n_rows, maximum + r, scratch.weights, weight + r);
            float * sums = scratch.sums + r * n_dims;
            if (!widened) {
                add_rows<T, Simd::kValueRows>(n_rows, scratch.weights, tile, values.stride, n, n_dims, sums);
                continue;
            }
            if (!ready) {
                widen<T>(tile, values.stride, n, n_dims, scratch.tile);
                ready = true;
            }
            add_rows<float, Simd::kValueRows>(n_rows, scratch.weights, (const char *) scratch.tile,
                                              n_dims * sizeof(float), n, n_dims, sums);
        }
    }
    bool finite[kRows];
    for (int64_t r = 0; r < rows.n; ++r) {
        finite[r] = finish_row(scratch.sums + r * n_dims, weight[r].value(), n_dims, rows.result[r] + begin);
    }
    for (int64_t r = 0; r < rows.n; ++r) {
        if (!finite[r]) {
            redo_row<T>(scores + r * stride, maximum[r], values, begin, n_dims, rows.result[r] + begin, scratch);
        }
    }
}

constexpr Kernels kKernels = {
    scores_of<float>, scores_of<F16>, scores_of<BF16>, values_of<float>, values_of<F16>, values_of<BF16>,
};

}  // namespace
}  // namespace localspec::attention

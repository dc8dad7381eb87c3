// 16 floats a vector with AVX-512 F, BW and VL. TARGET and INLINE are the includer's.
#pragma once

#include <immintrin.h>

#include "simd_types.h"

namespace localspec {
namespace {

struct simd {
    static constexpr int width = 16;
    static constexpr int max_score_rows = 12;  // rows of a register tile: 12 sums and 12 totals in 32 registers
    static constexpr int max_value_rows = 8;

    using floats = __m512;
    using ints64 = __m512i;

    static INLINE floats zero() { return _mm512_setzero_ps(); }
    static INLINE floats all(float x) { return _mm512_set1_ps(x); }
    static INLINE floats load(const float * p) { return _mm512_loadu_ps(p); }
    static INLINE floats load(const f16 * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
    static INLINE floats load(const bf16 * p) {
        const __m256i bits = _mm256_loadu_si256((const __m256i *) p);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static INLINE void store(float * p, floats x) { _mm512_storeu_ps(p, x); }

    static INLINE floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
    static INLINE floats sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
    static INLINE floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
    static INLINE floats fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
    static INLINE floats fnma(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static INLINE floats max(floats a, floats b) { return _mm512_max_ps(a, b); }  // b where either is not a number
    static INLINE float max_of(floats x) { return _mm512_reduce_max_ps(x); }
    static INLINE floats round(floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // x * 2^n for whole n in -126 … 0
    static INLINE floats scale(floats x, floats n) {
        const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
        return _mm512_mul_ps(x, _mm512_castsi512_ps(bits));
    }

    // `y` where not a < b
    static INLINE floats zero_below(floats a, floats b, floats y) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), y);
    }
    // `y`, `mark` where x equals `mark`
    static INLINE floats keep_equal(floats x, floats mark, floats y) {
        return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, mark, _CMP_EQ_OQ), mark);
    }
    static INLINE bool any_not_equal(floats x, floats y) { return _mm512_cmp_ps_mask(x, y, _CMP_NEQ_UQ) != 0; }

    static INLINE ints64 zero64() { return _mm512_setzero_si512(); }
    // Adds to `sum` the bit patterns of double(x) + offset, lane by lane.
    static INLINE ints64 add_bits(ints64 sum, floats x, double offset) {
        const __m512d shift = _mm512_set1_pd(offset);
        const __m512d low = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), shift);
        const __m512d high = _mm512_add_pd(_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1))), shift);
        return _mm512_add_epi64(sum, _mm512_add_epi64(_mm512_castpd_si512(low), _mm512_castpd_si512(high)));
    }
    static INLINE ints64 minus(ints64 x, uint64_t all) { return _mm512_sub_epi64(x, _mm512_set1_epi64((int64_t) all)); }
    static INLINE int64_t sum_of(ints64 x) {  // modulo 2^64
        const __m256i half = _mm256_add_epi64(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
        const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        return _mm_cvtsi128_si64(_mm_add_epi64(pair, _mm_unpackhi_epi64(pair, pair)));
    }

    // Transposes transposed elements of `width` rows: out[i * out_stride + row] = rows[row][i], with rows
    // `stride` bytes apart. Of 16-bit elements there may be `n` only; the others become zero.
    static constexpr int transposed16 = 32;
    static constexpr int transposed32 = 16;
    static INLINE void transpose16(const char * rows, size_t stride, int64_t n, uint16_t * out, int64_t out_stride);
    static INLINE void transpose32(const char * rows, size_t stride, float * out, int64_t out_stride);
};

INLINE void simd::transpose16(const char * rows, size_t stride, int64_t n, uint16_t * out, int64_t out_stride) {
    const __mmask32 present = n >= 32 ? ~0u : (1u << n) - 1;
    __m512i half[2][8];  // of the first and the last 8 rows: [j] has, in lane l, element 8 l + j of each row
    for (int h = 0; h < 2; ++h) {
        __m512i a[8], b[8];
        for (int i = 0; i < 8; ++i) {
            a[i] = _mm512_maskz_loadu_epi16(present, rows + (8 * h + i) * stride);
        }
        for (int i = 0; i < 4; ++i) {
            b[2 * i] = _mm512_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            a[4 * i] = _mm512_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
            a[4 * i + 1] = _mm512_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
            a[4 * i + 2] = _mm512_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
            a[4 * i + 3] = _mm512_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
        }
        for (int i = 0; i < 4; ++i) {
            half[h][2 * i] = _mm512_unpacklo_epi64(a[i], a[i + 4]);
            half[h][2 * i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 4]);
        }
    }
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int j = 0; j < 8; ++j) {
        const __m512i x = _mm512_permutex2var_epi64(half[0][j], first, half[1][j]);
        const __m512i y = _mm512_permutex2var_epi64(half[0][j], last, half[1][j]);
        _mm256_storeu_si256((__m256i *) (out + j * out_stride), _mm512_castsi512_si256(x));
        _mm256_storeu_si256((__m256i *) (out + (8 + j) * out_stride), _mm512_extracti64x4_epi64(x, 1));
        _mm256_storeu_si256((__m256i *) (out + (16 + j) * out_stride), _mm512_castsi512_si256(y));
        _mm256_storeu_si256((__m256i *) (out + (24 + j) * out_stride), _mm512_extracti64x4_epi64(y, 1));
    }
}

INLINE void simd::transpose32(const char * rows, size_t stride, float * out, int64_t out_stride) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; ++i) {
        a[i] = _mm512_loadu_ps(rows + i * stride);
    }
    for (int i = 0; i < 8; ++i) {
        b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {  // a[4 i + j] has, in lane l, element 4 l + j of rows 4 i … 4 i + 3
        a[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[4 * i]), _mm512_castps_pd(b[4 * i + 2])));
        a[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[4 * i]), _mm512_castps_pd(b[4 * i + 2])));
        a[4 * i + 2] =
            _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[4 * i + 1]), _mm512_castps_pd(b[4 * i + 3])));
        a[4 * i + 3] =
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[4 * i + 1]), _mm512_castps_pd(b[4 * i + 3])));
    }
    for (int j = 0; j < 4; ++j) {
        const __m512 even01 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), odd01 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
        const __m512 even23 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88),
                     odd23 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_ps(out + j * out_stride, _mm512_shuffle_f32x4(even01, even23, 0x88));
        _mm512_storeu_ps(out + (4 + j) * out_stride, _mm512_shuffle_f32x4(odd01, odd23, 0x88));
        _mm512_storeu_ps(out + (8 + j) * out_stride, _mm512_shuffle_f32x4(even01, even23, 0xdd));
        _mm512_storeu_ps(out + (12 + j) * out_stride, _mm512_shuffle_f32x4(odd01, odd23, 0xdd));
    }
}

}  // namespace
}  // namespace localspec

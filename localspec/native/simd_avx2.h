// 8 floats a vector with AVX2, FMA and F16C. TARGET and INLINE are the includer's.
#pragma once

#include <immintrin.h>

#include "simd_types.h"

namespace localspec {
namespace {

struct simd {
    static constexpr int width = 8;
    static constexpr int max_score_rows = 6;  // rows of a register tile: 6 sums and 6 totals in 16 registers
    static constexpr int max_value_rows = 6;

    using floats = __m256;
    using ints64 = __m256i;

    static INLINE floats zero() { return _mm256_setzero_ps(); }
    static INLINE floats all(float x) { return _mm256_set1_ps(x); }
    static INLINE floats load(const float * p) { return _mm256_loadu_ps(p); }
    static INLINE floats load(const f16 * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
    static INLINE floats load(const bf16 * p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p)), 16));
    }
    static INLINE void store(float * p, floats x) { _mm256_storeu_ps(p, x); }

    static INLINE floats add(floats a, floats b) { return _mm256_add_ps(a, b); }
    static INLINE floats sub(floats a, floats b) { return _mm256_sub_ps(a, b); }
    static INLINE floats mul(floats a, floats b) { return _mm256_mul_ps(a, b); }
    static INLINE floats fma(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
    static INLINE floats fnma(floats a, floats b, floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static INLINE floats max(floats a, floats b) { return _mm256_max_ps(a, b); }  // b where either is not a number
    static INLINE float max_of(floats x) {
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    }
    static INLINE floats round(floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // x * 2^n for whole n in -126 … 0
    static INLINE floats scale(floats x, floats n) {
        const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
    }

    // `y` where not a < b
    static INLINE floats zero_below(floats a, floats b, floats y) {
        return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), y);
    }
    // `y`, `mark` where x equals `mark`
    static INLINE floats keep_equal(floats x, floats mark, floats y) {
        return _mm256_blendv_ps(y, mark, _mm256_cmp_ps(x, mark, _CMP_EQ_OQ));
    }
    static INLINE bool any_not_equal(floats x, floats y) {
        return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_NEQ_UQ)) != 0;
    }

    static INLINE ints64 zero64() { return _mm256_setzero_si256(); }
    // Adds to `sum` the bit patterns of double(x) + offset, lane by lane.
    static INLINE ints64 add_bits(ints64 sum, floats x, double offset) {
        const __m256d shift = _mm256_set1_pd(offset);
        const __m256d low = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), shift);
        const __m256d high = _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)), shift);
        return _mm256_add_epi64(sum, _mm256_add_epi64(_mm256_castpd_si256(low), _mm256_castpd_si256(high)));
    }
    static INLINE ints64 minus(ints64 x, uint64_t all) { return _mm256_sub_epi64(x, _mm256_set1_epi64x((int64_t) all)); }
    static INLINE int64_t sum_of(ints64 x) {  // modulo 2^64
        const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        return _mm_cvtsi128_si64(_mm_add_epi64(pair, _mm_unpackhi_epi64(pair, pair)));
    }

    // Transposes transposed elements of `width` rows, `stride` bytes apart: out[i * out_stride + row] = rows[row][i].
    static constexpr int transposed16 = 16;
    static constexpr int transposed32 = 8;
    static INLINE void transpose16(const char * rows, size_t stride, int64_t, uint16_t * out, int64_t out_stride);
    static INLINE void transpose32(const char * rows, size_t stride, float * out, int64_t out_stride);
};

INLINE void simd::transpose16(const char * rows, size_t stride, int64_t, uint16_t * out, int64_t out_stride) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; ++i) {
        a[i] = _mm256_loadu_si256((const __m256i *) (rows + i * stride));
    }
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm256_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        a[4 * i] = _mm256_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm256_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm256_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm256_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // element 2 i (+ 1) of each row in the low lane, 8 more in the high one
        const __m256i even = _mm256_unpacklo_epi64(a[i], a[i + 4]), odd = _mm256_unpackhi_epi64(a[i], a[i + 4]);
        _mm_storeu_si128((__m128i *) (out + 2 * i * out_stride), _mm256_castsi256_si128(even));
        _mm_storeu_si128((__m128i *) (out + (2 * i + 1) * out_stride), _mm256_castsi256_si128(odd));
        _mm_storeu_si128((__m128i *) (out + (2 * i + 8) * out_stride), _mm256_extracti128_si256(even, 1));
        _mm_storeu_si128((__m128i *) (out + (2 * i + 9) * out_stride), _mm256_extracti128_si256(odd, 1));
    }
}

INLINE void simd::transpose32(const char * rows, size_t stride, float * out, int64_t out_stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) {
        a[i] = _mm256_loadu_ps((const float *) (rows + i * stride));
    }
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {  // a[4 i + j] has, in lane l, element 4 l + j of rows 4 i … 4 i + 3
        a[4 * i] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0x44);
        a[4 * i + 1] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0xee);
        a[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0x44);
        a[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
        _mm256_storeu_ps(out + j * out_stride, _mm256_permute2f128_ps(a[j], a[4 + j], 0x20));
        _mm256_storeu_ps(out + (4 + j) * out_stride, _mm256_permute2f128_ps(a[j], a[4 + j], 0x31));
    }
}

}  // namespace
}  // namespace localspec

// Products with AVX2, and the quantisation of activations for all instruction sets.
#include "products.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE inline __attribute__((always_inline)) TARGET

#include "vector256.h"

namespace {

struct V : vector256 {
    // vpmaddubsw adds two products in 16 bits, and the sum of two lines must fit as well: with codes of up to 6 bits it does
    // (4 · 63 · 127 = 32004). Signed weights are multiplied as |w| · (x with the sign of w), line by line (2 · 128 · 127 =
    // 32512), and need no offset.
    template <int OFFSET> static INLINE I start(const int32_t * sum) {
        return OFFSET == 0 || OFFSET == 128 ? _mm256_setzero_si256() : _mm256_set1_epi32(*sum);
    }
    template <int OFFSET> static INLINE void prepare(I &, I &) {}
    template <int OFFSET> static INLINE I dot(I sum, I low, I x_low, I high, I x_high) {
        const I ones = _mm256_set1_epi16(1);
        if (OFFSET == 128) {
            const I p = _mm256_maddubs_epi16(_mm256_abs_epi8(low), _mm256_sign_epi8(x_low, low));
            const I q = _mm256_maddubs_epi16(_mm256_abs_epi8(high), _mm256_sign_epi8(x_high, high));
            return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(p, ones), _mm256_madd_epi16(q, ones)));
        }
        const I both = _mm256_add_epi16(_mm256_maddubs_epi16(low, x_low), _mm256_maddubs_epi16(high, x_high));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(both, ones));
    }
};

}  // namespace

#include "product_kernel.h"

namespace {

INLINE int32_t sum_of(__m256i x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y         = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
}

INLINE int32_t max_of(__m256i x) {
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y         = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
}

// Bit patterns of floats without sign are ordered as the floats are, infinities and then NaNs last: none gets lost.
template <int BLOCK> INLINE block_scale quantise_block(const float * x, uint8_t * quants, int offset) {
    constexpr int n = BLOCK / 8;
    __m256        v[n];
    __m256i       max = _mm256_setzero_si256();
    for (int i = 0; i < n; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        max  = _mm256_max_epi32(max, _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(INT32_MAX)));
    }
    const int32_t bits = max_of(max);
    float         amax;
    __builtin_memcpy(&amax, &bits, sizeof(amax));

    block_scale scale;
    if (!(amax >= 1e-36f && amax < __builtin_inff())) {  // below, 127 / amax would be infinite
        __builtin_memset(quants, 0, BLOCK);
        scale.d      = amax < 1.0f ? 0.0f : __builtin_nanf("");
        scale.offset = 0;
        if (offset == 0) {
            scale.sum = scale.d;
        }
        return scale;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    __m256i      sum     = _mm256_setzero_si256();
    for (int i = 0; i < n; i++) {
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        sum             = _mm256_add_epi32(sum, q);
        const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_storel_epi64((__m128i *) (quants + 8 * i), _mm_packs_epi16(h, h));
    }
    scale.d = amax / 127.0f;
    if (offset == 0) {
        scale.sum = scale.d * float(sum_of(sum));
    } else {
        scale.offset = -offset * sum_of(sum);
    }
    return scale;
}

TARGET void quantise(const activations & format, const float * x, uint8_t * column, int64_t k, int64_t first, int64_t last) {
    block_scale * scales = reinterpret_cast<block_scale *>(column + k);
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * format.block;
        scales[b]        = format.block == 32 ? quantise_block<32>(x + at, column + at, format.offset)
                                              : quantise_block<16>(x + at, column + at, format.offset);
    }
}

}  // namespace

namespace localspec {

quantise_fn quantise_avx2() { return quantise; }
product_fn  product_avx2(ggml_type type) { return product_of(type); }

}  // namespace localspec

#else

namespace localspec {

quantise_fn quantise_avx2() { return nullptr; }
product_fn  product_avx2(ggml_type) { return nullptr; }

}  // namespace localspec

#endif

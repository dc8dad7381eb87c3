// Products with AVX-512 VNNI: 32 rows × 4 columns at once, so that a load of activations serves two vectors of weights.
#include "products.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#define INLINE inline __attribute__((always_inline)) TARGET

namespace {

struct V {
    using I = __m512i;
    using F = __m512;
    typedef uint32_t words_of __attribute__((vector_size(64)));
    static constexpr int rows    = 16;  // of a vector
    static constexpr int vectors = 2;   // of a tile

    static INLINE I load(const uint8_t * p) { return _mm512_loadu_si512(p); }
    static INLINE I four(const int8_t * p) {  // the same four bytes for every row
        int32_t x;
        __builtin_memcpy(&x, p, 4);
        return _mm512_set1_epi32(x);
    }
    static INLINE I bytes(const uint8_t * p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p)); }
    static INLINE I signed_bytes(const uint8_t * p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p)); }
    static INLINE I words(const uint8_t * p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)); }
    static INLINE F halves(const uint8_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }

    static INLINE I right(I x, int n) { return (I) ((words_of) x >> n); }
    static INLINE I left(I x, int n) { return (I) ((words_of) x << n); }
    static INLINE I both(I x, int32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(mask)); }
    static INLINE I either(I x, I y) { return _mm512_or_si512(x, y); }
    static INLINE I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(0xF)); }
    static INLINE I insert(I x, I bits, int8_t mask) {  // x | (bits & mask)
        return _mm512_ternarylogic_epi32(x, bits, _mm512_set1_epi8(mask), 0xF8);
    }
    static INLINE I iq4_values(I x) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) localspec::iq4_table)), x);
    }

    static INLINE F all(float x) { return _mm512_set1_ps(x); }
    static INLINE F floats(I x) { return _mm512_cvtepi32_ps(x); }
    static INLINE F mul(F x, F y) { return _mm512_mul_ps(x, y); }
    static INLINE F sub(F x, F y) { return _mm512_sub_ps(x, y); }
    static INLINE F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
    static INLINE F negative(F x) { return (F) _mm512_xor_si512((I) x, _mm512_set1_epi32(INT32_MIN)); }
    static INLINE void store(float * p, F x) { _mm512_storeu_ps(p, x); }

    // vpdpbusd wants unsigned weights: signed bytes get 128 more, and the sum begins with what that is too much.
    template <int OFFSET> static INLINE I start(const int32_t * sum) {
        return OFFSET == 0 ? _mm512_setzero_si512() : _mm512_set1_epi32(*sum);
    }
    template <int OFFSET> static INLINE void prepare(I & low, I & high) {
        if (OFFSET == 128) {
            low  = _mm512_xor_si512(low, _mm512_set1_epi8(-128));
            high = _mm512_xor_si512(high, _mm512_set1_epi8(-128));
        }
    }
    template <int OFFSET> static INLINE I dot(I sum, I low, I x_low, I high, I x_high) {
        return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, low, x_low), high, x_high);
    }
};

}  // namespace

#include "product_kernel.h"

namespace localspec {

product_fn product_avx512vnni(ggml_type type) { return product_of(type); }

}  // namespace localspec

#else

namespace localspec {

product_fn product_avx512vnni(ggml_type) { return nullptr; }

}  // namespace localspec

#endif

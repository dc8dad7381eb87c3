// Products with AVX-VNNI: what CPUs without AVX-512 have of VNNI, with vectors of 256 bits.
#include "products.h"

#if defined(__x86_64__) && defined(LOCALSPEC_HAS_AVXVNNI)

#include <immintrin.h>

#define TARGET __attribute__((target("avxvnni,avx2,fma,f16c")))
#define INLINE inline __attribute__((always_inline)) TARGET

#include "vector256.h"

namespace {

struct V : vector256 {
    // As with AVX-512: vpdpbusd wants unsigned weights.
    template <int OFFSET> static INLINE I start(const int32_t * sum) {
        return OFFSET == 0 ? _mm256_setzero_si256() : _mm256_set1_epi32(*sum);
    }
    template <int OFFSET> static INLINE void prepare(I & low, I & high) {
        if (OFFSET == 128) {
            low  = _mm256_xor_si256(low, _mm256_set1_epi8(-128));
            high = _mm256_xor_si256(high, _mm256_set1_epi8(-128));
        }
    }
    template <int OFFSET> static INLINE I dot(I sum, I low, I x_low, I high, I x_high) {
        return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sum, low, x_low), high, x_high);
    }
};

}  // namespace

#include "product_kernel.h"

namespace localspec {

product_fn product_avxvnni(ggml_type type) { return product_of(type); }

}  // namespace localspec

#else

namespace localspec {

product_fn product_avxvnni(ggml_type) { return nullptr; }

}  // namespace localspec

#endif

// Vectors of 8 rows, half a group, one to a tile: there are 16 registers only. The products are the includer's.

namespace {

struct vector256 {
    using I = __m256i;
    using F = __m256;
    typedef uint32_t words_of __attribute__((vector_size(32)));
    static constexpr int rows    = 8;
    static constexpr int vectors = 1;

    static INLINE I load(const uint8_t * p) { return _mm256_loadu_si256((const __m256i *) p); }
    static INLINE I four(const int8_t * p) {
        int32_t x;
        __builtin_memcpy(&x, p, 4);
        return _mm256_set1_epi32(x);
    }
    static INLINE I bytes(const uint8_t * p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
    static INLINE I signed_bytes(const uint8_t * p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
    static INLINE I words(const uint8_t * p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p)); }
    static INLINE F halves(const uint8_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }

    static INLINE I right(I x, int n) { return (I) ((words_of) x >> n); }
    static INLINE I left(I x, int n) { return (I) ((words_of) x << n); }
    static INLINE I both(I x, int32_t mask) { return _mm256_and_si256(x, _mm256_set1_epi32(mask)); }
    static INLINE I either(I x, I y) { return _mm256_or_si256(x, y); }
    static INLINE I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(0xF)); }
    static INLINE I insert(I x, I bits, int8_t mask) {  // x | (bits & mask)
        return _mm256_or_si256(x, _mm256_and_si256(bits, _mm256_set1_epi8(mask)));
    }
    static INLINE I iq4_values(I x) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) localspec::iq4_table)), x);
    }

    static INLINE F all(float x) { return _mm256_set1_ps(x); }
    static INLINE F floats(I x) { return _mm256_cvtepi32_ps(x); }
    static INLINE F mul(F x, F y) { return _mm256_mul_ps(x, y); }
    static INLINE F sub(F x, F y) { return _mm256_sub_ps(x, y); }
    static INLINE F fma(F x, F y, F z) { return _mm256_fmadd_ps(x, y, z); }
    static INLINE F negative(F x) { return (F) _mm256_xor_si256((I) x, _mm256_set1_epi32(INT32_MIN)); }
    static INLINE void store(float * p, F x) { _mm256_storeu_ps(p, x); }
};

}  // namespace

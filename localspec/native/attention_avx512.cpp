#include "attention_tiles.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl")))
#define INLINE inline __attribute__((always_inline)) TARGET

#include "simd_avx512.h"

#include "attention_kernels.h"

namespace localspec::attention {

const attention_kernels avx512_kernels = kernels_of_simd;

}  // namespace localspec::attention

#else

namespace localspec::attention {

const attention_kernels avx512_kernels = {};

}  // namespace localspec::attention

#endif

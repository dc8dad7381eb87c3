// The element types that SIMD loads tell apart.
#pragma once

#include <cstdint>

namespace localspec {

struct F16 {
    uint16_t bits;
};

struct BF16 {
    uint16_t bits;
};

}  // namespace localspec

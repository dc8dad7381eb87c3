// The element types that SIMD loads tell apart.
#pragma once

#include <cstdint>

namespace localspec {

struct f16 {
    uint16_t bits;
};

struct bf16 {
    uint16_t bits;
};

}  // namespace localspec

// What attention.cpp hands to the kernels of an instruction set, and the kernels of each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace localspec::attention {

constexpr int64_t kCells     = 32;  // cells a tile; every buffer over cells is padded to a multiple
constexpr int64_t kRows      = 24;  // most rows (query heads of one group, of several columns) a tile
constexpr int64_t kHeadStep  = 16;  // head sizes are multiples of it; a score is summed in runs of as many dimensions
constexpr int64_t kHeadBlock = 32;  // transposed keys are padded to a multiple of it

// Keys or values of one head of one stream: cell i lies at data + i * stride.
struct Cells {
    const char * data;
    size_t       stride;
    int64_t      n;
    int64_t      head_size;
};

// The rows of one tile, in one group of query heads that share keys and values.
struct Rows {
    int64_t          n;             // 1 … kRows
    const float *    query[kRows];  // [head_size of the keys]
    const uint16_t * mask[kRows];   // F16 [cells], or null: all visible
    float *          result[kRows]; // [head_size of the values]
};

// Memory of one thread while it computes one tile; 64-byte aligned.
struct Scratch {
    char *  keys;     // a transposed tile of keys
    float * queries;  // [n / R][head_size][R]
    float * weights;  // [R][kCells]
    float * tile;     // [kCells][head_size]: keys or values, padded or widened
    float * sums;     // [kRows][head_size]
};

// scores[row][cell] = scale * <query, key> + mask, -inf where masked, for cells begin … end (begin a multiple of
// kCells; the last tile is padded with -inf).
using ScoresKernel = void (*)(const Rows & rows, const Cells & keys, int64_t begin, int64_t end, float scale,
                              float * scores, int64_t stride, const Scratch & scratch);

// result[row][d] = sum of exp(score - max) * value / sum of exp(score - max), for dimensions begin … end (multiples of
// kHeadStep).
using ValuesKernel = void (*)(const Rows & rows, const Cells & values, int64_t begin, int64_t end,
                              const float * scores, int64_t stride, const Scratch & scratch);

struct Kernels {
    ScoresKernel scores_f32, scores_f16, scores_bf16;
    ValuesKernel values_f32, values_f16, values_bf16;
};

extern const Kernels kAvx2;    // AVX2, FMA, F16C
extern const Kernels kAvx512;  // AVX-512 F, BW, DQ, VL

}  // namespace localspec::attention

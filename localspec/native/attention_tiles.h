// What attention.cpp hands to the kernels of an instruction set, and the kernels of each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace localspec::attention {

constexpr int64_t tile_cells = 32;  // cells a tile; every buffer over cells is padded to a multiple
constexpr int64_t max_rows   = 24;  // most rows (query heads of one group, of several columns) a tile
constexpr int64_t head_step  = 16;  // head sizes are multiples of it; a score is summed in runs of as many dimensions
constexpr int64_t head_block = 32;  // transposed keys are padded to a multiple of it

// Keys or values of one head of one stream: cell i lies at data + i * stride.
struct head_cells {
    const char * data;
    size_t       stride;
    int64_t      n;
    int64_t      head_size;
};

// The rows of one tile, in one group of query heads that share keys and values.
struct row_tile {
    int64_t          n;                 // 1 … max_rows
    const float *    query[max_rows];   // [head_size of the keys]
    const uint16_t * mask[max_rows];    // F16 [cells], or null: all visible
    float *          result[max_rows];  // [head_size of the values]
};

// Memory of one thread while it computes one tile; 64-byte aligned.
struct scratch_memory {
    char *  keys;     // a transposed tile of keys
    float * queries;  // [n / R][head_size][R]
    float * weights;  // [R][tile_cells]
    float * tile;     // [tile_cells][head_size]: keys or values, padded or widened
    float * sums;     // [max_rows][head_size]
};

// scores[row][cell] = scale * <query, key> + mask, -inf where masked, for cells begin … end (begin a multiple of
// tile_cells; the last tile is padded with -inf).
using scores_kernel = void (*)(const row_tile & rows, const head_cells & keys, int64_t begin, int64_t end, float scale,
                              float * scores, int64_t stride, const scratch_memory & scratch);

// result[row][d] = sum of exp(score - max) * value / sum of exp(score - max), for dimensions begin … end (multiples of
// head_step).
using values_kernel = void (*)(const row_tile & rows, const head_cells & values, int64_t begin, int64_t end,
                              const float * scores, int64_t stride, const scratch_memory & scratch);

struct attention_kernels {
    scores_kernel scores_f32, scores_f16, scores_bf16;
    values_kernel values_f32, values_f16, values_bf16;
};

extern const attention_kernels avx2_kernels;    // AVX2, FMA, F16C
extern const attention_kernels avx512_kernels;  // AVX-512 F, BW, DQ, VL

}  // namespace localspec::attention

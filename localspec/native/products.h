// MUL_MAT and MUL_MAT_ID with packed weights and activations in 8 bits.
//
// Every column is computed by the same operations in the same order whatever the number of columns, threads and the
// instruction set: integer sums of a block are exact, and floats are added block by block.
#pragma once

#include "cpu.h"
#include "ggml_internals.h"
#include "packing.h"

namespace localspec {

// How the activations of a product are quantised: int8 quants of all k, then a `block_scale` for every `block` of them.
struct activations {
    int block;   // 32, or 16 where weights have a scale for every 16
    int offset;  // weights are code - offset; 0 where they have a minimum instead
    size_t bytes(int64_t k) const;  // of a column
};

struct block_scale {
    float d;
    union {
        float   sum;     // d * the sum of the quants
        int32_t offset;  // - offset * the sum of the quants: where the integer sum of the product begins
    };
};

activations activations_of(ggml_type type);

extern const int8_t iq4_table[16];  // the values of IQ4_NL and IQ4_XS

// One column of a product: quantised activations, and where its results go.
struct column {
    const uint8_t * x;
    float *         y;
};

// Quantises blocks [first, last) of a column of k floats. A block with a NaN or an infinity becomes NaN.
using quantise_fn = void (*)(const activations & format, const float * x, uint8_t * column, int64_t k, int64_t first, int64_t last);
// A row of a plane, the first of a group.
struct rows_at {
    int64_t plane;
    int64_t row;
};

// Computes results [to, end) of all columns from the weights' rows from `first` on; fetches the beginning of `next` into the
// cache.
using product_fn = void (*)(const packed & w, const uint8_t * data, rows_at first, rows_at next, int64_t to, int64_t end,
                            const column * columns, int64_t n_columns);

quantise_fn quantise_avx2();
product_fn  product_avx2(ggml_type type);
product_fn  product_avxvnni(ggml_type type);
product_fn  product_avx512vnni(ggml_type type);

// Whether products with this weight (in no buffer yet, or in ours) are ours: the encoding, 32 or 256 along k, and at most
// 3 % of padding.
bool products_pack(const ggml_tensor * weight);
// Whether `op`, whose src[0] is packed, can be computed.
bool products_support(const ggml_tensor * op);

size_t products_work_size(const ggml_tensor * op);
void   products_forward(isa set, const ggml_compute_params * params, ggml_tensor * op);

}  // namespace localspec

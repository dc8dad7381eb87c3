// How weights lie in memory. ggml stores a row as blocks, each with its scales and quants. Here 16 rows are one group and
// every field of the block (a half, a byte of scales, four bytes of quants) lies in a region of its own, element by
// element, 16 rows side by side:
//
//     region of a field: [group][block][element of the field in a block][row of the group]
//
// so that one 64-byte load brings 4 quants of 16 rows, and the scales are vectors, too. Of the 32 quants (16 in Q6_K) that
// share a scale, quant e = 4 t + i has its low four bits in byte i of an element t: in the low half of the byte for the first
// half of the quants, in the high half for the second. Further bits are in byte i of one more element, at bit t (2 t in Q6_K).
// It is a permutation of the file's bits: nothing grows (but for rows up to a multiple of 16), and the file can be had back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml.h"

namespace localspec {

constexpr int64_t group_rows = 16;
constexpr int     max_fields = 5;

// Where ggml spreads the bits of 32 quants over a block, the elements of a field are rearranged on the way.
using rearrange = void (*)(const uint32_t * from, uint32_t * to);

struct field {
    uint8_t   offset;  // in the block, bytes
    uint8_t   size;    // of an element, bytes: 1, 2 or 4
    uint8_t   count;   // elements in a block
    rearrange there = nullptr;
    rearrange back  = nullptr;
};

struct encoding {
    ggml_type type;
    int       n_fields;
    field     fields[max_fields];
};

// nullptr where there are no kernels for the type.
const encoding * encoding_of(ggml_type type);

// A packed tensor: `rows` in every one of `planes`, each padded to whole groups.
struct packed {
    const encoding * code;
    int64_t          n_blocks;  // in a row
    int64_t          rows;
    int64_t          planes;
    size_t           row_bytes;  // in the file

    int64_t groups() const { return (rows + group_rows - 1) / group_rows; }  // of a plane
    size_t  bytes() const { return planes * groups() * group_rows * row_bytes; }
    // Where the region of a field begins, in bytes from the tensor's data.
    size_t region(int f) const;
};

// The tensor must have an encoding.
packed packed_of(const ggml_tensor * tensor);

// Write (or read) `size` bytes at `offset` of the tensor as the file has it, with as many threads as are worth it.
void pack(const packed & tensor, uint8_t * data, const uint8_t * bytes, size_t offset, size_t size);
void unpack(const packed & tensor, const uint8_t * data, uint8_t * bytes, size_t offset, size_t size);

}  // namespace localspec

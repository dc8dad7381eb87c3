// GGML_OP_FLASH_ATTN_EXT for any number of query columns, the same to the last bit however they are batched.
//
// A column's result is a function of its query and of the cells its mask shows, in their order, and of nothing else:
//   - a score is the sum over the head's dimensions in a fixed order, whatever lane or tile computes it;
//   - the weights are exp(score - maximum), where the maximum is exact, so no running rescale depends on a blocking;
//   - their sum is a sum of integers (multiples of 2^-40), which is exact in any order;
//   - values are added cell by cell, one multiply-add each. A masked cell has weight zero and adds exactly nothing.
// So neither the threads nor the tiles, neither padding nor cells of other branches between can change a bit, and the
// two instruction sets agree as well.
#pragma once

#include <cstddef>

#include "cpu.h"
#include "ggml_internals.h"

namespace localspec {

// Whether attention_forward computes `op`: F32 queries; keys and values in F32, F16 or BF16; head sizes that are
// multiples of 16; no ALiBi, no soft cap, no sinks. Anything else stays with ggml.
bool attention_supports(const ggml_tensor * op);

// Bytes of work memory, with room for its alignment.
size_t attention_work_size(int n_threads, const ggml_tensor * op);

// Called by every thread of the graph. `params->wsize` must be at least attention_work_size of as many threads.
void attention_forward(isa set, const ggml_compute_params * params, ggml_tensor * op);

}  // namespace localspec

// FILL, SET_ROWS and REPEAT over rows of one float. A DFlash drafter with a reduced head spreads its logits over the
// target's vocabulary with them, and ggml's own find their way to each row anew: a third of a draft's time.
#pragma once

#include "ggml_internals.h"

namespace localspec {

// Whether single_floats_forward computes `op`: FILL of contiguous floats, SET_ROWS of rows of one float, REPEAT of single
// floats along their row.
bool single_floats_support(const ggml_tensor * op);

// Called by every thread of the graph; needs no work memory.
void single_floats_forward(const ggml_compute_params * params, ggml_tensor * op);

}  // namespace localspec

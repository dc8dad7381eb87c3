// The buffer type whose tensors are packed. Its context is an extra_buffer_type, as ggml's CPU backend expects.
#pragma once

#include "ggml_internals.h"

namespace localspec {

ggml_backend_buffer_type_t packed_buffer_type(ggml::cpu::extra_buffer_type * context);

// Whether the tensor lies in a buffer of that type.
bool is_packed(const ggml_tensor * tensor);

}  // namespace localspec

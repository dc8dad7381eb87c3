// Declarations of ggml that llama-cpp-python 0.3.36 does not install: of llama.cpp 0c1e57098 (ggml 0.25.3), copied from
// ggml-backend-impl.h, ggml-cpu/ggml-cpu-impl.h and ggml-cpu/traits.h. They are no stable interface: another version of
// ggml must not be entered through them. All functions and destructors below are exported by libggml-base and libggml-cpu.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#define LOCALSPEC_GGML_COMMIT "0c1e57098"

extern "C" {

struct ggml_backend_buffer_type_i {
    const char * (*get_name)(ggml_backend_buffer_type_t buft);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t buft, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t buft);
    size_t (*get_max_size)(ggml_backend_buffer_type_t buft);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor);
    bool (*is_host)(ggml_backend_buffer_type_t buft);
};

struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t         device;
    void *                     context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t buffer);
    void * (*get_base)(ggml_backend_buffer_t buffer);
    ggml_status (*init_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor);
    void (*memset_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size);
    void (*set_tensor_2d)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    void (*get_tensor_2d)(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    bool (*cpy_tensor)(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst);
    void (*clear)(ggml_backend_buffer_t buffer, uint8_t value);
    void (*reset)(ggml_backend_buffer_t buffer);
};

struct ggml_backend_buffer {
    ggml_backend_buffer_i      iface;
    ggml_backend_buffer_type_t buft;
    void *                     context;
    size_t                     size;
    ggml_backend_buffer_usage  usage;
};

ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t buft, ggml_backend_buffer_i iface,
                                               void * context, size_t size);

// What every thread gets that computes an op: its number, how many there are, and the work memory they share.
struct ggml_compute_params {
    int               ith, nth;
    size_t            wsize;
    void *            wdata;
    ggml_threadpool * threadpool;
    bool              use_ref;
};

// All threads of a graph meet; the chunk counter is theirs in common (set it before a barrier, draw from it after).
void ggml_barrier(ggml_threadpool * threadpool);
void ggml_threadpool_chunk_set(ggml_threadpool * threadpool, int value);
int  ggml_threadpool_chunk_add(ggml_threadpool * threadpool, int value);  // the value before

}  // extern "C"

namespace ggml::cpu {

class tensor_traits {
  public:
    virtual ~tensor_traits();
    virtual bool work_size(int n_threads, const ggml_tensor * op, size_t & size) = 0;
    virtual bool compute_forward(ggml_compute_params * params, ggml_tensor * op) = 0;
};

// The context of an extra buffer type. ggml asks it for the traits of every op of a CPU graph, by every thread.
class extra_buffer_type {
  public:
    virtual ~extra_buffer_type();
    virtual bool            supports_op(ggml_backend_dev_t device, const ggml_tensor * op) = 0;
    virtual tensor_traits * get_tensor_traits(const ggml_tensor * op)                      = 0;
};

}  // namespace ggml::cpu

// The CPU backend's list, by reference; llama.cpp asks its buffer types in this order when it places a weight.
std::vector<ggml_backend_buffer_type_t> & ggml_backend_cpu_get_extra_buffer_types();

#include "buffer.h"

#include <algorithm>
#include <vector>

#include "packing.h"

namespace localspec {

static uint8_t * bytes_of(const ggml_tensor * tensor) {
    return static_cast<uint8_t *>(tensor->data);
}

static void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    pack(packed_of(tensor), bytes_of(tensor), static_cast<const uint8_t *>(data), offset, size);
}

static void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    unpack(packed_of(tensor), bytes_of(tensor), static_cast<uint8_t *>(data), offset, size);
}

static void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    const std::vector<uint8_t> data(size, value);
    set_tensor(buffer, tensor, data.data(), offset, size);
}

static const char * get_name(ggml_backend_buffer_type_t) {
    return "CPU_LOCALSPEC";
}

// ggml's own memory, with our ways in and out. No cpy_tensor: ggml goes by set_tensor and get_tensor then.
static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer != nullptr) {
        buffer->buft                = type;
        buffer->iface.set_tensor    = set_tensor;
        buffer->iface.get_tensor    = get_tensor;
        buffer->iface.memset_tensor = memset_tensor;
        buffer->iface.set_tensor_2d = nullptr;
        buffer->iface.get_tensor_2d = nullptr;
        buffer->iface.cpy_tensor    = nullptr;
    }
    return buffer;
}

static size_t get_alignment(ggml_backend_buffer_type_t) {
    return 64;
}

static size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    return encoding_of(tensor->type) != nullptr ? packed_of(tensor).bytes() : ggml_nbytes(tensor);
}

ggml_backend_buffer_type_t packed_buffer_type(ggml::cpu::extra_buffer_type * context) {
    static ggml_backend_buffer_type type = {
        { get_name, alloc_buffer, get_alignment, nullptr, get_alloc_size, nullptr },
        ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU),
        context,
    };
    return &type;
}

bool is_packed(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    return buffer != nullptr && buffer->iface.set_tensor == set_tensor;
}

}  // namespace localspec

#include "buffer.h"

#include <sys/mman.h>

#include <cstring>
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

// Pages of 2 MB: with those of 4 KB a pass over the weights waits for translations, and loading for faults.
constexpr size_t huge_page = 2 << 20;

struct memory {
    void * mapping;
    size_t mapped;

    uint8_t * begin() const { return reinterpret_cast<uint8_t *>(GGML_PAD(reinterpret_cast<uintptr_t>(mapping), huge_page)); }
};

static memory & memory_of(ggml_backend_buffer_t buffer) {
    return *static_cast<memory *>(buffer->context);
}

static void free_buffer(ggml_backend_buffer_t buffer) {
    munmap(memory_of(buffer).mapping, memory_of(buffer).mapped);
    delete &memory_of(buffer);
}

static void * get_base(ggml_backend_buffer_t buffer) {
    return memory_of(buffer).begin();
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(get_base(buffer), value, buffer->size);
}

// Mapped, not from the heap: freed, it is the system's again at once. No cpy_tensor: ggml goes by set_tensor and get_tensor.
static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    static const ggml_backend_buffer_i interface = [] {
        ggml_backend_buffer_i i = {};
        i.free_buffer   = free_buffer;
        i.get_base      = get_base;
        i.memset_tensor = memset_tensor;
        i.set_tensor    = set_tensor;
        i.get_tensor    = get_tensor;
        i.clear         = clear;
        return i;
    }();
    const size_t mapped  = size + huge_page;
    void *       mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) {
        return nullptr;
    }
    memory * context = new memory{ mapping, mapped };
#if defined(MADV_HUGEPAGE)
    madvise(context->begin(), size / huge_page * huge_page, MADV_HUGEPAGE);
#endif
    return ggml_backend_buffer_init(type, interface, context, size);
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

// Puts the kernels before ggml's own: a buffer type at the front of the CPU backend's list. llama.cpp asks it for every
// weight, and ggml asks it for every op of a CPU graph, so that ops without weights of ours can be taken over too.

#include <atomic>

#include "attention.h"
#include "buffer.h"
#include "cpu.h"
#include "ggml_internals.h"
#include "products.h"
#include "single_floats.h"

namespace localspec {

static std::atomic<isa>  used{ isa::none };
static std::atomic<bool> attention_is_ours{ true };

class product_traits : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor * op, size_t & size) override {
        size = products_work_size(op);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        products_forward(used.load(std::memory_order_relaxed), params, op);
        return true;
    }
};

class attention_traits : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = attention_work_size(n_threads, op);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        attention_forward(used.load(std::memory_order_relaxed), params, op);
        return true;
    }
};

class single_floats_traits : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t & size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        single_floats_forward(params, op);
        return true;
    }
};

class kernels : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        const ggml_tensor * weight = op->src[0];
        if (weight == nullptr || !is_ours(weight)) {
            return false;
        }
        return products_support(op) && products_pack(weight->view_src != nullptr ? weight->view_src : weight);
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        switch (op->op) {
            case GGML_OP_MUL_MAT:
            case GGML_OP_MUL_MAT_ID:
                return is_packed(op->src[0]) ? &products : nullptr;
            case GGML_OP_FLASH_ATTN_EXT:
                return attention_is_ours.load(std::memory_order_relaxed) && attention_supports(op) ? &attention : nullptr;
            case GGML_OP_FILL:
            case GGML_OP_SET_ROWS:
            case GGML_OP_REPEAT:
                return single_floats_support(op) ? &single_floats : nullptr;
            default:
                return nullptr;
        }
    }

  private:
    product_traits       products;
    attention_traits     attention;
    single_floats_traits single_floats;

    // Also of a weight in a buffer without memory, with which llama.cpp asks before it loads.
    bool is_ours(const ggml_tensor * weight) {
        const ggml_tensor * root = weight->view_src != nullptr ? weight->view_src : weight;
        return root->buffer != nullptr && root->buffer->buft == packed_buffer_type(this);
    }
};

}  // namespace localspec

extern "C" {

// Before the first model is loaded. Returns the instruction set (cpu.h), 0 where nothing was changed: no CPU for it or
// LOCALSPEC_KERNELS=0. Calling it again changes nothing.
__attribute__((visibility("default"))) int localspec_kernels_enable(void) {
    using namespace localspec;
    static const isa chosen = [] {
        const isa set = cpu_choose();
        if (set != isa::none) {
            static kernels instance;
            used           = set;
            auto & types   = ggml_backend_cpu_get_extra_buffer_types();
            types.insert(types.begin(), packed_buffer_type(&instance));
        }
        return set;
    }();
    return int(chosen);
}

__attribute__((visibility("default"))) int localspec_kernels_supported(int set) {
    return localspec::cpu_has(localspec::isa(set));
}

__attribute__((visibility("default"))) const char * localspec_kernels_name(int set) {
    return localspec::isa_name(localspec::isa(set));
}

// Another instruction set from the next graph on, for tests: packed weights are the same for all. Returns whether it is there.
__attribute__((visibility("default"))) int localspec_kernels_use(int set) {
    using namespace localspec;
    if (isa(set) == isa::none || !cpu_has(isa(set))) {
        return 0;
    }
    used = isa(set);
    return 1;
}

// Whether attention is ours from the next graph on, for tests and benchmarks. Returns whether it was.
__attribute__((visibility("default"))) int localspec_kernels_attention(int ours) {
    return localspec::attention_is_ours.exchange(ours != 0);
}

// The buffer type of packed weights, for tests.
__attribute__((visibility("default"))) ggml_backend_buffer_type_t localspec_kernels_buffer_type(void) {
    return ggml_backend_cpu_get_extra_buffer_types().front();
}

}  // extern "C"

// Layer inputs of graphs that do not hand them out themselves: nearly all name the output of layer i "l_out-<i>", which
// is the input of layer i + 1. The scheduler asks about every node of a graph, and shows those that are wanted as soon
// as they are computed, before their memory is used again. Portable, and apart from the kernels.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "ggml-backend.h"
#include "ggml.h"

extern "C" {

// Filled by the caller, who owns all memory (localspec/llama/layer_inputs.py has the same struct).
struct localspec_layer_inputs {
    int32_t         n_layers;
    int32_t         n_embd;
    int32_t         capacity;  // rows a layer
    const int32_t * layers;    // [n_layers], their inputs are wanted
    const int8_t *  wanted;    // [n_layers], now
    int32_t *       n_rows;    // [n_layers], of the decode so far: the caller sets them to 0 before; -1: does not fit
    float *         rows;      // [n_layers, capacity, n_embd]
};

}  // extern "C"

// Which of the wanted inputs a tensor is, or -1. Views and copies have longer names.
static int slot_of(const localspec_layer_inputs & self, const char * name) {
    static const char prefix[] = "l_out-";
    if (std::strncmp(name, prefix, sizeof(prefix) - 1) != 0) {
        return -1;
    }
    char *     end   = nullptr;
    const long layer = std::strtol(name + sizeof(prefix) - 1, &end, 10) + 1;
    if (*end != '\0') {
        return -1;
    }
    for (int i = 0; i < self.n_layers; i++) {
        if (self.layers[i] == layer && self.wanted[i]) {
            return i;
        }
    }
    return -1;
}

static void take(const localspec_layer_inputs & self, int slot, const ggml_tensor * tensor) {
    int32_t &     n_rows  = self.n_rows[slot];
    const int64_t n_new   = tensor->ne[1];
    const bool    is_rows = tensor->type == GGML_TYPE_F32 && tensor->ne[0] == self.n_embd && tensor->ne[2] == 1 &&
                         tensor->ne[3] == 1 && ggml_is_contiguous(tensor);
    if (n_rows < 0 || !is_rows || n_rows + n_new > self.capacity) {
        n_rows = -1;
        return;
    }
    float * to = self.rows + (int64_t(slot) * self.capacity + n_rows) * self.n_embd;
    ggml_backend_tensor_get(tensor, to, 0, ggml_nbytes(tensor));
    n_rows += int32_t(n_new);
}

extern "C" {

// A ggml_backend_sched_eval_callback over a localspec_layer_inputs. An answer of false would end the graph there.
__attribute__((visibility("default"))) bool localspec_layer_inputs_take(ggml_tensor * tensor, bool ask, void * data) {
    const localspec_layer_inputs & self = *static_cast<const localspec_layer_inputs *>(data);
    const int                      slot = slot_of(self, tensor->name);
    if (ask) {
        return slot >= 0;
    }
    if (slot >= 0) {
        take(self, slot, tensor);
    }
    return true;
}

}  // extern "C"

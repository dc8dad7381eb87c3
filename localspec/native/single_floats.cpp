#include "single_floats.h"

#include <algorithm>
#include <cstring>

namespace localspec {
namespace {

// The part of `n` pieces of work that is this thread's.
struct share {
    int64_t first, last;

    share(const ggml_compute_params * params, int64_t n)
        : first(n * params->ith / params->nth), last(n * (params->ith + 1) / params->nth) {}
};

void fill(const ggml_compute_params * params, ggml_tensor * op) {
    float value;
    std::memcpy(&value, op->op_params, sizeof value);
    const share mine(params, ggml_nelements(op));
    float *     out = (float *) op->data;
    std::fill(out + mine.first, out + mine.last, value);
}

template <class Index> void set_rows(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor *values = op->src[0], *rows = op->src[1];
    const share        mine(params, values->ne[1]);
    for (int64_t i3 = 0; i3 < values->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < values->ne[2]; ++i2) {
            const char * from = (const char *) values->data + i2 * values->nb[2] + i3 * values->nb[3];
            const char * index = (const char *) rows->data + i2 % rows->ne[1] * rows->nb[1] + i3 % rows->ne[2] * rows->nb[2];
            char *       to = (char *) op->data + i2 * op->nb[2] + i3 * op->nb[3];
            for (int64_t i = mine.first; i < mine.last; ++i) {
                const int64_t row = *(const Index *) (index + i * rows->nb[0]);
                GGML_ASSERT(row >= 0 && row < op->ne[1]);
                *(float *) (to + row * op->nb[1]) = *(const float *) (from + i * values->nb[1]);
            }
        }
    }
}

void repeat(const ggml_compute_params * params, ggml_tensor * op) {
    const share   mine(params, ggml_nrows(op));
    const int64_t n = op->ne[0];
    const float * from = (const float *) op->src[0]->data;
    float *       to = (float *) op->data;
    for (int64_t row = mine.first; row < mine.last; ++row) {
        std::fill(to + row * n, to + (row + 1) * n, from[row]);
    }
}

bool is_floats(const ggml_tensor * t) { return t->type == GGML_TYPE_F32; }

bool sets_single_floats(const ggml_tensor * op) {
    const ggml_tensor *values = op->src[0], *rows = op->src[1];
    return is_floats(op) && is_floats(values) && op->ne[0] == 1 && rows->ne[3] == 1 &&
           (rows->type == GGML_TYPE_I64 || rows->type == GGML_TYPE_I32);
}

bool repeats_single_floats(const ggml_tensor * op) {
    const ggml_tensor * from = op->src[0];
    return is_floats(op) && is_floats(from) && from->ne[0] == 1 && from->ne[1] == op->ne[1] && from->ne[2] == op->ne[2] &&
           from->ne[3] == op->ne[3] && ggml_is_contiguous(from) && ggml_is_contiguous(op);
}

}  // namespace

bool single_floats_support(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_FILL:     return is_floats(op) && ggml_is_contiguous(op);
        case GGML_OP_SET_ROWS: return sets_single_floats(op);
        case GGML_OP_REPEAT:   return repeats_single_floats(op);
        default:               return false;
    }
}

void single_floats_forward(const ggml_compute_params * params, ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_FILL:     return fill(params, op);
        case GGML_OP_SET_ROWS:
            return op->src[1]->type == GGML_TYPE_I64 ? set_rows<int64_t>(params, op) : set_rows<int32_t>(params, op);
        case GGML_OP_REPEAT:   return repeat(params, op);
        default:               GGML_ABORT("localspec: not an op of single floats");
    }
}

}  // namespace localspec

#include "products.h"

#include <algorithm>
#include <cstring>

namespace localspec {

const int8_t iq4_table[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

activations activations_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:
            return { 32, 8 };
        case GGML_TYPE_Q5_0:
            return { 32, 16 };
        case GGML_TYPE_Q6_K:
            return { 16, 32 };
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_IQ4_XS:
            return { 32, 128 };
        default:
            return { 32, 0 };
    }
}

size_t activations::bytes(int64_t k) const {
    return GGML_PAD(k + k / block * sizeof(block_scale), 64);
}

bool products_pack(const ggml_tensor * weight) {
    if (encoding_of(weight->type) == nullptr || weight->view_src != nullptr || !ggml_is_contiguous(weight)) {
        return false;
    }
    return packed_of(weight).bytes() <= 1.03 * ggml_nbytes(weight);
}

// The packed tensor that src[0] is, or of which it is whole planes or rows from a group's first on.
struct weights {
    packed          tensor;
    const uint8_t * data;
    int64_t         plane;  // of the view's first row
    int64_t         row;
};

static weights weights_of(const ggml_tensor * src) {
    const ggml_tensor * root = src->view_src != nullptr ? src->view_src : src;
    const int64_t       row  = src->view_offs / root->nb[1];
    return { packed_of(root), static_cast<const uint8_t *>(root->data), row / root->ne[1], row % root->ne[1] };
}

static bool is_readable(const ggml_tensor * src) {
    const ggml_tensor * root = src->view_src;
    if (root == nullptr) {
        return true;
    }
    const bool rows_kept = src->type == root->type && src->ne[0] == root->ne[0] && src->view_offs % root->nb[1] == 0 &&
                           ggml_is_contiguous(src);
    const int64_t row = src->view_offs / root->nb[1] % root->ne[1];
    return rows_kept && (src->ne[1] == root->ne[1] ? row == 0
                                                   : ggml_nrows(src) == src->ne[1] && row % group_rows == 0 &&
                                                         row + src->ne[1] <= root->ne[1]);
}

bool products_support(const ggml_tensor * op) {
    const ggml_tensor * x = op->src[1];
    return (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID) && is_readable(op->src[0]) && x != nullptr &&
           x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && op->type == GGML_TYPE_F32 &&
           (x->buffer == nullptr || ggml_backend_buft_is_host(ggml_backend_buffer_get_type(x->buffer)));
}

// The columns that one plane of weights is multiplied with.
struct job {
    int64_t plane;
    int64_t first;
    int64_t n;
};

// The work memory: quantised columns, the columns of the product in the jobs' order, the jobs.
struct work {
    activations format;
    size_t      column_bytes;
    uint8_t *   quantised;
    column *    columns;
    job *       jobs;
    size_t      size;
};

static work work_of(const ggml_tensor * op, void * memory) {
    const ggml_tensor * x       = op->src[1];
    const activations   format  = activations_of(op->src[0]->type);
    const size_t        column_bytes = format.bytes(x->ne[0]);
    const int64_t       n_columns    = ggml_nrows(op);
    const int64_t       n_jobs = op->op == GGML_OP_MUL_MAT ? op->src[0]->ne[2] * x->ne[3] : op->src[0]->ne[2];

    uint8_t * quantised = reinterpret_cast<uint8_t *>(GGML_PAD(reinterpret_cast<uintptr_t>(memory), 64));
    column *  columns   = reinterpret_cast<column *>(quantised + column_bytes * ggml_nrows(x));
    job *     jobs      = reinterpret_cast<job *>(columns + n_columns);
    return { format, column_bytes, quantised, columns, jobs,
             64 + size_t(reinterpret_cast<uint8_t *>(jobs + n_jobs) - quantised) };
}

size_t products_work_size(const ggml_tensor * op) {
    return work_of(op, nullptr).size;
}

static float * at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<float *>(static_cast<char *>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}

// This thread's share of all blocks of all columns.
static void quantise(quantise_fn quantise_blocks, const ggml_compute_params * params, const work & w, const ggml_tensor * x) {
    const int64_t k = x->ne[0], n_blocks = k / w.format.block, all = n_blocks * ggml_nrows(x);
    int64_t       begin = all * params->ith / params->nth;
    const int64_t end   = all * (params->ith + 1) / params->nth;
    while (begin < end) {
        const int64_t i = begin / n_blocks, first = begin % n_blocks, last = std::min(n_blocks, first + end - begin);
        const int64_t i1 = i % x->ne[1], i2 = i / x->ne[1] % x->ne[2], i3 = i / x->ne[1] / x->ne[2];
        quantise_blocks(w.format, at(x, i1, i2, i3), w.quantised + i * w.column_bytes, k, first, last);
        begin += last - first;
    }
}

// Planes of src[0] are repeated along the planes of src[1]: neighbours there share one here.
static int64_t jobs_of_mul_mat(const work & w, const ggml_tensor * op, const weights & from) {
    const ggml_tensor * a = op->src[0], * x = op->src[1];
    const int64_t       repeats = x->ne[2] / a->ne[2];
    int64_t             n_jobs = 0, n_columns = 0;
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++) {
        for (int64_t a2 = 0; a2 < a->ne[2]; a2++) {
            const int64_t a3 = i3 / (x->ne[3] / a->ne[3]);
            w.jobs[n_jobs++] = { from.plane + a3 * a->ne[2] + a2, n_columns, repeats * x->ne[1] };
            for (int64_t i2 = a2 * repeats; i2 < (a2 + 1) * repeats; i2++) {
                for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                    const int64_t i      = (i3 * x->ne[2] + i2) * x->ne[1] + i1;
                    w.columns[n_columns++] = { w.quantised + i * w.column_bytes, at(op, i1, i2, i3) };
                }
            }
        }
    }
    return n_jobs;
}

// Every expert that was chosen, with the tokens that chose it.
static int64_t jobs_of_mul_mat_id(const work & w, const ggml_tensor * op, const weights & from) {
    const ggml_tensor * x = op->src[1], * ids = op->src[2];
    const int64_t       n_experts = op->src[0]->ne[2];
    const auto          expert    = [&](int64_t used, int64_t token) {
        const int32_t e = *reinterpret_cast<const int32_t *>(static_cast<const char *>(ids->data) + token * ids->nb[1] + used * ids->nb[0]);
        GGML_ASSERT(e >= 0 && e < n_experts);
        return e;
    };
    for (int64_t e = 0; e < n_experts; e++) {
        w.jobs[e] = { from.plane + e, 0, 0 };
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t used = 0; used < ids->ne[0]; used++) {
            w.jobs[expert(used, token)].n++;
        }
    }
    for (int64_t e = 0, first = 0; e < n_experts; e++) {
        w.jobs[e].first = first;
        first += w.jobs[e].n;
        w.jobs[e].n = 0;
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t used = 0; used < ids->ne[0]; used++) {
            job &         j = w.jobs[expert(used, token)];
            const int64_t i = token * x->ne[1] + used % x->ne[1];
            w.columns[j.first + j.n++] = { w.quantised + i * w.column_bytes, at(op, used, token, 0) };
        }
    }
    return n_experts;
}

// What a thread does at once: some rows by some columns.
struct piece {
    int64_t        plane;
    int64_t        row;
    int64_t        n_rows;  // 0 behind the end
    const column * columns;
    int64_t        n_columns;
};

// All pieces of a product by number, asked for in rising order.
struct pieces {
    const job *    jobs;
    const job *    end;
    const column * columns;
    int64_t        n_rows;             // of a plane
    int64_t        rows_per_piece;
    int64_t        columns_per_piece;
    int64_t        first = 0;          // number of the first piece of *jobs

    void at(int64_t number, piece & found) {
        const int64_t n_down = (n_rows + rows_per_piece - 1) / rows_per_piece;
        for (; jobs != end; jobs++) {
            const int64_t n = n_down * ((jobs->n + columns_per_piece - 1) / columns_per_piece);
            if (number < first + n) {
                const int64_t row = (number - first) % n_down * rows_per_piece;
                const int64_t col = (number - first) / n_down * columns_per_piece;
                found = { jobs->plane, row, std::min(rows_per_piece, n_rows - row), columns + jobs->first + col,
                          std::min(columns_per_piece, jobs->n - col) };
                return;
            }
            first += n;
        }
        found = {};
    }
};

// Rows so few that the threads end together, columns so few that their quants stay in the second cache while weights
// stream by.
static pieces pieces_of(const work & w, const ggml_tensor * op, int n_threads) {
    const int64_t n_rows    = op->src[0]->ne[1];
    const int64_t n_jobs    = op->op == GGML_OP_MUL_MAT ? op->src[0]->ne[2] * op->src[1]->ne[3] : op->src[0]->ne[2];
    const int64_t n_columns = (256 << 10) / w.column_bytes / 4 * 4;
    return { w.jobs, w.jobs + n_jobs, w.columns, n_rows, std::max<int64_t>(32, n_rows / (n_threads * 8) / 32 * 32),
             std::max<int64_t>(16, n_columns) };
}

static product_fn product_for(isa set, ggml_type type) {
    switch (set) {
        case isa::avx512vnni: return product_avx512vnni(type);
        case isa::avxvnni:    return product_avxvnni(type);
        default:              return product_avx2(type);
    }
}

void products_forward(isa set, const ggml_compute_params * params, ggml_tensor * op) {
    const work    w    = work_of(op, params->wdata);
    const weights from = weights_of(op->src[0]);
    GGML_ASSERT(params->wsize >= w.size);

    quantise(quantise_avx2(), params, w, op->src[1]);
    const bool is_mul_mat = op->op == GGML_OP_MUL_MAT;
    if (params->ith == 0) {
        is_mul_mat ? jobs_of_mul_mat(w, op, from) : jobs_of_mul_mat_id(w, op, from);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const product_fn product = product_for(set, op->src[0]->type);
    pieces           all     = pieces_of(w, op, params->nth);
    piece            now, next;
    all.at(params->ith, now);
    while (now.n_rows != 0) {
        all.at(ggml_threadpool_chunk_add(params->threadpool, 1), next);
        const rows_at first{ now.plane, from.row + now.row };
        const rows_at then{ next.plane, from.row + next.row };
        product(from.tensor, from.data, first, next.n_rows != 0 ? then : first, now.row, now.row + now.n_rows, now.columns,
                now.n_columns);
        now = next;
    }
}

}  // namespace localspec

#include "attention.h"

#include <algorithm>
#include <cstring>

#include "attention_tiles.h"

namespace localspec {
namespace {

using namespace attention;

constexpr int64_t chunk_cells     = 256;      // cells of one unit of work where threads share the cells of a head
constexpr int64_t few_cells     = 256;      // up to as many cells, sharing costs more than it brings
constexpr int64_t score_room = 1 << 18;  // floats of scores a thread keeps for one tile, if eight rows fit

int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_value_type(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; }

float float_param(const ggml_tensor * op, int i) {
    float value;
    std::memcpy(&value, (const char *) op->op_params + i * sizeof value, sizeof value);
    return value;
}

// What an op is about. A *group* is one head of keys and values of one stream with the query heads that read it; its
// rows are its query heads of column 0, of column 1, and so on.
struct op_shape {
    const ggml_tensor *op, *q, *k, *v, *mask;
    int64_t            n_cells, n_kv_heads, n_per_group, n_groups, n_rows;

    explicit op_shape(const ggml_tensor * op)
        : op(op), q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), n_cells(k->ne[1]),
          n_kv_heads(k->ne[2]), n_per_group(q->ne[2] / k->ne[2]), n_groups(k->ne[2] * k->ne[3]),
          n_rows(q->ne[1] * n_per_group) {}

    int64_t stream(int64_t group) const { return group / n_kv_heads; }
    int64_t kv_head(int64_t group) const { return group % n_kv_heads; }

    head_cells cells(const ggml_tensor * t, int64_t group) const {
        return {(const char *) t->data + kv_head(group) * t->nb[2] + stream(group) * t->nb[3], t->nb[1], n_cells, t->ne[0]};
    }

    row_tile rows(int64_t group, int64_t first, int64_t n) const {
        row_tile rows = {n, {}, {}, {}};
        for (int64_t i = 0; i < n; ++i) {
            const int64_t column = (first + i) / n_per_group, s = stream(group);
            const int64_t head = kv_head(group) * n_per_group + (first + i) % n_per_group;
            rows.query[i] = (const float *) ((const char *) q->data + column * q->nb[1] + head * q->nb[2] + s * q->nb[3]);
            rows.result[i] = (float *) ((char *) op->data + head * op->nb[1] + column * op->nb[2] + s * op->nb[3]);
            rows.mask[i] = !mask ? nullptr
                                 : (const uint16_t *) ((const char *) mask->data + column * mask->nb[1] +
                                                       head % mask->ne[2] * mask->nb[2] + s % mask->ne[3] * mask->nb[3]);
        }
        return rows;
    }
};

// How the work is cut. Nothing of it can change a result. Threads take whole tiles of rows from the scores to the
// values; where those are few, they *share*: first the scores of all rows, cut by cells, then, after a barrier, the
// values, cut by rows and dimensions.
struct work_plan {
    bool    shared;
    int64_t tile_rows;   // of a whole tile, and of a tile of scores
    int64_t value_rows;  // of a tile of values where threads share
    int64_t n_slices;    // of the dimensions of the values where threads share
    int64_t stride;      // floats of a row of scores
    size_t  scratch;     // bytes of a thread
    size_t  tile_scores; // bytes of a thread's scores where they do not share
    size_t  all_scores;  // bytes of all scores where they may share

    work_plan(const op_shape & shape, int n_threads);

    // Enough for fewer threads too, which may share where these do not.
    size_t size(int n_threads) const { return n_threads * scratch + std::max(n_threads * tile_scores, all_scores); }
};

struct scratch_layout {
    size_t keys, queries, weights, tile, sums, end;

    explicit scratch_layout(const op_shape & shape) {
        const int64_t dk = shape.k->ne[0], dv = shape.v->ne[0];
        keys    = 0;
        queries = keys + padded(tile_cells * padded(dk, head_block) * sizeof(float), 64);
        weights = queries + padded(max_rows * dk * sizeof(float), 64);
        tile    = weights + padded(max_rows * tile_cells * sizeof(float), 64);
        sums    = tile + padded(tile_cells * std::max(dk, dv) * sizeof(float), 64);
        end     = sums + padded(max_rows * dv * sizeof(float), 64);
    }

    scratch_memory at(char * base) const {
        return {base + keys, (float *) (base + queries), (float *) (base + weights), (float *) (base + tile),
                (float *) (base + sums)};
    }
};

work_plan::work_plan(const op_shape & shape, int n_threads) {
    stride  = padded(shape.n_cells, tile_cells);
    scratch = scratch_layout(shape).end;

    const int64_t fitting = std::clamp<int64_t>(score_room / stride / 8 * 8, 8, max_rows);
    const int64_t n_tiles = shape.n_groups * ceil_div(shape.n_rows, fitting);
    const bool    few_tiles = shape.n_cells > few_cells && n_tiles < 4 * n_threads;
    shared = few_tiles && n_tiles % n_threads != 0;

    tile_rows   = std::min(shape.n_rows, shared ? max_rows : fitting);
    tile_scores = padded(std::min(shape.n_rows, fitting) * stride * sizeof(float), 64);
    all_scores  = few_tiles ? padded(shape.n_groups * shape.n_rows * stride * sizeof(float), 64) : 0;
    value_rows  = tile_rows;
    n_slices    = 1;

    // The cut of the values that ends first: a slice repeats the weights of its rows, a tile the conversion of values.
    double best = 1e30;
    for (int64_t rows : {24, 16, 8}) {
        for (int64_t slices = 1; slices <= ceil_div(shape.v->ne[0], 2 * head_step); slices *= 2) {
            const int64_t n_units = shape.n_groups * ceil_div(shape.n_rows, rows) * slices;
            const double  unit = (double) (std::min(rows, shape.n_rows) + 2) / slices + 0.25 * std::min(rows, shape.n_rows);
            const double  cost = ceil_div(n_units, n_threads) * unit;
            if (cost < best) {
                best = cost, value_rows = rows, n_slices = slices;
            }
        }
    }
}

struct chosen_kernels {
    scores_kernel scores;
    values_kernel values;

    chosen_kernels(isa set, const op_shape & shape) {
        const attention_kernels & all = set == isa::avx512vnni ? avx512_kernels : avx2_kernels;
        const ggml_type k = shape.k->type, v = shape.v->type;
        scores = k == GGML_TYPE_F32 ? all.scores_f32 : k == GGML_TYPE_F16 ? all.scores_f16 : all.scores_bf16;
        values = v == GGML_TYPE_F32 ? all.values_f32 : v == GGML_TYPE_F16 ? all.values_f16 : all.values_bf16;
    }
};

// One thread's part of an op.
struct worker {
    const op_shape &     shape;
    const work_plan &    plan;
    const chosen_kernels kernels;
    const int            ith, nth;
    const float          scale;
    const scratch_memory scratch;
    float *              scores;  // of all rows where threads share, else of this thread's tile

    void score(int64_t group, int64_t first, int64_t n, int64_t begin, int64_t end, float * out) const {
        kernels.scores(shape.rows(group, first, n), shape.cells(shape.k, group), begin, end, scale, out, plan.stride, scratch);
    }

    void add_up(int64_t group, int64_t first, int64_t n, int64_t begin, int64_t end, const float * in) const {
        kernels.values(shape.rows(group, first, n), shape.cells(shape.v, group), begin, end, in, plan.stride, scratch);
    }

    float * shared_scores(int64_t group, int64_t row) const {
        return scores + (group * shape.n_rows + row) * plan.stride;
    }

    void whole_tiles() const {
        const int64_t n_tiles = ceil_div(shape.n_rows, plan.tile_rows);
        for (int64_t unit = ith; unit < shape.n_groups * n_tiles; unit += nth) {
            const int64_t group = unit / n_tiles, first = unit % n_tiles * plan.tile_rows;
            const int64_t n = std::min(plan.tile_rows, shape.n_rows - first);
            score(group, first, n, 0, shape.n_cells, scores);
            add_up(group, first, n, 0, shape.v->ne[0], scores);
        }
    }

    void shared_score_tiles() const {
        const int64_t n_tiles = ceil_div(shape.n_rows, plan.tile_rows), n_chunks = ceil_div(shape.n_cells, chunk_cells);
        for (int64_t unit = ith; unit < shape.n_groups * n_tiles * n_chunks; unit += nth) {
            const int64_t group = unit / n_chunks / n_tiles, first = unit / n_chunks % n_tiles * plan.tile_rows;
            const int64_t n = std::min(plan.tile_rows, shape.n_rows - first);
            const int64_t begin = unit % n_chunks * chunk_cells, end = std::min(begin + chunk_cells, shape.n_cells);
            score(group, first, n, begin, end, shared_scores(group, first));
        }
    }

    void shared_value_tiles() const {
        const int64_t n_tiles = ceil_div(shape.n_rows, plan.value_rows), size = shape.v->ne[0];
        const int64_t slice = padded(ceil_div(size, plan.n_slices), head_step);
        for (int64_t unit = ith; unit < shape.n_groups * n_tiles * plan.n_slices; unit += nth) {
            const int64_t group = unit / plan.n_slices / n_tiles;
            const int64_t first = unit / plan.n_slices % n_tiles * plan.value_rows;
            const int64_t n = std::min(plan.value_rows, shape.n_rows - first);
            const int64_t begin = unit % plan.n_slices * slice, end = std::min(begin + slice, size);
            if (begin < end) {
                add_up(group, first, n, begin, end, shared_scores(group, first));
            }
        }
    }
};

}  // namespace

bool attention_supports(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    const bool known = q->type == GGML_TYPE_F32 && is_value_type(k->type) && is_value_type(v->type) && !op->src[4];
    const bool plain = float_param(op, 1) == 0.0f && float_param(op, 2) == 0.0f;  // no ALiBi, no soft cap
    const bool shapes = k->ne[0] % head_step == 0 && v->ne[0] % head_step == 0 && k->ne[2] == v->ne[2] &&
                        k->ne[1] == v->ne[1] && q->ne[2] % k->ne[2] == 0 && q->ne[3] == k->ne[3] && q->ne[3] == v->ne[3];
    const bool rows = q->nb[0] == sizeof(float) && k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type);
    return known && plain && shapes && rows;
}

size_t attention_work_size(int n_threads, const ggml_tensor * op) {
    return work_plan(op_shape(op), n_threads).size(n_threads) + 64;
}

void attention_forward(isa set, const ggml_compute_params * params, ggml_tensor * op) {
    const op_shape shape(op);
    const work_plan plan(shape, params->nth);
    char * work = (char *) padded((intptr_t) params->wdata, 64);
    char * scores = work + params->nth * plan.scratch;
    const worker self = {shape, plan, chosen_kernels(set, shape), params->ith, params->nth, float_param(op, 0),
                           scratch_layout(shape).at(work + params->ith * plan.scratch),
                           (float *) (plan.shared ? scores : scores + params->ith * plan.tile_scores)};
    if (!plan.shared) {
        return self.whole_tiles();
    }
    self.shared_score_tiles();
    ggml_barrier(params->threadpool);
    self.shared_value_tiles();
}

}  // namespace localspec

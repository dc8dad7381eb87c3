#include "packing.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

namespace localspec {

// Quants first: their lines of 64 bytes stay aligned that way. The order is the kernels' order, too.
static const encoding encodings[] = {
    { GGML_TYPE_Q4_0,   2, { { 2, 4, 4, false }, { 0, 2, 1, false } } },
    { GGML_TYPE_IQ4_NL, 2, { { 2, 4, 4, false }, { 0, 2, 1, false } } },
    { GGML_TYPE_Q4_1,   3, { { 4, 4, 4, false }, { 0, 2, 1, false }, { 2, 2, 1, false } } },
    { GGML_TYPE_Q5_0,   3, { { 6, 4, 4, false }, { 2, 4, 1, true }, { 0, 2, 1, false } } },
    { GGML_TYPE_Q5_1,   4, { { 8, 4, 4, false }, { 4, 4, 1, true }, { 0, 2, 1, false }, { 2, 2, 1, false } } },
    { GGML_TYPE_Q8_0,   2, { { 2, 4, 8, false }, { 0, 2, 1, false } } },
    { GGML_TYPE_Q4_K,   4, { { 16, 4, 32, false }, { 4, 1, 12, false }, { 0, 2, 1, false }, { 2, 2, 1, false } } },
    { GGML_TYPE_Q5_K,   5, { { 48, 4, 32, false }, { 16, 4, 8, false }, { 4, 1, 12, false }, { 0, 2, 1, false }, { 2, 2, 1, false } } },
    { GGML_TYPE_Q6_K,   4, { { 0, 4, 32, false }, { 128, 4, 16, false }, { 192, 1, 16, false }, { 208, 2, 1, false } } },
    { GGML_TYPE_IQ4_XS, 4, { { 8, 4, 32, false }, { 4, 1, 4, false }, { 2, 2, 1, false }, { 0, 2, 1, false } } },
};

const encoding * encoding_of(ggml_type type) {
    for (const encoding & code : encodings) {
        if (code.type == type) {
            return &code;
        }
    }
    return nullptr;
}

packed packed_of(const ggml_tensor * tensor) {
    return { encoding_of(tensor->type), tensor->ne[0] / ggml_blck_size(tensor->type), tensor->ne[1],
             tensor->ne[2] * tensor->ne[3], ggml_row_size(tensor->type, tensor->ne[0]) };
}

size_t packed::region(int f) const {
    size_t bytes_before = 0;  // in a block
    for (int i = 0; i < f; i++) {
        bytes_before += code->fields[i].size * code->fields[i].count;
    }
    return planes * groups() * group_rows * n_blocks * bytes_before;
}

// Four bits become the lowest of four bytes, and back: the products put each where it belongs and nothing carries.
static uint32_t spread(uint32_t word) {
    uint32_t out = 0;
    for (int t = 0; t < 8; t++) {
        out |= ((((word >> 4 * t) & 0xF) * 0x00204081u) & 0x01010101u) << t;
    }
    return out;
}

static uint32_t gather(uint32_t word) {
    uint32_t out = 0;
    for (int t = 0; t < 8; t++) {
        out |= ((((word >> t) & 0x01010101u) * 0x10204080u) >> 28) << 4 * t;
    }
    return out;
}

template <bool PACK, typename T>
static void move_field(const field & f, uint8_t * region, uint8_t * rows, size_t row_bytes, int64_t n_blocks, size_t block_bytes) {
    for (int64_t b = 0; b < n_blocks; b++, region += f.count * group_rows * sizeof(T)) {
        for (int64_t row = 0; row < group_rows; row++) {
            uint8_t * in_file = rows + row * row_bytes + b * block_bytes + f.offset;
            for (int e = 0; e < f.count; e++) {
                uint8_t * in_region = region + (e * group_rows + row) * sizeof(T);
                T         value;
                memcpy(&value, PACK ? in_file + e * sizeof(T) : in_region, sizeof(T));
                if (f.bits) {
                    value = T(PACK ? spread(value) : gather(value));
                }
                memcpy(PACK ? in_region : in_file + e * sizeof(T), &value, sizeof(T));
            }
        }
    }
}

// One group (counted over all planes) from or to 16 whole rows.
template <bool PACK> static void move_group(const packed & tensor, uint8_t * data, int64_t group, uint8_t * rows) {
    const size_t block_bytes = tensor.row_bytes / tensor.n_blocks;
    for (int i = 0; i < tensor.code->n_fields; i++) {
        const field & f      = tensor.code->fields[i];
        uint8_t *     region = data + tensor.region(i) + group * tensor.n_blocks * f.count * group_rows * f.size;
        const auto    move   = f.size == 4   ? move_field<PACK, uint32_t>
                               : f.size == 2 ? move_field<PACK, uint16_t>
                                             : move_field<PACK, uint8_t>;
        move(f, region, rows, tensor.row_bytes, tensor.n_blocks, block_bytes);
    }
}

// The part of one group that lies in the file's bytes [begin, end): straight where it is all 16 rows, else through a copy.
template <bool PACK>
static void move_part(const packed & tensor, uint8_t * data, uint8_t * bytes, size_t begin, size_t end, int64_t group) {
    const int64_t plane = group / tensor.groups(), row = group % tensor.groups() * group_rows;
    const size_t  first = (plane * tensor.rows + row) * tensor.row_bytes;
    const size_t  last  = first + std::min(group_rows, tensor.rows - row) * tensor.row_bytes;
    const size_t  from = std::max(first, begin), to = std::min(last, end);
    if (from >= to) {
        return;
    }
    if (to - from == group_rows * tensor.row_bytes) {
        return move_group<PACK>(tensor, data, group, bytes + (from - begin));
    }
    std::vector<uint8_t> rows(group_rows * tensor.row_bytes);
    if (!PACK || to - from != last - first) {  // rows that no file has are zeros, and need not be kept
        move_group<false>(tensor, data, group, rows.data());
    }
    if (PACK) {
        memcpy(rows.data() + (from - first), bytes + (from - begin), to - from);
        move_group<true>(tensor, data, group, rows.data());
    } else {
        memcpy(bytes + (from - begin), rows.data() + (from - first), to - from);
    }
}

template <bool PACK>
static void move_range(const packed & tensor, uint8_t * data, uint8_t * bytes, size_t offset, size_t size) {
    if (size == 0) {
        return;
    }
    const auto group_at = [&](size_t byte) {
        const int64_t row = byte / tensor.row_bytes;
        return row / tensor.rows * tensor.groups() + row % tensor.rows / group_rows;
    };
    const int64_t first = group_at(offset), last = group_at(offset + size - 1) + 1;
    const auto    work = [&](int64_t from, int64_t to) {
        for (int64_t group = from; group < to; group++) {
            move_part<PACK>(tensor, data, bytes, offset, offset + size, group);
        }
    };
    // A thread costs some 50 µs, a megabyte about 200.
    const int64_t n_threads = std::min<int64_t>({ std::max(1u, std::thread::hardware_concurrency()),
                                                  1 + int64_t(size >> 20), last - first, 16 });
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < n_threads; i++) {
        threads.emplace_back(work, first + (last - first) * i / n_threads, first + (last - first) * (i + 1) / n_threads);
    }
    work(first, first + (last - first) / n_threads);
    for (std::thread & thread : threads) {
        thread.join();
    }
}

void pack(const packed & tensor, uint8_t * data, const uint8_t * bytes, size_t offset, size_t size) {
    move_range<true>(tensor, data, const_cast<uint8_t *>(bytes), offset, size);  // only read
}

void unpack(const packed & tensor, const uint8_t * data, uint8_t * bytes, size_t offset, size_t size) {
    move_range<false>(tensor, const_cast<uint8_t *>(data), bytes, offset, size);  // only read
}

}  // namespace localspec

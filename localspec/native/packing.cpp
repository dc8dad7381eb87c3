#include "packing.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

namespace localspec {

constexpr uint32_t low_halves = 0x0F0F0F0F;

// Q5_0, Q5_1: bit 4 t + i of a word becomes bit t of byte i. Four bits become the lowest of four bytes, and back, by a product
// in which nothing carries.
static void spread(const uint32_t * from, uint32_t * to) {
    *to = 0;
    for (int t = 0; t < 8; t++) {
        *to |= ((((*from >> 4 * t) & 0xF) * 0x00204081u) & 0x01010101u) << t;
    }
}

static void gather(const uint32_t * from, uint32_t * to) {
    *to = 0;
    for (int t = 0; t < 8; t++) {
        *to |= ((((*from >> t) & 0x01010101u) * 0x10204080u) >> 28) << 4 * t;
    }
}

// Q4_K, Q5_K: blocks 2 p and 2 p + 1 are the low and high halves of 8 words. Its own inverse.
static void nibbles_k(const uint32_t * from, uint32_t * to) {
    for (int p = 0; p < 4; p++, from += 8, to += 8) {
        for (int t = 0; t < 4; t++) {
            to[t]     = (from[t] & low_halves) | (from[t + 4] & low_halves) << 4;
            to[t + 4] = (from[t] >> 4 & low_halves) | (from[t + 4] & ~low_halves);
        }
    }
}

// Q5_K: bit j of the bytes of word t belongs to block j. Its own inverse.
static void bits_k(const uint32_t * from, uint32_t * to) {
    for (int j = 0; j < 8; j++) {
        to[j] = 0;
        for (int t = 0; t < 8; t++) {
            to[j] |= (from[t] >> j & 0x01010101u) << t;
        }
    }
}

// Q6_K: block 2 q + s of 16, of 8 in half a super-block: quarter q, part s. A quarter is the low (q = 0, 1) or high halves of
// 8 words, and the bits 2 q and 2 q + 1 of another 8.
static void nibbles_6(const uint32_t * from, uint32_t * to) {
    for (int i = 0; i < 32; i++) {
        const int        half = i / 16, q = i / 4 % 4, s = i / 2 % 2, u = i % 2;
        const uint32_t * word = from + half * 16 + q % 2 * 8 + s * 4 + u;
        const int        bit  = q / 2 * 4;
        to[i]                 = (word[0] >> bit & low_halves) | (word[2] >> bit & low_halves) << 4;
    }
}

static void nibbles_6_back(const uint32_t * from, uint32_t * to) {
    for (int i = 0; i < 32; i++) {
        const int        half = i / 16, odd = i / 8 % 2, s = i / 4 % 2, t = i % 4;
        const uint32_t * low  = from + half * 16 + odd * 4 + s * 2 + t % 2;  // its quarter; the other one is 8 words on
        const int        bit  = t / 2 * 4;
        to[i]                 = (low[0] >> bit & low_halves) | (low[8] >> bit & low_halves) << 4;
    }
}

static void bits_6(const uint32_t * from, uint32_t * to) {
    for (int i = 0; i < 16; i++) {
        const int half = i / 8, q = i / 2 % 4, s = i % 2;
        to[i]          = 0;
        for (int t = 0; t < 4; t++) {
            to[i] |= (from[half * 8 + s * 4 + t] >> 2 * q & 0x03030303u) << 2 * t;
        }
    }
}

static void bits_6_back(const uint32_t * from, uint32_t * to) {
    for (int i = 0; i < 16; i++) {
        const int half = i / 8, s = i / 4 % 2, t = i % 4;
        to[i]          = 0;
        for (int q = 0; q < 4; q++) {
            to[i] |= (from[half * 8 + q * 2 + s] >> 2 * t & 0x03030303u) << 2 * q;
        }
    }
}

// Quants first: their lines of 64 bytes stay aligned that way. The order is the kernels' order, too.
static const encoding encodings[] = {
    { GGML_TYPE_Q4_0,   2, { { 2, 4, 4 }, { 0, 2, 1 } } },
    { GGML_TYPE_IQ4_NL, 2, { { 2, 4, 4 }, { 0, 2, 1 } } },
    { GGML_TYPE_Q4_1,   3, { { 4, 4, 4 }, { 0, 2, 1 }, { 2, 2, 1 } } },
    { GGML_TYPE_Q5_0,   3, { { 6, 4, 4 }, { 2, 4, 1, spread, gather }, { 0, 2, 1 } } },
    { GGML_TYPE_Q5_1,   4, { { 8, 4, 4 }, { 4, 4, 1, spread, gather }, { 0, 2, 1 }, { 2, 2, 1 } } },
    { GGML_TYPE_Q8_0,   2, { { 2, 4, 8 }, { 0, 2, 1 } } },
    { GGML_TYPE_Q4_K,   4, { { 16, 4, 32, nibbles_k, nibbles_k }, { 4, 1, 12 }, { 0, 2, 1 }, { 2, 2, 1 } } },
    { GGML_TYPE_Q5_K,   5, { { 48, 4, 32, nibbles_k, nibbles_k }, { 16, 4, 8, bits_k, bits_k }, { 4, 1, 12 }, { 0, 2, 1 }, { 2, 2, 1 } } },
    { GGML_TYPE_Q6_K,   4, { { 0, 4, 32, nibbles_6, nibbles_6_back }, { 128, 4, 16, bits_6, bits_6_back }, { 192, 1, 16 }, { 208, 2, 1 } } },
    { GGML_TYPE_IQ4_XS, 4, { { 8, 4, 32 }, { 4, 1, 4 }, { 2, 2, 1 }, { 0, 2, 1 } } },
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

static const uint32_t * rearranged(rearrange f, const uint32_t * from, uint32_t * to) {
    if (f == nullptr) {
        return from;
    }
    f(from, to);
    return to;
}

// Only words of four bytes are ever rearranged.
template <typename T> static const T * rearranged(rearrange, const T * from, T *) {
    return from;
}

template <bool PACK, typename T>
static void move_field(const field & f, uint8_t * region, uint8_t * rows, size_t row_bytes, int64_t n_blocks, size_t block_bytes) {
    constexpr int64_t stride = group_rows * sizeof(T);
    T                 file[32], packed[32];
    for (int64_t b = 0; b < n_blocks; b++, region += f.count * stride) {
        for (int64_t row = 0; row < group_rows; row++) {
            uint8_t * in_file   = rows + row * row_bytes + b * block_bytes + f.offset;
            uint8_t * in_region = region + row * sizeof(T);
            if (PACK) {
                memcpy(file, in_file, f.count * sizeof(T));
                const T * from = rearranged(f.there, file, packed);
                for (int e = 0; e < f.count; e++) {
                    memcpy(in_region + e * stride, from + e, sizeof(T));
                }
            } else {
                for (int e = 0; e < f.count; e++) {
                    memcpy(packed + e, in_region + e * stride, sizeof(T));
                }
                memcpy(in_file, rearranged(f.back, packed, file), f.count * sizeof(T));
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

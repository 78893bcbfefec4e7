// The functions that `aerie.kernels` calls. Rows are float32, [rows, size] with a leading dimension in elements.

#include <omp.h>

#include "vectors.h"
#include "products.h"
#include "rows.h"
#include "attention.h"

extern "C" {

// A decoder layer and its weights: `aerie.kernels.host_layer` has the same fields.
struct Product {
    const void *codes;
    const float *scales, *offsets, *bias;
    int64_t outputs, inputs, group, format;
};

struct Layer {
    Product qkv, o_proj, gate_up, down;
    const float *norm;
    float *k_pages, *v_pages;
    int64_t heads, kv_heads, head_dim, page_size, window, hidden;
    double scale, eps;
};

// The batch of a pass that all layers share.
struct Pass {
    const int32_t *page_table, *prefix_len;
    const int64_t *mask, *index, *slots;
    const float *cos, *sin;
    float *scratch;
    int64_t ld_table, ld_mask, ld_mask_row, requests, rows, suffix_len, half, threads, is_long;
};

// out [rows, outputs] = x W^T + bias. scratch: float32 [threads * inputs * 16 + rows * groups].
void product(const void *codes, const float *scales, const float *offsets, int64_t outputs, int64_t inputs,
             int64_t group, int32_t format, const float *x, int64_t ld_x, int64_t num_rows, const float *bias,
             float *out, int64_t ld_out, int32_t threads, float *scratch) {
    if (num_rows == 0) return;
    const Weight w = {codes, scales, offsets, outputs, inputs};
    Rows rows = {x, nullptr, ld_x, inputs / group};
    if (offsets) {
        rows.group_sums = scratch;
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t g = 0; g < rows.groups; g++) scratch[r * rows.groups + g] = sum_of(x + r * ld_x + g * group, group);
        scratch += num_rows * rows.groups;
    }
    switch (format) {
        case FLOAT32: return multiply<FLOAT32>(w, num_rows, rows, bias, out, ld_out, threads, scratch);
        case BFLOAT16: return multiply<BFLOAT16>(w, num_rows, rows, bias, out, ld_out, threads, scratch);
        case INT8: return multiply<INT8>(w, num_rows, rows, bias, out, ld_out, threads, scratch);
        default: return multiply<INT4>(w, num_rows, rows, bias, out, ld_out, threads, scratch);
    }
}

// out [num_ids, inputs] = the weight's rows `ids`.
void weight_rows(const void *codes, const float *scales, const float *offsets, int64_t outputs, int64_t inputs,
                 int64_t group, int32_t format, const int64_t *ids, int64_t num_ids, float *out, int32_t threads) {
    const Weight w = {codes, scales, offsets, outputs, inputs};
#pragma omp parallel for num_threads(threads) if (threads > 1 && num_ids > 64)
    for (int64_t i = 0; i < num_ids; i++) weight_row(w, format, inputs / group, ids[i], out + i * inputs);
}

// out = RMSNorm of x, or of residual + x, which is written to `residual` if it is not null.
void rms_norm(const float *x, int64_t ld_x, float *residual, const float *weight, int64_t num_rows, int64_t size,
              float eps, float *out, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && num_rows * size > (1 << 16))
    for (int64_t r = 0; r < num_rows; r++)
        norm_row(x + r * ld_x, residual ? residual + r * size : nullptr, weight, size, eps, out + r * size);
}

// out [num_rows, size] = silu(first half of x) * second half.
void silu_mul(const float *x, int64_t num_rows, int64_t size, float *out, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && num_rows * size > (1 << 15))
    for (int64_t r = 0; r < num_rows; r++) gate_row(x + 2 * r * size, x + (2 * r + 1) * size, size, out + r * size);
}

// Rotates q into `out` [rows, heads, size], rotates k into its page, and copies v to its page. index, slots: row of cos
// and sin, and index of the token in the pages, by row. NaN in v is stored as in `aerie.kernels.kv.stored_values`.
void rope_store(const float *q, int64_t ld_q, int64_t heads, const float *k, int64_t ld_k, const float *v, int64_t ld_v,
                int64_t kv_heads, int64_t size, const float *cos, const float *sin, int64_t half, const int64_t *index,
                const int64_t *slots, float *k_pages, float *v_pages, int64_t num_rows, float *out, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && num_rows * heads * size > (1 << 15))
    for (int64_t r = 0; r < num_rows; r++) {
        const float *c = cos + index[r] * half, *s = sin + index[r] * half;
        for (int64_t h = 0; h < heads; h++)
            rotate_head(q + r * ld_q + h * size, c, s, half, size, out + (r * heads + h) * size);
        for (int64_t h = 0; h < kv_heads; h++) {
            const int64_t place = (slots[r] * kv_heads + h) * size;
            store_head(k + r * ld_k + h * size, v + r * ld_v + h * size, c, s, half, size, k_pages + place,
                       v_pages + place);
        }
    }
}

// Attention of rounds: row r of request b is q[b * rows + r], [heads, head_dim]. mask: [requests, rows] with a stride
// for each request. window: positions before its own that a row sees at most, if rows is 1; 0 for all.
void attend_rounds(const float *q, int64_t ld_q, int64_t heads, const float *k, const float *v, int64_t page_size,
                   int64_t kv_heads, int64_t head_dim, const int32_t *page_table, int64_t ld_table,
                   const int32_t *prefix_len, int64_t suffix_len, const int64_t *mask, int64_t ld_mask,
                   int64_t ld_mask_row, int64_t requests, int64_t rows, int64_t window, float scale, float *out,
                   int32_t threads, int32_t is_long) {
    const Pages pages = {k, v, page_size, kv_heads, head_dim};
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && is_long)
    for (int64_t i = 0; i < requests * rows * heads; i++) {
        const int64_t h = i % heads, row = i / heads, b = row / rows, suffix = prefix_len[b], end = suffix + suffix_len;
        const int64_t first = window && end > window ? end - window : 0;
        attend_row(q + row * ld_q + h * head_dim, pages, page_table + b * ld_table, h * kv_heads / heads, first, suffix,
                   end, (uint64_t)mask[b * ld_mask + row % rows * ld_mask_row], scale,
                   out + (row * heads + h) * head_dim);
    }
}

// One decoder layer over the rows of a round: out = mlp(norm(residual + attention(normed))), without the last addition
// to the residual stream; `residual` receives the first one. scratch: `scratch_size` numbers.
void decoder_layer(const Layer *layer, const Pass *pass, const float *normed, float *residual, float *out) {
    const Layer &l = *layer;
    const Pass &p = *pass;
    const int64_t num_rows = p.requests * p.rows, width = l.heads * l.head_dim, kv = l.kv_heads * l.head_dim;
    const int64_t wide = l.qkv.outputs > l.gate_up.outputs ? l.qkv.outputs : l.gate_up.outputs;
    const int32_t threads = (int32_t)p.threads;
    float *first = p.scratch, *second = first + num_rows * wide, *third = second + num_rows * wide;
    float *rest = third + num_rows * (wide > l.hidden ? wide : l.hidden);
    const auto times = [&](const Product &w, const float *x, float *to) {
        product(w.codes, w.scales, w.offsets, w.outputs, w.inputs, w.group, (int32_t)w.format, x, w.inputs, num_rows,
                w.bias, to, w.outputs, threads, rest);
    };
    times(l.qkv, normed, first);
    rope_store(first, l.qkv.outputs, l.heads, first + width, l.qkv.outputs, first + width + kv, l.qkv.outputs,
               l.kv_heads, l.head_dim, p.cos, p.sin, p.half, p.index, p.slots, l.k_pages, l.v_pages, num_rows, second,
               threads);
    attend_rounds(second, width, l.heads, l.k_pages, l.v_pages, l.page_size, l.kv_heads, l.head_dim, p.page_table,
                  p.ld_table, p.prefix_len, p.suffix_len, p.mask, p.ld_mask, p.ld_mask_row, p.requests, p.rows,
                  l.window, (float)l.scale, third, threads, (int32_t)p.is_long);
    times(l.o_proj, third, second);
    rms_norm(second, l.hidden, residual, l.norm, num_rows, l.hidden, (float)l.eps, third, threads);
    times(l.gate_up, third, first);
    silu_mul(first, num_rows, l.gate_up.outputs / 2, second, threads);
    times(l.down, second, out);
}
}

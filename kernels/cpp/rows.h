// What is computed row by row, and rows of weights.

// Row `output` of the weight [inputs], dequantised.
static void weight_row(const Weight &w, int format, int64_t groups, int64_t output, float *out) {
    const int64_t block = output / BLOCK, lane = output % BLOCK, size = w.inputs / groups;
    const char *codes = (const char *)w.codes + block * block_bytes(format, w.inputs);
    for (int64_t k = 0; k < w.inputs; k++) {
        float value;
        if (format == FLOAT32) {
            value = ((const float *)codes)[k * BLOCK + lane];
        } else if (format == BFLOAT16) {
            const uint32_t bits = (uint32_t)((const uint16_t *)codes)[k * BLOCK + lane] << 16;
            memcpy(&value, &bits, 4);
        } else {
            const int64_t place = (block * groups + k / size) * BLOCK + lane;
            const uint8_t both = ((const uint8_t *)codes)[k / 2 * BLOCK + lane];
            const int code = format == INT8 ? ((const int8_t *)codes)[k * BLOCK + lane]
                                            : (k % 2 ? both >> 4 : both & 15) - 8;
            value = (float)code * w.scales[place];
            if (w.offsets) value += w.offsets[place];
        }
        out[k] = value;
    }
}

// out = x / rms(x) * weight, for one row. Adds x to `residual` first, and norms the sum, if it is not null.
static void norm_row(const float *x, float *residual, const float *weight, int64_t size, float eps, float *out) {
    Vec squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vec value = load<Vec>(x + i);
        if (residual) store(residual + i, value += load<Vec>(residual + i));
        squares += value * value;
    }
    for (; i < size; i++) {
        const float value = residual ? residual[i] += x[i] : x[i];
        rest += value * value;
    }
    const float factor = 1.0f / std::sqrt((sum(squares) + rest) / (float)size + eps);
    const float *from = residual ? residual : x;
    for (i = 0; i < size; i++) out[i] = from[i] * factor * weight[i];
}

// out [size] = silu(gate) * up, for one row.
static void gate_row(const float *gate, const float *up, int64_t size, float *out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, silu(load<Vec>(gate + i)) * load<Vec>(up + i));
    for (; i < size; i++) out[i] = silu(broadcast(gate[i]))[0] * up[i];
}

// Rotates the first 2 * half dimensions of a head (half-split order) and copies the rest.
INLINE void rotate_head(const float *x, const float *cos, const float *sin, int64_t half, int64_t size, float *out) {
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[half + i];
        out[i] = first * cos[i] - second * sin[i];
        out[half + i] = second * cos[i] + first * sin[i];
    }
    for (int64_t i = 2 * half; i < size; i++) out[i] = x[i];
}

static void store_head(const float *k, const float *v, const float *cos, const float *sin, int64_t half, int64_t size,
                       float *k_page, float *v_page) {
    bool spoilt = false;
    for (int64_t i = 0; i < size; i++) spoilt |= std::isnan(v[i]);
    rotate_head(k, cos, sin, half, size, k_page);
    memcpy(v_page, v, size * sizeof(float));
    if (spoilt)
        for (int64_t i = 0; i < size; i++) {
            k_page[i] = NAN;
            if (std::isnan(v_page[i])) v_page[i] = 0;
        }
}

// y = x W^T + b for float32 rows and weights of 4 to 32 bits. Sums are float32.
//
// W is stored in blocks of 16 outputs: weight[block][input][output in block]; of 4 bits, a byte has input 2 i in its
// lower half and input 2 i + 1 in its upper half. Integers c are in groups of inputs, scale[block][group][16] and
// perhaps offset[block][group][16]: weight = c * scale + offset.
//
// The order in which a result is summed depends neither on the other rows nor on their number: inputs ascend, each
// group has a sum of its own, and the scaled sums of groups ascend. `tile` computes R rows and N blocks at a time only
// so that enough independent sums hide the latency of additions.

constexpr int BLOCK = 16;  // outputs
constexpr int PARTS = BLOCK / LANES;
constexpr int MAX_TILE_ROWS = 6;  // 12 sums, 2 weights and a broadcast input fill the 16 registers of AVX2

constexpr int64_t MIN_CONVERTED_ROWS = 24;  // rows for which a block is converted to float32 once, not for each tile

enum Format { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

struct Weight {
    const void *codes;
    const float *scales;   // null for floats
    const float *offsets;  // or null
    int64_t outputs, inputs;
};

INLINE int64_t block_bytes(int format, int64_t inputs) {
    return format == FLOAT32 ? inputs * 64 : format == BFLOAT16 ? inputs * 32 : format == INT8 ? inputs * 16 : inputs * 8;
}

// Adds the products of input `k` (INT4: of inputs k and k + 1) to the sums.
template <int FORMAT, int R, int N>
INLINE void step(Vec (&sums)[R][N][PARTS], const char *const (&codes)[N], const float *const (&x)[R], int64_t k) {
    for (int n = 0; n < N; n++) {
        if (FORMAT == INT4) {
            Vec weight[2][PARTS];
            of_nibbles(codes[n] + k * 8, weight[0], weight[1]);
            for (int i = 0; i < 2; i++)
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < PARTS; p++) sums[r][n][p] += weight[i][p] * broadcast(x[r][k + i]);
        } else {
            Vec weight[PARTS];
            for (int p = 0; p < PARTS; p++) {
                if (FORMAT == FLOAT32) weight[p] = load<Vec>(codes[n] + (k * BLOCK + p * LANES) * 4);
                if (FORMAT == BFLOAT16)
                    weight[p] = of_bfloat16(load<HalfVec>(codes[n] + (k * BLOCK + p * LANES) * 2));
                if (FORMAT == INT8) weight[p] = of_bytes(load<ByteVec>(codes[n] + k * BLOCK + p * LANES));
            }
            for (int r = 0; r < R; r++)
                for (int p = 0; p < PARTS; p++) sums[r][n][p] += weight[p] * broadcast(x[r][k]);
        }
    }
}

// Rows of x, and their sums over each group (null without offsets).
struct Rows {
    const float *x, *group_sums;
    int64_t ld_x, groups;

    Rows from(int64_t row) const {
        return {x + row * ld_x, group_sums ? group_sums + row * groups : nullptr, ld_x, groups};
    }
};

// Computes R rows of N blocks. codes: of the first block.
template <int FORMAT, int R, int N>
static void tile(const Weight &w, const char *first_codes, int64_t block, const Rows &rows, const float *bias,
                 float *out, int64_t ld_out) {
    constexpr int STEP = FORMAT == INT4 ? 2 : 1;
    const int64_t groups = rows.groups, size = w.inputs / groups;
    const char *codes[N];
    const float *x[R];
    for (int n = 0; n < N; n++) codes[n] = first_codes + n * block_bytes(FORMAT, w.inputs);
    for (int r = 0; r < R; r++) x[r] = rows.x + r * rows.ld_x;
    Vec totals[R][N][PARTS] = {};
    for (int64_t g = 0; g < groups; g++) {
        Vec sums[R][N][PARTS] = {};
        for (int64_t k = g * size; k < (g + 1) * size; k += STEP) step<FORMAT, R, N>(sums, codes, x, k);
        if (!w.scales) {
            memcpy(totals, sums, sizeof(sums));
            break;
        }
        for (int n = 0; n < N; n++)
            for (int p = 0; p < PARTS; p++) {
                const int64_t place = ((block + n) * groups + g) * BLOCK + p * LANES;
                const Vec scale = load<Vec>(w.scales + place);
                for (int r = 0; r < R; r++) totals[r][n][p] += sums[r][n][p] * scale;
                if (w.offsets) {
                    const Vec offset = load<Vec>(w.offsets + place);
                    for (int r = 0; r < R; r++)
                        totals[r][n][p] += offset * broadcast(rows.group_sums[r * groups + g]);
                }
            }
    }
    for (int n = 0; n < N; n++) {
        const int64_t first = (block + n) * BLOCK, count = w.outputs - first < BLOCK ? w.outputs - first : BLOCK;
        for (int r = 0; r < R; r++) {
            float result[BLOCK];
            for (int p = 0; p < PARTS; p++) store(result + p * LANES, totals[r][n][p]);
            if (bias)
                for (int64_t i = 0; i < count; i++) result[i] += bias[first + i];
            memcpy(out + r * ld_out + first, result, count * sizeof(float));
        }
    }
}

template <int FORMAT, int N>
INLINE void rows_of_tile(const Weight &w, const char *codes, int64_t block, int64_t num_rows, const Rows &rows,
                         const float *bias, float *out, int64_t ld_out) {
    switch (num_rows) {
        case 1: return tile<FORMAT, 1, N>(w, codes, block, rows, bias, out, ld_out);
        case 2: return tile<FORMAT, 2, N>(w, codes, block, rows, bias, out, ld_out);
        case 3: return tile<FORMAT, 3, N>(w, codes, block, rows, bias, out, ld_out);
    }
    if constexpr (N == 1) {
        if (num_rows == 4) return tile<FORMAT, 4, N>(w, codes, block, rows, bias, out, ld_out);
        if (num_rows == 5) return tile<FORMAT, 5, N>(w, codes, block, rows, bias, out, ld_out);
        return tile<FORMAT, 6, N>(w, codes, block, rows, bias, out, ld_out);
    }
}

// Computes all rows of `taken` blocks.
template <int FORMAT>
static void blocks_of(const Weight &w, const char *codes, int64_t block, int64_t taken, int64_t num_rows,
                      const Rows &rows, const float *bias, float *out, int64_t ld_out) {
    const int64_t tiles = (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t begin = num_rows * t / tiles, count = num_rows * (t + 1) / tiles - begin;
        const Rows mine = rows.from(begin);
        float *to = out + begin * ld_out;
        if (taken == 4)
            rows_of_tile<FORMAT, 4>(w, codes, block, count, mine, bias, to, ld_out);
        else if (taken == 2)
            rows_of_tile<FORMAT, 2>(w, codes, block, count, mine, bias, to, ld_out);
        else
            rows_of_tile<FORMAT, 1>(w, codes, block, count, mine, bias, to, ld_out);
    }
}

// Converts the numbers of a block to float32, without their scales: [inputs][16].
template <int FORMAT>
static void convert(const char *codes, int64_t inputs, float *out) {
    for (int64_t k = 0; k < inputs; k += FORMAT == INT4 ? 2 : 1) {
        Vec values[2][PARTS];
        if (FORMAT == INT4) of_nibbles(codes + k * 8, values[0], values[1]);
        for (int p = 0; p < PARTS; p++) {
            if (FORMAT == BFLOAT16) values[0][p] = of_bfloat16(load<HalfVec>(codes + (k * BLOCK + p * LANES) * 2));
            if (FORMAT == INT8) values[0][p] = of_bytes(load<ByteVec>(codes + k * BLOCK + p * LANES));
            for (int i = 0; i < (FORMAT == INT4 ? 2 : 1); i++) store(out + (k + i) * BLOCK + p * LANES, values[i][p]);
        }
    }
}

// scratch: [threads, inputs * 16 + 16] float32, used from MIN_CONVERTED_ROWS rows on.
template <int FORMAT>
static void multiply(const Weight &w, int64_t num_rows, const Rows &rows, const float *bias, float *out,
                     int64_t ld_out, int threads, float *scratch) {
    constexpr int UNIT = 4;  // blocks that a thread takes at a time
    const int64_t blocks = (w.outputs + BLOCK - 1) / BLOCK, units = (blocks + UNIT - 1) / UNIT;
    const int64_t tiles = (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, largest = (num_rows + tiles - 1) / tiles;
    const int64_t width = largest == 1 ? 4 : largest <= 3 ? 2 : 1;  // blocks of a tile
    const bool is_small = num_rows * w.outputs * w.inputs < (1 << 17);  // a parallel region takes about 5 us
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && !is_small)
    for (int64_t unit = 0; unit < units; unit++) {
        const int64_t end = (unit + 1) * UNIT < blocks ? (unit + 1) * UNIT : blocks;
        for (int64_t block = unit * UNIT; block < end;) {
            const int64_t taken = block + width <= end ? width : 1;
            const char *codes = (const char *)w.codes + block * block_bytes(FORMAT, w.inputs);
            if (FORMAT != FLOAT32 && num_rows >= MIN_CONVERTED_ROWS) {
                float *mine = scratch + omp_get_thread_num() * w.inputs * BLOCK;
                convert<FORMAT>(codes, w.inputs, mine);
                blocks_of<FLOAT32>(w, (const char *)mine, block, 1, num_rows, rows, bias, out, ld_out);
            } else {
                blocks_of<FORMAT>(w, codes, block, taken, num_rows, rows, bias, out, ld_out);
            }
            block += taken;
        }
    }
}

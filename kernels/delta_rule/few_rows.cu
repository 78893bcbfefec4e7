// The kernel of `delta_rule_rounds` for a few rows per request, in CUDA C++. `few_rows_cuda` compiles and launches it.
//
// A thread block computes one value head of one request. The head's state [128 keys, 128 values] is in registers: a
// warp has 128 / WARPS columns, a lane has four of them for 128 / WARPS keys. So products of the state with keys and
// queries are float32 sums within one warp. Columns are independent: each thread solves the triangular system of one
// column by substitution. Tensor cores multiply the rows with each other.
//
// Rows of the tile: PATH committed keys, WIDTH new keys, WIDTH queries. Names as in `few_rows_triton`. Macros: WIDTH,
// PATH, PENDING, HK, HV, ROW_SIZE, SIGMOID, WARPS, PROGRAMS, PDL, ALIGNED (alignment of the new rows' addresses, in
// elements, at most 8), SAVED_BF16 (dtype of snapshots), NORM_F32 (dtype of the norm's weight).

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int D = 128;                      // keys, and values, of a head
constexpr int KEYS = HK * D;                // channels of all keys
constexpr int C = 2 * KEYS + HV * D;        // channels per token
constexpr int R = ROW_SIZE;                 // elements per row
constexpr int NUM_KEYS = PATH + WIDTH;
constexpr int ROWS = NUM_KEYS + WIDTH;
constexpr int TOKENS = 3 + NUM_KEYS;        // raw rows: history, committed, new
constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = 32 / WARPS;          // lanes for the columns of a warp, four columns each
constexpr int STEPS = D / WARPS / 4;        // fours of keys per lane
constexpr int CHUNKS = D / 8;               // 16-byte pieces of a head's channels
constexpr int ROW_TILES = (ROWS + 15) / 16, COLUMN_TILES = (ROWS + 7) / 8;
constexpr int STRIDE = D + 8;               // of tensor core rows; avoids bank conflicts
constexpr int COEFS = (NUM_KEYS + 3) / 4 * 4;
constexpr float NORM_EPS = L2_EPS;          // of the l2 norms of q and k
constexpr float QUERY_SCALE = 0.08838834764831845f;  // 128 ** -0.5

__device__ __forceinline__ float of_bf16(u16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float log_decay(float a, float a_log, float dt_bias) {
    float x = a + dt_bias;
    return -expf(a_log) * (x > 20.0f ? x : log1pf(expf(x)));
}

__device__ __forceinline__ float4 load_state(const float* at) {
    float4 x;  // volatile keeps the load before the PDL wait
    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at) : "memory");
    return x;
}

// Load output of the previous kernel: after the PDL wait, and from L2, because L1 may have stale lines.
__device__ __forceinline__ u32 load_new(const u16* at) {
    u16 x;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_eight(const u16* at) {
    uint4 x;
    if constexpr (ALIGNED == 8) {
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    } else if constexpr (ALIGNED == 4) {
        asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%4]; ld.global.cg.v2.u32 {%2, %3}, [%4 + 8];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    } else if constexpr (ALIGNED == 2) {
        asm volatile("ld.global.cg.u32 %0, [%4]; ld.global.cg.u32 %1, [%4 + 4]; ld.global.cg.u32 %2, [%4 + 8]; "
                     "ld.global.cg.u32 %3, [%4 + 12];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    } else {
        x.x = load_new(at) | load_new(at + 1) << 16, x.y = load_new(at + 2) | load_new(at + 3) << 16;
        x.z = load_new(at + 4) | load_new(at + 5) << 16, x.w = load_new(at + 6) | load_new(at + 7) << 16;
    }
    return x;
}

// First channel of part 0 (queries), 1 (keys) or 2 (values) of the program's heads.
__device__ __forceinline__ int channel_of(int part, int key_head, int h) {
    return part == 2 ? 2 * KEYS + h * D : part * KEYS + key_head * D;
}

// Sum sums[c] over the lanes that share four columns; return the total of the lane's own column.
__device__ __forceinline__ float own_column(float4 sums, int lane) {
    bool upper = lane & 16, odd = lane & 8;
    float first = (upper ? sums.z : sums.x) + __shfl_xor_sync(~0u, upper ? sums.x : sums.z, 16);
    float second = (upper ? sums.w : sums.y) + __shfl_xor_sync(~0u, upper ? sums.y : sums.w, 16);
    float own = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 8);
#pragma unroll
    for (int bit = 4; bit >= GROUPS; bit /= 2) own += __shfl_xor_sync(~0u, own, bit);
    return own;
}

struct Shared {
    uint4 raw[TOKENS][3][CHUNKS];           // rows before the convolution: queries, keys, values
    uint4 z[WIDTH][CHUNKS];
    float4 rows[ROWS][D / 4];               // keys, then queries, after the convolution
    u16 packed[ROW_TILES * 16][STRIDE];     // the same in bfloat16, for tensor cores
    u16 values[NUM_KEYS][D];
    float products[ROW_TILES * 16][COLUMN_TILES * 8 + 1];
    float coefs[ROWS][COEFS];
    float of_state[ROWS], g[NUM_KEYS], beta[NUM_KEYS], decay[ROWS], adds[PATH], squares[WIDTH][WARPS];
    u32 sees[ROWS];
    int before[WIDTH][3];                   // raw rows of each new row's three nearest ancestors, newest first
};

// res[i]: row i times the state, in the lane's own column.
template <int COUNT>
__device__ __forceinline__ void multiply(const float4 (*state)[4], const float4 (*rows)[D / 4], int of_lane, int lane,
                                         float* res) {
    float4 sums[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float4 k = rows[i][step * WARPS + of_lane];
            float factors[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float4 s = state[step][c];
                sums[i].x += factors[c] * s.x;
                sums[i].y += factors[c] * s.y;
                sums[i].z += factors[c] * s.z;
                sums[i].w += factors[c] * s.w;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) res[i] = own_column(sums[i], lane);
}

// `multiply` for COUNT rows, four at a time.
template <int COUNT>
__device__ __forceinline__ void multiply_all(const float4 (*state)[4], const float4 (*rows)[D / 4], int of_lane,
                                             int lane, float* res) {
#pragma unroll
    for (int first = 0; first + 4 <= COUNT; first += 4) {
        multiply<4>(state, rows + first, of_lane, lane, res + first);
    }
    if constexpr (COUNT % 4 != 0) {
        constexpr int first = COUNT / 4 * 4;
        multiply<COUNT % 4>(state, rows + first, of_lane, lane, res + first);
    }
}

__device__ __forceinline__ void store(float* at, float4 x) { *(float4*)at = x; }

__device__ __forceinline__ void store(u16* at, float4 x) {
    *(ushort4*)at = make_ushort4(to_bf16(x.x), to_bf16(x.y), to_bf16(x.z), to_bf16(x.w));
}

// Write kept * state + the sum over j < PATH of key j times factors[j] * added[j].
template <typename T>
__device__ __forceinline__ void write_state(T* target, const float4 (*state)[4], const Shared& shared,
                                            const float* added, float kept, const float* factors, int of_lane,
                                            int lane) {
    float4 u[PATH];
#pragma unroll
    for (int j = 0; j < PATH; j++) {
        float x = added[j] * factors[j];
        int first = lane & (GROUPS - 1);
        u[j] = make_float4(__shfl_sync(~0u, x, first), __shfl_sync(~0u, x, first | 8),
                           __shfl_sync(~0u, x, first | 16), __shfl_sync(~0u, x, first | 24));
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float4 s[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float4 old = state[step][c];
            s[c] = make_float4(kept * old.x, kept * old.y, kept * old.z, kept * old.w);
        }
#pragma unroll
        for (int j = 0; j < PATH; j++) {
            float4 k = shared.rows[j][step * WARPS + of_lane];
            float keys[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                s[c].x += keys[c] * u[j].x;
                s[c].y += keys[c] * u[j].y;
                s[c].z += keys[c] * u[j].z;
                s[c].w += keys[c] * u[j].w;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) store(target + (step * WARPS * 4 + c) * D, s[c]);
    }
}

#if SAVED_BF16
typedef u16 Saved;
#else
typedef float Saved;
#endif
#if NORM_F32
typedef float Norm;
__device__ __forceinline__ float norm_of(Norm x) { return x; }
#else
typedef u16 Norm;
__device__ __forceinline__ float norm_of(Norm x) { return of_bf16(x); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) delta_few_rows(
    const u16* __restrict__ qkv, const u16* __restrict__ z, const u16* __restrict__ b, const u16* __restrict__ a,
    u16* __restrict__ out, const u16* __restrict__ weight, const float* __restrict__ a_log,
    const float* __restrict__ dt_bias, const Norm* __restrict__ norm, float* __restrict__ states,
    const u16* __restrict__ conv, u16* __restrict__ pending, const u16* __restrict__ committed,
    Saved* __restrict__ saved_states, u16* __restrict__ saved_conv, const int* __restrict__ counts,
    const i64* __restrict__ slots, const int* __restrict__ prefix, const i64* __restrict__ masks,
    const int* __restrict__ snapshot_at, const i64* __restrict__ snapshot_entry, int mask_stride, int qkv_stride,
    int z_stride, int b_stride, int a_stride, int out_stride, float eps) {
    __shared__ __align__(16) Shared shared;
    const int h = blockIdx.x, request = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int key_head = h / (HV / HK);
    const bool leads = h % (HV / HK) == 0;  // one value head per key head writes the key head's channels
    const int of_lane = lane / GROUPS;      // index of the lane's keys in each 4 * WARPS
    const int first_column = warp * (D / WARPS) + lane % GROUPS * 4;
    const int column = first_column + (lane & 16 ? 2 : 0) + (lane & 8 ? 1 : 0);  // the lane's own
#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    const i64 slot = slots[request];
    const int count = counts[slot];
    const i64 of_state = (i64)h * (D * D) + of_lane * 4 * D + first_column;
    float* own_state = states + slot * (HV * D * D) + of_state;
    float4 state[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int c = 0; c < 4; c++) state[step][c] = load_state(own_state + (step * WARPS * 4 + c) * D);
    }

    // 1. Data from before the pass: history, committed rows, weights, tree masks.
    for (int i = thread; i < (3 + PATH) * 3 * CHUNKS; i += THREADS) {
        int token = i / (3 * CHUNKS), part = i / CHUNKS % 3, chunk = i % CHUNKS;
        int channel = channel_of(part, key_head, h) + chunk * 8;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (token < 3) x = *(const uint4*)(conv + (slot * 3 + token) * C + channel);
        else if (token - 3 < count) x = *(const uint4*)(committed + (slot * PATH + token - 3) * R + channel);
        shared.raw[token][part][chunk] = x;
    }
    const int channel = thread % D;  // of the convolution
    float taps[3][4];
#pragma unroll
    for (int part = 0; part < 3; part++) {
#pragma unroll
        for (int i = 0; i < 4; i++) taps[part][i] = of_bf16(weight[i * C + channel_of(part, key_head, h) + channel]);
    }
    const float log_rate = a_log[h], bias = dt_bias[h];
    const int passed = snapshot_at[slot] - (prefix[request] - count);
    if (thread < ROWS) {
        u32 sees;
        if (thread < PATH) {
            sees = thread < count ? (2u << thread) - 1 : 0;
        } else {
            int node = thread < NUM_KEYS ? thread - PATH : thread - NUM_KEYS;
            u32 mask = (u32)masks[request * mask_stride + node];
            sees = ((1u << count) - 1) | mask << PATH;
            u32 above = mask & ((1u << node) - 1);
            if (thread < NUM_KEYS) {
                int next = count + 2;
#pragma unroll
                for (int i = 0; i < 3; i++) {
                    if (above) {
                        int nearest = 31 - __clz(above);
                        above ^= 1u << nearest;
                        shared.before[node][i] = 3 + PATH + nearest;
                    } else {
                        shared.before[node][i] = next--;
                    }
                }
            }
        }
        shared.sees[thread] = sees;
    }
    if (thread < PATH) {
        float own_a = 0.0f, own_b = 0.0f;
        if (thread < count) {
            const u16* gates = committed + (slot * PATH + thread) * R + C + h;
            own_b = of_bf16(gates[0]), own_a = of_bf16(gates[HV]);
        }
        shared.g[thread] = thread < count ? log_decay(own_a, log_rate, bias) : 0.0f;
        shared.beta[thread] = sigmoid(own_b);
    }
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    // 2. The new rows.
    const i64 first_row = (i64)request * WIDTH;
    u16* own_pending = pending + slot * (i64)(PENDING * R);
    for (int i = thread; i < WIDTH * 4 * CHUNKS; i += THREADS) {
        int node = i / (4 * CHUNKS), part = i / CHUNKS % 4, chunk = i % CHUNKS;
        if (part == 3) {
            shared.z[node][chunk] = load_eight(z + (first_row + node) * z_stride + h * D + chunk * 8);
        } else {
            int channel = channel_of(part, key_head, h) + chunk * 8;
            uint4 x = load_eight(qkv + (first_row + node) * qkv_stride + channel);
            shared.raw[3 + PATH + node][part][chunk] = x;
            if (leads || part == 2) *(uint4*)(own_pending + node * R + channel) = x;
        }
    }
    if (thread < WIDTH) {
        u16 own_b = load_new(b + (first_row + thread) * b_stride + h);
        u16 own_a = load_new(a + (first_row + thread) * a_stride + h);
        own_pending[thread * R + C + h] = own_b;
        own_pending[thread * R + C + HV + h] = own_a;
        shared.g[PATH + thread] = log_decay(of_bf16(own_a), log_rate, bias);
        shared.beta[PATH + thread] = sigmoid(of_bf16(own_b));
    }
    __syncthreads();

    // 3. The convolution, and the decay of each row since the state.
    for (int j = thread / D; j < NUM_KEYS; j += THREADS / D) {
        int tokens[4];  // newest first
        tokens[0] = 3 + j;
#pragma unroll
        for (int i = 0; i < 3; i++) tokens[i + 1] = j < PATH ? 2 + j - i : shared.before[j - PATH][i];
        float x[3];
#pragma unroll
        for (int part = 0; part < 3; part++) {
            x[part] = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[part] += taps[part][3 - i] * of_bf16(((const u16*)shared.raw[tokens[i]][part])[channel]);
            }
        }
        u16 k = to_bf16(silu(x[1]));
        shared.packed[j][channel] = k;
        ((float*)shared.rows[j])[channel] = of_bf16(k);
        shared.values[j][channel] = to_bf16(silu(x[2]));
        if (j >= PATH) {
            u16 q = to_bf16(silu(x[0]));
            shared.packed[WIDTH + j][channel] = q;
            ((float*)shared.rows[WIDTH + j])[channel] = of_bf16(q);
        }
    }
    if (thread < ROWS) {
        float decay = 0.0f;
        u32 sees = shared.sees[thread];
#pragma unroll
        for (int j = 0; j < NUM_KEYS; j++) decay += sees >> j & 1 ? shared.g[j] : 0.0f;
        shared.decay[thread] = decay;
    }
    __syncthreads();

    // 4. Products of the rows with each other: exact products of bfloat16, summed in float32.
    for (int tile = warp; tile < ROW_TILES * COLUMN_TILES; tile += WARPS) {
        int row = tile / COLUMN_TILES * 16, other = tile % COLUMN_TILES * 8, group = lane / 4, pair = lane % 4 * 2;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            u32 x0 = *(const u32*)&shared.packed[row + group][k + pair];
            u32 x1 = *(const u32*)&shared.packed[row + group + 8][k + pair];
            u32 x2 = *(const u32*)&shared.packed[row + group][k + pair + 8];
            u32 x3 = *(const u32*)&shared.packed[row + group + 8][k + pair + 8];
            u32 y0 = *(const u32*)&shared.packed[other + group][k + pair];
            u32 y1 = *(const u32*)&shared.packed[other + group][k + pair + 8];
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                "{%0, %1, %2, %3};"
                : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(y0), "r"(y1));
        }
        shared.products[row + group][other + pair] = sum[0];
        shared.products[row + group][other + pair + 1] = sum[1];
        shared.products[row + group + 8][other + pair] = sum[2];
        shared.products[row + group + 8][other + pair + 1] = sum[3];
    }
    __syncthreads();
    for (int i = thread; i < ROWS * COEFS; i += THREADS) {
        int row = i / COEFS, j = i % COEFS;
        bool is_key = row < NUM_KEYS;
        float scale = rsqrtf(shared.products[row][row] + NORM_EPS), decay = shared.decay[row];
        float of_row = is_key ? shared.beta[row] * scale : scale * QUERY_SCALE;
        float coef = 0.0f;
        if (j < NUM_KEYS && (shared.sees[row] >> j & 1) && j != row) {
            float between = expf(fminf(decay - shared.decay[j], 0.0f)) * rsqrtf(shared.products[j][j] + NORM_EPS);
            coef = shared.products[row][j] * between * of_row;
        }
        shared.coefs[row][j] = coef;
        if (j == 0) shared.of_state[row] = of_row * expf(decay);
    }
    float all_decay = 0.0f;
#pragma unroll
    for (int j = 0; j < PATH; j++) all_decay += j < count ? shared.g[j] : 0.0f;
    if (thread < PATH) {
        float scale = rsqrtf(shared.products[thread][thread] + NORM_EPS);
        shared.adds[thread] = thread < count ? expf(all_decay - shared.decay[thread]) * scale : 0.0f;
    }

    // 5. Products of the rows with the state.
    float found[ROWS];
#pragma unroll
    for (int first = 0; first < PATH; first += 4) {
        constexpr int LAST = PATH % 4;
        if (first < count) {
            if (first + 4 <= PATH) multiply<4>(state, shared.rows + first, of_lane, lane, found + first);
            else if constexpr (LAST != 0) multiply<LAST>(state, shared.rows + first, of_lane, lane, found + first);
        } else {
#pragma unroll
            for (int i = first; i < first + 4 && i < PATH; i++) found[i] = 0.0f;
        }
    }
    multiply_all<2 * WIDTH>(state, shared.rows + PATH, of_lane, lane, found + PATH);
    __syncthreads();

    // 6. What the rows add to the state, and the outputs, in one column.
    float added[NUM_KEYS], outs[WIDTH];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float sum = shared.of_state[row] * found[row];
        if (row < NUM_KEYS) sum = shared.beta[row] * of_bf16(shared.values[row][column]) - sum;
#pragma unroll
        for (int j = 0; j < (row < NUM_KEYS ? row : NUM_KEYS); j++) {
            float part = shared.coefs[row][j] * added[j];
            sum += row < NUM_KEYS ? -part : part;
        }
        if (row < NUM_KEYS) added[row] = sum;
        else outs[row - NUM_KEYS] = sum;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        float square = outs[i] * outs[i];
#pragma unroll
        for (int bit = 16; bit > 0; bit /= 2) {
            if (bit < GROUPS || bit >= 8) square += __shfl_xor_sync(~0u, square, bit);  // other bits: same column
        }
        if (lane == 0) shared.squares[i][warp] = square;
    }

    // 7. The state after the committed rows, and at the snapshot.
    if (passed >= 0 && passed <= count) {
        i64 entry = snapshot_entry[slot];
        float until = 0.0f, factors[PATH];
#pragma unroll
        for (int j = 0; j < PATH; j++) until += j < passed ? shared.g[j] : 0.0f;
#pragma unroll
        for (int j = 0; j < PATH; j++) {
            float scale = rsqrtf(shared.products[j][j] + NORM_EPS);
            factors[j] = j < passed ? expf(until - shared.decay[j]) * scale : 0.0f;
        }
        write_state(saved_states + entry * (HV * D * D) + of_state, state, shared, added, expf(until), factors, of_lane,
                    lane);
        for (int i = thread; i < 3 * 3 * CHUNKS; i += THREADS) {
            int token = i / (3 * CHUNKS), part = i / CHUNKS % 3, chunk = i % CHUNKS;
            if (leads || part == 2) {
                u16* target = saved_conv + (entry * 3 + token) * C + channel_of(part, key_head, h) + chunk * 8;
                *(uint4*)target = shared.raw[passed + token][part][chunk];
            }
        }
    }
    if (count > 0) write_state(own_state, state, shared, added, expf(all_decay), shared.adds, of_lane, lane);
    __syncthreads();

    // 8. The gated norm.
    float norm_weight = norm_of(norm[column]);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        float square = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) square += shared.squares[i][w];
        float gate = of_bf16(((const u16*)shared.z[i])[column]);
        gate = SIGMOID ? sigmoid(gate) : silu(gate);
        float o = outs[i] * rsqrtf(square / D + eps) * norm_weight * gate;
        if (GROUPS >= 8 || (lane & (8 - GROUPS)) == 0) out[(first_row + i) * out_stride + h * D + column] = to_bf16(o);
    }
}

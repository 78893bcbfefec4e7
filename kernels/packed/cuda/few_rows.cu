// y = x W^T, or silu(x G^T) * (x U^T), for up to 32 rows and int4 weights. `kernels_cuda` compiles it.
//
// Macros: `FewRowsTiles` in tiles.py. WN: warps_n. WK: warps_k. RT: row_tiles. HALF: float16, else bfloat16. ZEROS:
// weights have zeros.
//
// Bulk copies load codes: they need no registers, and start before the PDL wait. A warp reads its own part of mma's
// first operand from shared memory (`weight.py`).

constexpr int WARPS = WN * WK;  // STAGES is a multiple of WK
constexpr int CONSUMERS = 32 * WARPS;
constexpr int CODES = 4096 * WN, SCALES = 128 * WN * (1 + ZEROS), X_ROW = 256 + 64;  // bytes; rows start 16 banks apart
constexpr int STAGE = CODES + SCALES + 8 * RT * X_ROW;
constexpr int CELLS = WN * 4 * RT;  // tiles of 16 outputs by 8 rows
constexpr int OWN = GATED ? WN / 2 : WN;
constexpr int MEMORY = SHARED_BYTES - 16 * STAGES;  // barriers follow it
static_assert(MEMORY >= STAGES * STAGE && MEMORY >= WARPS * 4 * RT * 512, "tiles.py");

extern "C" __global__ void __launch_bounds__(CONSUMERS, PROGRAMS) few_rows(
    const u16* __restrict__ x, int rows, int row_stride, const char* __restrict__ codes,
    const char* __restrict__ scales, const char* __restrict__ zeros, const u16* __restrict__ bias,
    u16* __restrict__ out, int n_out, int blocks, int steps, int group_steps) {
    // blocks: of 64 outputs of W. steps: of 128 inputs. group_steps: steps that share a scale; 0: all.
    extern __shared__ __align__(128) char memory[];
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    u32 full = base + MEMORY, empty = full + 8 * STAGES;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
    int rank = blockIdx.y;
    int first = steps * rank / SPLITS, count = steps * (rank + 1) / SPLITS - first;
    if (threadIdx.x == 0) init_stages(full, empty, STAGES, 1 + 32, WN);
    __syncthreads();
    int g = lane / 4, t = lane % 4;
    {
        int j = warp % WN, k = warp / WN;
        // the warps with the same k read every WK-th stage, copied by the first of them: lanes below WN copy codes, all
        // lanes copy scales and rows
        auto block = [&](int mine) {
            if (!GATED) return min(tile * WN + mine, blocks - 1);
            const int half = blocks / 2;
            return mine < OWN ? min(tile * OWN + mine, half - 1) : half + min(tile * OWN + mine - OWN, half - 1);
        };
        const int groups = group_steps ? steps / group_steps : 1;
        const char* my_codes = codes + ((u64)block(lane % WN) * steps + first) * 4096;
        const char* my_scales = scales + (u64)block(lane / 8 % WN) * groups * 128 + lane % 8 * 16;
        const char* my_zeros = zeros + (u64)block(lane / 8 % WN) * groups * 128 + lane % 8 * 16;
        auto weights = [&](int s) {
            const u32 at = base + s % STAGES * STAGE, barrier = full + 8 * (s % STAGES);
            if (lane == 0) expect(barrier, CODES);
            __syncwarp();
            if (lane < WN) copy(at + 4096 * lane, my_codes + (u64)s * 4096, 4096, barrier);
            const int group = group_steps ? (first + s) / group_steps : 0;
            for (int mine = lane / 8; mine < WN; mine += 4) {
                const u64 there = group * 128 + (WN > 4 ? (u64)(block(mine) - block(lane / 8)) * groups * 128 : 0);
                copy16(at + CODES + 128 * mine + lane % 8 * 16, my_scales + there);
                if (ZEROS) copy16(at + CODES + 128 * (WN + mine) + lane % 8 * 16, my_zeros + there);
            }
        };
        auto inputs = [&](int s) {
            const u32 at = base + s % STAGES * STAGE + CODES + SCALES + lane % 16 * 16;
            const u16* from = x + (first + s) * 128 + lane % 16 * 8;
            for (int m = lane / 16; m < rows; m += 2) copy16(at + m * X_ROW, from + (u64)m * row_stride);
            arrive_after_copies(full + 8 * (s % STAGES));
        };
        if (j == 0) {
            for (int s = k; s < min(STAGES, count); s += WK) weights(s);
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int s = k; s < min(STAGES, count); s += WK) inputs(s);
        }
        float acc[4][RT][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int m = 0; m < RT; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) acc[i][m][r] = 0.f;
        for (int s = k; s < count; s += WK) {
            int slot = s % STAGES, next = s - WK + STAGES;
            u32 at = base + slot * STAGE;
            if (j == 0 && s != k && next < count) {
                wait(empty + 8 * (next % STAGES), (next / STAGES + 1) & 1);
                weights(next);
                inputs(next);
            }
            wait(full + 8 * slot, (s / STAGES) & 1);
            u32 my_codes = at + 4096 * j + 16 * lane;
            u32 my_x = at + CODES + SCALES + g * X_ROW + 16 * t;
            uint4 pairs = load(at + CODES + 128 * j + 16 * g);
            u32 pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#if ZEROS
            pairs = load(at + CODES + 128 * (WN + j) + 16 * g);
            u32 zero[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#endif
            float part[4][RT][4];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                uint4 q[4];
#pragma unroll
                for (int i = 0; i < 4; i++) q[i] = load(my_codes + 2048 * c + 512 * i);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint4 b[RT];
#pragma unroll
                    for (int m = 0; m < RT; m++) b[m] = load(my_x + m * 8 * X_ROW + c * 128 + h * 64);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        u32 low[4], high[4], z0 = ZERO, z1 = ZERO;
#if ZEROS
                        z0 = twice(zero[i], 0) | MINUS, z1 = twice(zero[i], 1) | MINUS;
#endif
                        decode(low, h ? q[i].z : q[i].x, 0, 0, z0, z1);
                        decode(high, h ? q[i].w : q[i].y, 0, 0, z0, z1);
#pragma unroll
                        for (int m = 0; m < RT; m++) mma(part[i][m], low, b[m].x, b[m].y, c == 0 && h == 0);
#pragma unroll
                        for (int m = 0; m < RT; m++) mma(part[i][m], high, b[m].z, b[m].w, false);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) arrive(empty + 8 * slot);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float s0 = number(pair[i], 0), s1 = number(pair[i], 1);
#pragma unroll
                for (int m = 0; m < RT; m++)
#pragma unroll
                    for (int r = 0; r < 4; r++) acc[i][m][r] = fmaf(part[i][m][r], r < 2 ? s0 : s1, acc[i][m][r]);
            }
        }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
        // all stages have been read: the sums reuse their memory
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int m = 0; m < RT; m++) {
                u32 to = base + (((k * WN + j) * 4 + i) * RT + m) * 512 + lane * 16;
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(acc[i][m][0]),
                             "f"(acc[i][m][1]), "f"(acc[i][m][2]), "f"(acc[i][m][3])
                             : "memory");
            }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    }
    auto sum_of_warps = [&](int cell) {
        float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int k = 0; k < WK; k++) {
            uint4 v = load(base + (k * CELLS * 32 + cell) * 16);
            total.x += __uint_as_float(v.x), total.y += __uint_as_float(v.y);
            total.z += __uint_as_float(v.z), total.w += __uint_as_float(v.w);
        }
        return total;
    };
#if SPLITS > 1
    if (WK > 1)
        for (int cell = threadIdx.x; cell < CELLS * 32; cell += CONSUMERS) {
            float4 v = sum_of_warps(cell);
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(base + cell * 16), "f"(v.x), "f"(v.y),
                         "f"(v.z), "f"(v.w)
                         : "memory");
        }
    cluster_sync();
#endif
    auto sum = [&](int cell) {
#if SPLITS > 1
        float4 total = load_of(base + cell * 16, 0);
#pragma unroll
        for (int q = 1; q < SPLITS; q++) {
            float4 v = load_of(base + cell * 16, q);
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        return total;
#else
        return sum_of_warps(cell);
#endif
    };
    {
        constexpr int OUT_CELLS = CELLS / WN * OWN * 32;
        int end = OUT_CELLS * (rank + 1) / SPLITS;
        for (int cell = OUT_CELLS * rank / SPLITS + threadIdx.x; cell < end; cell += CONSUMERS) {
            int where = cell / 32, m = where % RT * 8 + 2 * (cell % 4);
            int n = (tile * OWN + where / (4 * RT)) * 64 + where / RT % 4 * 16 + cell % 32 / 4;
            if (m >= rows) continue;
            float4 v4 = sum(cell);
            float v[4] = {v4.x, v4.y, v4.z, v4.w};
#if GATED
            float4 u4 = sum(cell + OUT_CELLS);
            float u[4] = {u4.x, u4.y, u4.z, u4.w};
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float gate = nearest(v[r]);
                v[r] = nearest(gate / (1.f + __expf(-gate))) * nearest(u[r]);
            }
#endif
#pragma unroll
            for (int r = 0; r < 4; r++) {
                int row = m + r % 2, column = n + r / 2 * 8;
                if (row < rows && column < n_out) {
                    float total = v[r];
                    if (bias) total += number(bias[column], 0);
                    out[(u64)row * n_out + column] = rounded(total);
                }
            }
        }
    }
#if SPLITS > 1
    cluster_sync();
#endif
}

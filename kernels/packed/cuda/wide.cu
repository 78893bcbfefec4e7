// y = x W^T, or silu(x G^T) * (x U^T), for int4 weights and 17 to 32 rows. `kernels_cuda` compiles it, and generates
// the device function `wgmma`.
//
// Macros: `WideTiles` in tiles.py. ROWS: block_m. HALF: float16, else bfloat16. ZEROS: weights have zeros.
//
// One warp of the third group copies codes, scales and, by a tensor map, rows. The other groups decode codes into
// wgmma's first operand, in registers, one product ahead. Copying rows by one thread, 4 or 256 bytes at a time, took
// twice as long (tests/bench/EXPERIMENTS.md).

constexpr int JW = 2;  // blocks of 64 outputs of each of two warp groups; GATED: the first computes gate, the second up
constexpr int WN = 2 * JW;
constexpr int CODES = 4096 * WN, SCALES = 128 * WN * (1 + ZEROS), X = ROWS * 256;
constexpr int STAGE = X + CODES + (SCALES + 1023) / 1024 * 1024;
constexpr int RT = ROWS / 8, CELLS = WN * 4 * RT;
constexpr int MEMORY = SHARED_BYTES - 16 * STAGES;  // barriers follow it
static_assert(MEMORY >= STAGES * STAGE && MEMORY >= CELLS * 512, "tiles.py");
constexpr int OWN = GATED ? WN / 2 : WN;
constexpr int CONSUMERS = 256, MOVERS = 128;

extern "C" __global__ void __launch_bounds__(CONSUMERS + MOVERS, 1) wide(
    const __grid_constant__ TensorMap x, int all_rows, const char* __restrict__ codes,
    const char* __restrict__ scales, const char* __restrict__ zeros, const u16* __restrict__ bias,
    u16* __restrict__ out, int n_out, int blocks, int steps, int group_steps) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const u32 full = base + MEMORY, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x, rank = blockIdx.y;
    const int first_row = blockIdx.z * ROWS, rows = min(ROWS, all_rows - first_row);
    const int first = steps * rank / SPLITS, count = steps * (rank + 1) / SPLITS - first;
    if (threadIdx.x == 0) init_stages(full, empty, STAGES, 1, CONSUMERS / 32);
    __syncthreads();
    const int g = lane / 4;
    if (warp >= CONSUMERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int mover = warp - CONSUMERS / 32, mine = lane % WN, half = blocks / 2;
        int block;
        if (GATED) block = mine < OWN ? min(tile * OWN + mine, half - 1) : half + min(tile * OWN + mine - OWN, half - 1);
        else block = min(tile * WN + mine, blocks - 1);
        const char* my_codes = codes + ((u64)block * steps + first) * 4096;
        const char* my_scales = (lane < 2 * WN ? scales : zeros) + (u64)block * (group_steps ? steps / group_steps : 1) * 128;
        auto weights = [&](int s) {
            u32 at = base + s % STAGES * STAGE + X, barrier = full + 8 * (s % STAGES);
            if (lane == 0) expect(barrier, CODES + SCALES + X);
            __syncwarp();
            if (lane < WN) copy(at + 4096 * mine, my_codes + (u64)s * 4096, 4096, barrier);
            else if (lane < (2 + ZEROS) * WN)
                copy(at + CODES + 128 * (lane - WN), my_scales + (group_steps ? (first + s) / group_steps : 0) * 128, 128, barrier);
        };
        auto inputs = [&](int s) {
            const u32 at = base + s % STAGES * STAGE, barrier = full + 8 * (s % STAGES);
            if (lane < 2)
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                        at + lane * (ROWS * 128)),
                    "l"(&x), "r"((first + s) * 128 + lane * 64), "r"(first_row), "r"(barrier)
                    : "memory");
        };
        if (mover == 0) {
            for (int s = 0; s < min(STAGES, count); s++) weights(s);
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int s = 0; s < min(STAGES, count); s++) inputs(s);
            for (int s = STAGES; s < count; s++) {
                wait(empty + 8 * (s % STAGES), (s / STAGES + 1) & 1);
                weights(s);
                inputs(s);
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = warp / 4, i = warp % 4;
        float acc[JW][4 * RT];
#pragma unroll
        for (int j = 0; j < JW; j++)
#pragma unroll
            for (int r = 0; r < 4 * RT; r++) acc[j][r] = 0.f;
        // Codes and scales of a stage, and its first operands.
        u32 words[JW][8], s0[JW], s1[JW], z0[JW], z1[JW], a[2][JW][4];
        auto decode_step = [&](int k) {
#pragma unroll
            for (int j = 0; j < JW; j++) decode(a[k % 2][j], words[j][k], s0[j], s1[j], z0[j], z1[j]);
        };
        auto open = [&](int s) {
            const int slot = s % STAGES;
            const u32 weights = base + slot * STAGE + X;
            wait(full + 8 * slot, (s / STAGES) & 1);
#pragma unroll
            for (int j = 0; j < JW; j++) {
                u32 pair;
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(weights + CODES + 128 * (group * JW + j) + 16 * g + 4 * i));
                s0[j] = twice(pair, 0), s1[j] = twice(pair, 1), z0[j] = ZERO, z1[j] = ZERO;
#if ZEROS
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(weights + CODES + 128 * (WN + group * JW + j) + 16 * g + 4 * i));
                z0[j] = twice(pair, 0) | MINUS, z1[j] = twice(pair, 1) | MINUS;
#endif
                natural(words[j], load(weights + 4096 * (group * JW + j) + 512 * i + 16 * lane));
                natural(words[j] + 4, load(weights + 4096 * (group * JW + j) + 2048 + 512 * i + 16 * lane));
            }
            decode_step(0);
        };
        if (count > 0) open(0);
#pragma unroll 1
        for (int s = 0; s < count; s++) {
            const u64 b = descriptor(base + s % STAGES * STAGE);
#pragma unroll
            for (int k = 0; k < 8; k++) {
#pragma unroll
                for (int j = 0; j < JW; j++) {  // an operand that is written after the fence makes wgmma wait
                    u32(&now)[4] = a[k % 2][j];
                    asm volatile("" : "+r"(now[0]), "+r"(now[1]), "+r"(now[2]), "+r"(now[3])::"memory");
                }
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int j = 0; j < JW; j++) wgmma(acc[j], a[k % 2][j], b + (k / 4 * ROWS * 128 + k % 4 * 32) / 16);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (k < 7) decode_step(k + 1);
                else if (s + 1 < count) open(s + 1);
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane == 0) arrive(empty + 8 * (s % STAGES));
        }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
        for (int j = 0; j < JW; j++)
#pragma unroll
            for (int m = 0; m < RT; m++) {
                const float* v = acc[j] + 4 * m;
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                                 base + (((group * JW + j) * 4 + i) * RT + m) * 512 + lane * 16),
                             "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                             : "memory");
            }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    }
#if SPLITS > 1
    cluster_sync();
#endif
    if (warp < CONSUMERS / 32) {
        auto sum = [&](int cell) {
            float4 total = load_of(base + cell * 16, 0);
#pragma unroll
            for (int q = 1; q < SPLITS; q++) {
                float4 v = load_of(base + cell * 16, q);
                total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
            return total;
        };
        constexpr int OUT_CELLS = CELLS / WN * OWN * 32;
        const int end = OUT_CELLS * (rank + 1) / SPLITS;
        for (int cell = OUT_CELLS * rank / SPLITS + threadIdx.x; cell < end; cell += CONSUMERS) {
            const int where = cell / 32, m = where % RT * 8 + 2 * (cell % 4);
            const int n = (tile * OWN + where / (4 * RT)) * 64 + where / RT % 4 * 16 + cell % 32 / 4;
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
                const int row = m + r % 2, column = n + r / 2 * 8;
                if (row < rows && column < n_out) {
                    float total = v[r];
                    if (bias) total += number(bias[column], 0);
                    out[(u64)(first_row + row) * n_out + column] = rounded(total);
                }
            }
        }
    }
#if SPLITS > 1
    cluster_sync();
#endif
}

// silu(x G^T) * (x U^T) for up to 256 rows and 16-bit weights. `gated_rows_cuda` compiles it, and generates the device
// function `wgmma`.
//
// Macros: WIDTH: rows of W per tile, half of them of G and half of U, a multiple of 16. STAGES: pipeline stages of 64
// inputs. HALF: float16, else bfloat16. SHARED_BYTES.
//
// x is the tensor core's first operand, so tiles may have any width: `gated_width` in tiles.py fills waves. Groups of 8
// rows of G and U alternate in shared memory, so a thread has gate and up projections of the same outputs. Two programs
// of a cluster compute different outputs; each copies half of x's rows to both, because L2 bandwidth is the limit. One
// thread copies; copies for the next tile begin before this tile's results are stored.

constexpr int X = 256 * 128, STAGE = X + WIDTH * 128, BARRIERS = STAGES * STAGE, GROUPS = WIDTH / 16;
static_assert(SHARED_BYTES >= BARRIERS + 16 * STAGES, "tiles.py");
constexpr int CONSUMERS = 256, MOVERS = 128;

extern "C" __global__ void __launch_bounds__(CONSUMERS + MOVERS, 1) gated_rows(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, u16* __restrict__ out, int rows, int n,
    int steps) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = (u32)__cvta_generic_to_shared(memory), full = base + BARRIERS, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % 2;
    const int tiles = (n + WIDTH / 2 - 1) / (WIDTH / 2), first_tile = blockIdx.x;
    // Both programs of a cluster compute equally many tiles; a tile after the last is zero, and not stored.
    const int end_tile = (tiles + 1) / 2 * 2;
    if (threadIdx.x == 0) init_stages(full, empty, STAGES, 1, 2 * CONSUMERS / 32);
    cluster_sync();
    if (warp >= CONSUMERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS) {
            auto weights = [&](int tile, int s, int slot) {
                expect(full + 8 * slot, STAGE);
                asm volatile(
                    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                    "[%1, {%2, %3, %3, %4}], [%5];" ::"r"(base + slot * STAGE + X),
                    "l"(&w), "r"(s * 64), "r"(0), "r"(tile * GROUPS), "r"(full + 8 * slot)
                    : "memory");
            };
            auto inputs = [&](int s, int slot) {
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                    ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(base + slot * STAGE + rank * (X / 2)),
                    "l"(&x), "r"(s * 64), "r"(rank * 128), "r"(full + 8 * slot), "h"((u16)3)
                    : "memory");
            };
            const int ahead = min(STAGES, steps);
            for (int s = 0; s < ahead; s++) weights(first_tile, s, s);
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int s = 0; s < ahead; s++) inputs(s, s);
            int slot = 0, phase = 1;
            for (int tile = first_tile; tile < end_tile; tile += gridDim.x)
                for (int s = 0; s < steps; s++) {
                    if (tile != first_tile || s >= ahead) {
                        wait(empty + 8 * slot, phase);
                        weights(tile, s, slot);
                        inputs(s, slot);
                    }
                    if (++slot == STAGES) slot = 0, phase ^= 1;
                }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int first_row = warp / 4 * 128;
        int slot = 0, phase = 0;
        for (int tile = first_tile; tile < end_tile; tile += gridDim.x) {
            float low[WIDTH / 2], high[WIDTH / 2];  // 64 rows each
#pragma unroll
            for (int r = 0; r < WIDTH / 2; r++) low[r] = high[r] = 0.f;
            int before = 0;
#pragma unroll 1
            for (int s = 0; s < steps; s++) {
                wait(full + 8 * slot, phase);
                const u64 a = descriptor(base + slot * STAGE + first_row * 128), b = descriptor(base + slot * STAGE + X);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    wgmma(low, a + 2 * k, b + 2 * k);
                    wgmma(high, a + 2 * k + 64 * 128 / 16, b + 2 * k);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (s > 0 && lane < 2) arrive_at(empty + 8 * before, lane);
                before = slot;
                if (++slot == STAGES) slot = 0, phase ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int r = 0; r < WIDTH / 2; r++)  // a conversion moved before the wait would make each wgmma wait
                asm volatile("" : "+f"(low[r]), "+f"(high[r]));
            if (lane < 2) arrive_at(empty + 8 * before, lane);
            // Two lanes exchange outputs of two groups, so that each stores four adjacent ones.
            auto store = [&](const float(&acc)[WIDTH / 2], int row) {
                const int t = lane % 4, odd = t % 2, column = tile * (WIDTH / 2);
#pragma unroll
                for (int h = 0; h < 2; h++, row += 8) {
                    u16* to = out + (u64)row * n + column;
                    auto pair = [&](int j) {
                        const float* v = acc + 8 * j + 2 * h;
                        return gated_pair(pair_of(v[0], v[1]), pair_of(v[4], v[5]));
                    };
#pragma unroll
                    for (int j = 0; j + 1 < GROUPS; j += 2) {
                        const u32 first = pair(j), second = pair(j + 1);
                        const u32 other = __shfl_xor_sync(~0u, odd ? first : second, 1);
                        const int at = 8 * (j + odd) + 4 * (t / 2);
                        if (row < rows && column + at < n)
                            asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to + at), "r"(odd ? other : first),
                                         "r"(odd ? second : other)
                                         : "memory");
                    }
                    if (GROUPS % 2) {
                        const u32 last = pair(GROUPS - 1);
                        const int at = 8 * (GROUPS - 1) + 2 * t;
                        if (row < rows && column + at < n)
                            asm volatile("st.global.u32 [%0], %1;" ::"l"(to + at), "r"(last) : "memory");
                    }
                }
            };
            const int row = first_row + warp % 4 * 16 + lane / 4;
            store(low, row);
            store(high, row + 64);
        }
    }
    cluster_sync();  // neither ends while the other one copies to it
}

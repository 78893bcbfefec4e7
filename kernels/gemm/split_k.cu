// y = x W^T + b for up to 256 rows and 16-bit weights. `split_k_cuda` compiles it, and generates the device function
// `wgmma`.
//
// Macros: WIDTH: outputs of a tile, a multiple of 16. STAGES: pipeline stages of 64 inputs. HALF: float16, else
// bfloat16. SHARED_BYTES.
//
// The two programs of a cluster compute the same outputs of 128 rows each, and each copies half of W's rows to both.
// Two clusters share a tile, each with half of the inputs: the first stores its sums in `part`, the second adds its own
// and stores results. It waits only for a cluster with a lower index, which has started earlier. One thread copies; it
// copies the first stages of W before the PDL wait.

constexpr int X = 128 * 128, STAGE = X + WIDTH * 128, BARRIERS = STAGES * STAGE, GROUPS = WIDTH / 8;
static_assert(WIDTH % 16 == 0 && SHARED_BYTES >= BARRIERS + 16 * STAGES, "tiles.py");
constexpr int CONSUMERS = 256, MOVERS = 128;

extern "C" __global__ void __launch_bounds__(CONSUMERS + MOVERS, 1) split_k(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* __restrict__ bias,
    u16* __restrict__ out, float* __restrict__ part, u32* __restrict__ flags, int rows, int n, int all_steps) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = (u32)__cvta_generic_to_shared(memory), full = base + BARRIERS, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % 2;
    const int tiles = gridDim.x / 4, last = blockIdx.x / 2 >= tiles, tile = blockIdx.x / 2 - last * tiles;
    const int given = all_steps / 2, first = last * given, steps = last ? all_steps - given : given;
    if (threadIdx.x == 0) init_stages(full, empty, STAGES, 1, 2 * CONSUMERS / 32);
    cluster_sync();
    if (warp >= CONSUMERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) {
            auto weights = [&](int s, int slot) {
                expect(full + 8 * slot, STAGE);
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                    ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                        base + slot * STAGE + X + rank * (WIDTH * 64)),
                    "l"(&w), "r"((first + s) * 64), "r"(tile * WIDTH + rank * (WIDTH / 2)), "r"(full + 8 * slot),
                    "h"((u16)3)
                    : "memory");
            };
            auto inputs = [&](int s, int slot) {
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                    "[%1, {%2, %3}], [%4];" ::"r"(base + slot * STAGE),
                    "l"(&x), "r"((first + s) * 64), "r"(rank * 128), "r"(full + 8 * slot)
                    : "memory");
            };
            const int ahead = min(STAGES, steps);
            for (int s = 0; s < ahead; s++) weights(s, s);
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int s = 0; s < ahead; s++) inputs(s, s);
            int slot = ahead % STAGES, phase = 0;
            for (int s = ahead; s < steps; s++) {
                wait(empty + 8 * slot, phase);
                weights(s, slot);
                inputs(s, slot);
                if (++slot == STAGES) slot = 0, phase ^= 1;
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float acc[WIDTH / 2];
#pragma unroll
        for (int r = 0; r < WIDTH / 2; r++) acc[r] = 0.f;
        int slot = 0, phase = 0, before = 0;
#pragma unroll 1
        for (int s = 0; s < steps; s++) {
            wait(full + 8 * slot, phase);
            const u64 a = descriptor(base + slot * STAGE + warp / 4 * (64 * 128)), b = descriptor(base + slot * STAGE + X);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma(acc, a + 2 * k, b + 2 * k);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (s > 0 && lane < 2) arrive_at(empty + 8 * before, lane);
            before = slot;
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int r = 0; r < WIDTH / 2; r++)  // a use moved before the wait would make each wgmma wait
            asm volatile("" : "+f"(acc[r]));
        // A warp adds what the same warp of the other cluster has stored.
        const int program = tile * 2 + rank;
        float* sums = part + ((u64)program * GROUPS * CONSUMERS + threadIdx.x) * 4;
        u32* flag = flags + program * (CONSUMERS / 32) + warp;
        if (!last) {
#pragma unroll
            for (int j = 0; j < GROUPS; j++)
                store_sums(sums + j * CONSUMERS * 4, acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
            __syncwarp();
            if (lane == 0)
                asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
        } else {
            if (lane == 0) {
                u32 stored;
                do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(stored) : "l"(flag) : "memory");
                while (!stored);
                *flag = 0;
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < GROUPS; j++) {
                const float4 v = load_sums(sums + j * CONSUMERS * 4);
                acc[4 * j] += v.x, acc[4 * j + 1] += v.y, acc[4 * j + 2] += v.z, acc[4 * j + 3] += v.w;
            }
            // Two lanes exchange outputs of two groups of 8, so that each stores four adjacent ones.
            const int t = lane % 4, odd = t % 2, column = tile * WIDTH;
            int row = rank * 128 + warp * 16 + lane / 4;
#pragma unroll
            for (int h = 0; h < 2; h++, row += 8) {
                u16* to = out + (u64)row * n + column;
                auto pair = [&](int j) {
                    float low = acc[4 * j + 2 * h], high = acc[4 * j + 2 * h + 1];
                    const int at = column + 8 * j + 2 * t;
                    if (bias && at < n) {
                        const u32 added = *(const u32*)(bias + at);
                        low += number(added, 0), high += number(added, 1);
                    }
                    return pair_of(low, high);
                };
#pragma unroll
                for (int j = 0; j < GROUPS; j += 2) {
                    const u32 one = pair(j), two = pair(j + 1);
                    const u32 other = __shfl_xor_sync(~0u, odd ? one : two, 1);
                    const int at = 8 * (j + odd) + 4 * (t / 2);
                    if (row < rows && column + at < n)
                        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to + at), "r"(odd ? other : one),
                                     "r"(odd ? two : other)
                                     : "memory");
                }
            }
        }
    }
    cluster_sync();  // neither ends while the other one copies to it
}

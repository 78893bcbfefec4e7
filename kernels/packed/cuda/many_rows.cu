// y = x W^T, or silu(x G^T) * (x U^T), for more than 32 rows and int4 weights. `kernels_cuda` compiles it, and
// generates the device function `wgmma`.
//
// Macros: `ManyRowsTiles` in tiles.py. ROWS: block_m. GATED: the first warp group computes gate, the second up
// projections. HALF: float16, else bfloat16. ZEROS: weights have zeros.
//
// Each program computes tiles of 128 outputs by ROWS rows, one after another. Two programs of a cluster compute
// different outputs of the same rows; each copies half of the rows' inputs to both, because L2 bandwidth is the limit.
// One warp copies; copies for the next tile begin before this tile's results are stored.
//
// If the tiles do not fill all clusters equally (`rest`), the first ones are divided by inputs (stream-K): each cluster
// gets the same number of consecutive stages, from one to three tiles. It begins with its last tile, whose other inputs
// may belong to a later cluster, stores that tile's sums in `part` and sets its flags. The cluster with a tile's last
// inputs adds the stored sums of earlier clusters, and resets their flags. A cluster waits only for earlier ones, and
// only for sums that they compute first. Then follow the other tiles; all clusters read the same inputs at the same
// time, so they find rows in L2.

constexpr int X = ROWS * 256, CODES = 8192, STAGE = X + CODES, SCALES = 256 * (1 + ZEROS);
constexpr int SCALE_RING = STAGES * STAGE, STAGING = SCALE_RING + STAGES * SCALES, BARRIERS = STAGING + 8192;
static_assert(SHARED_BYTES >= BARRIERS + 16 * STAGES, "tiles.py");

extern "C" __global__ void __launch_bounds__(CONSUMERS + MOVERS, 1) many_rows(
    const __grid_constant__ TensorMap x, int all_rows, const char* __restrict__ codes,
    const char* __restrict__ scales, const char* __restrict__ zeros, const u16* __restrict__ bias,
    u16* __restrict__ out, int n_out, int blocks, int steps, int group_steps, float* __restrict__ part,
    u32* __restrict__ flags) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const u32 full = base + BARRIERS, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % 2;
    const int row_tiles = (all_rows + ROWS - 1) / ROWS, pairs = ((GATED ? blocks / 2 : (blocks + 1) / 2) + 1) / 2;
    const int tiles = row_tiles * pairs, clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
    // The first `shared` tiles are divided by stages: this cluster computes stages `low` to `high` of them.
    const int rest = tiles % clusters, shared = rest && tiles > clusters ? rest + clusters : rest;
    const int share = (shared * steps + clusters - 1) / clusters;
    const int low = min(cluster * share, shared * steps), high = min(low + share, shared * steps);
    // Tiles in the order in which this cluster computes them, and which stages of them.
    const int first_tile = low < high ? (high - 1) / steps : shared + cluster;
    auto next_tile = [&](int index) {
        if (index >= shared) return index + clusters;
        return index > low / steps ? index - 1 : shared + cluster;
    };
    auto first_stage = [&](int index) { return index < shared ? max(low - index * steps, 0) : 0; };
    auto end_stage = [&](int index) { return index < shared ? min(high - index * steps, steps) : steps; };
    // The outputs and first row of a tile; rows are the inner dimension.
    auto place = [&](int index, int& output_tile, int& first_row) {
        int pair;
        tile_of(index, pairs, row_tiles, pair, first_row);
        output_tile = pair * 2 + rank;
    };
    if (threadIdx.x == 0) init_stages(full, empty, STAGES, 1, 2 * CONSUMERS / 32);
    cluster_sync();
    if (warp >= CONSUMERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == CONSUMERS / 32) {
            int output_tile, first_row;
            const char *my_codes = 0, *my_scales = 0;
            auto open = [&](int index) {
                place(index, output_tile, first_row);
                const int mine = lane % 2, half = blocks / 2;
                int block;
                if (GATED) block = mine * half + min(output_tile, half - 1);
                else block = min(output_tile * 2 + mine, blocks - 1);
                my_codes = codes + (u64)block * steps * 4096;
                my_scales = (lane < 4 ? scales : zeros) + (u64)block * (group_steps ? steps / group_steps : 1) * 128;
            };
            auto weights = [&](int s, int slot) {
                const u32 barrier = full + 8 * slot;
                if (lane == 0) expect(barrier, CODES + SCALES + X);
                __syncwarp();
                if (lane < 2) copy(base + slot * STAGE + X + 4096 * lane, my_codes + (u64)s * 4096, 4096, barrier);
                else if (lane < 4 + 2 * ZEROS)
                    copy(
                        base + SCALE_RING + slot * SCALES + 128 * (lane - 2),
                        my_scales + (group_steps ? s / group_steps : 0) * 128, 128, barrier);
            };
            auto inputs = [&](int s, int slot) {
                if (lane == 0)
                    asm volatile(
                        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                            base + slot * STAGE + rank * (ROWS * 128)),
                        "l"(&x), "r"(s * 128 + rank * 64), "r"(first_row), "r"(full + 8 * slot), "h"((u16)3)
                        : "memory");
            };
            int index = first_tile, turn = 0;
            const int ahead = index < tiles ? min(STAGES, end_stage(index) - first_stage(index)) : 0;
            if (ahead) open(index);
            const int start = first_stage(index);
            for (int s = 0; s < ahead; s++) weights(start + s, s);
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int s = 0; s < ahead; s++) inputs(start + s, s);
            for (; index < tiles; index = next_tile(index)) {
                open(index);
                const int end = end_stage(index);
                for (int s = first_stage(index); s < end; s++, turn++) {
                    if (turn < ahead) continue;
                    const int slot = turn % STAGES;
                    wait(empty + 8 * slot, (turn / STAGES + 1) & 1);
                    weights(s, slot);
                    inputs(s, slot);
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int g = lane / 4, group = warp / 4, i = warp % 4;
        auto release = [&](int turn) {
            if (lane < 2) arrive_at(empty + 8 * (turn % STAGES), lane);
        };
        int turn = 0;
        for (int index = first_tile; index < tiles; index = next_tile(index)) {
            const int start = first_stage(index), end = end_stage(index);
            int output_tile, first_row;
            place(index, output_tile, first_row);
            float acc[4 * RT];
#pragma unroll
            for (int r = 0; r < 4 * RT; r++) acc[r] = 0.f;
            // Codes and scales of the next stage, and its first operand.
            u32 words[8], s0, s1, z0 = ZERO, z1 = ZERO, a[2][4];
            auto open = [&](int turn) {
                const int slot = turn % STAGES;
                const u32 at = base + slot * STAGE + X + 4096 * group + 512 * i + 16 * lane;
                const u32 ring = base + SCALE_RING + slot * SCALES + 128 * group + 16 * g + 4 * i;
                wait(full + 8 * slot, (turn / STAGES) & 1);
                u32 pair;
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(ring));
                s0 = twice(pair, 0), s1 = twice(pair, 1);
#if ZEROS
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(ring + 256));
                z0 = twice(pair, 0) | MINUS, z1 = twice(pair, 1) | MINUS;
#endif
                natural(words, load(at));
                natural(words + 4, load(at + 2048));
                decode(a[0], words[0], s0, s1, z0, z1);
            };
            open(turn);
#pragma unroll 1
            for (int s = start; s < end; s++, turn++) {
                const u64 b = descriptor(base + turn % STAGES * STAGE);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    u32(&now)[4] = a[k % 2];  // an operand that is written after the fence makes wgmma wait
                    asm volatile("wgmma.fence.sync.aligned;"
                                 : "+r"(now[0]), "+r"(now[1]), "+r"(now[2]), "+r"(now[3])::"memory");
                    wgmma(acc, now, b + (k / 4 * ROWS * 128 + k % 4 * 32) / 16);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (k < 7) decode(a[(k + 1) % 2], words[k + 1], s0, s1, z0, z1);
                    else if (s + 1 < end) open(turn + 1);
                }
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                release(turn);
            }
            auto sums_of = [&](int program) { return part + ((u64)program * RT * CONSUMERS + threadIdx.x) * 4; };
            if (end < steps) {
                float* to = sums_of(blockIdx.x);
#pragma unroll
                for (int r = 0; r < RT; r++)
                    store_sums(to + r * CONSUMERS * 4, acc[4 * r], acc[4 * r + 1], acc[4 * r + 2], acc[4 * r + 3]);
                __syncwarp();
                if (lane == 0)
                    asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flags + blockIdx.x * 8 + warp)
                                 : "memory");
                continue;
            }
            for (int other = start ? index * steps / share : cluster; other < cluster; other++) {
                u32* flag = flags + (other * 2 + rank) * 8 + warp;
                if (lane == 0) {
                    u32 stored;
                    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(stored) : "l"(flag) : "memory");
                    while (!stored);
                    *flag = 0;
                }
                __syncwarp();
                const float* from = sums_of(other * 2 + rank);
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    const float4 v = load_sums(from + r * CONSUMERS * 4);
                    acc[4 * r] += v.x, acc[4 * r + 1] += v.y, acc[4 * r + 2] += v.z, acc[4 * r + 3] += v.w;
                }
            }

            const int column = (output_tile * (GATED ? 1 : 2) + (GATED ? 0 : group)) * 64 + 16 * i;
            const int rows = min(ROWS, all_rows - first_row);
            store_sums_of<gated_pair>(Target{out, bias, base + STAGING, n_out, column, first_row, rows}, acc);
        }
    }
    cluster_sync();
}

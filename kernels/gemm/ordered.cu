// y = x W^T + b, or silu(x G^T) * (x U^T), for many rows and 16-bit weights, with sums added in the order of
// `sum_order` in tiles.py. `ordered_cuda` compiles it, and generates the device function `wgmma`.
//
// Macros: ROWS: rows of a tile, a multiple of 32. STAGES: pipeline stages of 64 inputs. GATED: the first warp group
// computes gate, the second up projections. HALF: float16, else bfloat16. SHARED_BYTES.
//
// W's tile is the tensor core's first operand, as in Triton's kernels for few rows. A program computes tiles of 128
// outputs by ROWS rows, one after another. Two programs of a cluster compute different outputs of the same rows; each
// copies half of the rows to both, because L2 bandwidth is the limit. One thread copies; copies for the next tile begin
// before this tile's results are stored. Each slice of K is summed from zero; the sums of earlier slices wait in
// `part`, from where the same thread reads them.

constexpr int X = ROWS * 128, STAGE = X + 128 * 128;
constexpr int STAGING = STAGES * STAGE, BARRIERS = STAGING + 8192;
static_assert(ROWS % 32 == 0 && SHARED_BYTES >= BARRIERS + 16 * STAGES, "tiles.py");

// The operations of Triton's kernels: `__expf` and `/` would round differently.
__device__ __forceinline__ float ordered_silu(float gate) {
    float v;
    asm("{\n.reg .f32 t;\nmul.f32 t, %1, 0fBFB8AA3B;\nex2.approx.f32 t, t;\nadd.f32 t, t, 0f3F800000;\n"
        "div.full.f32 %0, %1, t;\n}"
        : "=f"(v)
        : "f"(gate));
    return v;
}
__device__ __forceinline__ u32 ordered_gated(u32 gates, u32 ups) {
    float v[2];
#pragma unroll
    for (int p = 0; p < 2; p++) v[p] = nearest(ordered_silu(number(gates, p))) * number(ups, p);
    return pair_of(v[0], v[1]);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + MOVERS, 1) ordered(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* __restrict__ bias,
    u16* __restrict__ out, float* part, int all_rows, int n_out, int slices, int steps, int last) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const u32 full = base + BARRIERS, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % 2;
    constexpr int OUTPUTS = GATED ? 64 : 128;
    const int row_tiles = (all_rows + ROWS - 1) / ROWS, pairs = (n_out + 2 * OUTPUTS - 1) / (2 * OUTPUTS);
    const int tiles = row_tiles * pairs, clusters = gridDim.x / 2, first_tile = blockIdx.x / 2;
    // The first output and first row of a tile; rows are the inner dimension.
    auto place = [&](int index, int& first_output, int& first_row) {
        int pair;
        tile_of(index, pairs, row_tiles, pair, first_row);
        first_output = (pair * 2 + rank) * OUTPUTS;
    };
    if (threadIdx.x == 0) init_stages(full, empty, STAGES, 1, 2 * CONSUMERS / 32);
    cluster_sync();
    if (warp >= CONSUMERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) {
            auto rows_of_w = [&](int row, int column, u32 to, u32 barrier) {
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                    "[%1, {%2, %3}], [%4];" ::"r"(to),
                    "l"(&w), "r"(column), "r"(row), "r"(barrier)
                    : "memory");
            };
            auto weights = [&](int first_output, int column, int slot) {
                const u32 barrier = full + 8 * slot, to = base + slot * STAGE + X;
                expect(barrier, STAGE);
                rows_of_w(first_output, column, to, barrier);
                rows_of_w(GATED ? n_out + first_output : first_output + 64, column, to + 64 * 128, barrier);
            };
            auto inputs = [&](int first_row, int column, int slot) {
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                    ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                        base + slot * STAGE + rank * (ROWS / 2 * 128)),
                    "l"(&x), "r"(column), "r"(first_row + rank * (ROWS / 2)), "r"(full + 8 * slot), "h"((u16)3)
                    : "memory");
            };
            auto column_of = [&](int slice, int step) {
                const int turned = step + last < steps ? step + last : step + last - steps;
                return (slice * steps + turned) * 64;
            };
            int first_output, first_row, turn = 0;
            const int ahead = first_tile < tiles ? min(STAGES, steps) : 0;
            place(first_tile, first_output, first_row);
            for (int s = 0; s < ahead; s++) weights(first_output, column_of(0, s), s);
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int s = 0; s < ahead; s++) inputs(first_row, column_of(0, s), s);
            for (int index = first_tile; index < tiles; index += clusters) {
                place(index, first_output, first_row);
                for (int slice = 0; slice < slices; slice++)
                    for (int s = 0; s < steps; s++, turn++) {
                        if (turn < ahead) continue;
                        const int slot = turn % STAGES;
                        if (turn >= STAGES) wait(empty + 8 * slot, (turn / STAGES + 1) & 1);
                        weights(first_output, column_of(slice, s), slot);
                        inputs(first_row, column_of(slice, s), slot);
                    }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int g = lane / 4, group = warp / 4, i = warp % 4;
        float* sums = part + ((u64)blockIdx.x * RT * CONSUMERS + threadIdx.x) * 4;
        int slot = 0, phase = 0;
        for (int index = first_tile; index < tiles; index += clusters) {
            int first_output, first_row;
            place(index, first_output, first_row);
            float acc[4 * RT];
#pragma unroll 1
            for (int slice = 0; slice < slices; slice++) {
#pragma unroll
                for (int r = 0; r < 4 * RT; r++) acc[r] = 0.f;
                int before = 0;
#pragma unroll 1
                for (int s = 0; s < steps; s++) {
                    wait(full + 8 * slot, phase);
                    const u64 b = descriptor(base + slot * STAGE);
                    const u64 a = descriptor(base + slot * STAGE + X + group * (64 * 128));
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
                for (int r = 0; r < 4 * RT; r++)  // a use moved before the wait would make each wgmma wait
                    asm volatile("" : "+f"(acc[r]));
                if (lane < 2) arrive_at(empty + 8 * before, lane);
                if (slice > 0) {
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        const float4 v = load_sums(sums + r * CONSUMERS * 4);
                        acc[4 * r] += v.x, acc[4 * r + 1] += v.y, acc[4 * r + 2] += v.z, acc[4 * r + 3] += v.w;
                    }
                }
                if (slice + 1 < slices) {
#pragma unroll
                    for (int r = 0; r < RT; r++)
                        store_sums(sums + r * CONSUMERS * 4, acc[4 * r], acc[4 * r + 1], acc[4 * r + 2], acc[4 * r + 3]);
                }
            }
            const int column = first_output + (GATED ? 0 : group * 64) + 16 * i;
            const int rows = min(ROWS, all_rows - first_row);
            store_sums_of<ordered_gated>(Target{out, bias, base + STAGING, n_out, column, first_row, rows}, acc);
        }
    }
    cluster_sync();  // neither ends while the other one copies to it
}

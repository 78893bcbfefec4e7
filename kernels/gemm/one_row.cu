// y = W x + b for one row x. `one_row_cuda` compiles it.
//
// Macros: K: inputs, a multiple of 32. ROWS: maximum rows of W per thread block. HALF: float16, else bfloat16.
//
// There is one thread block per multiprocessor, whose shared memory holds all of its rows of W. Bulk copies read them
// before the PDL wait, while earlier kernels run; only the product itself waits for x.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int WARPS = 16, PITCH = 2 * K + 16;  // PITCH: bytes per row; eight rows start in different banks
constexpr int TILES = (ROWS + 15) / 16, PIECES = K / 32, STEPS = (PIECES + WARPS - 1) / WARPS;
constexpr int X = ROWS * PITCH, BARRIERS = X + 2 * K;
static_assert(BARRIERS + 8 * TILES <= SHARED_BYTES && WARPS * TILES * 64 <= X, "one_row_cuda.py");
#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

__device__ __forceinline__ void matrices(u32 (&a)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float number(u16 v) {
    float f;
#if HALF
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
#else
    f = __uint_as_float((u32)v << 16);
#endif
    return f;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) one_row(
    const uint4* x, const char* __restrict__ w, const u16* __restrict__ bias, u16* __restrict__ out, int n) {
    extern __shared__ __align__(128) char memory[];
    const u32 base = (u32)__cvta_generic_to_shared(memory), full = base + BARRIERS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (int)((u64)n * blockIdx.x / gridDim.x);
    const int count = (int)((u64)n * (blockIdx.x + 1) / gridDim.x) - first;
    if (warp == 0) {
        if (lane < TILES) {
            const int rows = max(0, min(16, count - 16 * lane));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * lane) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * lane),
                         "r"(rows * 2 * K)
                         : "memory");
        }
        __syncwarp();
        for (int row = lane; row < count; row += 32)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    base + row * PITCH),
                "l"(w + (u64)(first + row) * (2 * K)), "n"(2 * K), "r"(full + row / 16 * 8)
                : "memory");
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    float offset = 0.f;
    if (bias && threadIdx.x < count) offset = number(bias[first + threadIdx.x]);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = threadIdx.x; i < K / 8; i += 32 * WARPS) {
        uint4 v;  // volatile: the compiler moves other reads before the wait
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(x + i));
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(base + X + 16 * i), "r"(v.x), "r"(v.y), "r"(v.z),
                     "r"(v.w)
                     : "memory");
    }
    __syncthreads();
    u32 inputs[STEPS][4];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (warp + s * WARPS < PIECES) matrices(inputs[s], base + X + (warp + s * WARPS) * 64 + lane / 8 * 16);
    float sum[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        sum[tile][0] = sum[tile][1] = sum[tile][2] = sum[tile][3] = 0.f;
        asm volatile(
            "{\n.reg .pred p;\nL:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@p bra D;\nbra L;\nD:\n}" ::"r"(full + 8 * tile)
            : "memory");
        // rows past the block's last repeat it, and are not stored
        const u32 from = base + max(0, min(16 * tile + lane % 16, count - 1)) * PITCH + lane / 16 * 16;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            if (warp + s * WARPS < PIECES) {
                u32 a[4];
                matrices(a, from + (warp + s * WARPS) * 64);
                mma(sum[tile], a, inputs[s][0], inputs[s][1]);
                matrices(a, from + (warp + s * WARPS) * 64 + 32);
                mma(sum[tile], a, inputs[s][2], inputs[s][3]);
            }
    }
    __syncthreads();  // sums reuse W's memory; all columns of a sum are equal
    if (lane % 4 == 0)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const u32 to = base + (warp * TILES * 16 + 16 * tile + lane / 4) * 4;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(sum[tile][0]) : "memory");
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + 32), "f"(sum[tile][2]) : "memory");
        }
    __syncthreads();
    if (threadIdx.x < count) {
        float total = 0.f;
#pragma unroll
        for (int k = 0; k < WARPS; k++) {
            float v;
            const u32 from = base + (k * TILES * 16 + threadIdx.x) * 4;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
            total += v;
        }
        u16 result;
        asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(result) : "f"(total + offset));
        out[first + threadIdx.x] = result;
    }
}

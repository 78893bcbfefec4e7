// Device functions of the kernels in CUDA C++ of `gemm` and `packed`: barriers, copies, shared memory, decoding.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ void init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Initialise two barriers per stage: `full` for `writers` arrivals, `empty` for `readers`. Called by one thread.
__device__ __forceinline__ void init_stages(u32 full, u32 empty, int stages, u32 writers, u32 readers) {
    for (int s = 0; s < stages; s++) {
        init(full + 8 * s, writers);
        init(empty + 8 * s, readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrive at the barrier of one of the cluster's programs.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [a];\n}" ::"r"(barrier), "r"(rank)
        : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred p;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier)
        : "memory");
}
// Copy 16 bytes by one thread. Small bulk copies are slower: an SM pipelines these without limit.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Arrive when this thread's copies have completed.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A tensor map of the driver.
struct alignas(64) TensorMap {
    u64 words[16];
};
// An operand of `wgmma`: rows of 64 inputs with 128-byte swizzle.
__device__ __forceinline__ u64 descriptor(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ uint4 load(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}
__device__ __forceinline__ float load_float(u32 from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store(u32 to, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void store4(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ float4 load_of(u32 from, u32 rank) {
    float4 v;
    asm volatile(
        "{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(from), "r"(rank)
        : "memory");
    return v;
}
// Partial sums in device memory, which other programs store.
__device__ __forceinline__ void store_sums(float* to, float a, float b, float c, float d) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ float4 load_sums(const float* from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool first) {
#if HALF
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
    if (first)
        asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
    else
        asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if HALF
#define PAIR "f16x2"
constexpr u32 MAGIC = 0x64006400, ZERO = 0xE408E408, MINUS = 0xE400E400, ONE = 0x3C003C00;
#else
#define PAIR "bf16x2"
constexpr u32 MAGIC = 0x43004300, ZERO = 0xC308C308, MINUS = 0xC300C300, ONE = 0x3F803F80;
#endif
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// Decode four registers of a first operand. s0, s1: scales of outputs g and g + 8, if ROUNDED. z0, z1: added to the
// numbers with MAGIC's exponent; minus the zero and MAGIC.
__device__ __forceinline__ void decode(u32 (&a)[4], u32 word, u32 s0, u32 s1, u32 z0, u32 z1) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        u32 v;
        asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(v) : "r"(word >> (4 * r)), "r"(MAGIC));
        v = fma2(v, ONE, r % 2 ? z1 : z0);
#if ROUNDED
        v = fma2(v, r % 2 ? s1 : s0, 0x80008000);
#endif
        a[r] = v;
    }
}
// Codes of 64 inputs in natural order, because the other operand has the rows' order: word k of n has inputs 16 k to
// 16 k + 15. q, from `load`, has the order of `weight.py`; the lanes of a quad exchange its words.
__device__ __forceinline__ void natural(u32* n, const uint4& q) {
    const int t = threadIdx.x % 4;
    const u32 bytes = t % 2 ? 0x3715 : 0x6240;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const u32 first = s ? q.z : q.x, second = s ? q.w : q.y;
        const u32 kept = t < 2 ? first : second, given = t < 2 ? second : first;
        const u32 beside = __shfl_xor_sync(~0u, kept, 1), across = __shfl_xor_sync(~0u, given, 2);
        const u32 diagonal = __shfl_xor_sync(~0u, given, 3);
        const u32 own = __byte_perm(kept, beside, bytes), other = __byte_perm(across, diagonal, bytes);
        n[2 * s] = t < 2 ? own : other;
        n[2 * s + 1] = t < 2 ? other : own;
    }
}
__device__ __forceinline__ u32 twice(u32 pair, int high) {
    u32 v;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(v) : "r"(pair), "r"(high ? 0x3232 : 0x1010));
    return v;
}
__device__ __forceinline__ float number(u32 pair, int high) {
    float v;
#if HALF
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, %2;\n}" : "=f"(v) : "r"(pair), "h"((u16)(pair >> (16 * high))));
#else
    v = __uint_as_float(high ? pair & 0xFFFF0000 : pair << 16);
#endif
    return v;
}
__device__ __forceinline__ u16 rounded(float v) {
    u16 h;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
#endif
    return h;
}
__device__ __forceinline__ float nearest(float v) { return number(rounded(v), 0); }
__device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 pair;
    asm("cvt.rn." PAIR ".f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u32 gated_pair(u32 gates, u32 ups) {
    float v[2];
#pragma unroll
    for (int p = 0; p < 2; p++) {
        float gate = number(gates, p);
        v[p] = nearest(gate / (1.f + __expf(-gate))) * number(ups, p);
    }
    return pair_of(v[0], v[1]);
}


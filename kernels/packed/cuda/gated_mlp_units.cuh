// Sizes and device functions of `gated_mlp.cu`.

constexpr int WARPS = SIZE / 256, THREADS = 32 * WARPS, SLICES = WIDTH / 16, QUADS = WIDTH / 256;
constexpr int COLUMNS = SIZE / 16 / WARPS;  // groups of the down projection's slices, one for each warp
constexpr int OWN = (QUADS + RANGES - 1) / RANGES;  // items of the down projection per warp
constexpr int ITEM = 2048 + 64;  // bytes: codes, scales
constexpr int PITCH = ROWS > 1 ? 36 : 32, INNER_PITCH = ROWS > 1 ? 576 : 512;  // words, bytes; avoid bank conflicts
constexpr int PARTS = WARPS * STAGES * ITEM, INNER = PARTS + 2 * WARPS * ROWS * PITCH * 4;
constexpr int MINUS_SUMS = INNER + OWN * ROWS * INNER_PITCH, END = MINUS_SUMS + 2 * OWN * ROWS * 4;
static_assert(SIZE % 256 == 0 && WIDTH % 256 == 0 && RANGES <= 8 && RANGES <= WARPS, "gated_mlp_tiles.py");
static_assert(END <= SHARED_BYTES && (ROWS == 1 || ROWS == 8), "gated_mlp_tiles.py");
constexpr float OFFSET = -136.f;  // codes are read as 128 + code, for code - 8

__device__ __forceinline__ u32 shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return (u32)__cvta_generic_to_shared(memory);
}
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void grid_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }
__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for all but the last STAGES - 1 groups of copies.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory"); }
__device__ __forceinline__ u32 load_word(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ float real(u32 v) { return __uint_as_float(v); }
__device__ __forceinline__ u32 bits(float v) { return __float_as_uint(v); }
// Volatile: the compiler moves other reads before the wait.
__device__ __forceinline__ uint4 load_global(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
template <typename T>
__device__ __forceinline__ T across(T v, int far) {
    return __shfl_xor_sync(~0u, v, far);
}
__device__ __forceinline__ u32 of_lane(u32 v, int lane) { return __shfl_sync(~0u, v, lane); }
__device__ __forceinline__ float pair_sum(u32 pair) { return number(pair, 0) + number(pair, 1); }
// Words of mail: a pair of numbers and a sum, never zero.
__device__ __forceinline__ u32 sent(u32 pair) { return pair ? pair : 0x80008000; }
__device__ __forceinline__ u32 sent_sum(float v) { return bits(v) ? bits(v) : 0x80000000; }
__device__ __forceinline__ void send1(u32* to, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void send4(u32* to, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// Wait for four words of mail, and reset them to zero.
__device__ __forceinline__ uint4 received(u32* from) {
    uint4 v;
    do
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from)
                     : "memory");
    while (!(v.x && v.y && v.z && v.w));
    send4(from, uint4{0, 0, 0, 0});
    return v;
}
__device__ __forceinline__ void plain(u32 (&a)[4], u32 word) {
#pragma unroll
    for (int r = 0; r < 4; r++)
        asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(a[r]) : "r"(word >> (4 * r)), "r"(MAGIC));
}
// Add the products of 128 inputs, which share a scale. minus: OFFSET times their sum, for this lane's two rows.
__device__ __forceinline__ void add_group(
    float (&sum)[4], const uint4* codes, u32 scales, const uint4* b, const float (&minus)[2]) {
    float part[4] = {minus[0], minus[1], minus[0], minus[1]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 q = codes[i / 2];
        u32 low[4], high[4];
        plain(low, i % 2 ? q.z : q.x);
        plain(high, i % 2 ? q.w : q.y);
        mma(part, low, b[i].x, b[i].y, false);
        mma(part, high, b[i].z, b[i].w, false);
    }
    const float s0 = number(scales, 0), s1 = number(scales, 1);
    sum[0] = fmaf(part[0], s0, sum[0]), sum[2] = fmaf(part[2], s1, sum[2]);
    if (ROWS > 1) sum[1] = fmaf(part[1], s0, sum[1]), sum[3] = fmaf(part[3], s1, sum[3]);
}

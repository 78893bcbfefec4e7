// Units of `one_row_experts.cu`: their layout in shared memory, and their products.

constexpr int WARPS = 4 * RINGS, CONSUMERS = 32 * WARPS;
constexpr int GATE_STEPS = SIZE / 64 / UNIT, DOWN_STEPS = WIDTH / 64 / UNIT;  // units per tile, and for down per expert
constexpr int INNER_TILES = WIDTH / 64, OUT_TILES = SIZE / 64;
constexpr int CODES = 2048 * UNIT, SCALES = 256 * UNIT, BYTES = CODES + SCALES, INPUTS = 64 * UNIT;
constexpr int ROW = RINGS * DEPTH * BYTES, INNER = ROW + 2 * SIZE, SUMS = INNER + 2 * KEPT * INPUTS;
constexpr int BARRIERS = SUMS + TILES * RINGS * 256, END = BARRIERS + 16 * RINGS * DEPTH;
static_assert(SIZE / 8 <= CONSUMERS && END <= SHARED_BYTES && TILES >= 2 && KEPT <= RINGS * DEPTH, "gated_mlp_tiles.py");
constexpr int QUADS = (KEPT * INPUTS / 4 + CONSUMERS - 1) / CONSUMERS;  // fours of inner activations per thread

struct Span {
    int first, count;
    __device__ Span(int total, int block, int blocks) {
        first = total * block / blocks;
        count = total * (block + 1) / blocks - first;
    }
};
// The block that computes a unit.
__device__ __forceinline__ int owner(int unit, int total, int blocks) { return ((unit + 1) * blocks - 1) / total; }

__device__ __forceinline__ void decode_moved(u32 (&a)[4], u32 word) {
    a[0] = word & 0x81C081C0;
    a[1] = word << 3 & 0x81C081C0;
    a[2] = (word << 6 & 0x01C001C0) | (word << 1 & 0x80008000);
    a[3] = (word >> 3 & 0x01C001C0) | (word << 2 & 0x80008000);
}
// Add the products of one unit with 16 outputs. sum: of outputs g and g + 8. q: the codes.
__device__ __forceinline__ void add_unit(float (&sum)[2], const uint4 (&q)[UNIT], u32 scales, u32 inputs) {
#pragma unroll
    for (int c = 0; c < UNIT; c++) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const uint4 b = load(inputs + 128 * c + 64 * s);
            u32 pair, low[4], high[4];
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(scales + 128 * (2 * c + s)));
            decode_moved(low, s ? q[c].z : q[c].x);
            decode_moved(high, s ? q[c].w : q[c].y);
            float part[4];
            mma(part, low, b.x, b.y, true);
            mma(part, high, b.z, b.w, false);
            sum[0] = fmaf(part[0], number(pair, 0), sum[0]);
            sum[1] = fmaf(part[2], number(pair, 1), sum[1]);
        }
    }
}
__device__ __forceinline__ bool arrived(u32 barrier, u32 phase) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return done;
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
// Reads of what earlier kernels or other blocks wrote. Volatile: the compiler moves others before the waits.
template <typename T>
__device__ __forceinline__ T fresh(const T* from) {
    static_assert(sizeof(T) == 4, "a word");
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return *(T*)&v;
}
__device__ __forceinline__ float4 other(const float* from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
}
// Also orders the writes of threads that this one has synchronised with.
__device__ __forceinline__ int add_ticket(int* ticket) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
    return before;
}
__device__ __forceinline__ void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }
__device__ __forceinline__ float activated(float gate, float up, float alpha, float limit, float shift, float cubic) {
#if CLAMPED
    gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
#endif
#if CUBED
    const float inner = gate * (1.f + cubic * gate * gate);
#else
    const float inner = gate;
#endif
    return gate / (1.f + __expf(-alpha * inner)) * (up + shift);
}
// bfloat16 times 2^64, for codes that are 2^-126 times their number and scales that are 2^110 times theirs.
__device__ __forceinline__ u32 raised(u32 pair) { return fma2(pair, 0x5F805F80, 0x80008000); }
constexpr float RESTORE = 1.f / (1ull << 48);

// What `ordered.cu` and `aerie.kernels.packed.cuda`'s many_rows.cu share: tiles of outputs by ROWS rows, computed by two
// programs of a cluster, and how CONSUMERS threads store a tile's sums. Macros: theirs.

constexpr int RT = ROWS / 8, CONSUMERS = 256, MOVERS = 128;
constexpr int AT_ONCE = RT % 8 ? 2 : 4;  // tiles of 8 rows that a warp stores at once
constexpr int ROW_TILES_AT_ONCE = 8;  // their inputs stay in L2 while weights are read

// The pair of output tiles, and the first row, of tile `index`; rows are the inner dimension.
__device__ __forceinline__ void tile_of(int index, int pairs, int row_tiles, int& pair, int& first_row) {
    const int group = index / (ROW_TILES_AT_ONCE * pairs), inside = index - group * ROW_TILES_AT_ONCE * pairs;
    const int height = min(ROW_TILES_AT_ONCE, row_tiles - group * ROW_TILES_AT_ONCE);
    pair = inside / height;
    first_row = (group * ROW_TILES_AT_ONCE + inside % height) * ROWS;
}

// Where a warp stores its sums: 16 outputs from `column`, `rows` rows from first_row. `base` is the staging memory of all
// warps.
struct Target {
    u16* out;
    const u16* bias;
    u32 base;
    int n_out, column, first_row, rows;
};

// Store AT_ONCE tiles of 8 rows: pairs of rows of tile m + j / 2 at outputs g and g + 8.
__device__ __forceinline__ void store_tiles(const Target& at, const u32 (&v)[2 * AT_ONCE], int m) {
    const int lane = threadIdx.x % 32;
    const u32 staging = at.base + 1024 * (threadIdx.x / 32);
    const u32 to = staging + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int j = 0; j < AT_ONCE / 2; j++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + 512 * j),
                     "r"(v[4 * j]), "r"(v[4 * j + 1]), "r"(v[4 * j + 2]), "r"(v[4 * j + 3])
                     : "memory");
    __syncwarp();
#pragma unroll
    for (int j = 0; j < AT_ONCE / 2; j++) {
        const uint4 eight = load(staging + 512 * j + 16 * lane);
        const int row = m * 8 + 16 * j + lane / 2, first = at.column + lane % 2 * 8;
        u16* target = at.out + (u64)(at.first_row + row) * at.n_out + first;
        if (row >= at.rows) continue;
        if (at.n_out % 8 == 0 && first < at.n_out)
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(eight.x), "r"(eight.y),
                         "r"(eight.z), "r"(eight.w)
                         : "memory");
        else
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (first + e < at.n_out) {
                    u32 word = e < 2 ? eight.x : e < 4 ? eight.y : e < 6 ? eight.z : eight.w;
                    target[e] = (u16)(word >> (e % 2 * 16));
                }
    }
    __syncwarp();
}

// Store the sums of a tile. activated: silu(gate) * up of pairs of numbers.
template <u32 activated(u32, u32)>
__device__ __forceinline__ void store_sums_of(const Target& at, const float (&acc)[4 * RT]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4, g = lane / 4;
#if GATED
    // The first warp group multiplies the first half of the rows, the second the other half.
    const u32 staging = at.base + 1024 * warp, theirs = at.base + 1024 * (warp ^ 4);
#pragma unroll
    for (int m = 0; m < RT / 2; m += AT_ONCE) {
        u32 own[2 * AT_ONCE];
#pragma unroll
        for (int j = 0; j < 2 * AT_ONCE; j++) {
            const int first = 4 * (m + j / 2) + j % 2 * 2, second = first + 2 * RT;
            own[j] = group ? pair_of(acc[second], acc[second + 1]) : pair_of(acc[first], acc[first + 1]);
            const u32 given = group ? pair_of(acc[first], acc[first + 1]) : pair_of(acc[second], acc[second + 1]);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(staging + 128 * j + 4 * lane), "r"(given) : "memory");
        }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
        u32 v[2 * AT_ONCE];
#pragma unroll
        for (int j = 0; j < 2 * AT_ONCE; j++) {
            u32 other;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(other) : "r"(theirs + 128 * j + 4 * lane) : "memory");
            v[j] = group ? activated(other, own[j]) : activated(own[j], other);
        }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
        store_tiles(at, v, m + group * (RT / 2));
    }
#else
    float low = 0.f, high = 0.f;
    if (at.bias) {
        if (at.column + g < at.n_out) low = number(at.bias[at.column + g], 0);
        if (at.column + g + 8 < at.n_out) high = number(at.bias[at.column + g + 8], 0);
    }
#pragma unroll
    for (int m = 0; m < RT; m += AT_ONCE) {
        u32 v[2 * AT_ONCE];
#pragma unroll
        for (int j = 0; j < 2 * AT_ONCE; j++) {
            const int first = 4 * (m + j / 2) + j % 2 * 2;
            const float added = j % 2 ? high : low;
            v[j] = pair_of(acc[first] + added, acc[first + 1] + added);
        }
        store_tiles(at, v, m);
    }
#endif
}


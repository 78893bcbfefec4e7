// A gated MLP of up to ROWS rows with int4 weights, in one launch with one thread block per multiprocessor: (silu(x
// G^T) * (x U^T)) D^T. `gated_mlp_cuda` compiles it.
//
// Macros: `GatedMLPTiles` in gated_mlp_tiles.py. SIZE, WIDTH: numbers per row, inner activations. ROWS: 1 or 8. RANGES:
// blocks that share a sum of the down projection. STAGES: items per warp in shared memory.
//
// An item is 16 outputs by 256 inputs of a weight; a slice is the 16 outputs. Each warp fills a ring buffer of its
// items: a lane copies the codes that it multiplies. Copies of the down projection's items follow those of gate and up
// immediately. The warps of a block divide the inputs of a slice of gate and up. Slices go to blocks round-robin, so
// the inner activations for a block's first items of the down projection are ready when they are needed.
//
// Blocks exchange inner activations and sums through `mail`, whose words are zero before they are written and after
// they are read; a zero is sent as minus zero. There is one block per multiprocessor, so all blocks are resident and
// may wait for each other. Sums are added in order, so equal inputs give equal bits.

extern "C" __global__ void __launch_bounds__(THREADS, 1) gated_mlp(
    const u16* x, int rows, int row_stride, const char* gate_codes, const char* gate_scales, const char* down_codes,
    const char* down_scales, u16* out, u32* mail) {
    const u32 base = shared_memory();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int block = blockIdx.x, blocks = gridDim.x;
    const int rounds = (SLICES - block + blocks - 1) / blocks;
    const int range = block % RANGES, column = block / RANGES;  // of the down projection: inputs, outputs
    const int downs = column < COLUMNS && range < QUADS ? (QUADS - range + RANGES - 1) / RANGES : 0;
    const int total = 2 * rounds + downs, down_slice = column * WARPS + warp;
    const u32 ring = base + warp * (STAGES * ITEM);

    auto fetch = [&](int n, int slot) {
        if (n < total) {
            const bool inner = n < 2 * rounds;
            const int slice = inner ? block + n / 2 * blocks + n % 2 * SLICES : down_slice;
            const int quad = inner ? warp : range + (n - 2 * rounds) * RANGES;
            const int quads = inner ? SIZE / 256 : QUADS;
            const u64 tile = (u64)(slice / 4) * quads + quad;
            const u32 to = ring + slot * ITEM;
            const char* codes = (inner ? gate_codes : down_codes) + tile * 8192 + slice % 4 * 512 + lane * 16;
#pragma unroll
            for (int c = 0; c < 4; c++) copy16(to + 512 * c + lane * 16, codes + 2048 * c);
            const char* scales = (inner ? gate_scales : down_scales) + tile * 256 + t * 128 + g * 16 + slice % 4 * 4;
            if (t < 2) copy4(to + 2048 + t * 32 + g * 4, scales);
        }
        commit_copies();
    };
#pragma unroll 1
    for (int n = 0; n < STAGES; n++) fetch(n, n);
    grid_wait();

    int next = 0, slot = 0;
    uint4 codes[4];
    u32 scales[2];
    // Take the next item out of the ring, and begin to copy another one there.
    auto take = [&]() {
        copies_wait();
        warp_sync();
        const u32 from = ring + slot * ITEM;
#pragma unroll
        for (int c = 0; c < 4; c++) codes[c] = load(from + 512 * c + lane * 16);
        scales[0] = load_word(from + 2048 + g * 4), scales[1] = load_word(from + 2080 + g * 4);
        warp_sync();
        if (next == total - 1) grid_trigger();
        fetch(next + STAGES, slot);
        next++;
        if (++slot == STAGES) slot = 0;
    };
    {
        uint4 b[8];
        const u16* mine = x + (u64)(ROWS > 1 && g < rows ? g : 0) * row_stride + warp * 256 + 8 * t;
#pragma unroll
        for (int i = 0; i < 8; i++) b[i] = load_global(mine + 32 * i);
        float minus[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum[4] = {0.f, 0.f, 0.f, 0.f};
            const u32 ones[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                mma(sum, ones, b[4 * h + i].x, b[4 * h + i].y, false);
                mma(sum, ones, b[4 * h + i].z, b[4 * h + i].w, false);
            }
            minus[h][0] = OFFSET * sum[0], minus[h][1] = OFFSET * sum[1];
        }
#pragma unroll 1
        for (int s = 0; s < rounds; s++) {
            const u32 parts = base + PARTS + (s % 2) * (WARPS * ROWS * PITCH * 4);
#pragma unroll 1
            for (int up = 0; up < 2; up++) {
                float sum[4] = {0.f, 0.f, 0.f, 0.f};
                take();
#pragma unroll
                for (int h = 0; h < 2; h++) add_group(sum, &codes[2 * h], scales[h], &b[4 * h], minus[h]);
                const u32 to = parts + (warp * ROWS * PITCH + up * 16 + g) * 4;
                if (ROWS == 1) {
                    if (t == 0) store(to, sum[0]), store(to + 32, sum[2]);
                } else {
                    const u32 there = to + 2 * t * (PITCH * 4);
                    store(there, sum[0]), store(there + 32, sum[2]);
                    store(there + PITCH * 4, sum[1]), store(there + PITCH * 4 + 32, sum[3]);
                }
            }
            block_sync();
            // lane: gate, then up, of the slice's outputs
#pragma unroll 1
            for (int r = (warp + s) % WARPS; r < rows; r += WARPS) {
                float mine = 0.f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) mine += load_float(parts + ((w * ROWS + r) * PITCH + lane) * 4);
                const float other = across(mine, 16);
                const float gate = nearest(lane < 16 ? mine : other), up = nearest(lane < 16 ? other : mine);
                const u32 inner = rounded(nearest(gate / (1.f + __expf(-gate))) * up);
                const u32 beside = across(inner, 1);
                const u32 pair = sent(lane % 2 ? beside | inner << 16 : inner | beside << 16);
                uint4 v;
                const int first = lane % 2 * 8;
                v.x = of_lane(pair, first), v.y = of_lane(pair, first + 2);
                v.z = of_lane(pair, first + 4), v.w = of_lane(pair, first + 6);
                const int slice = block + s * blocks;
                send4(mail + (u64)(lane / 2 * ROWS + r) * (WIDTH / 2) + slice * 8 + lane % 2 * 4, v);
            }
        }
    }
    if (downs == 0) return;
    // Copy the inner activations of one item and row to shared memory, with the sum of each scale's inputs.
    auto receive = [&](int m, int r) {
        const int quad = range + m * RANGES;
        const uint4 v = received(mail + (u64)(column * ROWS + r) * (WIDTH / 2) + quad * 128 + lane * 4);
        store4(base + INNER + (m * ROWS + r) * INNER_PITCH + lane * 16, v);
        float sum = pair_sum(v.x) + pair_sum(v.y) + (pair_sum(v.z) + pair_sum(v.w));
#pragma unroll
        for (int far = 1; far < 16; far *= 2) sum += across(sum, far);
        if (lane % 16 == 0) store(base + MINUS_SUMS + ((m * 2 + lane / 16) * ROWS + r) * 4, OFFSET * sum);
    };
#pragma unroll 1
    for (int p = warp; p < (downs - 1) * rows; p += WARPS) receive(p / rows, p % rows);
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int m = 0; m < downs; m++) {
        if (m == max(0, downs - 2)) {
#pragma unroll 1
            for (int r = warp; r < rows; r += WARPS) receive(downs - 1, r);
            block_sync();
        } else if (m == 0) {
            block_sync();
        }
        take();
        const u32 inner = base + INNER + (m * ROWS + (ROWS > 1 ? g : 0)) * INNER_PITCH + 16 * t;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) b[i] = load(inner + 64 * (4 * h + i));
            float minus[2];
            const u32 from = base + MINUS_SUMS + ((m * 2 + h) * ROWS + (ROWS > 1 ? 2 * t : 0)) * 4;
            minus[0] = load_float(from), minus[1] = ROWS > 1 ? load_float(from + 4) : minus[0];
            add_group(sum, &codes[2 * h], scales[h], b, minus);
        }
    }
    // sums of ranges: of each slice, one block's warp adds them
    u32* const sums = mail + COLUMNS * ROWS * (WIDTH / 2) + (u64)down_slice * (ROWS * RANGES * 16);
    auto send = [&](int r, int k, float v) { send1(sums + (r * RANGES + range) * 16 + k, sent_sum(v)); };
    if (ROWS == 1) {
        if (t == 0) send(0, g, sum[0]), send(0, g + 8, sum[2]);
    } else {
        if (2 * t < rows) send(2 * t, g, sum[0]), send(2 * t, g + 8, sum[2]);
        if (2 * t + 1 < rows) send(2 * t + 1, g, sum[1]), send(2 * t + 1, g + 8, sum[3]);
    }
    if (warp % RANGES != range) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        uint4 v = {0, 0, 0, 0};
        if (lane < 4 * RANGES) v = received(sums + r * RANGES * 16 + lane * 4);
        float each[4] = {real(v.x), real(v.y), real(v.z), real(v.w)};
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int far = 4; far < 32; far *= 2) each[k] += across(each[k], far);
        if (lane < 4) {
            u32* const to = (u32*)(out + (u64)r * SIZE + down_slice * 16 + lane * 4);
            to[0] = rounded(each[0]) | (u32)rounded(each[1]) << 16;
            to[1] = rounded(each[2]) | (u32)rounded(each[3]) << 16;
        }
    }
}

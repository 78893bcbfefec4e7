// The experts of one row with MXFP4 weights, in one launch with one thread block per multiprocessor. `gated_mlp_cuda`
// compiles it.
//
// Macros: `OneRowTiles` in gated_mlp_tiles.py. SIZE, WIDTH: of a row and of an expert. UNIT: chunks of 64 inputs per
// unit. RINGS, DEPTH: ring buffers of units, and units in each. KEPT: maximum down units per block. TILES: pairs of
// gate and up tiles that a block computes parts of. SLOTS: experts per row. USED: maximum of them on this rank.
// CLAMPED, CUBED: variants of the activation.
//
// A unit is 64 outputs by 64 UNIT inputs. Blocks have equal numbers of adjacent units, so several blocks may share a
// tile of outputs. Four warps consume each ring of units. All down units of a block fit in its rings: their copies
// follow those of gate and up immediately, and run while blocks exchange inner activations. There is one block per
// multiprocessor, so all blocks are resident and may wait for each other. Sums of blocks are added in order, so equal
// inputs give equal bits.

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) one_row_experts(
    const u32* x, const int* used, const int* num_used, const int* chosen, const float* weight,
    const char* __restrict__ gate_codes, const char* __restrict__ gate_scales, const float* __restrict__ gate_bias,
    const char* __restrict__ down_codes, const char* __restrict__ down_scales, const float* __restrict__ down_bias,
    u16* __restrict__ out, float* part, int* tickets, float alpha, float limit, float shift, float cubic) {
    extern __shared__ __align__(128) char memory[];
    __shared__ int is_last[2], experts_used[USED];
    __shared__ float shares[USED];
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const u32 full = base + BARRIERS, empty = full + 8 * RINGS * DEPTH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x;
    if (threadIdx.x == 0) {
        for (int s = 0; s < RINGS * DEPTH; s++) init(full + 8 * s, 1), init(empty + 8 * s, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < TILES * RINGS * 64; i += CONSUMERS + 32) store(base + SUMS + 4 * i, 0.f);
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // all reads at once
    int expert[USED], mine_used = 0;
    float share_of = 0.f;
    uint4 row = {0, 0, 0, 0};
    if (warp == WARPS) {
#pragma unroll
        for (int s = 0; s < USED; s++) expert[s] = fresh(used + s);
    } else {
        if (threadIdx.x < SIZE / 8)
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(row.x), "=r"(row.y), "=r"(row.z), "=r"(row.w)
                         : "l"(x + 4 * threadIdx.x));
        if (threadIdx.x < USED) {
            int choice[SLOTS];
            float weights[SLOTS];
#pragma unroll
            for (int s = 0; s < SLOTS; s++) choice[s] = fresh(chosen + s), weights[s] = fresh(weight + s);
            mine_used = fresh(used + threadIdx.x);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) share_of += choice[s] == mine_used ? weights[s] : 0.f;
        }
    }
    const int experts = fresh(num_used);
    const Span gates(experts * INNER_TILES * GATE_STEPS, block, blocks);
    const Span downs(experts * OUT_TILES * DOWN_STEPS, block, blocks);
    const int down_tile_steps = max(1, experts * DOWN_STEPS);
    if (warp == WARPS) {
        if (lane > 0) return;
        auto expert_of = [&](int index) {
            int found = expert[0];
#pragma unroll
            for (int s = 1; s < USED; s++) found = index == s ? expert[s] : found;
            return (u64)found;
        };
        auto read = [&](int ring, int k, const char* codes, const char* scales, u64 unit) {
            const int slot = ring * DEPTH + k % DEPTH;
            const u32 at = base + slot * BYTES, barrier = full + 8 * slot;
            if (k >= DEPTH) wait(empty + 8 * slot, (k / DEPTH + 1) & 1);
            expect(barrier, BYTES);
            copy(at, codes + unit * CODES, CODES, barrier);
            copy(at + CODES, scales + unit * SCALES, SCALES, barrier);
        };
#pragma unroll 1
        for (int n = 0; n < gates.count; n++) {
            const int unit = gates.first + n, tile = unit / GATE_STEPS;
            const u64 row = expert_of(tile / INNER_TILES) * (2 * INNER_TILES) + tile % INNER_TILES;
            const u64 from = row * GATE_STEPS + unit % GATE_STEPS;
            constexpr int SETS = RINGS / 2;
            read(n % SETS * 2, n / SETS, gate_codes, gate_scales, from);
            read(n % SETS * 2 + 1, n / SETS, gate_codes, gate_scales, from + INNER_TILES * GATE_STEPS);
        }
#pragma unroll 1
        for (int n = 0; n < downs.count; n++) {
            const int unit = downs.first + n, tile = unit / down_tile_steps, rest = unit % down_tile_steps;
            const int ring = n % RINGS;
            const u64 row = expert_of(rest / DOWN_STEPS) * OUT_TILES + tile;
            const int before = (gates.count + RINGS / 2 - 1 - ring / 2) / (RINGS / 2);  // pairs in the ring
            read(ring, before + n / RINGS, down_codes, down_scales, row * DOWN_STEPS + rest % DOWN_STEPS);
        }
        return;
    }
    const int g = lane / 4, t = lane % 4;
    if (threadIdx.x < SIZE / 8)
        store4(base + ROW + 16 * threadIdx.x, uint4{raised(row.x), raised(row.y), raised(row.z), raised(row.w)});
    if (threadIdx.x < experts) experts_used[threadIdx.x] = mine_used, shares[threadIdx.x] = share_of;
    consumers_sync();
    const int first_tile = gates.first / GATE_STEPS;
    const int ring = warp / 4, i = warp % 4;  // the warp's ring, and its 16 outputs of each unit
    int slot = 0, phase = 0;
    uint4 q[UNIT];
    bool is_read = false;  // whether q has the next unit's codes
    auto codes = [&]() {
        const u32 from = base + (ring * DEPTH + slot) * BYTES + 512 * i + 16 * lane;
#pragma unroll
        for (int c = 0; c < UNIT; c++) q[c] = load(from + 2048 * c);
    };
    // Add the products of the ring's next unit, and read the next codes if they have arrived.
    auto multiply = [&](float(&sum)[2], u32 inputs, bool has_next) {
        const int each = ring * DEPTH + slot;
        if (!is_read) wait(full + 8 * each, phase), codes();
        add_unit(sum, q, base + each * BYTES + CODES + 16 * g + 4 * i, inputs + 16 * t);
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * each);
        if (++slot == DEPTH) slot = 0, phase ^= 1;
        is_read = has_next && arrived(full + 8 * (ring * DEPTH + slot), phase);
        if (is_read) codes();
    };
    {
        float sum[2] = {0.f, 0.f};
        int tile = first_tile;
        auto flush = [&]() {
            if (t == 0) {
                const u32 to = base + SUMS + (((tile - first_tile) * RINGS + ring) * 64 + i * 16 + g) * 4;
                store(to, sum[0]), store(to + 32, sum[1]);
            }
            sum[0] = sum[1] = 0.f;
        };
#pragma unroll 1
        for (int n = ring / 2; n < gates.count; n += RINGS / 2) {
            const int unit = gates.first + n;
            if (unit / GATE_STEPS != tile) flush(), tile = unit / GATE_STEPS;
            const bool has_next = n + RINGS / 2 < gates.count || ring < downs.count;
            multiply(sum, base + ROW + unit % GATE_STEPS * (2 * INPUTS), has_next);
        }
        if (gates.count) flush();
    }
    consumers_sync();
    int* const gathered = tickets;
    int* const finished = tickets + 1;
    float* const down_part = part + (u64)blocks * TILES * 128;
    {
        const int tiles = gates.count ? (gates.first + gates.count - 1) / GATE_STEPS - first_tile + 1 : 0;
#pragma unroll 1
        for (int n = threadIdx.x; n < tiles * 128; n += CONSUMERS) {
            float sum = 0.f;
#pragma unroll
            for (int r = 0; r < RINGS; r += 2)
                sum += load_float(base + SUMS + ((n / 128 * RINGS + r) * 64 + n % 128) * 4);
            part[(u64)block * TILES * 128 + n] = sum;
        }
    }
    consumers_sync();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(gathered) : "memory");
    // inner activations of this block's down units; biases are read before other blocks' sums
    float4 biases[QUADS][2];
    int places[QUADS];
    float share[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        const int quad = threadIdx.x + q * CONSUMERS, n = quad / (INPUTS / 4);
        const int rest = (downs.first + n) % down_tile_steps, index = rest / DOWN_STEPS;
        const int column = rest % DOWN_STEPS * INPUTS + quad % (INPUTS / 4) * 4;
        places[q] = n < downs.count ? index * WIDTH + column : -1;
        share[q] = 0.f;
        biases[q][0] = biases[q][1] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (places[q] >= 0) {
            share[q] = shares[index];
            if (gate_bias) {
                const float4* from = (const float4*)(gate_bias + (u64)experts_used[index] * (2 * WIDTH) + column);
                biases[q][0] = from[0], biases[q][1] = from[WIDTH / 4];
            }
        }
    }
    if (threadIdx.x == 0) {
        int seen;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(gathered) : "memory");
        while (seen < blocks);
    }
    consumers_sync();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int all_gates = experts * INNER_TILES * GATE_STEPS, all_downs = experts * OUT_TILES * DOWN_STEPS;
    // read the parts of the first and last block before the first use; with few experts there are more parts
    float4 parts[QUADS][4];
    auto part_of = [&](int b, int place) {
        return part + ((u64)b * TILES + place / 64 - Span(all_gates, b, blocks).first / GATE_STEPS) * 128 + place % 64;
    };
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        parts[q][2] = parts[q][3] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (places[q] < 0) continue;
        const int unit = places[q] / 64 * GATE_STEPS, end = owner(unit + GATE_STEPS - 1, all_gates, blocks);
        int b = owner(unit, all_gates, blocks);
        const float* from = part_of(b, places[q]);
        parts[q][0] = other(from), parts[q][1] = other(from + 64);
#pragma unroll 1
        while (++b < end) {
            from = part_of(b, places[q]);
            add(parts[q][0], other(from)), add(parts[q][1], other(from + 64));
        }
        if (b == end) from = part_of(b, places[q]), parts[q][2] = other(from), parts[q][3] = other(from + 64);
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        if (places[q] < 0) continue;
        float4 gate = parts[q][0], up = parts[q][1];
        add(gate, parts[q][2]), add(up, parts[q][3]);
        const float* gates4 = (const float*)&gate;
        const float* ups4 = (const float*)&up;
        const float* gate_biases = (const float*)&biases[q][0];
        const float* up_biases = (const float*)&biases[q][1];
        u32 word[2];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float a = gates4[k] * RESTORE + gate_biases[k], b = ups4[k] * RESTORE + up_biases[k];
            const u32 inner = rounded(activated(a, b, alpha, limit, shift, cubic) * share[q]);
            word[k / 2] = k % 2 ? word[k / 2] | inner << 16 : inner;
        }
        const u32 to = base + INNER + (threadIdx.x + q * CONSUMERS) * 8;
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(raised(word[0])), "r"(raised(word[1]))
                     : "memory");
    }
    consumers_sync();
    const int first_out = downs.first / down_tile_steps;
    const int outs = downs.count ? (downs.first + downs.count - 1) / down_tile_steps - first_out + 1 : 0;
    {
        float sum[2] = {0.f, 0.f}, done[2] = {0.f, 0.f};
        int tile = first_out;
#pragma unroll 1
        for (int n = ring; n < downs.count; n += RINGS) {
            const int unit = downs.first + n;
            if (unit / down_tile_steps != tile) {
                done[0] = sum[0], done[1] = sum[1], sum[0] = sum[1] = 0.f;
                tile = unit / down_tile_steps;
            }
            multiply(sum, base + INNER + n * (2 * INPUTS), n + RINGS < downs.count);
        }
        if (t == 0) {
            const bool second = tile != first_out;
            const u32 to = base + SUMS + (ring * 64 + i * 16 + g) * 4;
            store(to, second ? done[0] : sum[0]), store(to + 32, second ? done[1] : sum[1]);
            store(to + RINGS * 256, second ? sum[0] : 0.f), store(to + RINGS * 256 + 32, second ? sum[1] : 0.f);
        }
    }
    consumers_sync();
    const int k = threadIdx.x % 64, mine = threadIdx.x / 64, tile = first_out + mine;
    const bool adds = threadIdx.x < 64 * outs;
    float bias = 0.f;
    if (adds) {
        float sum = 0.f;
#pragma unroll
        for (int r = 0; r < RINGS; r++) sum += load_float(base + SUMS + ((mine * RINGS + r) * 64 + k) * 4);
        down_part[((u64)block * 2 + mine) * 64 + k] = sum;
        if (down_bias)
            #pragma unroll 1
            for (int e = 0; e < experts; e++)
                bias += down_bias[(u64)experts_used[e] * SIZE + tile * 64 + k] * shares[e];
    }
    consumers_sync();
    if (threadIdx.x < outs) {
        const int its_tile = first_out + threadIdx.x;
        const int first = owner(its_tile * down_tile_steps, all_downs, blocks);
        const int last = owner((its_tile + 1) * down_tile_steps - 1, all_downs, blocks);
        const bool ends = add_ticket(tickets + 2 + its_tile) == last - first;
        if (ends) tickets[2 + its_tile] = 0;
        is_last[threadIdx.x] = ends;
    }
    consumers_sync();
    if (adds && is_last[mine]) {
        const int last = owner((tile + 1) * down_tile_steps - 1, all_downs, blocks);
        float sum = 0.f;
#pragma unroll 1
        for (int first = owner(tile * down_tile_steps, all_downs, blocks); first <= last; first += 4) {
            float sums[4];
#pragma unroll
            for (int each = 0; each < 4; each++) {
                const int b = min(first + each, last), its_first = Span(all_downs, b, blocks).first / down_tile_steps;
                sums[each] = fresh(down_part + ((u64)b * 2 + tile - its_first) * 64 + k);
            }
#pragma unroll
            for (int each = 0; each < 4; each++) sum += first + each <= last ? sums[each] : 0.f;
        }
        out[tile * 64 + k] = rounded(sum * RESTORE + bias);
    }
    if (experts == 0)  // a padding row, or experts of other ranks
        for (int i = block * CONSUMERS + threadIdx.x; i < SIZE; i += blocks * CONSUMERS) out[i] = 0;
    if (threadIdx.x == 0 && add_ticket(finished) == blocks - 1) *gathered = *finished = 0;
}

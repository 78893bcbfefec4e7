# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Sums of accumulators over the warps of a program, for `stream_triton` and the experts' kernels.

Triton's sum over warps writes with a stride of 16 or 32 words, so all lanes use one bank of shared memory, which takes
longer than the product. Here adjacent lanes write adjacent 16 bytes, and each warp adds and stores some of the
accumulators.

Tensors have the layout of `fragments_triton`, with warp w = WARPS_N wk + wn.
"""

import triton
import triton.language as tl

_BATCH_BYTES = 32 << 10  # shared memory; static, so at most 48 kB


@triton.jit
def sums_of_warps(
    parts,
    COUNT: tl.constexpr,
    WARPS_N: tl.constexpr,
    WARPS_K: tl.constexpr,
    PAIRED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return ceil(COUNT / WARPS_K) tensors. In warp (wk, wn), tensor q is accumulator WARPS_K q + wk (modulo COUNT) of
    the warps with this wn, summed over wk in order.

    parts: COUNT accumulators; COUNT and WARPS_K are powers of two.
    PAIRED: WARPS_N is 2. Return 2 * ceil(COUNT / WARPS) tensors for WARPS warps. In warp w, tensors 2 q and 2 q + 1 are
        the sums of accumulator WARPS q + w (modulo COUNT) of the warps with wn = 0 and 1.
    """
    if INTERPRETED:
        return _sums_interpreted(parts, COUNT, WARPS_N, WARPS_K, PAIRED)
    elif WARPS_K == 1 and not PAIRED:
        return parts
    else:
        return tl.inline_asm_elementwise(
            _sums_asm(COUNT, WARPS_N, WARPS_K, PAIRED),
            _operands(_results(COUNT, WARPS_N, WARPS_K, PAIRED), COUNT),
            parts,
            dtype=_floats(_results(COUNT, WARPS_N, WARPS_K, PAIRED)),
            is_pure=False,
            pack=4,
        )


@triton.constexpr_function
def _results(count, warps_n, warps_k, paired):
    return 2 * -(-count // (warps_n * warps_k)) if paired else -(-count // warps_k)


@triton.constexpr_function
def _operands(outputs, inputs):
    return ",".join(["=f"] * (4 * outputs) + ["f"] * (4 * inputs))


@triton.constexpr_function
def _floats(count):
    return (tl.float32,) * count


@triton.constexpr_function
def _sums_asm(count, warps_n, warps_k, paired):
    """Return PTX that adds `count` accumulators over warps through shared memory, `batch` accumulators at a time."""
    warps, outputs = warps_n * warps_k, _results(count, warps_n, warps_k, paired)
    step = 512 * warps  # bytes of an accumulator of all warps
    batch = count
    while batch * step > _BATCH_BYTES and batch > warps:
        batch //= 2
    lines = [
        f".shared .align 16 .b8 sums_of_warps_cells[{batch * step}];",
        ".reg .b32 cells, warp, here, there;",
        ".reg .f32 f0, f1, f2, f3;",
        "mov.u32 cells, sums_of_warps_cells;",
        "mov.u32 there, %tid.x;",
        "mad.lo.u32 here, there, 16, cells;",
        "shr.u32 warp, there, 5;",
        "and.b32 there, there, 31;",
        "mad.lo.u32 there, there, 16, cells;",
    ]
    if paired:  # there: accumulator w of warp 0
        lines += [f"rem.u32 warp, warp, {batch};", f"mad.lo.u32 there, warp, {step}, there;"]
    else:  # there: accumulator wk of warp wn
        lines += [f"rem.u32 cells, warp, {warps_n};", "mad.lo.u32 there, cells, 512, there;"]
        lines += [f"div.u32 cells, warp, {warps_n};", f"rem.u32 cells, cells, {batch};"]
        lines.append(f"mad.lo.u32 there, cells, {step}, there;")
    each = warps if paired else warps_k  # accumulators added at once
    at = 0
    for first in range(0, count, batch):
        if first:
            lines.append("bar.sync 0;")
        for part in range(batch):
            lines.append(f"st.shared.v4.f32 [here+{part * step}], {_four(4 * (outputs + first + part))};")
        lines.append("bar.sync 0;")
        for q in range(max(1, batch // each)):
            for wn in range(2 if paired else 1):
                for wk in range(warps_k):
                    cell = f"[there+{q * each * step + (wk * warps_n + wn) * 512}]"
                    lines.append(f"ld.shared.v4.f32 {_four(at) if wk == 0 else '{f0, f1, f2, f3}'}, {cell};")
                    if wk:
                        lines += [f"add.f32 ${at + r}, ${at + r}, f{r};" for r in range(4)]
                at += 4
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _four(first):
    return "{" + ", ".join(f"${first + r}" for r in range(4)) + "}"


@triton.jit
def _sums_interpreted(parts, COUNT: tl.constexpr, WARPS_N: tl.constexpr, WARPS_K: tl.constexpr, PAIRED: tl.constexpr):
    """Compute `sums_of_warps` without PTX."""
    CELLS: tl.constexpr = WARPS_N * 128
    WARPS: tl.constexpr = WARPS_N * WARPS_K
    results = ()
    warp = tl.arange(0, WARPS)[:, None]
    for q in tl.static_range((COUNT + WARPS - 1) // WARPS if PAIRED else (COUNT + WARPS_K - 1) // WARPS_K):
        result, other = tl.zeros([WARPS, 128], tl.float32), tl.zeros([WARPS, 128], tl.float32)
        for w in tl.static_range(WARPS if PAIRED else WARPS_K):
            part = parts[(q * WARPS + w if PAIRED else q * WARPS_K + w) % COUNT]
            total = tl.sum(tl.reshape(part, [WARPS_K, CELLS]), 0)
            if PAIRED:
                first, second = tl.split(tl.permute(tl.reshape(total, [2, 128]), [1, 0]))
                result = tl.where(warp == w, first[None, :], result)
                other = tl.where(warp == w, second[None, :], other)
            else:
                mine = tl.reshape(tl.broadcast_to(total[None, :], [WARPS_K, CELLS]), [WARPS, 128])
                result = tl.where(warp // WARPS_N == w, mine, result)
        results = results + (tl.reshape(result, [WARPS * 128]),)
        if PAIRED:
            results = results + (tl.reshape(other, [WARPS * 128]),)
    return results

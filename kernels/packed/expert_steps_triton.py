# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Common parts of `expert_gate_up_triton` and `expert_down_triton`: a warp's load of a weight, and its product with
rows. Tensors have the layout of `aerie.kernels.packed.fragments_triton`.

Loads of a weight have no masks, so that Triton's pipelined loops copy them to shared memory several steps ahead.
Indices are clamped instead; inputs after the last are zero in rows, and outputs after the last are not stored.
"""

import triton
import triton.language as tl

from aerie.kernels.packed.fragments_triton import add_scaled, decode, multiply, times_power

RAISED = tl.constexpr("e2m1 / 2^126")  # codes of `aerie.kernels.packed.experts.with_raised_scales`
MOVED = tl.constexpr("e2m1 moved")  # the same after `aerie.kernels.packed.experts.with_moved_bits`


@triton.jit
def load_weight(
    codes_base,
    scales_base,
    zeros_base,
    chunk,
    index,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Load a chunk of 64 inputs. Return a tuple: one tensor of codes per 16 outputs (int8: per 16 outputs and 32
    inputs); then one of scales, and of zeros if there are any, per 32 inputs or for all 64.

    codes_base, scales_base, zeros_base: addresses of the warps' tile of 64 outputs; zeros_base may be None.
    chunk: the chunk, of CHUNKS.
    index: number of each element among those of all warps.
    GROUP: inputs that share a scale.
    PIECES: tensors of codes per 16 outputs: 2 for int8, else 1.
    """
    loaded = ()
    word, t = index % 128, index // 4 % 4
    at = tl.minimum(chunk, CHUNKS - 1)
    for piece in tl.static_range(4 * PIECES):
        loaded = loaded + (tl.load(codes_base + at * (512 * PIECES) + piece * 128 + word),)
    for s in tl.static_range(1 if GROUP % 64 == 0 else 2):
        start = at * 64 + 32 * s
        if GROUP == 16:
            start += t // 2 * 16
        loaded = loaded + (tl.load(scales_base + start // GROUP * 32),)
        if zeros_base is not None:
            loaded = loaded + (tl.load(zeros_base + start // GROUP * 32),)
    return loaded


@triton.jit
def _load_inputs(pointers, there, waits, INTERPRETED: tl.constexpr):
    """Load 16 bytes per lane; zeros unless `there`. Inline PTX, because Triton's pipelined loops would copy its own
    loads to shared memory; L1 serves all warps.

    pointers, there: four adjacent int32 words per lane, with one mask. The assembly gets four elements at a time and
        uses the first one's address and mask.
    waits: whether to wait for the previous kernel (`aerie.kernels.pdl`), equal in all lanes; None: do not wait.
        Here because pipelined loops would move a `gdc_wait` after the load.
    """
    if INTERPRETED:
        return tl.load(pointers, mask=there, other=0)
    elif waits is not None:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred there, waits;
            setp.ne.s32 there, $8, 0;
            setp.ne.s32 waits, $12, 0;
            mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
            @waits griddepcontrol.wait;
            @there ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,r,r,r,r",
            # the sum has the shape of `pointers`
            [pointers, there.to(tl.int32), (pointers.to(tl.int64) * 0).to(tl.int32) + waits.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred there;
            setp.ne.s32 there, $8, 0;
            mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
            @there ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r",
            [pointers, there.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=4,
        )


@triton.jit
def load_inputs(
    x_base,
    rows_there,
    waits,
    chunk,
    t,
    K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Load a chunk of 64 inputs of all rows. Return two tensors, of 32 inputs each, per tile of 8 rows.

    x_base: pointers to the lanes' words of each of ROW_TILES tiles of 8 rows.
    rows_there: masks of the same.
    waits: see `_load_inputs`.
    t: each lane's quarter of 32 inputs. K: inputs in all.
    """
    inputs = ()
    k = chunk * 64
    for j in tl.static_range(ROW_TILES):
        for s in tl.static_range(2):
            there = rows_there[j] & (k + 32 * s + 8 * t < K)
            inputs = inputs + (_load_inputs(x_base[j] + k // 2 + 16 * s, there, waits, INTERPRETED),)
    return inputs


@triton.jit
def add_products(
    acc,
    loaded,
    loaded_inputs,
    GROUP: tl.constexpr,
    ROW_TILES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the sums `acc`, 4 * ROW_TILES tensors, plus the products of what `load_weight` and `load_inputs` loaded.

    SCALES: scale weights in `MOVED` also with one tile of rows.
    GROUP: inputs that share a scale.
    HAS_ZEROS: whether `loaded` has zeros.
    CODE: format of the codes, see `aerie.kernels.packed.weight.PackedWeight`.
    TYPE, SCALE_TYPE: dtypes of operands and of scales.
    INTERPRETED: run by Triton's interpreter, without PTX.
    """
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    HALVES: tl.constexpr = 1 if GROUP % 64 == 0 else 2
    PER_HALF: tl.constexpr = 2 if HAS_ZEROS else 1
    FIRST: tl.constexpr = 4 * PIECES
    # Scaled weights are exact: significands have at most 2 and 4 bits. With one tile of rows, scaling sums takes fewer
    # multiplications.
    SCALED: tl.constexpr = CODE == RAISED or (CODE == MOVED and (SCALES or ROW_TILES > 1))
    BY: tl.constexpr = tl.bfloat16 if SCALED else None
    inputs = ()
    for s in tl.static_range(2 * ROW_TILES):
        x = loaded_inputs[s]
        if CODE == MOVED and not SCALED:
            x = times_power(x, INTERPRETED)
        inputs = inputs + (x,)
    scales = loaded[FIRST], loaded[FIRST + (HALVES - 1) * PER_HALF]
    zeros = loaded[FIRST + PER_HALF - 1], loaded[FIRST + (HALVES - 1) * PER_HALF + PER_HALF - 1]
    sums = ()
    for i in tl.static_range(4):
        first, second = loaded[i * PIECES], loaded[i * PIECES + PIECES - 1]
        a0, a1 = decode(first, zeros[0], scales[0], i, 0, CODE, HAS_ZEROS, BY, TYPE, INTERPRETED)
        a2, a3 = decode(second, zeros[1], scales[1], i, 1, CODE, HAS_ZEROS, BY, TYPE, INTERPRETED)
        for j in tl.static_range(ROW_TILES):
            part = acc[i * ROW_TILES + j]
            if SCALED:
                part = multiply(a0, a1, inputs[2 * j], part, TYPE, INTERPRETED)
                part = multiply(a2, a3, inputs[2 * j + 1], part, TYPE, INTERPRETED)
            elif HALVES == 1:
                own = multiply(a0, a1, inputs[2 * j], None, TYPE, INTERPRETED)
                own = multiply(a2, a3, inputs[2 * j + 1], own, TYPE, INTERPRETED)
                part = add_scaled(part, own, scales[0], i, SCALE_TYPE, INTERPRETED)
            else:
                own = multiply(a0, a1, inputs[2 * j], None, TYPE, INTERPRETED)
                part = add_scaled(part, own, scales[0], i, SCALE_TYPE, INTERPRETED)
                own = multiply(a2, a3, inputs[2 * j + 1], None, TYPE, INTERPRETED)
                part = add_scaled(part, own, scales[1], i, SCALE_TYPE, INTERPRETED)
            sums = sums + (part,)
    return sums


@triton.jit
def restored(sums, CODE: tl.constexpr, SCALES: tl.constexpr, ROW_TILES: tl.constexpr):
    """Return sums without the powers of two of `aerie.kernels.packed.experts.with_raised_scales` and `times_power`."""
    if CODE == MOVED and ROW_TILES == 1 and not SCALES:
        return sums * 2.0**-48
    elif CODE == RAISED or CODE == MOVED:  # noqa: SIM109 - not in kernels
        return sums * 65536.0
    else:
        return sums


@triton.jit
def zero_sums(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Return COUNT tensors of SIZE float32 zeros."""
    acc = ()
    for _ in tl.static_range(COUNT):
        acc = acc + (tl.zeros([SIZE], tl.float32),)
    return acc


@triton.jit
def words(ptr):
    """Return the pointer as a pointer to 32-bit words."""
    return ptr.to(tl.pointer_type(tl.int32))

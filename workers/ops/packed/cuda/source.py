"""Joins the sources of this folder's kernels, because NVRTC compiles one string without headers."""

from pathlib import Path


def joined(*names: str | Path, generated: str = "") -> str:
    """Return `packed.cuh` and the files with these names in this folder, or these paths, in this order.

    generated: further device functions, between `packed.cuh` and the rest.
    """
    folder = Path(__file__).parent
    return (folder / "packed.cuh").read_text() + generated + "".join((folder / name).read_text() for name in names)


def wgmma(columns: int, half: bool, in_registers: bool = True) -> str:
    """Return the device function `wgmma`, which adds the products of 16 inputs to 64 x `columns` sums.

    in_registers: whether the first operand is in registers; else in shared memory, like the second one.
    """
    number, count = "f16" if half else "bf16", columns // 2
    held = range(4 if in_registers else 1)
    sums = ", ".join(f"%{r}" for r in range(count))
    first = ", ".join(f"%{count + r}" for r in held)
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{number}.{number}"
    outputs = ", ".join(f'"+f"(d[{r}])' for r in range(count))
    inputs = ", ".join(f'"r"(a[{r}])' for r in held) if in_registers else '"l"(a)'
    operand = f"{{{first}}}" if in_registers else first
    majors = "0" if in_registers else "0, 0"  # of the operands in shared memory, whose inputs are adjacent
    kind = "const u32 (&a)[4]" if in_registers else "u64 a"
    head = f"__device__ __forceinline__ void wgmma(float (&d)[{count}], {kind}, u64 b)"
    code = f"{name} {{{sums}}}, {operand}, %{count + len(held)}, 1, 1, 1, {majors};"
    return f'{head} {{\n    asm volatile("{code}" : {outputs} : {inputs}, "l"(b));\n}}\n'

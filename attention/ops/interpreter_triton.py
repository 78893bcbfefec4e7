"""Whether Triton's interpreter runs the kernels of this process (TRITON_INTERPRET=1), as tests without a GPU do."""

import triton

# Decided when a kernel is decorated. The interpreter (3.6) computes on the raw bits of bfloat16, so kernels that get
# UPCAST=INTERPRETED work in float32 there.
INTERPRETED = bool(triton.knobs.runtime.interpret)

"""Whether Triton's interpreter runs the kernels of this process (TRITON_INTERPRET=1), as tests without a GPU do."""

import triton

# Triton decides this when a kernel is decorated. Its interpreter (3.6) computes on the raw bits of bfloat16. So kernels
# with a constant UPCAST are launched with UPCAST=INTERPRETED, and then compute in float32.
INTERPRETED = bool(triton.knobs.runtime.interpret)

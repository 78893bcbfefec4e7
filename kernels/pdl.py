"""Programmatic dependent launch (PDL, here early launch; compute capability 9 or later): how to request it, the rule
that makes it safe, and the reads of each kernel before it waits.

A kernel launched early may start when every program of its predecessor, the kernel just before it on the stream, has
triggered its dependents (`gdc_launch_dependents`) or ended. Its `gdc_wait` returns when the predecessor has ended and
its writes are visible. Before the wait, no write of the predecessor is guaranteed to be visible, even if the
predecessor never triggers and its programs have ended (PTX ISA, griddepcontrol; CUDA C++ Programming Guide,
Programmatic Dependent Launch and Synchronization).

The rule:
1. A kernel launched early waits in every program that does work. So when a kernel has ended, all earlier kernels have
   ended, and after its wait a kernel may access all that they accessed.
2. Before its wait a kernel writes nothing. It reads only constants (weights, addresses: written before the first step)
   and data written before a *fence*: a kernel between the writer and the reader that is launched normally, or that
   waits before it triggers. A fence starts, or triggers, only after all earlier kernels have ended, so all later
   kernels start after that, too.
3. A writer is not its own fence, even if it is launched normally: it must have ended itself. So the predecessor's
   results are never read before the wait.

    kernel                  first      reads before its wait          written by, and the fence after that
    rope_store              waits      nothing                        (is a fence)
    normed_rope_store       waits      the norms' weights             constant (is a fence)
    attend_decode           waits      items of the plan              split_kv's planner, before the layer's store,
                                                                      which is the fence: see `Prepared.plan`. A forward
                                                                      that has to plan itself is launched normally
                                       masks, prefix lengths, pages   kernels before the pass; the store is the fence
    attend_latent           waits      as attend_decode               the same; normed_latents is the fence
    add_suffix              triggers   masks, prefix lengths, pages   kernels before the pass; FlashInfer's kernel,
                                                                      launched normally, is the fence
    normed_latents          waits      the norms' weights             constant (is a fence)
    normed_latents (later)  triggers   the norms' weights             constant; used where an earlier layer's
                                                                      normed_latents is the fence: `Prepared.plan`
    head_products           triggers   W                              constant
    delta_round             triggers   tables and counts of slots,    kernels before the pass; the embedding, launched
                                       masks, prefix lengths          normally, is the fence
                                       the gates' weights             constant
    delta_wide              triggers   as delta_round, and states     as delta_round. Launched normally if its replay is
                                                                      the kernel just before
    delta_few_rows          triggers   as delta_round, and states     as delta_round
    delta_few_rows (CUDA)   triggers   as delta_step                  as delta_step
    delta_step              triggers   as delta_round, and states,    kernels before the pass; the embedding, launched
                                       histories, committed rows      normally, is the fence
                                       weights but the norm's         constant
    merge_rows              triggers   counts of the plan             split_kv's planner; attend_decode is the fence
    merge_in_order          triggers   as merge_rows                  the same
    finish_paths            triggers   counts of the plan, paths      as merge_rows
                                       masks, prefix lengths, q, the  kernels before attend_decode, which is the fence
                                       pool's K and V
    rms_norm, add_rms_norm  triggers   the norm's weight              constant
    silu_mul                triggers   nothing
    sigmoid_mul             triggers   nothing
    skinny_gemm             triggers   the first columns of W         constant
                                       B of adapters, rows' indices   copies and kernels before the pass; the reset of
                                                                      its counters, launched normally, is the fence
    ordered_gemm            triggers   nothing
    ordered (CUDA)          triggers   the first columns of W         constant
    one_row (CUDA)          triggers   W, the bias                    constant
    quantize                triggers   nothing
    fp8_norm                triggers   the norm's weight             constant
    fp8_gemm                triggers   the first columns of W         constant
    fp8_gemm_ahead          triggers   W                              constant
    fp8_gemm_wide           triggers   nothing
    packed_stream           triggers   the first codes and scales     constant
    packed_blocks           triggers   nothing
    few_rows, wide (CUDA)   triggers   codes, scales and zeros        constant
    gated_mlp (CUDA)        waits      codes, scales                  constant (is a fence)
    order_rows              triggers   nothing
    dequantize              triggers   codes, scales and zeros        constant
    gate_up_of_blocks       triggers   nothing
    gate_up_of_blocks (few) waits      nothing                        (is a fence)
    down_of_blocks          triggers   nothing
    down_of_listed          triggers   the list of experts; codes,    route; gate_up_of_blocks (few) is the fence
                                       scales, biases                 constant
    one_row_experts (CUDA)  waits      nothing                        (is a fence)
    latent_values           triggers   W                              constant
    route                   triggers   nothing
    norm_route              triggers   W, the norm's weight           constant
    order                   triggers   nothing
    gate_up_of_few_rows     waits      nothing                        (is a fence)
    down_of_few_rows        triggers   the list of experts            route; gate_up_of_few_rows is the fence
                                       the first columns of W         constant
    down_of_one_row         triggers   the list of experts            the same
                                       W and its scales               constant
    gate_up_of_ordered_row  waits      nothing                        (is a fence)
    down_of_ordered_row     triggers   the row's experts and weights  route; gate_up_of_ordered_row is the fence
                                       W and its scales               constant
    gate_up_of_sorted_rows  triggers   nothing
    down_of_sorted_rows     triggers   nothing
    sum_choices             triggers   nothing
    head_input              triggers   the norms' weights             constant
    convolve_blocks         triggers   nothing
    score_candidates        triggers   nothing
    lora_shrink             triggers   nothing
    lora_expand             triggers   nothing
    gate_up_of_cells        triggers   nothing
    activate_cells          triggers   nothing
    expert_lora_shrink      triggers   nothing
    expert_lora_expand      triggers   nothing
    lora_columns            triggers   nothing
    one_shot_all_reduce     waits      the norm's weight, addresses   constant
    sum_in_order            triggers   nothing

FlashInfer (0.6.17): its fa2 kernels read the plan, which our kernel writes, before they wait; so its wrappers are never
launched early. XQA (`csrc/xqa/mha.cu`) triggers, waits, and then reads. trtllm-gen has no source: its inputs are
written before the layer's store (a fence), or by a copy of q that is launched normally.

`tests.kernels.test_pdl` compiles the kernels and checks the instructions before the wait;
`tests.kernels.pdl_stress` runs them a million times, each time with different lengths.
"""

import torch

from aerie.kernels.capability import Capability


def pdl_wait(device: torch.device, early: bool = True) -> dict[str, bool]:
    """Return the launch options of a kernel with a constant PDL.

    early: launch early if the device supports it. Triton has the option `launch_pdl` only on GPUs.
    """
    return {"PDL": True, "launch_pdl": True} if early and Capability.of(device).supports_pdl else {"PDL": False}

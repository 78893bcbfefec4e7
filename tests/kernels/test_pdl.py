"""Kernels that are launched early against the rule of `aerie.kernels.pdl`: what stands before their wait in the
code compiled for Hopper, and the order of launches. What a GPU makes of it: `test_pdl_gpu`."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

import triton.language as tl  # noqa: E402

from aerie.attention.backend import Prepared  # noqa: E402
from aerie.attention.backends import triton_backend  # noqa: E402
from aerie.attention.backends.triton_kernels import LayerShape  # noqa: E402
from aerie.kernels import pdl  # noqa: E402
from aerie.kernels.attend import (  # noqa: E402
    decode_plan_triton,
    decode_triton,
    latent_decode_triton,
    latent_suffix_triton,
    merge_states_triton,
)
from aerie.kernels.attend.fixed import path_triton  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.attend.split_kv_triton import Items  # noqa: E402
from aerie.kernels.collectives import all_reduce_triton  # noqa: E402
from aerie.kernels.drafting import block_head_triton  # noqa: E402
from aerie.kernels.experts.adapted import product_triton as expert_lora_triton  # noqa: E402
from aerie.kernels.fp8 import rows_triton as fp8_norm  # noqa: E402
from aerie.kernels.fp8 import rows_triton as fp8_rows  # noqa: E402
from aerie.kernels.kv.batches import (  # noqa: E402
    DecodeBatch,
    LayerKV,  # noqa: E402
    Mode,
    causal_mask,
)
from aerie.kernels.latent import head_products_triton as head_products  # noqa: E402
from aerie.kernels.latent import latents_triton as latent  # noqa: E402
from aerie.kernels.lora import embedding_triton as lora_embedding_triton  # noqa: E402
from aerie.kernels.lora import product_triton as lora_triton  # noqa: E402
from aerie.kernels.norm import norm_triton
from aerie.kernels.packed import product_triton, stream_triton
from aerie.kernels.rope import rope_store_normed_triton, rope_store_triton  # noqa: E402
from aerie.kernels.rope.rope_store import Angles  # noqa: E402
from aerie.workers.layers.forward_context import ForwardContext  # noqa: E402
from tests.kernels.attend.test_triton_compile import (  # noqa: E402
    ROPE,
    compiled,
    decode_constants,
    latent_constants,
    path_constants,
    rope_constants,
)
from tests.kernels.delta_rule.test_delta_compile import DELTA_FEW_ROWS, DELTA_ROUND, DELTA_STEP, DELTA_WIDE
from tests.kernels.lora.test_expert_lora_compile import POINTERS as EXPERT_LORA  # noqa: E402
from tests.kernels.lora.test_expert_lora_compile import constants as expert_lora_constants  # noqa: E402
from tests.kernels.lora.test_lora_compile import COLUMNS as LORA_COLUMNS  # noqa: E402
from tests.kernels.lora.test_lora_compile import POINTERS as LORA  # noqa: E402
from tests.kernels.lora.test_lora_compile import column_constants as lora_column_constants  # noqa: E402
from tests.kernels.lora.test_lora_compile import constants as lora_constants  # noqa: E402
from tests.kernels.products.test_kernels_compile import FP8_OUT, LATENT, NORM_FP8, NORMED_LATENTS, head_constants  # noqa: E402
from tests.kernels.products.test_packed_compile import PACKED_STREAM  # noqa: E402
from tests.kernels.products.test_packed_experts_compile import QWEN  # noqa: E402
from tests.kernels.products.test_packed_experts_compile import cases as packed_experts  # noqa: E402
from tests.kernels.test_kernel_options import kernels  # noqa: E402

CPU = torch.device("cpu")
BF16 = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "x_ptr", "weight_ptr", "residual_ptr"), "bf16")
NORM = {"HAS_RESIDUAL": True, "BLOCK": 4096, "PDL": True}
SWIGLU = {"BLOCK": 1024, "PDL": True, "GELU": False}
# By name in the table: the kernel, its pointers, its constants, whether it waits first, and what it reads before.
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], bool, set[str]]] = {
    "rope_store": (
        rope_store_triton._rope_store,
        ROPE,
        {"GROUP": 4, "GROUP_PADDED": 4, "KV_HEADS": 8, "D": 128, "ROTATED": 128, "STORES": True, "PDL": True},
        True,
        set(),
    ),
    "normed_rope_store": (
        rope_store_normed_triton._normed_rope_store,
        ROPE | {"q_weight_ptr": "bf16", "k_weight_ptr": "bf16"},
        rope_constants(8, 256, 64),
        True,
        {"q_weight_ptr", "k_weight_ptr"},
    ),
    "attend_decode": (
        decode_triton._attend_decode,
        BF16 | {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32"},
        decode_constants(4, 4, 128, 16, decode_plan_triton.decode_tiles(16, 128, 2, 0.5)),
        True,
        {"items_ptr", "mask_ptr", "prefix_ptr", "table_ptr"},
    ),
    "attend_latent": (
        latent_decode_triton._attend_latent,
        BF16 | {"rows_ptr": "bf16", "mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32"},
        latent_constants(1, 16, 16, decode_plan_triton.latent_tiles(16, 2, 0.5)),
        True,
        {"items_ptr", "mask_ptr", "prefix_ptr", "table_ptr"},
    ),
    "add_suffix": (
        latent_suffix_triton._add_suffix,
        BF16 | {"rows_ptr": "bf16", "mask_ptr": "i64", "lse_ptr": "fp32"},
        {"ROWS": 8, "HEADS": 16, "D": 512, "ROTATED": 64, "PAGE": 16, "BLOCK_M": 16, "BLOCK_N": 16}
        | {"PDL": True, "UPCAST": False},
        False,
        {"mask_ptr", "prefix_ptr", "table_ptr"},
    ),
    "normed_latents": (
        latent._normed_latents,
        *NORMED_LATENTS,
        True,
        {"q_weight_ptr", "row_weight_ptr"},
    ),
    "normed_latents (later)": (
        latent._normed_latents,
        NORMED_LATENTS[0],
        NORMED_LATENTS[1] | {"FENCE": False},
        False,
        {"q_weight_ptr", "row_weight_ptr"},
    ),
    "head_products": (
        head_products._head_products,
        LATENT,
        head_constants(8, 128, 512, 64),
        False,
        {"weight_ptr"},
    ),
    "delta_round": (
        *DELTA_ROUND,
        False,
        {"slots_ptr", "count_ptr", "mask_ptr", "mask_stride", "prefix_ptr", "snapshot_at_ptr", "snapshot_entry_ptr"}
        | {"a_log_ptr", "dt_bias_ptr"},
    ),
    "delta_wide": (
        *DELTA_WIDE,
        False,
        {"slots_ptr", "count_ptr", "mask_ptr", "mask_stride", "a_log_ptr", "dt_bias_ptr", "state_ptr"},
    ),
    "delta_few_rows": (
        *DELTA_FEW_ROWS,
        False,
        {"slots_ptr", "count_ptr", "mask_ptr", "mask_stride", "prefix_ptr", "snapshot_at_ptr", "snapshot_entry_ptr"}
        | {"a_log_ptr", "dt_bias_ptr", "state_ptr"},
    ),
    "delta_step": (
        *DELTA_STEP,
        False,
        {"slots_ptr", "count_ptr", "prefix_ptr", "snapshot_at_ptr", "a_log_ptr", "dt_bias_ptr"}
        | {"state_ptr", "conv_ptr", "committed_ptr", "weight_ptr"},
    ),
    "merge_rows": (
        merge_states_triton.merge_rows,
        {"part_ptr": "fp32", "lse_ptr": "fp32", "out_ptr": "bf16"},
        {"ROWS": 4, "GROUP": 4, "KV_HEADS": 8, "D": 128, "BLOCK_M": 16, "COLUMNS": 8, "AT_ONCE": 8, "MAX_SPLITS": 64}
        | {"PDL": True},
        False,
        {"requests_ptr"},
    ),
    "merge_in_order": (
        merge_states_triton.merge_in_order,
        {"part_ptr": "fp32", "lse_ptr": "fp32", "out_ptr": "bf16"},
        {"ROWS": 4, "GROUP": 4, "KV_HEADS": 8, "D": 128, "BLOCK_M": 16, "COLUMNS": 8, "AT_ONCE": 8}
        | {"PDL": True, "sums_ptr": None},
        False,
        {"requests_ptr"},
    ),
    "finish_paths": (
        path_triton._finish_paths,
        BF16 | {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32", "sums_ptr": "fp32"},
        path_constants(9, 4, 128, LayerShape(32, 8, 128, None, 2, 2).fixed_tiles(9)),
        False,
        {"requests_ptr", "mask_ptr", "prefix_ptr", "tokens_ptr", "q_ptr", "k_ptr", "v_ptr"},
    ),
    "add_rms_norm": (norm_triton._add_norm, BF16, NORM, False, {"weight_ptr"}),
    "fp8_norm": (
        fp8_norm._fp8_norm,
        BF16 | {"plain_ptr": "bf16"} | FP8_OUT,
        NORM_FP8,
        False,
        {"weight_ptr"},
    ),
    "silu_mul": (norm_triton._gated_mul, BF16 | {"gate_up_ptr": "bf16"}, SWIGLU, False, set()),
    "sigmoid_mul": (
        norm_triton._sigmoid_mul,
        BF16 | {"gate_ptr": "bf16", "added_ptr": "bf16"},
        {"GATE_STEP": 1, "HAS_ADDED": False, "BLOCK": 256, "PDL": True},
        False,
        set(),
    ),
    "quantize": (
        fp8_rows._quantize,
        BF16 | {"out_ptr": "fp8e4nv", "scales_ptr": "fp32"},
        {"SIZE": 7168, "BLOCK": 1024, "BY_GROUP": True, "GATED": True, "PDL": True, "INTERPRETED": False},
        False,
        set(),
    ),
    "head_input": (
        norm_triton._head_input,
        dict.fromkeys(("table_ptr", "hidden_ptr", "table_weight_ptr", "hidden_weight_ptr", "out_ptr"), "bf16")
        | {"id_ptr": "i64"},
        {"BLOCK": 4096, "PDL": True},
        False,
        {"table_weight_ptr", "hidden_weight_ptr"},
    ),
    "convolve_blocks": (
        block_head_triton._convolve_blocks,
        BF16 | {"base_ptr": "bf16", "dynamic_ptr": "bf16"},
        {"GROUP": 16, "TAPS": 2, "BLOCK": 1024, "PDL": True},
        False,
        set(),
    ),
    "score_candidates": (
        block_head_triton._score_candidates,
        dict.fromkeys(("projected_ptr", "before_ptr", "after_ptr"), "bf16")
        | dict.fromkeys(("unary_ptr", "score_ptr"), "fp32")
        | dict.fromkeys(("candidate_ptr", "previous_ptr", "id_ptr"), "i64"),
        {"N": 16, "RANK": 256, "PDL": True},
        False,
        set(),
    ),
    "one_shot_all_reduce": (
        all_reduce_triton._one_shot_all_reduce,
        {"inbox_ptr": "i64", "inboxes_ptr": "i64"},
        {"WORLD": 4, "NORM": True, "HALF": all_reduce_triton.tl.bfloat16, "BLOCK": 2048, "PDL": True},
        True,
        {"weight_ptr", "inboxes_ptr"},
    ),
}
OF_EXPERTS = expert_lora_constants(8, 16, 16, 768, (0, 2048))
CASES |= {
    "lora_shrink": (lora_triton._lora_shrink, LORA, lora_constants(8, 16, (0, 4096))[0], False, set()),
    "lora_expand": (lora_triton._lora_expand, LORA, lora_constants(8, 16, (0, 4096))[1], False, set()),
    "expert_lora_shrink": (expert_lora_triton._expert_lora_shrink, EXPERT_LORA, OF_EXPERTS[0], False, set()),
    "expert_lora_expand": (expert_lora_triton._expert_lora_expand, EXPERT_LORA, OF_EXPERTS[1], False, set()),
    "lora_columns": (lora_embedding_triton._lora_columns, LORA_COLUMNS, lora_column_constants(16), False, set()),
    "sum_in_order": (
        all_reduce_triton._sum_in_order,
        {"parts_ptr": "bf16", "out_ptr": "bf16"},
        {"RANKS": 4, "BLOCK": 2048, "WIDE": tl.float32, "PDL": True},
        False,
        set(),
    ),
    "packed_stream": (stream_triton._packed_stream, *PACKED_STREAM, False, {"codes_ptr", "scales_ptr"}),
    "order_rows": (
        product_triton._order_rows,
        {"x_ptr": "bf16", "out_ptr": "bf16"},
        {"K": 4096, "COLUMNS": 4096, "BLOCK": 1024, "PDL": True},
        False,
        set(),
    ),
    "dequantize": (
        product_triton._dequantize,
        {"scales_ptr": "bf16", "zeros_ptr": "i16", "out_ptr": "bf16"},
        {"K": 4096, "CODE": "int4", "GROUP": 128, "TYPE": tl.bfloat16, "SCALE_TYPE": tl.bfloat16, "WARPS": 4}
        | {"PDL": True, "INTERPRETED": False},
        False,
        {"codes_ptr", "scales_ptr", "zeros_ptr"},
    ),
    "gate_up_of_blocks": (*packed_experts(64, QWEN, "int4", 128)[0][:3], False, set()),
    "gate_up_of_blocks (few)": (*packed_experts(1, QWEN, "int4", 128)[0][:3], True, set()),
    "down_of_blocks": (*packed_experts(64, QWEN, "int4", 128)[1][:3], False, set()),
    "down_of_listed": (*packed_experts(1, QWEN, "int4", 128)[1][:3], False, {"used_ptr", "num_used_ptr", "bias_ptr"}),
}
# Read W through a tensor map, no pointer: `test_kernels_compile` and `test_expert_kernels_compile` of
# `tests.kernels.products` look at what stands before their wait.
ELSEWHERE = {
    name: f"_{name}"
    for name in (
        "skinny_gemm",
        "ordered_gemm",
        "norm_route",
        "fp8_gemm",
        "fp8_gemm_ahead",
        "fp8_gemm_wide",
        "packed_blocks",
        "latent_values",
        "route",
        "order",
        "sum_choices",
    )
} | {
    name: name
    for name in (
        "gate_up_of_cells",
        "activate_cells",
        "gate_up_of_few_rows",
        "down_of_few_rows",
        "down_of_one_row",
        "gate_up_of_ordered_row",
        "down_of_ordered_row",
        "gate_up_of_sorted_rows",
        "down_of_sorted_rows",
    )
}

not_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


def pointers_read(ptx: str, names: list[str]) -> set[str]:
    """Return the arguments, among `names`, from which lines of PTX load. 64-bit registers are traced to the arguments
    that they were computed from; loaded values are not traced, since no kernel of ours follows pointers to pointers
    before its wait."""
    made_of: dict[str, set[str]] = {}
    read = set()
    for line in ptx.splitlines():
        argument = re.search(r"ld\.param\.\w+\s+(%rd\d+), \[\w+_param_(\d+)\]", line)
        address = re.search(r"ld\.global.*\[ ?(%rd\d+)", line)
        registers = re.findall(r"%rd\d+", line)
        if argument:
            made_of[argument[1]] = {names[int(argument[2])]}
        elif address:
            read |= made_of.get(address[1], {f"unknown: {line.strip()}"})
        elif registers:
            made_of[registers[0]] = set().union(*(made_of.get(register, set()) for register in registers[1:]))
    return read


@not_interpreted
@pytest.mark.parametrize("name", CASES)
def test_before_its_wait_a_kernel_reads_what_the_table_says_and_writes_nothing(name: str, tmp_path: Path) -> None:
    kernel, pointers, constants, waits_first, expected = CASES[name]
    _, _, ptx = compiled(kernel, tmp_path, pointers, constants, 4, 3)
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert ("griddepcontrol.launch_dependents" not in before) == waits_first
    assert not re.search(r"\b(st|atom|red)\.global", before)
    assert pointers_read(before, [n for n in kernel.arg_names if n not in constants]) == expected


@not_interpreted
def test_the_table_has_every_kernel_that_can_be_launched_early() -> None:
    early = {kernel.fn.__name__ for kernel in kernels().values() if "PDL" in kernel.arg_names}
    listed = {case[0].fn.__name__ for case in CASES.values()} | set(ELSEWHERE.values())
    assert early == listed
    assert pdl.__doc__ is not None
    for name in (*CASES, *ELSEWHERE):
        assert f" {name} " in pdl.__doc__, f"{name} is not in the table of aerie.kernels.pdl"


class Recording(Prepared):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def plan(self, q: Tensor, kv: LayerKV, scale: float) -> bool:
        self.events.append("plan")
        return True

    def forward(self, q: Tensor, kv: LayerKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        self.events.append("forward")
        return q


def test_the_store_stands_between_plan_and_attention() -> None:
    events: list[str] = []

    class Pool:
        def layer(self, index: int) -> LayerKV:
            return LayerKV(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))

        def store(self, layer: int, q: Tensor, *args: Any) -> Tensor:
            events.append("store")
            return q

    rows = torch.arange(3)
    context = ForwardContext(Pool(), rows, rows, 3, Recording(events), None)  # type: ignore[arg-type]
    q, k = torch.zeros(3, 2, 8), torch.zeros(3, 1, 8)
    for layer in range(2):
        context.attend(layer, q, (k, k), Angles(rows, rows, rows), ScoreRule(1.0))
    assert events == ["plan", "store", "forward"] * 2


def test_what_reads_a_plan_is_not_launched_early_right_after_what_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that writes a plan need not be complete when the next one starts, if that is launched early."""
    early: list[bool] = []

    def attend(*args: object, **options: bool) -> None:
        early.append(options["early"])

    monkeypatch.setattr(triton_backend, "attend_rows", attend)
    monkeypatch.setattr(triton_backend, "plan_items", lambda *args: None)
    length, table = torch.tensor([5], dtype=torch.int32), torch.ones(1, 4, dtype=torch.int32)
    batch = DecodeBatch(Mode.DECODE, 1, 1, length, causal_mask(1, 1, CPU), table, 6)
    q, kv = torch.zeros(1, 2, 16), LayerKV(torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16))
    backend = triton_backend.TritonBackend()
    for planned_before in (False, True):
        prepared = backend.prepare(batch)
        if planned_before:
            prepared.plan(q, kv, ScoreRule(1.0))
        for _ in range(2):
            prepared.forward(q, kv, ScoreRule(1.0))
    assert early == [False, True, True, True]


@pytest.mark.parametrize("span", [None, 256], ids=["plan", "fixed plan"])
def test_the_layer_at_which_a_plan_is_made_has_the_fence(span: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    items = Items(torch.zeros(1, 6, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))
    for planner in ("plan_items", "plan_whole_spans"):
        monkeypatch.setattr(triton_backend, planner, lambda *args: items)
    length, table = torch.tensor([5], dtype=torch.int32), torch.ones(1, 4, dtype=torch.int32)
    batch = DecodeBatch(Mode.DECODE, 1, 1, length, causal_mask(1, 1, CPU), table, 6)
    q, kv = torch.zeros(1, 2, 16), LayerKV(torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16))
    prepared = triton_backend.TritonBackend(span).prepare(batch)
    assert [prepared.plan(q, kv, ScoreRule(1.0)) for _ in range(3)] == [True, False, False]
    windows = (64, None, 64, 3, 3)  # layers with another window have a plan of their own
    assert [prepared.plan(q, kv, ScoreRule(1.0, window)) for window in windows] == [True, False, False, True, False]
    assert Recording([]).plan(q, kv, ScoreRule(1.0))  # who does not know has it at every layer

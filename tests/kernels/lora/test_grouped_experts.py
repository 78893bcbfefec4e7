"""The sum of experts with adapters, on a CPU: that of experts whose weights contain the adapters."""

import pytest
import torch

from aerie.kernels.experts.adapted import grouped as grouped_experts
from aerie.kernels.experts.adapted.grouped import adapted_experts
from aerie.kernels.experts.adapted.product import ExpertAdapters
from aerie.kernels.experts.gated import GPT_OSS, SWIGLU, GatedActivation
from aerie.kernels.experts.grouped import experts_one_by_one
from tests.kernels.ops.lora_cases import expert_tables
from tests.support.kernels.strict_device import DEVICE, strict_device


@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize(("width", "activation"), [(24, SWIGLU), (20, GPT_OSS), (21, SWIGLU)])
def test_each_row_gets_experts_with_its_adapter(width: int, activation: GatedActivation, block_m: int) -> None:
    """The last of 6 experts is a shared one without adapters. Expert 6 is another rank's. A width of 21 is not
    aligned."""
    cpu, size, rows = torch.device("cpu"), 40, 9
    first = expert_tables(2, 5, 16, size, (0, width, 2 * width), torch.float32, cpu)
    second = expert_tables(2, 5, 16, width, (0, size), torch.float32, cpu)
    generator = torch.Generator().manual_seed(width)
    gate_up, down = (torch.randn(6, *shape, generator=generator) * 0.2 for shape in ((2 * width, size), (size, width)))
    biases = torch.randn(6, 2 * width, generator=generator), torch.randn(6, size, generator=generator)
    x, weight = torch.randn(rows, size, generator=generator), torch.rand(rows, 4, generator=generator)
    chosen = torch.stack([torch.randperm(7, generator=generator)[:4] for _ in range(rows)])
    index = torch.randint(-1, 2, (rows,), generator=generator, dtype=torch.int32)
    given = None if activation is SWIGLU else biases
    adapters = ExpertAdapters(first, second, index)
    result = adapted_experts(x, chosen, weight, gate_up, down, adapters, block_m, activation, given)
    for row in range(rows):
        merged_gate_up, merged_down = gate_up.clone(), down.clone()
        if (adapter := int(index[row])) >= 0:
            for part in (slice(0, width), slice(width, 2 * width)):
                ranks = slice(0, 16) if part.start == 0 else slice(16, 32)
                merged_gate_up[:5, part] += first.up[adapter][:, part] @ first.down[adapter][:, ranks]
            merged_down[:5] += second.up[adapter] @ second.down[adapter]
        whole = slice(row, row + 1)
        expected = experts_one_by_one(
            x[whole], chosen[whole], weight[whole], merged_gate_up, merged_down, activation, given
        )
        torch.testing.assert_close(result[whole], expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step cannot wait. The adapters' operation has its own kernels on a GPU."""
    monkeypatch.setattr(grouped_experts, "add_expert_lora", lambda y, *rest: y)
    rows, size, width = 9, 64, 32
    tables = expert_tables(2, 5, 16, size, (0, width, 2 * width), torch.bfloat16, DEVICE)
    adapters = ExpertAdapters(tables, tables, torch.empty(rows, dtype=torch.int32, device=DEVICE))
    x = torch.empty(rows, size, dtype=torch.bfloat16, device=DEVICE)
    chosen, weight = torch.empty(rows, 4, dtype=torch.int64, device=DEVICE), torch.empty(rows, 4, device=DEVICE)
    gate_up = torch.empty(6, 2 * width, size, dtype=torch.bfloat16, device=DEVICE)
    down = torch.empty(6, size, width, dtype=torch.bfloat16, device=DEVICE)
    with strict_device(monkeypatch):
        assert adapted_experts(x, chosen, weight, gate_up, down, adapters, 16).shape == x.shape

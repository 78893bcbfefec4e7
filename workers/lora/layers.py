"""Which layers adapters may change, and `AdaptedMethod`, which adds the adapters' part to such a layer's result.

A pass without adapters runs the layer's own method, with all its fused kernels. A pass with adapters computes each
product alone, of rows in the model's dtype. The product's own kernel adds the adapters' part if it can; else
`aerie.kernels.lora.product` does, in two more launches."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from aerie.kernels.capability import ALIGNED_BYTES
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.host_weight import HostWeight
from aerie.kernels.lora.product import RANK_STEP, LoraTables, RowAdapters, add_lora
from aerie.kernels.norm.norm import silu_mul
from aerie.workers.layers.forward_context import ForwardContext, RowIndex
from aerie.workers.layers.linear import LinearBase
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part
from aerie.workers.layers.moe import MixtureOfExperts
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.lora.adapted_weight import AdaptedWeight
from aerie.workers.models.decoder import Decoder

EMBEDDING, HEAD = "embed_tokens", "lm_head"  # paths of a target's layers of the vocabulary
MAX_PRODUCTS = 2048  # of a pass that add their adapters in one launch; 100 layers have 400


class AdapterRows(RowIndex):
    """The adapter of each row of a pass.

    of_slot: [slots + 1] int64 index in the tables of each slot's adapter; -1: none.
    max_loras: number of adapters in the tables of embedding and vocabulary head; None: these have none, such as a
        draft's, which may be the target's.
    is_active: whether the pass has adapters.
    is_fixed: whether sums have one order for any rows, as in deterministic engines.
    """

    def __init__(self, of_slot: Tensor, is_fixed: bool = False, max_loras: int | None = None) -> None:
        super().__init__()
        self.is_active, self.is_fixed = False, is_fixed
        self._of_slot = of_slot
        self._token_indices: Tensor | None = None
        self._others: dict[int | None, Tensor] = {}
        # by path, [max_loras + 1] int32: an index if its adapter changes the layer, else -1; the last is that of -1
        self._changed: dict[str, Tensor] = {}
        if max_loras is not None:
            none = torch.full((max_loras + 1,), -1, dtype=torch.int32, device=of_slot.device)
            self._changed = {path: none.clone() for path in (EMBEDDING, HEAD)}
        self._embedded: Tensor | None = None  # of this pass, of rows of the embedding
        self._indices: dict[int, Tensor] = {}  # of this pass, by the number of rows; all layers share them
        self._counters = torch.zeros(MAX_PRODUCTS, ALIGNED_BYTES // 4, dtype=torch.int32, device=of_slot.device)
        self._num_used = 0  # counters of this pass

    @property
    def are_apart(self) -> bool:
        """Whether products of this pass run alone. With `is_fixed` all do: fused kernels may round differently, and
        other requests' adapters must not decide which ones a request gets."""
        return self.is_active or self.is_fixed

    def enter(self, context: ForwardContext, adapted: bool) -> None:
        super().enter(context, adapted)
        self.is_active = adapted
        self._indices, self._token_indices, self._others = {}, None, {}
        if not adapted:
            return
        if context.expanded is not None:
            slots, chunks = context.expanded.batch.slots, context.expanded.token_chunks
            assert slots is not None, "captured without a `RowIndex`"
            self._token_indices = self._of_slot[slots.long()[chunks]].int()
        attending, num_all = (context.last or context).attending_rows(context.row_slots), context.row_slots.shape[0]
        for num_rows in {num_all, attending.shape[0]}:
            indices = self._of_slot[self.of(num_rows).long()]
            self._indices[num_rows] = indices.int()
            if num_rows == num_all and EMBEDDING in self._changed:
                self._embedded = self._changed[EMBEDDING][indices]
        self._reset_counters()

    @contextlib.contextmanager
    def rows_of(self, slots: Tensor) -> Iterator[None]:
        """See `RowIndex.rows_of`."""
        self._indices = {slots.shape[0]: self._changed[HEAD][self._of_slot[slots]]}
        self._reset_counters()
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False

    def place(self, path: str, index: int, changes: bool) -> None:
        """Note whether the adapter that is now at an index of the tables changes the embedding or the head, so that
        rows of the others skip its part.

        path: of the layer; others are left alone.
        """
        if path in self._changed:
            self._changed[path][index] = index if changes else -1

    def _reset_counters(self) -> None:
        """The last launch before a pass: the fence after its indices are written, which products read before their wait
        (`aerie.kernels.pdl`)."""
        self._counters.zero_()
        self._num_used = 0

    @contextlib.contextmanager
    def without_adapters(self, num_rows: int) -> Iterator[None]:
        """Within the context, products have `num_rows` rows without an adapter, and run as in a pass with adapters."""
        self._embedded = torch.full((num_rows,), -1, dtype=torch.int32, device=self._of_slot.device)
        self._indices = {num_rows: self._embedded}
        self._others = {}
        self._reset_counters()
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False

    def of_product(self, tables: LoraTables, num_rows: int) -> RowAdapters | None:
        """Return the adapters of the pass's next product; None if the pass has no counter for it."""
        if self._num_used == MAX_PRODUCTS:
            return None
        self._num_used += 1
        return RowAdapters(tables, self.lora_indices(num_rows), self._counters[self._num_used - 1])

    def lora_indices(self, num_rows: int) -> Tensor:
        """Return [num_rows] int32: the index in the tables of each row's adapter; -1: none. num_rows: all rows of the
        pass, or those that attend in its last layer. Raises ValueError for another number."""
        if num_rows not in self._indices:  # at the start, whose first steps have adapters
            raise ValueError("lora: a layer of this model multiplies more rows than the step's; leave lora out")
        return self._indices[num_rows]

    def other_ranks(self, num_rows: int | None, owners: Tensor) -> Tensor:
        """Return [num_rows, ranks] bool: ranks of adapters other than a row's own. All layers share it.

        num_rows: as for `lora_indices`; None: the tokens of `ForwardContext.expanded`.
        owners: [ranks] int32, each rank's adapter, the same for all layers.
        """
        if num_rows not in self._others:
            indices = self._token_indices if num_rows is None else self.lora_indices(num_rows)
            assert indices is not None, "the pass expands no latents"
            self._others[num_rows] = indices[:, None] != owners
        return self._others[num_rows]

    def embedded_indices(self) -> Tensor:
        """Return the indices of all rows of the pass as `lora_indices`, -1 also for adapters without matrices of the
        embedding."""
        assert self._embedded is not None, "the rows are of a target"
        return self._embedded


def adaptable_layers(model: nn.Module) -> dict[str, LinearBase | VocabEmbedding]:
    """Return the layers of a target or draft that adapters may change, by path: all linear layers, and a target's
    embedding and vocabulary head. Routed experts, routers and convolutions are none."""
    layers: dict[str, LinearBase | VocabEmbedding] = {}
    for path, module in model.named_modules():
        if isinstance(module, LinearBase) and not isinstance(module, LMHead):
            layers[path] = module
        for shared in module.joined if isinstance(module, MixtureOfExperts) else ():
            children = shared.named_children()
            layers |= {f"{path}.shared_experts.{name}": each for name, each in children if isinstance(each, LinearBase)}
    if isinstance(model, Decoder):
        layers |= {EMBEDDING: model.embed_tokens, HEAD: model.lm_head}
    return layers


def checked_layers(model: nn.Module, title: str) -> dict[str, LinearBase | VocabEmbedding]:
    """Return `adaptable_layers`. title: names the model. Raises ValueError if there are none."""
    layers = adaptable_layers(model)
    if not layers:
        raise ValueError(f"{title}: has no layers that adapters may change (docs/lora.md); leave lora out")
    return layers


def padded_rank(max_lora_rank: int) -> int:
    """Return the rank of tables for adapters of up to `max_lora_rank`."""
    return -(-max_lora_rank // RANK_STEP) * RANK_STEP


def allocate_tables(
    shape: LinearShape, max_loras: int, rank: int, dtype: torch.dtype, device: torch.device, fixed: bool = False
) -> LoraTables:
    """Return a layer's tables without adapters. rank: of `padded_rank`. fixed: as in `LoraTables`."""
    ends = [part.offset + part.rows.size for part in shape.parts]
    down = torch.zeros(max_loras, len(ends) * rank, shape.in_features, dtype=dtype, device=device)
    up = torch.zeros(max_loras, shape.out_features, rank, dtype=dtype, device=device)
    return LoraTables(down, up, (0, *ends), fixed)


def table_bytes(layers: Iterable[LinearBase | VocabEmbedding], max_loras: int, max_lora_rank: int) -> int:
    """Return the bytes of the tables of all layers on this rank."""
    rank, meta = padded_rank(max_lora_rank), torch.device("meta")
    tables = [allocate_tables(layer.shape, max_loras, rank, layer.dtype, meta) for layer in layers]
    return sum(table.down.nbytes + table.up.nbytes for table in tables)


class AdaptedMethod(AdaptedWeight, LinearMethod):
    """A layer's method, with adapters. inner: the layer's own, which has the weight."""

    inner: LinearMethod

    def __init__(self, inner: LinearMethod, tables: LoraTables, rows: AdapterRows) -> None:
        super().__init__(inner.shape)
        self.inner = inner
        self.tables = tables
        self._rows = rows
        self.kinds = inner.kinds

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def is_adapted(self) -> bool:
        return self._rows.are_apart

    @property
    def base(self) -> LinearMethod:
        return self.inner

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if not self._rows.is_active:
            return self.inner.multiply(x, bias, out)
        y = self._in_one_launch(x, bias, out, False)
        if y is not None:
            return y
        assert isinstance(x, Tensor), "fp8_inputs is None in a pass with adapters"
        return add_lora(self.inner.multiply(x, bias, out), x, self.tables, self._rows.lora_indices(x.shape[0]))

    def launch_kernels(self, num_rows: int, bias: Tensor | None) -> None:
        """Launch what a pass with adapters launches for `num_rows` rows. bias: the layer's."""
        x = torch.zeros(num_rows, self.shape.in_features, dtype=self.dtype, device=self.tables.up.device)
        sizes = [part.rows.size for part in self.shape.parts]
        with self._rows.without_adapters(num_rows):
            for added in {id(each): each for each in (bias, None)}.values():
                self.multiply(x, added)
            if bias is None and len(sizes) == 2 and sizes[0] == sizes[1]:  # may be a gate and its values
                self.multiply_gated(x)

    def _in_one_launch(
        self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None, gated: bool
    ) -> Tensor | None:
        assert isinstance(x, Tensor), "fp8_inputs is None in a pass with adapters"
        adapters = None if self._rows.is_fixed else self._rows.of_product(self.tables, x.shape[0])
        return None if adapters is None else self.inner.multiply_adapted(x, bias, out, adapters, gated)

    def multiply_last(self, x: Tensor | Fp8Rows, bias: Tensor | None, count: int) -> Tensor:
        if not self._rows.are_apart:
            return self.inner.multiply_last(x, bias, count)
        return super().multiply_last(x, bias, count)

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        return None if self._rows.are_apart else self.inner.multiply_apart(x)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        if not self._rows.are_apart:
            return self.inner.multiply_gated(x, wanted)
        gated = self._in_one_launch(x, None, None, True)
        return silu_mul(self.multiply(x, None)) if gated is None else gated

    def multiply_mlp(self, x: Tensor | Fp8Rows, down: LinearMethod, out: Tensor | None = None) -> Tensor:
        if not self._rows.are_apart:
            return self.inner.multiply_mlp(x, down.base, out)
        return super().multiply_mlp(x, down, out)

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return None if self._rows.are_apart else self.inner.fp8_inputs

    @property
    def host_weight(self) -> HostWeight | None:
        return self.inner.host_weight

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        self.inner.load(kind, part, full)

    def kinds_of(self, part: Part) -> tuple[str, ...]:
        return self.inner.kinds_of(part)

    def fill_missing(self, kind: str, part: Part) -> bool:
        return self.inner.fill_missing(kind, part)

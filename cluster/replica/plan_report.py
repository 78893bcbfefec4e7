"""Reports for the operator: the plan before the start, and the table of ranks after it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aerie.attention.config import FP8_E4M3, LATENT_PAGE_SIZE
from aerie.cluster.config import AerieConfig
from aerie.cluster.placement import NodeResources, Placement, RankLocation, describe_cluster
from aerie.workers.config import AUTO_SLOTS, SchedulerConfig
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.memory_use import HOST_LIMIT_BYTES, HOST_SHARE, MemoryUse
from aerie.workers.scheduling.cost_table import CostTable, default_itl_target_ms
from aerie.workers.vision.config import why_without_images

if TYPE_CHECKING:
    from aerie.speculative.build import WeightBytes

_LONG_TOKENS = 16384  # length of the long request that is reported for models with windows


def plan_lines(
    config: AerieConfig,
    placement: Placement,
    nodes: Sequence[NodeResources],
    layout: EngineLayout,
    weights: "WeightBytes | None" = None,
    chats: Sequence[str] = (),
) -> list[str]:
    """Return lines about the resolved configuration, before a start. layout: layout of one engine. weights: of a rank
    on GPUs. chats: lines about the chat template (`aerie.cluster.http.parsers.self_check`)."""
    parallel, scheduler = config.parallel, config.scheduler
    bundles = " + ".join(_bundle(bundle) for bundle in placement.bundles)
    return [
        f"target      {config.model.path}",
        *([] if layout.served_by is None else [f"served by   {layout.served_by}"]),
        f"draft       {_draft(config)}",
        f"engines     {parallel.replicas} x {parallel.tensor_parallel} ranks"
        f"{' with whole experts' if parallel.expert_parallel else ''} on {placement.device}, "
        f"{placement.strategy}: {bundles}",
        *([] if weights is None else [_weights_line(weights, layout)]),
        *([] if weights is None or not weights.formats else [f"formats     {weights.formats}"]),
        *_adapter_lines(layout, weights),
        *_memory_lines(config, placement, layout),
        f"scheduler   {_slots(config, placement)} running, {_queue(scheduler)} waiting, "
        f"{layout.scheduler.step_token_limit} prompt tokens per step, {_target(scheduler)}",
        f"rounds      {_shapes(layout)}; requests of up to {layout.max_model_len} tokens",
        f"attention   target {config.attention.prefill}/{config.attention.decode} (prefill/decode), draft "
        f"{config.draft_attention.prefill}/{config.draft_attention.extend}/{config.draft_attention.decode}"
        " (prefill/extend/decode)",
        *(f"chats       {line}" for line in chats),
        f"cluster     {describe_cluster(nodes)}",
    ]


def rank_lines(locations: Sequence[RankLocation], layout: EngineLayout) -> list[str]:
    """Return lines about each rank's node, device and memory, the KV cache and the kinds of round."""
    rows = [[str(member.rank), member.address, str(member.pid), member.device] for member in locations]
    page_size = layout.cache.page_size
    return [
        *_table([["rank", "node", "pid", "device"], *rows]),
        *([] if layout.memory is None else [memory_line(layout.memory)]),
        f"{layout.num_pages} KV pages of {page_size} tokens = {layout.num_pages * page_size} tokens, "
        f"{_window_pages(layout)}"
        f"{layout.scheduler.num_slots} requests at once; rounds: {_shapes(layout)}",
    ]


def memory_line(use: MemoryUse) -> str:
    """Return the memory use of a rank in GB, as text."""
    parts = {
        "weights": use.weights,
        "tables of slots": use.tables,
        "workspaces": use.workspaces,
        "activations": use.activations,
        "graphs": use.graphs,
        "KV": use.kv,
    }
    taken = ", ".join(f"{name} {num_bytes / 1e9:.2f}" for name, num_bytes in parts.items() if num_bytes)
    return (
        f"rank 0's memory, of {use.total / 1e9:.1f} GB: {taken}; {use.left / 1e9:.2f} left; "
        f"{use.others / 1e9:.2f} were in use before"
    )


def cost_line(layout: EngineLayout, costs: CostTable) -> str:
    """Return the measured step times and the ITL target, as text."""
    num_slots, target_ms = layout.scheduler.num_slots, layout.scheduler.itl_target_ms
    sizes = sorted({1, min(8, num_slots), num_slots})
    rounds = [
        f"{shape.name} {' / '.join(_ms(costs.round_ms(index, n)) for n in sizes)}"
        for index, shape in enumerate(layout.shapes.shapes)
    ]
    target = f"{_ms(default_itl_target_ms(costs))} (auto)" if target_ms == "auto" else f"{target_ms:g}"
    return (
        f"ms of a round of {' / '.join(map(str, sizes))}: {', '.join(rounds)}; of 512 prompt tokens "
        f"{_ms(costs.step_ms(0, 0, 0, 512))}; prompts stretch steps to itl_target_ms {target}"
    )


def _draft(config: AerieConfig) -> str:
    """Describe how drafts are made."""
    draft = config.speculative
    if draft is None:
        return "none: plain decoding"
    if draft.method == "suffix":
        return (
            f"copied from the request's own text (suffix): up to {draft.num_steps} tokens after a match of "
            f"{draft.match_min} to {draft.match_max}; no weights, no KV"
        )
    kind = "chain" if draft.top_k == 1 else f"tree of top {draft.top_k}"
    sees = "" if draft.window is None else f", sees the last {draft.window} tokens"
    nodes = f"{draft.num_draft_tokens} nodes verified"
    if draft.suffix_tokens:
        nodes += f" and a branch of {draft.suffix_tokens} copied from the request's own text"
    kind += " from one block" if draft.shape.in_block else ""
    return f"{draft.path} ({draft.method}, {kind}, depth {draft.num_steps}, {nodes}{sees})"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _target(scheduler: SchedulerConfig) -> str:
    if scheduler.itl_target_ms == "auto":
        return "itl_target_ms from the costs that the start measures"
    return f"itl_target_ms {scheduler.itl_target_ms:g}"


def _queue(scheduler: SchedulerConfig) -> str:
    requests = f"{scheduler.max_waiting}, " if scheduler.max_waiting is not None else ""
    return f"{requests}{scheduler.max_waiting_bytes / 2**20:.0f} MiB"


def _slots(config: AerieConfig, placement: Placement) -> str:
    limit = config.scheduler.max_running
    return "{} to {} (auto)".format(*AUTO_SLOTS[placement.device]) if limit == "auto" else f"{limit}"


def _shapes(layout: EngineLayout) -> str:
    return ", ".join(f"{s.name} ({s.width} rows, up to {s.max_new_tokens} tokens)" for s in layout.shapes.shapes)


def _memory_lines(config: AerieConfig, placement: Placement, layout: EngineLayout) -> list[str]:
    """Return each rank's memory besides the weights, as far as known before loading."""
    cache, limits = config.cache, config.graph_capture
    if cache.num_pages is not None:
        pages = f"{cache.num_pages} pages"
    elif cache.memory_gb != "auto":
        pages = f"{cache.memory_gb:g} GB per rank, tables of running requests included"
    elif placement.uses_gpus:
        pages = f"what is left of {cache.memory_share:g} of each GPU's free memory"
    else:
        pages = f"{HOST_SHARE:g} of the free memory that is left, at most {HOST_LIMIT_BYTES / 1e9:g} GB per rank"
    size = f"{cache.page_size} tokens per page"
    if layout.has_latent_rows and placement.uses_gpus and cache.page_size < LATENT_PAGE_SIZE:
        size += f" (latent rows are read faster by pages of {LATENT_PAGE_SIZE}: set cache.page_size)"
    if layout.kv_in_fp8:
        size += f" in {FP8_E4M3}, {layout.bytes_per_page / cache.page_size / 1e3:.4g} kB per token on each rank"
    lines = [
        f"KV cache    {pages}, {size}, prefix cache {'on' if layout.cache.prefix_cache else 'off'}",
        f"slots       {_slots(config, placement)}, {layout.bytes_per_slot / 1e6:.2f} MB each per rank: page tables, "
        "token counts and biases of running requests"
        + (", recurrent states" if layout.bytes_per_state else "")
        + (f", {4 * layout.max_position / 1e6:.2f} MB of tokens for drafts" if layout.shapes.keeps_tokens else ""),
    ]
    if layout.images is None and (why := why_without_images(config.model, layout.served_by)):
        lines.append(f"images      none: {why}")
    if layout.images is not None:
        images = layout.images
        lines.append(
            f"images      {images.tower_bytes / 1e9:.2f} GB for the vision tower, whole on each rank, and up to "
            f"{images.cache_bytes / 1e9:.2f} GB for embeddings of images; up to {images.max_patches} patches, or "
            f"{images.max_patches // images.merge_size**2} tokens, each"
        )
    if layout.window is not None:
        lines.append(_windows_line(layout, layout.window))
    if layout.bytes_per_state:
        asked = cache.state_snapshots
        number = (
            f"up to {layout.snapshot_share:.0%} of the KV cache's memory" if asked == "auto" else f"{asked} of them"
        )
        lines.append(
            f"states      {layout.bytes_per_state / 1e6:.2f} MB of each slot are recurrent states; saved ones for the "
            f"prefix cache: {number}, {layout.bytes_per_snapshot / 1e6:.2f} MB each, of {cache.state_snapshot_dtype}"
            + (f"; a prompt's longest chunk takes {layout.chunk_bytes / 1e6:.0f} MB" if placement.uses_gpus else "")
        )
    if placement.uses_gpus:
        lines.append(
            f"CUDA graphs all rounds; with prompts, filters, penalties and log-probabilities as far as "
            f"{limits.limit_gb:g} GB per rank go; the first at the start, the others while it serves"
        )
    return lines


def _windows_line(layout: EngineLayout, window: int) -> str:
    """Return a line about KV bytes: per token in full-attention layers, per request in layers with a window, and per
    step of a long request."""
    size, length = layout.cache.page_size, min(_LONG_TOKENS, layout.max_model_len)
    per_token, in_windows = layout.bytes_per_page // size, layout.bytes_per_window_page // size
    windowed, whole = length * per_token + min(length, window) * in_windows, length * (per_token + in_windows)
    request_bytes = _window_bytes(layout, window)
    return (
        f"windows     a token takes {per_token / 1e3:.4g} kB in layers that keep all tokens, {in_windows / 1e3:.4g} kB "
        f"in layers with windows of {window}: up to {request_bytes / 1e6:.4g} MB a request; one of {length} tokens "
        f"reads {windowed / 1e6:.4g} MB a step (without windows {whole / 1e6:.4g})"
    )


def _window_bytes(layout: EngineLayout, window: int) -> int:
    """Return the maximum bytes of a decoding request in layers with a window."""
    return layout.window_pages(window) * layout.bytes_per_window_page


def _window_pages(layout: EngineLayout) -> str:
    return "" if layout.window is None else f"{layout.known_window_pages} of them with window pages at a time, "


def _weights_line(weights: "WeightBytes", layout: EngineLayout) -> str:
    """Return a line about weights. Before Hopper, FP8 weights are dequantised, which takes twice the memory."""
    draft = f" and {weights.draft / 1e9:.2f} GB of the draft" if weights.draft else ""
    if weights.head_rows is not None:
        draft += f" (its vocabulary head {weights.head_rows} rows, {weights.head / 1e9:.2f} GB)"
    return (
        f"weights     {weights.target / 1e9:.2f} GB of the target{draft} on each GPU (FP8 as it is, from compute "
        f"capability 9.0 on); KV takes {layout.bytes_per_page // layout.cache.page_size} bytes per token of each"
        + ("" if layout.window is None else f", and {_window_bytes(layout, layout.window) / 1e6:.4g} MB per request")
    )


def _adapter_lines(layout: EngineLayout, weights: "WeightBytes | None") -> list[str]:
    """Return a line about LoRA adapters; none without."""
    lora = layout.lora
    if lora is None:
        return []
    size = "" if weights is None else f", {weights.adapters / 1e9:.2f} GB of each GPU"
    if weights is not None and lora.experts:
        size += f" ({weights.expert_adapters / 1e9:.2f} GB of them for routed experts)"
    return [
        f"adapters    {len(lora.modules)} at the start, tables for {lora.max_loras} of rank up to "
        f"{lora.max_lora_rank}{size}; all others in host memory"
    ]


def _bundle(bundle: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{key}: {amount:g}" for key, amount in bundle.items()) + "}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

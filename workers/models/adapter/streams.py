"""Captures inputs and outputs of the layers of a transformers model, for drafts that read them (EAGLE-3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from aerie.workers.models.adapter.survey import NUM_ROWS, AttentionCall

Shape = tuple[int, ...]


def record_shapes(model: nn.Module) -> dict[str, Shape]:
    """Return a dict that the model's next pass fills: path of each module of its lists -> shape of its input, and path
    + " output" -> shape of its output. Values that are not tensors are absent."""
    shapes: dict[str, Shape] = {}

    def record(name: str) -> Callable[[Any], None]:
        def keep(stream: Any) -> None:
            if isinstance(stream, Tensor):
                shapes[name] = tuple(stream.shape)

        return keep

    for path, modules in model.named_modules():
        if isinstance(modules, nn.ModuleList):
            for number, module in enumerate(modules):
                name = f"{path}.{number}"
                on_input(module, record(name))
                on_output(module, record(f"{name} output"))
    return shapes


def path_of_layers(calls: Sequence[AttentionCall], shapes: Mapping[str, Shape], hidden_size: int) -> str | None:
    """Return the path of the list of layers, each with one of `calls`; None without one, or if a layer's input or
    output is not [1, rows, hidden_size].

    shapes: see `record_shapes`.
    """
    parts = calls[0].module.split(".")
    lists = (".".join(parts[:i]) for i, part in enumerate(parts) if part == "0")
    for path in lists:
        layers = [f"{path}.{number}" for number in range(len(calls))]
        if all(call.module.startswith(f"{layer}.") for call, layer in zip(calls, layers, strict=True)):
            streams = [*layers, f"{layers[-1]} output"]
            return path if all(shapes.get(stream) == (1, NUM_ROWS, hidden_size) for stream in streams) else None
    return None


def capture_streams(layers: nn.ModuleList, capture: Sequence[int], report: Callable[[int, Tensor], None]) -> None:
    """Call `report` in every pass, with the number of each layer of `capture` and its input, [1, rows, hidden_size].
    The number of layers stands for the last layer's output."""

    def keep(number: int) -> Callable[[Any], None]:
        return lambda stream: report(number, stream)

    for number in capture:
        if number < len(layers):
            on_input(layers[number], keep(number))
        else:
            on_output(layers[-1], keep(number))


def on_input(module: nn.Module, report: Callable[[Any], None]) -> None:
    """Call `report` with the module's first argument whenever the module is called."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        report(inputs[0] if inputs else named.get("hidden_states"))

    module.register_forward_pre_hook(hook, with_kwargs=True)


def on_output(module: nn.Module, report: Callable[[Any], None]) -> None:
    """Call `report` with the module's output, or the first of several, after each call of the module."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> None:
        report(out[0] if isinstance(out, tuple) else out)

    module.register_forward_hook(hook)

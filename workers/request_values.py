"""`Value`: the declaration of a per-request value that is one number, in `SamplingParams`.

From it follow the field of requests over HTTP and in Python, `ingress.default_*`, and the slot's column on the device
(docs/add-a-per-request-value.md). Without torch, because the API imports it.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from aerie.attention.setting import Bounds, Number


@dataclass(frozen=True)
class Value(Bounds):
    """Metadata of an annotated field of type int, float or bool. Bounds apply to the value in a request.

    generate_name: its name in `sampling_params` of /generate, if SGLang's differs.
    server_default: whether generation_config.json and `ingress.default_NAME` may set it for requests without it.
    least: requested values below it mean 0.
    on_device: whether a slot has a column of this name: int64, float32 or bool, according to the field's type.
    stored: the column's value for a `SlotInit`; None: the value itself.
    use: the sampling code that a value other than the default needs. filter: top-k, top-p and min-p. shaping: changes
        of logits. counts: changes of logits that depend on the number of occurrences of each token.
    name, kind, default: from the field.
    """

    generate_name: str = ""
    server_default: bool = False
    least: Number | None = None
    on_device: bool = False
    stored: Callable[[Any], Number] | None = None
    use: Literal["", "filter", "shaping", "counts"] = ""
    name: str = ""
    kind: type[Number] = float
    default: Number = 0

    def of(self, value: Number) -> Any:
        """Return the engine's value for a request's, of the field's type."""
        value = self.kind(value)
        return value if self.least is None or value >= self.least else self.kind(0)

    def column(self, init: Any) -> Number:
        """Return what the slot's column holds. init: a `SlotInit`."""
        value: Number = getattr(init.sampling, self.name) if self.stored is None else self.stored(init)
        return value


def declared_values(params: type) -> dict[str, Value]:
    """Return the declarations of a struct's annotated fields, by name, in their order."""
    declared = {}
    defaults = dict(zip(reversed(params.__struct_fields__), reversed(params.__struct_defaults__), strict=False))  # type: ignore[attr-defined]
    for name, hint in get_type_hints(params, include_extras=True).items():
        kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        for value in metadata:
            if isinstance(value, Value):
                declared[name] = replace(value, name=name, kind=kind, default=defaults[name])
    return declared


def uses(values: Mapping[str, Value], *kinds: str) -> Callable[[Any], bool]:
    """Return whether a `SamplingParams` has a value with one of these uses, other than its default. At least two values
    must have them."""
    used = {name: value.default for name, value in values.items() if value.use in kinds}
    get, defaults = operator.attrgetter(*used), tuple(used.values())  # one call for all of them: 0.2 us
    return lambda sampling: bool(get(sampling) != defaults)

"""The result of a part of the benchmark: figures with their targets, and the lines to print."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One figure. required: its bound in the same unit. at_least: the bound is a lower one."""

    value: float
    required: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.required if self.at_least else self.value <= self.required

    @property
    def rule(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.required:g}"

    def as_json(self) -> dict[str, Any]:
        return {"value": round(self.value, 4), "required": self.rule, "unit": self.unit, "met": self.met}


@dataclass(frozen=True)
class Report:
    """findings: by name. lines: tables for the reader. details: further figures, plain JSON values."""

    findings: dict[str, Finding]
    lines: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

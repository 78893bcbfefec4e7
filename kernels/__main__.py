"""Prints every operation, its implementations, and which of them this machine can run."""

from importlib import import_module
from pkgutil import walk_packages

import torch

from aerie.kernels.capability import Capability
from aerie.kernels.operation import OPERATIONS


def import_operations() -> None:
    """Import every module that defines operations, but no kernels."""
    for module in walk_packages(import_module("aerie.kernels").__path__, "aerie.kernels."):
        if not module.name.endswith(("_triton", "_cuda", "__main__")):
            import_module(module.name)


def table(capability: Capability) -> str:
    lines = []
    for operation in sorted(OPERATIONS, key=lambda choice: choice.name):
        serving = operation.serving(capability)
        lines.append(operation.name)
        for choice in operation.implementations:
            runs = "runs here" if choice in serving else "not here"
            lines.append(f"    {choice.name:<12} {runs:<10} {choice.limits}".rstrip())
        lines.append(f"    {'torch':<12} runs here  {'what the rows above leave' if serving else 'everything'}")
    return "\n".join(lines)


def main() -> None:
    import_operations()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    capability = Capability.of(device)
    compute = (
        "" if capability.compute is None else f", compute capability {capability.compute[0]}.{capability.compute[1]}"
    )
    print(f"{capability.type}{compute}; {', '.join(sorted(capability.libraries)) or 'no kernel library'} installed\n")
    print(table(capability))


if __name__ == "__main__":
    main()

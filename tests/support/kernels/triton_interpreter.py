"""Where tests of Triton kernels run: on a GPU, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from aerie.kernels.operation import OPERATIONS, Operation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
MARKS = [] if INTERPRETED else [pytest.mark.gpu]

if INTERPRETED:
    import triton.language
    from triton.language import core
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, set[Any]()

    def patch_lang_once(function: Any) -> Any:
        """Triton 3.6 replaces its language's functions anew at each call of a device function, though the kernel's
        launch has: a third of the interpreter's time."""
        languages = {each for each in function.__globals__.values() if each is triton.language or each is core}
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())
        patched.update(languages)
        return scope

    interpreter._patch_lang = patch_lang_once
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_new_numpy(tensor: Any, scope: Any) -> None:
        """Triton 3.6 calls int() on arrays of one element, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_new_numpy

    # Triton 3.6 computes whether an integer sum or product overflows, in int64, and has no use for the answer without
    # TRITON_DEBUG: a third of the interpreter's time.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # Triton 3.6 makes the type of each shape, and the name of each type, which only errors print: a quarter of
    # the interpreter's time.
    shapes = dict[tuple[int, ...], tuple[Any, ...]]()

    def shape_once(shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the shape in numbers, the product of them, and both as tensors have them."""
        if (found := shapes.get(shape)) is None:
            numel = core.validate_block_shape(shape)
            constants = core.tuple([core.constexpr(size) for size in shape])
            found = shapes[shape] = core.tuple(shape), numel, constants, core.constexpr(numel)
        return found

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        shape = core._unwrap_if_constexpr(shape) if isinstance(shape, core.constexpr) else shape
        sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
        self.element_ty = element_ty
        self.shape, self.numel, *_ = shape_once(sizes)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        *_, self.shape, self.numel = shape_once(tuple(type.shape.values) if type.is_block() else ())

    def init_tuple_type(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def type_of_tuple(self: Any) -> Any:
        found = self.__dict__.get("type")
        return core._type_for_tuple_values(self.values) if found is None else found

    get_np_dtype, np_dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype_once(kind: Any) -> Any:
        """Triton 3.6 makes a table of all types at each call, of which a result needs several."""
        scalar = kind.scalar
        if (found := np_dtypes.get(scalar.name)) is None:
            found = np_dtypes[scalar.name] = get_np_dtype(scalar)
        return found

    interpreter._get_np_dtype = get_np_dtype_once
    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tuple_type.__init__ = init_tuple_type
    core.tuple_type.name = property(lambda self: str(list(zip(self.fields, self.types, strict=True))))
    core.tuple.__init__ = init_tuple
    core.tuple.type = property(type_of_tuple, lambda self, value: self.__dict__.update(type=value))


@contextmanager
def kernels_of_operations() -> Iterator[None]:
    """Operations run their Triton kernels on a CPU too, under the interpreter, so that layers are tested with them."""
    serving = Operation.serving
    Operation.serving = lambda self, _: tuple(each for each in self.implementations if each.name.startswith("triton"))  # type: ignore[method-assign]
    _forget_choices()
    try:
        yield
    finally:
        Operation.serving = serving  # type: ignore[method-assign]
        _forget_choices()


def _forget_choices() -> None:
    for each in OPERATIONS:
        each._by_device.clear()

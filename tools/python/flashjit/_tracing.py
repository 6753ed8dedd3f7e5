"""Python functions as text of flashjit's language: called with stand-ins that write down what is done to them."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ._at_work import is_compiling, is_tensor, loaded_torch, symbol_tensor, torch_module, tracers
from ._compiling import call_compiled
from ._rows import STAND_INS, ElementRow, PartialRead, Row, row_of
from ._torch_names import FUNCTIONS, call, refuse_in_place, without_function
from ._values import ELEMENTS, LOWEST, Shape, Size, Value, as_text, int_range, literal
from .errors import InvalidArgument, WrongType

MAX_TENSORS, MAX_SCALARS, _MAX_DIMENSIONS = 16, 8, 6
#: Programs of elements of O, Q and K, as attention() and specs call them.
ELEMENT_MODS = ("out_mod", "q_mod", "k_mod")

_POSITION_MAX = 2**30 - 1  # so that the sum of two is an int; longer sequences fit into no GPU


def identifiers(text: str) -> frozenset[str]:
    """The words of a text: names, functions and types. Without `re`: torch.compile follows this, and would hold on to the
    places of patterns in a cache that others change."""
    words = "".join(char if char.isalnum() or char == "_" else " " for char in text).split()
    return frozenset(word for word in words if not word[0].isdigit())


class Tracer:
    """Gives names to the captured tensors of the functions that it calls, in the order of their first use."""

    def __init__(self, taken: Mapping[str, Any]) -> None:
        self.taken = taken  # names that texts use already
        self.tensors: dict[str, Any] = {}
        self.scalars: dict[str, Any] = {}
        self.function: Any = None
        self.looked = False  # whether Python saw what a captured tensor is, beside its type and dimensions

    # Captured tensors.

    def read(self, tensor: Any) -> PartialRead:
        if tensor.dim() > _MAX_DIMENSIONS:
            raise InvalidArgument(
                f"{self.named(tensor)} has {tensor.dim()} dimensions: programs read tensors of at most "
                f"{_MAX_DIMENSIONS}; flatten some of them."
            )
        return PartialRead(self, tensor, (None,) * tensor.dim())

    def read_at(self, tensor: Any, indices: tuple[Value | None, ...]) -> Any:
        """A read where there is an index for each dimension."""
        if any(index is None for index in indices):
            return PartialRead(self, tensor, indices)
        if not indices:
            return self.value_of(tensor)
        return self._element(
            tensor, ", ".join([as_text(index, "int") for index in indices if index is not None])
        )

    def _element(self, tensor: Any, indices: str) -> Value:
        dtype = _dtype_name(tensor)
        self._check_type(tensor)
        return Value(
            f"{self._name(self.tensors, tensor, 'c')}[{indices}]",
            dtype,
            *int_range(dtype),
            wide=dtype == "int64",
        )

    def _check_type(self, tensor: Any) -> None:
        if _dtype_name(tensor) not in ELEMENTS:
            element_type(tensor, self.named(tensor))

    def index(self, tensor: Any, dimension: int, given: Any) -> Value:
        """An index as the language takes it: what is below zero counts from the end."""
        index = None if given is None or isinstance(given, bool) else literal(self.value_of(given))
        if index is None or index.dtype_name in ("bool", "uint8") or index.type == "float":
            self._refuse_index(tensor, given, index)
        if index.number is not None and not is_compiling():  # which would compile again for other sizes
            self._check_constant(tensor, dimension, index.number)
        if index.low >= 0:
            return index
        size = self.size_value(tensor, dimension)
        if index.high < 0:
            return size + index
        text = as_text(index, "int")
        return Value(
            f"select({text} < 0, {text} + {size.text}, {text})",
            index.dtype_name,
            0,
            index.high,
            wide=index.wide,
        )

    def _refuse_index(self, tensor: Any, given: Any, index: Value | None) -> NoReturn:
        what = f"{self.named(tensor)} is indexed with"
        if index is None:
            raise WrongType(f"{what} {given}: give numbers and positions.")
        if index.type == "float":
            raise WrongType(f"{what} a float: convert it with .int() first.")
        raise WrongType(
            f"{what} a {index.dtype_name}, which PyTorch takes for a mask: convert it with .int() first."
        )

    def _check_constant(self, tensor: Any, dimension: int, number: int) -> None:
        self.looked = True
        size = tensor.shape[dimension]
        if not -size <= number < size:
            raise InvalidArgument(
                f"{self.named(tensor)} is indexed with {number} in dimension {dimension}, which has the size "
                f"{size}."
            )

    def size_value(self, tensor: Any, dimension: int) -> Value:
        return Value(f"size({self._name(self.tensors, tensor, 'c')}, {dimension})", "int", 1, _POSITION_MAX)

    def size(self, tensor: Any, dimension: int) -> Any:
        self.looked = True
        if is_compiling():
            return tensor.shape[dimension]  # a number, or a symbol
        return Size(tensor.shape[dimension], self.size_value(tensor, dimension))

    def shape(self, tensor: Any) -> Shape:
        return Shape([self.size(tensor, i) for i in range(tensor.dim())])

    def value_of(self, value: Any) -> Any:
        """A captured tensor as a number, where it is one."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.value_of, value))
        if not is_tensor(value):
            return value
        if value.dim() > 0:
            raise InvalidArgument(
                f"{self.named(value)} of shape {tuple(value.shape)} is used as a number: index it with b, h, "
                "q_idx and kv_idx, such as bias[h, q_idx - kv_idx]."
            )
        if not is_scalar(value):
            return self._element(value, "0")
        dtype = _dtype_name(value)
        self._check_type(value)
        name = self._name(self.scalars, value, "s")
        return Value(
            f"to_bool({name})" if dtype == "bool" else name,
            dtype,
            *int_range("int32" if dtype == "int64" else dtype),
        )

    def has_room_for_symbols(self) -> bool:
        return len(self.scalars) < MAX_SCALARS

    def symbol(self, value: Any) -> Value:
        dtype = "float" if isinstance(value, float) else "int"
        return Value(self._name(self.scalars, symbol_tensor(value), "s"), dtype, *int_range(dtype))

    def _name(self, names: dict[str, Any], value: Any, prefix: str) -> str:
        for name, known in names.items():
            if known is value:
                return name
        name = next(
            name for name in (f"{prefix}{i}" for i in range(len(names), 999)) if name not in self.taken
        )
        names[name] = value
        return name

    def named(self, tensor: Any) -> str:
        """The captured tensor as messages call it: by the name that the function has for it, if any."""
        name = None if is_compiling() else variable_of(self.function, tensor)
        return "a captured tensor" if name is None else f"the captured tensor {name}"

    # Calls.

    def call_torch(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A function of torch, or an operator of a tensor, on stand-ins and captured tensors."""
        # Reversed operators are wrapped, and a compiled function sees the wrapper without their name.
        function = getattr(function, "__wrapped__", function)
        # Formatted, since the compiler of PyTorch 2.13 and 2.14 knows no methods of __name__ itself.
        name = f"{getattr(function, '__name__', function)}"
        if name == "__getitem__" and arguments and is_tensor(arguments[0]):
            return self.read(arguments[0])[arguments[1]]
        arguments = tuple([self.value_of(argument) for argument in arguments])
        named = {key: self.value_of(value) for key, value in named.items()}
        plain = name.strip("_") if name.startswith("__") else name
        if plain.startswith("r") and name.startswith("__") and plain[1:] in FUNCTIONS and len(arguments) == 2:
            plain, arguments = plain[1:], arguments[::-1]
        if name.startswith("__i") and plain[1:] in FUNCTIONS and plain not in FUNCTIONS:
            refuse_in_place(plain)
        if name.endswith("_") and not name.startswith("__"):
            refuse_in_place(name)
        plain = plain.lstrip("_").removeprefix("special_")
        rows = [row_of(argument) for argument in arguments]
        if any(row is not None for row in rows):
            return call_on_rows(
                plain, tuple(a if row is None else row for a, row in zip(arguments, rows)), named
            )
        if plain not in FUNCTIONS:
            raise InvalidArgument(without_function(f"torch.{plain}"))
        return call(plain, FUNCTIONS[plain], arguments, named)

    def score(self, function: Callable[..., Any]) -> tuple[str, list[str]]:
        """The text of a score_mod, "" where it returns the score as it is, and the conditions that it masks by."""
        result = self._call(function, (Value("score", "float32"), *_positions()), "score_mod")
        result, conditions = split_mask(result)
        return "" if result.text == "score" else as_text(result, "float"), conditions

    def mask(self, function: Callable[..., Any]) -> str:
        """The text of a mask_mod."""
        return as_text(self._call(function, _positions(), "mask_mod"), "bool")

    def out(self, function: Callable[..., Any]) -> str:
        """The text of an out_mod, "" where it returns O as it is."""
        b, h, q, _ = _positions()
        column = Value("column", "int32", 0, _POSITION_MAX)
        result = self._call(function, (Value("out", "float32"), b, h, q, column), "out_mod")
        return "" if result.text == "out" else as_text(result, "float")

    def row(self, function: Callable[..., Any], kind: str) -> str:
        """The text of a q_mod or k_mod, "" where it returns the element as it is."""
        b, h, q, kv = _positions()
        position = (h, q) if kind == "q_mod" else (Value("h_kv", "int32", 0, _POSITION_MAX), kv)
        column = Value("column", "int32", 0, _POSITION_MAX)
        result = self._call(function, (ElementRow(self), b, *position, column), kind)
        return "" if result.text == "element" else as_text(result, "float")

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], kind: str) -> Value:
        tracers.append(self)
        self.function = function
        try:
            if loaded_torch() is None:
                result = function(*arguments)
            elif is_compiling():
                with torch_mode():
                    result = call_compiled(function, *arguments)
            else:
                with torch_mode():
                    result = _with_sizes(function, self)(*arguments)
            result = literal(self.value_of(result)) if _is_number(result) else result
        except (TypeError, IndexError) as error:  # IndexError: of NumPy, which looks at an index itself
            if isinstance(error, InvalidArgument):
                raise
            if "__array_ufunc__" in str(error):
                raise WrongType(
                    f"{_name_of(function)} calls a function of NumPy, which knows no numbers of a program: call torch's of "
                    "that name."
                ) from error
            raise WrongType(
                f"{_name_of(function)} cannot be traced ({error}): {'an' if kind[0] == 'o' else 'a'} {kind} is called as "
                f"{SIGNATURES[kind]} with stand-ins for numbers; see help(flashjit.programs)."
            ) from error
        finally:
            tracers.pop()
        if not isinstance(result, Value):
            raise WrongType(
                f"{_name_of(function)} returns a {type(result).__name__}: a {kind} returns a "
                f"{_RETURNED[kind]}, computed from its arguments."
            )
        return result

    def with_sizes_as_scalars(self, *programs: str) -> tuple[list[str], dict[str, Any]]:
        """Programs that need no tensor for its sizes alone, which may be on another device; and these sizes by name."""
        sizes: dict[str, Any] = {}
        texts = list(programs)
        for name, tensor in self.tensors.items():
            if any([f"{name}[" in text for text in texts]):
                continue
            for dimension, size in enumerate(tensor.shape):
                found, scalar = f"size({name}, {dimension})", f"{name}_size{dimension}"
                if any([found in text for text in texts]):
                    texts = [text.replace(found, scalar) for text in texts]
                    sizes[scalar] = int(size)
        return texts, sizes


def call_on_rows(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if name in ("sum", "mean", "any", "all"):
        return getattr(arguments[0], name)()
    if name in ("dot", "inner", "vdot", "matmul"):
        return arguments[0].dot(arguments[1])
    if name not in FUNCTIONS:
        raise InvalidArgument(without_function(f"torch.{name}", "a row of a captured tensor"))
    return Row.each(FUNCTIONS[name], arguments, named)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (Value, PartialRead, Row, int, float))
        or is_tensor(value)
        or hasattr(value, "__array_ufunc__")
    )


SIGNATURES = {
    "score_mod": "score_mod(score, b, h, q_idx, kv_idx)",
    "weight_mod": "weight_mod(score, b, h, q_idx, kv_idx)",
    "mask_mod": "mask_mod(b, h, q_idx, kv_idx)",
    "out_mod": "out_mod(out, b, h, q_idx, column)",
    "q_mod": "q_mod(row, b, h, q_idx, column)",
    "k_mod": "k_mod(row, b, h_kv, kv_idx, column)",
}
_RETURNED = {
    "score_mod": "score",
    "mask_mod": "condition",
    "out_mod": "number",
    "q_mod": "number",
    "k_mod": "number",
}


def _positions() -> tuple[Value, ...]:
    return tuple([Value(name, "int32", 0, _POSITION_MAX) for name in ("b", "h", "q", "kv")])


def split_mask(score: Value) -> tuple[Value, list[str]]:
    """Conditions that give -inf at the outside of a score, as masks: they say the same and cost less."""
    conditions: list[str] = []
    while score.arms:
        condition, a, b = score.arms
        if "score" in identifiers(condition.text):
            break
        if b.text == LOWEST:
            conditions.append(condition.text)
            score = a
        elif a.text == LOWEST:
            conditions.append(f"(!{condition.text})")
            score = b
        else:
            break
    return score, conditions


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def variable_of(function: Any, value: Any) -> str | None:
    """What a function calls a value."""
    owner = getattr(function, "__self__", None)
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    if code is None:
        owner = function
    else:
        for name, cell in zip(code.co_freevars, inner.__closure__ or ()):
            if cell.cell_contents is value:
                return name
        for name in code.co_names:
            if inner.__globals__.get(name) is value:
                return name
    for name, attribute in [
        *getattr(owner, "__dict__", {}).items(),
        *getattr(owner, "_parameters", {}).items(),
        *getattr(owner, "_buffers", {}).items(),
    ]:
        if attribute is value:
            return name
    return None


@functools.lru_cache(maxsize=1000)
def _asks_for_len(code: types.CodeType) -> bool:
    """Whether a function calls len() itself, and may be given another one: not where it sets globals."""
    names = [code, *[const for const in code.co_consts if isinstance(const, types.CodeType)]]
    return any("len" in part.co_names for part in names) and not any(
        step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        for part in names
        for step in dis.get_instructions(part)
    )


def _with_sizes(function: Any, tracer: Tracer) -> Any:
    """The function with a len() that gives a Size: Python's own makes an int of whatever a tensor answers."""
    inner = getattr(function, "__func__", function)
    if (
        not isinstance(inner, types.FunctionType)
        or "len" in inner.__globals__
        or not _asks_for_len(inner.__code__)
    ):
        return function

    def length(value: Any) -> int:
        if isinstance(value, PartialRead):
            return value.shape[0]
        return tracer.size(value, 0) if is_tensor(value) and value.dim() else builtins.len(value)

    copy = types.FunctionType(
        inner.__code__,
        {**inner.__globals__, "len": length},
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy if inner is function else types.MethodType(copy, function.__self__)


_mode_class: Any = None


def torch_mode() -> Any:
    """Sees every call of torch on real tensors too: `slopes[h]` asks the tensor, not the stand-in."""
    global _mode_class
    if _mode_class is None:
        import torch
        from torch.overrides import TorchFunctionMode

        torch_module.append(torch)

        class ProgramMode(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, arguments: Any = (), named: Any = None
            ) -> Any:
                if _has_stand_in((arguments, named)):
                    return tracers[-1].call_torch(function, arguments, named or {})
                if is_compiling():
                    return function(*arguments, **(named or {}))
                tracers[-1].looked = True
                return _on_tensor(function, arguments, named or {})

        _mode_class = ProgramMode
    return _mode_class()


def _on_tensor(function: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """A real tensor's answer; its sizes are read anew at each call."""
    tensor, name = arguments[0] if arguments else None, getattr(function, "__name__", "")
    if not is_tensor(tensor):
        return function(*arguments, **named)
    if name == "__get__" and function.__self__.__name__ == "shape":
        return tracers[-1].shape(tensor)
    if name == "size":
        dimension = named.get("dim", arguments[1] if len(arguments) > 1 else None)
        return tracers[-1].shape(tensor) if dimension is None else tracers[-1].shape(tensor)[dimension]
    if name in ("numel", "nelement"):
        return tracers[-1].shape(tensor).numel()
    return function(*arguments, **named)


def _has_stand_in(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_stand_in, value))
    if isinstance(value, dict):
        return any(map(_has_stand_in, value.values()))
    return isinstance(value, STAND_INS)


def _dtype_name(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def element_type(array: Any, name: str = "a captured tensor") -> str:
    """ "fp32", ..., "bool" of a tensor or array. Raises WrongType for types that programs cannot read."""
    dtype = _dtype_name(array)
    if dtype not in ELEMENTS:
        raise WrongType(f"{name} has type {dtype}: programs read {', '.join(ELEMENTS)}; convert it.")
    return ELEMENTS[dtype]


def is_scalar(value: Any) -> bool:
    """Whether a capture is a number: a Python one, or a tensor without dimensions on the CPU that is not differentiated."""
    return isinstance(value, (int, float)) or (
        is_tensor(value)
        and value.dim() == 0
        and value.device.type == "cpu"
        and not value.requires_grad
        and (is_compiling() or _is_plain(value))
    )


def _is_plain(tensor: Any) -> bool:
    """Whether it has no tangent, and no transform of torch.func wraps it, which may hide a tangent, a gradient or a batch."""
    torch = loaded_torch()
    return (
        not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch.autograd.forward_ad.unpack_dual(tensor).tangent is None
    )


def is_real(scalar: Any) -> bool:
    return scalar.dtype.is_floating_point if is_tensor(scalar) else isinstance(scalar, float)

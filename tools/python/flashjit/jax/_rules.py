"""What each operation of a jaxpr is in flashjit's language: rules that make elements of a result from elements of operands."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import _arithmetic as ops
from .. import _functions  # noqa: F401  (fills FUNCTIONS)
from .. import _values as v
from .._torch_names import FUNCTIONS
from .._values import ELEMENTS, Value, converted, literal
from ..errors import InvalidArgument, WrongType

_MOST_UNROLLED = 256
_NAN = Value("(0.0 / 0.0)", "float32")


class Elements:
    """An array whose elements are values of the program. at: an element by its indices. is_capture: whether at() clamps
    indices itself."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        at: Callable[[tuple[Value, ...]], Value],
        is_capture: bool = False,
    ) -> None:
        self.shape, self.dtype, self.is_capture = tuple(shape), dtype, is_capture
        self.at = at if self.shape else _once(at)


def scalar(value: Value) -> Elements:
    return Elements((), value.dtype_name, lambda _: value)


def _once(at: Callable[[tuple[Value, ...]], Value]) -> Callable[[tuple[Value, ...]], Value]:
    value = functools.cache(lambda: at(()))
    return lambda indices: value()


def dtype_of(dtype: Any, what: str = "a program") -> str:
    name = str(dtype)
    if name not in ELEMENTS:
        advice = "float32" if name == "float64" else "int32"
        raise WrongType(
            f"{what} has a value of {name}: programs compute in float32, int32, int64 and bool, and read "
            f"{', '.join(ELEMENTS)}; convert it with .astype(jnp.{advice})."
        )
    return name


def _out_dtype(equation: Any) -> str:
    """The type of the result. What a Python float makes of an int is a float64 with jax_enable_x64 until it meets a float32."""
    aval = equation.outvars[0].aval
    return "float32" if str(aval.dtype) == "float64" and aval.weak_type else dtype_of(aval.dtype)


def constant(number: Any) -> Value:
    return _NAN if isinstance(number, float) and math.isnan(number) else literal(number)


def _typed(value: Value, dtype: str) -> Value:
    """The value as a jaxpr types it. Numbers take the type of what they meet."""
    return value if value.number is not None or value.dtype_name == dtype else converted(value, dtype)


# --- elementwise -------------------------------------------------------------------------------------------------------


def _elementwise(function: Callable[..., Value]) -> Callable[..., Elements]:
    def rule(equation: Any, *operands: Elements) -> Elements:
        dtype = _out_dtype(equation)

        def at(indices: tuple[Value, ...]) -> Value:
            return _typed(function(*[x.at(indices if x.shape else ()) for x in operands]), dtype)

        return Elements(equation.outvars[0].aval.shape, dtype, at)

    return rule


def _comparison(operator: str) -> Callable[..., Elements]:
    def compare(x: Value, y: Value) -> Value:
        if x.type == y.type == "int":
            known = _decided(operator, x, y)
            if known is not None:
                return literal(known)
        return ops.compare(operator, x, y)

    return _elementwise(compare)


def _decided(operator: str, x: Value, y: Value) -> bool | None:
    """What a comparison of ints gives for all values that they may have, if that is known."""
    if operator in (">", ">="):
        return _decided("<" if operator == ">" else "<=", y, x)
    if operator == "<":
        return True if x.high < y.low else False if x.low >= y.high else None
    if operator == "<=":
        return True if x.high <= y.low else False if x.low > y.high else None
    return None


def _divide(x: Value, y: Value) -> Value:
    return ops.divide(x, y) if "float" in (x.type, y.type) else ops.truncated_divide(x, y)


def _select(which: Value, *cases: Value) -> Value:
    if which.number is not None:
        return cases[int(which.number)]
    if which.type == "bool":
        return ops.where(which, cases[1], cases[0])
    result = cases[-1]
    for number, case in reversed(list(enumerate(cases[:-1]))):
        result = ops.where(ops.compare("==", which, number), case, result)
    return result


def _round(equation: Any, x: Elements) -> Elements:
    if int(equation.params["rounding_method"]) == 1:  # to the even neighbour
        return _elementwise(FUNCTIONS["round"])(equation, x)

    def away_from_zero(value: Value) -> Value:
        half = FUNCTIONS["floor"](ops.add(ops.absolute(value), 0.5))
        return ops.where(ops.compare("<", value, 0.0), ops.negate(half), half)

    return _elementwise(away_from_zero)(equation, x)


def _shift_right_logical(x: Value, y: Value) -> Value:
    if x.low < 0:
        raise InvalidArgument(
            "a program shifts right with the sign: use jax.lax.shift_right_arithmetic, or mask the bits first."
        )
    return ops.shift_right(x, y)


def _integer_pow(equation: Any, x: Elements) -> Elements:
    return _elementwise(lambda value: ops.power(value, equation.params["y"]))(equation, x)


def _clamp(low: Value, x: Value, high: Value) -> Value:
    return ops.chosen("min", ops.chosen("max", x, low), high)


def _convert(equation: Any, x: Elements) -> Elements:
    dtype = _out_dtype(equation)

    def convert(value: Value) -> Value:
        same_kind = value.type == Value("", dtype).type
        return (
            value
            if same_kind and value.number is not None and dtype not in ("uint8", "int8", "int16")
            else converted(value, dtype)
        )

    return _elementwise(convert)(equation, x)


# --- arrays ------------------------------------------------------------------------------------------------------------


def _mapped(indices: Callable[..., tuple[Value, ...]]) -> Callable[..., Elements]:
    """A rule whose elements are the operand's at other indices."""

    def rule(equation: Any, x: Elements) -> Elements:
        aval = equation.outvars[0].aval
        return Elements(aval.shape, x.dtype, lambda given: x.at(indices(equation.params, x.shape, given)))

    return rule


def _broadcast(params: Any, shape: tuple[int, ...], given: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(
        literal(0) if size == 1 else given[dimension]
        for size, dimension in zip(shape, params["broadcast_dimensions"])
    )


def _squeeze(params: Any, shape: tuple[int, ...], given: tuple[Value, ...]) -> tuple[Value, ...]:
    rest = iter(given)
    return tuple(literal(0) if d in params["dimensions"] else next(rest) for d in range(len(shape)))


def _reshape(params: Any, shape: tuple[int, ...], given: tuple[Value, ...]) -> tuple[Value, ...]:
    to = params["new_sizes"]
    if [size for size in shape if size != 1] == [size for size in to if size != 1]:
        rest = iter([index for size, index in zip(to, given) if size != 1])
        return tuple(literal(0) if size == 1 else next(rest) for size in shape)
    number = literal(0)
    for size, index in zip(to, given):
        number = ops.add(ops.multiply(number, size), index)
    indices: list[Value] = []
    for size in reversed(shape):
        indices.insert(0, ops.remainder(number, size))
        number = ops.floor_divide(number, size)
    return tuple(indices)


def _transpose(params: Any, shape: tuple[int, ...], given: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(given[params["permutation"].index(d)] for d in range(len(shape)))


def _slice(params: Any, shape: tuple[int, ...], given: tuple[Value, ...]) -> tuple[Value, ...]:
    strides = params["strides"] or (1,) * len(shape)
    return tuple(
        ops.add(ops.multiply(i, step), start)
        for i, start, step in zip(given, params["start_indices"], strides)
    )


def _reverse(params: Any, shape: tuple[int, ...], given: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(
        ops.subtract(size - 1, index) if d in params["dimensions"] else index
        for d, (size, index) in enumerate(zip(shape, given))
    )


def _start(x: Elements, dimension: int, length: int, start: Value) -> Value:
    """Where a slice begins, moved into the array as XLA does."""
    last = x.shape[dimension] - length
    if last == 0 and length > 1 or x.shape[dimension] == 1:
        return literal(0)
    if start.low >= 0 and start.high <= last or x.is_capture and length == 1:
        return start
    return _clamp(literal(0), start, literal(last))


def _dynamic_slice(equation: Any, x: Elements, *starts: Elements) -> Elements:
    lengths = equation.params["slice_sizes"]

    def at(given: tuple[Value, ...]) -> Value:
        begins = [_start(x, d, lengths[d], start.at(())) for d, start in enumerate(starts)]
        return x.at(tuple(_sum(begin, index) for begin, index in zip(begins, given)))

    return Elements(equation.outvars[0].aval.shape, x.dtype, at)


def _sum(a: Value, b: Value) -> Value:
    return b if a.number == 0 else a if b.number == 0 else ops.add(a, b)


def _gather(equation: Any, x: Elements, indices: Elements) -> Elements:
    params, aval = equation.params, equation.outvars[0].aval
    numbers, lengths = params["dimension_numbers"], params["slice_sizes"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(x.shape)) if d not in gone]
    mode = str(params["mode"]).rpartition(".")[2]

    def at(given: tuple[Value, ...]) -> Value:
        batch = tuple(index for d, index in enumerate(given) if d not in numbers.offset_dims)
        full = [literal(0)] * len(x.shape)
        inside = literal(True)
        for k, d in enumerate(numbers.start_index_map):
            start = indices.at((*batch, literal(k)))
            if mode == "FILL_OR_DROP":
                for test in (_known_compare(start, 0), _known_compare(x.shape[d] - lengths[d], start)):
                    inside = ops.bits("&", inside, test)
            full[d] = _start(x, d, lengths[d], start)
        for d, place in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims):
            full[d] = batch[place]
        for d, place in zip(kept, numbers.offset_dims):
            full[d] = _sum(full[d], given[place])
        value = x.at(tuple(full))
        return (
            value if inside.number is True else ops.where(inside, value, _fill(params["fill_value"], x.dtype))
        )

    return Elements(aval.shape, x.dtype, at)


def _known_compare(a: Any, b: Any) -> Value:
    """a >= b of ints."""
    x, y = literal(a), literal(b)
    known = _decided(">=", x, y)
    return ops.compare(">=", x, y) if known is None else literal(known)


def _fill(value: Any, dtype: str) -> Value:
    """What JAX gives where an index is outside: by default NaN, or the least int, or True."""
    if value is None:
        number = (
            math.nan
            if Value("", dtype).type == "float"
            else True
            if dtype == "bool"
            else v.int_range(dtype)[0]
        )
    else:
        number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) >= 2**31:
        raise InvalidArgument(
            'a program has no least int to give for an index outside of the array: read it with mode="clip".'
        )
    return constant(number)


def _concatenate(equation: Any, *parts: Elements) -> Elements:
    dimension = equation.params["dimension"]
    ends = list(itertools.accumulate(part.shape[dimension] for part in parts))

    def at(given: tuple[Value, ...]) -> Value:
        place = given[dimension]

        def element(number: int) -> Value:
            begin = ends[number] - parts[number].shape[dimension]
            inside = ops.subtract(place, begin) if place.number is None else literal(place.number - begin)
            return parts[number].at((*given[:dimension], inside, *given[dimension + 1 :]))

        return _one_of(place, ends, element)

    return Elements(equation.outvars[0].aval.shape, _out_dtype(equation), at)


def _stack(equation: Any, *parts: Elements) -> Elements:
    axis = equation.params["axis"]

    def at(given: tuple[Value, ...]) -> Value:
        rest = (*given[:axis], *given[axis + 1 :])
        return _one_of(given[axis], range(1, len(parts) + 1), lambda number: parts[number].at(rest))

    return Elements(equation.outvars[0].aval.shape, _out_dtype(equation), at)


def _one_of(place: Value, ends: Sequence[int], element: Callable[[int], Value]) -> Value:
    """The element of the part in which a place lies. ends: where the parts do."""
    if place.number is not None:
        return element(next(number for number, end in enumerate(ends) if place.number < end))
    result = element(len(ends) - 1)
    for number in range(len(ends) - 2, -1, -1):
        result = ops.where(ops.compare("<", place, ends[number]), element(number), result)
    return result


def _reduction(function: Callable[[Value, Value], Value]) -> Callable[..., Elements]:
    def rule(equation: Any, x: Elements) -> Elements:
        axes, aval = equation.params["axes"], equation.outvars[0].aval
        count = math.prod(x.shape[d] for d in axes)
        if not 1 <= count <= _MOST_UNROLLED:
            raise InvalidArgument(
                f"a program adds up {count} elements, which are written one by one: 1 to {_MOST_UNROLLED} are "
                "possible; compute the sum before the call."
            )

        def at(given: tuple[Value, ...]) -> Value:
            elements = []
            for place in itertools.product(*[range(x.shape[d]) for d in axes]):
                rest, chosen = iter(given), dict(zip(axes, map(literal, place)))
                elements.append(
                    x.at(tuple(chosen[d] if d in chosen else next(rest) for d in range(len(x.shape))))
                )
            return _typed(functools.reduce(function, elements), _out_dtype(equation))

        return Elements(aval.shape, _out_dtype(equation), at)

    return rule


RULES: dict[str, Callable[..., Elements]] = {
    **{
        name: _elementwise(FUNCTIONS[of_torch])
        for name, of_torch in {
            **{
                name: name
                for name in (
                    "exp exp2 expm1 log log1p sqrt rsqrt tanh erf erfc sin cos tan sinh cosh floor ceil abs neg sign".split()
                )
            },
            "logistic": "sigmoid",
            "is_finite": "isfinite",
        }.items()
    },
    "add": _elementwise(ops.add),
    "add_any": _elementwise(ops.add),
    "sub": _elementwise(ops.subtract),
    "mul": _elementwise(ops.multiply),
    "div": _elementwise(_divide),
    "rem": _elementwise(ops.truncated_remainder),
    "max": _elementwise(functools.partial(ops.chosen, "max")),
    "min": _elementwise(functools.partial(ops.chosen, "min")),
    "pow": _elementwise(ops.power),
    "integer_pow": _integer_pow,
    "square": _elementwise(lambda x: ops.multiply(x, x)),
    "round": _round,
    "clamp": _elementwise(_clamp),
    "select_n": _elementwise(_select),
    **{
        name: _comparison(sign)
        for name, sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items()
    },
    **{
        name: _elementwise(functools.partial(ops.bits, sign))
        for name, sign in {"and": "&", "or": "|", "xor": "^"}.items()
    },
    "not": _elementwise(ops.invert),
    "shift_left": _elementwise(ops.shift_left),
    "shift_right_arithmetic": _elementwise(ops.shift_right),
    "shift_right_logical": _elementwise(_shift_right_logical),
    "convert_element_type": _convert,
    "broadcast_in_dim": _mapped(_broadcast),
    "reshape": _mapped(_reshape),
    "squeeze": _mapped(_squeeze),
    "transpose": _mapped(_transpose),
    "slice": _mapped(_slice),
    "rev": _mapped(_reverse),
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "concatenate": _concatenate,
    "stack": _stack,
    "reduce_sum": _reduction(ops.add),
    "reduce_max": _reduction(functools.partial(ops.chosen, "max")),
    "reduce_min": _reduction(functools.partial(ops.chosen, "min")),
    "reduce_and": _reduction(functools.partial(ops.bits, "&")),
    "reduce_or": _reduction(functools.partial(ops.bits, "|")),
}
UNCHANGED = ("copy", "copy_p", "pvary", "optimization_barrier")  # pvary: of a shard_map
_LOOP = ": it has no loops and no branches; use jnp.where"
INSTEAD = {
    "cond": _LOOP,
    "while": _LOOP,
    "scan": _LOOP,
    "stop_gradient": ": apply jax.lax.stop_gradient to what is captured, before the call",
    "custom_vjp_call": ": its derivative is made of what it computes, so leave the rule out",
    "dot_general": ": write sums of products, or compute it before the call",
    "random_bits": ": draw numbers before the call, and capture them",
    "cbrt": ": write x ** (1 / 3) of what is positive",
}

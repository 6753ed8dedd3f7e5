"""What torch.compile needs in order to follow the trace of a program."""
from __future__ import annotations

import functools
import sys
from typing import Any


def without_side_effects(function: Any, *arguments: Any) -> Any:
    """A call that leaves what is outside of it as it was. Within a checkpoint torch.compile refuses those that set anything
    even so, as a tracer and a mode of torch do while they are at work."""
    import torch
    unchecked = getattr(torch._dynamo.utils, "_disable_side_effect_safety_checks_for_current_subtracer", None)
    return function(*arguments) if unchecked is None else unchecked(function, *arguments)


def call_compiled(function: Any, *arguments: Any) -> Any:
    """Calls a function with stand-ins: F.sigmoid and F.tanh, too, which call a method and nothing else, reach them."""
    from torch._dynamo.comptime import comptime
    comptime(_hand_over)
    try:
        return function(*arguments)
    finally:
        comptime(_hand_over_no_more)


def _hand_over(context: Any) -> None:
    """While torch.compile traces: until _hand_over_no_more(), or the end of its work if that fails."""
    _compare_with_symbols()
    added = _methods() - _handed_over()
    _handed_over().update(added)
    hooks = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    hooks.add_cleanup_hook(lambda: _handed_over().difference_update(added))


def _hand_over_no_more(context: Any) -> None:
    _handed_over().difference_update(_methods())


def _methods() -> set[Any]:
    functional = sys.modules["torch.nn.functional"]
    return {functional.sigmoid, functional.tanh}


def _handed_over() -> set[Any]:
    """What torch.compile hands over to modes of torch."""
    return sys.modules["torch._dynamo.variables.torch"].get_overridable_functions()  # type: ignore[no-any-return]


_REFLECTED = {"__lt__": "__gt__", "__gt__": "__lt__", "__le__": "__ge__", "__ge__": "__le__", "__eq__": "__eq__", "__ne__": "__ne__"}


@functools.lru_cache(maxsize=None)
def _compare_with_symbols() -> None:
    """PyTorch's compiler does not ask an object that is compared with a symbol: 2.15 takes `==` for False, and ends at `<`; 2.11 fails,
    at `~` of an object, too. From here on it asks stand-ins."""
    try:
        from torch._dynamo.variables.builtin import BuiltinVariable
        answer = BuiltinVariable._comparison_with_symnode
        known = BuiltinVariable._binop_handlers.cache_clear, BuiltinVariable.call_function_handler_cache.clear
    except (ImportError, AttributeError):  # the compiler itself answers, or refuses
        return
    try:
        from torch._dynamo.variables.object_protocol import generic_richcompare as compare
    except ImportError:
        def compare(tx: Any, left: Any, right: Any, name: str) -> Any:  # type: ignore[misc]
            return left.call_method(tx, name, [right], {})

        BuiltinVariable.call_invert = lambda self, tx, value: value.call_method(tx, "__invert__", [], {}) if _is_stand_in(value) else None  # type: ignore

    def ask(self: Any, tx: Any, left: Any, right: Any) -> Any:
        name = f"__{self.fn.__name__}__"
        if _is_stand_in(left):
            return compare(tx, left, right, name)
        if _is_stand_in(right):
            return compare(tx, right, left, _REFLECTED[name])
        return answer(self, tx, left, right)

    BuiltinVariable._comparison_with_symnode = ask  # type: ignore[method-assign]
    for forget in known:
        forget()


def _is_stand_in(variable: Any) -> bool:
    from ._tracing import STAND_INS
    try:
        return issubclass(variable.python_type(), STAND_INS)
    except NotImplementedError:
        return False

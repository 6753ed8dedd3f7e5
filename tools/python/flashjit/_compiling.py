"""What torch.compile needs in order to follow the trace of a program."""

from __future__ import annotations

import functools
import operator
import sys
from typing import Any


def without_side_effects(function: Any, *arguments: Any) -> Any:
    """Calls a function that changes nothing outside of it. Within a checkpoint torch.compile refuses calls that set anything,
    even for a while, as a tracer and a mode of torch do."""
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
    _ask_stand_ins()
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


# What a stand-in is asked on the left of an operator, and on the right of it.
_ASKED = {
    operator.invert: ("__invert__",),
    operator.lt: ("__lt__", "__gt__"),
    operator.gt: ("__gt__", "__lt__"),
    operator.le: ("__le__", "__ge__"),
    operator.ge: ("__ge__", "__le__"),
    operator.eq: ("__eq__", "__eq__"),
    operator.ne: ("__ne__", "__ne__"),
    operator.and_: ("__and__", "__rand__"),
    operator.or_: ("__or__", "__ror__"),
    operator.xor: ("__xor__", "__rxor__"),
}


@functools.cache
def _ask_stand_ins() -> None:
    """PyTorch's compiler has its own answers to these operators: 2.15 takes `==` of an object and a symbol for False, and ends at
    `<`; 2.11 fails at `2 <= x` and `~x`. From here on it asks stand-ins."""
    try:
        from torch._dynamo.symbolic_convert import compare_op_handlers
        from torch._dynamo.variables.builtin import BuiltinVariable

        answer = BuiltinVariable.call_function
    except (ImportError, AttributeError):  # a newer compiler itself answers, or refuses
        return

    def call_function(self: Any, tx: Any, arguments: Any, named: Any) -> Any:
        for i, (name, argument) in enumerate(zip(_ASKED.get(self.fn, ()), arguments)):
            if _is_stand_in(argument):
                return argument.call_method(tx, name, [*arguments[:i], *arguments[i + 1 :]], {})
        return answer(self, tx, arguments, named)

    BuiltinVariable.call_function = call_function  # type: ignore[method-assign]
    for sign, handler in compare_op_handlers.items():
        if getattr(handler, "__func__", None) is answer:  # bound before
            compare_op_handlers[sign] = call_function.__get__(handler.__self__)


def _is_stand_in(variable: Any) -> bool:
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    from ._rows import STAND_INS

    return isinstance(variable, UserDefinedObjectVariable) and issubclass(variable.python_type(), STAND_INS)

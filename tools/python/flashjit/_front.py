"""The compiled front (tools/torch): how a call was launched is kept, and done again without Python for calls that look alike.

Optional: where there is no libflashjit_torch.so, or FLASHJIT_FRONT=off, every call goes through Python, with the same results and
errors. So a call that the front does not know, or that is not plain, costs what it costs without it and a microsecond.
"""

from __future__ import annotations

import array
import ctypes
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ._call_types import NO_RNG, NOTHING, OF_BOTH_PASSES, Fixed
from ._installed import library_path
from ._launch import address_of
from ._library import BackwardArgs, Capture, ForwardArgs, runtime, word
from ._structs import words_at, words_lent
from ._tracing import ELEMENT_MODS
from .errors import InternalError
from .programs import known_program

_INTERFACE = 6  # of both files: flashjit/_front.py and tools/torch/front.cpp
_MOST_CALLS, _MOST_OF_PLAN = 4096, 64
_MISSING = inspect.Parameter.empty
_CAPTURE_WORDS, _CAPTURE_DATA = ctypes.sizeof(Capture) // 8, word(Capture, "data")


def _words(structure: Any, fixed: Sequence[str], *members: str) -> dict[str, int]:
    """Where the struct has its pointers to tensors."""
    lent = words_lent(structure, fixed)
    return {
        **{name: words_at(structure, name)[0] for name in members},
        **{"workspace": lent.workspace, "lists": lent.lists, **dict(zip(fixed, lent.fixed))},
    }


#: The tensors beside Q, K and V that both passes read.
FIXED = OF_BOTH_PASSES
_WORDS = {
    "forward": _words(ForwardArgs, Fixed._fields, "q", "k", "v", "out", "lse", "captures"),
    "backward": _words(
        BackwardArgs,
        FIXED,
        *("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "dsinks", "captures"),
    ),
}
_RESULTS = {"forward": ("out", "lse", "nothing"), "backward": ("dq", "dk", "dv")}
_KINDS = {"lists": "l"}
#: The members of what a call returns, or uses, that may be the caller's.
MEMORY = ("out", "lse", "workspace")


def _open() -> Any:
    """The module of libflashjit_torch.so, or None."""
    path = library_path().parent / "libflashjit_torch.so"
    fits = sys.implementation.name == "cpython" and "t" not in getattr(sys, "abiflags", "t")
    if os.environ.get("FLASHJIT_FRONT") == "off" or not fits or not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader("flashjit._front_module", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (
        ImportError,
        AttributeError,
    ):  # of another system, or a PyTorch that does not say where its tensors lie
        return None
    if getattr(module, "INTERFACE", None) != _INTERFACE:
        raise InternalError(
            f"{path} belongs to another version of flashjit: install the wheel again, build the CMake target "
            "flashjit_torch, or set FLASHJIT_FRONT=off."
        )
    return module


_module = _open()
#: What autograd calls for the two passes of a recorded call, or None: see _autograd.Call.
RECORDED = None if _module is None else (_module.recorded_forward, _module.recorded_backward)


class _ByPython:
    """What stands for a front that is called itself where there is none."""

    __slots__ = ()

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(False, *args, **named)  # type: ignore[attr-defined]


#: A base of callables: a call that looks like one that was kept is launched without Python, and others are given to their _call(), after
#: whether they are to be kept.
CallableFront: Any = _ByPython if _module is None else _module.Front


class Calls:
    """A function's calls that were launched, by their arguments.

    find(*arguments): the result of a call that looks like one that was kept; None: of a call that is to be kept, which it is when met again;
    NotImplemented: of one that is not plain."""

    __slots__ = ("find", "_front", "_members", "_pass")

    def __init__(
        self,
        kinds: str,
        members: Sequence[str],
        names: tuple[str, ...],
        defaults: tuple[Any, ...],
        most: int = _MOST_CALLS,
        launched: str = "forward",
        programs: Sequence[str] = (),
        maker: Any = None,
        asks_all: bool = True,
    ) -> None:
        """maker: of the front; None: the module's. asks_all: whether modes, transforms and autocast change what a call gives. kinds: of parameters, letters as tools/torch/front.cpp has them. members: of the struct, that tensors are; or "".
        defaults: _MISSING where there is none. launched: the pass. programs: the parameters that are programs."""
        self._members, self._pass = members, launched
        self._front: Any = None
        self.find: Callable[..., Any] = _not_implemented
        if _module is not None:
            self._front = (maker or _module.Front)(
                kinds,
                names,
                defaults,
                _MISSING,
                most,
                functools.partial(_parts_of_program, (*programs,)),
                asks_all,
            )
            self.find = self._front.call

    @staticmethod
    def of_gradients(given: str, saved: Sequence[str]) -> Calls:
        """Calls of a plan's backward pass. Parameters are the members' tensors, all saved but the first, and lists of tiles."""
        members = (given, *saved, "lists")
        kinds = "t" + "s" * len(saved) + "l"
        values = (_MISSING,) * len(kinds)
        return Calls(kinds, members, members, values, _MOST_OF_PLAN, "backward", asks_all=False)

    @staticmethod
    def of_bound(
        maker: Any, defaults: Mapping[str, Any], changing: Sequence[str], captures: Mapping[str, Any]
    ) -> Calls:
        """Parameters q, k and v, the caller's memory, and members' tensors with defaults. Calls may give only the changing ones: a
        space keeps them from naming the rest. maker: of the front."""
        members = ("q", "k", "v", *defaults, "")
        given = ("q", "k", "v", *MEMORY, *changing)
        names = [name if name in given else f" {name}" for name in members]
        kinds = "ttt" + "".join(["m" if name in MEMORY else _KINDS.get(name, "t") for name in defaults])
        values = (_MISSING, _MISSING, None, *defaults.values(), captures)
        return Calls(kinds + "c", members, tuple(names), values, _MOST_OF_PLAN, maker=maker, asks_all=False)

    @staticmethod
    def of_front(front: Any, members: Sequence[str]) -> Calls:
        """The Calls of a front that of_bound() made, and that holds no Calls: both would live until the garbage is collected."""
        calls = Calls.__new__(Calls)
        calls._front, calls._members, calls._pass, calls.find = front, members, "forward", front.call
        return calls

    @staticmethod
    def of(
        function: Callable[..., Any],
        tensors: Mapping[str, str],
        values: Sequence[str],
        ignored: Sequence[str],
        programs: Sequence[str],
    ) -> Calls:
        """tensors: parameters of the function, and the members that they are; MEMORY is the caller's for results, lists are tile
        lists. values: parameters whose values count. ignored: parameters without effect. programs: parameters that are programs; the
        values of their names are in `captures`. Others have their defaults, or the call is not plain."""
        parameters = inspect.signature(function).parameters.values()
        named = {x.name: x.default for x in parameters if x.kind is not x.VAR_KEYWORD and x.name[0] != "_"}
        kinds = {**dict.fromkeys(named, "d"), **dict.fromkeys(values, "v"), **dict.fromkeys(ignored, "i")}
        kinds |= {x: "m" if member in MEMORY else _KINDS.get(member, "t") for x, member in tensors.items()}
        kinds |= {**dict.fromkeys(programs, "p"), "captures": "c"} if programs else {}
        members = [tensors.get(x, "") for x in named]
        in_order = [name for name in named if name in programs]
        return Calls("".join(kinds.values()), members, tuple(named), tuple(named.values()), programs=in_order)

    def arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """One for each parameter."""
        return self._front.arguments(*args, **named)

    def tensors(self, given: tuple[Any, ...]) -> dict[str, tuple[int, Any]]:
        """The given tensors, and lists, by member, each with its place among all tensors; without the caller's memory for results."""
        tensors = [(x, value) for x, value in zip(self._members, given) if x and x not in MEMORY]
        return {x: (i, value) for i, (x, value) in enumerate(tensors) if value is not None}

    def places_of_captures(
        self, given: tuple[Any, ...], plan: Any, values: Sequence[Any]
    ) -> list[tuple[int, int]] | None:
        """Where each captured tensor of the plan is among the given ones and among the values; None where one is not given."""
        if not plan.tensor_places:
            return []
        captured = dict((name, (i, value)) for i, (name, value) in enumerate(self._front.captured(given)))
        found = [(captured.get(plan.problem.names[i], (0, None)), i) for i in plan.tensor_places]
        if any(value is not values[i] for (_, value), i in found):
            return None
        return [(place, i) for (place, _), i in found]

    def forget(self) -> None:
        if self._front is not None:
            self._front.forget()

    @property
    def front(self) -> Any:
        return self._front

    @property
    def members(self) -> Sequence[str]:
        return self._members

    @property
    def tensor_count(self) -> int:
        """How many of the parameters delegate()'s functions may be given."""
        return sum(bool(member) and member not in MEMORY for member in self._members)

    def refuse(self, given: tuple[Any, ...]) -> None:
        self._front.refuse(given)

    def delegate(self, given: tuple[Any, ...], function: Callable[..., Any], places: tuple[int, ...]) -> None:
        """Calls that look like this one give the function None, and their tensors at these places: first the parameters', and lists, then
        what programs capture; None where a place is negative."""
        self._front.delegate(given, function, places)

    def keep(self, given: tuple[Any, ...], filled: _Filled, result: Any, *function: Any) -> bool:
        """Whether calls like this one can be launched by their pointers alone. function: what is then given the result, and tensors at
        which places, as in delegate()."""
        words, plan, at = filled.words, filled.plan, _WORDS[self._pass]
        captures = self.places_of_captures(given, plan, filled.values)
        if captures is None:
            return False
        tail = bytes(filled.captures or b"")
        behind = len(words) + _CAPTURE_DATA
        inputs = [(len(self._members) + place, behind + i * _CAPTURE_WORDS) for place, i in captures]
        places: dict[str, Any] = {}
        for i, (member, value) in enumerate(zip(self._members, given)):
            if not member or value is None:
                continue
            if words[at[member]] != (value.front_key[0] if member == "lists" else value.data_ptr()):
                return False  # the launch read a copy
            inputs.append((i, at[member]))
            places[member] = i, value
        if "v" not in places and words[at["v"]] == words[at["k"]]:  # V is K's first columns
            inputs.append((places["k"][0], at["v"]))
            places["v"] = places["k"]
        results = result if type(result) is tuple else (result,)
        returned = _RESULTS[self._pass][: len(results)]
        layouts = [
            _result(made, name, places.get(name), at.get(name, 0), words)
            for made, name in zip(results, returned)
        ]
        others = [name for name in at if name not in places and words[at[name]]]
        if None in layouts or len(results) > 3 or not {*others} <= {*returned, "workspace", "captures"}:
            return False
        needed = words[at["workspace"] + 1]
        workspace = (at["workspace"], (needed,), (1,), torch.uint8) if "workspace" in others else None
        shared = runtime()
        return self._front.remember(
            given,
            filled,
            shared,
            shared.generation,
            address_of(self._pass, plan.index),
            shared.address if plan.index >= 0 else 0,
            plan.spec.address,
            plan.index,
            words.tobytes() + tail,
            at["captures"] if tail else 0,
            len(words) if tail else 0,
            tuple(inputs),
            tuple(layouts),
            type(result) is tuple,
            workspace,
            *function,
        )


def _result(made: Any, name: str, place: Any, word: int, words: array.array[int]) -> Any:
    """A result as the front makes it: (parameter or -1, word, size, stride, type), or None where it cannot."""
    if made is None or name == "nothing":
        return (-1, 0, None, None, None) if made is None and name == "nothing" else None
    if type(made) is not Tensor or made.data_ptr() != words[word]:
        return None
    if place is not None:
        return (place[0], word, None, None, None) if place[1] is made else None
    is_dense = made.untyped_storage().nbytes() == made.numel() * made.element_size()
    return (-1, word, tuple(made.shape), made.stride(), made.dtype) if is_dense else None


def _parts_of_program(names: Sequence[str], *programs: Any) -> Any:
    """(form, its names, captured tensors, numbers) of attention()'s programs, which have these names; None where Python has to
    read them."""
    given = {name: program for name, program in zip(names, programs) if program is not None}
    weight = given.pop("weight_mod", None)
    if weight is not None and "score_mod" in given:
        return None
    score = given.pop("score_mod", weight)
    mods = tuple([given.get(name) for name in ELEMENT_MODS])
    program = known_program(score, given.get("mask_mod"), mods)
    return None if program is None else (program.form, program.form.tensors, program.tensors, program.scalars)


def are_checked(plan: Any, fixed: Fixed) -> bool:
    """Whether each call checks values, as it does on the CPU."""
    return plan.index < 0 and fixed is not NOTHING


def _not_implemented(*_: Any, **named: Any) -> Any:
    return NotImplemented


class _Filled(NamedTuple):
    """What was launched; it lives as long as the front launches it again."""

    plan: Any
    words: array.array[int]
    captures: Any
    values: Sequence[Any]


class Recorder:
    """Keeps how a call that is new to the front was launched."""

    __slots__ = ("_calls", "_given", "_filled", "_function", "_is_recorded", "made")

    def __init__(self, calls: Calls, given: tuple[Any, ...]) -> None:
        self._calls, self._given = calls, given
        self._filled: _Filled | None = None
        self._function: tuple[Callable[..., Any], tuple[int, ...]] | None = None
        self._is_recorded = False
        self.made: Any = None  # (O, LSE) of a recorded call

    def launches(
        self,
        plan: Any,
        words: array.array[int],
        captures: Any,
        values: Sequence[Any],
        fixed: Fixed,
        rng: Any,
        *others: Any,
    ) -> None:
        """What Plan.forward() or backward() launched: kept where calls that look alike differ in pointers alone. others: None in such calls."""
        differ = rng is not NO_RNG or not plan.launches or are_checked(plan, fixed)
        if not differ and others.count(None) == len(others):
            self._filled = _Filled(plan, words, captures, values)

    def records(
        self,
        function: Callable[..., Any],
        plan: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fixed: Fixed,
        values: tuple[Any, ...],
    ) -> None:
        """Notes that autograd records the call. The function is given (O, LSE) if they were launched, lists if the call has some, Q, K and V,
        and the fixed and captured tensors if there are any. Kept only if these are the call's own tensors and no values are checked."""
        self._is_recorded = True
        given = self._calls.tensors(self._given)
        own = [given.get(name, (-1, None)) for name in ("q", "k", "v", *Fixed._fields)]
        captures = self._calls.places_of_captures(self._given, plan, values)
        is_other = any(x is not y for (_, x), y in zip(own, (q, k, v, *fixed)))
        if captures is None or are_checked(plan, fixed) or is_other:
            return
        lists = [given["lists"][0]] if "lists" in given else []
        places = [place for place, _ in own]
        if fixed is NOTHING and not values:
            del places[3:]
        behind = self._calls.tensor_count
        self._function = function, (*lists, *places, *[behind + place for place, _ in captures])

    def keep(self, result: Any) -> Any:
        """The result, when the call is over."""
        calls, given, filled = self._calls, self._given, self._filled
        if torch.are_deterministic_algorithms_enabled() and calls.tensors(given).get("indices"):
            calls.refuse(given)  # each call warns, or is refused
        elif not self._is_recorded:
            if filled is None or not calls.keep(given, filled, result):
                calls.refuse(given)
        elif self._function is None:
            calls.refuse(given)
        elif filled is None or not calls.keep(given, filled, self.made, *self._function):
            calls.delegate(given, *self._function)
        return result


_Function = TypeVar("_Function", bound=Callable[..., Any])


def kept(
    tensors: Mapping[str, str],
    values: Sequence[str],
    ignored: Sequence[str] = (),
    programs: Sequence[str] = (),
) -> Callable[[_Function], _Function]:
    """A function whose calls the front keeps, with the arguments of Calls.of(). It gives `_recorder`, which calls that are new to the front
    have, to attention()."""

    def decorate(function: _Function) -> _Function:
        calls = Calls.of(function, tensors, values, ignored, programs)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if not torch.compiler.is_compiling():
                found = calls.find(*args, **named)
                if found is None:
                    recorder = Recorder(calls, calls.arguments(args, named))
                    return recorder.keep(function(*args, **named, _recorder=recorder))
                if found is not NotImplemented:
                    return found
            return function(*args, **named)

        signature = inspect.signature(function)
        shown = [x for x in signature.parameters.values() if x.name[0] != "_"]
        call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        call._calls = calls  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate

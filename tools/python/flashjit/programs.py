"""Score and mask programs: text in flashjit's language, or Python functions that are traced into it.

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

becomes "c0: fp32 1d; score + (c0[h] * to_float(kv - q))", with the tensor `slopes` as the capture c0. The functions
have the signatures of PyTorch's FlexAttention: score_mod(score, b, h, q_idx, kv_idx), mask_mod(b, h, q_idx, kv_idx).
They are called once, with stand-ins instead of numbers: +, -, *, /, //, %, **, comparisons, &, |, ^, ~, <<, >>, abs and
these functions of torch work on them: where, minimum, maximum, clamp, exp, exp2, log, log2, sqrt, rsqrt, tanh, sigmoid,
sin, cos, floor, ceil, square, relu, remainder, logical_and, logical_or, logical_not, zeros_like, ones_like, full_like.
"""
from __future__ import annotations

import functools
import threading
import types
from typing import Any, Mapping

from ._tracing import SIGNATURES, Tracer, element_type, identifiers, is_real, is_scalar, is_tensor
from .errors import InvalidArgument, WrongType

NAMED_MASKS = {"causal": "kv <= q + seqlen_kv - seqlen_q", "causal_top_left": "kv <= q"}


class Form:
    """What a program computes, without the values of its names.

    score, mask: texts without declarations; "" for none. declared: the declarations that the texts brought along,
    such as "slopes: fp32 1d grad". tensors, scalars: the names that each call gives values for.
    """

    def __init__(self, score: str, mask: str, declared: tuple[str, ...] = (), tensors: tuple[str, ...] = (),
                 scalars: tuple[str, ...] = ()) -> None:
        self.score, self.mask, self.declared, self.tensors, self.scalars = score, mask, declared, tensors, scalars
        self.known = frozenset(map(declared_name, declared))
        self.in_score, self.in_mask = identifiers(score), identifiers(mask)

    def declarations(self, kinds: tuple[tuple[str, int, bool], ...], is_float: tuple[bool, ...]) -> list[str]:
        """Of all names. kinds: element type, rank and whether a gradient is wanted, of each tensor. is_float: of each
        scalar."""
        lines = list(self.declared)
        for name, (element, rank, grad) in zip(self.tensors, kinds):
            if name not in self.known:
                lines.append(f"{name}: {element} {max(1, rank)}d{' grad' if grad else ''}")
        for name, real in zip(self.scalars, is_float):
            if name not in self.known:
                lines.append(f"{name}: {'float' if real else 'int'}")
        return lines

    def options(self, causal: str, kinds: tuple[tuple[str, int, bool], ...], is_float: tuple[bool, ...]) -> str:
        """As options of a spec: ":score{...}:mask{...}". causal: a named mask to add, or ""."""
        lines = self.declarations(kinds, is_float)
        mask = self.mask
        if causal:
            mask = f"({_spelled_out(causal)}) && ({_spelled_out(mask)})" if mask else causal
        result = ""
        if self.score:
            own = [line for line in lines if declared_name(line) in self.in_score]
            result += f":score{{{'; '.join([*own, self.score])}}}"
        if mask in NAMED_MASKS:
            result += f":{mask}"
        elif mask:
            own = [line.removesuffix(" grad") for line in lines if declared_name(line) in self.in_mask]
            result += f":mask{{{'; '.join([*own, mask])}}}"
        return result


class Program:
    """A form and the values of its names: what score_mod and mask_mod of flashjit.attention() may be.

    tensors: captured tensors, as form.tensors names them. scalars: numbers, or 0-d tensors on the CPU whose value is
    read at every call, as form.scalars names them.
    """

    def __init__(self, form: Form, tensors: tuple[Any, ...] = (), scalars: tuple[Any, ...] = ()) -> None:
        self.form, self.tensors, self.scalars = form, tensors, scalars

    def __repr__(self) -> str:
        parts = [f"score: {self.form.score}"] * bool(self.form.score) + [f"mask: {self.form.mask}"] * bool(self.form.mask)
        return f"<flashjit.Program {'; '.join(parts) or 'that changes nothing'}>"

    def options(self, causal: str = "") -> str:
        """The program as options of a spec, without gradients for captures."""
        kinds = tuple((element_type(t), len(t.shape), False) for t in self.tensors)
        return self.form.options(causal, kinds, tuple(map(is_real, self.scalars)))


# --- text ------------------------------------------------------------------------------------------------------------


def split_declarations(text: str) -> tuple[tuple[str, ...], str]:
    """("a: int; b: fp32 1d; score + a") -> (("a: int", "b: fp32 1d"), "score + a")."""
    head, _, expression = text.rpartition(";")
    return tuple(part.strip() for part in head.split(";") if part.strip()), expression.strip()


def declared_name(declaration: str) -> str:
    return declaration.partition(":")[0].strip()


_tracing = threading.RLock()  # the tracer at work is the process's


def trace(score_mod: Any = None, mask_mod: Any = None, captures: Mapping[str, Any] | None = None) -> Program:
    """Makes a program once, for many calls: `flashjit.attention(q, k, v, score_mod=program)` then traces nothing.

    score_mod, mask_mod: functions or texts. captures: the values of the names in texts.
    A condition that gives -inf at the outside of a score_mod, torch.where(condition, x, -inf), becomes a mask, whose
    empty tiles are skipped.
    """
    with _tracing:
        return trace_unlocked(score_mod, mask_mod, captures)


def trace_unlocked(score_mod: Any = None, mask_mod: Any = None, captures: Mapping[str, Any] | None = None) -> Program:
    """trace() as torch.compile can follow it."""
    for what, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if isinstance(given, Program) or not (given is None or isinstance(given, str) or callable(given)):
            raise WrongType(f"{what} is a {type(given).__name__}: give a function {SIGNATURES[what]} or text.")
    values = dict(captures or {})
    score, own_score = _text_of(score_mod)
    mask, own_mask = _text_of(mask_mod)
    declared = tuple(dict.fromkeys(own_score + own_mask))
    tracer = Tracer({**values, **dict.fromkeys(map(declared_name, declared))})
    conditions: list[str] = []
    if callable(score_mod):
        score, conditions = tracer.score(score_mod)
    if callable(mask_mod):
        mask = tracer.mask(mask_mod)
    if conditions:
        mask = " && ".join(conditions + ([f"({_spelled_out(mask)})"] if mask else []))
    used = identifiers(score) | identifiers(mask)
    for name in values:
        if name not in used:
            raise InvalidArgument(f"captures has {name!r}, but neither program mentions it: remove it, or use it.")
    for name in map(declared_name, declared):
        if name not in values:
            raise InvalidArgument(f"the program declares {name!r}, but captures does not have it: give its value.")
    tensors = {**{name: value for name, value in values.items() if not is_scalar(value)}, **tracer.tensors}
    scalars = {**{name: value for name, value in values.items() if is_scalar(value)}, **tracer.scalars}
    scalars = dict(sorted(scalars.items(), key=lambda item: not is_tensor(item[1])))  # tensors first, as operators do
    return Program(Form(score, mask, declared, tuple(tensors), tuple(scalars)), tuple(tensors.values()),
                   tuple(scalars.values()))


def _text_of(program: Any) -> tuple[str, tuple[str, ...]]:
    if not isinstance(program, str):
        return "", ()
    own, text = split_declarations(program)
    return text, own


def _spelled_out(mask: str) -> str:
    return NAMED_MASKS.get(mask, mask)


# --- remembering what was traced -------------------------------------------------------------------------------------

EMPTY = Program(Form("", ""))
_forms: dict[Any, tuple[Form, tuple[int, ...], tuple[int, ...]]] = {}
_MOST_FORMS = 1000


def program_of(score_mod: Any, mask_mod: Any, captures: Mapping[str, Any] | None) -> Program:
    """trace(), which remembers what it traced while nothing changes that a function refers to: a function is traced
    anew when a number or a function that it uses changed, not when a captured tensor did."""
    if isinstance(score_mod, Program) or isinstance(mask_mod, Program):
        if captures or not (score_mod is None or mask_mod is None or score_mod is mask_mod):
            raise InvalidArgument("a program from flashjit.trace() comes with other programs or captures: trace all of "
                                  "them together, flashjit.trace(score_mod, mask_mod, captures).")
        return mask_mod if score_mod is None else score_mod
    if score_mod is None and mask_mod is None and not captures:
        return EMPTY
    walk = _Walk()
    for name, value in (captures or {}).items():
        walk.key.append(name)
        walk.visit(value if is_scalar(value) and is_tensor(value) else float(0) if isinstance(value, float)
                   else 0 if isinstance(value, int) else _Opaque)
    key = None
    if walk.visit(score_mod) and walk.visit(mask_mod):
        key = tuple(walk.key)
        found = _forms.get(key)
        if found is not None:
            form, tensors, scalars = found
            given = captures or {}
            return Program(form, *(tuple(given[i] if isinstance(i, str) else walk.tensors[i] for i in places)
                                   for places in (tensors, scalars)))
    program = trace(score_mod, mask_mod, captures)
    places = [[_place(name, value, captures, walk) for name, value in zip(names, values)]
              for names, values in ((program.form.tensors, program.tensors), (program.form.scalars, program.scalars))]
    if key is not None and None not in places[0] + places[1]:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[key] = (program.form, tuple(places[0]), tuple(places[1]))
    return program


def _place(name: str, value: Any, captures: Mapping[str, Any] | None, walk: "_Walk") -> Any:
    """Where the next call finds the value of a name: in captures, or among the tensors that its functions refer to."""
    if captures and name in captures:
        return name
    return next((i for i, tensor in enumerate(walk.tensors) if tensor is value), None)


class _Opaque:
    """Stands for a captured array in a key: which one it is does not matter."""


class _Walk:
    """Collects what the trace of functions depends on: `key` for what is compared, `tensors` for what may change."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Any] = []

    def visit(self, value: Any, depth: int = 0) -> bool:
        """False where it cannot be told, such as for a method of an object that may change."""
        if value is None or isinstance(value, (int, float, str)):
            self.key += (type(value), value)
        elif is_tensor(value):
            same = next((i for i, tensor in enumerate(self.tensors) if tensor is value), -1)
            self.key += (value.dtype, value.dim(), same, value.dim() == 0 and is_scalar(value))
            self.tensors.append(value)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
            self.key.append(value)
        elif isinstance(value, (tuple, list)) and len(value) <= 8 and depth < 4:
            self.key += (type(value), len(value))
            return all([self.visit(item, depth + 1) for item in value])
        elif isinstance(value, types.FunctionType) and depth < 4:
            return self._visit_function(value, depth)
        else:
            return False
        return True

    def _visit_function(self, function: types.FunctionType, depth: int) -> bool:
        self.key.append(function.__code__)
        try:
            parts = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a variable that is not set yet
            return False
        names = function.__globals__
        parts += [names[name] for name in _names_in(function.__code__) if name in names]
        parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return all([self.visit(part, depth + 1) for part in parts])


@functools.lru_cache(maxsize=_MOST_FORMS)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function and in those inside of it."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names_in(const))
    return tuple(dict.fromkeys((*code.co_names, *inner)))
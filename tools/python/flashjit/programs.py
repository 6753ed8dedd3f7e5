"""Programs of scores, masks and elements (of O, Q and K): text in flashjit's language, or Python functions traced into it.

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

becomes "c0: fp32 1d; score + (c0[h] * to_float(kv - q))", with the tensor `slopes` as the capture c0. The functions
have the signatures of PyTorch's FlexAttention: score_mod(score, b, h, q_idx, kv_idx), mask_mod(b, h, q_idx, kv_idx); and
weight_mod(score, b, h, q_idx, kv_idx), out_mod(out, b, h, q_idx, column), q_mod(row, b, h, q_idx, column), k_mod(row, b, h_kv,
kv_idx, column). They are called with stand-ins instead of numbers, at each call of attention(), so that the values that they
read may change; flashjit.trace() calls them once. They mean the same as in PyTorch, see tools/docs/programs-python.md in
flashjit's repository.

On stand-ins work +, -, *, /, //, %, **, comparisons, &, |, ^, ~, <<, >>, abs, captured tensors indexed by them (negative
indices count from the end, [:] and ... leave dimensions whole; a captured row has sum(), any() and all()), sizes of captured tensors,
and these functions of torch and torch.nn.functional, as methods, too:
    {functions}
"""

from __future__ import annotations

import re
import textwrap
import threading
from collections.abc import Mapping
from typing import Any

from ._at_work import is_symbol, symbol_tensor
from ._checks import check_mapping, python_number
from ._compiling import without_side_effects
from ._torch_names import FUNCTIONS
from ._tracing import (
    ELEMENT_MODS,
    MAX_SCALARS,
    MAX_TENSORS,
    SIGNATURES,
    Tracer,
    element_type,
    identifiers,
    is_real,
    is_scalar,
    is_tensor,
    variable_of,
)
from ._watching import Watch
from .errors import InvalidArgument, WrongType

if __doc__:  # python -OO has none
    _of_operators = {"and", "or", "xor", "invert", "lshift", "rshift", "mod", "floordiv", "truediv", "pos"}
    _usable = {name for name, function in FUNCTIONS.items() if function.__name__ != "refused"} - _of_operators
    __doc__ = __doc__.replace("{functions}", "\n    ".join(textwrap.wrap(", ".join(sorted(_usable)), 100)))

_NO_MODS = ("",) * len(ELEMENT_MODS)
NAMED_MASKS = {"causal": "kv <= q + seqlen_kv - seqlen_q", "causal_top_left": "kv <= q"}


class Form:
    """What a program computes, without the values of its names.

    score, mask, and `mods`, of the elements of O, Q and K (ELEMENT_MODS): texts without declarations; "" for none. declared: the
    declarations that the texts brought along, such as "slopes: fp32 1d grad". tensors, scalars: the names that each call gives
    values for.
    """

    def __init__(
        self,
        score: str,
        mask: str,
        declared: tuple[str, ...] = (),
        tensors: tuple[str, ...] = (),
        scalars: tuple[str, ...] = (),
        mods: tuple[str, ...] = _NO_MODS,
    ) -> None:
        self.score, self.mask, self.declared, self.tensors, self.scalars, self.mods = (
            score,
            mask,
            declared,
            tensors,
            scalars,
            mods,
        )
        self.known = frozenset(map(declared_name, declared))
        self.in_score, self.in_mask, *self.in_mods = map(identifiers, (score, mask, *mods))

    def has_gradient(self, name: str) -> bool:
        """Whether a program with gradients reads this name."""
        return any([name in used for used in (self.in_score, *self.in_mods)])

    def declarations(self, kinds: tuple[tuple[str, int, bool], ...], is_float: tuple[bool, ...]) -> list[str]:
        """Declarations of all names. kinds: element type, rank and whether a gradient is wanted, for each tensor. is_float: for
        each scalar."""
        lines = list(self.declared)
        for name, (element, rank, grad) in zip(self.tensors, kinds):
            if name not in self.known:
                lines.append(f"{name}: {element} {max(1, rank)}d{' grad' if grad else ''}")
        for name, real in zip(self.scalars, is_float):
            if name not in self.known:
                lines.append(f"{name}: {'float' if real else 'int'}")
        return lines

    def options(
        self, causal: str, kinds: tuple[tuple[str, int, bool], ...], is_float: tuple[bool, ...]
    ) -> str:
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
        for kind, text, used in zip(ELEMENT_MODS, self.mods, self.in_mods):
            if text:
                own = [line for line in lines if declared_name(line) in used]
                result += f":{kind}{{{'; '.join([*own, text])}}}"
        return result


class Program:
    """A form and the values of its names, as flashjit.trace() returns it, for score_mod, mask_mod, out_mod, q_mod or k_mod of
    flashjit.attention().

    tensors: captured tensors, in the order of form.tensors. scalars: numbers, or 0-d tensors on the CPU whose value is
    read at every call, in the order of form.scalars. queries: the most queries that its tensors have rows for; None: any.
    """

    queries: int | None = None

    def __init__(self, form: Form, tensors: tuple[Any, ...] = (), scalars: tuple[Any, ...] = ()) -> None:
        self.form, self.tensors, self.scalars = form, tensors, scalars

    def __repr__(self) -> str:
        texts = {"score": self.form.score, "mask": self.form.mask, **dict(zip(ELEMENT_MODS, self.form.mods))}
        parts = [f"{name}: {text}" for name, text in texts.items() if text]
        return f"<flashjit.Program {'; '.join(parts) or 'that changes nothing'}>"

    def options(self, causal: str = "") -> str:
        """The program as options of a spec, without gradients for captures."""
        kinds = tuple((element_type(t), len(t.shape), False) for t in self.tensors)
        return self.form.options(causal, kinds, tuple(map(is_real, self.scalars)))


def check_queries(mod: Any, q: Any, cu_seqlens_q: Any) -> None:
    """Whether a named mask's tensors have a row for each query: programs take the last one again beyond their end."""
    if mod is None or cu_seqlens_q is not None or not isinstance(mod, Program) or mod.queries is None:
        return
    if (queries := q.shape[2]) > mod.queries:
        raise InvalidArgument(
            f"q has {queries} queries, but the mask's tensors are of {mod.queries}: make them [batch, {queries}]."
        )


_TRACED_NAME = re.compile(r"[cs]\d+(_size\d+)?")
_QUOTED_PROGRAM = re.compile(
    r"the spec '.*' has a wrong field '(score|mask|out_mod|q_mod|k_mod)\{.*': (?=an? ([a-z_ ]+_mod )?program )",
    re.DOTALL,
)


def named_as_written(
    error: InvalidArgument,
    names: tuple[str, ...],
    values: tuple[Any, ...],
    captures: Mapping[str, Any] | None,
    *functions: Any,
) -> InvalidArgument:
    """An error about captures by the names that the functions have for them, where a trace has given others; and about blocks by
    the name of attention()'s argument."""
    if "block_map" in str(error):
        error = type(error)(str(error).replace("block_map", "block_mask"))
    traced = [function for function in functions if callable(function) or isinstance(function, Program)]
    if not traced:
        return error
    text = _QUOTED_PROGRAM.sub("", str(error))
    for name, value in zip(names, values):
        if _TRACED_NAME.fullmatch(name) and name not in (captures or {}):
            label = next(filter(None, [variable_of(function, value) for function in traced]), None)
            kind = "number" if is_scalar(value) else "tensor"
            text = text.replace(f"captures[{name!r}]", f"the captured tensor {name}")
            if label is None:
                text = text.replace(f"the captured tensor {name}", "a captured tensor")
            text = re.sub(rf"\b{name}\b", label or f"a captured {kind}", text)
    return type(error)(text)


# --- text ------------------------------------------------------------------------------------------------------------


def split_declarations(text: str) -> tuple[tuple[str, ...], str]:
    """("a: int; b: fp32 1d; score + a") -> (("a: int", "b: fp32 1d"), "score + a")."""
    head, _, expression = text.rpartition(";")
    return tuple(part.strip() for part in head.split(";") if part.strip()), expression.strip()


def declared_name(declaration: str) -> str:
    return declaration.partition(":")[0].strip()


# Words that programs have besides the names that they declare.
WORDS = frozenset(
    """score b h h_kv q kv seqlen_q seqlen_kv out column element sum_of_squares element_at true false causal causal_top_left
    size select min max abs floor trunc round exp exp2 expm1 log log2 log1p pow sqrt rsqrt tanh sigmoid erf sin cos to_float to_int to_bool to_int64 low_word
    high_word""".split()
)

_tracing = threading.RLock()  # the tracer at work is the process's


def trace(
    score_mod: Any = None,
    mask_mod: Any = None,
    captures: Mapping[str, Any] | None = None,
    out_mod: Any = None,
    q_mod: Any = None,
    k_mod: Any = None,
) -> Program:
    """Makes a program once, for many calls: `flashjit.attention(q, k, v, score_mod=program)` then traces nothing.

    score_mod, mask_mod, out_mod, q_mod, k_mod: functions or texts, as in attention(). The program holds all of them: give it as any
    one of these arguments. captures: the values of the names in texts.
    A score_mod of the form torch.where(condition, x, -inf) becomes a score and a mask, whose empty tiles are skipped.

    Raises flashjit.WrongType for a function that cannot be traced, flashjit.InvalidArgument for wrong captures. attention() checks
    texts.
    """
    with _tracing:
        return _program(score_mod, mask_mod, captures, (out_mod, q_mod, k_mod), _known_form)


_of_texts: dict[Any, Form] = {}


def repeated(score: str | None, mask: str | None, captures: Mapping[str, Any]) -> Program:
    """trace() of texts that come again, whose names stand for tensors or for numbers every time."""
    key = (score, mask, tuple(captures))
    form = _of_texts.get(key)
    if form is None:
        program = trace(score, mask, captures)
        _of_texts[key] = program.form
        return program
    return Program(
        form,
        tuple([captures[name] for name in form.tensors]),
        tuple([captures[name] for name in form.scalars]),
    )


def trace_unlocked(
    score_mod: Any = None,
    mask_mod: Any = None,
    captures: Mapping[str, Any] | None = None,
    mods: tuple[Any, ...] = (None, None, None),
) -> Program:
    """trace() as torch.compile can follow it."""
    return without_side_effects(_program, score_mod, mask_mod, captures, mods, _form_of)


def _program(
    score_mod: Any,
    mask_mod: Any,
    captures: Mapping[str, Any] | None,
    mods: tuple[Any, ...],
    form_of: Any,
    tracer: Tracer | None = None,
) -> Program:
    for what, given in (("score_mod", score_mod), ("mask_mod", mask_mod), *zip(ELEMENT_MODS, mods)):
        if isinstance(given, Program) or not (given is None or isinstance(given, str) or callable(given)):
            raise WrongType(
                f"{what} is a {type(given).__name__}: give a function {SIGNATURES[what]} or text."
            )
        if isinstance(given, str) and not given.strip():
            raise InvalidArgument(f"{what} is {given!r}: give an expression, or None for no program.")
    check_mapping("captures", captures or {})
    values = {
        name: symbol_tensor(value) if is_symbol(value) else python_number(value)
        for name, value in (captures or {}).items()
    }
    score, own_score = _text_of(score_mod)
    mask, own_mask = _text_of(mask_mod)
    texts = [_text_of(mod) for mod in mods]
    of_mods = [text for text, _ in texts]
    declared = tuple(dict.fromkeys([*own_score, *own_mask, *[line for _, own in texts for line in own]]))
    tracer = tracer or Tracer({**values, **dict.fromkeys(map(declared_name, declared))})
    conditions: list[str] = []
    if callable(score_mod):
        score, conditions = tracer.score(score_mod)
    if callable(mask_mod):
        mask = tracer.mask(mask_mod)
    for place, (kind, mod) in enumerate(zip(ELEMENT_MODS, mods)):
        if callable(mod):
            of_mods[place] = tracer.out(mod) if kind == "out_mod" else tracer.row(mod, kind)
    if conditions:
        mask = " && ".join(conditions + ([f"({_spelled_out(mask)})"] if mask else []))
    (score, mask, *of_mods), sizes = tracer.with_sizes_as_scalars(score, mask, *of_mods)
    scalars = {
        **{name: value for name, value in values.items() if is_scalar(value)},
        **tracer.scalars,
        **sizes,
    }
    tensors = {**{name: value for name, value in values.items() if name not in scalars}, **tracer.tensors}
    scalars = dict(
        sorted(scalars.items(), key=lambda item: not is_tensor(item[1]))
    )  # tensors first, as operators do
    form = form_of(score, mask, declared, tuple(tensors), tuple(scalars), tuple(values), tuple(of_mods))
    return Program(
        form, tuple([tensors[name] for name in form.tensors]), tuple([scalars[name] for name in form.scalars])
    )


def _form_of(
    score: str,
    mask: str,
    declared: tuple[str, ...],
    tensors: tuple[str, ...],
    scalars: tuple[str, ...],
    given: tuple[str, ...],
    mods: tuple[str, ...] = _NO_MODS,
) -> Form:
    """given: the names of captures, which texts must use; what a function reads without using it is left out."""
    used = frozenset().union(*[identifiers(text) for text in (score, mask, *mods)])
    for name in given:
        if name not in used:
            unknown = sorted(used - WORDS - {*tensors, *scalars})
            also = (
                ""
                if not unknown
                else f", and it has {unknown[0]!r}, which captures does not have: is one misspelt?"
            )
            raise InvalidArgument(
                f"captures has {name!r}, but no program mentions it{also or ': remove it, or use it.'}"
            )
    for name in map(declared_name, declared):
        if name not in given:
            raise InvalidArgument(
                f"the program declares {name!r}, but captures does not have it: give its value."
            )
    form = Form(
        score,
        mask,
        declared,
        tuple([name for name in tensors if name in used]),
        tuple([name for name in scalars if name in used]),
        mods,
    )
    for what, names, most in (("tensors", form.tensors, MAX_TENSORS), ("scalars", form.scalars, MAX_SCALARS)):
        if len(names) > most:
            raise InvalidArgument(
                f"a program captures {len(names)} {what}, more than {most} {what}: put them into one tensor of "
                "one more dimension."
            )
    return form


_forms: dict[Any, Form] = {}
_MOST_FORMS = 1000


def _known_form(*parts: Any) -> Form:
    """_form_of() these parts: the same object every time, by which plans are found."""
    form = _forms.get(parts)
    if form is None:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        form = _forms[parts] = _form_of(*parts)
    return form


def _text_of(program: Any) -> tuple[str, tuple[str, ...]]:
    if not isinstance(program, str):
        return "", ()
    own, text = split_declarations(program)
    return text, own


def _spelled_out(mask: str) -> str:
    return NAMED_MASKS.get(mask, mask)


# --- remembering what was traced -------------------------------------------------------------------------------------

EMPTY = Program(Form("", ""))
_traced: dict[Any, tuple[Form, tuple[int, ...], tuple[int, ...]]] = {}


def program_of(
    score_mod: Any,
    mask_mod: Any,
    captures: Mapping[str, Any] | None,
    mods: tuple[Any, ...] = (None, None, None),
) -> Program:
    """The program of attention()'s arguments. Functions are called anew each time, unless all that they read can be compared with
    the last time: numbers, and captured tensors that they index."""
    given = [mod for mod in (score_mod, mask_mod, *mods) if mod is not None]
    if any(isinstance(mod, Program) for mod in given):
        if captures or any(mod is not given[0] for mod in given):
            raise InvalidArgument(
                "a program from flashjit.trace() comes with other programs or captures: trace all of "
                "them together, flashjit.trace(score_mod, mask_mod, captures, out_mod, q_mod, k_mod)."
            )
        return given[0]
    if not given and not captures:
        return EMPTY
    watch = Watch()
    if captures or not watch.see_all((score_mod, mask_mod, *mods)):
        return trace(score_mod, mask_mod, captures, *mods)
    program = _found(watch)
    if program is not None:
        return program
    with _tracing:
        tracer = Tracer({})
        program = _program(score_mod, mask_mod, None, mods, _known_form, tracer)
    places = [[watch.place_of(value) for value in values] for values in (program.tensors, program.scalars)]
    if not tracer.looked and None not in places[0] + places[1]:
        if len(_traced) >= _MOST_FORMS:
            _traced.clear()
        _traced[tuple(watch.key)] = (program.form, tuple(places[0]), tuple(places[1]))  # type: ignore[arg-type]
    return program


def _found(watch: Watch) -> Program | None:
    """The program of functions that were traced before, with the values that they read now."""
    found = _traced.get(tuple(watch.key))
    if found is None:
        return None
    form, tensors, scalars = found
    return Program(
        form, tuple([watch.tensors[i] for i in tensors]), tuple([watch.tensors[i] for i in scalars])
    )


def known_program(score_mod: Any, mask_mod: Any, mods: tuple[Any, ...]) -> Program | None:
    """program_of() without captures, where that traces nothing; None where it would, or would refuse."""
    given = [mod for mod in (score_mod, mask_mod, *mods) if mod is not None]
    if isinstance(given[0], Program):
        return given[0] if len(given) == 1 else None
    watch = Watch()
    return _found(watch) if watch.see_all((score_mod, mask_mod, *mods)) else None

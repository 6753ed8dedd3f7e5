"""bind(): a call of attention() that is read, checked and planned once, for tensors that differ in their memory alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._attention import attention, draw_rng
from ._call_types import NO_RNG, Fixed, Problem
from ._formats import BLOCK_SCALES
from ._front import MEMORY, CallableFront, Calls, Recorder
from ._kept_plans import plan_of
from ._lists import TileLists
from ._pages import read_csr
from ._results import Results
from ._tensor_checks import check_memory
from ._tensors import PLAIN, Layout, describe, is_differentiated, is_laid_out, layout_of
from ._transforms import have_tangents, refuse_wrapped
from .errors import InvalidArgument, Unsupported, WrongType

#: What a bound call may be given besides Q, K and V, where bind() was given it.
_CHANGING = tuple(name for name in Fixed._fields if name != "block_map" and not name.endswith("_scale"))


class BoundCall(CallableFront):  # type: ignore[misc]
    """What bind() returns: attention() with its options, for tensors of one form.

    call(q, k, v=None, *, out=None, lse=None, workspace=None, **others) gives O, or (O, LSE), as attention() returns them. q, k, v: see
    bind(). v is left out where bind() was given v_columns.

    out, lse, workspace: as in attention(); by default those given to bind(), else they are allocated. others: tensors
    such as kv_lengths and page_table that bind() was given, by name, but scales; by default those given there, whose values
    are read anew.
    """

    __slots__ = (
        *("_plan", "_fixed", "_places", "_values", "_lists", "_results", "_v_columns", "_has_grad"),
        "_members",
    )

    @classmethod
    def _of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        v_columns: int | None,
        fixed: Fixed,
        values: tuple[Any, ...],
        problem: Problem,
        lists: TileLists | None,
        results: Results,
    ) -> BoundCall:
        """What attention() gives the call that it has read, in place of launching it."""
        if results.codes is not None:
            raise Unsupported("out_dtype is of codes, which bind() does not store: call attention().")
        plan = plan_of(q, k, v, fixed, values, problem)
        if not plan.reads:
            raise InvalidArgument(
                f"q has the strides {q.stride()}, k {k.stride()} and v {v.stride()}: a bound call reads tensors where they "
                "lie, which takes a last stride of 1 and others of multiples of 16 bytes."
            )
        if not plan.has_dense_others:
            raise InvalidArgument(
                "a tensor beside q, k and v is not contiguous, and a bound call reads it in place: give its contiguous()."
            )
        if any(x is not None for x in (*results[2:5], results.skip_softmax_counts)):
            results.check(plan)
        places = {
            name: i for i, name in enumerate(fixed._fields) if name in _CHANGING and fixed[i] is not None
        }
        given = {name: getattr(results, name) for name in MEMORY}
        given |= {name: tensor for name, tensor in zip(fixed._fields, fixed) if tensor is not None}
        given["lists"] = lists
        calls = Calls.of_bound(
            functools.partial(cls.__new__, cls), given, (*places,), dict(zip(problem.names, values))
        )
        self: BoundCall = calls.front or cls.__new__(cls)
        self._plan, self._members = plan, calls.members
        self._has_grad = is_differentiated(*fixed, *values)
        self._v_columns = v.shape[3] if v_columns else 0  # in bytes where K has a format
        self._fixed, self._values, self._lists, self._results = fixed, values, lists, results
        self._places = places
        return self

    def _call(
        self,
        is_new: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        workspace: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """A call that the front does not launch. is_new: whether it is to be kept."""
        if not is_new:
            return self._by_python(q, k, v, out, lse, workspace, others)
        memory = {name: x for name, x in zip(MEMORY, (out, lse, workspace)) if x is not None}
        calls = Calls.of_front(self, self._members)
        recorder = Recorder(calls, calls.arguments((q, k, v), {**memory, **others}))
        return recorder.keep(self._by_python(q, k, v, out, lse, workspace, others, recorder))

    def _by_python(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        workspace: Tensor | None,
        others: dict[str, Any],
        recorder: Recorder | None = None,
    ) -> Any:
        plan = self._plan
        refuse_wrapped("a bound call", q, k, v, out, lse, workspace, *others.values())
        if v is None and self._v_columns and isinstance(k, Tensor):
            v = k[..., : self._v_columns]
        elif v is None or self._v_columns:
            raise InvalidArgument(
                "v is missing: bind() was given v, so give it here, too."
                if v is None
                else "v is given, but bind() was given v_columns: leave v out."
            )
        if (
            not plan.takes(q, k, v)
            or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16
            or type(q) not in PLAIN
            or type(k) not in PLAIN
            or type(v) not in PLAIN
            or q.is_neg()
            or k.is_neg()
            or v.is_neg()
        ):
            _refuse_others((q, k, v), plan.forms)
        if torch.is_grad_enabled() and (
            self._has_grad  # no transform wraps these tensors
            or q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or others
            and is_differentiated(*others.values())
        ):
            _refuse_derivatives()
        fixed = self._with(others) if others else self._fixed
        if forward_ad._current_level >= 0 and have_tangents(q, k, v, *fixed, *self._values):
            _refuse_derivatives()
        given = self._results
        if out is lse is workspace is None:
            out, lse, workspace = given.out, given.lse, given.workspace
        else:
            wants_lse = given.wants_lse or lse is not None
            Results(wants_lse, given.row_max, out, lse, workspace).check(plan)
            given = Results(
                wants_lse,
                given.row_max,
                given.out if out is None else out,
                given.lse if lse is None else lse,
                given.workspace if workspace is None else workspace,
                skip_softmax_counts=given.skip_softmax_counts,
            )
            out, lse, workspace = given[2:5]
        row_max = plan.new_rows() if given.row_max else None
        rng = draw_rng(q) if plan.problem.dropout_p else NO_RNG
        lists = None if self._lists is None else self._lists.built[0]
        made = plan.forward(
            *(q, k, v, fixed, self._values, rng, given.wants_lse, lists, row_max, out, None, lse, workspace),
            recorder=recorder,
            skip_softmax_counts=given.skip_softmax_counts,
        )
        if row_max is not None:
            return (*made, row_max) if given.wants_lse else (made[0], row_max)
        return made if given.wants_lse else made[0]

    def __repr__(self) -> str:
        return f"<flashjit.bind() of {self._plan.described(False)}>"

    def _with(self, others: dict[str, Any]) -> Fixed:
        """The fixed tensors with those that a call gives."""
        if type(others.get("page_table")) is tuple or type(others.get("indices")) is tuple:
            others = _in_parts(others, "page_table", "page_starts", "page_table")
            others = _in_parts(others, "indices", "indices", "topk_length")
        parts, places, plan = [*self._fixed], self._places, self._plan
        alike = True
        for name, tensor in others.items():
            place = places.get(name)
            if place is None:
                raise InvalidArgument(
                    f"{name} is given, but a bound call takes "
                    f"{', '.join(('q', 'k', 'v', 'out', 'lse', 'workspace', *places))}: give the rest to bind()."
                )
            parts[place] = tensor
            alike = alike and type(tensor) in PLAIN and not tensor.is_neg()
        fixed = Fixed._make(parts)
        if not alike or not plan.takes_fixed(fixed) or plan.index < 0:
            for name, tensor in others.items():
                form = layout_of(self._fixed[places[name]])
                if not is_laid_out(tensor, form) or tensor.device != plan.device or tensor.is_neg():
                    _refuse(name, tensor, form)
                check_memory(name, tensor)
            if fixed.page_starts is not None:  # whose values are checked on the CPU
                read_csr((fixed.page_starts, fixed.page_table), fixed.kv_lengths, plan.forms[1].size[2])
        return fixed


def _in_parts(others: dict[str, Any], name: str, *parts: str) -> dict[str, Any]:
    """The arguments, with a pair of tensors under the names of both."""
    pair = others.get(name)
    if not isinstance(pair, tuple):
        return others
    if len(pair) != len(parts):
        raise InvalidArgument(
            f"{name} has {len(pair)} parts: a bound call takes a tensor, or a pair of them."
        )
    return {**others, **dict(zip(parts, pair))}


def _refuse_derivatives() -> None:
    raise Unsupported("a bound call has no derivatives: call it under torch.no_grad(), or call attention().")


def _refuse_others(given: Sequence[Any], forms: Sequence[Layout]) -> None:
    """The first of Q, K and V that does not lie as the one that was bound; else the last."""
    for name, tensor, form in zip("qkv", given, forms):
        if not is_laid_out(tensor, form) or tensor.data_ptr() % 16 or tensor.is_neg() or name == "v":
            _refuse(name, tensor, form)
        if form.device_index < 0 and not tensor.is_cpu:
            _refuse(name, tensor, form)


def _refuse(name: str, tensor: Any, form: Layout) -> None:
    if not isinstance(tensor, Tensor):
        raise WrongType(f"{name} is a {type(tensor).__name__}: give a torch.Tensor.")
    if type(tensor) not in PLAIN:
        raise Unsupported(
            f"{name} is a {type(tensor).__name__}: a bound call takes plain tensors; attention() takes subclasses."
        )
    device = "the CPU" if form.device_index < 0 else f"cuda:{form.device_index}"
    wanted = f"{str(form.dtype).removeprefix('torch.')} {list(form.size)} with strides {list(form.stride)} on {device}"
    if tensor.data_ptr() % 16:
        wanted += ", in memory that begins at a multiple of 16 bytes"
    if tensor.is_neg():
        wanted += ", and no negative view, as behind z.conj().imag"
    raise InvalidArgument(
        f"{name} is {describe(tensor)} with strides {list(tensor.stride())}: this call was bound for {wanted}; give such "
        "a tensor, or bind another call."
    )


def bind(q: Tensor, k: Tensor, v: Tensor | None = None, **options: Any) -> BoundCall:
    """attention() with its arguments read, checked and planned once: call = flashjit.bind(q, k, v, causal=True) makes
    call(q, k, v) of other tensors of the same form cost little more than the launch.

    q, k, v: tensors of the form that calls will have: sizes, strides, type, device. Nothing is computed, and their values are
        not read. They are read where they lie: strides that attention() would copy are refused.
    options: attention()'s, except `state`. Numbers and programs keep the values that they have now. Tensors are kept, and read anew
        by each call. A call may also be given other tensors of the same form by name, such as kv_lengths, page_table and
        cu_seqlens_q, but not scales and captures. max_seqlen_q and max_seqlen_kv bound all lengths. Options that attention()
        would convert to float32 have to be float32 already. BlockMask keeps the blocks that it has now.

    Returns call(q, k, v, *, out=None, lse=None, workspace=None, ...), which launches on the current stream, allocates O and LSE
    where none are given, and may be captured in CUDA graphs. It has no gradients, and is not for compiled code, tensor subclasses
    and transforms. A tensor of another form is refused: flashjit.InvalidArgument.
    """
    if torch.compiler.is_compiling():
        raise Unsupported(
            "bind() cannot be called in compiled code: bind outside of it, or call attention()."
        )
    if options.get("state") is not None:
        raise Unsupported(
            "state changes from call to call, and a bound call has none: call attention(), or merge()."
        )
    call = attention(q, k, v, _receiver=BoundCall._of, **options)
    for name, given, form in (("q", q, call._plan.forms[0]), ("k", k, call._plan.forms[1])):
        if given.dtype != form.dtype:
            raise Unsupported(
                f"{name} is {describe(given)}, which torch.autocast would convert in each call: bind outside of it, with "
                f"tensors of {str(form.dtype).removeprefix('torch.')}."
            )
    _refuse_copies(call._fixed, options)
    return call


def _refuse_copies(fixed: Fixed, options: dict[str, Any]) -> None:
    """Refuses tensors that attention() converts: a call would not see their new values."""
    table = options.get("page_table")
    if isinstance(table, tuple) and len(table) == 3:
        raise Unsupported(
            "page_table has last_page_len, from which attention() computes lengths in each call: give (indptr, indices) "
            "and kv_lengths."
        )
    for name in _CHANGING:
        given = options.get(name)
        if name == "q_rope" and isinstance(given, Tensor) and given is not fixed.q_rope:
            raise Unsupported(
                f"q_rope is {describe(given)} with strides {list(given.stride())}, and a bound call reads it in place: give a last "
                "stride of 1 and others of multiples of 16 bytes, and bind under torch.no_grad()."
            )
        if isinstance(given, Tensor) and given.is_floating_point() and getattr(fixed, name) is not given:
            raise Unsupported(
                f"{name} is {describe(given)}, and a bound call reads it in place: give it as float32."
            )
    for name in ("k_scale", "v_scale", "q_scale", *BLOCK_SCALES):
        scale, read = options.get(name), getattr(fixed, name)
        if scale is not None and scale.numel() and (read is None or read.data_ptr() != scale.data_ptr()):
            raise Unsupported(
                f"{name} is {describe(scale)} with strides {list(scale.stride())}, and a bound call reads it in place: "
                "give it in the form that attention() names."
            )

"""What attention() and TileLists are asked for, as tensors, values and a spec's options."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ._call_types import NOTHING, Fixed, Problem
from ._checks import check_mapping, check_number
from ._library import options_of, spec_options
from ._named import CAUSAL
from ._plans import KEEP_PLANS
from ._tensors import ELEMENTS, SPEC_TYPES, describe, is_differentiated, refuse_nested
from ._tracing import is_real
from .errors import InvalidArgument, WrongType
from .programs import EMPTY, Program, program_of, trace_unlocked


class BlockMap:
    """Which blocks of queries and keys attend to each other; the rest costs nothing.

    blocks: [batch or 1, heads_q or 1, ceil(seqlen_q / bq), ceil(seqlen_kv / bkv)], or the last two only, of bool or
        integers: nonzero attends. The first block begins at query 0 and key 0 of each sequence. Within blocks that attend the
        call's mask_mod, causal, window and lengths apply.
    block: (bq, bkv), or one number for both: multiples of 16 from 16 to 256; default 128.
    """

    def __init__(self, blocks: Tensor, block: int | tuple[int, int] = 128) -> None:
        if not isinstance(blocks, Tensor) or blocks.dim() not in (2, 4) or blocks.is_floating_point():
            raise WrongType(
                f"blocks is {describe(blocks)}: give booleans or integers [batch or 1, heads or 1, block rows, "
                "block columns], or [block rows, block columns]."
            )
        blocks = blocks if blocks.dim() == 4 else blocks[None, None]
        self.blocks = (blocks != 0).to(torch.uint8).contiguous()
        pair = (block, block) if isinstance(block, Integral) else block
        if (
            not isinstance(pair, (tuple, list))
            or len(pair) != 2
            or any(size not in range(16, 257, 16) for size in pair)
        ):
            raise InvalidArgument(f"block is {block!r}: give one or two multiples of 16 from 16 to 256.")
        self.block = (int(pair[0]), int(pair[1]))


def check_types(q: Any, k: Any, v: Any) -> None:
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, Tensor):
            raise WrongType(
                f"{name} is a {type(value).__name__}: give a torch.Tensor; flashjit.forward() takes other "
                "arrays."
            )
        if hasattr(value, "to_local") and hasattr(value, "placements"):
            raise WrongType(
                f"{name} is a {type(value).__name__}, which flashjit has no rule to shard: give its "
                "to_local(), sharded by batch or heads; for a sequence's shards see flashjit.distributed."
            )
    refuse_nested(q, k, v)


@functools.lru_cache(maxsize=KEEP_PLANS)
def plain_problem(causal: bool | str, scale: float | None, deterministic: bool) -> Problem:
    """What read_problem() makes of a call that is given no more than this; the same object every time."""
    _, _, problem = read_problem(
        causal, scale, 0.0, None, None, None, None, None, None, None, None, None, None, deterministic, False
    )
    return problem


def usual_call(
    causal: bool,
    scale: float | None,
    deterministic: bool | None,
    packing: tuple[Any, Any, Any, Any],
    kv_lengths: Any,
    page_table: Any,
    page_starts: Any,
    pages: int | None,
) -> tuple[Fixed, Problem] | None:
    """What read_problem() makes of calls that have no programs, dropout or types of 8 bits: without other tensors, packed, or over
    a cache. None: it is for read_problem(), as wrong arguments are. The problem is the same object every time."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = packing
    if kv_lengths is max_seqlen_q is max_seqlen_kv is cu_seqlens_q is cu_seqlens_kv is pages is None:
        return NOTHING, plain_problem(causal, scale, deterministic)
    cached, packed = pages is not None, cu_seqlens_q is not None
    if (
        cached != (kv_lengths is not None)
        or cached == (cu_seqlens_kv is not None)
        or packed != (type(max_seqlen_q) is int)
        or not packed
        and (max_seqlen_q is not None or not cached)
        or type(max_seqlen_kv) is not int
        and (max_seqlen_kv is not None or not cached)
    ):
        return None
    fixed = Fixed(
        None, kv_lengths, cu_seqlens_q, cu_seqlens_kv, page_table=page_table, page_starts=page_starts
    )
    for tensor in (kv_lengths, cu_seqlens_q, cu_seqlens_kv, page_table, page_starts):
        if tensor is not None and (type(tensor) is not Tensor or tensor.layout is not torch.strided):
            return None
    longest = max_seqlen_q or 0, max_seqlen_kv or 0
    fixed = Fixed(None, kv_lengths, *packing[:2], page_table=page_table, page_starts=page_starts)
    return fixed, _packed_problem(causal, scale, deterministic, packed, pages, *longest)


@functools.lru_cache(maxsize=KEEP_PLANS)
def _packed_problem(
    causal: bool,
    scale: float | None,
    deterministic: bool,
    packed: bool,
    pages: int | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
) -> Problem:
    options = _cached_options(_key(EMPTY, causal, pages=pages, varlen=packed, deterministic=deterministic))
    return Problem(options, scale, 0.0, max_seqlen_q, max_seqlen_kv, (), pages is not None)


def read_problem(
    causal: bool | str,
    scale: float | None,
    dropout_p: float,
    score_mod: Any,
    mask_mod: Any,
    captures: Mapping[str, Any] | None,
    block_mask: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    sinks: Any,
    kv_lengths: Any,
    deterministic: bool | None,
    wants_grad: bool,
    compiling: bool = False,
    page_table: Any = None,
    pages: int | None = None,
    row_max: bool = False,
    fp32_out: bool = False,
    batch_invariant: bool = False,
    fp32_grads: bool = False,
    indices: Any = None,
    prefix_length: Any = None,
    running_state: bool = False,
    page_starts: Any = None,
    weight_mod: bool = False,
    mods: Any = (None, None, None),
    skip_softmax_threshold: float | None = None,
    q_rope: Any = None,
    two_terms: bool = False,
) -> tuple[Fixed, tuple[Any, ...], Problem]:
    """attention()'s arguments besides Q, K and V, and the values of the names in its programs.

    wants_grad: whether captured tensors that require gradients get them. compiling: whether torch.compile traces it.
    weight_mod: whether score_mod gives the weights of pairs, without a softmax. mods: programs of elements, in the order of ELEMENT_MODS.
    pages: rows of a page where K and V are a cache in pages, 0 for a cache in slots; None: no cache.
    """
    if not compiling:
        _check_kinds(causal, scale, dropout_p, captures)
    program, fixed, block = EMPTY, NOTHING, None
    values: tuple[Any, ...] = ()
    if block_mask is not None:
        if not isinstance(block_mask, BlockMap):
            raise WrongType(
                f"block_mask is {describe(block_mask)}: give a flashjit.torch.BlockMap, or FlexAttention's "
                "BlockMask."
            )
        block = block_mask.block
    given = [mod for mod in (score_mod, mask_mod, *mods) if mod is not None]
    if given or captures:
        traces = compiling and not any([isinstance(mod, Program) for mod in given])
        read = trace_unlocked if traces else _weights_of if weight_mod else program_of
        program = read(score_mod, mask_mod, captures, mods)
        values = (*program.tensors, *program.scalars)
    indices, topk_length = _with_lengths(indices)
    varlen = cu_seqlens_q is not None or cu_seqlens_kv is not None
    if varlen or block is not None or sinks is not None or kv_lengths is not None or indices is not None:
        for name, value in (
            ("sinks", sinks),
            ("kv_lengths", kv_lengths),
            ("indices", indices),
            ("topk_length", topk_length),
            ("page_table", page_table),
            ("prefix_length", prefix_length),
            ("page_table's indptr", page_starts),
        ):
            _check_dense(name, value)
        if sinks is not None and sinks.dtype != torch.float32:
            sinks = sinks.float()
        fixed = Fixed(
            None if block is None else block_mask.blocks,
            kv_lengths,
            cu_seqlens_q,
            cu_seqlens_kv,
            sinks,
            indices,
            topk_length,
            page_table,
            prefix_length,
            page_starts,
        )
    fixed = fixed if q_rope is None else fixed._replace(q_rope=q_rope)
    if prefix_length is not None and (not pages or cu_seqlens_q is None):
        raise InvalidArgument(
            "prefix_length is for packed queries over pages: give page_table, int32 [sequences, pages of the "
            "longest], and cu_seqlens_q too, or leave it out."
        )
    if pages is not None:
        _check_cache(page_table, kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    elif varlen:
        _check_varlen(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    elif max_seqlen_q is not None or max_seqlen_kv is not None:
        raise InvalidArgument(
            "max_seqlen_q and max_seqlen_kv belong to cu_seqlens_q and cu_seqlens_kv: give those too, or "
            "none of them."
        )
    if deterministic is None:
        deterministic = _asked_deterministic(indices is not None, wants_grad and not compiling)
    key = _key(
        program,
        causal,
        _kinds(program, wants_grad) if values else (),
        block,
        pages,
        dropout_p > 0,
        kv_lengths is not None and pages is None,
        varlen,
        sinks is not None,
        deterministic,
        row_max,
        fp32_out,
        batch_invariant,
        fp32_grads,
        indices is not None,
        prefix_length is not None,
        running_state,
        weight_mod,
        skip_softmax_threshold is not None,
        q_rope is not None,
        two_terms,
    )
    options = _options(key) if compiling else _cached_options(key)
    if not -1 < dropout_p < 1:
        raise InvalidArgument(f"dropout_p is {dropout_p}: it must be at least 0 and less than 1.")
    # Not `size or 0`: torch.compile cannot branch on an .item().
    longest_q, longest_kv = (0 if size is None else size for size in (max_seqlen_q, max_seqlen_kv))
    problem = Problem(
        options,
        scale,
        dropout_p,
        longest_q,
        longest_kv,
        program.form.tensors + program.form.scalars,
        pages is not None,
        skip_softmax_threshold=skip_softmax_threshold,
    )
    return fixed, values, problem


def _weights_of(weight_mod: Any, *others: Any) -> Program:
    """The program whose score is the weight of a pair."""
    try:
        return program_of(weight_mod, *others)
    except (InvalidArgument, WrongType) as error:
        text = str(error).replace("score_mod", "weight_mod").replace("returns a score", "returns a weight")
        raise type(error)(text) from error.__cause__


def _with_lengths(indices: Any) -> tuple[Any, Any]:
    """attention()'s indices, and topk_length where they come with it."""
    if not isinstance(indices, tuple):
        return indices, None
    if len(indices) != 2:
        raise WrongType(
            f"indices is a tuple of {len(indices)}: give a torch.Tensor, or (indices, topk_length)."
        )
    return indices


def _key(
    program: Program,
    causal: bool | str,
    kinds: tuple[Any, ...] = (),
    block: Any = None,
    pages: int | None = None,
    dropout: bool = False,
    padded: bool = False,
    varlen: bool = False,
    sinks: bool = False,
    deterministic: bool = False,
    *others: bool,
) -> tuple[Any, ...]:
    """What decides a spec's options. others: as _options() names them; by default all are False."""
    given = (dropout, padded, varlen, sinks, pages == 0, deterministic, *(others or (False,) * 11))
    return program.form, causal, kinds, block, pages, given


def _asked_deterministic(indices: bool, warns: bool) -> bool:
    """As torch.use_deterministic_algorithms() says; with indices, which have no deterministic gradients, not where that warns only."""
    asked = torch.are_deterministic_algorithms_enabled()
    if not (asked and indices and torch.is_deterministic_algorithms_warn_only_enabled()):
        return asked
    if warns:
        warnings.warn(
            "flashjit's gradients with indices are not deterministic, though "
            "torch.use_deterministic_algorithms(True, warn_only=True) is set.",
            stacklevel=5,
        )
    return False


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast attention runs in the lower precision, as PyTorch's own does."""
    return tuple(
        t.to(torch.get_autocast_dtype(t.device.type))
        if isinstance(t, Tensor)
        and t.device.type in ("cuda", "cpu")
        and torch.is_autocast_enabled(t.device.type)
        and t.dtype in SPEC_TYPES
        else t
        for t in (q, k, v)
    )  # type: ignore[return-value]


def _check_kinds(causal: Any, scale: Any, dropout_p: Any, captures: Any) -> None:
    if type(causal) is not bool:
        causal_option(causal)
    if scale is not None:
        check_number("scale", scale)
    if type(dropout_p) is not float:
        check_number("dropout_p", dropout_p)
    if captures is not None:
        check_mapping("captures", captures)


def _check_varlen(cu_seqlens_q: Any, cu_seqlens_kv: Any, max_seqlen_q: Any, max_seqlen_kv: Any) -> None:
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if not isinstance(value, Tensor):
            raise WrongType(
                f"{name} is {describe(value)}: give cu_seqlens_q and cu_seqlens_kv as int32 tensors."
            )
        _check_dense(name, value)
    if max_seqlen_q is None or max_seqlen_kv is None:
        raise InvalidArgument(
            "cu_seqlens come without max_seqlen_q or max_seqlen_kv: give both as Python ints; to find "
            "them from cu_seqlens would wait for the GPU."
        )
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if not _is_whole(value):
            raise WrongType(f"{name} is a {type(value).__name__}: give a Python int.")


def _is_whole(value: Any) -> bool:
    """Whether it is an int, NumPy's too; compiled code, whose ints may be symbols, cannot be asked for attributes."""
    if isinstance(value, (int, torch.SymInt)) or torch.compiler.is_compiling():
        return not isinstance(value, (float, Tensor))
    return not isinstance(value, Tensor) and hasattr(value, "__index__")


def _check_dense(name: str, value: Any) -> None:
    if value is None or isinstance(value, Tensor) and value.layout is torch.strided:
        return
    if isinstance(value, Tensor):
        raise WrongType(f"{name} has the layout {value.layout}: convert it with .to_dense().")
    raise WrongType(f"{name} is a {type(value).__name__}: give a torch.Tensor.")


def _check_cache(
    page_table: Any,
    kv_lengths: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
) -> None:
    if kv_lengths is None:
        raise InvalidArgument(
            "kv_lengths is missing: with page_table or cache=True it says how many keys each sequence has."
        )
    if cu_seqlens_kv is not None:
        raise InvalidArgument(
            "cu_seqlens_kv is given, but with page_table or cache=True kv_lengths says how many keys each "
            "sequence has: leave it out."
        )
    _check_dense("cu_seqlens_q", cu_seqlens_q)
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        raise InvalidArgument(
            "cu_seqlens_q and max_seqlen_q come together: give both, or neither where every sequence has the "
            "same number of queries."
        )
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if value is not None and not _is_whole(value):
            raise WrongType(f"{name} is a {type(value).__name__}: give a Python int.")


def _kinds(program: Program, wants_grad: bool) -> tuple[Any, ...]:
    """(type, rank, whether a gradient is wanted) of each captured tensor, then whether each scalar is a float."""
    kinds = []
    for name, tensor in zip(program.form.tensors, program.tensors):
        if not isinstance(tensor, Tensor) or tensor.dtype not in ELEMENTS:
            raise WrongType(
                f"captures[{name!r}] is {describe(tensor)}: give a number, or a tensor of "
                f"{', '.join(str(t).removeprefix('torch.') for t in ELEMENTS)}."
            )
        # What a mask alone reads has no gradient. Under no_grad() too where nothing speaks against it, so that kernels and
        # lists of training serve there.
        grad = (
            is_differentiated(tensor)
            and program.form.has_gradient(name)
            and (wants_grad or name not in program.form.known)
        )
        kinds.append((ELEMENTS[tensor.dtype], tensor.dim(), grad))
    return (*kinds, *map(is_real, program.scalars))


def causal_option(causal: Any) -> str:
    """The mask's name in a spec."""
    if not isinstance(causal, Hashable) or causal not in CAUSAL:
        raise InvalidArgument(f'causal is {causal!r}: give True, False, "bottom_right" or "top_left".')
    return CAUSAL[causal]


def _options(key: tuple[Any, ...]) -> str:
    """The options of a spec, from what attention() was asked for."""
    form, causal, kinds, block, pages, given = key
    named = causal_option(causal)
    count = len(form.tensors)
    for name, kind in zip(form.tensors, kinds):
        if (
            kind[2]
            and name in form.known
            and not any(
                line.partition(":")[0].strip() == name and line.endswith(" grad") for line in form.declared
            )
        ):
            raise InvalidArgument(
                f"the captured tensor {name} requires a gradient, but the program declares it without: "
                f'end its declaration with "grad", or give its detach().'
            )
    text = form.options(named, kinds[:count], kinds[count:])
    if block is not None:
        text += f":map{block[0]}x{block[1]}"
    if pages:
        text += f":pages{pages}"
    names = (
        "dropout_p",
        "kv_lengths",
        "cu_seqlens_q",
        "sinks",
        "cache",
        "deterministic",
        "return_row_max",
        "out_dtype",
        "batch_invariant",
        "fp32_grads",
        "indices",
        "prefix_length",
        "state",
        "weight_mod",
        "skip_softmax_threshold",
        "q_rope",
        "accurate",
    )
    asked = dict(zip(names, given))
    return text + options_of(asked, _spec_options()) + (":fp32_grads" if asked["fp32_grads"] else "")


def _spec_options() -> tuple[tuple[str, str], ...]:
    return spec_options()


# What torch.compiler.assume_constant_result() does, which imports the compiler.
_spec_options._dynamo_marked_constant = True  # type: ignore[attr-defined]


_known_options: dict[Any, str] = {}


def _cached_options(key: tuple[Any, ...]) -> str:
    text = _known_options.get(key)
    if text is None:
        if len(_known_options) >= KEEP_PLANS:
            _known_options.clear()
        text = _known_options[key] = _options(key)
    return text


def with_elements(value: Any) -> Any:
    """A captured tensor of a call without queries, which reads none, such as a mask's of an empty batch: not empty."""
    if not isinstance(value, Tensor) or value.numel():
        return value
    zeros = value.new_zeros([max(size, 1) for size in value.shape])
    return zeros + value.sum() if value.requires_grad else zeros  # the sum has a gradient without elements

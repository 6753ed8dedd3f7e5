"""attention(): from PyTorch's arguments to a plan, and from there to autograd or to the operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._autograd import Call, record, recording
from ._blocks import read_blocks
from ._call_types import NO_RNG, NOTHING, Fixed, Problem, Rng, contiguous, switches_of
from ._checks import check_switches, read_accurate
from ._formats import KvFormat, with_formats
from ._front import MEMORY, Recorder, kept
from ._kept_plans import plan_of
from ._launch import is_watched
from ._lists import TileLists, check_lists
from ._named import sides_of, weights_of, with_named
from ._operators import draw, through_operator
from ._out_codes import read_out_codes
from ._pages import most_keys, read_table
from ._peers import refuse_unknown
from ._plans import Plan
from ._problem import autocast, check_types, read_problem, usual_call, with_elements
from ._q_rope import read_q_rope
from ._results import Results, read_threshold
from ._scales import has_codes, is_fp32_out, with_scales
from ._tensors import PLAIN, describe, is_differentiated, readable
from ._tracing import ELEMENT_MODS, torch_mode
from ._transforms import have_tangents
from .errors import InvalidArgument, Unsupported, WrongType
from .programs import check_queries, named_as_written

torch_mode()  # makes its class now: torch.compile, which may be the first to trace a program, cannot

NO_VALUES: tuple[Any, ...] = ()  # of captures


_TENSORS = (
    "q k v cu_seqlens_q cu_seqlens_kv sinks kv_lengths page_table indices prefix_length k_scale v_scale q_scale "
    "k_block_scale v_block_scale q_rope"
).split()
_VALUES = (
    "causal scale v_columns dropout_p window softcap max_seqlen_q max_seqlen_kv cache k_format v_format deterministic "
    "return_lse batch_invariant"
).split()
_SWITCHES = "cache return_lse return_row_max accurate batch_invariant swizzled_scales deterministic".split()
_PROGRAMS = ("score_mod", "mask_mod", "weight_mod", *ELEMENT_MODS)


@kept({name: name for name in (*_TENSORS, *MEMORY, "lists")}, _VALUES, programs=_PROGRAMS)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    v_columns: int | None = None,
    q_rope: Tensor | None = None,
    dropout_p: float = 0.0,
    score_mod: Any = None,
    weight_mod: Any = None,
    out_mod: Any = None,
    q_mod: Any = None,
    k_mod: Any = None,
    mask_mod: Any = None,
    captures: Mapping[str, Any] | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    block_mask: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    sinks: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | tuple[Tensor, ...] | None = None,
    cache: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_block_scale: Tensor | None = None,
    v_block_scale: Tensor | None = None,
    k_format: KvFormat | str | None = None,
    v_format: KvFormat | str | None = None,
    indices: Tensor | tuple[Tensor, Tensor] | None = None,
    prefix_length: Tensor | None = None,
    state: tuple[Tensor, Tensor] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    out_block_scale: Tensor | None = None,
    swizzled_scales: bool = False,
    accurate: bool | str = False,
    batch_invariant: bool = False,
    pv_sums: int | str = 1,
    skip_softmax_threshold: float | None = None,
    skip_softmax_counts: Tensor | None = None,
    lists: TileLists | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    **unknown: Any,
) -> Any:
    """softmax(score_mod(scale * Q K^T), where mask_mod) V, with gradients to q, k, v, sinks and captured tensors.

    q: [batch, heads_q, seqlen_q, head_dim]; k: [batch, heads_kv, seqlen_kv, head_dim]; v: [batch, heads_kv, seqlen_kv,
        head_dim_v]; float16, bfloat16 or float32. heads_q is a multiple of heads_kv; head_dim is a multiple of 8 up to 576, and
        head_dim_v up to 512. Any strides work without a copy where the last is 1, the others are multiples of 16 bytes and
        memory begins at one; else a copy is made.
    v_columns: instead of v: V is the first so many columns of K, as in latent attention, where K and V are one cache. K is
        loaded once, and its gradient is dK + dV.
    q_rope: with v_columns: Q's columns behind V's, [batch, heads_q, seqlen_q, head_dim - v_columns], as latent attention rotates
        them; q then has v_columns columns. Kernels read the two tensors where they lie. Where autograd records, in compiled code,
        under transforms, with q_mod and with q of 8 bits they are joined first.
    causal: True masks later keys, with the last query seeing the last key; "top_left": the first query sees the first. With
        cu_seqlens or a cache it is aligned in each sequence. With kv_lengths as padding, True needs q and k of equal length, or
        one query: else it is ambiguous, and refused.
    scale: above 0; default 1 / sqrt(head_dim).
    dropout_p: probability to drop a pair, from 0 to less than 1; seeded by PyTorch's generator.
    score_mod, mask_mod: functions as FlexAttention has them, score_mod(score, b, h, q_idx, kv_idx) and mask_mod(b, h,
        q_idx, kv_idx) -> whether the pair attends; or text, such as "score + slopes[h] * to_float(kv - q)"; or what
        flashjit.trace() made. Captured tensors that require gradients in score_mod get them.
    weight_mod: in place of the softmax: a score_mod, in the same three forms, whose value is the weight of a pair: O is
        where(mask, weight_mod(scale * Q K^T), 0) V, as in sigmoid attention, torch.sigmoid(score - math.log(n)). Not with
        score_mod, softcap, sinks, dropout_p, indices, state, batch_invariant, q of 8 bits, return_lse and return_row_max.
    out_mod: a function out_mod(out, b, h, q_idx, column) -> the number stored for an element of O, or text. out is the element in
        float32, before rounding: out * torch.sigmoid(gate[b, q_idx, h, column]). With gradients to the tensors that it reads; LSE
        and the largest scores stay the softmax's. With cu_seqlens b and q_idx count as in score_mod. Not with indices, state,
        batch_invariant, accurate and forward-mode derivatives.
    q_mod, k_mod: functions q_mod(row, b, h, q_idx, column) and k_mod(row, b, h_kv, kv_idx, column) -> the element of Q or K that
        scores are computed from, or texts: RoPE, the norm of a head, a scale per column. In float32, then rounded to the type of
        q. row[column] is the element, row[other] another one of the row, row.square().sum() the row's sum of squares. q_idx counts
        from 0, over a cache too. Gradients are for q and k as they are given, and for the tensors that the functions read. Neither
        with indices, state, q or k and v of 8 bits, and forward-mode derivatives; k_mod not with v_columns, k_format, v_format
        and caches, whose rows append() normalizes and rotates.
    captures: the values of the names in texts: tensors of 1 to 6 dimensions, and numbers.
    window: (left, right): how many keys a query sees before and after its own position; None or -1: all. The last query is
        at the last key; with causal="top_left" the first at the first. With kv_lengths as padding it needs q and k of equal
        length, or top_left; with one query, (None, right) is allowed, too. Not with mask_mod.
    softcap: scores become softcap * tanh(score / softcap). Not with score_mod.
    block_mask: BlockMap, or FlexAttention's BlockMask, whose own mask_mod is applied in its partial blocks alone, as there; the
        argument mask_mod is applied everywhere. Its tables are read on the device at each call; with lists they keep their values.
    cu_seqlens_q, cu_seqlens_kv: int32 [sequences + 1]: q is [1, heads_q, all rows, head_dim], and sequence i has the rows
        cu_seqlens_q[i] to cu_seqlens_q[i + 1]; so K and V. With max_seqlen_q and max_seqlen_kv, ints, at least the longest.
        Rows after the last sequence's end, as trainers pad them, get zeros. On the GPU cu_seqlens is not checked: wrong values
        give wrong results for the sequences concerned, but nothing outside the tensors is read or written. On the CPU
        they are refused.
    sinks: [heads_q], of any float type: one more logit per head in the softmax, without a value.
    kv_lengths: int32 [batch]: keys from there on are padding, which may hold anything. Queries are all computed: ignore rows of O
        that are padding. On the CPU a length below 0, or above the number of
        keys that there is room for, is refused; on a GPU it is cut.
    page_table: int32 [sequences, pages of the longest]: k and v are a cache's pages, k [pages, heads_kv, rows of a page,
        head_dim] with any strides, and key n of sequence i is row n % rows of page page_table[i, n // rows]; or int32
        [sequences]: they are slots, and this is each sequence's. kv_lengths, int32 [sequences], is how many keys each has;
        nothing behind them, in pages or table, is read. causal lets a sequence's last query see its last key. With
        cu_seqlens_q and max_seqlen_q the queries are packed; max_seqlen_kv is the most keys that a sequence may have, by
        default all that a row of the table has room for. No gradients.
        Or CSR: (indptr, indices), int32 [sequences + 1] and [pages of all], best with max_seqlen_kv, whose default is the room
        in all of them; (indptr, indices, last_page_len), int32 [sequences], in place of kv_lengths too.
    cache: k and v are a cache's slots in order, k [sequences, heads_kv, capacity, head_dim]; all else as with page_table.
    k_scale, v_scale: with k and v of float8_e4m3fn, float8_e5m2 or int8: float32, what these are multiplied with: one number,
        [heads_kv], [sequences, heads_kv], or for keys or pages with scales of their own [pages, heads_kv, rows of a page], 1 in
        the place of the rows where a page has one (slots of a cache, and without a cache sequences, stand for pages); any
        strides. No gradients.
    q_scale: with q of their type too, float8_e4m3fn or float8_e5m2: one number, [heads_kv], or [sequences, heads_kv]: of all
        query heads of a KV head.
    k_format, v_format: KvFormat, or its text such as "nvfp4": k or v is uint8, [..., bytes of a row]: rows in that format, with
        strides that are multiples of its alignment(). Formats of codes alone, and "scaled" ones, take k_scale and v_scale. With
        v_columns V has the rows of K. None: elements, of q's type or of 8 bits. No gradients.
    k_block_scale, v_block_scale: with formats whose scales are in a tensor of their own: that tensor, of KvFormat.block_scales()'s
        sizes and type, with any strides, the last one 1: [pages or batch, heads_kv, rows or groups of keys, scales and then zero points].
    indices: int32 [batch or 1, seqlen_q, heads_kv, top-k]: sparse tokens. A query of the heads that share a head of k attends to
        the keys that its list names, and to no others. Entry n is row n of k; with cu_seqlens row n of its sequence (indices is then
        [1, all rows of q, heads_kv, top-k]); with page_table row n of its sequence's pages in order. A key that is in a list twice
        counts twice; -1, and a number that is no key of the sequence, is skipped. Or (indices, topk_length), with topk_length int32
        [batch or 1, seqlen_q] or [seqlen_q]: so many first entries count. causal and mask_mod apply. Not with block_mask, dropout_p,
        q of 8 bits, deterministic gradients.
    prefix_length: int32 [1], with page_table and cu_seqlens_q: how many first keys each sequence has in common with the first
        one. Each has at least so many before the keys of its queries. 0: none. It changes no results: where possible, these keys are
        read once for all sequences. A wrong number is refused on the CPU; on a GPU it is not checked, and results are wrong.
    state: (O, LSE), float32, of the same queries over other keys. O and LSE are then of all these keys, as merge() would make
        them. O of a row whose LSE is -inf may be anything. Not with a cache, indices, k and v of 8 bits, and sinks, which belong to
        the call that makes the first state. No gradients: merge() has them.
    deterministic: the same gradients, bit by bit, on every run; None: as torch.use_deterministic_algorithms() says.
        Not with indices: an error, or with warn_only=True a warning.
    return_lse: also return the log of the softmax's row sums, float32 [batch, heads_q, seqlen_q], with cu_seqlens
        [1, heads_q, all rows], which has gradients too. -inf where a row attends to nothing or belongs to no sequence.
    return_row_max: also return, last, the largest score of each query, shaped like the LSE, after score_mod and without sinks.
        QK-clip's largest logit of each head is row_max.amax((0, 2)). No gradient; refused in compiled code and under transforms.
    out_dtype: torch.float32, or None for the type of q. With q of 8 bits: torch.bfloat16 (None is the same), torch.float16 or
        torch.float32. The backward pass reads O as it is returned, without rounding. Or codes, with the scales below and without
        gradients: torch.float8_e4m3fn or torch.float4_e2m1fn_x2 (NVFP4), of head_dim_v in multiples of 16; the nearest, ties to even;
        a value that is too large becomes the largest, and NaN stays NaN, with NVFP4 in the scale. Not with state and bind(), nor in
        compiled code.
    out_scale: float32, one number on q's device, with codes as out_dtype: O is code * out_scale, with NVFP4 code * block's scale *
        out_scale. Without it, O of float8_e4m3fn has a scale for each row of a head, its largest magnitude / 448.
    out_block_scale: memory for the scales of rows, float32 [batch, heads_q, seqlen_q, 1], or of NVFP4's 16 columns, float8_e4m3fn
        [batch, heads_q, seqlen_q, head_dim_v / 16], with any strides, the last one 1; by default it is made. These scales are returned
        after O.
    swizzled_scales: NVFP4's scales as cuBLAS and engines read them (128x4): float8_e4m3fn [rows, heads_q * head_dim_v / 16], contiguous, of a
        row for each token, b * seqlen_q + i, rounded up to a multiple of 128, of head_dim_v in multiples of 64. Rows behind the last
        token are not written.
    accurate: the backward pass reads O before it is rounded to the type of q. Rows in which one key is strong then have gradients
        of the type's precision, which may else be off by a tenth and more. Autograd keeps O in float32, 4 bytes an element,
        beside the returned O. "fp32": P and dS also enter their products as two elements each, so that O, dQ, dK and dV have the
        errors of attention in float32, for kernels of families sm80 and simt. No effect without gradients, with float32, and with
        weight_mod. Not with out_mod and forward-mode derivatives.
    batch_invariant: O and LSE of a sequence are the same, bit by bit, whatever else is in the batch. Slower where there are few
        sequences: keys are split only with up to 64 queries, and then into parts of 2048.
    pv_sums: with q of 8 bits, of how many tiles of keys the tensor cores may sum up P V: 1, 4 or "all". Hopper's sum codes with
        about 14 bits, so that with more O has a larger error where V's mean is not zero, and is found faster. Up to 128
        columns of V for 4; elsewhere, and with programs of scores, dropout_p and scales of keys, it is 1.
    skip_softmax_threshold: from 0, which skips nothing, to 1: skip-softmax (BLASST), an approximation for inference. Rows that are
        computed together leave out the keys of a tile where exp(largest score in the tile - maximum so far) is below it for each of
        them: O changes by at most 2 n threshold max|v| with n keys left out. FlashInfer's threshold; TensorRT-LLM's scale factor
        divided by the number of keys. NaN in v of a skipped tile is not seen. No gradients; not with dropout_p and weight_mod, nor in
        compiled code. On the CPU nothing is skipped.
    skip_softmax_counts: with a threshold, int64 [2] on q's device, ADDED to: tiles that were visited, and how many were skipped.
    lists: TileLists built from these arguments, if many calls share a mask; None: built in this call, if needed. Not with
        weight_mod, out_mod, q_mod, k_mod and an out_dtype of codes, which TileLists does not take.
    out: a tensor that O is written to, and that is returned: of O's sizes, type and device, any strides whose last is 1 and whose
        others are multiples of 16 bytes, in memory of its own. lse: the same for LSE, of any strides; it is then returned as with
        return_lse. workspace: uint8 [bytes] for this call in place of an allocation, at least Runtime.workspace_bytes(). None of
        the three with gradients or in compiled code.

    Returns O, [batch, heads_q, seqlen_q, head_dim_v]; rows that attend to nothing are 0. With more results asked for a tuple: O, scales
        of codes, LSE, row maxima. Raises flashjit.Error.
    """
    receive, recorder = _hidden(unknown) if unknown else (None, None)
    compiling, stored = torch.compiler.is_compiling(), k_format is not None or v_format is not None
    switches = (cache, return_lse, return_row_max, accurate, batch_invariant, swizzled_scales, deterministic)
    two_terms = _check_switches(switches, compiling)
    q, q_rope = read_q_rope(q, q_rope, k, v_columns, q_mod)
    if compiling or torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    v = k if stored and v is None and v_columns is not None else _value_of(k, v, v_columns)
    plain = not compiling and type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
    if not plain and not compiling:
        check_types(q, k, v)
    fixed, values, usual, wants_grad = NOTHING, NO_VALUES, None, torch.is_grad_enabled()
    cached = cache or page_table is not None
    page_starts, page_table, kv_lengths, pages = read_table(page_table, kv_lengths, k)
    scales = (k_scale, v_scale, q_scale, k_block_scale, v_block_scale)
    scaled = has_codes(q, k, scales, pv_sums) or stored
    accurate = bool(accurate) and wants_grad and out is None and receive is None
    codes, out, out_dtype = read_out_codes(out_dtype, out_scale, out_block_scale, out, v, swizzled_scales)
    fp32_out, final = _type_of_out(out_dtype, q, accurate and not codes, out_mod, weight_mod)
    mods, packing = (out_mod, q_mod, k_mod), (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    if (
        plain
        and score_mod is mask_mod is out_mod is q_mod is k_mod is block_mask is window is softcap is None
        and not (scaled or return_row_max or fp32_out or batch_invariant or weight_mod or codes)
        and skip_softmax_threshold is skip_softmax_counts is None
        and (type(causal) is bool and (scale is None or type(scale) is float))
        and (type(dropout_p) is float and dropout_p == 0)
        and captures is sinks is indices is prefix_length is state is q_rope is None
    ):
        cache_of = (kv_lengths, page_table, page_starts, pages if cached else None)
        usual = usual_call(causal, scale, deterministic, packing, *cache_of)
    if usual is not None:  # most calls, in a fraction of the time
        fixed, problem = usual
    else:
        score_mod = weights_of(weight_mod, score_mod, softcap, return_lse, lse, return_row_max)
        check_queries(mask_mod, q, cu_seqlens_q)
        if window is not None or softcap is not None:
            score_mod, mask_mod, captures = with_named(causal, score_mod, mask_mod, captures, window, softcap)
        if block_mask is not None:
            queries = q.shape[2] if max_seqlen_q is None else max_seqlen_q
            keys = most_keys(page_starts, page_table, pages, k) if max_seqlen_kv is None else max_seqlen_kv
            block_mask, mask_mod = read_blocks(
                block_mask, mask_mod, queries, keys, lists is not None and not compiling
            )
        fixed, values, problem = read_problem(
            causal,
            scale,
            dropout_p,
            score_mod,
            mask_mod,
            captures,
            block_mask,
            *packing,
            sinks,
            kv_lengths,
            deterministic,
            wants_grad,
            compiling,
            page_table,
            pages if cached else None,
            return_row_max,
            fp32_out,
            bool(batch_invariant),
            indices=indices,
            prefix_length=prefix_length,
            running_state=state is not None,
            page_starts=page_starts,
            weight_mod=weight_mod is not None,
            mods=mods,
            skip_softmax_threshold=read_threshold(skip_softmax_threshold, skip_softmax_counts),
            q_rope=q_rope,
            two_terms=two_terms and accurate and fp32_out,
        )
        values = tuple(map(with_elements, values)) if values and not q.numel() else values
        _refuse_two_meanings(causal, window, q, k, None if cached else kv_lengths)
        if stored and pv_sums == 1:
            fixed, problem = with_formats(fixed, problem, q, k, v, v_columns, (k_format, v_format), scales)
        elif scaled:
            fixed, problem = with_scales(fixed, problem, q, k, scales, out_dtype, pv_sums)
    if (cached or scaled) and wants_grad:
        _refuse_gradients(q, k, v, sinks, values)
    check_lists(lists, codes)
    results = Results(
        return_lse or lse is not None, return_row_max, out, lse, workspace, final, skip_softmax_counts, codes
    )
    dual = forward_ad._current_level >= 0 and have_tangents(q, k, v, *fixed, *values)
    try:
        if dual or not plain or is_watched() or _is_negated(q, k, v, fixed, values):
            results.refuse_in_operators(state, skip_softmax_threshold, receive is not None, dual)
            of = (None, None) if lists is None else lists.memory
            return results.of_operator(*through_operator(q, k, v, fixed, values, problem, of, dual))
        if v_columns and not scaled:
            problem = problem._replace(options=problem.options + ":shared_kv")
        if receive is not None:
            return receive(q, k, v, v_columns, fixed, values, problem, lists, results)
        return _launch(q, k, v, v_columns, fixed, values, problem, lists, results, state, recorder)
    except InvalidArgument as error:
        if compiling:
            raise
        raise named_as_written(error, problem.names, values, captures, score_mod, mask_mod, *mods) from None


def _check_switches(given: Sequence[Any], compiling: bool) -> bool:
    """Whether P and dS are two elements each, which accurate="fp32" asks for."""
    if any([type(x) is not bool and x is not None for x in given]):
        named = dict(zip(_SWITCHES, given))
        two_terms, named["accurate"] = read_accurate(named["accurate"])
        if not compiling:
            check_switches(**named)
        return two_terms
    return False


def _hidden(unknown: dict[str, Any]) -> tuple[Any, Any]:
    """Given besides attention()'s arguments: who receives the call when it is read, in place of _launch(), as bind() does;
    the recorder of a call that is new to the front."""
    others = {name: value for name, value in unknown.items() if name not in ("_receiver", "_recorder")}
    if others:
        refuse_unknown(others)
    return unknown.get("_receiver"), unknown.get("_recorder")


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_columns: int | None,
    fixed: Fixed,
    values: tuple[Any, ...],
    problem: Problem,
    lists: TileLists | None,
    results: Results,
    state: Any,
    recorder: Recorder | None,
) -> Any:
    """Computes at once, and records what autograd asks for."""
    if results.codes is not None:
        problem = problem._replace(options=results.codes.options(problem.options))
    rng: Rng = draw_rng(q) if problem.dropout_p else NO_RNG
    plan = plan_of(q, k, v, fixed, values, problem)
    if not plan.has_dense_others:
        fixed = contiguous(fixed)
        plan = plan_of(q, k, v, fixed, values, problem)
    if problem.stored is not None:
        if not plan.reads or q.data_ptr() % 16:
            q = readable(q, "q")
            plan = plan_of(q, k, v, fixed, values, problem)
    elif not plan.reads or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q, k = readable(q, "q"), readable(k, "k")
        v = k[..., :v_columns] if v_columns else readable(v, "v")
        plan = plan_of(q, k, v, fixed, values, problem)
    row_max = plan.new_rows() if results.row_max else None
    if state is not None:
        state = _read_state(state, plan, (q, k, v, *values) if torch.is_grad_enabled() else ())
    if torch.is_grad_enabled() and is_differentiated(q, k, v, fixed.sinks, *values):
        results.refuse_gradients()
        if problem.skip_softmax_threshold is not None:
            raise Unsupported(
                "skip_softmax_threshold is for inference, and q, k, v or what programs read requires gradients: call under "
                "torch.no_grad(), or leave it out."
            )
        if not plan.prepared_both:
            _refuse_any_order(plan)
            plan.prepare_both()
        call = Call(plan, values, rng, lists, results.wants_lse, row_max, results.rounded)
        if not call.is_plain:
            recorder = None
        elif recorder is not None:
            recorder.records(recording(call), plan, q, k, v, fixed, values)
        if fixed is NOTHING and not values:
            result = record(call, recorder, q, k, v)
        else:
            result = record(call, recorder, q, k, v, *fixed, *[x for x in values if isinstance(x, Tensor)])
    else:
        if any(x is not None for x in (*results[2:5], results.skip_softmax_counts)):
            results.check(plan)
        out, lse = plan.forward(
            q,
            k,
            v,
            fixed,
            values,
            rng,
            results.wants_lse,
            None if lists is None else lists.built[0],
            row_max,
            results.out,
            state,
            results.lse,
            results.workspace,
            recorder=recorder,
            skip_softmax_counts=results.skip_softmax_counts,
            codes=results.codes,
        )
        if results.rounded is not None:
            out = out.to(results.rounded)
        if results.codes is not None:
            return results.with_codes(out, lse, row_max)
        result = (out, lse) if results.wants_lse else out
    return result if row_max is None else (*result, row_max) if results.wants_lse else (result, row_max)


def _type_of_out(
    out_dtype: Any, q: Tensor, accurate: bool, out_mod: Any, weight_mod: Any
) -> tuple[bool, torch.dtype | None]:
    """Whether O is float32, and what it is rounded to before it is returned, where that is for the backward pass alone."""
    if out_dtype is not None and is_fp32_out(out_dtype, q):
        return True, None
    if not accurate or q.dtype not in (torch.float16, torch.bfloat16) or weight_mod is not None:
        return False, None
    if out_mod is not None:
        raise Unsupported(
            "accurate and out_mod are both given, and O before out_mod is kept in the type of q: leave one of them out."
        )
    return True, q.dtype


def _refuse_any_order(plan: Plan) -> None:
    if {"indices", "det"} <= {*switches_of(plan.problem.options)}:
        raise Unsupported(
            "indices have no deterministic gradients, which torch.use_deterministic_algorithms(True) "
            "or deterministic=True asks for: give deterministic=False, or warn_only=True there."
        )


def _read_state(state: Any, plan: Plan, differentiable: Sequence[Any]) -> tuple[Tensor, Tensor]:
    if (
        not isinstance(state, (tuple, list))
        or len(state) != 2
        or not all(isinstance(x, Tensor) for x in state)
    ):
        raise WrongType(f"state is a {type(state).__name__}: give O and LSE of other keys, (out, lse).")
    if differentiable and is_differentiated(*differentiable, *state):
        raise Unsupported(
            "state has no gradients: call under torch.no_grad(), or join the parts by merge(), which has them."
        )
    for name, x, size in zip(("state[0]", "state[1]"), state, (plan.out_size, plan.lse_size)):
        if x.dtype != torch.float32 or tuple(x.shape) != tuple(size) or x.device != plan.device:
            raise InvalidArgument(f"{name} is {describe(x)}: give float32 {list(size)} on {plan.device}.")
    return readable(state[0], "state[0]"), state[1].contiguous()


def _value_of(k: Tensor, v: Tensor | None, v_columns: int | None) -> Tensor:
    """V, as it is given or as the first columns of K."""
    if (v is None) == (v_columns is None):
        raise InvalidArgument(
            "v and v_columns are "
            + ("both given" if v is not None else "both missing")
            + ": give v, or in its "
            "place v_columns, how many of K's first columns are V."
        )
    if v is not None:
        return v
    if not isinstance(k, Tensor):
        raise WrongType(
            f"k is a {type(k).__name__}: give a torch.Tensor; flashjit.forward() takes other arrays."
        )
    if not isinstance(v_columns, int) or not 0 < v_columns <= k.shape[-1]:
        raise InvalidArgument(
            f"v_columns is {v_columns!r}: give an int from 8 to the {k.shape[-1]} columns of k."
        )
    return k[..., :v_columns]


def _refuse_two_meanings(causal: Any, window: Any, q: Tensor, k: Tensor, padded: Tensor | None) -> None:
    """With padding, a diagonal that ends at the last key, of the tensor or of the sequence. padded: kv_lengths of such a call."""
    if padded is None or causal == "top_left" or not causal and window is None:
        return
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys:
        return
    left, right = sides_of(window)
    by_window = left is not None or right is not None and queries != 1
    if by_window or causal and queries != 1:
        raise InvalidArgument(
            f"{'window' if by_window else 'causal=True'} with kv_lengths, {queries} queries and {keys} keys has two meanings: give "
            "cache=True too where the last query is to see a sequence's own last key, or "
            'causal="top_left", or a mask_mod, where k is padded.'
        )


def _refuse_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Sequence[Any]) -> None:
    if is_differentiated(q, k, v, sinks, *values):
        raise Unsupported(
            "a cache, and K and V of 8 bits, have no backward pass: call attention() under torch.no_grad(), or with K "
            "and V as tensors of the type of Q, without page_table and cache."
        )


def _is_negated(q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: Sequence[Any]) -> bool:
    """Whether memory holds the numbers with the other sign, as behind z.conj().imag: the dispatcher makes copies."""
    if q.is_neg() or k.is_neg() or v.is_neg():
        return True
    if fixed is not NOTHING:  # all others are whole numbers
        values = (fixed.sinks, fixed.k_scale, fixed.v_scale, fixed.q_scale, *values)
    return any(isinstance(value, Tensor) and value.is_neg() for value in values) if values else False


def draw_rng(q: Tensor) -> tuple[int, int] | Tensor:
    """Seed and offset of a dropout mask, from PyTorch's generator of the device; where that is a GPU's, without a kernel."""
    if not q.is_cuda or torch.cuda.is_current_stream_capturing():  # each replay of a graph draws again
        return draw(q)
    generator = torch.cuda.default_generators[q.get_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # offsets are multiples of 4 in PyTorch; ours need to differ only
    return generator.initial_seed(), offset

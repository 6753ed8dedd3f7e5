"""The plan of a call, made once for all that look alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._call_types import NOTHING, Fixed, Problem
from ._plans import KEEP_PLANS, Plan
from ._tensor_checks import check_tensors
from ._tensors import refuse_nested, signature

_plans: dict[Any, Plan] = {}
_recent: dict[
    tuple[Problem, int, int], Plan
] = {}  # by problem and elements of Q and K, of calls without captures


def plan_of(q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem) -> Plan:
    if values:
        return _plan_by_key(q, k, v, fixed, values, problem)
    recent = problem, q.numel(), k.numel()
    plan = _recent.get(recent)
    if plan is not None and plan.takes(q, k, v) and plan.takes_fixed(fixed):
        if plan.index < 0:
            check_tensors(q, k, v, fixed, values, problem)
        return plan
    plan = _plan_by_key(q, k, v, fixed, values, problem)
    if len(_recent) >= KEEP_PLANS:
        _recent.clear()
    _recent[recent] = plan
    return plan


def _plan_by_key(
    q: Tensor, k: Tensor, v: Tensor, fixed: Fixed, values: tuple[Any, ...], problem: Problem
) -> Plan:
    try:
        key = (
            q.shape,
            k.shape,
            v.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            q.dtype,
            k.dtype,
            v.dtype,
            q.get_device(),
            k.get_device(),
            v.get_device(),
            problem,
        )
    except RuntimeError:
        refuse_nested(q, k, v)
        raise
    if fixed is not NOTHING or values:
        key = (*key, *[signature(value) for value in (*fixed, *values)])
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(q, k, v, fixed, values, problem)
        if len(_plans) >= KEEP_PLANS:
            _plans.clear()
        _plans[key] = plan
    elif plan.index < 0:  # so is the index of all that is on no GPU, such as on meta
        check_tensors(q, k, v, fixed, values, problem)
    return plan

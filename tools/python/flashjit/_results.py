"""What attention() returns, and the caller's memory for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check_number
from ._out_codes import OutCodes
from ._plans import Plan
from ._tensors import describe, refuse_expanded, refuse_negated
from .errors import InvalidArgument, Unsupported, WrongType


def read_threshold(threshold: Any, counts: Any) -> float | None:
    """attention()'s skip_softmax_threshold. Its range is the library's to check."""
    if threshold is None:
        if counts is not None:
            raise InvalidArgument(
                "skip_softmax_counts is given without skip_softmax_threshold: give a threshold, too, or leave the counts out."
            )
        return None
    if not torch.compiler.is_compiling():
        check_number("skip_softmax_threshold", threshold)
    return float(threshold)


class Results(NamedTuple):
    wants_lse: bool
    row_max: bool
    out: Tensor | None
    lse: Tensor | None
    workspace: Tensor | None
    rounded: torch.dtype | None = None  # O's type, which is float32 for the backward pass alone
    skip_softmax_counts: Tensor | None = None
    codes: OutCodes | None = None  # O is stored as codes

    def with_codes(self, out: tuple[Tensor, Tensor | None], lse: Any, row_max: Tensor | None) -> Any:
        """What attention() returns of O and the scales of its blocks."""
        assert self.codes is not None
        of_codes = (self.codes.returned(out[0]), out[1])
        results = [x for x in (*of_codes, lse if self.wants_lse else None, row_max) if x is not None]
        return results[0] if len(results) == 1 else tuple(results)

    def _given(self) -> str | None:
        """The name of memory that is the caller's."""
        for name in ("out", "lse", "workspace"):
            if getattr(self, name) is not None:
                return name
        return None

    def of_operator(self, out: Tensor, lse: Tensor) -> Any:
        """What attention() returns of an operator's results."""
        if self.rounded is not None:
            out = out.to(self.rounded)
        return (out, lse) if self.wants_lse else out

    def refuse_in_operators(
        self, state: Any, skip_softmax_threshold: Any, binding: bool, tangents: bool
    ) -> None:
        if tangents and self.rounded is not None:
            raise Unsupported(
                "accurate is for the backward pass, and forward-mode derivatives have none: leave it out."
            )
        if binding:
            raise Unsupported(
                "bind() is not for tensor subclasses, negative views, and modes and transforms of torch: call attention()."
            )
        if self.codes is not None:
            raise Unsupported(
                "out_dtype of codes cannot be had in compiled code, or under modes and transforms of torch: call attention() outside "
                "of them."
            )
        name = "return_row_max" if self.row_max else "state" if state is not None else self._given()
        if skip_softmax_threshold is not None:
            name = "skip_softmax_threshold"
        if name is not None:
            raise Unsupported(
                f"{name} cannot be had in compiled code, or under modes and transforms of torch: call attention() "
                "outside of them."
            )

    def refuse_gradients(self) -> None:
        if self.codes is not None:
            raise Unsupported(
                "out_dtype is of codes, which have no gradients, and q, k, v or what programs read requires them: call under "
                "torch.no_grad(), or give another out_dtype."
            )
        name = self._given()
        if name is not None:
            raise Unsupported(
                f"{name} is given with tensors that require gradients: leave it out, or call under torch.no_grad()."
            )

    def check(self, plan: Plan) -> None:
        """That the caller's memory is as the plan's results are."""
        for name, size, dtype in (
            ("out", plan.out_size, plan.out_dtype),
            ("lse", plan.lse_size, torch.float32),
            ("workspace", None, torch.uint8),
            ("skip_softmax_counts", (2,), torch.int64),
        ):
            given = getattr(self, name)
            if given is None:
                continue
            if not isinstance(given, Tensor):
                raise WrongType(f"{name} is a {type(given).__name__}: give a torch.Tensor.")
            wanted = list(given.shape) if size is None else list(size)
            if list(given.shape) != wanted or given.dtype != dtype or given.device != plan.device:
                type_name = str(dtype).removeprefix("torch.")
                raise InvalidArgument(
                    f"{name} is {describe(given)}: it must be {type_name} {'[bytes]' if size is None else wanted} on "
                    f"{plan.device}."
                )
            refuse_negated(name, given)
            if name == "lse":
                refuse_expanded(name, given)
            if name in ("workspace", "skip_softmax_counts") and not given.is_contiguous():
                raise InvalidArgument(f"{name} has the strides {given.stride()}: it must be contiguous.")

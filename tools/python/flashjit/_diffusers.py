"""flashjit as an attention back end of Hugging Face diffusers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._attention import attention
from ._sdpa import scaled_dot_product_attention, supported
from .errors import InvalidArgument, Unsupported

NAME = "flashjit"


def register() -> str:
    """See flashjit.torch.register_with_diffusers()."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise Unsupported(
            f"diffusers cannot be used ({error}): flashjit registers with version 0.35 or newer; install it with "
            "`pip install -U diffusers`."
        ) from None
    if NAME not in AttentionBackendName._value2member_map_:
        _AttentionBackendRegistry.register(_new_member(AttentionBackendName))(attention_forward)
    return NAME


def _new_member(names: Any) -> Any:
    """One more member of an enumeration of texts: the dispatcher takes no other names."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    names._member_names_.append(member._name_)
    type.__setattr__(names, member._name_, member)
    return member


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """What diffusers' dispatcher calls. query: [batch, seqlen_q, heads, head_dim]; so key and value. Returns the same layout.

    attn_mask: boolean or added to the scores, broadcastable to [batch, heads, seqlen_q, seqlen_kv], or [batch, seqlen_kv]; or
        FlexAttention's BlockMask, or a flashjit.torch.BlockMap. return_lse: also LSE, [batch, heads, seqlen_q].
    """
    if _parallel_config is not None:
        raise Unsupported(
            "context parallelism of diffusers is not supported by flashjit's back end: use another back end for "
            "this model."
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(attn_mask, Tensor):
        if return_lse:
            raise Unsupported(
                "return_lse with a dense attn_mask is not supported here: give a BlockMask, or no mask."
            )
        if attn_mask.dim() == 2 and attn_mask.shape == (
            query.shape[0],
            key.shape[1],
        ):  # as diffusers' own back ends read it
            attn_mask = attn_mask[:, None, None]
        return scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa
        ).transpose(1, 2)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise InvalidArgument(
            f"query has {q.shape[1]} heads and key {k.shape[1]}: set enable_gqa=True for grouped heads."
        )
    dim_v = v.shape[3]
    if scale is not None or q.shape[3] % 8 or dim_v % 8:
        q, k, v, scale = supported(q, k, v, scale)
    found = attention(
        q,
        k,
        v,
        causal="top_left" if is_causal and q.shape[2] != k.shape[2] else is_causal,
        scale=scale,
        dropout_p=dropout_p,
        block_mask=attn_mask,
        return_lse=return_lse,
    )
    out, lse = found if return_lse else (found, None)
    out = (out if out.shape[3] == dim_v else out[..., :dim_v]).transpose(1, 2)
    return (out, lse) if return_lse else out


# --- Processors that call PyTorch's function themselves --------------------------------------------------------------


def use(model: torch.nn.Module) -> None:
    """See flashjit.torch.use_in_diffusers()."""
    name = register()
    modules = [module for module in model.modules() if getattr(module, "processor", None) is not None]
    if not modules:
        raise InvalidArgument(
            f"{type(model).__name__} has no attention processors: give a model of diffusers, such as "
            "pipe.transformer."
        )
    if any(hasattr(module.processor, "_attention_backend") for module in modules):
        model.set_attention_backend(name)  # type: ignore[operator]
    for module in modules:
        if not hasattr(module.processor, "_attention_backend"):
            processor: Any = type(module.processor)
            module.processor.__class__ = _through_flashjit(processor)


class _Sdpa(TorchFunctionMode):
    """Within it, PyTorch's scaled_dot_product_attention() is flashjit's."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            function = scaled_dot_product_attention
        return function(*arguments, **(named or {}))


@functools.cache
def _through_flashjit(processor: Any) -> Any:
    """The class of processors, with its calls in an _Sdpa."""
    if hasattr(processor, "_is_flashjit"):
        return processor

    @functools.wraps(processor.__call__)  # attention modules look at the names of arguments
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        with _Sdpa():
            return processor.__call__(self, *arguments, **named)

    return type(
        processor.__name__,
        (processor,),
        {"__call__": call, "__module__": processor.__module__, "_is_flashjit": True},
    )

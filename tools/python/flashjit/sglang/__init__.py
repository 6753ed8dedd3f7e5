"""flashjit as SGLang's attention backend. Importing this needs neither SGLang nor PyTorch.

A wheel of flashjit announces register() to SGLang by the entry point `sglang.srt.plugins`; then

    python -m sglang.launch_server --model-path MODEL --attention-backend flashjit

computes attention with flashjit, for models with latent attention (MLA) too. A configuration that flashjit cannot serve is
refused when the model is loaded, with the reason. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

NAME = "flashjit"


def register() -> None:
    """Makes `flashjit` one of SGLang's attention backends. SGLang calls it in each of its processes."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([NAME])

    @register_attention_backend(NAME)
    def create(model_runner: Any) -> Any:
        from ._backend import FlashjitBackend

        return FlashjitBackend(model_runner)

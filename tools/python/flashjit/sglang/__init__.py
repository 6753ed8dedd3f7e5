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
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for kind in ("attention", "draft_attention", "deterministic_attention"):
        getattr(choices, f"add_{kind}_backend_choices")([NAME])
    _serve_drafts()

    @register_attention_backend(NAME)
    def create(model_runner: Any) -> Any:
        from ._backend import FlashjitBackend

        return FlashjitBackend(model_runner)


def _serve_drafts() -> None:
    """Adds NAME to SGLang's fixed table of backends for draft models."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory as Factory

    create = Factory._create_backend
    if getattr(create, "serves", None) == NAME:
        return

    def create_backend(self: Any, kind: str, backends: dict[str, Any], *rest: Any, **named: Any) -> Any:
        def own() -> tuple[str, Any]:
            from ._backend import FlashjitBackend
            from ._drafts import FlashjitDraftBackend

            runner = self.draft_model_runner
            if not named.get("stamps_children"):  # backends of decoding steps
                return NAME, FlashjitBackend(runner)
            return NAME, FlashjitDraftBackend(runner, self.topk, self.speculative_num_steps)

        return create(self, kind, {**backends, NAME: own}, *rest, **named)

    create_backend.serves = NAME  # type: ignore[attr-defined]
    Factory._create_backend = create_backend

"""flashjit as vLLM's attention backend. Importing this needs neither vLLM nor PyTorch.

A wheel of flashjit announces register() to vLLM by the entry point `vllm.general_plugins`; then

    vllm serve MODEL --attention-backend CUSTOM

computes attention with flashjit. For models with latent attention (MLA) the backend is FLASHJIT_MLA, with sparse latent attention
FLASHJIT_MLA_SPARSE. A configuration that flashjit cannot serve is refused when the model is loaded, with the reason. Written for
vLLM 0.32; 0.26 takes no new names, so there a latent backend is registered as CUSTOM.
"""

from __future__ import annotations

BACKEND = f"{__name__}._backend.FlashjitBackend"
LATENT_BACKEND = f"{__name__}._latent.FlashjitLatentBackend"
SPARSE_LATENT_BACKEND = f"{__name__}._sparse_latent.FlashjitSparseLatentBackend"


def register() -> None:
    """Makes vLLM's backends CUSTOM, FLASHJIT_MLA and FLASHJIT_MLA_SPARSE flashjit's. vLLM calls it in each of its processes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    register_backend("FLASHJIT_MLA", LATENT_BACKEND)
    register_backend("FLASHJIT_MLA_SPARSE", SPARSE_LATENT_BACKEND)

"""flash-attn's functions (2.8) with flashjit's kernels: the same names, arguments, defaults and results.

    from flashjit.flash_attn import flash_attn_func  # in place of: from flash_attn import flash_attn_func

    import flashjit.flash_attn
    flashjit.flash_attn.install()                    # libraries that import flash_attn get these functions

Q is [batch, seqlen_q, heads_q, head_dim], K and V [batch, seqlen_kv, heads_kv, head_dim]; packed forms have
no batch. A causal mask and a window are aligned at the last query and the last key. Missing features raise
flashjit.Unsupported by name. Arguments that choose among flash-attn's kernels have no effect:
scheduler_metadata, num_splits without a cache, pack_gqa, sm_margin, ver, fa_version.
"""

from ._functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ._install import __version__, install
from .bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_put_first_axis",
    "install",
    "pad_input",
    "unpad_input",
    "__version__",
]

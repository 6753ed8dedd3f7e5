// What combines with K and V of 8 bits, for `flashjit verify` on a device of sm_90: each feature that a
// kernel of family sm90 meets in a way of its own.
#pragma once

#include <array>

namespace flashjit::test {

/// Arguments of `flashjit verify`.
constexpr std::array kProblemsOfCodes = {
    "--spec 'fwd:bf16:d256:kve4m3:causal' --shape b1:hq4:hkv2:sq200:skv333",
    "--spec 'fwd:bf16:d256:kve4m3:kvlen:sinks:key_scales' --shape b3:hq2:hkv2:sq70:skv200",
    "--spec 'fwd:fp16:d64:kvint8:dropout:varlen:key_scales' --shape b3:hq4:hkv2:sq200:skv300",
    "--spec 'fwd:bf16:d128:kve5m2:mask{q >= kv && q - kv < 70}:key_scales' --shape b1:hq4:hkv2:sq200:skv333",
    "--spec 'fwd:bf16:d128:kve4m3:map64x128' --shape b1:hq2:hkv2:sq300:skv633",
    "--spec 'fwd:fp16:d64:kve4m3:map64x64:causal:key_scales' --shape b1:hq2:hkv2:sq300:skv333",
    "--spec 'fwd:bf16:d96:kve4m3:score{slopes: fp32 1d; score + slopes[h] * to_float(kv - q)}:causal' "
    "--shape "
    "b1:hq2:hkv2:sq200:skv333",
    "--spec 'fwd:bf16:d64:kve4m3:score{bias: bf16 4d; score + bias[b, h, q, kv]}:key_scales' --shape "
    "b1:hq2:hkv2:sq150:skv200",
    "--spec 'fwd:bf16:d64:kve4m3:score{f: fp32 2d; score + (f[b, q] - f[b, kv])}:key_scales' --shape "
    "b1:hq2:hkv2:sq150:skv200",
    "--spec 'fwd:bf16:d64:kve4m3:mask{doc: int32 1d; doc[q] == doc[kv]}' --shape b1:hq2:hkv2:sq150:skv200",
    "--spec 'fwd:fp16:d192x128:kvint8:causal:pages8:key_scales' --shape b3:hq8:hkv2:sq7:skv333",
    "--spec 'fwd:bf16:d80x48:kve4m3:causal:varlen:pages16' --shape b4:hq8:hkv2:sq40:skv500",
    "--spec 'fwd:bf16:d128:kve4m3:causal' --shape b1:hq2:hkv1:sq1100:skv1100",
};

}  // namespace flashjit::test

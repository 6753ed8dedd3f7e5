"""Score and mask programs from functions: what they give, checked against PyTorch's own arithmetic, and when they are traced."""

import functools
import math
import re
import sys

import flashjit
import numpy as np
import pytest
from flashjit import programs as program_module

torch = pytest.importorskip("torch", reason="functions are traced with and without PyTorch; here with")
F = torch.nn.functional
from program_values import check_mask, check_score, mask_of_library, of_library, raw_scores  # noqa: E402  (needs PyTorch)

SCORES = {
    "identity of parts": lambda s, b, h, q, kv: s * 2 + 1 - s / 4,
    "distance": lambda s, b, h, q, kv: s - 0.5 * (q - kv),
    "from the right": lambda s, b, h, q, kv: 1 - s + 2 / (q + 1) + 3 // (kv + 1) + 7 % (q + 1),
    "floor division of negatives": lambda s, b, h, q, kv: s + (kv - q) // 2 + (kv - q) % 2,
    "floor division by negatives": lambda s, b, h, q, kv: (
        s + q // (kv - 9) + q % (kv - 9) + (q - kv) % (q - 5)
    ),
    "float floor division": lambda s, b, h, q, kv: (
        (s * 10) // 3 + (s * 10) % 3 + s // -0.7 + s % -0.7 + (q + 1.0) // 0.1
    ),
    "rests": lambda s, b, h, q, kv: torch.fmod(s, 0.7) + torch.fmod(q - kv, 3) + torch.remainder(s, -0.7),
    "powers": lambda s, b, h, q, kv: (
        s**2 + s**3 + abs(s) ** 0.5 + 2**s + (abs(s) + 1) ** -1 + 3.0**s + (0.1 * s) ** torch.inf
    ),
    "powers of negatives": lambda s, b, h, q, kv: s ** (q * 1.0) + q**2 + 2 ** (q + 1) + (s + 4) ** 1.7,
    "branches": lambda s, b, h, q, kv: torch.where(q >= kv, s, s * 0.5),
    "functions": lambda s, b, h, q, kv: (
        torch.tanh(s)
        + torch.exp(s)
        + torch.log(abs(s) + 1)
        + torch.sigmoid(s)
        + torch.sqrt(abs(s))
        + torch.rsqrt(abs(s) + 1)
        + torch.sin(s)
        + torch.cos(s)
        + torch.floor(s)
        + torch.exp2(s)
        + torch.log2(abs(s) + 1)
        + torch.erf(s)
        + torch.expm1(s)
        + torch.log1p(abs(s))
    ),
    "whole numbers": lambda s, b, h, q, kv: (
        torch.round(s)
        + torch.trunc(s) * 10
        + torch.ceil(s) * 100
        + torch.sign(s) * 1000
        + torch.floor(q)
        + torch.round(s * 10) / 10
    ),
    "finite": lambda s, b, h, q, kv: (
        torch.where(torch.isfinite(1 / s), s, 0.0) + torch.isinf(1 / (s * 0.0)) + torch.isnan(s)
    ),
    "methods": lambda s, b, h, q, kv: s.tanh() + (q - kv).abs().float() + s.clamp(min=1.0) + s.square(),
    "smallest and largest": lambda s, b, h, q, kv: (
        torch.minimum(s, q * 0.01) + torch.maximum(q, kv) + torch.clamp(s, 0.1, 0.2)
    ),
    "softcap": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "conversions": lambda s, b, h, q, kv: (
        (s * 10).int().float() + (q > kv).to(torch.float32) + (q * 100).to(torch.uint8)
    ),
    "booleans count": lambda s, b, h, q, kv: s + (q > kv) * 3,
    "logic of ints": lambda s, b, h, q, kv: (
        s
        + torch.logical_and(q & 1, kv - 1)
        + torch.logical_or(q, h) * 2.0
        + torch.logical_xor(q, kv) * 4
        + torch.logical_not(kv) * 8
    ),
    "shifts by what is too much": lambda s, b, h, q, kv: (
        s + (q << (kv * 16)) % 7 + ((q - 2) >> (kv * 16)) + (1 << q)
    ),
    "mixtures": lambda s, b, h, q, kv: (
        torch.lerp(s, q * 1.0, 0.25)
        + torch.addcmul(s, q, kv, value=0.5)
        + torch.hypot(s, s + 1)
        + torch.logaddexp(s, s * 2)
        + torch.nan_to_num(s)
    ),
    "NumPy's numbers": lambda s, b, h, q, kv: (
        s * np.float64(0.5) + np.float32(0.25) * s + q * np.int64(2) + np.pi
    ),
    "a constant": lambda s, b, h, q, kv: torch.tensor(1.5),
}
ACTIVATIONS = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=False),
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "elu with alpha": lambda x: F.elu(x, 0.5),
    "softplus": F.softplus,
    "softplus with beta": lambda x: F.softplus(x, beta=3.0, threshold=4.0),
    "leaky_relu": F.leaky_relu,
    "leaky_relu with a slope": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": F.hardtanh,
    "hardtanh with bounds": lambda x: F.hardtanh(x, -0.5, 2.0),
    "logsigmoid": F.logsigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "a module": torch.nn.GELU(),
    "special": lambda x: torch.special.expit(x),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    check_score(SCORES[name])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes(name):
    function = ACTIVATIONS[name]
    score_mod = lambda s, b, h, q, kv: function(s)
    torch.testing.assert_close(of_library(score_mod), function(raw_scores()))
    q, k, v = (torch.randn(1, 1, 6, 8, requires_grad=True) for _ in range(3))
    got = torch.autograd.grad(flashjit.attention(q, k, v, score_mod=score_mod).square().sum(), (q, k, v))
    want = torch.autograd.grad((function(q @ k.mT / 8**0.5).softmax(-1) @ v).square().sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


MASKS = {
    "window": lambda b, h, q, kv: (q - kv < 3) & (q >= kv),
    "or and not": lambda b, h, q, kv: ~(q < kv) | (b == 1),
    "xor": lambda b, h, q, kv: (q > kv) ^ (h == 2),
    "blocks": lambda b, h, q, kv: q // 4 == kv // 4,
    "bits": lambda b, h, q, kv: ((q ^ kv) & 3) == 3,
    "shifts": lambda b, h, q, kv: (q >> 1) < (kv << 1),
    "dilated": lambda b, h, q, kv: (q - kv) % 3 == 0,
    "torch's logic": lambda b, h, q, kv: torch.logical_and(q > kv, torch.logical_not(h == 3)),
    "neighbourhood": lambda b, h, q, kv: (abs(q // 4 - kv // 4) <= 1) & ((q % 4 - kv % 4).abs() <= 1),
    "numbers are conditions": lambda b, h, q, kv: q & 1,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check_mask(MASKS[name])


def test_traces_are_read_by_the_library():
    for function in SCORES.values():
        flashjit._library.spec_handle("fp32:d8" + flashjit.trace(function).options())
    for function in MASKS.values():
        flashjit._library.spec_handle("fp32:d8" + flashjit.trace(None, function).options("causal"))


def test_captured_tensors():
    slopes, bias, table = (
        torch.rand(4),
        torch.rand(2, 4, 9, 9, dtype=torch.bfloat16),
        torch.zeros(9, dtype=torch.int32),
    )
    program = flashjit.trace(
        lambda s, b, h, q, kv: s + slopes[h] * (q - kv) + bias[b][h][q, kv],
        lambda b, h, q, kv: table[q] == table[kv],
    )
    assert program.options() == (
        ":score{c0: fp32 1d; c1: bf16 4d; ((score + (c0[h] * to_float((q - kv)))) + c1[b, h, q, kv])}"
        ":mask{c2: int32 1d; (c2[q] == c2[kv])}"
    )
    assert [id(t) for t in program.tensors] == [id(slopes), id(bias), id(table)]
    assert program.form.options(
        "", (("fp32", 1, True), ("bf16", 4, False), ("int32", 1, False)), ()
    ).startswith(":score{c0: fp32 1d grad; ")


def test_attributes_and_methods_can_be_captured():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.rand(32))

        def score_mod(self, score, b, h, q, kv):
            return score + self.table[torch.clamp(q - kv + 16, 0, 31)]

    module = Module()
    program = program_module.program_of(module.score_mod, None, None)
    assert program.form.score == "(score + c0[min(max(((q - kv) + 16), 0), 31)])" and program.tensors == (
        module.table,
    )


def test_scalars_on_the_cpu_are_read_at_every_call():
    cap, shift = torch.tensor(30.0), torch.tensor(3)
    program = flashjit.trace(lambda s, b, h, q, kv: cap * torch.tanh(s / cap) + shift)
    assert program.options() == ":score{s0: float; s1: int; ((s0 * tanh((score / s0))) + to_float(s1))}"


CAPPED = {
    "softcap": lambda cap: lambda s, b, h, i, j: cap * torch.tanh(s / cap),
    "a power": lambda cap: lambda s, b, h, i, j: s**cap - cap,
    "limits": lambda cap: lambda s, b, h, i, j: torch.where(s > cap, cap, s.clamp(min=-cap)),
    "named": lambda cap: lambda s, b, h, i, j: torch.add(F.softplus(s, beta=cap), 1, alpha=cap),
    "a factor": lambda cap: lambda s, b, h, i, j: s + (i - j) / cap,
}


@pytest.mark.parametrize("name", CAPPED)
def test_an_int_where_a_float_is_meant_is_the_float(name):
    """cap=50 and cap=50.0 make one program, and so one kernel."""
    programs = {
        flashjit.trace(CAPPED[name](cap)).form.score for cap in (50, 50.0, np.int64(50), np.float32(50))
    }
    assert len(programs) == 1, programs


def test_minus_infinity_becomes_a_mask():
    minus = float("-inf")
    program = flashjit.trace(
        lambda s, b, h, q, kv: torch.where(q >= kv, torch.where(kv < 3, minus, s * 2), minus)
    )
    assert (program.form.score, program.form.mask) == ("(score * 2.0)", "(q >= kv) && (!(kv < 3))")
    program = flashjit.trace(lambda s, b, h, q, kv: torch.where(s > 0, s, minus))
    assert program.form.mask == "" and "(-1.0 / 0.0)" in program.form.score
    program = flashjit.trace(lambda s, b, h, q, kv: torch.where(q > kv, s, minus), "causal")
    assert program.form.mask == "(q > kv) && (kv <= q + seqlen_kv - seqlen_q)"


def test_texts():
    program = flashjit.trace("score + s[h] * to_float(x)", None, {"s": torch.rand(4), "x": 3})
    assert program.options("causal") == ":score{s: fp32 1d; x: int; score + s[h] * to_float(x)}:causal"
    program = flashjit.trace("score", "window: int; q - kv < window", {"window": 3})
    assert (
        program.options("causal_top_left")
        == ":score{score}:mask{window: int; (kv <= q) && (q - kv < window)}"
    )
    assert flashjit.trace(None, "causal").options() == ":causal"
    shared = flashjit.trace("t: fp32 1d grad; score + t[q]", "t[q] > 0.0", {"t": torch.rand(4)})
    assert shared.options() == ":score{t: fp32 1d grad; score + t[q]}:mask{t: fp32 1d; t[q] > 0.0}"


def test_flex_attention_s_compositions():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    both = flex.and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < 3)
    assert flashjit.trace(None, both).form.mask == "((q >= kv) && ((q - kv) < 3))"
    either = flex.or_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < 3)
    assert flashjit.trace(None, either).form.mask == "((q >= kv) || (kv < 3))"
    assert flashjit.trace(None, flex.noop_mask).form.mask == "true"


bias = torch.rand(4, 4)


@pytest.mark.parametrize(
    "function, match",
    [
        (lambda s, b, h, q, kv: s if q > kv else 0.0, "torch.where"),
        (lambda s, b, h, q, kv: s * (q > kv and q < 3), "torch.where"),
        (lambda s, b, h, q, kv: s + bias, "tensor bias of shape"),
        (lambda s, b, h, q, kv: s + bias[q], "tensor bias has 2 dimensions and is indexed with 1: index all"),
        (lambda s, b, h, q, kv: s + bias[q, kv, h], "tensor bias has 2 dimensions and is indexed with 3"),
        (lambda s, b, h, q, kv: s + bias[s, kv], "indexed with a float"),
        (
            lambda s, b, h, q, kv: s + bias[-5, kv],
            "tensor bias is indexed with -5 in dimension 0, which has the size 4",
        ),
        (lambda s, b, h, q, kv: s + bias[q > kv, kv], "takes for a mask"),
        (lambda s, b, h, q, kv: s + bias[q, 1:], "a slice"),
        (lambda s, b, h, q, kv: s.frobnicate(), "no 'frobnicate'"),
        (lambda s, b, h, q, kv: s.detach(), "detach what is captured"),
        (lambda s, b, h, q, kv: s.to(torch.float64), "computes in float32"),
        (lambda s, b, h, q, kv: s.add_(1), "in place"),
        (lambda s, b, h, q, kv: F.relu(s, inplace=True), "in place"),
        (lambda s, b, h, q, kv: -(q > kv), "PyTorch has no -"),
        (lambda s, b, h, q, kv: (q > kv) - (q < kv), "PyTorch has no -"),
        (lambda s, b, h, q, kv: torch.softmax(s, 0), "torch.softmax"),
        (lambda s, b, h, q, kv: math.tanh(s), "functions of torch"),
        (lambda s, b, h, q, kv: None, "returns a NoneType"),
        (lambda s, b, h, q: s, "score_mod.score, b, h, q_idx, kv_idx."),
        (lambda s, b, h, q, kv: s + (q + 2**40), "does not fit 32 bits"),
        (lambda s, b, h, q, kv: s + math.nan, "NaN"),
        (lambda s, b, h, q, kv: s & 1, "not floats"),
        (lambda s, b, h, q, kv: s + torch.fmod(q > kv, q < kv), "PyTorch has no fmod of two booleans"),
        (
            lambda s, b, h, q, kv: s + torch.div(q > kv, q < kv, rounding_mode="trunc"),
            "PyTorch has no truncated division of two booleans",
        ),
        (lambda s, b, h, q, kv: s * 10**400, "an integer of 1329 bits"),
        (lambda s, b, h, q, kv: s + (q + 10**5000), "an integer of 16610 bits"),
        (
            lambda s, b, h, q, kv: torch.atan(s),
            r"no 'torch.atan' of its values: .* no derivative .* captured as a tensor, .* such as torch.tanh",
        ),
        (lambda s, b, h, q, kv: s.asin(), "no 'asin' of its values: .* no derivative"),
        (lambda s, b, h, q, kv: torch.erfinv(s), "'torch.erfinv' of its values: .* no derivative"),
        (
            lambda s, b, h, q, kv: torch.arcsinh(s),
            r"'torch.arcsinh' .* write torch.log\(x \+ torch.sqrt\(x \* x \+ 1\)\)",
        ),
        (lambda s, b, h, q, kv: torch.special.ndtr(s), "'torch.ndtr' .* write 0.5"),
        (lambda s, b, h, q, kv: torch.argmax(s), "'torch.argmax' .* sees no other"),
        (lambda s, b, h, q, kv: F.dropout(s), "'torch.dropout' .* give attention.. dropout_p"),
        (
            lambda s, b, h, q, kv: s + torch.logsumexp(bias[q], 0),
            "'torch.logsumexp' of a row of a captured tensor: .* sees no other",
        ),
        (lambda s, b, h, q, kv: np.exp(s), "calls a function of NumPy.*: call torch's"),
        (lambda s, b, h, q, kv: s + torch.zeros(3, dtype=torch.float64)[q], "float64"),
        (lambda s, b, h, q, kv: [1, 2, 3][q], "no Python number"),
    ],
)
def test_what_cannot_be_traced_is_refused(function, match):
    with pytest.raises(flashjit.InvalidArgument, match=match):
        flashjit.trace(function)


@pytest.mark.parametrize("rounds", [20, 500])
def test_values_that_are_used_twice_do_not_grow_for_ever(rounds):
    """They are written twice, so that text doubles in each round."""

    def score(s, b, h, q, kv):
        for _ in range(rounds):
            s = s * 0.5 + s * 0.25
        return s

    with pytest.raises(
        flashjit.InvalidArgument, match="grew beyond .* a value that is used twice is written twice"
    ):
        flashjit.trace(score)


def lse_of(score_mod, **captures):
    q = torch.ones(1, 1, 4, 8)
    return flashjit.attention(q, q, q, score_mod=score_mod, captures=captures or None, return_lse=True)[1]


@pytest.mark.parametrize("number", [3.4028235e38, float.fromhex("0x1.fffffefffffffp127")])
@pytest.mark.parametrize("sign", [-1, 1])
def test_numbers_that_round_to_the_largest(number, sign):
    """PyTorch rounds them so; functions, texts and captures do the same."""
    number *= sign
    want = torch.full((1, 1, 4), float(torch.tensor(number, dtype=torch.float64).float()))
    assert want.isfinite().all()
    for found in (
        lse_of(lambda s, *_: s * 0.0 + number),
        lse_of(f"score * 0.0 + {number!r}"),
        lse_of("score * 0.0 + low", low=number),
    ):
        assert torch.equal(found, want)


@pytest.mark.parametrize("number", [float.fromhex("0x1.ffffffp127"), 1e39])
def test_numbers_that_round_to_infinity(number):
    assert torch.tensor(number, dtype=torch.float64).float().isinf()
    assert torch.equal(lse_of(lambda s, *_: s * 0.0 - number), torch.full((1, 1, 4), -torch.inf))
    with pytest.raises(flashjit.InvalidArgument, match="a number that a float holds"):
        lse_of("score * 0.0 + low", low=-number)


GUARDS = {
    "sqrt of relu": lambda s: torch.sqrt(torch.relu(s)),
    "a power of relu": lambda s: torch.relu(s) ** 0.5,
    "sqrt of clamp": lambda s: torch.sqrt(torch.clamp(s, min=0)),
    "where inside": lambda s: torch.sqrt(torch.where(s > 0, s, 0.0)),
    "log": lambda s: torch.log(torch.relu(s) + 0.25),
}


@pytest.mark.parametrize("name", GUARDS)
def test_guards_inside_functions_cut_their_gradients(name):
    """PyTorch's backward pass of relu, clamp and where puts 0 there, also in the place of an infinite slope."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3))
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = flashjit.attention(q, k, v, score_mod=lambda s, *_: GUARDS[name](s))
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    scores = GUARDS[name](leaves[0] @ leaves[1].mT / 8**0.5)
    want = torch.autograd.grad((scores.softmax(-1) @ leaves[2]).square().sum(), leaves)
    for a, b in zip(got, want):
        if (
            b.isfinite().all()
        ):  # PyTorch's own gradient may be NaN where an infinite slope meets its guard's zero
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
        assert a.isfinite().all()


def test_a_misspelt_name_is_shown_with_its_capture():
    with pytest.raises(
        flashjit.InvalidArgument, match="captures has 'slope'.*it has 'slopes', which captures does not have"
    ):
        flashjit.trace("score + slopes[h]", None, {"slope": torch.rand(4)})


def test_the_words_of_the_language_are_known():
    for word in program_module.WORDS - {"size"}:
        with pytest.raises(flashjit.Error, match="a program|means something"):
            flashjit._library.spec_handle(f"fp32:d8:score{{{word}: int; score + {word} * missing}}")
    with pytest.raises(flashjit.Error) as unknown:
        flashjit._library.spec_handle("fp32:d8:score{missing(score)}")
    named = re.findall(r"\\w+", str(unknown.value).partition("there are")[2])
    assert set(named) <= program_module.WORDS | set("score 1 ^ in the program".split()), named


def test_messages_have_the_names_of_the_function_s_variables():
    """Not those that the program has for them."""
    q, ids = torch.randn(1, 1, 4, 8), torch.zeros(1, 1, 1, 1, 1, 1, 4)
    weights = torch.empty(4, device="meta")
    with pytest.raises(flashjit.InvalidArgument, match="the captured tensor weights on meta"):
        flashjit.attention(q, q, q, score_mod=lambda s, b, h, q, kv: s + weights[kv])
    with pytest.raises(flashjit.InvalidArgument, match="the captured tensor ids has 7 dimensions"):
        flashjit.attention(q, q, q, score_mod=lambda s, b, h, q, kv: s + ids[b, h, 0, 0, 0, 0, kv])
    with pytest.raises(
        flashjit.InvalidArgument, match=r"block is 1073741824: give one or two multiples of 16"
    ):
        flashjit.BlockMap(torch.ones(1, 1, dtype=torch.bool), 1 << 30)


class Window:
    def __init__(self, value):
        self.value = torch.tensor(value)


def test_messages_of_the_library_have_the_names_of_the_function_s_variables():
    q, window, settings, factor = (
        torch.randn(1, 1, 4, 8),
        torch.tensor(2**40),
        Window(2**40),
        torch.tensor(math.nan),
    )
    sparse = torch.eye(4).to_sparse()
    near = lambda b, h, q, kv: q - kv < window
    for program, match in (
        (dict(mask_mod=near), "^window is 1099511627776, but the program declares 'window: int'"),
        (dict(mask_mod=flashjit.trace(None, near)), "^a captured number is 1099511627776"),
        (dict(mask_mod=lambda b, h, q, kv: q - kv < settings.value), "^a captured number is 1099511627776"),
        (dict(score_mod=lambda s, b, h, q, kv: s * factor), "^factor is nan"),
        (
            dict(score_mod=lambda s, b, h, q, kv: s + sparse[q, kv]),
            "^the captured tensor sparse has the layout",
        ),
        (dict(score_mod="score * s0", captures={"s0": math.nan}), "^s0 is nan"),
    ):
        with pytest.raises(flashjit.InvalidArgument, match=match):
            flashjit.attention(q, q, q, **program)


def test_long_rows_are_summed():
    row = torch.randn(4, 256)
    check_score(lambda s, b, h, q, kv: s + row[q].sum() / 16)


def test_programs_that_are_too_deep_are_not_quoted():
    """A user who wrote a function does not care about its text."""
    q = torch.randn(1, 1, 4, 8)

    def deep(s, b, h, q, kv):
        for _ in range(300):
            s = s + q
        return s

    with pytest.raises(flashjit.InvalidArgument, match="^a program is 30. levels deep"):
        flashjit.attention(q, q, q, score_mod=deep)


def test_captures_are_checked():
    with pytest.raises(flashjit.InvalidArgument, match="no program mentions"):
        flashjit.trace("score", None, {"x": 1})
    with pytest.raises(flashjit.InvalidArgument, match="captures does not have it"):
        flashjit.trace("x: int; score + to_float(x)")
    with pytest.raises(flashjit.WrongType, match="score_mod is a int"):
        flashjit.trace(3)
    tables = [torch.rand(3) for _ in range(17)]
    with pytest.raises(flashjit.InvalidArgument, match="captures 17 tensors, more than 16"):
        flashjit.trace(lambda s, b, h, q, kv: sum((t[q] for t in tables), s))


# --- captured tensors ---

six, sixteen = torch.randn(1, 2, 3, 4, 3, 5), [torch.randn((1,) * (i % 6) + (2,)) for i in range(16)]
table, matrix, ids = torch.randn(7), torch.randn(4, 5), torch.tensor([3, 1, 3, 2, 1])
READS = {
    "from the end": lambda s, b, h, q, kv: (
        s + table[q - kv] + table[-1] + table[kv - 5] + matrix[-1, kv] + matrix[q][-1 - kv]
    ),
    "by a size": lambda s, b, h, q, kv: (
        s
        + table[(q + 3 * kv) % len(table)]
        + table[table.shape[0] - 1 - q] * table.numel()
        + matrix[q, matrix.size(1) - 1 - kv] / matrix.size(0)
        + matrix.shape.numel()
    ),
    "whole dimensions": lambda s, b, h, q, kv: (
        s + matrix[:, kv][q] + matrix[..., kv][q] + matrix[q, ...][kv] + matrix[:][q, kv]
    ),
    "six dimensions": lambda s, b, h, q, kv: s + six[0, b, h, q // 2, kv % 3, -1 - kv],
    "sixteen tensors": lambda s, b, h, q, kv: sum((t[(0,) * (t.dim() - 1) + (kv % 2,)] for t in sixteen), s),
    "sums of rows": lambda s, b, h, q, kv: (
        s
        + matrix[q].sum()
        + sum(matrix[i, kv] * s for i in range(matrix.shape[0]))
        + torch.sum(matrix[q] * matrix[b])
        + matrix[q].dot(matrix[h])
        + (matrix[q] @ torch.tanh(matrix[b]))
        + matrix[q].mean()
        + sum(x for x in matrix[q])
    ),
    "no dimensions": lambda s, b, h, q, kv: (
        s * torch.tensor(2.0) + torch.tensor(3) + torch.tensor(True) + table[2][...]
    ),
    "by what is read": lambda s, b, h, q, kv: s + table[ids[kv]] + matrix[ids[q], -ids[kv]],
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_pytorch_s(name):
    check_score(READS[name])


def test_a_branch_on_a_size_is_python_s():
    check_score(lambda s, b, h, q, kv: s + table[kv] if table.shape[0] > 3 and len(matrix) == 4 else s)


def test_sizes_are_the_call_s():
    """One kernel, whose program has no size in it, serves tensors of all sizes."""

    def make(table):
        return lambda s, b, h, q, kv: (
            s + table[(3 * q + kv) % len(table)] + table[q - kv] * (table.shape[0] + q % table.size(0))
        )

    forms = set()
    for size in (5, 7, 12):
        check_score(make(torch.randn(size)))
        forms.add(flashjit.trace(make(torch.randn(size))).options())
    assert len(forms) == 1


def test_a_size_of_what_is_not_read_takes_no_tensor():
    program = flashjit.trace(lambda s, b, h, q, kv: s + q % table.shape[0])
    assert program.tensors == () and program.scalars == (7,)


def test_what_is_read_and_not_used_is_nobody_s_business():
    """Neither in a branch that folds away, nor in a condition alone, does a tensor need a gradient or a value."""
    unused, hidden, limit = (torch.randn(5, requires_grad=True) for _ in range(3))

    def score_mod(s, b, h, q, kv):
        unused[kv]
        _nothing = (unused[q] > 0) & False
        return torch.where(limit[q] > -9, s + hidden[kv] * 0, float("-inf"))

    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    out = flashjit.attention(q, k, v, score_mod=score_mod, mask_mod=lambda b, h, q, kv: limit[kv] < 9)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    grads = torch.autograd.grad(out.sum(), (q, unused, hidden, limit), allow_unused=True)
    assert grads[0] is not None and all(x is None or not x.any() for x in grads[1:])


def test_small_ints_wrap_and_booleans_are_no_numbers():
    small, flags = (
        torch.tensor([0, 1, 200, 255, 7], dtype=torch.uint8),
        torch.tensor([True, False, True, True, False]),
    )
    signed = torch.tensor([-128, -1, 0, 1, 127], dtype=torch.int8)
    check_score(
        lambda s, b, h, q, kv: s + (small[q] - small[kv]) + (flags[q] + flags[kv]) + flags[q] * flags[kv]
    )
    check_score(
        lambda s, b, h, q, kv: (
            s + (signed[q] * signed[kv] - signed[kv]) + (-small[q]) + ~small[kv] + abs(signed[q])
        )
    )
    check_mask(lambda b, h, q, kv: (small[q] - small[kv] < 100) & (flags[q] + flags[kv]))


def test_int64s_are_exact():
    """Ids that differ in their upper half are different, times that are far from zero have differences."""
    ids = torch.tensor([5, 2**32 + 5, 2**62 + 5, 2**62 + 2**33 + 5, 2**62 + 6])
    times = torch.tensor([1_700_000_000_000_000 + 1_500_000 * i for i in range(5)])
    check_mask(lambda b, h, q, kv: ids[q] == ids[kv])
    check_mask(lambda b, h, q, kv: (ids[q] < ids[kv]) | (ids[kv] % 2 == 0) & (times[q] >= times[kv]))
    assert torch.equal(
        mask_of_library("ids[q] == ids[kv]", {"ids": ids}), ids[:4, None] == ids.expand(2, 2, 4, 5)
    )
    check_score(lambda s, b, h, q, kv: s + (times[q] - times[kv]).float() / 1e6)
    check_score(
        lambda s, b, h, q, kv: (
            s + (ids[q] >> 32) + (ids[kv].int() & 7) + (times[q] - 1_700_000_000_000_000) * 1e-6
        )
    )
    check_score(
        lambda s, b, h, q, kv: (
            s + (q.long() * 2654435761 + kv * 40503) % 65536 + (q.to(torch.int64) << 40) % 1021
        )
    )
    program = flashjit.trace(None, lambda b, h, q, kv: kv <= q + ids[b])
    assert program.form.mask == "(kv <= (q + c0[b]))"


# --- what is remembered ---


class Settings:
    window = 2


def test_a_trace_is_not_older_than_what_it_read(monkeypatch):
    """Whatever a function looks at: sizes, attributes of classes, modules and functions, elements, what it imports."""
    import types

    module = types.ModuleType("settings")
    module.window = 2
    state = {"window": torch.tensor(2), "table": torch.tensor([2])}

    def by_attribute(s, b, h, q, kv):
        return s * by_attribute.window

    def by_import(s, b, h, q, kv):
        import settings_of_a_test

        return s * settings_of_a_test.window

    by_attribute.window = 2
    monkeypatch.setitem(sys.modules, "settings_of_a_test", module)
    shared = torch.tensor(2)
    functions = [
        lambda s, b, h, q, kv: s * Settings.window,
        lambda s, b, h, q, kv: s * module.window,
        lambda s, b, h, q, kv: s * shared.item(),
        lambda s, b, h, q, kv: s * float(shared),
        lambda s, b, h, q, kv: s * 2 if shared < 3 else s * 9,
        by_attribute,
        by_import,
        lambda s, b, h, q, kv: s * state["window"].item(),
        lambda s, b, h, q, kv: s * state["table"].tolist()[0],
        lambda s, b, h, q, kv: s * getattr(Settings, "window"),
        functools.partial(scaled_by, Settings),
    ]
    for value in (2, 9):
        Settings.window = module.window = by_attribute.window = value
        shared.fill_(value), state["window"].fill_(value), state["table"].fill_(value)
        for number, function in enumerate(functions):
            torch.testing.assert_close(
                of_library(function), raw_scores() * value, msg=f"function {number}, {value}"
            )


def scaled_by(settings, s, b, h, q, kv):
    return s * settings.window


def test_a_trace_is_not_older_than_a_size():
    def make(t):
        return [
            lambda s, b, h, q, kv: s + len(t),
            lambda s, b, h, q, kv: s + t.shape[0],
            lambda s, b, h, q, kv: s + t.size(0),
            lambda s, b, h, q, kv: s + t.numel(),
            lambda s, b, h, q, kv: s + t[len(t) - 1],
            lambda s, b, h, q, kv: s + t[-1],
            lambda s, b, h, q, kv: s + sum(1 for _ in t),
            lambda s, b, h, q, kv: s + (1 if t.shape[0] > 4 else 0),
        ]

    for t in (torch.randn(3), torch.randn(5)):
        for function in make(t):
            check_score(function)


def test_simple_functions_are_not_called_again():
    """Those that index captured tensors and use numbers, and no more."""
    calls = []
    slopes = torch.rand(4)

    def count(function):
        code = function.__code__
        before = len(calls)

        def hook(frame, event, arg):
            calls.append(1) if event == "call" and frame.f_code is code else None

        sys.setprofile(hook)
        try:
            program_module.program_of(function, None, None)
        finally:
            sys.setprofile(None)
        return len(calls) - before

    simple = lambda s, b, h, q, kv: s + slopes[h] * torch.where(q > kv, q - kv, 2.0)
    assert count(simple) == 1 and count(simple) == 0
    looking = lambda s, b, h, q, kv: s + slopes[h] * slopes.shape[0]
    assert count(looking) == 1 and count(looking) == 1


factor = 2


def by_global(s, b, h, q, kv):
    return s * factor


def test_a_function_is_traced_again_when_what_it_uses_changes(monkeypatch):
    first = program_module.program_of(by_global, None, None)
    assert program_module.program_of(by_global, None, None).form is first.form
    monkeypatch.setitem(globals(), "factor", 3)
    assert program_module.program_of(by_global, None, None).form.score == "(score * 3.0)"
    for zero in (0.0, -0.0):
        monkeypatch.setitem(globals(), "factor", zero)
        assert (
            program_module.program_of(by_global, None, None).form.score
            == f"(score * {zero if str(zero) == '0.0' else '(-0.0)'})"
        )


def test_new_tensors_need_no_new_trace():
    def make(table):
        return lambda s, b, h, q, kv: s + table[q]

    first, second = torch.rand(4), torch.rand(4)
    a, b = (
        program_module.program_of(make(first), None, None),
        program_module.program_of(make(second), None, None),
    )
    assert a.form is b.form and a.tensors[0] is first and b.tensors[0] is second
    c = program_module.program_of(make(torch.rand(4).half()), None, None)
    assert c.tensors[0].dtype == torch.float16
    values = [program_module.program_of("score + x[q]", None, {"x": t}) for t in (first, second)]
    assert values[0].form is values[1].form and values[1].tensors == (second,)


def test_an_object_that_may_change_is_traced_every_time():
    class Scaled:
        factor = 2

        def __call__(self, s, b, h, q, kv):
            return s * self.factor

    scaled = Scaled()
    assert program_module.program_of(scaled, None, None).form.score == "(score * 2.0)"
    scaled.factor = 5
    assert program_module.program_of(scaled, None, None).form.score == "(score * 5.0)"
    inner = lambda s, b, h, q, kv: scaled(s, b, h, q, kv)
    assert program_module.program_of(inner, None, None).form.score == "(score * 5.0)"
    scaled.factor = 7
    assert program_module.program_of(inner, None, None).form.score == "(score * 7.0)"


def test_a_traced_program_goes_alone():
    program = flashjit.trace(by_global)
    assert program_module.program_of(program, None, None) is program
    with pytest.raises(flashjit.InvalidArgument, match="trace all of them together"):
        program_module.program_of(program, "causal", None)

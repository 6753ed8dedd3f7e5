"""Score and mask programs from functions: the text that comes out, checked against Python's own arithmetic."""
import math
import re

import pytest

import flashjit
from flashjit import programs

torch = pytest.importorskip("torch", reason="functions are traced with and without PyTorch; here with")

POSITIONS = {"b": 1, "h": 2, "q": 7, "kv": 4}


def evaluate(text, score=0.75, captures=None):
    """A program's value by Python's eval: the language's operators are close to Python's."""
    expression = text.rpartition(";")[2]
    for c, python in (("&&", " and "), ("||", " or "), ("!=", " NE "), ("!", " not "), (" NE ", "!=")):
        expression = expression.replace(c, python)
    floats = {"score", *POSITIONS}

    class Int(int):
        """Divides as C does."""
        def __truediv__(self, other):
            if isinstance(other, int):
                return Int(int(math.trunc(int(self) / int(other)))) if other else Int(0)
            return float(self) / other

        def __mod__(self, other):
            return Int(math.fmod(self, other)) if other else Int(0)

        __add__ = lambda a, b: Int(int(a) + b) if isinstance(b, int) else float(a) + b
        __sub__ = lambda a, b: Int(int(a) - b) if isinstance(b, int) else float(a) - b
        __mul__ = lambda a, b: Int(int(a) * b) if isinstance(b, int) else float(a) * b
        __neg__ = lambda a: Int(-int(a))
        __abs__ = lambda a: Int(abs(int(a)))

    del floats
    divide = lambda a, b: math.copysign(math.inf, a) if b == 0 else a / b
    expression = re.sub(r"(?<![\w.])(\d+)(?![\w.])", r"Int(\1)", expression)
    expression = expression.replace("(1.0 / 0.0)", "inf").replace("(-1.0 / 0.0)", "(-inf)")
    names = {"Int": Int, "inf": math.inf, "true": True, "false": False, "divide": divide,
             "select": lambda c, a, b: a if c else b, "to_float": float, "to_int": lambda x: Int(int(x)), "to_bool": bool,
             "min": min, "max": max, "abs": abs, "floor": lambda x: float(math.floor(x)), "exp": math.exp,
             "exp2": lambda x: 2.0 ** x, "log": math.log, "log2": math.log2, "sqrt": math.sqrt,
             "rsqrt": lambda x: x ** -0.5, "tanh": math.tanh, "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "sin": math.sin,
             "cos": math.cos, "score": score, **{name: Int(value) for name, value in POSITIONS.items()}}
    return eval(expression, {**names, **(captures or {})})


SCORES = {
    "identity of parts": (lambda s, b, h, q, kv: s * 2 + 1 - s / 4, lambda s, b, h, q, kv: s * 2 + 1 - s / 4),
    "distance": (lambda s, b, h, q, kv: s - 0.5 * (q - kv), None),
    "from the right": (lambda s, b, h, q, kv: 1 - s + 2 / (q + 1) + 3 // (kv + 1) + 7 % (q + 1), None),
    "floor division of negatives": (lambda s, b, h, q, kv: s + (kv - q) // 2 + (kv - q) % 2, None),
    "floor division by negatives": (lambda s, b, h, q, kv: s + q // (kv - q) + q % (kv - q), None),
    "float floor division": (lambda s, b, h, q, kv: (s * 10) // 3 + (s * 10) % 3, None),
    "powers": (lambda s, b, h, q, kv: s ** 2 + s ** 3 + s ** 0.5 + 2 ** s + s ** -1 + 3.0 ** s, None),
    "branches": (lambda s, b, h, q, kv: torch.where(q >= kv, s, s * 0.5),
                 lambda s, b, h, q, kv: s if q >= kv else s * 0.5),
    "functions": (lambda s, b, h, q, kv: torch.tanh(s) + torch.exp(s) + torch.log(s) + torch.sigmoid(s) + torch.sqrt(s)
                  + torch.rsqrt(s) + torch.sin(s) + torch.cos(s) + torch.floor(s) + torch.exp2(s) + torch.log2(s),
                  lambda s, b, h, q, kv: math.tanh(s) + math.exp(s) + math.log(s) + 1 / (1 + math.exp(-s)) + s ** 0.5
                  + s ** -0.5 + math.sin(s) + math.cos(s) + math.floor(s) + 2 ** s + math.log2(s)),
    "methods": (lambda s, b, h, q, kv: s.tanh() + (q - kv).abs().float() + s.clamp(min=1.0) + s.square(),
                lambda s, b, h, q, kv: math.tanh(s) + abs(q - kv) + max(s, 1.0) + s * s),
    "smallest and largest": (lambda s, b, h, q, kv: torch.minimum(s, q * 0.01) + torch.maximum(q, kv) + torch.clamp(s, 0.1, 0.2),
                             lambda s, b, h, q, kv: min(s, q * 0.01) + max(q, kv) + min(max(s, 0.1), 0.2)),
    "softcap": (lambda s, b, h, q, kv: 20 * torch.tanh(s / 20), lambda s, b, h, q, kv: 20 * math.tanh(s / 20)),
    "ceil and relu": (lambda s, b, h, q, kv: torch.ceil(s) + torch.relu(s - 5), lambda s, b, h, q, kv: math.ceil(s) + max(s - 5, 0)),
    "conversions": (lambda s, b, h, q, kv: (s * 10).int().float() + (q > kv).to(torch.float32) + s.to(torch.bfloat16),
                    lambda s, b, h, q, kv: int(s * 10) + float(q > kv) + s),
    "booleans count": (lambda s, b, h, q, kv: s + (q > kv) * 3, None),
    "a constant": (lambda s, b, h, q, kv: 1.5, None),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    function, by_hand = SCORES[name]
    text = flashjit.trace(function).form.score
    want = (by_hand or function)(0.75, *POSITIONS.values())
    assert evaluate(text) == pytest.approx(want), text


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
@pytest.mark.parametrize("q, kv", [(7, 4), (4, 7), (5, 5), (0, 9)])
def test_masks(name, q, kv, monkeypatch):
    monkeypatch.setitem(POSITIONS, "q", q)
    monkeypatch.setitem(POSITIONS, "kv", kv)
    text = flashjit.trace(None, MASKS[name]).form.mask
    want = MASKS[name](*(torch.tensor(POSITIONS[n]) for n in ("b", "h", "q", "kv")))
    assert bool(evaluate(text)) == bool(want), text


def test_traces_are_read_by_the_library(programs):
    for function, _ in SCORES.values():
        flashjit._library.spec_handle("fp32:d8" + flashjit.trace(function).options())
    for function in MASKS.values():
        flashjit._library.spec_handle("fp32:d8" + flashjit.trace(None, function).options("causal"))


def test_captured_tensors():
    slopes, bias, table = torch.rand(4), torch.rand(2, 4, 9, 9, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int32)
    program = flashjit.trace(lambda s, b, h, q, kv: s + slopes[h] * (q - kv) + bias[b][h][q, kv],
                             lambda b, h, q, kv: table[q] == table[kv])
    assert program.options() == (":score{c0: fp32 1d; c1: bf16 4d; ((score + (c0[h] * to_float((q - kv)))) + c1[b, h, q, kv])}"
                                 ":mask{c2: int32 1d; (c2[q] == c2[kv])}")
    assert [id(t) for t in program.tensors] == [id(slopes), id(bias), id(table)]
    assert program.form.options("", (("fp32", 1, True), ("bf16", 4, False), ("int32", 1, False)), ()).startswith(
        ":score{c0: fp32 1d grad; ")


def test_attributes_and_methods_can_be_captured():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.rand(32))

        def score_mod(self, score, b, h, q, kv):
            return score + self.table[torch.clamp(q - kv + 16, 0, 31)]

    module = Module()
    program = programs.program_of(module.score_mod, None, None)
    assert program.form.score == "(score + c0[min(max(((q - kv) + 16), 0), 31)])" and program.tensors == (module.table,)


def test_scalars_on_the_cpu_are_read_at_every_call():
    cap, shift = torch.tensor(30.0), torch.tensor(3)
    program = flashjit.trace(lambda s, b, h, q, kv: cap * torch.tanh(s / cap) + shift)
    assert program.options() == ":score{s0: float; s1: int; ((s0 * tanh((score / s0))) + to_float(s1))}"


def test_minus_infinity_becomes_a_mask():
    minus = float("-inf")
    program = flashjit.trace(lambda s, b, h, q, kv: torch.where(q >= kv, torch.where(kv < 3, minus, s * 2), minus))
    assert (program.form.score, program.form.mask) == ("(score * 2.0)", "(q >= kv) && (!(kv < 3))")
    program = flashjit.trace(lambda s, b, h, q, kv: torch.where(s > 0, s, minus))
    assert program.form.mask == "" and "(-1.0 / 0.0)" in program.form.score
    program = flashjit.trace(lambda s, b, h, q, kv: torch.where(q > kv, s, minus), "causal")
    assert program.form.mask == "(q > kv) && (kv <= q + seqlen_kv - seqlen_q)"


def test_texts():
    program = flashjit.trace("score + s[h] * to_float(x)", None, {"s": torch.rand(4), "x": 3})
    assert program.options("causal") == ":score{s: fp32 1d; x: int; score + s[h] * to_float(x)}:causal"
    program = flashjit.trace("score", "window: int; q - kv < window", {"window": 3})
    assert program.options("causal_top_left") == ":score{score}:mask{window: int; (kv <= q) && (q - kv < window)}"
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


@pytest.mark.parametrize("function, match", [
    (lambda s, b, h, q, kv: s if q > kv else 0.0, "torch.where"),
    (lambda s, b, h, q, kv: s * (q > kv and q < 3), "torch.where"),
    (lambda s, b, h, q, kv: s + bias, "index it"),
    (lambda s, b, h, q, kv: s + bias[q], "index all"),
    (lambda s, b, h, q, kv: s + bias[q, kv, h], "2 dimensions is indexed with 3"),
    (lambda s, b, h, q, kv: s + bias[s, kv], "indexed with a float"),
    (lambda s, b, h, q, kv: s + bias[-1, kv], "negative constants"),
    (lambda s, b, h, q, kv: torch.softmax(s, 0), "torch.softmax"),
    (lambda s, b, h, q, kv: math.tanh(s), "functions of torch"),
    (lambda s, b, h, q, kv: None, "returns a NoneType"),
    (lambda s, b, h, q: s, "score_mod.score, b, h, q_idx, kv_idx."),
    (lambda s, b, h, q, kv: s + 2**40, "does not fit 32 bits"),
    (lambda s, b, h, q, kv: s + math.nan, "NaN"),
    (lambda s, b, h, q, kv: s & 1, "not floats"),
    (lambda s, b, h, q, kv: s + torch.zeros(3, dtype=torch.float64)[q], "float64"),
    (lambda s, b, h, q, kv: [1, 2, 3][q], "no Python number"),
])
def test_what_cannot_be_traced_is_refused(function, match):
    with pytest.raises(flashjit.InvalidArgument, match=match):
        flashjit.trace(function)


def test_captures_are_checked():
    with pytest.raises(flashjit.InvalidArgument, match="neither program mentions"):
        flashjit.trace("score", None, {"x": 1})
    with pytest.raises(flashjit.InvalidArgument, match="captures does not have it"):
        flashjit.trace("x: int; score + to_float(x)")
    with pytest.raises(flashjit.WrongType, match="score_mod is a int"):
        flashjit.trace(3)
    tables = [torch.rand(3) for _ in range(9)]
    with pytest.raises(flashjit.InvalidArgument, match="more than 8 tensors"):
        flashjit.trace(lambda s, b, h, q, kv: sum((t[q] for t in tables), s))


# --- what is remembered ---

factor = 2


def by_global(s, b, h, q, kv):
    return s * factor


def test_a_function_is_traced_again_when_what_it_uses_changes(monkeypatch):
    first = programs.program_of(by_global, None, None)
    assert programs.program_of(by_global, None, None).form is first.form
    monkeypatch.setitem(globals(), "factor", 3)
    assert programs.program_of(by_global, None, None).form.score == "(score * 3.0)"


def test_new_tensors_need_no_new_trace():
    def make(table):
        return lambda s, b, h, q, kv: s + table[q]
    first, second = torch.rand(4), torch.rand(4)
    a, b = programs.program_of(make(first), None, None), programs.program_of(make(second), None, None)
    assert a.form is b.form and a.tensors[0] is first and b.tensors[0] is second
    c = programs.program_of(make(torch.rand(4).half()), None, None)
    assert c.form is not a.form
    values = [programs.program_of("score + x[q]", None, {"x": t}) for t in (first, second)]
    assert values[0].form is values[1].form and values[1].tensors == (second,)


def test_an_object_that_may_change_is_traced_every_time():
    class Scaled:
        factor = 2

        def __call__(self, s, b, h, q, kv):
            return s * self.factor

    scaled = Scaled()
    assert programs.program_of(scaled, None, None).form.score == "(score * 2.0)"
    scaled.factor = 5
    assert programs.program_of(scaled, None, None).form.score == "(score * 5.0)"
    inner = lambda s, b, h, q, kv: scaled(s, b, h, q, kv)
    assert programs.program_of(inner, None, None).form.score == "(score * 5.0)"
    scaled.factor = 7
    assert programs.program_of(inner, None, None).form.score == "(score * 7.0)"


def test_a_traced_program_goes_alone():
    program = flashjit.trace(by_global)
    assert programs.program_of(program, None, None) is program
    with pytest.raises(flashjit.InvalidArgument, match="trace all of them together"):
        programs.program_of(program, "causal", None)

"""What tools/bench/races.py runs: the same attention on all sides, of the same tensors, and no time for what is wrong or missing."""

import collections
import csv
import importlib
import importlib.metadata
import pathlib
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")
import child  # noqa: E402, F401
import flashjit  # noqa: E402

BENCH = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture(scope="module")
def bench():
    """module(name): a script of tools/bench."""
    before = list(sys.path)
    sys.path[:0] = [str(BENCH)]
    yield importlib.import_module
    sys.path[:] = before


@pytest.fixture
def racing(bench):
    return bench("racing")


class Report:
    def __init__(self):
        self.rows, self.failures = [], []

    def row(self, **values):
        self.rows.append(values)

    def failure(self, text):
        self.failures.append(text)


class Wrapper:
    """FlashInfer's wrappers as their pages describe them: sequence i attends to the pages indices[indptr[i]:indptr[i + 1]]."""

    def __init__(self, workspace, layout, use_tensor_cores=False, backend="auto"):
        assert layout == "NHD" and not workspace.any()

    def attend(self, q, cache, queries, csr, scales=(1.0, 1.0)):
        racing = importlib.import_module("racing")
        indptr, indices, last = csr
        rows, found = cache[0].shape[1], []
        for i, (begin, end) in enumerate(zip(queries[:-1].tolist(), queries[1:].tolist())):
            pages = indices[indptr[i] : indptr[i + 1]]
            length = (len(pages) - 1) * rows + int(last[i])
            k, v = ((x[pages].float() * scale).flatten(0, 1)[:length] for x, scale in zip(cache, scales))
            found.append(racing.attention_in_fp32(q[begin:end], k, v))
        return torch.cat(found).to(q.dtype)


class Decode(Wrapper):
    def plan(self, indptr, indices, last, heads, heads_kv, dim, page, **types):
        self.csr = indptr, indices, last

    def run(self, q, cache, k_scale=1.0, v_scale=1.0):
        return self.attend(q, cache, torch.arange(len(q) + 1), self.csr, (k_scale, v_scale))


class Prefill(Wrapper):
    def plan(self, queries, indptr, indices, last, heads, heads_kv, dim, page, causal, **types):
        assert causal
        self.queries, self.csr = queries, (indptr, indices, last)

    def run(self, q, cache):
        return self.attend(q, cache, self.queries, self.csr)


class Pod(Wrapper):
    def plan(self, *given, **types):
        self.parts = given[:4], given[4:8]

    def run(self, q_p, cache_p, q_d, cache_d, causal_p):
        assert causal_p
        return [
            self.attend(q, cache, queries, csr)
            for q, cache, (queries, *csr) in zip((q_p, q_d), (cache_p, cache_d), self.parts)
        ]


class Persistent(Wrapper):
    def __init__(self, layout, device):
        pass

    def plan(self, queries, indptr, indices, lengths, heads, heads_kv, dim, dim_v, page, **types):
        last = [(length - 1) % page + 1 for length in lengths.tolist()]
        self.queries, self.csr = queries, (indptr, indices, last)

    def run(self, q, cache):
        return self.attend(q, cache, self.queries, self.csr), None


@pytest.fixture
def fake_flashinfer(monkeypatch):
    fake = types.SimpleNamespace(
        __version__="0.fake",
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchPODWithPagedKVCacheWrapper=Pod,
        BatchAttention=Persistent,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)


@pytest.mark.parametrize(
    "name, queries, lengths, e4m3, least",
    [
        ("decode", [1] * 3, [40, 130, 17], False, 3),
        ("decode of 8 bits", [1] * 2, [40, 33], True, 3),
        ("some queries", [5] * 2, [40, 16], False, 3),
        ("a mix", [30, 30, 1, 1, 1], [30, 64, 9, 100, 33], False, 7),
    ],
)
def test_all_calls_of_flashinfers_race_are_one_attention(
    bench, racing, fake_flashinfer, monkeypatch, name, queries, lengths, e4m3, least
):
    race = bench("race_flashinfer")
    monkeypatch.setattr(race, "WORKSPACE", 256)
    monkeypatch.setattr(bench("serving"), "IN_L2", 1)
    heat = race.heat(race.Batch(name, queries, lengths, e4m3, dim=64, heads=16), "cpu")
    report = Report()
    errors, refused = racing.checked(report, heat)
    assert not refused and not report.failures and len(errors) == len(heat.calls) == least
    assert sum(part.shape[0] for part in heat.expected) == sum(queries)
    assert heat.operations == 4 * 16 * 64 * racing.pairs(queries, lengths)
    assert heat.read_bytes == 2 * 64 * 8 * sum(lengths) * (1 if e4m3 else 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("weights", ["sigmoid", "softmax"])
def test_all_calls_of_the_race_of_weights_are_one_attention(bench, racing, monkeypatch, weights, causal):
    race = bench("race_weights")

    def prefill(module, q, k, v, slope, shift, factor, mask_mode):
        assert module == ("module", q.shape[2]) and factor == 1.0
        z = torch.einsum("qhd,khd->hqk", q.float(), k.float())
        p = 1 / (1 + torch.exp2(z * slope + shift))
        return torch.einsum("hqk,khd->qhd", p.tril() if mask_mode == 1 else p, v.float()).to(q.dtype)

    fake = types.SimpleNamespace(
        prefill=types.SimpleNamespace(single_prefill_with_kv_cache_with_jit_module=prefill)
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(race, "module", lambda backend, dim: ("module", dim))
    monkeypatch.setattr(race, "HIDDEN", 128)
    heat = race.heat(race.Problem(weights, 64, causal, 80), "cpu")
    report = Report()
    errors, refused = racing.checked(report, heat)
    assert not refused and not report.failures and len(errors) == (3 if weights == "sigmoid" else 1)
    assert heat.operations == 4 * 128 * racing.pairs([80], [80], causal)


def test_flashinfers_module_of_weights_has_the_transform_in_each_backends_words(bench):
    race = bench("race_weights")
    for backend, left_out in (("fa3", "DefaultUpdater"), ("fa2", "use_softmax = false")):
        backend_given, uri, *_, names, types_of, variant, text = race.jit_arguments(backend, 64)
        assert backend_given == backend and uri == f"weights_sigmoid_{backend}_d64"
        assert len(names) == len(types_of) and f"struct {variant} " in text
        assert left_out in text and race.SIGMOID in text


@pytest.fixture
def fake_flash_mla(monkeypatch):
    """FlashMLA's calls as its interface describes them."""
    race, racing = importlib.import_module("race_latents"), importlib.import_module("racing")

    def with_kvcache(q, cache, table, lengths, dim_v, plan, softmax_scale, causal=False, **how):
        assert dim_v == 512 and plan == "plan"
        if how:
            assert how["is_fp8_kvcache"] and cache.shape[1:] == (race.PAGE, 1, 656)
            flat, lists = q.flatten(0, 1), how["indices"].flatten(0, 1)
            return race.expected_of_lists(flat, cache.view(-1, 656), lists).view(*q.shape[:3], 512), None
        found = []
        for i, length in enumerate(lengths.tolist()):
            rows = cache[table[i].long()].flatten(0, 1)[:length]
            found.append(racing.attention_in_fp32(q[i], rows, rows[..., :512], causal, softmax_scale))
        return torch.stack(found), None

    def sparse(q, kv, lists, scale):
        return race.expected_of_lists(q, kv[:, 0], lists[:, 0]), None, None

    fake = types.SimpleNamespace(
        flash_mla_with_kvcache=with_kvcache,
        flash_mla_sparse_fwd=sparse,
        get_mla_metadata=lambda: ("plan", None),
    )
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    monkeypatch.setitem(sys.modules, "flashinfer", None)


@pytest.mark.parametrize(
    "kind, queries, top_k",
    [("decode", 1, 0), ("decode", 2, 0), ("sparse decode", 2, 20), ("sparse prefill", 3, 20)],
)
def test_all_calls_over_latents_are_one_attention(
    bench, racing, monkeypatch, fake_flash_mla, kind, queries, top_k
):
    race = bench("race_latents")
    monkeypatch.setattr(bench("serving"), "IN_L2", 1)
    sequences = 1 if kind == "sparse prefill" else 2
    heat = race.heat(race.Problem(kind, 16, sequences, queries, 128, top_k), "cpu")
    report = Report()
    errors, refused = racing.checked(report, heat)
    assert list(errors) == ["flashjit", "FlashMLA"] and not report.failures
    assert list(refused) == ["FlashInfer MLA, fa3"] * (kind == "decode" and queries == 1)
    seen = queries * top_k or (128 if queries == 1 else 127 + 128)
    assert heat.operations == 2 * sequences * 16 * seen * (576 + 512)
    rows = queries * top_k or 128
    assert heat.read_bytes == sequences * rows * (656 if kind == "sparse decode" else 1152)


def test_both_sides_have_the_tangent(bench, racing, monkeypatch):
    race = bench("race_tangents")
    attention = lambda q, k, v, causal, **how: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal
    )
    fake = types.ModuleType("jvp_flash_attention.jvp_attention")
    fake.JVPAttn = types.SimpleNamespace(fwd_dual=attention)
    monkeypatch.setitem(sys.modules, "jvp_flash_attention", types.ModuleType("jvp_flash_attention"))
    monkeypatch.setitem(sys.modules, "jvp_flash_attention.jvp_attention", fake)
    for causal in (False, True):
        report = Report()
        heat = race.heat(race.Problem(32, 1, 2, 70, causal), "cpu")
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            errors, refused = racing.checked(report, heat)
        assert not refused and not report.failures and len(errors) == 5


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_all_sides_train_alike(bench, racing, monkeypatch, pass_name, causal):
    race = bench("race_wide")
    fake = types.SimpleNamespace(
        ffpa_attn_func=lambda q, k, v, is_causal, enable_gqa, **how: race.F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=enable_gqa
        ),
        TritonBackend=lambda enable_tma, **passes: passes,
    )
    monkeypatch.setitem(sys.modules, "ffpa_attn", fake)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(race, "DIM", 64)
    monkeypatch.setattr(
        race, "sdpa_kernel", lambda backend: torch.nn.attention.sdpa_kernel([backend, race.SDPBackend.MATH])
    )
    report = Report()
    heat = race.heat(race.Problem(pass_name, 1, 4, 2, 50, causal), "cpu")
    with torch.no_grad():
        errors, refused = racing.checked(report, heat)
    assert not report.failures and list(refused) == [race.FA4] * (pass_name == "forward")
    assert len(errors) == 5 and len(heat.expected) == (1 if pass_name == "forward" else 3)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "prefix", "alibi", "softcap"])
def test_all_programs_are_one_attention(bench, racing, monkeypatch, name):
    race = bench("race_programs")
    for module in (race, bench("variants")):
        for what, value in (("LENGTH", 130), ("WINDOW", 50), ("PREFIX", 40), ("HIDDEN", 32), ("BATCH", 2)):
            if hasattr(module, what):
                monkeypatch.setattr(module, what, value)

    class Programs:
        def __init__(self, case, q, k, v, dout):
            self.case, self.inputs, self.dout = case, (q, k, v), dout

        def fwd(self):
            return flashjit.forward(
                *self.inputs, options=self.case.parts.removeprefix(":"), captures=self.case.captures
            )[0]

    class Seen:
        """cuDNN's plan, as its page describes it: [0, F0) and [F1, F2)."""

        def __init__(self, ends, q, k, v, build_backward):
            assert ends.dtype == torch.int32 and ends.shape[::2] == (1, 2 * 130) and ends.shape[1] % 2
            keys, (first, *rest) = torch.arange(130), ends[0, :, :130, None]
            self.mask = keys < first
            if rest:
                self.mask |= (keys >= rest[0]) & (keys < rest[1])

    def flex_attn_func(q, k, v, mask_plan):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return race.torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=mask_plan.mask
        ).transpose(1, 2)

    fake = types.SimpleNamespace(create_mask_plan=Seen, flex_attn_func=flex_attn_func)
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(flex_attention=fake))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", fake)
    sides = {"flashjit": Programs, "cuDNN flex": race.Intervals}
    monkeypatch.setattr(race, "SIDES", sides)
    for pass_name in ("fwd", "bwd"):
        report, heat = Report(), race.heat(race.Problem(pass_name, name, 16), "cpu")
        if pass_name == "bwd":
            del heat.calls["flashjit"]
        errors, refused = racing.checked(report, heat)
        assert not report.failures and list(refused) == ["cuDNN flex"] * (name in ("alibi", "softcap"))
        assert len(errors) + len(refused) == len(heat.calls)


class OneByOne:
    """_flash_attn_fwd, a pair at a time: blocks of their lists alone, and the mask in those that are not full."""

    def __init__(self, block):
        self.block = block

    def attends(self, lists, mask, captures, row, key):
        at, block = row // self.block, key // self.block
        counts, indices, full_counts, full_indices = (x[0, 0, at] for x in lists)
        if block in full_indices[:full_counts]:
            return True
        here = block in indices[:counts]
        return here and bool(mask(0, 0, torch.tensor([row]), torch.tensor([key]), None, captures))

    def forward(self, q, k, v, return_lse, score_mod, mask_mod, block_sparse_tensors, aux_tensors):
        lists, size = block_sparse_tensors[:4], block_sparse_tensors.block_size
        assert return_lse and size == (self.block, self.block)
        keep = torch.tensor(
            [
                [self.attends(lists, mask_mod, aux_tensors, row, key) for key in range(k.shape[1])]
                for row in range(q.shape[1])
            ]
        )
        scores = q.shape[3] ** -0.5 * torch.einsum("bqhd,bkhd->bhqk", q, k)
        if score_mod:
            head = torch.arange(q.shape[2])[:, None, None]
            rows, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
            scores = score_mod(scores, 0, head, rows, keys, None, aux_tensors)
        weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "prefix", "alibi", "softcap"])
def test_flash_attention_4_has_the_same_functions(bench, monkeypatch, name):
    """With PyTorch in place of CuTe: the masks and scores, and the lists of blocks."""
    programs, variants = bench("fa4_programs"), bench("variants")
    for module in (programs, variants):
        for what, value in (("WINDOW", 20), ("PREFIX", 20), ("BLOCK", 16)):
            if hasattr(module, what):
                monkeypatch.setattr(module, what, value)
    math = types.SimpleNamespace(
        exp2=lambda x, fastmath: torch.exp2(x), tanh=lambda x, fastmath: torch.tanh(x)
    )
    cute = types.SimpleNamespace(jit=lambda function: function, math=math)
    cutlass = types.SimpleNamespace(Int32=torch.int32, Float32=torch.float32, cute=cute)
    utils = types.SimpleNamespace(
        scalar_to_ssa=lambda x, kind: torch.as_tensor(x).reshape(1),
        create_softcap_scoremod=lambda cap: lambda score, *rest: cap * torch.tanh(score / cap),
        create_softcap_scoremod_bwd=lambda cap: lambda grad, *rest: grad,
    )
    blocks = types.SimpleNamespace(
        BlockSparseTensorsTorch=collections.namedtuple(
            "Blocks", "mask_count mask_index full_count full_index block_size"
        )
    )
    of_pairs = types.SimpleNamespace(_flash_attn_fwd=OneByOne(16).forward)
    package = types.SimpleNamespace(cute=types.SimpleNamespace(utils=utils))
    for module, fake in (
        ("cutlass", cutlass),
        ("cutlass.cute", cute),
        ("flash_attn", package),
        ("flash_attn.cute", package.cute),
        ("flash_attn.cute.utils", utils),
        ("flash_attn.cute.block_sparsity", blocks),
        ("flash_attn.cute.interface", of_pairs),
    ):
        monkeypatch.setitem(sys.modules, module, fake)
    programs.functions.cache_clear()
    case = next(case for case in variants.cases(56, "cpu") if case.name == name)
    q, k, v, dout = (torch.randn(1, 2, 56, 16) for _ in range(4))
    found = programs.FlashAttention4(case, q, k, v, dout).fwd()
    programs.functions.cache_clear()
    expected = bench("race_programs").expected(case, q, k, v, dout)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_codes_mean_the_same_on_all_sides(bench, racing, monkeypatch, causal):
    race = bench("race_codes")

    def fwd(*given):
        """The operator, whose arguments are in the order of vLLM's flash_attn_interface.py."""
        assert len(given) == 37 and given[3:7] == (None,) * 4 and given[9:12] == (None,) * 3
        assert given[7].tolist() == given[8].tolist() == [0, 300] and given[12:14] == (300, 300)
        assert given[14:20] == (None,) * 6 and given[23] == 32**-0.5 and given[24] is causal
        assert given[25:] == (-1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
        q, k, v = (x.float() * scale[0, :, None] for x, scale in zip(given[:3], given[20:23]))
        return [racing.attention_in_fp32(q, k, v, causal).to(torch.bfloat16), None]

    package = types.SimpleNamespace(_vllm_fa3_C=None)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(vllm_flash_attn=package))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", package)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", types.SimpleNamespace(fwd=fwd), raising=False)
    report, heat = Report(), race.heat(race.Problem(32, 2, 300, causal), "cpu")
    errors, refused = racing.checked(report, heat)
    assert not report.failures and list(errors) == ["flashjit", "FA3 of vLLM's fork"]
    assert list(refused) == ["FA3"] and errors["FA3 of vLLM's fork"] < 0.005


def test_what_is_wrong_has_no_time(racing, monkeypatch):
    right = torch.ones(4)
    heat = racing.Heat(
        "a problem",
        {
            "flashjit": [lambda: right],
            "peer": [lambda: (right * 1.001,)],
            "far": [lambda: right * 1.1],
            "nan": [lambda: right * float("nan")],
            "broken": [lambda: 1 / 0],
        },
        (right,),
        0.01,
        1e9,
        2e9,
    )
    monkeypatch.setattr(racing, "times_of", lambda heat, names, rounds: dict.fromkeys(names, 500.0))
    race = racing.Race(
        "a race", ("sys",), "pip install it", lambda: [], lambda problem: heat, {"peer": "torch"}
    )
    report = Report()
    racing.run_heat(report, race, None, 3)
    rows = {row["who"]: row for row in report.rows}
    assert [who for who in rows if "us" in rows[who]] == ["flashjit", "peer"] and not report.failures
    assert rows["flashjit"]["version"] == "" and rows["peer"]["version"] == importlib.metadata.version(
        "torch"
    )
    assert rows["peer"]["tflop_per_s"] == 2.0 and rows["peer"]["tb_per_s"] == 4.0
    assert rows["far"]["why_not"] == "its error is 0.1, over 0.01"
    assert "nan" in rows["nan"]["why_not"] and rows["broken"]["why_not"].startswith("ZeroDivisionError")
    ours = heat._replace(calls={"flashjit": [lambda: right * 2], "flashjit, two calls": [lambda: 1 / 0]})
    racing.checked(report, ours)
    assert len(report.failures) == 2


def test_attention_in_fp32_is_causal_from_the_end(racing):
    q, k, v = torch.randn(3, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 5)
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(racing.attention_in_fp32(q, k, v), want[0].transpose(0, 1))
    assert racing.pairs([3, 1], [7, 9]) == int(mask.sum()) + 9


def test_a_peer_that_is_missing_is_named(bench, racing, monkeypatch, capsys):
    races = bench("races")
    race = racing.Race("nobody", ("no_such_module",), "pip install nobody", list, None, {})
    monkeypatch.setitem(races.RACES, "nobody", race)
    assert races.able(["nobody"]) == []
    said = capsys.readouterr().err
    assert "nobody is left out: no_such_module cannot be imported" in said and "pip install nobody" in said


def test_the_page_and_the_help_name_every_race(bench):
    races = bench("races")
    page = (BENCH.parent / "docs" / "benchmarks.md").read_text()
    for name, race in races.RACES.items():
        assert f"\n    {name} " in races.__doc__ and f"`{name}`" in page, name
        names = [problem.name for problem in race.problems()]
        assert len(set(names)) == len(names) > 1


def test_tables_are_joined(bench, racing, tmp_path):
    races = bench("races")

    def table(name, *rows):
        path = tmp_path / name
        lines = [",".join(f"{row.get(column, '')}" for column in racing.COLUMNS) for row in rows]
        path.write_text("\n".join([",".join(racing.COLUMNS), *lines]))
        return str(path)

    row = lambda problem, us, why="": {
        "race": "wide",
        "problem": problem,
        "who": "peer",
        "us": us,
        "why_not": why,
    }
    into = table("all.csv", row("a", 1), row("b", 2))
    later = table("more.csv", row("b", 3), row("c", 4), row("a", "", "ModuleNotFoundError: cutlass"))
    races.join(into, [later])
    rows = list(csv.DictReader(open(into, newline="")))
    assert [(row["problem"], row["us"]) for row in rows] == [("a", "1"), ("b", "3"), ("c", "4")]
    races.join(str(tmp_path / "new.csv"), [later])
    assert len(list(csv.DictReader(open(tmp_path / "new.csv", newline="")))) == 2


def test_races_are_tables(bench):
    races = bench("plot_races")
    row = lambda problem, who, us, **more: {
        **{"device": "H100", "date": "today", "commit": "abc", "race": "wide", "version": "", "why_not": ""},
        **{"problem": problem, "who": who, "us": us, "tflop_per_s": us and "100.4"},
        **more,
    }
    rows = [
        row("a", "flashjit", "50.04"),
        row("a", "flashjit, two calls", "40.0"),
        row("a", "peer", "39.0", version="1.2"),
        row("a", "other", "", why_not="does not run"),
        row("b", "flashjit", "2000.4"),
        row("b", "flashjit, two calls", ""),
        row("b", "peer", "3000.6", version="1.2"),
        row("b", "other", "", why_not="does not run"),
    ]
    text = races.races_section(rows)
    assert "### Heads of 512 columns, next to FFPA (peer 1.2)" in text and "H100, today, commit abc." in text
    assert "| problem | flashjit, us | flashjit, two calls, us | peer, us | flashjit, TFLOP/s | best" in text
    assert "| a | 50.0 | 40.0 | 39.0 | 100 | **0.97** |\n| b | 2000 | - | 3001 | 100 | 1.50 |" in text
    assert "- No time of other: does not run (2 problems)" in text
    assert races.races_summary(rows).splitlines()[2] == (
        "| `wide` | 2 | 1.21 | 0.97 (peer; a) | 1.50 (peer; b) |"
    )
    assert races.TITLES.keys() == bench("races").RACES.keys()


def test_the_script_installs_every_peer(bench):
    script = str(BENCH / "peers.sh")
    for name in bench("races").RACES:
        assert f"\n{name}() {{" in pathlib.Path(script).read_text()
    run = subprocess.run(["bash", script, "nobody"], capture_output=True, text=True)
    assert run.returncode == 2 and "no race is called nobody" in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    run = subprocess.run(
        [sys.executable, str(BENCH / "races.py"), "--race", "tangents"], capture_output=True, text=True
    )
    assert run.returncode == 3 and "finds no GPU" in run.stderr


COMPILED = """
import cutlass
from cutlass import Float32, cute
from cutlass.cute import jit
from quack.compile_utils import make_fake_tensor
from flash_attn.cute.cache_utils import get_jit_cache

class Kernel(cutlass.utils.Base):
    width: cutlass.Constexpr[int] = 4
    rows: Float32 | None = None

    @jit
    def run(self, x: cute.Tensor):
        return x

cache = get_jit_cache("fwd")
key = (cutlass.BFloat16, 128, None, (True, 1.5))
found = cache[key](3) if key in cache else None
"""


def test_flash_attention_4_runs_without_its_compiler(bench, tmp_path, monkeypatch):
    """Its modules are imported over stand-ins, and a key finds the kernel of the same key with the real types."""
    offline = bench("fa4_offline")
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text(COMPILED)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] in ("cutlass", "quack", "flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(offline, "KERNELS", tmp_path)
    real = type("BFloat16", (), {}), 128, None, (True, 1.5)
    kernel = tmp_path / f"fwd-{offline.name_of(real)}.so"
    kernel.touch()
    loaded = types.SimpleNamespace(load_module=lambda path: types.SimpleNamespace(func=lambda x: (path, x)))
    monkeypatch.setitem(sys.modules, "tvm_ffi", loaded)
    offline.install()
    interface = importlib.import_module("flash_attn.cute.interface")
    assert interface.found == (str(kernel), 3) and interface.Kernel.run(None, 7) == 7
    with pytest.raises(NotImplementedError, match="compiled no kernel of fwd"):
        (interface.cutlass.BFloat16, 64) in interface.cache  # noqa: B015
    for name in [name for name in sys.modules if name.split(".")[0] in ("cutlass", "quack", "flash_attn")]:
        monkeypatch.delitem(sys.modules, name)

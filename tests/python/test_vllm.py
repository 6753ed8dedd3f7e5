"""flashjit.vllm's backend, builder and layers over a stand-in of vLLM's interface, against fp64.

vLLM itself: tools/bench/vllm_tokens.py."""

import dataclasses
import importlib
import types

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
import vllm_standin  # noqa: E402
from vllm_standin import DEVICE, ints, normal  # noqa: E402

HQ, HKV, DIM, BLOCK = 4, 2, 32, 16
OLD, NEW = (20, 0, 3), (1, 18, 4)  # keys that are there, and new ones: decoding, a prefill, a chunk of one
CONFIG = types.SimpleNamespace(
    model_config=types.SimpleNamespace(is_mm_prefix_lm=True),
    scheduler_config=types.SimpleNamespace(max_num_batched_tokens=64),
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def backend(monkeypatch):
    vllm_standin.install(monkeypatch)
    return importlib.import_module("flashjit.vllm._backend")


class Step:
    """Requests with OLD keys in the cache and NEW tokens, as vLLM describes them. The cache is NaN elsewhere."""

    def __init__(self, dtype=torch.float32, **more):
        self.k, self.v = ([normal(n + m, HKV, DIM) for n, m in zip(OLD, NEW)] for _ in range(2))
        self.q = normal(sum(NEW), HQ, DIM)
        blocks = [(n + m + BLOCK - 1) // BLOCK for n, m in zip(OLD, NEW)]
        order = iter(torch.randperm(sum(blocks) + 2).tolist())
        self.table = torch.full((len(NEW), 4), -1, dtype=torch.int32, device=DEVICE)
        for i, count in enumerate(blocks):
            self.table[i, :count] = ints(*[next(order) for _ in range(count)])
        self.cache = torch.full((sum(blocks) + 2, HKV, BLOCK, 2 * DIM), float("nan"), device=DEVICE).to(dtype)
        starts = torch.tensor([0, *NEW]).cumsum(0).int()
        slots = [
            int(self.table[i, at // BLOCK]) * BLOCK + at % BLOCK
            for i, (n, m) in enumerate(zip(OLD, NEW))
            for at in range(n, n + m)
        ]
        self.common, _ = vllm_standin.described(
            OLD,
            NEW,
            self.table,
            slot_mapping=torch.tensor(slots, device=DEVICE),
            seq_lens_cpu_upper_bound=torch.tensor([n + m for n, m in zip(OLD, NEW)]),
            **more,
        )
        self.rows = [slice(int(a), int(b)) for a, b in zip(starts, starts[1:])]

    def old_slots(self, i):
        at = torch.arange(OLD[i], device=DEVICE)
        return self.table[i, at // BLOCK].long() * BLOCK + at % BLOCK

    def run(self, backend, layer=types.SimpleNamespace(), output_scale=None, **options):
        """O of the layer, with a scale in FP8; padded rows of the output keep their value."""
        impl = backend.FlashjitImpl(HQ, DIM, 0.2, HKV, **options)
        for i in range(len(NEW)):
            n = OLD[i]
            impl.do_kv_cache_update(layer, self.k[i][:n], self.v[i][:n], self.cache, self.old_slots(i))
        k, v = (torch.cat([x[i][OLD[i] :] for i in range(len(NEW))]) for x in (self.k, self.v))
        padded = [torch.cat((x, torch.full_like(x[:3], 9.0))) for x in (self.q, k, v)]
        impl.do_kv_cache_update(layer, padded[1], padded[2], self.cache, self.common.slot_mapping)
        builder = backend.FlashjitBuilder(None, ["layer"], CONFIG, DEVICE)
        metadata = builder.build(0, self.common)
        output = torch.full_like(padded[0], 7.0)
        output = output if output_scale is None else output.to(torch.float8_e4m3fn)
        assert impl.forward(layer, *padded, self.cache, metadata, output, output_scale) is output
        assert (output[sum(NEW) :].float() == 7).all()
        return output[: sum(NEW)]

    def check(self, out, tolerance=1e-5, **options):
        for i, rows in enumerate(self.rows):
            more = {name: value(i) if callable(value) else value for name, value in options.items()}
            wanted, _ = exact_attention.exact(self.q[rows], self.k[i], self.v[i], scale=0.2, **more)
            torch.testing.assert_close(out[rows].double().cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({}, {}),
        ({"sliding_window": 5}, {"window": 4}),
        ({"logits_soft_cap": 1.5}, {"cap": 1.5}),
        ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        ({"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}, {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}),
        ({"sliding_window": 9, "logits_soft_cap": 3.0}, {"window": 8, "cap": 3.0}),
    ],
)
def test_a_mixed_batch_over_pages(backend, options, wanted):
    step = Step()
    if "sinks" in options:
        options = {"sinks": options["sinks"].to(DEVICE)}
    step.check(step.run(backend, **options), causal=True, **wanted)


def test_o_in_fp8(backend):
    scale = torch.tensor([0.01], device=DEVICE)
    step = Step()
    got, wanted = step.run(backend, output_scale=scale), step.run(backend).float() / scale
    assert got.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got.float(), wanted, rtol=0.07, atol=0.002)

    def key(dtype, static, one):
        shape = types.SimpleNamespace(is_per_tensor=lambda: one)
        return types.SimpleNamespace(
            dtype=dtype, symmetric=True, scale=types.SimpleNamespace(static=static, group_shape=shape)
        )

    impl = backend.FlashjitImpl(HQ, DIM, 0.2, HKV)
    assert impl.fused_output_quant_supported(key(torch.float8_e4m3fn, True, True))
    assert not impl.fused_output_quant_supported(key(torch.float8_e4m3fn, False, True))
    assert not impl.fused_output_quant_supported(key(torch.float8_e4m3fn, True, False))
    assert not impl.fused_output_quant_supported(key(torch.uint8, True, True))


def test_each_request_is_causal_or_not(backend):
    causal = torch.tensor([True, False, True], device=DEVICE)
    step = Step(causal=causal)
    step.check(step.run(backend), causal=lambda i: bool(causal[i]))
    step = Step(causal=False)
    step.check(step.run(backend), causal=False)


@pytest.mark.parametrize("window, clamped", [(None, False), (4, False), (4, True)])
def test_images_are_seen_whole(backend, window, clamped):
    ranges = {1: [(2, 6), (9, 13)], 2: [(1, 5)]}
    step = Step(mm_req_doc_ranges=ranges)

    def seen(i):
        at = torch.arange(NEW[i])[:, None] + OLD[i]
        key = torch.arange(OLD[i] + NEW[i])
        near = key > at - window if window else torch.ones_like(key, dtype=torch.bool)
        own = torch.zeros(NEW[i], OLD[i] + NEW[i], dtype=torch.bool)
        for low, high in ranges.get(i, ()):
            own |= (at >= low) & (at <= high) & (key >= low) & (key <= high)
        return ((key <= at) | own) & near if clamped else (key <= at) & near | own

    layer = types.SimpleNamespace(mm_prefix_clamp_sliding_window=clamped)
    step.check(step.run(backend, layer, sliding_window=window), seen=seen)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("stored_as", ["codes", "bytes"])
def test_fp8_caches_with_scales(backend, name, stored_as):
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    layer = types.SimpleNamespace(
        _k_scale=torch.tensor(0.5, device=DEVICE), _v_scale=torch.tensor(2.0, device=DEVICE)
    )
    step = Step(dtype)
    if stored_as == "bytes":
        step.cache = step.cache.view(torch.uint8)
    out = step.run(backend, layer, kv_cache_dtype=name)
    step.k, step.v = (
        [(x / scale).to(dtype).float() * scale for x in xs] for xs, scale in ((step.k, 0.5), (step.v, 2.0))
    )
    step.check(out, causal=True)


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head"])
@pytest.mark.parametrize("rows_first", [False, True])
def test_caches_with_a_scale_for_each_token_and_head(backend, name, rows_first):
    dtype = torch.int8 if name.startswith("int8") else torch.float8_e4m3fn
    step = Step()
    shape = backend.FlashjitBackend.get_kv_cache_shape(len(step.cache), BLOCK, HKV, DIM, name)
    assert shape == (*step.cache.shape[:3], 2 * (DIM + 4))
    order = (0, 2, 1, 3) if rows_first else (0, 1, 2, 3)
    step.cache = torch.full([shape[i] for i in order], 255, dtype=torch.uint8, device=DEVICE).permute(order)
    out = step.run(backend, kv_cache_dtype=name, sliding_window=9)

    def rounded(x):
        scale = x.abs().amax(-1, keepdim=True) / (127 if dtype == torch.int8 else 448)
        codes = (x / scale).round() if dtype == torch.int8 else (x / scale).to(dtype).float()
        return codes * scale

    step.k, step.v = ([rounded(x) for x in xs] for xs in (step.k, step.v))
    step.check(out, causal=True, window=8)
    with pytest.raises(flashjit.InvalidArgument, match="must lie one after another"):
        step.cache = torch.zeros(*shape[:3], shape[3] + 8, dtype=torch.uint8)[..., : shape[3]]
        step.run(backend, kv_cache_dtype=name)


def four_bits(x, rotation):
    """Rows of K or V as a cache of 4 bits gives them back: rotated, with a scale and a zero point each, and rotated back."""
    rotated = rotation(x)
    low, high = (part(rotated, -1, keepdim=True) for part in (torch.amin, torch.amax))
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    back = torch.empty_like(x)
    rotation.back(((rotated / scale + zero).round().clamp(0, 15) - zero) * scale, back)
    return back


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("dim", [32, 48])
def test_caches_of_four_bits(backend, rows_first, dim, monkeypatch):
    """With outliers in a column of K, which the rotation spreads."""
    name = "int4_per_token_head"
    monkeypatch.setitem(globals(), "DIM", dim)
    step = Step()
    for x in step.k:
        x[..., 5] *= 20
    shape = backend.FlashjitBackend.get_kv_cache_shape(len(step.cache), BLOCK, HKV, dim, name)
    assert shape == (*step.cache.shape[:3], 2 * (dim // 2 + 4))
    order = (0, 2, 1, 3) if rows_first else (0, 1, 2, 3)
    step.cache = torch.full([shape[i] for i in order], 255, dtype=torch.uint8, device=DEVICE).permute(order)
    out = step.run(backend, kv_cache_dtype=name, sliding_window=9, logits_soft_cap=3.0)
    rotation = backend._key_scales.Rotation(dim, torch.float32, step.q.device)
    exact, _ = exact_attention.exact(
        step.q[step.rows[1]], step.k[1], step.v[1], scale=0.2, causal=True, window=8, cap=3.0
    )
    step.k, step.v = ([four_bits(x, rotation) for x in xs] for xs in (step.k, step.v))
    step.check(out, tolerance=2e-3, causal=True, window=8, cap=3.0)
    error = (out[step.rows[1]].double().cpu() - exact).norm() / exact.norm()
    assert error < 0.25  # of the codes alone
    impl = backend.FlashjitImpl(HQ, dim, 0.2, HKV, kv_cache_dtype=name)
    key = types.SimpleNamespace(dtype=torch.float8_e4m3fn, symmetric=True, scale=None)
    key.scale = types.SimpleNamespace(
        static=True, group_shape=types.SimpleNamespace(is_per_tensor=lambda: True)
    )
    assert not impl.fused_output_quant_supported(key)  # O is rotated back first


@pytest.mark.parametrize("dim", [16, 32, 48, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotations_are_exact_in_every_type(backend, dim, dtype):
    rotation = backend._key_scales.Rotation(dim, dtype, torch.device("cpu"))
    matrix, back = rotation._matrix.double(), rotation._back.double()
    assert torch.equal(matrix @ back, torch.eye(dim, dtype=torch.float64))
    rows = torch.randn(2, 3, dim).to(dtype)
    assert torch.equal(rotation.of_q(rows), rows @ rotation._back.T)


def test_vllm_makes_room_for_the_scales(backend):
    @dataclasses.dataclass
    class Spec:
        kv_quant_mode: object
        head_size: int = DIM
        state_content_bytes: int | None = None

    each, four, plain = (
        types.SimpleNamespace(name=name, is_per_token_head=name.endswith("HEAD"))
        for name in ("INT8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "NONE")
    )
    adjust = backend.FlashjitBackend.customize_spec
    assert adjust(Spec(each)) == Spec(each, state_content_bytes=2 * (DIM + 4))
    assert adjust(Spec(four)) == Spec(four, state_content_bytes=2 * (DIM // 2 + 4))
    assert adjust(Spec(plain)) == Spec(plain) and adjust(Spec(each, DIM, 80)) == Spec(each, DIM, 80)
    ask = backend.FlashjitBackend.validate
    assert ask(128, torch.bfloat16, "int8_per_token_head", 16, (8, 0)) == []
    assert ask(128, torch.bfloat16, "fp8_per_token_head", 16, (9, 0)) == []
    assert "multiples of 16, not of 72" in ask(72, torch.bfloat16, "int8_per_token_head", 16, (9, 0))[0]
    assert ask(128, torch.bfloat16, "int4_per_token_head", 16, (9, 0)) == []
    assert ask(96, torch.float16, "int4_per_token_head", 32, (8, 0)) == []
    assert "multiples of 16, not of 72" in ask(72, torch.bfloat16, "int4_per_token_head", 16, (9, 0))[0]
    assert (
        "head sizes up to 256, not for 512" in ask(512, torch.bfloat16, "int4_per_token_head", 16, (9, 0))[0]
    )


@pytest.mark.parametrize("options, wanted", [({}, {}), ({"sliding_window": 30}, {"window": 29})])
def test_keys_that_all_requests_share(backend, options, wanted):
    """Cascade attention of vLLM 0.26: build() is given how many first keys are in the same blocks."""
    step, shared = Step(), 2 * BLOCK
    table = torch.stack([ints(1, 2, 3 + i, 6 + i) for i in range(3)])
    lengths = [shared + 5 + n for n in NEW]
    step.cache = torch.full((9, HKV, BLOCK, 2 * DIM), float("nan"), device=DEVICE)
    step.common.seq_lens, step.common.block_table_tensor = ints(*lengths), table
    step.common.max_seq_len = max(lengths)
    common = [normal(shared, HKV, DIM) for _ in range(2)]
    step.k, step.v = ([torch.cat((x, normal(n - shared, HKV, DIM))) for n in lengths] for x in common)
    impl = backend.FlashjitImpl(HQ, DIM, 0.2, HKV, **options)
    for k, v, row in zip(step.k, step.v, table):
        at = torch.arange(len(k), device=DEVICE)
        impl.do_kv_cache_update(None, k, v, step.cache, row[at // BLOCK].long() * BLOCK + at % BLOCK)
    builder = backend.FlashjitBuilder(None, ["layer"], CONFIG, DEVICE)
    metadata, out = builder.build(shared, step.common), torch.empty_like(step.q)
    assert metadata.batch.prefix.tolist() == [shared] and builder.build(0, step.common).batch.prefix is None
    impl.forward(None, step.q, step.q, step.q, step.cache, metadata, out)
    step.check(out, causal=True, **wanted)
    if DEVICE == "cpu":
        with pytest.raises(flashjit.InvalidArgument, match="prefix"):
            wrong = builder.build(shared + BLOCK, step.common)
            impl.forward(None, step.q, step.q, step.q, step.cache, wrong, out)


def test_vllm_is_told_when_to_look_for_shared_keys(backend):
    builder = backend.FlashjitBuilder(None, ["layer"], CONFIG, DEVICE)
    asked = {
        "common_prefix_len": 256,
        "query_lens": [1] * 8,
        "num_query_heads": 8,
        "num_kv_heads": 2,
        "use_alibi": False,
        "use_sliding_window": False,
        "use_local_attention": False,
        "num_sms": 132,
        "dcp_world_size": 1,
    }
    assert builder.use_cascade_attention(**asked)
    others = {"common_prefix_len": 240, "query_lens": [1] * 7, "dcp_world_size": 2}
    others |= {f"use_{name}": True for name in ("alibi", "sliding_window", "local_attention")}
    for name, value in others.items():
        assert not builder.use_cascade_attention(**{**asked, name: value})


def test_an_encoder_has_no_cache(backend):
    step = Step()
    step.k, step.v = ([x[i][OLD[i] :] for i in range(len(NEW))] for x in (step.k, step.v))
    impl = backend.FlashjitImpl(HQ, DIM, 0.2, HKV, sliding_window=3, attn_type="encoder_only")
    metadata = backend.FlashjitBuilder(None, [], CONFIG, DEVICE).build(0, step.common)
    out = torch.empty_like(step.q)
    empty = torch.empty(0, device=DEVICE)
    impl.do_kv_cache_update(None, step.k[0], step.v[0], empty, step.common.slot_mapping)
    impl.forward(None, step.q, torch.cat(step.k), torch.cat(step.v), empty, metadata, out)
    step.check(out, seen=lambda i: (torch.arange(NEW[i])[:, None] - torch.arange(NEW[i])).abs() < 3)


@pytest.mark.parametrize("given", [{}, {"mm_req_doc_ranges": {1: [(2, 6)]}}])
def test_a_call_traces_nothing(backend, monkeypatch, given):
    from flashjit import programs

    options = {"sliding_window": 5, "logits_soft_cap": 1.5}
    Step(**given).run(backend, **options)  # which may
    monkeypatch.setattr(programs, "_program", lambda *_: pytest.fail("a program is traced in a call"))
    Step(**given).run(backend, **options)


def test_slots_of_no_row_are_left_out(backend):
    step = Step()
    impl = backend.FlashjitImpl(HQ, DIM, 0.2, HKV)
    slots = torch.tensor([-1, 5, 10**9], device=DEVICE)
    impl.do_kv_cache_update(None, *(normal(3, HKV, DIM) for _ in range(2)), step.cache, slots)
    written = ~step.cache.isnan().any(3).any(1)
    assert written.nonzero().tolist() == [[0, 5]]


def test_a_profile_without_metadata_gives_zeros(backend):
    impl = backend.FlashjitImpl(HQ, DIM, 0.2, HKV)
    out = torch.full((2, HQ, DIM), 7.0)
    impl.forward(None, out, out, out, out, None, out)
    assert not out.any()


def test_the_builder_keeps_vllms_tensors(backend):
    step = Step()
    builder = backend.FlashjitBuilder(None, [], CONFIG, DEVICE)
    assert builder._cudagraph_support is vllm_standin.AttentionCGSupport.ALWAYS
    metadata = builder.build(0, step.common, fast_build=True)
    assert metadata.batch.lengths is step.common.seq_lens and metadata.batch.table is step.table
    other = step.table.clone()
    moved = builder.update_block_table(metadata, other, metadata.slot_mapping)
    assert moved.batch.table is other and moved.batch.lengths is metadata.batch.lengths


@pytest.mark.parametrize(
    ("mixed", "most", "rows"),
    [("FULL", 512, sum(NEW)), ("FULL", 2, max(NEW)), ("PIECEWISE", 512, max(NEW)), ("NONE", 0, max(NEW))],
)
def test_a_graph_of_any_batch_has_room_for_one_long_sequence(backend, mixed, most, rows):
    """vLLM captures it with rows that are shared out evenly."""
    mode = types.SimpleNamespace(
        mixed_mode=lambda: types.SimpleNamespace(name=mixed),
        decode_mode=lambda: types.SimpleNamespace(name="NONE" if mixed == "NONE" else "FULL"),
    )
    graphs = types.SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=most)
    model = types.SimpleNamespace(**vars(CONFIG.model_config), max_model_len=4096)
    config = types.SimpleNamespace(**vars(CONFIG) | {"compilation_config": graphs, "model_config": model})
    builder, common = backend.FlashjitBuilder(None, [], config, DEVICE), Step().common
    batch = builder.build(0, common).batch
    assert batch.most_q == rows
    captured = mixed != "NONE" and common.num_actual_tokens <= most
    assert batch.most_kv == (4096 if captured else common.max_seq_len)  # as vLLM captures it


def test_vllms_cache_has_the_shape_that_layers_read(backend):
    """vLLM before 0.32 asks the backend for it."""
    assert (
        backend.FlashjitBackend.get_kv_cache_shape(7, BLOCK, HKV, DIM, "auto")
        == Step().cache[:1].expand(7, -1, -1, -1).shape
    )


def test_what_no_kernel_serves_is_refused_when_the_model_is_loaded(backend):
    ask = backend.FlashjitBackend.validate
    assert ask(128, torch.bfloat16, "auto", 16, (9, 0)) == []
    assert ask(256, torch.bfloat16, "fp8", 64, (8, 0)) == []
    assert ask(512, torch.bfloat16, "fp8", 64, (9, 0)) == [
        "flashjit has tensor cores for fp8 caches of head sizes up to 256, not for 512"
    ]
    asked = flashjit.can("bf16:d100:causal:varlen:pages16", device="sm_90a")
    assert (
        ask(100, torch.bfloat16, "auto", 16, (9, 0))[-1] == asked.reason and "head_dim is 100" in asked.reason
    )
    assert ask(128, torch.bfloat16, "auto", 16, (10, 9)) == []  # a GPU that is not known by its number
    assert "no cache of the type nvfp4" in ask(128, torch.bfloat16, "nvfp4", 16, (9, 0))[0]
    assert "caches have the type of the model" in ask(128, torch.bfloat16, "float16", 16, (9, 0))[0]
    assert "dtype not supported" in ask(128, torch.float64, "auto", 16, (9, 0))
    assert "compute capability not supported" in ask(128, torch.float16, "auto", 16, (7, 0))
    with pytest.raises(flashjit.Unsupported, match="does not have rotary"):
        backend.FlashjitImpl(HQ, DIM, 0.2, HKV, rotary=1)
    with pytest.raises(flashjit.Unsupported, match="no cache of the type nvfp4"):
        backend.FlashjitImpl(HQ, DIM, 0.2, HKV, kv_cache_dtype="nvfp4")
    with pytest.raises(flashjit.Unsupported, match="head_dim is 100; it must be a multiple of 8"):
        backend.FlashjitImpl(HQ, 100, 0.2, HKV)
    impl = backend.FlashjitImpl(HQ, DIM, 0.2, HKV)
    with pytest.raises(flashjit.Unsupported, match="output_block_scale is given"):
        out = torch.empty(1, HQ, DIM)
        impl.forward(None, out, out, out, out, object(), out, output_block_scale=torch.ones(1))


def test_a_thread_that_loads_a_model_may_have_no_context(monkeypatch):
    from flashjit import _engines

    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(_engines, "bind_context", asked.append)
    monkeypatch.setattr(
        _engines, "can", lambda spec: asked.append(spec) or flashjit.can(spec, device="sm_90a")
    )
    assert _engines.why_not(128, torch.bfloat16, "auto") is None
    assert asked == [torch.device("cuda"), "bf16:d128:causal:varlen:pages16"]


def test_latent_attention_decodes_with_several_queries(monkeypatch):
    vllm_standin.install(monkeypatch)
    latent = importlib.import_module("flashjit.vllm._latent")
    heads, rank, columns = 3, 64, 80
    impl = latent.FlashjitLatentImpl(kv_lora_rank=rank, scale=0.1)
    impl.need_to_return_lse_for_decode = True
    cache, q = normal(5, BLOCK, columns), normal(4, heads, columns)
    step = types.SimpleNamespace(block_table=ints(3, 1, 0, 4).view(2, 2), seq_lens=ints(20, 7))
    parts = (q[..., :rank], q[..., rank:])
    out, lse = impl.forward_mqa(parts, cache, types.SimpleNamespace(decode=step), None)
    for i, keys in enumerate((torch.cat((cache[3], cache[1]))[:20], cache[0][:7])):
        rows = slice(2 * i, 2 * i + 2)
        wanted = exact_attention.exact(q[rows], keys[:, None], keys[:, None, :rank], scale=0.1, causal=True)
        for found, exact in zip((out[rows], lse[rows]), wanted):
            torch.testing.assert_close(found.double().cpu(), exact, rtol=1e-5, atol=1e-5)
    for given, why in ((step, "q has 3 rows for 2 sequences"), (None, "has no decode part")):
        with pytest.raises(flashjit.InvalidArgument, match=why):
            impl.forward_mqa(q[:3], cache, types.SimpleNamespace(decode=given), None)
    ask = latent.FlashjitLatentBackend.supports_combination
    assert ask(576, torch.bfloat16, "auto", 64, True, False, False, (9, 0)) is None
    assert ask(576, torch.bfloat16, "fp8", 64, device_capability=(8, 0)) is None
    assert "or FP8, not fp8_ds_mla" in ask(576, torch.bfloat16, "fp8_ds_mla")
    assert "or FP8, not fp8_per_token_head" in ask(576, torch.bfloat16, "fp8_per_token_head")
    assert latent.FlashjitLatentImpl.supports_dcp and impl.supports_quant_query_input is False
    assert "head_dim is 584" in ask(584, torch.bfloat16, "auto", 64, device_capability=(9, 0))
    with pytest.raises(flashjit.Unsupported, match="sliding_window is given"):
        latent.FlashjitLatentImpl(kv_lora_rank=rank, scale=0.1, sliding_window=3)


@pytest.mark.parametrize("stored_as", ["codes", "bytes"])
@pytest.mark.parametrize("rope", [0, 16])
def test_latents_of_fp8(monkeypatch, stored_as, rope):
    vllm_standin.install(monkeypatch)
    latent = importlib.import_module("flashjit.vllm._latent")
    heads, rank = 3, 64
    impl = latent.FlashjitLatentImpl(kv_lora_rank=rank, scale=0.1)
    codes, q = normal(5, BLOCK, rank + rope).to(torch.float8_e4m3fn), normal(2, heads, rank + rope)
    step = types.SimpleNamespace(block_table=ints(3, 1, 0, 4).view(2, 2), seq_lens=ints(20, 7))
    layer = types.SimpleNamespace(_k_scale=torch.tensor(0.5, device=DEVICE))
    given = codes.view(torch.uint8) if stored_as == "bytes" else codes
    parts = (q[..., :rank], q[..., rank:])
    out, _ = impl.forward_mqa(parts, given, types.SimpleNamespace(decode=step), layer)
    cache = codes.float() * 0.5
    for i, keys in enumerate((torch.cat((cache[3], cache[1]))[:20], cache[0][:7])):
        rows = slice(i, i + 1)
        wanted, _ = exact_attention.exact(
            q[rows], keys[:, None], keys[:, None, :rank], scale=0.1, causal=True
        )
        torch.testing.assert_close(out[rows].double().cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_registering_names_classes_that_exist(monkeypatch):
    vllm_standin.install(monkeypatch)
    from flashjit.vllm import register

    register()
    for path in vllm_standin.registered.values():
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
    names = {vllm_standin.AttentionBackendEnum.CUSTOM, "FLASHJIT_MLA", "FLASHJIT_MLA_SPARSE"}
    assert set(vllm_standin.registered) == names


@pytest.mark.parametrize("slopes", [[0.5], [0.5] * 3, [0.5] * (HQ + 1)])
def test_slopes_of_another_number_of_heads_are_refused(backend, slopes):
    says = f"alibi_slopes has {len(slopes)} numbers: give {HQ}, one for each of the layer's heads"
    with pytest.raises(flashjit.InvalidArgument, match=says):
        backend.FlashjitImpl(HQ, DIM, 0.2, HKV, alibi_slopes=slopes)


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 1)])
def test_causal_of_other_requests_is_refused(backend, shape):
    step = Step(causal=torch.ones(shape, dtype=torch.bool, device=DEVICE))
    with pytest.raises(flashjit.InvalidArgument, match=r"causal is bool .*: it must be .*\[3\]"):
        backend.FlashjitBuilder(None, ["layer"], CONFIG, DEVICE).build(0, step.common)


@pytest.mark.parametrize(
    "old, new",
    [((5, 0, 3), (1, 0, 1)), ((0, 7, 0), (0, 2, 0)), ((9, 3, 0), (1, 1, 0)), ((9, 0, 3), (0, 0, 0))],
)
@pytest.mark.parametrize("how", ["plain", "strided", "transposed"])
def test_requests_without_new_tokens_and_any_strides(backend, old, new, how):
    table = torch.arange(12, dtype=torch.int32, device=DEVICE).view(4, 3).t()  # of any strides, too
    common, starts = vllm_standin.described(old, new, table)
    rows = sum(new) + 2
    q = {
        "plain": lambda: normal(rows, HQ, DIM),
        "strided": lambda: normal(rows, 3 * HQ, DIM)[:, HQ : 2 * HQ],
        "transposed": lambda: normal(DIM, rows, HQ).permute(1, 2, 0),
    }[how]()
    cache, kv = normal(12, HKV, BLOCK, 2 * DIM), normal(rows, HKV, DIM)
    out = torch.full((rows, 2 * HQ, DIM), 7.0, device=DEVICE)[:, :HQ]
    impl, layer = backend.FlashjitImpl(HQ, DIM, 0.2, HKV), types.SimpleNamespace()
    metadata = backend.FlashjitBuilder(None, ["layer"], CONFIG, DEVICE).build(0, common)
    impl.forward(layer, q, kv, kv, cache, metadata, out)
    assert (out[sum(new) :] == 7).all()
    for i, (n, m) in enumerate(zip(old, new)):
        keys = cache[table[i].long()].transpose(1, 2).reshape(-1, HKV, 2 * DIM)[: n + m]
        own = slice(int(starts[i]), int(starts[i + 1]))
        wanted, _ = exact_attention.exact(q[own], keys[..., :DIM], keys[..., DIM:], scale=0.2, causal=True)
        torch.testing.assert_close(out[own].double().cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
def test_caches_of_other_rows_are_refused(backend, name):
    from flashjit.vllm import _key_scales

    impl, size = (
        backend.FlashjitImpl(HQ, DIM, 0.2, HKV, kv_cache_dtype=name),
        _key_scales.row_bytes(DIM, name),
    )
    rows, slots = normal(3, HKV, DIM), torch.tensor([0, 17, 2], device=DEVICE)
    for wrong in (size - 16, size + 16, 2 * DIM):
        cache = torch.zeros(4, HKV, BLOCK, wrong, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(
            flashjit.InvalidArgument, match=f"kv_cache is .*{name} and heads of 32 .*, {size}"
        ):
            impl.do_kv_cache_update(None, rows, rows, cache, slots)
    with pytest.raises(flashjit.InvalidArgument, match="kv_cache is float32 .* it must be bytes"):
        impl.do_kv_cache_update(None, rows, rows, torch.zeros(4, HKV, BLOCK, size, device=DEVICE), slots)

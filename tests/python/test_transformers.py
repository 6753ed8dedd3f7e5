"""flashjit in Hugging Face transformers: small random models, on the CPU or the GPU, against transformers' own."""

import pathlib
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import child  # noqa: E402
import flashjit  # noqa: E402
import flashjit.torch  # noqa: E402
from flashjit import _tensors, _transformers  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def models():
    llama = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
    )
    bert = transformers.BertConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=99,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return {
        "llama": lambda how: transformers.LlamaForCausalLM._from_config(llama, attn_implementation=how),
        "bert": lambda how: transformers.BertModel._from_config(bert, attn_implementation=how),
    }


def pair(name):
    """The same random weights with flashjit and with transformers' own attention."""
    with pytest.raises(flashjit.InvalidArgument, match="choose another"):
        flashjit.torch.register_with_transformers("flashjit")
    assert flashjit.torch.register_with_transformers() == "jit_attention"
    torch.manual_seed(0)
    own = models()[name]("sdpa").to(DEVICE)
    ours = models()[name]("jit_attention").to(DEVICE)
    ours.load_state_dict(own.state_dict())
    assert ours.config._attn_implementation == "jit_attention"
    return ours, own


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_same_results_and_gradients(name):
    ours, own = pair(name)
    ids = torch.randint(0, 99, (2, 17), device=DEVICE)
    results = []
    for model in (ours, own):
        out = model(input_ids=ids)[0]
        out.square().mean().backward()
        results.append([out.detach()] + [p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding(name):
    ours, own = (model.eval() for model in pair(name))
    ids = torch.randint(0, 99, (2, 17), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        a, b = (model(input_ids=ids, attention_mask=mask)[0] for model in (ours, own))
    torch.testing.assert_close(a[0, 5:], b[0, 5:], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(a[1], b[1], atol=1e-4, rtol=1e-3)


OTHERS = {
    "bloom": lambda: (
        transformers.BloomModel,
        transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=99),
    ),
    "falcon": lambda: (
        transformers.FalconModel,
        transformers.FalconConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99, alibi=False
        ),
    ),
    "t5": lambda: (
        transformers.T5EncoderModel,
        transformers.T5Config(
            d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, vocab_size=99, decoder_start_token_id=0
        ),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_never_call_a_registered_attention_are_told_of(name, caplog, monkeypatch):
    flashjit.torch.register_with_transformers()
    _tensors.say_once.cache_clear()
    called = []
    counted = lambda *a, real=transformers.AttentionInterface._global_mapping["jit_attention"], **n: (
        called.append(1) or real(*a, **n)
    )
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "jit_attention", counted)
    kind, config = OTHERS[name]()
    model = kind(config).to(DEVICE).eval()
    model.config._attn_implementation = "jit_attention"
    ids = torch.randint(0, 99, (2, 7), device=DEVICE)
    for _ in range(2):
        model(input_ids=ids)
    told = [record.getMessage() for record in caplog.records if record.name == "flashjit"]
    assert bool(called) != bool(told), (called, told)  # versions of transformers differ in which these are
    assert all("does not call 'jit_attention'" in text for text in told) and len(told) <= 1


def test_models_that_call_it_are_not_told_of(caplog):
    _tensors.say_once.cache_clear()
    for name in ("llama", "bert"):
        pair(name)[0](input_ids=torch.randint(0, 99, (2, 7), device=DEVICE))
    assert not [record for record in caplog.records if record.name == "flashjit"]


def test_that_there_are_no_weights_is_told_once(caplog):
    _tensors.say_once.cache_clear()
    ours, _ = pair("llama")
    ids = torch.randint(0, 99, (2, 7), device=DEVICE)
    for _ in range(2):
        ours(input_ids=ids, output_attentions=True)
    told = [record.getMessage() for record in caplog.records if record.name == "flashjit"]
    assert len(told) == 1 and "output_attentions=True" in told[0]


def test_generation():
    ours, own = (model.eval() for model in pair("llama"))
    ids = torch.randint(0, 99, (1, 7), device=DEVICE)
    a, b = (model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for model in (ours, own))
    assert torch.equal(a, b)


@pytest.mark.slow
def test_whole_graphs_of_torch_compile():
    ours, own = (model.eval() for model in pair("llama"))
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    ids = torch.randint(0, 99, (2, 17), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        for given in ({}, {"attention_mask": mask}):
            a, b = (
                model(input_ids=ids, use_cache=False, **given).logits[mask.bool()]
                for model in (compiled, own)
            )
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_its_own_flash_attention_2(name):
    """Whole, padded and packed batches, windows and soft-caps, gradients, and tokens generated."""
    script = pathlib.Path(__file__).parent / "transformers_flash.py"
    done = subprocess.run(
        [sys.executable, script, name], capture_output=True, text=True, timeout=300, env=child.environment()
    )
    assert done.returncode == 0 and "the same" in done.stdout, done.stdout + done.stderr


SIZES = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=99,
    initializer_range=0.5,
)
SERVED = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
    "gemma": lambda: transformers.Gemma2Config(
        **SIZES,
        head_dim=16,
        sliding_window=6,
        attn_logit_softcapping=0.7,
        query_pre_attn_scalar=1,
        tie_word_embeddings=False,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
}
SERVES = hasattr(getattr(transformers, "ContinuousBatchingConfig", None), "page_size")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", SERVED)
def test_packed_sequences_do_not_see_each_other(name, use_cache):
    """As DataCollatorWithFlattening gives them. Models with windows also give a dense mask, which knows of the sequences or not."""
    flashjit.torch.register_with_transformers()
    torch.manual_seed(0)
    own = (
        transformers.AutoModelForCausalLM.from_config(SERVED[name](), attn_implementation="eager")
        .to(DEVICE)
        .eval()
    )
    ours = (
        transformers.AutoModelForCausalLM.from_config(SERVED[name](), attn_implementation="jit_attention")
        .to(DEVICE)
        .eval()
    )
    ours.load_state_dict(own.state_dict())
    lengths = (9, 3, 14)
    ids = torch.randint(0, 99, (1, sum(lengths)), device=DEVICE)
    offsets = torch.tensor([0, 9, 12, 26], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        got = ours(
            input_ids=ids,
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE),
            use_cache=use_cache,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=14,
            max_length_k=14,
        ).logits[0]
        want = torch.cat([own(input_ids=part).logits[0] for part in ids.split(lengths, 1)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_packed_sequences_with_a_mask_and_a_bias_of_all_rows():
    """Both are read at the rows of all sequences. A mask that is not causal stays so, and a bias has its gradient."""
    torch.manual_seed(0)
    lengths, offsets = (5, 2, 6), torch.tensor([0, 5, 7, 13], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(1, heads, 13, 16, device=DEVICE) for heads in (4, 2, 2))
    mask = torch.rand(1, 1, 13, 13, device=DEVICE) < 0.7
    mask |= torch.eye(13, dtype=torch.bool, device=DEVICE)
    bias = torch.randn(1, 4, 13, 13, device=DEVICE, requires_grad=True)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(DEVICE)
    module, packed = (
        torch.nn.Module(),
        {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 6, "max_length_k": 6},
    )
    for given in (mask, torch.where(mask, 0.0, -torch.inf), mask[:, :, :1].contiguous()):
        got, _ = _transformers.attention_forward(
            module, q, k, v, given, position_bias=bias, sliding_window=3, **packed
        )
        allowed = (given if given.dtype == torch.bool else given == 0) & (document[:, None] == document)
        s = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.25 + bias
        s = s.masked_fill(~allowed, -torch.inf)
        want = (torch.softmax(s, 3).nan_to_num() @ v.repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        for a, b in zip(
            torch.autograd.grad(got.square().sum(), bias), torch.autograd.grad(want.square().sum(), bias)
        ):
            torch.testing.assert_close(a, b.nan_to_num(), atol=1e-5, rtol=1e-4)
    with pytest.raises(flashjit.InvalidArgument, match="DataCollatorWithFlattening"):
        _transformers.attention_forward(module, q, k, v, None, cu_seq_lens_q=offsets)
    with pytest.raises(flashjit.Unsupported, match="block_table"):
        _transformers.attention_forward(
            module, q, k, v, mask, block_table=torch.zeros(3, 1, dtype=torch.int32), **packed
        )


@pytest.mark.skipif(not SERVES, reason="this transformers has another continuous batching")
@pytest.mark.parametrize("name, fast", [*[(name, False) for name in SERVED], ("llama", True)])
def test_continuous_batching_gives_the_same_tokens_as_eager(name, fast, monkeypatch):
    """Prompts in chunks of 24 tokens, pages of 8. fast: decode from pages, which transformers does on GPUs alone."""
    from transformers.generation.continuous_batching import initialization

    flashjit.torch.register_with_transformers()
    calls, forward = [], _transformers._packed_forward
    monkeypatch.setattr(
        _transformers,
        "_packed_forward",
        lambda *rest, **named: calls.append(named.get("block_table") is not None) or forward(*rest, **named),
    )
    if fast:
        monkeypatch.setattr(
            initialization,
            "torch",
            types.SimpleNamespace(
                **{**vars(torch), "cuda": types.SimpleNamespace(is_available=lambda: True)}
            ),
        )
    torch.manual_seed(0)
    model = (
        transformers.AutoModelForCausalLM.from_config(SERVED[name](), attn_implementation="eager")
        .to(DEVICE)
        .eval()
    )
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    prompts = [torch.randint(0, 99, (n,)).tolist() for n in (3, 17, 9, 30)]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = [
        model.generate(
            torch.tensor([prompt], device=DEVICE),
            attention_mask=torch.ones(1, len(prompt), device=DEVICE),
            eos_token_id=None,
            **options,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    model.set_attn_implementation("jit_attention")
    found = model.generate_batch(
        prompts,
        transformers.GenerationConfig(eos_token_id=-1, **options),
        progress_bar=False,
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=8, num_blocks=64, max_batch_tokens=24
        ),
    )
    assert model.config._attn_implementation == "jit_attention"
    got = {tuple(result.prompt_ids): result.generated_tokens for result in found.values()}
    assert [got[tuple(prompt)] for prompt in prompts] == want
    assert len(calls) > 8 and any(calls) == (fast or DEVICE == "cuda" and name == "llama")


@pytest.mark.skipif(not SERVES, reason="this transformers has another continuous batching")
@pytest.mark.parametrize("blocks", [64, 8])
def test_continuous_batching_shares_pages_of_a_prefix_and_lacks_pages(blocks, monkeypatch):
    """Prompts with a prefix of three pages, which transformers computes once; with few pages requests wait, or begin again."""
    from transformers.generation.continuous_batching import initialization

    flashjit.torch.register_with_transformers()
    monkeypatch.setattr(
        initialization,
        "torch",
        types.SimpleNamespace(**{**vars(torch), "cuda": types.SimpleNamespace(is_available=lambda: True)}),
    )
    torch.manual_seed(1)
    model = (
        transformers.AutoModelForCausalLM.from_config(SERVED["llama"](), attn_implementation="eager")
        .to(DEVICE)
        .eval()
    )
    prefix = torch.randint(0, 99, (25,)).tolist()
    prompts = [prefix + torch.randint(0, 99, (n,)).tolist() for n in (1, 9, 4, 16, 2)]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = [
        model.generate(
            torch.tensor([prompt], device=DEVICE),
            attention_mask=torch.ones(1, len(prompt), device=DEVICE),
            eos_token_id=None,
            **options,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    model.set_attn_implementation("jit_attention")
    found = model.generate_batch(
        prompts,
        transformers.GenerationConfig(eos_token_id=-1, **options),
        progress_bar=False,
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=8, num_blocks=blocks, max_batch_tokens=24
        ),
    )
    got = {tuple(result.prompt_ids): result.generated_tokens for result in found.values()}
    assert [got[tuple(prompt)] for prompt in prompts] == want


def test_pages_are_attended_to_through_a_window():
    """What transformers keeps in rings today: the forms of the mask and the score in pages, against packed keys."""
    torch.manual_seed(0)
    lengths, rows = [5, 12], 4
    q, k, v = (torch.randn(1, heads, 2, 16, device=DEVICE) for heads in (4, 2, 2))
    k_pages, v_pages = torch.full((2, 8, rows, 2, 16), float("nan"), device=DEVICE)
    table = torch.tensor([[6, 1, -1], [3, 0, 5]], dtype=torch.int32, device=DEVICE)
    keys, values = ([torch.randn(2, n, 16, device=DEVICE) for n in lengths] for _ in range(2))
    for i, n in enumerate(lengths):
        keys[i][:, -1], values[i][:, -1] = k[0, :, i], v[0, :, i]
        for key in range(n - 1):
            k_pages[table[i, key // rows], key % rows] = keys[i][:, key]
            v_pages[table[i, key // rows], key % rows] = values[i][:, key]
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 5, 17], dtype=torch.int32, device=DEVICE)
    rest = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": cu_k,
        "max_length_q": 1,
        "max_length_k": 12,
        "sliding_window": 4,
        "softcap": 0.5,
        "is_causal": True,
        "s_aux": torch.randn(4, device=DEVICE),
    }
    module = torch.nn.Module()
    want, _ = _transformers.attention_forward(
        module, q, torch.cat(keys, 1)[None], torch.cat(values, 1)[None], None, **rest
    )
    got, _ = _transformers.attention_forward(
        module, q, k, v, None, block_table=table, k_cache=k_pages, v_cache=v_pages, **rest
    )
    assert got.shape == want.shape == (1, 2, 4, 16)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(flashjit.InvalidArgument, match=r"^block_table is int64 \[2, 3\].*: it must be int32"):
        given = {**rest, "block_table": table.long(), "k_cache": k_pages, "v_cache": v_pages}
        _transformers.attention_forward(module, q, k, v, None, **given)

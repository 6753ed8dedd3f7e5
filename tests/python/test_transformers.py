"""flashjit in Hugging Face transformers: small random models, on the CPU or the GPU, against transformers' own."""
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import flashjit  # noqa: E402
import flashjit.torch  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def models():
    llama = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=2, vocab_size=99)
    bert = transformers.BertConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                   vocab_size=99, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return {"llama": lambda how: transformers.LlamaForCausalLM._from_config(llama, attn_implementation=how),
            "bert": lambda how: transformers.BertModel._from_config(bert, attn_implementation=how)}


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
def test_padding(programs, name):
    ours, own = (model.eval() for model in pair(name))
    ids = torch.randint(0, 99, (2, 17), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        a, b = (model(input_ids=ids, attention_mask=mask)[0] for model in (ours, own))
    torch.testing.assert_close(a[0, 5:], b[0, 5:], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(a[1], b[1], atol=1e-4, rtol=1e-3)


def test_generation():
    ours, own = (model.eval() for model in pair("llama"))
    ids = torch.randint(0, 99, (1, 7), device=DEVICE)
    a, b = (model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for model in (ours, own))
    assert torch.equal(a, b)

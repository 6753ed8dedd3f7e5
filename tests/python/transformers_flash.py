"""transformers' own "flash_attention_2" over flashjit.flash_attn.install(), in a process of its own: test_transformers.py runs
this. transformers refuses FlashAttention without a GPU before it calls it; that question alone is answered otherwise."""

import copy
import sys

import flashjit.flash_attn
import torch
import transformers

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.cuda.is_available = lambda: True
flashjit.flash_attn.install()
calls = []
functions = flashjit.flash_attn._functions
attend = functions.attend
functions.attend = lambda *given, **named: (
    calls.append(named.keys() - {"recorder"}) or attend(*given, **named)
)

CONFIGS = {
    "llama": transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
    ),
    "mistral": transformers.MistralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        sliding_window=6,
    ),
    "gemma2": transformers.Gemma2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        head_dim=16,
        sliding_window=6,
    ),
}


def pair(name):
    """The same random weights with transformers' eager attention, and with flash_attention_2."""
    torch.manual_seed(0)
    own, ours = (
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=how)
        .to(device)
        .eval()
        for how in ("eager", "flash_attention_2")
    )
    ours.load_state_dict(own.state_dict())
    assert ours.config._attn_implementation == "flash_attention_2"
    return own, ours


def compare(own, ours, rows=slice(None), **given):
    """Results where `rows` counts, and the gradients of their mean square."""
    results = []
    for model in (own, ours):
        model.zero_grad()
        calls.clear()
        out = model(**given).logits[rows]
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
        assert len(calls) == (2 if model is ours else 0)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


own, ours = pair(sys.argv[1])
ids = torch.randint(0, 99, (3, 17), device=device)
compare(own, ours, input_ids=ids)
assert not calls[0], calls

kept = torch.ones_like(ids)
kept[0, :5] = kept[1, :11] = 0
compare(own, ours, kept.bool(), input_ids=ids, attention_mask=kept)
assert "cu_seqlens_q" in calls[0], calls

lengths = (5, 9, 3)  # three sequences, packed
positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(device)
with torch.no_grad():
    calls.clear()
    packed = ours(input_ids=ids[:1], position_ids=positions, use_cache=False).logits[0]
    assert "cu_seqlens_q" in calls[0], calls
    apart = [own(input_ids=ids[:1, document == i]).logits[0] for i in range(3)]
    torch.testing.assert_close(packed, torch.cat(apart), atol=1e-4, rtol=1e-3)

    tokens = [
        model.generate(ids, attention_mask=kept, max_new_tokens=8, do_sample=False, pad_token_id=0)
        for model in (own, ours)
    ]
    assert torch.equal(*tokens), tokens
print("the same")

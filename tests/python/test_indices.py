"""attention() with a list of keys for each query. On the GPU where there is one."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402
from operator_arguments import arguments_of_forward  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LIMIT = 2e-2 if torch.cuda.is_available() else 1e-4


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def lists(*shape, keys, seed=0):
    """Unsorted, with equal entries, some of them -1 or no key."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, keys, shape, generator=generator, dtype=torch.int32)
    kind = torch.randint(0, 8, shape, generator=generator)
    return torch.where(kind == 0, -1, torch.where(kind == 1, indices + keys, indices)).to(DEVICE)


def exact(q, k, v, indices, lengths=None, causal=False):
    """Each entry as a key of its own; O and LSE in fp64."""
    batch, heads, queries, dim = q.shape
    group = heads // k.shape[1]
    out = q.new_zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64, device=q.device)
    rows = []
    for b in range(batch):
        length = k.shape[2] if lengths is None else int(lengths[b])
        for h in range(heads):
            of_head = []
            for i in range(queries):
                named = indices[b if indices.shape[0] > 1 else 0, i, h // group].long()
                last = i + length - queries if causal else length
                named = named[(named >= 0) & (named < length) & (named <= last)]
                if len(named) == 0:
                    of_head.append(q.new_zeros(v.shape[-1], dtype=torch.float64))
                    continue
                scores = dim**-0.5 * k[b, h // group, named].double() @ q[b, h, i].double()
                lse[b, h, i] = scores.logsumexp(0)
                of_head.append(scores.softmax(0) @ v[b, h // group, named].double())
            rows.append(torch.stack(of_head))
    return torch.stack(rows).reshape(out.shape), lse


def without_unnamed(k, indices):
    """NaN in the rows of k that no list names."""
    spoilt = k.detach().clone()
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            named = indices[b if indices.shape[0] > 1 else 0, :, h].flatten().long()
            unnamed = torch.ones(k.shape[2], dtype=torch.bool, device=k.device)
            unnamed[named[(named >= 0) & (named < k.shape[2])]] = False
            spoilt[b, h, unnamed] = math.nan
    return spoilt


@pytest.mark.parametrize("heads, heads_kv", [(1, 1), (3, 1), (16, 1), (65, 1), (128, 1), (12, 4), (6, 6)])
@pytest.mark.parametrize("causal", [False, True])
def test_lists(heads, heads_kv, causal):
    torch.manual_seed(heads)
    q, k, v = randn(2, heads, 3, 64), randn(2, heads_kv, 50, 64), randn(2, heads_kv, 50, 32)
    indices = lists(2, 3, heads_kv, 20, keys=50)
    k, v = without_unnamed(k, indices), without_unnamed(v, indices)
    out, lse = flashjit.attention(q, k, v, indices=indices, causal=causal, return_lse=True)
    wanted, wanted_lse = exact(q, k, v, indices, causal=causal)
    assert (out - wanted).abs().max() < LIMIT
    assert torch.allclose(lse.double(), wanted_lse, atol=LIMIT)


def left_out(indices, length):
    """-1 behind the lengths, [sequences or 1, queries]."""
    behind = torch.arange(indices.shape[3], device=DEVICE) >= length.reshape(-1, indices.shape[1], 1, 1)
    return torch.where(behind, -1, indices)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_only_the_first_entries_count(shared, dimensions):
    torch.manual_seed(8)
    q, k, v = randn(2, 6, 5, 64), randn(2, 2, 50, 64), randn(2, 2, 50, 32)
    indices = lists(1 if shared else 2, 5, 2, 20, keys=50)
    length = torch.tensor([[0, 20, 7, -2, 99], [3, 1, 0, 16, 19]], dtype=torch.int32, device=DEVICE)
    length = length[0] if dimensions == 1 else length[: len(indices)]
    wanted = left_out(indices, length)
    k, v = without_unnamed(k, wanted), without_unnamed(v, wanted)
    out, lse = flashjit.attention(q, k, v, indices=(indices, length), return_lse=True)
    right, right_lse = exact(q, k, v, wanted)
    assert (out - right).abs().max() < LIMIT
    assert torch.allclose(lse.double(), right_lse, atol=LIMIT)
    assert (lse[:, :, 0] == -math.inf).sum() == (12 if dimensions == 1 or shared else 6)


def test_lengths_of_lists_with_gradients_and_compiled():
    torch.manual_seed(9)
    q, k = randn(2, 4, 3, 64).requires_grad_(), randn(2, 1, 30, 64).requires_grad_()
    indices = lists(2, 3, 1, 12, keys=30)
    length = torch.tensor([[0, 5, 12], [3, 12, 1]], dtype=torch.int32, device=DEVICE)

    def attend(q, k, given):
        return flashjit.attention(q, k, k, indices=given)

    wanted = attend(q, k, left_out(indices, length))
    dout = torch.randn_like(wanted)
    right = torch.autograd.grad(wanted, (q, k), dout)
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = call(q, k, (indices, length))
        assert (out - wanted).abs().max() < LIMIT
        for got, expected in zip(torch.autograd.grad(out, (q, k), dout), right):
            assert (got - expected).abs().max() < LIMIT * max(1, expected.abs().max())


def test_lengths_of_packed_lists():
    torch.manual_seed(10)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    q, k = randn(1, 4, 5, 64), randn(1, 1, 40, 64)
    keys = torch.tensor([0, 20, 40], dtype=torch.int32, device=DEVICE)
    indices = lists(1, 5, 1, 16, keys=20)
    length = torch.tensor([4, 16, 0, 9, 1], dtype=torch.int32, device=DEVICE)

    def attend(given):
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_kv": keys, "max_seqlen_q": 3, "max_seqlen_kv": 20}
        return flashjit.attention(q, k, k, indices=given, **packed)

    assert (attend((indices, length)) - attend(left_out(indices, length))).abs().max() < LIMIT


def test_other_lengths_are_refused():
    q, k = randn(2, 4, 3, 64), randn(2, 1, 30, 64)
    indices = lists(2, 3, 1, 12, keys=30)
    for length in (torch.ones(2, 3), torch.ones(2, dtype=torch.int32), torch.ones(3, 2, dtype=torch.int32)):
        with pytest.raises(
            flashjit.InvalidArgument, match=r"topk_length is .* it must be int32 \[3\], \[1, 3\]"
        ):
            flashjit.attention(q, k, k, indices=(indices, length.to(DEVICE)))
    with pytest.raises(flashjit.Error, match="topk_length"):
        flashjit.attention(q, k, k, indices=(indices, [1, 2, 3]))


def test_an_entry_that_is_there_twice_counts_twice():
    torch.manual_seed(1)
    q, k, v = randn(1, 2, 1, 64), randn(1, 1, 9, 64), randn(1, 1, 9, 64)
    twice = torch.tensor([3, 5, 3], dtype=torch.int32, device=DEVICE)[None, None, None]
    rows = torch.cat([k[:, :, [3, 5, 3]]]), v[:, :, [3, 5, 3]]
    assert (flashjit.attention(q, k, v, indices=twice) - flashjit.attention(q, *rows)).abs().max() < LIMIT


def test_lists_of_no_keys():
    q, k = randn(2, 4, 3, 64), randn(2, 1, 30, 64)
    nothing = torch.full((1, 3, 1, 8), -1, dtype=torch.int32, device=DEVICE)
    nothing[0, 1, 0, 0] = 30
    out, lse = flashjit.attention(q, k * math.nan, k * math.nan, indices=nothing, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_all_keys_named_are_dense_attention():
    torch.manual_seed(3)
    q, k, v = randn(2, 8, 40, 64), randn(2, 2, 40, 64), randn(2, 2, 40, 64)
    order = torch.randperm(40, device=DEVICE).to(torch.int32).expand(1, 40, 2, 40)
    assert (
        flashjit.attention(q, k, v, indices=order, causal=True) - flashjit.attention(q, k, v, causal=True)
    ).abs().max() < LIMIT


def test_latents_and_gradients():
    torch.manual_seed(4)
    q, latent = randn(2, 16, 4, 96).requires_grad_(), randn(2, 1, 30, 96).requires_grad_()
    indices = lists(2, 4, 1, 12, keys=30)
    out, lse = flashjit.attention(q, latent, v_columns=64, indices=indices, return_lse=True)
    wanted, wanted_lse = exact(q, latent, latent[..., :64], indices)
    assert (out - wanted).abs().max() < LIMIT
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, latent), dout)
    for got, right in zip(found, torch.autograd.grad(wanted, (q, latent), dout.double())):
        assert (got - right).abs().max() < LIMIT * max(1, right.abs().max())


def test_pages_and_packed_queries():
    torch.manual_seed(5)
    lengths, queries = [37, 0, 64], [2, 1, 3]
    offsets = torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(12, device=DEVICE).reshape(3, 4).to(torch.int32)
    pages = torch.full((12, 1, 16, 96), math.nan, device=DEVICE, dtype=DTYPE)
    q, indices = randn(1, 8, 6, 96), lists(1, 6, 1, 20, keys=64)
    latents = [randn(n, 96) for n in lengths]
    for row, latent in zip(table.tolist(), latents):
        for n, key in enumerate(latent):
            pages[row[n // 16], 0, n % 16] = key
    with torch.no_grad():
        out = flashjit.attention(
            q,
            pages,
            v_columns=64,
            indices=indices,
            causal=True,
            page_table=table,
            cu_seqlens_q=offsets,
            max_seqlen_q=3,
            kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        )
    first = 0
    for count, latent in zip(queries, latents):
        rows = slice(first, first + count)
        wanted, _ = exact(
            q[:, :, rows], latent[None, None], latent[None, None, :, :64], indices[:, rows], causal=True
        )
        assert (out[:, :, rows] - wanted).abs().max() < LIMIT
        first += count


@pytest.mark.parametrize("heads_first", [False, True])
def test_rows_of_a_whole_pool_beside_several_sequences(heads_first):
    """Lists that name rows of the pool, page * 16 + offset, give what lists of each sequence's keys give."""
    torch.manual_seed(6)
    pages, lengths = 12, torch.tensor([37, 5, 64], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(pages, device=DEVICE).reshape(3, 4).to(torch.int32)
    memory = randn(pages, 2, 16, 64) if heads_first else randn(pages, 16, 2, 64).transpose(1, 2)
    q, offsets = randn(1, 8, 6, 64), torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=DEVICE)
    of_row = torch.tensor([0, 0, 1, 2, 2, 2], device=DEVICE)  # the sequence of each query
    own = lists(1, 6, 2, 20, keys=64)
    own = torch.where(own < lengths[of_row][None, :, None, None], own, -1)
    page = table[of_row[None, :, None, None].expand(own.shape), own.clamp(min=0) // 16]
    rows = torch.where(own < 0, -1, page * 16 + own % 16).to(torch.int32)
    with torch.no_grad():
        packed = dict(cu_seqlens_q=offsets, max_seqlen_q=3, page_table=table, kv_lengths=lengths)
        want, want_lse = flashjit.attention(q, memory, memory, indices=own, **packed, return_lse=True)
        every = torch.arange(pages, dtype=torch.int32, device=DEVICE)[None]  # one sequence of all pages
        all_rows = torch.tensor([pages * 16], dtype=torch.int32, device=DEVICE)
        of_pool = dict(page_table=every, kv_lengths=all_rows, indices=rows, return_lse=True)
        found = [flashjit.attention(q, memory, memory, **of_pool)]
        if not heads_first:  # rows of equal distance need no table
            pool = memory.transpose(1, 2).view(1, pages * 16, 2, 64).transpose(1, 2)
            found.append(flashjit.attention(q, pool, pool, indices=rows, return_lse=True))
    for out, lse in found:
        assert (out - want).abs().max() < LIMIT
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


def test_the_operators_are_sound():
    q, k = randn(2, 4, 3, 64).requires_grad_(), randn(2, 2, 30, 64).requires_grad_()
    indices = lists(2, 3, 2, 8, keys=30)
    counts = torch.tensor([2, 0, 8], dtype=torch.int32, device=DEVICE)
    arguments = arguments_of_forward(q, k, k, indices=indices, topk_length=counts, options=":indices")
    torch.library.opcheck(torch.ops.flashjit.attention_forward.default, arguments)
    assert (
        torch.ops.flashjit.attention_forward(*arguments)[0]
        - flashjit.attention(q, k, k, indices=(indices, arguments[9]))
    ).abs().max() < LIMIT


def test_what_makes_no_sense_is_refused():
    q, k = randn(2, 4, 3, 64), randn(2, 2, 30, 64)
    good = lists(2, 3, 2, 8, keys=30)
    for bad in (good.long(), good[:, :2], good[:, :, :1], good[0], good.to(torch.float32)):
        with pytest.raises(flashjit.InvalidArgument, match=r"indices is .*int32 \[2 or 1, 3, 2, top-k\]"):
            flashjit.attention(q, k, k, indices=bad)
    with pytest.raises(flashjit.WrongType, match="indices is a list"):
        flashjit.attention(q, k, k, indices=[1, 2])
    with pytest.raises(flashjit.InvalidArgument, match="indices is set beside dropout"):
        flashjit.attention(q, k, k, indices=good, dropout_p=0.5)
    blocks = flashjit.torch.BlockMap(torch.ones(1, 1, device=DEVICE, dtype=torch.bool), 64)
    with pytest.raises(flashjit.InvalidArgument, match="indices is set beside block_mask"):
        flashjit.attention(q, k, k, indices=good, block_mask=blocks)


# A small model in the manner of DeepSeek's, with random weights.

HEADS, LATENT, ROPE, NOPE, V_DIM, HIDDEN, WORDS = 4, 64, 16, 32, 32, 128, 101


class Layer:
    def __init__(self):
        weight = lambda *shape: randn(*shape) * shape[-2] ** -0.5
        self.to_q, self.to_latent = weight(HIDDEN, HEADS * (NOPE + ROPE)), weight(HIDDEN, LATENT + ROPE)
        self.to_k, self.to_v = weight(HEADS, LATENT, NOPE), weight(HEADS, LATENT, V_DIM)
        self.to_out, self.up, self.down = (
            weight(HEADS * V_DIM, HIDDEN),
            weight(HIDDEN, 2 * HIDDEN),
            weight(2 * HIDDEN, HIDDEN),
        )

    def __call__(self, x, attend):
        q = (norm(x) @ self.to_q).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
        q = torch.cat([q[..., :NOPE], rotated(q[..., NOPE:])], -1)
        latent = norm(x) @ self.to_latent
        latent = torch.cat([norm(latent[..., :LATENT]), rotated(latent[..., LATENT:])], -1)[:, None]
        x = x + attend(self, q, latent).transpose(1, 2).flatten(-2) @ self.to_out
        return x + torch.nn.functional.silu(norm(x) @ self.up) @ self.down


def norm(x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def rotated(x):
    angle = torch.arange(x.shape[-2], device=DEVICE)[:, None] * 10000.0 ** (
        -torch.arange(0, ROPE, 2, device=DEVICE) / ROPE
    )
    left, right = x[..., ::2], x[..., 1::2]
    turned = torch.stack(
        [left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], -1
    )
    return turned.flatten(-2).to(x.dtype)


def unabsorbed(layer, q, latent):
    k = torch.cat([latent[..., :LATENT] @ layer.to_k, latent[..., LATENT:].expand(-1, HEADS, -1, -1)], -1)
    return flashjit.attention(q, k, latent[..., :LATENT] @ layer.to_v, causal=True)


def absorbed(layer, q, latent, **named):
    q = torch.cat([q[..., :NOPE] @ layer.to_k.transpose(1, 2), q[..., NOPE:]], -1)
    return (
        flashjit.attention(q, latent, v_columns=LATENT, scale=(NOPE + ROPE) ** -0.5, causal=True, **named)
        @ layer.to_v
    )


def sparse(layer, q, latent):
    """With lists of all keys, the last first."""
    keys = latent.shape[2]
    order = torch.arange(keys - 1, -1, -1, dtype=torch.int32, device=DEVICE).expand(1, q.shape[2], 1, keys)
    return absorbed(layer, q, latent, indices=order)


def test_a_latent_model_says_the_same_absorbed_or_not():
    """In 16 bits two words may be as good as each other, so that all go on with the first one's."""
    torch.manual_seed(6)
    embedding, to_words, layers = randn(WORDS, HIDDEN), randn(HIDDEN, WORDS), [Layer() for _ in range(3)]
    said = torch.tensor([[3, 14, 15, 92]], device=DEVICE)
    with torch.no_grad():
        for _ in range(12):
            states = [embedding[said]] * 3
            for layer in layers:
                states = [layer(x, attend) for x, attend in zip(states, (unabsorbed, absorbed, sparse))]
            apart, latent, listed = (norm(x[:, -1]).float() @ to_words.float() for x in states)
            best = apart.topk(2).values[0]
            for logits in (latent, listed):
                assert (logits - apart).abs().max() < 20 * LIMIT
                assert best[0] - best[1] < 40 * LIMIT or logits.argmax() == apart.argmax()
            said = torch.cat([said, apart.argmax(-1, keepdim=True)], 1)
    assert len(set(said[0, 4:].tolist())) > 3

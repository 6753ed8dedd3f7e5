"""attention() on latents: V is K's first columns, and heads are wide. On the GPU where there is one."""

import math

import pytest

torch = pytest.importorskip("torch")
import flashjit  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LIMIT = 2e-2 if torch.cuda.is_available() else 1e-4


def tensors(heads_q, queries, keys, dim, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(2, heads_q, queries, dim, device=DEVICE, dtype=DTYPE, requires_grad=True)
    return q, torch.randn(2, 1, keys, dim, device=DEVICE, dtype=DTYPE, requires_grad=True)


def exact(q, latent, columns, causal=False):
    q, latent = q.double(), latent.double()
    s = q.shape[-1] ** -0.5 * q @ latent.transpose(-1, -2)
    if causal:
        rows, keys = (
            torch.arange(q.shape[2], device=q.device)[:, None],
            torch.arange(latent.shape[2], device=q.device),
        )
        s = s.masked_fill(keys > rows + latent.shape[2] - q.shape[2], -math.inf)
    return s.softmax(-1) @ latent[..., :columns]


@pytest.mark.parametrize(
    "heads, queries, keys, dim, columns", [(16, 1, 50, 576, 512), (3, 7, 40, 320, 256), (8, 2, 33, 72, 64)]
)
def test_v_is_columns_of_k(heads, queries, keys, dim, columns):
    q, latent = tensors(heads, queries, keys, dim)
    out = flashjit.attention(q, latent, v_columns=columns, causal=True)
    wanted = exact(q, latent, columns, causal=True)
    assert (out - wanted).abs().max() < LIMIT
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, latent), dout)
    for got, right in zip(found, torch.autograd.grad(wanted, (q, latent), dout.double())):
        assert (got - right).abs().max() < LIMIT * max(1, right.abs().max())


def test_gradient_is_the_sum_of_both():
    q, latent = tensors(4, 9, 31, 96)
    keys, values = latent.detach().requires_grad_(), latent.detach()[..., :64].contiguous().requires_grad_()
    dout = torch.randn(2, 4, 9, 64, device=DEVICE, dtype=DTYPE)
    (shared,) = torch.autograd.grad(flashjit.attention(q, latent, v_columns=64), latent, dout)
    of_k, of_v = torch.autograd.grad(flashjit.attention(q, keys, values), (keys, values), dout)
    of_k[..., :64] += of_v
    assert (shared - of_k).abs().max() < LIMIT


def test_absorbed_and_not():
    """DeepSeek's latent attention, with keys and values made of the latents, and with their projections in q and after O."""
    heads, latent_dim, rope, nope, v_dim, keys = 4, 64, 16, 32, 32, 21
    torch.manual_seed(1)
    latent = torch.randn(1, 1, keys, latent_dim + rope, device=DEVICE, dtype=DTYPE)
    to_k = torch.randn(heads, nope, latent_dim, device=DEVICE, dtype=DTYPE) * latent_dim**-0.5
    to_v = torch.randn(heads, v_dim, latent_dim, device=DEVICE, dtype=DTYPE) * latent_dim**-0.5
    q = torch.randn(1, heads, 5, nope + rope, device=DEVICE, dtype=DTYPE)
    scale = (nope + rope) ** -0.5
    k = torch.cat(
        [latent[..., :latent_dim] @ to_k.transpose(1, 2), latent[..., latent_dim:].expand(-1, heads, -1, -1)],
        -1,
    )
    apart = flashjit.attention(
        q, k, latent[..., :latent_dim] @ to_v.transpose(1, 2), scale=scale, causal=True
    )
    absorbed = flashjit.attention(
        torch.cat([q[..., :nope] @ to_k, q[..., nope:]], -1),
        latent,
        v_columns=latent_dim,
        scale=scale,
        causal=True,
    ) @ to_v.transpose(1, 2)
    assert (apart - absorbed).abs().max() < 4 * LIMIT


def test_paged_latents():
    columns, lengths = 64, [37, 5, 64]
    torch.manual_seed(2)
    pages = torch.full((12, 16, 1, 96), math.nan, device=DEVICE, dtype=DTYPE).transpose(1, 2)
    table = torch.randperm(12, device=DEVICE)[:12].reshape(3, 4).to(torch.int32)
    q = torch.randn(3, 16, 1, 96, device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        latents = [torch.randn(n, 96, device=DEVICE, dtype=DTYPE) for n in lengths]
        for row, latent in zip(table.tolist(), latents):
            for n, key in enumerate(latent):
                pages[row[n // 16], 0, n % 16] = key
        out = flashjit.attention(
            q,
            pages,
            v_columns=columns,
            page_table=table,
            causal=True,
            kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        )
        for i, latent in enumerate(latents):
            assert (out[i] - exact(q[i : i + 1], latent[None, None], columns)[0]).abs().max() < LIMIT


def in_parts(q, columns):
    """Q as engines have it: each part in memory of its own, or a view of a projection."""
    wider = torch.cat((torch.zeros_like(q[..., :32]), q[..., columns:]), -1)
    return q[..., :columns].contiguous(), wider[..., 32:]


@pytest.mark.parametrize(
    "heads, queries, keys, dim, columns", [(16, 1, 50, 576, 512), (3, 7, 40, 320, 256), (8, 2, 33, 72, 40)]
)
def test_q_in_two_tensors(heads, queries, keys, dim, columns):
    q, latent = tensors(heads, queries, keys, dim)
    with torch.no_grad():
        nope, rope = in_parts(q, columns)
        found = flashjit.attention(nope, latent, v_columns=columns, q_rope=rope, causal=True, return_lse=True)
        wanted = flashjit.attention(q, latent, v_columns=columns, causal=True, return_lse=True)
        call = flashjit.bind(nope, latent, v_columns=columns, q_rope=rope, causal=True)
        # Hopper's family takes Q in two tensors where V has a multiple of 64 columns, else another has other sums.
        same = torch.equal if columns % 64 == 0 else lambda a, b: (a - b).abs().max() < LIMIT
        assert all(same(a, b) for a, b in zip(found, wanted))
        for _ in range(3):  # the front launches the third
            assert torch.equal(call(nope, latent, q_rope=in_parts(q, columns)[1]), found[0])
        assert (found[0] - exact(q, latent, columns, causal=True)).abs().max() < LIMIT


def test_q_in_two_tensors_with_sparse_lists_and_pages():
    torch.manual_seed(3)
    pages = torch.randn(6, 1, 16, 96, device=DEVICE, dtype=DTYPE)
    q = torch.randn(2, 8, 3, 96, device=DEVICE, dtype=DTYPE)
    given = {
        "v_columns": 64,
        "page_table": torch.tensor([[3, 1, 5], [0, 2, 4]], dtype=torch.int32, device=DEVICE),
        "kv_lengths": torch.tensor([37, 48], dtype=torch.int32, device=DEVICE),
        "indices": torch.randint(-1, 37, (2, 3, 1, 20), dtype=torch.int32, device=DEVICE),
    }
    nope, rope = in_parts(q, 64)
    assert torch.equal(
        flashjit.attention(nope, pages, q_rope=rope, **given), flashjit.attention(q, pages, **given)
    )


@pytest.mark.parametrize("k_format", [None, "e4m3"])
def test_a_bound_call_of_q_in_two_tensors_over_pages(k_format):
    torch.manual_seed(7)
    pages = torch.randn(6, 1, 16, 96, device=DEVICE, dtype=DTYPE)
    given = {
        "v_columns": 64,
        "page_table": torch.tensor([[3, 1, 5], [0, 2, 4]], dtype=torch.int32, device=DEVICE),
        "kv_lengths": torch.tensor([37, 48], dtype=torch.int32, device=DEVICE),
        "causal": True,
    }
    if k_format:
        pages = pages.to(torch.float8_e4m3fn).view(torch.uint8)
        given.update(k_format=k_format, k_scale=torch.ones((), device=DEVICE))
    q = torch.randn(2, 8, 3, 96, device=DEVICE, dtype=DTYPE)
    nope, rope = in_parts(q, 64)
    wanted = flashjit.attention(q, pages, **given)
    with torch.no_grad():
        call = flashjit.bind(nope, pages, q_rope=rope, **given)
        for _ in range(3):
            assert torch.equal(call(nope, pages, q_rope=in_parts(q, 64)[1]), wanted)


def test_gradients_of_q_in_two_tensors():
    q, latent = tensors(4, 9, 31, 96)
    nope, rope = (x.detach().requires_grad_() for x in in_parts(q, 64))
    dout = torch.randn(2, 4, 9, 64, device=DEVICE, dtype=DTYPE)
    out = flashjit.attention(nope, latent, v_columns=64, q_rope=rope)
    found = torch.autograd.grad(out, (nope, rope), dout)
    (wanted,) = torch.autograd.grad(flashjit.attention(q, latent, v_columns=64), q, dout)
    assert torch.equal(torch.cat(found, -1), wanted)


def test_q_in_two_tensors_that_make_no_sense_is_refused():
    q, latent = (x.detach() for x in tensors(2, 3, 20, 64))
    nope, rope = in_parts(q, 48)
    with pytest.raises(flashjit.InvalidArgument, match="q_rope is given without v_columns"):
        flashjit.attention(nope, latent, latent, q_rope=rope)
    with pytest.raises(flashjit.InvalidArgument, match="the 40 columns of v_columns in q"):
        flashjit.attention(nope, latent, v_columns=40, q_rope=rope)
    with pytest.raises(flashjit.InvalidArgument, match="56 columns together, and k is .*64"):
        flashjit.attention(nope, latent, v_columns=48, q_rope=rope[..., :8])
    with pytest.raises(flashjit.InvalidArgument, match="must have one type"):
        flashjit.attention(nope, latent, v_columns=48, q_rope=rope.double())
    with pytest.raises(flashjit.WrongType, match="q_rope is a list"):
        flashjit.attention(nope, latent, v_columns=48, q_rope=[1.0])


def test_copies_are_made_of_both_where_strides_ask_for_it():
    q, latent = tensors(2, 3, 20, 64)
    turned = latent.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    assert (flashjit.attention(q, turned, v_columns=32) - exact(q, latent, 32)).abs().max() < LIMIT


@pytest.mark.parametrize("k", [None, [1.0]])
def test_v_columns_of_what_is_no_tensor(k):
    with pytest.raises(flashjit.WrongType, match="k is a"):
        flashjit.attention(torch.zeros(1, 1, 1, 16), k, v_columns=8)


def test_what_makes_no_sense_is_refused():
    q, latent = tensors(2, 3, 20, 64)
    with pytest.raises(flashjit.InvalidArgument, match="both given"):
        flashjit.attention(q, latent, latent, v_columns=32)
    with pytest.raises(flashjit.InvalidArgument, match="both missing"):
        flashjit.attention(q, latent)
    with pytest.raises(flashjit.InvalidArgument, match="v_columns is 65"):
        flashjit.attention(q, latent, v_columns=65)
    with pytest.raises(flashjit.InvalidArgument, match="multiple of 8"):
        flashjit.attention(q, latent, v_columns=30)


def test_q_in_two_tensors_over_latents_in_a_format():
    torch.manual_seed(4)
    q, latent = (torch.randn(2, *size, 576, device=DEVICE, dtype=DTYPE) for size in ((8, 3), (1, 20)))
    stored, _ = flashjit.quantize(latent, format="fp8_ds_mla")
    given = dict(v_columns=512, causal=True, k_format="fp8_ds_mla")
    nope, rope = in_parts(q, 512)
    assert torch.equal(
        flashjit.attention(nope, stored, q_rope=rope, **given), flashjit.attention(q, stored, **given)
    )

"""flashjit.flex_attention, called as PyTorch's flex_attention is, with PyTorch's objects: against PyTorch's own, and against
attention written out where PyTorch has nothing on the CPU (gradients, LSE)."""

import functools
import math

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import flashjit  # noqa: E402
from flashjit.flex_attention import (  # noqa: E402
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, S, D = 2, 4, 48, 16
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """PyTorch's function without its own torch.compile, which takes most of a test's time; and nothing compiled before."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch._dynamo.reset()


def tensors(queries=S, keys=None, heads_kv=H, dim=D, dim_v=None, batch_kv=B, dtype=torch.float32):
    torch.manual_seed(1)
    keys = keys or queries
    sizes = (B, H, queries, dim), (batch_kv, heads_kv, keys, dim), (batch_kv, heads_kv, keys, dim_v or dim)
    return [torch.randn(size, device=DEVICE, dtype=dtype) for size in sizes]


def blocks(mask_mod, queries=S, keys=None, size=16, batch=B):
    return create_block_mask(mask_mod, batch, H, queries, keys or queries, device=DEVICE, BLOCK_SIZE=size)


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=1e-4)


# --- The examples of PyTorch's documentation and of its articles on FlexAttention ------------------------------------


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(size):
    return and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= size)


def prefix_lm(lengths):
    return or_masks(lambda b, h, q_idx, kv_idx: kv_idx < lengths[b], causal)


def documents(mask_mod, lengths):
    """Sequences packed one behind the other, as a jagged tensor holds them."""
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    document = torch.repeat_interleave(
        torch.arange(len(lengths), device=DEVICE), torch.tensor(lengths, device=DEVICE)
    )

    def inside(b, h, q_idx, kv_idx):
        same = document[q_idx] == document[kv_idx]
        return same & mask_mod(b, h, q_idx - offsets[document[q_idx]], kv_idx - offsets[document[kv_idx]])

    return inside


def dilated(size, step):
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= size) & (distance % step == 0)

    return mask


def neighbourhood(width, height, reach):
    """A mask of a picture's pixels, row by row."""

    def mask(b, h, q_idx, kv_idx):
        return ((q_idx // width - kv_idx // width).abs() <= reach) & (
            (q_idx % width - kv_idx % width).abs() <= reach
        )

    assert width * height == S
    return mask


def paged(mask_mod):
    """Keys in pages that lie in any order, and a physical place is in no page: what PagedAttention's converted masks do."""
    logical = torch.randperm(S, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logical[::9] = -1

    def mask(b, h, q_idx, physical):
        found = logical[physical]
        return torch.where(found >= 0, mask_mod(b, h, q_idx, found), False)

    return mask


MASKS = {
    "no mask": lambda: noop_mask,
    "causal": lambda: causal,
    "sliding window": lambda: window(9),
    "prefix LM": lambda: prefix_lm(torch.tensor([7, 30], device=DEVICE)),
    "documents": lambda: documents(causal, [13, 1, 34]),
    "documents, whole": lambda: documents(noop_mask, [16, 16, 16]),
    "dilated window": lambda: dilated(14, 3),
    "neighbourhood": lambda: neighbourhood(8, 6, 2),
    "global and local": lambda: or_masks(window(5), lambda b, h, q_idx, kv_idx: kv_idx < 2),
    "causal from an offset": lambda: (
        lambda b, h, q_idx, kv_idx: q_idx + torch.tensor(5, device=DEVICE) >= kv_idx
    ),
    "pages": lambda: paged(causal),
    "by heads": lambda: (
        lambda b, h, q_idx, kv_idx: torch.where(h % 2 == 0, q_idx >= kv_idx, q_idx - kv_idx <= 4)
    ),
}


def alibi():
    slopes = torch.exp2(-torch.arange(1, H + 1, device=DEVICE) * (8.0 / H))
    return lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * slopes[h]


def bias(*size):
    return torch.randn(size, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))


SCORES = {
    "identity": lambda: lambda score, b, h, q_idx, kv_idx: score,
    "relative positions": lambda: lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "ALiBi": alibi,
    "soft-cap": lambda: lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20),
    "causal by -inf": lambda: (
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))
    ),
    "head bias": lambda: functools.partial(
        lambda table, score, b, h, q_idx, kv_idx: score + table[h], bias(H)
    ),
    "relative bias table": lambda: functools.partial(
        lambda table, score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + S], bias(H, 2 * S)
    ),
    "dense bias": lambda: functools.partial(
        lambda table, score, b, h, q_idx, kv_idx: score + table[b, h, q_idx, kv_idx], bias(B, H, S, S)
    ),
    "checkerboard": lambda: (
        lambda score, b, h, q_idx, kv_idx: torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    ),
    "squared": lambda: lambda score, b, h, q_idx, kv_idx: score * score,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_pytorch_s_examples(name, compiled):
    run = torch.compile(flex_attention, backend="eager", fullgraph=True) if compiled else flex_attention
    given = {"block_mask": blocks(MASKS[name]())} if name in MASKS else {"score_mod": SCORES[name]()}
    q, k, v = tensors()
    close(run(q, k, v, **given), flex.flex_attention(q, k, v, **given))
    if name in SCORES and not compiled:  # a score_mod and a mask together
        given["block_mask"] = blocks(window(20))
        close(run(q, k, v, **given), flex.flex_attention(q, k, v, **given))


# --- attn-gym, unchanged --------------------------------------------------------------------------------------------


def gym_masks(gym):
    """Queries, keys and mask of each of its masks."""
    masks = gym.masks
    offsets = torch.tensor([0, 10, 17, 48], device=DEVICE, dtype=torch.int32)
    topk = masks.compute_vsa_topk_indices(*tensors()[:2], tile_numel=8, top_k=2)
    sizes = torch.tensor([8, 8, 5, 8, 8, 3], device=DEVICE)
    intervals = torch.tensor([[0, 7], [1, 7], [7, 12]], device=DEVICE, dtype=torch.int32)
    tree = masks.build_tree_ancestor_matrix([-1, 0, 1, 1, 3, 3, 0], device=DEVICE)
    return {
        "causal": (S, S, masks.causal_mask),
        "natten": (36, 36, masks.generate_natten(6, 6, 3, 3)),
        "tiled natten": (36, 36, masks.generate_tiled_natten(6, 6, 3, 3, 2, 2)),
        "morton natten": (64, 64, masks.generate_morton_natten(8, 8, 3, 3)),
        "flamingo": (12, 9, masks.generate_vision_cross_attention_mask_mod(intervals, 3)),
        "tree": (7, 12, masks.generate_jetspec_tree_causal_mask_mod(5, tree)),
        "tree in training": (12, 17, masks.generate_jetspec_training_mask_mod(5, 4)),
        "batches": (S, S, masks.batchify_mask_mod(masks.causal_mask, 12)),
        "prefix LM": (S, S, masks.generate_prefix_lm_mask(10)),
        "documents": (S, S, masks.generate_doc_mask_mod(masks.causal_mask, offsets)),
        "packed documents": (S, S, masks.generate_packed_causal_doc_mask_mod(offsets)),
        "global window": (
            S,
            S,
            masks.generate_global_sliding_window(5, torch.arange(S, device=DEVICE) % 17 == 0),
        ),
        "spatial heads": (S, S, masks.generate_spatial_head_mask_mod(6, 6, 7, 2, True, 4)),
        "temporal heads": (S, S, masks.generate_temporal_head_mask_mod(6, 6, 7, 2)),
        "shared prefix": (
            S,
            S,
            masks.generate_shared_prefix_mask_mod(offsets, torch.tensor([0, 0, 0], device=DEVICE)),
        ),
        "dilated window": (S, S, masks.generate_dilated_sliding_window(12, 3)),
        "sliding window": (S, S, masks.generate_sliding_window(7)),
        "block diffusion": (S, S, masks.generate_block_diffusion_mask(24, 4)),
        "sliding tiles, 2-D": (68, 68, masks.generate_sta_mask_mod_2d((8, 8), (4, 4), (2, 2), 4)),
        "sliding tiles, 3-D": (68, 68, masks.generate_sta_mask_mod_3d((4, 4, 4), (2, 2, 2), (2, 2, 2), 4)),
        "video tiles": (S, S, masks.generate_vsa_mask_mod(topk, 8)),
        "video tiles of several sizes": (S, S, masks.generate_vsa_mask_mod(topk, 8, sizes)),
    }


def gym_scores(gym):
    mods = gym.mods
    torch.manual_seed(0)
    near = torch.rand(B, S, S) < 0.1
    types, lengths = mods.shortest_path_edge_types(near, torch.randint(0, 3, (B, S, S)), 3)
    return {
        "ALiBi": mods.generate_alibi_bias(H),
        "sandwich": mods.generate_sandwich_bias(H, S, device=DEVICE),
        "soft-cap": mods.generate_tanh_softcap(20),
        "soft-cap, approximate": mods.generate_tanh_softcap(20, approx=True),
        "gelu": mods.generate_activation_score_mod(torch.nn.functional.gelu),
        "relu": mods.generate_activation_score_mod(torch.relu),
        "graph distances": mods.generate_graphormer_spatial_bias(
            bias(H, 6), mods.shortest_path_distances(near, 4).to(DEVICE)
        ),
        "graph edges": mods.generate_graphormer_edge_bias(
            bias(H, 3, 3), types.to(DEVICE), lengths.to(DEVICE)
        ),
        "latent attention": mods.generate_mla_rope_score_mod(bias(B, H, S, 8), bias(B, 1, S, 8), H, 0.2),
    }


@pytest.fixture(scope="module")
def gym():
    return pytest.importorskip("attn_gym", reason="attn-gym")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attn_gym(gym, compiled):
    run = torch.compile(flex_attention, backend="eager", fullgraph=True) if compiled else flex_attention

    def compare(name, *given, **named):
        torch._dynamo.reset()
        torch.testing.assert_close(
            run(*given, **named),
            flex.flex_attention(*given, **named),
            atol=2e-5,
            rtol=1e-4,
            msg=lambda text: f"{name}: {text}",
        )

    for name, (queries, keys, mask_mod) in gym_masks(gym).items():
        compare(name, *tensors(queries, keys), block_mask=blocks(mask_mod, queries, keys))
    for name, score_mod in gym_scores(gym).items():
        compare(
            name,
            *tensors(heads_kv=1 if name == "latent attention" else H),
            score_mod=score_mod,
            enable_gqa=True,
        )


def test_a_tiled_neighbourhood_that_changes_under_torch_compile(gym):
    """More numbers become symbols than a program may capture: the rest stays as it is."""
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    for width, height in ((6, 6), (8, 8), (6, 8)):
        given, mask = tensors(width * height), gym.masks.generate_tiled_natten(width, height, 3, 3, 2, 2)
        mask = blocks(mask, width * height)
        close(compiled(*given, block_mask=mask), flex_attention(*given, block_mask=mask))


# --- What there is besides -----------------------------------------------------------------------------------------


def written_out(q, k, v, score_mod=None, mask_mod=None, scale=None, keep=None):
    """O and LSE in fp64, by PyTorch's vmap of the functions. keep: [b, hq, sq, skv], in the place of mask_mod."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        places = [torch.arange(size, device=q.device) for size in s.shape]
        for i in (3, 2, 1, 0):
            axes = [None] * 4
            axes[i] = 0
            score_mod = torch.vmap(score_mod, in_dims=(0, *axes))
        with TransformGetItemToIndex():  # PyTorch 2.10 takes no index from vmap otherwise
            s = score_mod(s, *places)
    if mask_mod is not None:
        keep = flex.create_mask(mask_mod, *s.shape, device=q.device)
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    return torch.nan_to_num(torch.softmax(s, 3)) @ v, torch.logsumexp(s, 3)


def test_attn_gym_s_block_masks(gym):
    """Made without create_block_mask(), with full and partial blocks; and with lists of those tiles alone that were chosen."""
    from attn_gym.masks import causal as gym_causal

    q, k, v = tensors()
    for separate in (False, True):
        mask = gym_causal.create_causal_block_mask_fast(B, H, S, S, DEVICE, 16, separate)
        close(flex_attention(q, k, v, block_mask=mask), flex.flex_attention(q, k, v, block_mask=mask))
    metadata = gym.masks.create_vsa_tile_metadata((3, 4, 5), (2, 2, 4), device=DEVICE)
    length, sizes = metadata.padded_seq_length, metadata.variable_block_sizes
    assert sizes.min() < sizes.max() == 16
    q, k, v = tensors(length)
    topk = gym.masks.compute_vsa_topk_indices(q, k, tile_numel=16, top_k=3)
    mask = gym.masks.create_vsa_block_mask(topk, 16, length // 16, sizes)
    keep = flex.create_mask(
        gym.masks.generate_vsa_mask_mod(topk, 16, sizes), B, H, length, length, device=DEVICE
    )
    close(flex_attention(q, k, v, block_mask=mask), written_out(q, k, v, keep=keep)[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_and_lse(compiled):
    """Also of LSE and of a captured table, and rows that have no key."""
    table = bias(H, 2 * S).requires_grad_()
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx % 11 != 3)
    score_mod = lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + S]
    q, k, v = (x.requires_grad_() for x in tensors(heads_kv=2))
    run = torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if compiled else flex_attention
    out, aux = run(q, k, v, score_mod, blocks(mask_mod), enable_gqa=True, return_aux=AuxRequest(lse=True))
    want, want_lse = written_out(q, k, v, score_mod, mask_mod)
    assert aux.max_scores is None and aux.lse.dtype == torch.float32
    close(out, want)
    close(aux.lse, want_lse)
    wanted = q, k, v, table
    loss = lambda o, lse: (o * o).sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()
    for got, exact in zip(
        torch.autograd.grad(loss(out, aux.lse), wanted), torch.autograd.grad(loss(want, want_lse), wanted)
    ):
        close(got, exact)


@pytest.mark.parametrize("wants_lse", [False, True])
def test_largest_scores(wants_lse):
    """After the score function, in natural units, -inf in rows without keys; O and LSE have their gradients."""
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx % 11 != 3)
    score_mod = lambda score, b, h, q_idx, kv_idx: 3 * score - kv_idx / 7
    q, k, v = (x.requires_grad_() for x in tensors())
    request = AuxRequest(lse=wants_lse, max_scores=True)
    out, aux = flex_attention(q, k, v, score_mod, blocks(mask_mod), return_aux=request)
    want, want_lse = written_out(q, k, v, score_mod, mask_mod)
    close(out, want)
    b, h, i, j = (
        torch.arange(n, device=DEVICE).view(*[-1 if d == at else 1 for d in range(4)])
        for at, n in enumerate((B, H, S, S))
    )
    scores = score_mod(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]), b, h, i, j)
    close(aux.max_scores, scores.masked_fill(~mask_mod(b, h, i, j), -math.inf).amax(3))
    assert aux.max_scores.dtype == torch.float32 and not aux.max_scores.requires_grad
    assert aux.lse is None if not wants_lse else close(aux.lse, want_lse) is None
    for got, exact in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))
    ):
        close(got, exact)


def test_what_is_returned():
    q, k, v = tensors()
    plain = flex_attention(q, k, v)
    out, lse = flex_attention(q, k, v, return_lse=True)
    named, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    without, nothing = flex_attention(q, k, v, return_aux=AuxRequest())
    assert type(aux) is type(nothing) is flex.AuxOutput and nothing == (None, None)
    assert all(torch.equal(plain, x) for x in (out, named, without)) and torch.equal(lse, aux.lse)
    close(lse, written_out(q, k, v)[1])
    assert out.stride() == flex.flex_attention(q, k, v).stride()
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)  # O lies in memory as Q does
    assert flex_attention(strided, k, v).stride() == strided.stride()


@pytest.mark.parametrize(
    "dim, dim_v, scale", [(16, 24, 0.3), (12, 20, None), (16, 16, 0.0), (16, 16, -0.5), (8, 3, -1.0)]
)
def test_sizes_and_scales(dim, dim_v, scale):
    q, k, v = tensors(dim=dim, dim_v=dim_v, keys=31)
    mask = blocks(causal, keys=31)
    out, lse = flex_attention(q, k, v, alibi(), mask, scale, return_lse=True)
    close(out, flex.flex_attention(q, k, v, alibi(), mask, scale))
    close(lse, written_out(q, k, v, alibi(), causal, scale)[1])


def test_keys_of_one_batch_serve_all():
    q, k, v = tensors(batch_kv=1)
    mask = blocks(lambda b, h, q_idx, kv_idx: kv_idx % 2 == b)
    close(flex_attention(q, k, v, block_mask=mask), flex.flex_attention(q, k, v, block_mask=mask))


def test_a_window_that_changes_under_torch_compile():
    """From its second value on the window is a symbol, which Dynamo compares with positions by itself: as False."""
    q, k, v = tensors()

    def run(q, k, v, number):
        mask_mod = lambda b, h, q_idx, kv_idx: (
            ((q_idx - kv_idx) % 5 == number)
            | (number + 1 == (kv_idx - q_idx) % 5)
            | (q_idx - kv_idx >= 4 * number)
            | (number > kv_idx)
            | (kv_idx != q_idx + number)
        )
        score_mod = lambda score, b, h, q_idx, kv_idx: score * ((q_idx - kv_idx) % 5 == number)
        return flex_attention(q, k, v, score_mod), flashjit.attention(q, k, v, mask_mod=mask_mod)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for number in (0, 1, 2, 3):
        for got, want in zip(compiled(q, k, v, number), run(q, k, v, number)):
            close(got, want)


def test_slices_of_a_block_mask():
    """Rows of blocks, with the mask_mod set anew: as generation one block at a time does it."""
    q, k, v = tensors()
    mask = blocks(causal)
    part = mask[:, :, 1]
    with pytest.raises(flashjit.InvalidArgument, match="slice"):
        flex_attention(q[:, :, 16:32], k, v, block_mask=part)
    for offset in (16, 9):  # the same object, with another mask_mod
        part.mask_mod = lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx
        keep = torch.ones(16, S, dtype=torch.bool, device=DEVICE).tril(offset) | (
            torch.arange(S, device=DEVICE) < 16
        )
        close(
            flex_attention(q[:, :, 16:32], k, v, block_mask=part),
            written_out(q[:, :, 16:32], k, v, keep=keep)[0],
        )


@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("inner", [causal, None])
def test_tables_that_list_fewer_blocks_than_there_are(inner, size):
    """As vLLM and sparse models make them: unsorted, an entry twice, empty rows, full and partial tables of other widths."""
    rows = -(-S // size)
    q, k, v = tensors()
    partial = torch.tensor([[2, 0], [1, 1], [-1, 7]][:rows], dtype=torch.int32, device=DEVICE)
    full = torch.tensor([[rows - 1], [0], [0]][:rows], dtype=torch.int32, device=DEVICE)
    counts = [torch.tensor(x[:rows], dtype=torch.int32, device=DEVICE) for x in ([2, 2, 0], [0, 1, 0])]
    mask = BlockMask.from_kv_blocks(
        *(x.expand(1, 1, *x.shape) for x in (counts[0], partial, counts[1], full)),
        BLOCK_SIZE=size,
        mask_mod=inner,
        seq_lengths=(S, S),
        compute_q_blocks=False,
    )
    place = torch.arange(S, device=DEVICE)
    pair = place[:, None] // size, place // size
    some, all_of = torch.zeros(2, 3, 3, dtype=torch.bool, device=DEVICE)
    some[0, 2], some[0, 0], some[1, 1], all_of[1, 0] = (True,) * 4
    seen = some[pair] if inner is None else some[pair] & (place[:, None] >= place)
    want = written_out(q, k, v, keep=seen | all_of[pair])[0]
    close(flex_attention(q, k, v, block_mask=mask), want.nan_to_num(0))


def test_kernel_options_change_nothing():
    q, k, v = tensors()
    options = {"BLOCK_M": 64, "num_warps": 8, "BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}
    assert torch.equal(flex_attention(q, k, v, kernel_options=options), flex_attention(q, k, v))


def test_other_names_are_pytorch_s():
    from flashjit import flex_attention as module

    assert (
        BlockMask is flex.BlockMask
        and module.create_mask is flex.create_mask
        and set(module.__all__) == set(flex.__all__)
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name


@pytest.mark.parametrize(
    "given, error, text",
    [
        (
            lambda q, k, v: dict(return_aux=AuxRequest(lse=True), return_lse=True),
            flashjit.InvalidArgument,
            "return_lse",
        ),
        (lambda q, k, v: dict(key=k[:, :2], value=v[:, :2]), flashjit.InvalidArgument, "enable_gqa"),
        (lambda q, k, v: dict(query=q[0]), flashjit.WrongType, "query"),
        (lambda q, k, v: dict(key=k.numpy(force=True)), flashjit.WrongType, "key"),
        (lambda q, k, v: dict(block_mask=torch.ones(S, S)), flashjit.WrongType, "block_mask"),
        (lambda q, k, v: dict(block_mask=blocks(causal, 64)), flashjit.InvalidArgument, "64 queries"),
    ],
)
def test_refusals_name_the_argument(given, error, text):
    q, k, v = tensors()
    with pytest.raises(error, match=text):
        flex_attention(**{"query": q, "key": k, "value": v, **given(q, k, v)})

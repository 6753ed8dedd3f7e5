"""FlashMLA's kernels for Hopper: decode over latents in pages, sparse decode over rows of 656 bytes (fp8_ds_mla), and sparse prefill;
beside them FlashInfer's decode over latents, where it is installed."""

import typing

import racing
import serving
from latent import DIM, PAGE, SCALE, V_DIM
from measuring import torch

GROUP = 128  # columns that share a scale
CHUNK = 64  # queries whose lists are gathered at a time for the reference


class Problem(typing.NamedTuple):
    kind: str  # decode, sparse decode, sparse prefill
    heads: int
    sequences: int
    queries: int
    keys: int
    top_k: int = 0

    @property
    def name(self):
        return (
            f"{self.kind}, {self.heads} heads, {self.sequences} x {self.queries} queries, {self.keys // 1024}k keys"
            + (f", top {self.top_k}" if self.top_k else "")
        )

    def row_bytes(self):
        return 656 if self.kind == "sparse decode" else 2 * DIM

    def rows_read(self):
        return self.sequences * (self.queries * self.top_k or self.keys)

    def operations(self):
        lengths = [self.top_k] * self.queries if self.top_k else [self.keys]
        seen = self.queries * self.top_k if self.top_k else racing.pairs([self.queries], lengths)
        return 2.0 * self.sequences * self.heads * seen * (DIM + V_DIM)


def problems():
    for heads, sequences, queries, keys in (
        (16, 128, 1, 4096),
        (64, 128, 1, 4096),
        (128, 128, 1, 4096),
        (128, 32, 1, 32768),
        (128, 128, 2, 4096),
    ):
        yield Problem("decode", heads, sequences, queries, keys)
    for heads in (64, 128):
        for sequences, queries in ((128, 1), (64, 2)):
            yield Problem("sparse decode", heads, sequences, queries, 32768, 2048)
        yield Problem("sparse prefill", heads, 1, 4096, 8192, 2048)


def decoded(rows):
    """fp32 [..., 576] of rows in the format fp8_ds_mla: 512 codes of e4m3, 4 scales in fp32, 64 columns of bf16."""
    codes = rows[..., :V_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., V_DIM : V_DIM + 16].contiguous().view(torch.float32)
    tail = rows[..., V_DIM + 16 :].contiguous().view(torch.bfloat16).float()
    scaled = codes.unflatten(-1, (-1, GROUP)) * scales[..., None]
    return torch.cat([scaled.flatten(-2), tail], -1)


def expected_of_lists(q, pool, lists):
    """O, fp32 [queries, heads, 512]. q: [queries, heads, 576]; pool: [rows, 576] or [rows, 656]; lists: [queries, top-k]."""
    found = []
    for some, of in zip(q.split(CHUNK), lists.split(CHUNK)):
        rows = pool[of.long()]
        rows = decoded(rows) if rows.dtype == torch.uint8 else rows.float()
        weights = (SCALE * torch.einsum("qhd,qkd->qhk", some.float(), rows)).softmax(-1)
        found.append(torch.einsum("qhk,qkd->qhd", weights, rows[..., :V_DIM]))
    return torch.cat(found)


def dense_calls(problem, q, flashjit, device):
    """who -> a function, of one copy of the cache; and O's reference. q: [sequences, queries, heads, 576]."""
    like = dict(device=device, dtype=torch.bfloat16)
    latents = torch.randn(problem.sequences, problem.keys, 1, DIM, **like)
    place = torch.randperm(problem.sequences * problem.keys // PAGE, device=device)
    pages = torch.empty(len(place), PAGE, 1, DIM, **like)
    pages[place] = latents.view(pages.shape)
    table = place.to(torch.int32).view(problem.sequences, -1)
    lengths = torch.full((problem.sequences,), problem.keys, device=device, dtype=torch.int32)
    heads_first = lambda x: x.transpose(1, 2)
    how = dict(v_columns=V_DIM, scale=SCALE, causal=True, page_table=table, kv_lengths=lengths)
    calls = {"flashjit": lambda: heads_first(flashjit.attention(heads_first(q), heads_first(pages), **how))}
    calls["FlashMLA"] = flash_mla(q, pages, block_table=table, cache_seqlens=lengths, causal=True)
    if problem.queries == 1:
        calls["FlashInfer MLA, fa3"] = flashinfer_mla(q, pages, table, lengths)
    expected = lambda: torch.stack(
        [
            racing.attention_in_fp32(q[i], latents[i], latents[i, ..., :V_DIM], scale=SCALE)
            for i in range(problem.sequences)
        ]
    )
    return calls, expected


def flash_mla(q, cache, block_table=None, cache_seqlens=None, **how):
    made = []

    def call():
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        if not made:  # its plan, which the first call fills
            made.append(get_mla_metadata()[0])
        return flash_mla_with_kvcache(
            q, cache, block_table, cache_seqlens, V_DIM, made[0], softmax_scale=SCALE, **how
        )[0]

    return call


def flashinfer_mla(q, pages, table, lengths):
    made = []

    def call():
        import flashinfer

        if not made:
            space = torch.zeros(256 << 20, dtype=torch.uint8, device=q.device)
            made.append(flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend="fa3"))
            count, each = table.shape
            starts = lambda step: torch.arange(count + 1, device=q.device, dtype=torch.int32) * step
            made[0].plan(
                starts(1),
                starts(each),
                table.flatten(),
                lengths,
                q.shape[2],
                V_DIM,
                DIM - V_DIM,
                PAGE,
                True,
                SCALE,
                q.dtype,
                q.dtype,
            )
        rows, queries = pages[:, :, 0], q[:, 0]
        return (
            made[0]
            .run(queries[..., :V_DIM], queries[..., V_DIM:], rows[..., :V_DIM], rows[..., V_DIM:])
            .view(*q.shape[:3], V_DIM)
        )

    return call


def sparse_calls(problem, q, flashjit, device):
    """Like dense_calls(): lists name rows of the whole pool, of a query's sequence alone."""
    rows = problem.sequences * problem.keys
    pool = torch.randn(1, 1, rows, DIM, device=device, dtype=torch.bfloat16)
    how = dict(v_columns=V_DIM, scale=SCALE)
    if problem.kind == "sparse decode":
        pool, _ = flashjit.quantize(pool, format="fp8_ds_mla")
        how["k_format"] = "fp8_ds_mla"
    count = problem.sequences * problem.queries
    lists = torch.rand(count, problem.keys, device=device).topk(problem.top_k).indices
    begin = torch.arange(problem.sequences, device=device).repeat_interleave(problem.queries) * problem.keys
    lists = (lists + begin[:, None]).to(torch.int32)
    flat = q.view(count, problem.heads, DIM)
    heads_first = flat.transpose(0, 1)[None]

    def ours():
        out = flashjit.attention(heads_first, pool, indices=lists[None, :, None], **how)
        return out[0].transpose(0, 1).view(*q.shape[:3], V_DIM)

    def sparse_prefill():
        from flash_mla import flash_mla_sparse_fwd

        return flash_mla_sparse_fwd(flat, pool.view(rows, 1, DIM), lists[:, None], SCALE)[0].view(
            *q.shape[:3], V_DIM
        )

    if problem.kind == "sparse prefill":
        theirs = sparse_prefill
    else:
        pages = pool.view(-1, PAGE, 1, pool.shape[-1])
        of = lists.view(problem.sequences, problem.queries, problem.top_k)
        theirs = flash_mla(q, pages, is_fp8_kvcache=True, indices=of)
    expected = lambda: expected_of_lists(flat, pool[0, 0], lists).view(*q.shape[:3], V_DIM)
    return {"flashjit": ours, "FlashMLA": theirs}, expected


def heat(problem, device="cuda"):
    import flashjit

    torch.manual_seed(problem.keys)
    q = torch.randn(
        problem.sequences, problem.queries, problem.heads, DIM, device=device, dtype=torch.bfloat16
    )
    make = sparse_calls if problem.top_k else dense_calls
    stored = problem.row_bytes() * problem.rows_read()
    calls, expected = {}, None
    for _ in range(max(1, -(-serving.IN_L2 // stored))):
        found, reference = make(problem, q, flashjit, device)
        expected = (reference(),) if expected is None else expected
        for who, call in found.items():
            calls.setdefault(who, []).append(call)
    return racing.Heat(problem.name, calls, expected, 0.01, problem.operations(), stored)


RACE = racing.Race(
    "latents",
    ("flash_mla",),
    "build FlashMLA: bash tools/bench/peers.sh latents",
    problems,
    heat,
    {"FlashMLA": "flash_mla", "FlashInfer": "flashinfer-python"},
)

"""FlashInfer's kernels for Hopper over pages of 16 rows: decode, prefill and both in one batch, also by POD."""

import typing

import racing
import serving
from measuring import torch

DIM, HEADS, HEADS_KV, PAGE = 128, 32, 8, 16
WORKSPACE = 256 << 20
POD, TWO_CALLS = "FlashInfer POD", "FlashInfer, two calls (fa3, fa2)"
APART = POD, TWO_CALLS  # which give O of prefills and of decodes apart


class Batch(typing.NamedTuple):
    """Sequences with so many queries and keys each."""

    name: str
    queries: list
    lengths: list
    e4m3: bool = False
    dim: int = DIM
    heads: int = HEADS

    def uniform(self):
        return len(set(self.queries)) == 1

    def prefills(self):
        return self.queries.count(max(self.queries))

    def prefill_rows(self):
        return sum(self.queries[: self.prefills()])

    def operations(self):
        return 4.0 * self.heads * self.dim * racing.pairs(self.queries, self.lengths)

    def kv_bytes(self):
        return (2 if self.e4m3 else 4) * self.dim * HEADS_KV * sum(self.lengths)


def batches():
    """Decode, prefill, and mixes, whose prefills come first."""
    for name, lengths in (
        ("64 x 4k", [4096] * 64),
        ("256 x 1k", [1024] * 256),
        ("128k and 31 x 1k", serving.LONG),
        ("64 of 128 to 32k", serving.log_uniform(64, 128, 32768)),
        ("1 x 8k", [8192]),
    ):
        yield Batch(f"decode, {name}", [1] * len(lengths), lengths)
    yield Batch("decode, 64 x 4k, e4m3 keys", [1] * 64, [4096] * 64, e4m3=True)
    yield Batch("decode, 64 x 4k, d64, 64 heads", [1] * 64, [4096] * 64, dim=64, heads=64)
    yield Batch("4 queries, 64 x 4k", [4] * 64, [4096] * 64)
    yield Batch("prefill, 4 x 4k", [4096] * 4, [4096] * 4)
    yield Batch("prefill, 512 of 16k, 4 times", [512] * 4, [16384] * 4)
    yield Batch("2 x 2k prefill, 128 x 2k decode", [2048] * 2 + [1] * 128, [2048] * 130)
    yield Batch("8 x 1k prefill, 56 x 4k decode", [1024] * 8 + [1] * 56, [1024] * 8 + [4096] * 56)


class Paged:
    """A copy of a batch's cache: K and V as [pages, rows, heads_kv, dim] in a random order, tables in rows and in CSR."""

    def __init__(self, batch, device="cuda"):
        cache = serving.Cache(
            serving.Problem(batch.name, batch.dim, batch.heads, HEADS_KV, 0, batch.lengths), device
        )
        self.batch, self.starts, self.lengths = batch, cache.starts, cache.lengths
        self.scales = [1.0, 1.0]
        if batch.e4m3:
            self.scales = [(x.abs().max().float() / 448).item() for x in (cache.k, cache.v)]
        self.rows = cache.k, cache.v
        self.k, self.v, self.table = cache.pages(PAGE)
        if batch.e4m3:
            self.k, self.v = (
                (x / scale).to(torch.float8_e4m3fn) for x, scale in zip((self.k, self.v), self.scales)
            )
        self.counts = [-(-length // PAGE) for length in batch.lengths]
        self.last = torch.tensor(
            [(length - 1) % PAGE + 1 for length in batch.lengths], device=device, dtype=torch.int32
        )

    def csr(self, begin=0, end=None):
        """indptr, indices and last_page_len of these sequences."""
        counts = self.counts[begin:end]
        indices = torch.cat([row[:count] for row, count in zip(self.table[begin:end], counts)])
        return racing.offsets(counts, indices.device), indices, self.last[begin:end]

    def expected(self, q):
        found, begin = [], 0
        for queries, start, length in zip(self.batch.queries, self.starts, self.batch.lengths):
            k, v = (x[start : start + length] for x in self.rows)
            found.append(racing.attention_in_fp32(q[begin : begin + queries], k, v))
            begin += queries
        return torch.cat(found)


def ours(flashjit, paged, q, begin=0, end=None):
    """A call of sequences begin to end, whose queries q is: [rows, heads, dim]."""
    batch, queries = paged.batch, paged.batch.queries[begin:end]
    where = dict(
        causal=True,
        page_table=paged.table[begin:end],
        kv_lengths=paged.lengths[begin:end],
        max_seqlen_kv=max(batch.lengths[begin:end]),
    )
    if batch.e4m3:
        scale = lambda x: torch.tensor([x], device=q.device)
        where |= dict(k_scale=scale(paged.scales[0]), v_scale=scale(paged.scales[1]))
    k, v = (x.transpose(1, 2) for x in (paged.k, paged.v))
    if len(set(queries)) == 1:
        heads_first = q.view(len(queries), queries[0], *q.shape[1:]).transpose(1, 2)
        return lambda: flashjit.attention(heads_first, k, v, **where).transpose(1, 2).reshape(q.shape)
    packed = q.transpose(0, 1)[None]
    where |= dict(cu_seqlens_q=racing.offsets(queries, q.device), max_seqlen_q=max(queries))
    return lambda: flashjit.attention(packed, k, v, **where)[0].transpose(0, 1)


def decode(flashinfer, paged, workspace, tensor_cores):
    batch = paged.batch
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        *paged.csr(),
        batch.heads,
        HEADS_KV,
        batch.dim,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=paged.k.dtype,
    )
    scales = dict(k_scale=paged.scales[0], v_scale=paged.scales[1]) if batch.e4m3 else {}
    return lambda q: wrapper.run(q, (paged.k, paged.v), **scales)


def prefill(flashinfer, paged, workspace, backend, begin=0, end=None):
    batch = paged.batch
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        racing.offsets(batch.queries[begin:end], workspace.device),
        *paged.csr(begin, end),
        batch.heads,
        HEADS_KV,
        batch.dim,
        PAGE,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=paged.k.dtype,
    )
    return lambda q: wrapper.run(q, (paged.k, paged.v))


def persistent(flashinfer, paged):
    batch = paged.batch
    wrapper = flashinfer.BatchAttention("NHD", str(paged.k.device))
    wrapper.plan(
        racing.offsets(batch.queries, paged.k.device),
        *paged.csr()[:2],
        paged.lengths,
        batch.heads,
        HEADS_KV,
        batch.dim,
        batch.dim,
        PAGE,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda q: wrapper.run(q, (paged.k, paged.v))[0]


def pod(flashinfer, paged, workspace):
    """Prefills and decodes in one kernel, whose parts share each multiprocessor."""
    batch, rows = paged.batch, paged.batch.prefill_rows()
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace, "NHD")
    parts = []
    for begin, end in ((0, batch.prefills()), (batch.prefills(), None)):
        parts += [racing.offsets(batch.queries[begin:end], workspace.device), *paged.csr(begin, end)]
    wrapper.plan(
        *parts,
        batch.heads,
        HEADS_KV,
        batch.dim,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    cache = paged.k, paged.v
    return lambda q: wrapper.run(q[:rows], cache, q[rows:], cache, causal_p=True)


def theirs(flashinfer, paged, workspace):
    """who -> a function that makes its call of q."""
    batch = paged.batch
    if batch.uniform() and batch.queries[0] == 1:
        return {
            "FlashInfer decode": lambda: decode(flashinfer, paged, workspace, False),
            "FlashInfer decode, tensor cores": lambda: decode(flashinfer, paged, workspace, True),
        }
    found = {
        f"FlashInfer prefill, {backend}": lambda backend=backend: prefill(
            flashinfer, paged, workspace, backend
        )
        for backend in ("fa2", "fa3")
    }
    if batch.uniform():
        return found
    rows, prefills, other = batch.prefill_rows(), batch.prefills(), torch.zeros_like(workspace)

    def two():
        first = prefill(flashinfer, paged, workspace, "fa3", 0, prefills)
        second = prefill(flashinfer, paged, other, "fa2", prefills)
        return lambda q: (first(q[:rows]), second(q[rows:]))

    return found | {
        "FlashInfer BatchAttention": lambda: persistent(flashinfer, paged),
        POD: lambda: pod(flashinfer, paged, workspace),
        TWO_CALLS: two,
    }


def called(make, q):
    """Their call, planned when it is first made: what cannot be planned is left out of the race, like what cannot run."""
    made = []

    def call():
        if not made:
            made.append(make())
        return made[0](q)

    return call


def in_parts(call, rows):
    """A call of all, whose O is given as the prefills' and the decodes'."""
    return lambda: (lambda out: (out[:rows], out[rows:]))(call())


def heat(batch, device="cuda"):
    import flashinfer
    import flashjit

    torch.manual_seed(len(batch.lengths))
    copies = [Paged(batch, device) for _ in range(max(1, -(-serving.IN_L2 // batch.kv_bytes())))]
    q = torch.randn(sum(batch.queries), batch.heads, batch.dim, device=device, dtype=torch.bfloat16)
    calls = {"flashjit": [ours(flashjit, paged, q) for paged in copies]}
    for paged in copies:
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        for who, make in theirs(flashinfer, paged, workspace).items():
            calls.setdefault(who, []).append(called(make, q))
    expected = (copies[0].expected(q),)
    if not batch.uniform():
        rows, prefills = batch.prefill_rows(), batch.prefills()
        expected = expected[0][:rows], expected[0][rows:]
        calls = {
            who: [call if who in APART else in_parts(call, rows) for call in functions]
            for who, functions in calls.items()
        }
        first = ours(flashjit, copies[0], q[:rows], 0, prefills)
        second = ours(flashjit, copies[0], q[rows:], prefills)
        calls["flashjit, two calls"] = [lambda: (first(), second())]
    limit = 0.08 if batch.e4m3 else 0.01
    return racing.Heat(batch.name, calls, expected, limit, batch.operations(), batch.kv_bytes())


RACE = racing.Race(
    "flashinfer",
    ("flashinfer",),
    "pip install flashinfer-python",
    batches,
    heat,
    {"FlashInfer": "flashinfer-python"},
)

"""flashjit.sglang's backend over a stand-in of SGLang's interface, against fp64."""

import types

import pytest

torch = pytest.importorskip("torch")

import exact_attention  # noqa: E402
import flashjit  # noqa: E402
import sglang_standin  # noqa: E402
from sglang_standin import AttentionArch, ForwardMode  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HQ, HKV, DIM, CONTEXT = 4, 2, 32, 64
OLD, NEW = (20, 0, 3), (5, 18, 4)


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    torch.manual_seed(0)
    sglang_standin.install(monkeypatch)


def normal(*size):
    return torch.randn(*size, device=DEVICE)


class Server:
    """A runner with requests in the rows 3, 0 and 2 of its table, whose pages are scattered."""

    def __init__(self, page, latent=False, dtype=torch.float32, translated=False, **arguments):
        self.page, self.dtype = page, dtype
        heads, dim = (1, 80) if latent else (HKV, DIM)
        pool = sglang_standin.Pool(CONTEXT * 6, heads, dim, DIM, dtype, DEVICE)
        if translated:
            pool.translate_loc_from_full_to_swa = lambda tokens: (
                CONTEXT * 6 - page - tokens // page * page + tokens % page
            )
        order = torch.randperm(CONTEXT * 5 // page, device=DEVICE).int()
        pages = order[: 5 * (CONTEXT // page)].view(5, -1)
        tokens = pages[..., None] * page + torch.arange(page, device=DEVICE, dtype=torch.int32)
        self.runner = types.SimpleNamespace(
            page_size=page,
            device=DEVICE,
            dtype=torch.float32,
            kv_cache_dtype=dtype,
            token_to_kv_pool=pool,
            req_to_token_pool=types.SimpleNamespace(req_to_token=tokens.flatten(1)),
            model_config=types.SimpleNamespace(
                context_len=CONTEXT,
                head_dim=DIM,
                attention_arch=AttentionArch.MLA if latent else AttentionArch.MHA,
                kv_lora_rank=64,
                qk_rope_head_dim=16,
                is_encoder_decoder=False,
            ),
            server_args=types.SimpleNamespace(
                **{"speculative_num_draft_tokens": None, "speculative_eagle_topk": None, **arguments}
            ),
        )
        self.requests = torch.tensor([3, 0, 2], device=DEVICE)

    def backend(self):
        from flashjit.sglang import register

        register()
        return sglang_standin.registered["flashjit"](self.runner)

    def tokens(self, i, first, last):
        return self.runner.req_to_token_pool.req_to_token[self.requests[i], first:last].long()

    def step(self, mode, old, new):
        """A batch whose requests have `old` keys and `new` tokens each."""
        held = list(old) if mode is ForwardMode.TARGET_VERIFY else [a + b for a, b in zip(old, new)]
        lengths = torch.tensor(held, device=DEVICE)
        return types.SimpleNamespace(
            forward_mode=mode,
            batch_size=len(new),
            seq_lens=lengths,
            seq_lens_cpu=lengths.cpu(),
            req_pool_indices=self.requests[: len(new)],
            extend_seq_lens=torch.tensor(new, device=DEVICE),
            extend_seq_lens_cpu=list(new),
            extend_prefix_lens_cpu=list(old),
            positions=torch.zeros(sum(new)),
            spec_info=None,
            out_cache_loc=torch.cat([self.tokens(i, a, a + b) for i, (a, b) in enumerate(zip(old, new))]),
        )


def layer(**options):
    return types.SimpleNamespace(
        **{
            "layer_id": 0,
            "tp_q_head_num": HQ,
            "tp_k_head_num": HKV,
            "tp_v_head_num": HKV,
            "qk_head_dim": DIM,
            "v_head_dim": DIM,
            "scaling": 0.2,
            "sliding_window_size": -1,
            "logit_cap": 0.0,
            "k_scale": None,
            "v_scale": None,
            "attn_type": sglang_standin.AttentionType.DECODER,
            **options,
        }
    )


class Sequences:
    """K and V of each request, [keys, hkv, d]."""

    def __init__(self, keys=CONTEXT):
        self.k, self.v = ([normal(keys, HKV, DIM) for _ in OLD] for _ in range(2))

    def rows(self, old, new):
        """K and V of a step's tokens, as SGLang hands them on."""
        cut = lambda xs: torch.cat([x[a : a + b] for x, a, b in zip(xs, old, new)]).flatten(1)
        return cut(self.k), cut(self.v)

    def check(self, out, q, old, new, tolerance=1e-5, seen=lambda i: None, **options):
        first = 0
        for i, (a, b) in enumerate(zip(old, new)):
            wanted, _ = exact_attention.exact(
                q.view(-1, HQ, DIM)[first : first + b],
                self.k[i][: a + b],
                self.v[i][: a + b],
                scale=0.2,
                seen=seen(i),
                **options,
            )
            found = out.view(-1, HQ, DIM)[first : first + b]
            torch.testing.assert_close(found.double().cpu(), wanted, rtol=tolerance, atol=tolerance)
            first += b


def store_old(server, backend, sequences, given):
    """What earlier steps left in the pool."""
    if any(OLD):
        step = server.step(ForwardMode.EXTEND, [0] * len(OLD), OLD)
        k, v = sequences.rows([0] * len(OLD), OLD)
        backend._store(given, step, k, v, None)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    "options, wanted",
    [({}, {}), ({"sliding_window_size": 4}, {"window": 4}), ({"logit_cap": 1.5}, {"cap": 1.5})],
)
def test_extend_then_decode(page, options, wanted):
    server, sequences, given = Server(page), Sequences(), layer(**options)
    backend = server.backend()
    store_old(server, backend, sequences, given)
    for mode, old, new in (
        (ForwardMode.EXTEND, OLD, NEW),
        (ForwardMode.DECODE, [a + b for a, b in zip(OLD, NEW)], (1, 1, 1)),
    ):
        step = server.step(mode, old, new)
        backend.init_forward_metadata(step)
        q = normal(sum(new), HQ * DIM)
        run = backend.forward_decode if mode is ForwardMode.DECODE else backend.forward_extend
        out, lse = run(q, *sequences.rows(old, new), given, step, return_lse=True)
        assert out.shape == q.shape and lse.shape == (sum(new), HQ)
        sequences.check(out, q, old, new, causal=True, **wanted)


def test_sinks_and_layers_that_look_both_ways():
    server, sequences = Server(1), Sequences()
    backend, sinks = server.backend(), normal(HQ)
    step = server.step(ForwardMode.EXTEND, (0, 0, 0), NEW)
    backend.init_forward_metadata(step)
    q = normal(sum(NEW), HQ * DIM)
    rows = sequences.rows((0, 0, 0), NEW)
    out = backend.forward_extend(q, *rows, layer(), step, sinks=sinks)
    sequences.check(out, q, (0, 0, 0), NEW, causal=True, sinks=sinks)
    both = layer(layer_id=1, attn_type=sglang_standin.AttentionType.ENCODER_ONLY)
    out = backend.forward_extend(q, *rows, both, step)
    sequences.check(out, q, (0, 0, 0), NEW)


@pytest.mark.parametrize("page", [1, 16])
def test_a_graph_reads_each_steps_tokens(page):
    """A graph repeats what init_forward_metadata_in_graph() and the layers launch; here they are called again."""
    server, sequences, given = Server(page), Sequences(), layer()
    backend = server.backend()
    backend.init_cuda_graph_state(4, 4)
    store_old(server, backend, sequences, given)
    step = server.step(ForwardMode.DECODE, OLD, (1, 1, 1))
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    captured = backend.batch
    for add in (0, 1):
        old = [n + add for n in OLD]
        now = server.step(ForwardMode.DECODE, old, (1, 1, 1))
        step.seq_lens.copy_(now.seq_lens)
        step.out_cache_loc.copy_(now.out_cache_loc)
        backend.init_forward_metadata_out_graph(step)
        backend.init_forward_metadata_in_graph(step)
        assert [x.data_ptr() for x in backend.batch[:3]] == [x.data_ptr() for x in captured[:3]]
        assert backend.batch[3:] == captured[3:]
        q = normal(3, HQ * DIM)
        out = backend.forward_decode(q, *sequences.rows(old, (1, 1, 1)), given, step)
        sequences.check(out, q, old, (1, 1, 1), causal=True)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_a_chain_of_drafts_is_verified():
    server, sequences, given = Server(1, speculative_num_draft_tokens=3), Sequences(), layer()
    backend = server.backend()
    store_old(server, backend, sequences, given)
    new = (3, 3, 3)
    step = server.step(ForwardMode.TARGET_VERIFY, OLD, new)
    backend.init_forward_metadata(step)
    q = normal(9, HQ * DIM)
    out = backend.forward_extend(q, *sequences.rows(OLD, new), given, step)
    sequences.check(out, q, OLD, new, causal=True)


PARENTS = ([-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0], [-1, 0, 1, 2, 3])  # of each request's drafts


class Trees:
    """Drafts that may have siblings, as SGLang's EAGLE and n-gram workers describe them."""

    tree_topk, drafts = 2, len(PARENTS[0])

    def __init__(self, server, whole, count=len(OLD)):
        self.own = [torch.eye(self.drafts, dtype=torch.bool) for _ in PARENTS]
        for own, parents in zip(self.own, PARENTS):
            for draft, parent in enumerate(parents[1:], 1):
                own[draft] |= own[parent]
        rows = [torch.cat((torch.ones(self.drafts, n).bool(), own), 1) for n, own in zip(OLD, self.own)]
        rows = rows if whole else self.own
        self.custom_mask = torch.cat([x.flatten() for x in rows[:count]]).to(DEVICE)
        self.num_tokens_per_req = self.drafts
        self.step = server.step(ForwardMode.TARGET_VERIFY, OLD, (self.drafts,) * len(OLD))
        self.step.spec_info = self

    def seen(self, window):
        """A draft is as far from a key as it is deep."""

        def of_request(i):
            depth = self.own[i].sum(1) - 1
            seen = torch.cat((torch.ones(self.drafts, OLD[i]).bool(), self.own[i]), 1)
            at = torch.cat((torch.arange(OLD[i]), OLD[i] + depth))
            return seen & (at >= OLD[i] + depth[:, None] - window) if window > -1 else seen

        return of_request


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize("graph", [False, True])
def test_a_tree_of_drafts_is_verified(whole, window, graph):
    options = {"speculative_num_draft_tokens": Trees.drafts, "speculative_eagle_topk": 2}
    server, sequences, given = Server(1, **options), Sequences(), layer(sliding_window_size=window)
    backend = server.backend()
    store_old(server, backend, sequences, given)
    trees, new = Trees(server, whole), (Trees.drafts,) * len(OLD)
    if graph:
        backend.init_cuda_graph_state(4, 4 * Trees.drafts)
        backend.init_forward_metadata_out_graph(trees.step, in_capture=True)
        captured = backend.batch.tree
        drafted, trees.custom_mask = trees.custom_mask, torch.ones_like(trees.custom_mask)
        backend.init_forward_metadata_out_graph(trees.step)
        trees.custom_mask = drafted
        backend.update_verify_buffers_to_fill_after_draft(trees, 3)
        backend.init_forward_metadata_in_graph(trees.step)
        assert [x.data_ptr() for x in backend.batch.tree] == [x.data_ptr() for x in captured]
    else:
        backend.init_forward_metadata(trees.step)
        backend.update_verify_buffers_to_fill_after_draft(trees, None)
    q = normal(sum(new), HQ * DIM)
    out = backend.forward_extend(q, *sequences.rows(OLD, new), given, trees.step)
    sequences.check(out, q, OLD, new, seen=trees.seen(window))


def test_a_graph_of_trees_may_have_more_sequences_than_the_step():
    options = {"speculative_num_draft_tokens": Trees.drafts, "speculative_eagle_topk": 2}
    server, sequences, given = Server(1, **options), Sequences(), layer()
    backend = server.backend()
    store_old(server, backend, sequences, given)
    trees, new = Trees(server, True, count=2), (Trees.drafts,) * len(OLD)
    backend.init_cuda_graph_state(4, 4 * Trees.drafts)
    backend.init_forward_metadata_out_graph(trees.step)
    backend.init_forward_metadata_in_graph(trees.step)
    q = normal(sum(new), HQ * DIM)
    out = backend.forward_extend(q, *sequences.rows(OLD, new), given, trees.step)
    sequences.check(out, q, OLD[:2], new[:2], seen=trees.seen(-1))
    trees.custom_mask = trees.custom_mask[:3]
    with pytest.raises(flashjit.InvalidArgument, match="custom_mask has 3 elements"):
        backend.init_forward_metadata(trees.step)
    with pytest.raises(flashjit.Unsupported, match="window is 2, and speculative_num_draft_tokens 5"):
        backend.forward_extend(q, None, None, layer(layer_id=1, sliding_window_size=2), trees.step)


class Drafts:
    """A draft model's server: requests with OLD keys, each with `topk` branches of `steps` tokens."""

    def __init__(self, page, topk, steps):
        self.topk, self.steps = topk, steps
        options = {"speculative_num_draft_tokens": steps + 1, "speculative_eagle_topk": topk}
        self.server = Server(page, **options)
        self.server.runner.is_draft_worker = True
        self.server.runner.draft_attention_backend = "flashjit"
        self.target = self.server.backend()  # which registers the name
        self.factory = sglang_standin.DraftBackendFactory(self.server.runner, topk, steps)
        self.keys = [Sequences() for _ in range(topk)]  # of each branch
        for branch in self.keys[1:]:
            for own, common in ((branch.k, self.keys[0].k), (branch.v, self.keys[0].v)):
                for x, y, n in zip(own, common, OLD):
                    x[:n] = y[:n]
        store_old(self.server, self.target, self.keys[0], layer())
        self.step = self.server.step(ForwardMode.DECODE, OLD, (1,) * len(OLD))
        self.step.seq_lens, self.step.seq_lens_cpu = (
            torch.tensor(OLD, device=device) for device in (DEVICE, "cpu")
        )
        self.step.spec_info = types.SimpleNamespace(tree_topk=topk)
        self.places = torch.stack([self._places(i) for i in range(len(OLD))])
        self.step.out_cache_loc = self.places.flatten()

    def _places(self, i):
        """[topk, steps]: a chain's behind the request's; of several branches in pages of their own, with the last keys again."""
        old, page, pool = OLD[i], self.server.page, self.server.runner.token_to_kv_pool
        if self.topk == 1:
            return self.server.tokens(i, old, old + self.steps)[None]
        first, width = old // page * page, -(-(old % page + self.steps) // page) * page
        rows = []
        for branch in range(self.topk):
            own = self.server.tokens(i, first + branch * width, first + (branch + 1) * width)
            for x in (pool.k, pool.v):
                x[own[: old % page]] = x[self.server.tokens(i, first, old)]
            rows.append(own[old % page :][: self.steps])
        return torch.stack(rows)

    def decode(self, backend, step):
        """A step of all branches, against fp64."""
        q = normal(len(OLD) * self.topk, HQ * DIM)
        at = [n + step for n in OLD]
        rows = [[getattr(x, name) for x in self.keys] for name in "kv"]
        k, v = (
            torch.stack([branch[i][n] for i, n in enumerate(at) for branch in of_branches]).flatten(1)
            for of_branches in rows
        )
        now = types.SimpleNamespace(**vars(self.step))
        now.out_cache_loc = self.places[..., step].flatten()
        out = backend.forward_decode(q, k, v, layer(), now)
        for branch, keys in enumerate(self.keys):
            own = slice(branch, None, self.topk)
            keys.check(out[own], q[own], at, (1, 1, 1), causal=True)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("page, topk", [(1, 1), (16, 1), (1, 3), (4, 2)])
def test_a_draft_decodes_step_by_step(page, topk, graph):
    drafts = Drafts(page, topk, steps=4)
    steps = drafts.factory.create_decode_backend()
    assert steps.decode_attention_backend_str == "flashjit" and len(steps.attn_backends) == 3
    assert not steps.needs_cpu_seq_lens
    if graph:
        steps.init_cuda_graph_state(4, 4 * topk)
        steps.init_forward_metadata_out_graph(drafts.step, in_capture=True)
        captured = [x.batch for x in steps.attn_backends]
        steps.init_forward_metadata_out_graph(drafts.step)
        steps.init_forward_metadata_in_graph(drafts.step)
        for before, now in zip(captured, steps.attn_backends):
            assert [x.data_ptr() for x in now.batch[:3]] == [x.data_ptr() for x in before[:3]]
            assert now.batch[3:] == before[3:] and now.batch.most_q == 1
    else:
        steps.init_forward_metadata(drafts.step)
    for number, backend in enumerate(steps.attn_backends):
        drafts.decode(backend, number)


@pytest.mark.parametrize("graph", [False, True])
def test_a_draft_is_extended_by_what_was_verified(graph):
    """Each request extends by a fixed number of tokens; SGLang drops some of them afterwards."""
    drafts, new = Drafts(1, 1, steps=4), (5, 5, 5)
    backend = drafts.factory.create_draft_extend_backend()
    step = drafts.server.step(ForwardMode.DRAFT_EXTEND_V2, OLD, new)
    step.spec_info = types.SimpleNamespace(num_tokens_per_req=5)
    if graph:
        backend.init_cuda_graph_state(4, 20)
        view = types.SimpleNamespace(**vars(step))
        del view.extend_seq_lens, view.extend_seq_lens_cpu, view.positions  # as SGLang has it before a replay
        backend.init_forward_metadata_out_graph(view)
        backend.init_forward_metadata_in_graph(step)
    else:
        backend.init_forward_metadata(step)
    q, keys = normal(15, HQ * DIM), drafts.keys[0]
    out = backend.forward_extend(q, *keys.rows(OLD, new), layer(), step)
    keys.check(out, q, OLD, new, causal=True)


def test_other_backends_of_drafts_are_left_to_sglang():
    drafts = Drafts(1, 2, steps=3)
    drafts.server.runner.draft_attention_backend = "other"
    with pytest.raises(ValueError, match="no other"):
        drafts.factory.create_decode_backend()
    assert not drafts.target.trees  # a draft model verifies none, and so has windows of any size


def test_fp8_pools_with_scales():
    server, sequences = Server(16, dtype=torch.float8_e4m3fn), Sequences()
    given = layer(k_scale=torch.tensor(0.5, device=DEVICE), v_scale=torch.tensor(2.0, device=DEVICE))
    backend = server.backend()
    store_old(server, backend, sequences, given)
    step = server.step(ForwardMode.EXTEND, OLD, NEW)
    backend.init_forward_metadata(step)
    q = normal(sum(NEW), HQ * DIM)
    out = backend.forward_extend(q, *sequences.rows(OLD, NEW), given, step)
    rounded = [(x / 0.5).to(torch.float8_e4m3fn).float() * 0.5 for x in sequences.k]
    sequences.k, sequences.v = rounded, [(x / 2).to(torch.float8_e4m3fn).float() * 2 for x in sequences.v]
    sequences.check(out, q, OLD, NEW, causal=True)


@pytest.mark.parametrize("graph", [False, True])
def test_windows_may_have_a_pool_of_their_own(graph):
    server, sequences = Server(16, translated=True), Sequences()
    given = layer(sliding_window_size=4)
    backend, pool = server.backend(), server.runner.token_to_kv_pool
    write = pool.set_kv_buffer
    pool.set_kv_buffer = lambda layer, where, *rest: write(
        layer, types.SimpleNamespace(loc=where.swa_loc), *rest
    )
    store_old(server, backend, sequences, given)
    new = (1, 1, 1)
    step = server.step(ForwardMode.DECODE, OLD, new)
    if graph:
        backend.init_cuda_graph_state(4, 4)
        backend.init_forward_metadata_out_graph(step)
        backend.init_forward_metadata_in_graph(step)
    else:
        backend.init_forward_metadata(step)
    q = normal(3, HQ * DIM)
    out = backend.forward_decode(q, *sequences.rows(OLD, new), given, step)
    sequences.check(out, q, OLD, new, causal=True, window=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page", [1, 16])
def test_latent_attention(page, dtype):
    server = Server(page, latent=True, dtype=dtype)
    backend, rank, columns, heads = server.backend(), 64, 80, 3
    given = layer(
        tp_q_head_num=heads,
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=columns,
        v_head_dim=rank,
        scaling=0.1,
    )
    keys = [normal(30, 1, columns).to(dtype).float() for _ in OLD]
    for mode, old, new in (
        (ForwardMode.EXTEND, (0, 0, 0), (9, 4, 6)),
        (ForwardMode.DECODE, (9, 4, 6), (1, 1, 1)),
    ):
        step = server.step(mode, old, new)
        backend.init_forward_metadata(step)
        rows = torch.cat([x[a : a + b] for x, a, b in zip(keys, old, new)])
        q = normal(sum(new), heads, columns)
        out = backend.forward_extend(
            q[..., :rank].flatten(1),
            rows[..., :rank],
            rows[..., :rank],
            given,
            step,
            True,
            q[..., rank:],
            rows[..., rank:],
        )
        first = 0
        for i, (a, b) in enumerate(zip(old, new)):
            part, x = slice(first, first + b), keys[i][: a + b]
            wanted, _ = exact_attention.exact(q[part], x, x[..., :rank], scale=0.1, causal=True)
            torch.testing.assert_close(out[part].double().cpu(), wanted.flatten(1), rtol=1e-5, atol=1e-5)
            first += b


def test_a_latent_prefill_that_is_not_absorbed():
    server = Server(1, latent=True)
    backend, new = server.backend(), (9, 4, 6)
    given = layer(tp_k_head_num=HQ, tp_v_head_num=HQ, qk_head_dim=DIM + 16, v_head_dim=DIM)
    step = server.step(ForwardMode.EXTEND, (0, 0, 0), new)
    q, k, v = normal(sum(new), HQ, DIM + 16), normal(sum(new), HQ, DIM + 16), normal(sum(new), HQ, DIM)
    with pytest.raises(flashjit.InvalidArgument, match="before init_forward_metadata"):
        backend.forward_extend(q.flatten(1), k, v, given, step, save_kv_cache=False)
    backend.init_forward_metadata(step)
    with pytest.raises(flashjit.InvalidArgument, match="k or v is None"):
        backend.forward_extend(q.flatten(1), None, v, given, step, save_kv_cache=False)
    out = backend.forward_extend(q.flatten(1), k, v, given, step, save_kv_cache=False)
    first = 0
    for b in new:
        part = slice(first, first + b)
        wanted, _ = exact_attention.exact(q[part], k[part], v[part], scale=0.2, causal=True)
        torch.testing.assert_close(out[part].double().cpu(), wanted.flatten(1), rtol=1e-5, atol=1e-5)
        first += b
    step.extend_prefix_lens_cpu = [2, 0, 0]
    with pytest.raises(flashjit.Unsupported, match="disable-chunked-prefix-cache"):
        backend.forward_extend(q.flatten(1), k, v, given, step, save_kv_cache=False)


@pytest.mark.parametrize(
    "change, why",
    [
        (
            lambda s: vars(s.runner.server_args).update(
                speculative_eagle_topk=4, speculative_num_draft_tokens=65
            ),
            "trees have at most 64 drafts",
        ),
        (lambda s: setattr(s.runner.model_config, "is_encoder_decoder", True), "cross attention"),
        (lambda s: setattr(s.runner, "attention_chunk_size", 8), "chunked local attention"),
        (
            lambda s: setattr(s.runner.model_config, "head_dim", 100),
            "head_dim is 100; it must be a multiple of 8",
        ),
        (lambda s: setattr(s.runner, "kv_cache_dtype", torch.uint8), "no cache of the type torch.uint8"),
    ],
)
def test_what_cannot_be_served_is_refused_when_the_model_is_loaded(change, why):
    server = Server(1)
    change(server)
    with pytest.raises(flashjit.Unsupported, match=why):
        server.backend()


def test_registering_adds_the_name():
    Server(1).backend()
    assert "flashjit" in sglang_standin.registered
    assert all("flashjit" in names for names in sglang_standin.chosen.values())
    server = Server(1)
    with pytest.raises(flashjit.Unsupported, match="score_mod: flashjit.sglang does not have it"):
        server.backend().forward_decode(None, None, None, layer(), None, score_mod=print)


def without_requests(mode):
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    return types.SimpleNamespace(
        forward_mode=mode,
        batch_size=0,
        seq_lens=none,
        seq_lens_cpu=none.cpu(),
        req_pool_indices=none,
        extend_seq_lens=none,
        extend_seq_lens_cpu=[],
        extend_prefix_lens_cpu=[],
        positions=none,
        spec_info=None,
        out_cache_loc=none,
    )


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("mode", ForwardMode)
def test_a_step_without_requests(page, latent, mode):
    server = Server(page, latent=latent, speculative_num_draft_tokens=3)
    backend, step = server.backend(), without_requests(mode)
    backend.init_forward_metadata(step)
    if latent:
        given = layer(tp_k_head_num=1, tp_v_head_num=1, qk_head_dim=80, v_head_dim=64)
        rows = (normal(0, 1, 64), normal(0, 1, 64), given, step, True, normal(0, HQ, 16), normal(0, 1, 16))
    else:
        given = layer()
        rows = (normal(0, HKV * DIM), normal(0, HKV * DIM), given, step)
    out, lse = backend.forward_extend(normal(0, HQ * given.v_head_dim), *rows, return_lse=True)
    assert out.shape == (0, HQ * given.v_head_dim) and lse.shape == (0, HQ)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    "old, new",
    [((20, 0, 3), (5, 0, 4)), ((20, 4, 3), (0, 0, 4)), ((20, 0, 3), (1, 0, 1)), ((0, 0, 0), (0, 0, 0))],
)
@pytest.mark.parametrize("how", ["plain", "strided", "transposed"])
def test_requests_without_new_tokens_and_any_strides(page, old, new, how):
    server, sequences, given = Server(page), Sequences(), layer()
    backend = server.backend()
    if any(old):
        step = server.step(ForwardMode.EXTEND, [0] * len(old), old)
        backend._store(given, step, *sequences.rows([0] * len(old), old), None)
    step = server.step(ForwardMode.EXTEND, old, new)
    backend.init_forward_metadata(step)
    rows = sum(new)
    q = {
        "plain": lambda: normal(rows, HQ * DIM),
        "strided": lambda: normal(rows, 3 * HQ * DIM)[:, HQ * DIM : 2 * HQ * DIM],
        "transposed": lambda: normal(HQ * DIM, rows).t(),
    }[how]()
    out = backend.forward_extend(q, *sequences.rows(old, new), given, step)
    assert out.shape == q.shape
    sequences.check(out, q.contiguous(), old, new, causal=True)


def test_queries_with_a_dimension_for_the_batch():
    server, sequences = Server(1), Sequences()
    backend, step = server.backend(), server.step(ForwardMode.EXTEND, (0, 0, 0), NEW)
    backend.init_forward_metadata(step)
    rows, q = sequences.rows((0, 0, 0), NEW), normal(1, sum(NEW), HQ * DIM)
    out = backend.forward_extend(q, *rows, layer(), step)
    sequences.check(out, q[0], (0, 0, 0), NEW, causal=True)


@pytest.mark.parametrize("width", [HQ * DIM // 2, 2 * HQ * DIM, HQ * DIM + 1])
def test_queries_of_another_width_are_refused(width):
    server, sequences = Server(1), Sequences()
    backend, step = server.backend(), server.step(ForwardMode.EXTEND, (0, 0, 0), NEW)
    backend.init_forward_metadata(step)
    rows = sequences.rows((0, 0, 0), NEW)
    with pytest.raises(
        flashjit.InvalidArgument, match=r"q is .*: it must be \[rows, 128\] or \[rows, 4, 32\]"
    ):
        backend.forward_extend(normal(sum(NEW), width), *rows, layer(), step)

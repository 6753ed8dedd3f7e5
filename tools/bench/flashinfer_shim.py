"""A module `flashinfer` of flashjit's functions, and pytest's hooks of flashinfer_suite.py."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import sys
import types
from typing import Any

import flashjit
import flashjit.flashinfer as ours
import pytest
import torch
from flashjit.flashinfer import _batch, _cascade, _ragged, _rows, _single, _tables, _varlen

ON_CPU = os.environ.get("FLASHINFER_SUITE_DEVICE", "cpu") == "cpu"


class Missing(Exception):
    """A name of FlashInfer that flashjit.flashinfer does not have is called."""


class NeedsGpu(Exception):
    pass


class _Absent:
    """Stands for a name until it is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _found(name, f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise Missing(self.name)

    def __getitem__(self, key: Any) -> Any:
        return _Absent(f"{self.name}[{key!r}]")

    def __or__(self, other: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> Any:
        return ()


def _packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    bits = torch.nn.functional.pad(x.reshape(-1).to(torch.int32), (0, -x.numel() % 8)).view(-1, 8)
    order = range(8) if bitorder == "little" else range(7, -1, -1)
    return (bits << torch.tensor(list(order), device=x.device)).sum(1).to(torch.uint8)


_KNOWN: dict[str, Any] = {
    "has_flashinfer_jit_cache": lambda *_, **__: True,
    "GPUArchitectureError": type("GPUArchitectureError", (Exception,), {}),
    "get_compute_capability": lambda *_: (9, 0),
    "is_sm90a_supported": lambda *_: True,
    "is_fa3_backend_supported": lambda *_, **__: False,
    "determine_attention_backend": lambda *_, **__: "fa2",
    "build_jit_specs": lambda *_, **__: None,
    "packbits": _packbits,
    **{
        f"is_{name}_supported": lambda *_, **__: False
        for name in ("sm100a", "sm100f", "sm110a", "sm120a", "sm121a", "sm12x")
    },
    "gen_batch_mla_module": lambda *_, **__: None,
    "gen_batch_prefill_module": lambda *_, **__: None,
    "gen_single_prefill_module": lambda *_, **__: None,
    "gen_batch_decode_module": lambda *_, **__: None,
    "gen_single_decode_module": lambda *_, **__: None,
    "gen_quantization_module": lambda *_, **__: None,
    "gen_batch_prefill_attention_sink_module": lambda *_, **__: None,
}


def _found(name: str, whole: str) -> Any:
    """What a name stands for in any of FlashInfer's modules."""
    return _KNOWN[name] if name in _KNOWN else getattr(ours, name, None) or _Absent(whole)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _found(name, f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] not in ("flashinfer", "tvm_ffi"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
if ON_CPU:
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    _batch.BatchAttention.__init__.__defaults__ = ("NHD", "cpu")
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(  # type: ignore[assignment]
        total_memory=80 << 30,
        multi_processor_count=132,
        major=9,
        minor=0,
        name="",
        shared_memory_per_block_optin=232448,
    )
    torch.cuda.memory_reserved = torch.cuda.memory_allocated = lambda *_: 0  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None  # type: ignore[assignment]

# --- Each call beside a softmax in float64 -------------------------------------------------------------------------

_checked = 0
_SMALL = 5e7  # products of a call


def _sequences(rows: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: dict[str, Any]) -> Any:
    """(rows of Q, K [keys, h, d], V) of each sequence."""
    offsets = rows.cu_seqlens
    count = q.shape[0] // rows.longest if offsets is None else offsets.numel() - 1
    for i in range(count):
        if offsets is None:
            chosen = slice(i * rows.longest, (i + 1) * rows.longest)
        else:
            chosen = slice(int(offsets[i]), int(offsets[i + 1]))
        if "page_table" in more:
            n, size = int(more["kv_lengths"][i]), k.shape[2]
            pages = more["page_table"][i, : (n + size - 1) // size].long()
            pair = [x[pages].transpose(1, 2).flatten(0, 1)[:n] for x in (k, v)]
        elif "cu_seqlens_kv" in more:
            keys = slice(*more["cu_seqlens_kv"][i : i + 2].tolist())
            pair = [x[0, :, keys].transpose(0, 1) for x in (k, v)]
        else:
            pair = [x[i].transpose(0, 1) for x in (k, v)]
        yield i, chosen, *pair


def _number(scale: Any, heads: int) -> torch.Tensor:
    scale = 1.0 if scale is None else scale
    return torch.as_tensor(scale, dtype=torch.float64).reshape(-1).cpu().expand(heads)


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Any, s: Any, scales: Any, more: dict[str, Any]
) -> Any:
    out = torch.zeros(*q.shape[:2], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    scale = q.shape[2] ** -0.5 if s.sm_scale is None else s.sm_scale
    for i, chosen, ki, vi in _sequences(rows, q, k, v, more):
        qi = q[chosen].double().cpu()
        group = qi.shape[1] // ki.shape[1]
        ki = (ki.double().cpu() * _number(scales.k, ki.shape[1])[:, None]).repeat_interleave(group, 1)
        vi = (vi.double().cpu() * _number(scales.v, vi.shape[1])[:, None]).repeat_interleave(group, 1)
        if s.rope is not None:
            qi, ki = _rotated(qi, len(ki) - len(qi), s.rope), _rotated(ki, 0, s.rope)
        score = torch.einsum("qhd,khd->hqk", qi * _number(scales.q, qi.shape[1])[:, None], ki) * scale
        nq, nk = score.shape[1:]
        at, key = torch.arange(nq)[:, None], torch.arange(nk)
        if s.alibi:
            score = score + _rows_slopes(qi.shape[1])[:, None, None] * (key - at)
        if s.logits_soft_cap:
            score = s.logits_soft_cap * torch.tanh(score / s.logits_soft_cap)
        seen = torch.ones(nq, nk, dtype=torch.bool)
        if s.causal or s.items is not None:
            seen &= key <= at + nk - nq
        if s.items is not None:
            prefix, last = int(s.items.prefix[i]), at + nk - nq
            place = s.items.places[i].cpu()[(last - prefix).clamp(min=0)]
            seen &= (last < prefix) | (key < prefix) | (key > last - place)
        if s.window_left >= 0:
            seen &= key >= at + nk - nq - s.window_left
        if s.mask is not None:
            place, first = (at * nk + key), int(s.mask_start[i])
            flat = s.mask.cpu()
            seen &= (
                (flat[first + place // 8] >> (place % 8) & 1).bool()
                if flat.dtype == torch.uint8
                else flat[first + place]
            )
        score = score.masked_fill(~seen, -torch.inf)
        if more.get("sinks") is not None:
            sink = more["sinks"].double().cpu()[:, None, None].expand(-1, nq, 1)
            total = torch.cat((score, sink), 2).logsumexp(2)
        else:
            total = score.logsumexp(2)
        p = torch.where(seen, (score - total[..., None]).exp(), 0.0)
        out[chosen] = torch.einsum("hqk,khd->qhd", p, vi)
        lse[chosen] = total.T
    return out, lse


def _rotated(x: torch.Tensor, start: int, rope: tuple[float, float]) -> torch.Tensor:
    scale, theta = rope
    pairs = torch.arange(0, x.shape[2], 2, dtype=torch.float64) / x.shape[2]
    angle = (torch.arange(len(x)) + start)[:, None, None] * (theta**-pairs / scale)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def _rows_slopes(heads: int) -> torch.Tensor:
    from tests.test_helpers.alibi_reference import get_slopes  # FlashInfer's own

    return get_slopes(heads).double()


def _checking(run: Any) -> Any:
    def checked(
        q: Any,
        k: Any,
        v: Any,
        rows: Any,
        scores: Any,
        scales: Any,
        dtype: Any,
        out: Any,
        wants: bool,
        **more: Any,
    ) -> Any:
        global _checked
        found = run(q, k, v, rows, scores, scales, dtype, out, wants, **more)
        size = q.numel() * k.shape[2] * (more["page_table"].shape[1] if "page_table" in more else 1)
        if (
            size < _SMALL
            and scores.seen is None
            and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            _checked += 1
            exact, lse = _exact(q, k, v, rows, scores, scales, more)
            far = {1: 0.3, 2: 2e-2, 4: 1e-4}[min(found[0].element_size(), q.element_size())]
            largest = exact.abs().max().item() if exact.numel() else 0
            torch.testing.assert_close(
                found[0].double().cpu(), exact, rtol=far, atol=far * max(largest, 1e-3)
            )
            if wants:
                torch.testing.assert_close(
                    found[1].T.double().cpu(), lse, rtol=1e-3, atol=1e-2 if q.element_size() > 1 else 0.3
                )
        return found

    return checked


for _module in (_batch, _cascade, _ragged, _single, _tables, _varlen):
    _module.run = _checking(_rows.run)  # type: ignore[attr-defined]

# --- pytest --------------------------------------------------------------------------------------------------------

_LOG = os.environ.get("FLASHINFER_SUITE_LOG")
_CASES = os.environ.get("FLASHINFER_SUITE_CASES")


@functools.cache
def _chosen() -> frozenset[str]:
    return frozenset(pathlib.Path(_CASES).read_text().splitlines()) if _CASES else frozenset()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: Any) -> None:
    """Only the cases to run become pytest's items: making all 190,000 takes it half a minute in each process."""
    if not _CASES or not metafunc._calls:
        return
    name = f"{metafunc.definition.nodeid}"
    metafunc._calls[:] = [call for call in metafunc._calls if f"{name}[{call.id}]" in _chosen()]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    global _checked
    _checked = 0
    if _LOG:
        pathlib.Path(_LOG).with_suffix(".begun").write_text(nodeid)


_outcomes: dict[str, tuple[str, str]] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        _outcomes[item.nodeid] = _judge(report, call.excinfo)
    if report.when == "teardown" and _LOG:
        outcome, why = _outcomes.pop(item.nodeid, ("error", "no report"))
        with open(_LOG, "a") as file:
            line = {"name": item.nodeid, "outcome": outcome, "why": why, "checked": _checked}
            file.write(json.dumps(line) + "\n")
        pathlib.Path(_LOG).with_suffix(".begun").write_text("")
        _give_memory_back()
        if (
            outcome == "error" and "capture" in why
        ):  # which leaves PyTorch's generator behind, for all that follows
            os._exit(1)


def _give_memory_back() -> None:
    """The processes of other cases share the GPU, and PyTorch keeps what a case has freed."""
    gc.collect()
    with contextlib.suppress(RuntimeError):  # an error of a case that stays
        torch.cuda.empty_cache()


def _judge(report: Any, excinfo: Any) -> tuple[str, str]:
    if report.outcome == "passed":
        return "passed", ""
    if excinfo is None:
        return "error", str(report.longrepr)[-300:]
    error = excinfo.value
    why = f"{type(error).__name__}: {error}".split("\n")[0]
    if report.outcome == "skipped":
        return "skipped", str(error).split("\n")[0]
    if isinstance(error, flashjit.Unsupported):
        return "refused", why
    if isinstance(error, Missing):
        return "missing", why
    text = str(error)
    if ON_CPU and any(word in text for word in ("CUDA", "cuda", "NVIDIA", "No module named 'flashinfer'")):
        return "gpu", why
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return "large", why
    if "ModuleNotFoundError" in text:  # a process of its own, which does not have this module
        return "missing", "flashinfer, in a process that the test starts"
    if isinstance(error, AssertionError):
        return "wrong", str(error)[:300].replace("\n", " ")
    return "error", why

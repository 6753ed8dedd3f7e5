"""What flashjit.jax promises of a GPU: no waiting, CUDA graphs, one kernel for equal layers, errors of the launch. Skips without one."""

import functools
import glob
import subprocess
import sys
import time

import pytest

pytest.importorskip("jax_reference")
import child  # noqa: E402
import flashjit.jax as fj  # noqa: E402
from flashjit.jax import _handler  # noqa: E402
from jax_reference import draw, jax, jnp, np  # noqa: E402

if jax.default_backend() != "gpu":
    pytest.skip("JAX finds no GPU here", allow_module_level=True)


def layers(count, q, k, v, slopes):
    alibi = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
    for _ in range(count):
        q = fj.attention(q, k, v, causal=True, score_mod=alibi)
    return q


def arrays(batch=1, length=512, heads=8, dim=64, dtype="bfloat16"):
    q, k, v = draw(0, *[(batch, length, heads, dim)] * 3, dtype=dtype)
    return q, k, v, 2.0 ** -jnp.arange(1.0, heads + 1)


def gradient(count):
    loss = lambda *given: layers(count, *given).astype(jnp.float32).sum()
    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))


def profiled(folder):
    """What a profile of JAX saw: names of all events, and (name, statistics) of what the GPU computed."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    names, kernels = [], []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                names.append(event.name)
                if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                    kernels.append((event.name, dict(event.stats)))
    return names, kernels


WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoH", "cuMemFree")


def test_calls_never_wait(tmp_path):
    """A profile from the first call to before the result is waited for has launches and no wait of the host."""
    given, call = arrays(), gradient(8)
    jax.block_until_ready(call(*given))
    with jax.profiler.trace(str(tmp_path)):
        results = [call(*given) for _ in range(3)]
        time.sleep(1)  # so that all has run, unwaited
    jax.block_until_ready(results)
    names, kernels = profiled(tmp_path)
    print(sorted({name for name in names if name.startswith("cu")}), len(kernels))
    assert kernels or any(name.startswith(("cuLaunch", "cuGraphLaunch")) for name in names)
    assert not [name for name in names if name.startswith(WAITS)]


def test_dispatch_is_ahead_of_the_gpu():
    given = arrays(batch=4, length=8192, heads=16, dim=128)
    call = jax.jit(functools.partial(layers, 8))
    jax.block_until_ready(call(*given))
    start = time.perf_counter()
    result = call(*given)
    dispatched = time.perf_counter() - start
    jax.block_until_ready(result)
    whole = time.perf_counter() - start
    print(f"dispatched in {dispatched * 1e3:.2f} ms, done in {whole * 1e3:.2f} ms")
    assert dispatched < whole / 4


IN_GRAPHS = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import test_jax_gpu as t
given, call = t.arrays(), t.gradient(8)
results = [t.jax.block_until_ready(call(*given)) for _ in range(3)]
with t.jax.profiler.trace(sys.argv[2]):
    results.append(t.jax.block_until_ready(call(*given)))
names, kernels = t.profiled(sys.argv[2])
for name in sorted({n for n, _ in kernels}):
    print("KERNEL", name[:60], sum(n == name for n, _ in kernels))
print("STATS", kernels[:1], kernels[-1:])
print("HOST", {n: names.count(n) for n in set(names) if n.startswith("cu") or "raph" in n})
print("launches", sum(n.startswith("cuGraphLaunch") for n in names), len(kernels))
other = [x + 1 for x in given]  # other buffers, with the same executable
results.append(call(*other))
np.savez(sys.argv[3], *[np.asarray(x, np.float32) for result in results for x in result])
"""


def test_calls_are_part_of_cuda_graphs(tmp_path):
    """With XLA's command buffers of custom calls the results are the same, and graphs replace launches."""

    def run(flags):
        name = str(tmp_path / f"{len(flags)}.npz")
        given = child.environment(XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        done = subprocess.run(
            [sys.executable, "-c", IN_GRAPHS, *(str(child.ROOT / "tests/python"), name + ".trace", name)],
            capture_output=True,
            text=True,
            env=given,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
        graphs, kernels = map(int, done.stdout.split("launches")[1].split()[:2])
        return graphs, kernels, list(np.load(name).values())

    kinds = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"
    graphs, kernels, got = run(f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1")
    no_graphs, all_kernels, want = run("--xla_gpu_enable_command_buffer=")
    print(f"{graphs} graphs and {kernels} kernels, {no_graphs} and {all_kernels} without")
    assert no_graphs == 0 and graphs > 0
    for x, y in zip(got, want, strict=True):  # dQ and slopes are added up in any order
        assert np.abs(x - y).max() <= 1e-2 * np.abs(y).max()


LAYERS = """
import sys
sys.path.insert(0, sys.argv[1])
import test_jax_gpu as t
t.jax.block_until_ready(t.gradient(32)(*t.arrays()))
"""


def test_equal_layers_share_their_kernels(tmp_path):
    """32 layers compile what one layer does: the same files in a cache of their own."""
    kernels = []
    for count in (1, 32):
        folder = tmp_path / str(count)
        done = subprocess.run(
            [sys.executable, "-c", LAYERS.replace("32", str(count)), str(child.ROOT / "tests/python")],
            capture_output=True,
            text=True,
            env=child.environment(FLASHJIT_CACHE_DIR=folder, XLA_PYTHON_CLIENT_PREALLOCATE="false"),
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        kernels.append(sorted(path.name for path in folder.rglob("*") if path.is_file()))
    print(kernels)
    assert kernels[0] and kernels[0] == kernels[1]


def test_an_error_of_the_launch_arrives_with_its_message(monkeypatch):
    """As where the library needs more workspace than when the call was lowered."""
    monkeypatch.setattr(_handler, "workspace_bytes", lambda *_: 0)
    given = arrays(length=192)
    with pytest.raises(jax.errors.JaxRuntimeError, match="flashjit: .*workspace"):
        jax.block_until_ready(gradient(1)(*given))


def test_caches_keep_their_memory():
    """append() with donated caches writes where these are."""
    k, v = draw(0, (2, 1, 4, 64), (2, 1, 4, 64), dtype="bfloat16")
    k_cache, v_cache = draw(1, (64, 16, 4, 64), (64, 16, 4, 64), dtype="bfloat16")
    table = jnp.asarray([[5, 1, 0], [2, 7, 4]], jnp.int32)
    append = jax.jit(
        lambda k_cache, v_cache, n: fj.append(k, v, k_cache, v_cache, kv_lengths=n, page_table=table),
        donate_argnums=(0, 1),
    )
    lengths = jnp.asarray([18, 1], jnp.int32)
    append(k_cache + 0, v_cache + 0, lengths)
    before = [np.asarray(x, np.float32) for x in (k_cache, v_cache)]
    where = [x.unsafe_buffer_pointer() for x in (k_cache, v_cache)]
    got = append(k_cache, v_cache, lengths)
    assert [x.unsafe_buffer_pointer() for x in got] == where and k_cache.is_deleted()
    for new, old, rows in zip(got, before, (k, v)):
        old[1, 1], old[2, 0] = np.asarray(rows[0, 0], np.float32), np.asarray(rows[1, 0], np.float32)
        np.testing.assert_array_equal(np.asarray(new, np.float32), old)

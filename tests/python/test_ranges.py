"""prepare_range(), over the fake driver and its compiler."""

import flashjit
import pytest

SPEC = "bf16:d64:causal:varlen:pages16"
SHAPES = ((1, 32), 8, 2, 1, (16, 4096))


def shapes_of(batches, lengths):
    return [(batch, 8, 2, 1, length) for batch in batches for length in lengths]


ALL = shapes_of([1, 2, 4, 8, 16, 32], [2**i for i in range(4, 13)])


def test_it_makes_what_calls_choose(fake_gpu):
    told = []
    report = flashjit.prepare_range(
        SPEC, SHAPES, runtime=fake_gpu.runtime, progress=lambda *numbers: told.append(numbers)
    )
    assert report.made == report.configurations > 0
    assert told[0] == (0, report.made) and told[-1] == (report.made, report.made)
    assert report.workspace_bytes == max(fake_gpu.runtime.workspace_bytes(SPEC, shape) for shape in ALL)
    assert len(report.kernels) == len({kernel.config for kernel in report.kernels}) == report.made


def test_a_kernel_that_is_prepared_is_reported(fake_gpu):
    made = fake_gpu.runtime.prepare("bf16:d64", (1, 2, 2, 128, 128))
    assert (made.spec, made.config_source, made.origin) == ("fwd:bf16:d64", "heuristic", "compiled")
    assert made.key and made.compile_ms >= 0 and all(entry.threads >= 32 for entry in made.entries)
    again, backward = fake_gpu.runtime.prepare_both("bf16:d64", (1, 2, 2, 128, 128))
    assert again[:4] == made[:4] and again.origin == "memory" and again.entries == made.entries
    assert backward.spec == "bwd:bf16:d64" and backward.origin == "compiled"


def test_numbers_and_steps_are_ranges_too(fake_gpu):
    one = flashjit.prepare_range(SPEC, (3, 8, 2, 1, 100), runtime=fake_gpu.runtime)
    assert one[:3] == (1, 1, fake_gpu.runtime.workspace_bytes(SPEC, (3, 8, 2, 1, 100)))
    steps = flashjit.prepare_range(SPEC, ((3, 12, 4), 8, 2, 1, 4096), runtime=fake_gpu.runtime)
    assert steps.workspace_bytes == max(
        fake_gpu.runtime.workspace_bytes(SPEC, shape) for shape in shapes_of([3, 7, 11, 12], [4096])
    )
    for spec in ("append:bf16:d64:pages16", "bwd:bf16:d64"):
        assert flashjit.prepare_range(spec, ((1, 4), 8, 2, (1, 64), 64), runtime=fake_gpu.runtime).made > 0


@pytest.mark.parametrize("stopped_by", [False, KeyboardInterrupt, ValueError("enough")])
def test_what_was_made_stays(fake_gpu, stopped_by):
    def stop(made, configurations):
        if made == 0:
            return True
        if stopped_by is False:
            return False
        raise stopped_by

    if stopped_by is False:
        first = flashjit.prepare_range(SPEC, SHAPES, runtime=fake_gpu.runtime, progress=stop)
        assert 0 < first.made <= first.configurations
    else:
        with pytest.raises(
            stopped_by if isinstance(stopped_by, type) else type(stopped_by), match="enough|^$"
        ):
            flashjit.prepare_range(SPEC, SHAPES, runtime=fake_gpu.runtime, progress=stop)
    again = flashjit.prepare_range(SPEC, SHAPES, runtime=fake_gpu.runtime)
    assert again.made == again.configurations


def test_nothing_is_made_where_it_is_stopped_at_once(fake_gpu):
    report = flashjit.prepare_range(SPEC, SHAPES, runtime=fake_gpu.runtime, progress=lambda *_: False)
    assert report.made == 0 < report.configurations and report.workspace_bytes > 0


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ((1, 8, 2, 1), "4 entries: give \\(batch, heads_q"),
        ((1, (4, 8), 2, 1, 16), "heads_q is \\(4, 8\\): give a number"),
        ((1, 8, 2, 1, (16,)), "seqlen_kv is \\(16,\\)"),
        ((1, 8, 2, 1, 16.0), "float"),
        (((0, 4), 8, 2, 1, 16), "batch goes from 0 to 4: begin with 1"),
        ((1, 8, 2, 1, (32, 16)), "seqlen_kv goes from 32 to 16"),
        (((1, 4, -1), 8, 2, 1, 16), "the step of batch is -1"),
        ((1, 8, 2, 1, (1, 2**20, 1)), "seqlen_kv has more than 65536 sizes"),
        (((1, 1000, 1), 8, 2, 1, (1, 1000, 1)), "has 1000000 shapes, 65536 are allowed"),
        ((1, 8, 3, 1, 16), "multiple of heads_kv"),
        ((1, 0, 0, 1, 16), "heads_kv is 0"),
    ],
)
def test_other_ranges_are_refused(fake_gpu, shapes, says):
    with pytest.raises((flashjit.InvalidArgument, flashjit.WrongType), match=says):
        flashjit.prepare_range(SPEC, shapes, runtime=fake_gpu.runtime)

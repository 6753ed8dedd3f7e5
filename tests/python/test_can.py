"""can(): answers without a GPU, and about the one that is there."""

import subprocess
import sys

import child
import flashjit
import pytest


def test_it_is_true_or_has_a_reason():
    found = flashjit.can("bf16:d128:causal:varlen:pages16", device="sm_90a")
    assert found and found.reason is None and isinstance(found, flashjit.Support)
    assert flashjit.can("append:bf16:d128:pages16", (4, 8, 2, 16, 4096), "sm_80")
    assert flashjit.can("bf16:d64:causal", (1, 2, 2, 128, 128), "sm_80", backward=True)
    cache = flashjit.can("bf16:d64:cache", device="sm_80", backward=True)
    assert not cache and "cache" in cache.reason
    uneven = flashjit.can("bf16:d64", (1, 3, 2, 8, 8), "sm_80")
    assert not uneven and "heads_q is 3 and heads_kv is 2" in uneven.reason


@pytest.mark.parametrize(
    "spec, why",
    [
        ("bf16:d63", "63"),
        ("bf16:d64:q_codes", "q_codes"),
        ("bf16:d64:sliding", "sliding"),
        ("bf16:d64\0:sliding", "text without NUL"),
        ("bf16:d64\udc80", "halves of surrogate pairs"),
    ],
)
def test_a_spec_that_no_call_could_have_is_refused_with_what_is_wrong(spec, why):
    refused = flashjit.can(spec, device="sm_90a")
    assert not refused and why in refused.reason


def test_the_gpu_that_is_there_is_asked_about_by_default(fake_gpu):
    assert flashjit.can("bf16:d64", (1, 1, 1, 8, 8))
    assert "heads" in flashjit.can("bf16:d64", (1, 3, 2, 8, 8)).reason


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        (("bf16:d64", (1, 1, 8, 8), "sm_80"), flashjit.InvalidArgument, "4 numbers"),
        (("bf16:d64", "12345", "sm_80"), flashjit.WrongType, "a size of the shape is a str"),
        (
            ("bf16:d64", None, "sm_91"),
            flashjit.InvalidArgument,
            "the architecture is 'sm_91'; it must be one of",
        ),
        (
            ("bf16:d64", None, 90),
            flashjit.WrongType,
            "device is a int: give an architecture such as 'sm_90a'",
        ),
        ((64, None, "sm_80"), flashjit.WrongType, "spec is a int: give a text"),
        (("bf16:d64", None, "sm_80\0"), flashjit.InvalidArgument, "device is .*: give text without NUL"),
    ],
)
def test_other_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        flashjit.can(*arguments)


def test_it_needs_a_driver_for_the_current_gpu_alone():
    code = """import flashjit
assert flashjit.can("bf16:d64", device="sm_90a")
try:
    flashjit.can("bf16:d64")
except flashjit.NoDriver as error:
    print(error.code)"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=child.environment(FLASHJIT_LIBCUDA="/nonexistent/libcuda.so.1"),
    )
    assert run.stdout == "no_driver\n"

"""Time O's tangent on one GPU by each of some tile configurations, beside the forward pass; errors against fp32 first.

bf16, heads of 64 and 128 columns, all of equal length. torch.func.jvp launches the forward pass and then the tangent's kernel:
`kernel_ms` is what it takes beside a forward pass alone, `of_forward` its rate as a share of the forward pass's, with six
products where that has two. Configurations take turns, and medians count.

    python3 tools/bench/tangent_tiles.py --lib build/libflashjit.so --csv tangent_tiles.csv
    python3 tools/bench/tangent_tiles.py --lib build/libflashjit.so --configs 128=sm90:br128:bc48:w8:s2,sm80:br128:bc32:w8

Exit code: 0 if everything ran and was right, 1 if not, 3 without GPU or PyTorch.
"""

import statistics
import sys

import measuring
import race_tangents
import racing
from measuring import torch

CONFIGS = {
    64: ("sm80:br128:bc64:w8", "sm90:br128:bc80:w8:s2", "sm90:br128:bc64:w8:s2"),
    128: ("sm80:br128:bc32:w8", "sm90:br128:bc48:w8:s2", "sm90:br128:bc32:w8:s2"),
}
COLUMNS = ["problem", "config", "forward_ms", "kernel_ms", "of_forward", "error"]
CALLS, LIMIT = 4, 0.02


def configs_of(text):
    """64=A,B;128=C: by columns of a head."""
    return {int(dim): names.split(",") for dim, _, names in (part.partition("=") for part in text.split(";"))}


def milliseconds(call):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS


def run_problem(report, problem, configs, runtime, flashjit, rounds):
    torch.manual_seed(problem.tokens)
    shape = problem.batch, problem.heads, problem.tokens, problem.dim
    draw = lambda: tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    primals, tangents = draw(), draw()
    attend = lambda q, k, v: flashjit.attention(q, k, v, causal=problem.causal)
    both = lambda: torch.func.jvp(attend, primals, tangents)
    spec = f"jvp:bf16:d{problem.dim}" + ":causal" * problem.causal
    sizes = problem.batch, problem.heads, problem.heads, problem.tokens, problem.tokens
    wanted, errors = race_tangents.expected(primals, tangents, problem.causal), {}
    for config in configs:
        runtime.prepare(spec, sizes, config=config)
        errors[config] = racing.relative_error(both(), wanted)
        if not errors[config] <= LIMIT:
            report.failure(f"{problem.name}: {config} has an error of {errors[config]:.3g}, over {LIMIT}")
    times = {name: [] for name in ("forward", *configs)}
    for _ in range(rounds):
        for name, measured in times.items():
            if name != "forward":
                runtime.prepare(spec, sizes, config=name)
            call = both if name != "forward" else lambda: attend(*primals)
            call()
            measured.append(milliseconds(call))
    forward = statistics.median(times.pop("forward"))
    for config, measured in times.items():
        kernel = statistics.median(measured) - forward
        report.row(
            problem=problem.name,
            config=config,
            forward_ms=forward,
            kernel_ms=kernel,
            of_forward=3 * forward / kernel,
            error=f"{errors[config]:.3g}",
        )
        print(
            f"{problem.name:40} {config:24} {kernel:8.3f} ms beside {forward:8.3f} of the forward pass: "
            f"{3 * forward / kernel:.2f} of its rate, error {errors[config]:.2g}",
            flush=True,
        )


@torch.no_grad()
def measure(report, flashjit, arguments):
    from flashjit._library import runtime

    for problem in race_tangents.problems():
        configs = arguments.configs.get(problem.dim, ())
        measuring.guarded(
            report, problem.name, run_problem, report, problem, configs, runtime(), flashjit, arguments.rounds
        )


def main():
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of timing (default %(default)s)")
    parser.add_argument(
        "--configs", type=configs_of, default=CONFIGS, help="64=A,B;128=C: tiles by columns of a head"
    )
    return measuring.command("tangent_tiles", parser.parse_args(), COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())

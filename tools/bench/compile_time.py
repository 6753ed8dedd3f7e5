"""How long NVRTC takes for kernels: parsing, its optimiser, ptxas. Needs NVRTC and no GPU.

    python3 tools/bench/compile_time.py [--only REGEX] [--rounds N]

Kernels are the lines of tools/same_sass.txt (architecture, shape, configuration or -, spec), or of --kernels. build/tools/flashjit
renders each; its slowest program is compiled in this process with the runtime's options, to the end of parsing, to PTX and to
machine code. Seconds of the processor count, which other processes change less than the clock's, and the least of the
rounds. The slowest kernel comes first.
"""

import argparse
import csv
import ctypes
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#include "(flashjit/[^"]+)"', re.M)
PROGRAM = "FLASHJIT_PROGRAM"
NVRTC = os.environ.get("FLASHJIT_NVRTC", "libnvrtc.so.13")
OPTIONS = ["--std=c++20", "-default-device", "--ptxas-options=-v", "--modify-stack-limit=false", "--no-cache"]


class Nvrtc:
    """NVRTC, called as runtime/compile/compiler.cpp does."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)

    def fetch(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, text)
        return text.raw

    def compile(self, text, headers, options, result):
        """Seconds of the processor, and the size of the result that is named."""
        strings = lambda values: (ctypes.c_char_p * len(values))(*(value.encode() for value in values))
        program = ctypes.c_void_p()
        begin = time.process_time()
        self.library.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            b"flashjit.cu",
            len(headers),
            strings([*headers.values()]),
            strings([*headers]),
        )
        failed = self.library.nvrtcCompileProgram(program, len(options), strings(options))
        seconds = time.process_time() - begin
        if failed:
            sys.exit(f"compile_time: {self.fetch(program, 'ProgramLog').decode()}")
        size = len(self.fetch(program, result)) if result else 0
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return seconds, size


def headers_of(text, templates, found):
    for name in INCLUDE.findall(text):
        if name not in found:
            found[name] = (templates / name.removeprefix("flashjit/")).read_text()
            headers_of(found[name], templates, found)
    return found


def rendered(line, options):
    """The source of a line's kernel, and the options of each of its programs."""
    arch, shape, config, spec = line.split(maxsplit=3)
    command = [options.command, "inspect", "--source", "--arch", arch, "--shape", shape, "--spec", spec]
    environment = {**os.environ, "FLASHJIT_TEMPLATE_DIR": str(options.templates)}
    done = subprocess.run(
        [*command, *([] if config == "-" else ["--config", config])],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        sys.exit(f"compile_time: {line}: {done.stderr}")
    programs = [[f"--define-macro={PROGRAM}={n}"] for n in (1, 2)] if PROGRAM in done.stdout else [[]]
    return arch, done.stdout, programs


def measure(nvrtc, line, options):
    """Milliseconds of the slowest program by stage, and of the others; bytes of PTX and machine code."""
    arch, text, programs = rendered(line, options)
    headers = headers_of(text, options.templates, {})
    least = lambda *what: min(nvrtc.compile(text, headers, *what) for _ in range(options.rounds))
    row, others = {}, 0.0
    for more in programs:
        more = [*OPTIONS, *more, *options.option]
        all_of_it, cubin = least([f"-arch={arch}", *more], "CUBIN")
        virtual = [f"-arch={arch.replace('sm', 'compute')}", *more]
        if row and all_of_it <= row["sum"]:
            others += all_of_it
            continue
        others += row.get("sum", 0)
        parsing, _ = least([*virtual, "--fdevice-syntax-only"], None)
        to_ptx, ptx = least(virtual, "PTX")
        row = dict(sum=all_of_it, parsing=parsing, optimiser=to_ptx - parsing, ptxas=all_of_it - to_ptx)
        row |= dict(ptx=ptx, cubin=cubin)
    return row | dict(others=others)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="lines that match")
    parser.add_argument("--kernels", type=pathlib.Path, default=ROOT / "tools/same_sass.txt", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--templates", type=pathlib.Path, default=ROOT / "templates")
    parser.add_argument("--command", default=ROOT / "build/tools/flashjit")
    parser.add_argument("--option", action="append", default=[], help="one more of NVRTC, repeatable")
    parser.add_argument("--csv", type=argparse.FileType("w"), help="the table goes here, too")
    options = parser.parse_args()
    options.templates = options.templates.resolve()
    nvrtc = Nvrtc(NVRTC)
    lines = [line for line in options.kernels.read_text().splitlines() if line and line[0] != "#"]
    rows = []
    for line in filter(re.compile(options.only).search, lines):
        rows.append((measure(nvrtc, line, options), line))
        print(f"{rows[-1][0]['sum']:6.2f}  {line}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: -row[0]["sum"])
    names = ("sum", "parsing", "optimiser", "ptxas", "others", "ptx", "cubin")
    print(*(f"{name:>9}" for name in names), " kernel")
    for row, line in rows:
        print(
            *(f"{row[name]:9.2f}" for name in names[:5]),
            *(f"{row[name]:9}" for name in names[5:]),
            f" {line}",
        )
    if options.csv:
        table = csv.writer(options.csv)
        table.writerow([*names, "kernel"])
        table.writerows([*(row[name] for name in names), line] for row, line in rows)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Shows whether a change leaves the machine code of the kernels as it was. Needs NVRTC and no GPU.

    tools/same_sass.py OLD [--only REGEX] [--templates-only] [--jobs N]

Compiles the kernels of tools/same_sass.txt with the commit OLD and with the working tree, and compares their code,
constants, registers and shared memory. Exit code 0: all are the same. What each side compiled stays in
build/same_sass (or the folder that FLASHJIT_SAME_SASS names), so OLD is compiled once.

    --only REGEX       lines that match
    --templates-only   both sides by build/tools/flashjit as it is, with the two templates/ folders: seconds instead of
                       a build, for a change of templates that the host does not include
    --mask-params      for a change of where kernels' parameters are: how large they are and the offsets that
                       instructions read them at do not count. Needs nvdisasm
    --jobs N           kernels compiled side by side; default one a processor
"""

import argparse
import concurrent.futures
import difflib
import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = "tools/same_sass.txt"
# Sections that the GPU executes or reads; symbol names and debug information may differ, and so may .nv.global and
# .nv.constant4: the constexpr variables of the source and a table of their addresses, which no instruction reads.
LOADED = (".text.", ".nv.constant0", ".nv.constant2", ".nv.constant3", ".rodata")
INSTRUCTION = 16  # bytes


def run(*command, **options):
    return subprocess.run(command, check=True, text=True, capture_output=True, **options).stdout


# --- The two sides ---------------------------------------------------------------------------------------------------


class Side:
    """A flashjit command, the templates it takes, and where its packs are kept."""

    def __init__(self, name, tree, command, kept, templates=None):
        self.name, self.tree, self.command, self.kept, self.templates = name, tree, command, kept, templates

    def lines(self, only):
        """The kernels to compile; a commit without the list gets the working tree's."""
        path = self.tree / LIST
        text = (path if path.exists() else ROOT / LIST).read_text()
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        return [line for line in lines if re.search(only, line)]

    def kernel(self, line):
        """The kernel of a line, as pack leaves it: its source text, its machine code, what meta.json says."""
        arch, shape, config, spec = line.split(maxsplit=3)
        folder = self.kept / hashlib.sha256(line.encode()).hexdigest()[:16]
        if not folder.exists():
            partial = folder.with_suffix(f".{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)
            options = [] if config == "-" else ["--config", config]
            environment = dict(os.environ)
            if self.templates:
                environment["FLASHJIT_TEMPLATE_DIR"] = str(self.templates)
            command = [self.command, "pack", "--spec", spec, "--shape", shape, "--arch", arch, "--jobs", "1"]
            done = subprocess.run(
                [*command, *options, "--out", partial], text=True, capture_output=True, env=environment
            )
            if done.returncode != 0:
                raise RuntimeError(f"{self.name} cannot compile it: {done.stdout}{done.stderr}")
            try:
                partial.rename(folder)
            except OSError:  # another run was first
                shutil.rmtree(partial)
        entry = next(folder.glob("v1/*/*/meta.json")).parent
        meta = json.loads((entry / "meta.json").read_text())["kernel"]
        return (entry / "kernel.cu").read_text(), (entry / "kernel.cubin").read_bytes(), meta


def build_command(tree, build, reference):
    """Configures like the build folder `reference` and builds the command alone."""
    cache = (reference / "CMakeCache.txt").read_text()
    taken = r"^(FLASHJIT_CUDA_INCLUDE|CMAKE_C(?:XX)?_COMPILER_LAUNCHER):\w+=(.+)$"
    options = [f"-D{name}={value}" for name, value in re.findall(taken, cache, re.M)]
    if not (build / "build.ninja").exists():
        run("cmake", "-S", tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options)
    run("ninja", "-C", build, "flashjit_command")
    return build / "tools/flashjit"


def sides(arguments, kept):
    commit = run("git", "-C", ROOT, "rev-parse", arguments.old).strip()
    tree, build = kept / f"tree-{commit[:12]}", ROOT / "build"
    if not tree.exists():
        run("git", "-C", ROOT, "worktree", "prune")
        run("git", "-C", ROOT, "worktree", "add", "--detach", tree, commit)
    new_packs = kept / f"new-{os.getpid()}"
    if arguments.templates_only:
        command = build / "tools/flashjit"
        return (
            Side("old", tree, command, kept / f"templates-{commit[:12]}", tree / "templates"),
            Side("new", ROOT, command, new_packs, ROOT / "templates"),
        )
    print(f"building {commit[:12]} and the working tree", flush=True)
    old = build_command(tree, kept / f"build-{commit[:12]}", build)
    return Side("old", tree, old, kept / f"packs-{commit[:12]}"), Side(
        "new", ROOT, build_command(ROOT, build, build), new_packs
    )


# --- Comparing -------------------------------------------------------------------------------------------------------


def sections(image):
    """What is loaded of an ELF image, by the order of its sections: [(kind, bytes)]."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    found = []
    for name_at, kind, _, _, offset, length in headers:
        name = image[names + name_at : image.index(b"\0", names + name_at)].decode()
        if name.startswith(LOADED) and kind == 1:
            found.append(
                (
                    next(prefix for prefix in LOADED if name.startswith(prefix)),
                    image[offset : offset + length],
                )
            )
    return found, max(
        [table + size * count] + [offset + length for _, kind, _, _, offset, length in headers if kind != 8]
    )


def images(cubin):
    """A stored cubin has one ELF image a program, one after the other."""
    found, at = [], cubin.find(b"\x7fELF")
    while at >= 0:
        loaded, end = sections(cubin[at:])
        found += loaded
        at = cubin.find(b"\x7fELF", at + end)
    return found


def resources(meta):
    """Registers, spills and shared memory; entries keep their order, whatever their names are."""
    used = {
        entry["name"]: [entry[key] for key in ("threads", "min_blocks", "cluster", "shared_bytes")]
        for entry in meta["entries"]
    }
    for one in meta["resources"]:
        used[one["entry"]] = used.get(one["entry"], []) + [
            value for key, value in sorted(one.items()) if key != "entry"
        ]
    return list(used.values())


def differing(old, new):
    """How many instructions of two codes differ, once what is common is aligned."""
    cut = lambda code: [code[i : i + INSTRUCTION] for i in range(0, len(code), INSTRUCTION)]
    old, new = cut(old), cut(new)
    same = sum(
        block.size for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    )
    return max(len(old), len(new)) - same, len(old)


def elf_images(cubin):
    """The ELF images of a stored cubin."""
    begins, at = [], cubin.find(b"\x7fELF")
    while at >= 0:
        begins.append(at)
        at = cubin.find(b"\x7fELF", at + sections(cubin[at:])[1])
    return [cubin[begin:end] for begin, end in zip(begins, [*begins[1:], len(cubin)])]


# Where an instruction reads a parameter, and what one adds to their address, with a carry, to find a tensor map.
PARAMS = (r"(c\[0x0\]\[[^]]*?)0x[0-9a-f]+\]", r"(\bU?IADD3 \w+, U?P\d, \w+, )0x[0-9a-f]{2,3}(?=, U?RZ)")


def masked_code(cubin):
    """The instructions as text, without the offsets of parameters."""
    text = ""
    for image in elf_images(cubin):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(image)
            file.flush()
            text += run("nvdisasm", "--print-code", file.name)
    for pattern in PARAMS:
        text = re.sub(pattern, r"\1PARAM", text)
    return [line for line in text.splitlines() if re.match(r"\s*(/\*[0-9a-f]{4,}\*/|\.L|\.text)", line)]


def compare_masked(old, new):
    """What differs between two kernels but for where their parameters are; empty: nothing."""
    found = []
    if resources(old[2]) != resources(new[2]):
        found.append(f"resources {resources(old[2])} -> {resources(new[2])}")
    before, after = masked_code(old[1]), masked_code(new[1])
    if before != after:
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        alike = sum(block.size for block in matcher.get_matching_blocks())
        found.append(f"{max(len(before), len(after)) - alike} of {len(before)} instructions")
    return found


def compare(old, new):
    """What differs between two kernels; empty: nothing."""
    found = []
    if resources(old[2]) != resources(new[2]):
        found.append(f"resources {resources(old[2])} -> {resources(new[2])}")
    loaded, changed = images(old[1]), images(new[1])
    if [kind for kind, _ in loaded] != [kind for kind, _ in changed]:
        found.append(f"{len(loaded)} sections -> {len(changed)}")
    for (kind, before), (_, after) in zip(loaded, changed):
        if before != after:
            found.append(
                "{}: {} of {} instructions".format(kind, *differing(before, after))
                if kind == ".text."
                else f"{kind} differs"
            )
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--templates-only", action="store_true")
    parser.add_argument("--mask-params", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    kept = pathlib.Path(os.environ.get("FLASHJIT_SAME_SASS", ROOT / "build/same_sass"))
    old, new = sides(arguments, kept)
    pairs = list(zip(old.lines(arguments.only), new.lines(arguments.only), strict=True))
    if not pairs:
        sys.exit(f"no line of {LIST} matches '{arguments.only}'")
    for side in (old, new):
        side.kept.mkdir(parents=True, exist_ok=True)

    differences = compare_masked if arguments.mask_params else compare

    def judge(pair):
        try:
            kernels = old.kernel(pair[0]), new.kernel(pair[1])
            return differences(*kernels), kernels[0][0] == kernels[1][0]
        except (RuntimeError, StopIteration) as error:
            return [str(error) or "it left no kernel"], False

    same = same_text = 0
    try:
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for pair, (found, equal_text) in zip(pairs, pool.map(judge, pairs)):
                same, same_text = same + (not found), same_text + equal_text
                print(f"{'differs' if found else 'same':8}{pair[1]}", *found, sep="\n          ", flush=True)
    finally:
        shutil.rmtree(new.kept, ignore_errors=True)
    print(f"{same} of {len(pairs)} kernels are the same, {same_text} of their rendered sources")
    sys.exit(same != len(pairs))


if __name__ == "__main__":
    main()

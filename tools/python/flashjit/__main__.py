"""python -m flashjit ...: the flashjit command that the wheel carries (doctor, tune, pack, cache, ...)."""

from __future__ import annotations

import os
import subprocess
import sys

from ._installed import COMMAND_NAME, PACKAGE, WINDOWS, installed_packs, nvrtc_folder


def main() -> int:
    command = os.environ.get("FLASHJIT_COMMAND") or str(PACKAGE / "native" / COMMAND_NAME)
    if not os.access(command, os.X_OK):
        print(
            f"flashjit: there is no command at {command}: install the flashjit wheel (pip wheel tools/python), or set "
            "FLASHJIT_COMMAND to a built one.",
            file=sys.stderr,
        )
        return 3
    nvrtc = nvrtc_folder()
    if nvrtc:
        os.environ["FLASHJIT_NVRTC"] = nvrtc
    packs = [*installed_packs(), *filter(None, [os.environ.get("FLASHJIT_PACKS")])]
    if packs:
        os.environ["FLASHJIT_PACKS"] = os.pathsep.join(packs)
    if WINDOWS:  # whose execv() leaves the console to both
        return subprocess.run([command, *sys.argv[1:]]).returncode
    os.execv(command, ["flashjit", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

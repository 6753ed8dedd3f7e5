"""Python processes of the tests' own."""
import os
import pathlib

import flashjit


def environment(**more):
    """In which they import the package under test, too. more: variables."""
    paths = [str(pathlib.Path(flashjit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **{name: str(value) for name, value in more.items()}}

"""Arguments of the custom operators by name, for opcheck."""

import flashjit._operators  # noqa: F401  (makes them)
import torch

NOTHING = {"str": "", "float": 0.0, "int": 0, "SymInt": 0, "bool": False}


def arguments_of_forward(q, k, v, **given):
    """Arguments of torch.ops.flashjit.attention_forward: all that are not given are as in a call without them."""
    given = {"q": q, "k": k, "v": v, **given}

    def value(argument):
        kind = str(argument.real_type if hasattr(argument, "real_type") else argument.type)
        if argument.name in given:
            return given.pop(argument.name)
        if kind.startswith("Optional"):
            return None
        return [] if kind.startswith("List") else NOTHING[kind]

    arguments = tuple(map(value, torch.ops.flashjit.attention_forward.default._schema.arguments))
    assert not given, f"the operator has no {', '.join(given)}"
    return arguments

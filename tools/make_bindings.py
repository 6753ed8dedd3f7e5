#!/usr/bin/env python3
"""Makes the structs, constants and functions of the C interface for Python and Rust from the headers of include/flashjit.
Context parallelism (flashjit_shared_*) is left out: Python has its own.

Without arguments it writes the files; with --check it fails where one is not what the headers say."""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEADERS = [f"include/flashjit/{name}.h" for name in ("types", "flashjit")]
WIDTH = 110  # of a line of Python
SHARED = "/** Attention over a sequence whose rows"  # where context parallelism begins, at a header's end
MADE = "made by tools/make_bindings.py from include/flashjit/*.h: edit these, and run it"

NUMBERS = {  # of C: of ctypes, of Rust
    "int32_t": ("c_int32", "i32"),
    "int64_t": ("c_int64", "i64"),
    "uint64_t": ("c_uint64", "u64"),
    "size_t": ("c_size_t", "usize"),
    "double": ("c_double", "f64"),
    "float": ("c_float", "f32"),
    "char": ("c_char", "c_char"),
}
POINTED = {"void": "c_void", "char": "c_char", "uint8_t": "u8", "CUstream_st": "c_void"}


class Interface:
    """What the headers declare. Types are text of C, such as "const float*"."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/|^#(?:[^\n]*\\\n)*[^\n]*", " ", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"\bstruct (CUstream_st)", r"\1", text)
        self.aliases = dict.fromkeys(re.findall(r"typedef int32_t (\w+);", text), "int32_t")
        self.opaque = re.findall(r"typedef struct (\w+) \1;", text)
        self.constants = [
            (name, int(value))
            for body in re.findall(r"enum \{(.*?)\}", text, re.DOTALL)
            for name, value in re.findall(r"(\w+) = (\d+)", body)
        ]
        self.callbacks = {
            name: (result, parameters_of(parameters))
            for result, name, parameters in re.findall(r"typedef (\w+) \(\*(\w+)\)\((.*?)\);", text)
        }
        self.structs = {
            name: [member for line in body.split(";") for member in members_of(line)]
            for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.DOTALL)
        }
        self.functions = {
            name: (result.strip(), parameters_of(parameters))
            for result, name, parameters in re.findall(
                r"FLASHJIT_C_API\s+([\w\s]+?[\s*]+)(\w+)\((.*?)\)\s*FLASHJIT_NOEXCEPT;", text, re.DOTALL
            )
        }


def squeezed(kind: str) -> str:
    return re.sub(r"\s*\*\s*", "*", " ".join(kind.split()))


def members_of(line: str) -> list[tuple[str, str, str]]:
    """(name, type, length of its array) of each that a line such as "const void *q, *k" declares."""
    line = " ".join(line.split())
    if not line:
        return []
    callback = re.fullmatch(r"(\w+) \(\*(\w+)\)\((.*)\)", line)
    if callback:
        return [(callback[2], f"{callback[1]}({callback[3]})", "")]
    first, *others = line.split(",")
    base, stars, name, length = declared(first)
    found = [(name, f"{base}{stars}", length)]
    for other in others:
        parts = re.fullmatch(r"\s*(\**)\s*(\w+)(?:\[(\w+)\])?", other)
        assert parts, line
        found.append((parts[2], base + parts[1], parts[3] or ""))
    return found


def declared(text: str) -> tuple[str, str, str, str]:
    parts = re.fullmatch(r"\s*(.*?[\s*])(\w+)(?:\[(\w+)\])?\s*", text, re.DOTALL)
    assert parts, text
    kind = squeezed(parts[1])
    base = kind.rstrip("*")
    return base, kind[len(base) :], parts[2], parts[3] or ""


def parameters_of(text: str) -> list[tuple[str, str]]:
    if text.strip() == "void":
        return []
    found = [declared(parameter) for parameter in text.split(",")]
    return [(name, base + stars) for base, stars, name, _ in found]


def short(name: str) -> str:
    return name.removeprefix("flashjit_").removeprefix("FLASHJIT_")


def listed(before: str, items: list[str], after: str) -> list[str]:
    """On one line, or a line for each item, as ruff does."""
    line = f"{before}{', '.join(items)}{after}"
    indent = " " * (len(before) - len(before.lstrip()))
    return (
        [line]
        if len(line) <= WIDTH
        else [before, *(f"{indent}    {item}," for item in items), indent + after]
    )


class Python:
    """ctypes. A pointer is c_void_p, except to text."""

    path = "tools/python/flashjit/_c_interface.py"

    def __init__(self, interface: Interface) -> None:
        self.interface = interface

    @staticmethod
    def class_of(struct: str) -> str:
        return "".join(word.capitalize() for word in short(struct).split("_"))

    def type(self, kind: str) -> str:
        kind = self.interface.aliases.get(kind, kind)
        if kind in self.interface.structs:
            return self.class_of(kind)
        if kind == "const char*":
            return "c_char_p"
        if kind == "const char*const*":
            return "POINTER(c_char_p)"
        return NUMBERS[kind][0] if kind in NUMBERS else "c_void_p"

    def text(self) -> str:
        of_c = self.interface
        lines = [f'"""The C interface by ctypes, {MADE}."""', ""]
        types = ["POINTER", "Structure", "c_char_p", "c_void_p", *(python for python, _ in NUMBERS.values())]
        lines += ["from ctypes import (", *(f"    {name}," for name in sorted(types, key=import_order)), ")"]
        lines += ["from typing import Any", ""]
        passes = (
            "FORWARD",
            "BACKWARD",
            "APPEND",
            "MERGE",
            "QUANTIZE",
            "JVP",
            "BACKWARD_JVP",
            "MAX_CAPTURE_DIMS",
        )
        lines += [f"{short(name)} = {value}" for name, value in of_c.constants if short(name) in passes]
        lines += ["", "#: flashjit_element_type, by the name that programs use.", "ELEMENT_TYPES = {"]
        lines += [
            f'    "{short(name)[8:].lower()}": {value},'
            for name, value in of_c.constants
            if short(name).startswith("ELEMENT_") and value
        ]
        lines += ["}", ""]
        for name, members in of_c.structs.items():
            fields = [f'("{member}", {self.array(*of)})' for member, *of in members]
            lines += [
                "",
                f"class {self.class_of(name)}(Structure):",
                *listed("    _fields_ = [", fields, "]"),
                "",
            ]
        lines += [
            "",
            "#: What each function returns and takes.",
            "SIGNATURES: dict[str, tuple[Any, list[Any]]] = {",
        ]
        for name, (result, parameters) in of_c.functions.items():
            taken = [self.type(kind) for _, kind in parameters]
            returned = "None" if result == "void" else self.type(squeezed(result))
            line = f'    "{name}": ({returned}, [{", ".join(taken)}]),'
            broken = [f'    "{name}": (', f"        {returned},", *listed("        [", taken, "],"), "    ),"]
            lines += [line] if len(line) <= WIDTH else broken
        return "\n".join([*lines, "}", ""])

    def array(self, kind: str, length: str) -> str:
        return f"{self.type(kind)} * {short(length)}" if length else self.type(kind)


def import_order(name: str) -> tuple[int, str]:
    """As ruff sorts: constants, classes, then others."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


class Rust:
    """For the crate flashjit-sys. Pointers keep their types."""

    path = "tools/packaging/rust/src/c_interface.rs"

    def __init__(self, interface: Interface) -> None:
        self.interface = interface

    def type(self, kind: str) -> str:
        if "(" in kind:
            result, _, parameters = kind[:-1].partition("(")
            return self.callback(result, parameters_of(parameters))
        if kind.endswith("*"):
            pointed = squeezed(kind[:-1])
            is_const = pointed.startswith("const ") and "*" not in pointed or pointed.endswith("*const")
            pointed = pointed.removesuffix("const") if "*" in pointed else pointed.removeprefix("const ")
            return f"*{'const' if is_const else 'mut'} {POINTED.get(pointed) or self.type(pointed)}"
        return NUMBERS[kind][1] if kind in NUMBERS else kind

    def callback(self, result: str, parameters: list[tuple[str, str]]) -> str:
        taken = ", ".join(f"{name}: {self.type(kind)}" for name, kind in parameters)
        returned = "" if result == "void" else f" -> {self.type(result)}"
        return f'Option<unsafe extern "C" fn({taken}){returned}>'

    def text(self) -> str:
        of_c = self.interface
        lines = [f"// The C interface, {MADE}.", "", "use core::ffi::{c_char, c_void};", ""]
        lines += [f"pub type {name} = i32;" for name in of_c.aliases]
        lines += [
            f"pub type {name} = {self.callback(result, parameters)};"
            for name, (result, parameters) in of_c.callbacks.items()
        ]
        lines += [
            "",
            *(f"pub const {name}: {self.type_of(name)} = {value};" for name, value in of_c.constants),
        ]
        for name in of_c.opaque:
            lines += ["", "#[repr(C)]", f"pub struct {name} {{", "    _private: [u8; 0],", "}"]
        for name, members in of_c.structs.items():
            lines += ["", "#[repr(C)]", "#[derive(Clone, Copy)]", f"pub struct {name} {{"]
            for member, kind, length in members:
                array = f"[{self.type(kind)}; {length}]" if length else self.type(kind)
                lines.append(f"    pub {self.name_of(member)}: {array},")
            lines.append("}")
        with_size = [name for name, members in of_c.structs.items() if members[0][0] == "struct_size"]
        lines += ["", "crate::zeros_with_size!(", *(f"    {name}," for name in with_size), ");"]
        lines += ["", 'extern "C" {']
        for name, (result, parameters) in of_c.functions.items():
            taken = [f"{self.name_of(parameter)}: {self.type(kind)}" for parameter, kind in parameters]
            returned = "" if result == "void" else f" -> {self.type(squeezed(result))}"
            line = f"    pub fn {name}({', '.join(taken)}){returned};"
            if len(line) <= 132:
                lines.append(line)
            else:
                lines += [f"    pub fn {name}(", *(f"        {one}," for one in taken), f"    ){returned};"]
        return "\n".join([*lines, "}", ""])

    def type_of(self, constant: str) -> str:
        """A number of elements is a usize; codes are i32."""
        return "usize" if constant.startswith("FLASHJIT_MAX_") else "i32"

    @staticmethod
    def name_of(member: str) -> str:
        return "element" if member == "type" else member  # a word of Rust's own


def main() -> None:
    texts = [(ROOT / header).read_text().partition(SHARED)[0] for header in HEADERS]
    interface = Interface("\n".join(texts))
    for language in (Python(interface), Rust(interface)):
        path, text = ROOT / language.path, language.text()
        if sys.argv[1:] != ["--check"]:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{language.path} is not what the headers say: run tools/make_bindings.py")


if __name__ == "__main__":
    main()

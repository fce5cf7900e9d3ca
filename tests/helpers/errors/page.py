"""docs/reference/errors.md and the messages in the sources; both with <> for what varies."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "reference" / "errors.md"
BUILTIN = {
    "ArgumentError": ValueError,
    "DtypeError": TypeError,
    "UnavailableError": NotImplementedError,
    "MissingExtensionError": ImportError,
    "PeerTimeoutError": RuntimeError,
    "Error": Exception,
}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.cache
def documented() -> dict[str, list[str]]:
    """Templates by the name of their section."""
    return {name: re.findall(r"```\n(.*)\n```", text) for name, text in sections().items()}


def anonymous(template: str) -> str:
    return re.sub(r"<[^<>]*>", "<>", template)


def to_regex(template: str) -> re.Pattern[str]:
    return re.compile(".+?".join(map(re.escape, anonymous(template).split("<>"))), re.DOTALL)


def python_templates() -> dict[str, set[str]]:
    """Class (or "Warnings") -> the messages that jax_ep's sources raise or warn with."""
    found: dict[str, set[str]] = {name: set() for name in (*BUILTIN, "Warnings")}
    for path in (REPOSITORY / "jax_ep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name in found:
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                        found[node.name].add(template_of(call.args[0]))
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and call.args and isinstance(call.func, ast.Name):
                warns = call.func.id == "warn_once"
                name, message = "Warnings" if warns else call.func.id, call.args[-1]
                if name in found and isinstance(message, ast.JoinedStr | ast.Constant):
                    found[name].add(template_of(message))
    return found


def template_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value
    assert isinstance(node, ast.JoinedStr), ast.unparse(node)
    return "".join(v.value if isinstance(v, ast.Constant) else "<>" for v in node.values)


def compiled_templates() -> set[str]:
    """The messages of ffi/: string literals as they are, other arguments as <>."""
    found = set()
    sources = set((REPOSITORY / "ffi").rglob("*.cc")) | set((REPOSITORY / "ffi").rglob("*.h"))
    for path in sources - {REPOSITORY / "ffi/runtime/status.h"}:  # which defines these functions
        for match in re.finditer(
            r"\b(?:InvalidArgument|FailedPrecondition|Unimplemented)\(", path.read_text()
        ):
            arguments = ast.parse(
                "f(" + cpp_arguments(path.read_text()[match.end() :]) + ")", mode="eval"
            ).body
            found.add(re.sub("(<>)+", "<>", "".join(arguments_to_parts(arguments))))
    return found


def cpp_arguments(text: str) -> str:
    """Up to the closing parenthesis, with every C++ expression that is no literal replaced by a name."""
    depth, parts, current, index = 0, [], "", 0
    while True:
        literal = re.match(r'"(?:[^"\\]|\\.)*"', text[index:])
        if literal:
            current, index = current + literal[0], index + literal.end()
            continue
        char = text[index]
        if (char == ")" and depth == 0) or (char == "," and depth == 0):
            parts.append(current.strip())
            current = ""
            if char == ")":
                break
        else:
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(char, 0)
            current += char
        index += 1
    return ", ".join(
        part if re.fullmatch(r'(?:"(?:[^"\\]|\\.)*"\s*)+', part) else "x" for part in parts
    )


def arguments_to_parts(call: ast.expr) -> list[str]:
    assert isinstance(call, ast.Call)
    return [a.value if isinstance(a, ast.Constant) else "<>" for a in call.args]

"""What the kernels' dialect forbids, found in their text (metal/README.md has the rules).

Address spaces are checked by a compiler (`compiler.check_types`).
"""

import re

FORBIDDEN = {
    r"\bstatic\b": "static",
    r"\bdouble\b": "double",
    r"(?<![\w.])(\d+\.\d*|\.\d+)([eE][+-]?\d+)?(?![\w.])": "a double literal (write 1.0f)",
    r"(?<![\w.])\d+[eE][+-]?\d+(?!\w)": "a double literal (write 1e3f)",
    r"\[[\s&=\w,]*\]\s*(\([^()]*\))?\s*(mutable\s*)?(->\s*\w+\s*)?\{": "a lambda",
    r"\b(new|delete|throw|try|virtual|goto|dynamic_cast)\b": "what GPUs do not have",
}

_KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "static_assert", "decltype"}


class DialectError(Exception):
    """A kernel's text leaves the dialect."""


def check(text: str) -> None:
    """Raise DialectError where the text of a kernel says what not all three preludes can."""
    text = stripped(text)
    for pattern, name in FORBIDDEN.items():
        if found := re.search(pattern, text):
            line = text.count("\n", 0, found.start()) + 1
            raise DialectError(f"line {line}: {name}: {found.group().strip()!r}")
    if circle := recursion(text):
        raise DialectError(f"recursion: {' -> '.join(circle)}")


def stripped(text: str) -> str:
    """Text without comments, strings and preprocessor lines; line numbers stay."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())  # noqa: E731
    text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)
    text = re.sub(r'"(\\.|[^"\\\n])*"', blank, text)
    return re.sub(r"^[ \t]*#(\\\n|[^\n])*", blank, text, flags=re.M)


def recursion(text: str) -> list[str] | None:
    """A circle of calls among the functions that the text defines, if there is one."""
    calls = {name: set(_calls(body)) for name, body in functions(text)}
    for start in calls:
        paths = [[start]]
        seen = set()
        while paths:
            path = paths.pop()
            for called in calls.get(path[-1], ()):
                if called == start:
                    return [*path, start]
                if called not in seen:
                    seen.add(called)
                    paths.append([*path, called])
    return None


def functions(text: str) -> list[tuple[str, str]]:
    """Names and bodies of the functions that stripped text defines."""
    found = []
    for match in re.finditer(r"\b(\w+)\s*\(", text):
        end = _closing(text, match.end() - 1)
        after = re.match(r"\s*(const\s*)?\{", text[end:])
        if after and match.group(1) not in _KEYWORDS:
            opening = end + after.end() - 1
            found.append((match.group(1), text[opening : _closing(text, opening)]))
    return found


def _calls(body: str) -> list[str]:
    return re.findall(r"\b(\w+)\s*(?:<[^;{}()]*>)?\s*\(", body)


def _closing(text: str, opening: int) -> int:
    """The index after the bracket that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += text[i] in "({"
        depth -= text[i] in ")}"
        if depth == 0:
            return i + 1
    return len(text)

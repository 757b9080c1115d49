"""The tools of the demo's agents. They are really executed, on the Python standard library and on a small project.

Outputs are the same on every run (sorted, times and folders taken out), so that both modes see the same text.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvpilot.replay.text import TextMaker

TEST_TIMEOUT_S = 60

_PROJECT = {
    "slugs.py": '''"""Titles to URL slugs."""

import re
import unicodedata


def slugify(title: str, limit: int = 60) -> str:
    """Lower case, words joined by hyphens, at most ``limit`` characters, cut at a word."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", plain.lower())
    slug = ""
    for word in words:
        longer = f"{slug}-{word}" if slug else word
        if len(longer) > limit:
            break
        slug = longer
    return slug


def unique(slug: str, taken: set[str]) -> str:
    """``slug``, with a number behind it if it is taken."""
    if slug not in taken:
        return slug
    number = 1
    while f"{slug}-{number}" in taken:
        number += 1
    return f"{slug}-{number}"
''',
    "test_slugs.py": """import unittest

from slugs import slugify, unique


class SlugifyTest(unittest.TestCase):
    def test_words_are_joined(self):
        self.assertEqual(slugify("Hello,  World!"), "hello-world")

    def test_accents_are_folded(self):
        self.assertEqual(slugify("Crème brûlée"), "creme-brulee")

    def test_cut_at_a_word(self):
        self.assertEqual(slugify("one two three", limit=9), "one-two")

    def test_a_first_word_that_is_too_long_is_cut(self):
        self.assertEqual(slugify("incomprehensibilities", limit=10), "incomprehe")


class UniqueTest(unittest.TestCase):
    def test_free(self):
        self.assertEqual(unique("a", set()), "a")

    def test_taken(self):
        self.assertEqual(unique("a", {"a", "a-2"}), "a-2")


if __name__ == "__main__":
    unittest.main()
""",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool and its arguments, as an agent's script has them."""

    name: str
    arguments: dict[str, str | int]


SCHEMAS = [
    {"name": "list_dir", "parameters": {"path": "folder below the library or the project"}},
    {"name": "read_file", "parameters": {"path": "file", "first": "first line, from 1"}},
    {"name": "grep", "parameters": {"pattern": "regular expression", "path": "folder or file"}},
    {"name": "run_tests", "parameters": {"path": "folder with a test suite"}},
]


class Toolbox:
    """Executes tool calls below the standard library (``lib/…``) and a small project (``project/…``)."""

    def __init__(self, project: Path, texts: TextMaker) -> None:
        self._roots = {"lib": Path(sysconfig.get_paths()["stdlib"]), "project": project}
        self._texts = texts

    def run(self, call: ToolCall, tokens: int) -> str:
        """The call's output, clipped to ``tokens`` tokens. What goes wrong is part of the output."""
        arguments = call.arguments
        path = str(arguments.get("path", ""))
        try:
            if call.name == "list_dir":
                output = self._list(path)
            elif call.name == "read_file":
                output = self._read(path, int(arguments.get("first", 1)))
            elif call.name == "grep":
                output = self._grep(str(arguments["pattern"]), path)
            elif call.name == "run_tests":
                output = self._tests(path)
            else:
                output = f"no such tool: {call.name}"
        except (OSError, UnicodeDecodeError, re.error, subprocess.SubprocessError) as error:
            output = f"{type(error).__name__}: {error}"
        return self._texts.clip(output, tokens)

    def tokens(self, text: str) -> int:
        return self._texts.count(text)

    def _path(self, path: str) -> Path:
        root, _, rest = path.partition("/")
        if root not in self._roots or ".." in rest.split("/"):
            raise FileNotFoundError(path)
        return self._roots[root] / rest

    def _list(self, path: str) -> str:
        entries = sorted(p for p in self._path(path).iterdir() if p.name != "__pycache__")
        return "\n".join(f"{p.name}/" if p.is_dir() else f"{p.name}  {p.stat().st_size}" for p in entries)

    def _read(self, path: str, first: int) -> str:
        lines = self._path(path).read_text().splitlines()
        return "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1) if number >= first)

    def _grep(self, pattern: str, path: str) -> str:
        wanted = re.compile(pattern)
        base = self._path(path)
        found = []
        for file in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            name = file.relative_to(base).as_posix() if base.is_dir() else file.name
            for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
                if wanted.search(line):
                    found.append(f"{name}:{number}:{line}")
        return "\n".join(found) or "no matches"

    def _tests(self, path: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "unittest", "-v"],
            cwd=self._path(path),
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT_S,
            check=False,
        )
        output = re.sub(r"\bin \d+\.\d+s", "in a moment", done.stderr + done.stdout)
        return output.replace(str(self._path(path)), "project") + f"\nexit code {done.returncode}"


@contextmanager
def small_project() -> Iterator[Path]:
    """A folder with a small project and its test suite (two of its tests fail), removed at the end."""
    with TemporaryDirectory(prefix="kvpilot-demo-project-") as folder:
        for name, text in _PROJECT.items():
            (Path(folder) / name).write_text(text)
        yield Path(folder)

"""Which programs a tool call runs, read from its arguments: what tells best how long it takes.

A shell line is named by its first and last program, each with the subcommand that decides what it does: ``git diff``,
``pytest … tail``, ``pip install … python -m pytest``. Changing the folder and setting the environment up are no
programs; what stands in here-documents, comments and quotes is none either. Never raises, and reads at most
``MAX_CHARS`` of a line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_CHARS = 2000
"""Of a longer line the beginning and the end are read: three quarters and one."""
MAX_NAME = 60
LINE_ARGUMENTS = ("command", "cmd", "script", "code", "commands", "input")
"""Names of the argument with the line to run: Claude Code's Bash and OpenHands' execute_bash, Codex's exec_command,
others'."""
_SHELL_TOOLS = re.compile(
    r"(?i)^(bash|shell|sh|zsh|powershell|pwsh|terminal|cmd|console|"
    r"(local_|remote_)?(run|exec|execute)?_?(in_)?(the_)?(bash|shell|terminal|command|cmd)(_(tool|command|cmd|exec))?|"
    r"container\.exec|exec|execute|unified_exec)$"
)
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(?s:.*?)(?:^[ \t]*\2[ \t]*$|\Z)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_SEPARATORS = re.compile(r"&&|\|\|?|;|\n|&")
_ASSIGNMENT = re.compile(r"^\w+\+?=")
_SIGNS = frozenset("();<>|&\n")
_WITH_SUBCOMMAND = re.compile(
    r"git|gh|go|pip|pip3|uv|poetry|npm|pnpm|yarn|bun|npx|cargo|mvn|gradle|dotnet|apt|apt-get|conda|"
    r"docker|podman|kubectl|helm|terraform|mise|make|just|rustup|brew|systemctl|aws|gcloud|az"
)
_RUNNERS = ("run", "exec", "compose", "tool")
"""Subcommands whose own argument decides: ``npm run test``, ``docker compose up``."""
_SETTING_UP = re.compile(r"cd|pushd|popd|source|\.|export|set|unset|umask|alias|shopt|ulimit")
_WRAPPERS = re.compile(r"sudo|env|time|nohup|exec|command|stdbuf|nice|ionice|setsid|timeout|gtimeout")
_PYTHON = re.compile(r"^python[\d.]*$")
_NUMBER = re.compile(r"^[\d.]+[smhd]?$")


def program_of(tool: str, arguments: Mapping[str, Any]) -> str | None:
    """The programs of a tool call; None where it runs no shell line."""
    if _SHELL_TOOLS.match(tool.rpartition("__")[2]) is None:
        return None
    found = next((arguments[name] for name in LINE_ARGUMENTS if arguments.get(name)), None)
    return programs(_line(found))


def _line(found: object) -> str:
    """A line, or a list of words as Codex's shell takes: ``["bash", "-lc", "git diff"]``."""
    if isinstance(found, str):
        return found
    words = [word for word in found if isinstance(word, str)] if isinstance(found, list) else []
    if len(words) >= 3 and words[0].rpartition("/")[2] in ("bash", "sh", "zsh") and words[1].startswith("-"):
        return words[2]
    try:
        return shlex.join(words)
    except ValueError:
        return ""


def programs(line: str) -> str | None:
    """First … last program of a shell line with their subcommands; None where it has none."""
    if len(line) > MAX_CHARS:
        line = line[: 3 * MAX_CHARS // 4] + "\n" + line[-MAX_CHARS // 4 :]
    line = line.replace("\\\n", " ")
    line = _COMMENT.sub("", _HERE_DOCUMENT.sub(r"\3\n", line))
    names = [name for words in _commands(line) if (name := _name(words)) is not None]
    if not names:
        return None
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _commands(line: str) -> Iterator[list[str]]:
    """The words of each simple command."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
        yield from _split(list(lexer))
    except ValueError:  # an open quote, say, where a long line was cut
        yield from (part.split() for part in _SEPARATORS.split(line))


def _split(words: Iterable[str]) -> Iterator[list[str]]:
    command: list[str] = []
    target = False
    for word in words:
        if word and not _SIGNS.issuperset(word):
            if not target:
                command.append(word)
            target = False
        elif "<" in word or ">" in word:
            target = True  # of a redirection: the next word is a file
        else:
            yield command
            command, target = [], False
    yield command


def _name(words: list[str]) -> str | None:
    """The program of a simple command, with the subcommand that decides what it does."""
    rest = _unwrapped(words)
    if not rest or _SETTING_UP.fullmatch(rest[0]) or not any(sign.isalnum() for sign in rest[0]):
        return None
    program = rest[0].replace("\\", "/").rstrip("/").rpartition("/")[2]
    more = rest[1:]
    if _PYTHON.match(program) and more and more[0] in ("-m", "-c"):
        parts = [program, more[0], *(more[1:2] if more[0] == "-m" else ())]
    elif _WITH_SUBCOMMAND.fullmatch(program):
        parts = [program, *_subcommand(more)]
    else:
        parts = [program]
    return " ".join(parts)[:MAX_NAME]


def _subcommand(words: list[str]) -> list[str]:
    """The first words that are no options (nor values of ``-C`` and the like, which take one)."""
    found: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith("-"):
            skip = not skip and word in (
                "-C",
                "-c",
                "-f",
                "--prefix",
                "--directory",
                "-p",
                "-n",
                "--namespace",
            )
            if found:
                break
            continue
        found.append(word)
        if word not in _RUNNERS or len(found) == 2:
            break
    return found


def _unwrapped(words: list[str]) -> list[str]:
    """Without leading assignments and programs that only run another one (``sudo``, ``timeout 60``)."""
    rest = list(words)
    wrapped = False
    while rest:
        if _WRAPPERS.fullmatch(rest[0]):
            wrapped = True
        elif not (_ASSIGNMENT.match(rest[0]) or (wrapped and (rest[0][:1] == "-" or _NUMBER.match(rest[0])))):
            break
        rest.pop(0)
    return rest

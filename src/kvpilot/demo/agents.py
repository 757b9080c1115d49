"""The demo's three coding agents and the short jobs of other tenants: scripts, not decisions of the model.

What a small or random model writes would not be worth following, so each agent does the same steps every time;
its tool calls are really executed and what they print really goes into its context.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpilot.demo.tools import SCHEMAS, Toolbox, ToolCall
from kvpilot.replay.text import TextMaker

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Script:
    """An agent's task, the file it has open, and the tool calls of each of its steps."""

    name: str
    task: str
    opened: ToolCall
    steps: tuple[tuple[ToolCall, ...], ...]


def _read(path: str, first: int = 1) -> ToolCall:
    return ToolCall("read_file", {"path": path, "first": first})


SCRIPTS = (
    Script(
        "decoder",
        "Find out how json reports the place of a syntax error, and whether it could name the key.",
        _read("lib/json/decoder.py"),
        (
            (ToolCall("grep", {"pattern": "JSONDecodeError|errmsg", "path": "lib/json"}),),
            (_read("lib/json/scanner.py"),),
            (ToolCall("list_dir", {"path": "lib/json"}), _read("lib/json/__init__.py", 180)),
        ),
    ),
    Script(
        "tests",
        "The project's test suite fails. Find out why and say what to change.",
        _read("lib/unittest/case.py", 200),
        (
            (ToolCall("run_tests", {"path": "project"}), _read("project/test_slugs.py", 20)),
            (_read("project/slugs.py"),),
            (ToolCall("grep", {"pattern": "def slugify|def unique|limit", "path": "project"}),
             _read("lib/unittest/result.py")),
        ),
    ),
    Script(
        "timeouts",
        "Explain how asyncio.timeout cancels a task and tells that from somebody else's cancellation.",
        _read("lib/asyncio/timeouts.py"),
        (
            (ToolCall("grep", {"pattern": "uncancel|cancelling", "path": "lib/asyncio"}),),
            (_read("lib/asyncio/taskgroups.py", 40),),
            (_read("lib/asyncio/tasks.py", 90),),
        ),
    ),
)  # fmt: skip

JOB_FILES = (
    "argparse.py", "ast.py", "bdb.py", "calendar.py", "configparser.py", "csv.py", "dataclasses.py",
    "datetime.py", "difflib.py", "doctest.py", "enum.py", "fractions.py", "ftplib.py", "functools.py",
    "gettext.py", "gzip.py", "heapq.py", "imaplib.py", "inspect.py", "ipaddress.py", "locale.py",
    "mailbox.py", "nntplib.py", "optparse.py", "pathlib.py", "pdb.py", "pickle.py", "platform.py",
    "plistlib.py", "pprint.py", "random.py", "shutil.py", "smtplib.py", "socket.py", "ssl.py",
    "statistics.py", "string.py", "subprocess.py", "tarfile.py", "textwrap.py", "threading.py",
    "timeit.py", "tokenize.py", "traceback.py", "turtle.py", "types.py", "typing.py", "uuid.py",
    "warnings.py", "weakref.py", "zipfile.py",
)  # fmt: skip
"""Documents other tenants ask about, in this order; those a Python version lacks are passed over."""

JOB_SYSTEM = "You answer questions about a document. Quote the lines you rely on. Be brief."
JOB_QUESTIONS = ("What is this module for?", "Which of its functions may raise, and when?")


@dataclass(slots=True)
class Agent:
    """One agent at work: its messages so far, and the script's next step."""

    script: Script
    session: str
    toolbox: Toolbox
    result_tokens: int
    messages: list[Message] = field(default_factory=list)
    step: int = 0

    def begin(self, system: str, opened_tokens: int) -> None:
        opened = self.toolbox.run(self.script.opened, opened_tokens)
        path = self.script.opened.arguments["path"]
        task = f"{self.script.task}\n\nThe file {path} is open in the editor:\n{opened}"
        self.messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]

    @property
    def done(self) -> bool:
        return self.step == len(self.script.steps)

    def replied(self, content: str) -> None:
        """The model's reply, with the script's tool calls in place of those it might have made."""
        reply: Message = {"role": "assistant", "content": content}
        if not self.done:
            reply["tool_calls"] = [
                {
                    "id": f"{self.script.name}-{self.step}-{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for number, call in enumerate(self.script.steps[self.step])
            ]
        self.messages.append(reply)

    def run_tools(self) -> None:
        """Execute this step's tool calls; their results are the next messages."""
        calls = self.script.steps[self.step]
        for number, call in enumerate(calls):
            self.messages.append(
                {
                    "role": "tool",
                    "tool_call_id": f"{self.script.name}-{self.step}-{number}",
                    "content": self.toolbox.run(call, self.result_tokens // len(calls)),
                }
            )
        self.step += 1


def system_prompt(texts: TextMaker, tokens: int) -> str:
    """The agents' shared system prompt: instructions, tool schemas, and a reference to fill ``tokens`` tokens."""
    import logging.config
    import unittest.mock

    instructions = (
        "You are a careful coding agent. Work in small steps. Look before you change anything: list folders, "
        "read files, search them, and run the tests. Say in one sentence what you will do, then call a tool. "
        "Never invent a file or a line you have not seen. Tools:\n"
    )
    reference = "\n\n".join(
        text for module in (unittest, unittest.mock.Mock, logging) if (text := module.__doc__)
    )
    house_rules = "\n".join(f"{n}. {line}" for n, line in enumerate(_ZEN, 1))
    filler = "\n\n".join([house_rules, reference, *(json.__doc__ or "", logging.config.__doc__ or "")])
    text = instructions + json.dumps(SCHEMAS, indent=1) + "\n\nHouse rules and references:\n" + filler
    return texts.clip(text, tokens)


_ZEN = (
    "Read the error message to its end before you look at the code.",
    "Prefer the smallest change that makes the failing test pass and keeps the others passing.",
    "A test that fails may be wrong: compare it with the documentation of what it tests.",
    "Quote file and line for every claim about the code.",
    "Do not reformat code that you do not change.",
    "When two explanations fit, find the observation that tells them apart, and make it.",
)


def job_documents(toolbox: Toolbox, tokens: int, wanted: int) -> list[str]:
    """The first ``wanted`` documents of that length; files that are missing or too short are passed over."""
    documents: list[str] = []
    for name in JOB_FILES:
        if len(documents) == wanted:
            break
        text = toolbox.run(_read(f"lib/{name}"), tokens)
        if toolbox.tokens(text) > 0.9 * tokens:
            documents.append(f"{name}\n{text}")
    return documents


def job_messages(document: str, replies: Sequence[str]) -> list[Message]:
    """A job's request: the document and the questions so far, with the replies they got."""
    messages: list[Message] = [{"role": "system", "content": JOB_SYSTEM}]
    for number, question in enumerate(JOB_QUESTIONS[: len(replies) + 1]):
        content = f"{document}\n\n{question}" if number == 0 else question
        messages.append({"role": "user", "content": content})
        if number < len(replies):
            messages.append({"role": "assistant", "content": replies[number]})
    return messages

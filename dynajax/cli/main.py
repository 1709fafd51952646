"""From arguments to a command and its exit status. Bad input is one line on standard error and status 2."""

from __future__ import annotations

import io
import itertools
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import tyro

from dynajax.cli import balance, plan, profile, train
from dynajax.errors import DynajaxError

_MARKERS = (tyro.conf.FlagCreatePairsOff,)
_BOX = "│╭╮╰╯─ "


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: what is typed.
        options: frozen dataclass of its flags; its docstrings are the help.
        run: does the work and returns the exit status.
        defaults: other defaults that the options ask for, for a second reading of the same arguments.
    """

    name: str
    options: type
    run: Callable[[Any], int]
    defaults: Callable[[Any], Any] = lambda options: options


COMMANDS = (
    Command("train", train.TrainOptions, train.run, train.defaults),
    Command("plan", plan.PlanOptions, plan.run),
    Command("balance", balance.BalanceOptions, balance.run),
    Command("profile", profile.ProfileOptions, profile.run),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (those of the process if None) name, and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["-h"], ["--help"]):
        print(_overview())
        return 0
    try:
        command, options = _read(words)
        return command.run(options)
    except DynajaxError as error:
        message = " ".join(str(error).split())
        print(f"dynajax: {message}", file=sys.stderr)
        if "--json" in words:
            print(json.dumps({"error": message}))
        return 2
    except KeyboardInterrupt:
        print("dynajax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _overview() -> str:
    lines = (f"  {c.name:<10} {(c.options.__doc__ or '').splitlines()[0]}" for c in COMMANDS)
    return "\n".join(["usage: dynajax COMMAND [flags]", "", *lines, "", "Flags: dynajax COMMAND --help"])


def _read(words: list[str]) -> tuple[Command, Any]:
    named = {command.name: command for command in COMMANDS}
    if not words or words[0] not in named:
        got = f"{words[0]!r} is no command" if words else "no command given"
        raise DynajaxError(f"{got}; take one of: {', '.join(named)}")
    command, flags = named[words[0]], words[1:]
    options = _parse(command, flags)
    defaults = command.defaults(options)
    return command, options if defaults is options else _parse(command, flags, defaults)


def _parse(command: Command, flags: list[str], defaults: Any = None) -> Any:
    """Read flags with tyro; its complaint, a box of lines for people, becomes one line.

    Raises:
        DynajaxError: the flags cannot be read.
    """
    program, drawn = f"dynajax {command.name}", io.StringIO()
    given = {} if defaults is None else {"default": defaults}
    try:
        with redirect_stderr(drawn):
            return tyro.cli(command.options, args=flags, prog=program, config=_MARKERS, **given)
    except SystemExit as end:
        if not end.code:
            raise
        lines = [line.strip(_BOX) for line in drawn.getvalue().splitlines()[1:]]
        lines = itertools.dropwhile(_is_rule, lines)
        said = itertools.takewhile(lambda line: not _is_rule(line), lines)
        raise DynajaxError(f"{' '.join(said).rstrip('.')}; see {program} --help") from None


def _is_rule(line: str) -> bool:
    """True for the lines that part what is said in a box."""
    return not line.strip("-")

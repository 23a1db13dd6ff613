"""Parses command lines with the parsers of their programs, and runs none of them.

Reads a JSON list of command lines, each a list of words. Prints a JSON object: ``problems`` has a sentence or None for
each of them, and ``options`` all options of the parsers.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import json
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[3]
EXTERNAL = ("coverage", "git", "jq", "patch", "pip", "scancel", "uv")  # nothing but the extras of pip is checked
OF_USERS = ("train.py",)
WITHOUT_PARSER = ("torch_fsdp_tests.device.machine", "build", "pytest", "unittest")
options: set[str] = set()


class Parsed(BaseException):
    """The parser of a program has accepted its arguments."""


class Problem(Exception):
    """A sentence about a command line."""


def _stop_after(method: Callable[..., argparse.Namespace]) -> Callable[..., NoReturn]:
    @functools.wraps(method)
    def parse(parser: argparse.ArgumentParser, *arguments: Any, **more: Any) -> NoReturn:
        options.update(parser._option_string_actions)
        parser.allow_abbrev = False
        raise Parsed(method(parser, *arguments, **more))

    return parse


def check(words: Sequence[str]) -> None:
    """Raise :class:`Problem` if a program would not accept these words."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program == "python":
        _python(arguments)
    elif program in ("run_test.py", "torch-fsdp-tests"):
        _run_test(arguments)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        given = _accepted(get_args_parser().parse_args, arguments)
        _python([given.training_script, *given.training_script_args])
    elif program == "srun":
        _python(arguments[arguments.index("python") + 1 :])
    elif program.startswith(".ci/"):
        _script(program, arguments)
    elif program == "pip":
        known = importlib.metadata.metadata("torch_fsdp_tests").get_all("Provides-Extra") or []
        for extra in re.findall(r"\.\[([\w,]+)\]", " ".join(arguments)):
            if not set(extra.split(",")) <= set(known):
                raise Problem(f"the extras are {', '.join(known)}")
    elif program not in EXTERNAL:
        raise Problem(f"the program {program} is not known; add it to EXTERNAL if nothing of it can be checked")


def _accepted(parse: Callable[[list[str]], object], arguments: list[str]) -> argparse.Namespace:
    """Return the namespace that the parser of a program makes of its arguments, or raise :class:`Problem`."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            parse(arguments)
    except Parsed as parsed:
        return parsed.args[0]
    except SystemExit as left:
        if not left.code:  # --help and --version
            return argparse.Namespace()
        raise Problem(stderr.getvalue().strip()) from None
    raise Problem("its parser was not called")


def _python(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        ast.parse(rest[0])
    elif first != "-m":
        _run_test(rest) if first == "run_test.py" else _script(first, rest)
    elif rest[0] == "torch_fsdp_tests":
        _run_test(rest[1:])
    elif importlib.util.find_spec(rest[0]) is None and rest[0] != "build":
        raise Problem(f"there is no module {rest[0]}")
    elif rest[0] not in WITHOUT_PARSER:
        module = importlib.import_module(rest[0])
        program = importlib.import_module(f"{rest[0]}.__main__") if hasattr(module, "__path__") else module
        given = rest[1:]
        if "--" in given:
            _run_test(given[given.index("--") + 1 :])
        _check_names(_accepted(program.main, given))


def _run_test(arguments: list[str]) -> None:
    from torch_fsdp_tests.dispatch.options import parse

    _check_names(_accepted(lambda given: parse(given, {}, ROOT), arguments))


def _check_names(given: argparse.Namespace) -> None:
    """Words in capitals, and names with globs, are not names of tests."""
    for name in (*getattr(given, "include", ()), *getattr(given, "exclude", ())):
        file = name.partition("::")[0]
        places = (ROOT / "test" / f"{file}{end}" for end in ("", ".py", ".txt"))
        if not (file.isupper() or "*" in file or any(place.exists() for place in places)):
            raise Problem(f"there is no test {name}")


def _script(name: str, arguments: list[str]) -> None:
    path = ROOT / name
    if name.isupper() or name in OF_USERS:
        return
    if not path.is_file():
        raise Problem(f"there is no file {name}")
    if name == ".ci/gpu":
        _accepted(runpy.run_path(str(path))["main"], arguments)


def main() -> None:
    for name in ("parse_args", "parse_intermixed_args"):
        setattr(argparse.ArgumentParser, name, _stop_after(getattr(argparse.ArgumentParser, name)))
    problems: list[str | None] = []
    for words in json.load(sys.stdin):
        try:
            check(words)
            problems.append(None)
        except (Problem, ImportError, IndexError, ValueError, SyntaxError) as error:
            problems.append(f"{type(error).__name__}: {error}" if not isinstance(error, Problem) else str(error))
    print(json.dumps({"problems": problems, "options": sorted(options)}))


if __name__ == "__main__":
    main()

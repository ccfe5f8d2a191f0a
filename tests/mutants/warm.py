"""Many trials from one process that has imported the package and collected every test.

A trial is a fork of it in which functions get the code of the changed file, so that only the tests take time. It can
show that a change is noticed, never that it is not: code that ran on import, and tests that start another Python, see
the package as it was. What survives here is tried in a process that imports the changed file.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import CO_NEWLOCALS
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from types import CodeType, FunctionType

import pytest

from tests.mutants.changes import Change
from tests.mutants.coverage_of import ROOT, SUITE

SOURCE = ROOT / "src"
_Place = tuple[str, str, int]  # file, qualified name, first line


class RunsOnImportError(Exception):
    """The change is in code that ran when the package was imported, or has no function of its own."""


def exchanged(old: str, new: str, path: str) -> dict[_Place, CodeType]:
    """The code of the functions that differ between two texts of a file, by where they stand in the old one."""
    found: dict[_Place, CodeType] = {}
    for before, after in _functions(compile(old, path, "exec"), compile(new, path, "exec")):
        if _content(before) == _content(after):
            continue
        place = _place(before)
        if before.co_name.startswith("<") or before.co_freevars != after.co_freevars or place in found:
            raise RunsOnImportError
        found[place] = after
    return found


def _place(code: CodeType) -> _Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _functions(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The functions of a module, or of a class in it, in both texts; what stands around them must be the same."""
    if _content(old, within=False) != _content(new, within=False):
        raise RunsOnImportError
    inner = [[part for part in code.co_consts if isinstance(part, CodeType)] for code in (old, new)]
    for before, after in zip(*inner, strict=True):
        if before.co_flags & CO_NEWLOCALS:
            yield before, after
        else:
            yield from _functions(before, after)  # a class


def _content(code: CodeType, within: bool = True) -> tuple[object, ...]:
    """What code does, without the lines it stands on; without the functions in it unless `within`."""
    constants = tuple(
        (_content(part) if within else None) if isinstance(part, CodeType) else (type(part), repr(part))
        for part in code.co_consts
    )
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_name, code.co_code, code.co_flags, code.co_exceptiontable, constants, names


class Warm:
    """The process that trials are forked from."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._talk, other = Pipe()
        self._process = get_context("spawn").Process(target=_serve, args=(other,), daemon=False)
        self._process.start()
        other.close()
        self._talk.recv()  # the tests are collected

    def failing(self, change: Change | None, tests: Sequence[str], limit: int) -> list[str] | None:
        """The first of the tests that fails with this change made; without a change all that fail, as they do anyway.

        None: they did not end in time. An empty list says only that these tests, without the processes they start,
        notice nothing. Raises `RunsOnImportError` where nothing could be tried.
        """
        self._talk.send((change, list(tests), limit))
        found: list[str] | RunsOnImportError | None = self._talk.recv()
        if isinstance(found, RunsOnImportError):
            raise found
        return found

    def close(self) -> None:
        self._talk.close()
        self._process.join()


def _serve(talk: Connection) -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    os.chdir(ROOT)
    sys.path[:0] = [str(SOURCE), str(ROOT)]
    os.environ["PYTHONPATH"] = str(SOURCE)
    pytest.main([*SUITE, "-c", "pyproject.toml", "--rootdir", str(ROOT)], plugins=[_Trials(talk)])


class _Trials:
    """A plugin that runs, instead of all tests once, those that are asked for, each time in a fork."""

    def __init__(self, talk: Connection) -> None:
        self._talk = talk
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid.partition("[")[0])

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            items[item.nodeid.partition("[")[0]].append(item)
        functions: defaultdict[_Place, list[FunctionType]] = defaultdict(list)
        gc.unfreeze()  # what is frozen is not among the objects
        for thing in gc.get_objects():
            # By its type: to ask an object for its class may run code of its own.
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(SOURCE)):
                functions[_place(thing.__code__)].append(thing)
        gc.collect()
        gc.freeze()
        self._talk.send(len(session.items))
        for change, tests, limit in self._asked():
            try:
                codes = {} if change is None else _codes(change)
                if not codes.keys() <= functions.keys():
                    raise RunsOnImportError
            except RunsOnImportError as error:
                self._talk.send(error)
                continue
            chosen = [item for test in tests for item in items[test]]
            code_of = {function: code for place, code in codes.items() for function in functions[place]}
            self._talk.send(self._fork(chosen, code_of, limit, first=change is not None))
        return True

    def _asked(self) -> Iterator[tuple[Change | None, list[str], int]]:
        with suppress(EOFError):  # closed by the other side
            while True:
                yield self._talk.recv()

    def _fork(
        self, chosen: Sequence[pytest.Item], codes: dict[FunctionType, CodeType], limit: int, first: bool
    ) -> list[str] | None:
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
            signal.alarm(5 * limit)  # by the clock: for one that waits, and for a busy machine
            for function, code in codes.items():
                function.__code__ = code
            for item, following in zip(chosen, [*chosen[1:], None], strict=False):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if first and self._failed:
                    break
            os.write(write, json.dumps(self._failed).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(process, 0)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what the tests started
        with os.fdopen(read, "rb") as answers:
            said = answers.read()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM):
            return None
        return list(json.loads(said)) if said else []


def _codes(change: Change) -> dict[_Place, CodeType]:
    path = SOURCE / change.path
    text = path.read_text(encoding="utf-8")
    return exchanged(text, change.applied(text), str(path))

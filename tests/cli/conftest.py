"""Shared by the CLI tests: a tiny checkpoint, a captured trace of it, and a runner that splits the streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nosa_sys.cli.app import run
from tests.cli.tiny_checkpoint import write_checkpoint

BUDGETS = ["--topk", "6", "--init-blocks", "1", "--window-size", "32", "--select-blocks", "3", "--block-size", "16"]
KERNEL = ["--kernel-stride", "8"]


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit status and both streams."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The last line of stdout as strict JSON."""

        def refuse(name: str) -> float:
            raise ValueError(f"{name} is no strict JSON")

        return json.loads(self.out.rstrip("\n").split("\n")[-1], parse_constant=refuse)


Nosa = Callable[..., Outcome]


@pytest.fixture
def nosa(capsys: pytest.CaptureFixture[str]) -> Nosa:
    """Run one command line in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text("".join(f"{n} squared is {n * n}. " for n in range(20)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trace(checkpoint: Path, prompt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with scores: about 330 tokens, 21 blocks of 16 against k = 6."""
    directory = tmp_path_factory.mktemp("trace") / "trace"
    captured = ["capture", "--model", str(checkpoint), "--prompt-file", str(prompt), "--max-new-tokens", "20"]
    status = run([*captured, "--scores", "--ignore-eos", *BUDGETS, *KERNEL, "--out", str(directory)])
    assert status == 0
    return directory

"""The ``nosa`` command: one verb a file, user errors as one line on stderr, never a traceback for them."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer

from nosa_sys import __version__
from nosa_sys.cli import (
    bench,
    capture,
    demo,
    doctor,
    eval,
    generate,
    locality,
    ls,
    profile,
    replay,
    report,
    results,
    simulate,
    sweep,
    trace,
    train,
    validate,
)
from nosa_sys.errors import NosaError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# typer vendors click in newer releases and depends on it in older ones; both derive BadParameter from this class.
_USAGE_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")  # type: ignore[assignment]

app = typer.Typer(
    name="nosa",
    help="Decode with NOSA sparse attention and KV offload, record what moves, and price it on other hardware.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nosa-sys {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Decode with NOSA sparse attention and KV offload, record what moves, and price it on other hardware."""


for _module in (
    *(doctor, generate, capture, replay, profile, simulate, sweep, validate, train, eval),
    *(report, results, ls, demo),
):
    app.command(_module.NAME)(_module.command)
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")
app.add_typer(locality.app, name="locality")


def _fail(message: str, code: int) -> int:
    print(f"nosa: {' '.join(message.split())}", file=sys.stderr)
    return code


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch reports a failed allocation as a RuntimeError, told from a fault of the program by its text alone."""
    return isinstance(error, MemoryError) or any(t in str(error) for t in ("allocate memory", "out of memory"))


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit status: 0 done, 1 a check failed, 2 user error, 130 interrupted."""
    command: Any = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name="nosa", standalone_mode=False)
        if result == EXIT_INTERRUPTED:  # newer typer turns Ctrl-C into this status, silently
            return _fail("interrupted", EXIT_INTERRUPTED)
        return result if isinstance(result, int) else 0
    except NosaError as error:
        return _fail(str(error), EXIT_USER_ERROR)
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            return EXIT_USER_ERROR
        return _fail(error.format_message() + "; see nosa --help", EXIT_USER_ERROR)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (nosa ... | head); leave quietly, and keep the interpreter from flushing into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", EXIT_USER_ERROR)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _fail("out of memory; use a shorter prompt, a smaller batch or fewer slots", EXIT_USER_ERROR)


def main() -> None:
    """Entry point of the ``nosa`` script. A terminal that cannot show a character gets its escape, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())


if __name__ == "__main__":
    main()

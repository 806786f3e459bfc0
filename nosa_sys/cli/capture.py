"""``nosa capture``: decode real prompts and record what was selected, moved and how long it took."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.decode_progress import DecodeProgress
from nosa_sys.cli.memory_rows import allocated_rows
from nosa_sys.cli.options import (
    BudgetFlags,
    CacheFlags,
    ConfigFile,
    DecodeFlags,
    DryRun,
    EngineFlags,
    JsonFlag,
    ModelFlags,
    Overwrite,
    Seed,
    field_names,
    grouped,
)
from nosa_sys.cli.requests import build_request, read_prompt
from nosa_sys.cli.settings import Settings, read_yaml_mapping
from nosa_sys.errors import ConfigError
from nosa_sys.methods import get_method
from nosa_sys.outputs import check_output, partial_path, whole_directory

NAME = "capture"


@grouped
def command(
    model: ModelFlags,
    decode: DecodeFlags,
    budgets: BudgetFlags,
    cache: CacheFlags,
    engine: EngineFlags,
    out_dir: Annotated[Path, typer.Option("--out", help="The trace directory to write.")],
    scores: Annotated[bool, typer.Option("--scores", help="Keep scores, for replay under other budgets.")] = False,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Also write timeline.json.gz (runner graph or kernels); each of its clock marks costs 1 to 2 us.",
        ),
    ] = False,
    force_tokens: Annotated[
        str | None,
        typer.Option(
            "--force-tokens",
            metavar="document|DIR|FILE",
            help="Decode given tokens, whatever the model says: what follows the prompt in its file, those of another "
            "trace, a text, or a .json of token ids; at least --max-new-tokens for each prompt.",
        ),
    ] = None,
    seed: Seed = None,
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Decode prompts with recording on; leaves a trace directory and ends with what moved.

    Example: [bold]nosa capture --prompt-file book.txt --max-new-tokens 64 --topk 16 --window-size 128
    --select-blocks 4 --out out/trace[/bold]
    """
    if not decode.prompt_file:
        raise ConfigError("--prompt-file is missing; give a UTF-8 text file (repeat it for a batch)")
    known = {"seed", *field_names(BudgetFlags, CacheFlags, EngineFlags, ModelFlags, DecodeFlags)} - {"prompt_file"}
    settings = Settings(read_yaml_mapping(config, known) if config else {})
    prompts = tuple(read_prompt(path) for path in decode.prompt_file)
    settings.note("prompts", ", ".join(str(path) for path in decode.prompt_file), "flag")
    check_output(out_dir, overwrite=overwrite)
    from nosa_sys.experiments.capture import run_capture  # torch takes its time
    from nosa_sys.experiments.forced_tokens import read_force_tokens

    if force_tokens is not None:
        settings.note("force_tokens", force_tokens, "flag")
    request, need = build_request(
        settings,
        prompts,
        model,
        budgets,
        cache,
        engine,
        decode,
        seed=seed,
        record_scores=scores,
        timed=timeline,
        force_tokens=None if force_tokens is None else read_force_tokens(force_tokens),
    )
    if request.offload is False and not get_method(request.method).dense:
        raise ConfigError(
            "a trace counts the blocks that cross to the device, and with --no-offload none do; leave it out"
        )
    settings.note("timeline", timeline, "flag" if timeline else "default")
    settings.banner(out.stderr(), "capture")
    if dry_run:
        if json:
            out.print_json({"options": settings.to_dict(), "dry_run": True})
        return
    if need is not None:
        need.refuse_unless_fits()
    try:
        with (
            whole_directory(out_dir, overwrite=overwrite, keep_when_interrupted=True) as partial,
            DecodeProgress(out.stderr()) as progress,
        ):
            document = run_capture(request, partial, progress, warn=progress.warn)
    except KeyboardInterrupt:
        kept = partial_path(out_dir)
        out.stderr().print(
            f"the steps so far are in {kept}; keep them with: nosa trace recover {kept} --out {out_dir}-recovered"
        )
        raise
    document = {**document, "options": settings.to_dict(), "trace": str(out_dir)}
    console = out.human(json)
    console.print(summary_table(document))
    for note in document["notes"]:
        console.print(f"note: {note}", markup=False)
    if json:
        out.print_json(document)


def summary_table(document: dict[str, Any]) -> Any:
    """What a capture moved, and how fast it was on which device."""
    share = document["sparse_step_share"]
    floor = document["guaranteed_gamma"]
    floor_text = "no guarantee" if floor is None else f"guaranteed {floor:.4g}"
    rows = [
        ("steps that were sparse", "-" if share is None else f"{share:.1%}"),
        ("new tokens", document["new_tokens"]),
        ("misses per head and step (cold apart)", document["misses_per_head_step"]),
        ("gamma, macro mean", f"{out.number(document['gamma_macro'])} ({floor_text})"),
        ("gamma, block-weighted mean", f"{out.number(document['gamma_weighted'])} ({floor_text})"),
        ("gamma, lowest row", f"{out.number(document['gamma_min'])} ({floor_text})"),
        ("blocks loaded (cold steps)", f"{document['blocks_loaded']:,} ({document['blocks_loaded_cold']:,})"),
        ("H2D, decode", f"{document['h2d_bytes']:,} bytes ({out.size(document['h2d_bytes'])})"),
        ("D2H, decode", f"{document['d2h_bytes']:,} bytes ({out.size(document['d2h_bytes'])})"),
        ("H2D, prefill", out.size(document["prefill_h2d_bytes"])),
        ("prefill tokens/s", document["prefill_tokens_per_s"]),
        ("cold step, ms", document["cold_step_ms"]),
        ("warm step, ms", document["warm_step_ms"]),
        ("tokens/s per sequence", document["tokens_per_s_per_sequence"]),
        ("tokens/s, aggregate", document["tokens_per_s"]),
        ("schedule (in use at the end)", f"{document['schedule']} ({document['schedule_in_use']})"),
        *allocated_rows(document),
    ]
    return out.table(f"capture, measured on {document['device']}", ("figure", "value"), rows)

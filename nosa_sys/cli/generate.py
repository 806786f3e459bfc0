"""``nosa generate``: text from a prompt, streamed as it is decoded."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nosa_sys.cli import console as out
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
    Seed,
    field_names,
    grouped,
)
from nosa_sys.cli.requests import build_request, read_prompt
from nosa_sys.cli.settings import Settings, read_yaml_mapping
from nosa_sys.errors import ConfigError

NAME = "generate"


@grouped
def command(
    model: ModelFlags,
    decode: DecodeFlags,
    budgets: BudgetFlags,
    cache: CacheFlags,
    engine: EngineFlags,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt itself, instead of --prompt-file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    seed: Seed = None,
    config: ConfigFile = None,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Decode one prompt and print the text as it comes.

    Example: [bold]nosa generate --prompt "What is a cache?" --chat --max-new-tokens 80[/bold]
    """
    files = decode.prompt_file or []
    if (prompt is None) == (not files) or len(files) > 1:
        raise ConfigError("give one prompt: either --prompt TEXT or one --prompt-file FILE")
    text = prompt if prompt is not None else read_prompt(files[0])
    if not text:
        raise ConfigError("the prompt is empty; give at least one character")
    known = {"seed", *field_names(BudgetFlags, CacheFlags, EngineFlags, ModelFlags, DecodeFlags)} - {"prompt_file"}
    settings = Settings(read_yaml_mapping(config, known) if config else {})
    request, need = build_request(settings, (text,), model, budgets, cache, engine, decode, seed=seed)
    if json or dry_run:
        settings.banner(out.stderr(), "generate")
    if dry_run:
        if json:
            out.print_json({"options": settings.to_dict(), "dry_run": True})
        return
    if need is not None:
        need.refuse_unless_fits()
    from nosa_sys.engine.engine import Engine  # torch takes its time
    from nosa_sys.experiments.capture import device_name, encode_prompts, open_model

    with out.stderr().status("loading the model"):
        loaded = open_model(request)
    for note in loaded.notes:
        out.stderr().print(f"note: {note}", markup=False)
    tokenizer = loaded.tokenizer
    if chat:
        tokens = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    else:
        tokens = encode_prompts(request, tokenizer)[0]
    decoder = Engine(loaded.model, request.sparse, max_batch=1, **request.engine_options())
    eos = () if request.ignore_eos else tokenizer.eos_ids
    sequence = decoder.add(tokens, request.max_new_tokens, request.sampling, eos)
    stream = tokenizer.stream()
    target = sys.stderr if json else sys.stdout
    for event in decoder.stream():
        if not tokenizer.is_special(event.token):
            target.write(stream.push(event.token))
            target.flush()
    target.write(stream.finish() + "\n")
    target.flush()  # the speed goes to stderr: it must not overtake the text
    summary = decoder.summary()
    speed = out.number(summary["tokens_per_s_per_sequence"])
    out.stderr().print(f"{speed} tokens/s, measured on {device_name(request.device)}", style="dim")
    out.stderr().print("; ".join(f"{name}: {value}" for name, value in allocated_rows(summary)), style="dim")
    if json:
        new_tokens = decoder.outputs[sequence]
        out.print_json(
            {
                "kind": "generate",
                "text": tokenizer.decode(new_tokens),
                "tokens": new_tokens,
                "options": settings.to_dict(),
                **summary,
            }
        )

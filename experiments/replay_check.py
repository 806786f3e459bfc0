"""Replays under other budgets, block sizes, methods and slots against live captures of the same forced tokens."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nosa_sys.engine.sequence import prompt_sha256
from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.capture import CaptureRequest, encode_prompts, open_model, run_capture
from nosa_sys.experiments.demo import PROMPT_TOKENS, SPARSE, document_text
from nosa_sys.experiments.forced_tokens import DOCUMENT, ForcedTokens, forced_facts
from nosa_sys.experiments.replay_figures import GAMMA_BOUND, MISSES_BOUND, by_layer, compare, in_order
from nosa_sys.machine import git_revision, versions
from nosa_sys.models.load import LoadedModel
from nosa_sys.outputs import whole_directory
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from nosa_sys.traces.schema import write_text_whole

STEPS = 200
SLOT_RATIOS = (1.0, 1.25)
BASE_NAME = "base"
ROWS_FILE, LAYERS_FILE, REPORT_FILE = "replay_check.csv", "replay_check_layers.csv", "replay_check.md"


@dataclass(frozen=True)
class Setting:
    """One situation that is both replayed and captured."""

    name: str
    sparse: SparseConfig
    method: str = "nosa"
    slot_ratio: float = 1.0

    @property
    def slots(self) -> int:
        return round(self.sparse.topk * self.slot_ratio)

    @property
    def policy(self) -> str:
        return "exact" if self.slots == self.sparse.topk else "lru"

    @property
    def scored(self) -> bool:
        """Whether its capture keeps scores, so that replays can start from it."""
        return self.name == BASE_NAME and self.slot_ratio == 1.0

    @property
    def label(self) -> str:
        return f"{self.method}-{self.name}-slots-{self.slot_ratio:.2f}"


def settings_around(base: SparseConfig) -> list[Setting]:
    """Half and twice k (ratios kept), select_blocks, and the block (tokens kept); both methods; slots of k and 1.25 k.

    InfLLMv2 has no use for select_blocks.
    """
    k, select, block = base.topk, base.select_blocks, base.block_size
    budgets = {
        BASE_NAME: base,
        f"k-{k // 2}": base.with_topk(k // 2),
        f"k-{2 * k}": base.with_topk(2 * k),
        f"select-{select // 2}": base.with_k_e(k - select // 2),
        f"select-{2 * select}": base.with_k_e(k - 2 * select),
        f"block-{block // 2}": base.with_block_size(block // 2),
        f"block-{2 * block}": base.with_block_size(2 * block),
    }
    return [
        Setting(name, sparse, method, ratio)
        for ratio in SLOT_RATIOS
        for method in ("nosa", "infllmv2")
        for name, sparse in budgets.items()
        if method == "nosa" or not name.startswith("select")
    ]


@dataclass
class ReplayCheck:
    """Captures of one forced text, each made once and kept in ``directory``/traces, and the comparisons between them.

    ``text`` is the document, called ``document`` in the report: its first ``prompt_tokens`` tokens are the prompt, the
    ``steps`` tokens that follow are forced. ``say`` hears what is done, ``command`` is what made it.
    """

    directory: Path
    text: str
    base: SparseConfig
    loaded: LoadedModel
    prompt_tokens: int = PROMPT_TOKENS
    steps: int = STEPS
    document: str = "the Python language reference"
    command: str = ""
    say: Callable[[str], None] = print
    rows: list[dict[str, Any]] = field(default_factory=list)

    def request(self, setting: Setting) -> CaptureRequest:
        """The live capture of a setting."""
        return CaptureRequest(
            sparse=setting.sparse,
            prompts=(self.text,),
            max_new_tokens=self.steps,
            method=setting.method,
            slots=setting.slots,
            policy=setting.policy,
            record_scores=setting.scored,
            force_tokens=ForcedTokens(DOCUMENT),
            ignore_eos=True,
            max_prompt_tokens=self.prompt_tokens,
        )

    def capture(self, setting: Setting) -> Trace:
        """The live trace of a setting, made unless it is there; ConfigError when what is there is of other tokens."""
        directory = self.directory / "traces" / setting.label
        request = self.request(setting)
        if not directory.is_dir():
            begun = time.perf_counter()
            with whole_directory(directory, overwrite=True) as partial:
                run_capture(request, partial, lambda *_: None, self.loaded)
            self.say(f"{setting.label}: captured in {time.perf_counter() - begun:.0f} s")
        trace = Trace.open(directory)
        tokenizer, forced = self.loaded.tokenizer, ForcedTokens(DOCUMENT)
        prompts = encode_prompts(request, tokenizer)
        facts = forced_facts(forced, forced.resolve(request.prompts, prompts, self.steps, tokenizer))
        meta, hashes = trace.meta, [prompt_sha256(prompt) for prompt in prompts]
        found = (meta.model, meta.sparse, meta.method, meta.slots, meta.policy, meta.forced_tokens)
        wanted = (self.loaded.shape, setting.sparse, setting.method, setting.slots, setting.policy, facts)
        if (
            [s.prompt_sha256 for s in meta.sequences] != hashes
            or found != wanted
            or (setting.scored and not trace.has("scores"))
        ):
            raise ConfigError(f"{directory} is a capture of something else; remove it, or give another --out")
        return trace

    def run(self, settings: Iterable[Setting], base_method: str = "nosa") -> None:
        """Replay the base capture of ``base_method`` in each setting, compare with the live capture, write the row."""
        base = Setting(BASE_NAME, self.base, base_method)
        source = self.capture(base)
        for setting in settings:
            row = {"base": base.label, **_described(setting, self.steps)}
            try:
                live = self.capture(setting)
                row |= self._compared(source, live, setting, base)
            except NosaError as error:
                row |= {"result": "failed", "error": " ".join(str(error).split())}
            self.rows.append(row)
            _append(self.directory / ROWS_FILE, _COLUMNS, row)
            write_text_whole(self.directory / REPORT_FILE, report(self, source))
            self.say(_line(row))

    def _compared(self, source: Trace, live: Trace, setting: Setting, base: Setting) -> dict[str, Any]:
        begun = time.perf_counter()
        result = replay(
            source, sparse=setting.sparse, method=setting.method, slots=setting.slots, policy=setting.policy
        )
        seconds = time.perf_counter() - begun
        recorded = in_order(live.selections)
        figures = compare(result.selections, recorded)
        if setting.slot_ratio == 1.0:
            for layer in by_layer(result.selections, recorded):
                names = {"base": base.label, "setting": setting.label}
                _append(self.directory / LAYERS_FILE, _LAYER_COLUMNS, names | layer)
        passed = figures["gamma_holds"] and figures["misses_hold"]
        about = {"error": "", "replay_s": round(seconds, 2), "live_revision": live.meta.git_revision}
        return {**figures, "result": "pass" if passed else "fail", **about}


_FIGURES = (
    *("gamma_macro_replay", "gamma_macro_live", "gamma_macro_diff"),
    *("gamma_weighted_replay", "gamma_weighted_live", "gamma_weighted_diff"),
    *("misses_replay", "misses_live", "misses_diff", "misses_diff_relative", "misses_diff_standard_error"),
    *("same_rows", "same_blocks", "same_rows_first_layer", "gamma_holds", "misses_hold"),
)
_COLUMNS = (
    *("base", "setting", "method", "topk", "block_size", "init_blocks", "window_size", "select_blocks", "slots"),
    *("policy", "steps", "n_rows", *_FIGURES, "result", "error", "replay_s", "live_revision"),
)
_LAYER_COLUMNS = ("base", "setting", "layer", "n_rows", *_FIGURES)


def _described(setting: Setting, steps: int) -> dict[str, Any]:
    budgets = {name: getattr(setting.sparse, name) for name in ("topk", "block_size", "init_blocks", "window_size")}
    budgets["select_blocks"] = setting.sparse.select_blocks
    about = {"setting": setting.label, "method": setting.method, "slots": setting.slots, "policy": setting.policy}
    return about | budgets | {"steps": steps}


def _append(path: Path, columns: tuple[str, ...], row: dict[str, Any]) -> None:
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        rounded = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
        writer.writerow(rounded)


def _line(row: dict[str, Any]) -> str:
    if row["result"] == "failed":
        return f"{row['setting']} from {row['base']}: {row['error']}"
    relative = row["misses_diff_relative"]
    misses = "no live misses" if relative is None else f"misses {relative:+.1%}"
    return f"{row['setting']} from {row['base']}: gamma {row['gamma_macro_diff']:+.4f}, {misses}, {row['result']}"


def report(check: ReplayCheck, source: Trace) -> str:
    """The rows so far as a Markdown table under what they were made from; ``source`` is any of the captures."""
    meta = source.meta
    prompt, forced = meta.sequences[0].prompt_sha256, meta.forced_tokens["sha256"]
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# Replays against live captures of the same forced tokens",
        "",
        f"Command: `{check.command}`. Model {meta.model.name} ({check.loaded.source}), {meta.model.dtype}, "
        f"{meta.device}; {check.prompt_tokens:,} prompt tokens of {check.document} (SHA-256 of the ids {prompt}), the "
        f"{check.steps} tokens that follow forced ({forced}). Nothing is drawn (seed {meta.seed}). Live figures are "
        "measured, replayed ones projected. Cold rows are left out.",
        "",
        f"Compared at revision {git_revision()} (of each capture: live_revision in {ROWS_FILE}); {found}.",
        "",
        f"Pass: gamma (macro and block-weighted mean) within {GAMMA_BOUND}, misses a head and step within "
        f"{MISSES_BOUND:.0%}. s.e.: standard error of the difference over 8 batches of steps. Same blocks: share of a "
        "live row's blocks that the replay selects too. Layer 0: share of its rows with equal selections.",
        "",
        "| replayed from | setting | gamma macro: replay, live | weighted: replay, live | misses: replay, live | "
        "difference (s.e.) | same blocks | layer 0 | result |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in check.rows:
        if row["result"] == "failed":
            lines.append(f"| {row['base']} | {row['setting']} | | | | | | | failed: {row['error']} |")
            continue
        relative, error = row["misses_diff_relative"], row["misses_diff_standard_error"]
        difference = "-" if relative is None or error is None else f"{relative:+.1%} ({error:.1%})"
        lines.append(
            f"| {row['base']} | {row['setting']} | {row['gamma_macro_replay']:.4f}, {row['gamma_macro_live']:.4f} | "
            f"{row['gamma_weighted_replay']:.4f}, {row['gamma_weighted_live']:.4f} | "
            f"{row['misses_replay']:.4f}, {row['misses_live']:.4f} | {difference} | {row['same_blocks']:.3f} | "
            f"{row['same_rows_first_layer']:.3f} | {row['result']} |"
        )
    passed = sum(row["result"] == "pass" for row in check.rows)
    return "\n".join([*lines, "", f"{passed} of {len(check.rows)} rows pass.", ""])


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every row passes, 1 when one does not, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="rows, report and (in traces/) the captures")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--document", type=Path, help="a text of your own; default: Python's language reference")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="settings by name, as nosa-k-8-*")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    settings = [s for s in settings_around(SPARSE) if any(fnmatchcase(s.label, name) for name in options.only)]
    try:
        if not settings:
            known = ", ".join(s.label for s in settings_around(SPARSE))
            raise ConfigError(f"--only {' '.join(options.only)} names no setting; known: {known}")
        text = document_text() if options.document is None else options.document.read_text(encoding="utf-8")
        options.out.mkdir(parents=True, exist_ok=True)
        for name in (ROWS_FILE, LAYERS_FILE):  # rows are made again; captures are kept
            (options.out / name).unlink(missing_ok=True)
        model = CaptureRequest(SPARSE, (text,), options.steps, model=options.model, threads=options.threads)
        check = ReplayCheck(
            directory=options.out,
            text=text,
            base=SPARSE,
            loaded=open_model(model),
            prompt_tokens=options.prompt_tokens,
            steps=options.steps,
            command=" ".join(["python -m nosa_sys.experiments.replay_check", *arguments]),
            say=_say,
        )
        if options.document is not None:
            check.document = options.document.name
        check.run(settings)
        check.run([s for s in settings if s.method == "infllmv2"], "infllmv2")
    except (NosaError, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(row["result"] != "pass" for row in check.rows))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

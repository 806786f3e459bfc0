"""Training, checked: gradients by finite differences, frozen weights bit for bit, resumed runs against unbroken ones.

    python -m nosa_sys.experiments.training_checks --out experiments/results/cpu/training_checks [--device cuda]

Writes ``checks.json``: every comparison as a row, and the worst of each kind beside its bound. All of it runs on a tiny
random model (``training_cases``). On a CPU the Triton kernels run in Triton's interpreter, in float32 alone, and
FlexAttention is held to its output: torch has no backward pass of it there. Where Triton is not installed its kernels
are left out, with a note. ``--device cuda`` checks the compiled forms and nothing else. A CPU takes one to two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nosa_sys.errors import NosaError
from nosa_sys.experiments.decode_bench import run_facts
from nosa_sys.experiments.gradient_checks import MODELS, difference_rows, form_rows, model_form_row, sharing
from nosa_sys.experiments.training_cases import settings, tiny, trainer
from nosa_sys.kernels.launch import NO_TRITON, choose_interpreter, interpreting, require_triton
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import check_device
from nosa_sys.outputs import write_whole
from nosa_sys.training import checkpoint
from nosa_sys.training.loop import LOSS_LOG
from nosa_sys.training.recipe import TRAINED

FILE = "checks.json"
BOUND = 1e-5  # relative errors of gradients in float64
FORM_BOUND = 2e-5  # of forms in float32, scores of about 100 among them
_BASE_FIELDS = ("qkv", "o", "gate_up", "down", "attention_norm", "mlp_norm")


def frozen_row(trained: str, directory: Path) -> dict[str, Any]:
    """Eight steps of a run of stage head or low_rank: tensors of the base that differ in a bit from the model that the
    run began with, and learning ones that did not move."""
    run = trainer(directory, trained=trained)
    learning = {name: tensor.detach().clone() for name, tensor in run.model.parameters.items()}
    run.run()
    before = dict(_base_tensors(tiny()))  # made anew: nothing that the run holds
    changed = [name for name, x in _base_tensors(run.model.base) if not torch.equal(x, before[name])]
    still = [name for name, x in run.model.parameters.items() if torch.equal(x, learning[name])]
    return {
        **{"part": "frozen", "trained": trained, "n_steps": run.step},
        **{"n_frozen": len(before), "n_frozen_changed": len(changed), "changed": changed},
        **{"n_learning": len(learning), "n_learning_still": len(still)},
    }


def _base_tensors(model: LlamaModel) -> Iterator[tuple[str, Tensor]]:
    """Everything but the eviction head, by place."""
    yield from (("embedding", model.embedding), ("final_norm", model.final_norm))
    for index, layer in enumerate(model.layers):
        yield from ((f"{index}.{field}", getattr(layer, field)) for field in _BASE_FIELDS)


def resumed_row(trained: str, directory: Path) -> dict[str, Any]:
    """An unbroken run beside one that ends and begins anew from its files at every step, in float32 on the CPU.

    Compared bit for bit: parameters, both moments of the optimizer, rows of the loss log (held-out losses among them;
    tokens/s aside), and where the reading of the texts stands."""
    n_steps = settings().steps
    unbroken, broken = directory / "unbroken", directory / "broken"
    trainer(unbroken, trained=trained).run()
    starts = []
    for _ in range(n_steps):
        part = trainer(broken, trained=trained, resume=True)
        starts.append(part.step)
        part.run(stop_after_s=0.0)
    ends = [checkpoint.latest(path) for path in (unbroken, broken)]
    assert ends[0] is not None
    assert ends[1] is not None
    left, right = (load_file(end.path / checkpoint.TENSORS) for end in ends if end is not None)
    logs = [[_row(line) for line in (path / LOSS_LOG).read_text().splitlines()] for path in (unbroken, broken)]
    return {
        **{"part": "resumed", "trained": trained, "n_steps": n_steps, "resumed_at": starts},
        "n_tensors": len(left),
        "n_tensors_different": sum(
            name not in right or not torch.equal(tensor, right[name]) for name, tensor in left.items()
        )
        + len(right.keys() - left.keys()),
        "n_log_rows": len(logs[0]),
        "n_log_rows_different": sum(a != b for a, b in zip(*logs, strict=False)) + abs(len(logs[0]) - len(logs[1])),
        "same_state": ends[0].state == ends[1].state,
    }


def _row(line: str) -> dict[str, Any]:
    return {**json.loads(line), "tokens_per_s": 0}


def check_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Every check that ``device`` runs."""
    yield from form_rows(device)
    if device.type == "cuda":
        return
    for method, head, trained in MODELS:
        yield from difference_rows(method, head, trained)
    for method, head in (("nosa", "ed_dma"), ("nosa", "dma"), ("dma", "ed_dma"), ("infllmv2", "none")):
        yield sharing(method, head)
        for form in ("sdpa", "triton") if interpreting() else ("sdpa",):
            yield model_form_row(form, method, head)
    for trained in TRAINED:
        with tempfile.TemporaryDirectory() as scratch:
            yield resumed_row(trained, Path(scratch))
            if trained != "all":
                yield frozen_row(trained, Path(scratch) / "frozen")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst of every kind of row: what, worst, bound, met; a kind without rows is left out."""
    found = []

    def add(what: str, values: list[float], bound: float) -> None:
        if values:
            worst = max(values, key=lambda value: float("inf") if value != value else value)
            found.append({"what": what, "n": len(values), "worst": worst, "bound": bound, "met": worst <= bound})

    def of(part: str, key: str) -> list[float]:
        return [row[key] for row in rows if row["part"] == part]

    add("gradients against finite differences, float64", of("difference", "relative_error"), BOUND)
    for form in sorted({row["form"] for row in rows if row["part"] == "form"}):
        own = [row for row in rows if row["part"] == "form" and row["form"] == form]
        gradients = [error for row in own for name, error in row["errors"].items() if name != "output"]
        add(f"output of form {form}, float32", [row["errors"]["output"] for row in own], FORM_BOUND)
        add(f"gradients of form {form}, float32", gradients, FORM_BOUND)
    add("gradients of a model by form, float32", of("model form", "relative_error"), FORM_BOUND)
    add("frozen tensors changed", of("frozen", "n_frozen_changed"), 0)
    add("learning tensors that did not move", of("frozen", "n_learning_still"), 0)
    add("tensors of a resumed run that differ", of("resumed", "n_tensors_different"), 0)
    add("log rows of a resumed run that differ", of("resumed", "n_log_rows_different"), 0)
    add("resumed runs that read elsewhere", [float(not same) for same in of("resumed", "same_state")], 0)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Check and write; 0 when every bound is met, 1 otherwise, 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    notes = []
    try:
        check_device(options.device)
        device = torch.device(options.device)
        if device.type == "cuda":
            require_triton()
        elif not choose_interpreter():
            notes.append(f"without the Triton kernels: {NO_TRITON}")
    except NosaError as error:
        print(error, file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # exp2 of the interpreter's numpy
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    rows = list(check_rows(device))
    worst = summary(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"kind": "training checks", "status": "measured", "facts": run_facts(options.device), "notes": notes}
    text = json.dumps({**document, "summary": worst, "rows": rows}, indent=1) + "\n"
    write_whole(options.out / FILE, text, overwrite=True)
    for note in notes:
        print(note)
    for line in worst:
        print(f"{'met ' if line['met'] else 'MISS'} {line['what']}: worst of {line['n']} is {line['worst']:.3g}")
    return 0 if all(line["met"] for line in worst) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Evaluation as a whole on tiny models: same documents for all, rows, comparisons, equal bytes, generation."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nosa_sys.cli.eval import figure_tables
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.experiments.equal_bytes import kept_bytes
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.load import LoadedModel
from nosa_sys.models.random import random_model
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.decoding import Request, decode, distinct_share, first_difference
from nosa_sys.training.evaluate import Evaluation, _Cell
from nosa_sys.training.evaluation_settings import EvalSettings, Subject, largest_budget, parse_eval_recipe
from nosa_sys.training.scoring import DocumentScore, score_document
from nosa_sys.training.summaries import summarise
from nosa_sys.training.texts import Document
from tests.cli.tiny_checkpoint import write_checkpoint
from tests.training.small import SHAPE, SPARSE, tiny, tokens

SUBJECTS = [("dense", "full", "none"), ("infllmv2", "infllmv2", "none"), ("nosa", "nosa", "ed_dma")]


def texts(n: int = 3) -> list[Document]:
    sizes = [900 + 10 * i for i in range(n)]
    rng = np.random.default_rng(0)
    made = [" ".join(f"{word}." for word in rng.integers(0, 10**6, size // 6)) for size in sizes]
    return [*(Document(f"{i}.txt", text) for i, text in enumerate(made)), Document("short.txt", "Too short.")]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[EvalSettings, list[dict[str, Any]]]:
    model = str(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))
    settings = EvalSettings(
        name="t",
        subjects=tuple(Subject(name, model=model, method=method, head=head) for name, method, head in SUBJECTS),
        sparse=SPARSE,
        contexts=(640, 400),
        documents=3,
        buckets=2,
        mass_positions=8,
        tasks=("passkey", "frequent_words"),
        cases=2,
        depths=(0.2, 0.8),
        generation_documents=2,
        generation_prompt=200,
        generation_tokens=24,
        dtype="float64",
    )
    calls: list[tuple[str, int, int]] = []
    rows = Evaluation(settings, texts(), progress=lambda *call: calls.append(call)).run()
    assert all(done <= total for _, done, total in calls)
    assert any("generation" in stage for stage, _, _ in calls)
    return settings, rows


def pick(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def test_every_subject_gets_the_same_documents_and_cases(evaluated: tuple[EvalSettings, list[dict[str, Any]]]) -> None:
    _, rows = evaluated
    for kind, labels in (("perplexity", ("document", "part", "n_tokens")), ("task", ("document", "task", "answers"))):
        made = [[tuple(r[k] for k in labels) for r in pick(rows, kind=kind, subject=name)] for name, _, _ in SUBJECTS]
        assert made[0] == made[1] == made[2]
        assert len(made[0]) == {"perplexity": 2 * 3 * 4, "task": 2 * (2 * 2 + 2)}[kind]
    assert "short.txt" not in {row["document"] for row in rows}
    assert {row["document"] for row in pick(rows, kind="perplexity")} == {"0.txt", "1.txt", "2.txt"}


def test_what_has_nothing_to_do_or_no_end_is_refused() -> None:
    common = {"name": "t", "subjects": (Subject("x"),), "sparse": SPARSE, "contexts": (300,)}
    with pytest.raises(ConfigError, match="nothing to do"):
        EvalSettings(**common, documents=0, cases=0, generation_documents=0)
    with pytest.raises(ConfigError, match="buckets=300 exceed the 299"):
        EvalSettings(**common, buckets=300)


def test_each_case_lies_in_a_text_of_its_own_where_no_document_is_scored(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "tiny"))
    settings = EvalSettings(
        name="t", subjects=(Subject("dense", model=model, method="full", head="none"),), sparse=SPARSE, contexts=(300,),
        documents=0, tasks=("passkey",), cases=3, depths=(0.5,), generation_documents=0,
    )  # fmt: skip
    rows = Evaluation(settings, texts(), progress=lambda *call: None).run()
    assert [row["document"] for row in rows] == ["0.txt", "1.txt", "2.txt"]


def test_parts_add_up_and_methods_move_what_they_should(evaluated: tuple[EvalSettings, list[dict[str, Any]]]) -> None:
    _, rows = evaluated
    for row in pick(rows, kind="perplexity", part="all"):
        parts = [
            other
            for other in pick(rows, kind="perplexity", **{k: row[k] for k in ("subject", "context", "document")})
            if "-" in other["part"]
        ]
        assert sum(part["loss_sum"] for part in parts) == pytest.approx(row["loss_sum"])
        assert sum(part["n_tokens"] for part in parts) == row["n_tokens"] == row["context"] - 1
        moved = row["misses_per_head_step"]
        assert (moved == 0) == (row["subject"] == "dense")
        assert row["h2d_bytes_per_step"] == pytest.approx(moved * 4 * 2 * 16 * 16 * 8)
        sparse = row["subject"] != "dense"
        assert [row[name] is not None for name in ("dense_mass", "recall", "gamma_macro", "gamma_weighted")] == [
            sparse
        ] * 4
        assert (row["hot_slots"], row["block_size"]) == (7 if sparse else None, 16)
        assert row["hot_misses_per_head_step"] <= moved
        assert row["hot_h2d_bytes_per_step"] == pytest.approx(row["hot_misses_per_head_step"] * 4 * 2 * 16 * 16 * 8)
    nosa, query = (
        np.mean([r["misses_per_head_step"] for r in pick(rows, kind="perplexity", part="all", subject=name)])
        for name in ("nosa", "infllmv2")
    )
    assert nosa < query


def test_subjects_of_one_model_load_it_once(tmp_path: Path) -> None:
    """A head is another model, budgets and methods are not; each subject's own budgets are what counts."""
    model = str(write_checkpoint(tmp_path / "tiny"))
    wider = dataclasses.replace(SPARSE, topk=9)
    subjects = (
        Subject("a", model=model),
        Subject("b", model=model, sparse=wider),
        Subject("c", model=model, method="dma"),
        Subject("d", model=model, head="none"),
        Subject("e", model=model, sparse=wider, method="full", head="none"),
    )
    settings = EvalSettings(
        name="t", subjects=subjects, sparse=SPARSE, contexts=(300,), documents=1, cases=0, generation_documents=0
    )
    loaded: list[str] = []
    evaluation = Evaluation(settings, texts(1), progress=lambda stage, *_: loaded.append(stage))
    rows = [row for row in evaluation.run() if row["part"] == "all"]
    assert [stage for stage in loaded if stage.startswith("loading")] == ["loading a", "loading d"]
    assert [row["topk"] for row in rows] == [5, 9, 5, 5, None]
    assert len({row["loss_sum"] for row in rows}) == 5


def test_case_10_a_cell_that_was_never_sparse_is_named(tmp_path: Path) -> None:
    """Case 10: 80 tokens are the 5 blocks of the budget, 81 are one more; the dense control has no budget."""
    model = str(write_checkpoint(tmp_path / "tiny"))
    subjects = (Subject("dense", model=model, method="full"), Subject("nosa", model=model))
    settings = EvalSettings(
        name="t", subjects=subjects, sparse=SPARSE, contexts=(80, 81), documents=1, cases=0, generation_documents=0
    )
    evaluation = Evaluation(settings, texts(1), progress=lambda *call: None)
    rows = [row for row in evaluation.run() if row["subject"] == "nosa" and row["part"] == "all"]
    assert [row["recall"] is not None for row in rows] == [False, True]
    named = [note for note in evaluation.notes if "sparse" in note]
    assert named == ["nosa, 80: no step is sparse, k = 5 blocks of 16 tokens hold the whole context"]


def test_gamma_is_weighed_by_blocks_and_by_steps() -> None:
    """A step that keeps 1 of 4 and one that keeps 2 of 2: 3 of 6 blocks, and a mean of 0.625. Step 0 has no gamma."""
    model = random_model(SHAPE, 0, "float64")
    settings = EvalSettings(name="t", subjects=(Subject("a"),))
    cell = _Cell(settings.subjects[0], LoadedModel(model, ""), 4, SPARSE, SPARSE, 5, 7)
    counts = [np.array(values) for values in ([9, 3, 0], [7, 1, 2], [8, 4, 2], [9, 2, 0])]
    zeros = np.zeros(3)
    score = DocumentScore(zeros, zeros > 0, counts[0], counts[1], counts[2], counts[3], None, None)
    row = Evaluation._score_columns(cell, score, 0, 3)
    assert (row["gamma_weighted"], row["gamma_macro"]) == (0.5, 0.625)
    assert (row["misses_per_head_step"], row["hot_misses_per_head_step"]) == (1.5 / 4, 1.0 / 4)
    only_cold = Evaluation._score_columns(cell, score, 0, 1)
    assert [only_cold[name] for name in ("gamma_macro", "gamma_weighted", "misses_per_head_step")] == [None] * 3


def test_figures_of_rows_without_the_newer_columns(evaluated: tuple[EvalSettings, list[dict[str, Any]]]) -> None:
    newer = {"hot_slots", "block_size", "select_blocks", "recall", "gamma_macro", "hot_misses_per_head_step"}
    rows = [{name: value for name, value in row.items() if name not in newer} for row in evaluated[1]]
    (figure,) = pick(summarise(rows, ["dense"]), kind="perplexity", subject="nosa", context=640, part="all")
    assert {figure[name] for name in newer} == {None}
    assert figure["dense_mass"] > 0
    assert len(figure_tables([figure], "dense")) == 2


def test_generation_of_the_baseline_is_its_own_continuation(
    evaluated: tuple[EvalSettings, list[dict[str, Any]]],
) -> None:
    _, rows = evaluated
    for row in pick(rows, kind="generation", subject="dense"):
        assert row["first_difference"] == 24
        assert row["dense_loss_sum"] == pytest.approx(row["baseline_text_loss_sum"])
        assert row["context"] == 224
    drifted = pick(rows, kind="generation", subject="infllmv2", part="all")
    assert len(drifted) == 2
    assert min(row["first_difference"] for row in drifted) < 24
    assert all(row["misses_per_head_step"] > 0 for row in drifted)


def test_summaries_hold_the_baseline_against_itself_never(evaluated: tuple[EvalSettings, list[dict[str, Any]]]) -> None:
    _, rows = evaluated
    figures = summarise(rows, [name for name, _, _ in SUBJECTS])
    (dense,) = pick(figures, kind="perplexity", subject="dense", context=640, part="all")
    (nosa,) = pick(figures, kind="perplexity", subject="nosa", context=640, part="all")
    assert "ratio_to_dense" not in dense
    assert nosa["ratio_to_dense"] == pytest.approx(nosa["perplexity"] / dense["perplexity"])
    assert nosa["ratio_to_dense_low"] <= nosa["ratio_to_dense"] <= nosa["ratio_to_dense_high"]
    losses = [row["loss_sum"] for row in pick(rows, kind="perplexity", subject="nosa", context=640, part="all")]
    assert nosa["perplexity"] == pytest.approx(math.exp(sum(losses) / (3 * 639)))
    assert nosa["perplexity_low"] < nosa["perplexity"] < nosa["perplexity_high"]
    (task,) = pick(figures, kind="task", subject="nosa", context=640, task="passkey")
    assert (task["rows"], task["documents"]) == (4, 2)
    assert 0 <= task["score"] <= 1
    assert {figure["part"] for figure in pick(figures, kind="generation")} >= {"all", "second half"}


def test_decoding_counts_warm_steps_alone() -> None:
    """Two requests of unequal lengths, one at a time, against the prefill's own count of misses."""
    model, ids = tiny("float64"), tokens(180).tolist()
    requests = [Request(ids[:150], 20, SamplingParams()), Request(ids[:120], 9, SamplingParams())]
    done = decode(model, requests, SPARSE, method="nosa", slots=5, max_batch=1)
    expected = 0
    for request, written in zip(requests, done.tokens, strict=True):
        score = score_document(model, [*request.prompt, *written], SPARSE)
        start = len(request.prompt)
        expected += int(score.misses[start : start + request.max_new_tokens - 1].sum())
    assert done.misses_per_head_step == pytest.approx(expected / (19 + 8) / 4)
    assert done.h2d_bytes_per_step == pytest.approx(expected * 2 * 16 * 8 * 8 / 27)


def test_measures_of_text() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert distinct_share([1, 2, 3, 4, 5]) == 1.0
    assert distinct_share([1] * 10) == pytest.approx(1 / 7)
    assert distinct_share([1, 2]) is None


# ---- budgets and settings
@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma"])
@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_equal_bytes_fill_the_budget(method: str, ratio: float) -> None:
    shape = ModelShape.preset("smollm2-135m")
    sparse = SparseConfig(topk=32, window_size=512, select_blocks=8)
    limit = kept_bytes(shape, sparse, "nosa", slots=round(32 * ratio), context=8192, offload=True).total_bytes
    found = largest_budget(shape, sparse, method, ratio=ratio, context=8192, gpu_bytes=limit)

    def cost(topk: int) -> int:
        slots = math.ceil(topk * ratio)
        return kept_bytes(shape, sparse, method, slots=slots, context=8192, offload=True).total_bytes

    assert cost(found.topk) <= limit < cost(found.topk + 1)
    assert (found.topk == 32) == (method == "nosa")
    assert found.topk >= 32
    with pytest.raises(CapacityError, match="smaller window"):
        largest_budget(shape, sparse, method, ratio=ratio, context=8192, gpu_bytes=1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subjects": []}, "subjects must be one or more"),
        ({"subjects": [{"name": "a"}, {"name": "a"}]}, "different names"),
        ({"subjects": [{"name": "a", "methode": "nosa"}]}, "subjects: unknown key 'methode'"),
        ({"subjects": "a"}, "must be a list"),
        ({"baseline": "b"}, "baseline='b'"),
        ({"budget": "gold"}, "must be one of blocks, bytes"),
        ({"tasks": ["riddle"]}, "unknown task 'riddle'"),
        ({"contexts": []}, "contexts="),
        ({"depths": [2.0]}, "depths="),
        ({"depths": [0.5, 0.5]}, "depths=.* must name each value once"),
        ({"contexts": [300, 300]}, "contexts=.* must name each value once"),
        ({"topks": [8, 8]}, "topks=.* must name each value once"),
        ({"tasks": ["passkey", "passkey"]}, "tasks=.* must name each value once"),
        ({"slots": 0.5}, "slots=0.5 must be >= 1"),
        ({"hot_slots": 0.5}, "hot_slots=0.5 must be a multiple of k"),
        ({"hot_slots": -1}, "hot_slots=-1.0 must be >= 0"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_recipe_faults_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml: .*" + message):
        parse_eval_recipe({"name": "x", "subjects": [{"name": "a"}], **change}, "r.yaml")


def test_too_short_texts_are_refused(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "tiny"))
    settings = EvalSettings(name="t", subjects=(Subject("a", model=model),), sparse=SPARSE, contexts=(5000,))
    with pytest.raises(ConfigError, match="0 of 4 texts have the 5000 tokens"):
        Evaluation(settings, texts(), progress=lambda *_: None)

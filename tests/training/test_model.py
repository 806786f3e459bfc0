"""The trainable view: equal to the engine's prefill, only what is asked for learns, low-rank changes merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.errors import ConfigError, NumericsError
from nosa_sys.models.low_rank import FUSED
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import Selected, select
from nosa_sys.training.model import TrainableModel
from nosa_sys.training.recipe import TRAINED
from tests.training.small import SPARSE, tiny, tokens

KINDS = [("nosa", "ed_dma"), ("nosa", "dma"), ("dma", "ed_dma"), ("infllmv2", "none"), ("full", "none")]


@pytest.mark.parametrize(("method", "head"), KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_logits_equal_the_engines_prefill(method: str, head: str, attention: str) -> None:
    """Every position of 150 tokens, sparse from 81 on, against chunked prefill through the engine's memory."""
    model, ids = tiny("float64", head), tokens(150)
    expected = prefill_logits(model, ids.tolist(), SPARSE, method=method, chunk=48).logits
    trainable = TrainableModel(model, SPARSE, method=method, trained="all", attention=attention)
    with torch.no_grad():
        got = trainable.logits(ids)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("n_tokens", [2, 31, 32, 40, 47, 48])
def test_case_21_contexts_with_no_one_or_two_windows(n_tokens: int, attention: str) -> None:
    """Windows of 32 every 16, k of two blocks: positions without a window are there, and the engine's logits."""
    cfg = SparseConfig(block_size=16, topk=2, init_blocks=0, window_size=16, select_blocks=1)
    model, ids = tiny("float64"), tokens(n_tokens)
    expected = prefill_logits(model, ids.tolist(), cfg, chunk=20).logits
    with torch.no_grad():
        got = TrainableModel(model, cfg, trained="all", attention=attention).logits(ids)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first_changed", [1, 70, 96, 149])
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma", "full"])
def test_case_22_later_tokens_change_no_earlier_output(method: str, attention: str, first_changed: int) -> None:
    """Bit for bit, over block edges and where selections are sparse."""
    model = TrainableModel(tiny("float64"), SPARSE, method=method, trained="all", attention=attention)
    ids, other = tokens(150), tokens(150)
    other[first_changed:] = (other[first_changed:] + 1 + tokens(150 - first_changed, 5) % 62) % 64
    with torch.no_grad():
        before, after = model.logits(ids), model.logits(other)
    assert torch.equal(before[:first_changed], after[:first_changed])
    assert not torch.equal(before[first_changed:], after[first_changed:])


def test_the_methods_differ() -> None:
    """Else the test above would hold for a model that ignores its method."""
    made = []
    for method, head in KINDS:
        with torch.no_grad():
            made.append(TrainableModel(tiny("float64", head), SPARSE, method=method, trained="all").logits(tokens(150)))
    for i in range(len(made)):
        for j in range(i):
            assert (made[i] - made[j]).abs().max() > 1e-3


def test_loss_is_the_mean_next_token_loss() -> None:
    ids = tokens(120)
    model = TrainableModel(tiny("float64"), SPARSE)
    with torch.no_grad():
        chances = model.logits(ids).log_softmax(-1)
    expected = -sum(chances[t, ids[t + 1]] for t in range(119)) / 119
    torch.testing.assert_close(model.loss(ids).detach(), expected)


@pytest.mark.parametrize("trained", TRAINED)
def test_only_what_is_asked_for_gets_gradients(trained: str) -> None:
    model = TrainableModel(tiny(), SPARSE, trained=trained, rank=2)
    model.loss(tokens(120)).backward()
    learning = model.parameters
    head = {name for name in learning if name.endswith((".A", ".delta.weight"))}
    assert len(head) == 4
    assert {"head": 0, "all": 14, "low_rank": 16}[trained] == len(learning) - len(head)
    for name, tensor in learning.items():
        assert tensor.grad is not None
        # a has no gradient while b is zero
        assert (tensor.grad.abs().max() > 0) == (not name.endswith(".a")), name
        assert torch.isfinite(tensor.grad).all()
    for tensor in model.frozen().values():
        assert tensor.grad is None
        assert not tensor.requires_grad


@pytest.mark.parametrize("trained", TRAINED)
def test_kept_and_recomputed_activations_give_the_same_bits(trained: str) -> None:
    grads = []
    for recompute in (True, False):
        model = TrainableModel(tiny(), SPARSE, trained=trained, rank=2, recompute=recompute)
        loss = model.loss(tokens(120))
        loss.backward()
        grads.append([loss.detach(), *(tensor.grad for tensor in model.parameters.values())])
    for kept, again in zip(*grads, strict=True):
        assert kept is not None
        assert again is not None
        assert torch.equal(kept, again)


def test_nan_scores_found_on_a_gpu_name_layer_position_head_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels report them: int32 [sparse queries, kv_head], -1 or the block."""
    model = TrainableModel(tiny(), SPARSE)
    plain, layers = select, iter(range(100))

    def reporting(*arguments: Any) -> Selected:
        ids = plain(*arguments)
        assert ids is not None
        errors = torch.full((120 - SPARSE.topk_tokens, 2), -1, dtype=torch.int32)
        if next(layers) == 3:  # the second sequence's second layer
            errors[7, 1] = 2
        return Selected(ids.block_ids, errors)

    monkeypatch.setattr("nosa_sys.training.model.select", reporting)
    with torch.no_grad():
        model.loss(tokens(120))
        model.check_selections()
        model.loss(tokens(120))
        with pytest.raises(NumericsError, match=r"layer 1, row 87, KV head 1, block 2"):
            model.check_selections()
        model.check_selections()


@pytest.mark.parametrize("bad_layer", [0, 1])
def test_case_25_nan_names_the_layer_on_a_cpu_too(bad_layer: int) -> None:
    """Head 1 of one layer is NaN: the first query that ranks is at position 80; one of its candidates 1 to 3 was picked
    by its score already, so the report is of block 1 or 2."""
    model = TrainableModel(tiny("float64"), SPARSE, method="nosa", trained="head")
    with torch.no_grad():
        model.base.layers[bad_layer].A[1] = torch.nan
    place = f"layer {bad_layer}, training, row = position: NaN in the pooled beta of row 80, KV head 1, block [12];"
    with pytest.raises(NumericsError, match=place):
        model.loss(tokens(150))


def test_fresh_head_is_ones_and_seeded() -> None:
    one, two, other = (TrainableModel(tiny(), SPARSE) for _ in range(3))
    for model, seed in ((one, 3), (two, 3), (other, 4)):
        model.start_head(seed)
    for index, layer in enumerate(one.base.layers):
        assert (layer.A == 1).all()
        assert 0.005 < layer.delta.std() < 0.04
        assert torch.equal(layer.delta, two.base.layers[index].delta)
        assert not torch.equal(layer.delta, other.base.layers[index].delta)


def test_engine_model_follows_training_and_holds_the_low_rank_change() -> None:
    model, ids = TrainableModel(tiny("float64"), SPARSE, trained="low_rank", rank=3), tokens(100)
    with torch.no_grad():
        for tensor in model.factors.values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=tensor.dtype)
        changed = model.logits(ids)
    got = prefill_logits(model.engine_model(), ids.tolist(), SPARSE).logits
    torch.testing.assert_close(got, changed, rtol=1e-9, atol=1e-9)
    plain = prefill_logits(tiny("float64"), ids.tolist(), SPARSE).logits
    assert (plain - changed).abs().max() > 1e-2
    assert set(FUSED) == {name.split(".")[4] for name in model.factors}


def test_bfloat16_autocast_keeps_heads_in_float32() -> None:
    """Close to the fp32 loss, with fp32 gradients."""
    ids = tokens(120)
    model = TrainableModel(tiny(), SPARSE)
    exact = float(model.loss(ids).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(ids)
        loss.backward()
    assert float(loss) == pytest.approx(exact, rel=2e-2)
    for tensor in model.head_parameters.values():
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trained": "some"}, "must be one of head, all"),
        ({"attention": "none"}, "must be one of sdpa, flex, triton"),
        ({"trained": "low_rank", "rank": 0}, "rank=0 must be >= 1"),
        ({"method": "infllmv2"}, "no head to train"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainableModel(tiny(), SPARSE, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float32"):
        TrainableModel(tiny("bfloat16"), SPARSE)

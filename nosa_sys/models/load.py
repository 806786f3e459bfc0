"""load_model: a name or a path to a LlamaModel with its tokenizer."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nosa_sys.errors import CheckpointError, ConfigError
from nosa_sys.methods import HEADS
from nosa_sys.model_shape import PRESETS, ModelShape
from nosa_sys.models import smollm2
from nosa_sys.models.config import LlamaConfig
from nosa_sys.models.conversion_cache import open_converted
from nosa_sys.models.eviction_head_weights import describe_adapter, fresh_head, recorded_rope_theta, take_head
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.low_rank import add_low_rank, rank_of
from nosa_sys.models.safetensors_reader import MAX_FILE_NAME, CheckpointTensors
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.models.weights import LM_HEAD, TORCH_DTYPES, base_tensors, head_tensors

# Tensors that a plain Llama layer has no use for although they would change its output: biases and q/k norms.
CHANGES_ARITHMETIC = re.compile(r"model\.layers\.\d+\..*(_proj\.bias|_norm\.weight)")
MAX_NAMED = 8


@dataclass
class LoadedModel:
    """A model ready to run: ``model``, ``tokenizer``, where it came from (``source``) and remarks (``notes``)."""

    model: LlamaModel
    source: str
    notes: list[str] = field(default_factory=list)
    tokenizer_or_none: Tokenizer | None = None

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model, with the dtype it was loaded in."""
        return self.model.shape

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; CheckpointError when the checkpoint came without one."""
        if self.tokenizer_or_none is None:
            raise CheckpointError(f"{self.source} has no tokenizer.json; put the checkpoint's one beside config.json")
        return self.tokenizer_or_none


@dataclass
class _Source:
    tensors: CheckpointTensors
    config: LlamaConfig
    tokenizer: Tokenizer | None
    text: str
    adapter: Path | None = None


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    head: str = "ed_dma",
    adapter: str | Path | None = None,
    convert_dense: bool = False,
    rope_theta: float | None = None,
) -> LoadedModel:
    """Load ``smollm2-135m``, a Hugging Face directory (config.json and safetensors) or a llama GGUF.

    ``dtype`` is float32, bfloat16, float16 or float64. The eviction head comes from ``adapter`` (a safetensors
    file of A and delta; low-rank changes of the base weights in it are added), else from the checkpoint, else
    (smollm2-135m) from the adapter shipped with the package.
    A dense Llama has none: that is an error unless ``head`` is none or ``convert_dense`` asks for a fresh head:
    A = 0, so that beta is 0 and attention unchanged until trained, and delta drawn from N(0, 0.02) with a fixed
    seed. ``rope_theta`` overrides the rotary base, for contexts longer than the model was trained on; where it is left
    out, the one that the record beside ``adapter`` names is used (a note says so), else the model's own.

    Raises CheckpointError naming the file or tensor, ConfigError for a bad argument. Tensors that no Llama has are
    ignored with a warning that names them.

    >>> loaded = load_model("smollm2-135m")  # doctest: +SKIP
    >>> loaded.tokenizer.decode(loaded.tokenizer.encode("A real document"))  # doctest: +SKIP
    'A real document'
    """
    _check_arguments(dtype, device, head, adapter, convert_dense)
    source = _open_source(name_or_path)
    notes: list[str] = []
    opened = None if adapter is None else CheckpointTensors.open_file(Path(adapter))
    recorded = None if opened is None else recorded_rope_theta(opened.source)
    config = _with_rope_theta(source.config.with_dtype(dtype), rope_theta, recorded, notes)
    tensors = {name: source.tensors.take(name, shape) for name, shape in base_tensors(config.shape)}
    if opened is not None:
        if head == "none" and not rank_of(opened):
            raise ConfigError(f"adapter {adapter} holds a head alone, no use with head=none; leave one of them out")
        rank = add_low_rank(tensors, opened, config.shape)
        if rank:
            notes.append(f"base weights changed by {opened.source.name}, rank {rank}")
        if head != "none":
            notes.append(describe_adapter(opened.source))
    if head != "none":
        tensors |= _head_tensors(source, config.shape, opened, convert_dense, notes)
    _report_unknown(source.tensors, config.shape, notes)
    _compare_vocabularies(source, notes)
    model = LlamaModel(config, tensors, head=head, device=device)
    return LoadedModel(model, source.text, notes, source.tokenizer)


def _with_rope_theta(config: LlamaConfig, given: float | None, recorded: float | None, notes: list[str]) -> LlamaConfig:
    """``config`` with the caller's rotary base, else that of the adapter's record, else its own."""
    if given is None:
        if recorded is None or recorded == config.rope_theta:
            return config
        notes.append(f"rope_theta {recorded:g} taken from the adapter's record")
        return dataclasses.replace(config, rope_theta=recorded)
    if not 0 < given < math.inf:
        raise ConfigError(f"rope_theta={given} must be a finite number > 0; the model's own is {config.rope_theta:g}")
    if given != config.rope_theta:
        notes.append(f"rope_theta {config.rope_theta:g} replaced by {given:g}")
    if recorded is not None and recorded != given:
        notes.append(f"rope_theta {given:g} differs from the {recorded:g} of the adapter's record")
    return dataclasses.replace(config, rope_theta=given)


def _check_arguments(dtype: str, device: str, head: str, adapter: str | Path | None, convert_dense: bool) -> None:
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(TORCH_DTYPES)}")
    if head not in HEADS:
        raise ConfigError(f"head={head!r} must be one of {', '.join(HEADS)}")
    if adapter is not None and convert_dense:
        raise ConfigError(f"adapter {adapter} and convert_dense both give an eviction head; leave one of them out")
    check_device(device)


def check_device(device: str) -> None:
    """ConfigError unless ``device`` is the CPU or a GPU that torch sees."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is no torch device; use cpu or cuda") from None
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} must be cpu or cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} asks for a GPU, but this torch sees none; use device cpu")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r}: torch sees {torch.cuda.device_count()} GPUs, numbered from 0")


def _open_source(name_or_path: str | Path) -> _Source:
    path = Path(name_or_path)
    if str(name_or_path) == smollm2.NAME:
        gguf = smollm2.find_gguf()
        converted = open_converted(gguf, smollm2.NAME)
        text = f"{gguf.name} of {gguf.parent.name}"
        return _Source(converted.tensors, converted.config, converted.tokenizer, text, smollm2.ADAPTER)
    if len(path.name) > MAX_FILE_NAME:
        raise CheckpointError(f"no model of a name of {len(path.name)} characters exists; use {smollm2.NAME} or a path")
    if path.is_file() and path.suffix == ".gguf":
        converted = open_converted(path, path.stem)
        return _Source(converted.tensors, converted.config, converted.tokenizer, str(path))
    if path.is_dir():
        if not (path / "config.json").exists():
            raise CheckpointError(f"{path} has no config.json")
        config = LlamaConfig.from_hf(path / "config.json")
        tensors = CheckpointTensors.open_directory(path)
        return _Source(tensors, config, Tokenizer.from_directory(path, config.eos_ids), str(path))
    if str(name_or_path) in PRESETS:
        raise CheckpointError(f"the weights of {name_or_path} are not shipped; download them and give their directory")
    raise CheckpointError(f"no model {str(name_or_path)!r}: use {smollm2.NAME}, a checkpoint directory or a .gguf file")


def _head_tensors(
    source: _Source, shape: ModelShape, adapter: CheckpointTensors | None, convert_dense: bool, notes: list[str]
) -> dict[str, Tensor]:
    carried = [name for name, _ in head_tensors(shape) if name in source.tensors.entries]
    if adapter is not None:
        return take_head(adapter, shape)
    if carried:
        return take_head(source.tensors, shape)
    if convert_dense:
        notes.append("fresh eviction head: A = 0 (beta is 0 until trained), delta from N(0, 0.02), seed 0")
        return fresh_head(shape)
    if source.adapter is not None:
        notes.append(describe_adapter(source.adapter))
        return take_head(CheckpointTensors.open_file(source.adapter), shape)
    missing = next(head_tensors(shape))[0]
    raise CheckpointError(
        f"{source.tensors.source}: tensor {missing} is missing: a dense Llama has no eviction head; give an adapter, "
        "head none, or convert_dense for a fresh head"
    )


def _compare_vocabularies(source: _Source, notes: list[str]) -> None:
    if source.tokenizer is not None and source.tokenizer.vocab_size > source.config.shape.vocab_size:
        message = (
            f"{source.text}: the tokenizer has {source.tokenizer.vocab_size} ids but the model only "
            f"{source.config.shape.vocab_size}; the ids beyond cannot be used"
        )
        notes.append(message)
        warnings.warn(message, stacklevel=3)


def _report_unknown(tensors: CheckpointTensors, shape: ModelShape, notes: list[str]) -> None:
    known = {name for name, _ in base_tensors(shape)} | {name for name, _ in head_tensors(shape)} | {LM_HEAD}
    unknown = sorted(set(tensors.entries) - known)
    for name in unknown:
        if CHANGES_ARITHMETIC.fullmatch(name):
            raise CheckpointError(
                f"{tensors.entries[name].file}: tensor {name} is of no plain Llama; this model would compute wrongly"
            )
    if unknown:
        rest = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
        message = f"{tensors.source}: unknown tensor {', '.join(unknown[:MAX_NAMED])}{rest} ignored"
        notes.append(message)
        warnings.warn(message, stacklevel=3)

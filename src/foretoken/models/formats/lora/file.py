"""The files of an adapter: its settings in adapter_config.json, and its matrices."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import Schema, parse, read_object, shortened
from foretoken.models.formats.weight_files import PICKLES, check_finite

SETTINGS = "adapter_config.json"
MAX_RANK = 8192

Rank = Annotated[int, Field(ge=1, le=MAX_RANK)]

# Unsupported features by the fields that request them.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that were trained whole (modules_to_save)",
    "lora_bias": "biases of its matrices (lora_bias)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "Arrow's router (arrow_config)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# Initializations that also change the model's own weights.
_CHANGES_MODEL = ("pissa", "corda", "olora", "loftq", "lora_ga")


class LoraSettings(Schema):
    """The fields of adapter_config.json that define an adapter's computation."""

    peft_type: str | None = None
    r: Rank = 8  # rank
    lora_alpha: float = 8.0  # the product is scaled by alpha / rank, or by alpha / sqrt(rank) with ``use_rslora``
    # names of the modules, their last parts, or one regular expression; None if it is missing
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None  # likewise, modules without an adapter
    layers_to_transform: list[int] | int | None = None  # numbers of the layers, if ``target_modules`` is a list
    layers_pattern: list[str] | str | None = None  # the part of a name that precedes the layer's number
    rank_pattern: dict[str, Rank] | None = None  # ranks by regular expression of the end of a name
    alpha_pattern: dict[str, float] | None = None  # alphas, likewise
    use_rslora: bool = False
    # names of parameters, or their last parts, such as the stacked matrices of experts
    target_parameters: list[str] | None = None
    peft_version: str | None = None  # version of the library that wrote the adapter; None before 0.18
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        return _of_pattern(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        rank, alpha = self.rank(module), _of_pattern(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, modules: Iterable[str]) -> set[str]:
        """Returns the modules that have an adapter, by PEFT's rules."""
        return {module for module in modules if self._is_target(module)}

    def names_parameter(self, parameter: str) -> bool:
        return _named(self.target_parameters or [], parameter)

    @property
    def outputs_first(self) -> bool:
        """Whether PEFT treated stacks of matrices as [experts, out, in]: from 0.19 on."""
        version = re.match(r"(\d+)\.(\d+)", self.peft_version or "")
        return version is not None and (int(version[1]), int(version[2])) >= (0, 19)

    def _is_target(self, module: str) -> bool:
        targets = self.target_modules
        if targets is None or (self.exclude_modules and _named(self.exclude_modules, module)):
            return False
        if isinstance(targets, str):
            return targets.lower() == "all-linear" or _named(targets, module)
        if module in targets:
            return True
        return _named(targets, module) and self._is_layer(module)

    def _is_layer(self, module: str) -> bool:
        layers = self.layers_to_transform
        if layers is None or layers == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        for pattern in patterns or ["[^.]*"]:
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(match[match.re.groups]) in ([layers] if isinstance(layers, int) else layers)
        return False


def read_settings(folder: Path) -> LoraSettings:
    """Reads the settings of an adapter."""
    file = folder / SETTINGS
    content = read_object(file, hint="the folder of a PEFT adapter has one")
    settings = parse(LoraSettings, content, str(file))
    if reason := _refused(settings, content):
        raise ModelLoadError(f"{file} asks for {reason}, which is not supported; merge it into the model with PEFT")
    _check_patterns(settings, file)
    return settings


def _refused(settings: LoraSettings, content: Mapping[str, Any]) -> str | None:
    """Returns the first unsupported setting; None if all are supported."""
    if settings.peft_type != "LORA":
        return f"an adapter of the type {shortened(settings.peft_type)}, not 'LORA'"
    if settings.bias != "none":
        return f"trained biases (bias={shortened(settings.bias)})"
    for name, what in _REFUSED.items():
        if content.get(name):
            return what
    start = settings.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_CHANGES_MODEL):
        return f"weights of the model that init_lora_weights={start!r} has changed"
    return None


def _check_patterns(settings: LoraSettings, file: Path) -> None:
    """Raises ModelLoadError for a pattern that is no regular expression."""
    layers = settings.layers_pattern
    parts = [layers] if isinstance(layers, str) else [*(layers or [])]
    parts += [*(settings.rank_pattern or {}), *(settings.alpha_pattern or {})]
    wholes = [text for text in (settings.target_modules, settings.exclude_modules) if isinstance(text, str)]
    for text, expression in [(text, f"({text})") for text in parts] + [(text, text) for text in wholes]:
        try:
            re.compile(expression)
        except re.error as error:
            raise ModelLoadError(f"{file} has {text!r}, which is no regular expression ({error})") from None


def _named(names: list[str] | str, module: str) -> bool:
    """Returns whether a regular expression, or one of several names or last parts of names, matches a module."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


TENSORS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


class AdapterFile:
    """Reads the matrices of one adapter. modules: names of the modules that have matrices."""

    def __init__(self, folder: Path, file: Any) -> None:
        self._folder, self._file = folder, file
        self.modules = self._modules(file.keys())

    def _modules(self, names: Iterable[str]) -> frozenset[str]:
        stored: dict[str, set[str]] = {}
        for name in sorted(names):
            if (parsed := _NAME.fullmatch(name)) is None:
                raise self.wrong(f"the tensor {name!r}, which is not supported: LoRA is computed on linear layers")
            stored.setdefault(parsed["module"], set()).add(parsed["part"])
        if not stored:
            raise self.wrong("no tensors")
        for module, parts in stored.items():
            if len(parts) < 2:
                raise self.wrong(f"only one of the two matrices of {module!r}")
        return frozenset(stored)

    def shape(self, module: str, part: str) -> tuple[int, int]:
        """Returns the shape of matrix "A" or "B" of a module. Raises ModelLoadError unless it is a matrix."""
        name = _tensor(module, part)
        shape = tuple(self._file.get_slice(name).get_shape())
        if len(shape) != 2:
            raise self.wrong(f"{name!r} of the shape {shape}, and it should be a matrix")
        return shape[0], shape[1]

    def matrix(self, module: str, part: str, shape: tuple[int, int]) -> Tensor:
        """Returns matrix "A" or "B" of a module in float32. Raises ModelLoadError unless it has the shape."""
        name, stored = _tensor(module, part), self.shape(module, part)
        if stored != shape:
            raise self.wrong(f"{name!r} of the shape {stored}; model and adapter_config.json say {shape}")
        tensor: Tensor = self._file.get_tensor(name)
        if not tensor.is_floating_point():
            raise self.wrong(f"{name!r} of {tensor.dtype}; expected floats")
        tensor = tensor.float()  # first, because values of float64 may be too large
        check_finite(name, tensor, str(self._folder))
        return tensor

    def wrong(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"the adapter in {self._folder} has {what}")


def _tensor(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"


def opened(folder: Path) -> Any:
    from safetensors import safe_open

    file = folder / TENSORS
    if not file.is_file():
        if pickles := sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
            raise ModelLoadError(
                f"{folder} has its weights only as a pickle ({pickles[0]}), which can run code when it is read; where "
                "you trust it, save the adapter again: PeftModel.from_pretrained(MODEL, SRC).save_pretrained(DST)"
            )
        raise ModelLoadError(f"{folder} has no {TENSORS}; expected the folder of a PEFT adapter")
    try:
        return safe_open(str(file), framework="pt")
    except Exception as error:  # safetensors raises its own and OSError kinds
        raise ModelLoadError(f"{file} is truncated or not a safetensors file ({error}); save it again") from error

"""LoRA adapters: logits equal PEFT's, bits depend on no neighbour, and what does not fit is refused whole."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.plain import text
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.base import Model
from foretoken.models.loading import load_model
from foretoken.models.state.pages import PAGE

from . import dense
from .adapters import ATTENTION, MLP, load_adapter, merge, save_adapter
from .tiny import ARCHITECTURES, GROUPED, Tiny, only_runner
from .trees import repeating

DRAFTS = [Draft.chain([7, 8, 9]), Draft.empty(), repeating([-1, -1, 0, 0, 1], 20), Draft.chain([5])]
# By family: the modules, and PEFT's further settings.
FAMILIES: dict[str, tuple[list[str] | str, dict[str, Any]]] = {
    "llama": ("all-linear", {"use_rslora": True, "rank_pattern": {"gate_proj": 3}, "alpha_pattern": {"o_proj": 5}}),
    "qwen2": (r".*\.layers\.1\.(self_attn|mlp)\.(q|v|down)_proj", {"r": 40}),
    "gemma2": (["q_proj", "v_proj", "down_proj"], {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "phi3": (["qkv_proj", "gate_up_proj"], {}),
    "dense: gpt2": (["c_attn", "mlp.c_proj"], {"fan_in_fan_out": True}),
    "dense: gpt_neox": (["query_key_value", "dense", "dense_h_to_4h"], {}),
    "dense: falcon, two norms": (["query_key_value", "dense_4h_to_h"], {}),
    "dense: cohere": (["q_proj", "o_proj", "gate_proj"], {"exclude_modules": ["layers.0.mlp.gate_proj"]}),
    "qwen3-next": (["q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"], {}),
    "qwen3.5": ("all-linear", {"rank_pattern": {"in_proj_z": 7}}),
    "bamba": ("all-linear", {}),
    "falcon-h1": (["in_proj", "q_proj", "o_proj", "gate_proj", "down_proj"], {"r": 20}),
    "granite-hybrid-dense": (["in_proj", "out_proj", "input_linear"], {}),
    "lfm2": ("all-linear", {}),
    "deepseek-v3": ("all-linear", {"rank_pattern": {"kv_b_proj": 3}}),
    "deepseek-v2": (["q_proj", "kv_b_proj", "gate_proj", "up_proj"], {}),
    "glm4-moe-lite": ("all-linear", {"target_parameters": ["mlp.experts.down_proj"]}),
    "qwen3.5-experts": ("all-linear", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "qwen3-moe": ("all-linear", {}),
    "qwen2-moe": (["o_proj", "gate_proj", "shared_expert_gate"], {}),
    "mixtral": (["q_proj", "w1", "w2", "w3", "gate"], {"use_rslora": True}),
    "gpt-oss": (["q_proj"], {"target_parameters": ["gate_up_proj", "down_proj", "router.weight"]}),
    "llama4": (["v_proj", "gate_proj"], {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "granitemoeshared": ("all-linear", {"target_parameters": ["experts.gate_up_proj", "router.weight"]}),
    "hy-v3": ("all-linear", {"target_parameters": ["experts.down_proj", "gate.weight"]}),
    "lfm2-moe": ("all-linear", {"target_parameters": ["experts.gate_up_proj"]}),
    "nemotron-h": (["in_proj", "up_proj"], {"target_parameters": ["experts.up_proj", "experts.down_proj"]}),
    "dense: gemma4": ("all-linear", {}),
    "dense: gemma4, one matrix for keys and values": ("all-linear", {}),
    "dense: gemma4, experts": (["o_proj", "gate_proj", "down_proj"], {"target_parameters": ["experts.gate_up_proj"]}),
}


def logits(model: Model, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> list[Tensor]:
    """Logits of one pass over all prompts with their drafts."""
    handles = [model.open(prompt, adapter=adapter) for prompt, adapter in zip(prompts, adapters, strict=True)]
    try:
        return [scores.logits.clone() for scores in model.score(handles, DRAFTS[: len(handles)])]
    finally:
        for handle in handles:
            model.close(handle)


# Widths that need padding, with heads of keys that fill half a unit of 32 outputs; and widths of whole units.
PADDED = {"num_key_value_heads": 1, "head_dim": 16, "hidden_size": 72, "intermediate_size": 44}
WHOLE = {"num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96}


def saved_llama(folder: Path, sizes: dict[str, int]) -> Path:
    return Tiny("Llama", {**GROUPED, **sizes}).save(folder)


def saved_adapters(folder: Path, model: Path) -> dict[str, Path]:
    """Adapters of several ranks on several modules."""
    return {
        "attention": save_adapter(folder / "attention", model, ATTENTION, rank=4, seed=1),
        "mlp": save_adapter(folder / "mlp", model, MLP, rank=33, seed=2),
        "all": save_adapter(folder / "all", model, ATTENTION + MLP, rank=20, seed=3),
        "some": save_adapter(folder / "some", model, ["q_proj", "v_proj", "up_proj"], rank=1, seed=4),
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("llama"), PADDED)


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_adapters(tmp_path_factory.mktemp("adapters"), llama)


def load(path: Path, adapters: dict[str, Path], dtype: str = "float32", **options: Any) -> Model:
    with only_runner("compiled"):
        model = load_model(path, dtype, "cpu", "native", **options)
    for name, folder in adapters.items():
        load_adapter(model, name, folder)
    return model


def precise(module: Any) -> Any:
    """Returns a module with gated delta rules in float64, any other as it is.

    In float32 transformers' module is up to 1e-4 away from that, more or less on each processor. Most other families
    cannot be computed in float64.
    """
    if not any("DeltaNet" in type(part).__name__ for part in module.modules()):
        return module
    module.set_experts_implementation("eager")  # the default takes float32 alone
    return module.double()


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning")  # of PEFT, about what it has added
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_equal_pefts(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    targets, settings = FAMILIES[family]
    base = dense.module(family[7:]) if family.startswith("dense: ") else ARCHITECTURES[family].build()
    base.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", {})
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": targets, **settings})
    module = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    module.save_pretrained(tmp_path / "adapter")
    precise(module)
    load_adapter(model, "x", tmp_path / "adapter")
    prompts = [text(9, 0), text(30, 1), text(1, 2)]
    for prompt, draft, scores in zip(prompts, DRAFTS, logits(model, prompts, ["x"] * 3), strict=False):
        paths = [[*prompt, *(draft.ids[node] for node in draft.path(end))] for end in range(-1, len(draft))]
        with torch.no_grad():
            expected = torch.stack([module(torch.tensor([path])).logits[0, -1] for path in paths])
        assert (scores - expected).abs().max() < 1e-4
        assert torch.equal(scores.argmax(-1), expected.argmax(-1))
    plain = logits(model, prompts, [None] * 3)
    assert min(float((a - b).abs().max()) for a, b in zip(plain, logits(model, prompts, ["x"] * 3), strict=True)) > 0.01


@pytest.mark.parametrize("sizes", [PADDED, WHOLE], ids=["padded", "whole units"])
def test_logits_equal_those_of_a_merged_checkpoint(sizes: dict[str, int], tmp_path: Path) -> None:
    path = saved_llama(tmp_path / "model", sizes)
    adapters = saved_adapters(tmp_path / "adapters", path)
    model, prompts = load(path, adapters), [text(5, 0), text(300, 1), text(1, 2), text(7, 3)]
    for (name, folder), prompt in zip(adapters.items(), prompts, strict=True):
        merged = load(merge(path, folder, tmp_path / name), {})
        assert (logits(model, [prompt], [name])[0] - logits(merged, [prompt], [None])[0]).abs().max() < 1e-4


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "packed", "int8", "int4"])
def test_no_bit_depends_on_the_other_rows_and_their_adapters(llama, adapters, numbers):
    torch.set_num_threads(2)
    options: dict[str, Any] = {}
    if numbers.startswith("int"):
        options = {"quantization": numbers}
    elif numbers == "packed":
        options = {"weight_format": numbers}
    model = load(llama, {}, "float32" if numbers == "float32" else "bfloat16", **options)
    prompts = [text(5, 0), text(40, 1), text(1, 2), text(270, 3)]
    before = logits(model, prompts, [None] * 4)
    for name, folder in adapters.items():
        load_adapter(model, name, folder)
    batches: list[list[str | None]] = [
        ["attention", "mlp", None, "all"],
        ["some", None, "some", "attention"],
        [None, "all", "all", None],
    ]
    for names in batches:
        together = logits(model, prompts, names)
        for i, name in enumerate(names):
            assert torch.equal(together[i], before[i]) == (name is None)
        assert_rows_stay_apart(model, prompts, names, together)


# Modules of layers that a Llama has not, by architecture.
LAYERS: dict[str, list[str]] = {
    "qwen3.5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"],
    "falcon-h1": ["in_proj", "out_proj", "k_proj", "up_proj"],
    "nemotron-h": ["in_proj", "up_proj", "out_proj", "down_proj", "v_proj"],
    "lfm2-moe": ["in_proj", "w1", "out_proj", "w2", "w3", "gate"],
    "deepseek-v3": ["kv_b_proj", "q_a_proj", "o_proj", "q_b_proj", "kv_a_proj_with_mqa", "gate_proj", "down_proj"],
    "qwen3.5-experts": ["gate", "gate_proj", "up_proj", "in_proj_a", "down_proj", "shared_expert_gate"],
}


@pytest.mark.parametrize("architecture", LAYERS)
@pytest.mark.slow
def test_other_layers_add_what_is_merged_and_rows_stay_apart(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    path = ARCHITECTURES[architecture].save(tmp_path / "model")
    targets, prompts = LAYERS[architecture], [text(5, 0), text(80, 1), text(1, 2), text(7, 3)]
    adapters = {
        "all": save_adapter(tmp_path / "all", path, targets, rank=3, seed=1),
        "half": save_adapter(tmp_path / "half", path, targets[::2], rank=18, seed=2),
    }
    model, names = load(path, adapters), ["all", "half", None, "all"]
    together = logits(model, prompts, names)
    for name, folder in adapters.items():
        merged = logits(load(merge(path, folder, tmp_path / f"merged {name}"), {}), prompts, [None] * 4)
        for wanted, scores, own in zip(merged, together, names, strict=True):
            assert own != name or (scores - wanted).abs().max() < 2e-4
    assert_rows_stay_apart(model, prompts, names, together)
    narrow = load(path, adapters, "bfloat16", quantization="int8")
    assert_rows_stay_apart(narrow, prompts, names, logits(narrow, prompts, names))


def assert_rows_stay_apart(
    model: Model, prompts: Sequence[Sequence[int]], names: Sequence[str | None], together: Sequence[Tensor]
) -> None:
    """Logits of a batch are those of each prompt alone, and an adapter changes those of its own rows."""
    plain = logits(model, prompts, [None] * len(prompts))
    for i, name in enumerate(names):
        handle = model.open(prompts[i], adapter=name)
        (alone,) = model.score([handle], [DRAFTS[i]])
        model.close(handle)
        assert torch.equal(together[i], alone.logits), (i, name)
        assert torch.equal(together[i], plain[i]) == (name is None)


def test_an_adapter_that_overflows_hurts_no_other_row(tmp_path: Path) -> None:
    """The kernels skip the zeros of the first adapter, a column of all heads but one."""
    path = ARCHITECTURES["deepseek-v3"].save(tmp_path / "model")
    own = save_adapter(tmp_path / "own", path, ["kv_b_proj"], rank=32, seed=1)
    wild = save_adapter(tmp_path / "wild", path, ["kv_b_proj"], rank=1, seed=2)
    for folder in (own, wild):
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, tensor in tensors.items():
            if folder == wild and "lora_A" in name:
                tensor.fill_(3e38)
            elif folder == own and "lora_B" in name:
                tensor[len(tensor) // 2 :, 0] = 0.0
        save_file(tensors, folder / "adapter_model.safetensors")
    model, prompts = load(path, {"own": own, "wild": wild}), [text(5, 0), text(1, 1)]
    beside = logits(model, prompts, ["own", "wild"])[0]
    assert torch.equal(beside, logits(model, prompts, ["own", None])[0]) and beside.isfinite().all()


def test_a_slot_forgets_its_adapter(llama: Path, adapters: dict[str, Path]) -> None:
    model = load(llama, adapters)
    plain = logits(model, [text(9, 0)], [None])
    logits(model, [text(9, 0)], ["all"])
    assert torch.equal(logits(model, [text(9, 0)], [None])[0], plain[0])


def test_pages_are_shared_within_an_adapter_only(llama: Path, adapters: dict[str, Path]) -> None:
    model, prompt = load(llama, adapters), text(2 * PAGE + 5, 0)
    assert model.enable_prefix_cache(2**24)
    names = [None, "all", "mlp"]
    expected: dict[str | None, Tensor] = {}
    for cached, salt in ((0, None), (2 * PAGE, None), (0, "salt")):
        for name in names:
            handle = model.open(prompt, cache_salt=salt, adapter=name)
            assert handle.cached == cached
            (scores,) = model.score([handle], [DRAFTS[0]])
            assert torch.equal(scores.logits, expected.setdefault(name, scores.logits))
            model.commit([handle], [[5]])
            model.close(handle)
    model.check()


def test_an_early_exit_has_the_adapters_of_its_model(llama: Path, adapters: dict[str, Path]) -> None:
    from foretoken.models.decoder import Decoder
    from foretoken.models.early_exit import EarlyExit, Exit

    whole = load(llama, {})
    assert isinstance(whole, Decoder)
    half = EarlyExit(whole, Exit(1, None, None))
    for name, folder in adapters.items():
        load_adapter(whole, name, folder)
    assert half.adapters == tuple(adapters)
    prompts = [text(5, 0), text(9, 1)]
    plain, adapted = logits(half, prompts, [None, None]), logits(half, prompts, [None, "all"])
    assert torch.equal(plain[0], adapted[0]) and not torch.equal(plain[1], adapted[1])


def test_unknown_names_and_names_in_use_are_refused(llama: Path, adapters: dict[str, Path]) -> None:
    model = load(llama, adapters)
    with pytest.raises(InvalidRequest, match="'other' is not loaded; loaded: attention, mlp, all, some"):
        model.open([1, 2], adapter="other")
    with pytest.raises(InvalidRequest, match="a LoRA adapter 'mlp' already"):
        load_adapter(model, "mlp", adapters["all"])


def test_other_runtimes_refuse_adapters_with_the_reason(llama: Path, adapters: dict[str, Path]) -> None:
    with only_runner("torch"):
        model = load_model(llama, "float32", "cpu", "native")
    with pytest.raises(InvalidRequest, match="compiled kernels alone, and torch operators compute this model"):
        load_adapter(model, "x", adapters["all"])
    with pytest.raises(InvalidRequest, match="runs through transformers' modules"):
        load_adapter(load_model(llama, "float32", "cpu", "hf"), "x", adapters["all"])


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]
LAYER = "base_model.model.model.layers.0"
Q_PROJ = f"{LAYER}.self_attn.q_proj.lora_A.weight"


def renamed(old: str, new: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{new}"] = tensors.pop(f"{LAYER}.{old}")

    return change


def setting(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def storing(tensors: dict[str, Tensor]) -> Change:
    return lambda config, stored: stored.update(tensors)


def two_prefixes(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config["target_modules"]
    for part in "AB":
        name = f"self_attn.q_proj.lora_{part}.weight"
        tensors[f"base_model.model.model.language_model.layers.0.{name}"] = tensors.pop(f"{LAYER}.{name}")


BROKEN: dict[str, tuple[Change, str]] = {
    "DoRA": (setting(use_dora=True), "asks for DoRA, which is not supported; merge it"),
    "whole modules": (setting(modules_to_save=["lm_head"]), "modules that were trained whole"),
    "biases": (setting(bias="all"), r"trained biases \(bias='all'\)"),
    "another method": (setting(peft_type="IA3"), "an adapter of the type 'IA3'"),
    "changed weights": (setting(init_lora_weights="pissa_niter_4"), "has changed"),
    "rank": (setting(r=0), "r = 0, which should be greater"),
    "other rank": (setting(r=5), r"lora_A.weight' of the shape \(4, 72\); model and adapter_config.json say \(5, 72\)"),
    "pattern": (setting(target_modules="(q_proj"), "no regular expression"),
    "flags": (setting(rank_pattern={"(?i)q_proj": 4}), r"'\(\?i\)q_proj', which is no regular expression"),
    "groups": (setting(layers_to_transform=[1], layers_pattern="(layers|h)"), "tensors of .*does not name"),
    "missing": (setting(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]), "no tensors of .*up_proj"),
    "unnamed": (setting(target_modules=["q_proj", "k_proj", "v_proj"]), "tensors of .*o_proj.*does not name"),
    "half": (lambda config, tensors: tensors.pop(f"{LAYER}.self_attn.q_proj.lora_B.weight"), "only one of the two"),
    "embedding": (renamed("self_attn.q_proj.lora_A.weight", "embed.lora_embedding_A"), "lora_embedding_A'.*linear"),
    "magnitudes": (renamed("self_attn.q_proj.lora_A.weight", "self_attn.lora_magnitude_vector"), "linear layers"),
    "head": (
        storing({f"base_model.model.lm_head.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}),
        "the module 'lm_head', and adapters may only change",
    ),
    "integers": (storing({Q_PROJ: torch.ones(4, 72, dtype=torch.int32)}), "expected floats"),
    "infinite": (lambda config, tensors: tensors[Q_PROJ].fill_(torch.inf), "NaN or infinite"),
    "nothing": (lambda config, tensors: tensors.clear(), "has no tensors"),
    "scale": (setting(lora_alpha=1e300), "scaled beyond float32"),
    "float64": (storing({Q_PROJ: torch.full((4, 72), 1e300, dtype=torch.float64)}), "NaN or infinite"),
    "two prefixes": (two_prefixes, "modules under two prefixes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_adapters_that_do_not_fit_are_refused_and_change_nothing(llama, adapters, tmp_path, case):
    change, message = BROKEN[case]
    config = json.loads((adapters["attention"] / "adapter_config.json").read_text())
    tensors = load_file(adapters["attention"] / "adapter_model.safetensors")
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = load(llama, {})
    with pytest.raises(ModelLoadError, match=message):
        load_adapter(model, "x", tmp_path)
    assert model.adapters == ()


def test_files_that_cannot_be_read_are_refused(llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    model = load(llama, {})
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json"):
        load_adapter(model, "x", tmp_path)
    (tmp_path / "adapter_config.json").write_bytes((adapters["all"] / "adapter_config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=r"has no adapter_model\.safetensors"):
        load_adapter(model, "x", tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="only as a pickle"):
        load_adapter(model, "x", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelLoadError, match="truncated"):
        load_adapter(model, "x", tmp_path)


def test_a_model_outlives_missing_kernels_of_its_adapters(llama, adapters, monkeypatch):
    model = load(llama, {}, "bfloat16")
    before = logits(model, [text(9, 0)], [None])

    def missing(kinds: Any, cache: Any) -> None:
        raise KernelsUnavailable("there is no compiler")

    with monkeypatch.context() as patch:
        patch.setattr("foretoken.models.runners.native.runner.library", missing)
        with pytest.raises(InvalidRequest, match="need the kernels of float32 matrices: there is no compiler"):
            load_adapter(model, "all", adapters["all"])
    assert model.adapters == () and torch.equal(logits(model, [text(9, 0)], [None])[0], before[0])
    load_adapter(model, "all", adapters["all"])
    assert not torch.equal(logits(model, [text(9, 0)], ["all"])[0], before[0])


def saved_experts(folder: Path, change: Change = lambda config, tensors: None) -> Path:
    """An adapter of the matrices of all experts as PEFT 0.19 and later save it, which ``change`` may change."""
    generator, rank, experts, hidden, inner = torch.Generator().manual_seed(0), 3, 8, 64, 40
    tensors = {}
    for layer in (0, 2):
        for base, rows, columns in ((".base_layer", 2 * inner, hidden), ("", hidden, inner)):
            name = f"base_model.model.model.layers.{layer}.mlp.experts{base}.lora_"
            tensors[f"{name}A.weight"] = torch.randn(experts * rank, columns, generator=generator) * 0.2
            tensors[f"{name}B.weight"] = torch.randn(rows, rank * experts, generator=generator) * 0.2
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"peft_type": "LORA", "r": rank, "target_parameters": parameters, "peft_version": "0.19.0"}
    change(config, tensors)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def other_roles(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As PEFT 0.17 and 0.18 save the same matrices: they took the outputs of stored experts for inputs."""
    del config["peft_version"]
    for name in [name for name in tensors if name.endswith("A.weight")]:
        other, rank, experts = name.replace("lora_A", "lora_B"), 3, 8
        down, up = tensors[name], tensors[other]
        tensors[name] = up.unflatten(1, (rank, experts)).permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = down.unflatten(0, (experts, rank)).permute(2, 1, 0).flatten(1).contiguous()


def test_experts_of_earlier_versions_of_peft_are_the_same(tmp_path: Path) -> None:
    path = ARCHITECTURES["qwen3-moe"].save(tmp_path / "model")
    now, then = saved_experts(tmp_path / "now"), saved_experts(tmp_path / "then", other_roles)
    model, prompt = load(path, {"now": now, "then": then}), text(9, 0)
    plain, *adapted = (logits(model, [prompt], [name])[0] for name in (None, "now", "then"))
    assert torch.equal(*adapted) and not torch.equal(plain, adapted[0])


def expert_by_itself(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["target_modules"] = ["layers.0.mlp.experts.7.down_proj"]
    for part, shape in (("A", (3, 40)), ("B", (64, 3))):
        tensors[f"{LAYER}.mlp.experts.7.down_proj.lora_{part}.weight"] = torch.ones(shape)


EXPERTS = "base_model.model.model.layers.2.mlp.experts.lora_"
BROKEN_EXPERTS: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda config, tensors: [tensors.pop(f"{EXPERTS}{part}.weight") for part in "AB"],
        "no tensors of 'model.layers.2.mlp.experts.down_proj'",
    ),
    "rank": (setting(r=2), r"of the shape \(24, 40\); model and adapter_config.json say \(16, 40\)"),
    "shape": (
        storing({f"{EXPERTS}B.weight": torch.ones(63, 24)}),
        "for 40 inputs and 63 outputs, which no parameter has",
    ),
    "no matrix": (
        storing({f"{EXPERTS}B.weight": torch.ones(())}),
        r"lora_B.weight' of the shape \(\), and it should be a matrix",
    ),
    "unnamed": (setting(target_parameters=["experts.gate_up_proj"]), "tensors of .*experts.down_proj.*not name"),
    "twice": (expert_by_itself, "matrices of 'an expert of layer 0' twice"),
}


@pytest.mark.parametrize("case", BROKEN_EXPERTS)
def test_adapters_of_experts_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path, case: str) -> None:
    change, message = BROKEN_EXPERTS[case]
    path = ARCHITECTURES["qwen3-moe"].save(tmp_path / "model")
    model = load(path, {})
    with pytest.raises(ModelLoadError, match=message):
        load_adapter(model, "x", saved_experts(tmp_path / "adapter", change))
    assert model.adapters == ()

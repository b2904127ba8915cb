"""Online training of a draft model or an EAGLE-3 head, its draft vocabulary included.

A differentiable copy learns from the distributions that the target computed.
"""

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.core.artifacts import heads_of
from foretoken.core.errors import InvalidRequest, ModelLoadError, reason_of
from foretoken.core.files import write_json
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.heads.dialects import write_eagle
from foretoken.models.heads.eagle import EagleHead, EagleNet, read_eagle
from foretoken.models.heads.layers import FusedLayer, FusedTaps, RmsNorm
from foretoken.models.learner import Learner, TargetSpan, TopLogprobs, overlap, padded_tokens

DEPTHS = 3  # tokens of a chain that are trained; later ones follow, at a fraction of the cost
_NEW_NORM = 0.2  # norm of a new token's row, as a fraction of the other rows'
_WANTED = 2.0  # occurrences from which a token is drafted


class FusedModule(FusedTaps):
    """The network of an EAGLE-3 or 3.1 head of one layer. Parameters have the checkpoint's names."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        layer = head.layer
        theta = (layer.get("rope_parameters") or layer).get("rope_theta", 10_000.0)
        shape = SimpleNamespace(**{**layer, "rope_parameters": {"rope_theta": theta}, "head_dim": head.head_dim})
        inputs, eps = head.tensors["fc.weight"].shape[1], layer["rms_norm_eps"]
        norms = inputs // head.target_hidden if head.fc_norm else 0
        self.input_norm = RmsNorm(inputs, eps) if head.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList([RmsNorm(head.target_hidden, eps) for _ in range(norms)])
        self.fc = nn.Linear(inputs, head.hidden, bias=False)
        self.layers = nn.ModuleList([FusedLayer(shape, layer["intermediate_size"])])
        self.norm, self.normed = RmsNorm(head.hidden, eps), head.norm_output
        self.lm_head = nn.Linear(head.hidden, head.draft_vocab, bias=False)

    def forward(self, embedded: Tensor, states: Tensor, depths: int) -> list[Tensor]:
        """Returns the layer's outputs by depth, [B, T - depths, H] each, for embeddings and states [B, T, ...].

        Row i of depth j proposes token i + 2 + j.
        """
        states = self.input_norm(states[:, : states.shape[1] - depths])
        return list(self.outputs(self.layers[0], embedded, states, depths))


class HeadStudent(Learner):
    """Trains an EAGLE-3 head in float32. Tokens that the target writes replace those in the draft vocabulary that it
    does not.

    Args:
        taps: the tapped layers of the target.
        learning_rate: learning rate of AdamW.
        batch: spans per update.

    Raises:
        InvalidRequest: the head has a feature that is not trained here.
    """

    reads_logits = False
    artifact = heads_of("eagle3")

    def __init__(self, net: EagleNet, taps: Sequence[int], learning_rate: float, batch: int) -> None:
        check_trainable(net.head)
        head = net.head if net.head.path is None else read_eagle(net.head.path)  # a net does not keep its matrices
        module = FusedModule(head)
        with torch.inference_mode(False):
            names = module.state_dict().keys()
            module.load_state_dict({name: head.tensors[name].float().clone() for name in names})
        super().__init__(module.to(net.device), learning_rate, batch)
        self.taps = tuple(taps)
        self._net, self._ids = net, net.head.ids().clone()  # the token of each row of lm_head, in any order

    def learn(self, spans: Sequence[TargetSpan], steps: int) -> None:
        self._exchange(spans)
        super().learn(spans, steps)

    def overlaps(self, spans: Sequence[TargetSpan]) -> Tensor:
        with torch.autocast(self._net.device.type, torch.bfloat16, enabled=self._net.dtype == torch.bfloat16):
            hidden, ids, log_p = self._rows(spans)
            logits = self.module.logits(hidden).float()
        columns = torch.full((self._net.head.vocab,), -1)
        columns[self._ids] = torch.arange(len(self._ids))
        chosen = columns[ids].to(hidden.device)  # of the logits; -1 for tokens that are not drafted
        q = (logits.gather(-1, chosen.clamp_min(0)) - logits.logsumexp(-1, keepdim=True)).exp()
        p = log_p.to(hidden.device).exp() * (chosen >= 0)
        return torch.minimum(p, q).sum(-1)

    def snapshot(self) -> Any:
        return super().snapshot(), self._ids.clone()

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot[0])
        self._ids = snapshot[1]

    @torch.no_grad()
    def version(self) -> EagleNet:
        return self._net.like(self._head())

    def save(self, folder: Path) -> None:
        config, tensors = write_eagle(self._head(), "sglang", self.taps)
        floats = {name for name, value in tensors.items() if value.is_floating_point()}
        stored = {n: t.to(self._net.dtype) if n in floats else t for n, t in tensors.items()}
        save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors", {"format": "pt"})
        write_json(folder / "config.json", config)

    def _head(self) -> EagleHead:
        """Returns the present head, the tokens of its vocabulary in ascending order."""
        head, order = self._net.head, self._ids.argsort()
        tensors = {**head.tensors, **{name: t.detach().cpu().clone() for name, t in self.module.state_dict().items()}}
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        if "d2t" in tensors:
            ids = self._ids[order]
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(head.vocab, dtype=torch.bool).index_fill_(0, ids, True)
        return replace(head, tensors=tensors)

    def _rows(self, spans: Sequence[TargetSpan]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the layer's outputs [rows, H], at every depth, where the target's distribution is known.

        Also returns the target's most probable tokens there [rows, k], and their log-probabilities [rows, k].
        """
        tokens, device = padded_tokens(spans), self._net.device
        parts = [torch.from_numpy(span.states).view(torch.bfloat16) for span in spans if span.states is not None]
        states = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        embedded = F.embedding(tokens, self._net.embedding).float().to(device)
        depths = min(DEPTHS, tokens.shape[1] - 1)
        hidden, ids, log_p = [], [], []
        for j, outputs in enumerate(self.module(embedded, states.float().to(device), depths)):
            for row, span in zip(outputs, spans, strict=True):
                start = len(span.tokens) - len(span)  # index of the first token with a distribution
                first, last = max(start, 1 + j), min(len(span.tokens), 1 + j + len(row))
                if last > first:
                    hidden.append(row[first - 1 - j : last - 1 - j])
                    ids.append(torch.from_numpy(span.ids[first - start : last - start]))
                    log_p.append(torch.from_numpy(span.log_p[first - start : last - start]))
        return torch.cat(hidden), torch.cat(ids), torch.cat(log_p)

    @torch.no_grad()
    def _exchange(self, spans: Sequence[TargetSpan]) -> None:
        """Gives rows of tokens that the target does not write to tokens that it writes and the head cannot draft.

        Tokens are compared by their occurrences in the spans. A new row points to the token's embedding.
        """
        if "d2t" not in self._net.head.tensors:
            return
        counts = torch.zeros(self._net.head.vocab)
        for span in spans:
            counts.index_add_(0, torch.from_numpy(span.ids).flatten(), torch.from_numpy(span.log_p).exp().flatten())
        drafted = counts[self._ids]
        missing = counts.index_fill(0, self._ids, 0.0)
        wanted = missing.argsort(descending=True)[: int((missing >= _WANTED).sum())]
        # Among tokens that do not occur, those with high ids are rare ones in most vocabularies.
        unused = torch.tensor(sorted(range(len(drafted)), key=lambda row: (drafted[row].item(), -int(self._ids[row]))))
        unused = unused[: len(wanted)]
        pairs = drafted[unused] < missing[wanted[: len(unused)]] / 2
        rows, tokens = unused[pairs], wanted[: len(unused)][pairs]
        weight = self.module.lm_head.weight
        norm = _NEW_NORM * weight.norm(dim=1).mean()
        weight[rows.to(weight.device)] = norm * F.normalize(self._net.embedding[tokens].float().to(weight.device))
        self._ids[rows] = tokens


def check_trainable(head: EagleHead) -> None:
    """Raises InvalidRequest for heads with features that ``FusedModule`` does not compute."""
    biased = any(name.endswith("bias") for name in head.tensors)
    rope = head.layer.get("rope_parameters") or head.layer.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    other = head.version != 3 or head.layers != 1 or head.mask_token is not None
    if other or head.norm_before_residual or biased or scaled:
        raise InvalidRequest(
            "adapt trains EAGLE-3 heads of one layer without biases, norm_before_residual and scaled rotary positions; "
            "leave adapt out, or take another head"
        )


_COMPANIONS = (".json", ".jinja", ".txt", ".model")


def _load(path: Path) -> Any:
    """Returns the transformers module of a checkpoint in float32. Raises ModelLoadError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if is_gguf(path):
        raise ModelLoadError(f"the draft {path} is a GGUF file, which cannot be trained further; take safetensors")
    weights = {name: tensor.float() for name, tensor in open_weights(path).items()}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelLoadError(f"the draft in {path} cannot be trained further ({reason_of(error)})") from error
    module.tie_weights()
    if odd := [*unexpected, *(set(missing) - set(module._tied_weights_keys or ()))]:
        raise ModelLoadError(
            f"the draft in {path} cannot be trained further: its tensor {odd[0]!r} is unexpected or missing"
        )
    return module.eval()


class Student(Learner):
    """Trains the transformers module of a draft model in float32.

    Args:
        path: the draft's checkpoint.
        like: model with the dtype, device and maximum length of the trained drafts.
        learning_rate: learning rate of AdamW.
        batch: spans per update.
        seed: seed for choosing spans.

    Raises:
        ModelLoadError: transformers cannot load the draft.
    """

    def __init__(self, path: Path, like: Model, learning_rate: float, batch: int, seed: int = 0) -> None:
        super().__init__(_load(path).to(like.device), learning_rate, batch, seed)
        self.path, self._dtype, self._device, self._max_length = path, like.dtype, like.device, like.max_length

    @torch.no_grad()
    def version(self) -> Model:
        config = load_config(self.path)
        if Decoder.supports(config):
            weights = {name: weight.detach().clone() for name, weight in self.module.state_dict().items()}
            return Decoder(config, weights, self._dtype, self._device, self._max_length)
        from foretoken.models.hf.model import HFModel

        return HFModel.from_module(copy.deepcopy(self.module).to(self._dtype).eval(), self._max_length)

    def save(self, folder: Path) -> None:
        copied = copy.deepcopy(self.module).to(self._dtype)
        copied.save_pretrained(folder)
        for file in sorted(self.path.iterdir()):
            if file.suffix in _COMPANIONS and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)

    def overlaps(self, spans: Sequence[TargetSpan]) -> Tensor:
        # Padding follows the tokens, so the causal mask is enough.
        ids = padded_tokens(spans)
        logits = self.module(ids.to(self._device), use_cache=False).logits
        parts = [row[len(x.tokens) - len(x) : len(x.tokens)] for row, x in zip(logits, spans, strict=True)]
        top = TopLogprobs(*(torch.from_numpy(np.concatenate([getattr(x, n) for x in spans])) for n in ("ids", "log_p")))
        return overlap(torch.cat(parts), TopLogprobs(top.ids.to(self._device), top.log_p.to(self._device)))

"""Models by name: the same parameters wherever they are listed, and the way to Hugging Face and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshrl.actors.models import (
    ModelConfig,
    build_model,
    export_hugging_face,
    load_hugging_face,
    load_tokenizer,
    model_names,
    parameter_shapes,
    titan_config,
)
from meshrl.errors import UserError


@pytest.mark.parametrize("name", model_names())
def test_every_named_model_has_the_parameters_that_are_listed_for_it(name: str) -> None:
    config = ModelConfig(name)
    with torch.device("meta"):  # shapes without memory
        model = titan_config(config, 264).build()
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert built == parameter_shapes(config, 264)


@pytest.mark.parametrize("tokenizer_name", ["arithmetic", "bytes"])
def test_an_exported_model_is_the_same_in_transformers_and_after_loading(
    tokenizer_name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config, tokenizer = ModelConfig("tiny-0.4m"), load_tokenizer(tokenizer_name)
    model = build_model(config, tokenizer.vocab_size, seed=4)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_hugging_face(weights, config, tokenizer, tmp_path)

    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("47+85=")])
    with torch.no_grad():
        expected = model(ids, positions=torch.arange(ids.shape[1])[None])
        torch.testing.assert_close(other(ids).logits, expected, atol=1e-6, rtol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("47+85=").input_ids == ids[0].tolist()
    loaded = load_hugging_face(tmp_path, config, tokenizer.vocab_size)
    assert set(loaded) == set(weights)
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_a_checkpoint_of_another_model_is_refused_by_parameter(tmp_path: Path) -> None:
    config, tokenizer = ModelConfig("tiny-0.4m"), load_tokenizer("arithmetic")
    model = build_model(config, tokenizer.vocab_size, seed=4)
    export_hugging_face(dict(model.named_parameters()), config, tokenizer, tmp_path)
    with pytest.raises(UserError, match=r"does not hold a tiny-0.8m: .* such as layers\.2\."):
        load_hugging_face(tmp_path, ModelConfig("tiny-0.8m"), tokenizer.vocab_size)
    with pytest.raises(UserError, match="no \\*.safetensors file"):
        load_hugging_face(tmp_path / "nowhere", config, tokenizer.vocab_size)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean qwen3-0.6b"):
        parameter_shapes(ModelConfig("qwen3-0.6"), 16)

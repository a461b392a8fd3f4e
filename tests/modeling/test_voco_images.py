# SPDX-License-Identifier: Apache-2.0
"""VoCo on images, with tiny models of LLaVA's and SmolVLM's shape."""

import numpy as np
import pytest
import torch
from parameters import disturb
from tiny_bases import BOS, base_config, ids_of
from tiny_models import SMALL_LORA
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from context_compressors import CompressedContext, VoCoForCausalLM
from context_compressors.modeling.parts.base_pass import CACHE

IMAGE = 127
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 2},
}
# Image tokens of one image, and the shape of the pixels of two rows with an image each.
SHAPES = {"llava": (16, (2, 3, 8, 8)), "smolvlm": (4, (2, 1, 3, 8, 8))}
GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def vision_language_model(kind):
    torch.manual_seed(0)
    if kind == "llava":
        vision = CLIPVisionConfig(**VISION, projection_dim=16)
        parts = {"vision_config": vision, "text_config": base_config()}
        config = LlavaConfig(**parts, image_token_index=IMAGE, vision_feature_layer=-1)
        return LlavaForConditionalGeneration(config).eval()
    config = SmolVLMConfig(vision_config=VISION, text_config=base_config(), image_token_id=IMAGE, scale_factor=2)
    return SmolVLMForConditionalGeneration(config).eval()


@pytest.fixture(scope="module", params=SHAPES)
def base(request, tmp_path_factory):
    """A vision-language model in a folder, and itself."""
    folder = tmp_path_factory.mktemp(request.param)
    model = vision_language_model(request.param)
    model.save_pretrained(folder)
    return request.param, folder, model


def start(base, **fields):
    """A compressor on it, nothing at a start value that could hide a mistake."""
    torch.manual_seed(1)
    fields = {"num_voco_tokens": 2, "encoder_lora": SMALL_LORA, **fields}
    return disturb(VoCoForCausalLM.from_base(base[1], **fields), 0.15)


def images(kind, before=3, behind=1):
    """Two rows of BOS, text, an image and text, and the pixels."""
    num_tokens, shape = SHAPES[kind]
    row = [BOS, *range(5, 4 + before), *[IMAGE] * num_tokens, *range(20, 20 + behind)]
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": torch.tensor([row] * 2), "pixel_values": pixels}


@torch.no_grad()
def test_a_memory_is_what_the_base_itself_would_cache_of_voco_tokens_behind_the_image(base):
    kind, _, model = base
    compressor, context = start(base, encoder_lora=None, num_voco_tokens=3), images(kind)
    memory = compressor.compress(**context)
    cache = model(**context, use_cache=True)[CACHE]
    length = context["input_ids"].shape[1]
    voco = compressor.model.memory_embeddings.expand(2, 3, -1)
    model.model.get_decoder()(inputs_embeds=voco, **{CACHE: cache}, use_cache=True)
    expected = tuple((layer.keys[:, :, length:], layer.values[:, :, length:]) for layer in cache.layers)
    torch.testing.assert_close(memory.key_values, expected, atol=1e-5, rtol=0)
    other = compressor.compress(context["input_ids"], pixel_values=context["pixel_values"].flip(0))
    torch.testing.assert_close(other.key_values[1][1].flip(0), memory.key_values[1][1], atol=1e-5, rtol=0)
    assert not memory.key_values[1][1][0].allclose(memory.key_values[1][1][1], atol=1e-3), "the images differ"


@pytest.mark.slow
@torch.no_grad()
def test_padded_rows_are_read_as_alone_and_several_questions_follow_one_image(base, pad_rows):
    kind, *_ = base
    model = start(base, compression_ratios=(4,), num_voco_tokens=None)
    first, second = images(kind), images(kind, before=1, behind=0)
    rows = [first["input_ids"][0], second["input_ids"][1]]
    together = model.compress(*pad_rows(rows, "left"), pixel_values=first["pixel_values"])
    for row, tokens in enumerate(rows):
        alone = model.compress(tokens[None], pixel_values=first["pixel_values"][row : row + 1])
        assert int(alone.num_slots) == -(-len(tokens) // 4)
        torch.testing.assert_close(together.rows(row).key_values, alone.key_values, atol=1e-5, rtol=0)
    questions = torch.cat([ids_of(4, seed=seed, most=120) for seed in (1, 2, 3)])
    answers = model.generate(questions, memory=together.rows(0), **GREEDY)
    for question, answer in zip(questions, answers, strict=True):
        image = {"context_input_ids": rows[0][None], "pixel_values": first["pixel_values"][:1]}
        assert model.generate(question[None], **image, **GREEDY)[0].equal(answer)


@pytest.mark.slow
def test_it_starts_from_the_bases_own_weights_and_is_saved_and_loaded_whole(base, tmp_path):
    kind, folder, own = base
    model, context, text = start(base), images(kind), ids_of(4, seed=1, most=120)
    frozen = dict(own.model.named_parameters())
    held = dict(model.model.image_model.named_parameters())
    assert held, "the part that makes image tokens"
    assert all(torch.equal(parameter, frozen[name]) for name, parameter in held.items())
    assert not any(parameter.requires_grad for parameter in held.values())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in own.parameters()) + trained
    memory = model.compress(**context)
    memory.save(tmp_path / "memory.safetensors")
    model.save_pretrained(tmp_path / "checkpoint")
    assert str(folder.parent) not in (tmp_path / "checkpoint" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert again.config.vision_language_config.model_type == kind
    loaded = CompressedContext.load(tmp_path / "memory.safetensors", model_id=again.model_id)
    assert again.generate(text, memory=loaded.rows(0), **GREEDY).equal(
        model.generate(text, memory=memory.rows(0), **GREEDY)
    )
    assert again.compress(**context).key_values[1][1].equal(memory.key_values[1][1])
    with pytest.raises(ValueError, match="its checkpoints are always whole"):
        model.save_pretrained(tmp_path / "light", include_base=False)
    half = VoCoForCausalLM.from_base(folder, num_voco_tokens=1, dtype=torch.bfloat16)
    assert half.compress(**context).dtype == torch.bfloat16


@pytest.mark.slow
def test_pictures_that_smolvlms_processor_cuts_into_unlike_numbers_of_tiles_are_compressed_and_asked(
    tmp_path, tiny_tokenizer, monkeypatch
):
    # Videos alone need these, which are packages of their own.
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    monkeypatch.setattr(SmolVLMProcessor, "check_argument_for_proper_class", lambda self, name, value: type(value))
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    names = ["<image>", "<fake_token_around_image>", "<global-img>", *tiles]
    tiny_tokenizer.add_special_tokens({"additional_special_tokens": names})
    sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}}
    processor = SmolVLMProcessor(SmolVLMImageProcessorPil(**sizes), tiny_tokenizer, None, image_seq_len=4)
    parts = {"vision_config": VISION, "text_config": base_config(vocab_size=len(tiny_tokenizer))}
    config = SmolVLMConfig(**parts, image_token_id=processor.image_token_id, scale_factor=2)
    torch.manual_seed(0)
    SmolVLMForConditionalGeneration(config).save_pretrained(tmp_path)
    draw = np.random.default_rng(0)
    pictures = [draw.integers(0, 255, shape, dtype=np.uint8) for shape in ((16, 16, 3), (8, 16, 3))]
    prompts = ["Look: <image>", "<image>"]
    context = processor(images=[[picture] for picture in pictures], text=prompts, return_tensors="pt", padding=True)
    # Four tiles and two, and each picture as a whole.
    assert (context["input_ids"] == processor.image_token_id).sum(dim=1).tolist() == [20, 12]
    model = start(("smolvlm", tmp_path), position_layout="enhanced")
    memory = model.compress(**context)
    question = processor.tokenizer("Which?", return_tensors="pt", add_special_tokens=False)
    for row in range(2):
        alone = processor(images=pictures[row], text=prompts[row], return_tensors="pt")
        expected = model.compress(**alone)
        torch.testing.assert_close(memory.rows(row).key_values, expected.key_values, atol=1e-5, rtol=0)
        written = model.generate(**question, memory=expected, **GREEDY)
        assert model.generate(**question, memory=memory.rows(row), **GREEDY).equal(written)
        given = {name if name.startswith("pixel") else f"context_{name}": value for name, value in alone.items()}
        assert model.generate(**question, **given, **GREEDY).equal(written)

# SPDX-License-Identifier: Apache-2.0
"""transformers' own tests of models, over all methods of the family."""

import unittest

import pytest
import torch

pytest.importorskip("parameterized", reason="transformers' tests need it: see tests/integrations/requirements.txt")

import decal_models
import transformers_tests
from tiny_bases import HIDDEN_SIZE, VOCAB_SIZE
from tiny_models import METHODS, TRAINING_FREE, Case

from context_compressors import DeCALConfig, DeCALForConditionalGeneration

try:
    ModelTesterMixin, GenerationTesterMixin = transformers_tests.load()
except OSError as error:
    pytest.skip(str(error), allow_module_level=True)

# Tests that do not apply to the family, and why.
NOT_APPLICABLE = {
    "test_bc_cache_name_forward": "`past_key_values`, the name in older versions, is taken without a warning",
    "test_correct_missing_keys": "a checkpoint that lacks weights is refused, so none load at random",
    "test_model_weights_reload_no_missing_tied_weights": "a checkpoint that lacks weights is refused",
    "test_keep_in_fp32_modules_exist": "the list names every part that a configuration can ask for",
    "test_keep_in_fp32_modules_strict_also_hardcode_fp32": "`from_config` and `from_pretrained` cast, not `__init__`",
    "test_retain_grad_hidden_states_attentions": "states are given cut to the text, beside the graph",
    "test_tied_weights_are_sharded_together": "tensor parallelism is not supported",
}
if GenerationTesterMixin is None:
    NOT_APPLICABLE["test_generation_tester_mixin_inheritance"] = "these sources lack GenerationTesterMixin"
# The same of single methods.
NOT_APPLICABLE_TO = {(method.name, "test_training"): "nothing trains" for method in TRAINING_FREE} | {
    ("decal", "test_attention_outputs"): "cross-attention sees the slots, which are fewer than the encoder's places",
    ("decal", "test_internal_model_config_and_subconfig_are_same"): "as in T5, each stack has a copy of its own",
}
# Tests that get text alone, and why.
WITHOUT_CONTEXT = {
    "test_attention_outputs": "attentions cover the slots, too",
    "test_training_gradient_checkpointing": "a mock repeats the last pass of a layer, which encodes and decodes",
}


class ModelTester:
    """Configuration and inputs of a tiny model, as transformers' mixins ask for them."""

    batch_size, seq_length, num_hidden_layers, num_attention_heads = 3, 8, 2, 4
    hidden_size, vocab_size, is_training = HIDDEN_SIZE, VOCAB_SIZE, True

    def __init__(self, case, has_context):
        self.case, self.has_context = case, has_context

    def get_config(self):
        return self.case.config()

    def prepare_config_and_inputs_for_common(self):
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(5, VOCAB_SIZE, (self.batch_size, self.seq_length), generator=generator)
        inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        if self.has_context:
            inputs["context_input_ids"] = torch.randint(5, VOCAB_SIZE, (self.batch_size, 13), generator=generator)
        return self.get_config(), inputs


class DeCALTester(ModelTester):
    """The same of DeCAL, in the form of an encoder-decoder; its encoder reads latents in front of the tokens."""

    encoder_seq_length = 4 + ModelTester.seq_length

    def get_config(self):
        return DeCALConfig(decoder_config=decal_models.T5_FIELDS, compression_ratios=(2, 3, 8))

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        inputs.pop("context_input_ids", None)
        return config, {**inputs, "decoder_input_ids": inputs["input_ids"].flip(1)}


class FamilyTests:
    """Base of all methods' test classes; `case` is the method's plainest setting."""

    model_tester_class = ModelTester
    test_resize_embeddings = False
    # Neither do parts that read contexts have one in a step on text alone, nor those of a training-free method ever.
    test_all_params_have_gradient = False

    def setUp(self):
        test = self._testMethodName
        name = self.all_model_classes[-1].config_class.model_type.removesuffix("_compressor")
        reason = NOT_APPLICABLE.get(test) or NOT_APPLICABLE_TO.get((name, test))
        if reason is not None:
            self.skipTest(reason)
        self.model_tester = self.model_tester_class(self.case, not test.startswith(tuple(WITHOUT_CONTEXT)))
        if test.startswith("test_training"):
            # The backbone has no loss.
            self.all_model_classes = self.all_model_classes[-1:]

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class)
        if return_labels and model_class is self.all_model_classes[-1]:
            inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
        return inputs


MIXINS = (ModelTesterMixin,) if GenerationTesterMixin is None else (ModelTesterMixin, GenerationTesterMixin)
for method in METHODS + TRAINING_FREE:
    name = f"Test{method.causal_lm_class.__name__}"
    fields = {"case": Case(method), "all_model_classes": (method.model_class, method.causal_lm_class)}
    globals()[name] = type(name, (FamilyTests, *MIXINS, unittest.TestCase), fields)


class TestDeCALForConditionalGeneration(FamilyTests, *MIXINS, unittest.TestCase):
    model_tester_class, case, is_encoder_decoder = DeCALTester, None, True
    # `DeCALModel` is the encoder alone, with outputs of its own.
    all_model_classes = (DeCALForConditionalGeneration,)

# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer of a few hundred tokens, trained on generated documents."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from context_compressors.data.prompts import format_prompt
from context_compressors.data.synthetic_documents import generate_document

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"


def train_tokenizer(vocab_size: int = 400, num_texts: int = 40, first: int = 0) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = []
    for index in range(first, first + num_texts):
        document = generate_document(index, num_tokens=128)
        prompts = (
            f"{format_prompt('question_answering', question.question)} {question.answer}"
            for question in document.questions[:3]
        )
        texts.append(document.text + "".join(prompts))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)

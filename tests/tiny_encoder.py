# SPDX-License-Identifier: Apache-2.0
"""A small encoder with a WordPiece tokenizer, in the form of all-MiniLM-L6-v2."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForTokenClassification, BertModel, BertTokenizer

from context_compressors.data.synthetic_documents import generate_document

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def word_piece_tokenizer(num_texts: int = 20) -> BertTokenizer:
    letters = [chr(code) for code in range(33, 127)]
    texts = [generate_document(index, num_tokens=128).text.lower() for index in range(num_texts)]
    words = sorted({word for text in texts for word in text.split() if word.isalpha() and len(word) > 1})
    vocab = {piece: place for place, piece in enumerate([*SPECIAL, *letters, *(f"##{c}" for c in letters), *words])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    )
    return BertTokenizer(tokenizer_object=tokenizer, model_max_length=96)


def save_encoder(folder: Path, is_classifier: bool = False) -> Path:
    torch.manual_seed(0)
    tokenizer = word_piece_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=96,
        initializer_range=0.3,
        id2label={0: "drop", 1: "keep"},
    )
    model = BertForTokenClassification(config) if is_classifier else BertModel(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

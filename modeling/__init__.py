# SPDX-License-Identifier: Apache-2.0
"""Models, one per method, and the parts that they share. Importing this registers them with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
)
from transformers.pipelines import PIPELINE_REGISTRY

from ..configuration.configuration_compression_tokens import CompressionTokensConfig
from ..configuration.configuration_compressor import QUESTION_ANSWERING
from ..configuration.configuration_comprexit import ComprExITConfig
from ..configuration.configuration_decal import DeCALConfig
from ..configuration.configuration_five_hundred_x import FiveHundredXConfig
from ..configuration.configuration_gmsa import GMSAConfig
from ..configuration.configuration_icae import ICAEConfig
from ..configuration.configuration_mean_pooling import MeanPoolingConfig
from ..configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig
from .compressor.context_compression_qa import ContextCompressionQAPipeline
from .modeling_compression_tokens import CompressionTokensForCausalLM, CompressionTokensModel
from .modeling_comprexit import ComprExITForCausalLM, ComprExITModel
from .modeling_decal import DeCALForConditionalGeneration, DeCALModel
from .modeling_decal_retrieval import DeCALForRetrieval
from .modeling_five_hundred_x import FiveHundredXForCausalLM, FiveHundredXModel
from .modeling_gmsa import GMSAForCausalLM, GMSAModel
from .modeling_icae import ICAEForCausalLM, ICAEModel
from .modeling_mean_pooling import MeanPoolingForCausalLM, MeanPoolingModel
from .modeling_tcp_autoencoder import TCPAutoencoderForCausalLM, TCPAutoencoderModel

for _config_class, _model_class, _causal_lm_class in (
    (MeanPoolingConfig, MeanPoolingModel, MeanPoolingForCausalLM),
    (CompressionTokensConfig, CompressionTokensModel, CompressionTokensForCausalLM),
    (ICAEConfig, ICAEModel, ICAEForCausalLM),
    (FiveHundredXConfig, FiveHundredXModel, FiveHundredXForCausalLM),
    (ComprExITConfig, ComprExITModel, ComprExITForCausalLM),
    (GMSAConfig, GMSAModel, GMSAForCausalLM),
    (TCPAutoencoderConfig, TCPAutoencoderModel, TCPAutoencoderForCausalLM),
):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _model_class, exist_ok=True)
    AutoModelForCausalLM.register(_config_class, _causal_lm_class, exist_ok=True)

AutoConfig.register(DeCALConfig.model_type, DeCALConfig, exist_ok=True)
AutoModel.register(DeCALConfig, DeCALModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(DeCALConfig, DeCALForConditionalGeneration, exist_ok=True)
AutoModelForTextEncoding.register(DeCALConfig, DeCALForRetrieval, exist_ok=True)

# For models that are loaded already; a checkpoint's folder brings its own.
PIPELINE_REGISTRY.register_pipeline(
    QUESTION_ANSWERING, ContextCompressionQAPipeline, pt_model=AutoModelForCausalLM, type="text"
)

"""Models, one per method, and the parts that they share. Importing this registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..configuration.configuration_compression_tokens import CompressionTokensConfig
from ..configuration.configuration_comprexit import ComprExITConfig
from ..configuration.configuration_five_hundred_x import FiveHundredXConfig
from ..configuration.configuration_icae import ICAEConfig
from ..configuration.configuration_mean_pooling import MeanPoolingConfig
from .modeling_compression_tokens import CompressionTokensForCausalLM, CompressionTokensModel
from .modeling_comprexit import ComprExITForCausalLM, ComprExITModel
from .modeling_five_hundred_x import FiveHundredXForCausalLM, FiveHundredXModel
from .modeling_icae import ICAEForCausalLM, ICAEModel
from .modeling_mean_pooling import MeanPoolingForCausalLM, MeanPoolingModel

for _config_class, _model_class, _causal_lm_class in (
    (MeanPoolingConfig, MeanPoolingModel, MeanPoolingForCausalLM),
    (CompressionTokensConfig, CompressionTokensModel, CompressionTokensForCausalLM),
    (ICAEConfig, ICAEModel, ICAEForCausalLM),
    (FiveHundredXConfig, FiveHundredXModel, FiveHundredXForCausalLM),
    (ComprExITConfig, ComprExITModel, ComprExITForCausalLM),
):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _model_class, exist_ok=True)
    AutoModelForCausalLM.register(_config_class, _causal_lm_class, exist_ok=True)

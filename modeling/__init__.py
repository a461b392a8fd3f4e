"""Models, one per method, and the parts that they share. Importing this registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..configuration.configuration_mean_pooling import MeanPoolingConfig
from .modeling_mean_pooling import MeanPoolingForCausalLM, MeanPoolingModel

for _config_class, _model_class, _causal_lm_class in ((MeanPoolingConfig, MeanPoolingModel, MeanPoolingForCausalLM),):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _model_class, exist_ok=True)
    AutoModelForCausalLM.register(_config_class, _causal_lm_class, exist_ok=True)

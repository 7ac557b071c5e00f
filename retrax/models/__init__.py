"""Models: compositions of layers only.

Each is a function of sizes and `mode` that returns a layer. `blocks` holds what they
repeat; above it is one module for each family.
"""

from retrax.models.bert import (
    BERT,
    BERTClassifierHead,
    BERTMLMHead,
    BERTPretrainingHead,
    BERTPretrainingLoss,
    BERTRegressionHead,
    MaskedLM,
)
from retrax.models.decoder_lm import DecoderLM
from retrax.models.latent_transformer import LatentTransformerLM
from retrax.models.mlp import MLP
from retrax.models.neural_gpu import NeuralGPU
from retrax.models.reformer import ReformerLM, ReformerShortenLM
from retrax.models.reformer_encdec import Reformer, Reformer2
from retrax.models.resnet import ConvNet, Resnet50, WideResnet
from retrax.models.rnn import GRULM, RNNLM, LSTMSeq2SeqAttn
from retrax.models.transformer import (
    TransformerDecoder,
    TransformerEncoder,
    TransformerLM,
)
from retrax.models.transformer_encdec import Transformer
from retrax.models.vit import ViT

__all__ = [
    "BERT",
    "BERTClassifierHead",
    "BERTMLMHead",
    "BERTPretrainingHead",
    "BERTPretrainingLoss",
    "BERTRegressionHead",
    "ConvNet",
    "DecoderLM",
    "GRULM",
    "LSTMSeq2SeqAttn",
    "LatentTransformerLM",
    "MLP",
    "MaskedLM",
    "NeuralGPU",
    "RNNLM",
    "Reformer",
    "Reformer2",
    "ReformerLM",
    "ReformerShortenLM",
    "Resnet50",
    "Transformer",
    "TransformerDecoder",
    "TransformerEncoder",
    "TransformerLM",
    "ViT",
    "WideResnet",
]

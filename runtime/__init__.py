"""Execute a plan on torch.distributed."""

from .hf_save import save_weights
from .models.decoder import Decoder
from .optimizer import build_optimizer, clip_gradients
from .parallel_model import ParallelModel
from .parallelize import parallelize

__all__ = ["Decoder", "ParallelModel", "build_optimizer", "clip_gradients", "parallelize", "save_weights"]

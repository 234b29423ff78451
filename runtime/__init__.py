"""Execute a plan on torch.distributed."""

from .models.decoder import Decoder
from .parallel_model import ParallelModel
from .parallelize import parallelize
from .training.optimizer import build_optimizer, clip_gradients
from .weights.save import save_weights

__all__ = ["Decoder", "ParallelModel", "build_optimizer", "clip_gradients", "parallelize", "save_weights"]

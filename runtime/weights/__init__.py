"""Published weights: Hugging Face's safetensors files into a model of any layout, and back."""

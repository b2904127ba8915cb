"""LoRA adapters (2106.09685) in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

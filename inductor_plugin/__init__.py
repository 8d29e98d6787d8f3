"""How PyTorch meets the kernels. Importing this must stay light: `import torch` does it."""


def _autoload() -> None:
    """Entry point of `torch.backends`: called while torch is being imported; never raises."""

"""Is this machine ready? Checks of accelerator, libraries, tools, kernels, storage, network and Python packages."""

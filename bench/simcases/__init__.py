"""Kernels that the simulator has to run: compiled here, with no GPU, by two foreign compilers and by this project."""

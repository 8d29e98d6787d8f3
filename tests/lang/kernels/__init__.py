"""Small kernels in the language, each one source for several targets: they test the language, and show it."""

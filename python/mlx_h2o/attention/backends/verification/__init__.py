"""Kernels that prove themselves on the device where they run, before they are used there."""

"""Verification of kernels on the device where they run, before they are used there."""

"""Calibration: the measurements in a profile, and how they are made."""

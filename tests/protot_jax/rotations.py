"""Rotary positions in float64, by complex numbers."""

import numpy as np


def turned(x_XTE, place_T, theta):
    """Coordinates (k, k + E / 2) as a complex number, times exp(i t theta^(-2 k / E))."""
    half = x_XTE.shape[-1] // 2
    z_XTF = x_XTE[..., :half] + 1j * x_XTE[..., half:]
    z_XTF = z_XTF * np.exp(1j * np.outer(place_T, theta ** (-np.arange(half) / half)))
    return np.concatenate([z_XTF.real, z_XTF.imag], -1)

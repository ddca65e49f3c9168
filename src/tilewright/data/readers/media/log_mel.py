"""Log-mel frames of sound, as Whisper and most recognisers take them, at the rate of the file: nothing is resampled.

By default windows of 25 ms each 10 ms (Hann, centred, ends mirrored), power, 80 triangles on Slaney's mel scale of unit
area up to 8 kHz or half the rate, log10 with a floor of 1e-10.
"""

import numpy as np

_TOP_HZ = 8000.0
_FLOOR = 1e-10
_FRAMES = 4096
"""Frames that are transformed at once."""


def log_mel(
    samples: np.ndarray, rate: int, num_mels: int = 80, window_ms: float = 25.0, hop_ms: float = 10.0
) -> np.ndarray:
    """Log-mel frames of one channel of sound.

    Args:
        samples: float [N], full scale 1.
        rate: samples per second, 1000 at least.
        num_mels: numbers in a frame.
        window_ms, hop_ms: milliseconds in a window, and from one to the next; at least two samples and one.

    Returns:
        float32 [1 + N // hop, num_mels], hop = the samples in `hop_ms`.
    """
    window, hop = round(window_ms * rate / 1000), round(hop_ms * rate / 1000)
    mode = "reflect" if len(samples) > window // 2 else "constant"
    padded = np.pad(samples.astype(np.float32, copy=False), window // 2, mode=mode)
    frames_FW = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop][: 1 + len(samples) // hop]
    hann_W = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    filters_KM = mel_filters(window, rate, num_mels)
    out_FM = np.empty((len(frames_FW), num_mels), np.float32)
    for start in range(0, len(frames_FW), _FRAMES):
        spectrum_FK = np.fft.rfft(frames_FW[start : start + _FRAMES] * hann_W)
        out_FM[start : start + _FRAMES] = np.log10(np.maximum(np.abs(spectrum_FK) ** 2 @ filters_KM, _FLOOR))
    return out_FM


def mel_filters(window: int, rate: int, num_mels: int = 80) -> np.ndarray:
    """The weights [1 + window // 2, num_mels] of a transform's frequencies in each mel band.

    Triangles of unit area, in equal steps in mel.
    """
    top = min(_TOP_HZ, rate / 2)
    corners = _to_hertz(np.linspace(0.0, _to_mel(np.array(top)), num_mels + 2))
    bins = np.arange(1 + window // 2)[:, None] * (rate / window)
    low, mid, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (bins - low) / (mid - low), (high - bins) / (high - mid)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))


def _to_mel(hertz: np.ndarray) -> np.ndarray:
    """Convert hertz to the mel scale by Slaney (1998): linear to 1 kHz, 3 mel per 200 Hz, then logarithmic, 27 mel per
    factor of 6.4."""
    return np.where(hertz < 1000, 3 * hertz / 200, 15 + 27 * np.log(np.maximum(hertz, 1) / 1000) / np.log(6.4))


def _to_hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))

"""Sound: duration, rate, channels, loudness, share of silence; log-mel frames on request. Its text is the transcript.

WAV of whole numbers is read by the standard library, everything else by soundfile. Sound is decoded in blocks. A file
that is shorter than it says is rejected whole: a transcript would not fit what is left.
"""

import wave
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.data.common.records import Record, Rejected
from tilewright.data.readers.file_entry import Entry
from tilewright.data.readers.media.captions import caption_of
from tilewright.data.readers.media.log_mel import log_mel
from tilewright.data.readers.parser_errors import PARSER_ERRORS, damage_of

SILENCE_DB = -50.0
"""A frame of 20 ms with a quieter RMS, against full scale, is silence."""
_BLOCK = 1 << 16
_LEAST_DB = -120.0
_UNKNOWN = (0, 0xFFFFFFFF, 0x7FFFFFFF)  # what a recorder that streams writes for a length
_MOST_CHUNKS = 10_000
Blocks = Iterator[np.ndarray]


def read_audio(entry: Entry) -> Iterator[Record | Rejected]:
    """Read an audio file: one record with the facts duration_s, rate, channels, loudness_db, peak, silence_share."""
    size, limits = entry.path.stat().st_size, entry.limits
    # 1. A WAV says how long it is: one that is shorter needs no decoding to be refused.
    lost = _wave_bytes_lost(entry)
    if lost:
        yield entry.reject("truncated audio", float(size), float(size + lost), "its header says so", num_bytes=size)
        return
    # 2. Limits by the header before, by what was decoded after: a header may say anything.
    try:
        source = _pcm(entry)
        if source is None:
            entry.need("soundfile")
            source = _open(entry)
        rate, channels, frames, blocks = source
        if rate < 1000 or not 1 <= channels <= 64:
            yield entry.reject("damaged audio", f"{rate} Hz, {channels} channels", "1000 Hz, 1 to 64 channels")
            return
        if frames > limits.audio_s * rate:
            yield entry.reject("seconds of sound", frames / rate, limits.audio_s, num_bytes=size)
            return
        measured, mono = _measure(blocks, rate, int(limits.audio_s * rate), entry.options.log_mel)
    except PARSER_ERRORS as error:
        yield entry.reject("damaged audio", damage_of(error), num_bytes=size)
        return
    # 3. Whole sounds only: a transcript would not fit a part.
    num = measured.pop("frames")
    if num > limits.audio_s * rate:
        yield entry.reject("seconds of sound", num / rate, limits.audio_s, num_bytes=size)
    elif num < frames or not num:
        yield entry.reject("truncated audio", num, float(max(frames, 1)), "frames", num_bytes=size)
    else:
        caption = caption_of(entry.path, limits.document_bytes, entry.folders)
        facts: dict[str, Any] = {"duration_s": num / rate, "rate": rate, "channels": channels, **measured}
        if caption.source:
            facts["caption_from"] = caption.source
        options = entry.options
        frames_of = (options.num_mels, options.window_ms, options.hop_ms)
        arrays = {"log_mel": log_mel(mono, rate, *frames_of)} if options.log_mel else {}
        yield entry.record("audio", caption.text, stop=size, facts=facts, arrays=arrays)


def _wave_bytes_lost(entry: Entry) -> int:
    """Bytes of audio that a WAV's header says and the file has not; decoders read what is there and report nothing."""
    size = entry.path.stat().st_size
    with entry.path.open("rb") as file:
        head = file.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return 0
        at = 12
        for _ in range(_MOST_CHUNKS):
            if at + 8 > size:
                break
            file.seek(at)
            kind, length = file.read(4), int.from_bytes(file.read(4), "little")
            if kind == b"data":
                return 0 if length in _UNKNOWN else max(0, at + 8 + length - size)
            at += 8 + length + length % 2
    return max(1, at - size)


def _pcm(entry: Entry) -> tuple[int, int, int, Blocks] | None:
    """Read PCM audio from a WAV of whole numbers: rate, channels, frames and blocks float [n, channels], or None."""
    with entry.path.open("rb") as file:
        if file.read(4) != b"RIFF":
            return None
    try:
        sound = wave.open(str(entry.path))  # noqa: SIM115  closed when its blocks end
    except (wave.Error, EOFError):
        return None
    width, frames = sound.getsampwidth(), sound.getnframes()
    size = frames * width * sound.getnchannels()
    if width not in (1, 2, 3, 4) or not 0 < size <= entry.path.stat().st_size:
        sound.close()
        return None

    def blocks() -> Blocks:
        with sound:
            while data := sound.readframes(_BLOCK):
                yield pcm_values(data, width).reshape(-1, sound.getnchannels())

    return sound.getframerate(), sound.getnchannels(), frames, blocks()


def pcm_values(data: bytes, width: int) -> np.ndarray:
    """Samples of PCM audio of `width` bytes, little-endian, as float32 of full scale 1; one-byte ones are unsigned.

    Example:
        >>> pcm_values(b"\\x00\\x40", 2), pcm_values(b"\\x00\\x00\\xc0", 3), pcm_values(b"\\x80", 1)
        (array([0.5], dtype=float32), array([-0.5], dtype=float32), array([0.], dtype=float32))
    """
    data = data[: len(data) // width * width]
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return (np.frombuffer(data, f"<i{width}") / 2 ** (8 * width - 1)).astype(np.float32)


def _open(entry: Entry) -> tuple[int, int, int, Blocks]:
    import soundfile

    entry.path.open("rb").close()  # what is wrong with the machine, it would say without a number
    sound = soundfile.SoundFile(str(entry.path))

    def blocks() -> Blocks:
        with sound:
            while len(block := sound.read(_BLOCK, dtype="float32", always_2d=True)):
                yield block

    return sound.samplerate, sound.channels, sound.frames, blocks()


def _measure(blocks: Blocks, rate: int, most: int, keep: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Measure audio: facts of a sound, and one channel of it (the mean of all) if `keep`; nothing after `most`
    frames."""
    # Silence is judged in steps of 20 ms, which blocks cut: the rest of a block is carried over.
    step = max(1, rate // 50)
    frames, power, peak, quiet, num_steps = 0, 0.0, 0.0, 0, 0
    mono: list[np.ndarray] = []
    held = np.zeros(0)
    threshold = 10 ** (SILENCE_DB / 10)
    for block in blocks:
        # Floats may hold NaN and infinities.
        block = np.nan_to_num(block, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1e3, 1e3)
        frames += len(block)
        energy_N = (block.astype(np.float64) ** 2).mean(1)
        power += energy_N.sum()
        peak = max(peak, float(np.abs(block).max(initial=0)))
        held = np.concatenate([held, energy_N])
        whole = len(held) // step * step
        quiet += int((held[:whole].reshape(-1, step).mean(1) < threshold).sum())
        num_steps += whole // step
        held = held[whole:]
        if keep:
            mono.append(block.mean(1))
        if frames > most:
            break
    # The last step may be shorter.
    if len(held):
        quiet, num_steps = quiet + int(held.mean() < threshold), num_steps + 1
    loudness = 10 * np.log10(power / frames) if frames and power else _LEAST_DB
    facts = {
        "frames": frames,
        "loudness_db": round(max(float(loudness), _LEAST_DB), 2),
        "peak": round(peak, 6),
        "silence_share": round(quiet / max(1, num_steps), 4),
    }
    return facts, np.concatenate(mono) if mono else np.zeros(0, np.float32)

"""Images and sound: facts against other implementations, captions by name, arrays on request, damage by number."""

import csv
import io
import json

import numpy as np
import pytest
import scipy.fft
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from tests.data.readers.made import image_bytes, one, pixels, read, refusal, sound_bytes, tone, wav_bytes
from tests.draws import examples
from tilewright.data.readers.limits import ReadLimits, ReadOptions
from tilewright.data.readers.media.images import near_images
from tilewright.data.readers.media.log_mel import log_mel
from tilewright.data.readers.read_file import read_file


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_facts_of_an_image(kind, tmp_path):
    path = tmp_path / f"a.{kind.lower()}"
    path.write_bytes(image_bytes(kind))
    record = one(path)
    assert (record.modality, record.text, record.stop) == ("image", "", path.stat().st_size)
    assert (record.facts["width"], record.facts["height"], record.facts["format"]) == (64, 48, kind.lower())
    assert record.facts["mode"] == Image.open(path).mode


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns(orientation, tmp_path):
    """Each orientation, undone with numpy: the pixels are those of the picture that was taken."""
    picture = pixels(height=40, width=40)[:, :30]
    undo = [lambda a: a, np.fliplr, lambda a: np.rot90(a, 2), np.flipud, lambda a: a.transpose(1, 0, 2)]
    undo += [lambda a: np.rot90(a, 1), lambda a: np.rot90(a, 2).transpose(1, 0, 2), lambda a: np.rot90(a, 3)]
    stored = np.ascontiguousarray(undo[orientation - 1](picture))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.png"
    Image.fromarray(stored).save(path, exif=exif)
    record = one(path, options=ReadOptions(image_size=30))
    assert (record.facts["width"], record.facts["height"]) == (30, 40)
    got = record.arrays["pixels"]
    assert (got.shape, got.dtype) == ((3, 30, 30), np.uint8)
    worst = np.abs(got.transpose(1, 2, 0).astype(int) - picture[5:35]).max()
    assert worst == 0, f"worst element off by {worst}"


def test_the_hash_is_that_of_scipys_cosine_transform_and_survives_a_new_size(tmp_path):
    picture = Image.fromarray(pixels(3, 256, 320))
    picture.save(tmp_path / "a.png")
    picture.resize((160, 128)).save(tmp_path / "b.jpg", quality=70)
    Image.fromarray(pixels(4, 256, 320)).save(tmp_path / "c.png")
    hashes = [int(one(tmp_path / name).facts["phash"], 16) for name in ("a.png", "b.jpg", "c.png")]
    grey = np.asarray(picture.convert("L").resize((32, 32), Image.Resampling.LANCZOS)).astype(float)
    low = scipy.fft.dctn(grey)[:8, :8]
    bits = "".join("01"[int(value > np.median(low))] for value in low.ravel())
    assert f"{hashes[0]:064b}" == bits
    assert near_images(hashes, 6) == [(0, 1)]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 15), st.randoms(use_true_random=False))
def test_near_images_are_all_that_a_comparison_of_each_with_each_finds(values, distance, random):
    for value in values[:5]:
        values.append(value ^ sum(1 << bit for bit in random.sample(range(64), random.randint(0, 10))))
    pairs = [(i, j) for j in range(len(values)) for i in range(j) if (values[i] ^ values[j]).bit_count() <= distance]
    assert near_images(values, distance) == sorted(pairs)


def test_captions(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.png").write_bytes(image_bytes())
    (tmp_path / "a.txt").write_text("Ein Hund über Bord", encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps({"caption": "A cat", "alt": "cat"}))
    with (tmp_path / "metadata.csv").open("w") as file:
        csv.writer(file).writerows([["file_name", "text"], ["c.png", "From a table"], ["x.png", "of none"]])
    records = {name: one(tmp_path / f"{name}.png") for name in "abcd"}
    assert [record.text for record in records.values()] == ["Ein Hund über Bord", "A cat", "From a table", ""]
    assert records["b"].facts["alt"] == "cat"
    assert [records[name].facts.get("caption_from") for name in "abcd"] == [".txt", ".json", "metadata.csv", None]
    for name, media in (("a.txt", "a.png"), ("b.json", "b.png"), ("metadata.csv", "c.png")):
        assert (refusal(tmp_path / name).rule, refusal(tmp_path / name).value) == ("text of another file", media)
    (tmp_path / "other.txt").write_text("a text of its own")
    assert one(tmp_path / "other.txt").text == "a text of its own"


def test_transcripts_of_a_manifest_one_folder_up(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.wav").write_bytes(wav_bytes())
    (tmp_path / "manifest.jsonl").write_text(json.dumps({"audio_filepath": "clips/a.wav", "text": "hello"}) + "\n")
    (record,) = read_file(tmp_path / "clips" / "a.wav", "clips/a.wav", "d")
    assert (record.modality, record.text, record.facts["caption_from"]) == ("audio", "hello", "manifest.jsonl")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_image(kind, tmp_path):
    path = tmp_path / f"a.{kind.lower()}"
    path.write_bytes(image_bytes(kind)[:-200])
    assert refusal(path).rule == "damaged image"


def test_too_many_pixels(tmp_path):
    path = tmp_path / "a.png"
    Image.new("1", (9000, 9000)).save(path)
    reject = refusal(path)
    assert (reject.rule, reject.value, reject.threshold) == ("pixels", 81e6, 1 << 26)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_loudness_of_a_tone_and_the_share_of_silence(width, tmp_path):
    path = tmp_path / "a.wav"
    samples = np.concatenate([tone(8000, 1.0), np.zeros(3 * 8000)])
    path.write_bytes(wav_bytes(np.repeat(samples, 2), 8000, width, channels=2))
    facts = one(path).facts
    assert (facts["duration_s"], facts["rate"], facts["channels"]) == (4.0, 8000, 2)
    other, _ = soundfile.read(io.BytesIO(path.read_bytes()))
    assert facts["loudness_db"] == pytest.approx(10 * np.log10(np.mean(other**2)), abs=0.01)  # two decimals
    assert facts["peak"] == pytest.approx(np.abs(other).max(), abs=1e-6)
    assert facts["silence_share"] == 0.75


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "AIFF", "MP3"])
def test_other_formats_of_sound(kind, tmp_path):
    path = tmp_path / f"a.{kind.lower()}"
    path.write_bytes(sound_bytes(kind))
    facts = one(path).facts
    assert facts["rate"] == 16000
    assert facts["duration_s"] == pytest.approx(0.5, abs=0.06)  # MP3 comes in frames of 36 ms
    assert facts["loudness_db"] == pytest.approx(20 * np.log10(0.5 / np.sqrt(2)), abs=0.5)


@examples(20)
@given(st.sampled_from([8000, 16000, 32000, 44100, 48000]), st.integers(300, 40_000), st.integers(0, 99))
def test_log_mel_is_that_of_transformers(rate, size, seed):
    samples = np.random.default_rng(seed).normal(0, 0.1, max(size, rate // 30)).astype(np.float32)
    window, hop = round(0.025 * rate), round(0.01 * rate)
    bank = mel_filter_bank(1 + window // 2, 80, 0.0, min(8000.0, rate / 2), rate, norm="slaney", mel_scale="slaney")
    hann = window_function(window, "hann")
    options = {"fft_length": window, "power": 2.0, "mel_filters": bank, "log_mel": "log10", "mel_floor": 1e-10}
    expected = spectrogram(samples.astype(np.float64), hann, window, hop, **options).T
    got = log_mel(samples, rate)
    num = min(len(got), len(expected))
    assert abs(len(got) - len(expected)) <= 1
    difference = np.abs(got[:num] - expected[:num])
    assert difference.max() < 1e-3, f"worst element {np.unravel_index(difference.argmax(), difference.shape)}"


def test_log_mel_on_request(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav_bytes(tone(16000, 1.0)))
    array = one(path, options=ReadOptions(log_mel=True)).arrays["log_mel"]
    assert (array.shape, array.dtype) == ((101, 80), np.float32)
    assert not one(path).arrays


def test_sound_that_is_shorter_than_it_says(tmp_path):
    for kind, data in (("wav", wav_bytes()), ("flac", sound_bytes("FLAC")), ("ogg", sound_bytes("OGG"))):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(data[: len(data) * 2 // 3])
        reject = refusal(path)
        assert reject.rule in ("truncated audio", "damaged audio"), kind
    wav = tmp_path / "a.wav"
    assert (refusal(wav).value, refusal(wav).threshold) == (float(wav.stat().st_size), float(len(wav_bytes())))


def test_too_many_seconds(tmp_path):
    for name, data in (("a.wav", wav_bytes()), ("a.flac", sound_bytes("FLAC"))):
        (tmp_path / name).write_bytes(data)
        reject = refusal(tmp_path / name, limits=ReadLimits(audio_s=0.4))
        assert (reject.rule, reject.value, reject.threshold) == ("seconds of sound", 0.5, 0.4)


def test_a_tar_of_webdataset(tmp_path):
    from tests.data.readers.made import tar_bytes

    members = {}
    for number in range(3):
        members |= {f"{number:03}.jpg": image_bytes("JPEG"), f"{number:03}.txt": f"caption {number}".encode()}
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    records, rejects = read(tmp_path / "a.tar")
    assert [(r.part, r.text) for r in records] == [(f"00{i}.jpg", f"caption {i}") for i in range(3)]
    assert [r.rule for r in rejects] == ["text of another file"] * 3

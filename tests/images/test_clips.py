"""Headers and frames of videos equal a plain PyAV loop."""

import contextlib
from fractions import Fraction
from io import BytesIO

import numpy as np
import pytest
from made_videos import KINDS, plain_frames, write_video

from latentcache.errors import UnusableSampleError
from latentcache.fields.clips import ClipSettings
from latentcache.geometry.sizes import Size
from latentcache.images.clips import EncodedClip, is_clip
from latentcache.sources.causes import HINTS


def settings(**changes):
    return ClipSettings(**{"frames": (5,), "step": 4, **changes})


def frames_of(path, count, **changes):
    """Decode the frames of a clip as (F, H, W, 3)."""
    return np.stack(list(EncodedClip(path.read_bytes()).pixels(count, settings(**changes))))


def decoded(data):
    clip = EncodedClip(data)
    return list(clip.pixels(min(clip.clip[0], 9), settings()))


def reason(data):
    with pytest.raises(UnusableSampleError) as caught:
        decoded(data)
    assert caught.value.fix == HINTS[caught.value.slug]
    return caught.value.slug


@pytest.mark.parametrize("ending", KINDS)
def test_every_format_has_its_header_and_its_frames(ending, tmp_path):
    path = write_video(tmp_path / f"a{ending}", 9, fps=8, audio=ending != ".mov")
    with path.open("rb") as file:
        assert is_clip(file)
        clip = EncodedClip(file)
    assert (clip.size, clip.clip) == (Size(64, 96), (9, 8, 1))
    assert np.array_equal(frames_of(path, 9), plain_frames(path)[0])
    assert np.array_equal(frames_of(path, 5), plain_frames(path)[0][:5])


def test_a_rotation_is_applied(tmp_path):
    """The display matrix of a telephone held upright, (0 1 -1 0), turns to the right: ISO/IEC 14496-12, 8.3.2."""
    data = write_video(tmp_path / "a.mp4", 5, rotation=-90).read_bytes()
    matrix = np.frombuffer(data, ">i4", count=5, offset=data.index(b"tkhd") + 44)
    assert (matrix // 65536).tolist() == [0, 1, 0, -1, 0]
    clip, frames = EncodedClip(data), plain_frames(tmp_path / "a.mp4")[0]
    assert clip.size == Size(96, 64)
    assert np.array_equal(frames_of(tmp_path / "a.mp4", 5), frames.transpose(0, 2, 1, 3)[:, :, ::-1])


@pytest.mark.parametrize(("fps", "frames"), [(4, [0, 2, 4, 6, 8]), (3, [0, 3, 5, 8]), (16, [0, 0, 1, 1, 2])])
def test_frames_are_resampled_by_time(fps, frames, tmp_path):
    path = write_video(tmp_path / "a.mp4", 9, fps=8)
    clip = np.array([EncodedClip(path.read_bytes()).clip])
    assert settings(fps=fps).available(clip)[0] == 8 * fps // 8 + 1
    assert np.array_equal(frames_of(path, len(frames), fps=fps), plain_frames(path)[0][frames])


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
def test_a_variable_frame_rate_uses_timestamps(ending, tmp_path):
    times = [0, 100, 150, 600, 1000, 1100, 1500, 1900, 2000]
    path = write_video(tmp_path / f"a{ending}", 9, times=times)
    frames, seconds = plain_frames(path)
    nearest = [min(range(9), key=lambda number: abs(seconds[number] - Fraction(at, 4))) for at in range(9)]
    assert np.array_equal(frames_of(path, 9, fps=4), frames[nearest])
    assert np.array_equal(frames_of(path, 9), frames)
    assert nearest != list(range(9))


@pytest.mark.parametrize("ending", [".mp4", ".mkv", ".webm"])
def test_files_that_are_cut_short(ending, tmp_path):
    data = write_video(tmp_path / f"a{ending}", 24).read_bytes()
    rest = data[: len(data) // 4]
    for damaged in (rest, rest.ljust(len(data), b"\0")):
        assert reason(damaged) in ("truncated", "decoder-error", "frames-missing")


@pytest.mark.parametrize("ending", KINDS)
def test_clips_of_a_truncated_file_equal_the_original(ending, tmp_path):
    data = write_video(tmp_path / f"a{ending}").read_bytes()
    whole = list(EncodedClip(data).pixels(9, settings()))
    for cut in range(len(data) // 40, len(data), len(data) // 40):
        with contextlib.suppress(UnusableSampleError):
            assert np.array_equal(list(EncodedClip(data[:cut]).pixels(9, settings())), whole)


def test_damaged_packets(tmp_path):
    data = bytearray(write_video(tmp_path / "a.mp4", 9, height=256, width=256).read_bytes())
    middle = len(data) * 3 // 5
    data[middle : middle + 64] = bytes(64)
    assert reason(bytes(data)) == "decoder-error"


def test_too_many_pixels(tmp_path):
    data = write_video(tmp_path / "a.mp4", 5).read_bytes()
    with pytest.raises(UnusableSampleError, match="64x96 = 6144 pixels, at most 6143 allowed"):
        EncodedClip(data, max_pixels=6143)
    assert EncodedClip(data, max_pixels=6144)


def test_a_playlist_is_never_opened(tmp_path):
    """FFmpeg would open other files for a playlist."""
    assert not is_clip(BytesIO(b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://localhost/a.ts\n"))
    assert not is_clip(BytesIO(b"ffconcat version 1.0\nfile /etc/passwd\n"))

"""Small videos written with PyAV, and their frames in a plain loop."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

#: Ending -> (container, codec).
KINDS = {
    ".mp4": ("mp4", "libx264"),
    ".mov": ("mov", "mpeg4"),
    ".mkv": ("matroska", "libx264"),
    ".webm": ("webm", "libvpx-vp9"),
}


def pixels(number, height, width, seed=0):
    """Frame ``number`` (H, W, 3): moving gradients and a bar whose height encodes the number."""
    y, x = np.mgrid[:height, :width]
    red, green, blue = np.random.default_rng(seed).integers(0, 256, 3)
    frame = np.stack([x * 2 + number * 9 + red, y * 3 + green, x + y + 5 * number + blue], axis=-1) % 256
    frame[(number * 2) % height] = 255
    return frame.astype(np.uint8)


def write_video(
    path, frames=9, *, fps=8, height=64, width=96, rotation=0, times=None, seed=0, audio=False, codec="", **options
):
    """Write a video of some frames.

    Args:
        path: Its ending decides the format.
        frames: Number of frames.
        fps: Frames per second.
        height: Of a stored frame.
        width: Of a stored frame.
        rotation: Degrees that a player turns it counterclockwise.
        times: Milliseconds of the frames, for a variable frame rate.
        seed: Another one gives another video.
        audio: With a second of silence.
        codec: Of the frames, if not the usual one.
        options: Of the codec.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    container, usual = KINDS[path.suffix]
    early = {"movflags": "faststart"} if path.suffix in (".mp4", ".mov") else {}
    with av.open(str(path), "w", format=container, options=early) as file:
        video = file.add_stream(codec or usual, rate=fps, options={"g": "4", "threads": "1", **options})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        video.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            video.set_display_rotation(rotation)
        if audio:
            sound = file.add_stream("libopus" if path.suffix == ".webm" else "aac", rate=48000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(pixels(number, height, width, seed), format="rgb24")
            frame.pts = times[number] if times else number * 1000 // fps
            frame.time_base = Fraction(1, 1000)
            file.mux(video.encode(frame))
        file.mux(video.encode(None))
        if audio:
            silence = av.AudioFrame.from_ndarray(
                np.zeros((2, 48000), dtype=np.float32), format="fltp", layout="stereo"
            )
            silence.rate = 48000
            file.mux([*sound.encode(silence), *sound.encode(None)])
    return path


def write_sound(path):
    """Write an mp4 file with a second of silence and no video stream."""
    with av.open(str(path), "w", format="mp4") as file:
        sound = file.add_stream("aac", rate=48000)
        silence = av.AudioFrame.from_ndarray(np.zeros((2, 48000), dtype=np.float32), format="fltp", layout="stereo")
        silence.rate = 48000
        file.mux([*sound.encode(silence), *sound.encode(None)])
    return path


def plain_frames(path: Path):
    """Decode all frames (N, H, W, 3) and their times in seconds."""
    with av.open(str(path)) as file:
        found = [(frame.to_ndarray(format="rgb24"), frame.pts * frame.time_base) for frame in file.decode(video=0)]
    return np.stack([frame for frame, _ in found]), [time for _, time in found]

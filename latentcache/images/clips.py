"""Videos: what their headers say, and the frames of a clip, decoded one by one with PyAV (FFmpeg).

Guarantee: a bad file raises ``UnusableSampleError`` and nothing else. A frame that the decoder calls damaged, and an
end of the video before a wanted frame, are errors. The container is the one that the first bytes show, so no playlist
and no network is ever opened. Cost of a header: one frame is decoded. Matroska has no count of frames, so its packets
are counted, which reads the file. Sound, pixel aspect ratios and HDR are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.clips import ClipSettings
from latentcache.fields.latents import MAX_PIXELS
from latentcache.geometry.sizes import Size
from latentcache.sources.causes import IMAGE_BRANDS, fault

_MATROSKA, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_MOVIE = (b"moov", b"mdat", b"wide")
_HEAD_BYTES = 16
#: Seconds that the frames of a Matroska file may end before the time that it announces.
_LATE = Fraction(1, 2)
_MAX_RATE, _MAX_PER = 1_000_000, 1 << 12


def is_clip(file: BinaryIO) -> bool:
    """True if a file begins as a video does: ISO media (mp4, mov) except images, or Matroska (mkv, webm)."""
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    if head[4:8] == b"ftyp":
        return head[8:12] not in IMAGE_BRANDS
    return head.startswith(_MATROSKA) or head[4:8] in _MOVIE


class EncodedClip:
    """One video file: its header is read once, its frames are decoded when asked for.

    Raises:
        UnusableSampleError: The file cannot be used; ``slug`` is the reason.
    """

    def __init__(self, source: bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> None:
        self._stream = BytesIO(source) if isinstance(source, bytes) else source
        with self._opened() as video:
            frames, rate = (video.frames, video.average_rate) if video.frames else _counted(video)
            rate = min(rate or video.guessed_rate or Fraction(1), Fraction(_MAX_RATE)).limit_denominator(_MAX_PER)
            self.clip = (frames, rate.numerator, rate.denominator)
            """Frames, and frames per second as numerator and denominator: a row of the column ``CLIP``."""
        with self._opened() as video:
            first = next(video.container.decode(video), None)
        if first is None:
            raise fault("no-video", "its video stream has no frames")
        if first.width * first.height > max_pixels:
            raise too_many_pixels(first.height, first.width, max_pixels)
        self._stored = (first.height, first.width)
        self._turns = first.rotation // 90 % 4
        self.size = Size(*(self._stored[::-1] if self._turns % 2 else self._stored))
        """Pixels of a frame, after rotation."""

    def pixels(self, count: int, clips: ClipSettings) -> Iterator[NDArray[np.uint8]]:
        """``count`` frames of a clip: RGB pixels (H, W, 3), upright, C-contiguous.

        Raises:
            UnusableSampleError: ``decoder-error``, ``frames-missing``; frames before were given.
        """
        wanted = 0
        held = None
        held_at = Fraction(0)
        with self._opened() as video:
            from av.video.reformatter import VideoReformatter

            rgb = VideoReformatter()
            for number, at, frame in self._timed(video, clips.fps):
                while held is not None and wanted < count and 2 * wanted <= held_at + at:
                    yield self._upright(rgb.reformat(held, format="rgb24"))
                    wanted += 1
                if wanted == count:
                    return
                held, held_at, last = frame, at, number
            if held is None or last + 1 < self.clip[0]:
                detail = f"its header announces {self.clip[0]} frames, the decoder gives {last + 1 if held else 0}"
                raise fault("frames-missing", detail)
            for _ in range(count - wanted):
                yield self._upright(rgb.reformat(held, format="rgb24"))

    def _timed(self, video: Any, fps: int) -> Iterator[tuple[int, Fraction, Any]]:
        """Number of each frame, its time in output frames, and the frame."""
        frames, rate, per = self.clip
        began: Fraction | None = None
        for number, frame in enumerate(video.container.decode(video)):
            if frame.is_corrupt or (frame.height, frame.width) != self._stored:
                damage = "is damaged" if frame.is_corrupt else f"has {frame.height}x{frame.width} pixels"
                raise fault("decoder-error", f"frame {number} of {frames} {damage}")
            time = Fraction(number * per, rate) if frame.pts is None else frame.pts * frame.time_base
            began = time if began is None else began
            yield number, (time - began) * fps if fps else Fraction(number), frame

    def _upright(self, frame: Any) -> NDArray[np.uint8]:
        return np.ascontiguousarray(np.rot90(frame.to_ndarray(), self._turns))

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            import av
        except ImportError as error:
            raise fault("needs-pyav", "it is a video, and PyAV is not installed") from error
        stream = self._stream
        stream.seek(0)
        is_matroska = stream.read(len(_MATROSKA)) == _MATROSKA
        if is_matroska and (announced := _segment_end(stream)) > (size := stream.seek(0, 2)):
            # FFmpeg gives the start of a cut frame as a whole one.
            raise fault("truncated", f"it announces {announced} bytes and has {size}")
        stream.seek(0)
        try:
            # Titles and comments need not be UTF-8, and are not used.
            form = "matroska" if is_matroska else "mp4"
            with av.open(stream, format=form, metadata_errors="ignore") as container:
                if not container.streams.video:
                    raise fault("no-video", "it has no video stream")
                video = container.streams.video[0]
                if video.codec_context is None:
                    raise fault("decoder-error", "the header of its video is damaged")
                video.codec_context.thread_count = 1  # other files are decoded by other threads
                yield video
        except av.FFmpegError as error:
            raise fault("decoder-error", f"decoding failed: {error}") from error


def too_many_pixels(height: int, width: int, most: int) -> UnusableSampleError:
    """The rejection of an image or a frame that is too large."""
    return fault("too-many-pixels", f"{height}x{width} = {height * width} pixels, at most {most} allowed")


def _segment_end(stream: BinaryIO) -> int:
    """Offset after the segment of a Matroska file (RFC 9559, 5), as its header claims; 0: it claims none."""
    position = 0
    for name in (_MATROSKA, _SEGMENT):
        stream.seek(position)
        head = stream.read(12)
        width = 9 - head[4].bit_length() if head.startswith(name) and len(head) == 12 else 9
        length = int.from_bytes(head[4 : 4 + width], "big") & (unknown := (1 << 7 * width) - 1)
        if width > 8 or length == unknown:
            return 0
        position += 4 + width + length
    return position


def _counted(video: Any) -> tuple[int, Fraction | None]:
    """Frames and frames per second of a stream whose header does not say them: its packets are counted."""
    times = [
        packet.pts * video.time_base
        for packet in video.container.demux(video)
        if packet.size and packet.pts is not None
    ]
    length, last = (max(times) - min(times), max(times)) if times else (Fraction(0), Fraction(0))
    try:
        hours, minutes, seconds = map(Fraction, video.metadata.get("DURATION", "0:0:0").split(":"))
    except ValueError:
        hours = minutes = seconds = Fraction(0)
    if hours * 3600 + minutes * 60 + seconds - last > _LATE + length / max(len(times), 1):
        raise fault("truncated", f"its frames end after {float(last):.1f} seconds, before its announced end")
    return len(times), (len(times) - 1) / length if length else None

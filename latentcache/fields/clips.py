"""Clips: the frames of a video that are encoded. An image is a clip of one frame."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import RecipeError, UsageError
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import MAX_DIM
from latentcache.value import Value

#: Column of samples, (S, 3) uint32: frames of a video, and its frames per second as numerator and denominator; zeros
#: for an image. Data sets without videos lack it.
CLIP = "clip"


class ClipSettings(Value):
    """Settings for the frames of a video that are encoded."""

    frames: tuple[int, ...]
    """Lengths of clips, ascending; a video gives one clip, of the longest that it has."""
    step: int
    """Frames of a latent frame: a clip of ``k * step + 1`` frames has ``k + 1`` of them."""
    fps: int = 0
    """Frames per second that are taken, nearest in time; 0: every frame."""
    version: int = 1
    """Increased if the same file gives other frames."""

    def identity(self) -> dict[str, Any]:
        """The part that moves stored bytes; the number of frames is in the key."""
        return {"fps": self.fps, "decoder": "ffmpeg", "version": self.version}

    def available(self, clip: NDArray[np.integer]) -> NDArray[np.int64]:
        """(n,) frames that videos, rows of the column ``CLIP``, have at :attr:`fps`; 0 for images."""
        count, rate, per = clip.astype(np.int64).T
        taken = (count - 1) * per * self.fps // np.maximum(rate, 1) + 1 if self.fps else count
        return np.where(count > 0, taken, 0)

    def chosen(self, clip: NDArray[np.integer]) -> NDArray[np.int64]:
        """(n,) length of the clip of each video; 0: it is too short for every length; 1 for images."""
        lengths = np.array([0, *self.frames], dtype=np.int64)
        longest = lengths[np.searchsorted(lengths, self.available(clip), side="right") - 1]
        return np.where(clip[:, 0] > 0, longest, 1)

    def __str__(self) -> str:
        rate = f" at {self.fps} per second" if self.fps else ""
        return f"{', '.join(map(str, self.frames))} frames{rate}"


def clip_settings(
    frames: tuple[int, ...] | None, fps: int | None, before: ClipSettings | None, step: int
) -> ClipSettings | None:
    """Combine settings, cache and model; None if images are all that is encoded."""
    lengths = tuple(sorted(frames)) if frames else before.frames if before else ()
    if not lengths:
        if fps is not None:
            raise UsageError(
                "needs frames: without them no videos are encoded",
                argument="fps",
                value=fps,
                fix=f"--frames=81 --fps={fps}",
            )
        return None
    if not step:
        fix = "give the VAE of a video model, or leave frames out"
        raise RecipeError("the encoder takes images only", argument="frames", value=lengths[-1], fix=fix)
    for length in lengths:
        good = min((length - 1) // step * step + 1, (MAX_DIM - 1) // step * step + 1)
        if length != good:
            raise RecipeError(
                f"this encoder takes 1 frame and a multiple of {step}, at most {MAX_DIM}",
                argument="frames",
                value=length,
                fix=f"--frames={max(good, 1)} or --frames={good + step}",
            )
    return ClipSettings(
        frames=lengths,
        step=step,
        fps=fps if fps is not None else before.fps if before else 0,
    )


def clip_frames(
    samples: SampleTable, rows: NDArray[np.intp], clips: ClipSettings | None, target: str
) -> tuple[NDArray[np.int64], list[tuple[int, Rejected]]]:
    """(n,) length of each sample's clip: 1 of an image, 0 of a rejected video; and the rejected samples."""
    if CLIP not in samples.columns:
        return np.ones(len(rows), dtype=np.int64), []
    clip = np.asarray(samples.columns[CLIP])[rows]
    frames = np.where(clip[:, 0] > 0, 0, 1) if clips is None else clips.chosen(clip)
    rejected = []
    for position in np.flatnonzero(frames == 0).tolist():
        if clips is None:
            reason, hint = "no-frame-count", "give --frames N to encode videos too; control images are of images only"
            detail = f"it is a video of {clip[position, 0]} frames, and {target} of images only is made"
        else:
            reason, hint = "too-few-frames", "use a longer video, or add a smaller --frames"
            rate = f" at {clips.fps} per second" if clips.fps else ""
            detail = f"it has {clips.available(clip[position : position + 1])[0]} frames{rate}, not {clips.frames[0]}"
        row = int(rows[position])
        rejected.append((row, samples.note([row], target, reason, detail=detail, hint=hint)))
    return frames, rejected


def clip_label(dims: tuple[int, int, int]) -> str:
    """``81x480x832``: frames, height and width; without the frames of an image."""
    return "x".join(map(str, dims[dims[0] == 1 :]))

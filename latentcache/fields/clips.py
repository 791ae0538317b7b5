"""Parts of images and videos that are encoded, from columns of the samples: clips, and points of focus crops.

A clip has some frames of a video; an image is a clip of one frame. A focus crop has a point in its middle. Its step
is part of the number of the variant in the key, so a point that moves the crop gives another entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import RecipeError, UsageError, count_of, keyword, option
from latentcache.fields.table import Rejected, SampleTable
from latentcache.geometry.placement import FOCUS_STEPS
from latentcache.identity.content import MAX_DIM
from latentcache.value import Value

#: Column of samples, (S, 3) uint32: frames of a video, and its frames per second as numerator and denominator; zeros
#: for an image. Data sets without videos lack it.
CLIP = "clip"
#: Column of samples, (S, 2) float32: x and y from 0 to 1 of width and height, or above 1 in pixels; -1: no point.
FOCUS = "focus"
STARTS = ("first", "middle")


class ClipSettings(Value):
    """Settings for the frames of a video that are encoded."""

    frames: tuple[int, ...]
    """Lengths of clips, ascending; a video gives one clip, of the longest that it has."""
    step: int
    """Frames of a latent frame: a clip of ``k * step + 1`` frames has ``k + 1`` of them."""
    fps: int = 0
    """Frames per second that are taken, nearest in time; 0: every frame."""
    start: str = "first"
    """``first`` or ``middle``: the clip has the first frames, or is in the middle of the video."""
    version: int = 1
    """Increased if the same file gives other frames."""

    def identity(self) -> dict[str, Any]:
        """The part that moves stored bytes; the number of frames is in the key."""
        return {"fps": self.fps, "start": self.start, "decoder": "ffmpeg", "version": self.version}

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

    def first(self, clip: tuple[int, int, int], frames: int) -> int:
        """Number of the first frame of a clip, counted at :attr:`fps`."""
        over = int(self.available(np.array([clip]))[0]) - frames
        return over // 2 if self.start == "middle" else 0

    def __str__(self) -> str:
        frames = f"{', '.join(map(str, self.frames))} frames"
        return f"{frames}{f' at {self.fps} per second' if self.fps else ''}, from the {self.start} on"


def clip_settings(
    frames: tuple[int, ...] | None, fps: int | None, start: str | None, before: ClipSettings | None, step: int
) -> ClipSettings | None:
    """Combine settings, cache and model; None if images are all that is encoded."""
    lengths = tuple(sorted(frames)) if frames else before.frames if before else ()
    if not lengths:
        if fps is not None or start is not None:
            argument, value = ("fps", fps) if fps is not None else ("clip_start", start)
            raise UsageError(
                "needs frames: without them no videos are encoded",
                argument=argument,
                value=value,
                fix=f"--frames=81 {option(argument, value)}",
                fix_python=f"frames=[81], {keyword(argument, value)}",
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
                fix_python=f"frames=[{max(good, 1)}] or frames=[{good + step}]",
            )
    return ClipSettings(
        frames=lengths,
        step=step,
        fps=fps if fps is not None else before.fps if before else 0,
        start=start or (before.start if before else "first"),
    )


def clip_frames(
    samples: SampleTable, rows: NDArray[np.intp], clips: ClipSettings | None, target: str, *, one_frame: bool
) -> tuple[NDArray[np.int64], list[tuple[int, Rejected]]]:
    """(n,) frames of each sample that are encoded: 1 of an image, 0 of a rejected video; and the rejected samples."""
    if one_frame or CLIP not in samples.columns:
        return np.ones(len(rows), dtype=np.int64), []
    clip = np.asarray(samples.columns[CLIP])[rows]
    frames = np.where(clip[:, 0] > 0, 0, 1) if clips is None else clips.chosen(clip)
    rejected = []
    for place in np.flatnonzero(frames == 0).tolist():
        if clips is None:
            reason, hint = "no-frame-count", "give --frames N to encode videos too; control images are of images only"
            detail = f"it is a video of {clip[place, 0]} frames, and {target} of images only is made"
        else:
            reason, hint = "too-few-frames", "use a longer video, or add a smaller --frames"
            rate = f" at {clips.fps} per second" if clips.fps else ""
            detail = f"it has {clips.available(clip[place : place + 1])[0]} frames{rate}, not {clips.frames[0]}"
        row = int(rows[place])
        rejected.append((row, samples.note([row], target, reason, detail=detail, hint=hint)))
    return frames, rejected


def clip_label(dims: tuple[int, int, int]) -> str:
    """``81x480x832``: frames, height and width; without the frames of an image."""
    return "x".join(map(str, dims[dims[0] == 1 :]))


def focus_of(samples: SampleTable) -> NDArray[np.float32]:
    """(S, 2) point of each image, see ``FOCUS``."""
    held = samples.columns.get(FOCUS)
    return np.full((len(samples), 2), -1, dtype=np.float32) if held is None else np.asarray(held)


def focus_steps(size: NDArray[np.int64], bucket: NDArray[np.int64], focus: NDArray[np.float32]) -> NDArray[np.int64]:
    """(n,) steps of ``geometry.placement``: the crop with the point in its middle, as far as the image reaches."""
    point = focus[:, ::-1].astype(np.float64)
    point = np.where((point > 1).any(axis=1, keepdims=True), point / size, point).clip(0, 1)
    scale = (bucket / size).max(axis=1, keepdims=True)
    over = np.maximum(size * scale - bucket, 0)
    axis = over.argmax(axis=1)[:, None]
    point, over, side = (np.take_along_axis(axes, axis, 1)[:, 0] for axes in (point, over, bucket))
    start = (point * (side + over) - side / 2) / np.maximum(over, 1)
    steps = np.floor(start.clip(0, 1) * FOCUS_STEPS + 0.5).astype(np.int64)
    return np.where((focus[:, 0] < 0) | (over < 1), FOCUS_STEPS // 2, steps)


def without_focus(samples: SampleTable, known: NDArray[np.intp], target: str) -> list[Rejected]:
    """One note for the field ``target`` if some of the images of known size have no point."""
    rows = known[focus_of(samples)[known, 0] < 0]
    if not len(rows):
        return []
    first = samples.names[int(rows[0])]
    detail = f"{count_of(len(rows), 'images have')} no point and a centered crop, the first is {first}"
    hint = "give focus_x and focus_y in a metadata table: from 0 to 1 of width and height, or in pixels"
    return [samples.note(rows, target, "no-focus", detail=detail, hint=hint)]

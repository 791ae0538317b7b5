"""Export a cache of images as the folder that a trainer reads: images, captions, and its own cache files.

Everything that can be wrong is looked for before the first byte: fields, architecture, sizes that the trainer would
not choose, and names that meet. Later exports into a folder write what changed, and delete the files of images that
are gone.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import ImageOps

from latentcache.errors import RecipeError, UsageError, count_of
from latentcache.export.aitoolkit import AiToolkit
from latentcache.export.folder import File, link, of_bytes, written
from latentcache.export.format import CONTROL, LATENTS, MASK, TEXT, Format, Latent, Request, Sample
from latentcache.export.kohya import Kohya
from latentcache.export.musubi import Musubi
from latentcache.export.onetrainer import OneTrainer
from latentcache.export.run import Advanced, Export
from latentcache.export.samples import captions_of, item_sizes, item_values, set_of
from latentcache.export.simpletuner import SimpleTuner
from latentcache.fields.clips import CLIP
from latentcache.fields.latents import LatentsRecipe, LatentsSettings, geometry_of
from latentcache.geometry.like.trainers import TRAINERS
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.images.clips import is_clip
from latentcache.images.headers import header
from latentcache.loader.samples import CachePart, join, prompt_row
from latentcache.sources.locations import locations, open_image, read_image
from latentcache.sources.scan import names_root
from latentcache.store.reader import EntryReader

if TYPE_CHECKING:
    from latentcache.export.folder import Folder
    from latentcache.export.settings import ExportSettings

#: By ``--to``.
TRAINER_FORMATS: Mapping[str, type[Format]] = {
    format.name: format for format in (Kohya, OneTrainer, SimpleTuner, Musubi, AiToolkit)
}
#: Bytes of a file of arrays beside the values: headers of its members and of the zip.
_AROUND = 2048


class ImageExport(Export):
    """One export: its cache, its format, and the samples in the order of the data set.

    See :class:`~latentcache.export.run.Export`.
    """

    noun = "images"

    def __init__(self, settings: ExportSettings) -> None:
        super().__init__(settings)
        trainer = TRAINER_FORMATS[settings.format]
        kinds = settings.fields or "latents"
        names = [
            *(trainer.latent_fields if kinds != "text" else ()),
            *(trainer.text_fields if kinds != "latents" else ()),
        ]
        self.fields = [name for name in names if name in self.snapshot.fields]
        self._recipe = self._checked_recipe()
        self._root = names_root(settings.data or Path(self.snapshot.source["root"]), self.snapshot.source)
        like = LatentsSettings(trainer_config=settings.trainer_config, like=settings.format).with_trainer()[0]
        try:
            self._geometry = geometry_of(like, self._recipe, self._recipe.encoder.multiple)
            self._geometry.like_tables()
        except RecipeError as error:  # it names options of a build
            problem = f"{settings.cache}: the trainer has no such sizes"
            raise UsageError(problem, why=str(error), fix=self._fitting_build()) from error
        fields = self.snapshot.fields
        self._check_config()
        self._entries = EntryReader(self.snapshot.paths, self.snapshot)
        self._format = trainer(
            Request(
                recipes={name: field.recipe for name, field in fields.items() if field.recipe is not None},
                wanted=self.fields,
                geometry=self._geometry,
                root=self._root,
                folder="" if settings.beside else settings.as_path or str(settings.out.absolute()),
                trainer_config=settings.trainer_config,
                prompts=self._prompts(),
                architecture=settings.architecture,
                release=settings.release,
            )
        )
        self.fields = list(self._format.request.wanted)
        joined = {name: join(CachePart(self.snapshot), (name,), repeats=False) for name in self.fields}
        self._rows = {name: _by_sample(part.sample, part.rows[name]) for name, part in joined.items()}
        needed = [set(rows) for name, rows in self._rows.items() if name not in self._format.optional]
        self._samples = {number: self._sample(number) for number in sorted(set.intersection(*needed))}
        self._check_sizes()
        self._check_names()
        self._format.begin(list(self._samples.values()))
        self._redrawn = 0
        """Images that are written as PNG: EXIF data turn the file, or the trainer does not read its format."""

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def plan(self) -> str:
        """See ``Export``."""
        return f"{super().plan}{' and copies of images' if self.settings.copy else ''}"

    @property
    def bytes(self) -> int:
        """See ``Export``: of the values, and of images that are copied."""
        total = 0
        samples = self.snapshot.samples
        for name, rows_of in self._rows.items():
            rows = [row for number in self._samples for variants in rows_of.get(number, ()) for row in variants]
            values = int(item_sizes(self.snapshot.fields[name], np.array(rows, int)).sum())
            halves = 2 if name == LATENTS and self._recipe.encoder.posterior == "moments" else 1
            total += values * 4 // halves + _AROUND * len(rows)
        if self.settings.copy:
            files = np.asarray(samples.first_input.file)[list(self._samples)]
            total += int(np.asarray(samples.files.stat)[files, 0].sum())
        return total

    def write(self, folder: Folder, on_progress: Advanced) -> tuple[dict[str, Any], dict[str, Any]]:
        """See ``Export``."""
        for done, (number, sample) in enumerate(self._samples.items(), 1):
            for file, make in self._files(number, sample):
                folder.put(file, make)
            on_progress(done, len(self._samples))
        if not self.settings.beside:  # there such a file would say how DATA is read
            for name, data in self._format.settings().items():
                folder.put(*of_bytes(name, data, is_changing=name in self._format.changing))
        samples = self._samples.values()
        settings = self.settings
        about = {
            **self.facts,
            **self._format.facts,
            "data": str(self._root),
            "draw": settings.draw,
            "beside": bool(settings.beside),
            "options": dict(self.snapshot.source.get("options", {})),
            "samples": len(samples),
            "left_out": len(self.snapshot.samples) - len(samples),
        }
        captions = sum(len(captions_of(self.snapshot, number, self.fields)) for number in self._samples)
        counts = {
            "redrawn": self._redrawn,
            "several_lines": sum(len(sample.caption.splitlines()) > 1 for sample in samples),
            "no_caption": sum(not sample.has_caption for sample in samples),
            "partners_left_out": 0 if settings.beside else sum(map(self._unwritten, self._samples)),
            "captions_left_out": 0 if self._format.draws_captions else captions - len(samples),
        }
        return about, {**about, **counts, "advice": list(self._format.advice())}

    def _checked_recipe(self) -> LatentsRecipe:
        settings, snapshot, build = self.settings, self.snapshot, self.build_command
        field = snapshot.fields.get(LATENTS)
        if field is None or not isinstance(field.recipe, LatentsRecipe):
            problem = f"{settings.cache}: holds no latents, which --to {settings.format} needs"
            raise UsageError(problem, fix=build(f"--model MODEL --like {settings.format}"))
        if settings.fields in ("text", "all") and TEXT not in snapshot.fields:
            problem = f"{settings.cache}: holds no embeddings of captions"
            raise UsageError(problem, fix=f"{build('--text-encoder PIPELINE')}; or --fields latents")
        self.check_demo()
        has_clips = field.recipe.geometry.clips is not None and not TRAINERS[settings.format].has_videos
        if has_clips or field.recipe.geometry.crops > 1:
            raise UsageError(
                f"{settings.cache}: holds clips or several crops, which --to {settings.format} cannot write",
                fix=build(f"--like {settings.format}", f"-{settings.format}"),
            )
        if settings.draw is not None and field.recipe.encoder.posterior != "moments":
            problem = "--draw: the cache holds means, nothing to draw from"
            raise UsageError(problem, fix=f"leave it out, or {build('--latents moments')}")
        return field.recipe

    def _check_config(self) -> None:
        """The settings of the trainer must allow what is exported."""
        config = self.settings.trainer_config
        if config is None:
            return
        if self._geometry.flip and not self._recipe.geometry.flip and LATENTS in self.fields:
            raise UsageError(
                f"{config}: the trainer flips images, and the cache has no flips",
                fix="run the same `latentcache build` with --flip: only flips are encoded; or turn it off",
            )
        limits = TRAINERS[self.settings.format].settings(config)
        if limits.needs_masks and LATENTS in self.fields and MASK not in self.fields:
            raise UsageError(
                f"{config}: masked_training or alpha_mask is on, and the cache has no masks",
                why="without them the trainer encodes again, or fails at the first batch",
                fix="run `latentcache build` with masks in files beside the images or --masks alpha, or turn it off",
            )
        if limits.needs_controls and LATENTS in self.fields and CONTROL not in self.fields:
            raise UsageError(
                f"{config}: the model takes a conditioning image, and the cache has none",
                fix="add NAME-condlabel.png beside each image, and run the same `latentcache build` again",
            )
        if TEXT in self.fields and limits.no_text:
            raise UsageError(
                f"{config}: the trainer takes no cached text",
                why=", ".join(limits.no_text),
                fix="turn it off in the trainer's settings, or export --fields latents",
            )

    def _check_sizes(self) -> None:
        """The trainer has to choose the sizes that the cache holds, or it encodes these images again."""
        upscale = self._geometry.upscale
        wrong = list[tuple[str, set[Size], set[Size | None]]]()

        @cache
        def chosen(image: Size) -> set[Size | None]:
            return {table.nearest(image) if upscale else table.within(image) for table in self._format.tables}

        for number, sample in self._samples.items() if LATENTS in self.fields else ():
            held = {self._bucket(LATENTS, variants) for variants in self._rows[LATENTS][number]}
            if held != chosen(sample.size):
                wrong.append((sample.name, held, chosen(sample.size)))
        if wrong:
            name, held, theirs = wrong[0]
            cached, wanted = " and ".join(map(str, held)), " and ".join(map(str, theirs))
            raise UsageError(
                f"{self.settings.cache}: the trainer would encode {count_of(len(wrong), 'images')}"
                f" of {len(self._samples)} again, because it chooses other sizes",
                where=name,
                why=f"{name} has {cached} in the cache, {self._format.name} gives it {wanted} (height x width)",
                fix=self._fitting_build(),
            )

    def _fitting_build(self) -> str:
        """The command that builds a cache with the sizes of the trainer."""
        geometry = self._recipe.geometry
        trainer = self.settings.format
        model = shlex.quote(str(self.snapshot.fields[LATENTS].provenance.get("model") or "MODEL"))
        sizes = "".join(f" --resolution {side}" for side in geometry.resolutions)
        words = f"--model {model}{sizes}{' --flip' if geometry.flip else ''} --like {trainer}"
        return self.build_command(words, f"-{trainer}")

    def _check_names(self) -> None:
        """No two images share a file, and images of one folder share the settings that it has in the trainer."""
        stems, folders = dict[str, str](), dict[str, Sample]()
        for sample in self._samples.values():
            if sample.name != sample.name.encode("utf-8", "replace").decode() and not self.settings.beside:
                raise UsageError(
                    f"{sample.name!r} is no UTF-8, and no settings of a trainer can name it",
                    where=repr(sample.name),
                    fix="rename this image or its folder, and build again",
                )
            other = stems.setdefault(sample.stem, sample.name)
            if other != sample.name:
                raise UsageError(
                    f"{other} and {sample.name} would share their files",
                    where=other,
                    why=f"{self._format.name} names files by the name of the image without its extension",
                    fix="rename one of the images, and build again",
                )
            first = folders.setdefault(sample.folder, sample)
            names = self._format.shared if not self.settings.beside else ()
            if differing := [name for name in names if getattr(sample, name) != getattr(first, name)]:
                values = f"{getattr(first, differing[0])!r} and {getattr(sample, differing[0])!r}"
                raise UsageError(
                    f"{first.name} and {sample.name} would be in one folder of the export, {sample.folder}",
                    where=first.name,
                    why=f"a folder has one value of {differing[0]} in {self._format.name}, and these have {values}",
                    fix="rename the folder of one of them, and build again",
                )

    def _sample(self, number: int) -> Sample:
        """A sample, without values."""
        samples = self.snapshot.samples
        captions = captions_of(self.snapshot, number, self.fields)
        image_set = set_of(self.snapshot, number)
        mask, name, clip = samples.inputs.get("mask"), samples.names[number], samples.columns.get(CLIP)
        clips = self._recipe.geometry.clips if clip is not None and clip[number][0] else None
        sample = Sample(
            name=name,
            target=name,
            size=Size(*map(int, samples.columns["original_size"][number])),
            caption=captions[0],
            further=[(caption, {}) for caption in captions[1:] if self._format.draws_captions],
            frames=0 if clips is None else int(clips.chosen(np.asarray(clip)[[number]])[0]),
            has_caption=any(captions) or TEXT in self.fields or self.snapshot.empty_by_choice,
            repeats=image_set.get("repeats", 1),
            class_words=image_set.get("class_words", ""),
            is_reg=image_set.get("is_reg", False),
            has_alpha=mask is not None and int(mask.file[number]) == int(samples.inputs["image"].file[number]),
        )
        if self.settings.beside:
            return sample
        sample = replace(sample, target=self._format.target(sample))
        named = {
            role: self._format.partner(sample, role, Path(location["path"]).suffix)
            for role, location in self._partners(number).items()
            if number in self._rows.get(role, (number,))
        }
        return replace(sample, partners={role: target for role, target in named.items() if target})

    def _with_values(self, sample: Sample, number: int) -> Sample:
        fields = [name for name in self.fields if name not in (LATENTS, MASK, CONTROL)]
        texts = [
            {name: self._values(name, self._rows[name][number][0][variant]) for name in fields}
            for variant in range(len(sample.further) + 1)
        ]
        further = [(caption, text) for (caption, _), text in zip(sample.further, texts[1:], strict=True)]
        latents, masks, controls = (
            [self._latent(name, *rows) for rows in self._rows.get(name, {}).get(number, ())]
            for name in (LATENTS, MASK, CONTROL)
        )
        return replace(sample, latents=latents, masks=masks, controls=controls, text=texts[0], further=further)

    def _prompts(self) -> dict[str, dict[str, Any]]:
        """Texts beside the captions, each with its item in every field of text."""
        names = [name for name in self.fields if name not in (LATENTS, MASK, CONTROL)]
        recipe = self.snapshot.fields[TEXT].recipe if TEXT in names else None
        return {
            text: {
                name: item_values(self._entries, field, prompt_row(field, text), dtype=torch.float32).numpy()
                for name, field in ((name, self.snapshot.fields[name]) for name in names)
            }
            for text in (recipe.read_time.prompts if recipe else ())
        }

    def _partners(self, number: int) -> dict[str, Mapping[str, Any]]:
        """Places of the masks and control images of a sample that are files of their own."""
        samples = self.snapshot.samples
        image = int(samples.inputs["image"].file[number])
        files = {role: int(held.file[number]) for role, held in samples.inputs.items() if role != "caption"}
        roles = [role for role, file in files.items() if file not in (-1, image)]
        return {role: locations(samples, [number], role)[0] for role in roles}

    def _unwritten(self, number: int) -> int:
        """Masks and control images of a sample that no file of the export holds."""
        inputs = self.snapshot.samples.inputs
        roles = {role for role in inputs.keys() - {"image", "caption"} if int(inputs[role].file[number]) >= 0}
        return len(roles - {*self._samples[number].partners, *({"mask"} if MASK in self.fields else ())})

    def _bucket(self, name: str, variants: Sequence[int]) -> Size:
        """Pixels of an item of a sample; ``variants`` are its rows."""
        field = self.snapshot.fields[name]
        return Size(*field.groups[int(field.group[variants[0]])].dims[1:])

    def _latent(self, name: str, *rows: int) -> Latent:
        """The latents or the mask of a sample in one size; ``rows`` are those of its variants."""
        has_flip = self._recipe.geometry.flip and rows[1] != rows[0]
        flipped = self._values(name, rows[1]) if has_flip else None
        return Latent(bucket=self._bucket(name, rows), values=self._values(name, rows[0]), flipped=flipped)

    def _values(self, name: str, row: int) -> Any:
        """Float32 values: of latents the mean or one draw, scaled if the format asks for it; whole numbers stay."""
        field = self.snapshot.fields[name]
        draw = self.settings.draw
        is_scaled = self._format.is_scaled
        return item_values(self._entries, field, row, is_scaled=is_scaled, draw=draw, dtype=torch.float32).numpy()

    def _files(self, number: int, sample: Sample) -> Iterator[tuple[File, Callable[[Path], str]]]:
        """Every file of a sample, and what writes it."""
        inputs = self.snapshot.samples.inputs
        how = "copy" if self.settings.copy else "link"
        more: dict[str, Any] = {"sample": sample.name, "source": bytes(inputs["image"].content[number]).hex()}
        keys = [
            bytes(key)
            for name in self.fields
            for rows in self._rows[name].get(number, ())
            for key in self.snapshot.fields[name].row_keys(np.asarray(rows))
        ]
        facts = [self._format.name, *self._format.facts.values(), str(self.settings.draw)]
        origin = content_hash(b"".join(keys) + "\0".join(facts).encode()).hex()
        for name in self._format.files(sample):
            yield File(name=name, origin=origin, **more), partial(self._write_values, number, sample, name)
        if self.settings.beside:
            return
        location_of = {"image": locations(self.snapshot.samples, [number])[0], **self._partners(number)}
        for role, target in {"image": sample.target, **sample.partners}.items():
            location = location_of[role]
            content = bytes(inputs[role].content[number]).hex()
            source = sample.name if role == "image" else location["path"]
            is_other = Path(target).suffix.lower() != Path(source).suffix.lower()
            file = File(name=target, origin=f"{content}-{how}", **more)
            yield file, partial(self._write_image, location, content, is_other)
        if sample.has_caption:
            lines = "\n".join(self._format.caption_text(captioned.caption) for captioned in sample.captioned)
            yield of_bytes(f"{sample.stem}.txt", (lines or self._format.empty_caption).encode(), **more)

    def _write_values(self, number: int, sample: Sample, name: str, path: Path) -> str:
        return written(path, self._format.files(self._with_values(sample, number))[name]())

    def _write_image(self, location: Mapping[str, Any], content: str, is_other: bool, path: Path) -> str:
        """A link to the file of an image; bytes for a member of an archive, and for one that EXIF data turn."""
        with open_image(self._root, location) as stream:
            if not is_clip(stream):
                image, orientation, _ = header(stream)
                if orientation > 1 or is_other:
                    self._redrawn += 1
                    buffer = io.BytesIO()
                    ImageOps.exif_transpose(image).save(buffer, "PNG")
                    return written(path, buffer.getvalue())
        if set(location) != {"path", "size"}:
            return written(path, read_image(self._root, location)[0])
        link(self._root / location["path"], path, copy=self.settings.copy)
        return content


def _by_sample(sample: Any, rows: Any) -> dict[int, list[list[int]]]:
    """Sample -> for each of its sizes the rows of its variants."""
    by_sample = dict[int, list[list[int]]]()
    for number, variants in zip(sample.tolist(), rows.tolist(), strict=True):
        by_sample.setdefault(number, []).append(variants)
    return by_sample

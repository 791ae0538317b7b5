"""Export a cache of images as the folder that a trainer reads: images, captions, and its own cache files.

Everything that can be wrong is looked for before the first byte: fields, architecture, sizes that the trainer would
not choose, names that meet, and the space on the disk. A new folder gets its name when it is whole. Later exports
into it write what changed, and delete the files of images that are gone.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from latentcache.errors import RecipeError, UsageError, count_of
from latentcache.export.folder import File, Folder, check_room, is_export, link
from latentcache.export.format import LATENTS, MASK, TEXT, Content, Format, Latent, Request, Sample
from latentcache.export.kohya import Kohya
from latentcache.export.onetrainer import OneTrainer
from latentcache.export.simpletuner import SimpleTuner
from latentcache.fields.captions import CaptionVariants
from latentcache.fields.latents import LatentsRecipe, LatentsSettings, geometry_of
from latentcache.fields.prompt_embeds import PromptRecipe
from latentcache.geometry.like.trainers import trainer_of
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.images.headers import header
from latentcache.loader.cache import Cache, open_cache
from latentcache.loader.samples import Part, join
from latentcache.loader.values import Affine, posterior
from latentcache.sources.options import SourceOptions
from latentcache.sources.places import open_image, places, read_image
from latentcache.sources.scan import names_root, scan
from latentcache.store.atomic_io import make_folder
from latentcache.store.reader import EntryReader

if TYPE_CHECKING:
    from latentcache.export.run import ExportSettings

#: By ``--to``.
TRAINER_FORMATS: Mapping[str, type[Format]] = {format.name: format for format in (Kohya, OneTrainer, SimpleTuner)}
#: Bytes of a file of arrays beside the values: headers of its members and of the zip.
_AROUND = 2048


class ImageExport:
    """One export: its cache, its format, and the samples in the order of the data set.

    Raises:
        UsageError: The cache does not fit the trainer, or a name is in the way; nothing was written.
        StoreError: The cache cannot be read.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of demo caches and parts
            self._cache: Cache = open_cache(settings.cache)
        self._snapshot = self._cache.snapshots[0]
        made, kinds = TRAINER_FORMATS[settings.format], settings.fields or "latents"
        names = [name for kind, fields in made.fields.items() if kinds in (kind, "all") for name in fields]
        self._wanted = [name for name in names if name in self._snapshot.fields]
        recipe = self._checked_recipe()
        root = names_root(settings.data or Path(self._snapshot.source["root"]), self._snapshot.source)
        self._root, self._recipe = root, recipe
        like = LatentsSettings(trainer_config=settings.trainer_config, like=settings.format).with_trainer()[0]
        try:
            self._geometry = geometry_of(like, recipe, recipe.encoder.multiple)
            self._tables = self._geometry.like_tables()
        except RecipeError as error:  # it names options of a build
            what = f"{settings.cache}: the trainer has no such sizes"
            raise UsageError(what, why=str(error), fix=self._fitting_build()) from error
        self._format = made(
            Request(
                recipe=recipe,
                geometry=self._geometry,
                wanted=self._wanted,
                root=root,
                trainer_config=settings.trainer_config,
                architecture=settings.architecture,
                release=settings.release,
            )
        )
        self._entries = EntryReader(self._snapshot.paths, self._snapshot)
        joined = {name: join(Part(self._snapshot), (name,), repeats=False) for name in self._wanted}
        self._rows = {name: _by_sample(found.sample, found.rows[name]) for name, found in joined.items()}
        kept = set.intersection(*(set(rows) for rows in self._rows.values()))
        self._numbers = sorted(kept)
        self._left_out = len(self._snapshot.samples) - len(kept)
        self._captions = CaptionVariants()
        self._redrawn = 0
        """Images that are written as PNG: EXIF data turn the file, or the trainer does not read its format."""
        self._several_lines = 0
        """Captions of several lines."""
        self._no_caption = 0
        """Images without a caption."""
        self._partners_left_out = 0
        """Masks and control images that the folder does not have."""
        self._sets: Sequence[Mapping[str, Any]] = self._snapshot.source.get("sets") or [{}]
        self._check()

    def _check(self) -> None:
        """Everything that can be wrong, before anything is written."""
        recipes = {name: field.recipe for name, field in self._snapshot.fields.items() if field.recipe is not None}
        self._check_config()
        self._format.check(Content(recipes=recipes, wanted=self._wanted))
        self._check_sizes()
        self._shown = self._settings.as_path or str(self._settings.out.absolute())
        """The folder as the trainer sees it."""
        self._check_letters()
        self._format.begin(self._shown, (self._sample(number, values=False) for number in self._numbers))
        self._check_names()
        check_room(self._settings.out, self.bytes)

    @property
    def plan(self) -> str:
        """What will be written, as a sentence."""
        what = f"{', '.join(self._wanted)}{' and copies of images' if self._settings.copy else ''}"
        return f"{count_of(len(self._numbers), 'images')}, about {self.bytes / 1e6:.1f} MB of {what}"

    @property
    def bytes(self) -> int:
        """Bytes of the files of values, about, and of images that are copied."""
        total = 0
        for name in self._wanted:
            field = self._snapshot.fields[name]
            counts = np.bincount(np.asarray(field.group), minlength=len(field.groups))
            longest = max(field.spec.length, 1)
            shapes = [[longest if side < 0 else side for side in group.shape] for group in field.groups]
            sizes = [int(np.prod(shape)) * 4 + _AROUND for shape in shapes]
            halves = 2 if name == LATENTS and self._recipe.encoder.posterior == "moments" else 1
            total += sum(int(count) * size // halves for count, size in zip(counts, sizes, strict=True))
        if self._settings.copy:
            held = self._snapshot.samples
            total += int(np.asarray(held.files.stat)[np.asarray(held.first_input.file)[self._numbers], 0].sum())
        return total

    def write(self, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
        """Write all files; a new folder is renamed to its name at the end. Returns the JSON output of the command.

        Raises:
            UsageError: A file is in the way that no export wrote.
            StoreError: The cache cannot be read, or a file not be written. The same export goes on later.
        """
        out = self._settings.out.absolute()
        is_new = not self._settings.beside and not is_export(out)
        if is_new and out.exists() and any(out.iterdir()):
            raise UsageError(f"{out} exists", where=str(out), fix="give another folder")
        folder_path = out.with_name(f"{out.name}.partial") if is_new else out
        make_folder(folder_path)
        shown, about = self._shown, self._about()
        with Folder(folder_path) as folder:
            names = set[str]()
            for done, number in enumerate(self._numbers, 1):
                for file, make in self._files(number):
                    folder.put(file, make)
                    names.add(file.name)
                on_progress(done, len(self._numbers))
            # Beside the images such a file would say how DATA is read.
            configured = {} if self._settings.beside else self._format.settings(shown, self._samples())
            for name, data in configured.items():
                file, make = _of_bytes(name, data)
                folder.put(file, make)
                names.add(name)
            deleted = folder.finish(names, about)
        if is_new:
            if out.exists():
                out.rmdir()  # an empty one, as was checked
            folder_path.rename(out)
        counts = {
            "files": len(names),
            "written": folder.written,
            "kept": folder.kept,
            "deleted": deleted,
            "redrawn": self._redrawn,
            "several_lines": self._several_lines,
            "no_caption": self._no_caption,
            "partners_left_out": self._partners_left_out,
        }
        advice = self._format.advice("" if self._settings.beside else shown, self._samples())
        return {**about, **counts, "advice": list(advice)}

    def _checked_recipe(self) -> LatentsRecipe:
        settings, snapshot = self._settings, self._snapshot
        field = snapshot.fields.get(LATENTS)
        data = shlex.quote(str(snapshot.source.get("root", "DATA")))
        build = f"latentcache build {data} --out {shlex.quote(str(settings.cache))}"
        if field is None or not isinstance(field.recipe, LatentsRecipe):
            what = f"{settings.cache}: holds no latents, which --to {settings.format} needs"
            raise UsageError(what, fix=f"{build} --model MODEL --like {settings.format}")
        if settings.fields in ("text", "all") and TEXT not in snapshot.fields:
            what = f"{settings.cache}: holds no embeddings of captions"
            raise UsageError(what, fix=f"{build} --text-encoder PIPELINE; or --fields latents")
        if snapshot.demo and not settings.force:
            raise UsageError(
                f"{settings.cache}: a demo encoder made it, which no model trains on",
                fix=f"{build} --model MODEL --like {settings.format}; or --force to try the files",
            )
        if field.recipe.geometry.clips is not None or field.recipe.geometry.crops > 1:
            raise UsageError(
                f"{settings.cache}: holds clips or several crops, which --to {settings.format} cannot write",
                fix=f"{build} --like {settings.format}, in another cache folder",
            )
        if settings.draw is not None and field.recipe.encoder.posterior != "moments":
            raise UsageError(
                "--draw: the cache holds means, nothing to draw from",
                fix=f"leave it out, or {build} --latents moments",
            )
        return field.recipe

    def _check_config(self) -> None:
        """The settings of the trainer must allow what is exported."""
        config = self._settings.trainer_config
        if config is None:
            return
        if self._geometry.flip and not self._recipe.geometry.flip and LATENTS in self._wanted:
            raise UsageError(
                f"{config}: the trainer flips images, and the cache has no flips",
                fix="run the same `latentcache build` with --flip: only flips are encoded; or turn it off",
            )
        found = trainer_of(config, self._settings.format).settings(config)
        if TEXT in self._wanted and found.no_text:
            raise UsageError(
                f"{config}: the trainer takes no cached text",
                why=", ".join(found.no_text),
                fix="turn it off in the trainer's settings, or export --fields latents",
            )

    def _check_sizes(self) -> None:
        """The trainer has to choose the sizes that the cache holds, or it encodes these images again."""
        field = self._snapshot.fields[LATENTS]
        groups = [Size(*group.dims[1:]) for group in field.groups]
        group, size = np.asarray(field.group), np.asarray(self._snapshot.samples.columns["original_size"])
        wrong, chosen = list[int](), dict[tuple[int, int], set[Size | None]]()
        for number in self._numbers if LATENTS in self._wanted else ():
            sides = int(size[number][0]), int(size[number][1])
            if sides not in chosen:
                image = Size(*sides)
                chosen[sides] = {
                    table.nearest(image) if self._geometry.upscale else table.within(image) for table in self._tables
                }
            held = {groups[int(group[rows[0]])] for rows in self._rows[LATENTS][number]}
            if held != chosen[sides]:
                wrong.append(number)
        if not wrong:
            return
        first = wrong[0]
        name, settings = self._snapshot.samples.names[first], self._settings
        cached = " and ".join(str(groups[int(group[rows[0]])]) for rows in self._rows[LATENTS][first])
        theirs = " and ".join(map(str, chosen[int(size[first][0]), int(size[first][1])]))
        raise UsageError(
            f"{settings.cache}: the trainer would encode {count_of(len(wrong), 'images')}"
            f" of {len(self._numbers)} again, because it chooses other sizes",
            where=name,
            why=f"{name} has {cached} in the cache, {self._format.name} gives it {theirs} (height x width)",
            fix=self._fitting_build(),
        )

    def _fitting_build(self) -> str:
        """The command that builds a cache with the sizes of the trainer."""
        trainer, data = self._settings.format, shlex.quote(str(self._snapshot.source["root"]))
        out = shlex.quote(f"{self._settings.cache}-{trainer}")
        model = shlex.quote(str(self._snapshot.fields[LATENTS].provenance.get("model") or "MODEL"))
        sizes = "".join(f" --resolution {side}" for side in self._recipe.geometry.resolutions)
        flip = " --flip" if self._recipe.geometry.flip else ""
        return f"latentcache build {data} --out {out} --model {model}{sizes}{flip} --like {trainer}"

    def _check_letters(self) -> None:
        """Names go into settings of the trainer, and into hashes of them, as UTF-8."""
        for number in () if self._settings.beside else self._numbers:
            name = self._snapshot.samples.names[number]
            if name != name.encode("utf-8", "replace").decode():
                raise UsageError(
                    f"{name!r} is no UTF-8, and no settings of a trainer can name it",
                    where=repr(name),
                    fix="rename this image or its folder, and build again",
                )

    def _check_names(self) -> None:
        """Two images must not share the name of a file, and no name may be one of the data set's folder."""
        names = dict[str, str]()
        for sample in self._samples():
            other = names.setdefault(sample.stem, sample.name)
            if other != sample.name:
                raise UsageError(
                    f"{other} and {sample.name} would share their files",
                    where=other,
                    why=f"{self._format.name} names files by the name of the image without its extension",
                    fix="rename one of the images, and build again",
                )

    def _caption(self, number: int) -> str:
        """The text that was encoded; empty if the sample has no caption."""
        held = self._snapshot.samples.inputs.get("caption")
        if held is None or held.text is None:
            return ""
        recipe = next((field.recipe for name, field in self._snapshot.fields.items() if name == TEXT), None)
        if TEXT in self._wanted and isinstance(recipe, PromptRecipe):
            return recipe.text(held.text[number], 0)
        return self._captions.text(held.text[number], 0)

    def _samples(self) -> Iterator[Sample]:
        """All samples, without values."""
        return (self._sample(number, values=False) for number in self._numbers)

    def _sample(self, number: int, *, values: bool = True) -> Sample:
        """A sample, with its latents and its text if ``values``."""
        samples, caption = self._snapshot.samples, self._caption(number)
        set_of = samples.columns.get("image_set")
        image_set = self._sets[0 if set_of is None else int(set_of[number])]
        name = samples.names[number]
        sample = Sample(
            name=name,
            target=name,
            size=Size(*map(int, samples.columns["original_size"][number])),
            caption=caption,
            has_caption=bool(caption) or TEXT in self._wanted or self._snapshot.empty_by_choice,
            repeats=image_set.get("repeats", 1),
            class_words=image_set.get("class_words", ""),
            is_reg=image_set.get("is_reg", False),
        )
        if not self._settings.beside:
            sample = replace(sample, target=self._format.target(sample))
            named = {
                role: self._format.partner(sample, role, Path(place["path"]).suffix)
                for role, place in self._partners(number).items()
            }
            sample = replace(sample, partners={role: target for role, target in named.items() if target})
        return self._with_values(sample, number) if values else sample

    def _with_values(self, sample: Sample, number: int) -> Sample:
        texts = dict[str, Any]()
        for name in self._wanted:
            if name not in (LATENTS, MASK):
                item = self._entries.read(name, int(self._rows[name][number][0][0]))
                texts[name] = _floats(item, self._snapshot.fields[name].spec.dtype)
        latents, masks = (
            [self._latent(name, *rows) for rows in self._rows.get(name, {}).get(number, ())]
            for name in (LATENTS, MASK)
        )
        return replace(sample, latents=latents, masks=masks, text=texts)

    def _partners(self, number: int) -> dict[str, Mapping[str, Any]]:
        """Places of the masks and control images of a sample that are files of their own."""
        inputs, found = self._snapshot.samples.inputs, dict[str, Mapping[str, Any]]()
        for role in inputs.keys() - {"image", "caption"}:
            file = int(inputs[role].file[number])
            if file >= 0 and file != int(inputs["image"].file[number]):
                found[role] = places(self._snapshot.samples, [number], role)[0]
        return found

    def _latent(self, name: str, *rows: int) -> Latent:
        """The latents or the mask of a sample in one size; ``rows`` are those of its variants."""
        field, flips = self._snapshot.fields[name], self._recipe.geometry.flip
        bucket = Size(*field.groups[int(field.group[rows[0]])].dims[1:])
        flipped = self._values(name, rows[1]) if flips and rows[1] != rows[0] else None
        return Latent(bucket=bucket, values=self._values(name, rows[0]), flipped=flipped)

    def _values(self, name: str, row: int) -> Any:
        """Float32 values (C, h, w): of latents the mean or one draw, scaled if the format asks for it."""
        field = self._snapshot.fields[name]
        recipe = cast("LatentsRecipe", field.recipe)
        stored = torch.from_numpy(_floats(self._entries.read(name, row), field.spec.dtype))
        if recipe.encoder.posterior == "moments":
            out = torch.empty((1, len(stored) // 2, *stored.shape[1:]))
            draw, seed = ("mode", 0) if self._settings.draw is None else ("sample", self._settings.draw)
            posterior(stored[None], field.row_keys(np.array([row])), out, draw, (seed, 0))  # type: ignore[arg-type]
            stored = out[0]
        if self._format.is_scaled or name == MASK:
            stored = Affine.of(recipe.read_time.affine).apply(
                stored[None].contiguous(), torch.empty(1, *stored.shape)
            )[0]
        return stored.numpy()

    def _files(self, number: int) -> Iterator[tuple[File, Callable[[Path], tuple[int, str]]]]:
        """Every file of a sample, and what writes it."""
        sample, settings = self._sample(number, values=False), self._settings
        content = bytes(self._snapshot.samples.first_input.content[number]).hex()
        more: dict[str, Any] = {"sample": sample.name, "source": content}
        keys = [
            bytes(key)
            for name in self._wanted
            for rows in self._rows[name][number]
            for key in self._snapshot.fields[name].row_keys(np.asarray(rows))
        ]
        facts = [self._format.name, *self._format.facts.values(), str(settings.draw)]
        origin = content_hash(b"".join(keys) + "\0".join(facts).encode()).hex()
        for name in self._format.files(sample, self._wanted):
            yield File(name=name, origin=origin, size=0, hash="", **more), partial(self._write_values, number, name)
        if settings.beside:
            return
        inputs, how = self._snapshot.samples.inputs, "copy" if settings.copy else "link"
        place_of = {"image": places(self._snapshot.samples, [number])[0], **self._partners(number)}
        for role, target in {"image": sample.target, **sample.partners}.items():
            place = place_of[role]
            source = sample.name if role == "image" else place["path"]
            held = bytes(inputs[role].content[number]).hex()
            is_other = Path(target).suffix != Path(source).suffix
            yield (
                File(name=target, origin=f"{held}-{how}", size=0, hash="", **more),
                partial(self._write_image, place, held, is_other),
            )
        roles = {role for role in inputs.keys() - {"image", "caption"} if int(inputs[role].file[number]) >= 0}
        written = {*sample.partners, *({"mask"} if MASK in self._wanted else ())}
        self._partners_left_out += len(roles - written)
        self._several_lines += len(sample.caption.splitlines()) > 1
        self._no_caption += not sample.has_caption
        if sample.has_caption:  # a file without any line stops sd-scripts
            yield _of_bytes(f"{sample.stem}.txt", (sample.caption or "\n").encode(), **more)

    def _write_values(self, number: int, name: str, path: Path) -> tuple[int, str]:
        return _written(path, self._format.files(self._sample(number), self._wanted)[name]())

    def _write_image(self, place: Mapping[str, Any], content: str, is_other: bool, path: Path) -> tuple[int, str]:
        """A link to the file of an image; bytes for a member of an archive, and for one that EXIF data turn."""
        with open_image(self._root, place) as stream:
            image, orientation, _ = header(stream)
            if orientation > 1 or is_other:
                self._redrawn += 1
                return _written(path, _upright(image))
        if set(place) != {"path", "size"}:
            return _written(path, read_image(self._root, place)[0])
        source = self._root / place["path"]
        link(source, path, copy=self._settings.copy)
        return source.stat().st_size, content

    def _about(self) -> dict[str, Any]:
        snapshot, settings = self._snapshot, self._settings
        return {
            "format": settings.format,
            **self._format.facts,
            "cache": str(settings.cache.resolve()),
            "snapshot": snapshot.number,
            "fingerprint": snapshot.fingerprint,
            "data": str(self._root),
            "fields": self._wanted,
            "draw": settings.draw,
            "beside": bool(settings.beside),
            "options": dict(snapshot.source.get("options", {})),
            "samples": len(self._numbers),
            "left_out": self._left_out,
            "rejected": sum(rejected.count for rejected in snapshot.rejected),
            "recipes": {name: snapshot.fields[name].recipe_id.hex() for name in self._wanted},
        }


def verify_export(out: Path, data: Path | None = None) -> Iterator[dict[str, str]]:
    """Compare an exported folder with its sidecar, and with ``data`` also the images; yields what differs.

    Bytes are hashed, never loaded. Each finding has ``path``, ``sample`` and ``problem``: ``missing`` or ``changed``;
    of an image of the data set ``source-changed``, ``source-removed`` or ``source-added``.
    """
    folder = Folder(out)
    yield from folder.findings()
    if data is None:
        return
    samples = scan(data, SourceOptions.from_json(folder.about["options"]), hash_all=True).samples
    now = {
        name: bytes(content).hex() for name, content in zip(samples.names, samples.first_input.content, strict=True)
    }
    then = {file.sample: file.source for file in folder.files.values() if file.sample}
    for name in sorted({*now, *then}):
        if name not in now:
            yield {"path": name, "problem": "source-removed", "sample": name}
        elif name not in then:
            yield {"path": name, "problem": "source-added", "sample": name}
        elif now[name] != then[name]:
            yield {"path": name, "problem": "source-changed", "sample": name}


def _by_sample(sample: Any, rows: Any) -> dict[int, list[list[int]]]:
    """Sample -> for each of its sizes the rows of its variants."""
    found = dict[int, list[list[int]]]()
    for number, variants in zip(sample.tolist(), rows.tolist(), strict=True):
        found.setdefault(number, []).append(variants)
    return found


def _floats(stored: Any, dtype: str) -> Any:
    """Float32 values of an item as it is stored; whole numbers stay what they are."""
    array = np.asarray(stored)
    if dtype == "int32":
        return array
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).astype(np.int32) << 16).view(torch.float32).numpy()
    return array.astype(np.float32)


def _of_bytes(name: str, data: bytes, **more: Any) -> tuple[File, Callable[[Path], tuple[int, str]]]:
    origin = content_hash(data).hex()
    return File(name=name, origin=origin, size=0, hash="", **more), lambda path: _written(path, data)


def _written(path: Path, data: bytes) -> tuple[int, str]:
    path.write_bytes(data)
    return len(data), content_hash(data).hex()


def _upright(image: Any) -> bytes:
    """A PNG of an image as it is meant to be seen."""
    import io

    from PIL import ImageOps

    buffer = io.BytesIO()
    ImageOps.exif_transpose(image).save(buffer, "PNG")
    return buffer.getvalue()

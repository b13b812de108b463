"""Images: digits and folders, split by content, cached by content, in an order that resumes exactly."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from normlab import NormLabError
from normlab.data import IGNORED, BatchLoader, ImageSamples, image_evaluation, prepare_images
from normlab.data import image_cache as cache_module
from normlab.data.images import Images

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


@pytest.fixture(scope="module")
def digits():
    return prepare_images(["digits"], size=8, channels=1)


def write_folder(root: Path, *, count: int = 12, kinds=("cat", "dog"), size=(10, 6)) -> Path:
    made = np.random.default_rng(0)
    for kind in kinds:
        (root / kind).mkdir(parents=True)
        for number in range(count):
            pixels = made.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / kind / f"{number}.png")
    return root


def opened(*folders: Path, cache: Path, size: int = 4, channels: int = 3, **options):
    known = {"val_fraction": 0.3, "cache": cache, "progress": False}
    return prepare_images([str(folder) for folder in folders], size=size, channels=channels, **known | options)


def made_up(count: int, size: int = 4) -> Images:
    """Images whose first pixel says which they are."""
    pixels = np.zeros((count, 1, size, size), np.uint8)
    pixels[:, 0, 0, 0] = np.arange(count)
    return Images(pixels, np.arange(count), np.arange(count), "made up")


# -- digits ----------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns(digits):
    from sklearn.datasets import load_digits

    found = load_digits()
    assert len(digits.train) + len(digits.val) == len(found.images) == 1797
    assert digits.classes == tuple("0123456789")
    pixels, labels = digits.train.read(np.arange(len(digits.train)))
    expected = found.images[digits.train.chosen]
    # Sixteen shades of ink on 255 levels.
    assert np.array_equal((pixels[:, 0] / 255 * 16).round(), expected)
    assert np.array_equal(labels, found.target[digits.train.chosen])
    assert np.bincount(digits.val.read(np.arange(len(digits.val)))[1]).min() > 20


def test_the_split_follows_from_content_alone(digits):
    again = prepare_images(["digits"], size=8, channels=1)
    assert again.fingerprint == digits.fingerprint
    assert np.array_equal(again.val.chosen, digits.val.chosen)
    more = prepare_images(["digits"], size=8, channels=1, val_fraction=0.3)
    assert set(digits.val.chosen) < set(more.val.chosen)
    assert not set(digits.train.chosen) & set(digits.val.chosen)
    assert "1,797 images of 8 × 8; 10 classes" in digits.describe()
    assert digits.facts()["val"]["images"] == len(digits.val)


@pytest.mark.parametrize(("size", "channels"), [(16, 1), (8, 3)])
def test_digits_have_one_size(size, channels):
    with pytest.raises(NormLabError, match=r"'digits' are images of 8 × 8 in grey") as caught:
        prepare_images(["digits"], size=size, channels=channels)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "data"), [("sklearn.datasets", ["digits"]), ("PIL.Image", None)], ids=["scikit-learn", "pillow"]
)
def test_a_missing_package_is_named_with_its_extra(package, data, tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "f")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NormLabError, match=r'which is missing; try: pip install "normlab\[vision\]"'):
        prepare_images(data or [str(folder)], size=8, channels=1, cache=tmp_path / "c", progress=False)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_has_a_class_for_each_of_its_folders(tmp_path):
    found = opened(write_folder(tmp_path / "f"), cache=tmp_path / "c")
    assert found.classes == ("cat", "dog")
    assert len(found.train) + len(found.val) == 24
    assert found.train.pixels.shape == (24, 3, 4, 4)
    assert np.bincount(found.train.labels).tolist() == [12, 12]


def test_pixels_are_those_of_the_middle_square_resized(tmp_path):
    folder = tmp_path / "f" / "one"
    folder.mkdir(parents=True)
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 4:12] = (200, 100, 50)
    Image.fromarray(pixels).save(folder / "a.png")
    Image.fromarray(np.full_like(pixels, (200, 100, 50))).save(folder / "b.png")
    colour = opened(tmp_path / "f", cache=tmp_path / "c", size=8)
    expected = np.broadcast_to(np.array([200, 100, 50], np.uint8)[:, None, None], (3, 8, 8))
    assert np.array_equal(colour.train.pixels, [expected, expected])
    grey = opened(tmp_path / "f", cache=tmp_path / "c", size=4, channels=1)
    # The usual weights of red, green and blue; the package rounds in fixed point.
    assert abs(int(grey.train.pixels[1, 0, 0, 0]) - (0.299 * 200 + 0.587 * 100 + 0.114 * 50)) <= 1


def test_a_picture_stands_the_right_way_up(tmp_path):
    folder = tmp_path / "f" / "one"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[:4] = 255 if name == "a" else 100
        turned = Image.fromarray(pixels)
        exif = Image.Exif()
        exif[274] = 3  # the camera was upside down
        turned.save(folder / f"{name}.png", exif=exif)
    found = opened(tmp_path / "f", cache=tmp_path / "c", size=8, channels=1)
    assert (found.train.pixels[0, 0, :4] == 0).all()
    assert (found.train.pixels[0, 0, 4:] == 255).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_of_sixteen_bits_keeps_its_shades(tmp_path, channels):
    shades = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    folder = tmp_path / "shades"
    for kind, pixels in (("deep", shades.astype(np.uint16) * 256 + 77), ("plain", shades)):
        (folder / kind).mkdir(parents=True)
        Image.fromarray(pixels).save(folder / kind / "x.png")
    images = opened(folder, cache=tmp_path / "cache", channels=channels)
    assert (images.train.pixels == shades).all()


def test_the_cache_is_built_once_per_content_and_size(tmp_path, monkeypatch):
    built = []
    real = cache_module._build
    monkeypatch.setattr(cache_module, "_build", lambda *a: built.append(1) or real(*a))
    folder, cache = write_folder(tmp_path / "f"), tmp_path / "c"
    first = opened(folder, cache=cache)
    shutil.copytree(folder, tmp_path / "copy")
    assert opened(tmp_path / "copy", cache=cache).fingerprint == first.fingerprint
    assert len(built) == 1
    opened(folder, cache=cache, size=6)
    assert len(built) == 2
    (folder / "cat" / "0.png").unlink()
    assert opened(folder, cache=cache).fingerprint != first.fingerprint
    assert len(built) == 3


@pytest.mark.parametrize("name", ["pixels.bin", "labels.bin", "digests.bin", "meta.json"])
def test_a_torn_cache_is_built_again(tmp_path, name):
    folder, cache = write_folder(tmp_path / "f"), tmp_path / "c"
    before = np.array(opened(folder, cache=cache).train.pixels)
    (torn,) = cache.glob(f"*/{name}")
    torn.write_bytes(torn.read_bytes()[:-8])
    assert np.array_equal(opened(folder, cache=cache).train.pixels, before)


def test_the_side_of_an_image_does_not_depend_on_its_size(tmp_path):
    folder, cache = write_folder(tmp_path / "f"), tmp_path / "c"
    small, large = (opened(folder, cache=cache, size=size) for size in (4, 9))
    assert np.array_equal(small.val.chosen, large.val.chosen)


def test_a_side_of_its_own(tmp_path):
    folder, apart, cache = write_folder(tmp_path / "f"), tmp_path / "v", tmp_path / "c"
    (apart / "dog").mkdir(parents=True)
    shutil.copy(folder / "dog" / "3.png", apart / "dog" / "x.png")
    found = opened(folder, cache=cache, val_data=[str(apart)])
    assert (len(found.train), len(found.val)) == (23, 1)
    assert found.val.read(np.array([0]))[1].tolist() == [found.classes.index("dog")]
    (apart / "emu").mkdir()
    shutil.copy(folder / "dog" / "3.png", apart / "emu" / "x.png")
    with pytest.raises(NormLabError, match="val_data has a class 'emu' that data does not have"):
        opened(folder, cache=cache, val_data=[str(apart)])


def test_what_is_wrong_with_a_folder_is_one_line(tmp_path):
    cache = tmp_path / "c"
    with pytest.raises(NormLabError, match="there is no folder"):
        opened(tmp_path / "none", cache=cache)
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(NormLabError, match="holds no images; expected empty/CLASS"):
        opened(tmp_path / "empty", cache=cache)
    (tmp_path / "empty" / "cat" / "a.png").write_bytes(b"no image")
    with pytest.raises(NormLabError, match=r"a\.png: not an image that can be read \(no known format\)") as caught:
        opened(tmp_path / "empty", cache=cache)
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("*.part"))
    with pytest.raises(NormLabError, match="have 1 channel"):
        opened(write_folder(tmp_path / "f"), cache=cache, channels=2)
    with pytest.raises(NormLabError, match="stands alone"):
        prepare_images(["digits", "x"], size=8, channels=1)
    with pytest.raises(NormLabError, match="val_fraction must lie between 0 and 1"):
        prepare_images(["digits"], size=8, channels=1, val_fraction=1.0)


# -- batches ---------------------------------------------------------------------------------------------------------


def numbers(feed: BatchLoader, count: int) -> list[int]:
    """Which images some batches hold."""
    return [int(label) for _ in range(count) for label in next(feed).targets]


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_every_epoch_has_every_image_once(size):
    seen = numbers(BatchLoader(ImageSamples(made_up(7), seed=1), batch=size, prefetch=0), 21)
    for epoch in range(len(seen) // 7):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert seen[:7] != seen[7:14] or size * 21 < 14


@pytest.mark.parametrize(("world", "batch"), [(2, 3), (3, 2), (6, 1)])
def test_ranks_see_what_one_sees(world, batch):
    one = numbers(BatchLoader(ImageSamples(made_up(10), seed=1), batch=6, prefetch=0), 8)
    feeds = [
        BatchLoader(ImageSamples(made_up(10), seed=1), batch=batch, rank=r, world=world, prefetch=0)
        for r in range(world)
    ]
    assert one == [n for _ in range(8) for feed in feeds for n in numbers(feed, 1)]


def test_it_resumes_at_the_exact_image_with_its_changes():
    line = {"seed": 5, "shift": 1, "flip": True}
    images = made_up(10)
    with BatchLoader(ImageSamples(images, **line), batch=4) as straight:
        expected = [next(straight).inputs for _ in range(10)]
    first = BatchLoader(ImageSamples(images, **line), batch=4, prefetch=0)
    for _ in range(3):
        next(first)
    with BatchLoader(ImageSamples(images, **line), batch=4) as second:
        second.load_state_dict(first.state_dict())
        assert all(torch.equal(next(second).inputs, batch) for batch in expected[3:])
    for change in ({"shift": 2}, {"flip": False}, {"seed": 6}):
        with pytest.raises(NormLabError, match=f"cannot resume on another {next(iter(change))}"):
            BatchLoader(ImageSamples(images, **line | change), batch=4).load_state_dict(first.state_dict())


def test_shifts_and_flips_are_what_they_say():
    pixels = np.zeros((1, 1, 5, 5), np.uint8)
    pixels[0, 0, 2, 1] = 255
    line = ImageSamples(Images(pixels, np.zeros(1, np.int64), np.arange(1), "dot"), seed=0, shift=1, flip=True)
    found = line.read(0, 2000).inputs
    assert ((found == 1.0).sum((1, 2, 3)) == 1).all()
    rows, columns = (found[:, 0] == 1.0).nonzero()[:, 1:].T
    # Three rows; the dot at 1, or mirrored at 3, and one to either side: 2 both ways.
    assert set(rows.tolist()) == {1, 2, 3}
    assert set(columns.tolist()) == {0, 1, 2, 3, 4}
    # 2000 fair draws: five standard deviations are 0.056.
    assert abs((columns > 2).float().mean() + 0.5 * (columns == 2).float().mean() - 0.5) < 0.056
    plain = ImageSamples(Images(pixels, np.zeros(1, np.int64), np.arange(1), "dot"), seed=0)
    assert (plain.read(0, 3).inputs[:, 0, 2, 1] == 1.0).all()


@pytest.mark.parametrize(("batch", "world"), [(1, 1), (4, 1), (3, 2), (20, 1), (2, 4)])
def test_evaluation_has_each_image_exactly_once(batch, world):
    images = made_up(10)
    ranks = [list(image_evaluation(images, batch=batch, rank=rank, world=world)) for rank in range(world)]
    assert len({len(found) for found in ranks}) == 1
    everything = [one for found in ranks for one in found]
    assert {one.inputs.shape for one in everything} == {(batch, 1, 4, 4)}
    labels = torch.cat([one.targets for one in everything])
    pixels = torch.cat([one.inputs for one in everything])[:, 0, 0, 0]
    real = labels != IGNORED
    assert sorted(labels[real].tolist()) == list(range(10))
    # Pixels run from -1 to 1, and the first says which image it is.
    assert torch.allclose((pixels[real] + 1) * 127.5, labels[real].float(), atol=1e-4)
    assert (pixels[~real] == -1).all()

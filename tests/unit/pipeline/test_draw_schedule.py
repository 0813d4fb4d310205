import sys
from xml.etree import ElementTree

import pytest

from megalite.pipeline.draw_schedule import COLOURS, draw, save_picture, save_svg, schedule_svg, shade
from megalite.pipeline.schedules import ActionKind
from megalite.utils.errors import UserError


def test_the_drawing_of_a_small_schedule():
    assert draw("1f1b", 2, 3).splitlines() == [
        "1f1b: 2 stages, 3 microbatches, bubble 25.0% of the time, "
        "at most 2 microbatches in flight (by rank: 2 1)",
        "rank 0 |F0F1....B0==F2B1==..B2==|",
        "rank 1 |..F0B0==F1B1==F2B2==....|",
    ]


def test_weight_gradients_apart():
    assert draw("zb-h1", 2, 2).splitlines()[1:] == [
        "rank 0 |F0F1..B0W0B1W1|",
        "rank 1 |..F0B0F1B1W0W1|",
    ]


def test_chunks_have_letters():
    assert draw("interleaved", 2, 2, 2).splitlines() == [
        "interleaved: 2 ranks of 2 chunks, 2 microbatches, bubble 20.0% of the time, "
        "at most 4 microbatches of a chunk in flight (by rank: 4 3)",
        "rank 0 |F0aF1aF0bF1b......B0b===...B1b===B0a===B1a===|",
        "rank 1 |...F0aF1aF0bB0b===F1bB1b===B0a===B1a===......|",
    ]


def test_columns_stay_aligned_when_numbers_grow():
    rows = draw("gpipe", 11, 12).splitlines()[1:]
    assert len({len(row) for row in rows}) == 1
    assert rows[0].startswith("rank  0 |F0 F1 ")
    assert rows[10].startswith("rank 10 |")


def test_a_picture_has_the_colours_of_what_runs(tmp_path):
    image = pytest.importorskip("PIL.Image")
    save_picture(tmp_path / "v.png", "zb-v", 3, 5)
    with image.open(tmp_path / "v.png") as picture:
        assert picture.format == "PNG"
        seen = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    for kind, colour in COLOURS.items():
        shades = {shade(colour, chunk, 2) for chunk in range(2)}
        assert shades & seen == (set() if kind is ActionKind.BACKWARD else shades)


def test_a_picture_without_pillow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="pip install pillow"):
        save_picture(tmp_path / "v.png", "1f1b", 2, 2)


def test_a_picture_that_nobody_could_open(tmp_path):
    pytest.importorskip("PIL")
    with pytest.raises(UserError, match="pixels wide, more than 16000: draw fewer microbatches"):
        save_picture(tmp_path / "v.png", "1f1b", 2, 1000)
    with pytest.raises(UserError, match="cannot be written"):
        save_picture(tmp_path / "none" / "v.png", "1f1b", 2, 2)


def test_an_svg_has_a_box_for_each_action():
    root = ElementTree.fromstring(schedule_svg("zb-h1", 3, 5))
    fills = [box.get("fill") for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT):
        colour = "#{:02x}{:02x}{:02x}".format(*COLOURS[kind])
        assert fills.count(colour) == 3 * 5 + 1  # and one in the legend
    words = " ".join(root.itertext())
    assert "zb-h1: 3 stages, 5 microbatches, bubble" in words and "rank 2" in words


def test_an_svg_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"--svg .* cannot be written"):
        save_svg(tmp_path / "nowhere" / "v.svg", "1f1b", 2, 2)

from megalite.pipeline.draw import draw


def test_the_drawing_of_a_small_schedule():
    assert draw("1f1b", 2, 3).splitlines() == [
        "1f1b: 2 stages, 3 microbatches, bubble 25.0% of the time, "
        "at most 2 microbatches in flight (by rank: 2 1)",
        "rank 0 |F0F1....B0==F2B1==..B2==|",
        "rank 1 |..F0B0==F1B1==F2B2==....|",
    ]


def test_columns_stay_aligned_when_numbers_grow():
    rows = draw("gpipe", 11, 12).splitlines()[1:]
    assert len({len(row) for row in rows}) == 1
    assert rows[0].startswith("rank  0 |F0 F1 ")
    assert rows[10].startswith("rank 10 |")

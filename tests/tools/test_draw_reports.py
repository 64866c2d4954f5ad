"""Pictures of reports: what a window shows, and what is refused."""

import struct
import zlib

from tests.browser import needs_browser
from tools.pictures import browser
from tools.pictures import reports as draw_reports


def pixels(data):
    """The rows of an 8-bit PNG without interlacing: [height][width][channels]."""
    width, height, depth, kind, *_ = struct.unpack(">IIBBBBB", data[16:29])
    channels = {2: 3, 6: 4}[kind]
    assert depth == 8
    packed, place = b"", 8
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + size]
        place += size + 12
    raw, stride = zlib.decompress(packed), width * channels
    rows, before = [], bytes(stride)
    for y in range(height):
        how, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 :][:stride])
        for x in range(stride):
            left = line[x - channels] if x >= channels else 0
            corner = before[x - channels] if x >= channels else 0
            up = before[x]
            paeth = min((left, up, corner), key=lambda v: abs(left + up - corner - v))
            line[x] = (line[x] + (0, left, up, (left + up) // 2, paeth)[how]) % 256
        rows.append([tuple(line[i : i + 3]) for i in range(0, stride, channels)])
        before = bytes(line)
    return rows


@needs_browser
def test_a_picture_is_the_window_at_its_scale(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<body style='margin:0;background:#ff0000'><div style='height:3000px'></div>"
        "<div id='end' style='height:3000px;background:#0000ff'></div>",
        "utf-8",
    )
    for anchor, colour in (("", (255, 0, 0)), ("#end", (0, 0, 255))):
        file = tmp_path / "page.png"
        browser.picture(page, file, anchor=anchor, width=600, height=300, scale=0.5)
        rows = pixels(file.read_bytes())
        assert (len(rows), len(rows[0])) == (150, 300)
        assert {pixel for row in rows for pixel in row} == {colour}


def test_a_report_that_is_not_there_is_named(tmp_path, capsys):
    assert draw_reports.main([f"--runs={tmp_path}"]) == 3
    said = capsys.readouterr().err
    assert "quickstart/audit/report.html" in said and "run make quickstart first" in said

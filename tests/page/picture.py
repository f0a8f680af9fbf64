"""Makes a screenshot small: a PNG with a palette of 256 colours instead of three bytes a pixel."""

import collections
import struct
import zlib


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def pixels(png):
    """The width, and the rows of a PNG of eight bits a channel, as Chromium writes it."""
    data, place, size = b"", 8, None
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place:place + 8])
        body = png[place + 8:place + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
            assert depth == 8 and colour in (2, 6)
            size = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            data += body
        place += length + 12
    data, stride, rows = zlib.decompress(data), width * size, []
    above = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        kind, line = data[start], bytearray(data[start + 1:start + 1 + stride])
        for i in range(stride if kind else 0):
            left, up, corner = (line[i - size] if i >= size else 0), above[i], (above[i - size] if i >= size else 0)
            if kind == 1:
                guess = left
            elif kind == 2:
                guess = up
            elif kind == 3:
                guess = (left + up) // 2
            else:
                guess = min((left, up, corner), key=lambda near: abs(left + up - corner - near))
            line[i] = (line[i] + guess) & 255
        rows.append([bytes(line[i:i + 3]) for i in range(0, stride, size)])
        above = line
    return width, rows


def small(png, colours=256):
    width, rows = pixels(png)
    counts = collections.Counter(pixel for row in rows for pixel in row)
    # A small mark in a colour of its own counts for more than a shade of grey.
    weight = lambda pixel: counts[pixel] * (1 + max(pixel) - min(pixel))
    palette = sorted(counts, key=weight, reverse=True)[:colours]
    nearest = {
        pixel: min(range(len(palette)), key=lambda n: sum((a - b) ** 2 for a, b in zip(palette[n], pixel))) for pixel in counts
    }
    data = b"".join(b"\0" + bytes(nearest[pixel] for pixel in row) for row in rows)
    head = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"PLTE", b"".join(palette))
            + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b""))

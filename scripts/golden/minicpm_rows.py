"""Rows for MiniCPM-V's slices of images and of frames: `tests/golden/data/canvas.jsonl`,
`data/canvas/` and `data/video_slices.jsonl`.

  python scripts/golden/minicpm_rows.py

In small-minicpm a slice has about 112 x 112 pixels, so the images of canvas.jsonl have 0, 2 to 9
slices in 1 to 3 rows; some start a turn, some have text or another image in front. Lines of text
begin with newlines and spaces, because one newline after an image may be part of the image. The
frames of video_slices.jsonl have 2 to 6 slices or none; those of video_28.jsonl have none.
"""

import json
import shutil

from PIL import Image, ImageOps

from reference_lib import normalise
from video_cases import DATA, typed

IMAGES = {  # name: source, width, height
    "wide": ("motorcycle_right_320x128", 331, 97), "tall": ("camera_128x320", 113, 250),
    "small": ("coins_96x64", 57, 29), "square": ("flower_224x224", 200, 199),
    "page": ("page_256x288", 280, 230), "nine": ("coffee_256x288", 331, 331),
    "strip": ("grass_64x448", 13, 170), "bar": ("text_448x64", 170, 13),
}


def write_images():
    shutil.rmtree(DATA / "canvas", ignore_errors=True)
    (DATA / "canvas").mkdir()
    for name, (source, width, height) in IMAGES.items():
        image = Image.open(DATA / "images" / f"exact_{source}.png").convert("RGB")
        image = ImageOps.posterize(image.resize((width, height)), 3)  # small files
        image.save(DATA / "canvas" / f"{name}.png", optimize=True)


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]


def row(name, messages, *images, **more):
    images = {"images": [f"canvas/{image}.png" for image in images]} if images else {}
    return {"id": name, "messages": messages, **images, **more}


def canvas_rows():
    system = [{"role": "system", "content": "Short answers."}]
    return [
        row("first", chat("<image>What is it?", "A flower."), "square"),
        row("front", chat("Look at this:<image>and say.", "A page."), "page"),
        row("alone", chat("<image>", "A motorcycle."), "wide"),
        row("last", chat("Tell me: <image>", "A man."), "tall"),
        row("several", chat("<image><image>Compare <image>.", "All."), "tall", "small", "wide"),
        row("adjacent", chat("<image><image><image>", "Three."), "strip", "nine", "bar"),
        row("turns", system + chat("<image>Say one.", "One.", "<image>\nTwo", "Two."),
            "page", "square"),
        row("lines", chat("<image>\n\nThree", "3", "<image>\n\n\nFour", "4"), "small", "tall"),
        row("spaces", chat("<image> \n next<image>\t", "a", "\n<image>:\n", "b"),
            "small", "bar", "wide"),
        row("thin", chat("a<image>\n<image>b", "Thin."), "strip", "bar"),
        row("nine", chat("Count <image> them.", "Nine."), "nine"),
        row("text", chat("No image.", "Only text.")),
    ]


def video_rows():
    """The videos in which a frame has slices, in the forms of video_28.jsonl."""
    paths = lambda size, *names: [f"images/exact_{name}_{size}.png" for name in names]
    squares = paths("224x224", "china", "flower", "rocket", "motorcycle_left", "hubble_deep_field")
    pages = paths("256x288", "page", "text", "moon")
    bars = paths("448x64", "text", "camera", "ihc", "grass")
    video = lambda frames, **rate: {"type": "video", "video": frames, **rate}
    text = lambda content: {"type": "text", "text": content}
    return [
        row("rated", chat([video(squares, fps=2), text("What is shown?")], "A palace.")),
        row("list", chat("First <video> what?", "A page."), videos=[pages]),
        row("start", chat("<video>", "Texts."), videos=[bars[:2]]),
        row("mixed", chat("<image><video>Which?", "Both.", "And <video><image>?", "All."),
            "tall", "small", videos=[squares[:2], bars]),
        row("two", chat("<video><video>Compare.", "Different."), videos=[pages[:1], squares[3:]]),
        row("slow", chat([video(bars, fps=0.75), text("\nHow long?")], "Long.")),
        row("short", chat([text("See:"), video(pages, fps=23.976)], "A page.")),
        row("frames", chat("<video>\nDescribe it.<image>", "A moon."), "square",
            videos=[[f"video/pan_{k}.png" for k in range(3)]]),
    ]


def parts(row):
    """Messages with typed parts, and the media in order as in `video_cases.typed`."""
    if "videos" in row or '"video"' in json.dumps(row["messages"]):
        return typed(row)
    messages, images = normalise(row)
    return messages, [("image", image) for image in images]


def main():
    write_images()
    for name, rows in (("canvas", canvas_rows()), ("video_slices", video_rows())):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (DATA / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()

//! The page of `inspect --html`: supervised tokens are marked, images are those that the model
//! receives, and data is escaped.

use crate::harness::{Place, golden, json_lines};
use base64::Engine as _;
use serde_json::{Value, json};

/// Names of all HTML elements that the page may contain.
const TAGS: [&str; 25] = [
    "html",
    "head",
    "meta",
    "title",
    "body",
    "h1",
    "h2",
    "h3",
    "h4",
    "p",
    "dl",
    "dt",
    "dd",
    "article",
    "section",
    "div",
    "span",
    "mark",
    "i",
    "b",
    "code",
    "figure",
    "figcaption",
    "img",
    "style",
];

/// Returns the page of all `rows`, and the objects of `--format jsonl`.
fn page(rows: &[Value], data: &str) -> (String, Vec<Value>) {
    let place = Place::empty();
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    place.write("rows.jsonl", &(lines.join("\n") + "\n"));
    let [model, root] =
        ["models/small-tied", "data"].map(|name| golden(name).display().to_string());
    let config = format!(
        "output_dir: run\nmodel: {{path: '{model}'}}\ndata:\n  train: [{{path: rows.jsonl, image_root: '{root}'}}]\n  \
         shuffle: false\n{data}\n"
    );
    place.write("config.yaml", &config);
    let arguments = ["inspect", "--config", "config.yaml", "--num", "20", "--format", "jsonl"];
    let output = place.trainer(&[&arguments[..], &["--html", "page.html"]].concat()).ends_with(0);
    (String::from_utf8(place.read("page.html")).unwrap(), json_lines(&output.stdout))
}

fn rows_of(name: &str, num: usize) -> Vec<Value> {
    let text = std::fs::read_to_string(golden(name)).unwrap();
    json_lines(&text).into_iter().take(num).collect()
}

/// The content of every tag of the page, between `<` and `>`.
fn elements(page: &str) -> Vec<&str> {
    let body = page.split("</style>").nth(1).unwrap();
    let inside = body.split('<').skip(1);
    inside
        .map(|rest| rest.split_once('>').unwrap_or_else(|| panic!("no `>` in {rest}")).0)
        .collect()
}

fn attribute<'a>(element: &'a str, name: &str) -> Option<&'a str> {
    element.split(&format!(" {name}=\"")).nth(1)?.split('"').next()
}

/// Decodes the images of the page, after checking that the stated sizes are those of the PNGs.
fn images(page: &str) -> Vec<image::RgbImage> {
    let images = elements(page).into_iter().filter(|element| element.starts_with("img "));
    images
        .map(|element| {
            let uri = attribute(element, "src").unwrap();
            let text = uri.strip_prefix("data:image/png;base64,").unwrap();
            let png = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
            let image = image::load_from_memory(&png).unwrap().into_rgb8();
            let stated = ["width", "height"].map(|side| attribute(element, side).unwrap().parse());
            assert_eq!(stated, [Ok(image.width()), Ok(image.height())]);
            image
        })
        .collect()
}

fn assert_marks(page: &str, samples: &[Value]) {
    let articles: Vec<&str> = page.split("<article class=\"sample\"").skip(1).collect();
    assert_eq!(articles.len(), samples.len());
    for (article, sample) in articles.iter().zip(samples) {
        let article = article.split("</article>").next().unwrap();
        let labels = sample["labels"].as_array().unwrap();
        let supervised = labels.iter().filter(|label| **label != -100).count();
        let marks = elements_in(article).filter(|element| element.starts_with("mark"));
        let tokens = |mark: &str| attribute(mark, "data-tokens").map_or(1, |n| n.parse().unwrap());
        let marked: usize = marks.map(tokens).sum();
        assert_eq!(marked, supervised, "{}", sample["id"]);
    }
}

fn elements_in(html: &str) -> impl Iterator<Item = &str> {
    html.split('<').skip(1).map(|rest| rest.split('>').next().unwrap())
}

#[test]
fn every_supervised_token_is_marked_and_images_are_those_of_the_model() {
    let (page, samples) = page(&rows_of("data/video.jsonl", 20), "  packing_length: 200");
    assert_marks(&page, &samples);
    assert!(samples.iter().any(|sample| !sample["video_grid_thw"].as_array().unwrap().is_empty()));
    let found = images(&page);
    // Each group of a video has two frames; an image counts as one.
    let groups = samples.iter().flat_map(|sample| sample["video_grid_thw"].as_array().unwrap());
    let frames: u64 = groups.map(|grid| 2 * grid[0].as_u64().unwrap()).sum();
    assert_eq!(found.len() as u64, frames + 1);
    // The first row samples frames 0, 2, 5 and 7 of `pan`, which are not resized.
    for (shown, frame) in found.iter().zip([0, 2, 5, 7]) {
        let source = image::open(golden(&format!("data/video/pan_{frame}.png"))).unwrap();
        assert!(*shown == source.into_rgb8(), "frame {frame}");
    }
    for text in [
        "1.2 seconds",
        "video 1, group 2 of 2: 4 tokens",
        "grid (t, h, w) 2 x 4 x 4",
        "image 1: 4 tokens",
    ] {
        assert!(page.contains(text), "no `{text}`");
    }
}

#[test]
fn packs_are_drawn_with_their_boundaries() {
    let (page, samples) = page(&rows_of("data/video.jsonl", 20), "  packing_length: 200");
    let lengths: u64 = samples.iter().map(|sample| sample["length"].as_u64().unwrap()).sum();
    let drawn = |class: &str| -> u64 {
        let segments = elements(&page).into_iter().filter(|element| {
            element.starts_with("i ")
                && element.contains("title=")
                && element.contains("class=\"room\"") == (class == "room")
        });
        segments
            .map(|segment| {
                let style = attribute(segment, "style").unwrap();
                style["flex:".len()..].split(' ').next().unwrap().parse::<u64>().unwrap()
            })
            .sum()
    };
    assert_eq!(drawn(""), lengths);
    let packs = page.matches("cu_seqlens <code>[0, ").count() as u64;
    assert_eq!(drawn("room"), packs * 200 - lengths);
    assert!(packs > 1);
}

#[test]
fn data_is_escaped_and_rejected_rows_are_listed() {
    let nasty = "</div></article><script>alert(1)</script><img src=x onerror=alert(1)> & <mark>\"'";
    let chat = |user: &str, answer: &str| json!({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]});
    let missing = json!({"messages": chat(nasty, "x")["messages"], "images": ["<b>no</b>.png"]});
    let rows = [
        chat(nasty, nasty),
        chat("Gr\u{fc}\u{df}e \u{1f600}", "\u{4f60}\u{597d} \u{1f468}\u{200d}\u{1f469}"),
        missing,
    ];
    let (page, samples) = page(&rows, "  packing_length: 500");
    assert_marks(&page, &samples);
    for element in elements(&page) {
        let name = element.trim_start_matches('/').split(' ').next().unwrap();
        assert!(TAGS.contains(&name), "`<{element}>`");
        assert!(!element.contains("onerror"), "`<{element}>`");
    }
    let opened = |name: &str| page.matches(&format!("<{name}")).count();
    for name in ["div", "section", "article", "figure", "mark"] {
        assert_eq!(opened(name), page.matches(&format!("</{name}>")).count(), "{name}");
    }
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
    assert!(page.contains("<b>image_missing</b>") && !page.contains("<script"), "{page}");
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn a_row_that_is_too_long_is_shown_with_the_reason_for_its_rejection() {
    let chat = |answer: &str| json!({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]});
    let rows = [chat("short"), chat(&"much too long ".repeat(40)), chat("short")];
    let (page, samples) = page(&rows, "  packing_length: 500\n  max_length: 60");
    assert_eq!(samples.len(), 3);
    assert_eq!(page.matches("class=\"bad\"").count(), 1);
    let (before, after) = page.split_once("<b>too_long</b>").unwrap();
    assert!(after.contains("tokens, `max_length` is 60"), "{page}");
    assert!(before.contains("rows.jsonl:1<") && !before.contains("rows.jsonl:3<"), "{page}");
    assert!(after.contains(&format!("{} tokens, ", samples[1]["length"])), "shown whole");
}

/// Classes and sizes of the boxes of a strip.
fn strip(article: &str) -> Vec<(&str, usize)> {
    let strip = article.split("<div class=\"strip\">").nth(1).unwrap().split("</div>").next();
    let boxes = elements_in(strip.unwrap()).filter(|element| element.starts_with("i "));
    boxes
        .map(|element| {
            let flex = attribute(element, "style").unwrap()["flex:".len()..].split(' ').next();
            (attribute(element, "class").unwrap_or(""), flex.unwrap().parse().unwrap())
        })
        .collect()
}

#[test]
fn truncated_tokens_are_shown_in_grey_at_their_place() {
    let chat = |user: Value, answer: &str| json!({"messages": [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": user}, {"role": "assistant", "content": answer}]});
    let image = json!([{"type": "image", "image": "images/exact_moon_64x64.png"}, {"type": "text", "text": "What is it?"}]);
    let rows = [
        chat(json!("What is it?"), "One two three four five six seven eight nine ten"),
        chat(image, "One two three four five six seven eight nine ten"),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
    ];
    let limit = |truncation: &str, most: usize| {
        format!("  packing_length: 500\n  max_length: {most}\n  truncation: {truncation}")
    };
    let (_, whole) = page(&rows, "  packing_length: 500");
    let length = |sample: &Value| sample["length"].as_u64().unwrap() as usize;
    let most = length(&whole[0]).min(length(&whole[1])) - 7;
    assert!(length(&whole[2]) < most);
    for (truncation, first, last) in [("left", true, false), ("right", false, true)] {
        let (page, samples) = page(&rows, &limit(truncation, most));
        assert_marks(&page, &samples);
        let articles: Vec<&str> = page.split("<article class=\"sample\"").skip(1).collect();
        let mut cut_rows = 0;
        let mut cut_tokens = 0;
        for ((article, sample), whole) in articles.iter().zip(&samples).zip(&whole) {
            let strip = strip(article);
            let gone = |(class, _): &&(&str, usize)| *class == "cut";
            let tokens: usize = strip.iter().filter(gone).map(|(_, tokens)| tokens).sum();
            assert_eq!(tokens, length(whole) - length(sample));
            assert_eq!(strip.iter().map(|(_, tokens)| tokens).sum::<usize>(), length(whole));
            let says = format!(", cut from the {truncation}: {tokens} tokens</p>");
            assert_eq!(article.contains(&says), tokens > 0, "{says}");
            assert_eq!(article.contains("<span class=\"cut\">"), tokens > 0);
            if tokens > 0 {
                let at_ends = (strip[0].0 == "cut", strip.last().unwrap().0 == "cut");
                assert_eq!(at_ends, (first, last), "{truncation}: {strip:?}");
                cut_rows += 1;
                cut_tokens += tokens;
            }
        }
        assert_eq!(cut_rows, 2);
        let says = format!(
            "<dt>truncation</dt><dd>{truncation}: 2 of 3 rows cut, {cut_tokens} tokens</dd>"
        );
        assert!(page.contains(&says), "{says}");
        // A turn that is truncated completely is still shown, and escaped.
        let system = page.contains("<section class=\"turn system gone\"><h4>system</h4>");
        assert_eq!(system, truncation == "left");
        for element in elements(&page) {
            let name = element.trim_start_matches('/').split(' ').next().unwrap();
            assert!(TAGS.contains(&name), "`<{element}>`");
        }
    }
    let (page, _) = page(&rows, "  packing_length: 500");
    assert!(!page.contains("<dt>truncation</dt>") && !page.contains("<span class=\"cut\">"));
}

#[test]
fn a_page_of_twenty_rows_with_images_is_about_a_megabyte() {
    let (page, samples) = page(&rows_of("data/image_exact.jsonl", 20), "  packing_length: 2048");
    assert_marks(&page, &samples);
    assert_eq!(samples.len(), 20);
    let counts = samples.iter().map(|sample| sample["image_grid_thw"].as_array().unwrap().len());
    assert_eq!(images(&page).len(), counts.sum::<usize>());
    assert!(page.len() < 1_200_000, "{} bytes", page.len());
}

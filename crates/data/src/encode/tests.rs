//! Chats with images that are cut into tiles.

use std::fs;
use std::io::Write as _;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use super::truncate::KeptEnd;
use super::*;
use batch::{
    AreaLimits, BoxRef, BoxUnit, ImageLimits, MediaRef, MediaSource, Objects, VideoLimits, VideoRef,
};

/// Writes a folder with the tokens of small-tied under other names: tiles of 112 pixels, of 16
/// tokens each.
fn folder(changes: &[(&str, Value)]) -> tempfile::TempDir {
    let model = repository("tests/golden/models/small-tied");
    let renamed = |name: &str| {
        let text = fs::read_to_string(model.join(name)).unwrap();
        [
            ("<|vision_start|>", "<img>"),
            ("<|vision_end|>", "</img>"),
            ("<|image_pad|>", "<IMG_CONTEXT>"),
            ("<|video_pad|>", "<video>"),
        ]
        .iter()
        .fold(text, |text, (old, new)| text.replace(old, new))
    };
    let template = "{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\n' }}
        {%- set text = [{'type': 'text', 'text': message.content}] %}
        {%- for part in (text if message.content is string else message.content) %}
            {%- if part.type == 'image' %}{{- '<IMG_CONTEXT>\n' }}
            {%- elif part.type == 'video' %}{{- '<video>\n' }}
            {%- else %}{{- part.text }}{% endif %}
        {%- endfor %}{{- '<|im_end|>\n' }}
    {%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}";
    let published: Value =
        serde_json::from_str(&fs::read_to_string(model.join("config.json")).unwrap()).unwrap();
    let mut config = json!({
        "model_type": "internvl", "image_token_id": published["image_token_id"],
        "text_config": {"vocab_size": published["text_config"]["vocab_size"]},
        "vision_config": {"image_size": [112, 112], "patch_size": [14, 14]},
        "downsample_ratio": 0.5,
    });
    for (key, value) in changes {
        config[key] = value.clone();
    }
    let preprocessor = json!({
        "size": {"height": 112, "width": 112}, "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225], "crop_to_patches": false,
    });
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("config.json", config.to_string()),
        ("preprocessor_config.json", preprocessor.to_string()),
        ("chat_template.jinja", template.to_owned()),
        ("tokenizer.json", renamed("tokenizer.json")),
        ("tokenizer_config.json", renamed("tokenizer_config.json")),
    ] {
        let mut file = fs::File::create(folder.path().join(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }
    folder
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn encoder(image: &ImageConfig) -> Encoder {
    Encoder::from_folder(folder(&[]).path(), image).unwrap()
}

/// An image of 96 x 64 pixels, which becomes 3 x 2 tiles and a thumbnail: 112 tokens.
fn image() -> MediaRef {
    let root: Arc<Path> = repository("tests/fixtures/images").into();
    let source = MediaSource::File { root, path: "exact_96x64.png".into() };
    MediaRef { source, limits: ImageLimits::default() }
}

fn sample(question: Vec<Part>, media: Vec<Medium>) -> Sample {
    let message = |role: &str, parts| Message::new(role, Content::Parts(parts));
    let answer = vec![Part::Text("Two red circles.".to_owned())];
    Sample {
        id: SampleId { file: Path::new("rows.jsonl").into(), line: 1 },
        messages: vec![message("user", question), message("assistant", answer)],
        media,
        tools: None,
        objects: Objects::default(),
    }
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

fn with_image() -> Sample {
    sample(vec![text("Look: "), Part::Image, text("What is it?")], vec![Medium::Image(image())])
}

#[test]
fn an_image_is_one_run_of_all_its_tiles_between_its_marks() {
    let encoder = encoder(&ImageConfig::default());
    let found = encoder.encode(&with_image()).unwrap();
    let [medium] = &found.media[..] else { panic!("{} media", found.media.len()) };
    assert_eq!(medium.grid_thw, [7, 8, 8]);
    // of `InternVLProcessor` in transformers 5.23
    let bytes: Vec<u8> = medium.pixel_values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let expected = "ef1b96478ef0819877e001567b1f7b0e278d5d87821a2b3e1e95edd1d0fbab14";
    assert_eq!(format!("{:x}", Sha256::digest(&bytes)), expected);
    let expected = format!(
        "<|im_start|>user\nLook: <img>{}</img>\nWhat is it?<|im_end|>\n<|im_start|>assistant\n\
         Two red circles.<|im_end|>\n",
        "<IMG_CONTEXT>".repeat(7 * 16)
    );
    assert_eq!(encoder.decode_with_specials(&found.input_ids).unwrap(), expected);
    let first = found.vision_rows[0];
    assert_eq!(found.vision_rows, (first..first + 7 * 16).collect::<Vec<u32>>());
    let positions: Vec<_> = (0..found.input_ids.len() as u32).map(|index| [index; 3]).collect();
    assert_eq!(found.position_ids, positions);
    assert_eq!(encoder.length(&with_image()).unwrap().tokens, found.input_ids.len());
    let pixels = encoder.image_processor().pixels(medium);
    let sides: Vec<_> = pixels.iter().map(|of| [of.height, of.width]).collect();
    assert_eq!(sides, [[112; 2]]);
}

#[test]
fn limits_of_the_config_and_of_a_row_limit_the_tiles() {
    let num_tiles = |config: &ImageConfig, limits: ImageLimits| {
        let encoder = encoder(config);
        let image = MediaRef { limits, ..image() };
        let sample = sample(vec![Part::Image], vec![Medium::Image(image)]);
        let found = encoder.encode(&sample).unwrap();
        assert_eq!(encoder.length(&sample).unwrap().tokens, found.input_ids.len());
        assert_eq!(found.vision_rows.len(), found.media[0].grid_thw[0] as usize * 16);
        found.media[0].grid_thw[0]
    };
    let (none, all) = (ImageConfig::default(), ImageLimits::default());
    assert_eq!(num_tiles(&none, all), 7);
    let side = |pixels| NonZeroU32::new(pixels).unwrap();
    let wide = ImageLimits { resized: Some([side(224), side(448)]), ..all };
    let of_tokens = |tokens| ImageConfig { max_tokens: NonZeroU32::new(tokens), ..none.clone() };
    assert_eq!(num_tiles(&of_tokens(9 * 16), wide), 9); // 4 x 2 tiles and a thumbnail
    assert_eq!(num_tiles(&of_tokens(9 * 16 - 1), wide), 3); // 2 x 1 tiles
    assert_eq!(num_tiles(&of_tokens(1), wide), 1);
    let max_pixels = |tiles: u32| {
        let max_pixels = NonZeroU32::new(tiles * 112 * 112);
        ImageLimits { area: AreaLimits { max_pixels, ..AreaLimits::default() }, ..all }
    };
    assert_eq!(num_tiles(&none, max_pixels(7)), 7);
    assert_eq!(num_tiles(&none, max_pixels(6)), 1);
}

#[test]
fn truncation_keeps_an_image_with_its_marks() {
    let encoder = encoder(&ImageConfig::default());
    let sample = with_image();
    let whole = encoder.encode(&sample).unwrap().input_ids;
    let marked = 7 * 16 + 2;
    for keep in [KeptEnd::Beginning, KeptEnd::End] {
        for max_length in marked + 1..whole.len() as u32 {
            let max_length = NonZeroU32::new(max_length).unwrap();
            let cut = Some(TruncationRule { max_length, keep });
            let Ok(found) = encoder.encode_truncated(&sample, cut) else { continue };
            assert_eq!(
                encoder.length_truncated(&sample, cut).unwrap().tokens,
                found.input_ids.len()
            );
            assert_eq!(found.input_ids.len(), max_length.get() as usize);
            let shown = encoder.decode_with_specials(&found.input_ids).unwrap();
            let image = format!("<img>{}</img>", "<IMG_CONTEXT>".repeat(7 * 16));
            assert!(shown.contains(&image), "{max_length}: {shown}");
        }
    }
    let max_length = NonZeroU32::new(marked).unwrap();
    let cut = Some(TruncationRule { max_length, keep: KeptEnd::End });
    let error = encoder.encode_truncated(&sample, cut).unwrap_err().to_string();
    assert!(error.contains("its media have 114 tokens"), "{error}");
}

#[test]
fn a_video_is_numbered_frames_of_one_tile() {
    let encoder = encoder(&ImageConfig::default());
    let video = |num_frames| {
        let limits =
            VideoLimits { num_frames: NonZeroU32::new(num_frames), ..VideoLimits::default() };
        VideoRef::Frames { frames: vec![image(); 5], fps: None, limits }
    };
    let sample = |num_frames| {
        let question = vec![Part::Video, text("Count.")];
        sample(question, vec![Medium::Video(video(num_frames))])
    };
    let found = encoder.encode(&sample(2)).unwrap();
    assert_eq!(found.media[0].grid_thw, [2, 8, 8]);
    let frame = |number| format!("Frame{number}: <img>{}</img>", "<IMG_CONTEXT>".repeat(16));
    let shown = encoder.decode_with_specials(&found.input_ids).unwrap();
    let start = format!("<|im_start|>user\n{}\n{}\nCount.<|im_end|>", frame(1), frame(2));
    assert!(shown.starts_with(&start), "{shown}");
    assert_eq!(found.vision_rows.len(), 32);
    assert_eq!(found.position_ids.last(), Some(&[found.input_ids.len() as u32 - 1; 3]));
    assert_eq!(encoder.length(&sample(2)).unwrap().tokens, found.input_ids.len());
    assert_eq!(encoder.encode(&sample(0)).unwrap().media[0].grid_thw, [5, 8, 8]); // all
    let size = VideoConfig { max_pixels: Some(1 << 20), ..VideoConfig::default() };
    let error = Encoder::with_video(folder(&[]).path(), &ImageConfig::default(), &size).err();
    assert!(error.unwrap().to_string().contains("`data.video.max_pixels` is `1048576`"));
}

#[test]
fn boxes_are_lists_between_tags_in_thousandths() {
    let encoder = encoder(&ImageConfig::default());
    let mut sample = with_image();
    let coordinates = vec![0.0, 16.0, 48.0, 64.0];
    let boxes = vec![BoxRef { coordinates, unit: BoxUnit::Pixel, image: 0 }];
    sample.objects = Objects { names: vec!["a cup".to_owned()], boxes };
    sample.messages[1].content = Content::Parts(vec![text("<ref-object><bbox>")]);
    let shown = encoder.render(&sample).unwrap();
    assert!(shown.contains("<ref>a cup</ref><box>[[0, 250, 500, 1000]]</box>"), "{shown}");
}

#[test]
fn settings_that_other_families_need_not_have_are_checked() {
    for (key, value, message) in [
        ("downsample_ratio", json!(0.3), "`downsample_ratio` is `0.3`"),
        ("image_token_id", json!(null), "`image_token_id` is missing"),
        ("vision_config", json!({"image_size": 224, "patch_size": 14}), "`size.height` is `112`"),
    ] {
        let folder = folder(&[(key, value)]);
        let error = Encoder::from_folder(folder.path(), &ImageConfig::default()).err().unwrap();
        assert!(error.to_string().contains(message), "{error}");
    }
    let folder = folder(&[]);
    let path = folder.path().join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"</img>\"", "\"</image>\"");
    fs::File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
    let error = Encoder::from_folder(folder.path(), &ImageConfig::default()).err().unwrap();
    assert!(error.to_string().contains("no token `</img>`"), "{error}");
}

//! Sizes of images and videos.

use super::model::Family;
use crate::conversion::Conversion;
use crate::line::Line;
use crate::tables::Role;
use crate::trainer::Trainer;

/// Roles that only models with a vision encoder need.
const ROLES: [Role; 8] = [
    Role::ImageMaxTokens,
    Role::ImageMinTokens,
    Role::FrameSampling,
    Role::FrameNum,
    Role::MaxFrames,
    Role::MinFrames,
    Role::VideoPixels,
    Role::VideoTokens,
];

/// Drops the settings of images and videos of a text-only model.
pub(super) fn none(conversion: &mut Conversion) {
    conversion.drop_roles(ROLES, "the model has no vision encoder");
}

/// Drops the settings that ms-swift reads for models of Qwen only.
fn drop_those_of_qwen(conversion: &mut Conversion) {
    let reason = "it has no effect on this model in ms-swift";
    let num_dropped = conversion.dropped.len();
    let roles = [Role::ImageMaxTokens, Role::ImageMinTokens, Role::MaxFrames, Role::MinFrames];
    let roles = roles.into_iter().chain([Role::VideoPixels, Role::VideoTokens]);
    conversion.drop_roles(roles, reason);
    let lines = std::mem::take(&mut conversion.lines);
    let (fps, others): (Vec<_>, _) =
        lines.into_iter().partition(|line| line.key == "data.video.fps");
    conversion.lines = others;
    for Line { value, origin, .. } in fps.into_iter().filter(|line| !line.is_default) {
        let setting = origin.replacen(' ', &format!(": {value} "), 1); // `FPS: 2 (a.sh:1)`
        conversion.dropped.push(format!("{setting}: {reason}"));
    }
    if conversion.dropped.len() > num_dropped {
        conversion.note("ms-swift reads other variables for videos of this model, such as MAX_NUM_FRAMES: set `data.video`");
    }
}

/// Writes the limits on frames of a model with slices, and drops those on pixels and tokens.
fn slices(conversion: &mut Conversion) {
    let limits = [Role::ImageMaxTokens, Role::ImageMinTokens, Role::VideoPixels, Role::VideoTokens];
    conversion.drop_roles(limits, "it does not limit slices");
    frames(conversion);
    let limits = ["data.image.min_pixels", "data.image.max_pixels"];
    conversion.lines.retain(|line| !limits.contains(&line.key.as_str()));
    conversion.note("limits on the pixels of an image or a frame are left out: other trainers apply them before it is cut into slices, and `data.image.max_pixels` and `data.video.max_pixels` count the pixels of the slices, too");
}

/// Writes `data.image` and `data.video`.
pub(super) fn media(conversion: &mut Conversion, family: Family) {
    if conversion.trainer == Trainer::MsSwift && [Family::Tiles, Family::Slices].contains(&family) {
        drop_those_of_qwen(conversion);
    }
    if family == Family::Slices {
        return slices(conversion);
    }
    let token = family.pixels_per_token();
    let limit = conversion.has("data.image.max_pixels");
    if let Some((tokens, setting)) = conversion.consume_count(Role::ImageMaxTokens)
        && (setting.is_written() || !limit)
    {
        conversion.write_setting("data.image.max_tokens", &tokens.to_string(), &setting);
    }
    if let Some((tokens, setting)) = conversion.consume_count(Role::ImageMinTokens) {
        let pixels = tokens * token;
        let comment = format!("{tokens} tokens of {token} pixels: {}", conversion.origin(&setting));
        conversion.write("data.image.min_pixels", &pixels.to_string(), &comment);
    }
    if conversion.trainer == Trainer::MsSwift && !conversion.has_script {
        conversion.note("ms-swift reads MAX_PIXELS, IMAGE_MAX_TOKEN_NUM, FPS and others from environment variables: if your script sets them, convert the script too (`trainer convert --from ms-swift train.yaml train.sh`)");
    }
    if conversion.trainer == Trainer::LlamaFactory {
        conversion.note(
            "LLaMA-Factory shrinks an image twice, here it is resized once: pixels differ slightly",
        );
    }
    let frames = frames(conversion);
    if family == Family::Tiles {
        let pixels = [Role::VideoPixels, Role::VideoTokens];
        return conversion.drop_roles(pixels, "a frame of this model has a fixed size");
    }
    video_pixels(conversion, frames, token);
}

/// Writes the limits on frames and returns the maximum.
fn frames(conversion: &mut Conversion) -> u64 {
    let sampling = conversion.consume(Role::FrameSampling);
    let number = conversion.consume_count(Role::FrameNum);
    let is_fixed =
        sampling.as_ref().is_some_and(|setting| setting.value.text() == Some("frame_num"));
    if let Some(setting) = sampling {
        match setting.value.text() {
            Some("fps" | "frame_num") => {
                conversion.drop(&setting, "it decides which of the frame settings apply");
            }
            _ => conversion.refuse(&setting, "expected `fps` or `frame_num`"),
        }
    }
    if let Some((number, setting)) = number {
        if is_fixed {
            for key in ["data.video.min_frames", "data.video.max_frames"] {
                conversion.write_setting(key, &number.to_string(), &setting);
            }
            return number;
        }
        conversion.drop(&setting, "has no effect without `video_sampling_strategy: frame_num`");
    }
    if let Some((frames, setting)) = conversion.consume_count(Role::MinFrames) {
        conversion.write_setting("data.video.min_frames", &frames.to_string(), &setting);
    }
    let Some((frames, setting)) = conversion.consume_count(Role::MaxFrames) else { return 1 };
    conversion.write_setting("data.video.max_frames", &frames.to_string(), &setting);
    frames
}

/// `token` is the number of pixels of a visual token.
fn video_pixels(conversion: &mut Conversion, frames: u64, token: u64) {
    let tokens = conversion.consume_count(Role::VideoTokens);
    let tokens = tokens.map(|(tokens, setting)| (tokens * token, setting));
    let Some((per_frame, setting)) = conversion.consume_count(Role::VideoPixels).or(tokens) else {
        return;
    };
    let comment = format!(
        "{per_frame} a frame x {frames} frames; a video with fewer frames may have larger ones: {}",
        conversion.origin(&setting)
    );
    conversion.write("data.video.max_pixels", &(per_frame * frames).to_string(), &comment);
    conversion.note(format!(
        "`data.video.max_pixels` limits all frames together, {} limits each frame: lower it if your videos have few frames",
        conversion.trainer.title()
    ));
}

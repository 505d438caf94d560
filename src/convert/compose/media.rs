//! Sizes of images and videos.

use super::model::Family;
use crate::convert::rule::Role;
use crate::convert::trainer::Trainer;
use crate::convert::work::Work;

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
pub(super) fn none(work: &mut Work) {
    for role in ROLES {
        if let Some(setting) = work.take(role) {
            work.drop(&setting, "the model has no vision encoder");
        }
    }
}

/// Writes `data.image` and `data.video`.
pub(super) fn media(work: &mut Work, family: Family) {
    let token = family.pixels_per_token();
    let limit = work.out.has("data.image.max_pixels");
    if let Some((tokens, setting)) = work.count(Role::ImageMaxTokens)
        && (setting.is_given() || !limit)
    {
        work.write_from("data.image.max_tokens", &tokens.to_string(), &setting);
    }
    if let Some((tokens, setting)) = work.count(Role::ImageMinTokens) {
        let pixels = tokens * token;
        let comment = format!("{tokens} tokens of {token} pixels: {}", work.from(&setting));
        work.write("data.image.min_pixels", &pixels.to_string(), &comment);
    }
    if work.trainer == Trainer::MsSwift && !work.has_script {
        work.note("ms-swift reads MAX_PIXELS, IMAGE_MAX_TOKEN_NUM, FPS and others from environment variables: if your script sets them, convert the script too (`trainer convert --from ms-swift train.yaml train.sh`)");
    }
    if work.trainer == Trainer::LlamaFactory {
        work.note(
            "LLaMA-Factory shrinks an image twice, here it is resized once: pixels differ slightly",
        );
    }
    let frames = frames(work);
    video_pixels(work, frames, token);
}

/// Writes the limits on frames and returns the maximum.
fn frames(work: &mut Work) -> u64 {
    let sampling = work.take(Role::FrameSampling);
    let number = work.count(Role::FrameNum);
    let is_fixed =
        sampling.as_ref().is_some_and(|setting| setting.value.text() == Some("frame_num"));
    if let Some(setting) = sampling {
        match setting.value.text() {
            Some("fps" | "frame_num") => {
                work.drop(&setting, "it decides which of the frame settings apply");
            }
            _ => work.refuse(&setting, "expected `fps` or `frame_num`"),
        }
    }
    if let Some((number, setting)) = number {
        if is_fixed {
            for key in ["data.video.min_frames", "data.video.max_frames"] {
                work.write_from(key, &number.to_string(), &setting);
            }
            return number;
        }
        work.drop(&setting, "has no effect without `video_sampling_strategy: frame_num`");
    }
    if let Some((frames, setting)) = work.count(Role::MinFrames) {
        work.write_from("data.video.min_frames", &frames.to_string(), &setting);
    }
    let Some((frames, setting)) = work.count(Role::MaxFrames) else { return 1 };
    work.write_from("data.video.max_frames", &frames.to_string(), &setting);
    frames
}

/// `token` is the number of pixels of a visual token.
fn video_pixels(work: &mut Work, frames: u64, token: u64) {
    let tokens = work.count(Role::VideoTokens);
    let tokens = tokens.map(|(tokens, setting)| (tokens * token, setting));
    let Some((per_frame, setting)) = work.count(Role::VideoPixels).or(tokens) else { return };
    let comment = format!(
        "{per_frame} a frame x {frames} frames; a video with fewer frames may have larger ones: {}",
        work.from(&setting)
    );
    work.write("data.video.max_pixels", &(per_frame * frames).to_string(), &comment);
    work.note(format!(
        "`data.video.max_pixels` limits all frames together, {} limits each frame: lower it if your videos have few frames",
        work.trainer.title()
    ));
}

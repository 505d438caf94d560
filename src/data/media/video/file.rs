//! Video files, through the system's FFmpeg.
//!
//! A file is data of strangers: only containers that hold their images themselves are opened, no
//! playlist, no address; each read and each frame is held against the limits of the config.
//! Frames are counted in the order in which they are shown, and turned upright as the container
//! says.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use ffmpeg_next::codec::packet::side_data::Type as SideData;
use ffmpeg_next::format::Pixel;
use ffmpeg_next::format::context::Input;
use ffmpeg_next::software::scaling;
use ffmpeg_next::{Dictionary, Error, Packet, Rational, codec, decoder, format, frame, log, media};
use image::metadata::Orientation;

use super::{Limits, VideoError};
use crate::data::media::image::{MAX_PIXELS, Rgb, resolve, swaps_sides, upright};

/// Containers that hold their images themselves, by FFmpeg's names.
const CONTAINERS: &str =
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif,ivf,yuv4mpegpipe,m4v,h264,hevc";
/// Share of the announced frames that may be missing at the end: containers that give a duration
/// only are a frame or two off.
const MISSING_SHARE: usize = 50;

/// An opened file, of which nothing is decoded yet.
pub(super) struct VideoFile {
    path: PathBuf,
    input: Input,
    decoder: decoder::Video,
    stream: usize,
    orientation: Orientation,
    total: usize,
    rate: f64,
    deadline: Deadline,
}

/// When the work on a file has to end.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    begin: Instant,
    limit: Duration,
}

impl Deadline {
    fn is_over(self) -> bool {
        self.begin.elapsed() > self.limit
    }
}

impl VideoFile {
    /// Reads the headers of a file inside `root`.
    pub(super) fn open(root: &Path, path: &Path, limits: Limits) -> Result<Self, VideoError> {
        static START: Once = Once::new();
        START.call_once(|| log::set_level(log::Level::Quiet)); // its words would go to stderr
        let real = resolve(root, path).map_err(|cause| VideoError::of_path(path, cause))?;
        let deadline =
            Deadline { begin: Instant::now(), limit: Duration::from_secs_f64(limits.timeout_s) };
        let broken = |error: Error| failure(path, deadline, error);
        let mut options = Dictionary::new();
        options.set("protocol_whitelist", "file");
        options.set("format_whitelist", CONTAINERS);
        let interrupt = move || deadline.is_over();
        let input = format::input_with_interrupt_and_dictionary(&real, interrupt, options);
        let input = input.map_err(broken)?;
        let stream = input.streams().best(media::Type::Video).ok_or_else(|| {
            let problem = "it has no video stream".to_owned();
            VideoError::Broken { path: path.to_owned(), problem }
        })?;
        let rates = [stream.avg_frame_rate(), stream.rate()].map(rational);
        let rate = rates.into_iter().find(|rate| rate.is_finite() && *rate > 0.0);
        let seconds = match (stream.duration(), input.duration()) {
            (ticks, _) if ticks > 0 => Some(ticks as f64 * rational(stream.time_base())),
            (_, microseconds) if microseconds > 0 => Some(microseconds as f64 / 1e6),
            _ => None,
        };
        let counted = usize::try_from(stream.frames()).ok().filter(|frames| *frames > 0);
        let total = counted.or_else(|| Some((seconds? * rate?).round() as usize));
        let (Some(rate), Some(total)) = (rate, total) else {
            let problem = "its header says no frame rate, or no length".to_owned();
            return Err(VideoError::Broken { path: path.to_owned(), problem });
        };
        if total > limits.max_source_frames {
            let (path, limit) = (path.to_owned(), limits.max_source_frames);
            return Err(VideoError::TooLong { path, frames: total, limit });
        }
        let orientation = orientation(&stream);
        let index = stream.index();
        let context = codec::Context::from_parameters(stream.parameters()).map_err(broken)?;
        let mut context = context.decoder();
        // Damage is an error, as in an image, not a frame with holes.
        context.check(decoder::Check::CRC | decoder::Check::BITSTREAM | decoder::Check::EXPLODE);
        let decoder = context.video().map_err(broken)?;
        let (width, height) = (decoder.width(), decoder.height());
        let area = u64::from(width) * u64::from(height);
        if area == 0 || area > MAX_PIXELS {
            return Err(VideoError::TooLarge { path: path.to_owned(), width, height });
        }
        let path = path.to_owned();
        Ok(Self { path, input, decoder, stream: index, orientation, total, rate, deadline })
    }

    /// Frames in the file, as its header has it.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Frames a second.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    /// `[height, width]` of the frames, upright.
    pub(super) fn size(&self) -> [u32; 2] {
        let (width, height) = (self.decoder.width(), self.decoder.height());
        if swaps_sides(self.orientation) { [width, height] } else { [height, width] }
    }

    /// Decodes up to the last of `indices`, which ascend, and gives those to `take`, with their
    /// index.
    pub(super) fn decode(
        mut self,
        indices: &[usize],
        mut take: impl FnMut(Rgb, usize) -> Result<(), VideoError>,
    ) -> Result<(), VideoError> {
        let mut rest = indices.iter().copied().peekable();
        let mut number = 0;
        let mut last: Option<frame::Video> = None;
        let mut converter = None;
        while rest.peek().is_some() {
            let Some(decoded) = self.next_frame()? else { break };
            if rest.next_if_eq(&number).is_some() {
                take(self.rgb(&decoded, &mut converter)?, number)?;
            }
            last = Some(decoded);
            number += 1;
        }
        let missing = self.total.saturating_sub(number);
        if rest.peek().is_some() && missing > (self.total / MISSING_SHARE).max(2) {
            let problem = format!("it ends after {number} of {} frames", self.total);
            return Err(VideoError::Broken { path: self.path, problem });
        }
        for index in rest {
            // The last frame stands for what the header counted too much.
            let Some(last) = &last else {
                let problem = "no frame can be decoded".to_owned();
                return Err(VideoError::Broken { path: self.path, problem });
            };
            take(self.rgb(last, &mut converter)?, index)?;
        }
        Ok(())
    }

    /// The next frame in the order of showing.
    fn next_frame(&mut self) -> Result<Option<frame::Video>, VideoError> {
        let mut decoded = frame::Video::empty();
        loop {
            if self.deadline.is_over() {
                return Err(failure(&self.path, self.deadline, Error::Exit));
            }
            match self.decoder.receive_frame(&mut decoded) {
                Ok(()) => return Ok(Some(decoded)),
                Err(Error::Eof) => return Ok(None),
                Err(Error::Other { errno }) if errno == ffmpeg_next::error::EAGAIN => {}
                Err(error) => return Err(failure(&self.path, self.deadline, error)),
            }
            let mut packet = Packet::empty();
            let fed = match packet.read(&mut self.input) {
                Ok(()) if packet.stream() != self.stream => continue,
                Ok(()) => self.decoder.send_packet(&packet),
                Err(Error::Eof) => self.decoder.send_eof(),
                Err(error) => Err(error),
            };
            fed.map_err(|error| failure(&self.path, self.deadline, error))?;
        }
    }

    /// A frame as upright RGB.
    fn rgb(
        &self,
        decoded: &frame::Video,
        converter: &mut Option<scaling::Context>,
    ) -> Result<Rgb, VideoError> {
        let broken = |error: Error| failure(&self.path, self.deadline, error);
        let (pixel, width, height) = (decoded.format(), decoded.width(), decoded.height());
        let fits = |context: &scaling::Context| {
            let input = context.input();
            (input.format, input.width, input.height) == (pixel, width, height)
        };
        if !converter.as_ref().is_some_and(fits) {
            let flags = scaling::Flags::BICUBIC | scaling::Flags::ACCURATE_RND;
            let (w, h) = (width, height);
            let made = scaling::Context::get(pixel, w, h, Pixel::RGB24, w, h, flags);
            *converter = Some(made.map_err(broken)?);
        }
        let mut converted = frame::Video::empty();
        if let Some(context) = converter {
            context.run(decoded, &mut converted).map_err(broken)?;
        }
        let row = width as usize * 3;
        let rows = converted.data(0).chunks(converted.stride(0)).take(height as usize);
        let data: Vec<u8> = rows.flat_map(|bytes| &bytes[..row]).copied().collect();
        let (width, height) = (width as usize, height as usize);
        Ok(upright(Rgb { width, height, data }, self.orientation))
    }
}

fn rational(value: Rational) -> f64 {
    f64::from(value.numerator()) / f64::from(value.denominator())
}

/// What the container's display matrix says to do before showing a frame: quarter turns only.
fn orientation(stream: &format::stream::Stream) -> Orientation {
    let matrix = stream.side_data().find(|data| data.kind() == SideData::DisplayMatrix);
    let quarter = matrix.and_then(|matrix| {
        let numbers = matrix.data().as_chunks::<4>().0;
        let number = |at: usize| numbers.get(at).map(|bytes| i32::from_ne_bytes(*bytes).signum());
        Some((number(0)?, number(1)?))
    });
    match quarter {
        Some((0, 1)) => Orientation::Rotate90,
        Some((-1, 0)) => Orientation::Rotate180,
        Some((0, -1)) => Orientation::Rotate270,
        _ => Orientation::NoTransforms,
    }
}

/// An error of FFmpeg, which does not say itself that it was interrupted.
fn failure(path: &Path, deadline: Deadline, error: Error) -> VideoError {
    let path = path.to_owned();
    if deadline.is_over() {
        return VideoError::Timeout { path, seconds: deadline.limit.as_secs_f64() };
    }
    VideoError::Broken { path, problem: error.to_string() }
}

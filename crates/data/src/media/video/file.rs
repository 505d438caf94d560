//! Reads video files with the FFmpeg libraries of the system.
//!
//! Files are untrusted. Only containers that hold their frames themselves are opened; playlists and
//! URLs are rejected. The time limit of the config is checked on each read and for each frame.
//! Frames are numbered in presentation order and rotated as the container specifies.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use ffmpeg_next::codec::packet::side_data::Type as SideData;
use ffmpeg_next::format::Pixel;
use ffmpeg_next::format::context::Input;
use ffmpeg_next::software::scaling;
use ffmpeg_next::{Dictionary, Error, Packet, Rational, codec, decoder, format, frame, log, media};
use image::metadata::Orientation;
use rustix::io::Errno;

use super::{VideoError, VideoFileLimits};
use crate::media::image::{MAX_PIXELS, Rgb, resolve, swaps_sides, upright};

/// FFmpeg's names of the containers that hold their frames themselves.
const CONTAINERS: &str =
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif,ivf,yuv4mpegpipe,m4v,h264,hevc";
/// Inverse of the maximum share of the declared frames that may be missing at the end; two frames
/// may always be missing. For containers that only store a duration, the computed number of frames
/// is off by one or two.
const MISSING_SHARE: usize = 50;

/// An open video file; no frame is decoded yet.
pub(super) struct VideoFile {
    path: PathBuf,
    input: Input,
    decoder: decoder::Video,
    /// Index of the video stream.
    stream: usize,
    orientation: Orientation,
    /// Number of frames that the header declares.
    total: usize,
    /// Frames per second.
    rate: f64,
    deadline: Deadline,
}

/// Time limit for loading a file.
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
    /// Opens a file inside `root` and reads its header.
    pub(super) fn open(
        root: &Path,
        path: &Path,
        limits: VideoFileLimits,
    ) -> Result<Self, VideoError> {
        static START: Once = Once::new();
        START.call_once(|| log::set_level(log::Level::Quiet)); // FFmpeg logs to stderr
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
            let problem = "its header has no frame rate or no length".to_owned();
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
        // Report damage as an error, as for images; by default FFmpeg conceals damaged areas.
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

    /// Number of frames that the header declares.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Frames per second.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    /// Upright `[height, width]` of the frames in pixels.
    pub(super) fn size(&self) -> [u32; 2] {
        let (width, height) = (self.decoder.width(), self.decoder.height());
        if swaps_sides(self.orientation) { [width, height] } else { [height, width] }
    }

    /// Decodes the file up to the last of `indices`, which ascend and may repeat, and calls
    /// `take(frame, index)` for each of them.
    ///
    /// If the file ends a few frames early, its last frame stands in for the missing ones.
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
            while rest.next_if_eq(&number).is_some() {
                take(self.rgb(&decoded, &mut converter)?, number)?;
            }
            last = Some(decoded);
            number += 1;
        }
        let missing = self.total.saturating_sub(number);
        if rest.peek().is_some() && missing > (self.total / MISSING_SHARE).max(2) {
            let problem = format!("it ends after {number} of {} declared frames", self.total);
            return Err(VideoError::Broken { path: self.path, problem });
        }
        for index in rest {
            let Some(last) = &last else {
                let problem = "no frame can be decoded".to_owned();
                return Err(VideoError::Broken { path: self.path, problem });
            };
            take(self.rgb(last, &mut converter)?, index)?;
        }
        Ok(())
    }

    /// Decodes the next frame in presentation order; `None` at the end of the file.
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
            let sent = match packet.read(&mut self.input) {
                Ok(()) if packet.stream() != self.stream => continue,
                Ok(()) => self.decoder.send_packet(&packet),
                Err(Error::Eof) => self.decoder.send_eof(),
                Err(error) => Err(error),
            };
            sent.map_err(|error| failure(&self.path, self.deadline, error))?;
        }
    }

    /// Converts a frame to upright RGB.
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

/// Reads the rotation from the display matrix of the container; only multiples of 90 degrees are
/// supported, others are ignored.
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

/// Converts an error of FFmpeg. After the time limit it is always `Timeout`, because FFmpeg does
/// not report whether it was interrupted.
fn failure(path: &Path, deadline: Deadline, error: Error) -> VideoError {
    let path = path.to_owned();
    if deadline.is_over() {
        return VideoError::Timeout { path, seconds: deadline.limit.as_secs_f64() };
    }
    if let Error::Other { errno } = error {
        // The file may be sound. FFmpeg returns most other codes for damaged files, too.
        let code = Errno::from_raw_os_error(errno);
        if [Errno::MFILE, Errno::NFILE, Errno::STALE].contains(&code) {
            return VideoError::Read { path, cause: code.into() };
        }
    }
    VideoError::Broken { path, problem: error.to_string() }
}

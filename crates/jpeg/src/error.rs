/// The reason why a JPEG cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JpegError {
    #[error("the file is truncated")]
    Truncated,
    #[error("{0}")]
    Damaged(&'static str),
    #[error("a JPEG with {0} is not supported")]
    Unsupported(&'static str),
}

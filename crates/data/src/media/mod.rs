//! Images and videos to patches.

pub(crate) mod family;
pub mod image;
pub mod video;

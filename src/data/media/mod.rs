//! Images and videos to patches.

pub mod image;
pub mod video;

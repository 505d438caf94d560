//! Images and videos to patches.

pub(in crate::data) mod family;
pub mod image;
pub mod video;

//! Stages with a hand-written backward, what a pass through them needs, gradient sinks, parameter
//! handles, and recomputation.
//!
//! A model is a list of stages. A step runs them forward and keeps either the activations or the
//! input of each, depending on the recompute policy. It then runs them backward from the last to
//! the first and frees memory on the way. This module does not depend on any model.

mod bucket;
mod param;
mod pass;
mod stage;

pub use bucket::{BUCKET_ALIGNMENT, Bucket, Layout, Part, StageBuckets, slot_lens};
pub use param::{GradSink, Gradients, Param, Trainable};
pub use pass::{
    DropoutPlace, Pass, Recorded, Resident, RouterChoices, RouterLog, Untrained, Weights,
};
pub use stage::{InputGrad, Recompute, Saved, SavedStage, Stage};

//! Peak memory of a training step, predicted from sizes by the formula of docs/memory.md.
//!
//! All results are bytes. `T` is the number of tokens of the largest micro-batch, with padding if
//! the model computes on it; `S` are its supervised rows, `P` its patches.

/// The program and its threads.
const PROCESS: f64 = 14e6;
/// Maximum bytes of free blocks that the allocator holds. They were tensors of a step before.
const FREE_BLOCKS: f64 = 64.0 * 1024.0 * 1024.0;
/// Measured: bytes per entry of the vocabulary that stay after a tokenizer was read.
const TOKENIZER_ENTRY: f64 = 1400.0;
/// Bytes of a token's ids, labels and positions in loader and model.
const HOST_TOKEN: f64 = 100.0;
/// Number of steps on the host at one time: one in use, one waiting, one being assembled.
const HOST_STEPS: f64 = 3.0;
/// The loader reads the rows of this many steps ahead, and at least this many rows per worker while
/// steps are small, but not more than these bytes of pixels: limits of `data::Loader`.
const STEPS_AHEAD: f64 = 2.0;
const WORKER_ROWS_AHEAD: f64 = 16.0;
const BYTES_AHEAD: f64 = 256.0 * 1024.0 * 1024.0;

/// Activations of a model, in bytes per token or patch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivationMemory {
    /// Per token: inputs of the layers such as rotary tables.
    pub token_context: f64,
    /// Per token: what all layers keep for backward.
    pub token_tape: f64,
    /// Per token: buffers of the backward of one layer, in addition to the tape.
    pub token_backward: f64,
    /// Buffers of the backward of one layer for any number of tokens.
    pub layer_backward: f64,
    /// Per token: activations of one layer that backward computes again.
    pub token_recomputed: f64,
    /// Per token and key head of linear attention: temporary memory of its backward on a GPU.
    pub token_delta_head: f64,
    /// Number of key heads of linear attention; 0 without it.
    pub delta_heads: f64,
    /// Number of values of a patch; 0 without a vision encoder.
    pub patch_values: f64,
    /// Per patch: pixels, features and tape of the vision encoder.
    pub patch: f64,
    /// Per patch: buffers of the backward of one block, in addition to the tape, or of its forward if
    /// the encoder is frozen. The decoder has no tape at that time.
    pub patch_buffers: f64,
    /// Per patch: activations of one block that backward computes again.
    pub patch_recomputed: f64,
}

/// What a process holds of the training state, in numbers of elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Division {
    /// Weights in the compute dtype.
    pub weights: f64,
    /// Buffers for gathered weights, and for those that are stored in another form, in the compute
    /// dtype.
    pub weight_slots: f64,
    /// Bytes of weights that are stored in another form.
    pub stored_bytes: f64,
    /// Gradients in `f32`, with those that are summed and those of earlier micro-batches.
    pub gradients: f64,
    /// Weights with optimizer state.
    pub optimizer: f64,
}

impl Division {
    /// A single process, with `buffers` buffers of all gradients.
    pub fn alone(parameters: f64, trained: f64, buffers: f64) -> Self {
        let gradients = buffers * trained;
        let (weight_slots, stored_bytes) = (0.0, 0.0);
        Self { weights: parameters, weight_slots, stored_bytes, gradients, optimizer: trained }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryModel {
    /// Bytes of a weight or activation: 4 in `f32`, 2 in `bf16`.
    pub element: f64,
    /// Mean bytes of the optimizer state of a trained weight: moments, and a master weight.
    pub state: f64,
    /// Bytes of them that are the master weight.
    pub master: f64,
    /// What this process holds of the training state.
    pub division: Division,
    /// `D`.
    pub hidden: f64,
    /// `V`.
    pub vocabulary: f64,
    /// Maximum bytes of logits at one time.
    pub logits: f64,
    /// Maximum bytes of temporary memory of linear attention on a GPU, unless one head needs more.
    /// 0 on the CPU.
    pub delta_limit: f64,
    /// Bytes of shared libraries.
    pub libraries: f64,
    /// Threads that read rows.
    pub workers: f64,
    pub activations: ActivationMemory,
}

/// The largest micro-batch of a run.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MicroBatchSizes {
    /// `T`.
    pub tokens: f64,
    /// `S`.
    pub targets: f64,
    /// `P`.
    pub patches: f64,
    pub step_patches: f64,
    /// Mean number of patches of a sample.
    pub sample_patches: f64,
}

/// The parts of the memory at the peak, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MemoryParts {
    /// Weights in the compute dtype, and those that are stored in another form.
    pub weights: f64,
    /// Master copies of the weights in `f32`.
    pub masters: f64,
    pub gradients: f64,
    /// Moments of the optimizer.
    pub moments: f64,
    /// Activations of the largest micro-batch, and the buffers of one layer.
    pub activations: f64,
    /// Activations of one layer or vision block that backward computes again; 0 if the head needs
    /// more memory.
    pub recomputed: f64,
    /// Logits and supervised rows of the head; 0 if the backward of a layer needs more memory.
    pub logits: f64,
    /// Rows and pixels that wait on the host.
    pub loader: f64,
    /// The program, its threads and its tokenizer.
    pub process: f64,
}

impl MemoryParts {
    /// Peak memory of the tensors of the model: those on the GPU, if it computes there.
    pub fn device(&self) -> f64 {
        self.state() + self.activations + self.recomputed + self.logits
    }

    /// Peak memory of a process that computes on the CPU.
    pub fn process(&self) -> f64 {
        self.device() + self.loader + self.process
    }

    fn state(&self) -> f64 {
        self.weights + self.masters + self.gradients + self.moments
    }

    pub fn named(&self) -> [(&'static str, f64); 9] {
        [
            ("weights", self.weights),
            ("masters", self.masters),
            ("gradients", self.gradients),
            ("moments", self.moments),
            ("activations", self.activations),
            ("recomputed", self.recomputed),
            ("logits", self.logits),
            ("loader", self.loader),
            ("process", self.process),
        ]
    }
}

impl MemoryModel {
    /// Peak memory of a process that computes on the CPU.
    pub fn peak_bytes(&self, sizes: &MicroBatchSizes) -> f64 {
        self.parts(sizes).process()
    }

    /// The memory at the peak.
    pub fn parts(&self, sizes: &MicroBatchSizes) -> MemoryParts {
        let tokens = sizes.tokens;
        let activations = &self.activations;
        let Division { weights, weight_slots, stored_bytes, gradients, optimizer } = self.division;
        let backward = tokens * (activations.token_backward + activations.token_recomputed)
            + self.delta_bytes(tokens)
            + activations.layer_backward;
        let hidden = tokens * 2.0 * self.element * self.hidden;
        let head = self.head_bytes(sizes.targets);
        let tape = tokens * activations.token_tape;
        let vision = sizes.patches * (activations.patch_buffers + activations.patch_recomputed);
        let (buffers, recomputed, logits) = if vision > tape + backward.max(hidden + head) {
            let recomputed = sizes.patches * activations.patch_recomputed;
            (vision - recomputed, recomputed, 0.0)
        } else if backward >= hidden + head {
            let recomputed = tokens * activations.token_recomputed;
            (tape + backward - recomputed, recomputed, 0.0)
        } else {
            (tape + hidden, 0.0, head)
        };
        let activations =
            sizes.patches * activations.patch + tokens * activations.token_context + buffers;
        MemoryParts {
            weights: self.element * (weights + weight_slots) + stored_bytes,
            masters: self.master * optimizer,
            gradients: 4.0 * gradients,
            moments: (self.state - self.master) * optimizer,
            activations,
            recomputed,
            logits,
            loader: tokens * HOST_TOKEN + self.host_pixel_bytes(sizes),
            process: PROCESS
                + self.libraries
                + TOKENIZER_ENTRY * self.vocabulary
                + FREE_BLOCKS.min(activations + recomputed + logits),
        }
    }

    /// Temporary memory of linear attention: as many heads at a time as fit into the limit.
    fn delta_bytes(&self, tokens: f64) -> f64 {
        let head = tokens * self.activations.token_delta_head;
        let all = head * self.activations.delta_heads;
        if self.delta_limit > 0.0 { all.min(self.delta_limit.max(head)) } else { 0.0 }
    }

    /// Head and loss: the supervised rows, their gradient, and one chunk of logits.
    fn head_bytes(&self, targets: f64) -> f64 {
        let row = 4.0 * self.vocabulary;
        let logits = row * targets.min((self.logits / row).floor().max(1.0));
        let rows = 2.0 * 4.0 * targets * self.hidden;
        logits + rows
    }

    fn host_pixel_bytes(&self, sizes: &MicroBatchSizes) -> f64 {
        let host = 4.0 * self.activations.patch_values;
        let ahead = f64::max(
            STEPS_AHEAD * sizes.step_patches,
            WORKER_ROWS_AHEAD * self.workers * sizes.sample_patches,
        );
        // each worker may exceed the limit by one row
        let limit = BYTES_AHEAD + host * self.workers * sizes.sample_patches;
        HOST_STEPS * host * sizes.step_patches + f64::min(host * ahead, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> MemoryModel {
        MemoryModel {
            element: 4.0,
            state: 8.0,
            master: 0.0,
            division: Division::alone(1000.0, 900.0, 1.0),
            hidden: 10.0,
            vocabulary: 100.0,
            logits: 4000.0,
            delta_limit: 0.0,
            libraries: 0.0,
            workers: 2.0,
            activations: ActivationMemory {
                token_context: 20.0,
                token_tape: 1752.0,
                token_backward: 160.0,
                layer_backward: 0.0,
                token_recomputed: 0.0,
                token_delta_head: 0.0,
                delta_heads: 0.0,
                patch_buffers: 0.0,
                patch_recomputed: 0.0,
                patch_values: 12.0,
                patch: 128.0,
            },
        }
    }

    #[test]
    fn a_token_costs_its_activations() {
        let peak = |tokens| {
            let sizes = MicroBatchSizes { tokens, targets: 1.0, ..MicroBatchSizes::default() };
            model().peak_bytes(&sizes)
        };
        assert_eq!(peak(100_001.0) - peak(100_000.0), HOST_TOKEN + 20.0 + 1752.0 + 160.0);
    }

    #[test]
    fn weights_cost_sixteen_bytes_trained_and_four_frozen_and_eighteen_in_bf16() {
        let mut model = model();
        let state = |model: &MemoryModel| model.parts(&MicroBatchSizes::default()).state();
        assert_eq!(state(&model), 16.0 * 900.0 + 4.0 * 100.0);
        (model.element, model.state, model.master) = (2.0, 12.0, 4.0);
        assert_eq!(state(&model), 18.0 * 900.0 + 2.0 * 100.0);
        assert_eq!(model.parts(&MicroBatchSizes::default()).masters, 4.0 * 900.0);
    }

    #[test]
    fn the_parts_are_those_of_the_moment_with_the_most_memory() {
        let mut model = model();
        model.activations.token_recomputed = 1000.0;
        let parts =
            model.parts(&MicroBatchSizes { tokens: 100.0, targets: 1.0, ..Default::default() });
        assert_eq!((parts.recomputed, parts.logits), (100_000.0, 0.0));
        model.logits = 1e9;
        let parts =
            model.parts(&MicroBatchSizes { tokens: 100.0, targets: 1000.0, ..Default::default() });
        assert_eq!((parts.recomputed, parts.logits), (0.0, 400_000.0 + 80_000.0));
        assert_eq!(parts.named().map(|(_, bytes)| bytes).iter().sum::<f64>(), parts.process());
    }

    #[test]
    fn logits_exist_for_a_chunk_of_rows_only() {
        let rows = |targets| 80.0 * targets;
        assert_eq!(model().head_bytes(5.0), 5.0 * 400.0 + rows(5.0));
        assert_eq!(model().head_bytes(50.0), 10.0 * 400.0 + rows(50.0)); // 4,000 bytes: ten rows
    }

    #[test]
    fn linear_attention_takes_as_many_heads_at_a_time_as_fit_on_a_gpu() {
        let mut model = model();
        (model.activations.token_delta_head, model.activations.delta_heads) = (7.0, 4.0);
        assert_eq!(model.delta_bytes(100.0), 0.0); // on the CPU
        model.delta_limit = 2000.0;
        let bytes = [50.0, 100.0, 300.0].map(|tokens| model.delta_bytes(tokens));
        assert_eq!(bytes, [50.0 * 28.0, 2000.0, 2100.0]);
        let parts = |model: &MemoryModel| {
            model.parts(&MicroBatchSizes { tokens: 50.0, ..Default::default() }).activations
        };
        let with = parts(&model);
        model.delta_limit = 0.0;
        assert_eq!(with - parts(&model), 1400.0);
        let without = parts(&model);
        model.activations.layer_backward = 500.0;
        assert_eq!(parts(&model) - without, 500.0);
    }

    #[test]
    fn pixels_wait_on_the_host() {
        let sizes = MicroBatchSizes { patches: 8.0, step_patches: 16.0, ..Default::default() };
        let bytes = |sizes: &MicroBatchSizes| model().host_pixel_bytes(sizes);
        assert_eq!(bytes(&sizes), (3.0 + 2.0) * 4.0 * 12.0 * 16.0);
        let small = MicroBatchSizes { sample_patches: 4.0, ..sizes };
        assert_eq!(bytes(&small), 4.0 * 12.0 * (3.0 * 16.0 + 16.0 * 2.0 * 4.0));
        let large = MicroBatchSizes { sample_patches: 1e9, ..sizes };
        let expected = 4.0 * 12.0 * (3.0 * 16.0 + 2.0 * 1e9) + BYTES_AHEAD;
        assert_eq!(bytes(&large), expected);
        let without = MicroBatchSizes::default();
        let device = |sizes| model().parts(sizes).device();
        let patches = device(&sizes) - device(&without);
        assert_eq!(patches, 8.0 * 128.0);
    }
}

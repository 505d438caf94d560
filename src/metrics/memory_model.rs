//! Peak memory of a training step, predicted from sizes: the formula of docs/memory.md.
//!
//! All results are bytes. Letters are the glossary's: `T` tokens of the largest micro-batch, padding
//! included if the model sees it; `S` its supervised rows; `P` its patches; `D`, `F`, `H`, `V`.

/// The program and its threads, and the free blocks that the allocator may hold above the highest
/// demand (64 MiB).
const PROCESS: f64 = 78e6;
/// Measured: what reading a tokenizer leaves, an entry of the vocabulary.
const TOKENIZER_ENTRY: f64 = 1400.0;
/// Ids, labels and positions of a token, on their way through loader and model.
const HOST_TOKEN: f64 = 100.0;
/// Steps that exist on the host at one time: in use, waiting, and being put together.
const HOST_STEPS: f64 = 3.0;
/// Rows that are encoded ahead, and the bound on their pixels.
const ROWS_AHEAD: f64 = 256.0;
const BYTES_AHEAD: f64 = 256.0 * 1024.0 * 1024.0;

/// What the tape holds of a layer between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerTape {
    /// All that backward needs.
    Whole,
    /// The input; forward runs again.
    Input,
}

/// Sizes of a model in training.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryModel {
    /// Parameters.
    pub parameters: f64,
    /// Those that are trained.
    pub trained: f64,
    /// Bytes of a weight or activation: 4 in `f32`, 2 in `bf16`.
    pub element: f64,
    /// Bytes of a moment: 4 in `f32`, 2 in `bf16`.
    pub moment: f64,
    /// Decoder layers that backward visits.
    pub layers: f64,
    /// `D`.
    pub hidden: f64,
    /// `H`.
    pub heads: f64,
    /// `Hkv`.
    pub kv_heads: f64,
    /// `Dh`.
    pub head_dim: f64,
    /// `F`.
    pub intermediate: f64,
    /// `V`.
    pub vocabulary: f64,
    /// Upper bound on the logits that exist at one time, in bytes.
    pub logits: f64,
    /// What is kept of a decoder layer.
    pub layer_tape: LayerTape,
    /// The vision tower.
    pub tower: TowerMemory,
}

/// Sizes of a vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct TowerMemory {
    /// Values of a patch.
    pub patch_values: f64,
    /// Blocks that backward visits: 0 if tower and mergers are frozen.
    pub blocks: f64,
    /// Width.
    pub hidden: f64,
    /// Width of a block's MLP.
    pub intermediate: f64,
    /// Attention heads.
    pub heads: f64,
    /// Mergers, the main one included.
    pub mergers: f64,
    /// Patches of a token.
    pub join: f64,
    /// What is kept of a block.
    pub block_tape: LayerTape,
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
    /// Patches of the whole step.
    pub step_patches: f64,
    /// Patches of a sample, on average.
    pub sample_patches: f64,
}

impl MemoryModel {
    /// Highest memory of the process.
    pub fn peak_bytes(&self, sizes: &MicroBatchSizes) -> f64 {
        let (t, s) = (sizes.tokens, sizes.targets);
        let tape = t * self.layers * self.layer_bytes();
        PROCESS
            + TOKENIZER_ENTRY * self.vocabulary
            + self.state_bytes()
            + t * (HOST_TOKEN + 4.0 * self.head_dim) // rotary tables
            + self.vision_bytes(sizes)
            + tape
            + f64::max(t * self.working_bytes(), t * 2.0 * self.element * self.hidden + self.head_bytes(s))
    }

    /// Weights, gradients, moments, and `f32` masters of `bf16` weights.
    pub fn state_bytes(&self) -> f64 {
        let master = if self.element < 4.0 { 4.0 } else { 0.0 };
        self.element * self.parameters + (4.0 + 2.0 * self.moment + master) * self.trained
    }

    /// What backward needs of one layer, a token: `x`, `x1`; `q`, `o`; `k`, `v`; `gate`, `up`;
    /// two `rstd` and `lse` in `f32`.
    fn whole_layer(&self) -> f64 {
        let wide = (self.heads + self.kv_heads) * self.head_dim;
        2.0 * self.element * (self.hidden + wide + self.intermediate) + 4.0 * (2.0 + self.heads)
    }

    /// What the tape holds of one layer, a token.
    pub fn layer_bytes(&self) -> f64 {
        match self.layer_tape {
            LayerTape::Whole => self.whole_layer(),
            LayerTape::Input => self.element * self.hidden,
        }
    }

    /// On top of the tape in the backward of the last layer, a token: `dy`, and the
    /// gradient of SwiGLU's output; the layer itself if it had to run again.
    fn working_bytes(&self) -> f64 {
        let again = match self.layer_tape {
            LayerTape::Whole => 0.0,
            LayerTape::Input => self.whole_layer() - self.element * self.hidden,
        };
        again + self.element * (self.hidden + self.intermediate)
    }

    /// Head and loss: the supervised rows, their gradient, and one chunk of logits.
    fn head_bytes(&self, targets: f64) -> f64 {
        let row = 4.0 * self.vocabulary;
        let logits = row * targets.min((self.logits / row).floor().max(1.0));
        let rows = 2.0 * 4.0 * targets * self.hidden;
        logits + rows
    }

    /// Pixels on the host and in the model, the features, and the tower's tape.
    fn vision_bytes(&self, sizes: &MicroBatchSizes) -> f64 {
        let (tower, e) = (&self.tower, self.element);
        let merged = 1.0 / tower.join; // tokens a patch
        let block = match tower.block_tape {
            LayerTape::Whole => {
                e * (6.0 * tower.hidden + tower.intermediate) + 4.0 * (4.0 + tower.heads)
            }
            LayerTape::Input => e * tower.hidden,
        };
        let merger = match tower.block_tape {
            LayerTape::Whole => e * tower.hidden, // M * 4 * Dv, before the activation
            LayerTape::Input => 0.0,
        };
        let trained =
            if tower.blocks > 0.0 { tower.mergers * merger + e * tower.hidden } else { 0.0 };
        let features = merged * tower.mergers * e * self.hidden;
        let host = 4.0 * tower.patch_values;
        sizes.patches * (e * tower.patch_values + features + tower.blocks * block + trained)
            + HOST_STEPS * host * sizes.step_patches
            + f64::min(ROWS_AHEAD * host * sizes.sample_patches, BYTES_AHEAD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(layer_tape: LayerTape) -> MemoryModel {
        MemoryModel {
            parameters: 1000.0,
            trained: 900.0,
            element: 4.0,
            moment: 4.0,
            layers: 3.0,
            hidden: 10.0,
            heads: 4.0,
            kv_heads: 2.0,
            head_dim: 5.0,
            intermediate: 30.0,
            vocabulary: 100.0,
            logits: 4000.0,
            layer_tape,
            tower: TowerMemory {
                patch_values: 12.0,
                blocks: 0.0,
                hidden: 8.0,
                intermediate: 16.0,
                heads: 2.0,
                mergers: 1.0,
                join: 4.0,
                block_tape: LayerTape::Whole,
            },
        }
    }

    fn text(tokens: f64, targets: f64) -> MicroBatchSizes {
        MicroBatchSizes { tokens, targets, ..MicroBatchSizes::default() }
    }

    #[test]
    fn a_token_costs_its_tape_and_the_working_set_of_one_layer() {
        let whole = model(LayerTape::Whole);
        // x, x1: 10 each; q, o: 20; k, v: 10; gate, up: 30; two rstd and four lse
        let layer = 4.0 * (20.0 + 40.0 + 20.0 + 60.0) + 4.0 * 6.0;
        assert_eq!(whole.layer_bytes(), layer);
        let slope = whole.peak_bytes(&text(1001.0, 1.0)) - whole.peak_bytes(&text(1000.0, 1.0));
        let working = 4.0 * (10.0 + 30.0);
        let context = HOST_TOKEN + 4.0 * 5.0;
        assert_eq!(slope, 3.0 * layer + working + context);
    }

    #[test]
    fn recomputing_keeps_one_tensor_a_layer_and_one_layer() {
        let (whole, input) = (model(LayerTape::Whole), model(LayerTape::Input));
        let at = text(1000.0, 1.0);
        let saved = whole.peak_bytes(&at) - input.peak_bytes(&at);
        assert_eq!(saved, 1000.0 * 2.0 * (whole.layer_bytes() - 40.0));
    }

    #[test]
    fn weights_cost_sixteen_bytes_trained_four_frozen_and_eighteen_or_fourteen_in_bf16() {
        let mut model = model(LayerTape::Whole);
        assert_eq!(model.state_bytes(), 16.0 * 900.0 + 4.0 * 100.0);
        model.element = 2.0;
        assert_eq!(model.state_bytes(), 18.0 * 900.0 + 2.0 * 100.0);
        model.moment = 2.0;
        assert_eq!(model.state_bytes(), 14.0 * 900.0 + 2.0 * 100.0);
    }

    #[test]
    fn logits_exist_for_a_chunk_of_rows_only() {
        let model = model(LayerTape::Whole);
        let rows = |targets| 80.0 * targets;
        assert_eq!(model.head_bytes(5.0), 5.0 * 400.0 + rows(5.0));
        assert_eq!(model.head_bytes(50.0), 10.0 * 400.0 + rows(50.0)); // 4,000 bytes are ten rows
    }

    #[test]
    fn a_frozen_tower_keeps_its_features_only() {
        let mut model = model(LayerTape::Whole);
        let sizes = MicroBatchSizes { patches: 8.0, ..MicroBatchSizes::default() };
        let frozen = 8.0 * 4.0 * 12.0 + 2.0 * 4.0 * 10.0; // pixels, two tokens' features
        assert_eq!(model.vision_bytes(&sizes), frozen);
        model.tower.blocks = 2.0;
        let block = 4.0 * (6.0 * 8.0 + 16.0) + 4.0 * 6.0;
        let mergers = 2.0 * 4.0 * 8.0; // the merger's input, and its hidden rows
        assert_eq!(model.vision_bytes(&sizes), frozen + 8.0 * (2.0 * block + mergers));
    }
}

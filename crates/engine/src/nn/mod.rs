//! Building blocks that model families share, each with a forward and a hand-written backward.
//!
//! Shapes: `T` tokens, `N` rows of any kind, `D` hidden size, `H` heads, `Hkv` kv heads, `Dh` head
//! dim, `F` intermediate size, `V` vocabulary.

mod adapter;
mod adapter_init;
mod attention;
mod config;
mod context;
mod cost;
mod decoder;
mod expert_linear;
mod experts;
mod init;
mod kv_cache;
mod linear;
mod linear_attention;
mod mixer;
mod mlp;
mod moe;
mod norm;
mod own_heads;
mod params;
mod rope;
mod routers;
mod shared_expert;
mod tensor_names;

pub use adapter::{AdapterModule, AdapterTensor, Adapters, peft_name, peft_name_of_file};
pub use adapter_init::{WeightPart, weight_factors};
pub use config::{
    AttentionSpec, DecoderConfig, LayerSpec, LinearAttentionSpec, MixerSpec, MlpSpec, Mrope,
    MropeLayout, decoder_specs,
};
pub(crate) use context::DecoderContext;
pub(crate) use cost::{indexes, matrix_elements};
pub(crate) use decoder::{Decoder, DecoderTape};
pub use experts::{ExpertFiles, MoeConfig};
pub use init::{AdapterDraw, Init, random_adapter_part, random_part, random_tensor};
pub use kv_cache::KvCache;
pub(crate) use linear::{Linear, backward_of};
pub(crate) use mlp::MlpBlock;
pub(crate) use norm::Norm;
pub(crate) use params::ParamMap;
pub use params::{Component, Inputs, ParamSpec, Stored, WeightError};
pub(crate) use rope::{HostTable, inverse_frequencies, rope_table};
pub use routers::Routers;
pub use tensor_names::TensorNames;

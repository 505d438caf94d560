//! What can go wrong between memory and disk.

use std::io;
use std::path::{Path, PathBuf};

/// A checkpoint or a model folder could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused a write, a rename or a sync.
    #[error("cannot write `{}`", .path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The operating system refused a read.
    #[error("cannot read `{}`", .path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A checkpoint lacks a file, or a file is not what the manifest says.
    #[error("checkpoint `{}` is damaged: `{file}` {problem}", .folder.display())]
    Damaged {
        /// The checkpoint.
        folder: PathBuf,
        /// The file in it.
        file: String,
        /// What is wrong with the file.
        problem: String,
    },
    /// A model folder has neither `model.safetensors` nor an index of shards.
    #[error("no weights in `{}`: found neither `model.safetensors` nor `model.safetensors.index.json`", .folder.display())]
    NoWeights {
        /// The model folder.
        folder: PathBuf,
    },
    /// The index names a shard that is not there.
    #[error("shard `{shard}` named by `{}` is missing", .index.display())]
    ShardMissing {
        /// The index file.
        index: PathBuf,
        /// The missing file.
        shard: String,
    },
    /// The index promises a tensor that its shard does not hold.
    #[error("`{}` says that `{shard}` holds `{tensor}`, but it does not", .index.display())]
    NotInShard {
        /// The index file.
        index: PathBuf,
        /// The shard.
        shard: String,
        /// The missing tensor.
        tensor: String,
    },
    /// A file is not what its name says: truncated, overlapping tensors, no JSON.
    #[error("`{}` is not valid: {problem}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        problem: String,
    },
    /// There is no tensor of this name.
    #[error("no tensor `{tensor}` in `{}`", .place.display())]
    NoTensor {
        /// The file or folder.
        place: PathBuf,
        /// The name that was asked for.
        tensor: String,
    },
    /// A tensor is neither `f32` nor `bf16` nor `f16`.
    #[error("tensor `{tensor}` in `{}` has dtype {dtype}, expected F32, BF16 or F16", .place.display())]
    Dtype {
        /// The file or folder.
        place: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
    /// A tensor could not be moved from or to its device.
    #[error("tensor `{tensor}` could not be moved between memory and disk")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What candle said.
        source: candle_core::Error,
    },
    /// Two tensors of one file have the same name.
    #[error("two tensors are named `{tensor}`")]
    SameName {
        /// The name.
        tensor: String,
    },
}

impl CheckpointError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            Self::Write { source, .. } => write_hint(source),
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                "check the path".to_owned()
            }
            Self::Read { .. } => "check the permissions of the path and the health of the disk".to_owned(),
            Self::Damaged { .. } => {
                "use `--resume auto`, which falls back to the newest undamaged checkpoint, or name an older one".to_owned()
            }
            Self::NoWeights { .. } => {
                "download the model again, or set `model.weights: random` to start from random weights".to_owned()
            }
            Self::ShardMissing { .. } | Self::NotInShard { .. } | Self::Invalid { .. } => {
                "the file is incomplete: download or copy it again".to_owned()
            }
            Self::NoTensor { .. } => {
                "the weights belong to another model than `config.json` describes".to_owned()
            }
            Self::Dtype { .. } => {
                "quantised weights cannot be trained: use the unquantised model".to_owned()
            }
            Self::Tensor { .. } => "see the cause; the device may be out of memory".to_owned(),
            Self::SameName { .. } => "a tied weight is saved once, under one name".to_owned(),
        }
    }

    /// Whether the disk, not the data, is to blame: full, read-only, no permission.
    pub fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. })
    }

    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Write { path: path.to_owned(), source }
    }

    pub(super) fn read(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Read { path: path.to_owned(), source }
    }

    pub(super) fn invalid(path: &Path, problem: &dyn ToString) -> Self {
        Self::Invalid { path: path.to_owned(), problem: problem.to_string() }
    }
}

fn write_hint(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on this disk, lower `checkpoint.keep`, or set `output_dir` to another disk"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "set `output_dir` to a folder that you may write to"
        }
        io::ErrorKind::FileTooLarge => "raise the limit on file sizes (`ulimit -f`)",
        _ => "check the disk that holds `output_dir`",
    }
    .to_owned()
}

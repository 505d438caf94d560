//! Errors of reading and writing checkpoints and model folders.

use super::ADAPTER_WEIGHTS;
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
        /// Cause reported by the operating system.
        source: io::Error,
    },
    /// The operating system refused a read.
    #[error("cannot read `{}`", .path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Cause reported by the operating system.
        source: io::Error,
    },
    /// `output_dir` was renamed, removed or replaced while the run writes there.
    #[error("`{}` was renamed or replaced while this run uses it{}", .folder.display(), moved_to(.now.as_deref()))]
    Moved {
        /// `output_dir`.
        folder: PathBuf,
        /// Where the folder of this run is, if it exists and the system reports it.
        now: Option<PathBuf>,
    },
    /// A checkpoint lacks a file, or a file differs from its entry in the manifest.
    #[error("checkpoint `{}` is damaged: `{file}` {problem}", .folder.display())]
    Damaged {
        /// Folder of the checkpoint.
        folder: PathBuf,
        /// Name of the file in the folder.
        file: String,
        /// What is wrong, as a verb phrase that follows the file's name in the message.
        problem: String,
    },
    /// A model folder has neither `model.safetensors` nor an index of shards.
    #[error(
        "no weights in `{}`: found neither `model.safetensors` nor `model.safetensors.index.json`",
        .folder.display()
    )]
    NoWeights {
        /// The model folder.
        folder: PathBuf,
    },
    /// A folder has its weights only in a file of `torch.save`.
    #[error("`{}` is a file of `torch.save`, expected `{expected}`", .path.display())]
    Pickled {
        /// The file.
        path: PathBuf,
        /// Name of the file that is read.
        expected: &'static str,
    },
    /// The index names a shard that does not exist.
    #[error("shard `{shard}` named by `{}` is missing", .index.display())]
    ShardMissing {
        /// The index file.
        index: PathBuf,
        /// The missing file.
        shard: String,
    },
    /// The index names a file of another format.
    #[error("`{}` names `{shard}`, expected files in the format safetensors", .index.display())]
    NotSafetensors {
        /// The index file.
        index: PathBuf,
        /// The file.
        shard: String,
    },
    /// The index lists a tensor in a shard that does not contain it.
    #[error("`{}` lists `{tensor}` in `{shard}`, which does not contain it", .index.display())]
    NotInShard {
        /// The index file.
        index: PathBuf,
        /// The shard.
        shard: String,
        /// The missing tensor.
        tensor: String,
    },
    /// A file does not have the format that its name implies: it is truncated, its tensors overlap,
    /// or it is not JSON.
    #[error("`{}` is not valid: {problem}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        problem: String,
    },
    /// A file or a model folder has no tensor of this name.
    #[error("tensor `{tensor}` is missing from `{}`", .place.display())]
    NoTensor {
        /// The file or folder.
        place: PathBuf,
        /// The requested name.
        tensor: String,
    },
    /// A tensor is neither `f32` nor `bf16` nor `f16`.
    #[error(
        "tensor `{tensor}` in `{}` has dtype `{dtype}`, expected F32, BF16 or F16",
        .place.display()
    )]
    Dtype {
        /// The file or folder.
        place: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
    /// A tensor of a file has a value that is infinite or not a number.
    #[error(
        "tensor `{tensor}` in `{}` is not finite: its element {element} is {value}", .path.display()
    )]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first such element, in row-major order.
        element: usize,
        /// Its value.
        value: f32,
    },
    /// A tensor to be saved has a value that is infinite or not a number.
    #[error(
        "tensor `{tensor}` is not finite: its element {element} is {value}; `{file}` was not saved"
    )]
    NonFiniteSaved {
        /// Name of the file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The first such element that this rank holds, in row-major order.
        element: usize,
        /// Its value.
        value: f32,
    },
    /// A file that checkpoints would copy is a link to a place outside of its folder.
    #[error(
        "`{}` is a link to `{}`, outside of its folder, and checkpoints would contain a copy of it",
        .path.display(), .target.display()
    )]
    OutsideLink {
        /// The link.
        path: PathBuf,
        /// Where the link leads.
        target: PathBuf,
    },
    /// A tensor could not be copied from or to its device.
    #[error("cannot copy tensor `{tensor}` between its device and the disk")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// Cause reported by candle.
        source: candle_core::Error,
    },
    /// The parts of a tensor do not fit to it or to each other.
    #[error("tensor `{tensor}` {problem}")]
    Parts {
        /// The tensor.
        tensor: String,
        /// What is wrong, as a verb phrase that follows the tensor's name in the message.
        problem: String,
    },
    /// A matrix in 4 bits has another form than that of bitsandbytes, or contradicts itself.
    #[error("tensor `{tensor}` {problem}")]
    Quantised {
        /// The matrix.
        tensor: String,
        /// What is wrong, as a verb phrase that follows the tensor's name in the message.
        problem: String,
    },
    /// Ranks save different tensors.
    #[error("rank {rank} saves other tensors in `{file}` than rank 0")]
    OtherTensors {
        /// The rank.
        rank: usize,
        /// Name of the file.
        file: String,
    },
    /// Another rank could not write or read its part of a checkpoint.
    #[error("rank {rank} failed: {message}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// A rank does not find the checkpoint that rank 0 found.
    #[error("checkpoint `{}` is missing or differs from that on rank 0", .folder.display())]
    NotShared {
        /// Folder of the checkpoint.
        folder: PathBuf,
    },
    /// Two tensors are the same one in the two spellings of its name.
    #[error(
        "`{}` has the tensors `{}` and `{}`, which both are `{tensor}`",
        .place.display(), .spellings[0], .spellings[1]
    )]
    TwoSpellings {
        /// The file or folder.
        place: PathBuf,
        /// The name in the model.
        tensor: String,
        /// The names in the files.
        spellings: [String; 2],
    },
    /// Two tensors of one file have the same name.
    #[error("two tensors are named `{tensor}`, expected unique names")]
    SameName {
        /// The name.
        tensor: String,
    },
}

impl CheckpointError {
    /// What the user can do to fix the error.
    pub fn hint(&self) -> String {
        match self {
            Self::Write { source, .. } => write_hint(source),
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                "check the path".to_owned()
            }
            Self::Read { .. } => {
                "check the permissions of the path and the health of the disk".to_owned()
            }
            Self::Moved { .. } => {
                "give the folder its name back, and run the same command again: it continues from \
                 the last checkpoint. Rename a folder only when no run uses it"
                    .to_owned()
            }
            Self::Damaged { .. } => "use `--resume auto`, which falls back to the newest \
                                     undamaged checkpoint, or name an older one"
                .to_owned(),
            Self::NoWeights { .. } => "download the model again, or set `model.weights: random` \
                                       to start from random weights"
                .to_owned(),
            Self::ShardMissing { .. } | Self::NotInShard { .. } | Self::Invalid { .. } => {
                "the file is incomplete: download or copy it again".to_owned()
            }
            Self::NoTensor { .. } => "use weights and a `config.json` of the same model".to_owned(),
            Self::Dtype { .. } => {
                "quantised weights cannot be trained: use the unquantised model".to_owned()
            }
            Self::NonFinite { .. } => {
                "copy the file again; if a run wrote it, resume from an older \
                                       checkpoint with `--resume DIR`"
                    .to_owned()
            }
            Self::NonFiniteSaved { .. } => {
                "an update overflowed: lower `optim.lr`; all checkpoints \
                                            on disk are finite, and the run resumes from the newest"
                    .to_owned()
            }
            Self::Pickled { expected: ADAPTER_WEIGHTS, .. } => {
                "load the adapter with PEFT, and write it again with `save_pretrained(FOLDER, \
                 safe_serialization=True)`"
                    .to_owned()
            }
            Self::NotSafetensors { .. } | Self::Pickled { .. } => {
                "download its safetensors files, or write the model again with `save_pretrained` of \
                 transformers"
                    .to_owned()
            }
            Self::OutsideLink { .. } => "replace the link by a copy of the file".to_owned(),
            Self::Tensor { .. } => "see the cause; the device may be out of memory".to_owned(),
            Self::Quantised { .. } => {
                "download the folder again, or use the original weights and `adapter.quantize: nf4`"
                    .to_owned()
            }
            Self::Parts { .. } | Self::OtherTensors { .. } => {
                "this is an error of the program: please report it".to_owned()
            }
            Self::OtherRank { .. } => {
                "fix the error that this rank reported, and run the same command again".to_owned()
            }
            Self::NotShared { .. } => {
                "`output_dir` must be on a file system that all ranks share".to_owned()
            }
            Self::TwoSpellings { .. } => {
                "write the folder again with one tensor for each name, as `save_pretrained` does"
                    .to_owned()
            }
            Self::SameName { .. } => "save a tied weight once, under one name".to_owned(),
        }
    }

    /// Whether writing failed: the disk is full or read-only, or there is no permission.
    pub fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. })
    }

    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Write { path: path.to_owned(), source }
    }

    pub(super) fn read(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Read { path: path.to_owned(), source }
    }

    pub(crate) fn invalid(path: &Path, problem: &dyn ToString) -> Self {
        Self::Invalid { path: path.to_owned(), problem: problem.to_string() }
    }
}

fn moved_to(now: Option<&Path>) -> String {
    now.map(|now| format!("; its files are in `{}`", now.display())).unwrap_or_default()
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

use super::ADAPTER_WEIGHTS;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum CheckpointError {
    #[error("cannot write `{}`", .path.display())]
    #[fault(exit = CannotWrite, hint = write_hint(source))]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot read `{}`", .path.display())]
    #[fault(hint = read_hint(source))]
    Read { path: PathBuf, source: io::Error },
    #[error("`{}` was renamed or replaced while this run uses it{}", .folder.display(), moved_to(.now.as_deref()))]
    #[fault(
        exit = CannotWrite,
        hint = "give the folder its name back, and run the same command again: it continues from the last checkpoint. Rename a folder only when no run uses it"
    )]
    Moved {
        folder: PathBuf,
        /// Where the folder of this run is, if it exists and the system reports it.
        now: Option<PathBuf>,
    },
    #[error("checkpoint `{}` is damaged: `{file}` {problem}", .folder.display())]
    #[fault(
        hint = "use `--resume auto`, which falls back to the newest undamaged checkpoint, or name an older one"
    )]
    Damaged {
        folder: PathBuf,
        file: String,
        /// What is wrong, as a verb phrase that follows the file's name in the message.
        problem: String,
    },
    #[error(
        "no weights in `{}`: found neither `model.safetensors` nor `model.safetensors.index.json`",
        .folder.display()
    )]
    #[fault(
        hint = "download the model again, or set `model.weights: random` to start from random weights"
    )]
    NoWeights { folder: PathBuf },
    #[error("`{}` is a file of `torch.save`, expected `{expected}`", .path.display())]
    #[fault(hint = pickle_hint(expected))]
    Pickled { path: PathBuf, expected: &'static str },
    #[error("shard `{shard}` named by `{}` is missing", .index.display())]
    #[fault(hint = "the file is incomplete: download or copy it again")]
    ShardMissing { index: PathBuf, shard: String },
    #[error("`{}` names `{shard}`, expected files in the format safetensors", .index.display())]
    #[fault(hint = SAFETENSORS)]
    NotSafetensors { index: PathBuf, shard: String },
    #[error("`{}` lists `{tensor}` in `{shard}`, which does not contain it", .index.display())]
    #[fault(hint = "the file is incomplete: download or copy it again")]
    NotInShard { index: PathBuf, shard: String, tensor: String },
    #[error("`{}` is not valid: {problem}", .path.display())]
    #[fault(hint = "the file is incomplete: download or copy it again")]
    Invalid { path: PathBuf, problem: String },
    #[error("tensor `{tensor}` is missing from `{}`", .place.display())]
    #[fault(hint = "use weights and a `config.json` of the same model")]
    NoTensor { place: PathBuf, tensor: String },
    #[error(
        "tensor `{tensor}` in `{}` has dtype `{dtype}`, expected F32, BF16 or F16",
        .place.display()
    )]
    #[fault(hint = "quantised weights cannot be trained: use the unquantised model")]
    Dtype { place: PathBuf, tensor: String, dtype: String },
    #[error(
        "tensor `{tensor}` in `{}` is not finite: its element {element} is {value}", .path.display()
    )]
    #[fault(
        hint = "copy the file again; if a run wrote it, resume from an older checkpoint with `--resume DIR`"
    )]
    NonFinite {
        path: PathBuf,
        tensor: String,
        /// The first such element, in row-major order.
        element: usize,
        value: f32,
    },
    #[error(
        "tensor `{tensor}` is not finite: its element {element} is {value}; `{file}` was not saved"
    )]
    #[fault(
        hint = "an update overflowed: lower `optim.lr`; all checkpoints on disk are finite, and the run resumes from the newest"
    )]
    NonFiniteSaved {
        file: String,
        tensor: String,
        /// The first such element that this rank holds, in row-major order.
        element: usize,
        value: f32,
    },
    #[error(
        "`{}` is a link to `{}`, outside of its folder, and checkpoints would contain a copy of it",
        .path.display(), .target.display()
    )]
    #[fault(hint = "replace the link by a copy of the file")]
    OutsideLink { path: PathBuf, target: PathBuf },
    #[error("tensor `{tensor}`: its element {element} is {value}, which {dtype} cannot represent")]
    #[fault(hint = "write the file with `--quant bf16`")]
    TooLarge {
        tensor: String,
        /// The first such element, in row-major order.
        element: usize,
        value: f32,
        dtype: &'static str,
    },
    #[error("cannot copy tensor `{tensor}` between its device and the disk")]
    #[fault(hint = "see the cause; the device may be out of memory")]
    Tensor { tensor: String, source: candle_core::Error },
    #[error("tensor `{tensor}` {problem}")]
    #[fault(hint = "this is an error of the program: please report it")]
    Parts {
        tensor: String,
        /// What is wrong, as a verb phrase that follows the tensor's name in the message.
        problem: String,
    },
    #[error("tensor `{tensor}` {problem}")]
    #[fault(
        hint = "download the folder again, or use the original weights and `adapter.quantize: nf4`"
    )]
    Quantised {
        tensor: String,
        /// What is wrong, as a verb phrase that follows the tensor's name in the message.
        problem: String,
    },
    #[error("rank {rank} saves other tensors in `{file}` than rank 0")]
    #[fault(hint = "this is an error of the program: please report it")]
    OtherTensors { rank: usize, file: String },
    #[error("rank {rank} failed: {message}")]
    #[fault(hint = "fix the error that this rank reported, and run the same command again")]
    OtherRank { rank: usize, message: String },
    #[error("checkpoint `{}` is missing or differs from that on rank 0", .folder.display())]
    #[fault(hint = "`output_dir` must be on a file system that all ranks share")]
    NotShared { folder: PathBuf },
    #[error(
        "`{}` has the tensors `{}` and `{}`, which both are `{tensor}`",
        .place.display(), .spellings[0], .spellings[1]
    )]
    #[fault(
        hint = "write the folder again with one tensor for each name, as `save_pretrained` does"
    )]
    TwoSpellings { place: PathBuf, tensor: String, spellings: [String; 2] },
    #[error("two tensors are named `{tensor}`, expected unique names")]
    #[fault(hint = "save a tied weight once, under one name")]
    SameName { tensor: String },
}

impl CheckpointError {
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

fn read_hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "check the path",
        _ => "check the permissions of the path and the health of the disk",
    }
}

/// What to do if a file in `output_dir` cannot be written.
pub(crate) fn write_hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on this disk, lower `checkpoint.keep`, or set `output_dir` to another disk"
        }
        io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem
        | io::ErrorKind::AlreadyExists
        | io::ErrorKind::NotADirectory => "set `output_dir` to a folder that you may write to",
        io::ErrorKind::FileTooLarge => "raise the limit on file sizes (`ulimit -f`)",
        _ => "check the disk that holds `output_dir`",
    }
}

const SAFETENSORS: &str = "download its safetensors files, or write the model again with `save_pretrained` of \
                           transformers";

fn pickle_hint(expected: &str) -> &'static str {
    if expected == ADAPTER_WEIGHTS {
        "load the adapter with PEFT, and write it again with `save_pretrained(FOLDER, \
         safe_serialization=True)`"
    } else {
        SAFETENSORS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fault::{Exit, Fault};

    #[test]
    fn only_errors_of_writing_have_the_exit_code_of_writing() {
        let path = || PathBuf::from("a");
        let failed = || io::Error::other("the disk failed");
        for (error, exit) in [
            (CheckpointError::Write { path: path(), source: failed() }, Exit::CannotWrite),
            (CheckpointError::Moved { folder: path(), now: None }, Exit::CannotWrite),
            (CheckpointError::Read { path: path(), source: failed() }, Exit::Data),
            (CheckpointError::invalid(&path(), &"no header"), Exit::Data),
            (CheckpointError::NoWeights { folder: path() }, Exit::Data),
            (CheckpointError::NotShared { folder: path() }, Exit::Data),
            (
                CheckpointError::Tensor {
                    tensor: "a".to_owned(),
                    source: candle_core::Error::Msg("surprise".to_owned()),
                },
                Exit::Data,
            ),
            (CheckpointError::OtherRank { rank: 1, message: "lost".to_owned() }, Exit::Data),
        ] {
            assert_eq!(error.exit(), Some(exit), "{error}");
        }
    }
}

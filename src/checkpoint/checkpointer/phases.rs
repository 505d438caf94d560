//! The three parts of a save. The first and the last are common calls of all ranks and take little
//! time. The second writes the tensors, and can run in the background.

use super::super::CheckpointError;
use super::super::atomic::{NewFolder, sync_folder, temporary_folder};
use super::super::manifest::{Entry, Manifest};
use super::super::pieces::Piece;
use super::super::tensors::TensorFile;
use super::super::together::{Together, agree, exchange};
use super::{Checkpointer, Contents};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// A checkpoint whose folder exists under a hidden name, with all files but those of tensors, which
/// are empty. Dropping it removes the folder.
#[derive(Debug)]
pub(in crate::checkpoint) struct Begun {
    target: PathBuf,
    /// On rank 0.
    new: Option<(NewFolder, Manifest)>,
}

/// What a rank wrote into one file.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::checkpoint) struct Written {
    /// Checksum of the header, which must be the same on all ranks.
    header: String,
    pieces: Vec<Piece>,
}

impl Written {
    /// Writes what rank `rank` of `world` ranks holds into the files that [`Checkpointer::begin`]
    /// created.
    pub(in crate::checkpoint) fn write(
        target: &Path,
        contents: &Contents<'_>,
        rank: usize,
        world: usize,
    ) -> Result<Vec<Self>, CheckpointError> {
        let folder = temporary_folder(target);
        let write = |file: &TensorFile<'_>| {
            let pieces = file.write(&folder, rank, world)?;
            Ok(Self { header: checksum(file), pieces })
        };
        contents.tensor_files()?.iter().map(write).collect()
    }
}

fn checksum(file: &TensorFile<'_>) -> String {
    format!("{:x}", Sha256::digest(file.header()))
}

impl Begun {
    /// The folder of the checkpoint, once it is complete.
    pub(in crate::checkpoint) fn target(&self) -> &Path {
        &self.target
    }
}

impl Checkpointer {
    /// [`Checkpointer::save`] with another name of the folder.
    pub(super) fn save_as<T: Together>(
        &self,
        target: PathBuf,
        step: u64,
        contents: &Contents<'_>,
        together: &T,
    ) -> Result<PathBuf, T::Error> {
        let begun = self.begin(target, step, contents, together)?;
        let own = Written::write(begun.target(), contents, together.rank(), together.world());
        self.complete(begun, contents, own, together)
    }

    /// Creates the hidden folder of a checkpoint on rank 0. On an error of any rank, all ranks
    /// return an error.
    pub(in crate::checkpoint) fn begin<T: Together>(
        &self,
        target: PathBuf,
        step: u64,
        contents: &Contents<'_>,
        together: &T,
    ) -> Result<Begun, T::Error> {
        let folder = temporary_folder(&target);
        let begin = || {
            let files = contents.tensor_files()?;
            let mut new = None;
            if together.rank() == 0 {
                self.check_place()?;
                let begun = NewFolder::create(&target)?;
                new = Some((begun, contents.begin(&folder, step, &files)?));
            }
            Ok(Begun { target, new })
        };
        agree(together, begin())
    }

    /// Gives the folder its name after all ranks have written their parts: `own` is the result of
    /// this one. On an error of any rank, all ranks return an error, and no new folder appears.
    pub(in crate::checkpoint) fn complete<T: Together>(
        &self,
        begun: Begun,
        contents: &Contents<'_>,
        own: Result<Vec<Written>, CheckpointError>,
        together: &T,
    ) -> Result<PathBuf, T::Error> {
        let written = exchange(together, own)?;
        let Begun { target, new } = begun;
        let finished = match new {
            Some((new, manifest)) => {
                let files = contents.tensor_files();
                files.and_then(|files| self.finish(new, manifest, &target, &files, written))
            }
            None => Ok(()),
        };
        agree(together, finished)?;
        Ok(target)
    }

    /// Writes the manifest and gives the folder its name.
    fn finish(
        &self,
        new: NewFolder,
        mut manifest: Manifest,
        target: &Path,
        files: &[TensorFile<'_>],
        mut written: Vec<Vec<Written>>,
    ) -> Result<(), CheckpointError> {
        for (index, file) in files.iter().enumerate() {
            let expected = checksum(file);
            let mut pieces = Vec::new();
            for (rank, of_rank) in written.iter_mut().enumerate() {
                match of_rank.get_mut(index) {
                    Some(written) if written.header == expected => {
                        pieces.append(&mut written.pieces);
                    }
                    _ => {
                        let file = file.name.clone();
                        return Err(CheckpointError::OtherTensors { rank, file });
                    }
                }
            }
            manifest.files.insert(file.name.clone(), Entry::new(file.joined(pieces)?));
        }
        manifest.write(&temporary_folder(target))?;
        new.complete()?;
        // `checkpoints` itself may be new.
        sync_folder(&self.output_dir)
    }
}

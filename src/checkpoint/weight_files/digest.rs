//! Digest of all tensors of a model folder.

use super::super::CheckpointError;
use super::{Shard, WeightFiles};
use rayon::prelude::*;
use safetensors::tensor::TensorInfo;
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Number of bytes that a thread reads at a time.
const CHUNK: usize = 16 << 20;

impl WeightFiles {
    /// SHA-256 of the names, dtypes, shapes and bytes of all tensors, including tensors that the model
    /// does not use. It does not depend on how the tensors are divided among files.
    pub fn digest(&self) -> String {
        let found = self.by_name.keys().filter_map(|name| Some((name, self.find(name)?)));
        let tensors: Vec<(&String, (&Shard, &TensorInfo))> = found.collect();
        let of_chunk = |shard: &Shard, chunk: &[u8]| {
            let digest = Sha256::digest(chunk);
            shard.release(chunk);
            digest
        };
        let chunks = tensors.par_iter().map(|(_, (shard, info))| {
            let chunks = shard.data(info).par_chunks(CHUNK);
            chunks.map(|chunk| of_chunk(shard, chunk)).collect::<Vec<_>>()
        });
        let chunks: Vec<_> = chunks.collect();
        let mut digest = Sha256::new();
        for ((name, (_, info)), chunks) in tensors.iter().zip(chunks) {
            digest.update(format!("{name} {:?} {:?} ", info.dtype, info.shape));
            for chunk in chunks {
                digest.update(chunk);
            }
        }
        format!("{:x}", digest.finalize())
    }

    /// Sizes and times of the files. If they are the same as before, so are the bytes.
    pub fn stamps(&self) -> Result<String, CheckpointError> {
        let mut digest = Sha256::new();
        for shard in &self.shards {
            let path = shard.path();
            let metadata = fs::metadata(path).map_err(CheckpointError::read(path))?;
            let times = (metadata.mtime(), metadata.mtime_nsec());
            let changed = (metadata.ctime(), metadata.ctime_nsec());
            let file = (path.file_name(), metadata.ino(), metadata.len());
            digest.update(format!("{file:?} {times:?} {changed:?} "));
        }
        Ok(format!("{:x}", digest.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use std::collections::HashMap;
    use std::path::Path;

    fn saved(path: &Path, tensors: &[(&str, &[f32])]) -> WeightFiles {
        let tensor = |(name, values): &(&str, &[f32])| {
            ((*name).to_owned(), Tensor::new(*values, &Device::Cpu).unwrap())
        };
        let tensors: HashMap<String, Tensor> = tensors.iter().map(tensor).collect();
        candle_core::safetensors::save(&tensors, path).unwrap();
        WeightFiles::open_file(path).unwrap()
    }

    #[test]
    fn the_digest_sees_every_byte_name_and_shape_but_not_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let long = vec![0.5f32; 5 << 20]; // several chunks
        let before = saved(&path, &[("a", &long), ("b", &[1.0, 2.0])]).digest();
        assert_eq!(saved(&path, &[("b", &[1.0, 2.0]), ("a", &long)]).digest(), before);
        for at in [0, 1, (4 << 20) - 1, 4 << 20, (5 << 20) - 1] {
            let mut other = long.clone();
            other[at] = 0.25;
            let files = saved(&path, &[("a", &other), ("b", &[1.0, 2.0])]);
            assert_ne!(files.digest(), before, "{at}");
        }
        assert_ne!(saved(&path, &[("a", &long), ("c", &[1.0, 2.0])]).digest(), before);
        assert_ne!(saved(&path, &[("a", &long), ("b", &[1.0]), ("c", &[2.0])]).digest(), before);
    }

    #[test]
    fn a_file_that_is_written_again_has_other_stamps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let files = saved(&path, &[("a", &[1.0])]);
        let before = files.stamps().unwrap();
        assert_eq!(files.stamps().unwrap(), before);
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let files = saved(&path, &[("a", &[2.0])]);
        let file = fs::File::options().append(true).open(&path).unwrap();
        file.set_modified(modified).unwrap();
        assert_ne!(files.stamps().unwrap(), before);
    }
}

//! A checkpoint directory in Hugging Face layout: one `model.safetensors`, or shards with an index.
//!
//! The index is untrusted text that names files: only plain names of files that really lie in the directory
//! are opened.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::TensorSpec;
use super::bounded::{ReadError, read_bounded};
use super::json::{UniqueKeys, cut};
use super::safetensors::Shard;
use super::source::{SourceError, TensorReader, UnsupportedTensor, WeightSource};

/// Longest index that is read, in bytes.
const MAX_INDEX_BYTES: u64 = 32 << 20;
/// Most files of one checkpoint.
const MAX_SHARDS: usize = 4096;
/// Most tensors of one checkpoint.
const MAX_CHECKPOINT_TENSORS: usize = 1 << 20;
/// Longest file name, in bytes (`NAME_MAX`).
const MAX_FILE_NAME_BYTES: usize = 255;

/// A directory with `model.safetensors`, or with `model.safetensors.index.json` and the shards it lists.
/// Where both are there, the single file is taken, as transformers does.
///
/// The directory is read anew by every [`index`](WeightSource::index). Index and shards must agree exactly:
/// a tensor in two shards, or in another than the index says, or in none of the two, is an error. One file
/// is open at a time, none before `index` and none after `finish`.
///
/// A file of the directory may be a symbolic link only to a file of the same directory, or, in a Hugging
/// Face cache (`snapshots/<revision>` beside `blobs`), to a blob of the same model.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    shards: Vec<Shard>,
    /// The shard whose file is open, if any is.
    open: Option<usize>,
    /// For each tensor of the index its shard and its position in it.
    places: Vec<(usize, usize)>,
    unsupported: Vec<UnsupportedTensor>,
    buffer: Vec<u8>,
}

impl Checkpoint {
    /// The checkpoint in a directory. Nothing is opened before [`index`](WeightSource::index).
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            shards: Vec::new(),
            open: None,
            places: Vec::new(),
            unsupported: Vec::new(),
            buffer: Vec::new(),
        }
    }

    /// Whether the directory holds weights: a single file or an index of shards.
    pub fn exists(directory: impl AsRef<Path>) -> bool {
        let directory = directory.as_ref();
        ["model.safetensors", "model.safetensors.index.json"].iter().any(|file| directory.join(file).exists())
    }

    /// The shard of a tensor and its position there; no other shard stays open.
    fn open_shard_of(&mut self, tensor: usize) -> Result<(usize, usize), SourceError> {
        let no_such_tensor = SourceError::NoSuchTensor { tensor, count: self.places.len() };
        let (number, position) = *self.places.get(tensor).ok_or(no_such_tensor)?;
        if let Some(open) = self.open.replace(number)
            && open != number
        {
            self.shards[open].close();
        }
        Ok((number, position))
    }

    /// Finds the files and what the index says of them, without opening a shard.
    fn list_shards(&self) -> Result<Plan, SourceError> {
        let exists = |path: &Path| match std::fs::symlink_metadata(path) {
            Ok(_) => Ok(true),
            Err(fault) if fault.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(SourceError::Io { path: path.to_owned(), source }),
        };
        let single = self.directory.join("model.safetensors");
        if exists(&single)? {
            return Ok(Plan { files: vec![single], placement: None });
        }
        let index = self.directory.join("model.safetensors.index.json");
        if !exists(&index)? {
            return Err(SourceError::NoCheckpoint { path: self.directory.clone() });
        }
        check_inside(&self.directory, &index)?;
        let placement = Placement::read(&index)?;
        let files = placement.shards.iter().map(|shard| self.directory.join(shard)).collect();
        Ok(Plan { files, placement: Some(placement) })
    }

    /// Reads the header of every shard and checks it against the index.
    fn index_shards(&mut self, mut plan: Plan) -> Result<Vec<TensorSpec>, SourceError> {
        for file in &plan.files {
            check_inside(&self.directory, file)?;
        }
        let mut specs = Vec::new();
        for (number, file) in plan.files.into_iter().enumerate() {
            let mut shard = Shard::at(file);
            let listed = shard.index();
            shard.close();
            let listed = listed?;
            let unsupported = shard.take_unsupported();
            if let Some(placement) = &mut plan.placement {
                let names = listed.iter().map(|spec| &spec.name);
                placement.strike(shard.path(), number, names.chain(unsupported.iter().map(|t| &t.name)))?;
            }
            self.places.extend((0..shard.len()).map(|tensor| (number, tensor)));
            self.unsupported.extend(unsupported);
            specs.extend(listed);
            self.shards.push(shard);
            if specs.len() + self.unsupported.len() > MAX_CHECKPOINT_TENSORS {
                return Err(too_many(&self.directory, "tensors", MAX_CHECKPOINT_TENSORS));
            }
        }
        match plan.placement {
            Some(placement) => placement.check_all_found(&self.shards).map(|()| specs),
            None => Ok(specs),
        }
    }
}

impl WeightSource for Checkpoint {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        *self = Checkpoint::at(std::mem::take(&mut self.directory));
        let listed = self.list_shards().and_then(|plan| self.index_shards(plan));
        if listed.is_err() {
            // Half an index must not be readable.
            *self = Checkpoint::at(std::mem::take(&mut self.directory));
        }
        listed
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        &self.unsupported
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let (number, position) = self.open_shard_of(tensor)?;
        self.shards[number].read(position, &mut self.buffer, sink)
    }

    fn reader(&mut self, tensor: usize) -> Result<Option<Box<dyn TensorReader + '_>>, SourceError> {
        let (number, position) = self.open_shard_of(tensor)?;
        Ok(Some(Box::new(self.shards[number].reader(position)?)))
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        self.buffer = Vec::new();
        if let Some(open) = self.open.take() {
            self.shards[open].close();
        }
        self.shards.iter().try_for_each(Shard::check_unchanged)
    }
}

/// Files to read and, unless it is a single one, what the index says of them.
struct Plan {
    files: Vec<PathBuf>,
    placement: Option<Placement>,
}

/// The index: for each tensor the number of its shard, and whether it was found there.
struct Placement {
    /// Plain file names in order.
    shards: Vec<String>,
    tensors: BTreeMap<String, (usize, bool)>,
}

impl Placement {
    fn read(path: &Path) -> Result<Self, SourceError> {
        let text = read_bounded(path, MAX_INDEX_BYTES).map_err(|fault| match fault {
            ReadError::Io(source) => SourceError::Io { path: path.to_owned(), source },
            ReadError::TooLarge { bytes } => {
                SourceError::IndexTooLarge { path: path.to_owned(), bytes, limit_bytes: MAX_INDEX_BYTES }
            }
        })?;
        let invalid = |source| SourceError::IndexJson { path: path.to_owned(), source };
        let index: Index = serde_json::from_slice(&text).map_err(invalid)?;
        let weight_map = index.weight_map.0;
        if weight_map.len() > MAX_CHECKPOINT_TENSORS {
            return Err(too_many(path, "tensors", MAX_CHECKPOINT_TENSORS));
        }
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        for (tensor, shard) in &weight_map {
            match shard {
                Value::String(shard) if is_plain_file_name(shard) => {
                    numbers.insert(shard.clone(), 0);
                }
                other => return Err(shard_name(path, tensor, other)),
            }
        }
        if numbers.len() > MAX_SHARDS {
            return Err(too_many(path, "shards", MAX_SHARDS));
        }
        for (number, slot) in numbers.values_mut().enumerate() {
            *slot = number;
        }
        let place = |(tensor, shard): (String, Value)| {
            let number = shard.as_str().and_then(|shard| numbers.get(shard)).copied()?;
            Some((tensor, (number, false)))
        };
        let tensors = weight_map.into_iter().filter_map(place).collect();
        Ok(Self { tensors, shards: numbers.into_keys().collect() })
    }

    /// Strikes the tensors of a shard off; each must be listed for exactly this shard.
    fn strike<'a>(
        &mut self,
        path: &Path,
        number: usize,
        names: impl Iterator<Item = &'a String>,
    ) -> Result<(), SourceError> {
        for name in names {
            let listed = self.tensors.get_mut(name);
            let listed_in = match listed {
                Some((shard, found)) if *shard == number => {
                    *found = true;
                    continue;
                }
                Some((shard, _)) => Some(self.shards[*shard].clone()),
                None => None,
            };
            return Err(SourceError::NotInIndex {
                path: path.to_owned(),
                tensor: cut(name).into(),
                listed_in,
            });
        }
        Ok(())
    }

    fn check_all_found(&self, shards: &[Shard]) -> Result<(), SourceError> {
        match self.tensors.iter().find(|(_, (_, found))| !found) {
            None => Ok(()),
            Some((tensor, (shard, _))) => Err(SourceError::NotInShard {
                path: shards[*shard].path().to_owned(),
                tensor: cut(tensor).into(),
            }),
        }
    }
}

/// `model.safetensors.index.json`; what else it holds (`metadata`) is not used.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: UniqueKeys,
}

/// Whether a name can only mean a file directly in the directory it is joined to.
fn is_plain_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..")
        && name.len() <= MAX_FILE_NAME_BYTES
        && !name.contains(['/', '\\'])
        && !name.contains(char::is_control)
}

fn shard_name(path: &Path, tensor: &str, entry: &Value) -> SourceError {
    let entry = entry.as_str().map_or_else(|| entry.to_string(), str::to_owned);
    SourceError::ShardName { path: path.to_owned(), tensor: cut(tensor).into(), entry: cut(&entry).into() }
}

fn too_many(path: &Path, what: &'static str, limit: usize) -> SourceError {
    SourceError::TooMany { path: path.to_owned(), what, limit }
}

/// Refuses a file that is, by links, not one of the directory (or of the cache's blobs) before it is opened.
fn check_inside(directory: &Path, file: &Path) -> Result<(), SourceError> {
    let resolve =
        |path: &Path| path.canonicalize().map_err(|source| SourceError::Io { path: path.to_owned(), source });
    let (inside, target) = (resolve(directory)?, resolve(file)?);
    let parent = target.parent();
    if parent == Some(&inside) || (parent.is_some() && parent == blobs_beside(&inside).as_deref()) {
        return Ok(());
    }
    Err(SourceError::LinkLeavesDirectory { path: file.to_owned(), target })
}

/// The blob directory that the links of a Hugging Face cache's snapshot lead to.
fn blobs_beside(directory: &Path) -> Option<PathBuf> {
    let snapshots = directory.parent()?;
    (snapshots.file_name()? == "snapshots").then(|| snapshots.with_file_name("blobs"))
}

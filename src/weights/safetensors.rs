//! A safetensors file as a source of weights.
//!
//! Data are read with positioned reads into a buffer, never mapped: a file that another process truncates
//! is then an error, not a `SIGBUS`, and no mapping outlives the load.

mod bytes;
mod error;
mod header;
#[cfg(test)]
pub(super) mod tests;

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

pub use self::bytes::SafetensorsBytes;
pub use self::error::SafetensorsError;
use self::header::{ByteRange, Header};
use super::bounded::open_regular;
use super::source::{SourceError, TensorReader, UnsupportedTensor, WeightSource};
use super::{DType, TensorSpec};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 4 << 20;

impl TryFrom<safetensors::Dtype> for DType {
    type Error = safetensors::Dtype;

    /// Takes the element types that weights can have; any other is handed back.
    fn try_from(dtype: safetensors::Dtype) -> Result<Self, safetensors::Dtype> {
        match dtype {
            safetensors::Dtype::F32 => Ok(DType::F32),
            safetensors::Dtype::F16 => Ok(DType::F16),
            safetensors::Dtype::BF16 => Ok(DType::Bf16),
            other => Err(other),
        }
    }
}

impl From<DType> for safetensors::Dtype {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => safetensors::Dtype::F32,
            DType::F16 => safetensors::Dtype::F16,
            DType::Bf16 => safetensors::Dtype::BF16,
        }
    }
}

/// One safetensors file.
///
/// The file is opened at `index` and closed at `finish` or when dropped. A file that is replaced or written
/// to in between is an error, as far as the file system's time stamps tell (a write of the same length within
/// one clock tick of the one before can hide); one that is replaced between loads is simply read anew.
#[derive(Debug)]
pub struct SafetensorsFile {
    shard: Shard,
    buffer: Vec<u8>,
}

impl SafetensorsFile {
    /// The file at a path. Nothing is opened before [`index`](WeightSource::index).
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { shard: Shard::at(path.into()), buffer: Vec::new() }
    }
}

impl WeightSource for SafetensorsFile {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.shard.index()
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        &self.shard.unsupported
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.shard.read(tensor, &mut self.buffer, sink)
    }

    fn reader(&mut self, tensor: usize) -> Result<Option<Box<dyn TensorReader + '_>>, SourceError> {
        Ok(Some(Box::new(self.shard.reader(tensor)?)))
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        self.buffer = Vec::new();
        self.shard.close();
        self.shard.check_unchanged()
    }
}

/// One file and what its header said; reads are refused once the file is another.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: Option<File>,
    /// What the file was at `index`.
    stamp: Option<Stamp>,
    /// Where each listed tensor's data are.
    ranges: Vec<ByteRange>,
    unsupported: Vec<UnsupportedTensor>,
}

impl Shard {
    pub(super) fn at(path: PathBuf) -> Self {
        Self { path, file: None, stamp: None, ranges: Vec::new(), unsupported: Vec::new() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the tensors of unsupported element types that the last index found.
    pub(super) fn take_unsupported(&mut self) -> Vec<UnsupportedTensor> {
        std::mem::take(&mut self.unsupported)
    }

    /// Number of tensors that can be read.
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Opens the path anew and reads its header; the file stays open.
    pub(super) fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        *self = Shard::at(std::mem::take(&mut self.path));
        let (file, file_bytes) = open_regular(&self.path).map_err(|source| self.io(source))?;
        let stamp = Stamp::of(&file.metadata().map_err(|source| self.io(source))?);
        let header = self.read_header(&file, file_bytes)?;
        let (listed, unsupported) = header.split();
        let (specs, ranges) = listed.into_iter().unzip();
        self.ranges = ranges;
        self.unsupported = unsupported;
        self.stamp = Some(stamp);
        self.file = Some(file);
        Ok(specs)
    }

    fn read_header(&self, file: &File, file_bytes: u64) -> Result<Header, SourceError> {
        let malformed = |fault| self.malformed(fault);
        let mut prefix = [0; 8];
        Header::check_prefix(file_bytes).map_err(malformed)?;
        self.read_exact(file, &mut prefix, 0)?;
        let header_bytes = Header::check_length(prefix, file_bytes).map_err(malformed)?;
        let mut text = vec![0; header_bytes];
        self.read_exact(file, &mut text, 8)?;
        Header::parse(&text, file_bytes).map_err(malformed)
    }

    /// Hands one tensor's bytes over, in pieces of `buffer`.
    pub(super) fn read(
        &mut self,
        tensor: usize,
        buffer: &mut Vec<u8>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), SourceError> {
        let tensor = self.reader(tensor)?;
        let tensor_bytes = tensor.bytes();
        for offset in (0..tensor_bytes).step_by(CHUNK_BYTES) {
            let bytes = CHUNK_BYTES.min(tensor_bytes - offset);
            if buffer.len() < bytes {
                buffer.resize(bytes, 0);
            }
            tensor.read_at(offset, &mut buffer[..bytes])?;
            sink(&buffer[..bytes]);
        }
        Ok(())
    }

    /// Opens one tensor.
    pub(super) fn reader(&mut self, tensor: usize) -> Result<ShardTensor<'_>, SourceError> {
        let no_such_tensor = SourceError::NoSuchTensor { tensor, count: self.ranges.len() };
        let range = *self.ranges.get(tensor).ok_or(no_such_tensor)?;
        self.reopen()?;
        let Some(file) = &self.file else { return Err(self.changed()) };
        Ok(ShardTensor { shard: self, file, range })
    }

    /// Opens the file again if it was closed, and makes sure that it is the one that was indexed.
    fn reopen(&mut self) -> Result<(), SourceError> {
        if self.file.is_some() {
            return Ok(());
        }
        let (file, _) = open_regular(&self.path).map_err(|source| self.io(source))?;
        let metadata = file.metadata().map_err(|source| self.io(source))?;
        if self.stamp != Some(Stamp::of(&metadata)) {
            return Err(self.changed());
        }
        self.file = Some(file);
        Ok(())
    }

    /// Gives the descriptor back. A later read opens the file again.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    /// Makes sure that the path still holds the file that was indexed, untouched.
    pub(super) fn check_unchanged(&self) -> Result<(), SourceError> {
        let Some(stamp) = self.stamp else { return Ok(()) };
        match std::fs::metadata(&self.path) {
            Ok(metadata) if Stamp::of(&metadata) == stamp => Ok(()),
            Ok(_) => Err(self.changed()),
            Err(fault) if fault.kind() == std::io::ErrorKind::NotFound => Err(self.changed()),
            Err(fault) => Err(self.io(fault)),
        }
    }

    /// Lengths were checked before, so an early end means that the file shrank since.
    fn read_exact(&self, file: &File, buffer: &mut [u8], position: u64) -> Result<(), SourceError> {
        file.read_exact_at(buffer, position).map_err(|fault| match fault.kind() {
            std::io::ErrorKind::UnexpectedEof => self.changed(),
            _ => self.io(fault),
        })
    }

    fn io(&self, source: std::io::Error) -> SourceError {
        SourceError::Io { path: self.path.clone(), source }
    }

    fn malformed(&self, fault: SafetensorsError) -> SourceError {
        SourceError::Safetensors { path: self.path.clone(), fault: Box::new(fault) }
    }

    fn changed(&self) -> SourceError {
        SourceError::ChangedDuringRead { path: self.path.clone() }
    }
}

/// One tensor of an open file.
pub(super) struct ShardTensor<'a> {
    shard: &'a Shard,
    file: &'a File,
    range: ByteRange,
}

impl ShardTensor<'_> {
    /// Its length: the header was checked against the file, so it fits the address space of whoever has room
    /// for the tensor.
    fn bytes(&self) -> usize {
        usize::try_from(self.range.end - self.range.begin).unwrap_or(usize::MAX)
    }
}

impl TensorReader for ShardTensor<'_> {
    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), SourceError> {
        let inside = offset.checked_add(out.len()).is_some_and(|end| end <= self.bytes());
        if !inside {
            return Err(self.shard.io(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!("{} bytes at {offset} of a tensor of {}", out.len(), self.bytes()),
            )));
        }
        self.shard.read_exact(self.file, out, self.range.begin + offset as u64)
    }
}

/// What tells one content of a path from another, as far as a file system can. The change time is part of
/// it, since a writer may set the modification time back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

//! What moving and digesting the same bytes costs without an engine, on one thread.

use std::fs::File;
use std::hint::black_box;
use std::io::Read;

use dormouse::{SourceError, TensorSpec, WeightSource, WeightsDigest};

use super::common::{Outcome, timed};
use super::model::{Model, set};
use super::times::Times;

/// Copies into memory that is there.
pub(crate) const MEMCPY: &str = "memcpy into the same memory";
/// Copies and digests.
pub(crate) const YARDSTICK: &str = "yardstick: copy into new memory, digest";

/// Bytes of a file that are read at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Runs everything once.
pub(crate) fn round(model: &Model, times: &mut Times) -> Outcome {
    let bytes = usize::try_from(model.bytes)?;
    let mut note = |name, time| times.note(name, 1, model.bytes, time);
    let copy = |target: &mut [u8]| {
        let mut rest = target;
        for tensor in &model.tensors {
            let (now, later) = rest.split_at_mut(tensor.data.len());
            now.copy_from_slice(&tensor.data);
            rest = later;
        }
    };
    let mut target = vec![1; bytes];
    note(MEMCPY, timed(|| copy(black_box(&mut target))).1);
    drop(target);
    note("memcpy into new memory", timed(|| black_box(Copies::of(model).all())).1);
    note(YARDSTICK, timed(|| black_box(WeightsDigest::of(&mut Copies::of(model)))).1);
    let digest = timed(|| black_box(WeightsDigest::of(&mut set(&model.tensors))));
    note("digest where it lies", digest.1);

    let mut buffer = vec![1; CHUNK_BYTES];
    let (read, time) = timed(|| read_files(model, &mut |file| while_full(file, &mut buffer)));
    read?;
    note("files, read into one buffer", time);
    let mut all = Vec::with_capacity(bytes + CHUNK_BYTES);
    let (read, time) = timed(|| read_files(model, &mut |file| file.read_to_end(&mut all).map(drop)));
    read?;
    note("files, read into new memory", time);
    Ok(())
}

fn read_files(model: &Model, read: &mut dyn FnMut(&mut File) -> std::io::Result<()>) -> Outcome {
    for path in model.files()? {
        read(&mut File::open(path)?)?;
    }
    Ok(())
}

/// Reads a file to its end and keeps nothing.
fn while_full(file: &mut File, buffer: &mut [u8]) -> std::io::Result<()> {
    while file.read(buffer)? > 0 {
        black_box(&mut *buffer);
    }
    Ok(())
}

/// A source that copies a tensor into memory that nobody has touched, and hands the copy out.
struct Copies<'a> {
    model: &'a Model,
    copied: Vec<u8>,
}

impl<'a> Copies<'a> {
    fn of(model: &'a Model) -> Self {
        let bytes: usize = model.tensors.iter().map(|tensor| tensor.data.len()).sum();
        Self { model, copied: Vec::with_capacity(bytes) }
    }

    fn all(mut self) -> Vec<u8> {
        self.model.tensors.iter().for_each(|tensor| self.copied.extend_from_slice(&tensor.data));
        self.copied
    }
}

impl WeightSource for Copies<'_> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.model.tensors.iter().map(|tensor| tensor.spec.clone()).collect())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let begin = self.copied.len();
        self.copied.extend_from_slice(&self.model.tensors[tensor].data);
        sink(&self.copied[begin..]);
        Ok(())
    }
}

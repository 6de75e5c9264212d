//! What the benchmarks share: the machine's own limits, tables, times.
#![allow(dead_code, reason = "each benchmark uses a part")]

pub(crate) mod machine;
pub(crate) mod report;

use std::borrow::Cow;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use dormouse::{Checkpoint, TensorSpec, WeightSource};
use safetensors::{Dtype, View};

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The middle one; of an even number the lower.
pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// The result and how long it took.
pub(crate) fn timed<T>(f: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let result = f();
    (result, begin.elapsed())
}

pub(crate) fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// A tensor as a trainer has it.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) spec: TensorSpec,
    pub(crate) data: Vec<u8>,
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.spec.dtype.into()
    }
    fn shape(&self) -> &[usize] {
        &self.spec.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        (&self.data).into()
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

/// All tensors of a checkpoint.
pub(crate) fn tensors(directory: &Path) -> Outcome<Vec<Tensor>> {
    let mut checkpoint = Checkpoint::at(directory);
    let mut tensors = Vec::new();
    for (index, spec) in checkpoint.index()?.into_iter().enumerate() {
        let mut data = Vec::new();
        checkpoint.read(index, &mut |piece| data.extend_from_slice(piece))?;
        tensors.push(Tensor { spec, data });
    }
    Ok(tensors)
}
